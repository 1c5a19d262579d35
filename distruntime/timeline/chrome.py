"""Chrome's format of traces: a JSON file of events, which Perfetto and chrome://tracing show."""

from __future__ import annotations

import gzip
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..errors import UsageError

# A value of JSON.
Json = object
Event = dict[str, Json]
# The file says by this that it is a trace of ours, and in which form.
MARK, FORM = "distruntime", 1


class Events:
    """The events of a trace. Times are in nanoseconds since it began, and the file has microseconds."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self._threads = self._flows = 0

    def process(self, pid: int, name: str) -> None:
        """Name a process, and show the processes in the order of their numbers."""
        self._about(pid, 0, "process_name", {"name": name})
        self._about(pid, 0, "process_sort_index", {"sort_index": pid})

    def thread(self, pid: int, name: str) -> int:
        """Return the number of a new thread of a process, which is shown below those before it."""
        self._threads += 1
        self._about(pid, self._threads, "thread_name", {"name": name})
        self._about(pid, self._threads, "thread_sort_index", {"sort_index": self._threads})
        return self._threads

    def _about(self, pid: int, tid: int, what: str, args: Mapping[str, Json]) -> None:
        self.all.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args})

    def slice(
        self, pid: int, tid: int, name: str, kind: str, began: int, ended: int, args: Mapping[str, Json]
    ) -> None:
        """Add what lasted from one time to another."""
        began = max(0, began)
        self.all.append(
            {
                "ph": "X",
                "name": name,
                "cat": kind,
                "pid": pid,
                "tid": tid,
                "ts": _micro(began),
                "dur": _micro(max(0, ended - began)),
                "args": args,
            }
        )

    def instant(self, pid: int, name: str, at: int, args: Mapping[str, Json]) -> None:
        """Add what happened at one time to a process."""
        event = {"ph": "i", "s": "p", "name": name, "cat": "note", "pid": pid, "tid": 0, "ts": _micro(at)}
        self.all.append({**event, "args": args})

    def flow(self, name: str, stops: Iterable[tuple[int, int, int]]) -> None:
        """Add arrows from slice to slice: each stop is a process, a thread, and a time within the slice."""
        self._flows += 1
        whole = [*stops]
        for k, (pid, tid, at) in enumerate(whole):
            step = "s" if k == 0 else "f" if k == len(whole) - 1 else "t"
            event: Event = {"ph": step, "id": self._flows, "name": name, "cat": "wire", "pid": pid}
            event.update(tid=tid, ts=_micro(max(0, at)), **({"bp": "e"} if step == "f" else {}))
            self.all.append(event)


def _micro(nanoseconds: int) -> float:
    return round(nanoseconds / 1000, 3)


def checked(path: str | os.PathLike[str]) -> Path:
    """Return the file that a trace is to be written to; raise `UsageError` where that cannot be."""
    found = Path(path)
    if not found.name.endswith((".json", ".json.gz")):
        raise UsageError(f'got the file {str(path)!r}, expected a name that ends in ".json" or ".json.gz"')
    if not found.parent.is_dir() or found.is_dir():
        raise UsageError(
            f"the trace cannot be written to {str(path)!r}: "
            + ("that is a folder" if found.is_dir() else f"there is no folder {str(found.parent)!r}. Make it")
        )
    return found


def write(path: Path, events: Iterable[Event], about: Mapping[str, Json]) -> None:
    """Write a file. It appears whole, or not at all."""
    draft = path.with_name(f".{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        with _opened(draft, "wt", path.name) as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ')
            file.write(json.dumps({MARK: FORM, **about}))
            file.write(', "traceEvents": [\n')
            before = ""
            for event in events:
                file.write(before + json.dumps(event))
                before = ",\n"
            file.write("\n]}\n")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> tuple[list[Event], dict[str, Json]]:
    """Return the events of a trace, and what it says of itself.

    Raise `UsageError` where the file is no trace of this package's.
    """
    found = Path(path)
    try:
        with _opened(found, "rt", found.name) as file:
            whole = json.load(file)
    except (OSError, EOFError) as error:
        raise UsageError(f"the trace {str(path)!r} cannot be read: {error}") from None
    except (ValueError, RecursionError):
        whole = None
    about = whole.get("otherData") if isinstance(whole, dict) else None
    if not isinstance(about, dict) or about.get(MARK) != FORM or not isinstance(whole["traceEvents"], list):
        raise UsageError(f"{str(path)!r} is no trace that dr.trace of this version has written")
    return whole["traceEvents"], about


@contextmanager
def _opened(path: Path, mode: str, name: str) -> Iterator[IO[str]]:
    if name.endswith(".gz"):
        with gzip.open(path, mode, encoding="utf-8", compresslevel=5) as packed:
            yield packed  # type: ignore[misc]
    else:
        with open(path, mode[0], encoding="utf-8") as file:
            yield file
