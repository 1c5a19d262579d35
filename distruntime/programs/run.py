"""One call of a program's function, as it was recorded: what it did, what it left behind and returned."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import TreeSpec

from ..guards.arithmetic import Term, explained
from ..guards.reachable import Reachable
from ..guards.seen import PLAIN, Key, Seen, same
from ..guards.unchanged import Marks, changed
from ..log.spec import Spec
from ..log.tape import not_in_a_program, refused
from ..tensors.tensor import DistributedTensor
from ..wire.messages import HELD, MADE
from .begins import Begins, Moves, alike, followed, line_of_offset
from .recorder import of_autocast
from .recording import Name, Recording, difference
from .returned import Returned, alike_results
from .side_effects import still_held


@dataclass
class Run:
    """One recorded call. It holds no tensor."""

    recording: Recording
    # What stands at each path behind it, where that is not what stood there before.
    state: dict[str, Name]
    specs: dict[str, Spec]
    returned: list[Returned]
    tree: TreeSpec
    # How the floats of the call came about.
    terms: Mapping[Term, float] = field(default_factory=dict)
    # These tensors of this process count an optimizer's steps, and the call has counted one.
    steps: Mapping[int, torch.Tensor] = field(default_factory=dict)
    # What it has read, where something else stands behind it.
    changed: Mapping[Key, object] = field(default_factory=dict)
    # This is where its arguments began, and what it has handed to what stands between its parts.
    begins: Begins = ()
    crossed: dict[Name, Spec] = field(default_factory=dict)
    # What it has read besides floats, and what floats have decided.
    marks: Marks = field(default_factory=dict)
    decisions: Mapping[Term, object] = field(default_factory=dict)

    def difference(self, other: Run) -> str:
        """Say how another call did something else, or return nothing."""
        found = difference(self.recording, other.recording) or self._number_differs(other)
        if found:
            return found
        if self.steps.keys() != other.steps.keys():
            return "an optimizer counts other steps"
        if self.state != other.state:
            paths = [p for p in {**self.state, **other.state} if self.state.get(p) != other.state.get(p)]
            return f"it leaves another value at {paths[0]}"
        if self.tree != other.tree or not alike_results(self.returned, other.returned):
            return "it returns something else: plain values must be the same at each call"
        odd_specs = [p for p, spec in self.specs.items() if other.specs.get(p, spec) is not spec]
        if odd_specs:
            return f"the shape or the layout of {odd_specs[0]} changes"
        odd_values = [name for name, follows in self._follows(other) if follows is None]
        return "a value begins elsewhere in its memory, and follows no argument" if odd_values else ""

    def _number_differs(self, other: Run) -> str:
        """Say which number of another call nobody can follow, or return nothing."""
        before, after = self.recording.floats, other.recording.floats
        deciding, remedy = other.recording.deciding, ""
        following, odd = explained(before, after, self.terms, other.terms)
        decides = next((k for k in deciding if not same(before[k], after[k])), -1)
        if decides >= 0:
            word, why = decides, f"what {deciding[decides]} does here may depend on it"
        elif odd >= 0:
            word, why = odd, "follows no float that was found"
            remedy = "\n  pass it as an argument, or as a tensor"
        elif following and (too := self._changes_besides(other)):
            word, why = following[0].words[0], f"{too}, so nobody knows what it follows"
        else:
            return ""
        line = other.recording.line_of_float(word)
        how = f"a number changes from {before[word]!r} to {after[word]!r}, and {why}"
        return f"{how}\n  issued at {line}{remedy}"

    def _changes_besides(self, other: Run) -> str:
        """Say what another call has read or decided otherwise, besides floats, or return nothing."""
        if self.decisions != other.decisions:
            return "a float has decided something else"
        # One float may stand in several places, and then it has come from any of them.
        if self.terms.keys() != other.terms.keys():
            return "a float has come about in another way"
        path = changed(self.marks, other.marks)
        return f"{path} has changed too" if path else ""

    def _follows(self, other: Run) -> Iterator[tuple[Name, tuple[int, ...] | None]]:
        """Yield the names of what was made and is known outside of a part, each with what it follows."""
        pairs = [(one.name, one.spec, two.spec) for one, two in zip(self.returned, other.returned)]
        pairs += [(name, spec, other.crossed.get(name)) for name, spec in self.crossed.items()]
        for name, one, two in pairs:
            if name is not None and name[0] == MADE:
                yield name, followed(one, two, self.begins, other.begins)

    def moves(self, other: Run) -> Moves:
        """Return how values move with the arguments, as a later call that did the same tells."""
        follows = {name: found for name, found in self._follows(other) if found}
        return Moves((self.begins, other.begins), follows)

    def depends_on_begins(self, other: Run) -> str:
        """Say how another call differs just because its arguments begin elsewhere, or return nothing."""
        if self.begins == other.begins or self.state != other.state or self.tree != other.tree:
            return ""
        line = line_of_offset(self.recording, other.recording)
        if (difference(self.recording, other.recording) or self._number_differs(other)) and not line:
            return ""
        if not alike_results(self.returned, other.returned) or self.crossed.keys() != other.crossed.keys():
            return ""
        if not all(alike(spec, other.specs.get(path, spec)) for path, spec in self.specs.items()):
            return ""
        what = f"an offset does\n  issued at {line}" if line else "what it leaves or returns does"
        return f"it depends on where its arguments begin in their memory: {what}"


def require_unchanged(before: Reachable, after: Reachable, steps: Container[int]) -> None:
    """Raise `NotSupportedError` if a function has changed what no replay would change."""
    known = {(one.path, one.form): one for one in before.seen}
    for one in after.seen:
        old = known.get((one.path, one.form))
        if old is None or not _plain(old) or not _plain(one) or same(old.value, one.value):
            continue
        # A replay counts an optimizer's steps.
        if one.form == "version" and id(one.owner) in steps:
            continue
        if one.form == "version":
            raise not_in_a_program(
                f"change the local tensor {one.path}, as a replay would not",
                "keep it on the worker; torch.optim.AdamW and its like count their steps there with "
                "fused=True or capturable=True",
            )
        what = "the number of items of " if one.form == "length" else ""
        raise not_in_a_program(
            f"change {what}{one.path} ({old.value!r:.40}, then {one.value!r:.40}), as a replay would not",
            "do it outside, or keep it in a remote tensor",
        )


def replaced(before: Reachable, after: Reachable, state: Collection[str]) -> dict[str, object]:
    """Return the objects that a run has put in place of others, and that hold what it has left (`state`)."""
    known = {(one.path, one.form): one.value for one in before.seen}
    return {
        one.path: one.value
        for one in after.seen
        if one.form in ("item", "attribute", "cell")
        and not isinstance(one.value, (DistributedTensor, *PLAIN))
        and known.get((one.path, one.form)) is not one.value
        and any(path.startswith((f"{one.path}.", f"{one.path}[")) for path in state)
    }


def unsteady(before: Reachable, after: Reachable, free: Collection[str], run: Run) -> str:
    """Say what a run has not left of the kind that it found, or return nothing.

    Only a run that ends as it began is what the next call would do. At the paths in `free` a call may find
    another kind of tensor than it leaves, or None.
    """
    known = {(one.path, one.form): one.value for one in before.seen}
    for one in after.seen:
        old = known.pop((one.path, one.form), None)
        tensors = isinstance(old, DistributedTensor), isinstance(one.value, DistributedTensor)
        if old is None and tensors[1] and one.path in free:
            continue
        counted = one.form == "version" and id(one.owner) in run.steps
        if tensors[0] != tensors[1] or (_plain(one) and not same(old, one.value) and not counted):
            return one.path
    if known:
        return next(iter(known))[0]
    firsts = before.by_ref(), after.by_ref()
    for path, tensor in after.paths.items():
        old_one = before.paths.get(path)
        if old_one is None and path in free:
            continue
        if old_one is None or (old_one._handle.spec is not tensor._handle.spec and path not in free):
            return path
        # Two paths of one tensor have one name in a recording.
        if firsts[0][old_one._handle.ref] != firsts[1][tensor._handle.ref]:
            return path
    return "" if before.paths.keys() <= after.paths.keys() else "a tensor that is gone"


def _plain(one: Seen) -> bool:
    return one.form in ("length", "version") or isinstance(one.value, PLAIN)


def state_behind(
    recording: Recording,
    after: Reachable,
    before: dict[int, str],
    arguments: dict[int, int],
    returned: set[int],
    first: bool,
) -> dict[str, Name]:
    """Return what a run has left at the paths behind it.

    Raise for what a program cannot leave: a graph, an argument itself, what cannot be found.
    """
    state: dict[str, Name] = {}
    reached: set[int] = set()
    for path, tensor in after.paths.items():
        ref = tensor._handle.ref
        reached.add(ref)
        if ref in recording.made:
            if tensor.grad_fn is not None:
                what, place = f"leave a tensor with its graph at {path}", f"made at {recording.where(ref)}"
                raise refused(what, place, "keep x.detach() there")
            state[path] = MADE, recording.made[ref]
        elif ref in before:
            if before[ref] != path and path not in state:
                state[path] = HELD, before[ref]
        elif not first:
            what = "an argument itself" if ref in arguments else "what another thread has made"
            raise refused(f"leave {what} at {path}", "", "keep a copy there, x.clone()")
    left = () if first else recording.made.keys() - reached - recording.freed - returned
    # A cycle of something older may hold it.
    for ref in still_held(left):
        raise refused(
            "leave a tensor where it cannot be found from the function: a replay could not renew it",
            f"made at {recording.where(ref)}",
            "return it, or keep it in an object, a list or a dictionary that the function names"
            + of_autocast(),
        )
    return state
