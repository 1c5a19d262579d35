"""What makes a stream wait, and what waits for devices.

A stream waits for another one of this worker, or for a signal of the master that another node has got there.
A thread of its own waits for devices, so that neither the reader nor a thread that issues has to.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from distruntime.errors import NodeFailed, ProtocolError, WaitTimeout
from distruntime.wire.messages import Signal
from distruntime.wire.shield import Lock

from ..machine import accelerator
from ..values.step import Slots, Words, int_word, real_word, text_word
from ..values.streams import Happening, Stream
from .state import State

log = logging.getLogger("distruntime.worker")

# What happens within so many seconds is waited for on the spot: to wake another thread takes as long.
_AT_ONCE = 20e-6

# It gets the error of a wait, or None.
Then = Callable[[BaseException | None], None]
_Entry = tuple[accelerator.Moment, Then]


class DeviceWaits:
    """The threads of a session that wait: one for each stream of a device that was ever waited for.

    The events of one stream happen in order, so its thread waits for one after the other. A stream that takes
    long holds no other's waits up.
    """

    def __init__(self, broke: Callable[[str], None]) -> None:
        # It is told of an answer that cannot be given.
        self._broke = broke
        self._queues: dict[torch.Stream, queue.SimpleQueue[_Entry | None]] = {}
        self._lock = Lock()
        self._closed = False

    def when_happened(self, events: Sequence[Happening], then: Then) -> None:
        """Call `then` once, when all of `events` have happened or one has failed. May do so at once."""
        try:
            happened = _soon(events)
        except RuntimeError as error:
            then(error)
            return
        if happened:
            then(None)
        else:
            self._from(0, events, then)

    def _from(self, k: int, events: Sequence[Happening], then: Then) -> None:
        """Call `then` when the events from the `k`-th on have happened."""
        if k == len(events):
            then(None)
            return

        def go_on(error: BaseException | None) -> None:
            if error is None:
                self._from(k + 1, events, then)
            else:
                then(error)

        event = events[k]
        try:
            if isinstance(event, accelerator.Moment):
                self._queue(event.stream).put((event, go_on))
            else:
                # It is a file that is being written, for example. There are few.
                threading.Thread(target=self._wait, args=(event, go_on), name="waits", daemon=True).start()
        except RuntimeError as error:
            # There is no room for a thread.
            then(error)

    def _queue(self, stream: torch.Stream) -> queue.SimpleQueue[_Entry | None]:
        with self._lock:
            found = self._queues.get(stream)
            if found is None:
                found = queue.SimpleQueue()
                if self._closed:
                    # Its thread ends with what is there now.
                    found.put(None)
                threading.Thread(target=self._run, args=(found,), name="waits-for-gpu", daemon=True).start()
                self._queues[stream] = found
        return found

    def close(self) -> None:
        """Let the threads end after what they have."""
        with self._lock:
            self._closed = True
            for one in self._queues.values():
                one.put(None)

    def _run(self, entries: queue.SimpleQueue[_Entry | None]) -> None:
        while (entry := entries.get()) is not None:
            self._wait(*entry)
            # Otherwise an idle thread would hold the value.
            del entry

    def _wait(self, event: Happening, then: Then) -> None:
        try:
            with torch.no_grad():
                try:
                    event.synchronize()
                except RuntimeError as error:
                    then(error)
                else:
                    then(None)
        except ProtocolError as error:
            self._broke(str(error))
        except Exception as error:
            # Whoever asked would wait for ever. Others wait for this thread, and get their answers.
            log.exception("an answer that waited for a device cannot be given")
            self._broke(f"a defect of the worker: {error!r}")


def _soon(events: Sequence[Happening]) -> bool:
    """Whether all have happened, or do so within the next moment."""
    if all(event.query() for event in events):
        return True
    if not all(isinstance(event, accelerator.Moment) for event in events):
        return False
    until = time.perf_counter() + _AT_ONCE
    while time.perf_counter() < until:
        if all(event.query() for event in events):
            return True
    return False


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
