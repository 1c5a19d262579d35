"""Chaos and soak on a cluster in a box: two masters run random programs on three hosts.

    make cluster ARGS="--chaos 1000"        a fault every few seconds, so many in all
    make cluster ARGS="--soak 120"          rounds of the same programs, for so many minutes

In chaos each piece of work must come out equal, or fail with the cause that is true: what befalls links and
hosts for a few seconds is no cause, what is killed or used up is. In soak no process may have more memory,
descriptors, threads and files in the end, nor need more time: a straight line through what is measured after
each round may rise no more than its interval of confidence allows for.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import shutil
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from scenarios import DOWN, MASTER, Topology, rack

from box import Box, Masters, command
from processes import until
from router import Weather

# A worker that is silent for so many seconds is unreachable, and lost after so many.
UNREACHABLE, GRACE = 4, 90
# A master that says nothing for so many seconds hangs. This is longer than all its deadlines.
PATIENCE = 300.0
# What a fault has done shows, and what a killed process has left goes, within so many seconds.
LATER, LEAVING = 100.0, 150.0
# The masters begin in so many seconds, and so many wrong pieces are enough.
WARM, MOST_WRONG = 20.0, 20
# A slope goes through so many means. This is Student's t for 99 % and ten degrees of freedom.
BLOCKS, STUDENT = 12, 3.169
# A line may surely rise by so much, and one of times by 3 %.
ALLOWED = {"MiB": 1.0, "threads": 0.5, "descriptors": 0.5, "processes": 0.5, "files": 0.5}
SETTLE = 2.5
PROGRAM = "random_master.py"
VARIABLES = {"DISTRUNTIME_UNREACHABLE": str(UNREACHABLE), "PYTHONFAULTHANDLER": "1"}

THREE = Topology(
    "three-hosts",
    "three workers, and the host of two masters",
    **rack(3, variables=VARIABLES),  # type: ignore[arg-type]
)
WORKERS = THREE.workers


class Fault(NamedTuple):
    """A fault, with all that was drawn for it."""

    kind: str
    host: str
    other: str
    seconds: float
    part: float
    gap: float


# How many there are of each kind among fifty.
DECK = {
    "down": 6,
    "one_way": 6,
    "between": 5,
    "bad": 5,
    "narrow": 4,
    "stop": 5,
    "stop_master": 2,
    "full_disk": 5,
    "full_shm": 3,
    "descriptors": 4,
    "kill_child": 3,
    "kill": 2,
}
_GONE = r"NodeFailed|ConnectionFailed|did not join|is lost|was lost|broke|taken the other's place"
# What may fail a piece, and what its error must say then.
CAUSES = {
    "full_disk": r"No space left on device|to be written, \d+ are free|bytes free",
    "full_shm": r"/dev/shm of this worker is full",
    "descriptors": r"Too many open files|file descriptors? left",
    "kill_child": r"SIGKILL|signal 9|\(pid \d+\) exited",
    "kill": rf"(?=.*({_GONE}))(?=.*({{host}}|node {{node}}|\[{{address}}\]))",
}


def faults_of(seed: int) -> Iterator[Fault]:
    """Yield faults for ever: fifty cards, again and again, in an order of their own."""
    draw = random.Random(seed)
    while True:
        cards = [kind for kind, count in DECK.items() for _ in range(count)]
        for kind in draw.sample(cards, len(cards)):
            host, other = draw.sample(WORKERS, 2)
            seconds = draw.choice((0.2, 0.5, 1.0, 2.0, 3.0, 5.0))
            yield Fault(kind, host, other, seconds, draw.random(), draw.uniform(0.2, 1.6))


class Chaos:
    """The faults, and how each piece of work has come out."""

    def __init__(self, box: Box, masters: Masters, seed: int) -> None:
        self.box, self.masters, self.random = box, masters, random.Random(seed)
        # Each fault, and when it was over.
        self.over: list[tuple[Fault, float]] = []
        self.wrong: list[str] = []
        self.count: Counter[str] = Counter()
        self.printed: dict[str, str] = {}
        # In soak: who has ended its round, and how long an operation took there, in microseconds.
        self.rounds: dict[str, float] = {}

    # -- the faults

    def strike(self, fault: Fault) -> None:
        began = time.monotonic()
        # It is a cause from its first moment on.
        self.over.append((fault, float("inf")))
        getattr(self, fault.kind)(fault)
        self.over[-1] = fault, time.monotonic()
        self.count[f"fault {fault.kind}"] += 1
        self.masters.note(f"since {began:.2f}: {fault}")
        self.listen(fault.gap)

    def _weather(self, fault: Fault, weather: Weather, *ways: tuple[str, str]) -> None:
        for way in ways:
            self.box.network.weather(*way, weather)
        self.listen(fault.seconds)
        self.box.calm()

    def down(self, fault: Fault) -> None:
        self._weather(fault, DOWN, (fault.host, "*"), ("*", fault.host))

    def one_way(self, fault: Fault) -> None:
        end = MASTER if fault.part < 0.5 else fault.other
        self._weather(fault, DOWN, (fault.host, end) if fault.gap < 0.9 else (end, fault.host))

    def between(self, fault: Fault) -> None:
        self._weather(fault, DOWN, (fault.host, fault.other), (fault.other, fault.host))

    def bad(self, fault: Fault) -> None:
        weather = Weather(loss=0.02, delay=0.03 * fault.part, jitter=0.01, reorder=0.02, duplicate=0.02)
        self._weather(fault, weather, ("*", "*"))

    def narrow(self, fault: Fault) -> None:
        self._weather(fault, Weather(rate=5e6, delay=0.01), ("*", "*"))

    def stop(self, fault: Fault) -> None:
        self._stop(fault, fault.host)

    def stop_master(self, fault: Fault) -> None:
        self._stop(fault, MASTER)

    def _stop(self, fault: Fault, host: str) -> None:
        self.box.hosts[host].stop()
        self.listen(fault.seconds)
        self.box.hosts[host].go_on()

    def full_disk(self, fault: Fault) -> None:
        host = self.box.hosts[fault.host]
        host.do(f"dd if=/dev/zero of={host.temporary}/../junk bs=64k 2>/dev/null || true")
        self.listen(fault.seconds)
        host.do(f"rm {host.temporary}/../junk")

    def full_shm(self, fault: Fault) -> None:
        host = self.box.hosts[fault.host]
        used = "$(df --output=used -B1 /dev/shm | tail -1)"
        host.do(f"mount -o remount,size=$(({used} + 4096)) /dev/shm || true")
        self.listen(fault.seconds)
        host.do("mount -o remount,size=50% /dev/shm")

    def descriptors(self, fault: Fault) -> None:
        pid = self.box.daemon(fault.host)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        left = int(fault.part * 8)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")) + left, before[1]))
        self.listen(fault.seconds)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    def kill_child(self, fault: Fault) -> None:
        """Kill a process that the worker has started: a rank of `dr.spmd`, a loader's, one that compiles."""
        mine = self.box.begun(fault.host)
        for pid in self.random.sample(mine, min(1, len(mine))):
            self.masters.note(f"to be killed on {fault.host}: {command(pid)[:150]}")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self, fault: Fault) -> None:
        os.kill(self.box.daemon(fault.host), signal.SIGKILL)
        self.box.workers[fault.host].wait()
        self.keep(fault.host)
        self.listen(fault.part * 3)
        self.box.start_worker(fault.host)
        until(lambda: self.listen(0.1) or "listening on" in self.box.said(fault.host), 120)

    def keep(self, host: str) -> None:
        """Keep what a worker has printed, which the next one's file takes the place of."""
        self.printed[host] = self.printed.get(host, "") + self.box.said(host)

    # -- what comes of it

    def told(self) -> str:
        return ", ".join(f"{what} {count}" for what, count in sorted(self.count.items()))

    def listen(self, seconds: float) -> None:
        """Judge what the masters say, for so many seconds."""
        end = time.monotonic() + seconds
        while True:
            for name, line in self.masters.poll():
                if "done" in line:
                    self.judge(name, line)
                if "round" in line:
                    self.rounds[name] = float(line["round"])
            if time.monotonic() >= end or not self.masters.lines:
                return

    def go_on(self) -> None:
        """Let the masters into the next round."""
        self.rounds.clear()
        for program in self.masters.programs.values():
            program.go_on()

    def judge(self, name: str, line: Mapping[str, object]) -> None:
        odd = str(line["odd"])
        self.count[f"{line['done']} {'failed' if odd else 'equal'}"] += 1
        if not odd:
            return
        failed = re.search(r"(Error|Failed|Interrupt): ", odd)
        for fault, over in self.over:
            where = {"host": fault.host, "node": WORKERS.index(fault.host)}
            cause = CAUSES.get(fault.kind, r"\Z.").format(**where, address=THREE.names[fault.host][0])
            if failed and over > self.masters.began[name] - LATER and re.search(cause, odd, re.DOTALL):
                self.count[f"because of {fault.kind}"] += 1
                return
        since = [f"{fault.kind} {fault.host}" for fault, over in self.over[-12:]]
        self.wrong.append(
            f"{name}: {line['done']} {line['seed']}: {odd[:1500]}\n  lately: {', '.join(since)}"
        )
        print(f"WRONG {self.wrong[-1]}", flush=True)

    def end(self) -> None:
        """Let the masters end, and see what is left."""
        if len(self.masters.lines) == 1:
            self.wrong.append("a master has ended by itself, see its log")
        if not self.hung():
            (self.box.logs / "shared" / "stop").touch()
        while self.masters.lines and not self.hung():
            self.listen(0.5)
        if self.hung():
            self.wrong.append(f"HUNG: {self.hung()}")
            self.stacks()
            return
        try:
            until(lambda: not self.box.left(), LEAVING)
        except AssertionError:
            self.wrong.append(f"there is left after {LEAVING:g} s: {', '.join(self.box.left())[:2000]}")

    def hung(self) -> str:
        """Return who hangs, or nothing."""
        return self.masters.silent(PATIENCE)

    def stacks(self) -> None:
        """Have all write the stacks of their threads to their logs."""
        for pid in self.box.hosts[MASTER].processes():
            if PROGRAM in command(pid) and "setsid" not in command(pid):
                os.kill(pid, signal.SIGUSR1)
        for name in WORKERS:
            os.kill(self.box.daemon(name), signal.SIGABRT)
        self.listen(5.0)


