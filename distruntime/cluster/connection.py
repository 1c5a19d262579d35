"""The state machine of one node's connection: sought, greeted, welcomed or refused, lost, and sought again.

A node that is sought (`mode` says as what) has no attempt, and is dialled when it is due, or has attempts. An
attempt is a connection on which the worker is to answer: it was dialled and is not connected yet, or the
worker is greeted on it. The first answer ends all of them. An attempt that fails ends alone, and the node is
due again after a pause.

The first meeting and every later one take this way. They differ in one thing: before a node's first worker
has come, somebody waits for it, who is told a `failure` after a few refusals; later ones are sought until the
session gives up.

Nothing here knows a socket, a thread or a clock. The `Connector` does what a connection says, and tells it
the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ..wire.address import host_of, resolve, trial_of
from ..wire.channel import HANG_UPS, PeerEvent

# An attempt has so many seconds. Each one gets twice as long as the one before that nobody answered in time,
# up to the longest.
ATTEMPT = 5.0
LONGEST_ATTEMPT = 20.0
# So many seconds lie between attempts. After each one that fails they are twice as many, up to the most.
SHORTEST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
# So many handshakes in a row must surely have failed before another key is taken for granted.
RESETS = 5


@dataclass
class Attempt:
    """A connection on which a worker is to answer. Times are those of `time.monotonic`."""

    mode: str
    dialled_at: float
    greeted_at: float | None = None
    # A worker that has dialled this process has said its incarnation, and it stands here.
    incarnation: bytes = b""
    # It is True if somebody looks whether anyone listens at the address at all.
    probed: bool = False


@final
class Connection:
    """The way to one node's worker. `address` is "" where the worker dials this process.

    `endpoint` is where it is dialled: the same, or this machine's end of a tunnel.
    """

    def __init__(self, number: int, address: str, endpoint: str = "") -> None:
        self.number, self.address, self.endpoint = number, address, endpoint or address
        # The node is sought with a greeting of this mode. It is None while the node is not sought.
        self.mode: str | None = None
        self.attempts: dict[bytes, Attempt] = {}
        # The connector is to hang up on these connections, which do not count any more.
        self.abandoned: list[bytes] = []
        # These say whether no worker has been this node yet, and why none can be any more.
        self.first = True
        self.failure: str | None = None
        # It is True once nobody waits any more for the first worker of a node that was to come to a session
        # that runs.
        self.withdrawn = False
        # This says why the worker there has not taken the session, as the log has it.
        self.refusal = ""
        # It is True where somebody listened at the address just before this search began.
        self.listened = False
        self.resets = 0
        self._hang_ups = 0
        self._due_at = 0.0
        self._patience, self._pause = ATTEMPT, SHORTEST_PAUSE
        self._dials = 0
        self._seen: set[str] = set()

    @property
    def is_local(self) -> bool:
        """Whether the worker is dialled on this machine, which knows at once if nobody listens."""
        return self.address.startswith("ipc://")

    @property
    def is_tunnelled(self) -> bool:
        """Whether a tunnel leads to the worker. A refusal at its end says nothing about the worker."""
        return self.endpoint != self.address

    @property
    def has_ended(self) -> bool:
        """Whether somebody has listened there so far: if nobody does now, that one has ended."""
        return self.listened or bool(self._seen & {"connected", "disconnected", "handshake_failed"})

    # -- seeking -------------------------------------------------------------------------------------------

    def seek(self, mode: str | None, now: float) -> None:
        """Seek the worker from now on with greetings of this mode; None: stop seeking it."""
        if mode == self.mode:
            return
        self.mode = mode
        self._abandon_all()
        self._due_at, self._patience, self._pause = now, ATTEMPT, SHORTEST_PAUSE
        self.resets = self._hang_ups = 0

    def is_due(self, now: float) -> bool:
        """Whether it is time to dial."""
        return self.mode is not None and bool(self.address) and not self.attempts and now >= self._due_at

    def dial(self, now: float) -> bytes:
        """Begin an attempt; return the name of its connection, which no other one has."""
        assert self.mode is not None
        self._dials += 1
        peer = f"node-{self.number}.{self._dials}".encode()
        self.attempts[peer] = Attempt(self.mode, now)
        return peer

    def join(self, peer: bytes, mode: str, incarnation: bytes, now: float) -> None:
        """Begin an attempt on a connection that the worker has made, and on which it is greeted now."""
        self.attempts[peer] = Attempt(mode, now, now, incarnation)

    def has_joined(self, incarnation: bytes) -> bool:
        """Whether this very worker is greeted on some connection."""
        return any(attempt.incarnation == incarnation for attempt in self.attempts.values())

    def expire(self, now: float) -> None:
        """End a dialled attempt that nobody has answered in time."""
        for peer, attempt in list(self.attempts.items()):
            if not attempt.incarnation and now > attempt.dialled_at + self._patience:
                self._patience = min(LONGEST_ATTEMPT, self._patience * 2)
                self._end(peer, now)

    # -- what happens on an attempt's connection -----------------------------------------------------------

    def happened(self, event: PeerEvent, now: float) -> bool:
        """Take note of what a connection reports; return whether the worker is to be greeted on it now."""
        assert event.peer is not None
        attempt = self.attempts[event.peer]
        self._seen.add(event.kind)
        if event.kind == "connected":
            # The master greets once: at the same endpoint, the connection before may have come back just
            # before it was hung up.
            greets = attempt.greeted_at is None
            if greets:
                attempt.greeted_at = now
            return greets
        if event.kind == "handshake_failed" and not event.final:
            # The other side may be flooded. libzmq dials again by itself. It would do so for a whole attempt
            # where the process of this machine that listened has just ended, so the next dial looks first.
            self._hang_ups += 1
            if self._hang_ups < HANG_UPS and not self.is_local:
                return False
        elif event.kind == "handshake_failed":
            self.resets += 1
        self._end(event.peer, now)
        if self.first and (event.kind == "auth_failed" or self.resets > RESETS or self._hang_ups >= HANG_UPS):
            self.fail()
        return False

    def answered(self, peer: bytes, now: float) -> tuple[str, float]:
        """Note that the worker has answered.

        Return the greeting's mode and the seconds that the answer took.
        """
        attempt = self.attempts[peer]
        return attempt.mode, now - (attempt.dialled_at if attempt.greeted_at is None else attempt.greeted_at)

    def welcomed(self, peer: bytes) -> None:
        """End the search: the worker is reached on this connection."""
        del self.attempts[peer]
        self.first, self.refusal = False, ""
        self.seek(None, 0.0)

    def refused(self, peer: bytes, why: str, now: float) -> bool:
        """End an attempt that the worker has refused; return whether that reason is a new one."""
        self._end(peer, now)
        if self.first:
            self.failure = why
        news, self.refusal = why != self.refusal, why
        return news

    # -- the first meeting ---------------------------------------------------------------------------------

    def fail(self) -> None:
        """Give the first meeting up, for what has been seen so far."""
        self.failure = self.unanswered(0.0)

    def unanswered(self, seconds: float) -> str:
        """Return why no worker has answered at the address within so many seconds."""
        if self.is_tunnelled and self._seen & {"auth_failed", "handshake_failed", "disconnected"}:
            return (
                f"the worker at {self.address} runs, and ssh does not lead to it. Does its sshd allow that "
                "(AllowTcpForwarding yes in sshd_config there)? If it does, the worker has another key: name "
                "the key file of its session with key="
            )
        if self._seen & {"auth_failed", "handshake_failed"}:
            return (
                f"{self.address} closed the connection during the handshake: the keys do not match. One side "
                "has a different key file, or only one side uses a key (or it has no descriptors left). "
                "Expected: the same key file on both sides (distruntime-worker keygen; key=...). On both "
                "machines, this shows whether it is: cksum ~/.config/distruntime/key"
            )
        if "connected" in self._seen:
            return (
                f"something at {self.address} accepts connections but did not answer as a worker within "
                f"{seconds:.0f} s: is it a distruntime-worker, and not stopped?"
            )
        if self.is_tunnelled:
            return (
                f"the worker at {self.address} runs, and has not answered through ssh within "
                f"{seconds:.0f} s: its machine may be busy. Give it longer: timeout="
            )
        host = host_of(self.address)
        if host and not resolve(self.address):
            return (
                f"the name {host!r} in {self.address!r} does not resolve on this machine: check its spelling"
            )
        trial = trial_of(self.address)
        return (
            f"nothing answers at {self.address} within {seconds:.0f} s: is the worker running there "
            f"(distruntime-worker --listen {self.address}), and the port open?"
            + (f" From here, this shows it: {trial}" if trial else "")
        )

    def _end(self, peer: bytes, now: float) -> None:
        del self.attempts[peer]
        self.abandoned.append(peer)
        self._due_at = now + self._pause
        self._pause = min(LONGEST_PAUSE, self._pause * 2)

    def _abandon_all(self) -> None:
        self.abandoned += self.attempts
        self.attempts.clear()
