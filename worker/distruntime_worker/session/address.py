"""Where other workers reach this one: the host that its data channels listen on and tell the others."""

from __future__ import annotations

import os
import socket

from distruntime.errors import ConfigurationError
from distruntime.wire.address import host_of

from .config import WorkerConfig

_ANY = ("", "*", "0.0.0.0", "::")


def data_host(config: WorkerConfig, proposed: str) -> str:
    """Return this worker's host for the others: what it was told, else where it listens, else where its
    master reaches it or it its master.

    `proposed` is the host by which the master has dialled this worker, if it has.
    """
    if config.data_host:
        return config.data_host
    address = config.listen or config.master or ""
    if not address.startswith("tcp://"):
        # This is an ipc address, so all are on this machine.
        return "127.0.0.1"
    host = host_of(address)
    if config.listen is not None:
        return proposed if host in _ANY and proposed else "127.0.0.1" if host in _ANY else host
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # This sends nothing: the system only chooses the interface.
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def peer_address(config: WorkerConfig, proposed: str, session: int) -> str:
    """Return an address to listen on for other workers, for one of this process's sessions."""
    address = config.listen or config.master or ""
    if address.startswith("ipc://"):
        return f"{address}-peer-{os.getpid()}-{session}"
    host = data_host(config, proposed)
    return f"tcp://[{host}]:{config.data_port}" if ":" in host else f"tcp://{host}:{config.data_port}"


def unusable_for_workers(address: str, error: ConfigurationError) -> ConfigurationError:
    """Return the error of an address that this worker cannot listen on for other workers.

    One that is not about the address stays.
    """
    cause = error.__cause__
    if cause is None:
        return error
    why = getattr(cause, "strerror", "") or cause
    return ConfigurationError(
        f"cannot listen at {address.removeprefix('tcp://')} for other workers: {why}. Expected a host of "
        "this "
        "machine and a free port, and one session at a time where the port is named: start the worker with "
        "another "
        "--data-address HOST:PORT, or leave the port out"
    )
