"""Take-over: switches reach the workers or are listed, and nothing that was ignored goes unsaid."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.cluster import as_cuda
from distruntime.cluster.cuda import replaced
from processes import STARTING

backends = torch.backends


@pytest.fixture(scope="module", autouse=True)
def _taken() -> Iterator[None]:
    dr.shutdown()
    own = [getattr(torch._C, name) for name in ("_set_cublas_allow_tf32", "_set_cudnn_enabled")]
    held = vars(type(backends.cudnn))["benchmark"].setter
    dr.init_master_worker(world_size=1, as_cuda=True, timeout=STARTING)
    yield
    dr.shutdown()
    assert own == [torch._C._set_cublas_allow_tf32, torch._C._set_cudnn_enabled]
    assert vars(type(backends.cudnn))["benchmark"].setter is held


@pytest.fixture(autouse=True)
def _nothing_so_far() -> Iterator[None]:
    replaced.pretended.clear()
    # torch's own test helpers, which other tests import, forbid to set these flags.
    with getattr(backends, "__allow_nonbracketed_mutation")():
        yield


# What sets a switch, and the name that `dr.config` has for it; each is on, then off.
FORWARDED: dict[str, Callable[[bool], None]] = {
    "cuda_matmul_allow_tf32": lambda on: setattr(backends.cuda.matmul, "allow_tf32", on),
    "cuda_matmul_allow_bf16_reduced_precision_reduction": lambda on: setattr(
        backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", on
    ),
    "cudnn_allow_tf32": lambda on: setattr(backends.cudnn, "allow_tf32", on),
    "cudnn_benchmark": lambda on: setattr(backends.cudnn, "benchmark", on),
    "cudnn_deterministic": lambda on: setattr(backends.cudnn, "deterministic", on),
}


def settings() -> Any:
    found = dr.config()
    assert found is not None
    return found[0]


@pytest.mark.parametrize("name", FORWARDED)
def test_workers_follow_a_switch(name: str) -> None:
    before = getattr(settings(), name)
    try:
        for on in (not before, before):
            FORWARDED[name](on)
            assert getattr(settings(), name) is on
        assert dr.takeover() == {}
    finally:
        FORWARDED[name](before)


def test_workers_follow_the_precision_of_matmul_and_a_block_of_flags() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        assert settings().float32_matmul_precision == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert settings().float32_matmul_precision == "highest"
    with backends.cudnn.flags(enabled=True, deterministic=True):
        assert settings().cudnn_deterministic is True
    assert settings().cudnn_deterministic is False and dr.takeover() == {}


def test_switches_that_no_worker_follows_are_listed() -> None:
    enabled = backends.cudnn.enabled
    backends.cudnn.enabled = not enabled
    backends.cudnn.enabled = enabled
    # It is so already.
    backends.cudnn.enabled = enabled
    torch.cuda.tunable.enable(True)
    own = backends.cuda.matmul.fp32_precision
    backends.cuda.matmul.fp32_precision = "tf32"
    backends.cuda.matmul.fp32_precision = own
    assert dr.takeover() == {
        "torch.backends.cudnn.enabled": 2,
        "torch.cuda.tunable.enable": 1,
        "torch.backends.cuda.matmul.fp32_precision": 2,
    }


def test_pinned_memory_is_listed() -> None:
    torch.empty(2, pin_memory=True)
    torch.empty(2, pin_memory=False)
    torch.ones(2).pin_memory()
    list(torch.utils.data.DataLoader([torch.ones(2)], pin_memory=True))  # type: ignore[arg-type]
    assert dr.takeover() == {"pin_memory": 3}
    assert as_cuda.summary().endswith("Only pretended: pin_memory (3)")


def test_what_is_not_compiled_is_listed() -> None:
    compiled = torch.compile(lambda x: x + 1, backend=lambda graph, inputs: graph.forward)
    with pytest.warns(UserWarning, match="operator by operator"):
        compiled(torch.ones(2, device="cuda"))
    compiled(torch.ones(2))
    assert dr.takeover() == {"torch.compile": 1}


def test_a_dtype_that_autocast_does_not_take_is_said_of_cuda_at_the_users_line() -> None:
    x = torch.ones(2, 2, device="cuda")
    for region in (torch.autocast, torch.amp.autocast):
        with pytest.warns(UserWarning, match="^In CUDA autocast, but the target dtype") as told:
            with region("cuda", dtype=torch.float32):
                assert (x @ x).dtype == torch.float32
        assert [warning.filename for warning in told] == [__file__]
        assert "remote" not in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("cuda", dtype=torch.float32, enabled=False):
            assert (x @ x).dtype == torch.float32
        with torch.autocast("cuda"):
            assert (x @ x).dtype == torch.float16


def test_a_function_that_asks_for_a_dtype_under_autocast_gets_it() -> None:
    seen = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.dtype, torch.is_autocast_enabled("cuda")))
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.ones(2, device="cuda", requires_grad=True)
    with torch.autocast("cuda"):
        Doubled.apply(x).sum().backward()
    assert seen == [(torch.float16, False)]
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]


def test_a_device_of_a_tensor_is_its_place() -> None:
    with torch.cuda.device_of(torch.ones(1, device="cuda")):
        assert torch.ones(1, device="cuda").place == dr.place(0)
    assert dr.takeover() == {}
