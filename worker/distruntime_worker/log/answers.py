"""Answers fetches, and whoever waits for a position of the log.

Invariant: a fetch is answered when each stream that it names has run up to its position, by whichever thread
gets there last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from distruntime.errors import InternalError, ProtocolError
from distruntime.wire.codec import copy_bytes, failure_fields, pack_constant
from distruntime.wire.messages import Failed, Fetch, Notify, Part, Plain, Reply, Signal
from distruntime.wire.shared import Attached

from ..machine import accelerator, lost
from ..values.objects import INLINE_BYTES, PART_BYTES, Poisoned, described, failure, render, wire_tensor
from ..values.streams import Action, Happening, HostCopy, Stream
from .progress import Progress
from .state import Sent, State, Tell
from .waits import DeviceWaits

# One segment reports at most so many failures with their text: a loop of failing instructions says the same
# thing anyway.
MOST_FAILURES = 64
# No log gets to this position.
_END = 1 << 62
# So many seconds lie between looks whether a large tensor has arrived.
_SENT = 0.0002


class Answers:
    """The fetches of a session, each answered when its value is there."""

    def __init__(self, state: State, progress: Progress, shared: Attached, tell: Tell) -> None:
        self._state, self._progress, self._shared, self._tell = state, progress, shared, tell
        # These fetches wait for the whole log, up to a position.
        self._done: list[tuple[int, Fetch]] = []
        self._device_waits = DeviceWaits(lambda why: state.breaks(why))
        # A trace puts what notes the time in its place.
        self.answer_with: Callable[[Fetch, object], None] = self.answer_plainly

    def fetch(self, fetch: Fetch) -> None:
        """Answer `fetch` if the log has run far enough.

        Else leave it to the thread that gets there (the reader).
        """
        after = fetch.after
        if not self._names(after):
            raise ProtocolError(f"a fetch after {str(after)[:80]}")
        if fetch.form != "done":
            # The streams' numbers give the order, so that no two threads wait for each other's `serving`.
            if len(after) > 2:
                pairs = sorted(zip(after[::2], after[1::2]))
                fetch = replace(fetch, after=[n for pair in pairs for n in pair])
            self._when(fetch, 0)
            return
        with self._state.gate:
            if self._state.executed < after[1]:
                self._done.append((after[1], fetch))
                return
        self._answer(fetch)

    def executed(self) -> None:
        """Answer who waits for the whole log, as far as it has run (a stream's thread)."""
        if not self._done:
            return
        with self._state.gate:
            ready = [fetch for after, fetch in self._done if after <= self._state.executed]
            self._done = [entry for entry in self._done if entry[0] > self._state.executed]
        for fetch in ready:
            self._answer(fetch)

    def notify(self, message: Notify) -> None:
        """Send a signal to another worker once a stream has run far enough (the reader)."""
        self.fetch(Fetch(message.number, message.node, [message.stream, message.position], "signal", {}))

    def _names(self, after: list[int]) -> bool:
        """Whether `after` is [stream, position, ...] of streams that there are."""
        return (
            bool(after)
            and len(after) % 2 == 0
            and all(type(n) is int for n in after)
            and all(map(self._state.named, after[::2]))
        )

    def _stream(self, number: int) -> Stream:
        stream = self._state.named(number)
        # `_names` has made sure of it.
        assert stream is not None
        return stream

    def _when(self, fetch: Fetch, k: int) -> None:
        """Answer `fetch` when the streams from the `k`-th on that it names are at their positions."""
        after = fetch.after
        while k < len(after):
            stream, position = self._stream(after[k]), after[k + 1]
            k += 2
            if self._reached(stream, position):
                continue
            entry = position, lambda k=k: self._when(fetch, k)
            with self._state.gate:
                stream.waiting.append(entry)
            if not self._reached(stream, position):
                return
            # It got there meanwhile, which is rare.
            take_back = partial(self._take_back, stream, entry)
            if threading.get_ident() != self._state.reader:
                take_back()
            elif stream.serving.acquire(blocking=False):
                # Its thread answers nobody. A new thread may find no room, and a small read needs none.
                try:
                    take_back()
                finally:
                    stream.serving.release()
            else:
                # The reader does not wait for the stream's thread. That may be sending a large value, and the
                # reader alone hears that it has arrived.
                self._state.apart(take_back)
            return
        self._answer(fetch)

    def _take_back(self, stream: Stream, entry: tuple[int, Action]) -> None:
        """Do what waits for a stream that is there already, unless its thread does. Block while that thread
        answers others.

        Its thread may have taken the entry, and be about to answer. What comes next could write the value, on
        a stream that need not wait any more: so this returns when it has answered.
        """
        with stream.serving:
            with self._state.gate:
                if entry not in stream.waiting:
                    return
                stream.waiting.remove(entry)
        entry[1]()

    def _reached(self, stream: Stream, position: int) -> bool:
        return stream.reached >= position or (
            stream is self._state.default and self._progress.position(stream).position >= position
        )

    def serve(self, stream: Stream, position: int) -> None:
        """Answer what has waited for a stream to be at `position` (the stream's thread)."""
        with stream.serving:
            with self._state.gate:
                ready = [entry for entry in stream.waiting if entry[0] <= position]
                for entry in ready:
                    stream.waiting.remove(entry)
            for entry in ready:
                entry[1]()

    def passed(self, after: list[int]) -> bool:
        """Whether each stream is at its position.

        On a GPU, whether the kernels before it have run (the reader).
        """
        if not self._names(after):
            raise ProtocolError(f"a question after {str(after)[:80]}")
        for number, position in zip(after[::2], after[1::2]):
            stream = self._stream(number)
            if not self._reached(stream, position):
                return False
            if self._state.devices.asynchronous and not stream.has_run(position):
                return False
        return True

    def _answer(self, fetch: Fetch) -> None:
        if fetch.form in ("done", "passed", "signal"):
            self._answer_wait(fetch)
            return
        value = self._state.slots.get(fetch.ref)
        if isinstance(value, Poisoned):
            self._state.send(Failed(fetch.request, failure_fields(value.failure)), None)
            return
        if self._state.orphans and fetch.form != "text":
            with self._state.gate:
                orphan = self._state.orphans.pop(0) if self._state.orphans else None
            if orphan is not None:
                self._state.send(Failed(fetch.request, failure_fields(orphan)), None)
                return
        if isinstance(value, HostCopy) and value.event is not None:
            self._later(fetch, value, partial(list, [value.event]))
        elif isinstance(value, torch.Tensor) and accelerator.asynchronous(value.device):
            # This is a text, for which the value need not come over whole.
            self._later(fetch, value, partial(self._events, fetch.after, value.device))
        else:
            self.answer_with(fetch, value)

    def answer_plainly(self, fetch: Fetch, value: object) -> None:
        """Answer a fetch with a value that is here."""
        # The master's shared memory may be another session's by now.
        if self._state.left:
            return
        # The bytes are here. So if an operation of a group has spoilt them, that is known here by now.
        spoilt = self._state.spoilt_for(fetch.after)
        if spoilt is not None:
            self._state.send(Failed(fetch.request, failure_fields(spoilt)), None)
            return
        try:
            if value is None:
                raise InternalError(f"the value {fetch.ref} is not here")
            shown = value.tensor if isinstance(value, HostCopy) else value
            if not isinstance(shown, torch.Tensor):
                raise InternalError(f"the value {fetch.ref} is no tensor")
            self._reply(fetch, shown)
        except Exception as error:
            # Whatever the error is, it is the answer.
            self._fail(fetch, value, error)

    def _fail(self, fetch: Fetch, value: object, error: BaseException) -> None:
        """Answer with an error."""
        op = f"fetch ({fetch.form})"
        error = lost.look(error, op)
        if fetch.form == "signal":
            self._tell(fetch.ref, Signal(fetch.request, str(error)))
            return
        operands = described([value]) if value is not None and not isinstance(value, HostCopy) else ""
        cause = failure(error, seq=0, position=fetch.after[1], op=op, operands=operands)
        self._state.send(Failed(fetch.request, failure_fields(cause)), None)

    def _answer_wait(self, fetch: Fetch) -> None:
        """Answer who waits for a stream, or for all; on a GPU, when the kernels have run."""
        if not self._state.devices.asynchronous:
            self._say(fetch)
            return
        if fetch.form == "done":
            self._later(fetch, None, partial(self._events_of_all, fetch.after[1]))
        else:
            self._later(fetch, None, partial(self._events, fetch.after))

    def _say(self, fetch: Fetch) -> None:
        """Tell whoever waits for streams that they are there.

        The master, or another worker whose stream waits.
        """
        if fetch.form == "signal":
            self._tell(fetch.ref, Signal(fetch.request, ""))
        else:
            self._state.send(Reply(fetch.request, self._news(fetch)), None)

    def _events(self, after: list[int], device: torch.device | None = None) -> list[accelerator.Moment]:
        """Return the events of one GPU, or of all, that come after [stream, position, ...]."""
        return [
            event
            for number, position in zip(after[::2], after[1::2])
            for event in self._stream(number).events(position, device)
        ]

    def _events_of_all(self, position: int) -> list[accelerator.Moment]:
        """Return the events of all GPUs, where each stream has been given all up to a position of the log."""
        # A mesh's log has other positions.
        position = _END if self._state.meshes else position
        return [event for stream in self._state.all_streams() for event in stream.events(position)]

    def _later(self, fetch: Fetch, value: object, events: Callable[[], Sequence[Happening]]) -> None:
        """Answer when a GPU has got to `events`; neither the reader nor a stream may block until then."""

        def answer(error: BaseException | None) -> None:
            if error is not None:
                self._fail(fetch, value, error)
            elif value is None:
                self._say(fetch)
            else:
                self.answer_with(fetch, value)

        try:
            found = events()
        except RuntimeError as error:
            # A device refuses an event. That is the answer, and costs the session nothing else.
            answer(error)
            return
        self._device_waits.when_happened(found, answer)

    def close(self) -> None:
        """Let the threads end that wait for devices."""
        self._device_waits.close()

    def _news(self, fetch: Fetch) -> list[list[Plain]] | None:
        """Return the failures that no `Done` has brought yet, for who waits for less than the whole log.

        Who waits hears of every failure, so the next read need not say it again.
        """
        if "quiet" in fetch.options:
            return None
        self._state.orphans.clear()
        if fetch.form == "done":
            return None
        return [failure_fields(f) for work in list(self._state.works) for f in work.failures[:MOST_FAILURES]]

    def _reply(self, fetch: Fetch, value: torch.Tensor) -> None:
        """Send a value in the form that was asked for.

        When this returns later instructions may write the tensor: its bytes have arrived, or the reader lets
        none come before they have.
        """
        request = fetch.request
        if fetch.form == "item":
            self._state.send(Reply(request, pack_constant(value.item())), None)
            return
        if fetch.form == "text":
            self._state.send(Reply(request, render(value, dict(fetch.options))), None)
            return
        head, data = wire_tensor(value)
        if "shared" in fetch.options:
            copy_bytes(memoryview(self._shared[fetch.options["shared"]])[: len(data)], data)
            self._state.send(Reply(request, [*head, "shared"]), None)
        elif len(data) <= INLINE_BYTES:
            self._state.send(Reply(request, [*head, bytes(data)]), None)
        elif len(data) <= PART_BYTES:
            self._state.send(Reply(request, [*head, None]), data)
        else:
            work = partial(self._send_parts, request, head, data)
            # Only the reader hears what has arrived, so it cannot wait for that.
            self._state.apart(work) if threading.get_ident() == self._state.reader else work()

    def _send_parts(self, request: int, head: list[Plain], data: memoryview) -> None:
        """Send a large value. When this returns its memory may be written again."""
        # One memory copy more on this way makes it a quarter slower than a plain socket.
        parts = [
            self._state.send(Part(request, k), data[k : k + PART_BYTES], copy=False)
            for k in range(0, len(data), PART_BYTES)
        ]
        self._state.send(Reply(request, [*head, "parts"]), None)
        with self._state.turn.paused():
            while not (self._state.closed or self._state.left or _arrived(parts)):
                time.sleep(_SENT)


def _arrived(parts: list[Sent]) -> bool:
    return all(part is None or part.done for part in reversed(parts))
