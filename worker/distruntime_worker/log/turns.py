"""Whose turn it is: sessions that have work at the same time run it in turns, each for as long as the others.

Without turns a session with eight streams has eight times the time of a session with one: its threads ask for
the interpreter and the cores eight times as often. A session that is alone takes no turns, and pays for the
look whether it is.

Invariant: at most one session holds the turn, and nobody waits for it for long. The holder gives it up when
it comes to the end of a segment and is ahead of somebody who waits, or has no more work, or blocks. If it
comes to no such end within `LEASE` seconds, it is in a long instruction, and those who wait go on beside it,
one after the other. So what a holder waits for cannot depend on its turn ending, whatever it is, and a turn
is never part of a circle of waits, within a worker or between workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from time import monotonic

from distruntime.wire.messages import TurnsTaken
from distruntime.wire.shield import Lock

# A session may run for so many seconds, without coming to the end of a segment, while others wait.
LEASE = 0.02
# A holder may be ahead of who waits by so many seconds. Two sessions that are never done have turns of twice
# that. Waking a thread that takes the interpreter over costs some 0.1 ms.
_GRAIN = LEASE / 2
# An account may be behind by so many seconds when its session has work again: gaps of that size are no
# idleness.
_CREDIT = 0.1
# An account may be ahead by so many seconds, and a thread pays so many for one segment at most. During a
# kernel of an hour, and after it, a session's other threads have to wait a little longer than others, but not
# for an hour.
_LEAD = 1.0


def _nothing() -> bool:
    return False


class Turn:
    """One session's place in the turns. `with turn:` stands around what a thread runs, a segment or a part of
    one; it blocks until then.

    Threads of one session hold the turn together, and count as one.
    """

    __slots__ = (
        "_account",
        "_closed",
        "_ready",
        "_threads",
        "_turns",
        "_waiting",
        "more",
        "name",
        "seconds",
        "taken",
    )

    def __init__(self, turns: Turns, name: str) -> None:
        self.name = name
        # These count the turns, and the seconds that it ran. While others ran beside it, its threads' part of
        # that counts.
        self.taken, self.seconds = 0, 0.0
        # It says whether something is there for it to run, which no thread has begun.
        self.more: Callable[[], bool] = _nothing
        self._turns = turns
        # The account is in seconds. The session with the least is next.
        self._account = 0.0
        # These threads run, each since that time.
        self._threads: dict[int, float] = {}
        # So many threads wait for the turn.
        self._waiting = 0
        self._ready = threading.Condition(turns.lock)
        self._closed = False

    def __enter__(self) -> None:
        turns = self._turns
        if turns.single:
            return
        with turns.lock:
            # Its threads only drop what is left.
            if self._closed:
                return
            now = monotonic()
            turns.charge(now)
            if not self._threads and not self._waiting:
                turns.welcome(self)
            # This may be so although another thread of its own still runs.
            if turns.holder is not self:
                self._wait(now)
            if not self._closed:
                self._threads[get_ident()] = turns.charged_at
                turns.running[self] = None

    def _wait(self, now: float) -> None:
        """Block until this session has the turn, or is closed."""
        turns = self._turns
        if turns.holder is None:
            turns.give(self, now)
            return
        self._waiting += 1
        try:
            while turns.holder is not self and not self._closed:
                turns.waiting[self] = None
                left = turns.since + LEASE - now
                if left > 0:
                    self._ready.wait(left)
                else:
                    turns.give(turns.next(), now)
                now = monotonic()
                turns.charge(now)
        except BaseException:
            # Nobody is left to use the turn.
            if turns.holder is self and self._waiting == 1 and not self._threads and turns.waiting:
                turns.give(turns.next(), now)
            raise
        finally:
            self._waiting -= 1
            if not self._waiting:
                turns.waiting.pop(self, None)

    def __exit__(self, *_: object) -> None:
        if self._threads:
            self.leave()

    def leave(self, blocks: bool = False) -> bool:
        """End what this thread runs, or interrupt it while the thread `blocks`.

        Return whether it ran anything in its turn.
        """
        turns, mine = self._turns, get_ident()
        # Only this thread changes its own entry.
        if mine not in self._threads:
            return False
        with turns.lock:
            now = monotonic()
            turns.charge(now)
            del self._threads[mine]
            if not self._threads:
                del turns.running[self]
            if turns.holder is self:
                turns.since = now
                # What is behind a thread that blocks cannot run.
                done = self.idle() or (blocks and not self._threads)
                if turns.waiting:
                    following = turns.next()
                    if done or self._account > following._account + _GRAIN:
                        turns.give(following, now)
                elif done:
                    turns.holder = None
            return True

    def paused(self) -> Pause:
        """Return the context in which a thread blocks.

        Others may have the turn meanwhile. Nothing happens in a thread without one.
        """
        return Pause(self)

    def charged(self, now: float) -> int:
        """Return how many of its threads pay.

        One that has been at the same segment for longer than an account counts does not.
        """
        return sum(now - since < _LEAD for since in self._threads.values())

    def idle(self) -> bool:
        """Whether nothing of it runs, or waits to be run."""
        return not self._threads and not self._waiting and not self.more()

    def close(self) -> None:
        """Leave for good: what its threads still run, they run beside the others."""
        turns = self._turns
        with turns.lock:
            self._closed, self.more = True, _nothing
            turns.open.pop(self, None)
            turns.single = len(turns.open) < 2
            turns.waiting.pop(self, None)
            if turns.holder is self:
                turns.holder = None
                if turns.waiting:
                    turns.give(turns.next(), monotonic())
            self._ready.notify_all()


class Pause:
    """A thread's way out of its session's turn and back, while it blocks."""

    __slots__ = ("_ran", "_turn")

    def __init__(self, turn: Turn) -> None:
        self._turn, self._ran = turn, False

    def __enter__(self) -> None:
        self._ran = self._turn.leave(blocks=True)

    def __exit__(self, *_: object) -> None:
        if self._ran:
            self._turn.__enter__()


class Turns:
    """The turns of one worker's sessions. All but `enter` and `report` is called under the lock, by `Turn`.

    Invariant: while somebody is in `waiting`, there is a holder, and it has come to the end of a segment
    within `LEASE` seconds, or some thread of those that wait takes the turn from it: each waits with that
    deadline.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        # These dictionaries serve as ordered sets.
        self.open: dict[Turn, None] = {}
        # It is True while no more than one session is open. What that one runs, or has begun while it was
        # alone, is not counted.
        self.single = True
        # These sessions' threads run: the holder's, and those that came to no end in time.
        self.running: dict[Turn, None] = {}
        self.waiting: dict[Turn, None] = {}
        self.holder: Turn | None = None
        # The holder took the turn, or came to the end of a segment, at this time.monotonic().
        self.since = 0.0
        self.charged_at = 0.0
        # This is the least account of those that were active. It never falls.
        self._floor = 0.0

    def enter(self, name: str) -> Turn:
        """Return the place of a new session."""
        with self.lock:
            turn = Turn(self, name)
            self.open[turn] = None
            self.single = len(self.open) < 2
            return turn

    def report(self) -> list[TurnsTaken]:
        """Return what each open session has had; what it did while it was alone is not in it."""
        with self.lock:
            self.charge(monotonic())
            return [TurnsTaken(turn.name, turn.taken, turn.seconds) for turn in self.open]

    def charge(self, now: float) -> None:
        """Charge the time since the last call to those that ran in it."""
        passed, self.charged_at = now - self.charged_at, now
        if not self.running:
            return
        # This does what follows, in short, for the commonest case.
        if len(self.running) == 1 and not self.waiting:
            (turn,) = self.running
            turn.seconds += passed
            turn._account += passed
            self._floor = max(self._floor, turn._account)
            return
        # All threads share the interpreter, or the cores.
        threads = sum(len(turn._threads) for turn in self.running)
        charged = [(turn, n) for turn in self.running if (n := turn.charged(now))]
        shares = sum(n for _, n in charged)
        for turn in self.running:
            turn.seconds += passed * len(turn._threads) / threads
        for turn, n in charged:
            turn._account += passed * n / shares
        active = [*(turn._account for turn, _ in charged), *(turn._account for turn in self.waiting)]
        if active:
            self._floor = max(self._floor, min(active))
        for turn, _ in charged:
            turn._account = min(turn._account, self._floor + _LEAD)

    def welcome(self, turn: Turn) -> None:
        """Take in a session that had nothing to do: what it did not use then is gone."""
        turn._account = max(turn._account, self._floor - _CREDIT)

    def next(self) -> Turn:
        """Return who of those that wait has used least."""
        return min(self.waiting, key=_account)

    def give(self, turn: Turn, now: float) -> None:
        """Give the turn to a session."""
        self.waiting.pop(turn, None)
        self.holder, self.since = turn, now
        turn.taken += 1
        turn._ready.notify_all()


def _account(turn: Turn) -> float:
    return turn._account
