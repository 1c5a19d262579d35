"""Threads of a function may trace with fake tensors and end, on a torch that is built for a GPU too."""

from __future__ import annotations

import distruntime as dr


def traced(threads: int) -> int:
    """Trace in so many threads, one after the other."""
    import threading

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    def trace() -> None:
        with FakeTensorMode():
            torch.empty(3).add_(1)

    for _ in range(threads):
        one = threading.Thread(target=trace)
        one.start()
        one.join()
        # Others take the memory that the thread has left, so what is read there is nonsense.
        _ = [bytearray(24 + k % 64) for k in range(10_000)]
    return threads


def test_threads_that_trace_may_end(session: object) -> None:
    assert dr.fetch(dr.remote(traced)(20)) == 20
