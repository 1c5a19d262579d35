"""Seeds of the fuzzer: the messages of real sessions, as workers sent and received them, in
`fuzz_seeds.msgpack`.

A message is stored as [class name, fields by name, payloads], so that seeds outlive a change of the protocol:
a field that the class no longer has is dropped, one that is new gets a value of its type. `record` makes the
file anew: `PYTHONPATH=.:worker:tests/help python tests/help/fuzzing.py record`.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import typing
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgpack
import torch

import distruntime as dr
from distruntime.session.session import active_session
from distruntime.wire.channel import Channel
from distruntime.wire.codec import decode, encode
from distruntime.wire.messages import (
    MESSAGES,
    PROTOCOL,
    AskActivity,
    AskClock,
    AskMemory,
    AskPassed,
    AskStacks,
    AskStatus,
    AskTurns,
    AskWorker,
    Bury,
    Hello,
    ListenForPeers,
    MeshBody,
    OpenGroup,
    Peers,
    Refused,
    RemoveFiles,
    StartTrace,
    StopTrace,
    StopWorker,
    TakeTrace,
    Typed,
    Welcome,
)
from network import Network
from processes import STARTING, until

FILE = Path(__file__).with_suffix(".msgpack")
ROOT = FILE.parents[2]
_CLASSES = {cls.__name__: cls for cls in MESSAGES}
# A worker keeps the session of a hostile master for so many seconds.
KEEP = 0.5
# So many bytes of a payload are kept. Of a longer one only its length is kept.
_SHORT = 256
_DEFAULTS: dict[Any, Any] = {
    int: 0,
    str: "",
    bytes: b"",
    list: [],
    dict: {},
    bool: False,
    float: 1.0,
    types.NoneType: None,
}


@dataclass(frozen=True)
class Seed:
    """One message and its payload frames: bytes, or the message that one of them is."""

    message: Any
    payloads: tuple[Any, ...] = ()

    @property
    def kind(self) -> str:
        return type(self.message).__name__

    def frames(self) -> list[bytes]:
        return [encode(self.message), *(p if isinstance(p, bytes) else encode(p) for p in self.payloads)]


@dataclass(frozen=True)
class Recording:
    """What one worker was sent (`by` "master", or "peer" by another worker), or has sent (`by` "worker"), in
    a session.
    """

    name: str
    by: str
    seeds: tuple[Seed, ...]


# -- the file --------------------------------------------------------------------------------------


def default(annotation: Any) -> Any:
    """Return a value that a field of this type may have."""
    if isinstance(annotation, types.UnionType):
        return default(typing.get_args(annotation)[-1])
    found = _DEFAULTS.get(typing.get_origin(annotation) or annotation)
    return found.copy() if isinstance(found, (list, dict)) else found


def revived(name: str, values: dict[str, Any]) -> Any:
    """Return a message of today from stored fields; None if there is no such class any more."""
    cls = _CLASSES.get(name)
    if cls is None:
        return None
    hints = typing.get_type_hints(cls)
    message = cls(
        **{f.name: values[f.name] if f.name in values else default(hints[f.name]) for f in fields(cls)}
    )
    if hasattr(message, "protocol"):
        object.__setattr__(message, "protocol", PROTOCOL)
    return message


def _harmless(message: Any) -> Any:
    """Return a recorded message as a hostile master may say it at any time: a greeting takes its session
    over, and is not kept for long.
    """
    if not isinstance(message, Hello):
        return message
    return replace(message, mode="force new" if message.mode in ("", "new") else message.mode, keep=KEEP)


def _stored(message: Any) -> list[Any]:
    values = {f.name: getattr(message, f.name) for f in fields(message)}
    if isinstance(message, Hello):
        # The real one is of a process that is gone.
        values["shared"] = ""
    if "host" in values and not isinstance(message, ListenForPeers):
        values["host"] = "here"
    if "process" in values:
        values["process"] = ["a-boot:pid:[1]", 1, "1"]
    if isinstance(message, Welcome):
        values["left"] = [[name, ["a-boot:pid:[1]", 1, "1"]] for name, _ in message.left]
    if isinstance(message, OpenGroup):
        # This would be a pickled class: who holds the key may run code, and so would a mutated pickle.
        values["factory"] = b""
    return [type(message).__name__, values]


def load() -> list[Recording]:
    """Return the recorded sessions."""
    found = []
    for name, by, rows in msgpack.unpackb(FILE.read_bytes()):
        seeds = []
        for cls, values, *payloads in rows:
            message = revived(cls, values)
            if message is not None:
                seeds.append(Seed(_harmless(message), tuple(_payload(p) for p in payloads)))
        found.append(Recording(name, by, tuple(seeds)))
    return found


def _payload(stored: Any) -> Any:
    if isinstance(stored, int):
        return bytes(stored)
    return revived(*stored) if isinstance(stored, list) else stored


def shape(value: Any) -> Any:
    """Return what of a message makes it another kind of message: its structure, its words' opcodes, its texts
    if they are short.
    """
    if isinstance(value, (list, tuple)):
        return tuple(shape(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, shape(item)) for key, item in value.items())
    if type(value) is int:
        return value if 0 <= value < 16 else "int"
    return value if isinstance(value, str) and len(value) < 20 else type(value).__name__


def save(recordings: list[list[Any]]) -> None:
    """Write the file, without sessions of the same shape, and say what is in it."""
    seen, kept = set(), []
    for row in recordings:
        key = shape(row[1:])
        if row[2] and key not in seen:
            seen.add(key)
            kept.append(row)
    FILE.write_bytes(msgpack.packb(kept))
    kinds = {cls for _, _, rows in kept for cls, *_ in rows} | {
        p[0] for _, _, rows in kept for r in rows for p in r[2:] if isinstance(p, list)
    }
    count = sum(len(rows) for _, _, rows in kept)
    print(
        f"{FILE.name}: {len(kept)} sessions, {count} messages, {FILE.stat().st_size >> 10} KB; not in it: "
        f"{sorted(set(_CLASSES) - kinds)}"
    )


# -- recording: a worker that notes what goes through its channels ---------------------------------


def tapped_worker(path: str, *arguments: str) -> int:
    """Run a worker until it is stopped; write what it has sent and received to `path`."""
    from distruntime_worker.cli import main

    rows: list[Any] = []
    # The first one is the daemon's.
    channels: list[Channel] = []
    send, receive = Channel.send, Channel.receive

    def note(channel: Channel, ours: bool, frames: Any) -> None:
        if channel not in channels:
            channels.append(channel)
        buffers = [bytes(f) if isinstance(f, (bytes, bytearray, memoryview)) else f.bytes for f in frames]
        rows.append([channel is channels[0], ours, *buffers])

    def tapped_send(self: Channel, peer: bytes, frames: Any, **options: Any) -> Any:
        note(self, True, frames)
        return send(self, peer, frames, **options)

    def tapped_receive(self: Channel, *args: Any, **options: Any) -> Any:
        arrived = receive(self, *args, **options)
        for _, frames in arrived:
            note(self, False, frames)
        return arrived

    Channel.send, Channel.receive = tapped_send, tapped_receive  # type: ignore[method-assign]
    code = main(arguments)
    Path(path).write_bytes(msgpack.packb(rows))
    return code


class _Tapped:
    """Workers in processes of their own, tapped.

    A context manager: at its end they are stopped, and there are `recordings`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.processes: list[tuple[subprocess.Popen[bytes], Path]] = []
        self.recordings: list[list[Any]] = []

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(dr.DistruntimeError):
                dr.shutdown()
        finally:
            for process, _ in self.processes:
                process.terminate()
            for process, _ in self.processes:
                process.wait(30)
        self.recordings = self._read()

    def start(self, *arguments: str, stderr: Any = subprocess.DEVNULL) -> None:
        path = self.folder / f"{self.name}-{len(self.processes)}"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "worker", FILE.parent])),
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "-c",
            "import sys, fuzz_seeds; sys.exit(fuzz_seeds.tapped_worker(*sys.argv[1:]))",
            str(path),
            *arguments,
        ]
        self.processes.append((subprocess.Popen(command, env=environment, stderr=stderr), path))

    def _read(self) -> list[list[Any]]:
        found: list[list[Any]] = []
        for number, (_, path) in enumerate(self.processes):
            # The script has killed the worker.
            if not path.exists():
                continue
            streams: dict[str, list[Any]] = {"master": [], "worker": [], "peer": []}
            for of_daemon, ours, *frames in msgpack.unpackb(path.read_bytes()):
                if of_daemon or not ours:
                    streams["peer" if not of_daemon else "worker" if ours else "master"].append(_row(frames))
            found += [[f"{self.name} {number}", by, rows] for by, rows in streams.items()]
        return found


