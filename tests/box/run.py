"""Run one program on a cluster in a box, in every weather. `make cluster`.

    python tests/box/run.py               all scenarios but those that take minutes, and the figures
    python tests/box/run.py --long        those too
    python tests/box/run.py --boxes 2     two scenarios at a time: each waits for most of its time
    python tests/box/run.py NAME ...      these; --list prints them
    python tests/box/run.py --chaos 1000  random programs through so many faults
    python tests/box/run.py --soak 120    the same programs again and again, for so many minutes

A scenario is green if the program computes what it does in calm weather, to the last bit, or fails with the
cause that is true, in time. What the processes have printed is in `build/box/`. It takes root on Linux, and
`/dev/net/tun`. Elsewhere it says what is missing, and fails nothing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import chaos
import clocks
import large
import launched
import mistakes
import scenarios
import services
from scenarios import DOWN, PROGRAM, Change, Clock, Scenario, Topology

import hosts
from box import Box, Program
from processes import ROOT, until
from router import Weather

_FILES = (scenarios, clocks, launched, mistakes, large)
SCENARIOS = tuple(scenario for file in _FILES for scenario in file.SCENARIOS)
TOPOLOGIES = tuple(topology for file in _FILES for topology in file.TOPOLOGIES)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
PYTHON = "{python}"
CANNOT = "cannot run here: "
# What a program has left behind ends within so many seconds.
LEAVING = 60.0
# A program has so many seconds to begin a session, on a machine that may be busy.
BEGINNING = 120.0
# These are bits a second and seconds.
NARROW, LONG = 20e6, 0.05
# What the program of many workers says of itself, in seconds and MiB.
MEASURED = ("began", "computed", "memory", "replaced", "moved")
# This is the name of the figures, beside those of the scenarios.
FIGURES = "figures"


class Lane:
    """Runs scenarios, one after the other. It keeps the last box while its workers are of use.

    A context manager.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._stack = ExitStack()
        self._box: Box | None = None
        # What the program computes in calm weather, by the number of its workers and of its rounds.
        self._calm: dict[tuple[int, int], str] = {}
        self._topologies = {topology.name: topology for topology in TOPOLOGIES}

    def __enter__(self) -> Lane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Give the last box up."""
        self._box = None
        self._stack.close()

    def _of(self, topology: Topology) -> Box:
        if self._box is None or self._box.topology != topology:
            self.end()
            logs = self._logs / topology.name
            shutil.rmtree(logs, ignore_errors=True)
            logs.mkdir(parents=True)
            self._box = self._stack.enter_context(Box(topology, logs, {}))
        return self._box

    def run(self, scenario: Scenario) -> tuple[str, str]:
        """Run a scenario. Return what is wrong, or nothing, and what was seen."""
        topology = self._topologies[scenario.topology]
        own = scenario.program != PROGRAM
        wanted = "right" if own else self._wanted(len(topology.workers), scenario.rounds)
        box = self._of(topology)
        said, seconds = go(box, scenario)
        wrong = verdict(scenario, said, wanted, seconds)
        # What masters leave on daemons' hosts has tests of its own.
        if not wrong and topology.launch + tuple(s for s in topology.services if s != "clock") != (PYTHON,):
            wrong = _left(box)
        if wrong or scenario.spoils:
            self.end()
        lengths = [f"{length:g}" for length in said.get("rounds", ())]
        figures = "".join(f", {name} {said[name]}" for name in MEASURED if name in said)
        seen = f"{seconds:.1f} s{figures}" + (f", rounds of {' '.join(lengths)}" if lengths else "")
        return wrong, seen + (f": {str(said['failed'])[:300]}" if "failed" in said and not wrong else "")

    def lacks(self, scenario: Scenario) -> str:
        """Return why there can be no such scenario here, or nothing."""
        return services.lacking(self._topologies[scenario.topology].services)

    def _wanted(self, workers: int, rounds: int) -> str:
        if (workers, rounds) not in self._calm:
            name = next(t.name for t in TOPOLOGIES if len(t.workers) == workers)
            scenario = Scenario("calm", "nothing", name, rounds=rounds)
            said, _ = go(self._of(self._topologies[name]), scenario)
            self._calm[workers, rounds] = str(said.get("result", f"nothing, as {said.get('failed', said)}"))
        return self._calm[workers, rounds]

    def figures(self) -> tuple[str, str]:
        """Measure throughput against the link's own. Return what is too low, or nothing, and the figures."""
        weathers = {"long": Weather(delay=LONG / 2), "narrow": Weather(rate=NARROW)}
        box = self._of(self._topologies["rack"])
        box.calm()
        found: dict[str, float] = {}
        with box.run({}, "measured.py") as program:
            for line in program.lines(time.monotonic() + BEGINNING + 120):
                if "at" in line:
                    box.network.weather("*", "*", weathers.get(line["at"], Weather()))
                    program.go_on()
                found |= line.get("found", {})
        box.calm()
        if not found:
            return "it did not end well, see build/box/rack/master.log", ""
        delayed = found["operations a second at 50 ms"] / found["operations a second"]
        parts = {name: found[name] / NARROW for name in found if not name.startswith("operations")}
        low = [f"{name} {part:.3f}" for name, part in parts.items() if part < 0.9]
        low += [f"operations {delayed:.3f}"] if delayed < 0.95 else []
        told = f"{found['operations a second']:,.0f} operations a second, at 50 ms {delayed:.3f} of that"
        told += "; of 20 Mbit/s " + ", ".join(f"{name} {part:.3f}" for name, part in parts.items())
        return f"too low: {', '.join(low)}" if low else "", told


