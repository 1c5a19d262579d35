"""`dr.trace`: records what the master, the wire and the workers do, on one clock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import final

from ..collectives.groups import Groups
from ..errors import DistruntimeError, UsageError, without_our_frames
from ..log.line import line_text, user_line
from ..log.log import Log
from ..log.mesh_log import MeshLog
from ..log.node import Node
from ..session.fetching import until_run
from ..session.screen import voice
from ..session.session import Session, active_session
from ..session.spelling import living
from ..session.timeouts import left_until
from ..wire.deadlines import LOOK, TRACE
from ..wire.units import printable
from . import chrome, parts
from .chrome import Json
from .growth import Growth
from .parts import Brought, Clock, Lines, Reading, read_clock
from .recording import Recording, Sampler
from .slices import MASTER, Drawing, lines_of, pid_of

# A worker notes so many instructions unless the user says otherwise. They take 48 MB there.
_MOST = 1_000_000
# After an error in its body, a trace waits so many seconds at most for what still runs.
_HURRY = 2.0
# The wait at the end of a trace has this name.
END = "the end of the trace"


@dataclass(frozen=True)
class TracedNode:
    """What a trace knows of a node.

    Its clock was estimated to within `clock` seconds, by round trips of `round_trip` seconds. `instructions`
    ran there, and `dropped` more that the worker had no room for. `missing` says why its part is left out, or
    nothing.
    """

    node: int
    host: str
    clock: float
    round_trip: float
    instructions: int
    dropped: int
    missing: str


class _On:
    """The trace of this process that is on."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        # The last one was written there.
        self.last: Path | None = None


on = _On()


@final
class Trace:
    """A trace of this process's session: see `dr.trace`. A context manager, or `start()` and `stop()`."""

    def __init__(self, path: Path, timeout: float, most: int, quiet: bool | None) -> None:
        self.path = path
        # How many seconds it lasted, once it is over.
        self.seconds = 0.0
        # What it knows of each node, once it is over.
        self.nodes: tuple[TracedNode, ...] = ()
        self._timeout, self._most, self._quiet = timeout, most, quiet
        self._running: _Running | None = None

    @without_our_frames
    def start(self) -> None:
        """Begin. Block until all workers note what they do, and their clocks are known.

        Raises:
            UsageError: a trace is on already. SessionClosed: there is no session.
        """
        other = on.trace
        if other is not None:
            raise UsageError(
                f"a trace is on already: {other.path}, begun at {other._begun_at()}. Stop it before another "
                "begins: a process has one at a time"
            )
        session = active_session()
        on.trace = self
        try:
            running = self._running = _Running(session, self._most)
            running.start()
        except BaseException:
            self._abandon()
            raise

    @without_our_frames
    def stop(self) -> None:
        """Wait until what was issued has run, as long as the trace's `timeout`, and write the file.

        Raises:
            UsageError: the trace is not on. OSError: the file cannot be written.
        """
        self._stop(self._timeout)

    def _begun_at(self) -> str:
        return "an unknown line" if self._running is None else line_text(self._running.line)

    def _stop(self, timeout: float) -> None:
        running = self._running
        if running is None:
            raise UsageError(f"the trace {self.path} is not on: it was never started, or it is over")
        try:
            drawing, nodes, about = running.finish(timeout)
        finally:
            self._abandon()
        chrome.write(self.path, drawing.events, about)
        self.seconds, self.nodes = running.seconds, nodes
        on.last = self.path
        voice(self._quiet)(f"{self._summary(drawing.instructions)}\n")

    def _abandon(self) -> None:
        """Let nothing be noted any more."""
        running, self._running = self._running, None
        if running is not None:
            running.end()
        if on.trace is self:
            on.trace = None

    def _summary(self, instructions: int) -> str:
        count = (
            f"{instructions:,} instructions on {len(self.nodes)} node{'s' if len(self.nodes) != 1 else ''}"
        )
        lines = [
            f"{self.path}: {self.seconds:.2f} s, {count}. https://ui.perfetto.dev opens it, and "
            "dr.why_slow() says where the time went"
        ]
        clocks = [f"node {n.node} to within {n.clock * 1e3:.2f} ms" for n in self.nodes if not n.missing]
        if clocks:
            lines.append(f"  clocks: {', '.join(clocks)}")
        lines += [f"  node {n.node} is left out: {n.missing}" for n in self.nodes if n.missing]
        lines += [
            f"  node {n.node} had no room for {n.dropped:,} more. "
            f"dr.trace(most={2 * self._most:,}) has room for twice as many"
            for n in self.nodes
            if n.dropped
        ]
        return printable("\n".join(lines))

    def __enter__(self) -> Trace:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is None:
            # The body has stopped it.
            return
        if kind is None:
            self.stop()
        else:
            try:
                self._stop(min(self._timeout, _HURRY))
            except (DistruntimeError, OSError) as unwritten:
                # The error of the body is the one to be raised.
                voice(self._quiet)(f"the trace {self.path} was not written: {unwritten}\n")

    def __repr__(self) -> str:
        state = "on" if self._running is not None else "over" if self.nodes else "not started"
        return f"<trace {str(self.path)!r}, {state}>"


