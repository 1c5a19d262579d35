"""Clocks that differ, jump and drift. Deadlines are counted by a steady clock, whatever time of day it is."""

from __future__ import annotations

from math import inf

from scenarios import DOWN, MASTER, Change, Clock, Scenario, Topology, rack

_HOUR, _YEAR = 3600.0, 365 * 86400.0
# A clock that gains this is beyond what a quartz does by a factor of a thousand.
_DRIFT = 0.05
_JUMPS = (
    Change(1, inf, Clock(_HOUR), host="gpu2"),
    Change(1, inf, Clock(-_HOUR), host=MASTER),
)

TOPOLOGIES = (
    Topology(
        "clocks", "two workers and a master, each with a clock of its own", **rack(2, services=("clock",))
    ),  # type: ignore[arg-type]
)

SCENARIOS = (
    Scenario("clock-jump", "gpu2's clock jumps an hour ahead, the master's back", "clocks", changes=_JUMPS),
    Scenario(
        "clock-jump-drop-15",
        "the same while all links are down for 15 s",
        "clocks",
        begin={"grace": 90},
        changes=(Change(1, 15, DOWN), *_JUMPS),
    ),
    Scenario(
        "clock-drift",
        "gpu1's clock gains 3 minutes an hour, the master's loses as much, gpu2's is a year ahead",
        "clocks",
        changes=(
            Change(0, inf, Clock(0, _DRIFT), host="gpu1"),
            Change(0, inf, Clock(0, -_DRIFT), host=MASTER),
            Change(0, inf, Clock(_YEAR), host="gpu2"),
        ),
    ),
    Scenario(
        "clock-tcp-tls",
        "the data channel tcp+tls, whose certificates have dates, a year and an hour apart",
        "clocks",
        begin={"data_channel": "tcp+tls"},
        program="channel.py",
        options={"collectives": False},
        changes=(
            Change(0, inf, Clock(_YEAR), host="gpu2"),
            Change(0, inf, Clock(-_YEAR), host=MASTER),
            Change(2, inf, Clock(-_HOUR), host="gpu1"),
        ),
    ),
)
