"""One call of a program's function, as it was recorded: what it did, what it left behind and returned."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import TreeSpec, tree_flatten

from ..errors import NotSupportedError
from ..guards.arithmetic import Term, explained
from ..guards.marks import Marks, changed
from ..guards.reachable import Reachable, local_of
from ..guards.seen import PLAIN, Key, Seen, same
from ..log.handle import Handle
from ..log.spec import Spec
from ..log.tape import not_in_a_program, refused
from ..operators.proxies import of_a_function, view_of, wrap, wrap_within
from ..tensors.tensor import DistributedTensor
from ..wire.messages import ARGUMENT, HELD, MADE
from .begins import Begins, Moves, alike, followed, line_of_offset
from .garbage import still_held
from .graphs import given
from .recording import Name, Recording, difference

# The mesh, placements, shape and strides of a DTensor.
Layout = tuple[DeviceMesh, tuple[Placement, ...], tuple[int, ...], tuple[int, ...]] | None


@dataclass(frozen=True)
class Returned:
    """A leaf of what a function returned: a value with its name, or a plain one."""

    name: Name | None
    spec: Spec | None
    wants_grad: bool
    plain: object
    layout: Layout = None


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
        if self.tree != other.tree or not all(map(_alike, self.returned, other.returned)):
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
        if not all(map(_alike, self.returned, other.returned)) or self.crossed.keys() != other.crossed.keys():
            return ""
        if not all(alike(spec, other.specs.get(path, spec)) for path, spec in self.specs.items()):
            return ""
        what = f"an offset does\n  issued at {line}" if line else "what it leaves or returns does"
        return f"it depends on where its arguments begin in their memory: {what}"


def _alike(one: Returned, other: Returned) -> bool:
    if one.name is not None and one.name[0] == HELD and one.spec is not other.spec:
        return False
    named = (one.name, one.wants_grad) == (other.name, other.wants_grad) and alike(one.spec, other.spec)
    return named and one.layout == other.layout and same(one.plain, other.plain)


@dataclass
class Stripped:
    """What a function returned, without graphs: its leaves, and which of them had a graph."""

    leaves: list[object]
    tree: TreeSpec
    graphs: list[bool]
    layouts: list[Layout]


def layout_of(leaf: object) -> Layout:
    """Return what a DTensor on a mesh is besides the tensor of its members; None of anything else."""
    if type(leaf) is DistributedTensor or not isinstance(local_of(leaf), DistributedTensor):
        return None
    assert isinstance(leaf, DTensor)
    return leaf.device_mesh, tuple(leaf.placements), tuple(leaf.shape), tuple(leaf.stride())


def local_leaf(leaf: object) -> object:
    """Return the tensor of the members of a DTensor, and anything else as it is."""
    local = local_of(leaf)
    return local if isinstance(local, DistributedTensor) else leaf


def laid_out(leaf: object, layout: Layout) -> object:
    """Return the tensor of a mesh's members as the DTensor that it is to be."""
    if layout is None or not isinstance(leaf, DistributedTensor):
        return leaf
    mesh, placements, shape, stride = layout
    return DTensor.from_local(leaf, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def stripped(result: object, known: Collection[int], name: str) -> Stripped:
    """Return what a function returned, its new tensors without the graphs that made them.

    `known` are the refs of what was there before: that is returned as it is.
    """
    flat, tree = tree_flatten(result)
    leaves: list[object] = []
    graphs: list[bool] = []
    layouts: list[Layout] = []
    for leaf in flat:
        graph, layout, local = False, layout_of(leaf), local_leaf(leaf)
        layouts.append(layout)
        if type(leaf) is DistributedTensor or layout is not None:
            assert isinstance(local, DistributedTensor)
            new = local._handle.ref not in known
            graph = new and leaf.requires_grad
            leaf = _bare(local, known) if new else local
        elif not isinstance(leaf, PLAIN):
            what = (
                "a local tensor" if isinstance(leaf, torch.Tensor) else f"an object of {type(leaf).__name__}"
            )
            raise NotSupportedError(
                f"the program {name!r} returns {what}: a replay could not make it anew\n"
                "  return remote tensors and plain values, in lists, tuples and dictionaries"
            )
        leaves.append(leaf)
        graphs.append(graph)
    return Stripped(leaves, tree, graphs, layouts)


@dataclass
class _Bare:
    """A tensor that was returned, until its graph is gone.

    `proxy` is one without a graph, and shares the count of its writes. A view has its base: the tensor, if
    that was there before, and its ref.
    """

    handle: Handle
    proxy: DistributedTensor
    base: DistributedTensor | None
    base_ref: int
    view: object


def _bare(tensor: DistributedTensor, known: Collection[int]) -> _Bare:
    proxy: DistributedTensor = wrap_within(DistributedTensor, tensor._handle, tensor)
    base: object = tensor._base
    if not isinstance(base, DistributedTensor):
        return _Bare(tensor._handle, proxy, None, 0, None)
    ref = base._handle.ref
    return _Bare(tensor._handle, proxy, base if ref in known else None, ref, view_of(tensor))


def dressed(found: Stripped, kept: Collection[int], name: str) -> list[object]:
    """Return the leaves as the caller gets them, in place of what `stripped` has put there.

    What stays in an object too (`kept`) is renewed there by each replay, so the caller gets another name of
    the value. A replay counts as a write to that object's tensor, and the caller's is not written to.
    """
    leaves = [*found.leaves]
    bare = {k: leaf for k, leaf in enumerate(leaves) if isinstance(leaf, _Bare)}
    ready: dict[int, DistributedTensor] = {}
    firsts: dict[int, DistributedTensor] = {}
    # A base comes before its views.
    for k, leaf in sorted(bare.items(), key=lambda item: item[1].base_ref != 0):
        handle = leaf.handle
        if leaf.base is not None and leaf.base._handle.ref in kept:
            # A view would hold the object's tensor, and nobody else may hold what a replay renews.
            leaves[k] = given(handle, name, found.graphs[k])
            continue
        base = ready.get(leaf.base_ref) if leaf.base is None else leaf.base
        if handle.ref in kept:
            plain: DistributedTensor = wrap(DistributedTensor, handle)
            leaves[k] = given(plain.data._handle, name, found.graphs[k])  # type: ignore[attr-defined]
            continue
        view, graph = None if base is None else leaf.view, found.graphs[k]
        if base is None and leaf.base_ref in firsts and not graph:
            # Views of what is not returned would give each other gradients through it.
            base, view = firsts[leaf.base_ref], of_a_function(handle.spec)
        proxy = given(handle, name, graph, leaf.proxy if view is None else base, view)
        if leaf.base_ref and not graph:
            firsts.setdefault(leaf.base_ref, proxy)
        leaves[k] = ready[handle.ref] = proxy
    return leaves


def handle_of(leaf: object) -> Handle | None:
    """Return the handle of a returned tensor."""
    if isinstance(leaf, _Bare):
        return leaf.handle
    return leaf._handle if isinstance(leaf, DistributedTensor) else None


def returned_from(
    found: Stripped, recording: Recording, arguments: dict[int, int], paths: dict[int, str]
) -> list[Returned]:
    """Return the names of what a function returned. The refs of arguments and of what was found are given."""
    described = []
    for leaf, graph, layout in zip(found.leaves, found.graphs, found.layouts):
        handle = handle_of(leaf)
        if handle is None:
            described.append(Returned(None, None, False, leaf))
            continue
        name: Name
        if handle.ref in recording.made:
            name = MADE, recording.made[handle.ref]
        elif handle.ref in arguments:
            name = ARGUMENT, arguments[handle.ref]
        else:
            name = HELD, paths.get(handle.ref, "?")
        described.append(Returned(name, handle.spec, graph, None, layout))
    return described


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


def unsteady(before: Reachable, after: Reachable, free: Collection[str], run: Run, last: Run) -> str:
    """Say what a run has not left of the kind that it found, or return nothing.

    Only a run that ends as it began is what the next call would do. At the paths in `free` a call may find
    another kind of tensor than it leaves, or None.
    """
    for key, value in run.changed.items():
        # A run that has read what it then changed would read another value the next time.
        if value is not None and not same(last.changed.get(key), value):
            return str(key[2])
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
            "return it, or keep it in an object, a list or a dictionary that the function names",
        )
    return state
