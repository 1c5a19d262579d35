"""Strangers and breakers of the protocol, at a listening worker and a listening master: dropped with a log
line, all else goes on.
"""

from __future__ import annotations

import ast
import logging
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

import distruntime as dr
from distruntime.errors import ConfigurationError, ConnectionFailed
from distruntime.session.session import active_session
from distruntime.wire.channel import Channel, PeerGone
from distruntime.wire.codec import decode, encode
from distruntime.wire.keys import KeyPair
from distruntime.wire.messages import (
    MESSAGES,
    PROTOCOL,
    AskMemory,
    AskPassed,
    Cancel,
    Done,
    Failed,
    Fetch,
    FindPublished,
    Goodbye,
    Hello,
    Join,
    MeshBody,
    MeshSegment,
    Message,
    OpenLines,
    OpenMesh,
    OpenStream,
    Refused,
    Reply,
    Segment,
    Signal,
    SweepSaves,
    Welcome,
)
from greeting_samples import HELLO, JOIN, WELCOME, hello
from processes import ListeningWorker, free_port, until

ROOT = Path(__file__).resolve().parents[2]


# -- attacks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A listening worker or master, and the file of the key that its friends hold."""

    address: str
    key: Path | None

    def friend(self) -> KeyPair | None:
        return KeyPair.load(self.key) if self.key is not None else None


# The attackers' sockets are closed at the end of the test, since closing drops what was not sent yet.
_open: list[Channel] = []


@pytest.fixture(autouse=True)
def _attackers_leave() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def talk(target: Target, keys: KeyPair | None, messages: list[list[bytes]]) -> Channel:
    channel = Channel(keys=keys)
    _open.append(channel)
    channel.connect(target.address, b"target")
    for frames in messages:
        try:
            channel.send(b"target", frames)
        except PeerGone:
            break  # refused already
    return channel


def connected(channel: Channel) -> None:
    until(lambda: any(event.kind == "connected" for event in channel.events()))


def greetings() -> list[list[bytes]]:
    """What opens a session at a worker, and what joins one at a master."""
    return [[encode(HELLO)], [encode(JOIN)]]


def refused(target: Target, keys: KeyPair | None) -> None:
    """Try to get in, until the handshake has failed; nothing ever answers."""
    channel = talk(target, keys, greetings())
    until(
        lambda: (
            channel.receive(0.05)
            or any(event.kind in ("auth_failed", "handshake_failed") for event in channel.events())
        )
    )
    assert channel.receive(0.2) == []


def without_a_key(target: Target) -> None:
    refused(target, None)


def with_another_key(target: Target) -> None:
    refused(target, KeyPair.generate())


def raw(target: Target, *parts: bytes) -> None:
    """Write to the port by hand and hang up."""
    if target.address.startswith("ipc://"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(target.address[len("ipc://") :])
    else:
        host, _, port = target.address[len("tcp://") :].rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=20)
    with connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # hung up on us already


def greeting(mechanism: bytes) -> bytes:
    """The start of ZMTP 3.1 (rfc.zeromq.org/spec/37): signature, version, mechanism, as-server."""
    return b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" * 32


def noise(target: Target) -> None:
    for seed in range(5):
        raw(target, random.Random(seed).randbytes(4096))
    raw(target, b"GET / HTTP/1.1\r\n\r\n")


def oversized_frames(target: Target) -> None:
    for mechanism in (b"NULL", b"CURVE", b"PLAIN"):
        for flags in (b"\x02", b"\x06"):  # a large message, a large command
            raw(target, greeting(mechanism), flags + (1 << 62).to_bytes(8, "big"), b"x" * 100_000)


def truncated_frames(target: Target) -> None:
    ready = b"\x04\x26\x05READY" + b"\x0bSocket-Type\0\0\0\x06ROUTER" + b"\x08Identity\0\0\0\0"
    for mechanism in (b"NULL", b"CURVE"):
        whole = greeting(mechanism) + ready + b"\x01\x05hello" + b"\x00\x7fcut"
        for length in (1, 10, 11, 40, 64, 66, 80, len(whole) - 3, len(whole)):
            raw(target, whole[:length])


