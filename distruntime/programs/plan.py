"""A program that is ready for calls of one kind: what its workers learn, and how a call becomes a replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import final

import msgpack
import torch
from torch.utils._pytree import tree_unflatten

from ..errors import NotSupportedError
from ..log.handle import Handle, Residence, Storage, next_ref
from ..log.issue import stream_at
from ..log.line import Line, Replayed, user_line
from ..log.log import relieve
from ..log.node import Node
from ..log.spec import Spec
from ..tensors.tensor import DistributedTensor
from ..wire.messages import ARGUMENT, FLOAT, HELD, MADE, NUMBER, PROGRAM
from .changing import Number, explained, numbers_of
from .graphs import given
from .guards import Guards
from .reach import Reach
from .recording import Name
from .run import Run


@dataclass
class Source:
    """Where a result's memory comes from: an argument, a storage that stays, or a new one."""

    argument: int | None = None
    storage: Storage | None = None
    root: int | None = None


@dataclass
class Made:
    """A result of each replay."""

    spec: Spec
    place: Residence
    source: Source
    wants_grad: bool


@dataclass
class Found:
    """What a plan is made of besides two equal runs, as it is behind the second one."""

    name: str
    leaves: Sequence[object]
    after: Reach
    # These are the handles of the tensors that were returned.
    handles: Sequence[Handle | None]
    # What was returned, as the caller gets it.
    given: Sequence[object]
    # The run has changed these in place.
    changed: Sequence[DistributedTensor]
    changed_arguments: Sequence[int]
    # These arguments are also found from the function.
    pinned: Sequence[int]
    # These arguments are floats, by number.
    floats: dict[str, int] = field(default_factory=dict)


