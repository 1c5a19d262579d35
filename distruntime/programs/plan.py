"""A program that is ready for calls of one kind: how a call becomes a replay.

A kind of call that is recorded again and again runs plainly, and its user is told. A recording takes as long
as some plain calls. It is in vain if it brings no plan that does something new, and no call was replayed
since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial

import torch
from torch.utils._pytree import tree_unflatten

from ..guards.anchors import Anchor, anchored
from ..guards.arithmetic import Term, explained, leaves_of, numbers_of, unmoved
from ..guards.guards import Guards
from ..guards.seen import same
from ..log.current import current_device, current_mesh, current_node, current_streams
from ..log.handle import Handle
from ..log.line import user_line
from ..log.log import Log
from ..operators.proxies import view_of
from ..session.session import session_of_log
from ..session.stalls import warn_at
from ..tensors.tensor import DistributedTensor
from ..wire.messages import ARGUMENT, HELD
from .attempt import Attempt
from .carried import Carried, Taken
from .layout import Layout, arguments_of, is_new, kept_behind
from .recording import Name
from .returned import given, laid_out
from .run import Run

# So many recordings in vain are made of a kind of call, and behind so many plain calls two more. Behind those
# come twice as many plain calls.
_MOST, _PLAIN, _AGAIN = 5, 100, 2


class Tries:
    """How the recordings of one kind of call have fared."""

    def __init__(self) -> None:
        # A replay sets it back.
        self.in_vain = 0
        self.why = ""
        self._plain, self._wait, self._told = 0, _PLAIN, False

    def note(self, brought_a_plan: bool, why: str) -> None:
        """Note a recording, and why the call was not replayed."""
        if not brought_a_plan:
            self.in_vain += 1
            self.why = why

    def over(self) -> bool:
        """Whether this call is to run plainly."""
        if self.in_vain < _MOST:
            return False
        self._plain += 1
        if self._plain <= self._wait:
            return True
        self._plain, self._wait, self.in_vain = 0, 2 * self._wait, _MOST - _AGAIN
        return False

    def tell(self, name: str) -> None:
        """Warn at the user's line, once."""
        if self._told:
            return
        self._told = True
        text = (
            f"the program {name!r} was recorded {_MOST} times, and no call was replayed: such calls run "
            f"plainly from now on, as without dr.program. {self.why}\n"
            "  pass what changes as an argument, or keep it in a remote tensor; "
            "if it must change, leave dr.program out"
        )
        warn_at(text, user_line())


# This is an argument, a tensor that is held, or a value that is returned.
_Place = tuple[str, int | Anchor[DistributedTensor]]


