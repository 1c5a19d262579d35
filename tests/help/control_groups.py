"""Control groups of so much memory, or of no thread more: the kernel kills what takes more memory, as where a
machine's is out, and starts no thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Each has the folder of version 1 or 2, the file that sets the limit, and what limits memory and swap
# together, where there is that.
_KINDS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"),
)


def unavailable() -> str:
    """Return why there can be none here; nothing if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "control groups take Linux and root"
    try:
        with memory(64 << 20):
            return ""
    except OSError as error:
        return f"control groups cannot be made here: {error}"


@contextmanager
def memory(nbytes: int) -> Iterator[Path]:
    """Make a control group of so many bytes; give the file that a process's number is written to."""
    folder, limit, with_swap = next((kind for kind in _KINDS if kind[0].is_dir()), _KINDS[-1])
    swap = nbytes if folder.name == "memory" else 0
    with _group(folder, {limit: str(nbytes), with_swap: str(swap)}) as group:
        yield group / "cgroup.procs"


@contextmanager
def threads() -> Iterator[Path]:
    """Make a control group whose processes may start no thread and no process; give its folder.

    "max" in its `pids.max` lets them.
    """
    folder = Path("/sys/fs/cgroup/pids")
    with _group(folder if folder.is_dir() else folder.parent, {"pids.max": "0"}) as group:
        yield group


@contextmanager
def _group(folder: Path, settings: Mapping[str, str]) -> Iterator[Path]:
    group = folder / f"dr-{os.getpid()}"
    group.mkdir()
    try:
        for name, value in settings.items():
            if (group / name).exists():
                (group / name).write_text(value, encoding="ascii")
        yield group
    finally:
        # Processes that have ended leave it. Whoever still runs goes where its parent is.
        for pid in (group / "cgroup.procs").read_text(encoding="ascii").split():
            (folder / "cgroup.procs").write_text(pid, encoding="ascii")
        group.rmdir()
