"""Addresses as users write them: what they stand for, and the error of one that cannot be used."""

from __future__ import annotations

import errno
import socket
import threading
from ipaddress import ip_address
from typing import final

from ..errors import ConfigurationError

# The kernel keeps a connection to itself for about so many seconds while nothing comes through it.
_SILENT = 5


def require_port(address: str) -> None:
    """Raise `ConfigurationError` if a tcp address has no port, or none that can be."""
    transport, _, rest = address.partition("://")
    port = rest.rpartition(":")[2]
    if transport != "tcp":
        return
    if ":" not in rest.rpartition("]")[2]:
        raise unusable(address, "the port is missing")
    if port != "*" and not (port.isdecimal() and int(port) < 65536):
        raise unusable(address, f"{port!r} is no port")


def resolve(address: str) -> list[str]:
    """Return the endpoints that a tcp address stands for.

    An empty list where its host is a wildcard, an interface or unknown yet.
    """
    if not address.startswith("tcp://"):
        return []
    require_port(address)
    port = address.rpartition(":")[2]
    try:
        found = socket.getaddrinfo(host_of(address), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    hosts = [str(where[0]) for *_, where in found]
    return [f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}" for host in hosts]


@final
class Lookups:
    """Looks up the hosts that addresses name, each in a thread: libzmq would do it in the one that all
    connections share.
    """

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        # Threads look these up now.
        self._sought: set[str] = set()

    def endpoint(self, address: str) -> str | None:
        """Return where to dial an address; None while its host is looked up. Return at once."""
        if not _has_name(address):
            return address
        found = self._found.pop(address, None)
        if found is None and address not in self._sought:
            self._sought.add(address)
            name = f"distruntime-resolves-{host_of(address)}"
            threading.Thread(target=self._look_up, args=(address,), name=name, daemon=True).start()
        return found

    def _look_up(self, address: str) -> None:
        try:
            self._found[address] = next(iter(resolve(address)), address)
        finally:
            self._sought.discard(address)


def _has_name(address: str) -> bool:
    """Whether an address names a host, where it could give the number."""
    host = host_of(address)
    try:
        ip_address(host)
    except ValueError:
        return bool(host)
    return False


def listener(address: str, backlog: int) -> socket.socket | None:
    """Return a socket that listens at a tcp address, as libzmq's would; None where that is no host: another
    transport, or an interface.

    Raises:
        OSError: the address is in use, or not this machine's.
    """
    host, port = host_of(address), address.rpartition(":")[2]
    if not address.startswith("tcp://"):
        return None
    if host == "*":
        where = [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]
    else:
        found = [endpoint.partition("://")[2].rpartition(":")[0] for endpoint in resolve(address)]
        where = [(socket.AF_INET, name) for name in found if ":" not in name] or [
            (socket.AF_INET6, name.strip("[]")) for name in found
        ]
    for family, name in where:
        try:
            made = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            # This machine has no IPv6.
            if error.errno == errno.EAFNOSUPPORT and len(where) > 1:
                continue
            raise
        try:
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((name, 0 if port == "*" else int(port)))
            made.listen(backlog)
            # The kernel keeps a connection through which nothing comes: libzmq's own peers speak at once.
            if hasattr(socket, "TCP_DEFER_ACCEPT"):
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT)
            # Otherwise libzmq's thread would wait for a connection that has gone before it was accepted.
            made.setblocking(False)
        except BaseException:
            made.close()
            raise
        return made
    return None


def host_of(address: str) -> str:
    """Return the host in a tcp address, an IPv6 one without its brackets; nothing for another transport."""
    transport, _, rest = address.partition("://")
    return rest.rpartition(":")[0].strip("[]") if transport == "tcp" else ""


def trial_of(address: str) -> str:
    """Return the command that shows whether a tcp address is reached; nothing for another transport."""
    host = host_of(address)
    return f"nc -vz {host} {address.rpartition(':')[2]}" if host else ""


def wants_ipv6(address: str, resolved: list[str]) -> bool:
    """Return whether to turn on libzmq's IPv6, which then takes a name's IPv6 address even where the peer
    listens on its IPv4 one only.
    """
    return address.startswith("tcp://*") or (bool(resolved) and all("[" in endpoint for endpoint in resolved))


def unusable(address: str, error: Exception | str) -> ConfigurationError:
    """Return the error of an address that cannot be listened at or dialled."""
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        return ConfigurationError(
            f"got address {address!r}: it is in use: another program listens there already. Choose another "
            "port, or end that program"
        )
    return ConfigurationError(
        f"got address {address!r}: {error}. Expected tcp://host:port or ipc://path (at most 107 characters "
        "of path)."
    )