class Plan:
    """A program for calls of one signature, as long as its guards hold."""

    def __init__(self, run: Run, other: Run, found: Found) -> None:
        recording = run.recording
        assert recording.log is not None
        self.run, self.name, self.node = run, found.name, recording.log
        self.weight = recording.weight
        paths = found.after.paths
        kept = _kept(run, paths)
        numbers, _ = explained(other.recording.floats, recording.floats, other.floats, run.floats)
        free = frozenset(path for number in numbers for form in number.forms for path in form.paths)
        by_ref = {tensor._handle.ref: tensor for tensor in paths.values()}
        renewed = [by_ref[ref] for ref in kept]
        self.guards = Guards(found.after, renewed, free - found.floats.keys())
        self._numbers = numbers_of(numbers, found.after.seen, found.floats) if numbers else None
        self.follows_floats = bool(numbers)
        # What it changes counts as written by this process's autograd too.
        self._changed = [*found.changed, *(t for t in renewed if t not in _Identical(found.changed))]
        self._changed_arguments = list(found.changed_arguments)
        self._fixed_floats = {
            k: value
            for path, k in found.floats.items()
            if path not in free and isinstance(value := found.leaves[k], float)
        }
        self._pinned = [(k, _handle(found.leaves[k])) for k in found.pinned]
        self._define(run, kept, paths, numbers)
        self._results(run, found, kept)
        # Nothing that it reads may be freed.
        self._held = [by_ref[ref]._handle for ref in self._reads if ref in by_ref]
        # It was compared with a recording behind so many replays.
        self.replays = self.verified = 0
        self._lines = recording.lines

    # -- what the worker learns ------------------------------------------------------------------------------

    def _define(
        self,
        run: Run,
        kept: dict[int, Name],
        paths: dict[str, DistributedTensor],
        numbers: Sequence[Number],
    ) -> None:
        recording = run.recording
        returned = [
            one.name for one in run.returned if one.name is not None and _is_new(one.name, kept, paths)
        ]
        used = [name for ins in recording.body for name in (*ins.words, *(ins.kin or ()))]
        arguments = sorted({int(k) for kind, k in (*used, *kept.values(), *returned) if kind == ARGUMENT})
        self.operands = arguments
        offsets = {k: 1 + n for n, k in enumerate(arguments)}
        words = {number.word: 1 + len(arguments) + n for n, number in enumerate(numbers)}
        reads: dict[int, None] = {}

        def word(name: Name) -> list[object]:
            kind, what = name
            if kind == ARGUMENT:
                return [ARGUMENT, offsets[int(what)]]
            if kind == FLOAT:
                k = int(what)
                return [NUMBER, words[k]] if k in words else [FLOAT, recording.floats[k]]
            if kind == HELD:
                ref = paths[str(what)]._handle.ref
                reads[ref] = None
                return [HELD, ref]
            return [MADE, what]

        rows: dict[int, int] = {}
        body = []
        for ins in recording.body:
            row = rows.setdefault(ins.template, len(rows))
            kin = None if ins.kin is None else [word(name) for name in ins.kin]
            body.append([row, [word(name) for name in ins.words], list(ins.makes), kin])
        templates = [list(self.node.templates.fields(number)) for number in rows]
        definition = [
            templates,
            body,
            [[ref, word(name)] for ref, name in kept.items()],
            [word(name) for name in returned],
            len(arguments),
            len(numbers),
        ]
        self._reads = list(dict.fromkeys((*reads, *kept)))
        self.fields: list[object] = [PROGRAM, definition, {}, 0]
        self.key: bytes = msgpack.packb(self.fields)
        self._taught = Taught(self.node, self.key)

    # -- what a call gets ------------------------------------------------------------------------------------

    def _results(self, run: Run, found: Found, kept: dict[int, Name]) -> None:
        """Note of each leaf that is returned how a replay makes it."""
        paths = found.after.paths
        fixed = {id(t._handle.storage): t._handle.storage for t in paths.values()}
        arguments = {
            id(leaf._handle.storage): k
            for k, leaf in reversed(list(enumerate(found.leaves)))
            if isinstance(leaf, DistributedTensor)
        }
        roots: dict[int, int] = {}
        self._roots: list[Spec] = []
        # Each entry makes a leaf: of the fresh ones, of the arguments, or as it always is.
        self._leaves: list[tuple[str, int, object]] = []
        self._made: list[Made] = []
        for one, handle, leaf in zip(run.returned, found.handles, found.given):
            if one.name is None or handle is None:
                self._leaves.append(("fixed", 0, leaf))
            elif not _is_new(one.name, kept, paths):
                kind, what = one.name
                argument = kind == ARGUMENT
                self._leaves.append(("argument", int(what), None) if argument else ("fixed", 0, leaf))
            else:
                storage = handle.storage
                if id(storage) in arguments:
                    source = Source(argument=arguments[id(storage)])
                elif id(storage) in fixed:
                    source = Source(storage=storage)
                else:
                    if id(storage) not in roots:
                        roots[id(storage)] = len(self._roots)
                        self._roots.append(storage.spec)
                    source = Source(root=roots[id(storage)])
                self._leaves.append(("made", len(self._made), None))
                self._made.append(Made(handle.spec, handle.place, source, one.wants_grad))
        self._single = len(self._leaves) == 1 and self._leaves[0][0] == "made" and run.tree.is_leaf()

    def fits(self, leaves: Sequence[object]) -> bool:
        """Whether these arguments are of this plan, and all that it has found is as it was."""
        for k, value in self._fixed_floats.items():
            if leaves[k] != value:
                return False
        for k, handle in self._pinned:
            if _handle(leaves[k]) is not handle:
                return False
        return self.guards.holds()

    def missed(self, leaves: Sequence[object]) -> str:
        """Say why it does not fit."""
        for k, value in self._fixed_floats.items():
            if leaves[k] != value:
                return f"argument {k} was {value!r}, and is {leaves[k]!r} now"
        for k, handle in self._pinned:
            if _handle(leaves[k]) is not handle:
                return f"argument {k} was a tensor that the function finds by itself, and is another one now"
        return self.guards.missed()

    def usable(self) -> bool:
        """Whether its worker and its session are there."""
        return self.node.failed is None and self.node.session.closed is None

    def numbers(self, leaves: Sequence[object]) -> list[float] | None:
        """Return the numbers that this call brings; None where nobody knows which float they follow."""
        return [] if self._numbers is None else self._numbers(leaves)

    def replay(self, leaves: Sequence[object], numbers: Sequence[float]) -> object:
        """Issue the program as one instruction; return what it returns. Blocks while the window is full."""
        node = self.node
        relieve(node)
        line = self._line()
        words: list[object] = [0]
        operands: list[Handle] = []
        for k in self.operands:
            handle = leaves[k]._handle  # type: ignore[attr-defined]
            operands.append(handle)
            words.append(handle.ref)
        words += numbers
        roots = [Storage(spec) for spec in self._roots]
        fresh: list[Handle] = []
        for made in self._made:
            source = made.source
            if source.root is not None:
                storage = roots[source.root]
            elif source.storage is not None:
                storage = source.storage
            else:
                storage = leaves[source.argument]._handle.storage  # type: ignore[index, attr-defined]
            handle = Handle(next_ref(), made.spec, made.place, storage)
            words.append(handle.ref)
            fresh.append(handle)
        with node.lock:
            words[0] = node.template(self.key, self.fields)
            node.weigh(self.weight)
            if node.order is None:
                born = node.append(words, line)
                for handle in fresh:
                    handle.born = born
                # What it has written is read behind it, whatever that is.
                node.checked = born[0]
            else:
                written = [handle.storage for handle in (*operands, *self._held)]
                generator = node.order.generator
                place = self._made[0].place if self._made else operands[0].place if operands else None
                stream = 0 if place is None else stream_at(place)
                node.order.issue(stream, words, fresh, [*operands, *self._held], [*written, generator], line)
        self._count_versions(leaves)
        self.replays += 1
        return self._given(leaves, fresh)

    def _line(self) -> Line:
        line = user_line()
        call = line[1]
        return line if call is None else (0, Replayed(call, self.name, self._lines), line[2])

    def _count_versions(self, leaves: Sequence[object]) -> None:
        changed = self._changed
        if self._changed_arguments:
            changed = [*changed, *(leaves[k] for k in self._changed_arguments)]  # type: ignore[list-item]
        if changed:
            torch.autograd.graph.increment_version(changed)

    def _given(self, leaves: Sequence[object], fresh: Sequence[Handle]) -> object:
        if self._single:
            return given(fresh[0], self.name, self._made[0].wants_grad)
        found: list[object] = []
        for kind, k, leaf in self._leaves:
            if kind == "made":
                found.append(given(fresh[k], self.name, self._made[k].wants_grad))
            else:
                found.append(leaves[k] if kind == "argument" else leaf)
        return tree_unflatten(found, self.run.tree)


