"""Whether it would pay to replace equal steps by replays as they are sent, with nothing changed in a program.

`benchmarks.tap` does so on trial. Beside it stand the same steps op by op; op by op with whole steps in a
message, which is half of what the tap does; and as a program. All times but those of a read are processor
time: of the thread that issues, and of the worker's busiest thread. Where nothing is read and each of the two
has a core, a step takes what the slower of the two takes.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

import distruntime as dr
from distruntime.log.log import Log
from distruntime.log.node import Node
from distruntime.session.session import active_session

from .harness import Figure
from .peer_systems import gpt_stepper
from .tap import Tap, whole_step, withheld
from .training_step import stepper

Step = Callable[[], torch.Tensor]
# Each has a name, what makes its step, and how many steps a round has.
_PROGRAMS: tuple[tuple[str, Callable[[str], Step], int], ...] = (
    ("MLP", stepper, 100),
    ("GPT of width 32", partial(gpt_stepper, width=32, samples=2), 16),
    ("GPT of width 128", gpt_stepper, 8),
)
# These ways are compared with the same step in this process.
_NAMES = {
    "plain": "op by op",
    "whole": "whole steps in a message",
    "replaced": "replaced",
    "program": "a program",
}
# After so many steps the tap has seen two that are alike.
_SETTLED = 4


class _Cost(NamedTuple):
    """What one step has cost: seconds."""

    wall: float
    issuing: float
    # It is the worker's busiest thread, and then its whole process.
    thread: float
    worker: float


def _threads(process: int) -> dict[str, float]:
    """Return the processor time of each thread of a process, in seconds."""
    found = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        found[task.name] = int((task / "schedstat").read_text(encoding="utf-8").split()[0]) / 1e9
    return found


class _Way:
    """One way to make steps on a worker.

    `after` is called after each step, where the log of the node is withheld, and `send` sends what is held.
    """

    def __init__(
        self,
        node: Node,
        step: Step,
        after: Callable[[], object] | None = None,
        send: Callable[[], object] | None = None,
    ) -> None:
        self._node, self._step, self._after, self._send = node, step, after, send or node.flush

    def cost(self, steps: int, read: bool = False) -> _Cost:
        """Make so many steps, and read each one's loss or none."""
        node = self._node
        dr.synchronize()
        with nullcontext() if self._after is None else withheld(node):
            for _ in range(_SETTLED):
                self._once(read)
            self._send()
            while node.flights:
                time.sleep(0.001)
            before = _threads(node.welcome.pid)
            began, issued = time.perf_counter(), time.thread_time()
            for _ in range(steps):
                self._once(read)
            issuing = time.thread_time() - issued
            self._send()
        dr.synchronize()
        wall = time.perf_counter() - began
        used = [total - before.get(thread, 0.0) for thread, total in _threads(node.welcome.pid).items()]
        return _Cost(*(total / steps for total in (wall, issuing, max(used), sum(used))))

    def _once(self, read: bool) -> None:
        # The loss of the step before is let go of here, within this one.
        self._loss = self._step()
        if self._after is not None:
            self._after()
        if read:
            self._send()
            self._loss.item()


@contextmanager
def _timed_flush(found: list[float]) -> Iterator[None]:
    """Add to the list what this thread spends in sending its log."""
    real, mine = Log.flush, threading.get_ident()

    def flush(log: Log, upto: int | None = None, *, gathered: bool = False) -> None:
        began = time.thread_time()
        real(log, upto, gathered=gathered)
        if threading.get_ident() == mine:
            found.append(time.thread_time() - began)

    with patch.object(Log, "flush", flush):
        yield


def _require_equal(node: Node, make: Callable[[str], Step]) -> None:
    """Raise if losses of replaced steps are not those of steps op by op, bit for bit."""
    plain, replaced, tap = make("remote"), make("remote"), Tap(node)
    expected = [plain() for _ in range(12)]
    # Until the worker has confirmed what was predicted, there are words that ask for it.
    dr.synchronize()
    found = []
    with withheld(node):
        for _ in range(12):
            found.append(replaced())
            tap.step()
        tap.send()
    assert tap.replaced >= 6, tap.replaced
    assert torch.equal(torch.stack(expected).cpu(), torch.stack(found).cpu())


class _Measured(NamedTuple):
    """The costs of each way by its name, round by round, and shares of the issuing thread's time."""

    ways: dict[str, list[_Cost]]
    # Comparing is what the tap does for a step that is replaced. Sending is what the thread does op by op to
    # send its log.
    comparing: list[float]
    sending: list[float]


