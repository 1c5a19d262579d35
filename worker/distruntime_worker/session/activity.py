"""What the streams of a worker's sessions do, for whoever looks at them from outside.

A thread looks at the streams while somebody asks, and for some seconds after. While nobody does, there is no
such thread.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import final

from distruntime.errors import ProtocolError
from distruntime.wire.messages import AskMaster, JointRow, MasterReport, SeenSession, StreamRow
from distruntime.wire.shield import Lock

from ..collectives.operation import Collective
from ..collectives.taking_part import LaneCollective
from ..log.budget import held_in
from ..log.progress import Running
from ..log.timing import thread_name
from ..values.step import Own
from ..values.streams import Stream
from .session import Session

# So many seconds lie between two looks. A look takes some 50 us of the interpreter.
_EVERY = 0.05
# The thread rests so many times as long as its last look took: a worker may have hundreds of streams.
_REST = 20
# So many looks at a stream are kept. They are ten seconds and more.
_KEPT = 240
# So many seconds after the last question the thread ends.
_LINGER = 10.0
# A stream that had nothing to run for so many seconds is idle. Until then it waits for its master.
_IDLE = 10.0
# A master is asked where it is after so many seconds at the earliest, and of so many instructions at most.
_AGAIN, _POSITIONS = 0.5, 16
# What a master has said counts for so many seconds.
_FRESH = 5.0
# So many sessions and streams are reported at most, and so many characters of a text.
_SESSIONS, _STREAMS, _TEXT = 100, 64, 300
# A count of what a session holds is used again for so many seconds, and for so many times as long as it took.
_COUNTED, _PAUSE = 1.0, 50
# The names of steps that call a function of the user's begin so. The lines of so many are remembered.
_CALL, _NAMES = "python::", 64
# These letters stand for what a stream was seen at.
COMPUTING, HELD, JOINT, QUEUED, MASTER, IDLE = "c", "s", "g", "q", "m", "."


@final
class _Seen:
    """One session as it was seen lately."""

    def __init__(self) -> None:
        # The key is a thread of the session's.
        self.letters: dict[int, deque[str]] = {}
        # The thread last had something to run then.
        self.busy_at: dict[int, float] = {}
        self.held: dict[str, int] = {}
        # The next count is worth its time then.
        self.count_at = 0.0
        self.asked_at = -_AGAIN
        self.told: MasterReport | None = None
        self.told_at = 0.0
        self.lines: dict[tuple[int, int], str] = {}
        # The master was asked for the lines of these functions of its own, and has said this of them lately.
        self.functions: dict[tuple[int, int], str] = {}
        self.called: dict[str, str] = {}


@final
class Activity:
    """Looks at the streams of all sessions of a worker, while somebody asks. Any thread may call."""

    def __init__(self, sessions: Mapping[str, Session]) -> None:
        self._sessions = sessions
        self._seen: dict[Session, _Seen] = {}
        self._until = 0.0
        self._looked_at: deque[float] = deque(maxlen=_KEPT)
        self._lock = Lock()
        self._thread: threading.Thread | None = None

    def rows(self) -> tuple[float, list[SeenSession]]:
        """Return the seconds between two looks, and what each session does; look for some seconds more
        (the reader).
        """
        now = time.monotonic()
        with self._lock:
            self._until = now + _LINGER
            if self._thread is None:
                self._look(now)
                self._thread = threading.Thread(target=self._run, name="looks", daemon=True)
                self._thread.start()
            looked = list(self._looked_at)
            every = (looked[-1] - looked[0]) / (len(looked) - 1) if len(looked) > 1 else _EVERY
            found = []
            for session in islice(self._sessions.values(), _SESSIONS):
                seen = self._seen.setdefault(session, _Seen())
                found.append(self._row(session, seen, now))
                self._ask(session, seen, now)
        return every, found

    def told(self, session: Session, message: MasterReport) -> None:
        """Take what a master says of itself (the reader)."""
        lines: dict[tuple[int, int], str] = {}
        for row in message.lines[:_POSITIONS]:
            match row:
                case [int(mesh), int(position), str(line)]:
                    lines[mesh, position] = line[:_TEXT]
                case _:
                    raise ProtocolError(f"{row!r:.80} is no line of an instruction")
        with self._lock:
            seen = self._seen.get(session)
            if seen is not None:
                seen.told, seen.told_at, seen.lines = message, time.monotonic(), lines
                called = {seen.functions[at]: line for at, line in lines.items() if at in seen.functions}
                seen.called = {**(seen.called if len(seen.called) < _NAMES else {}), **called}

    # -- looks -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            with self._lock:
                if began > self._until:
                    # Nothing is kept of sessions while nobody looks.
                    self._thread = None
                    self._seen.clear()
                    self._looked_at.clear()
                    return
                self._look(began)
            time.sleep(max(_EVERY, _REST * (time.monotonic() - began)))

    def _look(self, now: float) -> None:
        """Note what each stream does now."""
        self._looked_at.append(now)
        there = list(self._sessions.values())
        for ended in [session for session in self._seen if session not in there]:
            del self._seen[ended]
        frames = sys._current_frames()
        for session in there[:_SESSIONS]:
            state, seen = session.executor.state, self._seen.setdefault(session, _Seen())
            for thread, stream in islice(list(state.by_thread.items()), _STREAMS):
                runs = session.executor.progress.running(stream, frames.get(thread))
                letter = _letter(session, stream, runs)
                if letter != IDLE:
                    seen.busy_at[thread] = now
                elif now < seen.busy_at.get(thread, stream.started) + _IDLE and session.link.peer is not None:
                    letter = MASTER
                if thread not in seen.letters:
                    seen.letters[thread] = deque(maxlen=_KEPT)
                seen.letters[thread].append(letter)
        # Otherwise this variable would hold what the frames' own variables hold.
        del frames

    def _row(self, session: Session, seen: _Seen, now: float) -> SeenSession:
        state, executor = session.executor.state, session.executor
        if now >= seen.count_at:
            seen.held = {str(device): held for device, held in held_in(state.slots).items()}
            took = time.monotonic() - now
            seen.count_at = now + max(_COUNTED, _PAUSE * took)
        streams: list[StreamRow] = []
        frames = sys._current_frames()
        for thread, stream in islice(list(state.by_thread.items()), _STREAMS):
            name, _ = thread_name(state, thread)
            status = executor.progress.position(stream)
            runs = executor.progress.running(stream, frames.get(thread))
            line = "" if runs is None else seen.lines.get((runs.mesh, runs.position), "")
            # A loop calls a function at one line again and again, each time at another position.
            line = line or seen.called.get(status.running or "", "")
            joint = None if runs is None else _joint(session, runs, status.seconds, line)
            running = None if status.running is None else status.running[:_TEXT]
            letters = "".join(seen.letters.get(thread, ()))
            streams.append(StreamRow(name, letters, running, status.seconds, line, joint))
        del frames
        at = waits = ""
        if seen.told is not None and now < seen.told_at + _FRESH and session.link.peer is not None:
            at, waits = seen.told.at[:_TEXT], seen.told.waits[:_TEXT]
        return SeenSession(session.name, executor.joint.node, seen.held, streams, at, waits)

    def _ask(self, session: Session, seen: _Seen, now: float) -> None:
        """Ask a master that is there where it is."""
        if session.link.peer is None or now < seen.asked_at + _AGAIN:
            return
        seen.asked_at = now
        state, frames, positions = session.executor.state, sys._current_frames(), list[list[int]]()
        seen.functions.clear()
        for thread, stream in islice(list(state.by_thread.items()), _POSITIONS):
            runs = session.executor.progress.running(stream, frames.get(thread))
            if runs is not None:
                positions.append([runs.mesh, runs.position])
                if runs.step is not None and runs.step.name.startswith(_CALL):
                    seen.functions[runs.mesh, runs.position] = runs.step.name
        del frames
        session.send(AskMaster(positions))


def _letter(session: Session, stream: Stream, runs: Running | None) -> str:
    if runs is None:
        state = session.executor.state
        return QUEUED if not stream.queue.empty() or (state.works and state.one_stream()) else IDLE
    if runs.step is not None and runs.step.joint:
        return JOINT
    if isinstance(runs.step, Own) and runs.step.name.startswith("a wait for "):
        return HELD
    return COMPUTING


def _joint(session: Session, runs: Running, seconds: float, line: str) -> JointRow | None:
    """Return the operation of a group that a stream is in, if it is in one."""
    step, groups = runs.step, session.executor.joint.groups
    if isinstance(step, Collective):
        numbers = [step.group]
    elif isinstance(step, LaneCollective):
        numbers = step.groups
    else:
        return None
    found = [group for number in numbers if (group := groups.get(number)) is not None]
    nodes = sorted({node for group in found for node in group.nodes})
    key = f"mesh {runs.mesh} at {runs.position}" if runs.mesh >= 0 else f"{step.name}, {runs.sequence}"
    name = step.name.partition(" of group ")[0] if runs.mesh >= 0 else step.name
    return JointRow(name.removeprefix("group::")[:_TEXT], key[:_TEXT], nodes, seconds, line)
