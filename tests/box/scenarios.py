"""The clusters of the box, and what befalls them: each as data, with what must come of it."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from router import Weather

MASTER = "laptop"
PORT, DATA_PORT = 29400, 29401
PROGRAM = "program.py"
# This is a name, and addresses with the lengths of their networks, the largest packet, and whether it leads
# anywhere: the arguments of `hosts.Interface`.
Interface = (
    tuple[str, tuple[str, ...]] | tuple[str, tuple[str, ...], int] | tuple[str, tuple[str, ...], int, bool]
)
Way = tuple[str, str]
_NOTHING: Mapping[str, object] = MappingProxyType({})
_EVERYWHERE: tuple[Way, ...] = (("*", "*"),)


class Topology(NamedTuple):
    """Hosts, how they are joined, and how master and workers find each other."""

    name: str
    what: str
    hosts: Mapping[str, tuple[Interface, ...]]
    # What `/etc/hosts` says on all of them.
    names: Mapping[str, tuple[str, ...]]
    workers: tuple[str, ...]
    # The words of `distruntime-worker`; {name} is the host's. Without any, others start the workers.
    worker: tuple[str, ...]
    # The words of `init_master_worker`.
    begin: Mapping[str, object]
    # The workers dial.
    dial: bool = False
    # Hosts behind NAT, and their address outside.
    nat: Mapping[str, str] = MappingProxyType({})
    weather: tuple[tuple[str, str, Weather], ...] = ()
    # Who is asked for other names.
    nameservers: tuple[str, ...] = ()
    # What `/etc/hosts` says on a host instead.
    seen: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    # What runs on the hosts beside workers, and what `~/.ssh/config` says there.
    services: tuple[str, ...] = ()
    ssh: str = ""
    # These words stand before the program, and this command runs beside it; {python} is the interpreter.
    launch: tuple[str, ...] = ("{python}",)
    beside: tuple[str, ...] = ()
    # The worker of a host has another "key", or speaks another "protocol".
    odd: Mapping[str, str] = MappingProxyType({})
    # All processes have these variables.
    variables: Mapping[str, str] = MappingProxyType({})


class Clock(NamedTuple):
    """A host's calendar clock: it jumps by so many seconds, and gains this part of the time since then."""

    ahead: float
    gains: float = 0.0


class Change(NamedTuple):
    """Something that befalls the cluster while the program runs."""

    # It happens when the program has just begun this round, and ends after so many seconds.
    round: int
    seconds: float
    # A weather on these ways, a clock, "stop" or "vanish" for a host, "interrupt" or "kill" for the program.
    what: Weather | Clock | str
    ways: tuple[Way, ...] = _EVERYWHERE
    host: str = ""


class Scenario(NamedTuple):
    """A topology, a weather and what must come of it."""

    name: str
    what: str
    topology: str
    # The program computes what it does in calm weather, bit by bit; it fails with words that match this; or
    # it has "ended" before it was done.
    outcome: str = "equal"
    # From the first change on, or from the start where there is none, it takes no longer.
    within: float = 120.0
    # What holds all the time.
    weather: Weather | None = None
    ways: tuple[Way, ...] = _EVERYWHERE
    changes: tuple[Change, ...] = ()
    rounds: int = 4
    begin: Mapping[str, object] = _NOTHING
    # Other options of the program.
    options: Mapping[str, object] = _NOTHING
    # Takes minutes: only with --long.
    long: bool = False
    # The workers are of no use to the next one.
    spoils: bool = False
    # This one is the master, or it says itself whether all is "right".
    program: str = PROGRAM


def four(number: int) -> tuple[Interface, ...]:
    """Return the one interface of a host with this number."""
    return (("eth0", (f"10.77.0.{number}/16",)),)


def rack(workers: int, **changes: object) -> dict[str, object]:
    """Return the fields of a topology: a master and so many workers, side by side."""
    names = [f"gpu{k + 1}" for k in range(workers)]
    return {
        "hosts": {MASTER: four(1), **{name: four(11 + k) for k, name in enumerate(names)}},
        "names": {MASTER: ("10.77.0.1",), **{name: (f"10.77.0.{11 + k}",) for k, name in enumerate(names)}},
        "workers": tuple(names),
        "worker": ("--listen", f"tcp://0.0.0.0:{PORT}"),
        "begin": {"workers": [f"tcp://{name}:{PORT}" for name in names]},
        **changes,
    }


