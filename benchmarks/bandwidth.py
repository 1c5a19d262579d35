"""64 MiB up and down over loopback TCP, against a plain TCP socket into a kept buffer; and the way that one
machine offers.
"""

from __future__ import annotations

import multiprocessing
import socket

import torch

import distruntime as dr
from distruntime.session.session import active_session

from .harness import Figure, daemon, free_port, in_turn, seconds

NBYTES = 64 << 20


def _receive(connection: socket.socket, view: memoryview) -> None:
    got = 0
    while got < len(view):
        got += connection.recv_into(view[got:])


def _peer(port: int) -> None:
    """Take 64 MiB into a kept buffer, answer one byte; on the next byte send it back; until the other side
    closes.
    """
    kept = bytearray(NBYTES)
    with socket.create_server(("127.0.0.1", port)) as server:
        connection, _ = server.accept()
        with connection:
            while command := connection.recv(1):
                if command == b"u":
                    _receive(connection, memoryview(kept))
                    connection.sendall(b"k")
                else:
                    connection.sendall(kept)


def _against(session: dr.Session, way: str, plain: socket.socket, rounds: int, shared: bool) -> list[Figure]:
    tensor = torch.randn(NBYTES // 4)
    local, kept = memoryview(tensor.numpy()).cast("B"), bytearray(NBYTES)  # type: ignore[arg-type]
    remote: list[torch.Tensor] = []

    def plain_up() -> float:
        def run() -> None:
            plain.sendall(b"u")
            plain.sendall(local)
            plain.recv(1)

        return seconds(run)

    def plain_down() -> float:
        def run() -> None:
            plain.sendall(b"d")
            _receive(plain, memoryview(kept))

        return seconds(run)

    def up() -> float:
        def run() -> None:
            remote[:] = [tensor.to("remote")]
            dr.synchronize()

        return seconds(run)

    def down() -> float:
        return seconds(lambda: remote[0].cpu())

    with session:
        if not shared:
            active_session().nodes[0].shared = False
        for _ in range(4):
            up(), down(), plain_up(), plain_down()
        assert torch.equal(remote[0].cpu(), tensor)
        figures = []
        for name, ours, theirs in (("up", up, plain_up), ("down", down, plain_down)):
            ratio, mine, other = in_turn(
                theirs, ours, rounds
            )  # seconds of theirs over ours: a ratio of rates
            note = f"{NBYTES / other / 2**30:.2f} GiB/s, plain socket {NBYTES / mine / 2**30:.2f}"
            figures.append(
                Figure(f"64 MiB {name}, {way} / plain TCP socket", ratio, "x", 1.0, note, most=False)
            )
        remote.clear()
    return figures


def measure(quick: bool) -> list[Figure]:
    """Return the figures for TCP without shared memory, and for a worker started here."""
    rounds, port = 3 if quick else 11, free_port()
    process = multiprocessing.get_context("spawn").Process(target=_peer, args=(port,))
    process.start()
    plain = None
    while plain is None:
        try:
            plain = socket.create_connection(("127.0.0.1", port), timeout=60)
        except ConnectionRefusedError:
            continue  # the peer is still importing
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with plain:
        with daemon("--insecure") as address:
            session = dr.init_master_worker(workers=[address], insecure=True, quiet=True)
            figures = _against(session, "tcp", plain, rounds, shared=False)
        figures += _against(
            dr.init_master_worker(world_size=1, quiet=True), "same machine", plain, rounds, shared=True
        )
    process.join()
    return figures
