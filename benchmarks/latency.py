"""Reading a ready value with `.item()`, against a raw pyzmq ping-pong on the same transport."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable

import torch
import zmq

import distruntime as dr

from .harness import Figure, daemon, free_port, in_turn, seconds

READS = 300


def _echo(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.bind(address)
        while True:
            message = socket.recv()
            socket.send(message)
            if message == b"stop":
                return


def _compare(
    name: str, raw: str, session: dr.Session, rounds: int, note: str = "", bar: float | None = 1.5
) -> Figure:
    process = multiprocessing.get_context("spawn").Process(target=_echo, args=(raw,))
    process.start()
    with session, zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.connect(raw)
        value = torch.ones(3, device="remote").sum()
        value.item()

        def median(work: Callable[[], object]) -> float:
            return statistics.median(seconds(work) for _ in range(READS))

        def ping() -> None:
            socket.send(b"x" * 16)
            socket.recv()

        ping()
        ratio, ours, theirs = in_turn(lambda: median(value.item), lambda: median(ping), rounds)
        socket.send(b"stop")
        socket.recv()
    process.join()
    return Figure(
        f".item() of a ready value / raw ping-pong, {name}",
        ratio,
        "x",
        bar,
        f"{ours * 1e6:.0f} us, raw {theirs * 1e6:.0f} us{note}",
    )


def measure(quick: bool) -> list[Figure]:
    """Return the figures for ipc and for tcp with and without keys."""
    rounds = 3 if quick else 15
    with tempfile.TemporaryDirectory() as folder:
        figures = [
            _compare("ipc", f"ipc://{folder}/raw", dr.init_master_worker(world_size=1, quiet=True), rounds)
        ]
        with daemon("--insecure") as address:
            session = dr.init_master_worker(workers=[address], insecure=True, quiet=True)
            figures.append(_compare("tcp", f"tcp://127.0.0.1:{free_port()}", session, rounds))
        os.environ["DISTRUNTIME_KEY"] = f"{folder}/key"
        with daemon() as address:
            session = dr.init_master_worker(workers=[address], quiet=True)
            figures.append(
                _compare(
                    "tcp with keys",
                    f"tcp://127.0.0.1:{free_port()}",
                    session,
                    rounds,
                    " without keys",
                    bar=None,
                )
            )
        del os.environ["DISTRUNTIME_KEY"]
    return figures
