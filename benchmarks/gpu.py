"""A GPU behind a worker, against the same GPU used by this process: GPT-2 training steps op by op, large
copies, streams that overlap, two workers on one GPU, and NCCL between two GPUs.

Run it alone, `python -m benchmarks gpu`; without a GPU it says so and measures nothing. Workers are started
here and share the GPU with this process, and the two sides work in turn, never at once. Training here means
training in another process without a session, which measures its own seconds.

    python -m benchmarks.gpu training [--quick]             one part
    python -m benchmarks.gpu training --tiny [--simulate-cuda 2]   without a GPU: does the program run?
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator

import torch

import distruntime as dr

from .gpu_training import FULL, QUICK, TINY, Size, compiled, training
from .harness import Figure, in_turn, row, seconds

# The process ends with it where a figure cannot be measured on this machine.
LEFT_OUT = 4
# The process ends with it where a figure is on the wrong side of its bar. An exception ends it with 1.
MISSED = 3


def measure(quick: bool) -> list[Figure]:
    """Return the figures; none where there is no GPU."""
    if not torch.cuda.is_available():
        print("no GPU: nothing measured", flush=True)
        return []
    figures: list[Figure] = []
    for name in PARTS:
        figures += part(name, QUICK if quick else FULL, 0)
    return figures


def part(name: str, size: Size, simulate_cuda: int) -> Iterator[Figure]:
    """Measure the figures of one part in a session of its own, one after the other."""
    workers, work = PARTS[name]
    with dr.init_master_worker(world_size=workers, quiet=True, simulate_cuda=simulate_cuda):
        yield from work(size)


def accelerator(node: int = 0) -> dr.types.Place:
    """Return a node's first accelerator."""
    names = [device.name for device in dr.nodes()[node].devices if device.name != "cpu"]
    if not names:
        raise SystemExit(f"node {node} offers no accelerator")
    return dr.place(node, f"accelerator:{names[0].partition(':')[2]}")


def settle(size: Size) -> None:
    """Wait for this process's own device."""
    if size.local != "cpu":
        torch.cuda.synchronize()


