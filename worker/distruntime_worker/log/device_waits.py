"""Waiting for devices, so that neither the reader nor a thread that issues has to."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from distruntime.errors import ProtocolError
from distruntime.wire.shield import Lock

from ..machine import accelerator
from ..values.streams import Happening

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
