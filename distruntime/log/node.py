"""One worker as the master sees it: its command log, its failures, and whether it is there.

Knows no socket.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, final

from ..errors import NodeFailed, ProtocolError
from ..wire.channel import Channel
from ..wire.codec import failure_from
from ..wire.link import Link
from ..wire.messages import FORGET, Done, Failure, Segment, Welcome
from .failure_log import Cause, FailureLog, key_of
from .line import Line, text_of_part
from .log import Log, Owner
from .progress import go_on, land
from .replies import is_spec
from .segment import Flight


class NodeOwner(Owner, Protocol):
    """What a worker's log needs of its session besides."""

    channel: Channel
    nodes: list[Node]
    # It tells what of the user's lived on a worker that is lost.
    losses: Callable[[Node], str]


@final
class Node(Log):
    """A worker.

    The worker drops a segment that comes twice, so one that Ctrl-C kept from going is simply sent again.
    """

    session: NodeOwner

    def __init__(
        self,
        session: NodeOwner,
        index: int,
        peer: bytes,
        address: str,
        welcome: Welcome,
        round_trip: float,
        shared: bool,
    ) -> None:
        self.link = Link(peer)
        super().__init__(
            session, index, Segment, partial(session.channel.send, self.link), active=True, checks=0
        )
        self.address, self.welcome = address, welcome
        # It is in seconds.
        self.round_trip = round_trip
        # It is True if the worker reads this process's shared memory.
        self.shared = shared
        self.presence = Presence()
        self.failure_log = FailureLog()
        # The worker is in the meshes that have these logs.
        self.meshes: list[Log] = []
        # This says what of the user's lived there, as it was when somebody first met the loss.
        self._losses = ""
        self.asynchronous = not welcome.simulated and any(row[0] != "cpu" for row in welcome.devices)

    @property
    def host(self) -> str:
        """The worker's host name."""
        return self.welcome.host

    @property
    def simulated(self) -> bool:
        """Whether its GPUs are simulated ones."""
        return self.welcome.simulated

    def __str__(self) -> str:
        return f"node {self.index} ({self.host})"

    def __repr__(self) -> str:
        return f"<{self}, {self.failed or self.state}>"

    @property
    def state(self) -> str:
        """What it is now, in one word: see `Presence.state`."""
        return self.presence.state(self.failed is not None, bool(self.flights))

    def workers(self) -> list[Node]:
        """Return this worker, if it is there."""
        return [self] if self.failed is None else []

    def siblings(self) -> Sequence[Log]:
        """Return the logs of the meshes that this worker is in."""
        return self.meshes

    def stream_on_wire(self, stream: int) -> int:
        """Return the number of a stream, which is its own."""
        return stream

    def gathering(self) -> bool:
        """Never: what has gathered here is sent at the next look."""
        return False

    # -- what goes out ---------------------------------------------------------------------------------------

    def follow_meshes(self, line: Line) -> None:
        """Send what meshes hold for this worker, and let what is read from now on come after it.

        Call under `lock`.
        """
        if self.meshes:
            for mesh in self.meshes:
                # Nothing else tells of what was let go of, where that log is not active.
                if mesh.freed:
                    mesh.flush()
            self.flush()
            if self.overtaken:
                # No position of this log tells of those words, but a word that follows them does.
                words = [FORGET, 0]
                if self.order is None:
                    self.checked = self.append(words, line)[0]
                else:
                    self.order.put(0, words, line)
                    self.order.checked[0] = self.order.last[0]
                self.overtaken = False

    def carry(
        self,
        mesh: Log,
        line_table: list[Line],
        releases: list[Callable[[], None]],
        parts: dict[tuple[int, int, int], Flight[Log]],
    ) -> int:
        """Note that this worker gets a copy of a mesh's segment, as a segment of its own without words.

        Return its number here, or 0 if the worker is lost. `parts` has those of the same segment, which
        workers share where they have the same numbers. Call under `lock`, while the mesh's log is active.
        """
        if self.failed is not None:
            # It may have been lost just now: a finalizer that reads may run between two workers.
            for release in releases:
                release()
            return 0
        outlet = self.outlet
        seq = outlet.seq + 1
        key = seq, self.base, self.checks.last
        part = parts.get(key)
        if part is None:
            part = parts[key] = Flight(seq, mesh, line_table, 0, self.base, 0, self.checks.last, releases)
        outlet.seq = seq
        self.flights.append(part)
        self.overtaken = True
        return seq

    # -- what comes back -------------------------------------------------------------------------------------

    def done(self, message: Done) -> None:
        """Take an acknowledgement: land the segments, correct predictions, and file the failures."""
        with self.lock:
            failures = [failure_from(fields) for fields in message.failures]
            try:
                for row in message.corrections:
                    match row:
                        case [int(number), int(result), fields] if is_spec(fields):
                            for log in (self, *self.meshes):
                                log.checks.correct(number, result, fields)
                        case _:
                            raise ValueError(f"{row!r:.80}")
            except (TypeError, ValueError) as error:
                raise ProtocolError(f"Done carries a correction that makes no sense: {error}") from None
            flight: Flight[Log] | None = None
            while self.flights and self.flights[0].seq <= message.seq:
                flight = self.flights.popleft()
                for release in flight.releases:
                    release()
                if flight.log is self:
                    land(self, flight)
            if flight is not None:
                for failure in failures:
                    self._file(failure, flight)
            go_on(self)

    def _file(self, failure: Failure, flight: Flight[Log]) -> None:
        key = key_of(failure)
        # A reply may have named it before its segment was done.
        if key not in self.failure_log:
            line = flight.line_at(failure.position)
            call = None if line is None else line[1]
            log = None if flight.log is self else flight.log
            self.failure_log.file(key, Cause(failure, text_of_part(line, failure.part), call, log=log))

    def _file_running(self, failure: Failure) -> None:
        """File a failure of a segment that is not done."""
        for flight in self.flights:
            if flight.seq == failure.seq:
                self._file(failure, flight)

    def file_early(self, fields: Sequence[object]) -> None:
        """File failures of segments that are not done.

        Whoever waits for one stream hears of them first.
        """
        with self.lock:
            for failure in map(failure_from, fields):
                self._file_running(failure)

    def line_of(self, seq: int, position: int) -> Line | None:
        """Return the line of an instruction of a segment that is not done; None if there is no such."""
        with self.lock:
            flight = next((flight for flight in self.flights if flight.seq == seq), None)
            return None if flight is None else flight.line_at(position)

    def cause(self, failure: Failure) -> Cause:
        """Return the filed cause of a failure that a reply names, and count it as read."""
        if failure.node not in (-1, self.index) and 0 <= failure.node < len(self.session.nodes):
            origin = self.session.nodes[failure.node]
            return replace(origin.cause(replace(failure, node=-1)), where=origin.index)
        key = key_of(failure)
        with self.lock:
            if key not in self.failure_log:
                self._file_running(failure)
            found = self.failure_log.read(key) or Cause(failure, "")
        # Each of a mesh's members here may have failed in its own way.
        return found if found.failure == failure else replace(found, failure=failure)

    # -- the end ---------------------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """Mark the worker as lost. Everything that waits for it, now or later, fails with `why`."""
        with self.lock:
            if self.failed is None:
                self.failed, self.deserted = why, True
                self._drop()
                flights, self.flights = self.flights, deque()
                self.acknowledged, self.nbytes, self.heavy = self.base, 0, 0
                self.busy = False
                self.enough = 0
                self.outlet.unsent = None
                self.session.places.forget(self)
                for flight in flights:
                    # The memory that a worker reads is not given back while the worker may still read it.
                    if flight.log is not self:
                        for release in flight.releases:
                            release()
                for mesh in self.meshes:
                    mesh.fail(f"has lost a member: {self} {why}")

    def lost_error(self) -> NodeFailed:
        """Return the error of whatever lived on this lost worker."""
        if self.presence.taken:
            return NodeFailed(
                f"{self} {self.failed}. This session's tensors there are gone; published ones are still "
                "available"
            )
        if not self._losses:
            self._losses = self.session.losses(self)
        if self.session.nodes[self.index] is self:
            advice = (
                f"The session and its other nodes go on; dr.restart({self.index}) puts a new worker there."
            )
        else:
            advice = f"Node {self.index} has a new worker by now: make or publish there again what you need."
        return NodeFailed(f"{self} {self.failed}. {self._losses}{advice}")


class Absence:
    """A worker cannot be reached. `since` is a time of `time.monotonic`, `clock` tells it to people."""

    def __init__(self, why: str) -> None:
        self.why, self.since, self.clock = why, time.monotonic(), time.strftime("%H:%M:%S")
        # So often nobody was listening where the worker was.
        self.refusals = 0
        # It is True once the user has heard of it.
        self.told = False

    @property
    def text(self) -> str:
        """Say it in words."""
        return f"unreachable since {self.clock}: {self.why}"


class Presence:
    """What is known of a worker's being there, apart from its loss."""

    def __init__(self) -> None:
        # The absence stands here while there is no connection.
        self.absence: Absence | None = None
        # It is True if the worker said farewell before it was lost.
        self.has_left = False
        # It is True if another worker has been asked for in its place. The text says what is waited for.
        self.connecting = False
        self.sought = "another worker is started in its place"
        # It is True if another master has the session now.
        self.taken = False

    def state(self, lost: bool, busy: bool) -> str:
        """Return "ready", "busy", "unreachable", "lost", "left", or "connecting"."""
        if lost:
            return "connecting" if self.connecting else "left" if self.has_left else "lost"
        return "unreachable" if self.absence is not None else "busy" if busy else "ready"
