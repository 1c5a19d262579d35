"""Machines that `ssh` reaches, for tests: an sshd of the test's own for a second user.

It is on a port of loopback, or in a network namespace of its own.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from processes import ROOT, until

SSHD = "/usr/sbin/sshd"
# Tests of one process share the user, and those of several processes do not.
USER = f"dr-ssh-{os.getpid()}"


def unavailable() -> str:
    """Return why there can be no such machine here; nothing if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "a second user takes Linux and root"
    for program, package in ((SSHD, "openssh-server"), ("ssh", "openssh-client"), ("useradd", "passwd")):
        if shutil.which(program) is None:
            return f"there is no {program}: apt install {package}"
    return "" if _interpreter() else "there is no Python that a second user can run, with this version"


def _interpreter() -> str:
    """Return a Python of this version that another user can run; nothing if there is none."""
    version = ".".join(map(str, sys.version_info[:2]))
    for path in (
        os.path.realpath(sys.executable),
        f"/usr/bin/python{version}",
        f"/usr/local/bin/python{version}",
    ):
        parents = [Path(path), *Path(path).parents]
        if Path(path).is_file() and all(parent.stat().st_mode & 0o005 == 0o005 for parent in parents):
            return path
    return ""


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _with_users(*words: str) -> None:
    """Run a command that changes the list of users. Two test processes take turns."""
    # The folder itself is the lock, so that no file of it is left.
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        subprocess.run(words, check=True, capture_output=True)
    finally:
        os.close(folder)


class Account:
    """A second user with a home of its own, which goes with it, and a client that knows its key.

    A context manager. `bin` has the `ssh` that tests put first in PATH.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dr-sshd-"))
        self.home, self.bin = self.folder / "home", self.folder / "bin"
        self.uid = 0
        self.machines: list[Machine] = []

    def __enter__(self) -> Account:
        self.folder.chmod(0o755)
        self.bin.mkdir()
        _with_users("useradd", "-m", "-d", str(self.home), "-s", "/bin/sh", USER)
        # A locked account is not let in.
        _with_users("usermod", "-p", "*", USER)
        self.uid = pwd.getpwnam(USER).pw_uid
        for name in ("key", "host_key"):
            self._run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        shutil.copy(self.folder / "key.pub", self.folder / "authorized")
        self.python("python", [str(ROOT), str(ROOT / "worker"), *packages()])
        self.config = self.folder / "ssh_config"
        self.config.touch()
        self.known = self.folder / "known_hosts"
        self.known.touch()
        # For a jump host ssh starts itself with this path, and puts no quotes around it. So it has no blank.
        here, name = shlex.quote(str(self.folder)), self.config.name
        self._program("ssh", f'cd {here} && exec /usr/bin/ssh -F {name} "$@"')
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            machine.stop()
        # Who fails a test leaves processes, and userdel refuses a user that has some.
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        until(lambda: not self.processes())
        for path in self.left():
            shutil.rmtree(path, ignore_errors=True)
        _with_users("userdel", USER)
        shutil.rmtree(self.folder)

    def _run(self, *words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    def _program(self, name: str, text: str, folder: Path | None = None) -> Path:
        path = (folder or self.bin) / name
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    def python(self, name: str, paths: Sequence[str]) -> Path:
        """Make a Python for the user that finds packages in these folders."""
        where, interpreter = shlex.quote(":".join(paths)), shlex.quote(_interpreter())
        text = f'PYTHONPATH={where} OMP_NUM_THREADS=1 exec {interpreter} "$@"'
        return self._program(name, text, self.folder)

    def program(self, name: str, text: str) -> Path:
        """Make a program for the user: a shell's script."""
        return self._program(name, text, self.folder)

    def package(self, name: str, version: str) -> Path:
        """Make a folder with a package that has nothing but a version; return the folder."""
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / name
        folder.mkdir()
        folder.parent.chmod(0o755)
        (folder / "__init__.py").touch()
        (folder / "version.py").write_text(f'__version__ = "{version}"\n', encoding="utf-8")
        return folder.parent

    def processes(self) -> list[int]:
        """Return the user's processes. What has ended and was not fetched does not count."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    state = (entry / "stat").read_text(encoding="utf-8").rpartition(") ")[2][:1]
                    if entry.stat().st_uid == self.uid and state not in "ZX":
                        found.append(int(entry.name))
        return found

    def left(self) -> list[Path]:
        """Return the user's files outside of its home, and what a session leaves in it."""
        mine = [path for path in Path(tempfile.gettempdir()).iterdir() if _uid(path) == self.uid]
        return [*mine, *(path for path in self.home.rglob("*") if "distruntime" in path.name)]

    def machine(self, name: str, namespace: str = "", host: str = "127.0.0.1", settings: str = "") -> Machine:
        """Start an sshd, which `ssh NAME` reaches."""
        made = Machine(self, name, namespace, host, settings)
        self.machines.append(made)
        return made

    def ready_machine(self, name: str) -> Machine:
        """Start an sshd, behind which `python3` has all that a worker needs: the plain address is enough."""
        folder = self.folder / "installed"
        folder.mkdir(exist_ok=True)
        shutil.copy(self.folder / "python", folder / "python3")
        return self.machine(name, settings=f'SetEnv "PATH={folder}:/usr/bin:/bin"')


