"""A worker with a real GPU: what it says of it, copies to and from it, its memory and its settings."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

import distruntime as dr

SIZES = [
    1,
    5,
    1000,
    1 << 14,
    (1 << 14) + 1,
    (1 << 18) - 1,
    1 << 20,
    (1 << 24) + 7,
    1 << 26,
]  # floats, across every way that uploads take


def test_nodes_name_the_gpu_its_memory_and_its_capability(
    gpu: dr.types.Place, same_card: torch.device
) -> None:
    local = torch.cuda.get_device_properties(same_card)
    (info,) = dr.nodes()
    card = next(device for device in info.devices if device.name == gpu.local_device)
    assert card.description == local.name and card.capability == f"{local.major}.{local.minor}"
    assert 0 < card.free <= card.total and abs(card.total - local.total_memory) < local.total_memory / 10
    assert f"{local.name} ({local.major}.{local.minor}, " in repr(dr.nodes())


@pytest.mark.parametrize("count", SIZES)
def test_a_tensor_goes_there_and_comes_back(gpu: dr.types.Place, count: int) -> None:
    local = torch.randn(count)
    expected = local.clone()
    x = local.to("remote")
    local.zero_()  # an upload returns when its memory may be written again
    assert x.place == gpu and torch.equal(x.cpu(), expected)
    assert torch.equal((x * 2).cpu(), expected * 2)


def test_many_uploads_in_a_row_stay_apart(gpu: dr.types.Place) -> None:
    local = torch.empty(100_000)
    there = []
    for k in range(200):
        there.append(local.fill_(k).to("remote"))
    assert [float(x.max()) for x in there] == [float(x.min()) for x in there] == list(range(200))


def test_no_memory_is_out_of_memory_error_and_names_the_holders(gpu: dr.types.Place) -> None:
    gc.collect()
    kept = torch.ones(1 << 20, device="remote")
    free = next(d.free for d in dr.memory().devices if d.place == gpu)
    huge = torch.empty(2 * free, device="remote")
    dependent = huge + 1
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        dependent[0].item()
    text = str(caught.value)
    assert isinstance(caught.value, dr.errors.RemoteError) and "GPU 0" in text and "total capacity" in text
    held = [line for line in text.splitlines() if line.startswith("  held there")]
    assert (
        len(held) == 1
        and "4.0 MiB by" in held[0]
        and held[0].endswith('kept = torch.ones(1 << 20, device="remote") (1 tensor)')
    )
    assert kept.sum().item() == 1 << 20  # the worker lives
    del huge, dependent
    fits = torch.ones(1 << 22, device="remote")
    assert fits.sum().item() == 1 << 22


def test_an_upload_that_does_not_fit_is_out_of_memory_error(gpu: dr.types.Place) -> None:
    card = next(d for d in dr.memory().devices if d.place == gpu)
    room = card.free + card.reserved - card.allocated
    ballast = torch.empty(max(1, room - (256 << 20)), dtype=torch.uint8, device="remote")
    dr.synchronize()
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(1 << 27).to("remote").sum().item()
    assert ballast.dim() == 1
    del ballast
    # The empty tensor of the upload has failed too, and the next test would read that.
    with contextlib.suppress(torch.OutOfMemoryError):
        dr.synchronize()
    # What the worker's allocator keeps is memory that this process's own tests on that card lack.
    torch.remote.empty_cache()  # type: ignore[attr-defined]


def test_memory_shows_what_the_caching_allocator_holds(gpu: dr.types.Place) -> None:
    gc.collect()
    x = torch.ones(1 << 22, device="remote")
    dr.synchronize()
    memory = dr.memory()
    card = next(d for d in memory.devices if d.place == gpu)
    assert (
        card.values == 1 and card.held == 4 << 22 and 4 << 22 <= card.allocated <= card.reserved <= card.total
    )
    assert memory.lines[0].place == gpu and memory.lines[0].nbytes == 4 << 22
    assert "allocated  reserved" in repr(memory).splitlines()[0] and x.dim() == 1


def test_tf32_changes_what_a_matmul_gives(gpu: dr.types.Place) -> None:
    remote: Any = torch.remote  # type: ignore[attr-defined]
    if remote.get_device_capability(gpu) < (8, 0):
        pytest.skip("TF32 came with compute capability 8.0")
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    exact = a.double() @ b.double()
    x, y = a.to("remote"), b.to("remote")
    dr.config(cuda_matmul_allow_tf32=False)
    full = x @ y
    dr.config(cuda_matmul_allow_tf32=True)
    short = x @ y
    dr.config(cuda_matmul_allow_tf32=False)
    again = x @ y
    error = [float((result.cpu().double() - exact).abs().max()) for result in (full, short, again)]
    assert error[0] == error[2] < 1e-3 < error[1]


def test_reading_the_settings_of_a_worker_with_a_gpu(gpu: dr.types.Place) -> None:
    dr.config(float32_matmul_precision="high", cudnn_benchmark=True)
    found = dr.config()
    assert found is not None and found[0].cuda_matmul_allow_tf32 and found[0].cudnn_benchmark
    dr.config(float32_matmul_precision="highest", cudnn_benchmark=False)


def test_random_numbers_of_the_gpu_follow_the_seed(gpu: dr.types.Place) -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        draws.append(torch.randn(100, device="remote").cpu())
    assert torch.equal(*draws)


def test_a_seed_gives_what_it_gives_without_a_worker(gpu: dr.types.Place, same_card: torch.device) -> None:
    torch.manual_seed(7)
    there = torch.randn(100, device="remote").cpu()
    torch.manual_seed(7)
    assert torch.equal(there, torch.randn(100, device=same_card).cpu())
