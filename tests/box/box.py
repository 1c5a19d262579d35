"""A cluster in a box: hosts on a network, with a daemon on each of the workers' hosts, and a program on the
master's.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scenarios import MASTER, Topology

from distruntime.wire.keys import KeyPair
from hosts import Host, Interface
from processes import PATH, STARTING, until
from router import Router

FOLDER = Path(__file__).parent


class Box:
    """The hosts of a topology, and the workers on them. A context manager; what they print is in a folder."""

    def __init__(self, topology: Topology, logs: Path, variables: Mapping[str, str]) -> None:
        self.topology, self.logs = topology, logs
        self._variables = {"PYTHONPATH": os.pathsep.join(PATH), "OMP_NUM_THREADS": "1", **variables}
        self._stack = ExitStack()
        self.hosts: dict[str, Host] = {}
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Box:
        with ExitStack() as stack:
            self.network = stack.enter_context(Router())
            self._key = KeyPair.generate()
            for name, interfaces in self.topology.hosts.items():
                made = [Interface(*interface) for interface in interfaces]
                names = {**self.topology.names, **self.topology.seen.get(name, {})}
                self.hosts[name] = stack.enter_context(
                    Host(name, self.network, made, names, self.topology.nameservers)
                )
                self._give_key(self.hosts[name])
            for name, address in self.topology.nat.items():
                self.network.translate(name, address)
            self.calm()
            for name in self.topology.workers:
                self.start_worker(name)
            if not self.topology.dial:
                for name in self.topology.workers:
                    self._await_worker(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _give_key(self, host: Host) -> None:
        path = self.logs / f".key-{os.getpid()}"
        self._key.save(path)
        try:
            host.do(
                f"mkdir -p {host.home}/.config/distruntime && cp {path} {host.home}/.config/distruntime/key"
            )
        finally:
            path.unlink()

    def calm(self) -> None:
        """Bring the weather of the topology itself back."""
        self.network.calm()
        for source, target, weather in self.topology.weather:
            self.network.weather(source, target, weather)

    def start_worker(self, name: str) -> None:
        """Start the worker of a host."""
        words = [word.format(name=name) for word in self.topology.worker]
        # The lines of the last one are read again otherwise.
        with (self.logs / f"{name}.log").open("wb") as log:
            self.workers[name] = self.hosts[name].start(
                [sys.executable, "-m", "distruntime_worker", *words], self._variables, log
            )

    def _await_worker(self, name: str) -> None:
        process = self.workers[name]
        until(lambda: "listening on" in self.said(name) or process.poll() is not None, STARTING)
        assert process.poll() is None, f"the worker of {name} has ended:\n{self.said(name)}"

    def said(self, name: str) -> str:
        """Return what a worker has printed."""
        return (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def run(self, options: Mapping[str, object], program: str = "program.py") -> Program:
        """Start a program as the master."""
        begin = {**self.topology.begin, **dict(options.get("begin", {}))}  # type: ignore[call-overload]
        words = json.dumps({**options, "begin": begin})
        command = [sys.executable, str(FOLDER / program), words]
        return Program(self.hosts[MASTER], command, self.logs / "master.log", self._variables)


class Program:
    """The program while it runs, and what it says."""

    def __init__(self, host: Host, command: list[str], log: Path, variables: Mapping[str, str]) -> None:
        with log.open("wb") as errors:
            self._process = host.start(
                command, variables, subprocess.PIPE, stderr=errors, stdin=subprocess.PIPE
            )
        self._rest = b""

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        # Its other end, in the host's own process table, ends with the host at the latest.
        self._process.kill()
        self._process.wait()

    def go_on(self) -> None:
        """Write the line for which it waits."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def lines(self, deadline: float) -> Iterator[dict[str, Any]]:
        """Yield what it says, each with a name and a value, until it ends.

        An empty line comes some times a second. Raise `TimeoutError` at the deadline, by `time.monotonic()`.
        """
        output = self._process.stdout
        assert output is not None
        while time.monotonic() < deadline:
            ready, _, _ = select.select([output], [], [], 0.1)
            if not ready:
                yield {}
                continue
            data = os.read(output.fileno(), 1 << 16)
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                # A warning of a library may stand between.
                if line.startswith(b"{"):
                    yield json.loads(line)
        raise TimeoutError("the program has not ended in time")
