"""Attention: a fused kernel where torch would choose one on the worker, and the formula elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Protocol, TypeAlias, TypedDict, cast

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import drop_frames
from ..log.handle import Residence
from ..log.mesh_log import workers_of
from ..log.spec import Spec, spec
from ..operators.common_place import common_place
from ..session.session import active_session
from ..tensors.subclasses import plain_operands
from ..tensors.tensor import DistributedTensor
from .formulas import ATTENTION
from .on_import import when_imported
from .whole import FLASH, whole

_aten = torch.ops.aten


class Attention(Protocol):
    """Computes attention, as `attention` below does, or returns NotImplemented."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        /,
        *,
        scale: float | None,
        enable_gqa: bool,
    ) -> object: ...


# These functions compute attention over DTensors: see mesh/torch_dtensor.py.
of_dtensors: list[Attention] = []


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> object:
    """Compute attention as the worker's device would.

    That is by its fused kernel where torch would choose it there, and by the formula elsewhere.
    """
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    args = query, key, value, attn_mask, dropout_p, is_causal
    options: _Options = {"scale": scale, "enable_gqa": enable_gqa}
    grad = torch.is_grad_enabled()
    specs: list[Spec] = []
    flags: list[bool] = []
    place: Residence | None = None
    try:
        for tensor in given:
            if type(tensor) is not DistributedTensor:
                return _of_others(given, args, options)
            handle = tensor._handle
            specs.append(handle.spec)
            flags.append(grad and tensor.requires_grad)
            if place is None:
                place = handle.place
            elif handle.place is not place:
                place = common_place(DistributedTensor, ATTENTION, (query, key, value), {})
        assert place is not None
        if place.has_cpu_kernels:
            return _on_a_cpu(specs, flags, args, options)
        return whole(ATTENTION, args, {**options}, place)
    except BaseException as error:
        drop_frames(error)
        raise


class _Options(TypedDict):
    scale: float | None
    enable_gqa: bool


_Args: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", float, bool]


def _of_others(given: Sequence[torch.Tensor], args: _Args, options: _Options) -> object:
    """Compute attention of tensors that are not all plain proxies: a user's class, DTensors, a tracer's."""
    plain = plain_operands(args)
    if plain is not args:
        return attention(*cast(_Args, plain), **options)
    for compute in of_dtensors:
        found = compute(*args, **options)
        if found is not NotImplemented:
            return found
    query, key, value, attn_mask, dropout_p, is_causal = args
    traced = [t for t in given if isinstance(t, (FakeTensor, FunctionalTensor))]
    if len(traced) != len(given):
        return ATTENTION.decompose(*args, **options)
    # A tracer has no handles. It is to choose as the calls that it traces would.
    place = active_session().places.meant(query.device)
    specs = [_hinted(t) for t in traced]
    wants = [torch.is_grad_enabled() and t.requires_grad for t in traced]
    if place.has_cpu_kernels:
        return _on_a_cpu(specs, wants, args, options)
    if _fits_efficient(place, specs, attn_mask is not None, options["enable_gqa"]):
        results = _aten._scaled_dot_product_efficient_attention.default(
            query, key, value, None, any(wants), dropout_p, is_causal, scale=options["scale"]
        )
        return results[0]
    return ATTENTION.decompose(*args, **options)


def _on_a_cpu(specs: Sequence[Spec], grads: Sequence[bool], args: _Args, options: _Options) -> object:
    """Call the kernel that torch chooses on a CPU, or the formula."""
    query, key, value, mask, dropout_p, is_causal = args
    enabled = torch._C._get_flash_sdp_enabled(), torch._C._get_math_sdp_enabled()
    scale, enable_gqa = options["scale"], options["enable_gqa"]
    rest = dropout_p, is_causal, scale, enable_gqa
    if _choice(tuple(specs), tuple(grads), mask is not None, *rest, enabled) != FLASH:
        return ATTENTION.decompose(*args, **options)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    # From torch 2.15 on there may be no batch. The kernel takes it as a batch of one.
    single = len(specs[0].size) == 3
    if single:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        while mask is not None and mask.dim() < 4:
            mask = mask.unsqueeze(0)
    result = _aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
    )[0]
    return result.squeeze(0) if single else result


def _hinted(tensor: torch.Tensor) -> Spec:
    """Return the metadata of a tracer's tensor. A size that varies counts as it was in the first call."""

    def hinted(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(n if type(n) is int else int(n.node.hint) for n in numbers)  # type: ignore[attr-defined]

    return spec(hinted(tensor.size()), hinted(tensor.stride()), 0, tensor.dtype)


def _fits_efficient(place: Residence, specs: Sequence[Spec], masked: bool, enable_gqa: bool) -> bool:
    """Whether a GPU's memory-efficient kernel takes a tracer's attention as it is.

    A graph has to name its kernel before the device sees it. This one takes float32 and both dtypes of 16
    bits, and most sizes, and all its results are tensors. Its rules are those of torch's own choice
    (`sdp_utils.cpp`).
    """
    dtype = specs[0].dtype
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    if place.kind != "cuda" or masked or enable_gqa:
        return False
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or any(len(s.size) != 4 for s in specs):
        return False
    if dtype is torch.bfloat16 and any(
        float(device.capability) < 8
        for worker in workers_of(place.node)
        for device in worker.welcome.devices
        if device.capability
    ):
        return False
    # The kernel reads 16 bytes at once along the last dimension.
    return (
        all(s.stride[-1] == 1 and s.size[-1] * dtype.itemsize % 16 == 0 for s in specs)
        and all(s.size[1] == specs[0].size[1] for s in specs)
        and specs[1].size[-1] == specs[0].size[-1]
        and 0 not in (*specs[0].size, *specs[1].size)
    )


@lru_cache(maxsize=1 << 12)
def _choice(
    specs: tuple[Spec, ...],
    grads: tuple[bool, ...],
    masked: bool,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    enabled: tuple[bool, bool],
) -> int:
    """Return which kernel torch chooses on a CPU.

    It looks at metadata only, so the local twins' memory is never touched. Of a tracer's fakes it would
    choose the formula.
    """
    with _disable_current_modes():
        twins = [torch.empty_strided(s.size, s.stride, dtype=s.dtype, device="cpu") for s in specs]
        for twin, grad in zip(twins, grads):
            twin.requires_grad_(grad)
        mask = twins[3] if masked else None
        query, key, value = twins[:3]
        return torch._fused_sdp_choice(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def install_flex_attention() -> None:
    """Let `flex_attention` take remote tensors, once a script imports it."""
    when_imported("torch.nn.attention.flex_attention", _take_flex_attention)


def _take_flex_attention(module: ModuleType) -> None:
    require = module._validate_device

    def allow(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "remote":
            require(query, key, value)

    module._validate_device = allow  # type: ignore[attr-defined]
    # torch would trace its backward pass with fake tensors that claim "remote", for which autograd has no
    # thread. The formula is differentiated as it runs. It computes all scores, as torch does uncompiled.
    operator = module.flex_attention_hop
    formula = sys.modules[operator.__class__.__module__].math_attention
    for key in (torch._C.DispatchKey.AutogradLazy, DistributedTensor):
        operator.py_impl(key)(formula)
