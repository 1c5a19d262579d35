"""What this worker's members have begun in groups, and what becomes of it when a value turns out to be none.

A data channel of a GPU returns when its kernel is queued. So a result is in its slot, and others are computed
from it, before it is known whether every member had a value to give, and whether every member lives. This
keeps each such operation until its bytes have moved. If it turns out meanwhile that they are no values, then
nothing is believed that was written here after the operation began: see `State.spoilt`.

It comes in time. A member with a poisoned input takes part only when all other workers have answered that
they know. Until then, nobody's kernel can end, and neither can a copy to the host that stands behind it. The
same holds from worker to worker: whoever learns of a spoilt operation answers when the others know of all
that it has begun since. They are told in the opposite order of the program, the last one first. So whoever
waits here waits for what is later in the program, and no two wait for each other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from distruntime.errors import NodeFailed
from distruntime.wire.data_channel import Unfinished
from distruntime.wire.messages import Failure
from distruntime.wire.shield import Lock

from ..log.state import Spoilt, State
from ..values.objects import failure
from .group import Group

log = logging.getLogger("distruntime.worker")

_WAY_OUT = (
    "What this worker computes from there on is not believed, until dr.restart(node, force=True) puts "
    "another worker in its place"
)
# So many seconds lie between looks at what is under way: for how long, and whether it has failed.
_LOOK = 1.0


@dataclass(eq=False, slots=True)
class Begun:
    """One operation in which this worker's members take part."""

    group: Group
    sequence: int
    name: str
    # This is the segment, and the position in its log: every worker has a session's operations in this order.
    order: tuple[int, int]
    # These are the positions of all logs here: what was written before them cannot come from it.
    since: dict[int, int]
    # It has results here, which are no values if it fails.
    results: bool
    # The data channel gives these where its calls have returned before the bytes have moved.
    calls: Sequence[Unfinished] = ()
    queued: float = 0.0
    # It is there if the other workers are to know that no values go out, and set when they do.
    told: threading.Event | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.group.number, self.sequence

    def completed(self) -> bool:
        """Return whether the bytes have moved; raise what has kept them from it."""
        return all(call.is_completed() for call in self.calls)


@dataclass
class _News:
    """Of whom the other workers are to hear, by this thread and by others."""

    cause: Failure
    mine: list[Begun] = field(default_factory=list)
    others: list[threading.Event] = field(default_factory=list)


