"""Operators that do not travel as they are: reads, and what a worker's tensors cannot be.

One dictionary, `SPECIAL`, to which `backend/install.py` adds the copies of `collectives/copies.py`; every
other operator travels by its own name. A function here returns `NotImplemented` where the operator may travel
after all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import NotSupportedError, of_caller
from ..log.handle import BARE, REMOTE_TYPES, Residence
from ..log.line import user_line
from ..session.session import active_session
from .ask_worker import ask
from .member_views import member, member_backward
from .proxies import wrap
from .signatures import Call
from .transfer import item, upload

Special = Callable[[type, torch._ops.OpOverload, Sequence[Any], dict[str, Any]], Any]


def _item(cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return item(args[0]._handle)


def _zeros(cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    # Its special key is lost below dispatch: hessian and jvp of grad would crash the process.
    return torch.ops.aten.zeros.default(*args, **kwargs)


def _refuse(reason: str) -> Special:
    def refuse(cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        raise NotSupportedError(f"{func}: {reason}")

    return refuse


def _pack_padded_sequence(
    cls: Any, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    # It runs as on a GPU: the lengths come from this process's CPU, and the batch sizes stay there.
    data, lengths, batch_first = args
    if type(lengths) is cls:
        kind = lengths.type().rpartition(".")[2].removesuffix("Tensor")
        raise of_caller(
            RuntimeError(
                "'lengths' argument should be a 1D CPU int64 tensor, but got "
                f"{lengths.dim()}D {lengths.device} {kind} tensor"
            )
        )
    if type(data) is not cls:
        return NotImplemented
    place: Residence = data._handle.place
    sent = wrap(cls, upload(lengths, place, stay_on_cpu=True))
    packed, _ = ask(Call(cls, func, (data, sent, batch_first), {}, place, None, user_line()))
    steps, batch = (data.size(1), data.size(0)) if batch_first else (data.size(0), data.size(1))
    twin = torch.empty((batch, steps) if batch_first else (steps, batch), device="cpu")
    return packed, func(twin, lengths, batch_first)[1]


def _histc(cls: Any, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    # Code that asks for a "cpu" device before it counts integers takes the other way here, which CPUs have no
    # kernel for.
    source = args[0]
    if type(source) is not cls or source.dtype.is_floating_point or not source._handle.place.on_cpu:
        return NotImplemented
    return func(source.to(torch.float64), *args[1:], **kwargs).to(source.dtype)


def _same_size(cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    # Autograd asks so of a local tensor and a remote one.
    return bool(args[0].size() == args[1].size())


def _no(cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return False


def _detached(cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    # A value on a worker is in no graph. The worker's own `detach_` would refuse what is a view there, as
    # uploads may be (`torch.tensor` below autograd ends so).
    return args[0]


def _decompose(cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    # Below autograd torch hands composites over whole: in inference mode, and in what runs inside a dispatch
    # (a signal's handler, a finalizer). A whole composite would look at metadata where it is to move values,
    # or say nothing of results that share memory.
    return func.decompose(*args, **kwargs)


def _tensor_split(cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    # It comes here in inference mode only. A tensor says where to cut, and torch wants it on the CPU.
    return func.decompose(*args, **kwargs) if "tensor" in func._overloadname else NotImplemented


def _by_a_number(cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    # A number decides whether it returns its operand, or how large its result is, and is no part of a call's
    # signature. Such overloads come here in inference mode only. The formulas in Python copy, or round
    # otherwise.
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite):
        return NotImplemented
    return func._op_dk(composite, *args, **kwargs)


def _make_dual(cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    # It comes here in inference mode only. There nothing has a tangent, and torch returns the primal alone.
    return torch.ops.aten.alias.default(args[0])


def _attention_backward(
    cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    # A function of the user's may give no gradient. Then the kernels give none, and no meta kernel says so.
    return (None,) * len(func._schema.returns) if args[0] is None else NotImplemented


def claimed(source: torch.Tensor, device: torch.device) -> torch.device:
    """Return what proxies at a remote device claim in C++, or a device of this process as it is.

    What is on a mesh stays there for a bare "remote": see collectives/copies.py.
    """
    if device.type not in REMOTE_TYPES:
        return device
    places = active_session().places
    if (device.index is None or device.type == BARE) and source.device.type in REMOTE_TYPES:
        here = places.meant(source.device)
        if here.node.members:
            return here.lazy
    return places.meant(device).lazy


def _to(cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    args = [claimed(args[0], one) if isinstance(one, torch.device) else one for one in args]
    if isinstance(kwargs.get("device"), torch.device):
        kwargs = {**kwargs, "device": claimed(args[0], kwargs["device"])}
    return func.decompose(*args, **kwargs)


def ctc_loss(cls: Any, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute the loss with the lengths as numbers where they are local: a GPU takes them from any device.

    With lengths that are tensors, the formula mixes them with remote results.
    """
    log_probs, targets, *lengths = args[:4]
    if func._overloadname != "Tensor" or any(type(t) is cls for t in lengths):
        return func.decompose(*args, **kwargs)
    # A single sequence has lengths without a dimension.
    numbers = [t.reshape(-1).tolist() for t in lengths]
    return torch.ops.aten.ctc_loss.IntList(log_probs, targets, *numbers, *args[4:], **kwargs)


