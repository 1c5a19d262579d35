"""Runs segments of the log: messages in, messages out, no sockets.

Several threads call it: the daemon's reader, which answers what is ready at once, and one for each stream,
which run segments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from distruntime.errors import ProtocolError, StreamCancelled
from distruntime.wire import messages
from distruntime.wire.codec import failure_fields
from distruntime.wire.messages import AWAIT, WAIT
from distruntime.wire.shared import Attached

from ..collectives.taking_part import Joint
from ..log.answers import MOST_FAILURES, Answers
from ..log.budget import Budget
from ..log.cancel import Cancelling
from ..log.chain import Chain
from ..log.instructions import Instructions
from ..log.progress import Progress
from ..log.state import Send, State, Tell
from ..log.timing import Recorded
from ..log.turns import Turn, Turns
from ..log.waits import Waits
from ..machine.devices import Devices
from ..publishing.published import Others, Published, Shelf
from ..python.agent import Agent
from ..python.calls import AFTER, Calls
from ..python.children import Surroundings
from ..python.members import Members
from ..python.running import Around
from ..values.draws import Draws
from ..values.mesh_lanes import MeshState
from ..values.step import Operator, Own
from ..values.streams import Borrowed, Mesh, Stream, Work
from .steps import Steps

# Python raises these where a master's words are of the wrong kind or number. Templates keep what operators
# raise to themselves.
NONSENSE = (IndexError, TypeError, KeyError, ValueError, AttributeError, OverflowError, RecursionError)
# So many seconds lie between looks whether the master is gone.
_LOOK = 0.1
# One `Done` tells of so many segments of meshes at most, besides its own.
_UNTOLD = 7
# No log gets to this position.
_END = 1 << 62


class Executor:
    """Runs the log of one session on one worker. Who calls `run` and `run_stretch` does so in the session's
    `turn`.

    `draws` and `published` are the session's random state and what it has published: both outlive this log
    where a master resumes it. `refused` says why no function of a master runs here, or nothing. `present`
    tells whether the master is there.
    """

    def __init__(
        self,
        devices: Devices,
        send: Send,
        tell: Tell,
        *,
        draws: Draws | None = None,
        published: Published | None = None,
        others: Others = dict[str, Published],
        turn: Turn | None = None,
        budget: Budget | None = None,
        shared: Attached | None = None,
        refused: str = "",
        present: Callable[[], bool] = lambda: True,
    ) -> None:
        state, shared = State(devices, send, turn or Turns().enter(""), budget), shared or Attached()
        self.draws = Draws() if draws is None else draws
        self.progress = progress = Progress(state, (Executor.run.__code__, Executor.run_stretch.__code__))
        waits = Waits(state)
        self.state = state
        self._answers = Answers(state, progress, shared, tell)
        self.joint = Joint(state, tell, waits.signal)
        self._cancelling = Cancelling(state, waits)
        self.around = Around(lambda message: send(message, None), progress.place, present)
        # Other workers reach this one at this host. The daemon says so.
        self.host: Callable[[str], str] = lambda proposed: "127.0.0.1"
        here = Surroundings(
            devices.real, lambda proposed: self.host(proposed), state.turn.paused, lambda: state.closed
        )
        own: dict[str, Operator] = {"members": partial(Members, here), "agent": partial(Agent, here)}
        own[AFTER] = Members.after
        calls = Calls(refused, devices.real, self.around, own, state.lent, lambda: state.mine().native)
        self.chain = Chain(state, self.draws)
        # It compiles templates: see steps.py.
        self.steps = Steps(state, self.chain, self.joint, calls.table)
        self.learn = self.steps.learn
        self.shelf = Shelf(state, published or Published(""), others, self.chain.read_only)
        state.own.update(Instructions(state, shared).table)
        state.own[WAIT] = Own("a wait for another stream", waits.wait)
        state.own[AWAIT] = Own("a wait for another node", waits.await_signal)
        state.own.update(self.shelf.table)
        self.chain.add_own(state)
        # This is the number of the last segment that the reader accepted. A segment that is sent again is
        # dropped.
        self.received = 0
        # It is True while stream 0 runs a segment.
        self.running = False
        # The segment that came last is this mesh's. It is None where that was one of this worker's own log.
        self._last_mesh: Mesh | None = None
        # It is set when everything before the last change of logs has run.
        self._before: threading.Event | None = None
        # The reader calls these and looks at them. It need not know whose they are.
        self.fetch, self.passed, self.status = self._answers.fetch, self._answers.passed, progress.status
        self.notify = self._answers.notify
        self.signal = waits.signal
        self.slots, self.works, self.default, self.turn = state.slots, state.works, state.default, state.turn
        self.turn.more = state.waits

    def start_trace(self, most: int) -> Recorded:
        """Note from now on when instructions and answers begin and end (the reader)."""
        recorded = self.chain.timing.start(most)
        self._answers.answer_with = recorded.answering(self._answers.answer_plainly)
        return recorded

    def stop_trace(self) -> None:
        """Run and answer as before (the reader)."""
        self.chain.timing.stop()
        self._answers.answer_with = self._answers.answer_plainly

    def cancel(self, message: messages.Cancel) -> None:
        """Drop what a stream has not begun, and interrupt the function that it runs (the reader)."""
        state, position = self.state, message.position
        stream = state.named(message.stream)
        if stream is None:
            raise ProtocolError(f"there is no stream {message.stream}")
        if message.alone:
            if state.executed < position:
                self.around.cancel_call(position, message.reason)
            return
        self._cancelling.cut(stream, position)
        thread = next((ident for ident, one in list(state.by_thread.items()) if one is stream), None)
        if thread is not None:
            self.around.cancel(thread, position)

    def open(self, message: messages.OpenStream) -> Stream:
        """Return a new stream, for its thread to run.

        Raise `ProtocolError` where it makes no sense (the reader).
        """
        mesh = self.state.meshes.get(message.mesh)
        if message.mesh != -1 and mesh is None:
            raise ProtocolError(f"a stream of mesh {message.mesh}, which is not open")
        streams = self.state.streams if mesh is None else mesh.streams
        if not 0 < message.stream < 4096 or message.stream in streams:
            raise ProtocolError(f"stream {message.stream} cannot be opened")
        try:
            stream = Stream(
                message.stream, self.state.devices.real(torch.device(message.device)), message.priority
            )
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"stream {message.stream}: {error}") from error
        if stream.refused is not None:
            # The device has no room for it, for example. Everything else goes on.
            self._cancelling.cut(stream, _END)
        streams[message.stream] = stream
        return stream

    def refuse(self, stream: Stream, why: Exception) -> None:
        """Let what is issued to a stream fail, as it has no thread: stream 0's steps over it (the reader)."""
        stream.refused = why
        self._cancelling.cut(stream, _END)
        stream.queue = Borrowed(self.default.queue, stream)

    def open_mesh(self, message: messages.OpenMesh) -> None:
        """Take part in a mesh (the reader)."""
        state, devices = self.state, message.devices
        good = (
            bool(devices)
            and all(name in state.devices.names for name in devices)
            and len(set(devices)) == len(devices)
        )
        if not good or message.mesh in state.meshes or not 0 <= message.mesh < 1 << 31:
            raise ProtocolError(f"mesh {message.mesh} of members on {devices!r:.80} cannot be opened")
        mesh = MeshState(message.mesh, devices)
        self.chain.add_own(mesh)
        state.meshes[message.mesh] = mesh

    def open_lines(self, message: messages.OpenLines) -> None:
        """Learn which groups a mesh's members here are in, along one of its dimensions (the reader)."""
        mesh, rows = self.state.meshes.get(message.mesh), message.members
        if mesh is None or message.number in mesh.lines:
            raise ProtocolError(
                f"lines {message.number} of mesh {message.mesh}, which is not open or has them"
            )
        good = len(rows) == len(mesh.devices) and all(
            isinstance(row, list) and [type(n) for n in row] == [int, int] for row in rows
        )
        if not good or len({tuple(row) for row in rows}) < len(rows):
            raise ProtocolError(f"lines {message.number} of mesh {message.mesh} make no sense: {rows!r:.80}")
        for (group, rank), device in zip(rows, mesh.devices):
            if self.joint.groups[group].devices.get(rank) != self.state.devices.real(torch.device(device)):
                raise ProtocolError(
                    f"lines {message.number} of mesh {message.mesh}: {device} is not rank {rank} of group "
                    f"{group}"
                )
        mesh.lines[message.number] = rows

    def mesh_work(self, message: messages.MeshSegment, body: messages.Message) -> Work:
        """Return a mesh's segment as one of this worker's (the reader)."""
        mesh = self.state.meshes.get(body.mesh) if isinstance(body, messages.MeshBody) else None
        if mesh is None or not isinstance(body, messages.MeshBody):
            raise ProtocolError("MeshSegment without the body of a mesh that is open")
        mesh.enter(body.start, len(body.words))
        self.learn(body.templates, mesh)
        return Work(
            messages.Segment(message.seq, body.start, [], body.words, body.stretches),
            [],
            len(body.stretches) or 1,
            mesh=mesh,
        )

    def line_up(self, work: Work) -> None:
        """Add a segment to those that run, after one of another log.

        Between the logs all streams keep the order (the reader).
        """
        state = self.state
        with state.gate:
            if work.mesh is not self._last_mesh:
                self._last_mesh, self._before = work.mesh, threading.Event() if state.works else None
            # The next of the same log must not overtake it on another stream.
            if self._before is not None and not self._before.is_set():
                work.before = self._before
            state.works.append(work)

    def _await_before(self, stream: Stream, work: Work) -> None:
        """Block until everything before a segment has run; on GPUs, order this stream's kernels after it."""
        assert work.before is not None
        with self.turn.paused():
            while not work.before.wait(_LOOK) and not self.state.closed:
                pass
            for other in self.state.all_streams():
                # The streams 0 of all logs are the same default streams of the devices.
                if other is not stream and (other.number or stream.number):
                    stream.wait_for(other.events(_END))

    def divide(self, work: Work) -> None:
        """Give each stream its stretches of a segment (the reader)."""
        i, streams = 0, self.state.log(work).streams
        for row in work.segment.stretches:
            match row:
                case [int(number), int(words)] if number in streams and words > 0:
                    (streams[number] if number else self.default).queue.put((work, i, i + words))
                    i += words
                case _:
                    raise ProtocolError(f"segment {work.segment.seq}: {row!r} is no stretch")
        if i != len(work.segment.words):
            raise ProtocolError(
                f"segment {work.segment.seq}: stretches of {i} words for {len(work.segment.words)}"
            )

    def run(self, work: Work) -> None:
        """Run a segment that is all stream 0's; raise `ProtocolError` where its words make no sense."""
        self.running = True
        state, segment = self.state, work.segment
        stream = state.default if work.mesh is None else work.mesh.default
        state.by_thread[threading.get_ident()], stream.started = stream, time.monotonic()
        words, slots, waiting, start = segment.words, state.slots, stream.waiting, segment.start
        templates = (state if work.mesh is None else work.mesh).templates
        state.under_way[id(words)] = work
        i, n = 0, len(words)
        if work.before is not None:
            self._await_before(stream, work)
        if start < stream.cancelled:
            self.run_stretch(stream, work, 0, n)
            self.running = False
            return
        try:
            while i < n:
                # A word that is no number raises there, as any nonsense does.
                word: int = words[i]  # type: ignore[assignment]
                if word < 0:
                    slots.pop(-word, None)
                    i += 1
                else:
                    i = templates[word](slots, words, i)
                    if waiting:
                        self._answers.serve(stream, start + i)
                        if start + i < stream.cancelled:
                            self.run_stretch(stream, work, i, n)
                            self.running = False
                            return
        except NONSENSE as error:
            raise ProtocolError(
                f"segment {segment.seq} makes no sense at word {i} of {n}: {type(error).__name__}: {error}"
            ) from error
        self._finish(work)
        # This comes only now: whoever waits wants to hear of failures first.
        stream.reached = start + n
        if waiting:
            self._answers.serve(stream, start + n)
        if len(state.streams) > 1 or work.mesh is not None or state.devices.asynchronous:
            stream.mark(start + n)
        stream.advance(start + n)
        self.running = False

    def run_stretch(self, stream: Stream, work: Work, i: int, stop: int) -> None:
        """Run a stream's words from `i` to `stop` of a segment, while other streams run theirs."""
        state, segment = self.state, work.segment
        if work.mesh is not None and stream.number == 0:
            stream = work.mesh.default
        stream = work.borrowed.get(i, stream)
        state.by_thread[threading.get_ident()], stream.started = stream, time.monotonic()
        words, slots, waiting, start = segment.words, state.slots, stream.waiting, segment.start
        templates = (state if work.mesh is None else work.mesh).templates
        state.under_way[id(words)] = work
        try:
            with stream.entered():
                if work.before is not None:
                    self._await_before(stream, work)
                while i < stop:
                    # A word that is no number raises there, as any nonsense does.
                    word: int = words[i]  # type: ignore[assignment]
                    if start + i < stream.cancelled:
                        i = self._cancelling.drop(stream, words, i)
                    elif word < 0:
                        slots.pop(-word, None)
                        i += 1
                    else:
                        i = templates[word](slots, words, i)
                    stream.reached = start + i
                    if waiting:
                        self._answers.serve(stream, start + i)
                    if i < stop:
                        stream.advance(start + i)
                stream.mark(start + i)
        except NONSENSE as error:
            raise ProtocolError(
                f"segment {segment.seq} makes no sense at word {i}, on stream {stream.number}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._finish(work)
        if waiting:
            self._answers.serve(stream, start + i)
        stream.advance(start + i)

    def _finish(self, work: Work) -> None:
        """Count a stretch as run.

        Send `Done` for each segment that is complete and has only such before it. One `Done` tells of several
        segments of meshes while more work is there: a master with 1,024 workers reads 1,024 of them.
        """
        state = self.state
        with state.gate:
            work.left -= 1
            while state.works and state.works[0].left == 0:
                done = state.works.popleft()
                failures: list[messages.Plain] = [failure_fields(f) for f in done.failures[:MOST_FAILURES]]
                dull = done.mesh is not None and not failures and not done.corrections
                if dull and state.works and state.untold < _UNTOLD:
                    state.untold += 1
                else:
                    state.untold = 0
                    state.send(messages.Done(done.segment.seq, failures, done.corrections), None)
                if done.mesh is None:
                    state.executed = done.segment.start + len(done.segment.words)
                state.under_way.pop(id(done.segment.words), None)
                if state.works and (before := state.works[0].before) is not None:
                    before.set()
        self._answers.executed()

    def end_queues(self) -> None:
        """Let each stream's thread end after what is in its queue (the reader)."""
        for stream in self.state.all_streams():
            stream.queue.put(None)

    def drop(self, error: StreamCancelled, why: str) -> None:
        """Drop what no stream has begun, interrupt what runs, and break the groups (the reader)."""
        for stream in self.state.all_streams():
            stream.refused = stream.refused or error
            self._cancelling.cut(stream, _END)
        self.around.cancel_all(why)
        self.joint.groups.end_all(why)

    def close(self) -> None:
        """Drop what no stream has begun: the session is over."""
        self.state.closed = True
        self.around.close()
        self.turn.close()
        self._answers.close()
        self.chain.lost_devices.close()
        self.joint.groups.end_all("its session is over")
        for stream in self.state.all_streams():
            self._cancelling.cut(stream, _END)
        self.end_queues()