def messages_that_are_none(target: Target) -> None:
    """From one who holds the key: frames that are no message, and messages with fields of the wrong class."""
    random_ = random.Random(0)
    frames = [
        [b""],
        [b"\xc1"],
        [b"\x93" * 5000],
        [b"\xdf\xff\xff\xff\xff"],
        [random_.randbytes(100)],
        [msgpack.packb([99])],
        [b"", b"", b""],
    ]
    frames += [[msgpack.packb([number])] for number in range(len(MESSAGES))]
    frames += [[msgpack.packb([number, *[None] * 20])] for number in range(len(MESSAGES))]
    connected(talk(target, target.friend(), frames))


def messages_out_of_place(target: Target) -> None:
    """From one who holds the key but has no session: whole messages that only a peer in session may send."""
    messages: list[Message] = [
        OpenStream(1, "cpu", 0, -1), Segment(1, 0, [], [], []), Fetch(1, 1, [0, 0], "tensor", {}),
        AskMemory(1), Reply(1, None), Failed(1, []), Done(1, [], []), Signal(1, ""), Cancel(1, 1, False, ""),
        Goodbye("x"), OpenMesh(0, ["cpu"]), OpenLines(0, 0, [[1, 0]]),
        MeshSegment(1), MeshBody(0, 0, [], [], []),
    ]  # fmt: skip
    connected(talk(target, target.friend(), [[encode(message)] for message in messages]))


STRANGERS = [without_a_key, with_another_key, noise, oversized_frames, truncated_frames]
BREAKERS = [messages_that_are_none, messages_out_of_place]
Attack = Callable[[Target], None]


# -- a listening worker ----------------------------------------------------------------------------


@pytest.fixture
def curve_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ListeningWorker, Target]]:
    folder = tmp_path_factory.mktemp(
        "curve"
    )  # each worker of its own: after the first lines, a minute's are one
    KeyPair.generate().save(folder / "key")
    worker = ListeningWorker(folder, "--listen", "tcp://127.0.0.1:0", "--key", str(folder / "key"))
    yield worker, Target(worker.address, folder / "key")
    worker.stop()


@pytest.fixture
def open_worker(tmp_path: Path) -> Iterator[tuple[ListeningWorker, Target]]:
    os.chmod(tmp_path, 0o700)
    worker = ListeningWorker(tmp_path, "--listen", f"ipc://{tmp_path}/s", "--insecure")
    yield worker, Target(worker.address, None)
    worker.stop()


def bytes_of(frame: Any) -> bytes:
    return frame if isinstance(frame, bytes) else bytes(frame.bytes)


def computes() -> bool:
    return bool((torch.ones(3, device="remote") + 1).sum().item() == 6.0)


@pytest.mark.parametrize("attack", STRANGERS + BREAKERS)
def test_a_session_goes_on_while_others_attack_its_worker(
    curve_worker: tuple[ListeningWorker, Target], fresh_session: Callable[..., Any], attack: Attack
) -> None:
    worker, target = curve_worker
    before = len(worker.text())
    fresh_session(workers=[target.address], key=target.key)
    kept = torch.arange(5, device="remote")
    attack(target)
    until(lambda: any(word in worker.text()[before:] for word in ("refused a connection", "dropped a peer")))
    assert computes() and kept.tolist() == [0, 1, 2, 3, 4]
    assert worker.process.poll() is None and "Traceback" not in worker.text()
    dr.shutdown()
    fresh_session(workers=[target.address], key=target.key)
    assert computes()


@pytest.mark.parametrize("attack", [noise, oversized_frames, truncated_frames, *BREAKERS])
def test_a_worker_without_keys_survives_what_is_no_protocol(
    open_worker: tuple[ListeningWorker, Target], fresh_session: Callable[..., Any], attack: Attack
) -> None:
    worker, target = open_worker
    fresh_session(workers=[target.address])
    attack(target)
    assert computes()
    assert worker.process.poll() is None and "Traceback" not in worker.text()


