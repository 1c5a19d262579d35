"""Drops what a cancelled stream has not begun.

Its results are poisoned, and what others count on happens all the same.
"""

from __future__ import annotations

from distruntime.errors import StreamCancelled
from distruntime.wire.codec import failure_fields
from distruntime.wire.messages import (
    ADOPT,
    AWAIT,
    BEFORE_INSTRUCTION,
    DROP,
    FORGET,
    GIVE,
    HOST,
    LEARN,
    MARK,
    PUBLISH,
    RELEASE,
    STAMP,
    TAKE,
    UPLOAD,
    WAIT,
    Failed,
)

from ..values.functions import RANDOM_STATES
from ..values.objects import Poisoned
from ..values.step import Words, int_word
from ..values.streams import Stream
from .state import State, request_of
from .waits import Waits

# These are carried out all the same: the master remembers the settings and seeds, and would be wrong for ever
# after. A draw that is dropped has not changed the random state, so this can be read, and be given back.
_SETTINGS = {"distruntime::config", *RANDOM_STATES}
# So are these, and an upload that makes a value: it may be a seed, and the master may keep it.
_CARRIED_OUT = (RELEASE, FORGET, DROP, STAMP, MARK, TAKE, GIVE, ADOPT)


class Cancelling:
    """Cancels a session's streams."""

    def __init__(self, state: State, waits: Waits) -> None:
        self._state, self._waits = state, waits

    def cut(self, stream: Stream, position: int) -> None:
        """Drop what a stream has not begun and ends at or before `position` (the reader)."""
        stream.cancelled = max(stream.cancelled, position)
        with self._state.gate:
            # This makes `run` look, which has no time to look each time.
            stream.waiting.append((position, lambda: None))

    def drop(self, stream: Stream, p: Words, i: int) -> int:
        """Step over the instruction at `i` of a cancelled stream: its results are poisoned, its frees happen.

        The master counts on its waits: who waits for this stream waits for them instead, and so does it
        before it poisons what was there.
        """
        slots, word = self._state.slots, int_word(p[i])
        if word < 0:
            slots.pop(-word, None)
            return i + 1
        # What is taken or given may come from another stream, and an upload may go into a value that another
        # one is still to make.
        if word in (FORGET, DROP, TAKE, GIVE, UPLOAD):
            self._waits.pay(stream, p, i)
        if word in _CARRIED_OUT or (word == UPLOAD and p[i + 1] not in slots):
            return self._state.templates[word](slots, p, i)
        if word == WAIT and p[i + 3] is None:
            work = self._state.work(p)
            stream.owe(
                work.segment.start + i, self._state.log(work).streams[int_word(p[i + 1])], int_word(p[i + 2])
            )
        if word == WAIT:
            return i + 5
        if word == AWAIT:
            self._waits.discard(int_word(p[i + 1]))
            return i + 4
        error = stream.refused or StreamCancelled("dropped by stream.cancel() or dr.cancel() before it ran")
        if word in (UPLOAD, HOST):
            cause = self._state.failure(p, i, error, self._state.own[word].name, "")
            slots[p[i + (1 if word == UPLOAD else 2)]] = Poisoned(cause)
            return i + (6 if word == UPLOAD else 4)
        if word == PUBLISH:
            cause = self._state.failure(p, i, error, self._state.own[word].name, "")
            self._state.send(Failed(request_of(p[i + 1]), failure_fields(cause)), None)
            return i + 4
        first = i + BEFORE_INSTRUCTION.get(word, 0)
        log = self._state.log(self._state.work(p))
        step = log.info[p[first]]
        if step.name in _SETTINGS:
            self._waits.pay(stream, p, i)
            return log.templates[p[first]](slots, p, first)
        # What it would write, or be a view of, must be there to be known; and a group's operations keep their
        # order.
        if step.mutates or step.views or step.joint:
            self._waits.pay(stream, p, i)
        after = step.drop(slots, p, first, error)
        if word == LEARN and not step.joint:
            written = (slots.get(p[first + k]) for k in step.writes)
            poisoned = next((v.failure for v in written if isinstance(v, Poisoned)), None)
            cause = poisoned or self._state.failure(p, first, error, step.name, "")
            self._state.send(Failed(request_of(p[i + 1]), failure_fields(cause)), None)
        return after
