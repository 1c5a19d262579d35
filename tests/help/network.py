"""A network between master and worker that can be cut, slowed, torn or made to garble: it forwards
connections, a process of its own.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CHUNK = 1 << 16
# So many bytes may wait here for a receiver. Then its sender is not read any more, as with the buffers of a
# real network.
_MOST = 4 << 20
# Dribble hands over the first bytes of what comes, up to the second number, in pieces as small as the first.
_BITE, _BITTEN = 7, 400
# So many bytes at the end of a piece are within a message: each message ends with what proves it genuine.
_TAIL = 15
# A flip or a truncation may strike a piece of so many bytes. A shorter one may be no message at all.
_LEAST = 60


class Network:
    """Forwards what comes to `address` to a target, while it is whole. A context manager."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._process = subprocess.Popen(
            [sys.executable, __file__, target.removeprefix("tcp://")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = "tcp://" + self._process.stdout.readline().strip()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        # This closes its pipes, and waits for it.
        with self._process:
            self._process.kill()

    def _say(self, command: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == "done"

    def cut(self) -> None:
        """Let nothing through any more, either way; nobody is told, as where a cable is pulled out."""
        self._say("cut")

    def mend(self) -> None:
        """Let everything through again, as it comes, on the connections that still are and on new ones."""
        self._say("mend")

    def swallow(self, way: str) -> None:
        """Let nothing through one way, "up" to the target or "down" from it. Connecting still works."""
        self._say(f"swallow {way}")

    def refuse(self) -> None:
        """Reset every connection, and each new one as soon as it is made."""
        self._say("refuse")

    def close(self) -> None:
        """Reset every connection, and stop to listen: the machine says that nobody is there."""
        self._say("close")

    def tear(self) -> None:
        """Reset every connection, as a router that was restarted."""
        self._say("tear")

    def slow(self, seconds: float) -> None:
        """Delay each piece by so many seconds."""
        self._say(f"slow {seconds}")

    def throttle(self, rate: float) -> None:
        """Let so many bytes a second through, each way."""
        self._say(f"throttle {rate}")

    def dribble(self) -> None:
        """Hand over the beginning of whatever comes in pieces of a few bytes, a millisecond apart."""
        self._say("dribble")

    def truncate(self, where: float) -> None:
        """Cut the next longer piece, either way, at this part of it (0 to 1), and reset its connection."""
        self._say(f"truncate {where}")

    def flip(self, where: float) -> None:
        """Once: flip one bit of the next longer piece, at this part of it (0 to 1), either way; on the way up
        one of its last bytes.

        Elsewhere it may be a message's length: a worker whose master still beats waits for the rest of it for
        ever. See docs/limits.md.
        """
        self._say(f"flip {where}")

    def deafen(self, after: int) -> None:
        """Once: let the target hear so many bytes of the next connection and no more, while all goes on the
        other way.

        So a connection looks, to both ends, on which a message's length was changed: its receiver waits for
        the rest of it.
        """
        self._say(f"deafen {after}")

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
        self.listener: socket.socket | None = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = self.listener.getsockname()
        self.other: dict[socket.socket, socket.socket] = {}
        # Each end has the way that its bytes go.
        self.way: dict[socket.socket, str] = {}
        # Each receiver has what is to be sent to it, and when.
        self.waiting: dict[socket.socket, deque[tuple[float, bytes]]] = {}
        # Each receiver has the time when the last of what waits for it is sent.
        self.free_at: dict[socket.socket, float] = {}
        # These ends have sent all that they will.
        self.ended: set[socket.socket] = set()
        # These were accepted while the network was cut.
        self.new: list[socket.socket] = []
        # Nothing gets through on these ways.
        self.lost: set[str] = set()
        # So many bytes of each sender are still handed over. A sender that is not here has no limit.
        self.heard: dict[socket.socket, int] = {}
        # The next connection has this limit.
        self.deafens: int | None = None
        # This happens to the next longer piece, at this place in it.
        self.once: tuple[str, float] | None = None
        self.calm()

    def calm(self) -> None:
        """Let everything through, as it comes."""
        self.whole, self.refuses, self.dribbles, self.delay, self.rate = True, False, False, 0.0, math.inf
        self.lost.clear()
        self.once = None

    def _parsed(self, target: str) -> tuple[str, int]:
        host, _, port = target.rpartition(":")
        return host, int(port)

    def run(self) -> None:
        print(f"{self.address[0]}:{self.address[1]}", flush=True)
        while True:
            # An end that is cut is not read. To both ends it looks as if packets were lost.
            readers = [
                sys.stdin,
                *([self.listener] if self.listener is not None else []),
                *filter(self._is_read, self.other),
            ]
            now = time.monotonic()
            first = {end: queue[0][0] for end, queue in self.waiting.items() if queue and self._gets(end)}
            writers = [end for end, at in first.items() if at <= now]
            later = [at - now for at in first.values() if at > now]
            ready, writable, _ = select.select(readers, writers, [], min(later) if later else None)
            if sys.stdin in ready and not self.obey(sys.stdin.readline()):
                return
            if self.listener in ready and self.listener is not None:
                self.new.append(self.listener.accept()[0])
            if self.whole:
                self.admit()
            for source in ready:
                if source in self.other and self._is_read(source):
                    self.read(source)
            for end in writable:
                if end in self.other and self._gets(end):
                    self.deliver(end)

    def _is_read(self, end: socket.socket) -> bool:
        far = self.other[end]
        open_ = self.whole and end not in self.ended and self.way[end] not in self.lost
        return open_ and sum(len(data) for _, data in self.waiting[far]) < _MOST

    def _gets(self, end: socket.socket) -> bool:
        return self.whole and self.way[self.other[end]] not in self.lost

    def obey(self, line: str) -> bool:
        words = line.split()
        match words:
            case []:
                return False
            case ["cut"]:
                self.whole = False
            case ["mend"]:
                self.calm()
                if self.listener is None:
                    self.listener = socket.create_server(self.address, backlog=64)
            case ["swallow", way]:
                self.lost.add(way)
            case ["refuse"]:
                self.refuses = True
                self.tear()
            case ["close"]:
                if self.listener is not None:
                    self.listener.close()
                    self.listener = None
                self.tear()
            case ["tear"]:
                self.tear()
            case ["slow", seconds]:
                self.delay = float(seconds)
            case ["throttle", rate]:
                self.rate = float(rate)
            case ["dribble"]:
                self.dribbles = True
            case ["truncate" | "flip" as what, where]:
                self.once = what, float(where)
            case ["deafen", after]:
                self.deafens = int(after)
            case ["to", target]:
                self.target = self._parsed(target)
            case _:
                return False
        print("done", flush=True)
        return True

    def tear(self) -> None:
        for end in [*self.other, *self.new]:
            self.reset(end)
        for table in (self.other, self.way, self.waiting, self.free_at, self.heard):
            table.clear()
        self.ended.clear()
        self.new.clear()

    def reset(self, end: socket.socket) -> None:
        with suppress(OSError):
            # With this, close() sends a reset.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()

    def admit(self) -> None:
        for end in self.new:
            if self.refuses:
                self.reset(end)
                continue
            try:
                far = socket.create_connection(self.target, 5.0)
            except OSError:
                end.close()
                continue
            for one, two, way in ((end, far, "up"), (far, end, "down")):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                one.setblocking(False)
                self.other[one], self.way[one], self.waiting[one], self.free_at[one] = two, way, deque(), 0.0
            if self.deafens is not None:
                self.heard[end], self.deafens = self.deafens, None
        self.new.clear()

    def read(self, source: socket.socket) -> None:
        try:
            data = source.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self.hang_up(source, self.reset)
            return
        receiver = self.other[source]
        # What came before it is still to arrive.
        if not data:
            self.ended.add(source)
            self.waiting[receiver].append((self.free_at[receiver], b""))
            self.deliver(receiver)
            return
        if source in self.heard:
            data = data[: self.heard[source]]
            self.heard[source] -= len(data)
            if not data:
                return
        if self.once is not None and len(data) > _LEAST:
            (what, where), self.once = self.once, None
            k = int(where * (len(data) - 1))
            if what == "truncate":
                with suppress(OSError):
                    receiver.send(data[: k + 1])
                self.hang_up(source, self.reset)
                return
            if self.way[source] == "up":
                k = len(data) - 1 - int(where * _TAIL)
            data = data[:k] + bytes([data[k] ^ 1 << (k % 8)]) + data[k + 1 :]
        self.hand(receiver, data)

    def hand(self, receiver: socket.socket, data: bytes) -> None:
        """Put what has come into the queue of its receiver, in as many pieces as it is to arrive in."""
        pieces, apart = [data], 0.0
        if self.dribbles:
            pieces, apart = [data[k : k + _BITE] for k in range(0, min(_BITTEN, len(data)), _BITE)], 0.001
            pieces += [data[len(pieces) * _BITE :]] if len(data) > len(pieces) * _BITE else []
        elif self.rate != math.inf:
            step = max(1, int(self.rate / 50))
            pieces, apart = [data[k : k + step] for k in range(0, len(data), step)], 0.02
        at = max(self.free_at[receiver], time.monotonic() + self.delay)
        for piece in pieces:
            self.waiting[receiver].append((at, piece))
            at += apart
        self.free_at[receiver] = at
        self.deliver(receiver)

    def deliver(self, receiver: socket.socket) -> None:
        queue = self.waiting[receiver]
        while queue and queue[0][0] <= time.monotonic():
            at, data = queue[0]
            if not data:
                self.hang_up(receiver)
                return
            try:
                sent = receiver.send(data)
            except BlockingIOError:
                return
            except OSError:
                self.hang_up(receiver)
                return
            if sent == len(data):
                queue.popleft()
            else:
                queue[0] = at, data[sent:]

    def hang_up(
        self, end: socket.socket, close: Callable[[socket.socket], None] = socket.socket.close
    ) -> None:
        for one in (end, self.other.get(end)):
            if one is not None:
                for table in (self.other, self.way, self.waiting, self.free_at, self.heard):
                    table.pop(one, None)
                self.ended.discard(one)
                with suppress(OSError):
                    close(one)


if __name__ == "__main__":
    assert Path(__file__).name == "network.py"
    _Forwarder(sys.argv[1]).run()