def _uid(path: Path) -> int:
    try:
        return path.lstat().st_uid
    except OSError:
        return -1


def packages() -> list[str]:
    """Return where this process has its packages from."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


class Machine:
    """An sshd, and the entry of the client's config that leads to it."""

    def __init__(self, account: Account, name: str, namespace: str, host: str, settings: str) -> None:
        self.account, self.name, self.host, self.port = account, name, host, _port()
        self.namespace = namespace
        self.log = account.folder / f"{name}.log"
        config = account.folder / f"{name}.conf"
        config.write_text(
            f'Port {self.port}\nListenAddress {host}\nHostKey "{account.folder}/host_key"\n'
            f'PidFile none\nAuthorizedKeysFile "{account.folder}/authorized"\nStrictModes no\nUsePAM no\n'
            f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nAllowUsers {USER}\n{settings}\n",
            encoding="utf-8",
        )
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*inside, SSHD, "-D", "-e", "-f", str(config)], stdout=log, stderr=log
            )
        with account.config.open("a", encoding="utf-8") as file:
            file.write(
                f"Host {name}\n HostName {host}\n Port {self.port}\n User {USER}\n"
                f' IdentityFile "{account.folder}/key"\n IdentitiesOnly yes\n'
                f' UserKnownHostsFile "{account.known}"\n GlobalKnownHostsFile none\n'
            )
        key = (account.folder / "host_key.pub").read_text(encoding="utf-8")
        with account.known.open("a", encoding="utf-8") as file:
            file.write(f"[{host}]:{self.port} {key}")
        until(lambda: b"Server listening" in self.log.read_bytes() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text(encoding="utf-8")

    def stop(self) -> None:
        """End the sshd. Its connections stay."""
        self.process.terminate()
        self.process.wait(30)

    def address(self, python: Path | None = None, **options: str) -> str:
        """Return the address of a worker here, which runs under the user's Python."""
        named: Mapping[str, str] = {"python": str(python or self.account.folder / "python"), **options}
        return f"ssh://{self.name}?" + "&".join(f"{key}={value}" for key, value in named.items())


class Islands:
    """Two namespaces that this one reaches, and that do not reach each other. A context manager."""

    @staticmethod
    def unavailable() -> str:
        """Return why there can be none here; nothing if there can."""
        if shutil.which("ip") is None:
            return "there is no ip: apt install iproute2"
        tried = subprocess.run(
            ["ip", "netns", "add", f"dr-try-{os.getpid()}"], capture_output=True, text=True
        )
        if tried.returncode:
            return f"network namespaces cannot be made here: {tried.stderr.strip()}"
        subprocess.run(["ip", "netns", "del", f"dr-try-{os.getpid()}"], check=True)
        return ""

    def __init__(self) -> None:
        self.names = [f"dr-i{k}-{os.getpid()}" for k in range(2)]
        # Several test processes have islands at a time.
        number = os.getpid() * 2 % 32768
        nets = [number + k for k in range(2)]
        self.networks = [f"10.{64 + net // 256 % 128}.{net % 256}" for net in nets]
        self.hosts = [f"{network}.2" for network in self.networks]

    def __enter__(self) -> Islands:
        try:
            for k, name in enumerate(self.names):
                outer, inner = f"dri{k}{os.getpid() % 100000}", "dr0"
                self._ip("netns", "add", name)
                self._ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
                self._ip("addr", "add", f"{self.networks[k]}.1/24", "dev", outer)
                self._ip("link", "set", outer, "up")
                self._ip("-n", name, "addr", "add", f"{self.hosts[k]}/24", "dev", inner)
                for device in ("lo", inner):
                    self._ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)