_DIAL: dict[str, object] = {
    "worker": ("--master", f"tcp://{MASTER}:{PORT}"),
    "begin": {"listen": f"tcp://0.0.0.0:{PORT}", "world_size": 2},
    "dial": True,
}
_SIX = {name: (f"fd77::{number}",) for name, number in ((MASTER, 1), ("gpu1", 11), ("gpu2", 12))}
_BETWEEN_RACKS = Weather(delay=0.01)

TOPOLOGIES = (
    Topology("rack", "two workers and a master, side by side", **rack(2)),  # type: ignore[arg-type]
    Topology("rack-dial", "the same, and the workers dial", **rack(2, **_DIAL)),  # type: ignore[arg-type]
    Topology(
        "nat",
        "a master behind NAT: nobody can dial it",
        **rack(  # type: ignore[arg-type]
            2,
            hosts={MASTER: (("eth0", ("192.168.7.2/24",)),), "gpu1": four(11), "gpu2": four(12)},
            nat={MASTER: "10.77.0.99"},
        ),
    ),
    Topology(
        "nat-dial",
        "workers behind NAT, each in a network of its own: they dial the master, and cannot dial each other",
        **rack(  # type: ignore[arg-type]
            2,
            hosts={
                MASTER: four(1),
                "gpu1": (("eth0", ("192.168.7.11/24",)),),
                "gpu2": (("eth0", ("192.168.8.12/24",)),),
            },
            nat={"gpu1": "10.77.0.98", "gpu2": "10.77.0.99"},
            **_DIAL,
        ),
    ),
    Topology(
        "two-racks",
        "20 ms between racks: the master and gpu1 in one, gpu2 in the other",
        **rack(2, weather=(("gpu2", "*", _BETWEEN_RACKS), ("*", "gpu2", _BETWEEN_RACKS))),  # type: ignore[arg-type]
    ),
    Topology(
        "two-interfaces",
        "each worker has a second interface that leads nowhere, and its own name there stands for that one",
        **rack(  # type: ignore[arg-type]
            2,
            hosts={
                MASTER: four(1),
                "gpu1": (*four(11), ("ib0", ("10.99.0.11/24",), 1500, False)),
                "gpu2": (*four(12), ("ib0", ("10.99.0.12/24",), 1500, False)),
            },
            names={MASTER: ("10.77.0.1",), "gpu1": ("10.99.0.11",), "gpu2": ("10.99.0.12",)},
            begin={"workers": [f"tcp://10.77.0.11:{PORT}", f"tcp://10.77.0.12:{PORT}"]},
        ),
    ),
    Topology(
        "two-interfaces-dial",
        "the same, and the workers dial",
        **rack(  # type: ignore[arg-type]
            2,
            hosts={
                MASTER: (*four(1), ("ib0", ("10.99.0.1/24",), 1500, False)),
                "gpu1": (*four(11), ("ib0", ("10.99.0.11/24",), 1500, False)),
                "gpu2": (*four(12), ("ib0", ("10.99.0.12/24",), 1500, False)),
            },
            names={MASTER: ("10.77.0.1",), "gpu1": ("10.99.0.11",), "gpu2": ("10.99.0.12",)},
            **_DIAL,
        ),
    ),
    Topology(
        "own-names",
        "the name of each host stands for 127.0.1.1 there, as Debian has it",
        **rack(2, seen={name: {name: ("127.0.1.1",)} for name in (MASTER, "gpu1", "gpu2")}),  # type: ignore[arg-type]
    ),
    Topology(
        "names-differ",
        "the workers' names stand for the interface that leads nowhere on the workers, and not on the master",
        **rack(  # type: ignore[arg-type]
            2,
            hosts={
                MASTER: four(1),
                "gpu1": (*four(11), ("ib0", ("10.99.0.11/24",), 1500, False)),
                "gpu2": (*four(12), ("ib0", ("10.99.0.12/24",), 1500, False)),
            },
            seen={name: {"gpu1": ("10.99.0.11",), "gpu2": ("10.99.0.12",)} for name in ("gpu1", "gpu2")},
        ),
    ),
    Topology(
        "ipv6",
        "IPv6 only, by address",
        **rack(  # type: ignore[arg-type]
            2,
            hosts={name: (("eth0", (f"{where[0]}/64",)),) for name, where in _SIX.items()},
            names=_SIX,
            worker=("--listen", f"tcp://[::]:{PORT}"),
            begin={"workers": [f"tcp://[fd77::11]:{PORT}", f"tcp://[fd77::12]:{PORT}"]},
        ),
    ),
    Topology(
        "ipv6-names",
        "IPv6 only, by name",
        **rack(  # type: ignore[arg-type]
            2,
            hosts={name: (("eth0", (f"{where[0]}/64",)),) for name, where in _SIX.items()},
            names=_SIX,
            worker=("--listen", f"tcp://*:{PORT}"),
        ),
    ),
    Topology(
        "ipv6-dial",
        "IPv6 only, and the workers dial the master's name",
        **rack(  # type: ignore[arg-type]
            2,
            hosts={name: (("eth0", (f"{where[0]}/64",)),) for name, where in _SIX.items()},
            names=_SIX,
            **{**_DIAL, "begin": {"listen": f"tcp://[::]:{PORT}", "world_size": 2}},
        ),
    ),
    Topology(
        "mtu",
        "packets of 1,280 bytes at most in the middle: the hosts' interfaces do not know",
        **rack(2, weather=(("*", "*", Weather(mtu=1280)),)),  # type: ignore[arg-type]
    ),
    Topology(
        "one-port",
        "a firewall that drops all but the workers' port in silence",
        **rack(2, weather=(("*", "*", Weather(ports=(PORT,))),)),  # type: ignore[arg-type]
    ),
    Topology(
        "two-ports",
        "a firewall that drops all but the worker's port, and one that is named for other workers",
        **rack(  # type: ignore[arg-type]
            2,
            weather=(("*", "*", Weather(ports=(PORT, DATA_PORT))),),
            worker=("--listen", f"tcp://0.0.0.0:{PORT}", "--data-address", f"{{name}}:{DATA_PORT}"),
        ),
    ),
    Topology(
        "dead-dns",
        "nobody answers at the address of the name server",
        **rack(2, nameservers=("10.77.9.9",)),  # type: ignore[arg-type]
    ),
    Topology(
        "three",
        "three workers",
        **rack(3),  # type: ignore[arg-type]
    ),
)

