"""What `python -m distruntime top` shows below its tables: each stream of each session over the last seconds,
where the programs are, what sessions hold, and what stands out.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from ..cluster.observe import Answer
from ..session.tables import curve, table_text
from ..wire.messages import Activity, JointRow, SeenSession, StreamRow
from ..wire.units import operator_text, printable, size_text, span

# A worker says by a letter what it has seen a stream at, and this is what is shown for it.
COMPUTES, WAITS, JOINS, QUEUED, MASTER, IDLE = "#", "s", "g", "q", "m", "."
_SHOWN = {"c": COMPUTES, "s": WAITS, "g": JOINS, "q": QUEUED, "m": MASTER, ".": IDLE}
LEGEND = (
    f"{COMPUTES} computing   {JOINS} in an operation of a group   {MASTER} waiting for the master\n "
    f"{WAITS} waiting for another stream or node   {QUEUED} queued   {IDLE} idle"
)
# A strip has so many letters.
_WIDE = 48
# So many streams of a session are shown, and so many lines of its program.
_STREAMS, _LINES = 16, 3
# A line of text has so many letters.
_LINE = 110
# So many looks at a session are remembered.
_REMEMBERED = 60
# An operation of a group that lacks a member for so many seconds is stuck.
_STUCK = 2.0
# It stands out if the program waited at one line in such a part of the looks, and there are so many looks.
_OFTEN, _ENOUGH = 0.5, 5
# Memory stands out that grew by so many bytes, and that grew at so many of the looks and never sank.
# Quick looks see what a step makes and frees again: the least in each group of neighbouring looks counts.
_GROWN, _RISES, _GROUPS = 1 << 20, 4, 8
# Looks that lie closer are one, in seconds: sixty of the quickest would remember a third of a second.
_APART = 0.1
# A node stands out that computes such a part of the time, if another one waits for it so much of the time.
_BUSY, _HELD = 0.6, 0.3


@dataclass
class _Program:
    """What is remembered of a session from look to look."""

    at: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    held: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    # The workers by their numbers in the session.
    addresses: dict[int, str] = field(default_factory=dict)

    def note_held(self, now: float, held: int) -> None:
        """Remember what the session holds; the least of what close looks have seen."""
        if self.held and now - self.held[-1][0] < _APART:
            before, least = self.held.pop()
            now, held = before, min(held, least)
        self.held.append((now, held))


@dataclass(frozen=True)
class _Part:
    """What one worker says of a session: the worker's address, and the number to call it by."""

    address: str
    number: int
    every: float
    seen: SeenSession


class Looks:
    """Looks at workers, one after the other."""

    def __init__(self) -> None:
        self._programs: dict[str, _Program] = {}

    def text(self, answers: Sequence[Answer[Activity]], now: float) -> str:
        """Return what is shown of the answers of a look at `now` seconds."""
        parts: dict[str, list[_Part]] = {}
        for k, answer in enumerate(answers):
            for seen in answer.value.sessions if answer.value is not None else ():
                number = seen.node if seen.node >= 0 else k
                part = _Part(answer.address, number, answer.value.every, seen)  # type: ignore[union-attr]
                parts.setdefault(seen.name, []).append(part)
        silent = {answer.address: answer.why for answer in answers if answer.value is None}
        blocks = [self._session(name, some, silent, now) for name, some in parts.items()]
        if not blocks:
            return ""
        return printable("\n\n".join([*blocks, f" {LEGEND}"]))

    def _session(self, name: str, parts: list[_Part], silent: dict[str, str], now: float) -> str:
        program = self._programs.setdefault(name, _Program())
        parts.sort(key=lambda part: part.number)
        program.addresses.update((part.seen.node, part.address) for part in parts if part.seen.node >= 0)
        program.note_held(now, sum(sum(part.seen.held.values()) for part in parts))
        told = next((part.seen for part in parts if part.seen.at), None)
        if told is not None:
            program.at.append((told.at, told.waits))
        lines = [f" session {name}", table_text(_stream_rows(parts))]
        lines += _program_lines(program)
        lines.append(_held_line(program, parts))
        notes = [
            *_stuck(program, parts, silent),
            *_reads(program, parts),
            *_uneven(parts),
            *_growth(program, name),
        ]
        return "\n".join([*lines, *(_wrapped(f"! {note}") for note in notes)])


