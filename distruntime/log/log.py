"""A command log on the master: the words that gather, the segments in flight, and the window.

Knows no socket.

A worker has one (`node.Node`), and so has a mesh (`mesh_log.MeshLog`). Both are issued to in the same way.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ..errors import NodeFailed
from ..wire.codec import encode
from ..wire.messages import DROP
from ..wire.shield import RLock, shield
from .line import Line
from .order import Order
from .segment import Attached, Compose, Flight, Outlet, Send
from .tape import NOTED, StretchedLog, Tape
from .templates import Checks, Templates
from .uses import Lent

# A segment has this many words at most, about 1,000 instructions. A hundred instructions would do for the
# wire; this many keep acknowledgements rare.
BATCH = 4000
# So many words gather behind one segment in flight, twice as many behind two, and so on. A worker that is
# nearly idle gets work soon, and a busy one in large pieces. A training step of 230 words that reads its loss
# each time took 1.9 times as long as a local one with 160 words here, as the worker got its last third when
# the read came, and 1.7 times with 64. A step that reads nothing took the same (2 cores, 2026-11).
FIRST_BATCH = 64
# So many words may be in flight, some 60,000 instructions: at 100,000 a second enough for a round trip of
# half a second.
WINDOW = 1 << 18
# So many bytes of uploads may be in flight.
PAYLOAD_WINDOW = 256 << 20


class Member(Protocol):
    """The place of a mesh's member, as it is seen from here."""

    @property
    def node(self) -> int:
        """The number of its node."""

    @property
    def local_device(self) -> str:
        """What its node calls the device."""


class Signatures(Protocol):
    """The places of a session, as they are seen from here."""

    def forget(self, node: Log | None = None) -> None:
        """Send every call to `node`, or to all, down the slow path."""


class Owner(Protocol):
    """What a log needs of its session."""

    lock: RLock
    # Its first item says whether the pump sleeps.
    parked: list[bool]
    closed: str | None

    @property
    def stir(self) -> Callable[[], None]:
        """Wakes the pump."""

    @property
    def places(self) -> Signatures:
        """The places of its workers and meshes."""

    def throttle(self, node: Log, why: str = "a full window") -> None:
        """Block while the window of `node` is full. `why` names the wait."""

    def require_open(self) -> None:
        """Raise `SessionClosed` if the session has ended."""


def _enough(flights: int) -> int:
    return min(BATCH, FIRST_BATCH << (flights - 1)) if flights else 0


class CallPart(NamedTuple):
    """What one worker runs of a call that several run together: the position after it in the worker's log."""

    log: Log
    stream: int
    position: int


