"""What Ctrl-C must not tear: a shield, under which it waits a moment, and locks that it never leaves taken.

Pyzmq drops the frame that it is handing over when a signal's handler raises.
"""

from __future__ import annotations

import signal
import sys
import threading

# The public function makes enums: without them it takes 0.6 us there and back.
from _signal import signal as set_handler  # type: ignore[import-not-found]

_SIGINT = int(signal.SIGINT)
_MAIN = threading.main_thread().ident


class Shield:
    """A context in which Ctrl-C is noted, and acts when the outermost one ends.

    Python's handlers run in the main thread only.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._struck: list[tuple[object, ...]] = []
        self._handler: object = None

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN:
            if self._depth == 0:
                # It first runs the handlers of signals that have come: what Ctrl-C's raises must find nothing
                # begun.
                self._handler = set_handler(_SIGINT, self._note)
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == _MAIN:
            self._depth -= 1
            if self._depth == 0:
                handler = self._handler
                set_handler(_SIGINT, handler if handler is not None else signal.SIG_DFL)
                if self._struck:
                    struck = self._struck.pop()
                    self._struck.clear()
                    if callable(handler):
                        handler(*struck)

    def _note(self, *struck: object) -> None:
        self._struck.append(struck)


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