def test_a_stranger_learns_that_the_keys_differ(
    curve_worker: tuple[ListeningWorker, Target], tmp_path: Path
) -> None:
    _, target = curve_worker
    KeyPair.generate().save(tmp_path / "other")
    dr.shutdown()
    with pytest.raises(ConnectionFailed, match="the keys do not match"):
        dr.init_master_worker(workers=[target.address], key=tmp_path / "other", timeout=20)
    with pytest.raises(ConnectionFailed, match="key"):
        dr.init_master_worker(workers=[target.address], insecure=True, timeout=20)


def test_a_peer_that_says_hello_and_is_gone_costs_the_worker_nothing(
    open_worker: tuple[ListeningWorker, Target], fresh_session: Callable[..., Any]
) -> None:
    worker, target = open_worker
    wrong = encode(hello(protocol=PROTOCOL + 1))
    for _ in range(20):
        channel = talk(target, None, [[wrong]])
        connected(channel)
        channel.close()
    fresh_session(workers=[target.address])
    assert computes() and worker.process.poll() is None and "Traceback" not in worker.text()


FIELDS: list[Any] = [
    None,
    True,
    -1,
    1 << 62,
    1.5,
    "",
    "tensor",
    "x" * 1000,
    b"x",
    [],
    [[]],
    [None],
    {},
    {"a": 1},
    [[1, 2, 3]],
    [[0] * 7],
]


def malformed(kinds: list[type], count: int, seed: int) -> list[bytes]:
    """Messages of the right shape whose fields are of the right classes as often as not, and whose contents
    make no sense.
    """
    random_ = random.Random(seed)
    frames = []
    for _ in range(count):
        kind = random_.choice(kinds)
        fields = len(kind.__dataclass_fields__)  # type: ignore[attr-defined]
        frames.append(msgpack.packb([MESSAGES.index(kind), *(random_.choice(FIELDS) for _ in range(fields))]))
    by_class: dict[str, list[Any]] = {
        "int": [0, 1, 2, 3, -1, 1 << 62],
        "list": [[], [[]], [[], 1], [1, 2, 3], [[1, "x", [], {}, 1]], [[0] * 7], [None]],
        "str": ["", "tensor", "item", "done", "passed", "x", "cpu"],
        "bool": [True], "object": FIELDS, "bytes": [b""],
    }  # fmt: skip
    for _ in range(count):
        kind = random_.choice(kinds)
        values = []
        for field in kind.__dataclass_fields__.values():  # type: ignore[attr-defined]
            name = str(field.type).partition("[")[0].partition(" ")[0]
            values.append(random_.choice(by_class.get(name, [{}])))
        frames.append(msgpack.packb([MESSAGES.index(kind), *values]))
    return frames


@pytest.mark.parametrize("seed", range(3))
def test_a_master_whose_messages_make_no_sense_harms_no_later_one(
    open_worker: tuple[ListeningWorker, Target], fresh_session: Callable[..., Any], seed: int
) -> None:
    worker, target = open_worker
    dr.shutdown()
    attacker = talk(target, None, [])
    kinds: list[type] = [
        Segment,
        Fetch,
        AskMemory,
        AskPassed,
        FindPublished,
        SweepSaves,
        OpenStream,
        Signal,
        Cancel,
        Goodbye,
        OpenMesh,
        OpenLines,
        MeshSegment,
        MeshBody,
    ]
    for frame in [encode(AskPassed(1, [[], 1])), *malformed(kinds, 60, seed)]:
        attacker.send(b"target", greetings()[0])
        attacker.send(b"target", [frame])
    attacker.send(b"target", [encode(Goodbye("done"))])
    attacker.send(b"target", [encode(hello(protocol=PROTOCOL + 1))])

    def all_was_read() -> bool:
        return any(isinstance(decode(bytes_of(frames[0])), Refused) for _, frames in attacker.receive(0.05))

    until(all_was_read)
    assert worker.process.poll() is None, worker.text()
    fresh_session(workers=[target.address])
    assert computes() and worker.process.poll() is None, worker.text()


