"""torch's switches of CUDA under take-over: workers follow those that `dr.config` has, the others are noted.

torch keeps each switch in C++, and its Python sets it by a function of `torch._C`. Some of its properties
hold that function themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from ..settings import config

_Setter = Callable[..., object]  # type: ignore[explicit-any]
_Getter = Callable[[], object]

# What sets a switch in `torch._C`, what reads it, and the name that `dr.config` has for it.
_FORWARDED = {
    "_set_float32_matmul_precision": ("_get_float32_matmul_precision", "float32_matmul_precision"),
    "_set_cublas_allow_tf32": ("_get_cublas_allow_tf32", "cuda_matmul_allow_tf32"),
    "_set_cublas_allow_fp16_reduced_precision_reduction": (
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "cuda_matmul_allow_fp16_reduced_precision_reduction",
    ),
    "_set_cublas_allow_bf16_reduced_precision_reduction": (
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "cuda_matmul_allow_bf16_reduced_precision_reduction",
    ),
    "_set_cudnn_allow_tf32": ("_get_cudnn_allow_tf32", "cudnn_allow_tf32"),
    "_set_cudnn_benchmark": ("_get_cudnn_benchmark", "cudnn_benchmark"),
    "_set_cudnn_deterministic": ("_get_cudnn_deterministic", "cudnn_deterministic"),
}
# Workers keep these as they were started, and people know the switch by the name that stands here.
_IGNORED = {
    "_set_cudnn_enabled": ("_get_cudnn_enabled", "torch.backends.cudnn.enabled"),
    "_cuda_set_cudnn_benchmark_limit": (
        "_cuda_get_cudnn_benchmark_limit",
        "torch.backends.cudnn.benchmark_limit",
    ),
    "_set_cublas_allow_fp16_accumulation": (
        "_get_cublas_allow_fp16_accumulation",
        "torch.backends.cuda.matmul.allow_fp16_accumulation",
    ),
    "_set_linalg_preferred_backend": (
        "_get_linalg_preferred_backend",
        "torch.backends.cuda.preferred_linalg_library",
    ),
    "_set_blas_preferred_backend": (
        "_get_blas_preferred_backend",
        "torch.backends.cuda.preferred_blas_library",
    ),
    "_set_math_sdp_allow_fp16_bf16_reduction": (
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
    ),
}


def switches(note: Callable[[str], None]) -> Iterator[tuple[object, str, object]]:
    """Return what is to be replaced: its owner, its name there, and what comes in its place.

    `note` hears of each switch that has changed and that no worker follows.
    """
    tellings: dict[str, tuple[str, Callable[[object], None]]] = {}
    for setter, (getter, name) in _FORWARDED.items():
        tellings[setter] = getter, functools.partial(_tell, name)
    for setter, (getter, name) in _IGNORED.items():
        tellings[setter] = getter, functools.partial(_ignore, note, name)
    made: dict[int, _Setter] = {}
    for setter, (getter, tell) in tellings.items():
        own, read = getattr(torch._C, setter, None), getattr(torch._C, getter, None)
        if own is not None and read is not None:
            made[id(own)] = _followed(own, read, tell)
            yield torch._C, setter, made[id(own)]
    if hasattr(torch._C, "_set_fp32_precision_setter"):
        yield torch._C, "_set_fp32_precision_setter", _precision(note)
    for prop in vars(type(torch.backends.cudnn)).values():
        held = getattr(prop, "setter", None)
        if id(held) in made:
            yield prop, "setter", made[id(held)]


def _ignore(note: Callable[[str], None], name: str, value: object) -> None:
    note(name)


def _tell(name: str, value: object) -> None:
    config(**{name: value})  # type: ignore[arg-type]


def _precision(note: Callable[[str], None]) -> _Setter:
    """Return what sets a precision by the names of a backend and of operators, as newer code does."""
    own, read = torch._C._set_fp32_precision_setter, torch._C._get_fp32_precision_getter

    @functools.wraps(own)
    def change(backend: str, op: str, precision: str) -> object:
        before = read(backend, op)
        done: object = own(backend, op, precision)
        # The others are about kernels of CPUs, and no script for CUDA means these.
        if backend in ("generic", "cuda") and read(backend, op) != before:
            note(f"torch.backends.{backend}.{op}.fp32_precision")
        return done

    return change


def _followed(own: _Setter, read: _Getter, tell: Callable[[object], None]) -> _Setter:
    @functools.wraps(own)
    def change(*args: object) -> object:
        before = read()
        done = own(*args)
        # Dynamo sets some to what they are.
        if read() != before:
            tell(args[0])
        return done

    return change
