"""Keeps the connections to a session's workers: finds again those that are away, takes those that come in a lost one's place.

"The process died" and "the network is silent" are different. A death that this machine can see, or a machine that answers that nobody
listens there any more, is a loss at once; silence is one only after the grace time. Until then everything that is sent waits, in order, and
arrives once.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable
from itertools import count

import torch

from ..errors import ConnectionFailed
from ..log.node import Node
from ..session.session import Session
from ..wire.address import resolve
from ..wire.channel import ChannelClosed, PeerEvent
from ..wire.identity import has_died, process
from ..wire.messages import PROTOCOL, Bury, Goodbye, Hello, Join, Refused, Welcome

log = logging.getLogger("distruntime")

_SOON = 0.3  # seconds that a connection usually takes; later, somebody has a look whether anyone listens there at all
_ATTEMPT = 5.0  # seconds for an attempt to connect, after which the next one looks the address up anew
_LONGEST = 20.0  # seconds for an attempt at most: each one is given twice as long as the one before that nobody answered in time
_PAUSE = 2.0  # seconds between attempts at most
_BRIEF = 1.0  # seconds of an absence of which nobody need hear
_MOST_RESTARTS, _SPELL = (
    5,
    60.0,
)  # how often within how many seconds dead workers are started again: one that dies at once would for ever
_REFUSALS = 2  # in a row, before nobody is taken to be there any more


Make = Callable[
    [Session, int, bytes, str, Welcome, float], Node
]  # how a worker's welcome becomes a node: see begin.py


class _Attempt:
    """A worker that is greeted on a new connection, and what came of it. `mode` is the greeting's."""

    def __init__(self, node: Node, mode: str) -> None:
        self.node, self.mode = node, mode
        self.connected = threading.Event()
        self.answered = threading.Event()  # or the connection is gone
        self.taken = False


