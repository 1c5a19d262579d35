"""The calls that run now, each in its thread, and what ends one of them before it returns.

A function is interrupted by an exception that Python raises in its thread before the next bytecode.
Invariant: it is raised inside the user's call only. `finish` closes that window: under `gate` it marks the
call as over, and takes back what was sent and has not been raised. Where the user's call comes back to the
worker's own code (it prints, it warns), `unstruck` keeps an interrupt for the end of that code.
"""

from __future__ import annotations

import bdb
import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import NamedTuple, Protocol, TypeVar

from distruntime.errors import NodeFailed, RemoteError, StreamCancelled
from distruntime.wire.messages import Message, Printed, Typed, Warned
from distruntime.wire.shield import Lock

from .alarms import Alarm, alarms
from .async_exceptions import set_async_exception, take_back
from .forked import end_child
from .printing import Printing

T = TypeVar("T")

# A function that has not ended so many seconds after it was interrupted is told of.
_STUCK = 5.0
# A session may send so many characters of output at once, and so many a second after that. A loop of prints
# fills 10 MB a second, and the master shows less than that.
_BURST, _RATE = 1 << 20, 1 << 18
# A call tells of so many different warnings.
_MOST_WARNINGS = 16


class Interrupted(KeyboardInterrupt):
    """Ends a function, as Ctrl-C ends a program: `finally` runs, and `except Exception` does not catch it."""


class Place(Protocol):
    """Where an instruction stands in the log: see progress.py."""

    @property
    def seq(self) -> int: ...

    @property
    def position(self) -> int: ...

    @property
    def end(self) -> int: ...


class _Here(threading.local):
    """The call that this thread runs."""

    call: Running | None = None


here = _Here()
# The sessions with functions, and the calls that run, of all of them. These dictionaries serve as sets.
_sessions: dict[Around, None] = {}
_running: dict[Running, None] = {}
# It is True in a process that a function has forked.
_forked = [False]


def current() -> Running | None:
    """Return the call that this thread runs.

    Another thread may be one that a function has begun: it belongs to the call that is the only one of the
    only session.
    """
    call = here.call
    if call is not None or len(_running) != 1 or len(_sessions) != 1:
        return call
    return next(iter(_running.copy()), None)


def abandon() -> None:
    """In a process that was forked: let no call of the other one reach the master."""
    if here.call is not None:
        _forked[0] = True
        here.call = None
    _running.clear()
    _sessions.clear()


class Around:
    """What stands around the calls of one session.

    `locate` tells where the instruction of a thread stands, and `present` whether the master is there.
    """

    def __init__(
        self,
        send: Callable[[Message], object],
        locate: Callable[[int], Place | None],
        present: Callable[[], bool],
    ) -> None:
        self._send, self._locate, self._present = send, locate, present
        # It makes what a call runs in.
        self.call: Callable[[str, float | None], Running] = partial(Running, self)
        self.gate = Lock()
        # These calls, by the position after them, are not to begin, and why.
        self.unwanted: dict[int, Why] = {}
        # What may still be sent, and since when it grows.
        self._room, self._filled = float(_BURST), time.monotonic()
        _sessions[self] = None

    def place(self, thread: int) -> Place | None:
        """Return where the instruction stands that a thread runs."""
        return self._locate(thread)

    def send(self, message: Message) -> None:
        """Send to the master."""
        self._send(message)

    def room(self, count: int) -> bool:
        """Whether so many characters may be sent now; they count."""
        now = time.monotonic()
        self._room = min(_BURST, self._room + (now - self._filled) * _RATE)
        self._filled = now
        if count > self._room or not self._present():
            return False
        self._room -= count
        return True

    @property
    def present(self) -> bool:
        """Whether the master is there."""
        return self._present()

    def mine(self) -> list[Running]:
        """Return the calls of this session that run."""
        return [call for call in _running.copy() if call.around is self]

    def cancel(self, thread: int, position: int) -> None:
        """Interrupt the call that a thread runs, if it is before a position (the reader)."""
        for call in self.mine():
            place = self._locate(call.thread)
            if call.thread == thread and place is not None and place.end <= position:
                self.unwanted.pop(place.end, None)
                call.interrupt(Why())

    def cancel_all(self, text: str) -> None:
        """Interrupt every call that runs, for a reason (the reader)."""
        for call in self.mine():
            call.interrupt(Why(text=text))

    def cancel_call(self, position: int, lost: str) -> None:
        """Drop the call that ends at a position, or interrupt it; `lost` as in `Why` (the reader)."""
        why = self.unwanted[position] = Why(lost=lost)
        for call in self.mine():
            place = self._locate(call.thread)
            if place is not None and place.end == position:
                self.unwanted.pop(position, None)
                call.interrupt(why)

    def typed(self, message: Typed) -> None:
        """Hand a line to the debugger that waits for it (the reader)."""
        for call in self.mine():
            if call.typed is not None and call.at == (message.seq, message.position):
                call.typed(message.text)

    def close(self) -> None:
        """Interrupt what still runs: the session is over."""
        _sessions.pop(self, None)
        for call in self.mine():
            call.interrupt(Why())


