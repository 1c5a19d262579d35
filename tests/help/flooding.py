"""What strangers do to a listening port without a key: connections that say nothing, that stop half way, that
announce gigabytes.
"""

from __future__ import annotations

import os
import re
import resource
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distruntime.wire.zeromq.frames import FRAME, ROOM

# ZMTP 3.1 with CURVE starts so on a client: signature, version, mechanism, as-server.
GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
_CHUNK = b"\0" * (1 << 16)


def frame(size: int) -> bytes:
    """The head of a command of so many bytes."""
    return b"\x06" + struct.pack(">Q", size)


class Flood:
    """Strangers at one port, in one thread: so many silent connections, made again as they are closed, and so
    many half-open handshakes a second; `holders` send greetings and all but the last byte of the largest
    frame that is taken, `bombs` announce 8 GiB. These two are dialled again so many seconds after they were
    hung up on: `again`.
    """

    def __init__(
        self, port: int, silent: int, half_open: float, bombs: int = 0, holders: int = 0, again: float = 0.0
    ) -> None:
        self._port, self._again = port, again
        # Each entry says until when, and of what kind.
        self._resting: list[tuple[float, str]] = []
        self._wanted = {"silent": silent, "bomb": bombs, "holder": holders}
        self._rate = half_open
        # Each fd has the socket, its kind, and how many bytes are still to be sent.
        self._open: dict[int, tuple[socket.socket, str, int]] = {}
        self._poll = select.poll()
        self._next = 0.0
        self.made = 0

    def step(self, budget: float = 0.05) -> None:
        """Do what is to be done now, for about so many seconds."""
        end = time.monotonic() + budget
        counts = dict.fromkeys((*self._wanted, "half"), 0)
        self._resting = [(until, kind) for until, kind in self._resting if until > time.monotonic()]
        for kind in (*(kind for _, kind, _ in self._open.values()), *(kind for _, kind in self._resting)):
            counts[kind] += 1
        for kind, wanted in self._wanted.items():
            for _ in range(min(wanted - counts[kind], 200)):
                self._dial(kind)
        now = time.monotonic()
        if self._rate and now >= self._next:
            self._next = max(self._next + 1 / self._rate, now - 1.0)
            self._dial("half")
        while (left := end - time.monotonic()) > 0:
            for fd, events in self._poll.poll(
                max(1, round(min(left, 1 / self._rate if self._rate else left) * 1000))
            ):
                self._serve(fd, events)
            if self._rate and time.monotonic() >= self._next:
                break

    def _dial(self, kind: str) -> None:
        made = socket.socket()
        try:
            made.settimeout(1.0)
            made.connect(("127.0.0.1", self._port))
            left = {"silent": 0, "half": 0, "bomb": 1 << 33, "holder": FRAME + ROOM - 1}[kind]
            made.setblocking(False)
            if kind != "silent":
                made.send(GREETING)
            if kind in ("bomb", "holder"):
                made.send(frame(1 << 33 if kind == "bomb" else FRAME + ROOM))
        except OSError:
            made.close()
            return
        self.made += 1
        self._open[made.fileno()] = made, kind, left
        self._poll.register(made, select.POLLIN | (select.POLLOUT if left else 0))

    def _serve(self, fd: int, events: int) -> None:
        made, kind, left = self._open[fd]
        try:
            if events & select.POLLOUT:
                left -= made.send(_CHUNK[: min(left, len(_CHUNK))])
                self._open[fd] = made, kind, left
                if not left:
                    self._poll.modify(made, select.POLLIN)
            if events & ~select.POLLOUT and not made.recv(4096):
                raise ConnectionResetError
        except BlockingIOError:
            pass
        except OSError:
            self._poll.unregister(made)
            made.close()
            del self._open[fd]
            if self._again and kind in ("bomb", "holder"):
                self._resting.append((time.monotonic() + self._again, kind))

    @property
    def held(self) -> int:
        """How many connections are open, as far as is known."""
        return len(self._open)

    def close(self) -> None:
        """Hang up on all."""
        for made, _, _ in self._open.values():
            made.close()
        self._open.clear()


def run(port: str, silent: str, half_open: str, bombs: str, holders: str, again: str = "0") -> None:
    """Flood until stdin ends; say once that the flood is there. A process of its own."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flood = Flood(int(port), int(silent), float(half_open), int(bombs), int(holders), float(again))
    os.set_blocking(0, False)
    told = False
    while True:
        flood.step()
        if not told and flood.made >= int(silent) + int(bombs) + int(holders):
            told = True
            print("flooding", flush=True)
        try:
            if os.read(0, 1) == b"":
                break
        except BlockingIOError:
            pass
    print("made", flood.made, flush=True)


@contextmanager
def flooded(
    port: int, silent: int = 0, half_open: float = 0, bombs: int = 0, holders: int = 0, again: float = 0.1
) -> Iterator[None]:
    """Flood a port for the length of a `with` block, from a process of its own; it begins once all have
    connected.
    """
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, (port, silent, half_open, bombs, holders, again))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "flooding\n"
        yield
        assert process.poll() is None
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait(20)


def descriptors(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def listening(pid: int) -> list[int]:
    """Return the TCP ports at which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
        except OSError:
            continue
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


if __name__ == "__main__":
    run(*sys.argv[1:])
