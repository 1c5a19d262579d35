"""What a check gets: sessions with workers of this machine, their accelerators, a voice for what it sees."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import distruntime as dr
from here import Here

ROOT = Path(__file__).resolve().parents[3]
STARTING = 90.0


class LeftOut(Exception):
    """A check, or a part of one, cannot be tried here. The text says why."""


class Failed(AssertionError):
    """A check saw what it must not see."""


class Box:
    """This machine, as the checks see it.

    Args:
        simulate_cuda: the number of GPUs that each worker simulates with CPU tensors, or 0.
        quick: whether small sizes and few rounds will do, as on simulated devices.
    """

    def __init__(self, simulate_cuda: int, quick: bool) -> None:
        self.simulate_cuda, self.quick = simulate_cuda, quick
        self.cuda = not simulate_cuda and torch.cuda.is_available()
        # Where the same code runs without a worker, to compare with: this process has no local gradients,
        # and `box.here(function, ...)` calls a function in one that has.
        self.local = "cuda" if self.cuda else "cpu"
        self.here = Here()
        self.parts_left_out: list[str] = []
        # The logs of all workers are there.
        self.state = Path(
            os.environ.setdefault("DISTRUNTIME_STATE", tempfile.mkdtemp(prefix="distruntime-gpu-"))
        )
        self.state.mkdir(parents=True, exist_ok=True)

    def saw(self, text: object) -> None:
        """Show what was seen."""
        print("\n".join(f"    {line}" for line in str(text).splitlines()), flush=True)

    def leave_out(self, part: str, why: str) -> None:
        """Take note that a part of a check is left out."""
        self.parts_left_out.append(f"{part} {why}")
        self.saw(f"left out: {part} {why}")

    def require(self, condition: object, text: str) -> None:
        """Raise `Failed` unless the condition holds."""
        if not condition:
            raise Failed(text)

    @contextmanager
    def session(self, world_size: int = 1, **options: Any) -> Iterator[list[dr.types.Place]]:
        """Open a session with workers that are started here; give the accelerators of node 0."""
        options = {"timeout": STARTING, "quiet": True, "simulate_cuda": self.simulate_cuda, **options}
        opened = dr.init_master_worker(world_size=world_size, **options)
        try:
            yield self.accelerators(0)
        finally:
            # What failed has been shown already.
            if dr.is_initialized():
                opened.shutdown(raise_unread=False)

    def accelerators(self, node: int) -> list[dr.types.Place]:
        """Return the places of a node that are no CPU."""
        info = dr.nodes()[node]
        # "accelerator:1" is spelled alike for every kind of device.
        numbers = [device.name.partition(":")[2] for device in info.devices if device.name != "cpu"]
        found = [dr.place(node, f"accelerator:{number}") for number in numbers]
        self.require(
            found,
            f"node {node} offers no accelerator: it has {', '.join(d.name for d in info.devices)}. Its log:\n"
            f"{self.logs()[-2000:]}",
        )
        return found

    def cards(self) -> int:
        """Return how many accelerators a worker of this machine would find."""
        if self.simulate_cuda:
            return self.simulate_cuda
        if self.cuda:
            return torch.cuda.device_count()
        with self.session() as places:
            return len(places)

    def logs(self) -> str:
        """Return what the workers of this run have written."""
        return "\n".join(
            file.read_text(encoding="utf-8", errors="replace")
            for file in sorted(self.state.rglob("worker-*.log*"))
        )

    def synchronize(self) -> None:
        """Wait for this process's own accelerator."""
        if self.cuda:
            torch.cuda.synchronize()

    def child(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run this Python with such arguments; return what it printed."""
        options = {"capture_output": True, "text": True, "timeout": 120, "cwd": ROOT, **options}
        return subprocess.run([sys.executable, *arguments], check=False, **options)


def raised(act: Callable[[], object]) -> str:
    """Return "RemoteError: its text" of what `act` raises, and "" if it raises nothing."""
    try:
        act()
    except (dr.DistruntimeError, RuntimeError, IndexError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def first_line(text: str) -> str:
    """Return the first line of a text, short enough for a line."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 160 else f"{line[:159]}…"


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Block until a condition holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)


def seconds_of(act: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def busy(place: dr.types.Place | str, milliseconds: float, quick: bool) -> torch.Tensor:
    """Keep the current stream of a place busy for about so many milliseconds, or a little where `quick`."""
    # A product of 2048 x 2048 in float32 takes 0.3 to 1 ms on a GPU of these years.
    size, products = (64, 30) if quick else (2048, max(1, round(milliseconds / 0.4)))
    x = torch.ones(size, size, device=place) / size
    for _ in range(products):
        x = x @ x
    return x
