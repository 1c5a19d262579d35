"""The fuzzer against a worker: a daemon in a process of its own, hostile masters, and legitimate ones beside
and after them.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import platform
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from distruntime.errors import ProtocolError
from distruntime.wire.channel import Channel, PeerGone
from distruntime.wire.codec import decode, encode
from distruntime.wire.keys import KeyPair
from distruntime.wire.messages import (
    PROTOCOL,
    UPLOAD,
    Ack,
    Fetch,
    Goodbye,
    Hello,
    OpenGroup,
    Refused,
    Reply,
    Segment,
    Welcome,
)
from fuzz_mutations import Mutator
from fuzz_seeds import KEEP, ROOT, Recording, Seed, revived
from processes import pause

# A worker may take so many seconds to answer a master that has not offended.
PATIENCE = 30.0
# A fuzzed worker gets so many bytes of address space beyond what it has when it is ready: larger allocations
# fail, cleanly.
_ROOM = 2 << 30
_CODE = """
import sys, fuzz_worker
sys.exit(fuzz_worker.daemon(*sys.argv[1:]))
"""


_numbers = count(1)


class Finding(Exception):
    """What must not happen; the text says it all."""


# -- in the worker's process -----------------------------------------------------------------------


def daemon(report: str, *arguments: str) -> int:
    """Run a worker that writes what it holds to the file `report` at each SIGUSR1, and its stacks to its log
    at SIGUSR2.
    """
    import faulthandler

    # Some operators import these at their first call. They leave a hundred thousand objects, which are no
    # growth.
    for name in ("torch._dynamo", "torch._refs", "torch.distributed.tensor"):
        importlib.import_module(name)

    from distruntime_worker.cli import main
    from distruntime_worker.session.report import Questions

    # Whoever holds the key may end a worker, and the fuzzer needs it.
    Questions.stopped = property(lambda self: "", lambda self, why: None)  # type: ignore[assignment]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGUSR1, lambda number, frame: _report(Path(report), frame))
    return main(arguments)


def _report(path: Path, frame: FrameType | None) -> None:
    path.with_suffix(".new").write_text(json.dumps(holdings()), encoding="utf-8")
    path.with_suffix(".new").rename(path)


def holdings() -> dict[str, Any]:
    """Return what this process holds: bytes, threads, descriptors, Python objects, and the commonest classes
    of those.
    """
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    objects = gc.get_objects()
    kinds = Counter(type(o).__name__ for o in objects)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return {
        "bytes": pages * resource.getpagesize(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "objects": len(objects),
        "kinds": kinds.most_common(60),
        "files": Counter(_file(name) for name in os.listdir("/proc/self/fd")).most_common(),
        "names": sorted(t.name for t in threading.enumerate()),
    }


def _file(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}").partition(":[")[0]
    except OSError:
        return "the folder"


# -- in the fuzzer's -------------------------------------------------------------------------------


class FuzzedWorker:
    """A listening worker with two simulated GPUs, its log and what it holds; `check` finds what must not be
    in its log.
    """

    def __init__(self, folder: Path, *, key: bool = True) -> None:
        self.log, self._report = folder / "worker.log", folder / "report"
        self.keys = None
        arguments = ["--listen", f"ipc://{folder}/w", "--insecure"]
        if key:
            self.keys = KeyPair.generate()
            self.keys.save(folder / "key")
            arguments = ["--listen", "tcp://127.0.0.1:0", "--key", str(folder / "key")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "worker", Path(__file__).parent])),
            "OMP_NUM_THREADS": "1",
        }
        # Paths that the fuzzer names are relative, or up to two folders higher.
        inside = folder / "a" / "b" / "c"
        inside.mkdir(parents=True)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(self._report), *arguments,
                 "--simulate-cuda", "2", "--threads", "1"],
                stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=inside,
            )  # fmt: skip
        self._read = 0
        self._wait(lambda: "listening on " in self.text(), 90.0, "does not start")
        self.address = self.text().partition("listening on ")[2].partition(",")[0]
        Legitimate(self).compute().leave()
        if sys.platform == "linux":
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="utf-8").split()[0])
            limit = pages * resource.getpagesize() + _ROOM
            resource.prlimit(self.process.pid, resource.RLIMIT_AS, (limit, limit))

    def text(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(
            line
            for line in lines
            if not line.startswith("frame #") and "from a peer that has no session" not in line
        )

    def _wait(self, condition: Any, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise Finding(f"the worker ended ({self.process.returncode}):\n{self.text()[-6000:]}")
            if time.monotonic() > deadline:
                self.process.send_signal(signal.SIGUSR2)
                pause(1.0)
                raise Finding(f"the worker {what} within {seconds:.0f} s:\n{self.text()[-6000:]}")
            pause(0.002)

    def check(self) -> None:
        """Raise `Finding` if the process has ended or said what it must not."""
        if self.process.poll() is not None:
            raise Finding(f"the worker ended ({self.process.returncode}):\n{self.text()[-6000:]}")
        with self.log.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._read)
            new = file.read()
            self._read = file.tell()
        for line in new.splitlines():
            if (
                line.startswith("Traceback (most")
                or "a defect of the worker" in line[:200]
                or line.startswith("AUDIT")
            ):
                raise Finding(f"the worker's log:\n{new[max(0, new.index(line) - 500) :][:5000]}")

    def holds(self) -> dict[str, Any]:
        """Return what the worker holds; see `holdings`."""
        self._report.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        self._wait(self._report.exists, PATIENCE, "does not say what it holds")
        found: dict[str, Any] = json.loads(self._report.read_text(encoding="utf-8"))
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(20)


class Speaker:
    """A connection to a worker, of a master who says what he likes."""

    def __init__(self, worker: FuzzedWorker, keys: KeyPair | None = None) -> None:
        self.worker = worker
        self.channel = Channel(keys=keys or worker.keys)
        self.peer = b"worker"
        self.channel.connect(worker.address, self.peer)
        self.heard: list[Any] = []
        # So many messages of the session have come.
        self.counted = 0

    def say(self, *frames: bytes) -> None:
        with suppress(PeerGone):
            self.channel.send(self.peer, list(frames))

    def listen(self, seconds: float = 0.0) -> None:
        for peer, frames in self.channel.receive(seconds):
            try:
                message = decode(frames[0])  # type: ignore[arg-type]
            except ProtocolError as error:
                raise Finding(f"the worker breaks the protocol: {error}") from None
            if peer == self.peer:
                self.heard.append(message)
            self.counted += not isinstance(message, (Welcome, Refused, Ack))

    def dial_anew(self, hang_up: bool) -> None:
        """Speak on a new connection from now on; the worker hears that the other is closed, or does not."""
        if hang_up:
            self.channel.hang_up(self.peer)
        self.peer = b"worker-%d" % next(_numbers)
        self.channel.connect(self.worker.address, self.peer)

    def hears(self, kind: type, what: str, number: int | None = None, patience: float = PATIENCE) -> Any:
        """Wait for a message of a class, and return it; a `Finding` if it does not come.

        What has come is acknowledged: while a large value waits for that, nothing else of its session is
        read.
        """
        deadline, told = time.monotonic() + patience, 0
        while True:
            if self.counted > told:
                told = self.counted
                self.say(encode(Ack(told)))
            for message in self.heard:
                if isinstance(message, kind) and number in (None, getattr(message, "request", None)):
                    self.heard.remove(message)
                    return message
            self.worker.check()
            if time.monotonic() > deadline:
                self.worker.process.send_signal(signal.SIGUSR2)
                pause(1.0)
                raise Finding(
                    f"{what} was not answered within {patience:.0f} s; heard "
                    f"{self.heard[-3:]}:\n{self.worker.text()[-6000:]}"
                )
            self.listen(0.05)

    def answer(self, request: int) -> Any:
        """Return what a request is answered, if it is: whoever has said nonsense before is not."""
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline and not any(isinstance(m, Goodbye) for m in self.heard):
            for message in self.heard:
                if isinstance(message, Reply) and message.request == request:
                    return message.value
            self.listen(0.02)
        return None

    def fence(self) -> None:
        """Return once the worker has read all that was said."""
        self.heard = [m for m in self.heard if not isinstance(m, Refused)]
        self.say(encode(hello(PROTOCOL + 1)))
        self.hears(Refused, "a master of another protocol")

    def close(self) -> None:
        self.channel.close()


def hello(protocol: int = PROTOCOL, name: str = "fuzz") -> Hello:
    """Return what opens a session, whoever has one of that name."""
    values: dict[str, Any] = {
        "protocol": protocol,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    made = revived("Hello", {"session": name, "mode": "force new", "keep": KEEP, "host": "here", **values})
    return replace(made, protocol=protocol)


ADD = [16, "aten::add.Tensor", [["operand"], ["operand"]], {}, 1]


class Legitimate:
    """A master that behaves, and is to be served: welcomed within its deadline, and with right values."""

    def __init__(self, worker: FuzzedWorker) -> None:
        self._speaker = Speaker(worker)
        deadline = time.monotonic() + PATIENCE
        while True:
            # No attacker names this session.
            self._speaker.say(encode(hello(name=f"friend {next(_numbers)}")))
            answer = self._speaker.hears((Welcome, Refused), "Hello")  # type: ignore[arg-type]
            if isinstance(answer, Welcome):
                break
            if time.monotonic() > deadline:
                raise Finding(f"a legitimate master is still refused after {PATIENCE:.0f} s: {answer.reason}")
            # The worker has not seen the one before it leave yet.
            pause(0.01)
        self._requests = 0

    def compute(self) -> Legitimate:
        """Add two tensors; read the sum."""
        data = torch.tensor([1.5, 2.5]).numpy().tobytes()
        words = [UPLOAD, 1, "cpu", "float32", [2], data, 16, 1, 1, 2]
        self._speaker.say(encode(Segment(1, 0, [ADD], words, [])))
        return self.still()

    def still(self) -> Legitimate:
        """Read the sum once more."""
        self._requests += 1
        self._speaker.say(encode(Fetch(self._requests, 2, [0, 10], "tensor", {})))
        reply = self._speaker.hears(Reply, "a fetch", self._requests)
        if reply.value != ["float32", [2], torch.tensor([3.0, 5.0]).numpy().tobytes()]:
            raise Finding(f"a legitimate master read {reply.value}")
        return self

    def leave(self) -> None:
        self._speaker.say(encode(Goodbye("done")))
        with suppress(Finding):
            self._speaker.fence()
        self._speaker.close()


class AgainstWorker:
    """Rounds of attacks on one worker. `counts` are the messages sent, by class."""

    def __init__(self, folder: Path, recordings: list[Recording], seed: int, raw: bool = False) -> None:
        self.recordings, self.seed, self.raw = recordings, seed, raw
        self.worker = FuzzedWorker(folder)
        self.counts: Counter[str] = Counter()

    def round(self, number: int) -> None:
        """Attack once; raise `Finding`."""
        rng = random.Random(f"{self.seed}:{number}")
        mutator = Mutator(self.recordings, rng)
        if self.raw:
            self._strangers(rng, mutator)
        elif rng.random() < 0.2:
            self._beside(rng, mutator)
        else:
            self._as_master(rng, mutator)
        self.worker.check()

    def _as_master(self, rng: random.Random, mutator: Mutator) -> None:
        attacker = Speaker(self.worker)
        try:
            items: list[Any] = mutator.session(
                "master" if rng.random() < 0.9 else rng.choice(("worker", "peer"))
            )
            if not (items and isinstance(items[0], Seed) and items[0].kind == "Hello") and rng.random() < 0.9:
                items.insert(0, Seed(hello()))
            self._send(attacker, items, mutator)
            if rng.random() < 0.8:
                attacker.fence()
        finally:
            attacker.close()
        Legitimate(self.worker).compute().leave()

    def _beside(self, rng: random.Random, mutator: Mutator) -> None:
        """Hold the key and have no session, while a legitimate master has."""
        friend = Legitimate(self.worker).compute()
        attacker = Speaker(self.worker)
        try:
            items = [s for s in mutator.session(rng.choice(("master", "worker", "peer")), most=20)]
            self._send(attacker, items, mutator)
            attacker.fence()
        finally:
            attacker.close()
        friend.still().leave()

    def _send(self, attacker: Speaker, items: list[Any], mutator: Mutator) -> None:
        greeted = False
        for item in items:
            if isinstance(item, bytes):
                self.counts["noise"] += 1
                attacker.say(item)
                continue
            message = item.message
            if isinstance(message, Hello):
                attacker.listen()
                if greeted and mutator.random.random() < 0.7:
                    attacker.dial_anew(hang_up=mutator.random.random() < 0.5)
                greeted = True
                received = attacker.counted if mutator.random.random() < 0.7 else message.received
                keep = min(message.keep, KEEP) if isinstance(message.keep, (int, float)) else message.keep
                item = Seed(replace(message, received=received, keep=keep), item.payloads)
            if (
                isinstance(message, Ack)
                and isinstance(message.received, int)
                and mutator.random.random() < 0.7
            ):
                item = Seed(Ack(min(message.received, attacker.counted)), item.payloads)
            if isinstance(message, OpenGroup):
                # A member that joins waits for members elsewhere, so most often there are none.
                nodes = (
                    [0] * len(message.nodes)
                    if isinstance(message.nodes, list) and mutator.random.random() < 0.7
                    else message.nodes
                )
                limit = (
                    min(message.timeout, 2.0)
                    if isinstance(message.timeout, (int, float))
                    else message.timeout
                )
                message = replace(message, timeout=limit, nodes=nodes)
                item = Seed(message, item.payloads)
            self.counts[item.kind] += 1
            attacker.say(*mutator.frames(item))
            attacker.listen()

    # -- without the key ---------------------------------------------------------------------------

    def _strangers(self, rng: random.Random, mutator: Mutator) -> None:
        friend = Legitimate(self.worker).compute()
        for _ in range(rng.randrange(1, 6)):
            how = rng.choice(
                (self._noise, self._greeting, self._meddler, self._meddler, self._wrong_key, self._no_key)
            )
            self.counts[how.__name__.strip("_")] += 1
            how(rng, mutator)
        friend.still().leave()
        Legitimate(self.worker).compute().leave()

    def _write(self, *parts: bytes) -> None:
        host, _, port = self.worker.address[len("tcp://") :].rpartition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=10) as connection:
            for part in parts:
                connection.sendall(part)
            connection.settimeout(0.02)
            connection.recv(4096)

    def _noise(self, rng: random.Random, mutator: Mutator) -> None:
        self._write(
            rng.choice(
                [
                    rng.randbytes(rng.randrange(1, 5000)),
                    b"GET / HTTP/1.1\r\n\r\n",
                    b"\x16\x03\x01\x02\0",
                    b"\xff" * 64,
                    mutator.noise(),
                ]
            )
        )

    def _greeting(self, rng: random.Random, mutator: Mutator) -> None:
        mechanism = rng.choice((b"NULL", b"CURVE", b"PLAIN", b"GSSAPI", b"", b"\xff" * 20)).ljust(20, b"\0")
        greeting = (
            b"\xff"
            + rng.choice((b"\0" * 8, rng.randbytes(8)))
            + b"\x7f"
            + bytes([rng.choice((3, 3, 3, 0, 1, 2, 255)), rng.choice((0, 1))])
        )
        greeting += mechanism + rng.choice((b"\0", b"\1")) + b"\0" * 31
        ready = b"\x04\x26\x05READY" + b"\x0bSocket-Type\0\0\0\x06ROUTER" + b"\x08Identity\0\0\0\0"
        curve = (
            b"\x04\xc8\x05HELLO\x01\0"
            + b"\0" * 72
            + rng.randbytes(32)
            + b"\0" * 7
            + b"\1"
            + rng.randbytes(80)
        )
        size = rng.choice((1 << 62, 1 << 33, (1 << 64) - 1, 1 << 20, 0))
        large = (
            rng.choice((b"\x02", b"\x06", b"\x03", b"\xff"))
            + size.to_bytes(8, "big")
            + b"x" * rng.randrange(100_000)
        )
        whole = greeting + b"".join(
            rng.sample([ready, curve, large, rng.randbytes(60), b"\0\5hello"], rng.randrange(1, 5))
        )
        if rng.random() < 0.4:
            whole = mutator.bitten(whole)
        cut = rng.randrange(len(whole) + 1) if rng.random() < 0.3 else len(whole)
        self._write(whole[:cut], whole[cut:])

    def _meddler(self, rng: random.Random, mutator: Mutator) -> None:
        """Pass on a friend's handshake and messages, but flip, drop or repeat bytes on the way."""
        meddler = _Meddler(self.worker.address, rng)
        channel = Channel(keys=self.worker.keys)
        try:
            channel.connect(meddler.address, b"worker")
            for _ in range(3):
                with suppress(PeerGone):
                    channel.send(b"worker", [encode(hello(PROTOCOL + 1))])
            deadline = time.monotonic() + 0.15
            while time.monotonic() < deadline and not channel.receive(0.02) and not meddler.done:
                pass
        finally:
            channel.close()
            meddler.close()

    def _wrong_key(self, rng: random.Random, mutator: Mutator) -> None:
        self._refused(KeyPair.generate())

    def _no_key(self, rng: random.Random, mutator: Mutator) -> None:
        self._refused(None)

    def _refused(self, keys: KeyPair | None) -> None:
        channel = Channel(keys=keys)
        try:
            channel.connect(self.worker.address, b"worker")
            with suppress(PeerGone):
                channel.send(b"worker", [encode(hello())])
            deadline = time.monotonic() + 0.3
            while time.monotonic() < deadline and not any("failed" in e.kind for e in channel.events()):
                if channel.receive(0.02):
                    raise Finding("a stranger was answered")
        finally:
            channel.close()

    def holds(self) -> dict[str, Any]:
        return self.worker.holds()

    def close(self) -> None:
        self.worker.stop()


