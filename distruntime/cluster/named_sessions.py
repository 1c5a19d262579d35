"""Where this user's named sessions are: which workers each has, for a master that comes after the one that opened it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import ConfigurationError
from ..wire.keys import require_own

_FORMAT = 1
_LONGEST = 100  # characters of a name, which is a file's too


@dataclass(frozen=True)
class Entry:
    """A named session: its workers' addresses, the directory of those that were started on this machine (or nothing), and when it began."""

    name: str
    workers: tuple[str, ...]
    directory: str
    key: str
    insecure: bool
    listen: str
    simulate_cuda: int
    began: float  # time.time(), to be shown only


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
            f"a session's name is made of letters, digits, '.', '_' and '-', {_LONGEST} at most, and begins with none of '.-'; got {name!r}"
        )
    assert isinstance(name, str)
    return name


def _path(name: str) -> Path:
    return folder() / "sessions" / f"{name}.json"


def write(entry: Entry) -> None:
    """Note a session, in place of an earlier one of its name; raise `ConfigurationError` where that cannot be written."""
    path = _path(entry.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
            json.dump({"format": _FORMAT, **asdict(entry)}, file)
        os.replace(file.name, path)
    except OSError as error:
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
            f"{_path(name)} is of another version of distruntime. Delete it, and name the workers: workers=[...]"
        )
    fields["workers"] = tuple(fields["workers"])
    return Entry(**fields)


def forget(name: str) -> None:
    """Drop the entry of a session, if there is one."""
    _path(name).unlink(missing_ok=True)


def known() -> list[str]:
    """Return the names of the sessions that are noted here."""
    return sorted(path.stem for path in (folder() / "sessions").glob("*.json"))


def now() -> float:
    """Return the time of day that entries show."""
    return time.time()