class Keeper:
    """The connections of one session. The thread that reads the socket calls `happened`, `greeted` and `look`."""

    def __init__(self, session: Session, *, keep: float, grace: float, token: bytes, made: Make) -> None:
        self.session, self.keep, self.grace, self.token = session, keep, grace, token
        self.restart_workers = False  # whether those of this machine are started again when they die
        self._made = made
        self._sought: dict[
            Node, bool
        ] = {}  # those that a thread dials, and whether that was asked for again meanwhile
        self._seeking = threading.Lock()  # of it
        self._awaited: set[int] = set()  # the lost nodes in whose place another worker is looked for
        self._restarts: list[float] = []  # when workers were started again
        self._attempts: dict[bytes, _Attempt] = {}  # by connection
        self._numbers = count(1).__next__
        self._refused: dict[
            int, str
        ] = {}  # by node, why its worker does not take the session, as the log has it
        self._looked = 0.0

    def begin(self, restart_workers: bool) -> None:
        """Keep the connections from now on."""
        self.restart_workers = restart_workers
        for node in self.session.nodes:
            self.bury(node)
            if node.link.peer is not None and node.link.peer in self.session.parted:
                self.session.cut(node, "the connection was closed while others were still being made")
        for peer, join in self.session.early:
            self._joins(peer, join)

    def hello(self, mode: str, received: int = 0) -> Hello:
        """Return the greeting of this session."""
        session = self.session
        versions = torch.__version__, platform.python_version(), socket.gethostname()
        return Hello(
            PROTOCOL,
            session.name,
            mode,
            self.token,
            self.keep,
            session.lasting,
            received,
            *versions,
            process(),
            session.challenge.name,
        )

    def knew(self, peer: bytes) -> bool:
        """Whether this is the name of a connection on which a worker is greeted."""
        return peer in self._attempts

    # -- what happens ------------------------------------------------------------------------------------------------------------

    def happened(self, event: PeerEvent) -> None:
        """Act on what a connection reports that is no worker's now."""
        attempt = self._attempts.get(event.peer) if event.peer is not None else None
        if attempt is None or event.peer is None:
            if event.kind in ("auth_failed", "handshake_failed") and event.peer not in self.session.retired:
                self.session.strangers.note(
                    f"refused a connection ({event.kind.replace('_', ' ')}): {event.detail or event.address}"
                )
        elif event.kind == "connected":
            # Once: at the same endpoint, the connection before may have come back just before it was hung up.
            if not attempt.connected.is_set():
                self._greet(event.peer, attempt)
                attempt.connected.set()
        else:  # a welcome that is still to be read came before that
            self._end(event.peer, attempt)

    def _end(self, peer: bytes, attempt: _Attempt) -> None:
        """Let nothing that comes on an attempt's connection count any more, unless the worker is reached by it."""
        if not attempt.taken:
            self._attempts.pop(peer, None)
            self.session.retired.append(peer)
        attempt.answered.set()

    def _greet(self, peer: bytes, attempt: _Attempt) -> None:
        self.session.greet(
            peer, self.hello(attempt.mode, attempt.node.link.received if attempt.mode == "again" else 0)
        )

    def greeted(self, peer: bytes, message: Join | Welcome | Refused) -> None:
        """Act on what a worker says before it is one of the session's, or is again."""
        if isinstance(message, Join):
            self._joins(peer, message)
            return
        attempt = self._attempts.pop(peer, None)
        if attempt is None:  # it has been given up
            node = self.session.by_peer(peer)
            if node is not None and isinstance(message, Refused):
                self.session.cut(node, f"the worker has left the connection: {message.reason}")
            return
        try:
            if self._wanted(attempt.node, attempt.mode):
                self._answered(peer, attempt, message)
        finally:
            self._end(peer, attempt)

    def _answered(self, peer: bytes, attempt: _Attempt, message: Welcome | Refused) -> None:
        node, again = attempt.node, attempt.mode == "again"
        if isinstance(message, Welcome):
            attempt.taken = self._again(node, peer, message) if again else self._anew(node, peer, message)
        elif again:
            node.presence.taken = message.taken  # then nobody is to take it back
            self.session.lose(node, f"does not have this session any more: {message.reason}")
        elif self._refused.get(node.index) != message.reason:
            self._refused[node.index] = message.reason
            log.warning("%s does not take the session: %s", node, message.reason)

    def _joins(self, peer: bytes, join: Join) -> None:
        for node in self.session.nodes:
            if (
                node.failed is None
                and node.welcome is not None
                and node.welcome.incarnation == join.incarnation
            ):
                if node.link.peer is not None:
                    # Of the two connections this may be the older one, delayed: then the worker hears of it on the other, and joins again.
                    self.session.greet(node.link.peer, Refused("the worker has connected anew", False))
                    self.session.cut(node, "the worker has connected anew")
                attempt = self._attempts[peer] = _Attempt(node, "again")
                self._greet(peer, attempt)
                return
        lost = [node for node in self.session.nodes if node.failed is not None]
        wanted = [node for node in lost if join.node is None or node.index == join.node]
        if wanted:
            attempt = self._attempts[peer] = _Attempt(wanted[0], "new")
            self._greet(peer, attempt)
        else:
            self.session.greet(peer, Goodbye("the session has all its workers"))

    def _again(self, node: Node, peer: bytes, welcome: Welcome) -> bool:
        absence = node.presence.absence
        self.session.reached(node, peer, welcome.received)
        if absence is not None and absence.told:
            log.warning("%s is back after %s", node, span(time.monotonic() - absence.since))
        node.flush()
        return True

    def _anew(self, old: Node, peer: bytes, welcome: Welcome) -> bool:
        session = self.session
        try:
            node = self._made(session, old.index, peer, old.address, welcome, 0.0)
        except ConnectionFailed as error:
            log.warning("%s", error)
            return False
        session.replace(node)
        self._awaited.discard(node.index)
        self._refused.pop(node.index, None)
        self.bury(node)
        session.groups.meeting.returned(node)
        log.warning("%s is there again (pid %d); what lived on the one before stays lost", node, welcome.pid)
        return True

    def bury(self, node: Node) -> None:
        """Tell a worker which of the masters that it waits for were processes of this machine, and have died."""
        assert node.welcome is not None
        for entry in node.welcome.left:
            match entry:
                case [str(name), list(master)] if has_died(master):
                    self.session.post(node, Bury(name))

    # -- workers that are away ---------------------------------------------------------------------------------------------------

    def seek(self, node: Node) -> None:
        """Begin to look for a worker that cannot be reached; one that dials this process is waited for."""
        self._search(node)

    def lost(self, node: Node) -> None:
        """Report a loss, and begin to look for who may come in its place."""
        log.warning("%s %s", node, node.failed)
        if node.presence.taken:
            return
        if self.session.starter is None:
            self.revive(node)
        elif self.restart_workers:
            self._start_again(node)

    def _start_again(self, node: Node) -> None:
        recent = [at for at in self._restarts if at > time.monotonic() - _SPELL]
        if len(recent) >= _MOST_RESTARTS:
            log.warning(
                "%s is not started again: workers died %d times within %.0f s", node, len(recent), _SPELL
            )
            return
        self._restarts = [*recent, time.monotonic()]
        self.revive(node)

    def revive(self, node: Node) -> None:
        """Begin to look for whoever comes to be a lost node, after starting its worker if it was this process that had."""
        session = self.session
        self._awaited.add(node.index)
        if session.starter is not None:
            session.local_workers += [None] * (node.index + 1 - len(session.local_workers))
            ended = session.local_workers[node.index]
            if ended is not None:
                ended.stop(0)
            session.local_workers[node.index] = session.starter(node.index)
            node.presence.connecting = True
        self._search(node)

    def _search(self, node: Node) -> None:
        if self.session.channel.address:  # who dials this process is waited for
            return
        with self._seeking:
            before = node in self._sought
            self._sought[node] = before
        if not before:
            threading.Thread(
                target=self._dial, args=(node,), name=f"distruntime-seeks-{node.index}", daemon=True
            ).start()

    def _wanted(self, node: Node, mode: str) -> bool:
        if self.session.closed is not None or self.session.nodes[node.index] is not node:
            return False
        if mode == "again":
            return node.failed is None and node.presence.absence is not None
        return node.failed is not None and (node.index in self._awaited or bool(self.session.channel.address))

    def _dial(self, node: Node) -> None:
        """Dial a worker until it answers (a thread of its own): as the one that it was, and once that is lost, as whoever comes."""
        pause, patience = 0.1, _ATTEMPT
        try:
            while self._wanted(node, mode := "again" if node.failed is None else "new"):
                attempt = self._try(node, mode, patience)
                if not attempt.answered.is_set():
                    patience = min(_LONGEST, patience * 2)
                if not attempt.taken:
                    time.sleep(pause)
                    pause = min(_PAUSE, pause * 2)
        except ChannelClosed:
            return
        except Exception:  # the address cannot be used any more: the grace time ends it
            log.exception("looking for %s ended", node)
        finally:
            with self._seeking:
                asked = self._sought.pop(node)
        if asked:  # perhaps in just the moment when this thread had done what it was asked before
            self._search(node)

    def _try(self, node: Node, mode: str, patience: float) -> _Attempt:
        channel, absence = self.session.channel, node.presence.absence
        peer, attempt = f"node-{node.index}.{self._numbers()}".encode(), _Attempt(node, mode)
        self._attempts[peer] = attempt
        address = _endpoint(node.address)
        channel.connect(address, peer)
        started = time.monotonic()
        if not attempt.connected.wait(_SOON) and absence is not None:
            absence.refusals = absence.refusals + 1 if refuses(address) else 0
        while (
            not attempt.answered.wait(0.05)
            and self._wanted(node, mode)
            and time.monotonic() < started + patience
        ):
            pass
        if self._attempts.pop(peer, None) is None:  # whoever took it out answers it just now
            attempt.answered.wait()
        if not attempt.taken:
            self.session.retired.append(peer)
            channel.hang_up(peer)
        return attempt

    def look(self) -> None:
        """Give up who has been away for too long, and who has died."""
        now = time.monotonic()
        if now < self._looked + 0.1:
            return
        self._looked = now
        self.session.strangers.look()
        for node in self.session.nodes:
            absence = node.presence.absence
            if node.presence.connecting:
                self._look_after(node)
            if absence is None or node.failed is not None:
                continue
            assert node.welcome is not None
            if has_died(node.welcome.process):
                self.session.lose(node, f"(pid {node.welcome.pid}) died: there is no such process any more")
            elif absence.refusals >= _REFUSALS and not _tunnelled(node):
                self.session.lose(
                    node, f"died: its machine answers, and nobody listens at {node.address} any more"
                )
            elif now - absence.since > _BRIEF and not absence.told:
                absence.told = True
                log.warning(
                    "%s is unreachable: %s. It is waited for, %s at most", node, absence.why, span(self.grace)
                )
            elif now - absence.since > self.grace:
                self.session.lose(
                    node,
                    f"was unreachable for {span(now - absence.since)}, since {absence.clock} ({absence.why})",
                )

    def _look_after(self, node: Node) -> None:
        """Take note if the worker that was started in a lost one's place has ended, too."""
        worker = self.session.local_workers[node.index] if self.session.starter is not None else None
        ended = worker.poll() if worker is not None else None
        if worker is None or ended is None:
            return
        node.presence.connecting = False
        words = "\n  ".join(worker.last_words())
        log.warning(
            "%s: the worker that was started in its place ended before it was ready: %s; its last words:\n  %s",
            node,
            ended,
            words,
        )
        if self.restart_workers:
            self._start_again(node)


def _endpoint(address: str) -> str:
    """Return an address with its host looked up now: libzmq would do it in the thread that all connections share."""
    found = resolve(address)
    return found[0] if found else address


def refuses(address: str) -> bool:
    """Whether the machine at an address says that nobody listens there. Block for two seconds at most."""
    transport, _, rest = address.partition("://")
    try:
        if transport == "ipc":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(2.0)
                probe.connect(rest)
        else:
            host, _, port = rest.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), 2.0).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False


def _tunnelled(node: Node) -> bool:
    """Whether a worker is dialled at this machine's own address and runs on another: a tunnel, whose end says nothing of the worker."""
    local = any(part in node.address for part in ("://127.", "://localhost", "://[::1]"))
    return local and node.host != socket.gethostname()


def span(seconds: float) -> str:
    """Return "3 h 12 m", "2 m 5 s" or "7 s"."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} m"
    return f"{seconds // 60:.0f} m {seconds % 60:.0f} s" if seconds >= 60 else f"{seconds:.0f} s"


def new_token() -> bytes:
    """Return what a master proves itself with on later connections."""
    return secrets.token_bytes(16)


def new_name() -> str:
    """Return a name for a session that the user has not named."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"