def _row(frames: list[bytes]) -> list[Any]:
    payloads: list[Any] = []
    for data in frames[1:]:
        message = None
        if len(data) > 1:
            with suppress(Exception):
                message = decode(data)
        payloads.append(
            _stored(message)
            if isinstance(message, MeshBody)
            else _calm(data)
            if len(data) <= _SHORT
            else len(data)
        )
    stored = _stored(decode(frames[0]))
    return [stored[0], _calm(stored[1]), *payloads]


def _calm(value: Any) -> Any:
    """Return fields without this machine's paths, and without what the oracle looks for in logs."""
    if isinstance(value, dict):
        return {key: _calm(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_calm(item) for item in value]
    if isinstance(value, bytes):
        value = re.sub(rb"(/[\w.-]+)+/checkpoint\b", b"checkpoint", value)
        # An envelope of equal length says who signed it.
        return re.sub(rb"[a-z][\w.-]+@[\w.-]+", lambda found: b"me@" + b"x" * (len(found[0]) - 3), value)
    if isinstance(value, str) and "Traceback" in value:
        return "the worker's words\n  of an error"
    # A relative folder is one of the fuzzed worker's own.
    if isinstance(value, str):
        value = value.replace(socket.gethostname(), "here")
        value = re.sub(r"(/[\w.-]+)+/checkpoint\b", "checkpoint", value)
    return re.sub(r"(/[\w.-]+){3,}", "/a/path", value) if isinstance(value, str) else value


# -- the sessions ----------------------------------------------------------------------------------


def _plain_operations() -> None:
    with dr.on(0, "cpu"):
        x = torch.arange(12.0).reshape(3, 4)
        y = (x @ x.T).relu() + 1.5
        y[1:].add_(2)
        top, where = y.max(0)
        z = torch.cat([y, top[None]]).t().contiguous().view(-1)[::2]
        z.masked_fill_(z > 5, 0)
        w = torch.nn.functional.layer_norm(y, (3,)).softmax(-1).to(torch.float64)
        loss = (w.sum() * 2).item()
        assert isinstance(loss, float) and where.tolist() is not None
        drawn = torch.rand(4, generator=None) + torch.randn(4).to(torch.complex64).real
        drawn.cpu()
        torch.linspace(0, 1, 5, dtype=torch.float64).pow(2).sum().cpu()


def _uploads() -> None:
    with dr.on(0, "cpu"):
        # The first two go inline, the third in a payload frame, the last through shared memory.
        for count in (1, 100, 9000, 200_000):
            torch.arange(count, dtype=torch.float32).to("remote").sum().item()
        torch.ones(3, 0).to("remote").cpu()
        torch.ones(2, dtype=torch.bfloat16).to("remote").copy_(torch.zeros(2, dtype=torch.bfloat16)).cpu()
        active_session().nodes[0].shared = False
        torch.zeros(100_000).to("remote").sum().item()


def _reads() -> None:
    with dr.on(0, "cpu"):
        x = torch.arange(600_000, dtype=torch.float32, device="remote")
        x[:5].cpu(), x[:6000].cpu(), x[:100_000].cpu(), x.cpu()
        active_session().nodes[0].shared = False
        # This one comes in parts.
        x.cpu()
        x[3].item(), bool(x[0]), repr(x), repr(x[:3]), (x[:2].to(torch.complex64))[1].item()
        dr.fetch({"a": x[:3], "b": [x[:3], x[7]]})
        dr.nodes(), dr.memory(0)
        dr.synchronize()


def _learns_and_checks() -> None:
    with dr.on(0, "cpu"):
        x = torch.arange(6.0, device="remote")
        x.nonzero(), x[x > 2], torch.unique(x), (x > 100).nonzero(), torch.equal(x, x)
        u, s, v = torch.linalg.svd(x.reshape(2, 3).contiguous(), full_matrices=False)
        (u * s) @ v
        torch.manual_seed(3)
        dr.config(num_threads=1)
        parameter = torch.nn.Parameter(torch.ones(3, device="remote"))
        (parameter * x[:3]).sum().backward()
        torch.optim.SGD([parameter], 0.1).step()
        parameter.detach().cpu()


def _failures() -> None:
    with dr.on(0, "cpu"):
        x = torch.arange(6, device="remote")
        bad = x[torch.tensor([99], device="remote")]
        # It warns.
        torch.zeros(1, device="remote").expand(3).index_fill_(0, torch.tensor([0], device="remote"), 1.0)
        for read in (
            bad.cpu,
            (bad + 1).cpu,
            dr.synchronize,
            lambda: torch.linalg.inv(torch.zeros(2, 2, device="remote")).cpu(),
        ):
            with suppress(Exception):
                read()


def _functions() -> None:
    """Functions of Python's own only: a seed is changed at random, and what it names may be called."""
    x = torch.ones(2, device="remote")
    dr.fetch(dr.remote(print)("x"))
    dr.remote(torch.add)(x, x).cpu()
    slow = dr.remote(time.sleep, returns=object, timeout=5.0)(0.05)
    dr.cancel(slow)
    for wrong in (slow, dr.remote(len, returns=object)(3)):
        with suppress(dr.DistruntimeError):
            dr.fetch(wrong)
    # No debugger waits for it.
    active_session().post(active_session().nodes[0], Typed(1, 0, "c"))
    dr.synchronize()


def _streams() -> None:
    first, second = dr.Stream(0, "cpu"), dr.Stream(0, "cpu")
    with dr.stream(first):
        x = torch.ones(64, 64, device="remote") @ torch.ones(64, 64, device="remote")
    with dr.stream(second):
        y = x + 1
        second.wait_stream(first)
        z = y * 2
    event = first.record_event(dr.Event(enable_timing=True))
    second.wait_event(event, timeout=5)
    end = second.record_event(dr.Event(enable_timing=True))
    first.query(), end.synchronize(), event.elapsed_time(end)
    del x, y
    second.cancel()
    with dr.stream(second):
        w = z + 1
    second.cancel()
    with suppress(dr.DistruntimeError):
        w.cpu()
    z.cpu()
    repr(z)


def _between_workers() -> None:
    # Otherwise the master passes signals on.
    until(lambda: active_session().groups.meeting.done)
    here, there = dr.Stream(0, "cpu"), dr.Stream(1, "cpu")
    with dr.stream(here):
        x = torch.ones(8, device="remote") * 3
    event = here.record_event()
    there.wait_event(event)
    there.wait_event(here.record_event(), timeout=5)
    with dr.stream(there):
        y = torch.ones(8, device="remote")
    z = x.to(node=1) + y
    z.cpu()
    dr.synchronize()


def _groups() -> None:
    def values(*shape: int) -> list[torch.Tensor]:
        found = []
        for node in (0, 1):
            with dr.on(node, "cpu"):
                found.append(torch.ones(*(shape or (4,)), device="remote"))
        return found

    group = dr.distributed.new_group([0, 1])
    dr.distributed.all_reduce(values(), group=group)
    dr.distributed.broadcast(values(), group_src=0, group=group)
    dr.distributed.all_gather_into_tensor(values(8), values(), group=group)
    dr.functional.reduce_scatter(values(), group=group)
    dr.distributed.all_to_all_single(values(), values(), group=group)
    dr.distributed.barrier(group)
    dr.distributed.send(values()[0], 1, tag=3)
    dr.distributed.recv(values()[1], tag=3)
    x, y = values()
    bad = x[torch.tensor([9]).to(x.device)]
    with suppress(dr.DistruntimeError):
        dr.distributed.all_reduce([bad.expand(4).clone(), y], group=group)
        dr.fetch([x, y], timeout=30)
    with suppress(dr.DistruntimeError):
        dr.synchronize()
    group.close()
    dr.synchronize()


def _a_broken_group() -> None:
    group = dr.distributed.new_group([0, 1])
    with dr.on(0, "cpu"):
        x = torch.ones(4, device="remote")
    with dr.on(1, "cpu"):
        y = torch.ones(4, device="remote")
    os.kill(dr.nodes()[1].pid, signal.SIGKILL)
    with suppress(dr.DistruntimeError):
        dr.distributed.all_reduce([x, y], group=group)
    with suppress(dr.DistruntimeError):
        dr.synchronize(0, timeout=20)
    with suppress(dr.DistruntimeError):
        dr.distributed.barrier(group)
    with suppress(dr.DistruntimeError):
        dr.synchronize(0, timeout=20)


def _mesh(device: str, sizes: tuple[int, int]) -> None:
    mesh = dr.init_device_mesh(device, sizes, mesh_dim_names=("dp", "tp"))
    with mesh:
        x = torch.arange(12.0).reshape(4, 3) / 7
        y = (x @ x.T).relu() + 1
        y[1:].add_(2.5)
        y.max(0)
        torch.rand(3)
    dr.from_shards([torch.full((2, 3), float(k)) for k in range(mesh.size())], mesh)
    dr.shards(y)
    coordinate = mesh.coordinate("tp") + 1.0
    dr.lines.all_reduce(mesh.lines("tp"), coordinate)
    dr.shards(coordinate)
    y.member(-1).cpu()
    with dr.stream(dr.Stream(mesh.device)):
        z = y + 1
    dr.shards(z)
    dr.synchronize()


def _publications() -> None:
    with dr.on(0, "cpu"):
        model = torch.nn.Linear(3, 2, device="remote")
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        tied = torch.arange(6.0, device="remote")
    with dr.on(1, "cpu"):
        elsewhere = torch.ones(3, device="remote")
    dr.publish(
        "model",
        {"model": model, "optimizer": optimizer, "tied": [tied, tied.view(2, 3), elsewhere]},
        shared=True,
    )
    dr.publish("model", copy.deepcopy(model))
    dr.publish("tied", tied)
    repr(dr.names())
    dr.lookup("model")
    del model, optimizer, tied
    (dr.lookup("tied") + 1).sum().item()
    with suppress(dr.errors.UsageError):
        dr.lookup("nobody/model")
    dr.unpublish("model")
    dr.memory(), repr(dr.nodes())


def _checkpoints() -> None:
    with dr.on(0, "cpu"):
        model = torch.nn.Linear(3, 2, device="remote")
    with dr.on(1, "cpu"):
        tree = {"model": model, "more": [torch.ones(5, device="remote"), torch.arange(3), 7]}
    folder = Path(os.environ["DISTRUNTIME_STATE"]) / "checkpoint"
    dr.save(tree, folder)
    saving = dr.save(tree, folder, async_op=True)
    assert saving is not None
    saving.wait(STARTING)
    dr.load(folder)
    (folder / "distruntime.json").unlink()
    for read in (lambda: dr.load(folder), lambda: dr.load(folder / "nothing")):
        with suppress(dr.DistruntimeError):
            read()


def _questions() -> None:
    """What a session asks seldom, or only when something takes long."""
    session = active_session()
    for question, *details in (
        (AskTurns,),
        (AskWorker,),
        (AskActivity,),
        (AskStacks,),
        (AskStatus,),
        (AskMemory,),
        (AskClock,),
        (StartTrace, 100),
        (StopTrace,),
        (TakeTrace, 0),
        (AskPassed, [0, 0]),
        (RemoveFiles, "checkpoint", ["model-0.safetensors"]),
    ):
        session.value(session.ask(session.nodes[0], question, *details))


def _leaving() -> None:
    with dr.on(0, "cpu"):
        torch.ones(3, device="remote").cpu()
    os.kill(dr.nodes()[0].pid, signal.SIGTERM)
    until(lambda: dr.nodes()[0].state in ("left", "lost"))


def _stopping() -> None:
    session = active_session()
    session.value(session.ask(session.nodes[0], StopWorker, "enough"))
    until(lambda: dr.nodes()[0].state in ("left", "lost"))


# Each session says what to do, with how many workers, and with how many simulated GPUs on each.
_SESSIONS: list[tuple[Callable[[], None], int, int]] = [
    (_plain_operations, 1, 0), (_uploads, 1, 0), (_reads, 1, 0), (_learns_and_checks, 1, 0),
    (_failures, 1, 0), (_functions, 1, 0), (_streams, 1, 1), (_between_workers, 2, 0), (_groups, 2, 0),
    (_a_broken_group, 2, 0),
    (lambda: _mesh("cpu", (2, 1)), 2, 0),
    (_publications, 2, 0), (_checkpoints, 2, 0), (_questions, 1, 0),
    (lambda: _mesh("cuda", (2, 2)), 2, 2), (lambda: _mesh("cuda", (1, 2)), 1, 2), (_leaving, 1, 0),
    (_stopping, 1, 0),
]  # fmt: skip


def record() -> None:
    """Run every session with tapped workers; write the file."""
    recordings: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chmod(folder, 0o700)
        os.environ.update(
            DISTRUNTIME_STATE=name, DISTRUNTIME_SIGNING_KEY=f"{name}/signing-key", DISTRUNTIME_UNREACHABLE="2"
        )
        for number, (script, count, gpus) in enumerate(_SESSIONS):
            address = f"ipc://{folder}/m{number}"
            tapped = _Tapped(folder, f"{number}{script.__name__.replace('<lambda>', '_mesh')}")
            for node in range(count):
                tapped.start(
                    "--master",
                    address,
                    "--node",
                    str(node),
                    *(["--simulate-cuda", str(gpus)] if gpus else []),
                )
            with tapped:
                dr.init_master_worker(listen=address, world_size=count, timeout=STARTING)
                script()
            recordings += tapped.recordings
        recordings += _refusals(folder)
        recordings += _comings_and_goings(folder)
    save(recordings)


def _listening(folder: Path, name: str, address: str) -> tuple[_Tapped, str]:
    """Start a tapped worker that listens; return where."""
    tapped, log = _Tapped(folder, name), folder / f"{name}.log"
    with log.open("wb") as output:
        tapped.start("--listen", address, "--insecure", stderr=output)
    until(lambda: "listening on " in log.read_text(encoding="utf-8"), STARTING)
    return tapped, log.read_text(encoding="utf-8").partition("listening on ")[2].partition(",")[0]


def _comings_and_goings(folder: Path) -> list[list[Any]]:
    """A session that is left, resumed, taken over, and torn; one that is dropped as its worker has forgotten
    it.
    """
    tapped, address = _listening(folder, "comings", "tcp://127.0.0.1:0")
    options: dict[str, Any]
    with tapped, Network(address) as network:
        for options in ({}, {"resume": True}, {"resume": True, "force": True}, {"force": True}):
            dr.init_master_worker(
                workers=[network.address],
                session="kept",
                keep=30.0,
                timeout=STARTING,
                grace=20.0,
                insecure=True,
                **options,
            )
            if options.get("resume"):
                dr.lookup("x").cpu()
            x = torch.arange(50_000.0, device="remote")
            dr.publish("x", x)
            # So many are enough for acknowledgements.
            for _ in range(40):
                x.sum().item()
            network.tear()
            (x + 1).cpu()
            if "force" not in options:
                dr.detach()
                continue
            active_session().post(active_session().nodes[0], Bury("nobody"))
            dr.shutdown()
    return tapped.recordings


def _refusals(folder: Path) -> list[list[Any]]:
    tapped = _Tapped(folder, "refused")
    tapped.start("--listen", f"ipc://{folder}/listening")
    with tapped, closing(Channel()) as channel:
        until(lambda: (folder / "listening").exists())
        channel.connect(f"ipc://{folder}/listening", b"w")
        channel.send(b"w", [encode(replace(revived("Hello", {"session": "s"}), protocol=PROTOCOL + 1))])
        until(
            lambda: any(isinstance(decode(bytes(frames[0])), Refused) for _, frames in channel.receive(0.05))
        )
    return tapped.recordings


def addresses_dropped(message: Any) -> Any:
    """Return a recorded `Peers` whose addresses nobody listens at any more, as one of workers without
    channels; others as they are.
    """
    return (
        Peers(message.node, message.secret, [""] * len(message.addresses))
        if isinstance(message, Peers)
        else message
    )
