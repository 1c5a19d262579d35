"""A master's session on this worker.

Its executor, its threads, its trace, and its link to the master, which may come back on another connection.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count

import torch

from distruntime.errors import ConfigurationError, InternalError, NotSupportedError, ProtocolError
from distruntime.wire import messages
from distruntime.wire.channel import Channel, ChannelClosed, Frames
from distruntime.wire.codec import Buffer, decode, encode, failure_fields
from distruntime.wire.identity import has_died
from distruntime.wire.keys import KeyPair
from distruntime.wire.link import Link
from distruntime.wire.messages import Status
from distruntime.wire.shared import Attached

from ..collectives.peers import PeerChannel
from ..log.budget import Budget
from ..log.state import Sent
from ..log.turns import Turn
from ..machine import threads
from ..machine.devices import Devices
from ..machine.settings import per_thread
from ..publishing.published import Others, Published
from ..values.objects import failure
from ..values.streams import Stream, Work
from .executor import Executor
from .tracing import Tracing

log = logging.getLogger("distruntime.worker")

_numbers = count().__next__
# So many seconds lie between looks whether the session is over.
_LOOK = 0.1


class Session:
    """The session of one master: its executor, its queue of segments, and the threads that run them.

    `before` is the same session with an earlier master: its threads end before those of this one begin.
    `refused` says why nothing that its master has pickled is opened here, or nothing.
    """

    def __init__(
        self,
        peer: bytes,
        hello: messages.Hello,
        devices: Devices,
        channel: Channel,
        others: Others,
        turn: Turn,
        budget: Budget | None,
        before: Session | None = None,
        refused: str = "",
    ) -> None:
        self.link = Link(peer)
        self.began: float = time.monotonic() if before is None else before.began
        # The master was last there at this time, if it is not there now.
        self.alone_since: float | None = None
        self._channel = channel
        # This is the session's number in this process.
        self.number = _numbers()
        # The connection was opened with this greeting.
        self.greeting = hello
        self.name, self.token, self.process = hello.session, hello.token, hello.process
        self.keep, self.lasting = hello.keep, hello.lasting
        self.master = f"{hello.session} on {hello.host}"
        # The master has dialled this worker by this address, if it has.
        self.host = ""
        # It exists once the master has asked for it.
        self._peers: PeerChannel | None = None
        self.published: Published = before.published if before is not None else Published(hello.session)
        self.shared = Attached(hello.process, hello.shared)
        self.executor: Executor = Executor(
            devices,
            self.send,
            self.tell,
            draws=before.executor.draws if before is not None else None,
            published=self.published,
            others=others,
            turn=turn,
            budget=budget,
            shared=self.shared,
            refused=refused,
            present=lambda: self.link.peer is not None,
        )
        self.executor.state.apart, self.executor.state.breaks = self._do_apart, self._break
        self._refused = refused
        # It is True while messages must wait, because the value that a fetch has asked for is still being
        # read.
        self.held = False
        # These messages wait, each with who sent it. They are not counted yet.
        self.backlog: list[tuple[bytes, Frames]] = []
        self._default = self.executor.default.queue.put
        # The daemon calls these. A trace puts what notes the time in their place.
        self.accept: Callable[[messages.Segment, Sequence[Buffer]], None] = self.put
        self.accept_mesh: Callable[[messages.MeshSegment, Sequence[Buffer]], None] = self.put_mesh
        self.tracing = Tracing(self.executor)
        self.broken: str | None = None
        # These streams have threads that have not ended, by which each is known once it has begun.
        self.alive: dict[Stream, int] = {}
        # It is set when all of them have ended, so that nothing is left to run.
        self.over = threading.Event()
        # It is there once the master has left and has a successor.
        self._then: Callable[[], None] | None = None
        self._before = before
        if before is not None:
            self.executor.status = self._status
        self._start(self.executor.default, "executor")

    @property
    def spent(self) -> bool:
        """Whether its master has been away for as long as it has asked for, or is known to have died without
        a wish to be followed.
        """
        if self.alone_since is None:
            return False
        return time.monotonic() - self.alone_since > self.keep or (
            not self.lasting and has_died(self.process)
        )

    def leave(self) -> None:
        """Note that there is no connection to the master any more."""
        self.link.peer = None
        self.alone_since = time.monotonic()

    def part(self) -> None:
        """Hear that the master leaves, and its memory with it (the reader)."""
        state = self.executor.state
        state.left = True
        with state.gate:
            self.shared.keep(word for work in state.works for word in work.segment.words)

    def finish(self, then: Callable[[], None]) -> None:
        """Let the threads end after what has come: the master has left, and another one follows (the reader).

        The last thread calls `then`, before `over` is set.
        """
        self._then = then
        self.leave()
        self.executor.state.left = True
        self.executor.end_queues()

    def waits_for_another(self) -> bool:
        """Whether nothing runs yet, because what the master before has issued is not over."""
        before = self._before
        return before is not None and not before.over.is_set()

    def _status(self) -> Status:
        """Return what the session runs: first what the master before has left."""
        before = self._before
        if before is None or before.over.is_set():
            return self.executor.progress.status()
        _, running, seconds = before.executor.status()
        return Status(0, f"{running or 'the end of what'} (issued before this master came)", seconds)

    def come_back(self, peer: bytes, hello: messages.Hello) -> None:
        """Go on with the master on another connection."""
        self.alone_since = None
        self.greeting = hello
        self._channel.resume(self.link, peer, hello.received)

    def _do_apart(self, work: Callable[[], None]) -> None:
        """Do what waits for the master in a thread of its own, and hold what comes from the master until it
        is done (the reader).
        """
        self.held = True

        def act() -> None:
            try:
                work()
            finally:
                self.held = False
                with suppress(ChannelClosed):
                    self._channel.wake()

        try:
            threads.begin(act, "sends-parts")
        except ConfigurationError:
            self.held = False
            raise

    def _start(self, stream: Stream, name: str) -> None:
        self.alive[stream] = 0
        try:
            threads.begin(partial(self._run, stream), name)
        except ConfigurationError:
            del self.alive[stream]
            raise

    def open(self, message: messages.OpenStream) -> None:
        """Open a stream: start its thread. Where there is no room for one, what is issued to it fails."""
        stream = self.executor.open(message)
        try:
            self._start(stream, f"stream-{message.stream}")
        except ConfigurationError as error:
            self.executor.refuse(stream, error)

    def send(self, message: messages.Message, payload: memoryview | None = None, copy: bool = True) -> Sent:
        """Send to the master, from any thread; while it is away, the message waits.

        Without `copy`, the payload is the caller's memory: return what tells when it may be written again.
        """
        # A thread of the session's is still ending, or does what the master has left behind.
        if self.executor.state.closed or self.executor.state.left:
            return None
        if payload is None:
            return self._channel.send(self.link, [encode(message)])
        return self._channel.send(
            self.link, [encode(message), bytes(payload) if copy else payload], copy=False
        )

    def fail(self, request: int, error: BaseException, op: str) -> None:
        """Answer a request with the error that `op` has failed with."""
        cause = failure(error, seq=0, position=0, op=op, operands="")
        self.send(messages.Failed(request, failure_fields(cause)))

    def listen(self, address: str, keys: KeyPair | None) -> str:
        """Open the channel to other workers, if it is not; return where it listens."""
        if self._peers is None:
            self._peers = PeerChannel(address, keys, self.executor.joint.receive)
        return self._peers.address

    def meet(self, message: messages.Peers) -> None:
        """Take the addresses of the other workers."""
        if self._peers is None:
            raise ProtocolError("Peers before anyone has asked where this worker listens")
        self._peers.meet(message)
        self.executor.joint.node = message.node

    def tell(self, node: int, message: messages.Message) -> None:
        """Send to another worker, from any thread."""
        if self._peers is None:
            raise ProtocolError(
                f"{type(message).__name__} for node {node}, before the workers were told of each other"
            )
        self._peers.send(node, message)

    def join(self, message: messages.OpenGroup, host: str) -> None:
        """Join a group; the answer goes when that has ended."""

        def answer(error: BaseException | None) -> None:
            if error is None:
                self.send(messages.Reply(message.request, None))
            else:
                self.fail(message.request, error, f"joining group {message.group}")

        if self._refused and message.factory:
            answer(NotSupportedError(self._refused))
            return
        self.executor.joint.groups.open(message, host, self.tell, answer)

    def _run(self, stream: Stream) -> None:
        self.alive[stream] = threading.get_ident()
        try:
            before = self._before
            while before is not None and not before.over.wait(_LOOK) and not self.executor.state.closed:
                pass
            self._before = None
            with torch.no_grad():
                self.run_queue(stream)
        finally:
            self.ended(stream)

    def run_queue(self, stream: Stream) -> None:
        """Run what a stream has in its queue, until that ends."""
        executor = self.executor
        while (item := stream.queue.get()) is not None and not executor.state.closed:
            work, first, stop = item
            try:
                with executor.turn:
                    per_thread.apply()
                    if work.segment.stretches:
                        executor.run_stretch(stream, work, first, stop)
                    else:
                        executor.run(work)
                # Otherwise an idle stream would hold a segment's payloads.
                del item, work
            except Exception as error:
                # The master must hear of the error, whatever it is.
                if not isinstance(error, ProtocolError):
                    log.exception("the thread of stream %s ends", stream.number)
                self._break(
                    str(error) if isinstance(error, ProtocolError) else f"a defect of the worker: {error!r}"
                )
                return

    def ended(self, stream: Stream) -> None:
        """Note that nothing of a stream is left to run."""
        executor = self.executor
        with executor.state.gate:
            self.alive.pop(stream, None)
            last = not self.alive and not self.over.is_set()
        # The session itself is in cycles, and goes when Python looks for those.
        if last or executor.state.closed:
            executor.state.slots.clear()
        if not last:
            return
        if self.broken is not None:
            self.spoil(self.broken)
        if self._then is not None:
            for one in executor.state.all_streams():
                one.await_devices()
            self._then()
            self.over.set()
            executor.joint.groups.close_all()
            executor.close()
        self.over.set()

    def spoil(self, why: str) -> None:
        """Poison what is published: what was issued is not finished."""
        error = InternalError(f"what was issued before has ended in: {why}")
        self.published.spoil_all(failure(error, seq=0, position=0, op="a session", operands=""))

    def release_address(self) -> bool:
        """Close the channel to other workers; return whether there is one (the reader)."""
        if self._peers is not None:
            self._peers.close()
        return self._peers is not None

    def _break(self, why: str) -> None:
        """Have the reader drop the master (any thread)."""
        self.broken = why
        with suppress(ChannelClosed):
            self._channel.wake()

    def put(self, segment: messages.Segment, payloads: Sequence[Buffer]) -> None:
        """Queue a segment in order; one that came before is dropped, so that sending again is safe."""
        if segment.seq <= self.executor.received:
            return
        if segment.seq != self.executor.received + 1:
            raise ProtocolError(f"segment {segment.seq} came after {self.executor.received}")
        self.executor.received = segment.seq
        if segment.templates:
            self.executor.learn(segment.templates)
        work = Work(segment, list(payloads), len(segment.stretches) or 1)
        if not self.executor.state.meshes:
            self.executor.works.append(work)
        else:
            self.executor.line_up(work)
        if work.segment.stretches:
            self.executor.divide(work)
        else:
            self._default((work, 0, 0))

    def start_trace(self, most: int, then: Callable[[], None]) -> None:
        """Note from now on what comes, runs and is answered; then call `then` (the reader)."""
        arrived = self.tracing.start(most, then)

        def accept(segment: messages.Segment, payloads: Sequence[Buffer]) -> None:
            arrived(segment.seq)
            self.put(segment, payloads)

        def accept_mesh(message: messages.MeshSegment, payloads: Sequence[Buffer]) -> None:
            arrived(message.seq)
            self.put_mesh(message, payloads)

        self.accept, self.accept_mesh = accept, accept_mesh

    def stop_trace(self, then: Callable[[messages.TraceKept], None]) -> None:
        """Note no more; then call `then` with what there is (the reader)."""
        self.accept, self.accept_mesh = self.put, self.put_mesh
        self.tracing.stop(then)

    def put_mesh(self, message: messages.MeshSegment, payloads: Sequence[Buffer]) -> None:
        """As `put`, for a segment whose body is a mesh's."""
        if message.seq != self.executor.received + 1 or len(payloads) != 1:
            raise ProtocolError(
                f"segment {message.seq} of a mesh came after {self.executor.received}, with {len(payloads)} "
                "bodies"
            )
        self.executor.received = message.seq
        work = self.executor.mesh_work(message, decode(payloads[0]))
        self.executor.line_up(work)
        if work.segment.stretches:
            self.executor.divide(work)
        else:
            self._default((work, 0, 0))

    def close(self) -> None:
        """Let the threads end after the instructions that they are running; its values go with it."""
        self.tracing.close()
        self.executor.close()
        self.release_address()