def _measured(make: Callable[[str], Step], steps: int, rounds: int) -> _Measured:
    node = active_session().nodes[0]
    _require_equal(node, make)
    tap, program = Tap(node), dr.program(make("remote"))
    for _ in range(_SETTLED):
        program()
    assert program.replays, program.why
    plain, replaced = _Way(node, make("remote")), _Way(node, make("remote"), tap.step, tap.send)
    ways = {
        "plain": plain,
        "whole": _Way(node, make("remote"), partial(whole_step, node)),
        "replaced": replaced,
        "program": _Way(node, program),
        "local": _Way(node, make("cpu")),
    }
    found = _Measured({name: [] for name in (*ways, "plain, read", "replaced, read")}, [], [])
    for way in ways.values():
        way.cost(steps)
    for _ in range(rounds):
        for name, way in ways.items():
            looked, before = tap.seconds, tap.replaced
            cost = way.cost(steps)
            found.ways[name].append(cost)
            if way is replaced:
                assert tap.replaced - before >= steps, "the tap has met a step that is not as the one before"
                each = (tap.seconds - looked) / (tap.replaced - before)
                found.comparing.append(each / cost.issuing)
        found.ways["plain, read"].append(plain.cost(steps, read=True))
        found.ways["replaced, read"].append(replaced.cost(steps, read=True))
        sent: list[float] = []
        with _timed_flush(sent):
            issuing = plain.cost(steps).issuing
        found.sending.append(sum(sent) / (steps + _SETTLED) / issuing)
    return found


def _issuing(cost: _Cost) -> float:
    return cost.issuing


def _thread(cost: _Cost) -> float:
    return cost.thread


def _worker(cost: _Cost) -> float:
    return cost.worker


def _wall(cost: _Cost) -> float:
    return cost.wall


def _slower(cost: _Cost) -> float:
    return max(cost.issuing, cost.thread)


def _figures(name: str, found: _Measured) -> Iterator[Figure]:
    def beside_local(way: str) -> Figure:
        pairs = [(a.thread, b.issuing) for a, b in zip(found.ways[way], found.ways["local"])]
        there, here = (statistics.median(column) * 1e3 for column in zip(*pairs))
        ratio = statistics.median(a / b for a, b in pairs)
        note = f"{there:.2f} ms, {here:.2f} ms a step"
        return Figure(f"{name}: worker's thread, {_NAMES[way]} / local", ratio, "x", None, note)

    def figure(what: str, way: str, of: Callable[[_Cost], float], other: str = "plain") -> Figure:
        ours, theirs = found.ways[way], found.ways[other]
        pair = [statistics.median(map(of, costs)) * 1e3 for costs in (ours, theirs)]
        ratio = statistics.median(of(a) / of(b) for a, b in zip(ours, theirs))
        return Figure(f"{name}: {what}", ratio, "x", None, f"{pair[0]:.2f} ms, {pair[1]:.2f} ms a step")

    plain = found.ways["plain"]
    bound = statistics.median(cost.thread / cost.issuing for cost in plain)
    yield Figure(f"{name}: op by op, worker's thread / issuing thread", bound, "x", None)
    share = statistics.median(found.sending) * 100
    yield Figure(f"{name}: op by op, sending of the issuing thread's time", share, "%", None)
    share = statistics.median(found.comparing) * 100
    yield Figure(f"{name}: finding it equal, of the issuing thread's time", share, "%", None)
    for way in _NAMES:
        yield beside_local(way)
    yield figure("issuing thread, replaced / op by op", "replaced", _issuing)
    yield figure("worker's thread, replaced / op by op", "replaced", _thread)
    yield figure("worker's thread, whole steps in a message / op by op", "whole", _thread)
    yield figure("worker's thread, replaced / whole steps in a message", "replaced", _thread, "whole")
    yield figure("worker's process, replaced / op by op", "replaced", _worker)
    yield figure("worker's process, whole steps in a message / op by op", "whole", _worker)
    yield figure("the slower thread, replaced / op by op", "replaced", _slower)
    yield figure("the slower thread, whole steps in a message / op by op", "whole", _slower)
    yield figure("the slower thread, replaced / whole steps in a message", "replaced", _slower, "whole")
    yield figure("the slower thread, a program / op by op", "program", _slower)
    yield figure("wall, replaced / op by op", "replaced", _wall)
    yield figure("wall, replaced / op by op, loss read each step", "replaced, read", _wall, "plain, read")


def measure(quick: bool) -> list[Figure]:
    """Return the figures of each program."""
    figures: list[Figure] = []
    with dr.init_master_worker(world_size=1, quiet=True):
        for name, make, steps in _PROGRAMS:
            rounds = 2 if quick else 7
            figures += _figures(name, _measured(make, steps // 4 if quick else steps, rounds))
    return figures
