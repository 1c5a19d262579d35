"""A composite as one instruction, with one more for its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_flatten, tree_map_only

from ..log.handle import Handle, Residence, new_value
from ..log.issue import issue
from ..log.line import user_line
from ..log.log import relieve
from ..log.spec import NO_TENSOR, Spec, spec_from_wire, spec_of
from ..operators.alias_info import Operator
from ..operators.ask_worker import PENDING, ask_specs, await_specs
from ..operators.common_place import common_place
from ..operators.dispatch import dispatch
from ..operators.proxies import AUTOCAST_KEY, wrap
from ..operators.signatures import template
from ..operators.transfer import upload
from ..session.stalls import before_wait
from ..tensors.tensor import DistributedTensor
from .formulas import ATTENTION, Kernel, by_formula, by_formula_again, draws, specs_by_formula
from .random import get_rng_state

# The kernels of attention have these numbers in torch.nn.attention.SDPBackend, from MATH on.
FLASH = 1
# This is torch's own order. A program that was started under `sdpa_kernel` has no business here.
_ORDER = tuple(torch._C._get_sdp_priority_order())


def recurrent(op: Operator) -> Kernel:
    """Return the kernel of one recurrent operator: one instruction forward, one backward."""

    def run(*args: object, **kwargs: object) -> object:
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        proxies = [t for t in tensors if type(t) is DistributedTensor]
        if not proxies:
            # They are a transform's, or functional tensors of a trace.
            return by_formula(op, args, kwargs)
        place = common_place(DistributedTensor, op, args, kwargs)
        given, sizes = args, args[1]
        if op._overloadname == "data" and not isinstance(sizes, DistributedTensor):
            # The batch sizes of a packed sequence stay on the CPU in torch, so they are sent along.
            assert isinstance(sizes, torch.Tensor)
            sent = wrap(DistributedTensor, upload(sizes, place, stay_on_cpu=True))
            args = (args[0], sent, *args[2:])
            proxies.append(sent)
        if len(proxies) != len(tensors):
            # The formula raises torch's own error, which says what is mixed. Or they are a transform's.
            return by_formula(op, given, kwargs)
        return whole(op, args, kwargs, place)

    return run


def on_accelerators(op: Operator) -> Kernel:
    """Return the kernel of a composite that has fused kernels on GPUs, and a formula on CPUs."""

    def run(first: torch.Tensor, *args: object, **kwargs: object) -> object:
        if type(first) is DistributedTensor and not first._handle.place.has_cpu_kernels:
            tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
            if _lower() is None and all(type(t) is DistributedTensor for t in tensors):
                args = (first, *args)
                return whole(op, args, kwargs, common_place(DistributedTensor, op, args, kwargs))
        return op.decompose(first, *args, **kwargs)

    return run


def _lower() -> torch.dtype | None:
    """Return the dtype of the autocast that a kernel below it must bring about itself, if there is one."""
    if torch._C._dispatch_tls_is_dispatch_key_excluded(AUTOCAST_KEY):
        return None
    return torch.get_autocast_dtype("remote")


def whole(op: Operator, args: Sequence[object], kwargs: dict[str, object], place: Residence) -> object:
    """Issue a composite as one instruction.

    Its worker records it if gradients are wanted or autocast is on.
    """
    tensors = [t for t in tree_flatten((list(args), kwargs))[0] if isinstance(t, torch.Tensor)]
    # Forward-mode derivatives need the formula.
    if torch.autograd.forward_ad._current_level >= 0:
        return by_formula(op, args, kwargs)
    lower = _lower()
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        with torch._C._AutoDispatchBelowAutograd():
            if lower is None and _chosen(op, place) is None:
                return dispatch(DistributedTensor, op, (), tuple(args), kwargs)
            handles = _record(op, args, kwargs, place, [False] * len(tensors), lower)[:-1]
            out: Sequence[object] = [wrap(DistributedTensor, h) for h in handles]
    else:
        out = _Whole.apply(op, _rebuilder(args, kwargs), place, lower, *tensors)  # type: ignore[no-untyped-call]
    return out[0] if len(op._schema.returns) == 1 else tuple(out)


def _call_of(
    op: Operator,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    flags: list[bool],
    lower: torch.dtype | None,
    chosen: tuple[int, ...] | None,
    specs: Sequence[Spec] | None,
) -> tuple[str, list[object]]:
    """Return the worker's function that runs a composite with autograd on, and what it is called with."""
    strides = None if specs is None else [list(spec.stride) for spec in specs]
    name = f"{op._schema.name}.{op._schema.overload_name or 'default'}"
    packed = [strides, name, flags, *args, *(kwargs.get(a.name) for a in op._schema.arguments[len(args) :])]
    if lower is not None:
        return "distruntime::record_autocast", [lower, *packed]
    if chosen is not None:
        return "distruntime::record_attention", [list(chosen), *packed]
    return "distruntime::record", packed


