"""Chaos: a training on two daemons, during which workers and the master are killed, held still and cut off, and the disk fills.

    python tests/long/chaos.py --seed 0 --faults 20

It must end with the losses and weights of an undisturbed run, bit by bit, and go on within a minute after every fault. Exits with 1 if not.
What is saved goes to a small tmpfs where this runs as root; elsewhere the disk does not fill.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import distruntime as dr
from distruntime.wire.keys import KeyPair
from network import Network
from processes import Child, ListeningWorker, free_port, pause

SILENCE = 1.0  # seconds after which a worker is called unreachable
PATIENCE = 60.0  # seconds within which the training must go on after a fault
STEPS_EACH = 60  # steps for each fault
SAVED_EVERY = 10
DISK = 3 << 20  # bytes of the small disk: a checkpoint takes some 300 KB


# -- the master, in a process of its own -----------------------------------------------------------------------------------------


def train(ckpt: Any, steps: int, pace: float) -> dict[str, Any]:
    """Train with dropout and shuffled data on two nodes; say each step."""
    torch.manual_seed(7)
    data = torch.randn(256, 64)
    body = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Dropout(0.3), torch.nn.Tanh()).to(dr.place(0))
    head = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 1)).to(dr.place(1))
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    counts = [torch.zeros((), dtype=torch.int64, device=p.device) for p in (parameters[0], parameters[-1])]
    things: list[Any] = [body, head, optimizer]
    first, losses = 0, list[float]()
    found = ckpt.load()
    if found is not None:
        first, losses, counts = found["step"], list(found["losses"]), list(found["counts"])
        for thing, state in zip(things, found["things"]):
            thing.load_state_dict(state)
    for step in range(first, steps):
        batch = data[torch.randperm(256)[:64]].to(parameters[0].device)
        optimizer.zero_grad()
        loss = head(body(batch).to(dr.place(1))).square().mean()
        loss.backward()
        optimizer.step()
        for count in counts:
            count += 1
        losses.append(loss.item())
        if (step + 1) % SAVED_EVERY == 0:
            try:
                ckpt.save({"step": step + 1, "losses": losses, "counts": counts, "things": things})
            except OSError as error:  # the one before is there still
                print("not saved:", str(error).partition("\n")[0])
        print("step", step)
        pause(pace)
    return {"losses": losses, "counts": [int(c) for c in counts], "weights": [p.detach().cpu() for p in parameters]}


def master(workers: str, key: str, folder: str, result: str, steps: int, pace: float, resume: bool) -> None:
    """Train, and leave what came of it in a file."""
    torch.set_num_threads(1)
    where: dict[str, Any] = {"resume": True, "force": True} if resume else {"workers": workers.split()}
    dr.init_master_worker(session="chaos", key=key, unreachable=SILENCE, grace=120, timeout=90, keep=300, **where)
    print("attached")
    outcome = dr.run_with_restarts(lambda ckpt: train(ckpt, steps, pace), max_restarts=1000, checkpoint=folder)
    torch.save(outcome, result)
    print("done")
    dr.shutdown()


# -- who makes the trouble -------------------------------------------------------------------------------------------------------


class World:
    """Two daemons behind networks that can be cut, the master, and a disk that can be filled. A context manager."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.key = folder / "key"
        KeyPair.generate().save(self.key)
        self.disk = folder / "disk"
        self.disk.mkdir()
        self._stack = ExitStack()
        self.workers: list[ListeningWorker] = []
        self.networks: list[Network] = []
        self.ports = [free_port(), free_port()]
        self.starts = 0
        self.child: Child
        self.step = -1

    def __enter__(self) -> World:
        os.environ |= {"DISTRUNTIME_STATE": str(self.folder / "state"), "DISTRUNTIME_UNREACHABLE": str(SILENCE)}
        self.small = (
            os.geteuid() == 0
            and not subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "chaos", str(self.disk)], capture_output=True).returncode
        )
        if self.small:
            self._stack.callback(subprocess.run, ["umount", "-l", str(self.disk)], check=False)
        for k, port in enumerate(self.ports):
            self.workers.append(self._worker(k))
            self.networks.append(self._stack.enter_context(Network(f"tcp://127.0.0.1:{port}")))
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            with suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGCONT)
            worker.process.kill()
            worker.process.wait()
        self._stack.close()

    def _worker(self, k: int) -> ListeningWorker:
        self.starts += 1
        folder = self.folder / f"worker-{k}-{self.starts}"
        folder.mkdir()
        return ListeningWorker(folder, "--listen", f"tcp://127.0.0.1:{self.ports[k]}", "--key", str(self.key))

    def begin(self, steps: int, pace: float, name: str, resume: bool = False) -> None:
        """Start the master."""
        addresses = " ".join(network.address for network in self.networks)
        self.child = Child(master, addresses, str(self.key), str(self.disk / name), str(self.folder / f"{name}.pt"), steps, pace, resume)
        self._arguments = steps, pace, name

    def progress(self, patience: float = PATIENCE) -> bool:
        """Wait for the master's next step; return False if it has ended instead."""
        deadline = time.monotonic() + patience
        while True:
            line = self.child.line(max(0.1, deadline - time.monotonic()))
            if line.startswith("step"):
                self.step = int(line.split()[1])
                return True
            if line == "done":
                return False
            print("   master:", line[:160], flush=True)

    def advance(self, seconds: float) -> bool:
        """Let the training go on for a while; return False if it has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.progress():
                return False
        return True

    # -- faults

    def kill_worker(self) -> str:
        k = self.random.randrange(2)
        worker = self.workers[k]
        worker.process.kill()
        worker.process.wait()
        pause(self.random.uniform(0.0, 2.0))
        self.workers[k] = self._worker(k)
        return f"worker {k} killed"

    def stop_worker(self) -> str:
        k, seconds = self.random.randrange(2), self.random.uniform(0.2, 4.0)
        self.workers[k].process.send_signal(signal.SIGSTOP)
        pause(seconds)
        self.workers[k].process.send_signal(signal.SIGCONT)
        return f"worker {k} held still for {seconds:.1f} s"

    def stop_master(self) -> str:
        seconds = self.random.uniform(0.2, 4.0)
        os.kill(self.child.pid, signal.SIGSTOP)
        pause(seconds)
        os.kill(self.child.pid, signal.SIGCONT)
        return f"master held still for {seconds:.1f} s"

    def kill_master(self) -> str:
        os.kill(self.child.pid, signal.SIGKILL)
        with self.child:
            pass
        self.begin(*self._arguments, resume=True)
        return "master killed, another resumes"

    def cut(self) -> str:
        k, seconds = self.random.randrange(2), self.random.uniform(0.2, 5.0)
        with self.networks[k].broken():
            pause(seconds)
        return f"worker {k} cut off for {seconds:.1f} s"

    def tear(self) -> str:
        for _ in range(count := self.random.randrange(1, 6)):
            self.random.choice(self.networks).tear()
            pause(self.random.uniform(0.0, 0.2))
        return f"connections reset {count} times"

    def slow(self) -> str:
        k = self.random.randrange(2)
        self.networks[k].slow(0.05)
        pause(2.0)
        self.networks[k].slow(0.0)
        return f"worker {k} 50 ms away for 2 s"

    def fill_disk(self) -> str:
        if not self.small:
            return "no small disk to fill"
        junk = self.disk / "junk"
        with suppress(OSError), junk.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        pause(3.0)
        junk.unlink()
        return "disk full for 3 s"


FAULTS = [
    World.kill_worker,
    World.kill_worker,
    World.kill_master,
    World.stop_worker,
    World.stop_master,
    World.cut,
    World.cut,
    World.tear,
    World.slow,
    World.fill_disk,
]


@contextmanager
def folder() -> Iterator[Path]:
    """A directory of one's own."""
    made = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def chaos(seed: int, faults: int) -> None:
    """Run the training undisturbed and through so many faults; raise `AssertionError` where they differ, or one waits too long."""
    steps = faults * STEPS_EACH
    with folder() as place, World(place, seed) as world:
        world.begin(steps, 0.0, "undisturbed")
        while world.progress():
            pass
        world.child.finish()
        began = time.monotonic()
        world.begin(steps, 0.08, "chaos")
        assert world.progress(), "ended before it began"
        draw = world.random
        order = [draw.choice(FAULTS) for _ in range(faults)]
        slowest = 0.0
        for k, fault in enumerate(order):
            assert world.advance(draw.uniform(0.5, 3.0)), f"ended before the fault {k}: too few steps"
            what = fault(world)
            struck = time.monotonic()
            before = world.step
            assert world.progress(), f"ended with the fault {k}"
            took = time.monotonic() - struck
            slowest = max(slowest, took)
            print(f"{k + 1:3d}  {what}; at step {before}, on after {took:.1f} s, from step {world.step}", flush=True)
        while world.progress():
            pass
        world.child.finish()
        wanted, got = (torch.load(place / f"{name}.pt") for name in ("undisturbed", "chaos"))
        assert got["losses"] == wanted["losses"], "losses differ"
        assert got["counts"] == wanted["counts"] == [steps, steps], f"steps were counted as {got['counts']}, of {steps}"
        assert all(torch.equal(a, b) for a, b in zip(got["weights"], wanted["weights"])), "weights differ"
        for log in place.glob("worker-*/worker.log"):
            assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
    seconds = time.monotonic() - began
    print(f"seed {seed}: {faults} faults in {seconds:.0f} s, {steps} steps, bit-equal; the longest wait was {slowest:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=20)
    options = parser.parse_args()
    chaos(options.seed, options.faults)
