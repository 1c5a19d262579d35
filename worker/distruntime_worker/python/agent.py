"""Torchrun's agent on this worker: it starts the ranks of a script, watches them and starts them again.

The agent is `torch.distributed.run` itself, in a process that the worker's nursery has forked. The master
reads what it prints, sends it signals, and hears its exit code.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import socket
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from distruntime.wire.scratch import remove, scratch_folder
from distruntime.wire.shield import Lock

from . import children
from .children import Child, Nursery, Surroundings, readable

_PIPE = 1 << 16
# An agent that is told to end gives its ranks 30 s. It has so many itself before it is killed.
_ENDING = 45.0
# After a signal, an agent that has had no rank for so many looks is ended, and any other one past the time.
_ALONE, _STEP, _PATIENCE = 20, 0.1, 40.0


class Agent:
    """One agent, from the master's call to its end."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._nursery: Nursery | None = None
        self._child: Child | None = None
        self._folder = self._logs = ""
        self._lock = Lock()

    def __del__(self) -> None:
        self.close()

    def reached_at(self, proposed: str) -> tuple[str, int]:
        """Return where other workers reach this one, and a port that is free there."""
        host = self._around.host(proposed)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind((host, 0))
            port: int = free.getsockname()[1]
            return host, port

    def has(self, path: str) -> bool:
        """Whether there is such a file here."""
        return os.path.isfile(path)

    def unpack(self, packed: bytes) -> str:
        """Put the files of an archive into a folder of this run's own; return its path."""
        self._folder = str(scratch_folder("run"))
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(self._folder, filter="data")
        return self._folder

    def start(
        self, arguments: Sequence[str], variables: Mapping[str, str], directory: str, logs: bool
    ) -> int:
        """Start the agent with torchrun's arguments. Return its number here.

        Where it has no folder for logs, it gets one that goes with it: torchrun's own would stay.
        """
        self._nursery = children.enter()
        environment = {**os.environ, **variables}
        where = directory if os.path.isdir(directory) else self._folder or os.getcwd()
        if logs and "PET_LOG_DIR" not in environment:
            self._logs = str(scratch_folder("run"))
            arguments = ["--log-dir", self._logs, *arguments]
        self._child = self._nursery.fork(["agent", where, *arguments], environment)
        return self._child.number

    def read(self, seconds: float) -> tuple[bytes, int | None]:
        """Return what the agent and its ranks have printed, and its exit code; wait so long for either."""
        child, nursery = self._child, self._nursery
        assert child is not None and nursery is not None
        with self._around.paused():
            until = time.monotonic() + seconds
            while child.output >= 0:
                if not readable([child.output], until - time.monotonic()) or self._around.closed():
                    return b"", None
                data = os.read(child.output, _PIPE)
                if data:
                    return data, None
                # All that could write there has ended.
                os.close(child.output)
                child.output = -1
            while child.code is None and nursery.look(0.05) and time.monotonic() < until:
                pass
        return b"", child.code

    def signal(self, number: int) -> None:
        """Send the agent a signal, unless it has ended."""
        if self._child is not None:
            _tell(self._child, number)

    def close(self) -> None:
        """End the agent and its ranks. Block until they have ended."""
        with self._lock:
            child, nursery, self._child, self._nursery = self._child, self._nursery, None, None
        if child is not None and nursery is not None:
            self._end(child, nursery)
        for folder in filter(None, (self._folder, self._logs)):
            remove(Path(folder))

    def _end(self, child: Child, nursery: Nursery) -> None:
        nursery.look()
        _tell(child, signal.SIGTERM)
        until = time.monotonic() + _ENDING
        while child.code is None and nursery.look(0.05) and time.monotonic() < until:
            # A pipe that is full would keep the agent from ending.
            with suppress(OSError):
                while child.output >= 0 and os.read(child.output, _PIPE):
                    pass
        nursery.end(child)
        children.leave(nursery)


def _tell(child: Child, number: int) -> None:
    # An agent that has ended needs no signal.
    with suppress(OSError):
        child.link.send(bytes([number]))


class _Watch:
    """Gives this agent the signals that the worker sends, and ends it with the worker.

    An agent that waits for the others, in torch's C++, hears of no signal for five minutes. So one without
    ranks is ended here.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        threading.Thread(target=self._run, name="agent-watch", daemon=True).start()

    def _run(self) -> None:
        data = b"?"
        while data:
            data = self._link.recv(1)
            number = data[0] if data else signal.SIGTERM
            if number == signal.SIGKILL:
                self._end(number)
            os.kill(os.getpid(), number)
            threading.Thread(target=self._follow, args=(number,), name="agent-end", daemon=True).start()

    def _follow(self, number: int) -> None:
        """End this process when its ranks have ended, or have not ended for long."""
        until, alone = time.monotonic() + _PATIENCE, 0
        while time.monotonic() < until and alone < _ALONE:
            time.sleep(_STEP)
            alone = 0 if _ranks() else alone + 1
        self._end(number)

    def _end(self, number: int) -> None:
        for pid in _ranks():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        sys.stdout.flush()
        os._exit(128 + number)


def _ranks() -> list[int]:
    """Return the processes that this one has started."""
    found = []
    for task in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
        with suppress(OSError), open(f"/proc/self/task/{task}/children", encoding="utf-8") as file:
            found += [int(word) for word in file.read().split()]
    return found


def main(arguments: Sequence[str]) -> int:
    """Be torchrun, with these arguments after the working directory; return the exit code."""
    link = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _Watch(link)
    os.chdir(arguments[0])
    elastic = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    processes = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    torchrun = importlib.import_module("torch.distributed.run")
    try:
        torchrun.main([*arguments[1:]])
    except elastic.ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    except processes.SignalException as error:
        return 128 + int(error.sigval)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    # Whatever the agent raises is told as Python would tell it.
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
