"""Folders in the temporary folder: each has an owner. Once the owner is dead, the folder goes with the next
start of a session or a worker, or with the end of a session that has started workers.

A folder's owners are the processes that hold a shared lock on it: `flock`, which the kernel lets go of when a
process ends, however it ends. So no number of a process is looked up that another one may have by now. A
sweep removes what it can lock for itself.

Locks tell nothing of another machine that shares the temporary folder. So a folder's name says on which
machine it was made, and at which start of that machine. Of another machine nothing is swept.

This file's text also goes to machines that ssh reaches, so it imports Python's own library alone.
"""

from __future__ import annotations

import atexit
import base64
import fcntl
import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

# A folder that sockets are for has a path of so many characters at most. With a socket's name there may be
# 107, on macOS 103.
_LONGEST = 76
_SHORT = "/tmp"
# What stands in a name for the machine, and for its start.
_MARK = 6
_RANDOM = 8
# A folder that is just being removed has the last word.
_NAME = re.compile(
    rf"distruntime-[a-z]+-([a-z2-7]{{{_MARK}}})([a-z2-7]{{{_MARK}}})-\w{{{_RANDOM}}}(?:\.gone)?", re.ASCII
)

# A folder that other machines see has its marks in this file.
_OWNER = "owner"

# For each folder: the descriptor that holds the lock, the process that has it, and whether the folder goes
# when that process ends.
_held: dict[Path, tuple[int, int, bool]] = {}


def scratch_folder(kind: str, *, sockets: bool = False, outlives: bool = False) -> Path:
    """Return a new folder (mode 0700) that this process owns.

    Args:
        kind: what it is for, in small letters. It stands in the name.
        sockets: whether sockets come into it: then its path is short.
        outlives: whether it stays when this process ends in an orderly way, because others own it, too.
    """
    machine, start = _marks()
    while True:
        base = _base(kind) if sockets else tempfile.gettempdir()
        made = Path(tempfile.mkdtemp(prefix=f"distruntime-{kind}-{machine}{start}-", dir=base))
        # A sweep may have come between, and found a folder without an owner.
        if hold(made, outlives=outlives):
            return made


def hold(folder: Path, *, outlives: bool = True) -> bool:
    """Own a folder of this kind, too, until `let_go` or the end of this process.

    Return whether it is one, and there.
    """
    known = _held.get(folder)
    if known is not None and known[1] == os.getpid():
        return True
    return _NAME.fullmatch(folder.name) is not None and _locked(folder, outlives=outlives)


def _locked(folder: Path, *, outlives: bool) -> bool:
    descriptor = _opened(folder)
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        usable = _is_at(folder, descriptor)
    except BlockingIOError:
        usable = False
    except OSError:
        # This filesystem has no locks. So no sweep gets one, and the folder stays.
        usable = True
    if not usable:
        os.close(descriptor)
        return False
    _held[folder] = descriptor, os.getpid(), not outlives
    return True


def let_go(folder: Path) -> None:
    """Own a folder no more, and leave it to its other owners."""
    descriptor, owner, _ = _held.get(folder, (-1, 0, False))
    if owner == os.getpid():
        del _held[folder]
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Remove a folder, whoever else owns it."""
    _, owner, _ = _held.get(folder, (-1, os.getpid(), False))
    # A process that was forked from the owner is not the owner.
    if owner == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
        let_go(folder)


def lock_of(folder: Path) -> int:
    """Return the descriptor of this process's lock. A child that gets it owns the folder, too."""
    return _held[folder][0]


def remove_own() -> None:
    """Remove the folders that go with this process, as its end does."""
    for folder, (_, owner, goes) in list(_held.items()):
        if goes and owner == os.getpid():
            remove(folder)


def sweep() -> None:
    """Remove the folders of this user whose owners are dead."""
    machine, start = _marks()
    for base in {tempfile.gettempdir(), _SHORT}:
        # There may be no such folder.
        with suppress(OSError):
            for name in os.listdir(base):
                marks = _NAME.fullmatch(name)
                # At an earlier start of this machine, whoever owned it is dead in any case.
                if marks is not None and (marks[2] == start or marks[1] == machine):
                    _remove_if_left(Path(base, name))


def own_shared(folder: Path) -> None:
    """Own a folder with a name of its own, which other machines see, too. It goes with this process.

    A file in it says what stands in the names of other folders.
    """
    if _locked(folder, outlives=False):
        (folder / _OWNER).write_text(" ".join(_marks()), encoding="ascii")


def sweep_shared(base: Path) -> None:
    """Remove the folders in this one whose owners were on this machine, and are dead."""
    machine, start = _marks()
    # There may be no such folder.
    with suppress(OSError):
        for name in os.listdir(base):
            marks = _text(f"{base / name}/{_OWNER}").split()
            if len(marks) == 2 and (marks[1] == start or marks[0] == machine):
                _remove_if_left(base / name)


def _remove_if_left(folder: Path) -> None:
    descriptor = _opened(folder)
    if descriptor is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another sweep may have been faster, and the name may be another folder's by now.
        if _is_at(folder, descriptor):
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        # Somebody owns it, or this filesystem has no locks. Then nobody can tell, and it stays.
        return
    finally:
        os.close(descriptor)


def _opened(folder: Path) -> int | None:
    """Return a descriptor of a folder of this user's. Nothing for a link, a file or another user's folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(descriptor).st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    return None


def _is_at(folder: Path, descriptor: int) -> bool:
    try:
        there, opened = folder.lstat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(there.st_mode) and (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)


def _base(kind: str) -> str:
    """Return the temporary folder, or the system's own if the paths below it would be too long."""
    usual = tempfile.gettempdir()
    longest = len(f"{usual}/distruntime-{kind}-") + 2 * _MARK + 1 + _RANDOM
    return usual if longest <= _LONGEST else _SHORT


@cache
def _marks() -> tuple[str, str]:
    """Return what stands in names for this machine, and for its start."""
    # Where the kernel does not say (not Linux), each process is a start of its own. Nothing is swept there.
    start = _text("/proc/sys/kernel/random/boot_id") or os.urandom(16).hex()
    # An image of a container may have one number on many machines. Containers differ in their names.
    number = _text("/etc/machine-id")
    return _mark(f"{number} {socket.gethostname()}" if number else start), _mark(start)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _mark(text: str) -> str:
    return base64.b32encode(hashlib.sha256(text.encode()).digest())[:_MARK].decode("ascii").lower()


atexit.register(remove_own)
