"""Launchers and data channels in the box: ssh, Slurm, MPI, Ray, torchrun's scripts, and what befalls them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import inf

from scenarios import DOWN, MASTER, PORT, Change, Scenario, Topology, four, rack

from router import Weather

LAUNCH = ("{python}", "-m", "distruntime", "launch")
SSH = {"worker": (), "begin": {"workers": ["ssh://gpu1", "ssh://gpu2"]}, "services": ("sshd",)}
_NOTHING: Mapping[str, object] = {}
_ONLY_22 = Weather(ports=(22,))
_GATE = "gate"
_BEHIND = {
    **SSH,
    "hosts": {MASTER: four(1), _GATE: four(5), "gpu1": four(11), "gpu2": four(12)},
    "names": {
        MASTER: ("10.77.0.1",),
        _GATE: ("10.77.0.5",),
        "gpu1": ("10.77.0.11",),
        "gpu2": ("10.77.0.12",),
    },
    "ssh": f"Host gpu*\n ProxyJump {_GATE}\n",
}
# Between the master and the rack only one port of one host is open.
_JUMP = (
    *((MASTER, "*", DOWN), ("*", MASTER, DOWN)),
    *((MASTER, _GATE, _ONLY_22), (_GATE, MASTER, _ONLY_22)),
)
_ROOT = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
_MPIRUN = (
    "mpirun",
    *_ROOT,
    "--oversubscribe",
    *("-x", "PYTHONPATH", "-x", "DISTRUNTIME_STATE", "-x", "OMP_NUM_THREADS"),
)

TOPOLOGIES = (
    Topology("ssh", "two hosts that ssh reaches, and no daemon", **rack(2, **SSH)),  # type: ignore[arg-type]
    Topology(
        "jump",
        "the hosts of a rack are behind a jump host, of which port 22 is open",
        **rack(2, **_BEHIND, weather=_JUMP),  # type: ignore[arg-type]
    ),
    Topology(
        "jump-only-22",
        "the same, and the hosts of the rack reach each other at port 22 alone",
        **rack(2, **_BEHIND, weather=(("*", "*", _ONLY_22), *_JUMP)),  # type: ignore[arg-type]
    ),
    Topology(
        "hosts",
        "distruntime launch --hosts",
        **rack(2, **{**SSH, "begin": {}}, launch=(*LAUNCH, "--hosts", "gpu1,gpu2")),  # type: ignore[arg-type]
    ),
    Topology(
        "torchrun",
        "distruntime run, with two daemons and two ranks on each",
        **rack(  # type: ignore[arg-type]
            2,
            launch=(
                *("{python}", "-m", "distruntime", "run"),
                *("--workers", f"tcp://gpu1:{PORT},tcp://gpu2:{PORT}", "--nproc-per-node", "2"),
            ),
            # Neither its command line nor that of a daemon names these.
            variables={"DISTRUNTIME_GRACE": "15"},
        ),
    ),
    Topology(
        "slurm",
        "Slurm of three nodes, and a host from which jobs are submitted",
        **rack(  # type: ignore[arg-type]
            3,
            worker=(),
            begin={},
            services=("slurm",),
            launch=("salloc", "--quiet", "--nodes=3", *LAUNCH, "--slurm"),
        ),
    ),
    Topology(
        "mpirun",
        "Open MPI over three hosts, of which the first runs the script",
        **rack(  # type: ignore[arg-type]
            2,
            worker=(),
            begin={},
            services=("mpirun", "sshd"),
            # mpirun waits for a host as long as its ssh does.
            ssh="ServerAliveInterval 5\n",
            launch=(*_MPIRUN, "--host", f"{MASTER},gpu1,gpu2", *LAUNCH, "--mpi"),
        ),
    ),
    Topology(
        "mpi-data",
        "workers that one mpirun starts on two hosts, and that dial the master",
        **rack(  # type: ignore[arg-type]
            2,
            worker=(),
            begin={"listen": f"tcp://0.0.0.0:{PORT}", "world_size": 2, "data_channel": "mpi"},
            services=("mpirun", "sshd", "mpi4py"),
            beside=(
                *(*_MPIRUN, "--host", "gpu1,gpu2", "{python}", "-m", "distruntime_worker"),
                *("--master", f"tcp://{MASTER}:{PORT}", "--node", "rank", "--once"),
            ),
        ),
    ),
    Topology(
        "ray",
        "a Ray cluster of three nodes, and its head where the script runs",
        **rack(  # type: ignore[arg-type]
            3, worker=(), begin={}, services=("ray",), launch=(*LAUNCH, "--ray", "-n", "3")
        ),
    ),
)

_LOST = r"NodeFailed: .*gpu2"


def _fates(
    topology: str, what: str, *, lost: str = _LOST, ending: Mapping[str, object] = _NOTHING, **fields: object
) -> tuple[Scenario, ...]:
    """Return what befalls a launcher: nothing, Ctrl-C, kill -9, and the death of a node.

    Args:
        topology: its topology, whose name those of the scenarios begin with.
        what: what it is.
        lost: what must come of the death.
        ending: the options of the program where it is to end before it is done.
        fields: fields of all these scenarios.
    """
    fates: tuple[tuple[str, str, dict[str, object]], ...] = (
        ("", "", {}),
        (
            "-ctrl-c",
            ", Ctrl-C",
            {"changes": (Change(1, inf, "interrupt"),), "outcome": "ended", "within": 60},
        ),
        ("-kill-9", ", kill -9", {"changes": (Change(1, inf, "kill"),), "outcome": "ended", "within": 60}),
        (
            "-death",
            ", a node loses its power",
            {
                "changes": (Change(1, inf, "vanish", host="gpu2"),),
                "outcome": lost,
                "begin": {"grace": 15},
                "spoils": True,
            },
        ),
    )
    return tuple(
        Scenario(
            f"{topology}{end}",
            f"{what}{told}",
            topology,
            **{**fields, **more, "options": ending if end else {}},  # type: ignore[arg-type]
        )
        for end, told, more in fates
    )


_BAD = Weather(loss=0.01, delay=0.02, jitter=0.01, reorder=0.02)


def _channel(name: str, topology: str = "rack", collectives: bool = False) -> tuple[Scenario, ...]:
    """Return what befalls a data channel: nothing, bad weather, and links that are down for two seconds."""
    fields: dict[str, object] = {"begin": {"data_channel": name}, "program": "channel.py"}
    fields["options"] = {"collectives": collectives}
    of, short = f"the data channel {name}", name.replace("+", "-")
    between = (("gpu1", "gpu2"), ("gpu2", "gpu1"))
    return (
        Scenario(short, of, topology, **fields),  # type: ignore[arg-type]
        Scenario(f"{short}-bad", f"{of}, 1 % lost, 20 ms ± 10, 2 % late", topology, weather=_BAD, **fields),  # type: ignore[arg-type]
        Scenario(
            f"{short}-drop-2", f"{of}, 2 s down", topology, changes=(Change(1, 2, DOWN, between),), **fields
        ),  # type: ignore[arg-type]
    )


SCENARIOS = (
    *_channel("tcp"),
    *_channel("tcp+tls"),
    *_channel("relay", collectives=True),
    *_fates("ssh", "ssh:// addresses"),
    Scenario("jump", "a jump host", "jump"),
    Scenario("jump-drop-2", "a jump host, all links down for 2 s", "jump", changes=(Change(1, 2, DOWN),)),
    Scenario(
        "jump-only-22", "only port 22 is open, data goes through ssh", "jump-only-22", options={"spmd": False}
    ),
    *_fates("hosts", "distruntime launch --hosts"),
    *_fates(
        "torchrun",
        "a script of torchrun's on two hosts",
        lost="ended",
        ending={"waits": True},
        program="ranks.py",
    ),
    *_fates("slurm", "Slurm of three nodes"),
    # mpirun itself ends all of them when it misses a host.
    *_fates("mpirun", "Open MPI over hosts", lost="ended"),
    *_channel("mpi", "mpi-data", collectives=True),
    *_fates("ray", "a Ray cluster of three nodes"),
)
