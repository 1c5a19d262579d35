"""Proxies of what a call returns, and their gradients: the backward of a call is one instruction, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgpack
import torch
from torch.utils._pytree import tree_map

from ..errors import NotSupportedError, UsageError
from ..log.handle import Handle, Residence, new_value
from ..log.issue import issue, stream_at, template_number
from ..log.line import user_line
from ..log.log import relieve
from ..log.mesh_log import MeshLog
from ..log.shards import member_of
from ..log.spec import Spec
from ..log.storage import Storage
from ..operators.proxies import of_a_function, wrap, wrap_within
from ..tensors.tensor import DistributedTensor
from ..tensors.trees import joined
from ..tensors.uneven import UnevenTensor, together
from ..wire.codec import OPERAND
from .callee import lent_by
from .pickling import Operand
from .structure import leaves, memory_of, wants_grad


def tensor_proxies(
    structure: object, fresh: Sequence[Handle], operands: Sequence[object]
) -> list[DistributedTensor | None]:
    """Return the proxy of each leaf of a result that is a tensor; None for each object.

    Autograd counts the writes to what is in one memory together: an argument, and results.
    """
    found: list[DistributedTensor | None] = []
    bases: dict[int, tuple[DistributedTensor, bool]] = {}
    for handle, leaf in zip(fresh, leaves(structure)):
        if not leaf:
            found.append(None)
            continue
        number, wants = memory_of(leaf), wants_grad(leaf)
        given = operands[number] if 0 <= number < len(operands) else None
        if isinstance(given, DistributedTensor):
            bases.setdefault(id(handle.storage), (given, given.requires_grad))
        if id(handle.storage) in bases:
            base, graph = bases[id(handle.storage)]
            # Where only one of them has a graph, no gradient goes from one to the other.
            view = of_a_function(handle.spec) if wants == graph else None
            found.append(wrap_within(DistributedTensor, handle, base, view))
        else:
            own: DistributedTensor = wrap(DistributedTensor, handle)
            bases[id(handle.storage)] = own, wants
            found.append(own)
    return found


# -- gradients -----------------------------------------------------------------------------------------------


def recorded(
    name: str,
    structure: object,
    found: Sequence[DistributedTensor | None],
    operands: Sequence[object],
    tape: Handle,
    here: Sequence[bool] | None,
) -> list[DistributedTensor | None]:
    """Return the proxies as results of one node of this process's autograd graph.

    `here` says which of the tape's tensors are among them; None stands for all.
    """
    tensors = [proxy for proxy in found if proxy is not None]
    wanted = [wants_grad(leaf) for leaf in leaves(structure) if leaf]
    inputs = [o for o in operands if isinstance(o, DistributedTensor) and o.requires_grad]
    # What wants gradients may be parameters of the worker's own objects only.
    start = torch.empty(0, device="cpu", requires_grad=True)
    saved = [o._handle.storage for o in operands if isinstance(o, DistributedTensor)]
    outputs = iter(_Recorded.apply(name, tape, here, tensors, wanted, saved, start, *inputs))  # type: ignore[no-untyped-call]
    return [None if proxy is None else next(outputs) for proxy in found]


class _Recorded(torch.autograd.Function):
    """A call that the worker has recorded: its backward is one instruction."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        name: str,
        tape: Handle,
        here: Sequence[bool] | None,
        outputs: list[torch.Tensor],
        wanted: list[bool],
        saved: list[Storage],
        start: torch.Tensor,
        *inputs: DistributedTensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.name, ctx.tape, ctx.here = name, tape, here  # type: ignore[attr-defined]
        ctx.specs = [x._handle.spec for x in inputs]  # type: ignore[attr-defined]
        # The worker has saved of them what the backward needs. They may be freed here all the same.
        ctx.saved = saved  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(*[o for o, wants in zip(outputs, wanted) if not wants])
        ctx.set_materialize_grads(False)
        # The tape is the worker's. Torch frees this after a backward, and so it knows of a second one.
        ctx.save_for_backward(start)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: _Recorded, *grads: DistributedTensor | None) -> tuple[object, ...]:
        # This raises what torch raises of a graph that is freed.
        _ = ctx.saved_tensors
        if ctx.here is not None:  # type: ignore[attr-defined]
            given = iter(grads)
            grads = tuple([next(given) if there else None for there in ctx.here])  # type: ignore[attr-defined]
        with torch.no_grad():
            found = _gradients(ctx.name, ctx.tape, ctx.specs, grads, ctx.saved)  # type: ignore[attr-defined]
        # Under `create_graph=True` somebody will differentiate the gradients, and the tape is read once.
        if torch.is_grad_enabled():
            found = [_Once.apply(ctx.name, g.detach().requires_grad_()) for g in found]  # type: ignore[attr-defined, no-untyped-call]
        return (None, None, None, None, None, None, None, *found)


