"""What makes a stream wait.

For another stream of this worker, or for a signal of the master that another node has got there.
"""

from __future__ import annotations

import threading
import time

from distruntime.errors import NodeFailed, WaitTimeout
from distruntime.wire.messages import Signal

from ..values.step import Slots, Words, int_word, real_word, text_word
from ..values.streams import Stream
from .state import State

# So many seconds lie between a blocked stream's looks whether it is cancelled or the master gone.
_LOOK = 0.1


class Waits:
    """The waits of a session's streams. `wait` and `await_signal` are what `WAIT` and `AWAIT` run."""

    def __init__(self, state: State) -> None:
        self._state = state
        # Both end empty. Each number is waited for once, or its wait is dropped, and each is signalled once.
        # Whichever comes second forgets the number.
        self._signals: dict[int, tuple[threading.Event, list[str]]] = {}
        # The wait for each of these ended before the signal came.
        self._unwanted: set[int] = set()

    def wait(self, slots: Slots, p: Words, i: int) -> int:
        other, position = int_word(p[i + 1]), int_word(p[i + 2])
        seconds, text = real_word(p[i + 3]), text_word(p[i + 4])
        mine, work = self._state.mine(), self._state.work(p)
        target = self._state.log(work).streams[other]
        if not self._follow(mine, [(target, position)], p, i, seconds, text) and seconds is None:
            mine.owe(work.segment.start + i, target, position)
        return i + 5

    def _follow(
        self,
        mine: Stream,
        due: list[tuple[Stream, int]],
        p: Words,
        i: int,
        seconds: float | None,
        text: str,
        patient: bool = False,
    ) -> bool:
        """Block this stream until those in `due` are at their positions, and at what they have not waited for
        when they were cancelled.
        """
        # The loop itself adds to `due`.
        for target, position in due:
            passed = threading.Event()
            entry = position, passed
            target.blocked.append(entry)
            if target.position >= position:
                passed.set()
            done = self._block(mine, passed, p, i, seconds, text, patient)
            target.blocked.remove(entry)
            if mine.native is not None or target.native is not None:
                with self._state.turn.paused():
                    mine.wait_for(target.events(position))
            if not done:
                return False
            # Only debts from before that position count: a later one may be to this very stream, for what
            # stands behind this wait.
            due += [
                (other, where)
                for at, other, where in target.owed
                if at <= position and (other, where) not in due
            ]
        return True

    def pay(self, mine: Stream, p: Words, i: int) -> None:
        """Wait for what this stream has not waited for when it was cancelled.

        It is about to change what others may still use.
        """
        self._follow(mine, [(other, where) for _, other, where in mine.owed], p, i, None, "", patient=True)

    def await_signal(self, slots: Slots, p: Words, i: int) -> int:
        number, seconds, text = int_word(p[i + 1]), real_word(p[i + 2]), text_word(p[i + 3])
        passed, reasons = self._signal(number)
        if self._block(self._state.mine(), passed, p, i, seconds, text):
            for reason in reasons:
                self._state.orphans.append(self._state.failure(p, i, NodeFailed(reason), "wait", ""))
        self.discard(number)
        return i + 4

    def discard(self, number: int) -> None:
        """Drop a signal that nobody waits for any more, now or when it comes."""
        with self._state.gate:
            passed, _ = self._signals.pop(number, (None, None))
            if passed is None or not passed.is_set():
                self._unwanted.add(number)

    def _block(
        self,
        mine: Stream,
        passed: threading.Event,
        p: Words,
        i: int,
        seconds: float | None,
        text: str,
        patient: bool = False,
    ) -> bool:
        """Block until `passed`.

        Return False when time is up (a failure), the master gone, or the stream cancelled, unless `patient`.
        """
        if passed.is_set():
            return True
        deadline = None if seconds is None else time.monotonic() + seconds
        position = self._state.work(p).segment.start + i
        with self._state.turn.paused():
            while not passed.wait(
                _LOOK if deadline is None else min(_LOOK, max(0.0, deadline - time.monotonic()))
            ):
                if self._state.closed or (position < mine.cancelled and not patient):
                    return False
                if deadline is not None and time.monotonic() >= deadline:
                    self._state.orphans.append(self._state.failure(p, i, WaitTimeout(text), "wait", ""))
                    return False
        return True

    def _signal(self, number: int) -> tuple[threading.Event, list[str]]:
        with self._state.gate:
            return self._signals.setdefault(number, (threading.Event(), []))

    def signal(self, message: Signal) -> None:
        """Let the stream go on that waits for this signal, or will (the reader)."""
        with self._state.gate:
            if message.number in self._unwanted:
                self._unwanted.remove(message.number)
                return
            passed, reasons = self._signal(message.number)
            if message.reason:
                reasons.append(message.reason)
            passed.set()