def copies(size: Size) -> list[Figure]:
    """Return the rates of 256 MiB to the GPU and back, against this process's own copies from and to pinned
    memory.
    """
    tensor = torch.randn(size.nbytes // 4)
    pinned = tensor.pin_memory() if size.local != "cpu" else tensor.clone()
    there = tensor.clone().to(size.local)
    remote = [tensor.to("remote")]

    def up() -> float:
        def run() -> None:
            remote[:] = [tensor.to("remote")]
            remote[0][-1].item()  # has the GPU seen it, and not only the worker

        return seconds(run)

    def local(target: torch.Tensor, source: torch.Tensor) -> Callable[[], float]:
        def run() -> None:
            target.copy_(source, non_blocking=True)
            settle(size)

        return lambda: seconds(run)

    def down() -> float:
        return seconds(lambda: remote[0].cpu())

    figures = []
    for name, ours, theirs in (("up", up, local(there, pinned)), ("down", down, local(pinned, there))):
        for _ in range(3):
            ours(), theirs()
        # These are seconds of theirs over ours: a ratio of rates.
        ratio, other, mine = in_turn(theirs, ours, size.rounds)
        note = f"{size.nbytes / mine / 2**30:.2f} GiB/s, pinned {size.nbytes / other / 2**30:.2f}"
        figures.append(
            Figure(
                f"{size.nbytes >> 20} MiB {name}, GPU of a worker / local copy of pinned memory",
                ratio,
                "x",
                None,
                note,
                most=False,
            )
        )
    assert torch.equal(remote[0].cpu(), tensor)
    return figures


def _chain(matrix: torch.Tensor, products: int) -> torch.Tensor:
    x = matrix
    for _ in range(products):
        x = x @ matrix
    return x


def overlap(size: Size) -> list[Figure]:
    """Return the ratios of two chains of products on one stream and on two, and of a chain with a 256 MiB
    download beside it.
    """
    place = accelerator()
    one, two = dr.Stream(place), dr.Stream(place)
    a = torch.randn(size.side, size.side, device=place) / math.sqrt(size.side)
    large = torch.randn(size.nbytes // 4, device=place)

    def chain(stream: dr.Stream) -> torch.Tensor:
        with dr.stream(stream):
            return _chain(a, size.products)

    def chains(*streams: dr.Stream) -> float:
        def run() -> None:
            kept = [chain(stream) for stream in streams]
            dr.synchronize()
            del kept

        return seconds(run)

    def download() -> float:
        with dr.stream(two):
            return seconds(lambda: large.cpu())

    def both() -> float:
        def run() -> None:
            x = chain(one)
            with dr.stream(two):
                large.cpu()
            dr.synchronize()
            del x

        return seconds(run)

    chains(one, two), download(), both()
    ratio, alone, together = in_turn(lambda: chains(one, one), lambda: chains(one, two), size.rounds)
    note = f"{alone * 1e3:.1f} ms, {together * 1e3:.1f} ms"
    figures = [
        Figure(
            f"GPU: two chains of products ({size.side} x {size.side}), on one stream / on two",
            ratio,
            "x",
            None,
            note,
            most=False,
        )
    ]
    ratio, total, longer = in_turn(both, lambda: max(chains(one), download()), size.rounds)
    note = f"{total * 1e3:.1f} ms, the longer alone {longer * 1e3:.1f} ms"
    name = f"GPU: a chain of products with a {size.nbytes >> 20} MiB download beside it / the longer"
    return [*figures, Figure(name, ratio, "x", 1.3, note)]


def processes(size: Size) -> list[Figure]:
    """Return what it costs that two workers share a GPU: two chains of products, one on each or both on one,
    and a copy between them, which passes through the host.
    """
    first, second = accelerator(0), accelerator(1)
    matrices = [
        torch.randn(size.side, size.side, device=place) / math.sqrt(size.side) for place in (first, second)
    ]

    def chains(*which: int) -> float:
        def run() -> None:
            kept = [_chain(matrices[k], size.products) for k in which]
            dr.synchronize()
            del kept

        return seconds(run)

    chains(0, 1), chains(0, 0)
    ratio, shared, alone = in_turn(lambda: chains(0, 1), lambda: chains(0, 0), size.rounds)
    note = f"{shared * 1e3:.1f} ms, {alone * 1e3:.1f} ms"
    figures = [
        Figure("two chains of products, on two workers of one GPU / on one worker", ratio, "x", None, note)
    ]
    large = torch.randn(size.nbytes // 4, device=first)

    def copied() -> float:
        def run() -> None:
            large.to(second)[-1].item()

        return seconds(run)

    copied()
    rate = size.nbytes / min(copied() for _ in range(size.rounds)) / 2**30
    name = f"{size.nbytes >> 20} MiB between two workers of one GPU"
    return [*figures, Figure(name, rate, "GiB/s", None, "through the host", most=False)]


def between(size: Size) -> list[Figure]:
    """Return the rates of a copy and of a sum between the GPUs of two workers, the copy against that of this
    process between the same GPUs.
    """
    first, second = accelerator(0), accelerator(1)
    large = torch.randn(size.nbytes // 4, device=first)
    peers = [f"{size.local}:{k}" if size.local != "cpu" else "cpu" for k in range(2)]
    source, target = (torch.zeros(size.nbytes // 4, device=peer) for peer in peers)

    def copied() -> float:
        def run() -> None:
            large.to(second)[-1].item()

        return seconds(run)

    def local() -> float:
        def run() -> None:
            target.copy_(source)
            for k in range(2 if size.local != "cpu" else 0):
                torch.cuda.synchronize(k)

        return seconds(run)

    copied(), local()
    ratio, theirs, ours = in_turn(local, copied, size.rounds)
    note = f"{size.nbytes / ours / 2**30:.2f} GiB/s, torch's own {size.nbytes / theirs / 2**30:.2f}"
    name = f"{size.nbytes >> 20} MiB between the GPUs of two workers / torch's own copy"
    figures = [Figure(name, ratio, "x", None, note, most=False)]
    group = dr.distributed.new_group([first, second])
    for nbytes in (size.nbytes, 1024):
        tensors = [torch.ones(nbytes // 4, device=place) for place in (first, second)]

        def summed(tensors: list[torch.Tensor] = tensors) -> float:
            def run() -> None:
                dr.distributed.all_reduce(tensors, group=group)
                tensors[0][-1].item()

            return seconds(run)

        summed()
        took = min(summed() for _ in range(max(5, size.rounds)))
        rate, unit, what = (
            (nbytes / took / 2**30, "GiB/s", f"{nbytes >> 20} MiB")
            if nbytes > 1024
            else (took * 1e6, "us", "1 KiB")
        )
        figures.append(
            Figure(
                f"{what} all_reduce between the GPUs of two workers, and a read",
                rate,
                unit,
                None,
                "",
                unit == "us",
            )
        )
    return figures


# Each part, and how many workers its session has.
PARTS: dict[str, tuple[int, Callable[[Size], Iterable[Figure]]]] = {
    "training": (1, training),
    "compiled": (1, compiled),
    "copies": (1, copies),
    "streams": (1, overlap),
    "processes": (2, processes),
    "nccl": (2, between),
}


def main() -> int:
    """Measure one part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--tiny", action="store_true", help="to see that it runs; its numbers mean nothing")
    parser.add_argument("--simulate-cuda", type=int, default=0, metavar="N", help="with --tiny")
    options = parser.parse_args()
    if options.part == "processes":
        # Both workers are to share one GPU, and so is this process.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    size = TINY if options.tiny else QUICK if options.quick else FULL
    if size.local != "cpu" and not torch.cuda.is_available():
        print("no GPU: nothing measured")
        return LEFT_OUT
    if options.part == "nccl" and size.local != "cpu" and torch.cuda.device_count() < 2:
        print(f"needs two GPUs, and there is {torch.cuda.device_count()}")
        return LEFT_OUT
    figures = []
    try:
        for figure in part(options.part, size, options.simulate_cuda):
            figures.append(figure)
            print(row(figure), flush=True)
    except ModuleNotFoundError as error:
        print(f"needs the package {error.name}")
        return LEFT_OUT
    return 0 if options.tiny or all(figure.passed for figure in figures) else MISSED


if __name__ == "__main__":
    sys.exit(main())
