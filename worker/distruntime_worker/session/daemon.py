"""The worker's sockets.

One reader, and the sessions of masters, each with threads of its own that run its segments.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import torch

from distruntime.errors import ConfigurationError, ConnectionFailed, ProtocolError
from distruntime.wire import messages
from distruntime.wire.channel import HANG_UPS, Channel, Frames
from distruntime.wire.codec import decode
from distruntime.wire.deadlines import DIAL, UNREACHABLE
from distruntime.wire.descriptors import raise_limit, spare
from distruntime.wire.scratch import hold

from ..collectives.data_channel import prepare
from ..log.watching import install_watching
from ..machine import accelerator, hardware, lost, own_log
from ..machine.devices import Devices
from ..machine.figures import keep_pages
from ..python.output import install_around
from .address import data_host
from .config import WorkerConfig
from .executor import NONSENSE
from .metrics import Metrics
from .report import OfStranger, Questions, Reporter
from .session import Session
from .sessions import Sessions

log = logging.getLogger("distruntime.worker")

# A thread gives up the interpreter after so many seconds. With Python's 5 ms, a reader would wait that long
# behind a busy executing thread.
_SWITCH = 0.0005
# After a message the reader looks for another one for so many seconds before it sleeps.
_SPIN = 0.0002
# So many seconds pass before a master that has hung up is dialled again.
_PAUSE = 0.1
# So many seconds pass from the end of a session to the collection of what it leaves: its threads may still
# hold that before.
_SWEEP = 1.0
# A worker that ends waits so many seconds for its last words to leave.
_LAST_WORDS = 0.3
# So many seconds lie between looks whether a session's time is over.
_LOOK = 0.5


class Daemon:
    """Serves masters on one channel until told to stop, each in a session of its own."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._devices = Devices(config.devices, config.simulate_cuda)
        if config.listen is not None and config.listen.startswith("ipc://"):
            # The folder of a session that has a name outlives its master, with the workers that listen there.
            hold(Path(config.listen.removeprefix("ipc://")).parent)
        # Its silence is the master's to notice: a large frame that is on its way here says nothing for as
        # long as it takes.
        self._channel = Channel(
            listen=config.listen, keys=config.keys, silence=UNREACHABLE.get(), patient=True
        )
        self._sessions = Sessions(config, self._devices, self._channel, self._ended)
        # Each message asks for these.
        self._by_name, self._by_peer = self._sessions.by_name, self._sessions.by_peer
        self._greet, self._strangers = self._sessions.greet, self._sessions.strangers
        self._reporter = Reporter(self._devices, self._by_name, config.master or self._channel.address)
        self._questions = Questions(config, self._sessions.turns, self._reporter)
        self._metrics = None if config.metrics is None else Metrics(*config.metrics, config.keys)
        self._dials = count().__next__
        # The dialled master has hung up so often in a row, in the handshake.
        self._hang_ups = 0
        # This is the connection to the dialled master.
        self._master = b""
        # The worker dials the master again at this time.
        self._dial_at = math.inf
        self._looked = 0.0
        # At this time the worker looks for what ended sessions leave.
        self._sweep_at = math.inf
        self._began = time.monotonic()
        if config.listen is not None:
            log.info("listening on %s, offering %s", self._channel.address, ", ".join(self._devices.names))
        else:
            log.info("dialling %s, offering %s", config.master, ", ".join(self._devices.names))
            self._dial()

    def _dial(self) -> None:
        """Dial the master anew: under its old name libzmq would send what was for the broken connection.

        The greeting waits for the connection. Not for the event that tells of it: that knows an address,
        where the connection before may just have come back, and so can come twice; two greetings on one
        connection would be two workers to the master.
        """
        assert self._config.master is not None
        self._dial_at = math.inf
        self._channel.hang_up(self._master)
        self._master = b"master-%d" % self._dials()
        self._channel.connect(self._config.master, self._master)
        self._greet(
            self._master,
            messages.Join(self._config.node, os.getpid(), socket.gethostname(), self._sessions.incarnation),
        )

    def run(self, stop: threading.Event) -> str:
        """Serve until `stop` is set.

        A holder of the key may ask this worker to end. Then return why, and else nothing.
        """
        arrived: list[tuple[bytes, Frames]] = []
        while not (stop.is_set() or self._questions.stopped) and not (
            self._config.once and self._has_served()
        ):
            # A master that has just read something often reads again. While a segment runs, its thread needs
            # the interpreter more.
            quick = arrived and not any(session.executor.running for session in self._by_name.values())
            arrived = self._channel.receive(0.2, _SPIN if quick else 0.0)
            for peer, frames in arrived:
                self._handle(peer, frames)
                # This variable would hold the last upload until something else comes.
                del frames
            for session in [
                session for session in self._by_name.values() if session.backlog and not session.held
            ]:
                self._go_on(session)
                # Otherwise this variable would hold an ended session.
                del session
            self._watch()
        for session in list(self._by_name.values()):
            session.send(messages.Goodbye("the worker was stopped"))
            self._sessions.end(session, "stopped")
        return self._questions.stopped

    def _has_served(self) -> bool:
        """Whether the last session is over, or the master that this worker was started for never came."""
        if self._by_name:
            return False
        if self._sessions.served:
            return True
        # A worker that dials its master hears that nobody is there.
        if self._config.listen is None or time.monotonic() < self._began + DIAL.get():
            return False
        log.warning("no master has come within %g s: stopping", DIAL.get())
        return True

    def close(self) -> None:
        """Close the sockets, the master's after a moment for the last words to leave."""
        self._strangers.finish()
        if self._metrics is not None:
            self._metrics.close()
        self._channel.close(_LAST_WORDS)

    def _hear(self) -> None:
        """Take in what became of connections."""
        for event in self._channel.events():
            if event.kind == "connected" and event.peer is not None:
                self._hang_ups = 0
                self._sessions.connected(event.peer)
            elif event.kind == "disconnected" and event.peer is not None:
                self._sessions.disconnected(event.peer)
                if event.peer == self._master:
                    # Otherwise libzmq would go on by itself, with what is to be sent again in order.
                    self._channel.hang_up(self._master)
                    self._dial_at = time.monotonic() + _PAUSE
            elif event.kind in ("auth_failed", "handshake_failed"):
                what = event.kind.replace("_", " ")
                if event.peer is None:
                    self._strangers.note(f"refused a connection ({what}): {event.detail or event.address}")
                elif self._sessions.served:
                    self._dial_at = time.monotonic() + _PAUSE
                else:
                    self._hang_ups += 1
                    if event.final or self._hang_ups >= HANG_UPS:
                        raise ConnectionFailed(
                            f"the master at {self._config.master} and this worker do not hold the same key "
                            f"({what}), or the master has no descriptors left"
                        )

    def _watch(self) -> None:
        self._hear()
        if self._metrics is not None:
            self._metrics.look(self._reporter)
        now = time.monotonic()
        if accelerator.lost:
            for session in self._sessions.every():
                session.executor.chain.lost_devices.look()
        self._strangers.look()
        if now > self._sweep_at:
            self._sweep_at = math.inf
            self._sessions.sweep()
        if now > self._dial_at:
            self._dial()
        for session in [session for session in self._by_name.values() if session.broken is not None]:
            self._sessions.drop(session, str(session.broken))
        if now > self._looked + _LOOK:
            self._looked = now
            # A disk that is full costs no session.
            with suppress(OSError):
                own_log.cut()
            self._reporter.look()
            self._sessions.end_spent()

    def _handle(self, peer: bytes, frames: Frames) -> None:
        """Act on one message. A peer that breaks the protocol is dropped, and costs nothing else."""
        buffers = [f if isinstance(f, bytes) else f.buffer for f in frames]
        session = self._by_peer.get(peer)
        try:
            if not buffers:
                raise ProtocolError("a message without frames")
            message = decode(buffers[0])
            if session is None:
                self._first(peer, message)
                return
            if isinstance(message, messages.Ack):
                session.link.acknowledge(message.received)
                return
            if isinstance(message, messages.Refused) and peer == self._master:
                # The master has given this connection up, and waits for the worker on another.
                self._sessions.give_up(peer)
                self._dial()
                return
            if session.held or session.backlog:
                session.backlog.append((peer, frames))
                return
            payloads = buffers[1:]
            if not isinstance(message, messages.Hello) and session.link.count(
                sum(map(len, payloads)) if payloads else 0, False
            ):
                self._greet(peer, messages.Ack(session.link.received))
            match message:
                case messages.Segment():
                    session.accept(message, payloads)
                case messages.MeshSegment():
                    session.accept_mesh(message, payloads)
                case messages.OpenMesh():
                    session.executor.open_mesh(message)
                case messages.OpenLines():
                    session.executor.open_lines(message)
                case messages.Fetch():
                    session.executor.fetch(message)
                case messages.Question():
                    self._questions.answer(session, message)
                case messages.OpenStream():
                    session.open(message)
                case messages.Signal():
                    session.executor.signal(message)
                case messages.Cancel():
                    session.executor.cancel(message)
                case messages.Typed():
                    session.executor.around.typed(message)
                case messages.MasterReport():
                    self._reporter.seen.told(session, message)
                case messages.Notify():
                    session.executor.notify(message)
                case messages.Peers():
                    session.meet(message)
                case messages.OpenGroup():
                    session.join(message, data_host(self._config, session.host))
                case messages.BreakGroup():
                    session.executor.joint.groups.end(message.group, message.reason)
                case messages.Bury():
                    self._sessions.bury(message.session, session)
                case messages.Detach():
                    session.part()
                    self._greet(peer, messages.Ack(session.link.received))
                    log.info("master %s leaves: %s", session.master, message.reason)
                case messages.Hello() if message == session.greeting:
                    # It has been answered: a master that sees its connection come back before it was answered
                    # greets again.
                    pass
                case messages.Hello():
                    self._sessions.end(session, "a new session on the same connection")
                    self._welcome(peer, message)
                case messages.Goodbye():
                    self._greet(peer, messages.Ack(session.link.received))
                    self._sessions.end(session, message.reason)
                case _:
                    raise ProtocolError(f"a master does not send {type(message).__name__}")
        except ProtocolError as error:
            self._broke(session, str(error))
        except (ConfigurationError, OSError) as error:
            self._no_room(session, message, error)
        except NONSENSE as error:
            # Whatever it is in, it must not cost the other sessions.
            self._broke(session, f"a message makes no sense: {type(error).__name__}: {error!s:.200}")
        except RuntimeError as error:
            # A device was lost where nobody expected it, or its backend has failed, with an error of its own
            # class or without one. The other sessions go on.
            self._broke(session, str(lost.look(error, "a message")))

    def _no_room(self, session: Session | None, message: messages.Message, error: Exception) -> None:
        """Say that there is no room for a thread, a socket or a file that an answer needs.

        It costs that answer alone.
        """
        request = getattr(message, "request", None)
        if session is None or not isinstance(request, int):
            self._broke(session, str(error))
        else:
            session.fail(request, error, f"answering {type(message).__name__}")

    def _broke(self, session: Session | None, why: str) -> None:
        if session is not None:
            self._sessions.drop(session, why)
        else:
            self._strangers.note(f"dropped a peer: {why}")

    def _go_on(self, session: Session) -> None:
        """Act on what has come while a large value was being read.

        What is of a connection that is no more comes again on the next.
        """
        waiting, session.backlog = session.backlog, []
        for peer, frames in waiting:
            self._handle(peer, frames)

    def _ended(self, session: Session) -> None:
        self._sweep_at = time.monotonic() + _SWEEP
        # A greeting may have come behind what has ended it.
        self._go_on(session)

    def _first(self, peer: bytes, message: messages.Message) -> None:
        """Act on a message of a peer that has no session."""
        if isinstance(message, messages.Hello):
            self._welcome(peer, message)
        elif isinstance(message, OfStranger):
            self._greet(peer, self._questions.of_stranger(message))
        elif isinstance(message, messages.Goodbye) and peer == self._master and not self._by_peer:
            log.warning(
                "the master at %s has no place for this worker: %s. It gets one when another worker is lost, "
                "or dials again when that master has closed the connection",
                self._config.master,
                message.reason,
            )
        elif not isinstance(message, messages.Goodbye) and not self._sessions.is_retired(peer):
            # A message may come of a master that is no longer ours.
            raise ProtocolError(f"{type(message).__name__} from a peer that has no session here")

    def _welcome(self, peer: bytes, hello: messages.Hello) -> None:
        # The session's master may have gone since the last look, and this be its successor.
        self._watch()
        self._sessions.welcome(peer, hello)


def serve(config: WorkerConfig, stop: threading.Event) -> str:
    """Run the worker until `stop` is set. Block; raise `ConfigurationError` if it cannot start.

    Return why a holder of the key has asked it to end; nothing if nobody has.
    """
    raise_limit()
    spare.keep()
    sys.setswitchinterval(_SWITCH)
    keep_pages()
    hardware.keep_guard()
    if config.threads:
        torch.set_num_threads(config.threads)
    prepare()
    install_watching()
    install_around()
    daemon = Daemon(config)
    try:
        return daemon.run(stop)
    finally:
        daemon.close()
