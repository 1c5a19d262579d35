"""Where other workers reach this one: the host that its data channels listen on and tell the others."""

from __future__ import annotations

import ipaddress
import os
import socket

from distruntime.errors import ConfigurationError
from distruntime.wire import descriptors
from distruntime.wire.address import host_of

from ..collectives.listening import tcp_sockets
from .config import WorkerConfig

_ANY = ("", "*", "0.0.0.0", "::")


def data_host(config: WorkerConfig, proposed: str) -> str:
    """Return this worker's host for the others: what it was told, else where it listens, else where its
    master reaches it or it its master.

    `proposed` is the host by which the master has dialled this worker, if it has. A name may stand for
    something else on this machine: for its loopback, or for an interface that leads nowhere. So the address
    at which connections have come is taken where there is only one.
    """
    if config.data_host:
        return config.data_host
    address = config.listen or config.master or ""
    if not address.startswith("tcp://"):
        # This is an ipc address, so all are on this machine.
        return "127.0.0.1"
    host = host_of(address)
    if config.listen is None:
        return _towards(host)
    return host if host not in _ANY else _reached() or proposed or "127.0.0.1"


def _reached() -> str:
    """Return the address of this machine to which others have connected; nothing where that is not one.

    Raise `ConfigurationError` where no descriptor is left to look with: another address would be told then.
    """
    descriptors.require("a look at where its master has reached it", 2)
    sockets = tcp_sockets()
    if sockets is None:
        return ""
    ports = {port for _, port in sockets.listening}
    own = {host for (host, port), _ in sockets.connected if port in ports}
    found = [host for host in own if not ipaddress.ip_address(host).is_loopback]
    return found[0] if len(found) == 1 else ""


def _towards(host: str) -> str:
    """Return the address of this machine from which packets to a host go out.

    Raise `ConfigurationError` for a host that nobody knows.
    """
    try:
        rows = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigurationError(
            f"the master's host {host!r} is not known on {socket.gethostname()}: {error.strerror}. Name the "
            "address by which other workers reach this one: --data-address HOST"
        ) from error
    # libzmq takes an IPv6 address only where there is no other.
    family, _, _, _, where = min(rows, key=lambda row: row[0] == socket.AF_INET6)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # This sends nothing: the system only chooses the interface.
        probe.connect(where)
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
        "this machine and a free port, and one session at a time where the port is named: start the worker "
        "with another --data-address HOST:PORT, or leave the port out"
    )
