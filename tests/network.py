"""A network between master and worker that can be cut, slowed or torn: a forwarder of TCP connections in a process of its own."""

from __future__ import annotations

import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CHUNK = 1 << 16


class Network:
    """Forwards what comes to `address` to a target, while it is whole. A context manager."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._process = subprocess.Popen(
            [sys.executable, __file__, target.removeprefix("tcp://")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = "tcp://" + self._process.stdout.readline().strip()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _say(self, command: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == "done"

    def cut(self) -> None:
        """Let nothing through any more, either way; nobody is told, as where a cable is pulled out."""
        self._say("cut")

    def mend(self) -> None:
        """Let everything through again, on the connections that still are and on new ones."""
        self._say("mend")

    def tear(self) -> None:
        """Reset every connection, as a router that was restarted."""
        self._say("tear")

    def slow(self, seconds: float) -> None:
        """Delay each piece by so many seconds."""
        self._say(f"slow {seconds}")

    def retarget(self, target: str) -> None:
        """Forward new connections to another address."""
        self._say(f"to {target.removeprefix('tcp://')}")

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Cut the network for the length of a `with` block."""
        self.cut()
        try:
            yield
        finally:
            self.mend()


class _Forwarder:
    def __init__(self, target: str) -> None:
        self.target = self._parsed(target)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.other: dict[socket.socket, socket.socket] = {}
        self.waiting: dict[socket.socket, list[tuple[float, bytes]]] = {}  # by receiver: when to send what
        self.new: list[socket.socket] = []  # accepted while the network was cut
        self.whole, self.delay = True, 0.0

    def _parsed(self, target: str) -> tuple[str, int]:
        host, _, port = target.rpartition(":")
        return host, int(port)

    def run(self) -> None:
        host, port = self.listener.getsockname()
        print(f"{host}:{port}", flush=True)
        while True:
            # What is cut is not read: to both ends it looks as if packets were lost.
            readers = [sys.stdin, self.listener, *(self.other if self.whole else [])]
            due = [at for queue in self.waiting.values() for at, _ in queue[:1]]
            wait = max(0.0, min(due) - time.monotonic()) if due and self.whole else None
            ready = select.select(readers, [], [], wait)[0]
            if sys.stdin in ready and not self.obey(sys.stdin.readline()):
                return
            if self.listener in ready:
                self.new.append(self.listener.accept()[0])
            if self.whole:
                self.admit()
                for source in ready:
                    if source in self.other:
                        self.read(source)
                self.deliver()

    def obey(self, line: str) -> bool:
        words = line.split()
        match words:
            case []:
                return False
            case ["cut"]:
                self.whole = False
            case ["mend"]:
                self.whole = True
            case ["tear"]:
                for end in [*self.other, *self.new]:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends a reset
                    end.close()
                self.other.clear()
                self.waiting.clear()
                self.new.clear()
            case ["slow", seconds]:
                self.delay = float(seconds)
            case ["to", target]:
                self.target = self._parsed(target)
        print("done", flush=True)
        return True

    def admit(self) -> None:
        for end in self.new:
            try:
                far = socket.create_connection(self.target, 5.0)
            except OSError:
                end.close()
                continue
            for one, two in ((end, far), (far, end)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.other[one] = two
                self.waiting[one] = []
        self.new.clear()

    def read(self, source: socket.socket) -> None:
        if source not in self.other:
            return
        try:
            data = source.recv(_CHUNK)
        except OSError:
            data = b""
        if data:
            self.waiting[self.other[source]].append((time.monotonic() + self.delay, data))
        else:
            self.hang_up(source)

    def deliver(self) -> None:
        for receiver, queue in list(self.waiting.items()):
            while queue and queue[0][0] <= time.monotonic() and receiver in self.other:
                data = queue.pop(0)[1]
                try:
                    receiver.sendall(data)
                except OSError:
                    self.hang_up(receiver)

    def hang_up(self, end: socket.socket) -> None:
        for one in (end, self.other.get(end)):
            if one is not None:
                self.other.pop(one, None)
                self.waiting.pop(one, None)
                with suppress(OSError):
                    one.close()


if __name__ == "__main__":
    assert Path(__file__).name == "network.py"
    _Forwarder(sys.argv[1]).run()
