"""Where streams are, read off their threads' frames, so that running an instruction need not say so."""

from __future__ import annotations

import sys
import time
from types import CodeType, FrameType
from typing import NamedTuple

from distruntime.wire.messages import BEFORE_INSTRUCTION, Status

from ..values.step import Step
from ..values.streams import Stream, Work
from .state import State


class Place(NamedTuple):
    """Where an instruction stands: its segment, its position in the log, and the one after it."""

    seq: int
    position: int
    end: int


class Running(NamedTuple):
    """What a stream runs now: a step, None for a free, at a position in a log (a mesh's, or -1).

    `sequence` is the number of the operation in its group, -1 where the step is no such operation.
    """

    step: Step | None
    mesh: int
    position: int
    sequence: int


class Progress:
    """Tells where a session's streams are.

    `runs` is the code of the functions that walk words, whose locals it reads.
    """

    def __init__(self, state: State, runs: tuple[CodeType, ...]) -> None:
        self._state, self._runs = state, runs
        # Each stream has the position at which it was last seen, since when, and when that was.
        self._seen: dict[Stream, tuple[int, float, float]] = {}

    def status(self) -> Status:
        """Return where the first stream is that runs an operator; where none does, the first stream."""
        looks = [self.position(stream) for stream in self._state.all_streams()]
        return next((look for look in looks if look.running is not None), looks[0])

    def place(self, thread: int) -> Place | None:
        """Return where the instruction stands that a thread runs; None where it runs none."""
        frame = self._frame_that_runs(thread)
        names = {} if frame is None else frame.f_locals
        i, words, start, work = (names.get(name) for name in ("i", "words", "start", "work"))
        if i is None or words is None or start is None or work is None or i >= len(words):
            return None
        before = i
        while isinstance(words[i], int) and words[i] in BEFORE_INSTRUCTION:
            i += BEFORE_INSTRUCTION[words[i]]
        found = self._state.log(work).info.get(words[i])
        length = 1 if found is None else found.length
        return Place(work.segment.seq, start + before, start + i + length)

    def _frame_that_runs(self, thread: int) -> FrameType | None:
        """Return the frame of a thread that runs a segment; None where it runs none.

        The chain of a thread that is just making a frame may end in something else than a frame: Python 3.11
        gave a cell once in some 8,000 tests.
        """
        return self._running_frame(sys._current_frames().get(thread))

    def _running_frame(self, frame: object) -> FrameType | None:
        while isinstance(frame, FrameType):
            if frame.f_code in self._runs:
                return frame
            frame = frame.f_back
        return None

    def running(self, stream: Stream, innermost: FrameType | None) -> Running | None:
        """Return what a stream runs, by the innermost frame of its thread; None where it runs nothing."""
        frame = self._running_frame(innermost)
        if frame is None:
            return None
        names = frame.f_locals
        i, words, start, work = (names.get(name) for name in ("i", "words", "start", "work"))
        if i is None or words is None or start is None or work is None or names.get("stream") is not stream:
            return None
        if i >= names.get("stop", names.get("n", 0)):
            return None
        while isinstance(words[i], int) and words[i] in BEFORE_INSTRUCTION:
            i += BEFORE_INSTRUCTION[words[i]]
        step = self._state.log(work).info.get(words[i]) or self._state.own.get(words[i])
        mesh = -1 if work.mesh is None else work.mesh.number
        joint = step is not None and step.joint and isinstance(words[i + 1], int)
        return Running(step, mesh, start + i, words[i + 1] if joint else -1)

    def stretch(self, thread: int) -> tuple[Work, int, int] | None:
        """Return what a thread has still to run of its stretch, with what it runs now."""
        frame = self._frame_that_runs(thread)
        names = {} if frame is None else frame.f_locals
        if "i" not in names:
            return None
        return names["work"], names["i"], names.get("stop", len(names["work"].segment.words))

    def position(self, stream: Stream) -> Status:
        """Return where a stream is, read off its thread's frame.

        Looking from outside costs the hot path nothing; keeping a note per instruction would cost it 30 ns.
        """
        thread = next((ident for ident, mine in list(self._state.by_thread.items()) if mine is stream), None)
        frame = self._frame_that_runs(thread) if thread is not None else None
        if frame is None:
            return Status(stream.reached, None, 0.0)
        names = frame.f_locals
        i, words, start = names.get("i"), names.get("words"), names.get("start")
        # The thread of stream 0 runs the meshes' stream 0 too, and may just have turned to that: its
        # positions are others.
        if i is None or words is None or start is None or names.get("stream") is not stream:
            return Status(stream.reached, None, 0.0)
        position = start + i
        if i >= names.get("stop", names.get("n", 0)):
            return Status(position, None, 0.0)
        while isinstance(words[i], int) and words[i] in BEFORE_INSTRUCTION:
            i += BEFORE_INSTRUCTION[words[i]]
        found = self._state.log(names["work"]).info.get(words[i]) or self._state.own.get(words[i])
        return Status(position, found.name if found else "a free", self._seconds(stream, position))

    def _seconds(self, stream: Stream, position: int) -> float:
        """Return for about how many seconds a stream has run the instruction at a position.

        Nobody notes when an instruction begins, but the reader looks twice a second. So the instruction began
        after the last look that has found the stream elsewhere.
        """
        now = time.monotonic()
        before = self._seen.get(stream)
        if before is None or before[1] < stream.started:
            since = stream.started
        else:
            since = before[1] if before[0] == position else before[2]
        self._seen[stream] = position, since, now
        return now - since
