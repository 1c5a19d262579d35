"""What Ctrl-C must not tear: a shield, under which it waits a moment, and locks that it never leaves taken.

So it is with other signals whose handlers may raise, as a timeout's does. Pyzmq drops the frame that it is
handing over when a signal's handler raises.
"""

from __future__ import annotations

import signal
import sys
import threading

# The public functions make enums: without them it takes 0.6 us there and back.
from _signal import getsignal as handler_of  # type: ignore[import-not-found]
from _signal import signal as set_handler
from threading import get_ident

_SIGINT = int(signal.SIGINT)
# Users end what takes too long, or a whole job, by these. A profiler's signals are not among them: its
# handler looks at where it strikes.
_OTHERS = _ALRM, _TERM, _USR1, _USR2 = tuple(
    map(int, (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
)
_MAIN = threading.main_thread().ident


class Shield:
    """A context in which Ctrl-C and other signals are noted. They act when the outermost one ends.

    Python's handlers run in the main thread only.
    """

    def __init__(self) -> None:
        self._depth = 0
        # Each signal that has come stands here with what its handler takes.
        self._struck: dict[int, tuple[object, ...]] = {}
        # This is Ctrl-C's handler, where no other signal has one in Python.
        self._handler: object = None
        # Otherwise all of them stand here while this object's stands in their place.
        self._covered: list[tuple[int, object]] = []
        # It stands in their place. To make it each time takes 30 ns.
        self._noting = self._note

    def __enter__(self) -> None:
        if get_ident() == _MAIN:
            if not self._depth:
                # SIG_DFL is 0. One by one they take half of what a loop takes.
                if (
                    handler_of(_ALRM)
                    or handler_of(_TERM)
                    or handler_of(_USR1)
                    or handler_of(_USR2)
                    or self._covered
                ):
                    self._look_at_others()
                # Each call that sets a handler first runs those of signals that have come: what they raise
                # must find nothing begun.
                if not self._covered:
                    self._handler = set_handler(_SIGINT, self._noting)
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() == _MAIN:
            if self._depth > 1:
                self._depth -= 1
                return
            if self._covered:
                self._uncover()
            else:
                self._depth = 0
                handler = self._handler
                set_handler(_SIGINT, handler if handler is not None else signal.SIG_DFL)
            if self._struck:
                self._act()

    def _look_at_others(self) -> None:
        """Stand in the place of the other handlers too, if there are any."""
        if self._covered:
            self._uncover()
        pairs = ((number, handler_of(number)) for number in _OTHERS)
        covered: list[tuple[int, object]] = [pair for pair in pairs if callable(pair[1])]
        if not covered:
            return
        covered.append((_SIGINT, handler_of(_SIGINT)))
        try:
            self._covered = covered
            for number, _ in covered:
                set_handler(number, self._noting)
        except BaseException:
            self._uncover()
            raise

    def _uncover(self) -> None:
        """Put the handlers back. What one of them raises meanwhile is raised when all are there."""
        raised = None
        while self._covered:
            try:
                while self._covered:
                    number, handler = self._covered[-1]
                    # Python knows nothing of a handler that it has not set.
                    set_handler(number, handler if handler is not None else signal.SIG_DFL)
                    self._covered.pop()
            except BaseException as error:
                raised = error
        # No call stands between this and the last handler's return.
        self._depth = 0
        if raised is not None:
            raise raised

    def _act(self) -> None:
        """Let the signals that have come act. One may raise, and the others act all the same."""
        try:
            number, struck = self._struck.popitem()
        except KeyError:
            # Another signal's handler has run just before, and has let it act in a shield of its own.
            return
        try:
            handler = handler_of(number)
            if callable(handler):
                handler(*struck)
            else:
                signal.raise_signal(number)
        finally:
            if self._struck:
                self._act()

    def _note(self, number: int, frame: object) -> None:
        self._struck[number] = number, frame


shield = Shield()


class InstantLock:
    """A lock that `with` takes right before its block, so that nothing can be raised in between.

    Python looks for signals, and for exceptions from other threads, behind each call. From Python 3.14 on,
    `with` takes a lock by a call. What is raised behind that call finds the lock taken and the block not
    entered, and nobody ever lets go. Python does not look behind an instruction that asks whether something
    is true.

    A hook in Python's frames undoes this, as `__enter__` is a call from C then: Dynamo's does, while a
    function of `torch.compile` runs what it has not compiled. On Python 3.14, 40% of the exceptions that came
    to a thread at a lock left it taken under the hook, where Python's own locks left 2%.
    """

    # `with` and `not` look these up in the class. A slot gives them what this object keeps there.
    __slots__ = ("__bool__", "__exit__", "acquire", "locked", "release")

    def __init__(self) -> None:
        lock = threading.Lock()
        self.acquire = self.__bool__ = lock.acquire
        self.release, self.locked, self.__exit__ = lock.release, lock.locked, lock.__exit__

    def __enter__(self) -> bool:
        return not self


class InstantRLock:
    """As `InstantLock`; a thread that has it may take it again. A `Condition` can stand on it."""

    # `Condition` asks for the last four. Before Python 3.14, an RLock does not say whether it is taken.
    _FOR_CONDITIONS = ("_acquire_restore", "_is_owned", "_release_save", "locked")
    __slots__ = ("__bool__", "__exit__", "acquire", "release", *_FOR_CONDITIONS)

    def __init__(self) -> None:
        lock = threading.RLock()
        self.acquire = self.__bool__ = lock.acquire
        self.release, self.__exit__ = lock.release, lock.__exit__
        for name in self._FOR_CONDITIONS:
            if hasattr(lock, name):
                setattr(self, name, getattr(lock, name))

    def __enter__(self) -> bool:
        return not self


# Before Python 3.14, its own locks are as good, and quicker by 50 ns.
if sys.version_info >= (3, 14):
    Lock = InstantLock
    RLock = InstantRLock
else:
    Lock = threading.Lock
    RLock = threading.RLock
