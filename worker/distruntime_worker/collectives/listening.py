"""The TCP sockets of this process, and the network interface that has an address.

Which listen, and what is connected to what. Libraries do not say which are theirs, so one looks. Others are
told interfaces by their names.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distruntime.wire.shield import Lock

# A thread holds it while it makes this process listen somewhere. So a thread that looks before and after
# knows that what is new is its own.
LISTENING = Lock()

# It has an address and a port.
Endpoint = tuple[str, int]
# Linux and others list here what a process has open.
_OPEN = ("/proc/self/fd", "/dev/fd")
# This is Linux's request for the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915
# Each line has the address, a number, the prefix, the scope, the flags and the name.
_IPV6 = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class TCPSockets:
    """Where this process listens, and its connections as (its own end, the other end)."""

    listening: frozenset[Endpoint]
    connected: frozenset[tuple[Endpoint, Endpoint]]


def tcp_sockets() -> TCPSockets | None:
    """Return this process's TCP sockets; None where the system does not list them.

    It looks at each descriptor, some 6 us for one: see `next_descriptors`.
    """
    folder = next((path for path in map(Path, _OPEN) if path.is_dir()), None)
    return None if folder is None else sockets_among(map(int, os.listdir(folder)))


def next_descriptors(count: int) -> list[int]:
    """Return the numbers of the descriptors that are opened next, as long as nobody closes one.

    The system gives out the lowest that are free. So whoever knows them finds what a library opens without a
    look at each descriptor of the process. They are fewer where few are left.
    """
    held: list[int] = []
    with suppress(OSError):
        held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(held) < count:
            held.append(os.dup(held[0]))
    for descriptor in held:
        os.close(descriptor)
    return held


def sockets_among(descriptors: Iterable[int]) -> TCPSockets:
    """Return the TCP sockets among some descriptors."""
    listening, connected = set(), set()
    for number in descriptors:
        # It is closed meanwhile, or is no socket, or is not connected.
        with suppress(OSError), _socket(number) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                own = _endpoint(sock.getsockname())
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening.add(own)
                else:
                    connected.add((own, _endpoint(sock.getpeername())))
    return TCPSockets(frozenset(listening), frozenset(connected))


def _socket(number: int) -> socket.socket:
    """Return another descriptor of the socket with this one."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _endpoint(name: tuple[str, int] | tuple[str, int, int, int]) -> Endpoint:
    address = ipaddress.ip_address(name[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        # The other end may call it so.
        address = address.ipv4_mapped
    return str(address), name[1]


def interface_of(host: str) -> str:
    """Return the name of the interface with this host's address.

    Nothing where none is found, as on systems other than Linux.
    """
    try:
        addresses = {
            ipaddress.ip_address(str(row[4][0]).partition("%")[0])
            for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        }
    except (OSError, ValueError):
        return ""
    return next((name for name, address in _interfaces() if address in addresses), "")


def _interfaces() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    found: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    if not Path("/proc/self").exists():
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            # It has no IPv4 address.
            with suppress(OSError):
                row = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, ipaddress.IPv4Address(row[20:24])))
    # This system has no IPv6.
    with suppress(OSError):
        for line in _IPV6.read_text(encoding="utf-8").splitlines():
            fields = line.split()
            found.append((fields[-1], ipaddress.IPv6Address(bytes.fromhex(fields[0]))))
    return found
