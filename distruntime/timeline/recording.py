"""What the master notes while a trace is on: segments that leave, when they have run, and its waits.

A thread looks at the program's frames some hundred times a second, so a trace says where it is.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import final

from ..log.line import Line, inside, line_number, of_a_library, user_line
from ..log.log import Log
from ..log.mesh_log import MeshLog
from ..log.node import Node
from ..log.segment import Flight, Send
from ..session import stalls
from ..session.session import Session
from ..wire.link import Delivery, Part
from ..wire.shield import shield

# So many seconds lie between two looks. A look takes the interpreter away from the program for a moment.
_EVERY = 0.005
# So many changes of the line are kept.
_MOST = 200_000


@dataclass(slots=True)
class Stay:
    """How long the program was at a line: of the user's own, and of a library's that it has called.

    While it is `issuing`, it is inside torch or this package.
    """

    file: str
    number: int
    library: str
    issuing: bool
    began: int
    ended: int


@final
class Sampler:
    """Notes at which line one thread is."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self.stays: list[Stay] = []
        # An Event's lock is taken in Python code, where Ctrl-C can come before the lock is given back.
        self._over: SimpleQueue[None] = SimpleQueue()
        self._own: dict[str, bool] = {}
        self._runs = threading.Thread(target=self._run, name="distruntime-trace", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._runs.start()

    def stop(self) -> None:
        """Look no more. Block until the thread has ended."""
        self._over.put(None)
        self._runs.join()

    def _run(self) -> None:
        before = time.perf_counter_ns()
        while True:
            try:
                self._over.get(timeout=_EVERY)
                return
            except queue.Empty:
                pass
            frame, now = sys._current_frames().get(self._thread), time.perf_counter_ns()
            if frame is not None:
                self._look(frame, before, now)
            # Otherwise this variable would hold what the frame's own variables hold.
            del frame
            before = now

    def _look(self, frame: FrameType, before: int, now: int) -> None:
        issuing, found, library = inside(frame.f_code), "", ""
        number = 0
        caller: FrameType | None = frame
        # Where Dynamo has run functions, Python 3.11 once gave a dict as the caller of a frame of another
        # thread.
        while isinstance(caller, FrameType):
            file = caller.f_code.co_filename
            if self._is_own(file):
                # A frame between two lines has no `f_lineno`.
                found, number = file, line_number(caller.f_code, caller.f_lasti)
                break
            if not library and not inside(caller.f_code):
                library = f"{file}:{line_number(caller.f_code, caller.f_lasti)}"
            caller = caller.f_back
        last = self.stays[-1] if self.stays else None
        if (
            last is not None
            and (last.file, last.number, last.issuing) == (found, number, issuing)
            and last.library == library
        ):
            last.ended = now
        elif len(self.stays) < _MOST:
            self.stays.append(Stay(found, number, library, issuing, before, now))

    def _is_own(self, file: str) -> bool:
        """Whether a file is the user's own."""
        known = self._own.get(file)
        if known is None:
            known = self._own[file] = not of_a_library(file)
        return known


@dataclass(frozen=True)
class Sent:
    """A segment of a log that was sent: its positions, its lines, and its number at each worker.

    Times are of `time.perf_counter_ns`.
    """

    log: Log
    start: int
    end: int
    lines: list[Line]
    nbytes: int
    thread: int
    began: int
    ended: int
    numbers: dict[int, int]


@dataclass(frozen=True)
class Wait:
    """A wait of the master's for a worker."""

    why: str
    line: Line
    thread: int
    began: int
    ended: int


class Recording:
    """Notes what the master does, from `start` to `stop`. Keeps the lines of `most` instructions."""

    def __init__(self, session: Session, most: int) -> None:
        self._session, self._room = session, most
        self.sent: dict[tuple[Log, int], Sent] = {}
        # The key is a node and the number of a segment there.
        self.landed: dict[tuple[int, int], int] = {}
        self.waits: list[Wait] = []
        # The lines of so many instructions were not kept.
        self.dropped = 0
        # These segments were sent before: the position of the first word and the lines, by log and the
        # position after the last word.
        self.before: dict[tuple[Log, int], tuple[int, list[Line]]] = {}
        # The trace begins at these positions.
        self.since: dict[Log, int] = {}
        self._plain: list[tuple[Log, Send]] = []

    def note_flights(self) -> None:
        """Note the lines of what is under way."""
        for log in self._session.logs:
            with log.lock:
                for flight in log.flights:
                    if flight.log is log:
                        self.before[log, flight.end] = flight.end - flight.words, flight.line_table

    def start(self) -> None:
        """Begin to note."""
        session = self._session
        with session.lock, shield:
            self.note_flights()
            for log in session.logs:
                self._watch(log)
            session.on_mesh.append(self._watch)
            stalls.watchers.append(self._waited)

    def stop(self) -> None:
        """Leave everything as it was."""
        session = self._session
        with session.lock, shield:
            for log, plain in self._plain:
                log.outlet.send = plain
            self._plain.clear()
            if self._watch in session.on_mesh:
                session.on_mesh.remove(self._watch)
            if self._waited in stalls.watchers:
                stalls.watchers.remove(self._waited)

    def wait(self, why: str, began: int, line: Line | None = None) -> None:
        """Note a wait that is over now."""
        ended = time.perf_counter_ns()
        self.waits.append(Wait(why, line or user_line(), threading.get_ident(), began, ended))

    def _waited(self, why: str, line: Line, started: float) -> None:
        self.wait(why, int(started * 1e9), line)

    def _watch(self, log: Log) -> None:
        """Note each segment of a log."""
        plain = log.outlet.send
        self.since[log] = log.base

        def send(frames: Sequence[Part], *, copy: bool) -> Delivery | None:
            # Ctrl-C between the two would leave a segment out.
            with shield:
                began = time.perf_counter_ns()
                delivery = plain(frames, copy=copy)
                self._leaves(log, began)
            return delivery

        log.outlet.send = send
        self._plain.append((log, plain))

    def _leaves(self, log: Log, began: int) -> None:
        """Note a segment that has just been sent. Called under the log's lock."""
        if not log.flights:
            return
        flight = log.flights[-1]
        lines = flight.line_table
        if self._room < len(lines):
            self.dropped += len(lines)
            lines = []
        self._room -= len(lines)
        numbers: dict[int, int] = {}
        for node, part in self._parts(log, flight):
            numbers[node.index] = part.seq
            # The parts of a mesh's segment have one list.
            part.releases = [*part.releases, partial(self._ran, node.index, part.seq)]
        self.sent[log, flight.end] = Sent(
            log,
            flight.end - flight.words,
            flight.end,
            lines,
            flight.nbytes,
            threading.get_ident(),
            began,
            time.perf_counter_ns(),
            numbers,
        )

    def _parts(self, log: Log, flight: Flight[Log]) -> list[tuple[Node, Flight[Log]]]:
        """Return the segments of workers that a log's segment has become."""
        if isinstance(log, Node):
            return [(log, flight)]
        if not isinstance(log, MeshLog):
            return []
        lasts = [(node, node.flights[-1]) for node in log.workers() if node.flights]
        return [(node, part) for node, part in lasts if part.line_table is flight.line_table]

    def _ran(self, node: int, number: int) -> None:
        """Note that a worker has said that a segment has run, or is lost. Called under the log's lock."""
        self.landed.setdefault((node, number), time.perf_counter_ns())