class UnderWay:
    """What has begun and not ended, of one session. Any thread may call it."""

    def __init__(self, state: State, tell_of: Callable[[Begun, Failure], None]) -> None:
        self._state, self._tell_of = state, tell_of
        self._lock = Lock()
        # The keys are group and sequence. A thread is in a call for each of these.
        self._running: dict[tuple[int, int], Begun] = {}
        # The data channel has returned, and the bytes may not have moved. The order is that of their queues.
        self._queued: dict[tuple[int, int], Begun] = {}
        self._watching = False

    def begin(self, begun: Begun, cause: Failure | None, log_number: int | None) -> Failure | None:
        """Take note of an operation, before it begins.

        Return the failure of its inputs: `cause`, or that of what was written before it in the log with this
        number, if it has any. The caller tells the other workers of it, and sets `told` then.
        """
        with self._lock:
            while self._queued:
                first = next(iter(self._queued.values()))
                if not _completed(first):
                    break
                del self._queued[first.key]
            if cause is None and log_number is not None:
                cause = self._state.spoilt_by(log_number, begun.order[1])
            begun.told = None if cause is None else threading.Event()
            self._running[begun.key] = begun
            return cause

    def end(self, begun: Begun, calls: Sequence[Unfinished]) -> Failure | None:
        """Take note that the data channel has returned. Return the failure that the operation carries.

        Raise `NodeFailed` if the group has broken before the bytes have moved.
        """
        with self._lock:
            self._running.pop(begun.key, None)
            cause = begun.group.first_cause(begun.sequence)
            if cause is None and calls:
                if begun.group.broken:
                    begun.group.require()
                begun.calls, begun.queued = calls, time.monotonic()
                self._queued[begun.key] = begun
                if not self._watching:
                    self._watching = True
                    threading.Thread(target=self._watch, name="watches-groups", daemon=True).start()
            return cause

    def taint(
        self, group: Group | None, key: tuple[int, int], cause: Failure, then: Callable[[], None]
    ) -> None:
        """Act on the word of another worker that an operation carries a poisoned value. Never blocks.

        `then` is called when nothing of it is believed here, or anywhere that this worker has sent it to.
        """
        with self._lock:
            begun = self._queued.get(key)
            if begun is None or _completed(begun) or not begun.results:
                # It has not begun, or is in a call, and looks when that returns. What has ended did not need
                # the value.
                if group is not None and begun is None:
                    group.tainted(key[1], cause)
                news = None
            else:
                del self._queued[key]
                news = self._spoil(begun, cause)
        if begun is None or news is None:
            then()
            return
        late = begun

        def act() -> None:
            try:
                self._tell(news)
            finally:
                then()
            late.group.fail(
                f"{late.name} was queued here before it was known that a value of node {cause.node} is "
                f"poisoned: {cause.text.partition(chr(10))[0][:200]}. {_WAY_OUT}"
            )

        threading.Thread(target=act, name="tells-of-taint", daemon=True).start()

    def broken(self, group: Group, reason: str) -> Callable[[], None] | None:
        """Believe nothing that comes from what a group leaves unfinished.

        Return what is to be done before its channels are aborted, if anything: it blocks.
        """
        with self._lock:
            mine = [begun for begun in self._queued.values() if begun.group is group]
            for begun in mine:
                del self._queued[begun.key]
            left = [begun for begun in mine if begun.results and not _completed(begun)]
            if not left:
                return None
            first = min(left, key=_order)
            error = NodeFailed(f"group {group.number} is broken: {reason}")
            segment, position = first.order
            news = self._spoil(
                first, failure(error, seq=segment, position=position, op=first.name, operands="")
            )
        return lambda: self._tell(news)

    def _spoil(self, begun: Begun, cause: Failure) -> _News:
        """Believe nothing any more that was written after an operation began (the lock is held)."""
        shown = cause
        if _WAY_OUT not in cause.text:
            shown = replace(cause, text=f"{cause.text}\n{begun.name} was queued by then. {_WAY_OUT}.")
        self._state.spoilt.append(Spoilt(begun.since, shown))
        self._state.spoil_all(shown)
        news = _News(cause)
        for one in (*self._running.values(), *self._queued.values()):
            if one.order <= begun.order:
                continue
            if one.told is not None:
                news.others.append(one.told)
                continue
            one.told = threading.Event()
            news.mine.append(one)
            if one.key in self._running:
                one.group.tainted(one.sequence, cause)
        return news

    def _tell(self, news: _News) -> None:
        """Tell other workers of what has begun here since. Block until they know, and whoever they told."""
        for begun in sorted(news.mine, key=_order, reverse=True):
            assert begun.told is not None
            try:
                self._tell_of(begun, news.cause)
            finally:
                begun.told.set()
        for told in news.others:
            told.wait()

    def _watch(self) -> None:
        """Break groups whose operations take too long, or fail, as long as any is under way."""
        while True:
            time.sleep(_LOOK)
            with self._lock:
                failed = list(_failed(self._queued.values()))
                self._queued = {key: begun for key, begun in self._queued.items() if not _completed(begun)}
                self._watching = goes_on = bool(self._queued) and not self._state.closed
            for begun, why in failed:
                begun.group.fail(f"{begun.name} {why}")
            if not goes_on:
                return


def _order(begun: Begun) -> tuple[int, int]:
    return begun.order


def _completed(begun: Begun) -> bool:
    try:
        return begun.completed()
    except Exception:
        # `_watch` says so and breaks the group.
        return False


def _failed(every: Iterable[Begun]) -> Iterable[tuple[Begun, str]]:
    """Return what has failed, or takes longer than its group allows, and why."""
    now = time.monotonic()
    for begun in every:
        try:
            if not begun.completed() and now > begun.queued + begun.group.timeout:
                yield begun, f"has not ended within {begun.group.timeout:g} s of its being queued"
        except Exception as error:
            yield begun, f"has failed: {error}"
