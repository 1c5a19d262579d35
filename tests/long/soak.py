"""Soak: mixed work for a long time, with workers that join, leave, are killed and come back, and sessions
that are left and resumed.

    PYTHONPATH=.:worker:tests/help python tests/long/soak.py --minutes 30

Samples resident memory, descriptors and threads of this process and of a worker that stays all the time,
after each round. Flat means, for the rounds after the first third: no more threads and descriptors in the
last quarter than in the first quarter of them, and memory that a straight line through the samples lets grow
by less than 5 % or 10 MiB, whichever is more. Prints a table; exits with 1 if something grows.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "help"))

import numpy
import torch

import distruntime as dr
from distruntime.session.session import active_session
from distruntime.wire.keys import KeyPair
from network import Network
from processes import ListeningWorker, free_port, pause

MiB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """What a process has at one moment."""

    seconds: float
    memory: int
    descriptors: int
    threads: int


def sample(pid: int, began: float) -> Sample:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    )
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(
        time.monotonic() - began, int(status["VmRSS"].split()[0]) << 10, descriptors, int(status["Threads"])
    )


class Soak:
    """Two daemons, one of which is killed now and then, and the rounds of work."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key = folder, folder / "key"
        KeyPair.generate().save(self.key)
        self.port, self.starts = free_port(), 0
        (folder / "stays").mkdir()
        self.stays = ListeningWorker(
            folder / "stays", "--listen", "tcp://127.0.0.1:0", "--key", str(self.key)
        )
        self.network = Network(self.stays.address)
        self.goes = self.start()

    def start(self) -> ListeningWorker:
        self.starts += 1
        folder = self.folder / f"goes-{self.starts}"
        folder.mkdir()
        return ListeningWorker(folder, "--listen", f"tcp://127.0.0.1:{self.port}", "--key", str(self.key))

    def close(self) -> None:
        for worker in (self.stays, self.goes):
            worker.process.kill()
            worker.process.wait()
        with self.network:
            pass

    def attach(self, **options: object) -> None:
        where = [self.network.address, f"tcp://127.0.0.1:{self.port}"]
        dr.init_master_worker(
            workers=where, key=self.key, unreachable=2.0, grace=60, timeout=60, quiet=True, **options
        )  # type: ignore[arg-type]

    def work(self, k: int) -> None:
        """Use every way there is for a moment."""
        for node in active_session().nodes:
            node.shared = k % 2 == 0
        one, two = dr.default_stream(0, "cpu").device, dr.default_stream(1, "cpu").device
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8)
        ).to(one)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(20):
            loss = model(torch.randn(32, 64).to(one)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 0:
                loss.item()
        large = torch.randn(1_000_000)
        there = large.to(one)
        pending = dr.fetch_async(there)
        self.network.tear()
        assert torch.equal(pending.result(60), large)
        assert torch.equal(there.to(two).cpu(), large)
        side = dr.Stream(0, "cpu")
        with dr.stream(side):
            total = torch.zeros((), device=side.device) + 1
            event = side.record_event()
        event.wait(dr.default_stream(0, "cpu"))
        assert total.item() == 1
        group = dr.distributed.new_group([0, 1])
        parts = [torch.ones(1000, device=one), torch.ones(1000, device=two)]
        dr.distributed.all_reduce(parts, group=group)
        assert all(part.sum().item() == 2000 for part in parts)
        group.close()
        try:
            (there[:3] @ there[:4]).cpu()
        except RuntimeError:
            pass  # as it must: shapes that do not fit
        dr.synchronize()

    def round(self, k: int) -> None:
        """Open a session, work, leave it, resume it, work, lose a worker, end the session."""
        name = f"soak-{k}"
        self.attach(session=name, keep=60)
        self.work(k)
        kept = torch.nn.Linear(100, 100).to(dr.default_stream(0, "cpu").device)
        wanted = kept.weight.detach().cpu()
        dr.publish("kept", kept)
        dr.detach()
        dr.init_master_worker(
            session=name, resume=True, key=self.key, unreachable=2.0, timeout=60, quiet=True
        )
        assert torch.equal(dr.lookup("kept").weight.detach().cpu(), wanted)
        self.work(k + 1)
        dr.save({"x": torch.ones(1000, device="remote")}, self.folder / "saved")
        assert dr.load(self.folder / "saved")["x"].sum().item() == 1000
        if k % 3 == 2:
            self.goes.process.kill()
            self.goes.process.wait()
            self.goes = self.start()
            dr.restart(1, force=True, timeout=60)
            self.work(k)
        dr.shutdown()
        if k % 3 == 1:  # a session of workers that are started here, and end with it
            dr.init_master_worker(world_size=1, timeout=60, quiet=True)
            assert torch.ones(10, device="remote").sum().item() == 10
            dr.shutdown()


def verdict(name: str, samples: list[Sample]) -> list[str]:
    """Say what is not flat of a process."""
    late = samples[len(samples) // 3 :]
    quarter = max(1, len(late) // 4)
    wrong = []
    for what in ("descriptors", "threads"):
        before, after = (max(getattr(s, what) for s in part) for part in (late[:quarter], late[-quarter:]))
        if after > before:
            wrong.append(f"{name}: {what} grow, from {before} to {after}")
    times, memory = numpy.array([s.seconds for s in late]), numpy.array([s.memory for s in late], dtype=float)
    slope = float(numpy.polyfit(times, memory, 1)[0]) if len(late) > 2 else 0.0
    grown, base = slope * float(times[-1] - times[0]), float(memory[0])
    print(
        f"{name}: memory {base / MiB:.0f} MiB after the warm-up, a line grows by {grown / MiB:+.1f} MiB in "
        f"{times[-1] - times[0]:.0f} s"
    )
    if grown > max(0.05 * base, 10 * MiB):
        wrong.append(f"{name}: memory grows by {grown / MiB:.1f} MiB")
    return wrong


def soak(minutes: float) -> list[str]:
    torch.set_num_threads(1)
    began, samples = time.monotonic(), {"master": list[Sample](), "worker": list[Sample]()}
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        os.environ |= {"DISTRUNTIME_STATE": f"{name}/state", "DISTRUNTIME_UNREACHABLE": "2.0"}
        made = Soak(Path(name))
        print(
            f"{'round':>5} {'s':>6}   {'master MiB':>10} {'fds':>4} {'thr':>4}   {'worker MiB':>10} "
            f"{'fds':>4} {'thr':>4}"
        )
        try:
            k = 0
            while time.monotonic() < began + 60 * minutes:
                made.round(k)
                gc.collect()
                pause(2.5)  # the worker collects what ended sessions leave a second later
                rows = [sample(pid, began) for pid in (os.getpid(), made.stays.process.pid)]
                for rows_of, row in zip(samples.values(), rows):
                    rows_of.append(row)
                if k < 5 or k % 5 == 0:
                    text = "   ".join(
                        f"{row.memory / MiB:10.1f} {row.descriptors:4d} {row.threads:4d}" for row in rows
                    )
                    print(f"{k:5d} {rows[0].seconds:6.0f}   {text}", flush=True)
                k += 1
            begun, ended = (made.stays.text().count(words) for words in (") begins", " ended ("))
            assert begun == ended, f"{begun - ended} sessions have not ended on the worker that stayed"
            assert "Traceback" not in made.stays.text(), made.stays.text().partition("Traceback")[2][:3000]
        except BaseException:
            for worker in (made.stays, made.goes):
                state = "runs" if worker.process.poll() is None else f"ended with {worker.process.returncode}"
                print(
                    f"a worker that {state} wrote, at the end:", *worker.text().splitlines()[-20:], sep="\n  "
                )
            raise
        finally:
            made.close()
    print(f"{k} rounds in {time.monotonic() - began:.0f} s")
    return [line for name, rows_of in samples.items() for line in verdict(name, rows_of)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    wrong = soak(parser.parse_args().minutes)
    print("\n".join(wrong) or "flat")
    sys.exit(1 if wrong else 0)