def _scalars(cls: Any, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    # The factors of a list of tensors may stand in a tensor. It is one of this process, also beside GPUs.
    if func._overloadname != "Tensor" or type(args[3]) is cls:
        return NotImplemented
    factors, dims, length = args[3], args[3].dim(), len(args[0])
    words = ""
    if not factors.is_contiguous():
        words = "Expected scalars to be contiguous."
    elif dims != 1:
        words = f"Expected packed scalar Tensor to be of dimension 1. Got {dims} instead."
    elif len(factors) != length:
        words = (
            f"Expected length of scalars to match input of length {length} but got {len(factors)} instead."
        )
    if words:
        raise of_caller(RuntimeError(words))
    packet = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::"))
    return packet.ScalarList(*args[:3], factors.tolist())


SPECIAL: dict[str, Special] = {
    "aten::ctc_loss": ctc_loss,
    "aten::to": _to,
    "aten::_has_compatible_shallow_copy_type": _decompose,
    **dict.fromkeys(
        (
            *("aten::_foreach_addcmul", "aten::_foreach_addcmul_"),
            *("aten::_foreach_addcdiv", "aten::_foreach_addcdiv_"),
        ),
        _scalars,
    ),
    **dict.fromkeys(("aten::atleast_1d", "aten::atleast_2d", "aten::atleast_3d"), _decompose),
    # Its meta kernel promises other bags than its kernel returns.
    "aten::embedding_bag": _decompose,
    "aten::tensor_split": _tensor_split,
    **dict.fromkeys(
        ("aten::alpha_dropout", "aten::feature_dropout", "aten::feature_alpha_dropout"), _decompose
    ),
    **dict.fromkeys(
        (
            *("aten::dropout", "aten::upsample_linear1d", "aten::upsample_bilinear2d"),
            *("aten::upsample_nearest1d", "aten::upsample_nearest2d", "aten::upsample_nearest3d"),
            *("aten::_upsample_nearest_exact1d", "aten::_upsample_nearest_exact2d"),
            *("aten::_upsample_nearest_exact3d", "aten::upsample_trilinear3d", "aten::upsample_bicubic2d"),
            *("aten::_upsample_bilinear2d_aa", "aten::_upsample_bicubic2d_aa"),
            "aten::_upsample_lanczos2d_aa",
        ),
        _by_a_number,
    ),
    "aten::_local_scalar_dense": _item,
    "aten::_efficientzerotensor": _zeros,
    "aten::_pack_padded_sequence": _pack_padded_sequence,
    "aten::histc": _histc,
    "aten::_make_dual": _make_dual,
    **dict.fromkeys(
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            "aten::_scaled_dot_product_flash_attention_backward",
            "aten::_scaled_dot_product_efficient_attention_backward",
            "aten::_scaled_dot_product_cudnn_attention_backward",
        ),
        _attention_backward,
    ),
    "aten::is_pinned": _no,
    **dict.fromkeys(("aten::is_same_size", "aten::_has_same_storage_numel"), _same_size),
    # `nn.TransformerEncoder` asks whether it may make a nested tensor, and pads if it may not.
    "aten::_nested_tensor_from_mask_left_aligned": _no,
    "aten::detach_": _detached,
    "aten::select": member,
    "aten::select_backward": member_backward,
    **dict.fromkeys(
        ("aten::quantize_per_tensor", "aten::quantize_per_tensor_dynamic", "aten::quantize_per_channel"),
        _refuse(
            "the result would be quantized; remote tensors are strided only. "
            "Fetch the operand and quantize it here"
        ),
    ),
    "aten::_pin_memory": _refuse("pinned memory is this process's; a remote tensor has none"),
}