def go(box: Box, scenario: Scenario) -> tuple[dict[str, Any], float]:
    """Run the program in a scenario. Return what it said, and the seconds since the first change."""
    _settled(box, scenario)
    # Each entry has a time and the change that ends then.
    ends: list[tuple[float, Change]] = []
    said: dict[str, Any] = {}
    # A program that is to end is let into no other round.
    ended = False
    first = time.monotonic()
    deadline = first + BEGINNING + scenario.within
    options = {"rounds": scenario.rounds, "begin": dict(scenario.begin), **scenario.options}
    with box.run(options, scenario.program) as program:
        try:
            for line in program.lines(deadline):
                said |= line
                at = str(line.get("at", ""))
                if at.startswith("round") and not ended:
                    # A round may be over in a tenth of a second, so the program waits to be let into it.
                    program.go_on()
                for change in [one for one in scenario.changes if at == f"round {one.round}"]:
                    _begin(box, change, program)
                    ended = ended or change.what in ("interrupt", "kill")
                    first = time.monotonic()
                    deadline = first + scenario.within
                    ends.append((first + change.seconds, change))
                for entry in [one for one in ends if one[0] <= time.monotonic()]:
                    ends.remove(entry)
                    _end(box, scenario, entry[1])
        except TimeoutError as error:
            said["late"] = str(error)
        finally:
            for _, change in ends:
                _end(box, scenario, change)
            box.calm()
    return said, time.monotonic() - first


def _settled(box: Box, scenario: Scenario) -> None:
    """Bring the weather that holds all the time."""
    box.calm()
    for source, target in scenario.ways if scenario.weather is not None else ():
        box.network.weather(source, target, scenario.weather)


def _left(box: Box) -> str:
    try:
        until(lambda: not box.left(), LEAVING)
    except AssertionError:
        return f"there is left after {LEAVING:g} s: {', '.join(box.left())[:600]}"
    return ""


def _begin(box: Box, change: Change, program: Program) -> None:
    if change.what == "interrupt":
        program.interrupt()
    elif change.what == "kill":
        program.kill()
    elif change.what == "stop":
        box.hosts[change.host].stop()
    elif change.what == "vanish":
        for way in ((change.host, "*"), ("*", change.host)):
            box.network.weather(*way, DOWN)
        box.hosts[change.host].vanish()
    elif isinstance(change.what, Clock):
        services.set_clock(box.hosts[change.host], *change.what)
    else:
        for source, target in change.ways:
            assert isinstance(change.what, Weather)
            box.network.weather(source, target, change.what)


def _end(box: Box, scenario: Scenario, change: Change) -> None:
    if change.what == "stop":
        box.hosts[change.host].go_on()
    elif isinstance(change.what, Clock):
        services.set_clock(box.hosts[change.host], 0.0, 0.0)
    elif isinstance(change.what, Weather):
        _settled(box, scenario)


