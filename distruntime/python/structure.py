"""What a function returns, as it is known here: its structure, and the proxies that are made of it.

See `wire/codec.py` for what a structure is, and `structure.py` of the worker's room of this name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.utils._pytree import tree_map

from ..errors import InternalError, NotSupportedError, ProtocolError, UsageError
from ..log.handle import Handle, Residence, lent_storage, next_ref
from ..log.replies import is_spec
from ..log.spec import NO_TENSOR, Spec, spec_from_wire, spec_of
from ..log.storage import Storage
from ..log.uses import Memory
from ..tensors.tensor import DistributedTensor
from ..tensors.trees import is_here, remade
from ..wire.codec import DECLARED, DEEPEST_RESULT, END, FIRST_NAME, NOTHING, OBJECT, Opened, opened, parts_of


def require(structure: object, operands: int, depth: int = 0) -> object:
    """Return a structure that a worker has sent; raise `ProtocolError` where it is none."""
    match structure:
        case "object":
            return structure
        case "nothing":
            return structure
        case "end" if depth == 0:
            return structure
        case ["tensor", *spec, bool(_), int(memory)] if is_spec(spec):
            if -1 <= memory < operands or memory >= FIRST_NAME:
                return structure
        case ["tuple" | "list", *parts] if depth <= DEEPEST_RESULT:
            for part in parts:
                require(part, operands, depth + 1)
            return structure
        case ["dict", list(keys), *parts] if depth <= DEEPEST_RESULT and len(keys) == len(parts):
            for part in parts:
                require(part, operands, depth + 1)
            return structure
        case ["class", str(_), str(_), *parts] if depth <= DEEPEST_RESULT:
            for part in parts:
                require(part, operands, depth + 1)
            return structure
    raise ProtocolError(f"not the structure of a result: {structure!r:.80}")


def leaves(structure: object) -> Iterator[Sequence[object]]:
    """Yield the fields of each tensor of a structure; () for each object."""
    parts = parts_of(structure)
    if parts is not None:
        for part in parts:
            yield from leaves(part)
    elif structure != NOTHING:
        yield structure[1:] if isinstance(structure, list) else ()


def known_here(structure: object) -> tuple[object, list[bool]]:
    """Return a structure in which what is of a class that this process lacks is one object.

    Say of each tensor of the structure that was given whether it is still there.
    """
    parts = parts_of(structure)
    if parts is None:
        is_tensor = isinstance(structure, list)
        return structure, [True] * is_tensor
    match structure:
        case ["class", str(name), str(context), *_] if not is_here(name, context):
            return OBJECT, [False for fields in leaves(structure) if fields]
    assert isinstance(structure, list)
    known, here = list[object](), list[bool]()
    for part in parts:
        found, tensors = known_here(part)
        known.append(found)
        here += tensors
    return [*structure[: len(structure) - len(parts)], *known], here


def has_nothing(structure: object) -> bool:
    """Whether something in a structure is None. It may be a tensor at the next call."""
    parts = parts_of(structure)
    return structure == NOTHING if parts is None else any(map(has_nothing, parts))


def repeats(structure: object) -> bool:
    """Whether another call may be expected to return the same: no result is None, or in memory that objects
    hold.
    """
    if structure == END or has_nothing(structure):
        return False
    return not any(map(is_lent, leaves(structure)))


def memory_of(fields: Sequence[object]) -> int:
    memory = fields[-1]
    assert isinstance(memory, int)
    return memory


def wants_grad(fields: Sequence[object]) -> bool:
    """Whether a leaf is a tensor that requires grad."""
    return bool(fields) and fields[-2] is True


def is_lent(fields: Sequence[object]) -> bool:
    """Whether a leaf is a tensor in memory that the worker's own Python holds."""
    return bool(fields) and memory_of(fields) >= FIRST_NAME


def is_fresh(structure: object) -> bool:
    """Whether a result has tensors only, in memory of their own."""
    return all(bool(fields) and memory_of(fields) < 0 for fields in leaves(structure))


def owner_of(operands: Sequence[Handle]) -> Storage | None:
    """Return the memory of the first object among operands: what a call returns of objects is in it."""
    return next((handle.storage for handle in operands if handle.spec is NO_TENSOR), None)


