"""Autocast's operators, one by one: torch's list for CPUs on a CPU place, and CUDA's on a GPU place."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import distruntime as dr
from agree import REMOTE, Copier, check, quietly, seed
from autocast_samples import calls, recast
from distruntime.backend import autocast
from distruntime.backend.fused import RECURRENT
from fewer import fewer

# It warns about packages that it would like and does not need.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.autocast_test_lists import AutocastTestLists, TestAutocast

HALF, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32


# These overloads take names of dimensions (torch 2.11), which remote tensors do not have.
NAMED = re.compile(r"(?i)dimname|names_")


def registered(backend: str) -> list[str]:
    """Return what torch's dispatcher has for a key."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key(backend)
    return sorted(name for name in found if name.startswith("aten::") and not NAMED.search(name))


def operator(name: str) -> Any:
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


# The lists


def test_exactly_the_listed_operators_have_kernels(session: object) -> None:
    more = {
        op._schema.name + "." * bool(op._schema.overload_name) + op._schema.overload_name
        for op in (*RECURRENT, *autocast._OF_PRODUCTS)
    }
    # This one calls listed operators from within.
    more |= {"aten::_transformer_encoder_layer_fwd"}
    assert set(registered("AutocastPrivateUse1")) == {
        *(name for key in autocast.KEYS.values() for name in registered(key)),
        *more,
    }


MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": autocast.lowered,
    "AT_FORALL_FP32": autocast.in_float32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": autocast.with_float32_result,
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": autocast.appended,
    "AT_FORALL_PROMOTE": autocast.promoted,
}
# Listed in C++ only, for CUDA; the last two are in torch 2.15 or in builds for CUDA.
UNNAMED = {
    "aten::binary_cross_entropy": autocast.banned,
    "aten::cudnn_convolution": autocast.lowered,
    "aten::cudnn_convolution_transpose": autocast.lowered,
    "aten::_cudnn_rnn": autocast.lowered,
    "aten::linalg_matrix_sqrth": autocast.in_float32,
}


def test_the_policies_are_those_of_torchs_header() -> None:
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text(
        encoding="utf-8"
    )
    expected: dict[str, Any] = {}
    for macro, policy in MACROS.items():
        body = re.search(rf"^#define {macro}\(_\)((?:.*\\\n)*.*)", header, re.M)
        assert body is not None, f"{macro} is not in this torch's header"
        for entry in re.findall(r'"(norm\.\w+)"|_\((\w+)(?:, (\w+))?\)', body[1]):
            quoted, name, overload = entry
            expected[f"aten::{quoted or name}{overload and '.' + overload}"] = policy
    expected = {name: policy for name, policy in expected.items() if not NAMED.search(name)}
    ours = {name: autocast.policy("cuda", operator(name)) for name in registered("AutocastCUDA")}
    assert set(expected) - set(ours) == set(), "in the header and not in the dispatcher"
    assert {
        name: policy
        for name, policy in ours.items()
        if name not in expected and UNNAMED.get(name) is not policy
    } == {}
    assert {name: (policy, ours[name]) for name, policy in expected.items() if ours[name] is not policy} == {}


# CPUs: here against there

# Internal to CPUs, and out of reach without autocast too: one reads memory, the other leaves a result
# undefined. `grid_sample` and `nn.LSTM` do not call them on proxies.
OUT_OF_REACH = {"aten::_grid_sampler_2d_cpu_fallback", "aten::mkldnn_rnn_layer"}


@pytest.mark.parametrize(
    "name",
    fewer(
        [name for name in registered("AutocastCPU") if name not in OUT_OF_REACH],
        5,
        "each operator has the policy that torch's header gives it, which another test compares",
    ),
)
def test_cpu_operators_give_what_they_give_here(session: object, name: str) -> None:
    def run(device: str, function: Callable[..., Any], sample: Any) -> Any:
        args, kwargs = Copier(device)(sample)
        seed(0)
        with torch.autocast(device, dtype=BFLOAT16):
            return function(*args, **kwargs)

    given = calls(name)
    for dtype, every in ((FLOAT32, 1), (BFLOAT16, 1), (BFLOAT16, 2)):
        worked = False
        for function, args, kwargs in given:
            sides = [
                functools.partial(run, device, function, recast((args, kwargs), dtype, every))
                for device in ("cpu", REMOTE)
            ]
            worked |= quietly(functools.partial(check, *sides))
        assert worked, "no sample call of it works locally"


# Accelerators: torch's own kernels for them, on tensors that claim to be there and are `meta` inside


class Claims(torch.Tensor):
    """A tensor that C++ takes for one on an accelerator, and that has only metadata."""

    twin: torch.Tensor
    kind = "cuda"
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, twin: torch.Tensor) -> Any:
        out = torch.Tensor._make_wrapper_subclass(
            cls, twin.size(), strides=twin.stride(), dtype=twin.dtype, device=f"{cls.kind}:0"
        )
        out.twin = twin  # type: ignore[attr-defined]
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda t: t.twin, (args, kwargs or {}))
        return tree_map_only(
            torch.Tensor,
            cls.of,
            func(*args, **({**kwargs, "device": "meta"} if "device" in kwargs else kwargs)),
        )