# -- a listening master ----------------------------------------------------------------------------


def dial_in(folder: Path, address: str, node: int, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "worker")]),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / f"worker-{node}.log").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "distruntime_worker", "--master", address, "--node", str(node),
             *arguments],
            stdout=output, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip


@pytest.fixture
def listening_master(tmp_path: Path, fresh_session: Callable[..., Any]) -> Iterator[Target]:
    """A session of one worker that has dialled in."""
    KeyPair.generate().save(tmp_path / "key")
    address = f"tcp://127.0.0.1:{free_port()}"
    process = dial_in(tmp_path, address, 0, "--key", str(tmp_path / "key"))
    try:
        fresh_session(listen=address, world_size=1, key=tmp_path / "key", timeout=60)
        yield Target(address, tmp_path / "key")
    finally:
        dr.shutdown()
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize("attack", [*STRANGERS, *BREAKERS])
def test_a_session_goes_on_while_others_attack_its_master(
    listening_master: Target, caplog: pytest.LogCaptureFixture, attack: Attack
) -> None:
    kept = torch.arange(5, device="remote")
    with caplog.at_level(logging.WARNING):
        attack(listening_master)
        assert computes() and kept.tolist() == [0, 1, 2, 3, 4]
        until(lambda: [record for record in caplog.records if record.name.startswith("distruntime")])


@pytest.mark.parametrize("attack", STRANGERS)
def test_strangers_do_not_keep_a_session_from_coming_about(
    tmp_path: Path, fresh_session: Callable[..., Any], attack: Attack
) -> None:
    KeyPair.generate().save(tmp_path / "key")
    target = Target(f"tcp://127.0.0.1:{free_port()}", tmp_path / "key")
    process = dial_in(tmp_path, target.address, 0, "--key", str(tmp_path / "key"))

    def interfere() -> None:
        while True:
            try:
                raw(target)
                break
            except ConnectionRefusedError:
                threading.Event().wait(0.005)
        attack(target)

    thread = threading.Thread(target=interfere)
    thread.start()
    try:
        fresh_session(listen=target.address, world_size=1, key=target.key, timeout=60)
        thread.join()
        assert computes()
    finally:
        thread.join()
        dr.shutdown()
        process.terminate()
        process.wait(20)


class BadWorker:
    """Joins a session as a worker does, then says whatever it is told to."""

    def __init__(self, address: str, keys: KeyPair | None, node: int) -> None:
        self._channel = Channel(keys=keys)
        self._channel.connect(address, b"master")
        self._node = node
        self._stop = threading.Event()
        self.welcomed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._channel.send(b"master", [encode(replace(JOIN, node=self._node))])
        while not self._stop.is_set():
            for _, frames in self._channel.receive(0.05):
                if isinstance(decode(bytes_of(frames[0])), Hello):
                    self._channel.send(b"master", [encode(WELCOME)])
                    self.welcomed.set()

    def say(self, *frames: bytes) -> None:
        try:
            self._channel.send(b"master", list(frames))
        except PeerGone:
            pass  # hung up on us, as it may

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._channel.close()


