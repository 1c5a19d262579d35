"""A launch: workers, the script that they are for, and what becomes of both.

    distruntime launch --- starts ---> the script, which listens at `Meeting.listen`
                       --- starts ---> workers, which dial `Meeting.master` again and again

The script begins as many sessions as it likes, one after the other: the workers dial again after each. What
starts a worker is a `Launcher`. All of them end with the launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from ..errors import DistruntimeError
from ..session.launcher import Launcher, LaunchSpec, WorkerProcess
from .log_ends import Tails
from .script import Script

# Between two looks at the workers and their logs lie so many seconds.
_LOOK = 0.1
# All workers together have so many seconds to end.
_ENDING = 5.0
# An error quotes so many lines of a worker that has ended.
_LAST = 5


@dataclass(frozen=True)
class Meeting:
    """Where the script and its workers meet.

    Attributes:
        listen: the address at which the script listens.
        master: the address that workers dial.
        key: the file with the key; None: the address needs none.
        count: so many workers there are.
    """

    listen: str
    master: str
    key: Path | None
    count: int

    def variables(self) -> dict[str, str]:
        """Return the variables by which `init_master_worker()` finds the workers."""
        found = {"DISTRUNTIME_LISTEN": self.listen, "DISTRUNTIME_WORLD_SIZE": str(self.count)}
        # A launch within another one has workers of its own.
        found["DISTRUNTIME_WORKERS"] = ""
        return {**found, "DISTRUNTIME_KEY": str(self.key)} if self.key is not None else found


@dataclass
class Job:
    """What a launch is to do.

    Attributes:
        launcher: who starts the workers.
        meeting: where they meet the script.
        spec: what each worker is started with, but for its number.
        restarts: so often a worker that has ended is replaced, over all workers.
        words: the script's program and arguments.
        verbose: whether routine lines of the workers' logs are shown, too.
        say: takes what the launch itself has to say.
        before_limit: what is done at SIGUSR1, by which a scheduler tells that its time is nearly over. The
            script has ended then. None: the script gets that signal.
    """

    launcher: Launcher
    meeting: Meeting
    spec: LaunchSpec
    restarts: int
    words: Sequence[str]
    verbose: bool
    say: Callable[[str], None]
    before_limit: Callable[[], None] | None = None


@final
class Workers:
    """The workers of a launch: started, watched, replaced and ended."""

    def __init__(self, job: Job) -> None:
        self._job, self._left = job, job.restarts
        self._workers: list[WorkerProcess] = []

    def start(self) -> None:
        """Start all of them. Return at once, but for what the launcher takes."""
        for node in range(self._job.meeting.count):
            self._workers.append(self._start(node))

    def _start(self, node: int) -> WorkerProcess:
        return self._job.launcher.start(replace(self._job.spec, node=node))

    def look(self) -> str:
        """Replace the workers that have ended. Return why the launch is to end, or nothing."""
        for node, worker in enumerate(self._workers):
            ended = worker.poll()
            if ended is None:
                continue
            if self._left <= 0:
                limit = f"--max-restarts {self._job.restarts} allows no other in its place"
                return f"worker {node} (pid {worker.pid}) {ended}, and {limit}{_quoted(worker)}"
            self._left -= 1
            self._job.say(
                f"worker {node} (pid {worker.pid}) {ended}. Another one starts in its place, and "
                f"{self._left} more may{_quoted(worker)}"
            )
            worker.stop(0.0)
            self._workers[node] = self._start(node)
        return ""

    def stop(self) -> None:
        """End all of them. Block for some five seconds at most."""
        for worker in self._workers:
            worker.terminate()
        deadline = time.monotonic() + _ENDING
        for worker in self._workers:
            worker.stop(max(0.0, deadline - time.monotonic()))
        self._workers.clear()


def _quoted(worker: WorkerProcess) -> str:
    lines = worker.last_lines(_LAST)
    return "; its last lines:\n  " + lines.replace("\n", "\n  ") if lines else ""


def run(job: Job, environment: Mapping[str, str]) -> int:
    """Start the script and the workers. Block until the script has ended; return its exit code.

    Whatever happens, all of them have ended when this returns. If this process is killed, they end as well.
    """
    workers = Workers(job)
    tails = Tails(job.spec.logs or job.spec.directory, job.meeting.count, routine=job.verbose)
    # The script takes seconds to import torch, and so do the workers: side by side.
    variables = {**environment, **job.meeting.variables()}
    with Script(job.words, variables, watches_time=job.before_limit is not None) as script:
        try:
            workers.start()
            while (code := script.look(_LOOK)) is None:
                tails.look()
                if why := workers.look():
                    job.say(f"{why}\nThe script is ended")
                    script.end()
                    return 1
                if script.warned and job.before_limit is not None:
                    job.say("the time is nearly over: the script gets SIGTERM")
                    code = script.end()
                    job.before_limit()
                    break
            return code
        except DistruntimeError as error:
            job.say(f"{type(error).__name__}: {error}")
            return 1
        finally:
            # Without its workers a script could only wait.
            script.end()
            workers.stop()
            tails.look(last=True)
