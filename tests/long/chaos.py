"""Chaos: a training on two daemons, during which all that can go wrong does: the network, the workers, the
master, the disk, strangers.

    export PYTHONPATH=.:worker:tests/help
    python tests/long/chaos.py --seed 0 --faults 1000
    python tests/long/chaos.py --seed 1 --seconds 600
    python tests/long/chaos.py --seed 2 --faults 40 --kinds flip,truncate

It must end with the losses, counts and weights of an undisturbed run of as many steps, bit by bit, and go on
after each fault within a bound that follows from its settings. Exits with 1 if not, after the stacks of all
processes and the ends of their logs.

The faults follow from the seed; what they strike depends on the machine. Several may run side by side: each
has ports and folders of its own. What is saved goes to a small tmpfs where this runs as root; elsewhere the
disk does not fill.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "help"))

import torch

import distruntime as dr
from distruntime.cluster import connection
from distruntime.wire.keys import KeyPair
from network import Network
from processes import Child, ListeningWorker, pause, stopped

SILENCE = 1.5  # seconds after which a worker is called unreachable
DETACH = 4.0  # seconds that an ending waits for what is in flight to arrive
MEET = 15.0  # seconds for workers to find each other
CONNECT = 60.0
GRACE = 120.0
STARTING = 120.0  # seconds for a process to start, which imports torch, beside others that do

# What the bounds are made of. An attempt to connect may begin just before the fault ends, and be lost in it.
# The next attempt has twice as long, and is not.
DIAL = SILENCE + 3 * connection.ATTEMPT + 2 * connection.LONGEST_PAUSE
AGAIN = DIAL + MEET  # another worker, or another master: connections, then groups, are made anew
ENDING = (
    DETACH + 6.0
)  # for a master that is interrupted; a second for last words, two for each of its threads
BUSY = 20.0  # more, since a machine with more to do than cores may hold any of them up

PACE = 0.08  # seconds between steps: not more of them than the undisturbed run takes a reasonable time for
SAVED_EVERY = 10
DISK = 3 << 20  # bytes of the small disk: a checkpoint takes some 150 KB
NEVER = 1 << 40


# -- the master, in a process of its own ---------------------------------------------------------------------


def train(ckpt: Any, steps: int, pace: float, stop: str) -> dict[str, Any]:
    """Train with dropout and shuffled data on two nodes, with an upload that is checked in each step; say
    each step's loss.
    """
    torch.manual_seed(7)
    data, wanted = (
        torch.randn(256, 64),
        torch.randn(256, 1),
    )  # noise: what could be learned to the end would hide what differs
    body = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Dropout(0.3), torch.nn.Tanh()).to(
        dr.place(0)
    )
    head = torch.nn.Sequential(
        torch.nn.Linear(96, 64), torch.nn.Dropout(0.3), torch.nn.LayerNorm(64), torch.nn.Linear(64, 1)
    ).to(dr.place(1))
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    ends = parameters[0].device, parameters[-1].device
    counts = [torch.zeros((), dtype=torch.int64, device=device) for device in ends]
    things: list[Any] = [body, head, optimizer]
    upload = torch.arange(1 << 16)  # 512 KiB
    first = step = 0
    found = ckpt.load()
    if found is not None:
        first, counts = found["step"], list(found["counts"])
        for thing, state in zip(things, found["things"]):
            thing.load_state_dict(state)
    for step in range(first, steps):
        chosen = torch.randperm(256)[:64]
        batch, target = data[chosen].to(ends[0]), wanted[chosen].to(ends[1])
        optimizer.zero_grad()
        loss = (head(body(batch).to(dr.place(1))) - target).square().mean()
        loss.backward()
        optimizer.step()
        for count in counts:
            count += 1
        there = (upload + step).to(ends[step % 2])
        total = there.sum().item(), there[step % 1000].item()
        assert total == ((1 << 15) * ((1 << 16) - 1) + (step << 16), step + step % 1000), (
            f"step {step}: an upload has come as {total}"
        )
        counted = [int(count) for count in counts]
        assert counted == [step + 1, step + 1], f"step {step} was counted as {counted}"
        words = f"step {step} {loss.item().hex()}\n"
        if (step + 1) % SAVED_EVERY == 0:
            try:
                ckpt.save({"step": step + 1, "counts": counts, "things": things})
            except OSError as error:  # the one before is there still
                _say(f"not saved: {str(error).partition(chr(10))[0]}")
        sys.stdout.write(words)
        if _last(stop) <= step:
            break
        pause(pace)
    return {
        "steps": step + 1,
        "counts": [int(c) for c in counts],
        "weights": [p.detach().cpu() for p in parameters],
    }


def _last(stop: str) -> int:
    """Return the step that is to be the last one, as far as that is known."""
    try:
        return int(Path(stop).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return NEVER


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")  # in one piece, whatever interrupts this


def _attempt(ckpt: Any, *settings: Any) -> dict[str, Any]:
    try:
        return train(ckpt, *settings)
    except (
        OSError
    ) as error:  # what a worker without descriptors answers; the training may go on from its checkpoint
        if error.errno not in (errno.EMFILE, errno.ENFILE) or isinstance(error, dr.errors.ConnectionFailed):
            raise
        _say(f"no descriptors: {str(error).partition(chr(10))[0]}")
        raise dr.errors.ConnectionFailed("a worker had no descriptors left") from error


def master() -> None:
    """Wait for a line that says what to train, do it, and leave what came of it in a file."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell starts what runs in the background without it
    torch.set_num_threads(1)
    _say("warm")
    plan = json.loads(sys.stdin.readline())
    where: dict[str, Any] = (
        {"resume": True, "force": True} if plan["resume"] else {"workers": plan["workers"]}
    )
    dr.init_master_worker(
        session=plan["session"],
        key=plan["key"],
        unreachable=SILENCE,
        grace=GRACE,
        timeout=CONNECT,
        keep=600,
        quiet=True,
        **where,
    )
    _say("attached")
    outcome = dr.run_with_restarts(
        lambda ckpt: _attempt(ckpt, plan["steps"], plan["pace"], plan["stop"]),
        max_restarts=100_000,
        checkpoint=plan["checkpoint"],
    )
    torch.save(outcome, plan["result"])
    dr.shutdown()
    _say("done")


