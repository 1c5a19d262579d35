"""Who holds memory on the workers: live values, each storage once, by the line that made it or by layer.

Found by a walk over everything that Python's collector knows, because a registry would cost every operation
something. Nothing that is found is kept.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, starmap
from types import CodeType
from typing import TypeVar

import torch

from ..log.handle import Described, Handle, Place, Several
from ..log.line import code_text, place_of
from ..log.log import Log
from ..log.mesh_log import MeshLog
from ..log.node import Node
from ..wire.units import size_text

T = TypeVar("T")

# No log gets to this position.
_LAST = 1 << 62
# The error of a lost node names at most so many lines.
_MOST_LINES = 4


@dataclass(frozen=True)
class Holder:
    """Memory that one line of the master, or one layer, holds at one place, in bytes and tensors.

    `line` names the one or the other. Views count with their base.
    """

    nbytes: int
    tensors: int
    place: Place
    line: str


@dataclass(slots=True)
class _Held:
    """One storage: its bytes, and the oldest live value in it, which names the line."""

    nbytes: int
    position: int
    place: Place
    line: tuple[CodeType | None, int]
    # The storage's id.
    storage: int


def held(
    nodes: Collection[Node],
    *,
    before: tuple[Log, int] | None = None,
    poisoned: Collection[tuple[int, ...]] = (),
) -> tuple[list[Holder], Counter[Place]]:
    """Return who holds memory on these nodes, biggest first, and how many values live at each place.

    `before` leaves out what was issued behind that position of that log, `poisoned` what is known to hold
    nothing: see `Session.poisoned`.
    """
    storages, values = _storages(nodes, before, poisoned)
    return _by_line(storages), values


def held_by_layer(
    nodes: Collection[Node],
    *,
    before: tuple[Log, int] | None = None,
    poisoned: Collection[tuple[int, ...]] = (),
) -> list[Holder]:
    """Return which layers of the modules here hold memory on these nodes, biggest first. See `held`.

    What no module has is missing.
    """
    owners = layers()
    storages, _ = _storages(nodes, before, poisoned)
    return _summed((one, owners[one.storage]) for one in storages if one.storage in owners)


def _storages(
    nodes: Collection[Node], before: tuple[Log, int] | None, poisoned: Collection[tuple[int, ...]]
) -> tuple[Collection[_Held], Counter[Place]]:
    storages: dict[tuple[int, Place], _Held] = {}
    values: Counter[Place] = Counter()
    # Instances refer to their class. All handles are found at once, so that a storage's id stays its own.
    found = _handles()
    handle = storage = None
    try:
        for handle in found:
            # Another thread may be making a handle just now, which does not have this yet.
            born = getattr(handle, "born", None)
            if born is None:
                continue
            storage = handle.storage
            # A member's shard of a mesh's tensor is that one's memory.
            storage = next(
                (whole for known in (storage.whole or {}).values() if (whole := known()) is not None), storage
            )
            for place in _places(handle, nodes, before, poisoned):
                values[place] += 1
                # FSDP2 gives a parameter's memory back between uses.
                resized = storage.resized
                nbytes = max(handle.spec.extent, storage.spec.extent) if resized is None else resized
                # Positions of another log do not compare.
                position = born[0] if storage is handle.storage else _LAST
                mine = storages.setdefault(
                    (id(storage), place), _Held(nbytes, position, place, place_of(born), id(storage))
                )
                mine.nbytes = max(mine.nbytes, nbytes)
                if position < mine.position:
                    mine.position, mine.line = position, place_of(born)
    finally:
        # After Ctrl-C the traceback would keep this frame, and so these.
        del handle, found, storage
    return storages.values(), values


# `id` tells the hooks of `sys.addaudithook`, which are Python, and threads may change within them. This is C
# alone: an object's address, turned by four bits to the right.
_turned: Callable[[object], int] = object.__hash__
_BITS = sys.maxsize.bit_length() + 1
_MASK = (1 << _BITS) - 1


def tracked(kinds: Iterable[type], find: Callable[[], list[T]]) -> list[T]:
    """Return the objects that `find()` lists and whose class itself is among `kinds`.

    `find` is a function of `gc`, or a partial call of one. It lists every object there is, also a tuple that
    another thread is still building. That thread raises "SystemError: bad argument to internal function" if
    anybody else holds the tuple at its end. Python changes threads between two instructions, and never
    inside one. So one instruction finds the objects, takes of them what is asked for, and lets go of the
    rest. It makes no object that the collector tracks once it has found them, so no collection starts there,
    and no finalizer. It asks no class for its hash, as a metaclass may have one in Python.
    """
    held: list[T] = []
    known = {*map(_turned, kinds)}
    wanted = compress(iter(held), map(known.__contains__, map(_turned, map(type, iter(held)))))
    # What fills and empties the list returns None.
    return list(chain(*_around(held, find, wanted)))[1:-1]  # type: ignore[return-value]


def tracked_ids(find: Callable[[], list[T]]) -> set[int]:
    """Return the ids of the objects that `find()` lists. See `tracked`."""
    held: list[T] = []
    found = list(chain(*_around(held, find, map(_turned, iter(held)))))[1:-1]
    return {(number << 4 & _MASK) | (number & _MASK) >> (_BITS - 4) for number in found}  # type: ignore[operator]


def _around(
    held: list[T], find: Callable[[], list[T]], taken: Iterator[object]
) -> tuple[Iterator[object], ...]:
    """Return what fills the list, what takes from it, and what empties it, each when it is asked."""
    return map(held.extend, starmap(find, [()])), taken, starmap(held.clear, [()])


def _handles() -> list[Handle | Described]:
    """Return all handles, and what says the same of values that are owned together."""
    found: list[Handle | Several] = tracked({Handle, Several}, partial(gc.get_referrers, Handle, Several))
    one = None
    handles: list[Handle | Described] = []
    try:
        for one in found:
            if isinstance(one, Handle):
                handles.append(one)
            elif hasattr(one, "born"):
                handles += one.described()
    finally:
        del one, found
    return handles


def layers() -> dict[int, str]:
    """Return the layer of a module that has each storage, by the storage's id, as "GPT.blocks.3".

    A layer is named up to the first number in its path. Gradients and optimizers' state say so.
    """
    classes = _subclasses(torch.nn.Module) | _subclasses(torch.optim.Optimizer)
    things = tracked(classes, partial(gc.get_referrers, *classes))
    found: dict[int, str] = {}
    modules = [thing for thing in things if isinstance(thing, torch.nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    for root in modules:
        if id(root) in inner:
            continue
        for path, module in root.named_modules():
            layer = ".".join([type(root).__name__, *_up_to_number(path)])
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                _note(found, tensor, layer)
                if isinstance(tensor, torch.nn.Parameter):
                    _note(found, tensor.grad, f"{layer}, gradients")
    for optimizer in things:
        if isinstance(optimizer, torch.optim.Optimizer):
            for parameter, state in optimizer.state.items():
                storage = _storage_of(parameter)
                layer = found.get(0 if storage is None else id(storage), "")
                for tensor in state.values() if isinstance(state, dict) else ():
                    _note(found, tensor, f"{layer}, state of {type(optimizer).__name__}".lstrip(", "))
    return found


def _subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_subclasses, cls.__subclasses__()))


def _up_to_number(path: str) -> list[str]:
    parts = path.split(".") if path else []
    first = next((k for k, part in enumerate(parts) if part.isdigit()), 0)
    return parts[: first + 1]


def _storage_of(tensor: object) -> object:
    """Return the storage of a remote tensor, or of the shards of a DTensor; None for any other object."""
    local = getattr(tensor, "_local_tensor", tensor)
    # The first member's shard stands for an uneven tensor's others.
    handle = getattr(getattr(local, "_shards", [local])[0], "_handle", None)
    return handle.storage if isinstance(handle, Handle) else None


def _note(found: dict[int, str], tensor: object, layer: str) -> None:
    storage = _storage_of(tensor)
    if storage is not None:
        found.setdefault(id(storage), layer)


def _places(
    handle: Handle | Described,
    nodes: Collection[Node],
    before: tuple[Log, int] | None,
    poisoned: Collection[tuple[int, ...]],
) -> list[Place]:
    """Return where on these nodes a value lives: of a mesh, each member's place there."""
    node = handle.place.node
    # Positions of other logs do not compare.
    if before is not None and before[0] is node and handle.born[0] > before[1]:
        return []
    if isinstance(node, MeshLog):
        lanes = zip(node.members, node.lanes)
        return [
            place
            for place, (worker, k) in lanes
            if worker in nodes
            and (worker.index, handle.ref) not in poisoned
            and (worker.index, handle.ref, k) not in poisoned
        ]
    return [handle.place.place] if node in nodes and (node.index, handle.ref) not in poisoned else []


