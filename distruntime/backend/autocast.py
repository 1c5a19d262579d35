"""`torch.autocast("remote")`: on a place, what torch's own autocast does on a device of its kind.

Proxies carry the key AutocastPrivateUse1, which torch looks at only while autocast of "remote" is on. torch's
dispatcher tells which operators are listed, since the kernels of every device's autocast are registered
there. It cannot tell what each of them does, so that stands in the table below. As in torch, an operator that
is not listed runs in the dtypes that it is given, and the parts of one that is listed run unlisted.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeGuard

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ..errors import drop_frames
from ..log.handle import REMOTE_TYPES, Residence, next_ref
from ..operators.alias_info import Operator, tensors_of
from ..operators.common_place import common_place
from ..operators.proxies import AUTOCAST, AUTOCAST_KEY
from ..session.session import active, active_session
from ..tensors.sparse import SparseTensor
from ..tensors.subclasses import plain_operands
from ..tensors.tensor import DistributedTensor
from .formulas import Kernel
from .fused import RECURRENT
from .whole import whole

_aten = torch.ops.aten
_BELOW = torch._C._dispatch_keyset_full_after(AUTOCAST_KEY)
_BANNED = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
# Dynamo and AOTAutograd trace with these in the places of proxies.
_STAND_INS = (FakeTensor, FunctionalTensor)
_CASTABLE = (*_STAND_INS, SparseTensor)

Policy = Callable[[Sequence[object], dict[str, object]], object]

# -- what torch does with the operators that it lists --------------------------------------------------------

# Each kind of device has the dispatcher's key of its own autocast.
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}
# Accelerators from outside of torch register their autocast in the worker's process, where this one cannot
# look. Theirs is taken to be CUDA's, from which such packages begin.
OTHER = "cuda"

# These run in autocast's dtype, on CPUs and accelerators.
_LOWERED = frozenset(
    """
    _addmm_activation _convolution _cudnn_rnn _mps_convolution _native_multi_head_attention
    _scaled_dot_product_flash_attention
    _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d
    conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution cudnn_convolution
    cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul
    mkldnn_rnn_layer mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
    """.split()
)
# These run in the widest dtype among their operands.
_PROMOTED_ON_CPUS = frozenset("cat index_copy stack".split())
_PROMOTED = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot".split()
)


def policy(kind: str, op: Operator) -> Callable[[Operator], Policy]:
    """Return what a listed operator does on devices of a kind: what the table says, or else float32.

    torch lists most operators for float32.
    """
    name = op._schema.name.removeprefix("aten::")
    if kind == "mps" and name == "conv_transpose3d":
        return in_float32
    if name in _LOWERED:
        return lowered
    if name in (_PROMOTED_ON_CPUS if kind == "cpu" else _PROMOTED):
        return promoted
    if kind != "cpu" and name == "binary_cross_entropy":
        return banned
    if kind != "cpu" and name == "norm":
        return appended
    if kind not in ("cpu", "mps") and any(a.name == "dtype" for a in op._schema.arguments):
        return with_float32_result
    return in_float32


def listed(kind: str) -> dict[Operator, Callable[[Operator], Policy]]:
    """Return the operators that torch's autocast changes on devices of a kind, each with its policy."""
    found = {}
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(KEYS[kind]):
        namespace, _, rest = name.partition("::")
        if namespace == "aten":
            base, _, overload = rest.partition(".")
            op = getattr(getattr(_aten, base), overload or "default")
            found[op] = policy(kind, op)
    return found


# -- policies ------------------------------------------------------------------------------------------------


def lowered(op: Operator) -> Policy:
    """Cast what can be cast to autocast's dtype."""

    def run(args: Sequence[object], kwargs: dict[str, object]) -> object:
        return _cast_call(op, args, kwargs, torch.get_autocast_dtype("remote"))

    return run


def in_float32(op: Operator) -> Policy:
    """Cast what can be cast to float32."""

    def run(args: Sequence[object], kwargs: dict[str, object]) -> object:
        return _cast_call(op, args, kwargs, torch.float32)

    return run


def promoted(op: Operator) -> Policy:
    """Cast what can be cast to float32 if one operand has it, else to autocast's dtype.

    As in torch, optional operands have no say.
    """
    counted = [str(a.type) in ("Tensor", "List[Tensor]") for a in op._schema.arguments]

    def run(args: Sequence[object], kwargs: dict[str, object]) -> object:
        dtype = lower = torch.get_autocast_dtype("remote")
        for t in _remotes(a for a, counts in zip(args, counted) if counts):
            have = t.dtype
            if not have.is_floating_point or have is torch.float64:
                continue
            if dtype is torch.float32 or have is torch.float32:
                dtype = torch.float32
            elif have is not lower:
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
        return _cast_call(op, args, kwargs, dtype)

    return run


