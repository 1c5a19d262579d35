"""The ends of workers' logs: read, followed and cut.

Of a worker behind another program, such as `srun`, this machine has the log. The worker cannot cut that.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import final

# A log of more bytes is cut, and so many stay, as a worker does it that writes its log itself.
_MOST, _KEPT = 64 << 20, 1 << 20
# A line of a log is at most so long where the last ones are looked for.
_LINE = 200
# A worker logs what is of no concern to most people, such as that a session begins.
_ROUTINE = re.compile(rb"^\S+ \S+ INFO ")
# A line that has no end so far is shown after so many bytes.
_LONGEST = 1 << 16
# Where a log was cut, the bytes that were read last tell where to go on.
_KNOWN = 1 << 10


def last_lines(log: Path, count: int) -> str:
    """Return the end of a log, at most `count` lines."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LINE * count))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        return f"({log} cannot be read: {error.strerror})"
    return "\n".join(lines[-count:])


def cut(log: Path, most: int = _MOST, kept: int = _KEPT) -> bool:
    """Leave the last lines alone of a log that has grown large. Return whether it has been cut.

    Whoever writes there appends. A log that is gone is left alone, and so is one on a disk that is full.
    """
    with suppress(OSError):
        size = log.stat().st_size
        if size > most:
            with log.open("r+b") as file:
                file.seek(size - kept)
                last = file.read(kept)
                # What is written between the two calls is lost.
                file.truncate(0)
            with log.open("ab") as file:
                file.write(f"(what was before this was removed: {size >> 20} MiB)\n".encode())
                file.write(last.partition(b"\n")[2])
            return True
    return False


@final
class Tails:
    """The ends of the logs of workers, as they grow.

    Args:
        folder: where the logs are: worker-0.log and so on.
        count: the number of workers.
        routine: whether to show lines of the level INFO, too.
        show: takes each line; standard error is the default.
    """

    def __init__(
        self, folder: Path, count: int, *, routine: bool, show: Callable[[str], None] | None = None
    ) -> None:
        self._files = [folder / f"worker-{k}.log" for k in range(count)]
        # A log that stays may have had lines before.
        self._read = [file.stat().st_size if file.exists() else 0 for file in self._files]
        self._known = [b""] * count
        self._rest = [b""] * count
        self._routine, self._show = routine, show or _to_standard_error

    def look(self, *, last: bool = False) -> None:
        """Show the lines that are new. Return at once. The `last` time a line needs no end."""
        for k in range(len(self._files)):
            self._look(k, last)

    def _look(self, k: int, last: bool) -> None:
        try:
            with self._files[k].open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._read[k]:
                    self._read[k] = self._behind_cut(k, file.read())
                file.seek(self._read[k])
                new = file.read()
        except FileNotFoundError:
            # The worker has not been started so far, or its log is on another machine.
            return
        self._read[k] += len(new)
        self._known[k] = (self._known[k] + new)[-_KNOWN:]
        lines = (self._rest[k] + new).split(b"\n")
        self._rest[k] = lines.pop()
        if self._rest[k] and (last or len(self._rest[k]) > _LONGEST):
            lines.append(self._rest[k])
            self._rest[k] = b""
        for line in lines:
            if self._routine or not _ROUTINE.match(line):
                self._show(f"[worker {k}] {line.decode('utf-8', 'replace')}")

    def _behind_cut(self, k: int, text: bytes) -> int:
        """Return where to go on in a log that was cut."""
        known = self._known[k]
        at = text.rfind(known) if known else -1
        if at >= 0:
            return at + len(known)
        # More was written since than stayed.
        self._rest[k] = b""
        return 0


def _to_standard_error(line: str) -> None:
    # One write for a line: others write there, too.
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
