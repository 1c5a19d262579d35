"""Trainings with a fault, to be found by a look: a slow read, a slow node, a leak, a stuck collective.

    PYTHONPATH=.:worker:tests/help python tests/help/planted.py stuck

It begins a session "planted" of two workers and goes on until it is ended; `python -m distruntime top` and
`dr.trace` find the fault. tests/timeline/test_planted.py holds what they say.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import distruntime as dr

# A step of the training pauses for so many seconds, as a loader's next batch would take.
PAUSE = 0.002
# A trace is of so many steps.
STEPS = 40


class Training:
    """A linear model on a mesh of two nodes: each has its part of the batch, and they sum their gradients."""

    def __init__(self) -> None:
        mesh = dr.init_device_mesh("cpu", (2,))
        self.line = mesh.lines()
        self.x: Any = torch.randn(64, 128, device=mesh.device)
        self.target: Any = torch.randn(64, 8, device=mesh.device)
        self.weight: Any = torch.zeros(128, 8, device=mesh.device, requires_grad=True)

    def step(self) -> Any:
        loss = (self.x @ self.weight - self.target).square().mean()
        loss.backward()
        with torch.no_grad():
            # Here is the gradients' sum.
            dr.lines.all_reduce(self.line, self.weight.grad)
            self.weight -= 0.01 * self.weight.grad
        self.weight.grad = None
        return loss.detach()


@dr.remote
def for_so_long(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """Take so long on the worker."""
    time.sleep(seconds)
    return x


def read(training: Training) -> None:
    """Read the loss of each step."""
    for _ in range(STEPS):
        loss = training.step()
        # Here is the slow read.
        loss.member(0).item()


def node(training: Training) -> None:
    """Have node 1 take longer for each step."""
    for _ in range(STEPS // 8):
        # Here is the slow node.
        for_so_long(training.x.member(1), 0.2)
        training.step()
    dr.synchronize()


_kept: list[Any] = []


def leak(training: Training) -> None:
    """Keep what is no longer needed."""
    for _ in range(STEPS):
        loss = training.step()
        # Here is the leak.
        _kept.append(training.x * loss)
        time.sleep(PAUSE)
    dr.synchronize()


def stuck(training: Training) -> None:
    """Let one member of a group not come."""
    group = dr.distributed.new_group([0, 1])
    ones = [torch.ones(3, device=dr.place(node)) for node in (0, 1)]
    # The first call waits to hear what the function returns.
    for_so_long(ones[1], 0.0)
    # Here is what keeps it.
    for_so_long(ones[1], 3600.0)
    # Here is the stuck collective.
    dr.distributed.all_reduce(ones, group=group)
    print("waits", flush=True)
    # Here is the wait for it.
    ones[0].sum().item()


FAULTS: dict[str, Callable[[Training], None]] = {
    function.__name__: function for function in (read, node, leak, stuck)
}


def line_of(mark: str) -> str:
    """Return "planted.py:12" of the line below the comment with this mark."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [k + 1 for k, line in enumerate(lines, 1) if line.strip() == f"# Here is {mark}."]
    return f"{Path(__file__).name}:{number}"


def train(fault: str) -> None:
    """Begin a session, and train with this fault until the process is ended."""
    dr.init_master_worker(world_size=2, session="planted", quiet=True, timeout=90)
    training = Training()
    training.step()
    dr.synchronize()
    print("trains", flush=True)
    while True:
        FAULTS[fault](training)


def trace(fault: str, path: str, timeout: float = 10.0) -> None:
    """Begin a session, trace some steps with this fault, and print what `dr.why_slow` says of them."""
    dr.init_master_worker(world_size=2, quiet=True, timeout=90)
    training = Training()
    training.step()
    dr.synchronize()
    with dr.trace(path, quiet=True, timeout=timeout):
        if fault == "stuck":
            _stuck_and_on(training)
        else:
            FAULTS[fault](training)
    print(dr.why_slow(), flush=True)
    print("traced", flush=True)
    # What is stuck would keep an orderly end from coming.
    os._exit(0)


def _stuck_and_on(training: Training) -> None:
    """As `stuck`, but go on to the end of the trace without a wait."""
    group = dr.distributed.new_group([0, 1])
    ones = [torch.ones(3, device=dr.place(node)) for node in (0, 1)]
    for_so_long(ones[1], 0.0)
    # Here is what keeps it in the trace.
    for_so_long(ones[1], 3600.0)
    # Here is the stuck collective in the trace.
    dr.distributed.all_reduce(ones, group=group)


if __name__ == "__main__":
    if sys.argv[1:2] == ["trace"]:
        trace(sys.argv[2], sys.argv[3])
    else:
        train(sys.argv[1])
