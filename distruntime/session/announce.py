"""What a prompt, a notebook or a log says while the master waits or moves bytes.

A wait is said to be for a node, with what runs there, how much is queued ahead, about how long that takes,
and how to leave. Uploads, fetches, saves and loads that take longer than a second are shown as bars.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import final

from tqdm import tqdm

from ..errors import DistruntimeError
from ..log.log import Log
from ..log.node import Node
from ..log.progress import under_way, until_room
from ..wire.link import Delivery
from ..wire.messages import Status
from ..wire.shield import RLock, shield
from ..wire.units import operator_text, span
from .screen import Screen, screen

# From so many seconds on, the line counts.
_COUNTING = 5.0
# A transfer that takes longer than so many seconds is shown.
_LONG = 1.0
# Transfers with a gap of fewer seconds between them are one.
_GAP = 1.0
# The worker is asked what it runs after so many seconds of a wait, and again after each pause of as many.
_ASKED = 1.0
# A worker that has not got any further for so many seconds has become slower.
_STALE = 3 * _ASKED
# A bar has at most so many columns.
_COLUMNS = 100
# So many characters of what a bar is about leave room for its figures.
_LONGEST = 40
# What Ctrl-C does in a wait that loses nothing, and what a long one adds.
_LEAVE = "Ctrl-C leaves, and loses nothing"
_AND_DROP = "dr.cancel() then drops what is queued"


@dataclass
class Wait:
    """A thread that waits for a node.

    `leave` is what Ctrl-C does; without it Ctrl-C loses nothing. `room` is True if the thread waits until the
    node takes more. `first` says when it was first known how much is ahead of the wait, and how much that
    was. `last` says when it last became another number, and which.
    """

    started: float
    node: Log
    leave: str | None
    room: bool
    first: tuple[float, int] | None = None
    last: tuple[float, int] | None = None


@final
class Move:
    """Stands around an upload. `delivery` is the message that the bytes are in, once there is one."""

    def __init__(self, uploads: Uploads, nbytes: int) -> None:
        self._uploads, self.nbytes = uploads, nbytes
        self.delivery: Delivery | None = None
        # So many bytes are in memory that the worker reads.
        self.copied = 0
        # So many frames have left, from the first one on.
        self._left = 0

    def __enter__(self) -> Move:
        self._uploads.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._uploads.end(self)

    def done(self) -> int:
        """Return how many bytes have left this process, as far as it knows."""
        trackers = self.delivery.trackers if self.delivery is not None else ()
        # They leave in order.
        while self._left < len(trackers) and trackers[self._left].done:
            self._left += 1
        return self.nbytes * self._left // len(trackers) if trackers else self.copied


@final
class Uploads:
    """The large uploads of all threads. Those with short gaps between them are one transfer.

    `over` is called when the transfer has ended.
    """

    def __init__(self, over: Callable[[], None]) -> None:
        # A signal's handler may move or read something while this thread holds it.
        self._lock = RLock()
        self._over = over
        # So many threads are in the middle of several uploads.
        self._together = 0
        self._under_way: list[Move] = []
        self._started = self._last = 0.0
        self._total = self._done = self._moves = 0

    def __bool__(self) -> bool:
        return bool(self._under_way or self._together)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Stand around several uploads, which are shown as one transfer."""
        with self._lock:
            self._begin_anew()
            self._together += 1
        try:
            yield
        finally:
            with self._lock:
                self._together -= 1
            self._ended()

    def moving(self, nbytes: int) -> Move:
        """Return what stands around an upload of so many bytes."""
        return Move(self, nbytes)

    def begin(self, move: Move) -> None:
        """Note that an upload begins."""
        with self._lock:
            self._begin_anew()
            self._under_way.append(move)
            self._moves, self._total = self._moves + 1, self._total + move.nbytes

    def _begin_anew(self) -> None:
        """Begin another transfer, unless one is under way or has just ended."""
        now = time.monotonic()
        if not self and now > self._last + _GAP:
            self._started, self._total, self._done, self._moves = now, 0, 0, 0

    def end(self, move: Move) -> None:
        """Note that an upload has ended."""
        with self._lock:
            if move in self._under_way:
                self._under_way.remove(move)
            self._done, self._last = self._done + move.nbytes, time.monotonic()
        self._ended()

    def _ended(self) -> None:
        """Have the bar end where the transfer does: the next statement is not to find it there."""
        if not self:
            self._over()

    def last(self) -> str:
        """Return the bar of a transfer that has ended."""
        with self._lock:
            return bar("uploading", self._done, self._total, self._last - self._started)

    def text(self, now: float) -> tuple[float, str] | None:
        """Return since when bytes are sent, and the bar; None where there is nothing to show."""
        if not self:
            return None
        with self._lock:
            if now < self._started + _LONG:
                return None
            done = self._done + sum(move.done() for move in self._under_way)
            # How many more are to come only the program knows.
            total = self._total if self._moves == 1 else None
            return self._started, bar("uploading", done, total, now - self._started)


