"""The TCP sockets of this process.

Which listen, and what is connected to what. Libraries do not say which are theirs, so one looks.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# A thread holds it while it makes this process listen somewhere. So a thread that looks before and after
# knows that what is new is its own.
LISTENING = threading.Lock()

# It has an address and a port.
Endpoint = tuple[str, int]
# Linux and others list here what a process has open.
_OPEN = ("/proc/self/fd", "/dev/fd")


@dataclass(frozen=True)
class TCPSockets:
    """Where this process listens, and its connections as (its own end, the other end)."""

    listening: frozenset[Endpoint]
    connected: frozenset[tuple[Endpoint, Endpoint]]


def tcp_sockets() -> TCPSockets | None:
    """Return this process's TCP sockets; None where the system does not list them."""
    folder = next((path for path in map(Path, _OPEN) if path.is_dir()), None)
    if folder is None:
        return None
    listening, connected = set(), set()
    for name in os.listdir(folder):
        # It is closed meanwhile, or is no socket, or is not connected.
        with suppress(OSError), _socket(int(name)) as sock:
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