def _wrapped(text: str) -> str:
    """Return a text in lines that fit a terminal."""
    return textwrap.fill(text, _LINE, initial_indent=" ", subsequent_indent="   ", break_on_hyphens=False)


def _stream_rows(parts: Sequence[_Part]) -> list[list[str]]:
    rows = [["node", "stream", "the last seconds", "computing", "doing"]]
    count = 0
    for part in parts:
        for stream in part.seen.streams:
            count += 1
            if count > _STREAMS:
                continue
            strip, seconds = strip_of(stream.seen, part.every)
            busy = f"{_share(stream, 'c'):.0%} of {seconds:.0f} s"
            rows.append([str(part.number), stream.name, f"|{strip}|", busy, _doing(stream)])
    if count > _STREAMS:
        rows.append(["", f"{count - _STREAMS} more", "", "", ""])
    return rows


def strip_of(seen: str, every: float) -> tuple[str, float]:
    """Return the letters to be shown of a stream's looks, and how many seconds they are.

    A letter shows what the stream was seen at most in its part of the time.
    """
    width = min(_WIDE, len(seen))
    strip = []
    for k in range(width):
        part = seen[k * len(seen) // width : (k + 1) * len(seen) // width]
        ((letter, _),) = Counter(part).most_common(1)
        strip.append(_SHOWN.get(letter, "?"))
    return "".join(strip), len(seen) * every


def strips(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield each run of one letter in the strips of a text: where it begins and ends, and the letter."""
    for strip in re.finditer(r"\|([#gsqm.]+)\|", text):
        for run in re.finditer(r"(.)\1*", strip.group(1)):
            yield strip.start(1) + run.start(), strip.start(1) + run.end(), run.group(1)


def _share(stream: StreamRow, letter: str) -> float:
    return stream.seen.count(letter) / max(1, len(stream.seen))


def _doing(stream: StreamRow) -> str:
    if stream.running is None:
        return ""
    where = f" at {stream.line.partition('   ')[0]}" if stream.line else ""
    return f"{operator_text(stream.running)} for {stream.seconds:.1f} s{where}"


def _program_lines(program: _Program) -> list[str]:
    """Return at which lines the program was seen, the most frequent first."""
    lines = []
    for at, times in Counter(at for at, _ in program.at).most_common(_LINES):
        waited = sum(1 for line, waits in program.at if line == at and waits)
        what = f", waiting in {waited}," if waited else ""
        lines.append(_wrapped(f"in {times} of {len(program.at)} looks{what} the program was at {at}"))
    return lines


def _held_line(program: _Program, parts: Sequence[_Part]) -> str:
    devices: Counter[str] = Counter()
    for part in parts:
        for device, nbytes in part.seen.held.items():
            devices[f"node {part.number} {device}"] += nbytes
    where = ", ".join(f"{size_text(nbytes)} on {device}" for device, nbytes in devices.most_common(4))
    bars = curve([float(nbytes) for _, nbytes in program.held], _WIDE)
    return f" holds {where or 'nothing'}   {bars}".rstrip()


# -- what stands out -----------------------------------------------------------------------------------------


def _stuck(program: _Program, parts: Sequence[_Part], silent: dict[str, str]) -> list[str]:
    """Return which operations of groups wait for members that do not take part."""
    there: dict[str, list[tuple[_Part, JointRow]]] = {}
    for part in parts:
        for stream in part.seen.streams:
            if stream.joint is not None:
                there.setdefault(stream.joint.key, []).append((part, stream.joint))
    found = []
    for rows in there.values():
        joint = max((row for _, row in rows), key=lambda row: row.seconds)
        line = next((row.line for _, row in rows if row.line), "")
        absent = sorted({n for _, row in rows for n in row.nodes} - {part.number for part, _ in rows})
        if joint.seconds < _STUCK or not absent:
            continue
        waiting = _nodes(sorted({part.number for part, _ in rows}))
        whom = "; ".join(_absent(number, program, parts, silent) for number in absent[:4])
        at = f" at {line}" if line else ""
        found.append(f"{joint.name}{at}: {waiting} waits {span(joint.seconds)} for {whom}")
    return found


def _absent(number: int, program: _Program, parts: Sequence[_Part], silent: dict[str, str]) -> str:
    """Return who a member is that does not take part, and what it does instead."""
    part = next((part for part in parts if part.number == number), None)
    if part is None:
        address = program.addresses.get(number, "")
        return (
            f"node {number}, which {'does not answer' if address in silent else 'is not among these workers'}"
        )
    running = [stream for stream in part.seen.streams if stream.running is not None]
    if not running:
        return f"node {number}, which runs nothing: it was given no such operation yet"
    return f"node {number}, which runs {_doing(max(running, key=lambda stream: stream.seconds))}"


def _nodes(numbers: Sequence[int]) -> str:
    few = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"node{'s' if len(numbers) != 1 else ''} {few}"


def _reads(program: _Program, parts: Sequence[_Part]) -> list[str]:
    """Return at which line the program waits again and again, while its workers have nothing to do."""
    if len(program.at) < _ENOUGH:
        return []
    idle = [_share(stream, "m") for part in parts for stream in part.seen.streams]
    counts = Counter(at for at, waits in program.at if waits)
    if not counts or not idle or max(idle) < _HELD:
        return []
    ((line, times),) = counts.most_common(1)
    if times < _OFTEN * len(program.at):
        return []
    return [
        f"the program waits at {line} in {times} of {len(program.at)} looks, and its workers wait for it "
        f"{max(idle):.0%} of the time: read less often, or once after the loop with dr.fetch([...])"
    ]


def _uneven(parts: Sequence[_Part]) -> list[str]:
    """Return which node computes while others wait for it."""
    share = {
        letter: {
            part.number: max((_share(stream, letter) for stream in part.seen.streams), default=0.0)
            for part in parts
        }
        for letter in "cg"
    }
    late = [number for number, busy in share["c"].items() if busy >= _BUSY]
    held = [number for number, waits in share["g"].items() if waits >= _HELD and number not in late]
    if len(late) != 1 or not held:
        return []
    (node,) = late
    part = next(part for part in parts if part.number == node)
    running = [stream for stream in part.seen.streams if stream.running is not None]
    what = f": {_doing(running[0])}" if running else ""
    return [
        f"node {node} is late: it computes {share['c'][node]:.0%} of the time, while {_nodes(held)} "
        f"wait{'s' if len(held) == 1 else ''} for it in operations of a group "
        f"{max(share['g'][number] for number in held):.0%} of the time{what}"
    ]


def _growth(program: _Program, name: str) -> list[str]:
    """Return that what a session holds grows and grows."""
    looks = list(program.held)
    size = max(1, len(looks) // _GROUPS)
    looks = [min(looks[k : k + size], key=itemgetter(1)) for k in range(0, len(looks), size)]
    steps = [after - before for (_, before), (_, after) in itertools.pairwise(looks)]
    # What was there before a fall says nothing of what grows now.
    last = max((k for k, step in enumerate(steps) if step < 0), default=-1) + 1
    steps, looks = steps[last:], looks[last:]
    more = sum(steps)
    if more < _GROWN or sum(1 for step in steps if step > 0) < _RISES:
        return []
    seconds = looks[-1][0] - looks[0][0]
    return [
        f"session {name} holds {size_text(more)} more than {span(seconds)} ago, and grows: in its program, "
        "dr.trace names the lines that do, with dr.why_slow"
    ]
