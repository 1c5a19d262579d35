"""One thread runs an operation for members on several devices of a worker. The streams here are pretended
ones, which note what they wait for; `make accelerator` has real ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distruntime_worker.machine import accelerator

ONE, TWO, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


class Stream:
    """It has what has run before the next kernel on it."""

    def __init__(self) -> None:
        self.ran: set[str] = set()

    def record_event(self) -> set[str]:
        return set(self.ran)

    def wait_event(self, event: set[str]) -> None:
        self.ran |= event


@pytest.mark.parametrize("first_is_current", [True, False])
def test_members_begin_after_the_first_stream_and_it_goes_on_after_them(
    monkeypatch: pytest.MonkeyPatch, first_is_current: bool
) -> None:
    streams: dict[torch.device, Any] = {ONE: Stream(), TWO: Stream()}
    monkeypatch.setattr(accelerator, "current_stream", streams.__getitem__)
    first: Any = streams[ONE] if first_is_current else Stream()
    # The master has ordered this stream after all that made the inputs.
    first.ran.add("the inputs")
    with accelerator.all_in_order(first, [ONE, TWO, CPU, TWO]):
        for device in (ONE, TWO):
            assert "the inputs" in streams[device].ran
            streams[device].ran.add(f"the part on {device}")
    assert {"the part on cuda:0", "the part on cuda:1"} <= first.ran


def test_a_stream_of_the_cpu_orders_nothing() -> None:
    with accelerator.all_in_order(None, [CPU]):
        pass