def on_a_claimed_gpu(function: Callable[..., Any], sample: Any) -> Any:
    args, kwargs = tree_map_only(torch.Tensor, lambda t: Claims.of(t.detach().to("meta")), sample)
    # `torch.autocast("cuda")` declines without a GPU.
    torch.set_autocast_enabled(Claims.kind, True)
    try:
        return function(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(Claims.kind, False)


def on_a_simulated_gpu(function: Callable[..., Any], sample: Any) -> Any:
    args, kwargs = Copier(REMOTE)(sample)
    with torch.autocast(REMOTE, dtype=HALF):
        return function(*args, **kwargs)


def dtypes_or_error(run: Callable[..., Any], function: Callable[..., Any], sample: Any) -> Any:
    try:
        with torch.no_grad():
            return [
                t.dtype if isinstance(t, torch.Tensor) else type(t)
                for t in tree_leaves(quietly(lambda: run(function, sample)))
            ]
    except Exception as error:
        # It may be of any class, and is compared with the other side's.
        text = str(error)
        return type(error).__name__, text if "to autocast" in text or "at::autocast" in text else ""


NEED_A_GPU = {
    # These have neither a meta kernel nor one for CPUs.
    "aten::_cudnn_rnn",
    "aten::_mps_convolution",
    "aten::batch_norm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_lstm_cell",
    "aten::cudnn_convolution",
    "aten::cudnn_convolution_transpose",
    # These ask the GPU something first (the convolutions in torch 2.11). The lists below have the rest.
    "aten::_convolution",
    "aten::_convolution.deprecated",
    "aten::cosine_similarity",
    "aten::gru_cell",
    "aten::scaled_dot_product_attention",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", fewer(["cuda", "xpu", "mps"], 3, "another kind of accelerator, 5 s"))
def test_operators_give_the_dtypes_that_they_give_there(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    fresh_session(world_size=1, simulate_cuda=1)
    monkeypatch.setattr(Claims, "kind", kind)
    place = autocast._place

    def there(args: Any) -> Any:
        return None if place(args) is None else SimpleNamespace(kind=kind)

    monkeypatch.setattr(autocast, "_place", there)
    different, nowhere = [], []
    for name in registered(autocast.KEYS[kind]):
        if name in NEED_A_GPU:
            continue
        outcomes = []
        for function, args, kwargs in calls(name):
            for dtype, every in ((FLOAT32, 1), (HALF, 1), (HALF, 2), (torch.float64, 1), (BFLOAT16, 3)):
                sample = recast((args, kwargs), dtype, every)
                claimed, got = (
                    dtypes_or_error(on_a_claimed_gpu, function, sample),
                    dtypes_or_error(on_a_simulated_gpu, function, sample),
                )
                outcomes.append(got)
                if claimed != got:
                    different.append((name, dtype, every, claimed, got))
        if (
            not any(isinstance(outcome, list) for outcome in outcomes)
            and name != "aten::binary_cross_entropy"
        ):
            nowhere.append(name)
    assert different == [] and nowhere == []
    dr.synchronize()


@pytest.mark.timeout(300)
def test_gpu_operators_do_what_torchs_own_lists_promise(fresh_session: Callable[..., Any]) -> None:
    """The body of torch's test of its CUDA autocast.

    It compares dtypes, for functions and methods alike, and the very bits with those of casting by hand.
    """
    fresh_session(world_size=1, simulate_cuda=1)
    lists, body = AutocastTestLists(REMOTE), TestAutocast()._run_autocast_outofplace
    run = 0
    for name, dtype, module in (
        ("torch_fp16", HALF, torch),
        ("torch_fp32", FLOAT32, torch),
        ("torch_need_autocast_promote", FLOAT32, torch),
        ("torch_expect_builtin_promote", FLOAT32, torch),
        ("methods_expect_builtin_promote", FLOAT32, None),
        ("nn_fp16", HALF, torch._C._nn),
        ("nn_fp32", FLOAT32, torch._C._nn),
        ("linalg_fp16", HALF, torch._C._linalg),  # type: ignore[attr-defined]
        ("methods_fp16", HALF, None),
        ("methods_fp32", FLOAT32, None),
    ):
        for op, args, *rest in getattr(lists, name):
            # There is no such kernel on a CPU, and einsum's entry does not fit its operands.
            if op.startswith("cudnn_") or isinstance(args, str):
                continue
            options: dict[str, Any] = (
                {"out_type": rest[0]} if "builtin" in name else {"add_kwargs": rest[0]} if rest else {}
            )
            quietly(lambda: body(op, args, dtype, REMOTE, module=module, amp_dtype=HALF, **options))  # noqa: B023
            run += 1
    assert run > 100
    for op, args, module in lists.banned:
        with torch.autocast(REMOTE), pytest.raises(RuntimeError, match="unsafe to autocast"):
            getattr(module, op)(*args)


def test_each_place_has_its_own_list(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1, simulate_cuda=1)
    low = {}
    for device in ("cpu", "cuda:0"):
        with dr.device(device):
            low[device] = torch.rand(3, 3, dtype=BFLOAT16).to(REMOTE)
    cpu, gpu = low["cpu"], low["cuda:0"]
    assert (cpu.place.local_device, gpu.place.local_device) == ("cpu", "cuda:0")
    with torch.autocast(REMOTE, dtype=BFLOAT16):
        assert [t.exp().dtype for t in (cpu, gpu)] == [BFLOAT16, FLOAT32]
        assert [torch.nn.functional.pad(t, (1, 1), mode="reflect").dtype for t in (cpu, gpu)] == [
            FLOAT32,
            BFLOAT16,
        ]
        assert [torch.nn.functional.mse_loss(t, t).dtype for t in (cpu, gpu)] == [FLOAT32, FLOAT32]
        assert [torch.einsum("ij,jk", t.float(), t.float()).dtype for t in (cpu, gpu)] == [
            BFLOAT16,
            BFLOAT16,
        ]  # here by its parts
        assert torch.nn.functional.binary_cross_entropy(cpu.sigmoid(), cpu.sigmoid()).dtype is FLOAT32
