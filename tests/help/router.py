"""The network of a cluster in a box: one process that has the far end of every host's interface, as a switch
and the routers behind it have. It needs no kernel module but TUN, and no firewall of the system.

Each packet that a host sends is a datagram here. The router delays it, drops it, holds it back or rewrites
its address, and then gives it to the host that has its destination. So between two hosts there is the weather
that was said last. Packets for any other address are dropped: nothing here leads out.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# This is CLONE_NEWNET of sched.h.
_NEWNET = 0x40000000
# These are of linux/if_tun.h. An interface has packets without a header of its own, and no Ethernet.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_TUN = "/dev/net/tun"
# The largest packet of IP.
_LARGEST = 65535
# So many packets of an interface are taken before the others have their turn.
_TURN = 32
_TCP, _UDP, _ICMP = 6, 17, 1
_SYN, _ACK = 0x02, 0x10
# NAT gives out these ports.
_PORTS = range(40_000, 60_000)


@dataclass(frozen=True)
class Weather:
    """What happens to packets on their way from one host to another.

    `delay`, `jitter`, `held` and `queue` are in seconds, `rate` in bits a second (0: no limit), the others
    are parts of all packets. Jitter keeps the order. `reorder` of the packets are held back by `held`, and
    others overtake them. What would wait longer than `queue` for its turn at a rate is dropped, as a router's
    queue is finite.
    """

    delay: float = 0.0
    jitter: float = 0.0
    rate: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    held: float = 0.01
    duplicate: float = 0.0
    queue: float = 0.1
    # False: everything is dropped, and nobody is told.
    up: bool = True
    # A TCP connection to any other port is dropped in silence. None: all ports are open.
    ports: tuple[int, ...] | None = None
    # A longer packet is dropped, and its sender hears of it. 0: the interfaces' own size.
    mtu: int = 0


CALM = Weather()


def unavailable() -> str:
    """Return why there can be no such network here; nothing if there can."""
    if not os.path.exists(_TUN):
        return f"there is no {_TUN}"
    try:
        os.close(os.open(_TUN, os.O_RDWR))
    except OSError as error:
        return f"{_TUN} cannot be opened: {error.strerror}"
    return ""


class Router:
    """The process, and what it is told. It ends with this one, however that ends. A context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        # This closes its pipes, and waits for it.
        with self._process:
            self._process.kill()

    def _say(self, *words: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the router has ended: {self._process.wait()}"
        return json.loads(answer)

    def attach(self, host: str, namespace: str, interface: str, addresses: Sequence[str]) -> None:
        """Make an interface in a namespace, a path of /proc. Packets for its addresses go to it."""
        self._say("attach", host, namespace, interface, list(addresses))

    def translate(self, host: str, address: str) -> None:
        """Let a host be seen by others at this IPv4 address alone, as behind NAT: nobody can dial it."""
        self._say("translate", host, address)

    def weather(self, source: str, target: str, weather: Weather) -> None:
        """Say what happens on the way from a host to another; `*` is every host. What is said last holds."""
        self._say("weather", source, target, asdict(weather))

    def calm(self) -> None:
        """Forget all that `weather` has said."""
        self._say("calm")

    def counts(self) -> Mapping[str, int]:
        """Return how many packets and bytes were delivered, and how many packets were dropped and why."""
        counts: Mapping[str, int] = self._say("counts")
        return counts


class _Switch:
    def __init__(self) -> None:
        self.own = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.poll = select.poll()
        self.hosts: dict[int, str] = {}
        self.at: dict[bytes, int] = {}
        self.home: dict[bytes, str] = {}
        self.rules: list[tuple[str, str, Weather]] = []
        self.known: dict[tuple[str, str], Weather] = {}
        # Each way has the time when the last of its packets has left, and when it arrives.
        self.free: dict[tuple[str, str], float] = {}
        self.last: dict[tuple[str, str], float] = {}
        self.waiting: list[tuple[float, int, int, bytes]] = []
        self.number = 0
        self.chance = random.Random(0)
        self.count = {"packets": 0, "bytes": 0, "lost": 0, "full": 0, "down": 0, "closed": 0, "nowhere": 0}
        self.count["too long"] = 0
        # Hosts behind NAT, their address outside, and which connection has which port there.
        self.outside: dict[str, bytes] = {}
        self.ports: dict[tuple[bytes, int, int], int] = {}
        self.inside: dict[tuple[bytes, int, int], tuple[bytes, int]] = {}

    def run(self) -> None:
        self.poll.register(0, select.POLLIN)
        while True:
            wait = None
            if self.waiting:
                # This is in thousandths of a second, and poll waits no shorter.
                wait = max(0.0, (self.waiting[0][0] - time.monotonic()) * 1000)
            for descriptor, _ in self.poll.poll(wait):
                if descriptor:
                    self.take(descriptor)
                elif not self.obey():
                    return
            self.deliver()

    def obey(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False
        match json.loads(line):
            case ["attach", host, namespace, interface, addresses]:
                self.attach(host, namespace, interface, addresses)
            case ["translate", host, address]:
                self.outside[host] = socket.inet_aton(address)
            case ["weather", source, target, fields]:
                ports = fields.pop("ports")
                made = Weather(**fields, ports=None if ports is None else tuple(ports))
                self.rules = [rule for rule in self.rules if rule[:2] != (source, target)]
                self.rules.append((source, target, made))
                self.known.clear()
            case ["calm"]:
                self.rules.clear()
                self.known.clear()
            case ["counts"]:
                print(json.dumps(self.count), flush=True)
                return True
        print("[]", flush=True)
        return True

    def attach(self, host: str, namespace: str, interface: str, addresses: Sequence[str]) -> None:
        inside = os.open(namespace, os.O_RDONLY)
        self.enter(inside)
        try:
            tun = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", interface.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(tun, _TUNSETIFF, request)
        finally:
            self.enter(self.own)
            os.close(inside)
        self.hosts[tun] = host
        for address in addresses:
            packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
            self.at[packed], self.home[packed] = tun, host
        self.poll.register(tun, select.POLLIN)

    def enter(self, namespace: int) -> None:
        if self.libc.setns(namespace, _NEWNET):
            raise OSError(ctypes.get_errno(), "setns")

    def between(self, source: str, target: str) -> Weather:
        found = self.known.get((source, target))
        if found is None:
            found = CALM
            for one, other, weather in self.rules:
                if one in ("*", source) and other in ("*", target):
                    found = weather
            self.known[source, target] = found
        return found

    def take(self, tun: int) -> None:
        source = self.hosts[tun]
        for _ in range(_TURN):
            try:
                packet = os.read(tun, _LARGEST)
            except BlockingIOError:
                return
            except OSError:
                # The host is gone, and its interface with it.
                self.detach(tun)
                return
            self.send(tun, source, packet)

    def detach(self, tun: int) -> None:
        self.poll.unregister(tun)
        self.at = {address: where for address, where in self.at.items() if where != tun}
        del self.hosts[tun]
        os.close(tun)

    def send(self, tun: int, source: str, packet: bytes) -> None:
        if source in self.outside:
            packet = self.out(source, packet)
        destination = packet[16:20] if packet[0] >> 4 == 4 else packet[24:40]
        if destination in self.outside.values():
            packet = self.back(packet)
            destination = packet[16:20]
        to = self.at.get(destination)
        if to is None:
            self.count["nowhere"] += 1
            return
        target = self.hosts[to]
        way = source, target
        weather = self.between(source, target)
        if not weather.up:
            self.count["down"] += 1
            return
        if weather.ports is not None and _dialled(packet) not in (None, *weather.ports):
            self.count["closed"] += 1
            return
        if weather.mtu and len(packet) > weather.mtu:
            self.count["too long"] += 1
            if answer := _too_long(packet, weather.mtu):
                self.put(time.monotonic(), tun, answer)
            return
        if weather.loss and self.chance.random() < weather.loss:
            self.count["lost"] += 1
            return
        now = at = time.monotonic()
        if weather.rate:
            free = max(now, self.free.get(way, 0.0))
            if free - now > weather.queue:
                self.count["full"] += 1
                return
            at = self.free[way] = free + len(packet) * 8 / weather.rate
        at += weather.delay
        if weather.jitter:
            at = max(at + self.chance.uniform(-weather.jitter, weather.jitter), now, self.last.get(way, 0.0))
            self.last[way] = at
        if weather.reorder and self.chance.random() < weather.reorder:
            at += weather.held
        self.put(at, to, packet)
        if weather.duplicate and self.chance.random() < weather.duplicate:
            self.put(at, to, packet)

    def put(self, at: float, to: int, packet: bytes) -> None:
        self.number += 1
        heapq.heappush(self.waiting, (at, self.number, to, packet))

    def deliver(self) -> None:
        waiting, now = self.waiting, time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, to, packet = heapq.heappop(waiting)
            try:
                os.write(to, packet)
            except OSError:
                # The interface is down, or its host has gone.
                self.count["nowhere"] += 1
                continue
            self.count["packets"] += 1
            self.count["bytes"] += len(packet)

    # -- NAT -------------------------------------------------------------------------------------------------

    def out(self, host: str, packet: bytes) -> bytes:
        protocol, header = packet[9], (packet[0] & 15) * 4
        if packet[0] >> 4 != 4 or protocol not in (_TCP, _UDP):
            return packet
        inside, port = packet[12:16], int.from_bytes(packet[header : header + 2], "big")
        mapped = self.ports.get((inside, port, protocol))
        if mapped is None:
            mapped = _PORTS[len(self.ports) % len(_PORTS)]
            self.ports[inside, port, protocol] = mapped
            self.inside[self.outside[host], mapped, protocol] = inside, port
        return _rewritten(packet, 12, self.outside[host], header, mapped)

    def back(self, packet: bytes) -> bytes:
        protocol, header = packet[9], (packet[0] & 15) * 4
        port = int.from_bytes(packet[header + 2 : header + 4], "big")
        found = self.inside.get((packet[16:20], port, protocol))
        # Nobody inside has asked for it. The address outside is no host's, so it goes nowhere.
        return packet if found is None else _rewritten(packet, 16, found[0], header + 2, found[1])


def _dialled(packet: bytes) -> int | None:
    """Return the port to which this packet begins a TCP connection; None for any other packet.

    It also gives 0, which is no port, for packets of UDP.
    """
    four = packet[0] >> 4 == 4
    protocol, header = (packet[9], (packet[0] & 15) * 4) if four else (packet[6], 40)
    if protocol == _UDP:
        return 0
    if protocol != _TCP or packet[header + 13] & (_SYN | _ACK) != _SYN:
        return None
    return int.from_bytes(packet[header + 2 : header + 4], "big")


def _sum(data: bytes) -> int:
    """Return the sum of 16 bit words, in ones' complement."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data + bytes(len(data) % 2))[: (len(data) + 1) // 2])
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _adjusted(checksum: int, old: bytes, new: bytes) -> int:
    """Return a checksum after some bytes of what it covers have changed, as RFC 1624 does."""
    total = (~checksum & 0xFFFF) + (~_sum(old) & 0xFFFF) + _sum(new)
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _rewritten(packet: bytes, at: int, address: bytes, port_at: int, port: int) -> bytes:
    """Return an IPv4 packet with another address at one place and another port at another one."""
    made, header = bytearray(packet), (packet[0] & 15) * 4
    old, number = packet[at : at + 4], struct.pack("!H", port)
    made[at : at + 4], made[port_at : port_at + 2] = address, number
    (checksum,) = struct.unpack_from("!H", packet, 10)
    struct.pack_into("!H", made, 10, _adjusted(checksum, old, address))
    where = header + (16 if packet[9] == _TCP else 6)
    (checksum,) = struct.unpack_from("!H", packet, where)
    if packet[9] == _TCP or checksum:
        changed = _adjusted(checksum, old + packet[port_at : port_at + 2], address + number)
        struct.pack_into("!H", made, where, changed)
    return bytes(made)


def _too_long(packet: bytes, mtu: int) -> bytes:
    """Return what a router answers to an IPv4 packet that it may not cut: ICMP's "fragmentation needed".

    It names the sender's own destination as its source. Nothing for another packet.
    """
    if packet[0] >> 4 != 4 or packet[9] == _ICMP:
        return b""
    quoted = packet[: (packet[0] & 15) * 4 + 8]
    body = struct.pack("!BBHHH", 3, 4, 0, 0, mtu) + quoted
    body = body[:2] + struct.pack("!H", ~_sum(body) & 0xFFFF) + body[4:]
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 0, 0, 64, _ICMP, 0)
    header += packet[16:20] + packet[12:16]
    return header[:10] + struct.pack("!H", ~_sum(header) & 0xFFFF) + header[12:] + body


if __name__ == "__main__":
    _Switch().run()