def with_float32_result(op: Operator) -> Policy:
    """Have the result in float32, unless the caller gives a dtype."""
    position = [a.name for a in op._schema.arguments].index("dtype")

    def run(args: Sequence[object], kwargs: dict[str, object]) -> object:
        if _eligible(args[0]):
            if len(args) <= position:
                if kwargs.get("dtype") is None:
                    kwargs = {**kwargs, "dtype": torch.float32}
            elif args[position] is None:
                args = (*args[:position], torch.float32, *args[position + 1 :])
        return _call(op, args, kwargs)

    return run


def appended(op: Operator) -> Policy:
    """Call the overload that takes the result's dtype. `norm` has overloads with it and without."""
    packet = getattr(_aten, op._schema.name.removeprefix("aten::"))
    typed = getattr(
        packet, "ScalarOpt_dtype" if op._overloadname == "Scalar" else op._overloadname + "_dtype"
    )
    defaults = [a.default_value for a in op._schema.arguments]

    def run(args: Sequence[object], kwargs: dict[str, object]) -> object:
        first = args[0]
        assert isinstance(first, torch.Tensor)
        dtype = torch.float32 if _eligible(first) else first.dtype
        return _call(typed, (*args, *defaults[len(args) :]), {"dtype": dtype})

    return run


def banned(op: Operator) -> Policy:
    """Let torch's own kernel refuse. It does not look at its operands."""
    return lambda args, kwargs: op.redispatch(_BANNED, *args, **kwargs)


def by_worker(op: Operator) -> Policy:
    """Have a kernel that calls listed operators from within run under the worker's own autocast.

    It serves code without gradients. A graph that is traced runs outside of autocast, so there it is lowered.
    """
    lower = lowered(op)

    def run(args: Sequence[object], kwargs: dict[str, object]) -> object:
        kinds = set(map(type, tensors_of(args, kwargs)))
        if not kinds.isdisjoint(_STAND_INS):
            return lower(args, kwargs)
        if torch.is_grad_enabled() or kinds - {DistributedTensor}:
            return _call(op, args, kwargs)
        return whole(op, args, kwargs, common_place(DistributedTensor, op, args, kwargs))

    return run


def taken_apart(op: Operator) -> Policy:
    """Take a composite apart, so that autocast sees what it is made of."""
    formula = functools.partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)
    return lambda args, kwargs: formula(*args, **kwargs)


def _call(op: Operator, args: Sequence[object], kwargs: dict[str, object]) -> object:
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        return op(*args, **kwargs)


def _cast_call(op: Operator, args: Sequence[object], kwargs: dict[str, object], dtype: torch.dtype) -> object:
    return _call(op, [_cast(a, dtype) for a in args], {k: _cast(a, dtype) for k, a in kwargs.items()})


# -- casts ---------------------------------------------------------------------------------------------------

# Each parameter (by id) and dtype has the parameter and its cast, until the outermost region of any thread
# ends, as in torch. Unlike torch's cache, this one knows the dtype: in torch's, an inner region with another
# dtype gets the outer region's casts.
_casts: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
# The proxies' own method looks for places first, which takes 2.6 us.
_to = torch.Tensor.to


def _is_remote(value: object) -> TypeGuard[torch.Tensor]:
    if type(value) is DistributedTensor:
        return True
    return isinstance(value, _CASTABLE) and value.device.type in REMOTE_TYPES


def _eligible(value: object) -> bool:
    if not _is_remote(value):
        return False
    dtype = value.dtype
    return dtype.is_floating_point and dtype is not torch.float64


def _cast(value: object, dtype: torch.dtype) -> object:
    if not _is_remote(value):
        if type(value) is list or type(value) is tuple:
            return [_cast(item, dtype) for item in value]
        return value
    have = value.dtype
    if have is dtype or have is torch.float64 or not have.is_floating_point:
        return value
    if (
        have is torch.float32
        and value.requires_grad
        and value.is_leaf
        and torch.is_autocast_cache_enabled()
        and not value._is_view()
        and not torch.is_inference_mode_enabled()
    ):
        return _cast_once(value, dtype)
    return _to(value, dtype)


