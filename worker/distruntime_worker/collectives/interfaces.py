"""Which network interface has an address, for libraries that are told interfaces by their names."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

# This is Linux's request for the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915
# Each line has the address, a number, the prefix, the scope, the flags and the name.
_IPV6 = Path("/proc/net/if_inet6")


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
        for line in _IPV6.read_text().splitlines():
            fields = line.split()
            found.append((fields[-1], ipaddress.IPv6Address(bytes.fromhex(fields[0]))))
    return found