class _Once(torch.autograd.Function):
    """Gradients of a call, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, name: str, found: torch.Tensor) -> torch.Tensor:
        ctx.name = name  # type: ignore[attr-defined]
        return found.view_as(found)

    @staticmethod
    def backward(ctx: _Once, grad: torch.Tensor) -> tuple[object, ...]:
        raise NotSupportedError(
            f"the gradients of {ctx.name} cannot be differentiated again (create_graph=True): "  # type: ignore[attr-defined]
            "take both gradients inside the function, and return what you need of them"
        )


def _gradients(
    name: str,
    tape: Handle,
    specs: Sequence[Spec],
    grads: Sequence[DistributedTensor | None],
    saved: Sequence[Storage],
) -> list[DistributedTensor]:
    """Issue the backward of a call, which reads what the call has `saved`; return the gradients of its
    inputs.
    """
    home, line = tape.place, user_line()
    node = home.node
    relieve(node)
    given = [g._handle for g in grads if g is not None]
    made = [new_value(spec, home) for spec in specs]
    with node.lock:
        fields = [
            f"python::backward {name}",
            [OPERAND, *(None if g is None else OPERAND for g in grads)],
            {},
            [1] * len(made),
        ]
        number = template_number(node, msgpack.packb(fields), fields)
        words = [number, tape.ref, *(h.ref for h in given), *(h.ref for h in made)]
        order, stream = node.order, stream_at(home)
        if order is not None:
            for memory in saved:
                order.find(memory, stream)
        # It adds to gradients that the worker's Python holds.
        issue(words, made, [tape, *given], [tape.storage, *lent_by(home)], home, line)
        if order is not None:
            for memory in saved:
                order.read(memory, stream)
    return [wrap(DistributedTensor, handle) for handle in made]


# -- of the members of a mesh --------------------------------------------------------------------------------


class _Joined(torch.autograd.Function):
    """The members' results, as one tensor of the mesh: each gets its member's gradient."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, whole: DistributedTensor, *shards: torch.Tensor
    ) -> DistributedTensor:
        del ctx, shards
        return whole

    @staticmethod
    def backward(ctx: _Joined, grad: DistributedTensor) -> tuple[object, ...]:
        wanted: tuple[bool, ...] = ctx.needs_input_grad[1:]
        return (None, *[grad.member(k) if wants else None for k, wants in enumerate(wanted)])


def of_members(
    name: str,
    home: Residence,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    call: Callable[[Sequence[object], Mapping[str, object], Residence], object],
) -> object:
    """Call on each member of a mesh; join tensors to the mesh's, and list objects by member."""
    log = home.node
    assert isinstance(log, MeshLog)
    found = []
    for k, place in enumerate(log.members):

        def member(leaf: object, k: int = k) -> object:
            if isinstance(leaf, UnevenTensor):
                return leaf.member(k) if leaf.requires_grad and torch.is_grad_enabled() else leaf._shards[k]
            if not isinstance(leaf, DistributedTensor) or leaf._handle.place is not home:
                return leaf
            if leaf.requires_grad and torch.is_grad_enabled():
                return leaf.member(k)
            return wrap(DistributedTensor, member_of(leaf._handle, k))

        own, named = tree_map(member, (tuple(args), dict(kwargs)))
        found.append(call(own, named, log.session.places.residence(place, numbered=False)))
    return joined(found, partial(_joined, name, home))


def shards_of(found: Sequence[object]) -> list[DistributedTensor] | None:
    """Return the members' results as shards of one tensor; None where they differ in dtype or dimensions."""
    shards = [t for t in found if isinstance(t, DistributedTensor)]
    return shards if len(shards) == len(found) and len({(t.dtype, t.ndim) for t in shards}) == 1 else None


def _joined(name: str, home: Residence, found: list[object]) -> object:
    """Return the members' results as one: tensors as the mesh's, objects as a list by member."""
    if not isinstance(found[0], DistributedTensor):
        return found
    shards = shards_of(found)
    if shards is None:
        raise NotSupportedError(
            f"{name} returned tensors of other dtypes or dimensions on some members, or none: "
            "call it for each, x.member(k)"
        )
    whole = together(shards, home)
    return _Joined.apply(whole, *shards) if any(t.requires_grad for t in shards) else whole  # type: ignore[no-untyped-call]


class ByRank(list[object], Operand):
    """What the members of a mesh have returned, by rank, where that is no tensor of the mesh.

    An item is a `RemoteObject`, which `dr.fetch` brings, or a tensor at its member. An object of a class that
    is no plain value stays in its member's process. A function of `dr.spmd` that gets the list as an argument
    gets its own member's item.
    """

    @property
    def _handle(self) -> Handle:  # type: ignore[override]
        raise UsageError(
            "a list by rank goes to functions of dr.spmd, where each member gets its item: pass one item to "
            "a function of dr.remote"
        )


# A list by rank is opened where results are, as by `dr.fetch`.
torch.utils._pytree.register_pytree_node(
    ByRank, lambda ranks: ([*ranks], None), lambda items, _: [*items], serialized_type_name="dr.ByRank"
)
