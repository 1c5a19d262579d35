"""Programs where recordings cost more than replays save, against the same steps op by op on the same worker.

A schedule that changes at each step, batches that are slices of one tensor, a model for each fold, and an
optimizer that counts its steps here. Each loop begins with a new program, so its recordings count.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import distruntime as dr

from .harness import Figure, in_turn, seconds

_BATCH, _STEPS, _FOLDS = 32, 100, 3
# So many plain calls stand against five that are recorded.
_RECORDED = 50
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# It makes a step, and returns the step and what is called behind each one.
Making = Callable[[], tuple[Step, Callable[[], object]]]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)).to("remote")


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def one_cycle() -> tuple[Step, Callable[[], object]]:
    """Return a step whose learning rate and betas follow a schedule."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=_STEPS + 1)
    return _step_of(model, optimizer), schedule.step


def sgd() -> tuple[Step, Callable[[], object]]:
    """Return a step that has no state but its parameters."""
    model = _model()
    return _step_of(model, torch.optim.SGD(model.parameters(), lr=0.01)), lambda: None


def not_fused() -> tuple[Step, Callable[[], object]]:
    """Return a step whose optimizer counts its steps in this process."""
    model = _model()
    return _step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-3)), lambda: None


class _Loop:
    """A loop over slices of one tensor, as it is and with a program."""

    def __init__(self, make: Making, folds: int, steps: int) -> None:
        self._make, self._folds, self._steps = make, folds, steps
        self._x = torch.randn(_STEPS * _BATCH, 10).to("remote")
        self._y = torch.randn(_STEPS * _BATCH).to("remote")
        self.told = ""

    def run(self, as_program: bool) -> float:
        """Return the seconds of a loop."""
        torch.manual_seed(0)
        made = [self._make() for _ in range(self._folds)]
        for step, _ in made:
            # What is slow the first time only is not what this measures.
            step(self._x[:_BATCH], self._y[:_BATCH])
        programs: list[Any] = [dr.program(step) if as_program else step for step, _ in made]

        def loop() -> None:
            for program, (_, after) in zip(programs, made):
                for k in range(self._steps):
                    at = slice(k * _BATCH, (k + 1) * _BATCH)
                    loss = program(self._x[at], self._y[at])
                    after()
                loss.item()

        took = seconds(loop)
        if as_program:
            counts = [sum(getattr(one, name) for one in programs) for name in ("recordings", "replays")]
            self.told = f"{counts[0]} recordings, {counts[1]} replays"
        return took


def _figure(what: str, make: Making, folds: int, steps: int, bar: float | None, rounds: int) -> Figure:
    loop = _Loop(make, folds, steps)
    for as_program in (False, True):
        loop.run(as_program)
    ratio, ours, theirs = in_turn(lambda: loop.run(True), lambda: loop.run(False), rounds)
    per = 1e3 / folds / steps
    note = f"{ours * per:.2f} ms a step, plain {theirs * per:.2f} ms; {loop.told}"
    return Figure(f"{what}, as a program / plain", ratio, "x", bar, note)


def _addition() -> Callable[[], object]:
    x = torch.ones(20, 20, device="remote")
    return lambda: x + 1


def _mlp(layers: int) -> Callable[[], object]:
    """Return a step of an MLP on a worker, with AdamW."""
    sizes = [10, *[64] * (layers - 1), 1]
    parts = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*parts[:-1]).to("remote")
    step = _step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    return partial(step, torch.randn(_BATCH, 10).to("remote"), torch.randn(_BATCH).to("remote"))


def _recording(what: str, work: Callable[[], object], rounds: int) -> Figure:
    """Compare a call that is recorded with the plain call. Each is this process's own processor time."""

    def cost(once: Callable[[], object], times: int) -> float:
        dr.synchronize()
        began = time.process_time()
        for _ in range(times):
            once()
        return (time.process_time() - began) / times

    def recorded() -> None:
        program = dr.program(work)
        program()
        assert program.recordings == 1, program.why

    cost(work, 20), cost(recorded, 3)
    ratio, ours, theirs = in_turn(lambda: cost(recorded, 5), lambda: cost(work, _RECORDED), rounds)
    note = f"{ours * 1e3:.1f} ms, plain {theirs * 1e3:.2f} ms; processor time of this process"
    return Figure(f"a recording of {what} / the plain call", ratio, "x", None, note)


def measure(quick: bool) -> list[Figure]:
    """Return the figures of recordings, and of loops in which a recording is much of the time."""
    rounds = 3 if quick else 9
    with dr.init_master_worker(world_size=1, quiet=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        folds = f"a model for each of {_FOLDS} folds"
        return [
            _recording("one addition", _addition(), rounds),
            _recording("a step of an MLP of 3 layers", _mlp(3), rounds),
            _recording("a step of an MLP of 12 layers", _mlp(12), rounds),
            _figure(f"{_STEPS} steps, OneCycleLR, AdamW(fused)", one_cycle, 1, _STEPS, 1.05, rounds),
            _figure(f"{_STEPS} slices of one tensor, SGD", sgd, 1, _STEPS, 1.05, rounds),
            _figure(f"{folds} of 100 steps", sgd, _FOLDS, 100, 1.05, rounds),
            _figure(f"{folds} of 30 steps", sgd, _FOLDS, 30, None, rounds),
            _figure(f"{folds} of 10 steps", sgd, _FOLDS, 10, None, rounds),
            _figure(f"{_STEPS} steps, AdamW as it is", not_fused, 1, _STEPS, 1.05, rounds),
        ]
