"""Where one machine is outgrown: eight hosts with several workers each, and a master that goes elsewhere."""

from __future__ import annotations

from launched import LAUNCH, SSH
from scenarios import MASTER, Scenario, Topology, four, rack

_DESK = "desk"
_HOSTS = rack(8)["workers"]
assert isinstance(_HOSTS, tuple)
_EIGHT = {"worker": (), "begin": {}}
# A worker that has died is started again so many times in all.
_AGAIN = ("--max-restarts", "64")

TOPOLOGIES = (
    Topology(
        "eight-hosts",
        "eight hosts that ssh reaches, with four workers each",
        **rack(  # type: ignore[arg-type]
            8, **{**SSH, **_EIGHT}, launch=(*LAUNCH, "--hosts", ",".join(_HOSTS), "-n", "32")
        ),
    ),
    Topology(
        "slurm-64",
        "Slurm of eight nodes, with eight workers each",
        **rack(  # type: ignore[arg-type]
            8,
            **_EIGHT,
            services=("slurm",),
            launch=("salloc", "--quiet", "--nodes=8", *LAUNCH, "--slurm", "-n", "64", *_AGAIN),
        ),
    ),
    Topology(
        "two-desks",
        "eight hosts with a daemon each, and two hosts of the user",
        **rack(  # type: ignore[arg-type]
            8,
            hosts={**rack(8)["hosts"], _DESK: four(2)},  # type: ignore[dict-item]
            names={**rack(8)["names"], _DESK: ("10.77.0.2",)},  # type: ignore[dict-item]
            services=("sshd",),
        ),
    ),
)
_OWN: dict[str, object] = {"program": "many.py", "within": 1800, "long": True}

SCENARIOS = (
    Scenario(
        "eight-hosts",
        "eight hosts with four workers each, by ssh",
        "eight-hosts",
        **_OWN,  # type: ignore[arg-type]
    ),
    Scenario(
        "slurm-64",
        "64 workers by Slurm in one line, of which 32 are lost and replaced",
        "slurm-64",
        options={"lose": 32},
        **_OWN,  # type: ignore[arg-type]
    ),
    Scenario(
        "moved",
        f"the master of eight workers leaves {MASTER}, and goes on on {_DESK}",
        "two-desks",
        options={"move": _DESK},
        begin={"session": "moved"},
        **_OWN,  # type: ignore[arg-type]
    ),
)
