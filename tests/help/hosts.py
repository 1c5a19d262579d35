"""Hosts of a cluster in a box: each is a process with a network, a name, mounts and processes of its own.

The kernel ends all that runs on a host with that process, and that process with the one that has made it,
however this ends. So nothing is left after a kill -9: no namespace, no interface, no process and no file.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import router
from processes import ROOT, until
from router import Router

# A host keeps its own files in one of these: a file system in memory, which goes with the host. It takes the
# first that holds neither this checkout nor its Python.
_PLACES = ("/mnt", "/media", "/srv")
_PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
# The first process of a host fetches those that have lost their parents, as init does.
_INIT = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
signal.signal(signal.SIGCHLD, lambda *_: None)
print("up", flush=True)
while True:
    signal.sigwait([signal.SIGCHLD])
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


def unavailable() -> str:
    """Return why there can be no such hosts here; nothing if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "hosts of their own take Linux and root"
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"there is no {program}: apt install {package}"
    tried = subprocess.run([*_unshared(), "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"namespaces cannot be made here: {tried.stderr.strip()}"
    return router.unavailable()


def _unshared() -> list[str]:
    # The kernel ends setpriv, which becomes unshare, with this process, and unshare's child with unshare.
    # A process that is first in its table takes all others of that table with it.
    spaces = ["--net", "--uts", "--ipc", "--pid", "--mount"]
    return ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "--fork", "--kill-child", "--mount-proc"]


def _place() -> str:
    mine = [str(ROOT), sys.prefix, sys.base_prefix]
    return next(path for path in _PLACES if Path(path).is_dir() and not any(m.startswith(path) for m in mine))


@dataclass(frozen=True)
class Interface:
    """An interface of a host: its name, and its addresses with the lengths of their networks."""

    name: str
    addresses: tuple[str, ...]
    mtu: int = 1500
    # False: nothing that is sent through it arrives anywhere, and nothing comes.
    leads: bool = True


class Host:
    """A host. A context manager: nothing of it is left behind.

    Args:
        name: its hostname.
        interfaces: the first one has the default route.
        names: what `/etc/hosts` says there: an address for each name.
        nameservers: the addresses of `/etc/resolv.conf`. Where nobody answers at one, names that are not in
            `/etc/hosts` take long.
        size: so many bytes has the file system of its home and of its temporary folder.
    """

    def __init__(
        self,
        name: str,
        network: Router,
        interfaces: Sequence[Interface],
        names: Mapping[str, Sequence[str]],
        nameservers: Sequence[str] = (),
        size: int = 256 << 20,
    ) -> None:
        self.name, self._place = name, _place()
        self.home, self.temporary = f"{self._place}/home", f"{self._place}/tmp"
        # Whoever enters the process table later must be its child, so the first process is one of Python.
        self._process = subprocess.Popen(
            [*_unshared(), sys.executable, "-I", "-S", "-c", _INIT], stdout=subprocess.PIPE
        )
        self._started: list[subprocess.Popen[bytes]] = []
        try:
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == b"up\n", f"{name} has not come up"
            # This names its process table.
            self._table = os.readlink(f"{self._folder}/pid_for_children")
            for interface in interfaces:
                addresses = [address.partition("/")[0] for address in interface.addresses]
                network.attach(
                    name, f"{self._folder}/net", interface.name, addresses if interface.leads else ()
                )
            self.do(self._settings(interfaces, names, nameservers, size))
        except BaseException:
            self.__exit__(None, None, None)
            raise

    @property
    def _folder(self) -> str:
        return f"/proc/{self._process.pid}/ns"

    @property
    def network(self) -> str:
        """The path of its network namespace."""
        return f"{self._folder}/net"

    def _settings(
        self,
        interfaces: Sequence[Interface],
        names: Mapping[str, Sequence[str]],
        nameservers: Sequence[str],
        size: int,
    ) -> str:
        """Return the shell's lines that make of some namespaces a host."""
        lines = [
            f"echo {self.name} > /proc/sys/kernel/hostname",
            "ip link set lo up",
            f"mount -t tmpfs -o size={size} tmpfs {self._place}",
            "mount -t tmpfs tmpfs /dev/shm",
            f"mkdir {self.home} {self.temporary}",
        ]
        servers = "".join(f"nameserver {address}\n" for address in nameservers)
        table = ["127.0.0.1 localhost\n::1 localhost\n"]
        table += [f"{address} {name}\n" for name, addresses in names.items() for address in addresses]
        lines += [
            # Each has a copy of its own. A mount over one file of it ends where somebody outside replaces
            # that file, as `useradd` does with /etc/passwd. What somebody takes away meanwhile cannot be
            # copied, and is not wanted.
            f"cp -a /etc {self._place}/etc || true",
            # Nothing is written before this has succeeded.
            f"mount --bind {self._place}/etc /etc",
            f"printf %s '{''.join(table)}' > /etc/hosts",
            # Without a name server, whoever asks for another name hears at once that there is none.
            f"rm -f /etc/resolv.conf && printf %s '{servers}' > /etc/resolv.conf",
            # To ssh and sshd, a user's home is what stands here.
            f"sed -i 's|^\\(root:.*:\\)[^:]*:[^:]*$|\\1{self.home}:/bin/sh|' /etc/passwd",
        ]
        for interface in interfaces:
            lines += [
                f"ip addr add {address} dev {interface.name}" + (" nodad" if ":" in address else "")
                for address in interface.addresses
            ]
            lines += [f"ip link set {interface.name} mtu {interface.mtu} txqueuelen 2000 up"]
        families = {6 if ":" in address else 4 for address in interfaces[0].addresses}
        lines += [f"ip -{family} route add default dev {interfaces[0].name}" for family in sorted(families)]
        return "set -e\n" + "\n".join(lines)

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        for process in self._started:
            # It is nsenter, which is still there where it stands still with what it has started.
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs a command here."""
        spaces = {"net": "net", "uts": "uts", "ipc": "ipc", "mount": "mnt", "pid": "pid_for_children"}
        inside = [f"--{option}={self._folder}/{file}" for option, file in spaces.items()]
        # This process stays outside of the process table, and may stand still. It ends with this one, too.
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", *inside, "--", *words]

    def do(self, script: str) -> str:
        """Run a shell's script here; return what it prints, and fail if it fails."""
        done = subprocess.run(self.command(["sh", "-c", script]), capture_output=True, text=True)
        assert done.returncode == 0, f"{self.name}: {done.stderr}"
        return done.stdout

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | int, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process here. What it prints goes to the log; `options` are those of Popen."""
        own = {"HOME": self.home, "TMPDIR": self.temporary}
        mine = {
            name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "DISTRUNTIME_"))
        }
        process = subprocess.Popen(
            self.command(words),
            **{"stdout": log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, **options},
            env={**mine, **own, **environment},
            cwd=ROOT,
        )
        self._started.append(process)
        return process

    def processes(self) -> list[int]:
        """Return the numbers of all processes here, as this process sees them."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                # It has ended meanwhile.
                with suppress(OSError):
                    if os.readlink(entry / "ns" / "pid") == self._table:
                        found.append(int(entry.name))
        return found

    def stop(self) -> None:
        """Hold every process still."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let every process run again."""
        self._signal(signal.SIGCONT)
        # It stands still with what it has started there.
        for process in self._started:
            process.send_signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        # One that was forked meanwhile is seen the second time.
        for _ in range(2):
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def vanish(self) -> None:
        """End the host at once, as where its power is cut. Say before that nothing comes from it any more."""
        self._process.kill()
        until(lambda: not self.processes())
