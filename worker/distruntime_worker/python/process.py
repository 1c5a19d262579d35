"""What a function may do to the whole process: it forks it, or ends it."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import NoReturn

from distruntime.wire.messages import Goodbye

from .running import abandon, here

log = logging.getLogger("distruntime.worker")

# The last words of a process that a function ends have so many seconds to leave.
_LAST_WORDS = 0.3
# These end a process from outside.
_ENDING = {signal.SIGTERM, signal.SIGINT}
_exit = os._exit


def _in_child() -> None:
    """In a process that was forked: let nothing of it reach the master, and signals end it."""
    by_function = here.call is not None
    abandon()
    if by_function:
        # The worker's own handlers are for the worker: a child of a function ends by these signals.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def _told_exit(status: int) -> NoReturn:
    """`os._exit`, which tells the master whose function ends the worker."""
    call = here.call
    if call is not None:
        text = f"{call.name} called os._exit({status}), which ends the worker: return, or raise"
        log.error("%s", text)
        call.around.send(Goodbye(text))
        time.sleep(_LAST_WORDS)
    _exit(status)


def install_exit() -> None:
    """Have `os._exit` tell of itself."""
    os._exit = _told_exit


def _before_fork() -> None:
    """Keep back what would end a child until it has handlers of its own.

    Python drops a signal that has come to a child before. A pool of processes that is closed at once sends
    one so early, and then waits for the child: one of the first ten pools hung, in each of five runs.
    """
    if here.call is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)


def _after_fork() -> None:
    if here.call is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
