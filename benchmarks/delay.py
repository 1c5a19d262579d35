"""A TCP proxy on loopback that holds every byte for some time each way: `python -m benchmarks.delay
tcp://127.0.0.1:29400 0.05`.

It has a process of its own: its threads would take the master's interpreter lock twice for each message.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import threading
import time
from collections import deque


def pump(source: socket.socket, sink: socket.socket, delay: float) -> None:
    """Pass on what `source` sends, `delay` seconds later, without limiting how much is under way, until one
    side closes.
    """
    waiting: deque[tuple[float, bytes]] = deque()
    source.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while True:
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            try:
                if selector.select(timeout):
                    data = source.recv(1 << 20)
                    if not data:
                        break
                    waiting.append((time.monotonic() + delay, data))
                while waiting and waiting[0][0] <= time.monotonic():
                    sink.setblocking(True)
                    sink.sendall(waiting.popleft()[1])
                    sink.setblocking(False)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError:
                break  # one side has closed
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def main(target: str, delay: float) -> None:
    """Serve until killed; print the address first."""
    host, _, port = target.removeprefix("tcp://").rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"tcp://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    while True:
        here, _ = listener.accept()
        there = socket.create_connection((host, int(port)))
        for s in (here, there):
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink in ((here, there), (there, here)):
            threading.Thread(target=pump, args=(source, sink, delay), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
