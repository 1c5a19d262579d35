"""Ping-pong over two Channels against raw pyzmq: what a thread-safe socket costs.

    python benchmarks/channel_latency.py [ROUNDS]

The raw side is a blocking DEALER and ROUTER. Both pairs run in one process each side, measured in alternating
blocks, since the machine's mood changes more from minute to minute than the two differ.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import zmq

from distruntime.wire.channel import Channel

BLOCKS = 60
PAYLOAD = b"x" * 100
STOP = b"stop"


def echo_raw(address: str, told: Connection) -> None:
    """Answer every message, as a raw blocking ROUTER."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        told.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
        while True:
            peer, message = router.recv_multipart()
            router.send_multipart([peer, message])
            if message == STOP:
                told.recv()
                return


def echo_channel(address: str, told: Connection) -> None:
    """Answer every message, as a Channel."""
    channel = Channel(listen=address)
    told.send(channel.address)
    while True:
        for peer, frames in channel.receive(None):
            channel.send(peer, [frames[0] if isinstance(frames[0], bytes) else frames[0].bytes])
            if frames[0] == STOP:
                told.recv()
                channel.close()
                return


def timed(rounds: int, trip: Callable[[], object]) -> float:
    """Return the microseconds of a round trip."""
    start = time.perf_counter()
    for _ in range(rounds):
        trip()
    return (time.perf_counter() - start) / rounds * 1e6


def measure(transport: str, folder: str, rounds: int) -> tuple[float, float, float]:
    """Return the median round trip in microseconds, raw and through Channels, and the median ratio of
    neighbouring blocks.
    """
    processes, told, addresses = [], [], []
    spawn = multiprocessing.get_context("spawn")
    for name, echo in (("raw", echo_raw), ("channel", echo_channel)):
        here, there = spawn.Pipe()
        processes.append(
            spawn.Process(
                target=echo,
                args=(f"ipc://{folder}/{name}" if transport == "ipc" else "tcp://127.0.0.1:*", there),
            )
        )
        processes[-1].start()
        told.append(here)
        addresses.append(here.recv())
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(addresses[0])
        channel = Channel()
        channel.connect(addresses[1], b"echo")

        def raw() -> list[bytes]:
            dealer.send(PAYLOAD)
            return dealer.recv_multipart()

        def ours() -> None:
            channel.send(b"echo", [PAYLOAD])
            while not channel.receive(None):
                pass

        timed(rounds, raw), timed(rounds, ours)
        pairs = [(timed(rounds, raw), timed(rounds, ours)) for _ in range(BLOCKS)]
        dealer.send(STOP)
        dealer.recv()
        channel.send(b"echo", [STOP])
        while not channel.receive(None):
            pass
        channel.close()
    for process, here in zip(processes, told):
        here.send(None)
        process.join()
    return (
        statistics.median(r for r, _ in pairs),
        statistics.median(o for _, o in pairs),
        statistics.median(o / r for r, o in pairs),
    )


def main() -> None:
    """Print one row for each transport."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as folder:
        for transport in ("ipc", "tcp"):
            raw, ours, ratio = measure(transport, folder, rounds)
            print(f"{transport}: raw {raw:.1f} us, Channel {ours:.1f} us, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
