"""The worker's sockets and threads: one reader, one thread that runs segments, one master at a time."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from distruntime.errors import ConfigurationError, ConnectionFailed, ProtocolError
from distruntime.wire.channel import Channel, PeerGone
from distruntime.wire.codec import Buffer, decode, encode, failure_fields
from distruntime.wire.keys import KeyPair
from distruntime.wire.messages import (
    PROTOCOL,
    Ask,
    BreakGroup,
    Cancel,
    Failed,
    Fetch,
    Goodbye,
    Hello,
    Join,
    MeshSegment,
    Message,
    Notify,
    OpenGroup,
    OpenLines,
    OpenStream,
    OpenTeam,
    Peers,
    Refused,
    Reply,
    Segment,
    Signal,
    Welcome,
)
from distruntime.wire.shared import answer

from .address import data_host, peer_address, rendezvous
from .config import WorkerConfig
from .data_channel import prepare, report
from .devices import Devices
from .executor import NONSENSE, Executor
from .objects import failure
from .peers import PeerChannel
from .settings import per_thread, restore
from .streams import Stream, Work

log = logging.getLogger("distruntime.worker")

_SWITCH = 0.0005  # seconds; with Python's 5 ms a reader would wait that long behind a busy executing thread
_SPIN = 0.0002  # seconds
_MASTER = b"master"


def keep_pages() -> None:
    """Let glibc's malloc keep the pages of large blocks: fresh ones cost more than the transfer that fills them.

    The three settings together bring a 64 MiB frame over loopback from 1.1 to 4.0 GiB/s; two of them do not (measured 2026-11, 2 shared
    cores, glibc 2.36). Elsewhere than on glibc nothing happens.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        for option, setting in ((-4, 0), (-1, (1 << 31) - 1), (-8, 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX of malloc.h
            libc.mallopt(option, setting)


class _Master:
    """The session of one master: its executor, its queue of segments, and the thread that runs them."""

    def __init__(self, peer: bytes, name: str, devices: Devices, channel: Channel) -> None:
        self.peer, self.name = peer, name
        self._channel = channel
        self.host = ""  # by which the master has dialled this worker, if it has
        self._peers: PeerChannel | None = None  # once the master has asked for it
        self.executor = Executor(devices, self.send, self.tell)
        self._default = self.executor.default.queue.put
        self.broken: str | None = None
        self._start(self.executor.default, "executor")

    def _start(self, stream: Stream, name: str) -> None:
        threading.Thread(target=self._run, args=(stream,), name=name, daemon=True).start()

    def open(self, message: OpenStream) -> None:
        """Open a stream: start its thread."""
        try:
            self._start(self.executor.open(message), f"stream-{message.stream}")
        except RuntimeError as error:  # of threading: there is no more room for one
            raise ProtocolError(f"stream {message.stream} cannot be opened: {error}") from error

    def send(self, message: Message, payload: memoryview | None = None, copy: bool = True) -> Any:
        """Send to the master, from any thread; a master that has gone meanwhile is no error here.

        Without `copy`, return what tells when the payload's memory has been read.
        """
        if self.executor.state.closed:  # a thread of its still ends; the next master may have the same name
            return None
        try:
            if payload is None:
                return self._channel.send(self.peer, [encode(message)])
            return self._channel.send(self.peer, [encode(message), payload], copy=copy)
        except PeerGone:
            log.debug("master %s is gone: %s not sent", self.name, type(message).__name__)
            return None

    def listen(self, address: str, keys: KeyPair | None) -> str:
        """Open the channel to other workers, if it is not; return where it listens."""
        if self._peers is None:
            self._peers = PeerChannel(address, keys, self.executor.joint.take)
        return self._peers.address

    def meet(self, message: Peers) -> None:
        """Take the addresses of the other workers."""
        if self._peers is None:
            raise ProtocolError("Peers before anyone has asked where this worker listens")
        self._peers.meet(message)
        self.executor.joint.node = message.node

    def tell(self, node: int, message: Message) -> None:
        """Send to another worker, from any thread."""
        if self._peers is None:
            raise ProtocolError(f"{type(message).__name__} for node {node}, before the workers were told of each other")
        self._peers.send(node, message)

    def join(self, message: OpenGroup, host: str) -> None:
        """Join a group; the answer goes when that has ended."""

        def answer(error: BaseException | None) -> None:
            if error is None:
                self.send(Reply(message.request, None))
            else:
                cause = failure(error, seq=0, position=0, op=f"joining group {message.group}", operands="")
                self.send(Failed(message.request, failure_fields(cause)))

        self.executor.joint.groups.open(message, host, answer)

    def _run(self, stream: Stream) -> None:
        executor = self.executor
        with torch.no_grad():
            while (item := stream.queue.get()) is not None and not executor.state.closed:
                work, first, stop = item
                try:
                    per_thread.apply()
                    if work.segment.stretches:
                        executor.run_stretch(stream, work, first, stop)
                    else:
                        executor.run(work)
                    del item, work  # else an idle stream would hold a segment's payloads
                except Exception as error:  # the master must hear of it, whatever it is
                    if isinstance(error, ProtocolError):
                        self.broken = str(error)
                    else:
                        self.broken = f"a defect of the worker: {error!r}"
                        log.exception("the thread of stream %s ends", stream.number)
                    self._channel.wake()
                    return

    def put(self, segment: Segment, payloads: Sequence[Buffer]) -> None:
        """Queue a segment in order; one that came before is dropped, so that sending again is safe."""
        if segment.seq <= self.executor.received:
            return
        if segment.seq != self.executor.received + 1:
            raise ProtocolError(f"segment {segment.seq} came after {self.executor.received}")
        self.executor.received = segment.seq
        if segment.templates:
            self.executor.learn(segment.templates)
        work = Work(segment, list(payloads), len(segment.stretches) or 1)
        if not self.executor.state.teams:
            self.executor.works.append(work)
        else:
            self.executor.line_up(work)
        if segment.stretches:
            self.executor.divide(work)
        else:
            self._default((work, 0, 0))

    def put_mesh(self, message: MeshSegment, payloads: Sequence[Buffer]) -> None:
        """As `put`, for a segment whose body is a mesh's."""
        if message.seq != self.executor.received + 1 or len(payloads) != 1:
            raise ProtocolError(f"segment {message.seq} of a mesh came after {self.executor.received}, with {len(payloads)} bodies")
        self.executor.received = message.seq
        work = self.executor.mesh_work(message, decode(payloads[0]))
        self.executor.line_up(work)
        if work.segment.stretches:
            self.executor.divide(work)
        else:
            self._default((work, 0, 0))

    def close(self) -> None:
        """Let the threads end after the instructions that they are running; its values go with it."""
        self.executor.close()
        if self._peers is not None:
            self._peers.close()


class Daemon:
    """Serves one master after another on one channel until told to stop."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._devices = Devices(config.devices, config.simulate_cuda)
        self._channel = Channel(listen=config.listen, keys=config.keys)
        self._master: _Master | None = None
        if config.listen is not None:
            log.info("listening on %s, offering %s", self._channel.address, ", ".join(self._devices.names))
        else:
            assert config.master is not None
            log.info("dialling %s, offering %s", config.master, ", ".join(self._devices.names))
            self._channel.connect(config.master, _MASTER)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set."""
        arrived: list[Any] = []
        while not stop.is_set():
            # A master that has just read something often reads again. While a segment runs, its thread needs the interpreter more.
            quick = arrived and self._master is not None and not self._master.executor.running
            arrived = self._channel.receive(0.2, _SPIN if quick else 0.0)
            for peer, frames in arrived:
                self._handle(peer, frames)
            self._watch()
        if self._master is not None:
            self._master.send(Goodbye("the worker was stopped"))
            self._leave("stopped")

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def _watch(self) -> None:
        for event in self._channel.events():
            if event.kind == "connected" and self._config.master is not None:
                join = Join(self._config.node, os.getpid(), socket.gethostname())
                try:
                    self._channel.send(_MASTER, [encode(join)])
                except PeerGone:
                    log.warning("the master at %s went away before it could be joined", self._config.master)
            elif event.kind == "disconnected":
                if self._master is not None and (event.peer == self._master.peer or self._config.master is not None):
                    self._leave("connection closed")
            elif event.kind in ("auth_failed", "handshake_failed"):
                what = event.kind.replace("_", " ")
                if self._config.master is not None:  # libzmq does not dial again after a mismatch of keys
                    raise ConnectionFailed(f"the master at {self._config.master} and this worker do not hold the same key ({what})")
                log.warning("refused a connection (%s): %s", what, event.detail or event.address)
        if self._master is not None and self._master.broken is not None:
            self._drop(self._master.peer, self._master.broken)

    def _leave(self, why: str) -> None:
        if self._master is not None:
            log.info("session of master %s ended (%s)", self._master.name, why)
            self._master.close()
            self._master = None

    def _drop(self, peer: bytes, why: str) -> None:
        log.warning("dropped a peer: %s", why)
        if self._master is not None and peer == self._master.peer:
            self._master.send(Goodbye(why))
            self._leave("protocol error")

    def _handle(self, peer: bytes, frames: Sequence[Any]) -> None:
        """Act on one message. A peer that breaks the protocol is dropped, and costs nothing else."""
        buffers = [f if isinstance(f, bytes) else f.buffer for f in frames]
        try:
            if not buffers:
                raise ProtocolError("a message without frames")
            message, master = decode(buffers[0]), self._master
            if master is None or peer != master.peer:
                self._greet(peer, message)
                return
            match message:
                case Segment():
                    master.put(message, buffers[1:])
                case MeshSegment():
                    master.put_mesh(message, buffers[1:])
                case OpenTeam():
                    master.executor.open_team(message)
                case OpenLines():
                    master.executor.open_lines(message)
                case Fetch():
                    master.executor.fetch(message)
                case Ask():
                    self._reply(master, message)
                case OpenStream():
                    master.open(message)
                case Signal():
                    master.executor.signal(message)
                case Cancel():
                    master.executor.cancel(message)
                case Notify():
                    master.executor.notify(message)
                case Peers():
                    master.meet(message)
                case OpenGroup():
                    master.join(message, data_host(self._config, master.host))
                case BreakGroup():
                    master.executor.joint.groups.end(message.group, message.reason)
                case Hello():
                    self._leave("a new session on the same connection")
                    self._welcome(peer, message)
                case Goodbye():
                    self._leave(message.reason)
                case _:
                    raise ProtocolError(f"a master does not send {type(message).__name__}")
        except ProtocolError as error:
            self._drop(peer, str(error))
        except NONSENSE as error:  # whatever it is in, it must not cost the other sessions to come
            self._drop(peer, f"a message makes no sense: {type(error).__name__}: {error!s:.200}")

    def _greet(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Hello):
            self._welcome(peer, message)
        elif not isinstance(message, Goodbye):  # of a master that is no longer ours
            raise ProtocolError(f"{type(message).__name__} from a peer that has no session here")

    def _welcome(self, peer: bytes, hello: Hello) -> None:
        if self._master is not None:  # it may have died since the last look, and this be its successor
            self._watch()
        if hello.protocol != PROTOCOL:
            reason = f"this worker speaks protocol {PROTOCOL}, the master {hello.protocol}: install the same distruntime on both"
        elif self._master is not None:
            reason = f"this worker is serving another master ({self._master.name}); it serves one at a time"
        else:
            restore()
            self._master = _Master(peer, f"{hello.session} on {hello.host}", self._devices, self._channel)
            log.info("session of master %s (torch %s, Python %s) begins", self._master.name, hello.torch, hello.python)
            version = platform.python_version()
            simulated = self._devices.simulated
            self._master.send(
                Welcome(
                    PROTOCOL,
                    torch.__version__,
                    version,
                    socket.gethostname(),
                    os.getpid(),
                    answer(hello.shared),
                    self._devices.info(),
                    simulated,
                )
            )
            return
        log.warning("refused a master on %s: %s", hello.host, reason)
        with suppress(PeerGone):  # it did not wait for the answer
            self._channel.send(peer, [encode(Refused(reason))])

    def _reply(self, master: _Master, message: Ask) -> None:
        try:
            master.send(Reply(message.request, self._about(master, message.what, message.detail)))
        except (ConfigurationError, OSError) as error:
            cause = failure(error, seq=0, position=0, op=message.what, operands="")
            master.send(Failed(message.request, failure_fields(cause)))

    def _about(self, master: _Master, what: str, detail: list[Any]) -> Any:
        executor = master.executor
        if what == "status":
            return executor.status()
        if what == "info":
            return self._devices.info()
        if what == "passed":
            return executor.passed(detail)
        if what == "memory":
            return [
                len(executor.slots),
                executor.state.executed,
                executor.state.poisoned(),
            ]
        match what, detail:
            case "channel", [str(name)]:
                return report(name)
            case "listen", [str(host)]:
                master.host = host
                return master.listen(peer_address(self._config, host), self._config.keys)
            case "store", [str(host)]:
                return executor.joint.groups.store(*rendezvous(self._config, host))
        raise ProtocolError(f"nothing is known about {what[:40]!r}")


def serve(config: WorkerConfig, stop: threading.Event) -> None:
    """Run the worker until `stop` is set. Block; raise `ConfigurationError` if it cannot start."""
    sys.setswitchinterval(_SWITCH)
    keep_pages()
    if config.threads:
        torch.set_num_threads(config.threads)
    prepare()
    daemon = Daemon(config)
    try:
        daemon.run(stop)
    finally:
        daemon.close()