_BETWEEN_WORKERS = (("gpu1", "gpu2"), ("gpu2", "gpu1"))
_TO_MASTER = (("gpu1", MASTER), ("gpu2", MASTER), (MASTER, "gpu1"), (MASTER, "gpu2"))
DOWN = Weather(up=False)


def _drop(seconds: float, ways: tuple[Way, ...] = _EVERYWHERE) -> tuple[Change, ...]:
    return (Change(1, seconds, DOWN, ways),)


SCENARIOS = (
    Scenario("calm", "nothing", "rack"),
    Scenario("loss", "1 % of the packets are lost", "rack", weather=Weather(loss=0.01)),
    Scenario("jitter", "50 ms ± 20 each way", "rack", weather=Weather(delay=0.05, jitter=0.02)),
    Scenario("narrow", "20 Mbit/s", "rack", weather=Weather(rate=20e6)),
    Scenario("reorder", "5 % of the packets come 10 ms late", "rack", weather=Weather(reorder=0.05)),
    Scenario("duplicate", "5 % of the packets come twice", "rack", weather=Weather(duplicate=0.05)),
    Scenario(
        "all-bad",
        "1 % lost, 50 ms ± 20, 20 Mbit/s, 2 % late",
        "rack",
        weather=Weather(loss=0.01, delay=0.05, jitter=0.02, rate=20e6, reorder=0.02),
    ),
    Scenario("drop-2", "all links are down for 2 s", "rack", changes=_drop(2)),
    Scenario("drop-30", "all links are down for 30 s", "rack", changes=_drop(30)),
    Scenario("drop-300", "all links are down for 300 s", "rack", changes=_drop(300), within=600, long=True),
    Scenario("drop-2-dial", "the same for workers that dial", "rack-dial", changes=_drop(2)),
    Scenario("drop-30-dial", "all links are down for 30 s, workers dial", "rack-dial", changes=_drop(30)),
    Scenario(
        "deaf-master", "nothing comes from the workers for 30 s", "rack", changes=_drop(30, _TO_MASTER[:2])
    ),
    Scenario(
        "mute-master", "nothing comes to the workers for 30 s", "rack", changes=_drop(30, _TO_MASTER[2:])
    ),
    Scenario("to-master-30", "the master's links are down for 30 s", "rack", changes=_drop(30, _TO_MASTER)),
    Scenario(
        "workers-2",
        "the links between the workers are down for 2 s",
        "rack",
        changes=_drop(2, _BETWEEN_WORKERS),
    ),
    Scenario(
        "workers-30",
        "the links between the workers are down for 30 s",
        "rack",
        changes=_drop(30, _BETWEEN_WORKERS),
    ),
    Scenario(
        "workers-one-way-30",
        "nothing comes from gpu1 to gpu2 for 30 s",
        "rack",
        changes=_drop(30, _BETWEEN_WORKERS[:1]),
    ),
    Scenario(
        "workers-cut",
        "the workers never reach each other, the master reaches both",
        "rack",
        outcome=r"did not join.*gpu2.*nc -vz",
        weather=DOWN,
        ways=_BETWEEN_WORKERS,
        spoils=True,
    ),
    Scenario(
        "stopped",
        "all processes of gpu2 stand still for 15 s",
        "rack",
        changes=(Change(1, 15, "stop", host="gpu2"),),
    ),
    Scenario(
        "stopped-master",
        "all processes of the master's host stand still for 15 s",
        "rack",
        changes=(Change(1, 15, "stop", host=MASTER),),
    ),
    Scenario(
        "vanished",
        "gpu2 loses its power",
        "rack",
        outcome=r"NodeFailed: .*gpu2.*unreachable",
        within=60,
        begin={"grace": 15},
        changes=(Change(1, inf, "vanish", host="gpu2"),),
        spoils=True,
    ),
    Scenario("nat", "a master behind NAT", "nat"),
    Scenario("nat-drop-30", "a master behind NAT, all links down for 30 s", "nat", changes=_drop(30)),
    Scenario(
        "nat-dial", "workers behind NAT", "nat-dial", outcome=r"did not join.*192\.168\.\d\.1\d:\d+.*nc -vz"
    ),
    Scenario("two-racks", "20 ms between racks", "two-racks"),
    Scenario("two-interfaces", "an interface that leads nowhere", "two-interfaces"),
    Scenario("two-interfaces-dial", "an interface that leads nowhere, workers dial", "two-interfaces-dial"),
    Scenario("own-names", "a host's own name stands for 127.0.1.1", "own-names"),
    Scenario("names-differ", "names stand for other addresses on the workers", "names-differ"),
    Scenario("ipv6", "IPv6 only", "ipv6"),
    Scenario("ipv6-names", "IPv6 only, by name", "ipv6-names"),
    Scenario("ipv6-dial", "IPv6 only, workers dial", "ipv6-dial"),
    Scenario("mtu", "1,280 bytes in the middle", "mtu"),
    Scenario("one-port", "one open port", "one-port", outcome=r"did not join.*gpu2.*nc -vz"),
    Scenario(
        "two-ports",
        "two open ports, data by relay",
        "two-ports",
        begin={"data_channel": "relay"},
        options={"spmd": False},
    ),
    Scenario(
        "two-ports-spmd",
        "two open ports, data by relay, and processes of dr.spmd, which need others",
        "two-ports",
        outcome=r"gpu2.*does not reach.*gpu1:\d+.*nc -vz",
        begin={"data_channel": "relay"},
        spoils=True,
    ),
    Scenario("dead-dns", "a name server that does not answer", "dead-dns"),
    Scenario(
        "three", "three workers in bad weather", "three", weather=Weather(delay=0.02, jitter=0.01, loss=0.005)
    ),
)
