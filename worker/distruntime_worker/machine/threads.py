"""Threads, of which a system allows so many: what is said where there is no room for one more."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from distruntime.errors import ConfigurationError


def begin(work: Callable[[], object], name: str) -> None:
    """Run `work` in a thread of its own.

    Raise `ConfigurationError` where the system has no room for one more.
    """
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        raise ConfigurationError(no_room(name)) from error


def no_room(what: str) -> str:
    """Return the words that say that a thread cannot be started."""
    return (
        f"this worker (pid {os.getpid()}) has {threading.active_count()} threads and cannot start one more "
        f"({what}): the limit of its user's processes and threads (`ulimit -u`), of its control group "
        "(`pids.max`) or of its memory is reached. Everything else goes on; raise that, or end something "
        "there"
    )
