"""Many workers played by one process: `python -m benchmarks.played 1024` prints the port at which they
listen.

Each has an address of its own on loopback (127.1.0.0, 127.1.0.1, ...) and a connection of its own, greets the
master as a worker does, and acknowledges each segment in turn, as late as one that takes some 20 us an
operator. Nothing is run and no values are there to read.
"""

from __future__ import annotations

import heapq
import os
import platform
import sys
import time

import msgpack
import torch
import zmq

from distruntime.wire.codec import decode, encode
from distruntime.wire.messages import (
    MESSAGES,
    PROTOCOL,
    AskMemory,
    AskStatus,
    AskWorker,
    DeviceRow,
    Done,
    Fetch,
    Hello,
    ListenForPeers,
    MeshSegment,
    Question,
    Reply,
    Segment,
    Welcome,
)

_SEGMENTS = {MESSAGES.index(Segment), MESSAGES.index(MeshSegment)}
_UNTOLD = 7
_DONE = MESSAGES.index(Done)
_BYTE = 8e-7  # seconds: `x + y`, with the free of an earlier result, has 25 bytes of a segment
_DEVICES = [DeviceRow("cpu", "played", 0, 0, "", 0, 0, "", 5056, [])]
_REPORT = ["played", 0, "", "", "", "", 0.0, False, 0.0, _DEVICES, [None], []]
# An address that is empty says that there is no channel to other workers.
_ANSWERS: dict[type, object] = {
    ListenForPeers: "",
    AskMemory: [0, 0, []],
    AskStatus: [0, None, 0.0],
    AskWorker: _REPORT,
}


def addresses(port: int, count: int) -> list[str]:
    """Return where the first `count` workers listen."""
    return [f"tcp://127.1.{k >> 8}.{k & 255}:{port}" for k in range(count)]


def main(count: int) -> None:
    """Serve until killed, one master after another."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.sndhwm = router.rcvhwm = 0
    router.backlog = 1024
    router.bind(addresses(0, 1)[0].removesuffix("0") + "*")
    port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    for address in addresses(port, count)[1:]:
        router.bind(address)
    print(port, flush=True)
    welcome = encode(
        Welcome(
            PROTOCOL,
            b"played",
            0,
            0.0,
            torch.__version__,
            platform.python_version(),
            "played",
            os.getpid(),
            [],
            b"",
            b"",
            _DEVICES,
            False,
            [],
        )
    )
    due: list[tuple[float, int, bytes]] = []  # when which segment has been run, and by whom
    free: dict[bytes, float] = {}  # when each worker has run what it has
    queued: dict[bytes, int] = {}  # how many segments each worker has
    untold: dict[bytes, int] = {}  # how many it has run since its last Done
    while True:
        if not router.poll(max(0, round((due[0][0] - time.monotonic()) * 1000)) if due else None):
            now = time.monotonic()
            while due and due[0][0] <= now:
                _, seq, peer = heapq.heappop(due)
                queued[peer] -= 1
                # As a worker does, it tells of several segments of a mesh while there are more.
                untold[peer] = untold.get(peer, 0) + 1
                if queued[peer] == 0 or untold[peer] > _UNTOLD:
                    untold[peer] = 0
                    router.send_multipart([peer, msgpack.packb((_DONE, seq, [], []))])
            continue
        sender, head, *body = router.recv_multipart(copy=False)
        peer = sender.bytes
        number, *fields = msgpack.unpackb(head.buffer)
        if number in _SEGMENTS:
            size = len(body[0]) if body else len(head)
            free[peer] = max(free.get(peer, 0.0), time.monotonic()) + size * _BYTE
            heapq.heappush(due, (free[peer], fields[0], peer))
            queued[peer] = queued.get(peer, 0) + 1
            continue
        message = decode(head.bytes)
        if isinstance(message, Hello):
            router.send_multipart([peer, welcome])
        elif isinstance(message, Question):
            router.send_multipart([peer, encode(Reply(message.request, _ANSWERS.get(type(message))))])
        elif isinstance(message, Fetch):
            router.send_multipart([peer, encode(Reply(message.request, None))])


if __name__ == "__main__":
    main(int(sys.argv[1]))