@pytest.fixture
def bad_worker(tmp_path: Path, fresh_session: Callable[..., Any]) -> Iterator[BadWorker]:
    """Node 1 of a session whose node 0 is a real worker."""
    os.chmod(tmp_path, 0o700)
    address = f"ipc://{tmp_path}/m"
    process = dial_in(tmp_path, address, 0)
    bad = BadWorker(address, None, 1)
    try:
        fresh_session(listen=address, world_size=2, timeout=60)
        yield bad
    finally:
        bad.close()
        dr.shutdown()
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize("frame", [b"\xc1", b"", msgpack.packb([99]), msgpack.packb([0, 1]), encode(HELLO)])
def test_a_worker_that_breaks_the_protocol_is_dropped_alone(bad_worker: BadWorker, frame: bytes) -> None:
    there = torch.ones(2, device="remote")
    bad_worker.say(frame)
    with pytest.raises(dr.errors.NodeFailed, match="protocol"):
        with dr.on(1, "cpu"):
            until(lambda: torch.ones(1).item() != 1.0)
    assert computes() and there.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_whose_messages_make_no_sense_harms_nobody(bad_worker: BadWorker, seed: int) -> None:
    there = torch.ones(2, device="remote")
    for frame in malformed([Done, Reply, Failed, Join, Welcome], 60, seed):
        bad_worker.say(frame)
    for _ in range(20):
        assert computes()
    assert there.tolist() == [1.0, 1.0]


def test_a_worker_cannot_answer_for_another(bad_worker: BadWorker) -> None:
    session = active_session()
    asked = session.requests.new(session.nodes[0], "item")
    for number in range(asked.number, asked.number + 300):
        bad_worker.say(encode(Reply(number, 7.0)))
    until(lambda: asked.done or session.nodes[1].failed)
    assert not asked.done and "which went to another node" in str(session.nodes[1].failed)
    session.requests.discard(asked)
    for _ in range(50):
        assert computes()


# -- what may listen, and what may be unpickled ----------------------------------------------------


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
def test_a_master_does_not_listen_beyond_this_machine_without_a_key(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTRUNTIME_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    dr.shutdown()
    with pytest.raises(ConfigurationError, match="keygen"):
        dr.init_master_worker(listen=address, world_size=1)
    with pytest.raises(ConnectionFailed, match="did not dial"):
        dr.init_master_worker(listen=address, world_size=1, insecure=True, timeout=0.2)


UNPICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "copyreg"}
# These only write pickles, or say how one is written.
WRITES = {"Pickler", "dumps", "pickle", "_slotnames"}
CALLS = {"eval", "exec", "compile", "__import__"}
# guards.py compiles a test of its own words: tests/programs/test_traps.py tries names that are code.
# unchanged.py compiles numbers and names that are quoted.
# magics.py runs the cell that the user has typed, and __main__.py the script that the user names.
COMPILES = (
    *(ROOT / "distruntime/guards/guards.py", ROOT / "distruntime/guards/unchanged.py"),
    *(ROOT / "distruntime/magics.py", ROOT / "distruntime/__main__.py"),
)


# structure.py opens what a trusted key has signed, and nothing else: tests/publishing/test_signing.py holds
# that. pickling.py opens the copy of an object that the user has asked a worker for, in a session with a key.
# sent_weights.py runs on workers, and loads weights only.
_PLAIN = [
    path
    for path in sorted((ROOT / "distruntime").rglob("*.py"))
    if not any(map(path.match, ("publishing/structure.py", "python/pickling.py", "python/sent_weights.py")))
]


@pytest.mark.parametrize("path", _PLAIN, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_master_unpickles_nothing(path: Path) -> None:
    """Replies carry data: whatever a worker sends, no code of its choice runs."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                # Its `dumps` writes here. Its `loads` is caught below.
                modules = [name.name for name in names if name.name != "cloudpickle"]
            case ast.ImportFrom(module="pickle" | "copyreg" as module, names=[only]) if only.name in WRITES:
                continue
            case ast.ImportFrom(module=str(module), names=names):
                modules = [module, *(f"{module}.{name.name}" for name in names)]
            case ast.Call(func=ast.Name(id=name)) if name in CALLS and path not in COMPILES:
                raise AssertionError(f"{path}:{node.lineno} calls {name}")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                raise AssertionError(f"{path}:{node.lineno} calls torch.load, which unpickles")
            case ast.Attribute(attr="recv_pyobj" | "loads"):
                raise AssertionError(f"{path}:{node.lineno} uses {node.attr}")
            case _:
                continue
        assert not {module.partition(".")[0] for module in modules} & UNPICKLES, f"{path}:{node.lineno}"
