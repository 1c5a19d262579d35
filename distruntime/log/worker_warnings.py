"""What workers' kernels have warned of, shown as warnings of this process.

The thread that reads the socket notes a warning, and a thread of the user's shows it when it has waited: the
user's filters may raise it, and what shows it is the user's code.
"""

from __future__ import annotations

import builtins
import warnings

from ..wire.shield import RLock
from ..wire.units import printable
from .line import Line, line_number

# So many are noted until somebody waits, with so many characters of each.
_MOST, _MOST_TEXT = 100, 2000
# Python forgets what it has shown of a file where that is more.
_MOST_SHOWN = 1000
# What a worker may name.
_KNOWN = {
    name: cls
    for name, cls in vars(builtins).items()
    if isinstance(cls, type) and issubclass(cls, Warning) and cls is not Warning
}
_UNKNOWN = "<unknown>"


class WorkerWarnings:
    """The warnings of one session's workers that nobody has been shown."""

    def __init__(self) -> None:
        # A signal's handler may read while this thread holds it.
        self._lock = RLock()
        # By class, text, file and line, in the order in which they came.
        self._noted: dict[tuple[type[Warning], str, str, int], None] = {}
        # Python notes here what it has shown, for each file by itself.
        self._shown: dict[str, dict[str | tuple[str, type[Warning], int], int]] = {}

    def note(self, kind: str, text: str, line: Line | None) -> None:
        """Note what a worker has said; drop it where too much is noted (whoever reads the socket)."""
        name, number = _UNKNOWN, 0
        if line is not None and line[1] is not None:
            name, number = line[1].code.co_filename, line_number(line[1].code, line[2])
        with self._lock:
            if len(self._noted) < _MOST:
                cls = _KNOWN.get(kind, UserWarning)
                self._noted[cls, printable(text[:_MOST_TEXT]), name, number] = None

    def show(self) -> None:
        """Show what is noted, as this process's filters say; raise it if they say so (a user's thread)."""
        while self._noted:
            with self._lock:
                key = next(iter(self._noted), None)
                if key is None:
                    return
                self._noted.pop(key, None)
            cls, text, name, number = key
            shown = self._shown.setdefault(name, {})
            if len(shown) > _MOST_SHOWN:
                shown.clear()
            warnings.warn_explicit(text, cls, name, number, registry=shown)
