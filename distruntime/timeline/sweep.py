"""Goes through a trace from its begin to its end, and says of each moment what the program stood at.

At a moment one of five things holds the program up, and it is the first of these that is so:

waiting    a worker waits for another one, or for a stream, and the other one computes or does not answer
computing  a worker computes
waiting    workers move bytes to each other
reads      the master waits, and nothing of the above goes on
python     the master goes on, and no worker has anything to do
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .chrome import Event, Json
from .slices import FUNCTION, HELD, JOINT, KERNEL, MASTER, OPERATOR, PYTHON, READ, REPLAY, UPLOAD, pid_of

# What runs in these slices computes.
_COMPUTING = {OPERATOR, FUNCTION, REPLAY, UPLOAD, KERNEL}
# Whoever comes so many microseconds after the others is not late.
_PROMPT = 200.0


class Slice(NamedTuple):
    """A slice of a trace. Times are in microseconds since the trace began."""

    name: str
    kind: str
    pid: int
    tid: int
    began: float
    ended: float
    args: Mapping[str, Json]

    @property
    def line(self) -> str:
        """The user's line, or nothing."""
        return str(self.args.get("line", ""))

    @property
    def where(self) -> str:
        """The user's line with its code, or nothing."""
        return f"{self.line}   {self.args.get('code', '')}".rstrip()


class Late(NamedTuple):
    """Others waited for a node in an operation of a group."""

    node: int
    name: str
    where: str


