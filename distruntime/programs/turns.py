"""Threads that call one program: one call at a time is replayed or recorded.

A function of the user's may wait for another thread, and that one for the program. So no lock is held while
it runs, and who waits for a recording does so for a while only. The while begins anew with each recording:
one that ends was progress.
"""

from __future__ import annotations

import threading

from ..wire.shield import RLock

# So many seconds a call waits for one recording of another thread. Then it runs plainly.
PATIENCE = 10.0


class Recorder:
    """A call that is being recorded, or wants to be."""

    def __init__(self) -> None:
        self._thread, self._over = threading.get_ident(), threading.Event()

    def waits_for(self, other: Recorder) -> bool:
        """Wait until another thread's recording is over; return False if it is of this thread, or takes too
        long.
        """
        return other._thread != self._thread and other._over.wait(PATIENCE)

    def end(self) -> None:
        """Let the others go on."""
        self._over.set()


class Turns:
    """Whose turn it is."""

    def __init__(self) -> None:
        # It is held while a call is looked up and replayed. A signal handler may call the program meanwhile.
        self.lock = RLock()
        # The call that is being recorded. Only who holds the lock sets it.
        self.recorder: Recorder | None = None

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        # A copy of a program has its own.
        return Turns, ()