class Plan:
    """A program for calls of one signature, as long as its guards hold."""

    def __init__(self, attempt: Attempt, other: Run, compile: str | None = None) -> None:
        """Make it of a recorded call, and of an earlier one that did the same."""
        run, after = attempt.run, attempt.after
        recording = run.recording
        self.run, self.name, self.kinds = run, attempt.name, attempt.kinds
        paths = after.paths
        kept = kept_behind(run, paths)
        numbers, _ = explained(other.recording.floats, recording.floats, other.terms, run.terms)
        free = leaves_of(term for number in numbers for term in number.terms)
        notes = attempt.reads.notes
        reads = {
            key: one
            for key, one in notes.found.items()
            if one.form != "bytes" or id(one.owner) not in run.steps
        }
        by_ref = {tensor._handle.ref: tensor for tensor in paths.values()}
        renewed = [by_ref[ref] for ref in kept]
        mine = set(map(id, renewed))
        alone: dict[str, object] = {path: tensor for path, tensor in paths.items() if id(tensor) in mine}
        self.guards = Guards(after, reads, {**alone, **attempt.replaced}, free, run.steps, notes.made)
        self.carried = Carried(after, renewed, attempt.kinds)
        self._words = [number.words for number in numbers]
        decisions = {**run.decisions, **unmoved(recording.floats, numbers, run.terms)}
        self._numbers = numbers_of(numbers, decisions, reads, run.steps)
        self._steps = list(run.steps.values())
        # What it changes counts as written by this process's autograd too.
        self._changed = list(dict.fromkeys(map(anchored, (*attempt.changed, *renewed))))
        self._changed_arguments = attempt.changed_arguments
        self._changed_entries = [self.carried.own[p] for p in attempt.changed_paths if p in self.carried.own]
        before = {id(storage) for _, storage in attempt.memories}
        self._shares = any(id(tensor._handle.storage) in before for tensor in renewed)
        self._moves = other.moves(run)
        self._note_arguments(attempt, free)
        returned = self._note_returned(attempt, kept, mine)
        leaves, memories = attempt.leaves, attempt.memories
        of_leaves = arguments_of(leaves)
        laid = partial(
            Layout, recording, kept, numbers, returned, paths, of_leaves, memories, compile, self._moves
        )
        layout = self._layout = self._used = laid({})
        read = dict.fromkeys((*recording.read(), *kept.values()))
        # What others have left comes behind the arguments.
        entries = [name for name in read if name[0] == HELD and name[1] in self.carried.own]
        self._entries = [self.carried.own[str(path)] for _, path in entries]
        opened = {name: (ARGUMENT, len(leaves) + k) for k, name in enumerate(entries)}
        self._open = laid(opened) if opened else layout
        self.logs: Sequence[Log] = layout.logs
        # It is one of these streams that it names, and the others are current in each call.
        self._streams = dict(layout.current) if recording.several else None
        # What it makes anew goes to the place that was current.
        self._places = session_of_log(self.logs[0]).places
        self._context, self._place = self._now(), self._places.current()
        self.replays = 0
        # A replay says there that recordings are not in vain.
        self.tries = Tries()

    def _note_arguments(self, attempt: Attempt, free: Set[Term]) -> None:
        """Note what arguments must be, besides what their signature says."""
        leaves = attempt.leaves
        handles = [(k, handle) for k, leaf in enumerate(leaves) if (handle := _handle(leaf)) is not None]
        self._fixed_floats = {
            k: value for k, value in enumerate(leaves) if type(value) is float and ("argument", k) not in free
        }
        self._pinned = [(k, _handle(leaves[k])) for k in attempt.pinned]
        self._fixed = [(k, handle.spec) for k, handle in handles if k in self._moves.fixed]
        inside = {id(t._handle.storage) for _, t in attempt.after.tensors.values()}
        # What shares memory with something that was found must do so again: it is one memory for streams.
        self._inside = [(k, handle.storage) for k, handle in handles if id(handle.storage) in inside]

    def _note_returned(
        self, attempt: Attempt, kept: Mapping[int, Name], renewed: Set[int]
    ) -> dict[Name, Handle]:
        """Note what a replay returns. Return the values that it makes for that."""
        returned: dict[Name, Handle] = {}
        # Each entry makes a leaf: of the values of a replay, of the arguments, or as it always is.
        self._leaves: list[tuple[str, Name | int, bool, object]] = []
        for one, handle, leaf in zip(self.run.returned, attempt.handles, attempt.given):
            if one.name is not None and handle is not None and is_new(one.name, kept, attempt.after.paths):
                returned[one.name] = handle
                self._leaves.append(("made", one.name, one.wants_grad, None))
            elif one.name is not None and one.name[0] == ARGUMENT:
                self._leaves.append(("argument", int(one.name[1]), False, None))
            else:
                fixed = anchored(leaf) if isinstance(leaf, DistributedTensor) else leaf
                self._leaves.append(("fixed", 0, False, fixed))
        self._laid_out = any(one.layout is not None for one in self.run.returned)
        self._note_shared(attempt, renewed)
        single = len(self._leaves) == 1 and self._leaves[0][0] == "made" and self.run.tree.is_leaf()
        self._single = single and not self._laid_out and not self._shared
        return returned

    def _note_shared(self, attempt: Attempt, renewed: Set[int]) -> None:
        """Note which tensor's memory each returned value is in, and how it is a view of it.

        A tensor with one of the ids in `renewed` has other memory behind each replay.
        """
        places: dict[int, _Place] = {}
        memories: dict[int, _Place] = {}

        def note(tensor: DistributedTensor, place: _Place) -> None:
            places.setdefault(id(tensor), place)
            memories.setdefault(id(tensor._handle.storage), place)

        for k, leaf in enumerate(attempt.leaves):
            if isinstance(leaf, DistributedTensor):
                note(leaf, ("argument", k))
        for tensor in attempt.after.paths.values():
            if id(tensor) not in renewed:
                note(tensor, ("held", anchored(tensor)))
        made: list[tuple[int, DistributedTensor]] = []
        for k, ((kind, *_), leaf) in enumerate(zip(self._leaves, attempt.given)):
            if kind == "made" and isinstance(leaf, DistributedTensor):
                made.append((k, leaf))
        # A base comes before its views.
        made.sort(key=lambda item: item[1]._is_view())
        self._order = [k for k, _ in made]
        self._shared: dict[int, tuple[_Place, object]] = {}
        for k, leaf in made:
            base = places.get(id(leaf._base))
            place = base or memories.get(id(leaf._handle.storage))
            if place is not None:
                self._shared[k] = place, view_of(leaf) if base else None
            note(leaf, ("returned", k))

    def compiled(self) -> str:
        """Return what became of its compiling. Block until what was issued before has run."""
        return self._used.compiled()

    def does_as(self, other: Plan) -> bool:
        """Whether another plan does the same with the same kinds of tensors."""
        return not self.run.difference(other.run) and self.kinds == other.kinds

    def differs(self, run: Run, numbers: Sequence[float]) -> str:
        """Say how a call did something else than its replay with these numbers would have done."""
        floats = run.recording.floats
        for word, number in ((word, number) for words, number in zip(self._words, numbers) for word in words):
            if word < len(floats) and not same(number, floats[word]):
                line = run.recording.line_of_float(word)
                return f"a number would have been {number!r}, and is {floats[word]!r}\n  issued at {line}"
        return self.run.difference(run)

    def fits(self, leaves: Sequence[object]) -> bool:
        """Whether these arguments are of this plan, and all that it has found is as it was."""
        return not self.carried.turns and not self._called_otherwise(leaves) and self.guards.holds()

    def fits_with(self, leaves: Sequence[object]) -> Taken | None:
        """Return what stands where this plan's own tensors would, if it fits with that, or None."""
        if self._called_otherwise(leaves):
            return None
        taken = self.carried.taken(leaves)
        if taken is None:
            return None
        # A value that gets another name is ordered among streams by that name's memory only.
        if not taken.only_moved and self._shares and any(log.order is not None for log in self.logs):
            return None
        try:
            # The guards look at the plan's own, which have no value yet.
            taken.put_own()
            return taken if self.guards.holds() else None
        finally:
            taken.put_back()

    def _called_otherwise(self, leaves: Sequence[object]) -> str:
        """Say what is different in how it is called, or return nothing."""
        for k, value in self._fixed_floats.items():
            if not same(leaves[k], value):
                return f"argument {k} was {value!r}, and is {leaves[k]!r} now"
        for k, handle in self._pinned:
            if _handle(leaves[k]) is not handle:
                return f"argument {k} was a tensor that the function finds by itself, and is another one now"
        for k, spec in self._fixed:
            if leaves[k]._handle.spec is not spec:  # type: ignore[attr-defined]
                return f"argument {k} began at byte {spec.begin} of its memory, and begins elsewhere now"
        for k, storage in self._inside:
            if leaves[k]._handle.storage is not storage:  # type: ignore[attr-defined]
                return f"argument {k} was in a memory that the function finds by itself, and is not any more"
        if self._moves.together and self._moves.apart(leaves):
            return "arguments that moved alike in their memory do not any more"
        if self._streams is not None and dict(current_streams.get()) != self._streams:
            return "another stream is current, and the program uses several"
        if not self._at_its_place():
            return f"the current place was {self._place.place}, and is another one now"
        return ""

    def _now(self) -> tuple[object, ...]:
        return current_node.get(), current_device.get(), current_mesh.get(), self._places.default

    def _at_its_place(self) -> bool:
        """Whether a new tensor would go where it went when this was recorded."""
        context = self._now()
        if context != self._context:
            if self._places.current() is not self._place:
                return False
            self._context = context
        return True

    def missed(self, leaves: Sequence[object]) -> str:
        """Say why it does not fit."""
        turned = "what it found in objects when it was recorded is not what it left there"
        otherwise = self._called_otherwise(leaves) or self.guards.missed()
        return otherwise or (turned if self.carried.turns else "")

    def usable(self) -> bool:
        """Whether its workers, its groups and its session are there."""
        return self._layout.usable()

    def numbers(self, leaves: Sequence[object]) -> list[float] | None:
        """Return the numbers that this call brings; None where nobody knows which float they follow."""
        return [] if self._numbers is None else self._numbers(leaves)

    def replay(
        self, leaves: Sequence[object], numbers: Sequence[float], taken: Taken | None = None
    ) -> object:
        """Issue the program, part by part; return what it returns. Blocks while a window is full.

        `taken` is what `fits_with` has found. What is counted here comes first: if a signal's handler raises
        in between, no part has run that is not counted.
        """
        if self._steps:
            torch._foreach_add_(self._steps, 1)
        self._count_versions(leaves)
        if taken is not None and self._changed_entries:
            torch.autograd.graph.increment_version([*map(taken.instead_of, self._changed_entries)])
        layout, operands = self._layout, leaves
        if taken is not None and self._entries:
            layout = self._open
            operands = [*leaves, *map(taken.instead_of, self._entries)]
        self._used = layout
        handles = [one._handle if isinstance(one, DistributedTensor) else one for one in operands]
        made = layout.issue(handles, numbers, self.name).made
        if taken is not None:
            taken.put_own()
        self.replays += 1
        return self._given(leaves, made)

    def _count_versions(self, leaves: Sequence[object]) -> None:
        changed = [one.thing for one in self._changed]
        if self._changed_arguments:
            changed = [*changed, *(leaves[k] for k in self._changed_arguments)]  # type: ignore[list-item]
        if changed:
            torch.autograd.graph.increment_version(changed)

    def _given(self, leaves: Sequence[object], made: Mapping[Name, Handle]) -> object:
        if self._single:
            _, name, graph, _ = self._leaves[0]
            return given(made[name], self.name, graph)  # type: ignore[index]
        found: list[object] = [None] * len(self._leaves)
        for at, (kind, k, _, leaf) in enumerate(self._leaves):
            if kind == "argument":
                found[at] = leaves[k]  # type: ignore[index]
            elif kind == "fixed":
                found[at] = leaf.thing if isinstance(leaf, Anchor) else leaf
        for at in self._order:
            _, name, graph, _ = self._leaves[at]
            base, view = None, None
            if at in self._shared:
                (kind, what), view = self._shared[at]
                tensors = leaves if kind == "argument" else found
                base = what.thing if isinstance(what, Anchor) else tensors[what]
            found[at] = given(made[name], self.name, graph, base, view)  # type: ignore[arg-type, index]
        if self._laid_out:
            found = [laid_out(leaf, one.layout) for leaf, one in zip(found, self.run.returned)]
        return tree_unflatten(found, self.run.tree)


def _handle(leaf: object) -> Handle | None:
    return leaf._handle if isinstance(leaf, DistributedTensor) else None
