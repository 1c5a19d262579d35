"""Waiting for replies: a thread that waits reads the socket, one at a time, and wakes the others.

A reply that changes hands between threads costs 1.2 to 1.7 times a raw ping-pong, one that the waiting thread
reads itself about 1.0. So there is no reader thread in the way of a blocking read. A quiet thread, the pump,
wakes a thousand times a second while something is in flight and nobody waits: it takes acknowledgements,
sends what has gathered, and completes futures.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Generic, TypeVar

from ..errors import ProtocolError
from ..log.failure_log import Cause
from ..log.log import Log
from ..log.node import Node
from ..log.replies import require
from ..wire.codec import Buffer, failure_from
from ..wire.shared import Loan
from ..wire.shield import RLock, shield
from .announce import Announcer
from .output import Output

T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")

_READER = "reader"
# A thread that sets `then` must not come between `done` and the call of `then`. A signal's handler that reads
# may, within the thread that holds it.
_finishing = RLock()

# A waiting thread sleeps at most so many seconds before it looks for dead workers.
_SLICE = 0.1


class Request(Generic[T_co]):
    """A reply with a `T_co` that is expected from one node. `done` is set last.

    `then` runs once, in the thread that reads it.
    """

    __slots__ = (
        "buffer",
        "came",
        "cause",
        "done",
        "form",
        "lost",
        "node",
        "number",
        "payload",
        "then",
        "value",
    )

    def __init__(self, number: int, node: Node, form: str = "") -> None:
        # `form` is what was asked for: see replies.py.
        self.number, self.node, self.form = number, node, form
        # Nobody asks for it before its reply has come, so its type is the reply's.
        self.value: T_co = None  # type: ignore[assignment]
        self.payload: Buffer | None = None
        # The parts of a large reply are put together here.
        self.buffer: Loan | mmap.mmap | None = None
        # So many bytes of these have come.
        self.came = 0
        # This is set if the value is poisoned.
        self.cause: Cause | None = None
        # This says why no reply will come, if none will.
        self.lost: str | None = None
        self.done = False
        self.then: Callable[[Request[T_co]], None] | None = None

    def finish(self) -> None:
        """Mark the request as answered."""
        with _finishing:
            self.done = True
            # `then` may lead back to this request, and so to its bytes.
            then, self.then = self.then, None
        if then is not None:
            then(self)

    def when_done(self, then: Callable[[Request[T_co]], None]) -> None:
        """Call `then` when the request is answered, or now if it is."""
        with _finishing:
            if not self.done:
                self.then = then
                return
        then(self)


class Requests:
    """The requests of one session that are under way."""

    def __init__(self) -> None:
        self._numbers = count(1).__next__
        self._open: dict[int, Request[object]] = {}
        # This has the one thread that reads the socket, under _READER.
        self._reader: dict[str, int] = {}
        # It is re-entrant. Who waits enters the lock and not the Condition: that is entered in Python, and a
        # Ctrl-C there would leave the lock taken for ever.
        self._lock = RLock()
        self._arrived = threading.Condition(self._lock)
        self._followers = 0
        self.announcer = Announcer()
        self.output = Output(self.announcer.clear)
        self.announcer.fetched = self._fetched
        # So many bytes of large values have come since there were none to come.
        self._came = 0

    def new(self, node: Node, form: str = "") -> Request[R]:
        """Return a new request; its reply must be of `form`, one of `replies.FORMS`, or a tensor."""
        request: Request[R] = Request(self._numbers(), node, form)
        self._open[request.number] = request
        return request

    def __len__(self) -> int:
        return len(self._open)

    def discard(self, request: Request[object]) -> None:
        """Drop a request; its reply, if one comes, is ignored."""
        self._open.pop(request.number, None)

    def _of(self, number: int, node: Node) -> Request[object] | None:
        request = self._open.get(number)
        if request is not None and request.node is not node:
            raise ProtocolError(f"a reply to request {number}, which went to another node")
        return request

    def reply(self, node: Node, number: int, value: object, payloads: Sequence[Buffer]) -> None:
        """Answer a request; do nothing if nobody waits any more (Ctrl-C).

        Raise `ProtocolError` if the value is no answer to it.
        """
        request = self._of(number, node)
        if request is not None:
            payload, buffer = payloads[0] if payloads else None, request.buffer
            room = buffer.memory if isinstance(buffer, Loan) else buffer
            request.value, request.payload = require(request.form, value, payload, room), payload
            self._came += request.came
            self.discard(request)
            request.finish()

    def part(self, node: Node, number: int, offset: int, payloads: Sequence[Buffer]) -> None:
        """Put a part of a large reply in its place; ignore one that nobody waits for any more."""
        request = self._of(number, node)
        if request is None:
            return
        room = request.buffer.memory if isinstance(request.buffer, Loan) else request.buffer
        if room is None or len(payloads) != 1 or not 0 <= offset <= len(room) - len(payloads[0]):
            raise ProtocolError("a part does not fit what was asked for")
        memoryview(room)[offset : offset + len(payloads[0])] = payloads[0]
        request.came += len(payloads[0])

    def _fetched(self) -> tuple[int, int]:
        """Return how many bytes of large values have come, and of how many, since there were none to come."""
        large = [request for request in list(self._open.values()) if request.buffer is not None]
        if not large:
            self._came = 0
            return 0, 0
        sizes = [len(r.buffer.memory if isinstance(r.buffer, Loan) else r.buffer) for r in large if r.buffer]
        return self._came + sum(request.came for request in large), self._came + sum(sizes)

    def fail(self, node: Node, number: int, fields: object) -> None:
        """Take a `Failed`."""
        request = self._of(number, node)
        if request is not None:
            request.cause = request.node.cause(failure_from(fields))
            self.discard(request)
            request.finish()

    def lose(self, node: Node | None, why: str) -> None:
        """Fail every request to `node` (or to all): no reply will come."""
        for number, request in list(self._open.items()):
            if (node is None or request.node is node) and self._open.pop(number, None) is not None:
                request.lost = why
                request.finish()

    @property
    def attended(self) -> bool:
        """Whether a thread is reading the socket now."""
        return bool(self._reader)

    def _read_alone(self, read: Callable[[float], None], limit: float, ready: Callable[[], bool]) -> bool:
        """Read if no other thread does; return whether this one did.

        A signal handler, a finalizer or a future's callback may wait for a value inside the thread that
        reads: then that thread reads again, from within. The mark is set and taken away inside one `try`, so
        that Ctrl-C cannot leave it behind.
        """
        me = threading.get_ident()
        again = self._reader.get(_READER) == me
        try:
            # setdefault is atomic.
            if self._reader.setdefault(_READER, me) != me:
                return False
            if not ready():
                read(limit)
            return True
        finally:
            # No call may come until the mark is gone, because Ctrl-C strikes between calls. One look it is:
            # under a debugger another thread may take its own mark away between two.
            try:
                mine = not again and self._reader[_READER] == me
            except KeyError:
                mine = False
            if mine:
                del self._reader[_READER]
                if self._followers:
                    with self._lock:
                        self._arrived.notify_all()

    def wait(
        self,
        ready: Callable[[], bool],
        read: Callable[[float], None],
        deadline: float | None,
        node: Log | None = None,
        leave: str | None = None,
        room: bool = False,
        prompts: bool = False,
    ) -> bool:
        """Block until `ready()`, while some thread reads the socket; return False past the deadline.

        `node` is whom a long wait names at a terminal. `leave` and `room` are as `announce.Wait` has them.
        `prompts` says that the user may be asked for a line meanwhile: a function stands at a breakpoint.
        """
        slices = 0
        try:
            while not ready():
                slices += 1
                if slices == 2 and node is not None:
                    self.announcer.start_waiting(node, leave, room)
                if not self._wait_once(ready, read, deadline):
                    return False
                if self.output:
                    self.output.show()
                    if prompts:
                        self.output.answer()
            return True
        except KeyboardInterrupt as interrupt:
            # It says nothing to a user where in here Ctrl-C struck.
            raise interrupt.with_traceback(None) from None
        finally:
            if slices > 1:
                try:
                    self.announcer.stop_waiting()
                except BaseException:
                    # A signal struck, perhaps where it began. The line would say for ever that this waits.
                    self.announcer.stop_waiting()
                    raise

    def _wait_once(
        self, ready: Callable[[], bool], read: Callable[[float], None], deadline: float | None
    ) -> bool:
        limit = _SLICE if deadline is None else min(_SLICE, deadline - time.monotonic())
        if limit <= 0:
            return False
        if not self._read_alone(read, limit, ready):
            # What strikes within a Condition's wait can leave it without its lock. This is a short wait.
            with shield, self._lock:
                self._followers += 1
                try:
                    if not ready():
                        # The reader may have left between the two looks.
                        self._arrived.wait(min(limit, 0.02))
                finally:
                    self._followers -= 1
        return True

    def glance(self, read: Callable[[float], None]) -> None:
        """Read what is there without waiting, unless another thread is reading anyway."""
        self._read_alone(read, 0.0, _never)


def _never() -> bool:
    return False
