"""What `torch.remote` says of a real GPU: the figures of torch's allocator on the worker."""

from __future__ import annotations

from typing import Any

import torch

import distruntime as dr

MIB = 1 << 20


def test_memory_is_what_the_workers_allocator_says(gpu: dr.types.Place) -> None:
    remote: Any = torch.remote  # type: ignore[attr-defined]
    assert gpu.number == remote.current_device() == 0
    before = remote.memory_allocated(gpu)
    kept = torch.ones(64 * MIB // 4, device=gpu)
    assert remote.memory_allocated(gpu) == before + 64 * MIB <= remote.memory_reserved(gpu)
    gone = torch.ones(256 * MIB // 4, device=gpu)
    assert remote.memory_allocated(gpu) == before + 320 * MIB
    del gone
    assert remote.memory_allocated(gpu) == before + 64 * MIB
    assert remote.max_memory_allocated(gpu) >= before + 320 * MIB <= remote.max_memory_reserved(gpu)
    held = remote.memory_reserved(gpu)
    remote.empty_cache()
    assert remote.memory_reserved(gpu) <= held - 256 * MIB
    remote.reset_peak_memory_stats(gpu)
    assert remote.max_memory_allocated(gpu) == before + 64 * MIB
    assert kept.sum().item() == 64 * MIB // 4


def test_it_is_the_card_that_is_there(gpu: dr.types.Place, same_card: torch.device) -> None:
    remote: Any = torch.remote  # type: ignore[attr-defined]
    here = torch.cuda.get_device_properties(same_card)
    found = remote.get_device_properties(gpu)
    assert (found.name, found.total_memory) == (here.name, here.total_memory)
    assert (found.major, found.minor) == (here.major, here.minor) == remote.get_device_capability(gpu)
    assert found.multi_processor_count == here.multi_processor_count
    free, total = remote.mem_get_info(gpu)
    assert 0 < free < total == torch.cuda.mem_get_info(same_card)[1]
