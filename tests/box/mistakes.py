"""Clusters on which something is wrong from the start: the error names the host, what was tried, and the
command that shows it.
"""

from __future__ import annotations

from scenarios import MASTER, PORT, Scenario, Topology, rack

from router import Weather

_TEN: dict[str, object] = {"timeout": 10}
_FILTERED = Weather(ports=(22,))
_DIALS = {
    "worker": ("--master", f"tcp://{MASTER}:{PORT}"),
    "begin": {"listen": f"tcp://0.0.0.0:{PORT}", "world_size": 2},
    "dial": True,
}

TOPOLOGIES = (
    Topology(
        "filtered",
        "the port of gpu2 is filtered: what is sent there is dropped in silence",
        **rack(2, weather=((MASTER, "gpu2", _FILTERED),)),  # type: ignore[arg-type]
    ),
    Topology(
        "filtered-22",
        "port 22 of gpu2 is filtered",
        **rack(  # type: ignore[arg-type]
            2,
            worker=(),
            begin={"workers": ["ssh://gpu1", "ssh://gpu2"]},
            services=("sshd",),
            ssh="ConnectTimeout 5\n",
            weather=((MASTER, "gpu2", Weather(ports=(PORT,))),),
        ),
    ),
    Topology(
        "no-way-back",
        "the name of the master stands for an address that leads nowhere, on gpu2 alone",
        **rack(2, **_DIALS, seen={"gpu2": {MASTER: ("10.77.0.77",)}}),  # type: ignore[arg-type]
    ),
    Topology(
        "eight-key",
        "eight hosts, and gpu5 has another key",
        **rack(8, odd={"gpu5": "key"}),  # type: ignore[arg-type]
    ),
    Topology(
        "eight-protocol",
        "eight hosts, and the worker of gpu5 is of another version",
        **rack(8, odd={"gpu5": "protocol"}),  # type: ignore[arg-type]
    ),
)

SCENARIOS = (
    Scenario("filtered", "a filtered port", "filtered", r"gpu2:29400.*nc -vz gpu2 29400", begin=_TEN),
    Scenario("filtered-22", "a filtered port 22", "filtered-22", r"ssh://gpu2: .*ssh gpu2", begin=_TEN),
    Scenario(
        "no-way-back",
        "a host that the master's name does not lead back from",
        "no-way-back",
        r"node 1 is missing.*gpu1.*nc -vz laptop 29400",
        # The other host's worker must be there by then. Beside other work its start took more than 10 s.
        begin={"timeout": 40},
    ),
    Scenario(
        "eight-key",
        "one key of eight differs",
        "eight-key",
        r"gpu5:29400.*keys do not match.*cksum",
        begin=_TEN,
    ),
    Scenario(
        "eight-protocol",
        "one version of eight differs",
        "eight-protocol",
        r"gpu5.*protocol.*distruntime-worker --version",
        begin=_TEN,
    ),
)