class _Running:
    """A trace that is on."""

    def __init__(self, session: Session, most: int) -> None:
        self.session, self.line = session, user_line()
        self._most, self._thread = most, threading.get_ident()
        self._recording, self._sampler = Recording(session, most), Sampler(self._thread)
        # These workers have been told to note what they do, and these have said that they do.
        self._told: list[Node] = []
        self._noting: dict[Node, Reading] = {}
        self._missing: dict[Node, str] = {}
        self._began = self._ended = 0
        self._hooked = False
        self._growth: Growth | None = None

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return (self._ended - self._began) / 1e9

    def start(self) -> None:
        """Let the workers note what they do, and this process what it does."""
        session = self.session
        for log in session.logs:
            log.flush()
        self._recording.note_flights()
        self._told = living(session, None)
        self._missing = parts.begin(session, self._told, self._most, LOOK.get())
        for node in self._told:
            if node not in self._missing:
                reading = read_clock(session, node, LOOK.get())
                if reading is None:
                    self._missing[node] = "its clock could not be read"
                else:
                    self._noting[node] = reading
        self._growth = Growth(self._told)
        self._hooked = True
        self._recording.start()
        self._sampler.start()
        self._began = time.perf_counter_ns()

    def end(self) -> None:
        """Leave everything as it was."""
        if self._hooked:
            self._hooked = False
            self._recording.stop()
            self._sampler.stop()
        for node in self._told:
            parts.forget(self.session, node)
        self._told.clear()

    def finish(self, timeout: float) -> tuple[Drawing, tuple[TracedNode, ...], dict[str, Json]]:
        """Wait until everything has run, take what the workers have noted, and draw it."""
        recording = self._recording
        began = time.perf_counter_ns()
        late = self._drain(time.monotonic() + timeout)
        recording.wait(END, began, self.line)
        self._ended = time.perf_counter_ns()
        recording.stop()
        brought: dict[Node, tuple[Brought, Clock]] = {}
        for node, first in list(self._noting.items()):
            found = self._take(node, first)
            if isinstance(found, str):
                self._missing[node] = found
            else:
                brought[node] = found
                self._told.remove(node)
        return self._draw(brought, late)

    def _drain(self, deadline: float) -> list[Node]:
        """Block until the workers have run everything; return those that have not."""
        session = self.session
        asked, late = [], list[Node]()
        if session.closed is not None:
            return late
        for node in self._noting:
            try:
                asked.append((node, until_run(session, node)))
            except DistruntimeError:
                # What became of it is said when its part is to be taken.
                continue
        for node, request in asked:
            if not session.result(request, left_until(deadline), quietly=True):
                session.requests.discard(request)
                late.append(node)
        return late

    def _take(self, node: Node, first: Reading) -> tuple[Brought, Clock] | str:
        session = self.session
        if session.closed is not None:
            return f"the session has ended ({session.closed})"
        if node.failed is not None:
            return f"{node} {node.failed}"
        last = read_clock(session, node, LOOK.get())
        if last is None:
            return node.failed or f"it did not answer within {LOOK.get():g} s at the end of the trace"
        found = parts.take(session, node, LOOK.get() + self._most / 1e5)
        return found if isinstance(found, str) else (found, Clock(first, last))

    def _draw(
        self, brought: Mapping[Node, tuple[Brought, Clock]], late: list[Node]
    ) -> tuple[Drawing, tuple[TracedNode, ...], dict[str, Json]]:
        session, recording = self.session, self._recording
        groups = session.groups
        members = groups.nodes_in if isinstance(groups, Groups) else _nobody
        drawing = Drawing(self._began, self._ended, recording.since, members)
        self._sampler.stop()
        self._hooked = False
        threads = {thread.ident: thread for thread in threading.enumerate() if thread.ident is not None}
        main = drawing.master(self._thread, self._sampler.stays, recording, threads)
        lines, nodes = lines_of(recording), list[TracedNode]()
        for node, (found, clock) in brought.items():
            before = drawing.instructions
            drawing.node(node, found, clock, _logs(session, node, lines), recording)
            if found.dropped:
                drawing.note(pid_of(node.index), f"no room for {found.dropped:,} more instructions", {})
            if found.why:
                drawing.note(pid_of(node.index), f"no kernels: {found.why}", {})
            ran = drawing.instructions - before
            nodes.append(
                TracedNode(
                    *(
                        node.index,
                        node.host,
                        clock.uncertainty / 1e9,
                        clock.trip / 1e9,
                        ran,
                        found.dropped,
                        "",
                    )
                )
            )
        for node, why in self._missing.items():
            drawing.absent(node, f"its part is left out: {why}")
            nodes.append(TracedNode(node.index, node.host, 0.0, 0.0, 0, 0, why))
        nodes.sort(key=lambda found: found.node)
        about: dict[str, Json] = {
            "seconds": self.seconds,
            "begun_at": drawing.line(self.line).get("line", ""),
            "main": main,
            "master": MASTER,
            "late": [node.index for node in late],
            "grown": [] if self._growth is None else self._growth.rows(),
            "nodes": [
                {
                    "node": n.node,
                    "host": n.host,
                    "clock_within_ms": n.clock * 1e3,
                    "round_trip_ms": n.round_trip * 1e3,
                    "instructions": n.instructions,
                    "dropped": n.dropped,
                    "missing": n.missing,
                }
                for n in nodes
            ],
        }
        return drawing, tuple(nodes), about