def verdict(scenario: Scenario, said: Mapping[str, Any], wanted: str, seconds: float) -> str:
    """Return what is wrong; nothing if it came as it must."""
    if "late" in said:
        return f"{said['late']}: {scenario.within:g} s, it last was at {said.get('at', 'the beginning')}"
    failed = str(said.get("failed", ""))
    if scenario.outcome == "ended":
        return f"it computed {said['result']}, and must have ended before" if "result" in said else failed
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


class Run:
    """Scenarios that run in so many boxes at a time, and how each has come out."""

    def __init__(self, names: Sequence[str], logs: Path, boxes: int) -> None:
        self._logs, self._boxes = logs, boxes
        # A scenario that has not come to its end is red.
        self.how = dict.fromkeys(names, "red")
        # The scenarios of a topology share a box, so they stay together.
        together: dict[str, list[str]] = {}
        for name in names:
            together.setdefault(BY_NAME[name].topology if boxes > 1 else "", []).append(name)
        self._waiting = deque(together.values())

    def run(self) -> None:
        """Run them all. Ctrl-C ends this process, and with it all that runs in the boxes."""
        # A box ends with the thread that has made it.
        threads = [threading.Thread(target=self._work, args=(k,), daemon=True) for k in range(1, self._boxes)]
        for thread in threads:
            thread.start()
        self._work(0)
        for thread in threads:
            thread.join()

    def _work(self, number: int) -> None:
        with Lane(self._logs / f"beside-{number}" if number else self._logs) as lane:
            while names := self._next():
                for name in names:
                    self._one(lane, name)

    def _next(self) -> list[str]:
        """Return scenarios that nobody runs so far; none where there are no more."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return []

    def _one(self, lane: Lane, name: str) -> None:
        scenario = BY_NAME[name]
        if why := lane.lacks(scenario):
            self.how[name] = "not here"
            say(f"{name} ({scenario.what}): {CANNOT}{why}")
            return
        began = time.monotonic()
        try:
            wrong, seen = lane.run(scenario)
        except Exception as error:
            # The others go on: a box that does not come up is this one's.
            wrong, seen = f"{type(error).__name__}: {error}", ""
            lane.end()
        self.how[name] = "red" if wrong else "green"
        took = f"{time.monotonic() - began:.0f} s with its box"
        say(f"{name} ({scenario.what}): {f'RED: {wrong}; ' if wrong else 'green, '}{seen}; {took}")


def say(text: str) -> None:
    """Print a line at once: several threads do."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str], logs: Path = ROOT / "build" / "box") -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--long", action="store_true", help="also what takes minutes")
    parser.add_argument("--list", action="store_true", help="print the scenarios, and run nothing")
    parser.add_argument("--chaos", type=int, metavar="FAULTS", help="random programs through so many faults")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="the same programs for so many minutes")
    parser.add_argument("--boxes", type=int, default=1, metavar="N", help="so many scenarios at a time")
    parser.add_argument("--seed", type=int, default=1, help="of the programs and faults")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - BY_NAME.keys() - {FIGURES}:
        parser.error(f"there is no scenario {', '.join(sorted(unknown))}")
    names = options.names or [one.name for one in SCENARIOS if options.long or not one.long] + [FIGURES]
    if options.list:
        for name in names:
            print(
                f"{name}: {BY_NAME[name].what if name in BY_NAME else 'throughput against that of the link'}"
            )
        return 0
    if why := hosts.unavailable():
        print(f"{CANNOT}{why}")
        return 0
    # A shell's job in the background ignores Ctrl-C, and so would the programs that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.chaos:
        return chaos.chaos(options.chaos, options.seed, logs / "chaos")
    if options.soak:
        return chaos.soak(options.soak, options.seed, logs / "soak")
    found = Run([name for name in names if name != FIGURES], logs, options.boxes)
    found.run()
    how = found.how
    if FIGURES in names:
        # Nothing runs beside what is measured.
        with Lane(logs) as lane:
            wrong, seen = lane.figures()
        how[FIGURES] = "red" if wrong else "green"
        say(f"{FIGURES}: {f'RED: {wrong}; ' if wrong else 'green, '}{seen}")
    some = {what: [name for name in names if how[name] == what] for what in ("green", "red", "not here")}
    told = [f"{what}: {', '.join(some[what])}" for what in ("red", "not here") if some[what]]
    print(", ".join([f"{len(some['green'])} of {len(names)} green", *told]))
    return 1 if some["red"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