@contextmanager
def lane(logs: Path, seed: int, soak: bool) -> Iterator[Chaos]:
    """Make the hosts, and start the masters."""
    shutil.rmtree(logs, ignore_errors=True)
    (logs / "shared").mkdir(parents=True)
    options: dict[str, Mapping[str, object]] = {
        name: {
            "name": name,
            "owner": "one",
            "publishes": name == "one",
            "seed": 2 * seed + k,
            "soak": soak,
            "folder": str(logs / "shared"),
            "begin": {"grace": GRACE, "session": f"box-{name}", "resume": "auto", "force": True},
        }
        for k, name in enumerate(("one", "two"))
    }
    with Box(THREE, logs, {}) as box, Masters(box, PROGRAM, options) as masters:
        yield Chaos(box, masters, seed)


def chaos(faults: int, seed: int, logs: Path) -> int:
    """Run random programs through so many faults. Return 1 where one is wrong, hangs, or leaves something."""
    began, struck = time.monotonic(), 0
    with lane(logs, seed, soak=False) as found:
        found.listen(WARM)
        for fault in islice(faults_of(seed), faults):
            if found.hung() or len(found.wrong) >= MOST_WRONG or len(found.masters.lines) < 2:
                break
            found.strike(fault)
            struck += 1
            if struck % 50 == 0:
                print(f"{struck} faults in {time.monotonic() - began:.0f} s: {found.told()}", flush=True)
        found.end()
        for name in WORKERS:
            found.keep(name)
    for name, text in found.printed.items():
        (logs / f"{name}-all.log").write_text(text, encoding="utf-8")
        if "Traceback" in text:
            found.wrong.append(f"{name} has printed a traceback, see {name}-all.log")
    print(f"seed {seed}: {struck} faults in {time.monotonic() - began:.0f} s: {found.told()}")
    print("\n".join(found.wrong) or "all is equal or failed with its true cause, none hangs, none is left")
    return 1 if found.wrong or struck < faults else 0


