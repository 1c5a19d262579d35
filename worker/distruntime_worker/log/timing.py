"""Notes when each instruction of a session begins and ends, while its master traces.

It is a link, and off until it is asked for. So a session that is not traced runs each step's own `run`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from itertools import count
from threading import get_ident
from time import perf_counter_ns
from types import CodeType, FrameType

from distruntime.wire.messages import Fetch, TracedStep, TracedThread, TraceKept

from ..machine.kernels import Launched
from ..values.step import Own, Run, Slots, Step, Words
from ..values.streams import Work
from .state import State

# There are never more rows than this. They take 192 MiB.
MOST = 1 << 22
# A row has so many numbers, and each of them so many bytes.
ROW, NUMBER = 6, 8
# These either run another instruction, which is noted itself, or compute nothing.
_UNTIMED = ("check", "learn", "watch", "forget", "drop", "mark", "release")
# An instruction that has not ended ends then.
_RUNS = -1

Answer = Callable[[Fetch, object], None]


class _Rows(dict[int, "array[int]"]):
    """The rows of each thread. A thread adds to its own only."""

    def __missing__(self, thread: int) -> array[int]:
        rows = self[thread] = array("q")
        return rows


class Recorded:
    """What is noted while a master traces: rows by thread, and the names of their steps by number."""

    def __init__(self, most: int) -> None:
        self._most = max(0, min(most, MOST))
        self._numbers: dict[TracedStep, int] = {}
        self._rows, self._arrived = _Rows(), array("q")
        # Threads share it, and `next` of a count is one step for them.
        self._taken = count().__next__
        # What notes an instruction has this code. Its frame shows which one runs.
        self._code: CodeType | None = None

    def _number(self, name: str, joint: bool) -> int:
        return self._numbers.setdefault(TracedStep(name, joint), len(self._numbers))

    def timed(self, step: Step, run: Run, under_way: dict[int, Work]) -> Run:
        """Return what runs a step and notes when."""
        number, joint = self._number(step.name, step.joint), step.joint
        taken, most, rows = self._taken, self._most, self._rows

        def timed(slots: Slots, p: Words, i: int) -> int:
            began = perf_counter_ns()
            after = run(slots, p, i)
            ended = perf_counter_ns()
            if taken() < most:
                work = under_way[id(p)]
                mesh = -1 if work.mesh is None else work.mesh.number
                sequence: int = p[i + 1] if joint else -1  # type: ignore[assignment]
                rows[get_ident()].extend((number, mesh, work.segment.start + i, sequence, began, ended))
            return after

        self._code = timed.__code__
        return timed

    def answering(self, answer: Answer) -> Answer:
        """Return what answers a fetch with a value and notes when."""

        def timed(fetch: Fetch, value: object) -> None:
            began = perf_counter_ns()
            try:
                answer(fetch, value)
            finally:
                if self._taken() < self._most:
                    number = self._number(f"fetch {fetch.form}", False)
                    row = (number, -1, fetch.request, -1, began, perf_counter_ns())
                    self._rows[get_ident()].extend(row)

        return timed

    def arrived(self, seq: int) -> None:
        """Note that a segment is here (the reader)."""
        if self._taken() < self._most:
            self._arrived.extend((seq, perf_counter_ns()))

    def kept(self, state: State, launched: Iterable[Launched], why: str) -> tuple[TraceKept, bytes]:
        """Return what there is, and its bytes. Note what still runs (the reader, or a thread of its own)."""
        dropped = max(0, self._taken() - self._most)
        rows = {thread: array("q", found) for thread, found in list(self._rows.items())}
        for thread, row in self._running(state).items():
            rows.setdefault(thread, array("q")).extend(row)
        threads = [
            TracedThread(*thread_name(state, thread), len(found) // ROW) for thread, found in rows.items()
        ]
        blocks = list(rows.values())
        by_stream: dict[str, array[int]] = {}
        for one in launched:
            number = self._number(one.name, False)
            block = by_stream.setdefault(one.stream, array("q"))
            block.extend((number, -1, one.launched, -1, one.began, one.ended))
        threads += [TracedThread(name, "kernels", len(found) // ROW) for name, found in by_stream.items()]
        blocks += [*by_stream.values(), array("q", self._arrived)]
        if sys.byteorder == "big":
            for block in blocks:
                block.byteswap()
        data = b"".join(block.tobytes() for block in blocks)
        pairs = len(self._arrived) // 2
        return TraceKept(list(self._numbers), threads, pairs, dropped, len(data), why), data

    def _running(self, state: State) -> dict[int, tuple[int, ...]]:
        """Return a row of each instruction that runs now, read off its thread's frame, by thread."""
        found: dict[int, tuple[int, ...]] = {}
        for thread, innermost in sys._current_frames().items():
            frame: object = innermost
            # See `Progress`: the chain may end in something else than a frame.
            while isinstance(frame, FrameType) and frame.f_code is not self._code:
                frame = frame.f_back
            names = frame.f_locals if isinstance(frame, FrameType) else {}
            if names.get("rows") is not self._rows:
                continue
            words, i, began, number = names["p"], names["i"], names.get("began"), names["number"]
            work = state.under_way.get(id(words))
            if work is not None and isinstance(began, int) and "ended" not in names:
                mesh = -1 if work.mesh is None else work.mesh.number
                sequence = words[i + 1] if names["joint"] else -1
                found[thread] = (number, mesh, work.segment.start + i, sequence, began, _RUNS)
        return found


def thread_name(state: State, thread: int) -> tuple[str, str]:
    """Return what a thread of a session is called, and its kind."""
    stream = state.by_thread.get(thread)
    if stream is None:
        return ("reader", "reader") if thread == state.reader else ("answers", "other")
    for mesh in list(state.meshes.values()):
        if stream.number and mesh.streams.get(stream.number) is stream:
            return f"stream {stream.number} of mesh {mesh.number} ({stream.device})", "stream"
    on = f" ({stream.device})" if stream.number else ""
    return f"stream {stream.number}{on}", "stream"


class Timing:
    """The link that notes when instructions begin and end. `switched` is called when it goes on or off."""

    # A mesh's instruction is one row, whoever of its members are here.
    each = False

    def __init__(self, state: State, switched: Callable[[], None]) -> None:
        self._state, self._switched = state, switched
        self._recorded: Recorded | None = None

    def start(self, most: int) -> Recorded:
        """Begin anew (the reader)."""
        self._recorded = recorded = Recorded(most)
        self._switched()
        return recorded

    def stop(self) -> None:
        """Let each step run as before (the reader)."""
        self._recorded = None
        self._switched()

    def around(self, step: Step, run: Run) -> Run | None:
        """Return what runs a step and notes when; None while nobody traces."""
        if self._recorded is None or (isinstance(step, Own) and step.name in _UNTIMED):
            return None
        return self._recorded.timed(step, run, self._state.under_way)