def _by_line(storages: Collection[_Held]) -> list[Holder]:
    texts = {line: code_text(*line) for line in {storage.line for storage in storages}}
    return _summed((storage, texts[storage.line]) for storage in storages)


def _summed(named: Iterable[tuple[_Held, str]]) -> list[Holder]:
    """Return who holds how much, by place and name, biggest first."""
    nbytes: Counter[tuple[Place, str]] = Counter()
    tensors: Counter[tuple[Place, str]] = Counter()
    for storage, name in named:
        if storage.nbytes:
            nbytes[storage.place, name] += storage.nbytes
            tensors[storage.place, name] += 1
    return [Holder(count, tensors[key], *key) for key, count in nbytes.most_common()]


def lost_lines(node: Node) -> str:
    """Return sentences about what this process has on a lost node, by the lines that made it."""
    holders, _ = held([node])
    if not holders:
        return "No tensor of this process was lost with it. "
    tensors, nbytes = sum(h.tensors for h in holders), sum(h.nbytes for h in holders)
    lines = [
        f"    {size_text(h.nbytes):>9} by {h.line} ({h.tensors} tensor{'s' if h.tensors > 1 else ''})"
        for h in holders[:_MOST_LINES]
    ]
    if len(holders) > _MOST_LINES:
        lines.append(
            f"    and by {len(holders) - _MOST_LINES} more "
            f"line{'s' if len(holders) - _MOST_LINES > 1 else ''}"
        )
    return "\n".join(
        [
            f"Lost with it: {tensors} tensor{'s' if tensors > 1 else ''} ({size_text(nbytes)}), made",
            *lines,
            "  ",
        ]
    )
