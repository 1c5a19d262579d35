"""The command that starts a worker where a session expects one."""

from __future__ import annotations

import socket

from ..wire.address import host_of


def dialled_at(address: str) -> str:
    """Return where others dial what listens at an address: a wildcard stands for this machine's name."""
    port = address.rpartition(":")[2]
    return f"tcp://{socket.gethostname()}:{port}" if host_of(address) in ("*", "0.0.0.0", "::") else address


def worker_command(address: str, *, dials: bool) -> str:
    """Return the command of a worker that dials an address, or listens there."""
    return (
        f"distruntime-worker --master {dialled_at(address)}"
        if dials
        else f"distruntime-worker --listen {address}"
    )