def object_in(owner: Storage | None, home: Residence) -> Handle:
    """Return the handle of a new object, which is a part of another one if there is one."""
    return Handle(next_ref(), NO_TENSOR, home, owner or Storage(NO_TENSOR))


def kept_by(operands: Sequence[Handle], made: Sequence[Handle]) -> list[Memory]:
    """Return what counts as one memory after a call, an object's first; nothing where it has no object."""
    objects = [handle.storage for handle in (*operands, *made) if handle.spec is NO_TENSOR]
    if not objects:
        return []
    return list(dict.fromkeys((*objects, *(handle.storage for handle in operands))))


def handles_of(structure: object, home: Residence, operands: Sequence[Handle]) -> list[Handle]:
    """Return a new handle for each leaf, in the memory that it is in."""
    owner = owner_of(operands)
    found = []
    for fields in leaves(structure):
        if not fields:
            owner = owner or Storage(NO_TENSOR)
            found.append(Handle(next_ref(), NO_TENSOR, home, owner))
            continue
        spec, memory = spec_from_wire(list(fields[:5])), memory_of(fields)
        if memory < 0:
            storage = Storage(spec)
        elif memory < FIRST_NAME:
            storage = operands[memory].storage
        else:
            storage = lent_storage(spec, home, memory)
        found.append(Handle(next_ref(), spec, home, storage))
    return found


def built(structure: object, values: Iterator[object]) -> object:
    """Return a result of its leaves."""
    match structure:
        case ["tuple", *parts]:
            return tuple([built(part, values) for part in parts])
        case ["list", *parts]:
            return [built(part, values) for part in parts]
        case ["dict", list(keys), *parts]:
            return {key: built(part, values) for key, part in zip(keys, parts)}
        case ["class", str(name), str(context), *parts]:
            return remade(Opened(name, context, [built(part, values) for part in parts]))
        case "nothing":
            return None
    for value in values:
        return value
    raise InternalError("a result has fewer leaves than its structure")


# -- declared ------------------------------------------------------------------------------------------------


def declared(returns: object, thing: object, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Return the structure that `returns` declares of a call of `thing`, which is None for what is there."""
    if returns == "fake":
        if not callable(thing):
            raise NotSupportedError('returns="fake" is for functions of yours, which are run here')
        returns = thing
    if callable(returns) and returns is not object:
        fakes, named = tree_map(_fake, (tuple(args), dict(kwargs)))
        returns = returns(*fakes, **named)
    return _of_example(returns)


def _fake(leaf: object) -> object:
    """Return what a function of the arguments gets in the place of a tensor: its metadata."""
    if isinstance(leaf, DistributedTensor):
        return leaf._handle.spec.meta().requires_grad_(leaf.requires_grad)
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _of_example(returns: object) -> object:
    """Return the structure of an example: tensors of any device stand for metadata."""
    if returns is object:
        return OBJECT
    if isinstance(returns, torch.Tensor):
        handle = getattr(returns, "_handle", None)
        spec: Spec = handle.spec if isinstance(handle, Handle) else spec_of(returns)
        return ["tensor", *spec.wire(), returns.requires_grad, DECLARED]
    if isinstance(returns, (tuple, list)) and type(returns) in (tuple, list):
        return [type(returns).__name__, *map(_of_example, returns)]
    tree = opened(returns)
    if tree is not None:
        if not is_here(tree.name, tree.context):
            raise UsageError(
                f"returns={returns!r:.60}: its class is not found by its name, "
                f"{tree.name.replace(':', '.')}: define it in a module, outside of functions"
            )
        parts = [NOTHING if part is None else _of_example(part) for part in tree.parts]
        return ["class", tree.name, tree.context, *parts]
    if isinstance(returns, Mapping):
        return ["dict", [*returns], *map(_of_example, returns.values())]
    raise UsageError(
        f"returns={returns!r:.60}: expected an example of the result (tensors, also of device='meta', and "
        'tuples, lists and dicts of them), object, "ask", "fake", or a function of the arguments that '
        "returns such an example"
    )
