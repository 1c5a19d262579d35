"""Addresses as users write them: what they stand for, and the error of one that cannot be used."""

from __future__ import annotations

import socket

from distruntime.errors import ConfigurationError


def resolve(address: str) -> list[str]:
    """Return the endpoints that a tcp address stands for; none where its host is a wildcard, an interface or unknown yet."""
    transport, _, rest = address.partition("://")
    port = rest.rpartition(":")[2]
    if transport != "tcp":
        return []
    if port != "*" and not (port.isdecimal() and int(port) < 65536):
        raise unusable(address, f"{port!r} is no port")
    try:
        found = socket.getaddrinfo(host_of(address), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    hosts = [str(where[0]) for *_, where in found]
    return [f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}" for host in hosts]


def host_of(address: str) -> str:
    """Return the host in a tcp address, an IPv6 one without its brackets; nothing for another transport."""
    transport, _, rest = address.partition("://")
    return rest.rpartition(":")[0].strip("[]") if transport == "tcp" else ""


def wants_ipv6(address: str, resolved: list[str]) -> bool:
    """Return whether to turn on libzmq's IPv6, which then takes a name's IPv6 address even where the peer listens on its IPv4 one only."""
    return address.startswith("tcp://*") or (bool(resolved) and all("[" in endpoint for endpoint in resolved))


def unusable(address: str, error: Exception | str) -> ConfigurationError:
    """Return the error of an address that cannot be listened at or dialled."""
    return ConfigurationError(f"got address {address!r}: {error}. Expected tcp://host:port or ipc://path (at most 107 characters of path).")