class Log(ABC):
    """The words for one worker, or for the workers of a mesh, and what has become of them.

    Invariants, all under `lock`: `base + len(words)` is the position of the next word. A segment is in
    `flights` exactly from the moment its words leave `words` until it has run. Of the logs that go to one
    worker at most one is `active` and holds words that are not sent, so what they hold arrives in the order
    of the program.
    """

    # These are the places of a mesh's members. A worker has none.
    members: Sequence[Member] = ()

    def __init__(
        self, session: Owner, index: int, compose: Compose, send: Send, *, active: bool, checks: int
    ) -> None:
        # This is the number of a worker. A mesh's is negative.
        self.index = index
        self.session = session
        self.lock = session.lock
        self.words: list[object] = []
        # These are the user's lines that issued the instructions, by the position after each.
        self.line_table: list[Line] = []
        # The handles of these refs died. Anyone may append at any time.
        self.freed: list[int] = []
        # Nobody can call the programs of these keys any more. Anyone may append at any time.
        self.dropped: list[bytes] = []
        self.base = 0
        # Everything up to this position has run, or on a GPU has been issued, as far as is known.
        self.acknowledged = 0
        self.flights: deque[Flight[Log]] = deque()
        # The log is sent when it has more words than this. Any word will do while nothing is in flight. Any
        # word will do, too, while the log is not active, so that whoever issues comes through `flush`, which
        # activates it.
        self.enough = 0
        # It is True while the window is full, so that whoever issues must wait.
        self.busy = False
        self.active = active
        # It is True while a segment is being made and sent.
        self.flushing = False
        # This log wanted to become active while this one was being sent.
        self.deferred: Log | None = None
        # This says why nobody can issue to it any more.
        self.failed: str | None = None
        # It is True once nobody is left who would run it.
        self.deserted = False
        # Reads wait for this position, the one after the last instruction that only checks: such a failure
        # poisons no value.
        self.checked = 0
        # It is True if words of another log have been sent to the same worker since reads last waited for
        # such words.
        self.overtaken = False
        self.templates = Templates()
        self.checks = Checks(checks)
        self.attached = Attached()
        self.outlet = Outlet(compose, send)
        # Its workers have this code of the user's, by digest; what was called last stands last. See `python`.
        self.code: dict[bytes, object] = {}
        # These calls, by the positions after them, have parts elsewhere, too. See `streams.cancel`.
        self.together: dict[int, Sequence[CallPart]] = {}
        # Its worker has these packages of the user's, each with its digest. See `python.shipping`.
        self.packages: dict[str, str] = {}
        # This is the Order among its streams, once there are several. `words` is a StretchedLog then.
        self.order: Order | None = None
        # It is True if an exception has struck amid an instruction: see `issue.settle`.
        self.in_doubt = False
        # These are the words of the last instruction that has got in, and what they were when an exception
        # struck: another thread may issue something before whoever was struck asks.
        self.latest: Sequence[object] = ()
        self.struck: Sequence[object] = ()
        # What its functions and objects hold and have handed out. See `python`.
        self.lent = Lent()
        # It is True if an acknowledgement only says that everything has been issued to a GPU.
        self.asynchronous = False
        # Everything up to this position is known to have run.
        self.executed = 0
        # A worker has last said that it is at this position. It says so only when it is asked.
        self.told = 0
        # So many bytes of uploads are in flight.
        self.nbytes = 0
        # The programs that are not sent, and those in flight, stand for so many words.
        self.weight = self.heavy = 0
        # These note the words of this log while programs are recorded, each instruction as it is issued.
        self.tapes: list[Tape] = []

    # -- what a worker and a mesh do differently -------------------------------------------------------------

    @property
    @abstractmethod
    def host(self) -> str:
        """Where it runs, for people."""

    @property
    @abstractmethod
    def simulated(self) -> bool:
        """Whether its GPUs are simulated ones."""

    @abstractmethod
    def siblings(self) -> Sequence[Log]:
        """Return the other logs that go to a worker of this one."""

    @abstractmethod
    def stream_on_wire(self, stream: int) -> int:
        """Return the number by which the workers know a stream of this log."""

    @abstractmethod
    def gathering(self) -> bool:
        """Whether the pump had better leave the log alone for now, as more is being issued."""

    @abstractmethod
    def fail(self, why: str) -> None:
        """Mark it as lost, or as short of a member.

        What cannot run any more fails with `why`, now or later.
        """

    @abstractmethod
    def lost_error(self) -> NodeFailed:
        """Return the error of whatever needs what is lost."""

    def require_alive(self) -> None:
        """Raise `NodeFailed` if the worker, or a member of the mesh, is lost."""
        if self.failed is not None:
            raise self.lost_error()

    # -- issuing ---------------------------------------------------------------------------------------------

    def _drop_templates(self) -> None:
        """Have the workers drop what nobody can call any more, behind what has been issued."""
        while self.dropped:
            number = self.templates.drop(self.dropped.pop())
            if number is not None:
                if self.order is not None:
                    self.order.fence()
                self.words += [DROP, number]

    def append(self, words: Sequence[object], line: Line) -> Line:
        """Append one instruction; send the log if there is nothing to do.

        Return its entry in the line table, at once.
        """
        with self.lock:
            try:
                freed = self.freed
                while freed:
                    self.words.append(-freed.pop())
                self.words += words
                # No call stands between the two, so no signal's handler comes between.
                self.latest = words
                entry = (self.base + len(self.words), line[1], line[2])
                self.line_table.append(entry)
                if len(self.words) + self.weight > self.enough:
                    self.flush(gathered=True)
                return entry
            except BaseException:
                self.take_turn()
                raise

    def take_turn(self) -> None:
        """Become active, if an exception has struck where words are in and the log is not. Call under `lock`.

        What is issued to the same workers by another log would overtake these words.
        """
        with shield:
            if self.words and not self.active:
                self.flush()

    # -- sending ---------------------------------------------------------------------------------------------

    def flush(self, upto: int | None = None, *, gathered: bool = False) -> None:
        """Send what has gathered, or what of it stands before position `upto`, as one segment. Never blocks.

        A log that nobody runs any more drops it. `gathered` says that an instruction has passed `enough`.
        """
        with self.lock:
            # A finalizer ran inside the encoder and issued something: the flush under way or the next one
            # takes it.
            if self.flushing:
                return
            if not self.active and not self._activate():
                return
            if gathered and self.tapes:
                # A tape notes each instruction at once, in the thread that has issued it. Then the words
                # gather as they do without a tape. Sent one by one, 1,000 took 10 s for 1,024 members.
                for tape in self.tapes:
                    tape.take(self)
                if len(self.words) + self.weight <= _enough(len(self.flights)):
                    return
            self.flushing = True
            try:
                outlet, order = self.outlet, self.order
                if outlet.unsent is not None:
                    outlet.resend()
                if self.dropped:
                    self._drop_templates()
                if order is not None:
                    order.append_frees()
                freed = self.freed
                while freed:
                    self.words.append(-freed.pop())
                words = self.words
                for tape in self.tapes:
                    tape.take(self)
                stretched = words if isinstance(words, StretchedLog) else None
                if not words:
                    return
                if self.deserted:
                    self._drop()
                    return
                taken, lines = len(words), len(self.line_table)
                attached, after = self.attached, Attached()
                # Payload frames are numbered within their segment, so that segment stays whole.
                if upto is not None and not attached.frames:
                    taken = min(taken, upto - self.base)
                    lines = bisect.bisect_right([line[0] for line in self.line_table], self.base + taken)
                stretches = [] if stretched is None else stretched.stretched(taken)
                seq, end, templates = outlet.seq + 1, self.base + taken, self.templates
                # Whoever issues gives words that can travel, and the encoder refuses others.
                message = outlet.compose(seq, self.base, templates.untold, words[:taken], stretches)  # type: ignore[arg-type]
                frames = [encode(message), *attached.frames]
                flight = Flight(
                    seq,
                    self,
                    self.line_table[:lines],
                    taken,
                    end,
                    attached.nbytes,
                    self.checks.last,
                    attached.releases,
                    weight=self.weight,
                )
                rest = words[taken:] if stretched is None else stretched.rest(taken)
                # A finalizer may run in there and issue something.
                while stretched is not None and len(rest) + taken != len(words):
                    rest = stretched.rest(taken)
                # No call returns from here on until all is noted, so Ctrl-C cannot come between: the words
                # leave and become the unsent segment.
                outlet.seq = seq
                self.base = end
                self.words, self.line_table = rest, self.line_table[lines:]
                templates.untold, self.attached = [], after
                outlet.unsent = frames
                self.nbytes += flight.nbytes
                self.heavy += self.weight
                self.weight = 0
                if self.overtaken and order is None:
                    # What is read from now on comes after these words, and so after the other log's.
                    self.checked, self.overtaken = end, False
                self.flights.append(flight)
                under_way = end - self.acknowledged + self.heavy
                self.busy = under_way > WINDOW or self.nbytes > PAYLOAD_WINDOW
                self.enough = NOTED if self.tapes else _enough(len(self.flights))
                outlet.last = outlet.send(frames, copy=len(frames) == 1)
                outlet.unsent = None
                session = self.session
                if session.parked[0]:
                    session.stir()
            finally:
                self.flushing = False
            if self.deferred is not None:
                deferred, self.deferred = self.deferred, None
                deferred.flush()

    def _activate(self) -> bool:
        """Have the other logs that go to the same workers send what they hold.

        Return False if that must wait.
        """
        for sibling in self.siblings():
            if sibling.active:
                # A finalizer that runs inside the sibling's sending has come here.
                if sibling.flushing:
                    sibling.deferred = self
                    return False
                sibling.flush()
                sibling.active, sibling.enough = False, 0
        self.active, self.enough = True, self._threshold()
        return True

    def _drop(self) -> None:
        """Drop what has gathered: nobody is left to run it."""
        self.words.clear()
        self.line_table, self.attached, self.templates.untold = [], Attached(), []
        self.weight = 0

    def look_at_window(self) -> None:
        """Note whether the window is full, and how much is to gather. Call under `lock`."""
        under_way = self.base - self.acknowledged + self.heavy
        self.busy = under_way > WINDOW or self.nbytes > PAYLOAD_WINDOW
        if self.active:
            self.enough = self._threshold()

    def _threshold(self) -> int:
        return NOTED if self.tapes else _enough(len(self.flights))


def relieve(log: Log, why: str = "a full window") -> None:
    """Block while the window is full. `why` names the wait.

    Do not call it under the log's lock: whoever reads the acknowledgements needs that.
    """
    if log.busy:
        log.session.throttle(log, why)