def _record(
    op: Operator,
    args: Sequence[object],
    kwargs: dict[str, object],
    place: Residence,
    flags: list[bool],
    lower: torch.dtype | None,
) -> list[Handle]:
    """Have a worker run a composite with autograd on; return the handles of its results, and the tape's last.

    `flags` says which tensors will want gradients. `lower` is the dtype for the worker's autocast of its own
    CPU.
    """
    node = place.node
    relieve(node)
    chosen = _chosen(op, place)
    # Fused attention leaves its result as its query lies, and only the worker knows which kernel it takes.
    as_found = op == ATTENTION and not place.has_cpu_kernels and not node.members
    if lower is None and not as_found:
        specs: list[Spec] | None = specs_by_formula(op, args, kwargs)
    else:
        flat, shape = tree_flatten((list(args), kwargs))
        key = (
            op,
            lower,
            chosen,
            *flags,
            str(shape),
            *(leaf._handle.spec if type(leaf) is DistributedTensor else leaf for leaf in flat),
        )
        known = place.signatures.get(key)
        specs = known if isinstance(known, list) else None
        if specs is None:
            before_wait(
                f"{op} (a device's kernel decides its results' {'strides' if as_found else 'dtypes'})"
            )
    function, packed = _call_of(op, args, kwargs, flags, lower, chosen, specs)
    count = len(op._schema.returns) + 1
    handles = [new_value(s, place) for s in (*(specs or [PENDING] * (count - 1)), NO_TENSOR)]
    operands = [t._handle for t in tree_flatten((list(args), kwargs))[0] if type(t) is DistributedTensor]
    random = draws(op, args)
    with node.lock:
        number, words = template(None, DistributedTensor, packed, {}, [1] * count, node, name=function)
        words = [number, *words, *(h.ref for h in handles)]
        if specs is not None:
            issue(words, handles, operands, (), place, user_line(), random)
            return handles
        request = ask_specs(words, handles, operands, (), place, user_line(), random)
    tensors = [*[True] * (count - 1), False]
    # A CPU lowers a layer as a whole or only its products, as its kernels (oneDNN's and others) can.
    place.signatures[key] = found = [
        spec_from_wire(fields) for fields in await_specs(request, tensors, node, op)[:-1]
    ]
    for handle, described in zip(handles, found):
        handle.spec = described
    return handles


_Arguments = tuple[list[object], dict[str, object]]


def _rebuilder(
    args: Sequence[object], kwargs: dict[str, object]
) -> Callable[[Sequence[torch.Tensor]], _Arguments]:
    """Return a function that puts other tensors in the place of those in the arguments.

    It holds none of them.
    """
    hollow = tree_map_only(torch.Tensor, lambda _: _HOLE, (list(args), dict(kwargs)))

    def rebuild(tensors: Sequence[torch.Tensor]) -> _Arguments:
        rest = iter(tensors)
        filled: _Arguments = tree_map_only(_Hole, lambda _: next(rest), hollow)
        return filled

    return rebuild


class _Hole:
    """Stands for a tensor in a remembered argument list."""


