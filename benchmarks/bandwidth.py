"""64 MiB up and down over loopback TCP, against a plain TCP socket into a kept buffer; and the way that one
machine offers.
"""

from __future__ import annotations

import torch

import distruntime as dr
from distruntime.session.session import active_session

from . import floors
from .floors import NBYTES
from .harness import Figure, daemon, in_turn, seconds


def _against(
    session: dr.types.Session, way: str, plain: floors.Socket, rounds: int, shared: bool
) -> list[Figure]:
    tensor = torch.randn(NBYTES // 4)
    local = memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
    remote: list[torch.Tensor] = []

    def plain_up() -> float:
        return plain.up(local)

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
            up(), down(), plain_up(), plain.down()
        assert torch.equal(remote[0].cpu(), tensor)
        figures = []
        for name, ours, theirs in (("up", up, plain_up), ("down", down, plain.down)):
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
    rounds = 3 if quick else 11
    with floors.bare_socket() as plain:
        with daemon("--insecure") as address:
            session = dr.init_master_worker(workers=[address], insecure=True, quiet=True)
            figures = _against(session, "tcp", plain, rounds, shared=False)
        figures += _against(
            dr.init_master_worker(world_size=1, quiet=True), "same machine", plain, rounds, shared=True
        )
    return figures
