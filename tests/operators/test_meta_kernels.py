"""Calls of which torch's meta kernels promise what its kernels do not keep: they give what a CPU gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distruntime as dr
from agree import REMOTE, agrees, tensor
from distruntime.operators import new_calls


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@agrees
def test_the_margin_loss_of_a_single_sample_has_the_shape_of_its_target(
    device: str, shape: tuple[int, ...]
) -> Any:
    x, target = tensor(device, 10, grad=True), torch.full(shape, 3, device=device)
    loss = F.multi_margin_loss(x, target, reduction="none")
    (slope,) = torch.autograd.grad(loss.sum(), x)
    return loss, slope


def test_the_worker_answers_where_a_meta_kernel_takes_fakes_only(session: Any) -> None:
    """torch's own fails with an AttributeError. The operator has kernels for GPUs, and says so elsewhere."""

    def product(device: str) -> torch.Tensor:
        weight = torch.zeros(8, 1, 32, 4, dtype=torch.int32, device=device)
        x, scales = (
            torch.zeros(size, dtype=torch.bfloat16, device=device) for size in ((32, 32), (1, 64, 2))
        )
        return torch._weight_int4pack_mm(x, weight, 32, scales).cpu()

    for device in ("cpu", REMOTE):
        with pytest.raises(NotImplementedError, match="Could not run 'aten::_weight_int4pack_mm'"):
            product(device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@agrees
def test_the_norms_of_half_a_weight_are_whole(device: str, dtype: torch.dtype) -> Any:
    direction, size = tensor(device, 3, 5).to(dtype), tensor(device, 3, 1, seed=1).to(dtype)
    return torch._weight_norm_interface(direction, size, 0)


@agrees(remote_result=False)
def test_attention_takes_no_gradient_and_gives_none(device: str) -> Any:
    x = tensor(device, 1, 2, 3, 4, grad=True)
    found = []
    for _ in range(2):
        attended = torch._C._functions.UndefinedGrad()(F.scaled_dot_product_attention(x, x, x))
        (slope,) = torch.autograd.grad(attended, x, torch.ones_like(attended), allow_unused=True)
        found.append(slope is None)
    return found


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
@agrees
def test_batch_norm_keeps_what_its_kernel_keeps(
    device: str, layout: torch.memory_format, dtype: torch.dtype, weights: torch.dtype
) -> Any:
    x = tensor(device, 3, 4, 5, 2).to(dtype).contiguous(memory_format=layout)
    found = []
    for training in (True, False, True):
        kept = [torch.ones(4, device=device, dtype=weights) for _ in range(4)]
        made = torch.native_batch_norm(x, *kept, training, 0.1, 1e-5)
        found += [*made, *kept, *[[one.shape, one.stride()] for one in made]]
    return found


def test_a_batch_norm_that_trains_asks_no_worker(
    session: dr.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(new_calls, "ask", asked.append)
    x, kept = torch.rand(2, 7, 5, device="remote"), torch.ones(7, device="remote")
    found, *_ = torch.native_batch_norm(x, kept, kept, kept.clone(), kept.clone(), True, 0.1, 1e-5)
    assert asked == [] and found.shape == x.shape


def test_the_profiler_of_torch_hears_of_a_first_call_once(session: object) -> None:
    x = torch.ones(3, 5, device=REMOTE)
    with torch.autograd.profiler.profile() as profile:
        # This process has not called them with such operands.
        (x * 2.5).logsumexp(1)
        torch.nn.functional.hardtanh(x, -0.25, 0.125)
    names = [event.name for event in profile.function_events or ()]
    assert [names.count(name) for name in ("aten::mul", "aten::logsumexp", "aten::hardtanh")] == [1, 1, 1]
    # It hears of what comes after, too.
    with torch.autograd.profiler.profile() as profile:
        torch.ones(2) + 1
    assert "aten::add" in [event.name for event in profile.function_events or ()]