def _cast_once(leaf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = _casts.get((id(leaf), dtype))
    if cast is None:
        # Code under `no_grad` may make a cast that code which wants gradients meets later.
        with torch.enable_grad():
            # The leaf is held, so that no other tensor gets its id.
            cast = _casts[id(leaf), dtype] = leaf, _to(leaf, dtype)
    return cast[1]


_clear = torch.clear_autocast_cache


def clear_autocast_cache() -> None:
    """Drop torch's casts and those of remote parameters.

    `torch.autocast` calls it at the end of an outermost region.
    """
    _casts.clear()
    _clear()


# -- kernels -------------------------------------------------------------------------------------------------


def _remotes(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if _is_remote(value):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _remotes(value)


def _place(args: Sequence[object]) -> Residence | None:
    for value in _remotes(args):
        if type(value) is DistributedTensor:
            return value._handle.place
        return active_session().places.meant(value.device)
    return None


def _kernel(op: Operator, policies: dict[str, Policy]) -> Kernel:
    def run(keys: torch._C.DispatchKeySet, *args: object, **kwargs: object) -> object:
        args = tuple(plain_operands(args))
        place = _place(args)
        kind = None if place is None else place.kind
        apply = None if kind is None else policies.get(kind if kind in KEYS else OTHER)
        try:
            if apply is None:
                # It is not listed for this device. Its parts may be.
                return op.redispatch(keys & _BELOW, *args, **kwargs)
            return apply(args, kwargs)
        except BaseException as error:
            drop_frames(error)
            raise

    return run


# -- regions of other devices --------------------------------------------------------------------------------

_enter, _exit = torch.autocast.__enter__, torch.autocast.__exit__
# So many refs were given out within regions of "remote", and to `_issued` itself.
_within = [0]


def _issued() -> int:
    """Return a number that grows with each remote value that is made elsewhere."""
    _within[0] += 1
    return next_ref() - _within[0]


@functools.wraps(_enter)
def _entered(self: torch.autocast) -> object:
    if self._enabled and active and active[0].closed is None:
        self._issued = _issued()  # type: ignore[attr-defined]
    return _enter(self)  # type: ignore[no-untyped-call]


@functools.wraps(_exit)
def _exited(
    self: torch.autocast, kind: type[BaseException] | None, error: BaseException | None, trace: object
) -> object:
    done = _exit(self, kind, error, trace)
    before = self.__dict__.pop("_issued", None)
    if before is None or not active or active[0].closed is not None:
        return done
    if self.device == "remote":
        _within[0] += max(_issued() - before, 0)
    elif kind is None and _issued() > before and not torch.is_autocast_enabled("remote"):
        warnings.warn(
            f"torch.autocast({self.device!r}) was on around remote operations, and does nothing to them: "
            "they ran in the dtypes of their operands. "
            f'Write torch.autocast("remote", dtype={self.fast_dtype})',
            stacklevel=2,
        )
    return done


# Not every device lists these composites. Each lists the products that they are made of. In inference mode
# they would reach their worker whole, and so would einsum without gradients: nothing is lowered there.
_OF_PRODUCTS = (
    *(_aten.einsum.default, _aten.tensordot.default, _aten.inner.default, _aten.chain_matmul.default),
    *(_aten.linalg_multi_dot.default, _aten.linalg_matrix_power.default, _aten.matrix_power.default),
    *(_aten.cov.default, _aten.corrcoef.default, _aten.gru_cell.default, _aten.lstm_cell.default),
    *(_aten.rnn_tanh_cell.default, _aten.rnn_relu_cell.default),
)


def install_autocast(library: torch.library.Library, fallback: torch.library.Library) -> None:
    """Register the kernels of "remote" for each operator that torch lists for a kind of device.

    Every other operator falls through.
    """
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    columns = {kind: listed(kind) for kind in KEYS}
    for kind in columns.keys() - {"cpu"}:
        column = columns[kind]
        # On a GPU recurrent layers are lowered as a whole, since cuDNN's kernel is listed. On a CPU they run
        # under the worker's own autocast.
        column.update({op: lowered for op in RECURRENT if op not in column})
        # Where autocast is on, torch's Python takes this fused kernel on CPUs only; on proxies it cannot tell
        # (up to torch 2.13).
        column[_aten._native_multi_head_attention.default] = lowered
    columns["cpu"][_aten._transformer_encoder_layer_fwd.default] = by_worker
    for column in columns.values():
        for op in _OF_PRODUCTS:
            column.setdefault(op, taken_apart)
    for op in dict.fromkeys(op for column in columns.values() for op in column):
        policies = {kind: column[op](op) for kind, column in columns.items() if op in column}
        library.impl(op, _kernel(op, policies), "AutocastPrivateUse1", with_keyset=True)
    torch.clear_autocast_cache = clear_autocast_cache
    torch.autocast.__enter__ = _entered  # type: ignore[method-assign]
    torch.autocast.__exit__ = _exited  # type: ignore[method-assign]
