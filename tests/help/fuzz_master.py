"""The fuzzer against a master: what a worker says to it is changed on the way.

master process --- relay, which changes what comes back --- worker: node 1
               --- worker: node 0, whose values must be right whatever node 1 says
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import distruntime as dr
from distruntime.wire.channel import Channel, PeerGone
from distruntime.wire.codec import decode, encode
from distruntime.wire.messages import (
    LEARN,
    Fetch,
    Goodbye,
    Hello,
    OpenGroup,
    Question,
    Refused,
    Segment,
    Welcome,
)
from fuzz_mutations import Mutator
from fuzz_seeds import ROOT, Recording, Seed
from fuzz_worker import Finding, holdings
from processes import pause

# After so many seconds the relay hangs up, whatever the master still waits for.
_ATTACK = 1.5
# A master may take so many seconds for a round.
_ROUND = 120.0
_DEVICES = ("cpu", "cuda:0")
# A line of the master's begins with this where it answers.
_ANSWER = "answer: "


# -- in the master's process -----------------------------------------------------------------------


def master() -> None:
    """Open a session for each line of standard input, `round seed address address`; say what happened as a
    line of JSON.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    torch.set_num_threads(1)
    said: list[str] = []

    class Errors(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(self.format(record))

    logging.getLogger().addHandler(Errors(level=logging.ERROR))
    logging.getLogger("distruntime").setLevel(logging.ERROR)
    heard: list[str] = []
    sys.addaudithook(lambda event, _: heard.append(event) if event in _FORBIDDEN else None)
    for line in sys.stdin:
        if line == "holds\n":
            print(f"\n{_ANSWER}{json.dumps(holdings())}", flush=True)
            continue
        seed, *addresses = line.split()
        wrong = _session(random.Random(seed), addresses)
        wrong += [f"the log says: {text}" for text in said] + [
            f"the master did {event}" for event in set(heard)
        ]
        said.clear(), heard.clear()
        print(f"\n{_ANSWER}{json.dumps(wrong)}", flush=True)


_FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen")


def _session(rng: random.Random, addresses: list[str]) -> list[str]:
    wrong: list[str] = []

    def attempt(act: Callable[[], object]) -> None:
        try:
            act()
        except (dr.DistruntimeError, TimeoutError) as error:
            try:
                str(error), repr(error)
            except Exception:
                wrong.append(f"{act.__name__}: an error without words:\n{traceback.format_exc()[-3000:]}")
        except Exception:
            wrong.append(f"{act.__name__}:\n{traceback.format_exc()[-4000:]}")

    def opens() -> None:
        dr.init_master_worker(workers=addresses, timeout=4, unreachable=2, grace=2)

    attempt(opens)
    if not dr.is_initialized():
        return wrong
    try:
        with dr.on(0, "cpu"):
            kept = torch.arange(5.0, device="remote") * 2
    except Exception:
        return [*wrong, f"node 0 is gone:\n{traceback.format_exc()[-3000:]}"]
    for act in rng.sample(_ACTS, rng.randrange(2, 7)):
        attempt(act)
    # This brings what waited there for the other node, and it is lost.
    attempt(lambda: dr.synchronize(0, timeout=5))
    try:
        if (kept + 1).tolist() != [1.0, 3.0, 5.0, 7.0, 9.0]:
            wrong.append(f"node 0 computes {(kept + 1).tolist()}")
    except Exception:
        wrong.append(f"node 0 cannot be read:\n{traceback.format_exc()[-3000:]}")
    del kept
    attempt(lambda: dr.shutdown(timeout=1))
    if dr.is_initialized():
        wrong.append("the session does not close")
    return wrong


def there(*sizes: int) -> Any:
    """A tensor on the node whose words are changed."""
    with dr.on(1, "cpu"):
        return torch.ones(sizes or (6,), device="remote")


def reads() -> None:
    x = there() + 1
    x.cpu(), x.sum().item(), x.tolist(), repr(x), bool(x[0] > 1)
    dr.fetch({"a": x, "b": [x[:3], x]}, timeout=2)


def large_reads() -> None:
    x = there(700_000)
    x[:100_000].cpu(), x.cpu()


def in_parts() -> None:
    from distruntime.session.session import active_session

    active_session().nodes[1].shared = False
    there(700_000).cpu()


def futures() -> None:
    future = dr.fetch_async([there(), there(3)])
    future.result(2)


def learns() -> None:
    x = there()
    x.nonzero().cpu(), torch.unique(x).shape, x[x > 0].cpu(), torch.equal(x, x), x.cpu()


def failures() -> None:
    bad = there()[torch.tensor([99]).to(there().device)]
    for read in (bad.cpu, (bad + 1).tolist, lambda: dr.synchronize(1, timeout=2)):
        with suppress(IndexError):
            read()


def figures() -> None:
    repr(dr.nodes()), dr.nodes()._repr_html_(), repr(dr.memory(1)), repr(dr.memory())


def settings() -> None:
    dr.config(node=1)
    dr.config(node=1, num_threads=1)


def uploads() -> None:
    for count in (1, 9000, 200_000):
        torch.ones(count).to(there().device).sum().item()
    dr.synchronize(1, timeout=2)


def streams() -> None:
    first, second = dr.Stream(1, "cpu"), dr.Stream(1, "cpu")
    begin, end = dr.Event(enable_timing=True), dr.Event(enable_timing=True)
    with dr.stream(first):
        begin.record()
        x = torch.ones(8, device="remote") * 2
        end.record()
    second.wait_event(end, timeout=1)
    with dr.stream(second):
        y = x + 1
    end.query(), end.synchronize(2), begin.elapsed_time(end), y.cpu()
    second.cancel(), second.synchronize(2)


def across() -> None:
    event = dr.Stream(0, "cpu").record_event()
    dr.Stream(1, "cpu").wait_event(event, timeout=1)
    back = dr.Stream(1, "cpu").record_event()
    dr.Stream(0, "cpu").wait_event(back, timeout=0.2)
    (there().to(node=0) + 1).cpu()


def groups() -> None:
    with dr.on(0, "cpu"):
        here = torch.ones(4, device="remote")
    group = dr.distributed.new_group([0, 1], timeout=1.0)
    work = dr.distributed.all_reduce([here, there(4)], group=group, async_op=True)
    dr.distributed.barrier(group)
    work.wait(1.0)
    dr.fetch([here], timeout=2)


def meshes() -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    with mesh:
        x = torch.arange(4.0) + 1
        x.nonzero()
    dr.shards(x), x.sum().item(), repr(x)
    dr.synchronize(timeout=2)


def publications() -> None:
    with dr.on(0, "cpu"):
        here = torch.ones(3, device="remote")
    dr.publish("both", [here, there(3)], shared=True)
    repr(dr.names())
    dr.lookup("both")
    del here
    dr.fetch(dr.lookup("both"), timeout=2)
    dr.unpublish("both")


def checkpoints() -> None:
    with dr.on(0, "cpu"):
        here = torch.ones(3, device="remote")
    dr.save({"here": here, "there": there(3)}, "checkpoint")
    dr.fetch(dr.load("checkpoint"), timeout=2)


def training() -> None:
    with dr.on(1, "cpu"):
        model = torch.nn.Linear(3, 2, device="remote")
        loss = model(torch.ones(4, 3, device="remote")).pow(2).mean()
        loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    loss.item(), dr.fetch(model.state_dict(), timeout=2)


_ACTS: list[Callable[[], None]] = [
    reads, large_reads, in_parts, futures, learns, failures, figures, settings, uploads, streams, across,
    groups, meshes, training, publications, checkpoints,
]  # fmt: skip


# -- in the fuzzer's -------------------------------------------------------------------------------


class Relay:
    """Stands between a master and a worker for one session; changes what the worker says.

    `counts` are the changed messages, by class.
    """

    def __init__(self, address: str, worker: str, mutator: Mutator, counts: Counter[str]) -> None:
        self._near, self._far = Channel(listen=address), Channel()
        self._worker = worker
        # Each connection of the master has one of its own to the worker.
        self._ways: dict[bytes, bytes] = {}
        self._mutator, self._random, self._counts = mutator, mutator.random, counts
        self._rate = self._random.choice((0.02, 0.1, 0.3, 0.0))
        self._inject = self._random.choice((0.0, 0.05, 0.3))
        self._spare_welcome = self._random.random() < 0.85
        # This message is changed whatever the rate is.
        self._one = self._random.randrange(3, 40)
        self._master: bytes | None = None
        self._requests: list[int] = [1]
        self._ends = time.monotonic() + 60.0
        self._count = 0
        self._stop = threading.Event()
        self.failed = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and time.monotonic() < self._ends:
                for peer, frames in self._near.receive(0.001):
                    self._from_master(peer, [f if isinstance(f, bytes) else f.bytes for f in frames])
                for way, frames in self._far.receive(0.001):
                    if self._master is not None and way == self._ways[self._master]:
                        for changed in self._changed(
                            [f if isinstance(f, bytes) else f.bytes for f in frames]
                        ):
                            with suppress(PeerGone):
                                self._near.send(self._master, changed)
            goodbye = encode(Goodbye("the relay hangs up"))
            for near, far in self._ways.items():
                self._say(self._near, near, [goodbye])
                self._say(self._far, far, [goodbye])
            # The master may look for the worker again.
            while not self._stop.is_set():
                for peer, frames in self._near.receive(0.05):
                    if isinstance(decode(frames[0]), Hello):  # type: ignore[arg-type]
                        self._say(self._near, peer, [encode(Refused("the relay has hung up", False))])
        except Exception:
            self.failed = traceback.format_exc()

    def _from_master(self, peer: bytes, frames: list[bytes]) -> None:
        message = decode(frames[0])
        if isinstance(message, Hello):
            if self._master is None:
                self._ends = time.monotonic() + _ATTACK
            self._master = peer
            if peer not in self._ways:
                self._ways[peer] = b"worker-%d" % len(self._ways)
                self._far.connect(self._worker, self._ways[peer])
        if isinstance(message, (Fetch, Question, OpenGroup)):
            self._requests.append(message.request)
        if isinstance(message, Segment):
            self._requests += [
                n for word, n in zip(message.words, message.words[1:]) if word == LEARN and type(n) is int
            ]
        if peer in self._ways:
            self._say(self._far, self._ways[peer], frames)

    def _say(self, channel: Channel, peer: bytes, frames: list[bytes]) -> None:
        with suppress(PeerGone):
            channel.send(peer, frames)

    def _changed(self, frames: list[bytes]) -> list[list[bytes]]:
        """Return what the master hears instead of a message."""
        rng, message = self._random, decode(frames[0])
        self._count += 1
        found: list[list[bytes]] = []
        if not isinstance(message, Welcome) and rng.random() < self._inject:
            found.append(self._another())
        if isinstance(message, Welcome):
            hit = not self._spare_welcome
        else:
            hit = self._count == self._one or rng.random() < self._rate
        if not hit:
            return [*found, frames]
        self._counts[type(message).__name__] += 1
        how = rng.random()
        if how < 0.08 and not isinstance(message, Welcome):
            return found
        if how < 0.14:
            return [*found, frames, frames]
        if how < 0.2:
            return [*found, [self._mutator.noise(), *frames[1:]]]
        return [*found, self._mutator.frames(self._mutator.seed(Seed(message, tuple(frames[1:]))))]

    def _another(self) -> list[bytes]:
        """Return a message of a recorded session, of any kind, about a request that is under way."""
        kinds = self._mutator.by_kind
        seed = self._random.choice(kinds[self._random.choice(sorted(kinds))])
        if hasattr(seed.message, "request") and self._random.random() < 0.8:
            seed = Seed(
                replace(seed.message, request=self._random.choice(self._requests[-3:])), seed.payloads
            )
        if self._random.random() < 0.6:
            seed = self._mutator.seed(seed)
        self._counts[seed.kind] += 1
        return self._mutator.frames(seed)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)
        self._near.close()
        self._far.close()


