"""Where the logs of workers go that are started on this machine, and how long they stay.

$DISTRUNTIME_STATE/logs (or distruntime/logs in the user's state directory) has a folder for each session,
with worker-0.log and so on. They outlive the session, so that one can read what happened.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from .named_sessions import folder, names

# So many folders stay, besides those of sessions that may still run.
_KEPT = 50


def log_folder(session: str, directory: Path) -> Path | None:
    """Return the folder for the logs of a session, after removing old ones; None where none can be made.

    `directory` is the session's own. Its name tells sessions apart that have one name, one after the other.
    """
    logs = folder() / "logs"
    made = logs / f"{session}-{directory.name.rpartition('-')[2]}"
    try:
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_old(logs, made)
    except OSError:
        # The user has no directory that can be written. Then the logs go with the session.
        return None
    return made if os.access(made, os.W_OK) else None


def _remove_old(logs: Path, made: Path) -> None:
    found: list[tuple[float, Path]] = []
    for path in logs.iterdir():
        # Another master of this user's may be removing it at the same time.
        with suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    noted = set(names())
    for _, path in sorted(found, reverse=True)[_KEPT:]:
        if path != made and path.name.rpartition("-")[0] not in noted and not _runs(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _runs(session: str) -> bool:
    """Whether the process that began a session without a name may still be there: its name begins with it."""
    pid = session.partition("-")[0]
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
