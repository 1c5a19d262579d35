"""Notes of this user's named sessions: a later master learns there which workers a session has."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import ConfigurationError
from ..wire.keys import require_own
from ..wire.scratch import remove

_FORMAT = 1
# A name has at most so many characters, as it is a file's name too.
_LONGEST = 100


@dataclass(frozen=True)
class Entry:
    """A named session: its workers' addresses, and when it began.

    `directory` belongs to workers that were started on this machine; it is empty if there are none.
    """

    name: str
    workers: tuple[str, ...]
    directory: str
    key: str
    insecure: bool
    listen: str
    simulate_cuda: int
    # This is a time of time.time(), only to be shown.
    began: float


def folder() -> Path:
    """Return where entries are: $DISTRUNTIME_STATE, or distruntime in the user's state directory."""
    chosen = os.environ.get("DISTRUNTIME_STATE")
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(chosen) if chosen else Path(base) / "distruntime"


def checked_name(name: object) -> str:
    """Return a session's name; raise `ConfigurationError` for what cannot be one."""
    good = (
        isinstance(name, str)
        and 0 < len(name) <= _LONGEST
        and name[0] not in ".-"
        and all(c.isalnum() or c in "._-" for c in name)
    )
    if not good:
        raise ConfigurationError(
            f"a session's name is made of letters, digits, '.', '_' and '-', {_LONGEST} at most, and begins "
            f"with none of '.-'; got {name!r}"
        )
    assert isinstance(name, str)
    return name


def _path(name: str) -> Path:
    return folder() / "sessions" / f"{name}.json"


def write(entry: Entry) -> None:
    """Note a session, in place of an earlier one of its name; raise `ConfigurationError` if that fails."""
    path, written = _path(entry.name), ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=".", delete=False
        ) as file:
            written = file.name
            json.dump({"format": _FORMAT, **asdict(entry)}, file)
        os.replace(file.name, path)
    except OSError as error:
        with suppress(FileNotFoundError):
            os.unlink(written)
        raise ConfigurationError(
            f"the session {entry.name!r} cannot be noted in {path.parent}: {error.strerror or error}. "
            "Set $DISTRUNTIME_STATE to a directory that can be written"
        ) from error


def read(name: str) -> Entry | None:
    """Return the entry of a session, or None."""
    try:
        require_own(_path(name), "the note of a session")
    except FileNotFoundError:
        return None
    try:
        with _path(name).open(encoding="utf-8") as file:
            fields = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{_path(name)} cannot be read: {error}. Delete it, and name the workers: workers=[...]"
        ) from error
    if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
        raise ConfigurationError(
            f"{_path(name)} is of another version of distruntime. Delete it, and name the workers: "
            "workers=[...]"
        )
    fields["workers"] = tuple(fields["workers"])
    return Entry(**fields)


def delete(name: str) -> None:
    """Drop the entry of a session, if there is one."""
    _path(name).unlink(missing_ok=True)


def drop(entry: Entry) -> None:
    """Drop the entry of a session that has ended, and what its workers on this machine have left."""
    delete(entry.name)
    if entry.directory:
        remove(Path(entry.directory))


def names() -> list[str]:
    """Return the names of the sessions that are noted here."""
    return sorted(path.stem for path in (folder() / "sessions").glob("*.json"))


def now() -> float:
    """Return the time of day that entries show."""
    return time.time()
