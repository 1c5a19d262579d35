"""File systems of a few MB, for tests in which a disk is full. Only a process that was started by
`COMMAND` and what it starts see them, and they go with these.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

# It runs a command with mounts of its own.
COMMAND = ("unshare", "--mount")
_FILLER = "filler"


def unavailable() -> str:
    """Return why there can be none here; nothing if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "file systems of a few MB take Linux and root"
    tried = subprocess.run([*COMMAND, "true"], capture_output=True, text=True)
    return f"mounts of one's own cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


def mount(path: Path, size: int = 8 << 20) -> None:
    """Make a folder a file system of so many bytes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)


def fill(path: Path) -> None:
    """Write until nothing fits any more."""
    descriptor = os.open(path / _FILLER, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        while True:
            os.write(descriptor, bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    finally:
        os.close(descriptor)


def empty(path: Path) -> None:
    """Make room again."""
    (path / _FILLER).unlink()