class _Meddler:
    """Passes bytes on between a connection of its own port and another address, and changes some."""

    def __init__(self, address: str, rng: random.Random) -> None:
        host, _, port = address[len("tcp://") :].rpartition(":")
        self._there = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.done = False
        self._plans = [random.Random(rng.random()), random.Random(rng.random())]
        self._at = [
            rng.randrange(900) if rng.random() < 0.8 else 1 << 40,
            rng.randrange(900) if rng.random() < 0.3 else 1 << 40,
        ]
        self._sockets: list[socket.socket] = [self._server]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            near, _ = self._server.accept()
            far = socket.create_connection(self._there, timeout=5)
            self._sockets += [near, far]
            other = threading.Thread(target=self._pass, args=(far, near, 1), daemon=True)
            other.start()
            self._pass(near, far, 0)
            other.join(5)
        self.done = True

    def _pass(self, source: socket.socket, target: socket.socket, way: int) -> None:
        passed, rng = 0, self._plans[way]
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                k = self._at[way] - passed
                if 0 <= k < len(data):
                    how = rng.randrange(5)
                    if how == 0:
                        data[k] ^= 1 << rng.randrange(8)
                    elif how == 1:
                        del data[k : k + rng.randrange(1, 20)]
                    elif how == 2:
                        data[k:k] = rng.randbytes(rng.randrange(1, 300))
                    elif how == 3:
                        data += bytes(data)
                    else:
                        del data[k:]
                passed += len(data)
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._thread.join(10)
