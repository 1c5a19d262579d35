"""Two network namespaces joined by a cable, for tests that pull it: a worker's and a master's machine, as far
as the network goes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from typing import Any

# This is CLONE_NEWNET of sched.h.
_NEWNET = 0x40000000


def unavailable() -> str:
    """Return why there can be none here; nothing if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces take Linux, root and iproute2"
    tried = subprocess.run(["ip", "netns", "add", f"dr-try-{os.getpid()}"], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"dr-try-{os.getpid()}"], check=True)
    return ""


def enter(name: str) -> None:
    """Move the calling process into a namespace; before it has other threads."""
    with open(f"/var/run/netns/{name}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")


class Cable:
    """A namespace at each end: `worker` with the address 10.77.0.2, `master` with 10.77.0.1 and more.

    A context manager.
    """

    def __init__(self) -> None:
        self.worker, self.master = f"dr-w-{os.getpid()}", f"dr-m-{os.getpid()}"

    def __enter__(self) -> Cable:
        try:
            for name in (self.worker, self.master):
                self._ip("netns", "add", name)
            self._ip(
                "link",
                "add",
                "dr0",
                "netns",
                self.worker,
                "type",
                "veth",
                "peer",
                "name",
                "dr0",
                "netns",
                self.master,
            )
            for name, number in ((self.master, 1), (self.worker, 2)):
                self._ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "dr0")
                for device in ("lo", "dr0"):
                    self._ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self.worker, self.master):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def pull(self) -> None:
        """Pull the cable: packets go nowhere, and nobody is told."""
        self._ip("-n", self.worker, "link", "set", "dr0", "down")

    def plug(self) -> None:
        """Put it back."""
        self._ip("-n", self.worker, "link", "set", "dr0", "up")

    def move(self, number: int) -> None:
        """Give the master's machine another address, in place of those that it has."""
        self._ip("-n", self.master, "addr", "flush", "dev", "dr0")
        self._ip("-n", self.master, "addr", "add", f"10.77.0.{number}/24", "dev", "dr0")

    def run(self, namespace: str, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process at one end."""
        return subprocess.Popen(["ip", "netns", "exec", namespace, *command], **options)
