"""The worker's sockets.

One reader, and the sessions of masters, each with threads of its own that run its segments.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import platform
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from hmac import compare_digest
from itertools import count
from pathlib import Path

import torch

from distruntime.errors import ConfigurationError, ConnectionFailed, ProtocolError
from distruntime.wire import messages
from distruntime.wire.channel import HANG_UPS, Channel, PeerGone
from distruntime.wire.codec import decode, encode, failure_fields
from distruntime.wire.deadlines import DIAL, UNREACHABLE
from distruntime.wire.descriptors import raise_limit, spare
from distruntime.wire.identity import has_died, process
from distruntime.wire.inbox import Frames
from distruntime.wire.scratch import hold
from distruntime.wire.strangers import Tally

from ..checkpoint import folder as checkpoint_folder
from ..collectives.data_channel import prepare
from ..log.budget import Budget, limits
from ..log.turns import Turns
from ..log.watching import install_watching
from ..machine import accelerator, hardware, lost, own_log, threads
from ..machine.devices import Devices
from ..machine.figures import give_pages_back, keep_pages
from ..machine.settings import restore
from ..publishing.published import Published
from ..python.output import install_around
from ..values.objects import failure
from ..values.staging import downloads, uploads
from .address import data_host
from .admission import refusal
from .config import WorkerConfig
from .executor import NONSENSE
from .metrics import Metrics
from .report import OfStranger, Questions, Reporter
from .session import Session

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
        self._incarnation = os.urandom(16)
        self._sessions: dict[str, Session] = {}
        self._by_peer: dict[bytes, Session] = {}
        # Masters have given up these connections.
        self._retired: deque[bytes] = deque(maxlen=4096)
        # Those of them that have ended are here. Their greetings may still lie unread.
        self._gone: deque[bytes] = deque(maxlen=4096)
        self._turns = Turns()
        self._reporter = Reporter(self._devices, self._sessions, config.master or self._channel.address)
        self._questions = Questions(config, self._turns, self._reporter)
        self._metrics = None if config.metrics is None else Metrics(*config.metrics, config.keys)
        self._dials = count().__next__
        # The dialled master has hung up so often in a row, in the handshake.
        self._hang_ups = 0
        # It counts what peers without a session here make this worker say.
        self._strangers = Tally(log.warning)
        # This is the connection to the dialled master.
        self._master = b""
        # The worker dials the master again at this time.
        self._dial_at = math.inf
        self._looked = 0.0
        # At this time the worker looks for what ended sessions leave: threads, mapped memory and sockets'
        # descriptors, all in cycles.
        self._sweep_at = math.inf
        # It is True once there was a session.
        self._served = False
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
            messages.Join(self._config.node, os.getpid(), socket.gethostname(), self._incarnation),
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
            quick = arrived and not any(session.executor.running for session in self._sessions.values())
            arrived = self._channel.receive(0.2, _SPIN if quick else 0.0)
            for peer, frames in arrived:
                self._handle(peer, frames)
                # This variable would hold the last upload until something else comes.
                del frames
            for session in [
                session for session in self._sessions.values() if session.backlog and not session.held
            ]:
                self._go_on(session)
                # Otherwise this variable would hold an ended session.
                del session
            self._watch()
        for session in list(self._sessions.values()):
            session.send(messages.Goodbye("the worker was stopped"))
            self._end(session, "stopped")
        return self._questions.stopped

    def _has_served(self) -> bool:
        """Whether the last session is over, or the master that this worker was started for never came."""
        if self._served:
            return not self._sessions
        # A worker that dials its master hears that nobody is there.
        if self._config.listen is None or time.monotonic() < self._began + DIAL.get():
            return False
        log.warning("no master has come within %g s: stopping", DIAL.get())
        return True

    def _published(self) -> dict[str, Published]:
        """Return what each session has published."""
        return {name: session.published for name, session in list(self._sessions.items())}

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
                with suppress(ValueError):
                    self._gone.remove(event.peer)
            elif event.kind == "disconnected" and event.peer is not None:
                session = self._by_peer.pop(event.peer, None)
                self._retired.append(event.peer)
                self._gone.append(event.peer)
                if session is not None:
                    self._leave(session)
                if event.peer == self._master:
                    # Otherwise libzmq would go on by itself, with what is to be sent again in order.
                    self._channel.hang_up(self._master)
                    self._dial_at = time.monotonic() + _PAUSE
            elif event.kind in ("auth_failed", "handshake_failed"):
                what = event.kind.replace("_", " ")
                if event.peer is None:
                    self._strangers.note(f"refused a connection ({what}): {event.detail or event.address}")
                elif self._served:
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
            for session in self._sessions.values():
                session.executor.chain.lost_devices.look()
        self._strangers.look()
        if now > self._sweep_at:
            self._sweep_at = math.inf
            gc.collect()
            give_pages_back()
            if not self._sessions:
                # The devices wait for their kernels there.
                try:
                    threads.begin(_give_memory_back, "gives-memory-back")
                except ConfigurationError as error:
                    log.warning("%s", error)
        if now > self._dial_at:
            self._dial()
        for session in [session for session in self._sessions.values() if session.broken is not None]:
            self._drop(session, str(session.broken))
        if now > self._looked + _LOOK:
            self._looked = now
            # A disk that is full costs no session.
            with suppress(OSError):
                own_log.cut()
            self._reporter.look()
            for session in [session for session in self._sessions.values() if session.spent]:
                dead = not session.lasting and has_died(session.process)
                self._end(
                    session, "its master has died" if dead else f"its master was away for {session.keep:g} s"
                )

    def _leave(self, session: Session) -> None:
        """Note that a session's master is not connected any more."""
        session.leave()
        if session.spent:
            self._end(session, "its master has died")
        else:
            log.info(
                "session of master %s: connection closed. This worker keeps it for %.0f s",
                session.master,
                session.keep,
            )

    def _leave_for_another(self, session: Session) -> None:
        """Dial the master anew: it has given this connection up, and waits for the worker on another."""
        self._by_peer.pop(self._master, None)
        self._retired.append(self._master)
        self._leave(session)
        self._dial()

    def _end(self, session: Session, why: str) -> None:
        log.info("session of master %s ended (%s)", session.master, why)
        if session.link.peer is not None:
            self._by_peer.pop(session.link.peer, None)
            self._retired.append(session.link.peer)
        session.close()
        self._sweep_at = time.monotonic() + _SWEEP
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
        # A greeting may have come behind what has ended it.
        self._go_on(session)

    def _drop(self, session: Session, why: str) -> None:
        log.warning("dropped a peer: %s", why)
        session.send(messages.Goodbye(why))
        self._end(session, "protocol error")

    def _greet(self, peer: bytes, message: messages.Message) -> None:
        # It did not wait for the answer; an event tells of it.
        with suppress(PeerGone):
            self._channel.send(peer, [encode(message)])

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
                self._leave_for_another(session)
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
                case (
                    messages.ListFolder()
                    | messages.ReadIndex()
                    | messages.CommitSave()
                    | messages.SweepSaves()
                    | messages.RemoveFiles()
                ):
                    checkpoint_folder.answer(message, session.send)
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
                    dead = self._sessions.get(message.session)
                    if dead is not None and dead.alone_since is not None and not dead.lasting:
                        self._end(dead, f"its master has died, says {session.master}")
                case messages.Detach():
                    self._greet(peer, messages.Ack(session.link.received))
                    log.info("master %s leaves: %s", session.master, message.reason)
                case messages.Hello() if message == session.greeting:
                    # It has been answered: a master that sees its connection come back before it was answered
                    # greets again.
                    pass
                case messages.Hello():
                    self._end(session, "a new session on the same connection")
                    self._welcome(peer, message)
                case messages.Goodbye():
                    self._greet(peer, messages.Ack(session.link.received))
                    self._end(session, message.reason)
                case _:
                    raise ProtocolError(f"a master does not send {type(message).__name__}")
        except ProtocolError as error:
            self._broke(session, str(error))
        except (ConfigurationError, OSError) as error:
            # There is no room for a thread, a socket or a file that the answer needs. It costs that answer
            # alone.
            request = getattr(message, "request", None)
            if session is None or not isinstance(request, int):
                self._broke(session, str(error))
            else:
                name = type(message).__name__
                cause = failure(error, seq=0, position=0, op=f"answering {name}", operands="")
                session.send(messages.Failed(request, failure_fields(cause)))
        except NONSENSE as error:
            # Whatever it is in, it must not cost the other sessions.
            self._broke(session, f"a message makes no sense: {type(error).__name__}: {error!s:.200}")
        except RuntimeError as error:
            # A device was lost where nobody expected it, or its backend has failed, with an error of its own
            # class or without one. The other sessions go on.
            self._broke(session, str(lost.look(error, "a message")))

    def _broke(self, session: Session | None, why: str) -> None:
        if session is not None:
            self._drop(session, why)
        else:
            self._strangers.note(f"dropped a peer: {why}")

    def _go_on(self, session: Session) -> None:
        """Act on what has come while a large value was being read.

        What is of a connection that is no more comes again on the next.
        """
        waiting, session.backlog = session.backlog, []
        for peer, frames in waiting:
            self._handle(peer, frames)

    # -- how sessions begin, and go on -------------------------------------------------------------

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
        elif not isinstance(message, messages.Goodbye) and peer not in self._retired:
            # A message may come of a master that is no longer ours.
            raise ProtocolError(f"{type(message).__name__} from a peer that has no session here")

    def _welcome(self, peer: bytes, hello: messages.Hello) -> None:
        # The session's master may have gone since the last look, and this be its successor.
        self._watch()
        # The session would be in use for ever, by nobody: no event tells of that connection's end.
        if peer in self._gone:
            return
        found = self._sessions.get(hello.session)
        reason = refusal(hello, found, self._sessions)
        if reason:
            self._strangers.note(f"refused a master on {hello.host}: {reason}")
            self._greet(
                peer,
                messages.Refused(reason, found is not None and not compare_digest(found.token, hello.token)),
            )
            return
        if hello.mode == "again":
            assert found is not None
            # It knows of the break before we do, or this greeting is an older one that was on its way.
            if found.link.peer is not None:
                self._greet(
                    found.link.peer, messages.Refused("the session goes on on another connection", False)
                )
                self._by_peer.pop(found.link.peer, None)
                self._retired.append(found.link.peer)
            self._by_peer[peer] = found
            self._greet(peer, self._about_us(found))
            found.come_back(peer, hello)
            log.info("session of master %s goes on", found.master)
            return
        try:
            # A session takes one. Where there is none, the one that it was to go on from stays.
            threads.begin(_nothing, "session")
        except ConfigurationError as error:
            self._strangers.note(f"refused a master on {hello.host}: {error}")
            self._greet(peer, messages.Refused(str(error), False))
            return
        if found is not None:
            found.send(messages.Detach(f"the session was taken over by a master on {hello.host}"))
            self._end(found, f"taken over by a master on {hello.host}")
        if not self._sessions:
            restore()
        before = found if hello.mode.endswith(("resume", "auto")) else None
        most = self._config.max_memory
        budget = None if most is None else Budget(hello.session, limits(most, self._devices))
        turn = self._turns.enter(hello.session)
        session = Session(
            peer, hello, self._devices, self._channel, self._published, turn, budget, before, self._refused()
        )
        session.executor.host = partial(self._data_host, session)
        self._sessions[hello.session] = self._by_peer[peer] = session
        self._served = True
        log.info(
            "session of master %s (torch %s, Python %s) begins", session.master, hello.torch, hello.python
        )
        self._greet(peer, self._about_us(session))

    def _data_host(self, session: Session, proposed: str) -> str:
        """Return this worker's host for other workers, as `data_host`; the session's own once it has one."""
        return data_host(self._config, session.host or proposed)

    def _refused(self) -> str:
        """Return why this worker opens nothing that its masters have pickled, or nothing."""
        if not self._config.functions:
            return (
                "this worker was started with --no-functions: it runs operators only, and no Python of its "
                "masters' own. Start it without that option, or use torch's operators"
            )
        if self._channel.unproven:
            return (
                "this worker has no key, so it cannot know who sends it Python to run, and runs none. Make a "
                "key with `distruntime-worker keygen`, and start the workers and the session with it instead "
                "of --insecure (in Python: insecure=True)"
            )
        return ""

    def _about_us(self, session: Session) -> messages.Welcome:
        return messages.Welcome(
            messages.PROTOCOL,
            self._incarnation,
            session.link.received,
            time.monotonic() - session.began,
            torch.__version__,
            platform.python_version(),
            socket.gethostname(),
            os.getpid(),
            process(),
            session.shared.secret(),
            session.shared.nonce,
            self._devices.info(),
            self._devices.simulated,
            [
                [other.name, other.process]
                for other in self._sessions.values()
                if other.alone_since is not None
            ],
        )


def _nothing() -> None:
    """Return at once."""


def _give_memory_back() -> None:
    """Give back what torch's allocators hold for nobody."""
    with lost.tolerated("giving memory back"):
        uploads().empty()
        downloads().empty()
        hardware.forget_workspaces()
        hardware.empty_cache()


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
