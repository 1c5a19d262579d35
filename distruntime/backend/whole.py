"""A composite as one instruction, with one more for its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_flatten, tree_map_only

from ..errors import NotSupportedError, drop_frames
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
from ..operators.special import claimed
from ..operators.transfer import upload
from ..session.stalls import before_wait
from ..tensors.tensor import DistributedTensor
from .random import drawing_from, get_rng_state

_aten = torch.ops.aten
# torch calls each kernel with the arguments of its own operator, which no one type says.
Kernel = Callable[..., object]  # type: ignore[explicit-any]

# The kernels of attention have these numbers in torch.nn.attention.SDPBackend, from MATH on.
FLASH = 1
# This is torch's own order. A program that was started under `sdpa_kernel` has no business here.
_ORDER = tuple(torch._C._get_sdp_priority_order())
ATTENTION = _aten.scaled_dot_product_attention.default


def recurrent(op: Operator) -> Kernel:
    """Return the kernel of one recurrent operator: one instruction forward, one backward."""

    def run(*args: object, **kwargs: object) -> object:
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        proxies = [t for t in tensors if type(t) is DistributedTensor]
        if not proxies:
            # They are a transform's, or functional tensors of a trace.
            return _by_formula(op, args, kwargs)
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
            return _by_formula(op, given, kwargs)
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


def to_its_place(op: Operator) -> Kernel:
    """Return the kernel of `aten::to.device`: `torch.as_tensor` and `torch.asarray` ask for a device by it.

    A tensor that is there already is returned as it is, as torch promises. The formula compares devices in
    C++, where a proxy claims "lazy", so it would copy for "remote". The other overload, `to.dtype_layout`,
    has no such kernel: C++ calls it in every cross entropy, and a kernel in Python adds 7 us to 21 there.
    """
    formula = partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)

    def run(self: torch.Tensor, device: torch.device, *args: object, **kwargs: object) -> object:
        try:
            return formula(self, claimed(self, device), *args, **kwargs)
        except BaseException as error:
            drop_frames(error)
            raise

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
        return _by_formula(op, args, kwargs)
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


def _by_formula(op: Operator, args: Sequence[object], kwargs: dict[str, object]) -> object:
    """Compute a composite by torch's formula.

    `decompose` takes the one in Python, which `vmap` can take apart. It leaves out the dropout of recurrent
    layers (torch 2.13), so these take the one in C++.
    """
    if op is ATTENTION or not _draws(op, args):
        return op.decompose(*args, **kwargs)
    if op._overloadname == "data" and isinstance(args[1], DistributedTensor):
        # It reads the batch sizes in the memory of this process.
        args = (args[0], args[1].cpu(), *args[2:])
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


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
        specs: list[Spec] | None = _specs(op, args, kwargs)
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
    random = _draws(op, args)
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


def _draws(op: Operator, args: Sequence[object]) -> bool:
    """Whether a composite draws random numbers: it has a dropout, and it trains."""
    given = list(zip(op._schema.arguments, args))
    return any(a.name.startswith("dropout") and value for a, value in given) and not any(
        a.name == "train" and not value for a, value in given
    )


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
# Each signature has the metadata of its results.
_outputs: dict[tuple[object, ...], list[Spec]] = {}


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
        ctx.drew_from = get_rng_state(place) if _draws(op, args) else None
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
            outs = _computed_again(ctx, tensors)
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


def _computed_again(ctx: _Context, tensors: Sequence[DistributedTensor]) -> Sequence[torch.Tensor]:
    """Return a composite's results by its formula, with a graph and the draws of the first time."""
    if ctx.drew_from is not None and not ctx.place.has_cpu_kernels:
        raise NotSupportedError(
            f"{ctx.op}: the gradient of a gradient needs the same dropout again, and a fused kernel of "
            f"{ctx.place.place} does not tell it, nor would torch's own there. Leave dropout out, or put "
            "nn.Dropout between the layers"
        )
    drawing = nullcontext() if ctx.drew_from is None else drawing_from(ctx.drew_from, ctx.place)
    # `vmap` would refuse the draws. None of these tensors is one of many.
    with torch.enable_grad(), _autocast(ctx.lower), drawing, temporarily_clear_interpreter_stack():
        out = _by_formula(ctx.op, *ctx.rebuild(tensors))
    assert isinstance(out, (torch.Tensor, tuple, list))
    return [out] if isinstance(out, torch.Tensor) else list(out)


def _autocast(lower: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if lower is None else torch.autocast("remote", dtype=lower)


def _dense(given: Spec) -> Spec:
    """Return the metadata that a gradient is given: dense, in the order of its tensor's strides."""
    return spec_of(torch.empty_like(given.meta()))


def _specs(op: Operator, args: Sequence[object], kwargs: dict[str, object]) -> list[Spec]:
    """Return the metadata of a composite's results. Its formula runs on `meta`, once per signature."""
    flat, shape = tree_flatten((list(args), kwargs))
    key = (
        op,
        str(shape),
        tuple(leaf._handle.spec if type(leaf) is DistributedTensor else leaf for leaf in flat),
    )
    found = _outputs.get(key)
    if found is None:
        if len(_outputs) > 1 << 12:
            _outputs.clear()
        margs, mkwargs = tree_map_only(
            DistributedTensor, lambda t: t._handle.spec.meta(), (list(args), dict(kwargs))
        )
        if op._overloadname == "data":
            # The formula reads the batch sizes.
            batch_sizes = args[1]
            assert isinstance(batch_sizes, torch.Tensor)
            margs[1] = batch_sizes.cpu()
        out = op(*margs, **mkwargs)
        assert isinstance(out, (torch.Tensor, tuple, list))
        found = _outputs[key] = [
            spec_of(o.contiguous()) for o in ([out] if isinstance(out, torch.Tensor) else out)
        ]
    return found


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
