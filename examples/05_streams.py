"""Streams and events: work side by side on one worker, and in order across two.

    $ python examples/05_streams.py
    two chains on one stream  0.126 s
    the same on two streams   0.079 s
    equal results: True
    issued, and still computing: True
    node 1 went on after node 0's 343 ms: 256

A stream of a CPU is a thread of the worker, so the second line is shorter where two cores are free.
"""

import time

import torch

import distruntime as dr


def chain(stream: dr.Stream, start: torch.Tensor, products: int = 150) -> torch.Tensor:
    """Multiply `products` times on a stream. Returns at once."""
    with dr.stream(stream):
        x = start
        for _ in range(products):
            x = x @ start
    return x.sum()


def timed(*streams: dr.Stream) -> list[torch.Tensor]:
    """Run a chain on each stream, wait for all, and say how long that took."""
    started = time.perf_counter()
    sums = [chain(stream, matrix) for stream in streams]
    dr.synchronize()
    print(
        f"{'two chains on one stream' if len(set(streams)) == 1 else 'the same on two streams '}  "
        f"{time.perf_counter() - started:.3f} s"
    )
    return sums


with dr.init_master_worker(backend="zmq"):
    torch.manual_seed(0)
    with dr.on(0, "cpu"):
        matrix = torch.randn(256, 256) / 16
    first, second = dr.Stream(0, "cpu"), dr.Stream(0, "cpu")
    for stream in (first, second):
        chain(stream, matrix, 2)  # the first call of an operator costs more
    alone, both = timed(first, first), timed(first, second)
    print("equal results:", all(a.item() == b.item() for a, b in zip(alone, both)))

    # An event of node 0 holds a stream of node 1. The lines below return at once; `item` at the end is what
    # waits.
    begin, end = dr.Event(enable_timing=True), dr.Event(enable_timing=True)
    begin.record(first)
    chain(first, matrix, 1000)
    end.record(first)
    there = dr.Stream(1, "cpu")
    end.wait(there)
    with dr.stream(there):
        after = torch.ones(256, device="remote").sum()
    print("issued, and still computing:", not end.query())
    print(f"node 1 went on after node 0's {begin.elapsed_time(end):.0f} ms: {after.item():.0f}")
