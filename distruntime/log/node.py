"""The master's side of one worker: its command log, what is in flight, and what has failed there. Knows no socket."""

from __future__ import annotations

import bisect
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import NodeFailed, ProtocolError
from ..wire.codec import Buffer, encode, failure_from
from ..wire.link import Delivery, Link
from ..wire.messages import FIRST_TEMPLATE, FORGET, Done, Failure, MeshSegment, Segment, Welcome
from .line import Line, line_text
from .replies import is_spec

BATCH = 4000  # words in a segment at most: about 1,000 instructions; a hundred would do for the wire, this keeps acknowledgements rare
FIRST_BATCH = 160  # words that gather behind one segment in flight; twice as many behind two, and so on: a worker that is nearly idle gets
# work soon (a training step that reads its loss each time: 2.2 times local without this), a busy one in large pieces
WINDOW = (
    1 << 18
)  # words in flight, some 60,000 instructions: at 100,000 a second enough for a round trip of half a second
PAYLOAD_WINDOW = 256 << 20  # bytes of uploads in flight
_MOST_TEMPLATES = 1 << 15
_MOST_FAILURES = 1000
_CANCELLED = "distruntime.errors.StreamCancelled"


def _enough(flights: int) -> int:
    return min(BATCH, FIRST_BATCH << (flights - 1)) if flights else 0


def _undisturbed() -> None:
    """Of a node that no session has taken yet."""


def _unthrottled(node: Node) -> None:
    """Of a node that no session has taken yet."""


def _nothing(node: Node) -> str:
    """Of a node that no session has taken yet."""
    return ""


class Absence:
    """That a worker cannot be reached, and since when: `since` of `time.monotonic`, `clock` as people tell the time."""

    def __init__(self, why: str) -> None:
        self.why, self.since, self.clock = why, time.monotonic(), time.strftime("%H:%M:%S")
        self.refusals = 0  # how often nobody was listening where the worker was
        self.told = False  # whether the user has heard of it

    @property
    def text(self) -> str:
        """Say it in words."""
        return f"unreachable since {self.clock}: {self.why}"


@dataclass(frozen=True)
class Cause:
    """A failure on a worker together with the master's line that issued the instruction."""

    failure: Failure
    line: str
    where: Node | None = None  # that worker, where it is not the one that told of it
    log: Node | None = None  # whose position the failure has, where that is a mesh's


@dataclass(slots=True)
class _Flight:
    """A segment that is sent and not acknowledged."""

    seq: int
    lines: list[Line]
    words: int
    end: int  # position after its last word
    nbytes: int
    checks: int
    releases: list[Callable[[], None]]
    whole: Any = None  # the mesh's flight that this is a worker's part of; then `lines` count the mesh's words, and `words` none