def sample(box: Box) -> dict[str, float]:
    """Return what each process has now, and how many processes and files each host has."""
    found: dict[str, float] = {}
    for host, made in box.hosts.items():
        pids = made.processes()
        found[f"{host}, processes"] = len(pids)
        found[f"{host}, files"] = int(made.do(f"find {made.temporary} {made.home} /dev/shm | wc -l"))
        for pid in pids:
            # One that comes and goes may have ended.
            with suppress(OSError, IndexError):
                status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
                what = f"{host} {pid} ({' '.join(command(pid).split()[1:4])[:40]})"
                found[f"{what}, MiB"] = int(status.partition("VmRSS:")[2].split()[0]) / 1024
                found[f"{what}, threads"] = int(status.partition("Threads:")[2].split()[0])
                found[f"{what}, descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
    return found


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return how much a straight line through values rises in all, and half of its interval of confidence.

    Values that follow each other are alike. So the line goes through means of some of them in a row.
    """
    cuts = [round(k * len(values) / BLOCKS) for k in range(BLOCKS + 1)]
    x, y = ([statistics.fmean(some[a:b]) for a, b in pairwise(cuts)] for some in (times, values))
    line = statistics.linear_regression(x, y)
    rest = sum((b - line.intercept - line.slope * a) ** 2 for a, b in zip(x, y)) / (BLOCKS - 2)
    error = math.sqrt(rest / sum((a - statistics.fmean(x)) ** 2 for a in x))
    whole = times[-1] - times[0]
    return line.slope * whole, STUDENT * error * whole


def flat(samples: Sequence[Mapping[str, float]]) -> list[str]:
    """Print how each figure has risen after the first third; return those that are not flat."""
    late = samples[len(samples) // 3 :]
    if len(late) < BLOCKS:
        return [f"{len(samples)} rounds are too few for a slope"]
    wrong = []
    for name in sorted(name for name in late[0] if name != "seconds"):
        values = [one[name] for one in late if name in one]
        if len(values) == len(late):
            rise, half = slope([one["seconds"] for one in late], values)
            allowed = ALLOWED.get(name.rpartition(", ")[2], 0.03 * values[0])
            print(f"  {name}: {values[0]:.1f}, rises by {rise:+.2f} ± {half:.2f}")
            if rise - half > allowed:
                wrong.append(f"{name} rises by {rise:.2f} ± {half:.2f} from {values[0]:.1f}")
    return wrong


def soak(minutes: float, seed: int, logs: Path) -> int:
    """Run the same programs again and again; a link drops now and then. Return 1 unless all is flat."""
    began, samples = time.monotonic(), list[dict[str, float]]()
    with lane(logs, seed, soak=True) as found:
        while time.monotonic() < began + 60 * minutes and not found.hung() and not found.wrong:
            if len(samples) % 10 == 9:
                host = WORKERS[len(samples) // 10 % len(WORKERS)]
                found.strike(Fault("down", host, host, 1.5, 0.0, 0.1))
            while len(found.rounds) < 2 and not found.hung() and len(found.masters.lines) == 2:
                found.listen(0.2)
            # What ended sessions leave is collected a second later.
            found.listen(SETTLE)
            times = {f"{name}, microseconds": value for name, value in found.rounds.items()}
            samples.append({"seconds": time.monotonic() - began, **times, **sample(found.box)})
            if len(samples) % 50 == 0:
                print(f"{len(samples)} rounds in {time.monotonic() - began:.0f} s", flush=True)
            found.go_on()
        # Each of them ends its round, and reads this line.
        (logs / "shared" / "stop").touch()
        found.go_on()
        found.end()
    (logs / "samples.json").write_text(json.dumps(samples), encoding="utf-8")
    print(f"{len(samples)} rounds in {time.monotonic() - began:.0f} s, of the last two thirds:")
    wrong = [*found.wrong, *flat(samples)]
    print("\n".join(wrong) or "flat")
    return 1 if wrong else 0
