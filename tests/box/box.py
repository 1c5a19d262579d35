"""A cluster in a box: hosts on a network, with a daemon on each of the workers' hosts, and a program on the
master's.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import services
from scenarios import MASTER, PROGRAM, Topology

from distruntime.wire.keys import KeyPair
from hosts import Host, Interface
from processes import PATH, ROOT, STARTING, until
from router import Router

FOLDER = Path(__file__).parent
# A folder whose owner was killed goes with the next session or launch.
_SWEEP = """
import pathlib, runpy, sys
found = runpy.run_path(sys.argv[1])
found["sweep"]()
found["sweep_shared"](pathlib.Path(sys.argv[2]))
"""
# A worker of an earlier version.
_OLDER = """
import distruntime.wire.messages as messages
messages.PROTOCOL -= 1
from distruntime_worker.cli import main
main()
"""
# These folders of a host, and of what hosts share, are empty where no session runs.
_EMPTY = (
    "find {temporary} /dev/shm {shared}/launch -mindepth 1 -not -path '*torchinductor_*' 2>/dev/null || true"
)


class Box:
    """The hosts of a topology, and the workers on them. A context manager; what they print is in a folder."""

    def __init__(self, topology: Topology, logs: Path, variables: Mapping[str, str]) -> None:
        self.topology, self.logs = topology, logs
        self._variables = {"PYTHONPATH": os.pathsep.join(PATH), "OMP_NUM_THREADS": "1", **variables}
        self._variables |= topology.variables
        self._stack = ExitStack()
        self.hosts: dict[str, Host] = {}
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        # What runs on each host before a program does, and the files there.
        self._processes: dict[str, set[int]] = {}
        self._files: dict[str, set[str]] = {}

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
                key = KeyPair.generate() if self.topology.odd.get(name) == "key" else self._key
                self._give_key(self.hosts[name], key)
            for name, address in self.topology.nat.items():
                self.network.translate(name, address)
            self.calm()
            self._start_services()
            started = self.topology.workers if self.topology.worker else ()
            for name in started:
                self.start_worker(name)
            if not self.topology.dial:
                for name in started:
                    self._await_worker(name)
            self._processes = {name: set(host.processes()) for name, host in self.hosts.items()}
            self._files = {name: self._files_of(host) for name, host in self.hosts.items()}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _give_key(self, host: Host, key: KeyPair) -> None:
        path = self.logs / f".key-{os.getpid()}"
        key.save(path)
        try:
            host.do(
                f"mkdir -p {host.home}/.config/distruntime && cp {path} {host.home}/.config/distruntime/key"
            )
        finally:
            path.unlink()

    def _start_services(self) -> None:
        place = services.Place(self.hosts, self.topology.workers, self.logs, self.topology.ssh)
        for name in self.topology.services:
            self._variables |= services.SERVICES[name].start(place)

    def _files_of(self, host: Host) -> set[str]:
        return set(host.do(_EMPTY.format(temporary=host.temporary, shared=self.logs / "shared")).splitlines())

    def daemon(self, name: str) -> int:
        """Return the number of the worker's process of a host."""
        outside = self.workers[name].pid
        return int(Path(f"/proc/{outside}/task/{outside}/children").read_text(encoding="ascii").split()[0])

    def begun(self, name: str) -> list[int]:
        """Return the processes of a host that have begun since the box was there, but for its worker's."""
        runs = name in self.workers and self.workers[name].poll() is None
        own = self._processes[name] | ({self.daemon(name)} if runs else set())
        return sorted(set(self.hosts[name].processes()) - own)

    def left(self) -> list[str]:
        """Return what a program and its workers have left: processes and files."""
        found = []
        for name, host in self.hosts.items():
            # A host that has vanished has none.
            if host.processes():
                found += [
                    f"{name}: {words}"
                    for pid in self.begun(name)
                    if (words := command(pid)) and not services.is_own(self.topology.services, words)
                ]
                if self._files_of(host) - self._files[name]:
                    scratch = str(ROOT / "distruntime" / "wire" / "scratch.py")
                    words = [sys.executable, "-c", _SWEEP, scratch, str(self.logs / "shared" / "launch")]
                    host.do(f"TMPDIR={host.temporary} {shlex.join(words)}")
                found += [f"{name}: {path}" for path in sorted(self._files_of(host) - self._files[name])]
        return found

    def calm(self) -> None:
        """Bring the weather of the topology itself back."""
        self.network.calm()
        for source, target, weather in self.topology.weather:
            self.network.weather(source, target, weather)

    def start_worker(self, name: str) -> None:
        """Start the worker of a host."""
        words = [word.format(name=name) for word in self.topology.worker]
        old = self.topology.odd.get(name) == "protocol"
        program = ["-c", _OLDER] if old else ["-m", "distruntime_worker"]
        # The lines of the last one are read again otherwise.
        with (self.logs / f"{name}.log").open("wb") as log:
            self.workers[name] = self.hosts[name].start(
                [sys.executable, *program, *words], self._variables, log
            )

    def _await_worker(self, name: str) -> None:
        process = self.workers[name]
        until(lambda: "listening on" in self.said(name) or process.poll() is not None, STARTING)
        assert process.poll() is None, f"the worker of {name} has ended:\n{self.said(name)}"

    def said(self, name: str) -> str:
        """Return what a worker has printed."""
        return (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def run(self, options: Mapping[str, object], program: str = PROGRAM, logs: Path | None = None) -> Program:
        """Start a program as the master, and what the topology has beside it. Another folder is of another
        master's log.
        """
        begin = {**self.topology.begin, **dict(options.get("begin", {}))}  # type: ignore[call-overload]
        words = json.dumps({**options, "begin": begin})
        commands = [[*self.topology.launch, str(FOLDER / program), words]]
        commands += [list(self.topology.beside)] if self.topology.beside else []
        for command in commands:
            command[:] = [sys.executable if word == "{python}" else word for word in command]
        return Program(self.hosts[MASTER], commands, logs or self.logs, self._variables)


def command(pid: int) -> str:
    """Return the command line of a process; nothing if it has ended."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        return words.strip() or Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    return ""


class Program:
    """The program while it runs, and what it says. A context manager."""

    def __init__(
        self, host: Host, commands: Sequence[list[str]], logs: Path, variables: Mapping[str, str]
    ) -> None:
        self._host = host
        # A launcher that reads from a terminal moves its processes between groups of it, as a shell does.
        self._terminal, inside = os.openpty()
        settings = termios.tcgetattr(inside)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(inside, termios.TCSANOW, settings)
        with (logs / "master.log").open("wb") as errors, os.fdopen(inside, "rb") as stdin:
            words = ["setsid", "--ctty", *commands[0]]
            self._process = host.start(words, variables, subprocess.PIPE, stderr=errors, stdin=stdin)
        self._beside = []
        for command in commands[1:]:
            with (logs / "beside.log").open("wb") as log:
                self._beside.append(host.start(command, variables, log))
        self._rest = b""

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        # Its other end, in the host's own process table, ends with the host at the latest.
        for process in (self._process, *self._beside):
            process.kill()
            process.wait()
        os.close(self._terminal)

    def go_on(self) -> None:
        """Write the line for which it waits."""
        os.write(self._terminal, b"\n")

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self._terminal, b"\x03")

    def kill(self) -> None:
        """Kill its first process of Python: the launch, where there is one, and the program elsewhere."""
        (first,) = (
            Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
            .read_text(encoding="ascii")
            .split()
        )
        session = os.getsid(int(first))
        mine = [pid for pid in self._host.processes() if os.getsid(pid) == session]
        os.kill(min(pid for pid in mine if command(pid).startswith(sys.executable)), signal.SIGKILL)

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
                # A launcher may say whose line it is, and a warning of a library may stand between.
                said = re.sub(rb"^(\[[\w ]+\]:? ?)+", b"", line)
                if said.startswith(b"{"):
                    yield json.loads(said)
        raise TimeoutError("the program has not ended in time")


class Masters:
    """Several masters at a time, and what they say. Each has a log of its own. A context manager."""

    def __init__(self, box: Box, program: str, options: Mapping[str, Mapping[str, object]]) -> None:
        self._stack = ExitStack()
        self.lines: dict[str, Iterator[dict[str, Any]]] = {}
        self.programs: dict[str, Program] = {}
        # When each was heard last, when the piece of work began that it is at, and what that is.
        self.heard: dict[str, float] = {}
        self.began: dict[str, float] = {}
        self.at: dict[str, str] = {}
        self.log = self._stack.enter_context((box.logs / "said.txt").open("w", encoding="utf-8"))
        for name, own in options.items():
            (box.logs / name).mkdir()
            self.programs[name] = self._stack.enter_context(box.run(own, program, box.logs / name))
            self.lines[name] = self.programs[name].lines(math.inf)
            self.heard[name] = self.began[name] = time.monotonic()

    def __enter__(self) -> Masters:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def poll(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what they have said by now; wait for it a tenth of a second. Who has ended is no longer in
        `lines`.
        """
        for name in list(self.lines):
            line = next(self.lines[name], None)
            if line is None:
                del self.lines[name]
                continue
            if line:
                self.heard[name] = time.monotonic()
                self.note(f"{name} {line}")
            if "at" in line:
                self.began[name], self.at[name] = time.monotonic(), f"{line['at']} {line['seed']}"
            yield name, line

    def note(self, words: str) -> None:
        """Write a line into the log of what they say."""
        self.log.write(f"{time.monotonic():.2f} {words}\n")
        self.log.flush()

    def silent(self, seconds: float) -> str:
        """Return who has said nothing for so long, or nothing."""
        late = [name for name in self.lines if time.monotonic() - self.heard[name] > seconds]
        return ", ".join(f"{name} hangs at {self.at.get(name, 'its beginning')}" for name in late)