def bar(what: str, done: int, total: int | None, seconds: float) -> str:
    """Return a bar with an estimate of what is left. The middle of a long `what` is left out."""
    if len(what) > _LONGEST:
        what = f"{what[: _LONGEST // 2]}...{what[-(_LONGEST // 2) :]}"
    return str(
        tqdm.format_meter(
            done, total, seconds, ncols=_COLUMNS, prefix=what, unit="B", unit_scale=True, unit_divisor=1024
        )
    )


class Announcer:
    """Says what the master waits for, and how far bytes are.

    The pump calls `show`; the waiting thread only notes that it waits. `ask` asks a worker what it runs.
    """

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._shown = ""
        self._on: Screen | None = None
        self._shown_at = 0.0
        # A signal's handler may wait for a value while this thread holds it.
        self._lock = RLock()
        self.uploads = Uploads(self._uploaded)
        # It tells how many bytes of the large values that were asked for have come, and of how many.
        self.fetched: Callable[[], tuple[int, int]] = _nothing
        self._fetching_since: float | None = None
        # Threads that save or load have an entry here: what they do, since when, the bytes, and how many of
        # these are there.
        self._works: dict[int, tuple[str, float, int, Callable[[], int]]] = {}
        self.ask: Callable[[Node, Callable[[Status], None]], object] = _nobody
        self._status: Status | None = None
        self._asked_at = self._heard_at = 0.0
        # The status is of this node.
        self._asked: Node | None = None

    @property
    def waiting(self) -> bool:
        """Whether some thread waits."""
        return bool(self._waits)

    def start_waiting(self, node: Log, leave: str | None = None, room: bool = False) -> None:
        """Note that this thread begins to wait for `node`; `leave` and `room` are as `Wait` has them."""
        self._waits[threading.get_ident()] = Wait(time.monotonic(), node, leave, room)

    def stop_waiting(self) -> None:
        """Note that this thread has stopped waiting, and take the line away. A second call does nothing."""
        with shield:
            wait = self._waits.pop(threading.get_ident(), None)
        # The end of an upload takes its own bar away. A screen may be slow, so Ctrl-C ends this.
        if self._shown and not self._waits and not self._works and not self.uploads:
            with self._lock:
                if wait is not None:
                    self._finish(f"waited {time.monotonic() - wait.started:.1f} s for {wait.node}")

    @contextmanager
    def working(self, what: str, total: int, there: Callable[[], int]) -> Iterator[None]:
        """Stand around what moves so many bytes elsewhere. `there` tells how many have been moved."""
        started = time.monotonic()
        self._works[threading.get_ident()] = what, started, total, there
        try:
            yield
        finally:
            self._works.pop(threading.get_ident(), None)
            with self._lock:
                if self._shown:
                    self._finish(bar(what, there(), total, time.monotonic() - started))

    def _uploaded(self) -> None:
        if self._shown:
            with self._lock:
                if self._shown.startswith("uploading") or not (self._waits or self._works):
                    self._finish(self.uploads.last())

    def _finish(self, text: str) -> None:
        """Take away what is shown."""
        on, self._on, self._shown, self._status = self._on, None, "", None
        if on is not None:
            on.finish(text)

    def clear(self) -> None:
        """Take away what is shown: something else is written in its place. It comes again."""
        if self._shown:
            with self._lock:
                self._finish("")

    def show(self) -> None:
        """Show the longest transfer or wait if it is long enough to say so."""
        if not (self._waits or self._works or self._shown or self.uploads):
            return
        on, now = screen(), time.monotonic()
        started, text = self._text(on, now)
        with self._lock:
            if not text:
                # A transfer has ended, and nobody waits.
                if self._shown and not self._waits and not self._works:
                    self._finish(self._shown)
                return
            if now < started + on.first:
                return
            due = not self._shown or now > self._shown_at + on.pause(now - started)
            # What has just ended must not be shown after its line was taken away. A wait may have begun since
            # then, and an upload's bar is not about that.
            uploading = text.startswith("uploading")
            if text != self._shown and due:
                before = self._on, self._shown, self._shown_at
                # Who stops waiting from here on sees it, and waits for the lock to take it away.
                self._on, self._shown, self._shown_at = on, text, now
                shown = False
                try:
                    if self.uploads or (not uploading and (self._waits or self._works)):
                        on.show(text)
                        shown = True
                finally:
                    # A screen that has gone raises.
                    if not shown:
                        self._on, self._shown, self._shown_at = before

    def _text(self, on: Screen, now: float) -> tuple[float, str]:
        """Return what there is to say, and since when it is so."""
        works = sorted(list(self._works.values()), key=lambda work: work[1])
        if works and now > works[0][1] + _LONG:
            what, started, total, there = works[0]
            return started, bar(what, min(total, there()), total, now - started)
        found = self.uploads.text(now) or self._fetching(now)
        if found is not None:
            return found
        waits = sorted(list(self._waits.values()), key=lambda wait: wait.started)
        if not waits or now < waits[0].started + on.first:
            return now, ""
        return waits[0].started, self._waiting(waits[0], on, now)

    def _fetching(self, now: float) -> tuple[float, str] | None:
        """Return since when large values come, and the bar; None where there is nothing to show."""
        done, total = self.fetched()
        # A value that is still to be computed is waited for; it is fetched once its bytes come.
        if not done:
            self._fetching_since = None
            return None
        if self._fetching_since is None:
            self._fetching_since = now
        since = self._fetching_since
        return (since, bar("fetching", done, total, now - since)) if now > since + _LONG else None

    def _waiting(self, wait: Wait, on: Screen, now: float) -> str:
        node, seconds = wait.node, now - wait.started
        left = until_room(node) if wait.room else under_way(node)
        # What a worker tells first makes the number smaller at once, and that is no pace. A mesh tells
        # nothing.
        if not isinstance(node, Node) or self._heard_at > wait.started:
            if wait.last is None or wait.last[1] != left:
                wait.last = now, left
            wait.first = wait.first or wait.last
        count = f" for {seconds:.0f} s" if seconds >= _COUNTING else ""
        many = f"{left:,} operation{'s' if left != 1 else ''}"
        if wait.room:
            what = f"its queue is full, {many} until it takes more"
        else:
            what = f"{many} under way" if left else "its answer is due"
        leave = wait.leave or _LEAVE
        if isinstance(node, Node):
            if node.presence.absence is not None:
                what = f"{node.presence.absence.text}; it goes on when there is a connection again"
            elif node.presence.connecting:
                what = node.presence.sought
            else:
                what += self._runs(node, on, seconds, now)
                if seconds >= _COUNTING:
                    what += _estimate(wait, now)
                if wait.leave is None and left and seconds >= _COUNTING:
                    leave = f"Ctrl-C leaves, {_AND_DROP}"
        return f"waiting for {node}{count}: {what} ({leave})"

    def _runs(self, node: Node, on: Screen, seconds: float, now: float) -> str:
        """Return what the node runs, as it has last said; ask it again if that was a while ago."""
        if seconds > max(_ASKED, on.first - _COUNTING) and now > self._asked_at + _ASKED:
            self._asked_at = now
            if self._asked is not node:
                self._asked, self._status = node, None
            # The wait itself tells of an end.
            with suppress(DistruntimeError):
                self.ask(node, self._hear)
        status = self._status
        if status is None or status.running is None:
            return ""
        return f", now {operator_text(status.running)[:_COLUMNS]} for {status.seconds:.1f} s"

    def _hear(self, status: Status) -> None:
        self._status, self._heard_at = status, time.monotonic()


def _estimate(wait: Wait, now: float) -> str:
    """Return about how long the rest takes, at the pace since it is known how much is ahead."""
    if wait.first is None or wait.last is None:
        return ""
    (since, before), (changed, left) = wait.first, wait.last
    if left == 0 or before - left < 2:
        return ""
    # The number changes once a second. Between two changes the estimate must not rise.
    until = changed if now < changed + _STALE else now
    return f", about {span(left * (until - since) / (before - left))} left"


def _nothing() -> tuple[int, int]:
    return 0, 0


def _nobody(node: Node, then: Callable[[Status], None]) -> None:
    """Ask nobody: there is no session yet."""
