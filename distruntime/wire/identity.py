"""Which process this is, and whose, in words that another process of the same machine can check.

Did it die, or is only the network silent?
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from pathlib import Path

from .messages import Plain


def _read(path: str) -> str:
    try:
        # A process may have a name in any letters.
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _machine() -> str:
    """Return what names this boot of this machine and its process table.

    Nothing where that cannot be known (not Linux).
    """
    boot = _read("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}" if boot else ""
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return when a process has started, so that another one with its number is not taken for it.

    Nothing if it is no more, or a zombie.
    """
    fields = _read(f"/proc/{pid}/stat").rpartition(") ")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def user_name() -> str:
    """Return the name of this process's user, or the number of one that has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # In a container, the user is often a number alone.
        return str(os.getuid())


def vicinity() -> str:
    """Return what is the same for processes of one user that see the same processes and the same files.

    Nothing where that is not known.
    """
    machine = _machine()
    try:
        return f"{machine}:{os.readlink('/proc/self/ns/mnt')}:{os.geteuid()}" if machine else ""
    except OSError:
        return ""


def process(pid: int | None = None) -> list[Plain]:
    """Return a process of this machine as [machine, pid, start]: this one, or the one with that number."""
    number = os.getpid() if pid is None else pid
    return [_machine(), number, _started(number)]


def here(process: Sequence[object]) -> bool:
    """Whether a process is, or was, one of this machine's."""
    return len(process) == 3 and bool(process[0]) and process[0] == _machine()


def has_died(process: Sequence[object]) -> bool:
    """Whether a process is known to be no more.

    False of one of another machine, of which nothing is known.
    """
    return here(process) and isinstance(process[1], int) and _started(process[1]) != process[2]


def out_of_memory_kills() -> int:
    """Return how many processes this machine's kernel has ended because it had no memory left.

    0 where it does not say.
    """
    for line in _read("/proc/vmstat").splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return 0
