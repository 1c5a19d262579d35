"""The pinned buffers that uploads to a GPU pass through: right bytes, used again, bounded."""

from __future__ import annotations

import threading

import pytest
import torch

from distruntime_worker.values.staging import Staging

SIZES = [
    0,
    1,
    3,
    1000,
    (1 << 16) - 1,
    1 << 16,
    (1 << 16) + 1,
    1 << 20,
    (1 << 24) - 1,
    1 << 24,
    (1 << 24) + 1,
    (1 << 26) + 5,
]
GPU = torch.device("cuda:0")
# The buffers are the worker's, and these tests use them in this process.
pytestmark = pytest.mark.usefixtures("cuda")


def noise(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_copy_has_the_bytes_that_the_source_had(nbytes: int) -> None:
    staging, source = Staging(), noise(nbytes)
    expected = source.clone()
    copy = staging.to(GPU, source)
    source.zero_()  # it may change at once
    assert copy.device == GPU and copy.is_contiguous() and torch.equal(copy.cpu(), expected)


@pytest.mark.parametrize(
    "source",
    [
        torch.tensor(3.5, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.tensor([1 + 2j, -3j]),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(6.0).bfloat16().expand(5, 6),
        torch.zeros(0, 3),
    ],
    ids=lambda source: f"{tuple(source.shape)} {source.dtype}",
)
def test_shape_and_dtype_are_kept(source: torch.Tensor) -> None:
    copy = Staging().to(GPU, source)
    assert copy.dtype == source.dtype and torch.equal(copy.cpu(), source)


def test_a_copy_does_not_wait_for_the_stream() -> None:
    staging, source = Staging(), noise(1 << 20)
    staging.to(GPU, source)
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)  # cycles: half a second or more
    behind = torch.cuda.Event()
    copy = staging.to(GPU, source)
    behind.record()
    assert not behind.query(), "the upload waited for the kernel before it"
    assert torch.equal(copy.cpu(), source)


def test_buffers_are_used_again_once_the_gpu_has_read_them() -> None:
    staging = Staging()
    for _ in range(50):
        staging.to(GPU, noise(100_000))
        torch.cuda.synchronize()
    assert staging.pinned == 1 << 17


def test_a_buffer_that_the_gpu_has_not_read_is_left_alone() -> None:
    staging, sources = Staging(), [noise(1 << 16) for _ in range(20)]
    torch.cuda._sleep(1 << 28)
    copies = [staging.to(GPU, source) for source in sources]
    assert all(torch.equal(copy.cpu(), source) for copy, source in zip(copies, sources))


def test_what_is_pinned_is_bounded() -> None:
    staging, sources = (
        Staging(most=1 << 20),
        [noise(nbytes) for nbytes in (1 << 19, 1 << 16, 1 << 18, 1 << 20, 70_000) * 10],
    )
    torch.cuda._sleep(1 << 26)
    copies = []
    for source in sources:
        copies.append(staging.to(GPU, source))
        assert staging.pinned <= 1 << 20
    assert all(torch.equal(copy.cpu(), source) for copy, source in zip(copies, sources))


def test_threads_with_streams_of_their_own_share_the_buffers() -> None:
    staging = Staging(most=1 << 22)
    wrong: list[int] = []

    def upload(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            for k in range(100):
                source = torch.full(((k * 7919 * seed) % (1 << 18) + 1,), k, dtype=torch.uint8)
                copy = staging.to(GPU, source)
                source.fill_(255)
                if not bool((copy == k).all()):
                    wrong.append(k)

    threads = [threading.Thread(target=upload, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_no_memory_on_the_gpu_is_torchs_error_and_costs_no_buffer() -> None:
    staging = Staging()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(GPU)
    ballast = torch.empty(max(0, free - (256 << 20)), dtype=torch.uint8, device=GPU)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            staging.to(GPU, torch.empty(512 << 20, dtype=torch.uint8))
        assert staging.pinned == 0
    finally:
        del ballast
        torch.cuda.empty_cache()
