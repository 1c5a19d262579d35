"""The workers that a session has started: how each has ended, and how they are restarted and stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..log.node import Node
from ..wire.identity import has_died, out_of_memory_kills
from ..wire.scratch import sweep
from .launcher import WorkerProcess
from .timeouts import left_until

log = logging.getLogger("distruntime")

# An error quotes at most so many lines of a crash.
_MOST_WORDS = 12
# Dead workers are started again so often within so many seconds. Without a limit, one that dies at once would
# be started for ever.
_MOST_RESTARTS = 5
_SPELL = 60.0


class LaunchedWorkers(list[WorkerProcess | None]):
    """The workers of a session by node; None stands for one that this process has not started.

    `launch` starts the worker of a node; None: the session's workers are not this process's to start.
    `address` gives the address where the worker of a node listens; "": it dials this process.
    `startable` are the nodes whose workers it starts; None: all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launch: Callable[[int], WorkerProcess] | None = None
        self.address: Callable[[int], str] = lambda number: ""
        self.startable: frozenset[int] | None = None
        self._restarts: list[float] = []
        self._kills = out_of_memory_kills()

    def can_start(self, number: int) -> bool:
        """Whether this process starts the worker of a node."""
        return self.launch is not None and (self.startable is None or number in self.startable)

    def start(self, number: int) -> None:
        """Start the worker of a node, after ending the one that it had. Return at once, but for that end."""
        assert self.launch is not None
        self += [None] * (number + 1 - len(self))
        ended = self[number]
        if ended is not None:
            ended.stop(0)
        self[number] = self.launch(number)

    def may_restart(self, node: Node) -> bool:
        """Count a restart, and return whether it is to be; log a warning where workers died too often."""
        recent = [at for at in self._restarts if at > time.monotonic() - _SPELL]
        if len(recent) >= _MOST_RESTARTS:
            log.warning(
                "%s is not started again: workers died %d times within %.0f s", node, len(recent), _SPELL
            )
            return False
        self._restarts = [*recent, time.monotonic()]
        return True

    def of(self, node: Node) -> WorkerProcess | None:
        """Return the worker of a node, if this process has started it."""
        return self[node.index] if node.index < len(self) else None

    def epitaph(self, node: Node, wait: float = 0.5) -> str | None:
        """Return how a worker has ended; None: it runs, or nobody here can know.

        Block `wait` seconds at most.
        """
        worker = self.of(node)
        if worker is None:
            dead = has_died(node.welcome.process)
            return f"(pid {node.welcome.pid}) died: the process is gone" if dead else None
        deadline = time.monotonic() + wait
        ended = worker.poll()
        while ended is None and time.monotonic() < deadline:
            # The connection closes a moment before the kernel reports the death.
            time.sleep(0.01)
            ended = worker.poll()
        if ended is None:
            return None
        if "signal 9 " in ended and out_of_memory_kills() > self._kills:
            ended += ", by the kernel, which had no memory left (it says so in /proc/vmstat: oom_kill)"
        words = last_words(worker)
        quoted = "; its last lines:\n  " + "\n  ".join(words) + "\n" if words else ""
        how = ended if ended.startswith("exited") else f"exited: {ended}"
        return f"(pid {worker.pid}) {how}{quoted}"

    def stop(self, deadline: float) -> None:
        """Stop all of them together. Block until `deadline` (of `time.monotonic`) at most.

        Workers that are left then are killed. Folders that a killed one has left on this machine are removed.
        """
        started = [worker for worker in self if worker is not None]
        for worker in started:
            worker.terminate()
        for worker in started:
            worker.stop(left_until(deadline))
        # The next start may be long in coming.
        if started:
            sweep()

    def leave(self) -> None:
        """Let all of them run on, with the session that they are for."""
        for worker in self:
            if worker is not None:
                worker.leave()


def last_words(worker: WorkerProcess) -> list[str]:
    """Return what a worker wrote in the end: from where Python says that it is fatal, or else its last lines.

    What a library in C++ says before it ends the process stands in front of that. Of Python's threads only
    the one counts that has crashed, and its frames down to the worker's own: they name the user's function.
    """
    lines = [line for line in worker.last_lines(200).splitlines()]
    lines = [line for line in lines if " INFO " not in line and not line.startswith("Extension modules:")]
    fatal = [k for k, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if not fatal:
        return lines[-5:]
    before, after = lines[max(0, fatal[-1] - 2) : fatal[-1] + 1], lines[fatal[-1] + 1 :]
    crashed = [k for k, line in enumerate(after) if line.startswith("Current thread")]
    stack = after[crashed[0] :] if crashed else after
    ours = [k for k, line in enumerate(stack) if "/distruntime_worker/" in line]
    # A crash of an operator has no frame but the worker's own.
    return [*before, *stack[: max(ours[0], 3) if ours else None]][:_MOST_WORDS]
