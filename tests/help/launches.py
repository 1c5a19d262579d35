"""Launches for tests: `distruntime launch` in a process of its own, and all processes that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from processes import PATH, STARTING, state, until

# Each process below a launch has this variable, with the launch's own value.
_MARK = "TEST_LAUNCH"


def environment(**variables: str) -> dict[str, str]:
    """Return the variables with which a program finds both packages."""
    # The launch may find no scheduler but the test's own.
    foreign = ("SLURM_", "OMPI_", "PMI")
    found = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**found, "PYTHONPATH": os.pathsep.join(PATH), "OMP_NUM_THREADS": "1", **variables}


class Launch:
    """`distruntime launch` with these arguments, or another program. It runs in `folder`, with a state of its
    own.

    Its end kills whatever is left of it.
    """

    def __init__(self, folder: Path, *arguments: str, program: Sequence[str] = (), **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        words = [
            *program,
            *((sys.executable, "-m", "distruntime", "launch") if not program else ()),
            *arguments,
        ]
        self._out, self._err = folder / f"out-{self.mark}", folder / f"err-{self.mark}"
        state_folder = str(folder / "state")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env=environment(**{_MARK: self.mark, "DISTRUNTIME_STATE": state_folder, **variables}),
                start_new_session=True,
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def out(self) -> str:
        """What it has written on standard output."""
        return self._out.read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        """What it has written on standard error."""
        return self._err.read_text(encoding="utf-8")

    def pids(self) -> list[int]:
        """Return the processes of this launch that run, the launch itself too."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if (
                    entry.name.isdigit()
                    and f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                ):
                    found.append(int(entry.name))
        return [pid for pid in found if state(pid) not in ("", "Z")]

    def until_said(self, text: str, times: int = 1) -> None:
        """Block until it has written a text so often; fail if it ends before."""

        def said() -> bool:
            assert self.process.poll() is None or self._count(text) >= times, self.said()
            return self._count(text) >= times

        until(said, STARTING)

    def _count(self, text: str) -> int:
        return (self.out + self.err).count(text)

    def said(self) -> str:
        """Return all that it has written, for a test that fails."""
        return f"exit code {self.process.poll()}\n-- out\n{self.out}\n-- err\n{self.err}"

    def ended(self) -> int:
        """Block until it has ended; return its exit code."""
        return self.process.wait(STARTING)

    def until_nothing_is_left(self) -> None:
        """Block until no process of it runs."""
        until(lambda: not self.pids(), 30.0)
