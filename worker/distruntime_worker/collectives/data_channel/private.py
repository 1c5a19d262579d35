"""A folder of this process's own, for unix sockets that no other user of the machine can reach."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from distruntime.errors import ConfigurationError
from distruntime.wire.identity import has_died, process

# The folder's path may have so many characters. With the socket's name there may be 107, on macOS 103.
_LONGEST = 80
_PREFIX = "distruntime-data-"
# This file says whose folder it is.
_OWNER = "process"

_made: list[Path] = []
_making = threading.Lock()


def private_folder() -> Path:
    """Return the folder (mode 0700), made at the first call. It is removed when the process ends, else by the
    next one of this user's.

    Raise `ConfigurationError` where there can be none.
    """
    with _making:
        if not _made:
            try:
                _made.append(_make())
            except OSError as error:
                raise ConfigurationError(
                    f"no folder for sockets can be made: {error}. Expected one for temporary files that "
                    "this user may write to: set TMPDIR"
                ) from error
            atexit.register(shutil.rmtree, _made[0], ignore_errors=True)
        return _made[0]


def _make() -> Path:
    base = Path(tempfile.gettempdir())
    if len(str(base)) + len(_PREFIX) + 8 > _LONGEST:
        base = Path("/tmp")
    _sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    (folder / _OWNER).write_text(json.dumps(process()))
    return folder


def _sweep(base: Path) -> None:
    """Remove the folders of this user's processes that were killed."""
    for folder in base.glob(f"{_PREFIX}*"):
        # The folder is gone meanwhile, or is another user's, or is not one of ours.
        with suppress(OSError, ValueError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                owner = json.loads((folder / _OWNER).read_text())
                if isinstance(owner, list) and has_died(owner):
                    shutil.rmtree(folder, ignore_errors=True)