# -- the faults, which follow from the seed ------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One fault, with all that was drawn for it: whom it strikes, for how long, how often, which part of
    something, what comes after.
    """

    kind: str
    k: int
    seconds: float
    many: int
    part: float
    gap: float


# How many there are of each kind among fifty. Those that make a process start again are few, as that takes
# longer than all others.
DECK = {
    "cut": 4,
    "swallow_up": 3,
    "swallow_down": 3,
    "tear": 5,
    "slow": 3,
    "throttle": 2,
    "dribble": 3,
    "truncate": 4,
    "flip": 4,
    "refuse": 3,
    "close": 1,
    "stop_worker": 3,
    "stop_master": 2,
    "kill_worker": 2,
    "kill_master": 2,
    "storm": 2,
    "full_disk": 2,
    "descriptors": 1,
    "strangers": 1,
}


def faults_of(seed: int, kinds: list[str]) -> Iterator[Fault]:
    """Yield faults for ever: fifty cards in an order of their own, again and again; with `kinds`, one card of
    each.
    """
    draw = random.Random(seed)
    deck = kinds or [kind for kind, count in DECK.items() for _ in range(count)]
    while True:
        for kind in draw.sample(deck, len(deck)):
            seconds = draw.choice([0.1, 0.2, 0.4, 0.8, 1.6, 2.5])
            yield Fault(
                kind, draw.randrange(2), seconds, draw.randrange(1, 9), draw.random(), draw.uniform(0.0, 0.3)
            )


# -- who makes the trouble -----------------------------------------------------------------------------------


class World:
    """Two daemons behind networks, a third to take the place of one that is killed, the master, its
    successor, and a small disk.

    A context manager.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.name = folder, f"chaos-{seed}"
        self.noise = random.Random(seed)  # what strangers say
        self.key, self.disk, self.stop_file = folder / "key", folder / "disk", folder / "stop"
        KeyPair.generate().save(self.key)
        self.disk.mkdir()
        self._stack = ExitStack()
        self._pool = ThreadPoolExecutor(2)
        self.workers: list[ListeningWorker] = []
        self.started: list[ListeningWorker] = []
        self.networks: list[Network] = []
        self.children: list[Child] = []
        self.child: Child
        self.next_child: Child
        self.next_worker: Future[ListeningWorker]
        self.losses: dict[
            int, str
        ] = {}  # by step, as it was said; a step that is done again must say the same
        self.step = -1
        self.ends: list[float] = []  # how long masters took to end after Ctrl-C
        self.unheard = 0  # Ctrl-C that Python has dropped, since it struck in a finalizer

    def __enter__(self) -> World:
        os.environ |= {
            "DISTRUNTIME_STATE": str(self.folder / "state"),
            "DISTRUNTIME_UNREACHABLE": str(SILENCE),
            "DISTRUNTIME_DETACH_TIMEOUT": str(DETACH),
            "DISTRUNTIME_MEET_TIMEOUT": str(MEET),
            "PYTHONFAULTHANDLER": "1",
        }
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "chaos", str(self.disk)]
        self.small = os.geteuid() == 0 and not subprocess.run(mount, capture_output=True).returncode
        if self.small:
            self._stack.callback(subprocess.run, ["umount", "-l", str(self.disk)], check=False)
        first = [self._pool.submit(self._worker, k) for k in range(2)]
        self.workers = [made.result(STARTING) for made in first]
        self.networks = [self._stack.enter_context(Network(worker.address)) for worker in self.workers]
        self._prepare_worker()
        self._prepare_master()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):
            self.next_worker.result(STARTING)
        for worker in self.started:
            with suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGCONT)
            worker.process.kill()
            worker.process.wait()
        for child in self.children:
            with child:
                pass
        self._pool.shutdown()
        self._stack.close()

    def _worker(self, number: int) -> ListeningWorker:
        folder = self.folder / f"worker-{number}"
        folder.mkdir()
        worker = ListeningWorker(
            folder, "--listen", "tcp://127.0.0.1:0", "--key", str(self.key), "--threads", "1"
        )
        self.started.append(worker)
        return worker

    def _prepare_worker(self) -> None:
        self.next_worker = self._pool.submit(self._worker, len(self.started))

    def _prepare_master(self) -> None:
        self.next_child = Child(master)
        self.children.append(self.next_child)

    def begin(
        self, name: str, workers: list[str], steps: int = NEVER, pace: float = PACE, resume: bool = False
    ) -> None:
        """Let the master that is prepared begin a training, or go on with it, and prepare another."""
        plan = {
            "session": self.name if name == "chaos" else f"{self.name}-{name}",
            "key": str(self.key),
            "workers": workers,
            "checkpoint": str(self.disk / name),
            "result": str(self.folder / f"{name}.pt"),
            "stop": str(self.stop_file),
            "steps": steps,
            "pace": pace,
            "resume": resume,
        }
        self.child = self.next_child
        self.child.expect("warm", STARTING)
        self.child.tell(json.dumps(plan))
        self._prepare_master()

    def resume(self) -> None:
        """Let another master take the place of one that has ended."""
        self._take_all(self.child.rest())
        self.begin("chaos", [], resume=True)

    # -- what the master says

    def _take(self, line: str) -> bool:
        """Note a line; return whether it tells of a step."""
        words = line.split()
        if len(words) != 3 or words[0] != "step":
            return False
        self.step, loss = int(words[1]), words[2]
        before = self.losses.setdefault(self.step, loss)
        assert before == loss, f"step {self.step} was done twice, with losses {before} and {loss}"
        return True

    def _take_all(self, lines: list[str]) -> int:
        return sum(map(self._take, lines))

    def drain(self) -> int:
        """Take note of what has been said so far; return how many steps that were."""
        count = 0
        while self.child.waiting():
            count += self._take(self.child.line())
        return count

    def progress(self, patience: float, steps: int = 1) -> None:
        """Block until so many more steps are done; fail if that takes longer than `patience` seconds."""
        deadline = time.monotonic() + patience
        while steps > 0:
            line = self.child.line(max(0.1, deadline - time.monotonic()))
            if self._take(line):
                steps -= 1
            elif not line.startswith(("attached", "warm")):
                print("      master:", line[:200], flush=True)

    def until_done(self, patience: float) -> None:
        """Block until the training has ended."""
        deadline = time.monotonic() + patience
        while (line := self.child.line(max(0.1, deadline - time.monotonic()))) != "done":
            self._take(line)
        self.child.finish()

    def stop(self) -> None:
        """Let the training end after the last of all steps that any master has done: another may just be
        doing some of them again.
        """
        written = self.stop_file.with_suffix(".new")
        written.write_text(str(max(self.losses)), encoding="utf-8")
        written.rename(self.stop_file)

    # -- faults: each returns what it was, and what the bound of it is

    def _for_a_while(self, fault: Fault, begin: Callable[[], None]) -> None:
        begin()
        pause(fault.seconds)
        self.networks[fault.k].mend()

    def cut(self, fault: Fault) -> tuple[str, float]:
        self._for_a_while(fault, self.networks[fault.k].cut)
        return f"worker {fault.k} cut off for {fault.seconds} s", DIAL

    def swallow_up(self, fault: Fault) -> tuple[str, float]:
        self._for_a_while(fault, lambda: self.networks[fault.k].swallow("up"))
        return f"worker {fault.k} hears nothing for {fault.seconds} s", DIAL

    def swallow_down(self, fault: Fault) -> tuple[str, float]:
        self._for_a_while(fault, lambda: self.networks[fault.k].swallow("down"))
        return f"worker {fault.k} is not heard for {fault.seconds} s", DIAL

    def refuse(self, fault: Fault) -> tuple[str, float]:
        self._for_a_while(fault, self.networks[fault.k].refuse)
        return f"connections to worker {fault.k} reset for {fault.seconds} s", DIAL

    def close(self, fault: Fault) -> tuple[str, float]:
        self._for_a_while(fault, self.networks[fault.k].close)
        return f"nobody listens for worker {fault.k} for {fault.seconds} s", AGAIN

    def tear(self, fault: Fault) -> tuple[str, float]:
        count = 1 + fault.many // 2
        for number in range(count):
            self.networks[(fault.k + number) % 2].tear()
            pause(fault.part * 0.2)
        return f"connections torn {count} times", DIAL

    def slow(self, fault: Fault) -> tuple[str, float]:
        self._for_a_while(fault, lambda: self.networks[fault.k].slow(0.3 * fault.part))
        return f"worker {fault.k} {300 * fault.part:.0f} ms away for {fault.seconds} s", DIAL

    def throttle(self, fault: Fault) -> tuple[str, float]:
        self._for_a_while(fault, lambda: self.networks[fault.k].throttle(100_000))
        return f"worker {fault.k} gets 100 KB/s for {fault.seconds} s", DIAL

    def dribble(self, fault: Fault) -> tuple[str, float]:
        self._for_a_while(fault, self.networks[fault.k].dribble)
        return f"worker {fault.k} gets a few bytes at a time for {fault.seconds} s", DIAL

    def truncate(self, fault: Fault) -> tuple[str, float]:
        self.networks[fault.k].truncate(fault.part)
        self.progress(DIAL + BUSY)
        return f"a message of worker {fault.k} cut short", DIAL

    def flip(self, fault: Fault) -> tuple[str, float]:
        self.networks[fault.k].flip(fault.part)
        self.progress(DIAL + BUSY)
        return f"a bit on the way to or from worker {fault.k} flipped", DIAL

    def stop_worker(self, fault: Fault) -> tuple[str, float]:
        with stopped(self.workers[fault.k].process.pid):
            pause(fault.seconds)
        return f"worker {fault.k} held still for {fault.seconds} s", DIAL

    def stop_master(self, fault: Fault) -> tuple[str, float]:
        with stopped(self.child.pid):
            pause(fault.seconds)
        return f"master held still for {fault.seconds} s", DIAL

    def kill_worker(self, fault: Fault) -> tuple[str, float]:
        """Kill a worker; another one is there at its address after a while, or listens there already."""
        worker = self.workers[fault.k]
        worker.process.kill()
        worker.process.wait()
        pause(fault.seconds if fault.part < 0.5 else 0.0)
        self.workers[fault.k] = self.next_worker.result(STARTING)
        self.networks[fault.k].retarget(self.workers[fault.k].address)
        self._prepare_worker()
        return f"worker {fault.k} killed", AGAIN

    def _behind_a_cut(self, fault: Fault) -> bool:
        """Cut the network of one worker in every other case: then what a master says at its end is lost."""
        if fault.part < 0.5:
            self.networks[fault.k].cut()
        return fault.part < 0.5

    def kill_master(self, fault: Fault) -> tuple[str, float]:
        cut = self._behind_a_cut(fault)
        os.kill(self.child.pid, signal.SIGKILL)
        assert self.child.gone(10.0)
        self.resume()
        if cut:  # what the next one says first is lost, too
            pause(fault.seconds)
            self.networks[fault.k].mend()
        after = f", worker {fault.k} cut off until {fault.seconds} s after another began" if cut else ""
        return f"master killed{after}", AGAIN

    def storm(self, fault: Fault) -> tuple[str, float]:
        cut = self._behind_a_cut(fault)
        count = 1 + fault.many % 8
        for _ in range(count):  # in a row, or so that the later ones strike while it ends
            self.child.interrupt()
            pause((0.05 if fault.seconds < 0.5 else 2.0) * fault.gap)
        began = time.monotonic()
        deadline = began + ENDING + BUSY
        while not self.child.gone(1.0):
            assert time.monotonic() < deadline, (
                f"the master has not ended {ENDING + BUSY:.0f} s after {count} times Ctrl-C"
            )
            self.drain()
            if not self.child.gone(2.0) and self.drain():
                self.unheard += 1
                self.child.interrupt()
        took = time.monotonic() - began
        self.ends.append(took)
        if cut:
            self.networks[fault.k].mend()
        self.resume()
        return (
            f"Ctrl-C {count} times{', behind a cut' if cut else ''}, ended after {took:.1f} s, another "
            f"resumes",
            AGAIN,
        )

    def full_disk(self, fault: Fault) -> tuple[str, float]:
        if not self.small:
            return "no small disk to fill", DIAL
        junk = self.disk / "junk"
        with suppress(OSError), junk.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        pause(max(1.0, fault.seconds))
        junk.unlink()
        return f"disk full for {max(1.0, fault.seconds)} s", DIAL

    def descriptors(self, fault: Fault) -> tuple[str, float]:
        """Leave a worker no descriptor, or a few, for a while."""
        pid = self.workers[fault.k].process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        taken = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (taken + fault.many - 1, before[1]))
        pause(fault.seconds)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        return f"worker {fault.k} without descriptors for {fault.seconds} s ({fault.many - 1} left)", AGAIN

    def strangers(self, fault: Fault) -> tuple[str, float]:
        """Connect a hundred and fifty times, say something, and go, one way or the other."""
        host, _, port = self.workers[fault.k].address.removeprefix("tcp://").rpartition(":")
        made = list[socket.socket]()
        for _ in range(150):
            with suppress(OSError):
                made.append(socket.create_connection((host, int(port)), 1.0))
                made[-1].sendall(self.noise.randbytes(self.noise.randrange(1, 200)))
        pause(fault.seconds)
        for one in made:
            one.close()
        return f"{len(made)} strangers at worker {fault.k} for {fault.seconds} s", DIAL

    # -- what is said if it goes wrong

    def describe(self) -> None:
        """Print the stacks of all processes, which end by it, and the ends of their logs."""
        for pid in [child.pid for child in self.children] + [worker.process.pid for worker in self.workers]:
            for number in (
                signal.SIGCONT,
                signal.SIGABRT,
            ):  # by which faulthandler writes the stacks of all threads
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        for worker in self.workers:
            worker.process.wait(20)
            print(
                f"\n-- {worker.log.parent.name} (pid {worker.process.pid}):",
                *worker.text().splitlines()[-150:],
                sep="\n   ",
            )
        said = [*self.child.printed[-20:], *self.child.rest(20)]
        print(f"\n-- the master (pid {self.child.pid}):", *said[-200:], sep="\n   ", flush=True)


