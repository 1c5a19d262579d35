"""Draws a trace: what the master has noted and what workers have brought becomes slices and arrows.

The master is process 1, and node k is process k + 2.
"""

from __future__ import annotations

import bisect
import linecache
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Thread

from ..log.line import Line, file_name
from ..log.log import Log
from ..log.mesh_log import MeshLog
from ..log.node import Node
from ..wire.messages import PROGRAM, TracedStep, TracedThread
from ..wire.units import operator_text, size_text
from .chrome import Event, Events, Json
from .parts import Brought, Clock, Lines, Row, Stretch, Texts
from .recording import Recording, Sent, Stay, Wait

MASTER = 1
# The kinds of slices.
PYTHON, SEND, READ, ANSWER = "python", "send", "read", "answer"
OPERATOR, FUNCTION, REPLAY, UPLOAD, HELD, JOINT, KERNEL, RANGE = (
    "operator function program upload wait collective kernel range".split()
)
# A mark of something that takes no time is so many nanoseconds wide, so that an arrow finds it.
_MARK = 1000
# A slice of a segment names so many of its lines.
_FEW = 3
# These instructions wait for something.
_WAITS = ("a wait for another stream", "a wait for another node")
_CALL = "python::"
# So begin the names of the instructions of `dr.nvtx`. What the user calls the range follows.
_PUSH, _POP, _MOMENT = (f"distruntime::{name} " for name in ("range_push", "range_pop", "mark"))


def pid_of(node: int) -> int:
    """Return the number of a node's process in a trace."""
    return node + 2


