"""A folder of this process's own, for unix sockets that no other user of the machine can reach."""

from __future__ import annotations

from pathlib import Path

from distruntime.errors import ConfigurationError
from distruntime.wire.scratch import scratch_folder
from distruntime.wire.shield import Lock

_made: list[Path] = []
_making = Lock()


def private_folder() -> Path:
    """Return the folder (mode 0700), made at the first call. It is removed when the process ends.

    Raise `ConfigurationError` where there can be none.
    """
    with _making:
        if not _made:
            try:
                _made.append(scratch_folder("data", sockets=True))
            except OSError as error:
                raise ConfigurationError(
                    f"no folder for sockets can be made: {error}. Expected one for temporary files that "
                    "this user may write to: set TMPDIR"
                ) from error
        return _made[0]