class AgainstMaster:
    """Rounds of sessions of one master process. `counts` are the messages that were changed, by class."""

    def __init__(self, folder: Path, recordings: list[Recording], seed: int) -> None:
        self.recordings, self.seed, self.folder = recordings, seed, folder
        self.counts: Counter[str] = Counter()
        path = os.pathsep.join(map(str, [ROOT, ROOT / "worker", Path(__file__).parent]))
        self._environment = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "DISTRUNTIME_SIGNING_KEY": str(folder / "signing-key"),
        }
        self._processes: list[subprocess.Popen[Any]] = []
        self._log = (folder / "master.log").open("w+", encoding="utf-8")
        try:
            self.workers = [self._worker(k) for k in range(2)]
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", "import fuzz_master; fuzz_master.master()"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                # A meddled message may print any bytes.
                encoding="utf-8", errors="replace", env=self._environment, cwd=folder,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise
        self._processes.append(self.process)

    def _worker(self, number: int) -> str:
        address, log = f"ipc://{self.folder}/w{number}", self.folder / f"w{number}.log"
        with log.open("wb") as output:
            command = [
                sys.executable,
                "-m",
                "distruntime_worker",
                "--listen",
                address,
                "--insecure",
                "--threads",
                "1",
            ]
            self._processes.append(
                subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=self._environment)
            )
        deadline = time.monotonic() + 90
        while b"listening on" not in log.read_bytes():
            if time.monotonic() > deadline or self._processes[-1].poll() is not None:
                raise Finding(f"a worker does not start:\n{log.read_text(encoding='utf-8')}")
            pause(0.01)
        return address

    def round(self, number: int) -> None:
        """Let the master run one session; raise `Finding`."""
        rng = random.Random(f"{self.seed}:{number}")
        address = f"ipc://{self.folder}/r{number}"
        relay = Relay(address, self.workers[1], Mutator(self.recordings, rng), self.counts)
        try:
            wrong = self._tell(f"{self.seed}:{number} {self.workers[0]} {address}")
        finally:
            relay.close()
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        if relay.failed:
            raise RuntimeError(relay.failed)
        if wrong:
            raise Finding("\n".join(wrong))
        for k, process in enumerate(self._processes[:2]):
            log = (self.folder / f"w{k}.log").read_text(encoding="utf-8")
            if process.poll() is not None or "Traceback (most" in log or "a defect of the worker" in log:
                raise Finding(f"node {k}'s worker, {process.poll()}:\n{log[-5000:]}")

    def _tell(self, line: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        answer: list[str] = []
        with suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        lines = iter(self.process.stdout.readline, "")
        # A meddled message may be one that prints what a function there has printed, without an end of line.
        own = (line.removeprefix(_ANSWER) for line in lines if line.startswith(_ANSWER))
        thread = threading.Thread(target=lambda: answer.append(next(own, "")), daemon=True)
        thread.start()
        thread.join(_ROUND)
        if not answer:
            self.process.send_signal(signal.SIGUSR2)
            pause(1.0)
        if not answer or not answer[0]:
            self._log.seek(0)
            what = "does not end its session" if not answer else f"ended ({self.process.wait(10)})"
            raise Finding(f"the master {what}:\n{self._log.read()[-8000:]}")
        return json.loads(answer[0])

    def holds(self) -> dict[str, Any]:
        found: dict[str, Any] = self._tell("holds")
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(20)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._log.close()
