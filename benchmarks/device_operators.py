"""What the worker's own code adds to one operator of a device, beside what it adds to one of the CPU.

    python -m benchmarks.device_operators cuda
    PYTHONPATH=$(python tests/accelerator/run.py --only-build) python -m benchmarks.device_operators simulated

This needs a torch that has the device, and no worker: it compiles templates as a worker does, and runs them.
An operator's own launch is measured beside them and taken off, so that the rest is the worker's Python.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from distruntime.wire.codec import OPERAND, pack_constant
from distruntime_worker.values.step import Slots, Words
from distruntime_worker.values.template import Template, operator

_TIMES, _ROUNDS = 2000, 15
_SIDE = 8
# Each has the operator's own arguments behind its tensors.
_OPERATORS: dict[str, tuple[int, list[object]]] = {
    "aten::add.Tensor": (2, []),
    "aten::mm": (2, []),
    "aten::view": (1, [[_SIDE * _SIDE]]),
}


def _raise(template: Template, slots: object, words: object, i: int, error: BaseException) -> None:
    raise error


def _pair(name: str, device: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions: one runs an operator as a worker does, and one calls it."""
    tensors, rest = _OPERATORS[name]
    call = operator(name)
    constants = [pack_constant(value) for value in rest]
    template = Template(name, call, [*[OPERAND] * tensors, *constants], {}, 1, torch.device, _raise)
    x = torch.ones(_SIDE, _SIDE, device=device)
    slots: Slots = {1: x}
    words: Words = [1, *[1] * tensors, 2]
    run = template.run
    return (lambda: run(slots, words, 0)), (lambda: call(*[x] * tensors, *rest))


def _microseconds(act: Callable[[], object], device: str) -> float:
    """Return the time of this thread that one call takes."""
    started = time.thread_time()
    for _ in range(_TIMES):
        act()
    passed = time.thread_time() - started
    if device != "cpu":
        torch.accelerator.synchronize()
    return passed / _TIMES * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device")
    device: str = parser.parse_args().device
    print(f"| operator | cpu: run, call | {device}: run, call | worker's own part, {device} / cpu |")
    print("|---|---|---|---|")
    with torch.no_grad():
        for name in _OPERATORS:
            pairs = {where: _pair(name, where) for where in ("cpu", device)}
            found: dict[str, list[tuple[float, float]]] = {where: [] for where in pairs}
            for _ in range(_ROUNDS):
                for where, (run, call) in pairs.items():
                    found[where].append((_microseconds(run, where), _microseconds(call, where)))
            runs, calls, own = {}, {}, {}
            for where, rows in found.items():
                runs[where] = statistics.median(run for run, _ in rows)
                calls[where] = statistics.median(call for _, call in rows)
                own[where] = statistics.median(run - call for run, call in rows)
            texts = [f"{runs[where]:.2f}, {calls[where]:.2f} us" for where in pairs]
            print(
                f"| {name} | {texts[0]} | {texts[1]} | {own[device]:.2f} / {own['cpu']:.2f} us; "
                f"whole {runs[device] / calls[device]:.2f} against {runs['cpu'] / calls['cpu']:.2f} x |"
            )


if __name__ == "__main__":
    main()
