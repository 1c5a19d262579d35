"""The structure-aware fuzzer: recorded traffic, mutated, against a worker and against a master, before and
behind authentication.

    export PYTHONPATH=.:worker:tests/help
    python tests/help/fuzzing.py record
    python tests/help/fuzzing.py run --seconds 60 --seed 1
    python tests/help/fuzzing.py run --against worker --round 417 --seed 1

The first command makes tests/help/fuzz_seeds.msgpack anew from real sessions. The second one attacks a
worker, a master, and a worker as a stranger, in turns. The third one repeats one round that has found
something.

The program exits with 1 if it found something. These are findings: a process that ends, hangs, unpickles or
starts programs; a legitimate peer that is not served in time or reads a wrong value; a traceback in the log;
an exception of a class that is not distruntime's own; memory, threads, descriptors or Python objects that
grow from round to round.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import fuzz_seeds
from fuzz_worker import AgainstWorker, Finding
from processes import pause

KINDS = ("worker", "master", "raw")
# After so many rounds, what is kept for good (torch's caches of operators, malloc's arenas) is there.
_WARM = 200
# So many rounds lie between looks at what a process holds.
_LOOK = 100
# What has grown is looked at so often, two seconds apart: a kernel or the joining of a group may take its
# time.
_WAITS = 10
# So much may come without being growth: a kernel that still runs, a cache that fills, and pyzmq's thread that
# frees what was sent without a copy. That thread starts with the first such message and has seven
# descriptors.
_SLACK = {"bytes": 200 << 20, "threads": 6, "descriptors": 12, "objects": 4000}


class Growth:
    """What a process held at each look; `check` raises where the last looks all lie above the first ones by
    more than the slack.
    """

    def __init__(self) -> None:
        self.looks: list[dict[str, Any]] = []

    def note(self, found: dict[str, Any]) -> None:
        self.looks.append(found)

    def check(self) -> None:
        if len(self.looks) < 4:
            return
        third = max(1, len(self.looks) // 3)
        first, last = self.looks[:third], self.looks[-third:]
        for name, slack in _SLACK.items():
            before, after = max(look[name] for look in first), min(look[name] for look in last)
            if after > before + slack:
                kinds = Counter(dict(last[-1]["kinds"]))
                kinds.subtract(dict(first[-1]["kinds"]))
                grown = [row for row in kinds.most_common(12) if row[1] > 0]
                now = f"{grown}; {last[-1]['names']}; {last[-1]['files']}"
                raise Finding(f"{name} have grown from {before} to {after} in {len(self.looks)} looks; {now}")

    def line(self) -> str:
        if not self.looks:
            return "not looked at"
        first, last = self.looks[0], self.looks[-1]
        return ", ".join(f"{name} {first[name]:,} to {last[name]:,}" for name in _SLACK)


def target(kind: str, folder: Path, seed: int) -> Any:
    """Return what `rounds` runs."""
    recordings = fuzz_seeds.load()
    if kind == "master":
        from fuzz_master import AgainstMaster

        return AgainstMaster(folder, recordings, seed)
    return AgainstWorker(folder, recordings, seed, raw=kind == "raw")


class Run:
    """Rounds of one kind, from one on, on targets that are started again after a finding."""

    def __init__(self, kind: str, seed: int, first: int = 0) -> None:
        self.kind, self.seed, self.next = kind, seed, first
        self.done = 0
        self.findings: list[tuple[int, str]] = []
        self.counts: Counter[str] = Counter()
        self.growth = Growth()
        self._target: Any = None
        self._folder: Any = None
        # There were so many rounds of this target.
        self._here = 0

    def step(self) -> None:
        """Run one round."""
        if self._target is None:
            self._folder = tempfile.TemporaryDirectory()
            os.chmod(self._folder.name, 0o700)
            self._target, self._here, self.growth = (
                target(self.kind, Path(self._folder.name), self.seed),
                0,
                Growth(),
            )
        number, self.next = self.next, self.next + 1
        try:
            self._target.round(number)
            self.done += 1
            self._here += 1
            if self._here > _WARM and self._here % _LOOK == 0:
                self.look()
        except Finding as found:
            self.findings.append((number, str(found)))
            print(f"FINDING --against {self.kind} --seed {self.seed} --round {number}\n{found}\n", flush=True)
            self.close()

    def look(self) -> None:
        """Note what the target holds; a `Finding` where that has grown, and stays so when all that was begun
        has had time to end.
        """
        found = self._target.holds()
        first = self.growth.looks[0] if self.growth.looks else found
        for _ in range(_WAITS):
            if all(found[name] <= first[name] + slack for name, slack in _SLACK.items()):
                break
            pause(2.0)
            found = self._target.holds()
        self.growth.note(found)
        self.growth.check()

    def close(self) -> None:
        if self._target is not None:
            self.counts += self._target.counts
            self._target.close()
            self._folder.cleanup()
            self._target = None

    def summary(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in self.counts.most_common())
        findings = f"{self.kind}: {self.done} rounds, {len(self.findings)} findings"
        return f"{findings}; {self.growth.line()}\n  sent: {counts}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("record", "run"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--against", choices=KINDS, action="append")
    parser.add_argument("--round", type=int, help="run this one only")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    if options.what == "record":
        fuzz_seeds.record()
        return 0
    torch.set_num_threads(1)
    first = options.first if options.round is None else options.round
    runs = [Run(kind, options.seed, first) for kind in options.against or KINDS]
    deadline = time.monotonic() + options.seconds
    try:
        if options.round is not None:
            for run in runs:
                run.step()
        while options.round is None and time.monotonic() < deadline:
            for run in runs:
                run.step()
    finally:
        for run in runs:
            run.close()
    print("\n".join(run.summary() for run in runs))
    return 1 if any(run.findings for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