@final
class Taught:
    """Stands for what a worker has learnt of a program: it forgets that when nobody holds this.

    The collector may run the finalizer inside any lock, so it only appends, as that of a `Handle` does.
    """

    __slots__ = ("__del__",)

    __del__: Callable[[], object]

    def __init__(self, node: Node, key: bytes) -> None:
        self.__del__ = MethodType(node.dropped.append, key)


class _Identical:
    """Tells whether an object is one of these: tensors are compared by `==` element by element."""

    def __init__(self, objects: Sequence[object]) -> None:
        self._ids = set(map(id, objects))

    def __contains__(self, thing: object) -> bool:
        return id(thing) in self._ids


def _handle(leaf: object) -> Handle | None:
    return leaf._handle if isinstance(leaf, DistributedTensor) else None


def _is_new(name: Name, kept: dict[int, Name], paths: dict[str, DistributedTensor]) -> bool:
    """Whether a replay gives a value that is returned a ref of its own."""
    kind, what = name
    if kind == MADE:
        return True
    return kind == HELD and str(what) in paths and paths[str(what)]._handle.ref in kept


def _kept(run: Run, paths: dict[str, DistributedTensor]) -> dict[int, Name]:
    """Return which value stands under each ref behind a replay, where that changes."""
    kept: dict[int, Name] = {}
    for path, name in run.state.items():
        ref = paths[path]._handle.ref
        if name[0] == HELD and paths.get(str(name[1])) is None:
            raise NotSupportedError(
                f"what was at {name[1]} is at {path} now: a program cannot follow that yet"
            )
        if name[0] == HELD and paths[str(name[1])]._handle.ref == ref:
            continue
        if kept.setdefault(ref, name) != name:
            raise NotSupportedError(f"what stays at {path} is shared in a way that no program can follow yet")
    return kept
