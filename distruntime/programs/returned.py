"""What a program's function returned: its leaves without the graphs that made them, and with them again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import TreeSpec, tree_flatten

from ..errors import NotSupportedError, UsageError
from ..guards.reachable import local_of
from ..guards.seen import PLAIN, same
from ..log.handle import Handle
from ..log.spec import Spec
from ..operators.proxies import of_a_function, view_of, wrap, wrap_within
from ..tensors.tensor import DistributedTensor
from ..wire.messages import ARGUMENT, HELD, MADE
from .begins import alike
from .recording import Name, Recording

# It stands for whatever the graph would have begun with.
_leaf = torch.zeros((), requires_grad=True, device="cpu")


class _Left(torch.autograd.Function):
    """The end of a graph that stayed in a program."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        leaf: torch.Tensor,
        handle: Handle,
        name: str,
        base: DistributedTensor | None,
    ) -> torch.Tensor:
        ctx.program = name  # type: ignore[attr-defined]
        return _plain(handle, base)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> NoReturn:
        name = ctx.program  # type: ignore[attr-defined]
        raise UsageError(
            f"backward through what the program {name!r} has returned: its graph stays in the program, which "
            "is replayed as one instruction. Call backward() inside the program, and return the gradients or "
            "leave them in .grad; or return x.detach()"
        )


def _plain(handle: Handle, base: DistributedTensor | None, view: object = None) -> DistributedTensor:
    found: DistributedTensor
    if base is None or base._handle.storage is not handle.storage:
        found = wrap(DistributedTensor, handle)
    else:
        found = wrap_within(DistributedTensor, handle, base, view)
    return found


def given(
    handle: Handle, name: str, wants_grad: bool, base: DistributedTensor | None = None, view: object = None
) -> DistributedTensor:
    """Return a new proxy of what a program returns. Its backward raises if the value had a graph.

    If it is in the memory of `base`, autograd counts the writes to both together: see `wrap_within`.
    """
    if wants_grad and torch.is_grad_enabled():
        found: DistributedTensor = _Left.apply(_leaf, handle, name, base)  # type: ignore[no-untyped-call]
        return found
    return _plain(handle, base, view)


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


def alike_results(one: Sequence[Returned], other: Sequence[Returned]) -> bool:
    """Whether two calls have returned the same, as far as a replay can."""
    return all(map(_alike, one, other))


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


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a backward pass runs functions of the user's at this tensor."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


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
