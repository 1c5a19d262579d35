"""Two hosts joined by a cable, for tests that pull it: a worker's and a master's machine."""

from __future__ import annotations

import ctypes
import subprocess
from contextlib import ExitStack
from typing import Any

from hosts import Host, Interface
from router import Router, Weather

# This is CLONE_NEWNET of sched.h.
_NEWNET = 0x40000000
_INTERFACE = "dr0"
# The master's machine moves to these.
_OTHERS = range(10, 20)


def enter(name: str) -> None:
    """Move the calling process into a network namespace; before it has other threads."""
    with open(name, "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")


class Cable:
    """A host at each end: the worker's has the address 10.77.0.2, the master's 10.77.0.1 and later others.

    A context manager. `master` is what `enter` takes.
    """

    def __enter__(self) -> Cable:
        with ExitStack() as stack:
            self._network = stack.enter_context(Router())
            # Packets for all of them go to that host, whichever it has.
            addresses = tuple(f"10.77.0.{number}/24" for number in (1, *_OTHERS))
            self._ends = [
                stack.enter_context(Host(name, self._network, [Interface(_INTERFACE, own)], {}))
                for name, own in (("worker", ("10.77.0.2/24",)), ("master", addresses))
            ]
            self.master = self._ends[1].network
            self.move(1)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def pull(self) -> None:
        """Pull the cable: packets go nowhere, and nobody is told."""
        self._network.weather("*", "*", Weather(up=False))

    def plug(self) -> None:
        """Put it back."""
        self._network.calm()

    def move(self, number: int) -> None:
        """Give the master's machine another address, in place of those that it has."""
        self._ends[1].do(
            f"ip addr flush dev {_INTERFACE} && ip addr add 10.77.0.{number}/24 dev {_INTERFACE}"
        )

    def run(self, command: list[str], log: Any, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a process at the worker's end."""
        return self._ends[0].start(command, environment, log)
