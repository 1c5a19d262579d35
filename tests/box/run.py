"""Run one program on a cluster in a box, in every weather. `make cluster`.

    python tests/box/run.py               all scenarios but those that take minutes
    python tests/box/run.py --long        those too
    python tests/box/run.py NAME ...      these; --list prints them

A scenario is green if the program computes what it does in calm weather, to the last bit, or fails with the
cause that is true, in time. What the processes have printed is in `build/box/`. It takes root on Linux, and
`/dev/net/tun`. Elsewhere it says what is missing, and fails nothing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from scenarios import DOWN, SCENARIOS, TOPOLOGIES, Change, Scenario, Topology

import hosts
from box import Box
from processes import ROOT

LOGS = ROOT / "build" / "box"
CANNOT = "cannot run here: "
# A program has so many seconds to begin a session, on a machine that may be busy.
BEGINNING = 120.0


def go(box: Box, scenario: Scenario) -> tuple[dict[str, object], float]:
    """Run the program in a scenario. Return what it said last, and the seconds since the first change."""
    box.calm()
    if scenario.weather is not None:
        for source, target in scenario.ways:
            box.network.weather(source, target, scenario.weather)
    pending = list(scenario.changes)
    due: list[tuple[float, Change, bool]] = []
    said: dict[str, object] = {}
    first = began = time.monotonic()
    deadline = began + BEGINNING + scenario.within
    options = {"rounds": scenario.rounds, "pace": scenario.pace, "begin": dict(scenario.begin)}
    with box.run(options) as program:
        try:
            for line in program.lines(deadline):
                said |= {name: value for name, value in line.items() if name not in ("time",)}
                for change in [one for one in pending if said.get("at") == f"round {one.round}"]:
                    pending.remove(change)
                    due.append((time.monotonic() + change.wait, change, True))
                for entry in [one for one in due if one[0] <= time.monotonic()]:
                    due.remove(entry)
                    _, change, begins = entry
                    befall(box, scenario, change, begins)
                    if begins:
                        first = time.monotonic()
                        deadline = first + scenario.within
                        due.append((first + change.seconds, change, False))
        except TimeoutError as error:
            said["late"] = str(error)
        finally:
            for _, change, begins in due:
                if not begins and change.what == "stop":
                    box.hosts[change.host].go_on()
            box.calm()
    return said, time.monotonic() - first


def befall(box: Box, scenario: Scenario, change: Change, begins: bool) -> None:
    """Begin or end a change."""
    if change.what == "stop":
        host = box.hosts[change.host]
        host.stop() if begins else host.go_on()
    elif change.what == "vanish":
        for way in ((change.host, "*"), ("*", change.host)):
            box.network.weather(*way, DOWN)
        box.hosts[change.host].vanish()
    elif begins:
        assert not isinstance(change.what, str)
        for source, target in change.ways:
            box.network.weather(source, target, change.what)
    else:
        box.calm()
        if scenario.weather is not None:
            for source, target in scenario.ways:
                box.network.weather(source, target, scenario.weather)


def verdict(scenario: Scenario, said: Mapping[str, object], wanted: str, seconds: float) -> str:
    """Return what is wrong; nothing if it came as it must."""
    if "late" in said:
        return f"{said['late']}: {scenario.within:g} s, it last was at {said.get('at', 'the beginning')}"
    failed = str(said.get("failed", ""))
    if scenario.outcome == "equal":
        if failed:
            return failed
        return "" if said.get("result") == wanted else f"it computed {said.get('result')}, and not {wanted}"
    if not failed:
        return f"it did not fail, and must: {scenario.outcome}"
    if not re.search(scenario.outcome, failed, re.DOTALL):
        return f"the words do not match {scenario.outcome!r}: {failed}"
    return (
        "" if seconds <= scenario.within else f"it failed after {seconds:.0f} s, and not {scenario.within:g}"
    )


class Boxes:
    """The box of the last topology, while its workers are of use."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._box: Box | None = None

    def of(self, topology: Topology) -> Box:
        if self._box is None or self._box.topology != topology:
            self.end()
            logs = LOGS / topology.name
            shutil.rmtree(logs, ignore_errors=True)
            logs.mkdir(parents=True)
            self._box = self._stack.enter_context(Box(topology, logs, {}))
        return self._box

    def end(self) -> None:
        self._box = None
        self._stack.close()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--long", action="store_true", help="also what takes minutes")
    parser.add_argument("--list", action="store_true", help="print the scenarios, and run nothing")
    options = parser.parse_args(arguments)
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    if unknown := set(options.names) - by_name.keys():
        parser.error(f"there is no scenario {', '.join(sorted(unknown))}")
    chosen = [
        one
        for one in SCENARIOS
        if (one.name in options.names if options.names else options.long or not one.long)
    ]
    if options.list:
        for one in chosen:
            print(f"{one.name}: {one.what}")
        return 0
    if why := hosts.unavailable():
        print(f"{CANNOT}{why}")
        return 0
    topologies = {topology.name: topology for topology in TOPOLOGIES}
    boxes, wanted, red = Boxes(), dict[tuple[int, int], str](), 0
    try:
        for scenario in chosen:
            topology = topologies[scenario.topology]
            size = len(topology.workers), scenario.rounds
            if size not in wanted and scenario.name != "calm":
                calm = by_name["calm"]._replace(topology="three" if size[0] == 3 else "rack", rounds=size[1])
                said, _ = go(boxes.of(topologies[calm.topology]), calm)
                wanted[size] = str(said.get("result"))
            box = boxes.of(topology)
            said, seconds = go(box, scenario)
            wanted.setdefault(size, str(said.get("result")))
            wrong = verdict(scenario, said, wanted[size], seconds)
            red += bool(wrong)
            told = f"RED: {wrong}" if wrong else "green"
            failed = "" if wrong or "failed" not in said else f": {str(said['failed'])[:200]}"
            lengths = "".join(f" {length:g}" for length in said.get("rounds", ()))
            took = f"{seconds:.1f} s{lengths and ', rounds of'}{lengths}"
            print(f"{scenario.name} ({scenario.what}): {told}, {took}{failed}", flush=True)
            if wrong or scenario.spoils:
                boxes.end()
    finally:
        boxes.end()
    print(f"{len(chosen) - red} of {len(chosen)} green")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