@dataclass
class Found:
    """Where the time of a trace went, in microseconds."""

    whole: float = 0.0
    by_kind: Counter[str] = field(default_factory=Counter)
    # The waits of the master, and how much of each nothing explains.
    waits: list[Slice] = field(default_factory=list)
    idle: Counter[int] = field(default_factory=Counter)
    # So long did workers wait for a late one, and what that did meanwhile.
    late: Counter[Late] = field(default_factory=Counter)
    meanwhile: dict[Late, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    # So long did operations of groups take once all nodes were there: their names, and the user's lines.
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    # So long did streams wait for other ones.
    held: Counter[str] = field(default_factory=Counter)
    # So long did each node compute, and what.
    nodes: Counter[int] = field(default_factory=Counter)
    operators: Counter[tuple[str, str]] = field(default_factory=Counter)
    # So long was the program at a line while it had the say; and inside torch or this package.
    lines: Counter[str] = field(default_factory=Counter)
    issuing: float = 0.0


class _Mark(NamedTuple):
    """Something begins or ends, at a node or at the master (-1)."""

    at: float
    step: int
    what: str
    node: int
    number: int


def slices_of(events: Iterable[Event]) -> list[Slice]:
    """Return the slices of a trace. What makes no sense is left out."""
    found = []
    for event in events:
        if event.get("ph") != "X":
            continue
        began, length, args = event.get("ts"), event.get("dur"), event.get("args")
        if not isinstance(began, (int, float)) or not isinstance(length, (int, float)):
            continue
        pid, tid = event.get("pid"), event.get("tid")
        if isinstance(pid, int) and isinstance(tid, int):
            more = args if isinstance(args, dict) else {}
            name, kind = str(event.get("name")), str(event.get("cat"))
            found.append(Slice(name, kind, pid, tid, began, began + length, more))
    return found


def sweep(slices: Sequence[Slice], whole: float, main: int, missing: frozenset[int]) -> Found:
    """Return where the time went. `main` is the thread that was traced, `missing` has nodes left out."""
    found = Found(whole)
    found.waits = [one for one in slices if (one.pid, one.tid, one.kind) == (MASTER, main, READ)]
    marks: list[_Mark] = []
    for k, wait in enumerate(found.waits):
        _add(marks, "wait", -1, k, wait.began, wait.ended)
    together: dict[str, list[Slice]] = defaultdict(list)
    for one in slices:
        node = one.pid - pid_of(0)
        if node < 0:
            continue
        if one.kind in _COMPUTING:
            _add(marks, "computing", node, 0, one.began, one.ended)
            found.nodes[node] += _length(one)
            found.operators[one.name, one.where] += _length(one)
        elif one.kind == HELD:
            _add(marks, "held", node, 0, one.began, one.ended)
            found.held[one.where] += _length(one)
        elif one.kind == JOINT:
            together[str(one.args.get("together", ""))].append(one)
    running = _Running(slices)
    for parts in together.values():
        for same in _operations(parts):
            _note_late(found, marks, same, missing, running)
    _go_through(found, marks, slices)
    return found


def _length(one: Slice) -> int:
    return round(one.ended - one.began)


def _add(marks: list[_Mark], what: str, node: int, index: int, began: float, ended: float) -> None:
    if ended > began:
        marks.append(_Mark(began, 1, what, node, index))
        marks.append(_Mark(ended, -1, what, node, index))


class _Running:
    """What nodes compute, to say what a late one did."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        # The slices of a thread follow each other.
        self._threads: dict[int, dict[int, list[Slice]]] = defaultdict(dict)
        for one in sorted(slices, key=lambda one: one.began):
            if one.kind in _COMPUTING:
                self._threads[one.pid - pid_of(0)].setdefault(one.tid, []).append(one)

    def note(self, into: Counter[str], node: int, began: float, ended: float) -> None:
        """Add what a node ran between two times."""
        for slices in self._threads[node].values():
            first = bisect.bisect_right(slices, began, key=lambda one: one.ended)
            for one in itertools.islice(slices, first, None):
                both = min(ended, one.ended) - max(began, one.began)
                if both <= 0:
                    break
                into[f"{one.name} at {one.where}" if one.line else one.name] += round(both)


def _operations(parts: Sequence[Slice]) -> list[Sequence[Slice]]:
    """Return the operations that one instruction of a mesh is, along a dimension with several groups."""
    by_name: dict[str, list[Slice]] = defaultdict(list)
    for one in parts:
        by_name[one.name].append(one)
    # A worker with several members takes part in several of them by one slice, which names no group.
    return [parts] if any(" of group " not in name for name in by_name) else [*by_name.values()]


def _note_late(
    found: Found, marks: list[_Mark], parts: Sequence[Slice], missing: frozenset[int], running: _Running
) -> None:
    """Note who waited for whom in one operation of a group."""
    begun = {one.pid - pid_of(0): one for one in parts}
    nodes = parts[0].args.get("nodes")
    expected = {n for n in nodes if isinstance(n, int)} if isinstance(nodes, list) else set(begun)
    absent = sorted(expected - begun.keys())
    last = max(begun.values(), key=lambda one: one.began)
    late_at = max(one.ended for one in parts) if absent else last.began
    late = absent[0] if absent else last.pid - pid_of(0)
    who = Late(late, last.name, last.where)
    found.moved[last.name, last.where] += round(max(0.0, max(one.ended for one in parts) - late_at))
    first = min(one.began for one in parts)
    if late_at - first > _PROMPT:
        running.note(found.meanwhile[who], late, first, late_at)
    for node, one in begun.items():
        held = min(late_at, one.ended) - one.began
        if held > _PROMPT:
            _add(marks, "stuck" if late in missing else "held", node, 0, one.began, one.began + held)
            found.late[who] += round(held)
        _add(marks, "moving", node, 0, max(one.began, min(late_at, one.ended)), one.ended)


def _go_through(found: Found, marks: list[_Mark], slices: Sequence[Slice]) -> None:
    """Say of each moment what held the program up."""
    marks.sort()
    count: Counter[tuple[str, int]] = Counter()
    # How many nodes compute, and so on.
    some: Counter[str] = Counter()
    waits: dict[int, None] = {}
    before, says = 0.0, list[tuple[float, float]]()

    def state(node: int) -> str:
        for what in ("computing", "stuck", "held", "moving"):
            if count[what, node]:
                return what
        return ""

    def pass_to(now: float) -> None:
        nonlocal before
        now = min(max(now, before), found.whole)
        length = now - before
        if length <= 0:
            return
        if some["stuck"] or (some["held"] and some["computing"]):
            kind = "waiting"
        elif some["computing"]:
            kind = "computing"
        elif some["moving"]:
            kind = "waiting"
        elif waits:
            kind = "reads"
            found.idle[next(reversed(waits))] += round(length)
        else:
            kind = "python"
            says.append((before, now))
        found.by_kind[kind] += round(length)
        before = now

    for mark in marks:
        pass_to(mark.at)
        if mark.node < 0:
            if mark.step > 0:
                waits[mark.number] = None
            else:
                waits.pop(mark.number, None)
            continue
        some[state(mark.node)] -= 1
        count[mark.what, mark.node] += mark.step
        some[state(mark.node)] += 1
    pass_to(found.whole)
    _note_lines(found, says, [one for one in slices if one.pid == MASTER and one.kind == PYTHON])


def _note_lines(found: Found, says: Sequence[tuple[float, float]], stays: Sequence[Slice]) -> None:
    """Note at which lines the program was while it had the say."""
    k = 0
    for began, ended in says:
        while k < len(stays) and stays[k].ended <= began:
            k += 1
        i = k
        while i < len(stays) and stays[i].began < ended:
            both = round(min(ended, stays[i].ended) - max(began, stays[i].began))
            if both > 0:
                found.lines[stays[i].where] += both
                if stays[i].args.get("issuing"):
                    found.issuing += both
            i += 1
