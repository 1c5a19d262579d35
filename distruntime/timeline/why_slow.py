"""`dr.why_slow`: says of a trace where the time went."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from ..errors import UsageError, without_our_frames
from ..session.tables import table_html, table_text
from ..wire.units import printable
from .chrome import Json, read
from .growth import Grown, grown_of, growth_text
from .sweep import Found, Late, Slice, slices_of, sweep
from .trace import END, Trace, on

# A network whose round trip takes fewer milliseconds is no matter.
_FAR = 1.0
# A node that computes so many times as long as the one with the least is named.
_UNEVEN = 1.5
# What took such a share of the time has a line that says what helps.
_MUCH = 0.25
# So many waits at one line are those of a loop.
_LOOP = 10
_TITLES = {
    "python": "the master's Python",
    "reads": "reads",
    "network": "the network",
    "computing": "the workers' computing",
    "waiting": "waits between workers",
}
_ADVICE = {
    "python": "dr.program replays a step as one instruction, if most of it issues operators. Otherwise it is "
    "your own Python that takes the time.",
    "reads": "Read once, after the loop: dr.fetch([...]). dr.fetch_async(x) gives a future.",
    "network": "Wait less often: collect the values on the worker, and read them with one dr.fetch([...]).",
    "computing": "The workers are busy. Waiting less would not help.",
    "waiting": "Give the late node less to do, or what the others do not wait for to another stream.",
}


@dataclass(frozen=True)
class Cause:
    """What took a part of the time: its kind, its seconds, and their share of the trace (0 to 1).

    `kind` is "python", "reads", "network", "computing" or "waiting". `line` is the user's line that has most
    of it, `node` the node that is at fault, and `operator` what runs there, as far as the trace tells.
    """

    kind: str
    seconds: float
    share: float
    line: str
    node: int | None
    operator: str
    text: str
    # So many seconds did the program wait at `line`, whatever the workers did meanwhile.
    waited: float = 0.0


@final
@dataclass(frozen=True)
class WhySlow:
    """Where the time of a trace went: five causes, the largest first. It prints as a line for each."""

    path: str
    seconds: float
    causes: tuple[Cause, ...]
    # What the trace does not have.
    missing: tuple[str, ...]
    # These lines hold more memory at the end of the trace than at its begin, the most first.
    grown: tuple[Grown, ...] = ()

    @property
    def cause(self) -> Cause:
        """The largest cause."""
        return self.causes[0]

    def __getitem__(self, kind: str) -> Cause:
        """Return the cause of a kind."""
        for cause in self.causes:
            if cause.kind == kind:
                return cause
        raise KeyError(kind)

    def _rows(self) -> list[list[str]]:
        return [["took", "share", "what", "most of it"]] + [
            [f"{c.seconds:.3f} s", f"{c.share:.0%}", _TITLES[c.kind], c.text] for c in self.causes
        ]

    def _notes(self) -> list[str]:
        memory = growth_text(self.grown)
        told = [c for c in self.causes if c is self.cause or c.share >= _MUCH or c.kind in self._many]
        notes = [f"{_TITLES[c.kind]}: {_advice(c)}" for c in told if c.seconds > 0]
        return [*notes, *([memory] if memory else []), *self.missing]

    @property
    def _many(self) -> tuple[str, ...]:
        """Reads, if the program waited much at one line of them, whatever the workers did meanwhile."""
        return ("reads",) if self["reads"].waited >= _MUCH * self.seconds else ()

    def __repr__(self) -> str:
        head = f"{self.path}: {self.seconds:.3f} s"
        return printable("\n".join([head, table_text(self._rows()), *self._notes()]))

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(printable(note))}</p>" for note in self._notes())
        return f"<p>{html.escape(self.path)}: {self.seconds:.3f} s</p>{table_html(self._rows())}{notes}"


@without_our_frames
def why_slow(trace: Trace | str | os.PathLike[str] | None = None) -> WhySlow:
    """Return where the time of a trace went: five causes, the largest first.

    Each moment counts once: for waits between workers if one waits for another that computes, else for
    computing if a worker computes, else for reads or the network if this process waits, else for its Python.

    Args:
        trace: a trace that is over, or its file; None: the last one of this process.

    Raises:
        UsageError: there is no such trace, or the file is none.
    """
    path = trace.path if isinstance(trace, Trace) else on.last if trace is None else trace
    if path is None:
        raise UsageError(
            'this process has written no trace: with dr.trace("step.json"): around what is slow, or '
            'dr.why_slow("step.json") for a trace that is there'
        )
    if on.trace is not None and os.fspath(path) == os.fspath(on.trace.path):
        raise UsageError(f"the trace {os.fspath(path)} is still on: dr.why_slow() reads it once it is over")
    events, about = read(path)
    nodes = [row for row in _list(about.get("nodes")) if isinstance(row, dict)]
    silent = frozenset(_number(row.get("node")) for row in nodes if row.get("missing"))
    whole = _real(about.get("seconds")) * 1e6
    slices = slices_of(events)
    found = sweep(slices, whole, _number(about.get("main")), silent)
    trips = {_number(row.get("node")): _real(row.get("round_trip_ms")) for row in nodes}
    more = grown_of(about.get("grown"))
    return WhySlow(os.fspath(path), whole / 1e6, _causes(found, trips), _missing(about, nodes), more)


def _causes(found: Found, trips: dict[int, float]) -> tuple[Cause, ...]:
    far, trip = max(trips.items(), key=lambda pair: pair[1], default=(None, 0.0))
    network = Counter[int]()
    if trip >= _FAR:
        for k, idle in found.idle.items():
            network[k] = min(idle, round(trip * 1e3))
    paid = sum(network.values())
    seconds = {**found.by_kind, "network": paid}
    seconds["reads"] = found.by_kind["reads"] - paid
    whole = max(found.whole, 1.0)

    def cause(kind: str, line: str, node: int | None, operator: str, text: str, waited: float = 0.0) -> Cause:
        took = max(0.0, seconds.get(kind, 0) / 1e6)
        at = line.partition("   ")[0]
        return Cause(kind, took, took * 1e6 / whole, at, node, operator, text, waited)

    reads = _reads(found, network)
    causes = [
        cause("python", *_python(found)),
        cause("reads", *reads, _waited(found, reads[0])),
        cause("network", *_network(found, network, far, trip)),
        cause("computing", *_computing(found)),
        cause("waiting", *_waiting(found)),
    ]
    return tuple(sorted(causes, key=lambda one: -one.seconds))


_About = tuple[str, int | None, str, str]


def _python(found: Found) -> _About:
    line, took = _most(found.lines)
    if not line:
        return "", None, "", "nothing"
    text = f"{took / 1e6:.3f} s at {line}"
    if found.issuing:
        text += f" ({found.issuing / max(1, sum(found.lines.values())):.0%} of it all issues operators)"
    return line, None, "", text


def _reads(found: Found, network: Counter[int]) -> _About:
    idle = Counter[str]()
    for k, took in found.idle.items():
        idle[_of(found.waits[k])] += took - network[k]
    return _at_line(found.waits, idle)


def _waited(found: Found, line: str) -> float:
    """Return how many seconds the program waited at a line, if it has read there again and again."""
    here = [wait for wait in found.waits if _of(wait) == line != END]
    meant = any(str(wait.args.get("why", "")).startswith("explicit") for wait in here)
    return 0.0 if meant or len(here) < _LOOP else sum(wait.ended - wait.began for wait in here) / 1e6


def _of(wait: Slice) -> str:
    return END if wait.args.get("why") == END else wait.where


def _at_line(waits: Sequence[Slice], took: Counter[str]) -> _About:
    line, most = _most(took)
    if not line or most <= 0:
        return "", None, "", "none"
    here = [wait for wait in waits if _of(wait) == line]
    whole = sum(wait.ended - wait.began for wait in here) / 1e6
    why = str(here[0].args.get("why", "")) if here else ""
    times = f"{len(here)} waits" if len(here) != 1 else "1 wait"
    return line, None, why, f"{times} for {why} at {line}, {whole:.3f} s in all"


def _network(found: Found, network: Counter[int], far: int | None, trip: float) -> _About:
    text = f"a round trip to node {far} takes {trip:.2f} ms" if far is not None else "no worker was asked"
    if not network:
        return "", far, "", text
    took = Counter[str]()
    for k, part in network.items():
        took[_of(found.waits[k])] += part
    line, _ = _most(took)
    times = sum(_of(wait) == line for wait in found.waits)
    return line, far, "", f"{text}, and {times} wait{'s' if times != 1 else ''} at {line} paid it"


def _computing(found: Found) -> _About:
    if not found.operators:
        return "", None, "", "nothing"
    (operator, line), took = max(found.operators.items(), key=lambda pair: pair[1])
    text = f"{took / 1e6:.3f} s in {operator}" + (f" at {line}" if line else "")
    node, most = max(found.nodes.items(), key=lambda pair: pair[1])
    others = [seconds for other, seconds in found.nodes.items() if other != node]
    uneven = bool(others) and most > _UNEVEN * max(others)
    if uneven:
        text += f"; node {node} computed {most / 1e6:.3f} s, no other more than {max(others) / 1e6:.3f} s"
    return line, node if uneven or not others else None, operator, text


def _waiting(found: Found) -> _About:
    if not found.late and not found.held:
        (operator, line), took = max(found.moved.items(), key=lambda pair: pair[1], default=(("", ""), 0))
        if not took:
            return "", None, "", "none"
        return line, None, operator, f"{took / 1e6:.3f} s in {operator} at {line}, and no node was late"
    by_node = Counter[int]()
    for who, took in found.late.items():
        by_node[who.node] += took
    if not by_node or max(found.held.values(), default=0) > max(by_node.values()):
        line, took = max(found.held.items(), key=lambda pair: pair[1])
        return line, None, "", f"{took / 1e6:.3f} s for another stream, before {line or 'an unknown line'}"
    node, took = max(by_node.items(), key=lambda pair: pair[1])
    who = max((one for one in found.late if one.node == node), key=lambda one: found.late[one])
    text = f"node {node} is late: the others waited {took / 1e6:.3f} s"
    return who.where, node, who.name, f"{text}, most in {who.name} at {who.where}{_doing(found, who)}"


def _doing(found: Found, who: Late) -> str:
    what = Counter[str]()
    for one, ran in found.meanwhile.items():
        if one.node == who.node:
            what.update(ran)
    name, _ = _most(what)
    return f", while node {who.node} ran {name}" if name else f", and node {who.node} ran nothing meanwhile"


def _advice(cause: Cause) -> str:
    # Nobody is named, but the operation is.
    if cause.kind == "waiting" and cause.node is None and cause.operator:
        return "Exchange fewer and larger tensors, or exchange them on another stream."
    return _ADVICE[cause.kind]


def _missing(about: dict[str, Json], nodes: Sequence[dict[str, Json]]) -> tuple[str, ...]:
    notes = [
        f"node {row.get('node')} is left out: {row.get('missing')}" for row in nodes if row.get("missing")
    ]
    notes += [
        f"node {row.get('node')} had no room for {row.get('dropped')} more instructions"
        for row in nodes
        if row.get("dropped")
    ]
    late = _list(about.get("late"))
    if late:
        notes.append(f"node {', '.join(map(str, late))} had not run everything at the end of the trace")
    return tuple(notes)


def _most(counter: Counter[str]) -> tuple[str, int]:
    return max(counter.items(), key=lambda pair: pair[1], default=("", 0))


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _number(value: Json) -> int:
    return value if isinstance(value, int) else -1


def _real(value: Json) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
