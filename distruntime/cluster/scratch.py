"""Folders for workers on this machine: their sockets and logs, in a directory that only this user can enter.

A master removes its folder when its session ends. One that was killed cannot, so the next one that makes a
folder removes what is left: folders of this user's whose master has died, where nobody listens any more.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ..wire.identity import has_died, process

_PREFIX = "distruntime-"
_OWNER = "owner.json"
# A folder counts as left when nothing has changed there for so many seconds: workers that are just starting
# do not listen yet.
_LEAST_AGE = 600.0


def scratch_folder() -> Path:
    """Return a new folder (mode 0700), after removing those that killed masters of this user have left."""
    made = Path(tempfile.mkdtemp(prefix=_PREFIX))
    (made / _OWNER).write_text(json.dumps(process()), encoding="ascii")
    for folder in made.parent.glob(f"{_PREFIX}*"):
        if folder != made and _is_left(folder):
            # Another master of this user's may be removing it at the same time.
            shutil.rmtree(folder, ignore_errors=True)
    return made


def _is_left(folder: Path) -> bool:
    try:
        status = folder.lstat()
        if status.st_uid != os.getuid() or time.time() - status.st_mtime < _LEAST_AGE:
            return False
        with (folder / _OWNER).open(encoding="ascii") as file:
            owner = json.load(file)
        return (
            isinstance(owner, list)
            and has_died(owner)
            and not any(_listens(path) for path in folder.iterdir() if path.is_socket())
        )
    except (OSError, ValueError):
        # This is no folder of a master's, or one that is just going.
        return False


def _listens(path: Path) -> bool:
    """Whether a worker of a named session, whose master has gone, accepts connections at a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        with suppress(ConnectionRefusedError, FileNotFoundError):
            probe.connect(str(path))
            return True
    return False