class Node:
    """One worker as the master sees it.

    Invariants, all under `lock`: `base + len(log)` is the position of the next word; a segment is in `flights` exactly from the
    moment its words leave `log` until its `Done`; `unsent` is the one segment that may have left `log` but not the process
    (Ctrl-C can strike between the two), and the worker drops a segment that comes twice.
    """

    members: tuple[Any, ...] = ()  # of a mesh, which is issued to as a worker is: see team.py

    def __init__(
        self, index: int, peer: bytes | None, address: str, send: Callable[..., Any], lock: Any = None
    ) -> None:
        self.index, self.address = index, address
        self.link = Link(peer)
        self._send = send
        self.lock = threading.RLock() if lock is None else lock
        self.teams: list[Any] = []  # the logs of meshes that this worker is in
        self.meshed = False  # whether a mesh's segment was sent since reads last waited for one: see `settle`
        self.late: Any = None  # the log that wanted its turn while this one was being sent
        self.log: list[Any] = []
        self.lines: list[Line] = []
        self.freed: list[int] = []  # refs whose handles died; anyone may append at any time
        self.base = 0
        self.flights: deque[_Flight] = deque()
        self.checked = 0  # position after the last instruction that only checks: reads wait for it, as its failure has no value to poison
        # Words beyond which the log is sent: none while nothing is in flight, and -1 while it is the turn of another log that goes to the
        # same worker: whoever issues here then comes through `flush`, which takes the turn.
        self.enough = 0
        self.checks: dict[int, Callable[[int | None, list[Any]], None]] = {}
        self.failures: dict[
            tuple[int, int], Cause
        ] = {}  # first causes by (segment, position); read ones stay for those who read again
        self.unread: dict[tuple[int, int], Cause] = {}
        self.failed: str | None = None
        self.has_left = False  # whether it was a farewell
        self.connecting = False  # whether a worker has been asked for in its place, as it is lost
        self.taken = False  # whether another master has the session now
        self._lost = ""
        self.welcome: Welcome | None = None
        self.round_trip = 0.0
        self.forgetters: list[
            Callable[[], None]
        ] = []  # called when cached signatures must not be used any more
        self.throttle: Callable[[Node], None] = (
            _unthrottled  # blocks while the window is full; the session sets it
        )
        self.shared = False  # whether the worker reads this process's shared memory
        self.absence: Absence | None = None  # while there is no connection
        self.losses: Callable[[Node], str] = (
            _nothing  # tells what of the user's lived there; the session sets it
        )
        self.parked = [False]  # whether the pump sleeps; the session shares its own
        self.stir: Callable[[], None] = _undisturbed  # wakes the pump; the session sets it
        self.session: Any = None  # the Session that owns it, three layers up
        self.order: Any = None  # the Order among its streams, once there are several, two layers up; `log` is a StretchedLog then
        self.asynchronous = (
            False  # whether an acknowledgement only says that everything has been issued to a GPU
        )
        self.executed = 0  # position up to which everything is known to have run
        self.sent: Delivery | None = None  # the last segment
        self._seq = 0
        self._checks = 0
        self._payloads: list[Buffer] = []
        self._payload_bytes = 0
        self.busy = False  # whether the window is full, so that whoever issues must wait
        self._words = self._bytes = 0  # in flight
        self._releases: list[Callable[[], None]] = []
        self._templates: dict[Any, int] = {}
        self._next_template = self._generation = FIRST_TEMPLATE  # the current generation's first number
        self._new_templates: list[Any] = []
        self._unsent: list[Buffer] | None = None
        self._flushing = False

    @property
    def host(self) -> str:
        """The worker's host name."""
        return self.welcome.host if self.welcome is not None else self.address

    @property
    def acknowledged(self) -> int:
        """The position up to which everything has run, or on a GPU has been issued, as far as is known."""
        return self.base - self._words

    def __str__(self) -> str:
        return f"node {self.index} ({self.host})"

    def __repr__(self) -> str:
        return f"<{self}, {self.failed or self.state}>"

    @property
    def state(self) -> str:
        """What it is now: "ready", "busy", "unreachable", "lost", "left" (has said so), or "connecting" (another is to take its place)."""
        if self.failed is not None:
            return "connecting" if self.connecting else "left" if self.has_left else "lost"
        return "unreachable" if self.absence is not None else "busy" if self.flights else "ready"

    # -- issuing -----------------------------------------------------------------------------------------------------------------

    def template(self, key: Any, fields: Sequence[Any]) -> int:
        """Return the number of the template of `key`, after making the worker learn it if it is new. Call under `lock`."""
        number = self._templates.get(key)
        if number is None:
            if self._next_template - self._generation >= _MOST_TEMPLATES:
                self._forget()
            number = self._templates[key] = self._next_template
            self._next_template += 1
            self._new_templates.append([number, *fields])
        return number

    def _forget(self) -> None:
        """Drop the templates of the generation before this one, on both sides, and every signature.

        Two generations live, because another thread may have looked up a number and not yet issued it.
        """
        for drop in self.forgetters:
            drop()
        if self.order is not None:
            self.order.fence()  # instructions of other streams may still need what goes
        self._templates = {
            key: number for key, number in self._templates.items() if number >= self._generation
        }
        self.log += [FORGET, self._generation]
        self._generation = self._next_template

    def check(self, correct: Callable[[int | None, list[Any]], None]) -> int:
        """Return a number for CHECK; `correct` is called with (result, spec fields) where a prediction was wrong, then with (None, [])."""
        self._checks += 1
        self.checks[self._checks] = correct
        return self._checks

    def append(self, words: list[Any], line: Line) -> Line:
        """Append one instruction to the log; send the log if the worker has nothing to do. Return its entry in `lines`, at once."""
        with self.lock:
            freed = self.freed
            while freed:
                self.log.append(-freed.pop())
            self.log += words
            entry = (self.base + len(self.log), line[1], line[2])
            self.lines.append(entry)
            if len(self.log) > self.enough:
                self.flush()
            return entry

    def payload(self, data: Buffer) -> int:
        """Return the number of a payload frame that goes with the next segment. Call under `lock`, and flush before it is let go."""
        self._payloads.append(data)
        self._payload_bytes += len(data)
        return len(self._payloads) - 1

    def when_run(self, release: Callable[[], None]) -> None:
        """Call `release` when the next segment has run. Call under `lock`."""
        self._releases.append(release)

    def flush(self, upto: int | None = None) -> None:
        """Send what has gathered, or what of it stands before position `upto`, as one segment. Never blocks; a failed node swallows it."""
        with self.lock:
            if self._flushing:  # a finalizer ran inside the encoder and issued something: the flush under way or the next one takes it
                return
            if self.enough < 0 and not self.take_turn():
                return
            self._flushing = True
            try:
                if self._unsent is not None:
                    self._resend()
                order, stretches = self.order, []
                if order is not None:
                    order.settle()
                freed = self.freed
                while freed:
                    self.log.append(-freed.pop())
                log: Any = self.log
                if not log:
                    return
                if self.failed is not None:
                    log.clear()
                    self.lines, self._payloads, self._new_templates = [], [], []
                    return
                taken, lines = len(log), len(self.lines)
                if (
                    upto is not None and not self._payloads
                ):  # payload frames are numbered within their segment: it stays whole
                    taken = min(taken, upto - self.base)
                    lines = bisect.bisect_right([line[0] for line in self.lines], self.base + taken)
                if order is not None:
                    stretches = log.stretched(taken)
                frames: list[Buffer] = [
                    encode(Segment(self._seq + 1, self.base, self._new_templates, log[:taken], stretches)),
                    *self._payloads,
                ]
                flight = _Flight(
                    self._seq + 1,
                    self.lines[:lines],
                    taken,
                    self.base + taken,
                    self._payload_bytes,
                    self._checks,
                    self._releases,
                )
                rest = log[taken:] if order is None else log.rest(taken)
                while order is not None and len(rest) + taken != len(
                    log
                ):  # a finalizer ran in there and issued something
                    rest = log.rest(taken)
                # No call from here on, so that Ctrl-C cannot come between: the words leave the log and become the unsent segment.
                self._seq += 1
                self.base += taken
                self.log, self.lines = rest, self.lines[lines:]
                self._new_templates, self._payloads, self._payload_bytes, self._releases = [], [], 0, []
                self._unsent = frames
                self.flights.append(flight)
                self._words += taken
                self._bytes += flight.nbytes
                if (
                    self.meshed and order is None
                ):  # what is read from now on comes after these words, and so after the mesh's
                    self.checked, self.meshed = self.base, False
                self.busy = self._words > WINDOW or self._bytes > PAYLOAD_WINDOW
                self.enough = _enough(len(self.flights))
                self.sent = self._send(self.link, frames, copy=len(frames) == 1)
                self._unsent = None
                if self.parked[0]:
                    self.stir()
            finally:
                self._flushing = False
            if self.late is not None:
                self._let_late()

    def gathering(self) -> bool:
        """Whether the pump had better leave the log alone for now, as more is being issued."""
        return False

    def on_wire(self, stream: int) -> int:
        """Return the number by which the worker knows a stream of this log; a mesh has its own."""
        return stream

    def workers(self) -> list[Node]:
        """Return who runs this log and is there."""
        return [self] if self.failed is None else []

    def rivals(self) -> Sequence[Any]:
        """Return the other logs that go to a worker of this one."""
        return self.teams

    def take_turn(self) -> bool:
        """Have sent what other logs hold for the same workers, so that this one's words come after it. Return False if that must wait.

        Invariant: of the logs that go to one worker at most one, whose turn it is, holds words that are not sent. Call under `lock`.
        """
        for rival in self.rivals():
            if rival.enough >= 0:
                if rival._flushing:  # a finalizer that runs in there has come here
                    rival.late = self
                    return False
                rival.flush()
                rival.enough = -1
        self.enough = _enough(len(self.flights))
        return True

    def settle(self, line: Line) -> None:
        """Send what meshes hold for this worker, and let what is read from now on come after it. Call under `lock`."""
        if self.teams:
            for team in self.teams:
                if team.freed:  # of which nothing else tells, where it is not that log's turn
                    team.flush()
            self.flush()
            if self.meshed:  # which no position of this log tells of: a word that follows does
                words = [FORGET, 0]
                if self.order is None:
                    self.checked = self.append(words, line)[0]
                else:
                    self.order.put(0, words, line)
                    self.order.checked[0] = self.order.last[0]
                self.meshed = False

    def _let_late(self) -> None:
        late, self.late = self.late, None
        late.flush()

    def carry(self, whole: _Flight, frame: Buffer) -> None:
        """Send this worker its copy of a mesh's segment, one of its own without words of its log. Call under `lock`, in the mesh's turn."""
        if self.failed is not None:  # since the mesh counted who is to run it
            whole.releases[0]()
            return
        self._seq += 1
        self.flights.append(_Flight(self._seq, whole.lines, 0, self.base, 0, self._checks, [], whole))
        self.meshed = True
        self.sent = self._send(self.link, [encode(MeshSegment(self._seq)), frame], copy=True)

    def _resend(self) -> None:
        """Send the segment that Ctrl-C kept from going, or from being known to have gone: the worker drops one that comes twice."""
        assert self._unsent is not None
        self.sent = self._send(self.link, self._unsent, copy=len(self._unsent) == 1)
        self._unsent = None

    # -- what comes back ---------------------------------------------------------------------------------------------------------

    def done(self, message: Done) -> None:
        """Take an acknowledgement: free the window, file the failures under their lines, correct predictions."""
        with self.lock:
            failures = [failure_from(fields) for fields in message.failures]
            try:
                for number, result, fields in message.corrections:
                    correct = self.checks.get(number)
                    if type(result) is not int or not is_spec(fields):
                        raise ValueError(f"{fields!r:.80}")
                    if correct is not None:
                        correct(result, fields)
            except (TypeError, ValueError) as error:
                raise ProtocolError(f"Done carries a correction that makes no sense: {error}") from None
            flight: _Flight | None = None
            while self.flights and self.flights[0].seq <= message.seq:
                flight = self.flights.popleft()
                self._words -= flight.words
                self._bytes -= flight.nbytes
                for release in flight.releases:
                    release()
                if flight.whole is not None:
                    flight.whole.releases[0]()
            if self.enough >= 0:
                self.enough = _enough(len(self.flights))
            self.busy = self._words > WINDOW or self._bytes > PAYLOAD_WINDOW
            if flight is not None:
                if not self.asynchronous and flight.whole is None:
                    self.executed = flight.end
                for number in [n for n in self.checks if n <= flight.checks]:
                    self.checks.pop(number)(None, [])
                for failure in failures:
                    self._file(failure, flight)
            if self.log and len(self.log) > self.enough:
                self.flush()

    def _file(self, failure: Failure, flight: _Flight) -> None:
        if (failure.seq, failure.position) in self.failures:
            return  # a reply named it before its segment was done
        lines = flight.lines
        k = bisect.bisect_right([line[0] for line in lines], failure.position)
        log = None if flight.whole is None else flight.whole.releases[0].team
        cause = Cause(failure, line_text(lines[k] if k < len(lines) else None), log=log)
        if len(self.failures) >= _MOST_FAILURES:
            self.failures.pop(next(iter(self.failures)))
        self.failures[failure.seq, failure.position] = cause
        if len(self.unread) < _MOST_FAILURES and failure.kind != _CANCELLED:  # which somebody asked for
            self.unread[failure.seq, failure.position] = cause

    def early(self, fields: list[Any]) -> None:
        """File the failures of segments that are not done, which whoever waits for one stream hears of first."""
        with self.lock:
            for failure in map(failure_from, fields):
                for flight in self.flights:
                    if flight.seq == failure.seq:
                        self._file(failure, flight)

    def cause(self, failure: Failure) -> Cause:
        """Return the filed cause of a failure that a reply names, and count it as read."""
        if failure.node not in (-1, self.index) and 0 <= failure.node < len(self.session.nodes):
            origin: Node = self.session.nodes[failure.node]
            return replace(origin.cause(replace(failure, node=-1)), where=origin)
        key = failure.seq, failure.position
        with self.lock:
            if key not in self.failures:
                for flight in self.flights:  # its segment still runs
                    if flight.seq == failure.seq:
                        self._file(failure, flight)
            self.unread.pop(key, None)
            found = self.failures.get(key) or Cause(failure, "")
        # Of a mesh's members here each may have failed in its own way.
        return found if found.failure == failure else replace(found, failure=failure)

    def issued_at(self, position: int) -> str:
        """Return the line that issued the instruction at a position that has not been acknowledged; nothing if it has."""
        with self.lock:
            for lines in (*(flight.lines for flight in self.flights if flight.whole is None), self.lines):
                k = bisect.bisect_right([line[0] for line in lines], position)
                if k < len(lines):
                    return line_text(lines[k])
        return ""

    def fail(self, why: str) -> None:
        """Mark the worker as lost. Everything that waits for it, now or later, fails with `why`."""
        with self.lock:
            if self.failed is None:
                self.failed = why
                self.log.clear()
                self.lines, self._payloads, self._payload_bytes = [], [], 0
                flights, self.flights = self.flights, deque()
                self._words = self._bytes = 0
                self.busy = False
                self.enough = 0
                self._unsent = None
                for drop in self.forgetters:
                    drop()
                for flight in flights:
                    if flight.whole is not None:
                        flight.whole.releases[0]()
                for team in self.teams:
                    team.fail(f"has lost a member: {self} {why}")

    def require_alive(self) -> None:
        """Raise `NodeFailed` if the worker is lost."""
        if self.failed is not None:
            raise self.lost_error()

    def lost_error(self) -> NodeFailed:
        """Return the error of whatever lived on this lost worker."""
        if self.taken:
            return NodeFailed(
                f"{self} {self.failed}. It has this session's values no more; what it had published is there"
            )
        if not self._lost:  # as it was when somebody first met the loss
            self._lost = self.losses(self)
        return NodeFailed(
            f"{self} {self.failed}. {self._lost}The session and its other nodes go on; dr.restart({self.index}) begins anew there."
        )


def relieve(node: Node) -> None:
    """Block while the window of `node` is full. Not under its lock: whoever reads the acknowledgements needs that."""
    if node.busy:
        node.throttle(node)