_HOLE = _Hole()


class _Context(FunctionCtx):
    op: Operator
    rebuild: Callable[[Sequence[torch.Tensor]], _Arguments]
    place: Residence
    lower: torch.dtype | None
    wanted: list[bool]
    tape: Handle
    # The place's random state before it drew, if it did.
    drew_from: DistributedTensor | None
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[DistributedTensor, ...]


class _Whole(torch.autograd.Function):
    """A composite recorded on its worker: autograd runs there, and this process holds the tape's ref."""

    @staticmethod
    def forward(
        ctx: _Context,
        op: Operator,
        rebuild: Callable[[Sequence[torch.Tensor]], _Arguments],
        place: Residence,
        lower: torch.dtype | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.op, ctx.rebuild, ctx.place, ctx.lower = op, rebuild, place, lower
        # The tape shares their memory, and version counters watch over it.
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.wanted = list(ctx.needs_input_grad[4:])
        args, kwargs = rebuild(tensors)
        ctx.drew_from = get_rng_state(place) if draws(op, args) else None
        handles = _record(op, args, kwargs, place, ctx.wanted, lower)
        ctx.tape = handles.pop()
        return tuple(wrap(DistributedTensor, h) for h in handles)

    @staticmethod
    def backward(ctx: _Context, *grads: DistributedTensor | None) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors
        # With create_graph the formula is differentiated, as the recorded backward has no graph here. And
        # `vmap` (`is_grads_batched`) goes over it with many gradients at once.
        if torch.is_grad_enabled() or not all(
            isinstance(g, DistributedTensor) for g in grads if g is not None
        ):
            outs = by_formula_again(ctx.op, *ctx.rebuild(tensors), ctx.place, ctx.lower, ctx.drew_from)
            pairs = [(o, g) for o, g in zip(outs, grads) if g is not None]
            wanted = [t for t, want in zip(tensors, ctx.wanted) if want]
            found = torch.autograd.grad(
                [o for o, _ in pairs],
                wanted,
                [g for _, g in pairs],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
            back = iter(found)
            return None, None, None, None, *(next(back) if want else None for want in ctx.wanted)
        place: Residence = ctx.place
        tape = wrap(DistributedTensor, ctx.tape)
        wanted = [t for t, want in zip(tensors, ctx.wanted) if want]
        number, words = template(
            None,
            DistributedTensor,
            [tape, *grads],
            {},
            [1] * len(wanted),
            place.node,
            name="distruntime::replay_backward",
        )
        handles = [new_value(s, place) for s in (_dense(t._handle.spec) for t in wanted)]
        # The tape shares the memory of the forward's operands. Nobody may write that, on whatever stream,
        # before this has read it.
        operands = [ctx.tape, *(g._handle for g in grads if g is not None), *(t._handle for t in tensors)]
        issue([number, *words, *(h.ref for h in handles)], handles, operands, (), place, user_line())
        made = iter(handles)
        return (
            None,
            None,
            None,
            None,
            *(wrap(DistributedTensor, next(made)) if want else None for want in ctx.wanted),
        )


def _dense(given: Spec) -> Spec:
    """Return the metadata that a gradient is given: dense, in the order of its tensor's strides."""
    return spec_of(torch.empty_like(given.meta()))


def _chosen(op: Operator, place: Residence) -> tuple[int, ...] | None:
    """Return the kernels of attention that this program lets a device choose from, the first one first.

    Return None where that is left to torch, and where the master chooses itself.
    """
    if op != ATTENTION or place.has_cpu_kernels:
        return None
    backends = torch.backends.cuda
    enabled = {
        0: backends.math_sdp_enabled(),
        FLASH: backends.flash_sdp_enabled(),
        2: backends.mem_efficient_sdp_enabled(),
        3: backends.cudnn_sdp_enabled(),
    }
    order = tuple(torch._C._get_sdp_priority_order())
    return (
        None if order == _ORDER and all(enabled.values()) else tuple(k for k in order if enabled.get(k, True))
    )