class Why(NamedTuple):
    """Why a call is interrupted: it has run for so many seconds, or a worker that runs a part of it is lost.

    Otherwise somebody has cancelled it, or `text` has the reason.
    """

    seconds: float | None = None
    lost: str = ""
    text: str = ""


class Running:
    """One call of the user's Python, in its thread."""

    # Attributes of the class are what holds until something happens: most calls write nothing.
    over = False
    why: Why | None = None
    # It looks itself whether it is interrupted, and nothing strikes it.
    polls = False
    # It takes a line for the debugger of this call, while that waits for one.
    typed: Callable[[str | None], None] | None = None
    # Its thread is traced.
    debugged = False
    # Its thread is in code of ours, and was interrupted there.
    _ours, _owed = True, False
    _alarm: Alarm | None = None
    _at: tuple[int, int] | None = None
    _printing: Printing | None = None
    _heard: set[tuple[str, str]] | None = None

    def __init__(self, around: Around, name: str, timeout: float | None) -> None:
        self.around, self.name, self.timeout = around, name, timeout
        self.thread = get_ident()

    def begin(self) -> None:
        """Note that the call runs, in this thread; raise `StreamCancelled` if it is not to run."""
        try:
            here.call = self
            _running[self] = None
            if self.timeout is not None:
                self._alarm = alarms.after(self.timeout, partial(self.interrupt, Why(self.timeout)))
            # The reader adds to this before it looks at what runs.
            if self.around.unwanted:
                place = self.around.place(self.thread)
                why = None if place is None else self.around.unwanted.pop(place.end, None)
                if why is not None:
                    text = f"{self.name} was dropped by dr.cancel() before it ran"
                    raise NodeFailed(why.lost) if why.lost else StreamCancelled(text)
        finally:
            self._leave()

    def finish(self) -> None:
        """Note that the call is over. An interrupt may strike in here: then call it again."""
        if _forked[0]:
            end_child()
        with self.around.gate:
            self.over = True
            if self.why is not None:
                take_back(self.thread)
        if self.debugged:
            sys.settrace(None)
        here.call = None
        _running.pop(self, None)
        if self._alarm is not None:
            alarms.call_off(self._alarm)
        if self._printing is not None:
            self._printing.close()

    # -- what ends it early ----------------------------------------------------------------------------------

    def interrupt(self, why: Why) -> None:
        """Have the call end."""
        with self.around.gate:
            if self.over:
                return
            if self.why is None:
                self.why = why
                if self._alarm is not None:
                    alarms.call_off(self._alarm)
                self._alarm = alarms.after(_STUCK, self._tell_if_stuck)
            if self._ours:
                self._owed = True
            elif not self.polls:
                set_async_exception(self.thread, Interrupted)
            if self.typed is not None:
                self.typed(None)

    def unstruck(self, act: Callable[[], T]) -> T:
        """Run code of ours in this thread; what interrupts the call meanwhile strikes after it.

        Otherwise it could strike between two bytecodes that take a lock, and nobody would ever let that go:
        a `Condition` is entered in Python. Or it would lose a message that has its number already.
        """
        # What the function's own threads run is never struck.
        if self._ours or get_ident() != self.thread:
            return act()
        try:
            self._ours = True
            # An interrupt that did not see this has been sent, and strikes before the next call.
            with self.around.gate:
                pass
            return act()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Raise what was kept while the thread was in code of ours."""
        with self.around.gate:
            self._ours, owed = False, self._owed
            if owed:
                self._owed = False
        if owed and not self.polls:
            raise Interrupted

    def poll(self) -> None:
        """Let nothing strike the call from now on: `look` tells of what interrupts it."""
        with self.around.gate:
            self.polls = True
            if self.why is not None:
                # It may have been sent, and not have struck yet.
                take_back(self.thread)

    def look(self) -> None:
        """Raise what the call fails with, if something has interrupted it."""
        if self.why is not None:
            failure = self.failure(Interrupted())
            assert failure is not None
            raise failure

    def ask(self, text: str, typed: queue.SimpleQueue[str | None]) -> str | None:
        """Show a prompt at the master; return the line that is typed there, None at the end of the input."""
        if self._printing is not None:
            self.unstruck(self._printing.send_now)
        self.typed = typed.put
        # What ends the call may have come before there was somebody to be told. The debugger catches an
        # interrupt, and asks again.
        if self.why is not None:
            return None
        self._say(Printed(*self.at, "prompt", text))
        try:
            return typed.get()
        finally:
            self.typed = None
            if self.why is not None:
                self._say(Printed(*self.at, "prompt over", ""))

    def _say(self, message: Message) -> None:
        self.unstruck(partial(self.around.send, message))

    def patient(self) -> None:
        """Let the timeout not count any more: somebody debugs the call."""
        if self._alarm is not None:
            self.unstruck(partial(alarms.call_off, self._alarm))

    def _tell_if_stuck(self) -> None:
        if not self.over:
            self.write(
                "stderr",
                f"{self.name} was interrupted {_STUCK:g} s ago and has not ended: it is in code that Python "
                "cannot interrupt (a sleep, a lock, C). It ends when that returns; dr.restart(node, "
                "force=True) ends its worker\n",
            )

    def failure(self, error: BaseException) -> BaseException | None:
        """Return what a call has failed with, where that is not the error that it has raised."""
        match error:
            case Interrupted() | bdb.BdbQuit() if self.why is not None and self.why.seconds is not None:
                return TimeoutError(
                    f"{self.name} ran for longer than its timeout of {self.why.seconds:g} s, and was "
                    "interrupted"
                )
            case Interrupted() | bdb.BdbQuit() if self.why is not None and self.why.lost:
                return NodeFailed(self.why.lost)
            case Interrupted() | bdb.BdbQuit() if self.why is not None:
                by = self.why.text or "by dr.cancel() or stream.cancel()"
                return StreamCancelled(f"{self.name} was interrupted {by}")
            case bdb.BdbQuit():
                return RemoteError(f"{self.name} was ended at its breakpoint")
            case SystemExit():
                return RemoteError(
                    f"{self.name} called sys.exit({error.code!r}), and the worker goes on: return, or raise"
                )
            case Exception():
                return None
        return RemoteError(f"{self.name} raised {type(error).__name__}")

    # -- what it says ----------------------------------------------------------------------------------------

    @property
    def at(self) -> tuple[int, int]:
        """Where its instruction stands: the number of its segment, and its position in the log."""
        if self._at is None:
            place = self.around.place(self.thread)
            self._at = (0, 0) if place is None else (place.seq, place.position)
        return self._at

    def write(self, kind: str, text: str) -> bool:
        """Have the master show a text, soon. Return False if nobody is there, or the call is over."""
        return self.unstruck(partial(self._write, kind, text))

    def _write(self, kind: str, text: str) -> bool:
        if self.over or not self.around.present:
            return False
        if self._printing is None:
            # Another thread of the function's may do this too. Then the text of one of them comes later.
            self._printing = Printing(self.around, self.at, kind)
        self._printing.write(kind, text)
        return True

    def warn(self, kind: str, text: str) -> bool:
        """Tell the master of a warning, once for each call. Return False if the call is over."""
        if self.over or not self.around.present:
            return False
        heard = self._heard = self._heard or set()
        if (kind, text) not in heard and len(heard) < _MOST_WARNINGS:
            heard.add((kind, text))
            self._say(Warned(*self.at, kind, text))
        return True