def _nobody(group: int) -> list[int]:
    return []


def _logs(session: Session, node: Node, lines: Mapping[Log, Lines]) -> dict[int, tuple[Log, Lines]]:
    """Return the logs that a worker runs, by mesh, with their lines."""
    nothing = Lines([])
    found: dict[int, tuple[Log, Lines]] = {-1: (node, lines.get(node, nothing))}
    for mesh in session.meshes:
        if node in mesh.ranks and isinstance(mesh, MeshLog):
            found[mesh.number] = mesh, lines.get(mesh, nothing)
    return found


@without_our_frames
def trace(
    path: str | os.PathLike[str],
    *,
    timeout: float | None = None,
    most: int = _MOST,
    quiet: bool | None = None,
) -> Trace:
    """Return a trace of this process's session, to be used in a `with` or by `start()` and `stop()`.

    It records the lines and waits of this process, the way of each segment to its worker and back, and what
    each stream of each worker runs, on one clock. The file opens in https://ui.perfetto.dev and
    chrome://tracing, and `dr.why_slow()` reads it. Its end waits until what was issued has run.

    Args:
        path: the file to write, `.json` or `.json.gz`.
        timeout: how many seconds the end waits at most for what still runs (10).
        most: how many instructions each worker has room for, 48 bytes each. It counts those that it drops.
        quiet: leave out the lines that say at the end how good the clocks are and what is missing.

    Raises:
        UsageError: the file has another ending, or its folder is not there.
    """
    if not isinstance(most, int) or most < 1:
        raise UsageError(f"most is a number of instructions from 1 on, got {most!r}")
    return Trace(chrome.checked(path), TRACE.get(timeout), most, quiet)