@dataclass
class Ran:
    """The rows of one log on a worker by position, with the thread of each, to find what a segment began
    with.
    """

    positions: list[int] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)

    def first(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the thread and the begin of the first row between two positions."""
        k = bisect.bisect_left(self.positions, start)
        return self.rows[k] if k < len(self.rows) and self.positions[k] < end else None


class Drawing:
    """The events of one trace, which begins at `began` and is over at `ended` (`time.perf_counter_ns`)."""

    def __init__(
        self, began: int, ended: int, since: Mapping[Log, int], members: Callable[[int], list[int]]
    ) -> None:
        # Logs were at the positions of `since` when it began. `members` has the nodes of a group.
        self._began, self._ended, self._since, self._members = began, ended, since, members
        self._events, self._texts = Events(), Texts()
        self._threads: dict[int, int] = {}
        # So many instructions are drawn.
        self.instructions = 0
        self._events.process(MASTER, "master")

    @property
    def events(self) -> list[Event]:
        """What is drawn so far."""
        return self._events.all

    # -- the master --------------------------------------------------------------------------------

    def master(
        self, thread: int, stays: Sequence[Stay], recording: Recording, threads: Mapping[int, Thread]
    ) -> int:
        """Draw what the master did. Return the number of the thread that was traced."""
        events, since = self._events, self._began
        main = self._thread(thread, "the traced thread")
        python = events.thread(MASTER, "lines (sampled)")
        for stay in stays:
            text = f"{file_name(stay.file)}:{stay.number}" if stay.file else "no line of yours"
            args: dict[str, Json] = {"line": text, "issuing": stay.issuing}
            if stay.file:
                args["code"] = linecache.getline(stay.file, stay.number).strip()
            if stay.library:
                args["library"] = stay.library
            events.slice(MASTER, python, text, PYTHON, stay.began - since, stay.ended - since, args)
        for wait in recording.waits:
            self._wait(wait, threads)
        for sent in recording.sent.values():
            self._send(sent, threads)
        return main

    def _thread(self, ident: int, name: str) -> int:
        found = self._threads.get(ident)
        if found is None:
            found = self._threads[ident] = self._events.thread(MASTER, name)
        return found

    def _named(self, ident: int, threads: Mapping[int, Thread]) -> int:
        known = threads.get(ident)
        return self._thread(ident, "a thread that has ended" if known is None else known.name)

    def _wait(self, wait: Wait, threads: Mapping[int, Thread]) -> None:
        tid, since = self._named(wait.thread, threads), self._began
        args = {**self._texts.of(wait.line), "why": wait.why}
        name = f"wait: {operator_text(wait.why)}"
        self._events.slice(MASTER, tid, name, READ, wait.began - since, wait.ended - since, args)

    def _send(self, sent: Sent, threads: Mapping[int, Thread]) -> None:
        tid, since, count = self._named(sent.thread, threads), self._began, len(sent.lines)
        args: dict[str, Json] = {"to": _nodes(list(sent.numbers)), "instructions": count}
        lines = Counter(self._texts.short(line) for line in sent.lines).most_common(_FEW)
        if lines:
            args["line"] = lines[0][0]
            args["lines"] = ", ".join(f"{line} ({times})" for line, times in lines)
        if sent.nbytes:
            args["upload"] = size_text(sent.nbytes)
        name = f"send {count} instruction{'s' if count != 1 else ''}"
        self._events.slice(MASTER, tid, name, SEND, sent.began - since, sent.ended - since, args)

    # -- workers -----------------------------------------------------------------------------------

    def node(
        self,
        node: Node,
        brought: Brought,
        clock: Clock,
        logs: Mapping[int, tuple[Log, Lines]],
        recording: Recording,
    ) -> None:
        """Draw what a worker did, and the way of its segments. `logs` has its logs by mesh, -1 its own."""
        events, pid = self._events, pid_of(node.index)
        events.process(pid, str(node))
        reader, ran = events.thread(pid, "reader"), dict[int, Ran]()
        for thread, rows in _in_order(brought.threads):
            tid = reader if thread.kind == "reader" else events.thread(pid, thread.name)
            rows = self._ranges(pid, tid, rows, clock, logs)
            for row in rows:
                if thread.kind == "kernels":
                    self._kernel(pid, tid, row, clock, brought, logs)
                elif row.step.name.startswith("fetch "):
                    self._answer(pid, tid, row, clock, recording)
                else:
                    self._row(pid, tid, row, clock, logs, ran, node)
        for found in ran.values():
            order = sorted(range(len(found.positions)), key=found.positions.__getitem__)
            found.positions = [found.positions[k] for k in order]
            found.rows = [found.rows[k] for k in order]
        replies = self._thread(-1 - node.index, f"what {node} has acknowledged")
        arrived = {seq: clock.here(at) - self._began for seq, at in brought.arrived.items()}
        for sent in recording.sent.values():
            seq = sent.numbers.get(node.index)
            if seq is not None:
                self._way(sent, node, seq, arrived.get(seq), ran, (pid, reader, replies), recording)

    def _ranges(
        self, pid: int, tid: int, rows: list[Row], clock: Clock, logs: Mapping[int, tuple[Log, Lines]]
    ) -> list[Row]:
        """Draw a thread's ranges. Return the rows that are none."""
        rest, opened = list[Row](), list[Row]()

        def draw(row: Row, began: int, ended: int) -> None:
            log = logs.get(row.mesh)
            args = {**self._texts.of(None if log is None else log[1].at(row.position))}
            name = row.step.name.partition(" ")[2]
            if ended >= 0:
                self._events.slice(pid, tid, name, RANGE, began, ended, args)

        for row in rows:
            if row.step.name.startswith(_PUSH):
                opened.append(row)
            elif row.step.name.startswith(_MOMENT):
                draw(row, *self._times(row, clock))
            elif row.step.name.startswith(_POP):
                ended, name = self._times(row, clock)[1], row.step.name.removeprefix(_POP)
                known = any(one.step.name == _PUSH + name for one in opened)
                # It began before the trace, or its begin was dropped with what was cancelled.
                if not opened:
                    draw(row, 0, ended)
                # The ends of those inside it were dropped.
                while known:
                    innermost = opened.pop()
                    draw(innermost, self._times(innermost, clock)[0], ended)
                    known = innermost.step.name != _PUSH + name
            else:
                rest.append(row)
        for row in opened:
            draw(row, self._times(row, clock)[0], self._ended - self._began)
        return rest

    def _way(
        self,
        sent: Sent,
        node: Node,
        seq: int,
        arrived: int | None,
        ran: Mapping[int, Ran],
        where: tuple[int, int, int],
        recording: Recording,
    ) -> None:
        """Draw a segment's way: sent, arrived, begun, acknowledged."""
        pid, reader, replies = where
        name, since, events = f"segment {seq}", self._began, self._events
        stops = [(MASTER, self._threads[sent.thread], sent.began - since)]
        if arrived is not None:
            events.slice(pid, reader, f"{name} arrives", "wire", arrived, arrived + _MARK, {"segment": seq})
            stops.append((pid, reader, max(0, arrived)))
        mesh = sent.log.number if isinstance(sent.log, MeshLog) else -1
        first = ran[mesh].first(sent.start, sent.end) if mesh in ran else None
        if first is not None:
            stops.append((pid, *first))
        landed = recording.landed.get((node.index, seq))
        if landed is not None:
            at = landed - since
            args = {"segment": seq, "took_ms": round((landed - sent.began) / 1e6, 3)}
            events.slice(MASTER, replies, f"{name} has run", "wire", at, at + _MARK, args)
            stops.append((MASTER, replies, at))
        if len(stops) > 1:
            events.flow(f"{name} of {node}", stops)

    def _row(
        self,
        pid: int,
        tid: int,
        row: Row,
        clock: Clock,
        logs: Mapping[int, tuple[Log, Lines]],
        ran: dict[int, Ran],
        node: Node,
    ) -> None:
        began, ended = self._times(row, clock)
        if ended < 0:
            # It was over before the trace began.
            return
        log, lines = logs.get(row.mesh, (None, None))
        line = None if lines is None else lines.at(row.position)
        args: dict[str, Json] = {**self._texts.of(line), "position": row.position}
        name, kind = _called(row.step)
        program = args.pop("program", None)
        if kind == REPLAY and program is not None:
            name = f"program {program!r}"
        nodes = [node.index]
        if isinstance(log, MeshLog):
            nodes = sorted(member.index for member in log.ranks)
            args["mesh"], args["nodes"] = row.mesh, nodes
        if row.step.joint:
            group = row.step.name.rpartition(" of group ")[2]
            args["nodes"] = self._members(int(group)) if group.isdigit() else nodes
            # Whoever has the same takes part in the same operation.
            args["together"] = (
                f"mesh {row.mesh} at {row.position}"
                if row.mesh >= 0
                else f"{row.step.name}, number {row.sequence}"
            )
        if log is not None and row.position < self._since.get(log, 0):
            args["issued"] = "before the trace"
        if row.ended < 0:
            args["ended"] = "no: it still ran at the end of the trace"
        self._events.slice(pid, tid, name, kind, began, ended, args)
        self.instructions += 1
        found = ran.setdefault(row.mesh, Ran())
        found.positions.append(row.position)
        found.rows.append((tid, max(0, began)))

    def _kernel(
        self,
        pid: int,
        tid: int,
        row: Row,
        clock: Clock,
        brought: Brought,
        logs: Mapping[int, tuple[Log, Lines]],
    ) -> None:
        """Draw what an accelerator has run, with the line of the instruction that launched it."""
        began, ended = self._times(row, clock)
        args: dict[str, Json] = {}
        issuer = _around(brought, row.position)
        if issuer is not None:
            found = logs.get(issuer.mesh)
            line = None if found is None else found[1].at(issuer.position)
            args = {**self._texts.of(line), "operator": _called(issuer.step)[0]}
        self._events.slice(pid, tid, row.step.name, KERNEL, began, ended, args)

    def _answer(self, pid: int, tid: int, row: Row, clock: Clock, recording: Recording) -> None:
        """Draw how a worker answered a fetch, with the line of the wait that it was for."""
        began, ended = self._times(row, clock)
        if ended < 0:
            return
        args: dict[str, Json] = {}
        # Waits are noted when they are over, one after the other. Two clocks agree only so far.
        waits, started, over = recording.waits, began + self._began, ended + self._began
        k = bisect.bisect_left(waits, started, key=lambda wait: wait.ended)
        near = [
            (max(0, wait.began - over, started - wait.ended), wait) for wait in waits[max(0, k - 1) : k + 1]
        ]
        apart, found = min(near, key=lambda pair: pair[0], default=(0, None))
        if found is not None and apart <= clock.uncertainty:
            args = {**self._texts.of(found.line)}
        self._events.slice(pid, tid, row.step.name, ANSWER, began, ended, args)

    def _times(self, row: Row, clock: Clock) -> tuple[int, int]:
        ended = self._ended if row.ended < 0 else clock.here(row.ended)
        return clock.here(row.began) - self._began, ended - self._began

    def note(self, pid: int, text: str, args: Mapping[str, Json]) -> None:
        """Draw what is to be known of a process: that its part is left out, for example."""
        self._events.instant(pid, text, 0, args)

    def absent(self, node: Node, text: str) -> None:
        """Draw a worker that has brought nothing."""
        self._events.process(pid_of(node.index), str(node))
        self.note(pid_of(node.index), text, {})

    def line(self, line: Line | None) -> Mapping[str, str]:
        """Return what a slice says of a line."""
        return self._texts.of(line)


def lines_of(recording: Recording) -> dict[Log, Lines]:
    """Return the lines of each log's instructions."""
    stretches: dict[Log, list[Stretch]] = {}
    for sent in recording.sent.values():
        stretches.setdefault(sent.log, []).append(Stretch(sent.start, sent.end, sent.lines))
    for (log, end), (start, lines) in recording.before.items():
        if (log, end) not in recording.sent:
            stretches.setdefault(log, []).append(Stretch(start, end, lines))
    return {log: Lines(found) for log, found in stretches.items()}


def _in_order(threads: Sequence[tuple[TracedThread, list[Row]]]) -> list[tuple[TracedThread, list[Row]]]:
    """Return threads as they are shown: the reader, the streams, and what runs on devices."""
    kinds = ["reader", "stream", "kernels"]
    return sorted(
        threads,
        key=lambda found: (kinds.index(found[0].kind) if found[0].kind in kinds else 3, found[0].name),
    )


def _around(brought: Brought, at: int) -> Row | None:
    """Return the instruction that ran at a time of the worker's clock."""
    for thread, rows in brought.threads:
        if thread.kind == "stream":
            k = bisect.bisect_right(rows, at, key=lambda row: row.began) - 1
            if k >= 0 and (rows[k].ended < 0 or at <= rows[k].ended):
                return rows[k]
    return None


def _called(step: TracedStep) -> tuple[str, str]:
    """Return what people call a step, and its kind."""
    if step.joint:
        return step.name.removeprefix("group::"), JOINT
    if step.name in _WAITS:
        return step.name, HELD
    if step.name == PROGRAM:
        return "a program", REPLAY
    if step.name.startswith(_CALL):
        what, _, name = step.name.removeprefix(_CALL).partition(" ")
        return (name or what), FUNCTION
    if step.name == "upload":
        return step.name, UPLOAD
    return operator_text(step.name), OPERATOR


def _nodes(nodes: Sequence[int]) -> str:
    return f"node{'s' if len(nodes) != 1 else ''} {', '.join(map(str, sorted(nodes)))}"