@contextmanager
def folder() -> Iterator[Path]:
    """A directory of one's own."""
    made = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def strike(world: World, number: int, fault: Fault) -> float:
    """Let one fault happen; return how many seconds later the training went on."""
    world.drain()
    before = world.step
    what, bound = getattr(world, fault.kind)(fault)
    world.drain()
    struck = time.monotonic()
    world.progress(bound + BUSY)
    took = time.monotonic() - struck
    print(f"{number:4d}  {what}; at step {before}, on after {took:.2f} s, from step {world.step}", flush=True)
    assert all(worker.process.poll() is None for worker in world.workers), "a worker has died by itself"
    pause(fault.gap)
    return took


def chaos(seed: int, faults: int, seconds: float, kinds: list[str]) -> None:
    """Run a training through so many faults, or for so long, and then undisturbed; raise `AssertionError`
    where one waits too long.
    """
    waits: dict[str, list[float]] = {}
    began = time.monotonic()
    print(f"seed {seed}", flush=True)
    with folder() as place, World(place, seed) as world:
        try:
            world.begin("chaos", [network.address for network in world.networks])
            world.progress(STARTING)
            began = time.monotonic()
            for number, fault in enumerate(islice(faults_of(seed, kinds), faults or None), 1):
                if seconds and time.monotonic() > began + seconds:
                    break
                waits.setdefault(fault.kind, []).append(strike(world, number, fault))
            in_faults = time.monotonic() - began
            world.stop()
            world.until_done(AGAIN + BUSY)
            got = torch.load(place / "chaos.pt")
            steps = got["steps"]
            world.begin("undisturbed", [worker.address for worker in world.workers], steps=steps, pace=0.0)
            world.stop_file.unlink()
            world.until_done(60.0 + 0.5 * steps)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            world.describe()
            raise
        wanted = torch.load(place / "undisturbed.pt")
        assert len(world.losses) == steps, f"{len(world.losses)} losses of {steps} steps"
        assert got["counts"] == wanted["counts"] == [steps, steps], (
            f"steps were counted as {got['counts']}, of {steps}"
        )
        assert all(torch.equal(a, b) for a, b in zip(got["weights"], wanted["weights"])), "weights differ"
        for worker in world.started:
            assert "Traceback" not in worker.text(), worker.text()[-3000:]
        ends = [*world.ends]
    for kind, took in sorted(waits.items()):
        print(
            f"{kind:12s} {len(took):4d} times, on after {statistics.median(took):5.2f} s (median), "
            f"{max(took):5.2f} s (slowest)"
        )
    if ends:
        print(
            f"{len(ends)} endings by Ctrl-C took {statistics.median(ends):.2f} s (median), {max(ends):.2f} "
            f"s; unheard: {world.unheard}"
        )
    total = sum(map(len, waits.values()))
    print(
        f"seed {seed}: {total} faults in {in_faults:.0f} s ({in_faults / max(1, total):.2f} s each), {steps} "
        f"steps, bit-equal; "
        f"the longest wait was {max(map(max, waits.values()), default=0.0):.1f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=0, help="how many (20, or with --seconds any number)")
    parser.add_argument("--seconds", type=float, default=0.0, help="for how long")
    parser.add_argument("--kinds", default="", help=f"only these, with commas between: {', '.join(DECK)}")
    options = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM")
    )  # by way of what stops the workers and takes the small disk away
    only = [kind for kind in options.kinds.split(",") if kind]
    if unknown := set(only) - set(DECK):
        parser.error(f"no such kinds of faults: {', '.join(sorted(unknown))}")
    chaos(options.seed, options.faults or (0 if options.seconds else 20), options.seconds, only)
