"""Before the key is proven a stranger costs nothing: no descriptors, no memory, no log lines.

So it is at a listening worker, a listening master, and the ports of workers for each other. A session goes
on, and new masters get in.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.errors import ConfigurationError
from distruntime.wire import descriptors as wire_descriptors
from distruntime.wire.channel import Channel
from distruntime.wire.codec import encode
from distruntime.wire.keys import KeyPair
from distruntime.wire.strangers import Strangers, Tally
from flooding import GREETING, descriptors, flooded, frame, listening
from greeting_samples import JOIN
from processes import Child, ListeningWorker, free_port, limited, resident, until
from tests.hostile.test_security import dial_in

MIB = 1 << 20
LIMIT = 140  # descriptors, as few as a worker and a session or two can live with


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.fixture
def key(tmp_path: Path) -> Path:
    KeyPair.generate().save(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def worker(tmp_path: Path, key: Path) -> Iterator[ListeningWorker]:
    found = ListeningWorker(
        tmp_path, "--listen", "tcp://127.0.0.1:0", "--key", str(key), under=limited(LIMIT)
    )
    yield found
    found.stop()


def goes_on(rounds: int) -> None:
    """Compute op by op with reads, and upload: in an inline, a framed and a large tensor."""
    x, total = torch.zeros(3, device="remote"), 0
    for k in range(rounds):
        x += k
        total += k
        assert x.tolist() == [total] * 3
    for size in (10, 30_000, 200_000):
        local = torch.arange(size, dtype=torch.float32)
        assert torch.equal(local.to("remote").cpu(), local)


def silent_master(address: str, key: str) -> None:
    """A new master, in a process of its own: gets in, makes a group, leaves."""
    torch.set_num_threads(1)
    with dr.init_master_worker(workers=[address], key=Path(key), timeout=60, quiet=True):
        group = dr.distributed.new_group([0], timeout=60)
        a = torch.ones(3, device="remote")
        dr.distributed.all_reduce([a], group=group)
        event = dr.Stream(0).record_event()
        event.wait(dr.Stream(0))
        goes_on(5)
    print("was in")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"silent": 300}, id="silent", marks=pytest.mark.slow(reason="waits out 300 handshakes")),
        pytest.param({"silent": 100, "half_open": 100, "bombs": 20}, id="mixed"),
    ],
)
def test_a_worker_with_few_descriptors_serves_its_masters_under_a_flood(
    worker: ListeningWorker, key: Path, fresh_session: Callable[..., Any], kind: dict[str, int]
) -> None:
    fresh_session(workers=[worker.address], key=key, timeout=60)
    goes_on(10)
    before = descriptors(worker.process.pid)
    with flooded(port_of(worker.address), **kind):
        for _ in range(3):
            goes_on(20)
        until(lambda: descriptors(worker.process.pid) < before + LIMIT // 8 + 5)
        with Child(silent_master, worker.address, str(key)) as other:
            other.expect("was in", timeout=120)
            other.finish()
        goes_on(20)
        assert worker.process.poll() is None
    until(lambda: descriptors(worker.process.pid) < before + 5)
    lines = [line for line in worker.text().splitlines() if "refused" in line]
    assert len(lines) < 20, "\n".join(lines)
    dr.shutdown()
    worker.stop()
    assert "more lines of this kind" in worker.text() or not kind.get("half_open")


def test_the_frames_of_strangers_take_little_memory(
    worker: ListeningWorker, key: Path, fresh_session: Callable[..., Any]
) -> None:
    fresh_session(workers=[worker.address], key=key, timeout=60)
    goes_on(10)
    before, most = resident(worker.process.pid), 0
    with flooded(port_of(worker.address), holders=100, bombs=10):
        end = time.monotonic() + 4.0  # as two handshakes are given
        while time.monotonic() < end:
            goes_on(3)
            most = max(most, resident(worker.process.pid))
    assert most - before < 64 * MIB
    assert worker.process.poll() is None


def test_a_listening_master_goes_on_under_a_flood(
    tmp_path: Path, key: Path, fresh_session: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with caplog.at_level(logging.WARNING):
        process = dial_in(tmp_path, address, 0, "--key", str(key))
        try:
            fresh_session(listen=address, world_size=1, key=key, timeout=60)
            goes_on(10)
            before, held = resident(os.getpid()), descriptors(os.getpid())
            # All holders together make this process hold 51 MiB: a frame of the largest size for each.
            with flooded(port_of(address), silent=200, half_open=50, bombs=10, holders=100):
                end = time.monotonic() + 3.0
                while time.monotonic() < end:
                    goes_on(3)
                    assert resident(os.getpid()) - before < 64 * MIB
                until(lambda: descriptors(os.getpid()) < held + wire_descriptors.most_strangers() + 10)
                with closing(Channel(keys=KeyPair.load(key))) as late:  # a worker that is not wanted hears so
                    late.connect(address, b"master")
                    late.send(b"master", [encode(replace(JOIN, node=None))])
                    until(lambda: late.receive(0.05))
            goes_on(3)
            until(lambda: descriptors(os.getpid()) < held + 5)
        finally:
            dr.shutdown()
            process.terminate()
            process.wait(20)
    lines = [record for record in caplog.records if "rejected a connection" in record.getMessage()]
    assert 0 < len(lines) < 20


def garbage(rng: random.Random) -> bytes:
    kind = rng.randrange(6)
    size = rng.choice([1, 4, 8, 16, 64, 4096])
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 400))
    if kind == 1:
        return b"\0" * size
    if kind == 2:
        return b"\xff" * size
    if kind == 3:
        return struct.pack("<q", rng.choice([0, 1, 2, 5, -1, 1 << 40])) + rng.randbytes(rng.randrange(64))
    if kind == 4:
        return GREETING + frame(rng.choice([0, 1, 200, 1 << 20, 1 << 62])) + rng.randbytes(rng.randrange(400))
    return GREETING[: rng.randrange(1, 64)]


@pytest.mark.parametrize("seed", range(2))
def test_garbage_at_every_port_of_a_worker_harms_nothing(
    tmp_path: Path, key: Path, fresh_session: Callable[..., Any], seed: int
) -> None:
    """Its command port, its socket for other workers, the store where groups meet, and gloo's own."""
    workers = []
    for k in range(2):
        (tmp_path / str(k)).mkdir()
        workers.append(ListeningWorker(tmp_path / str(k), "--listen", "tcp://127.0.0.1:0", "--key", str(key)))
    try:
        fresh_session(workers=[one.address for one in workers], key=key, timeout=60)
        group, rng = dr.distributed.new_group([0, 1]), random.Random(seed)

        def works() -> bool:
            a = torch.full((100,), 1.0, device="remote")
            with dr.on(1):
                b = torch.full((100,), 2.0, device="remote")
            dr.distributed.all_reduce([a, b], group=group)
            return bool(a.cpu().eq(3).all()) and torch.equal(a.to(node=1).cpu(), b.cpu())

        assert works()
        ports = [port for one in workers for port in listening(one.process.pid)]
        assert len(ports) >= 4
        held = []
        for _ in range(15 * len(ports)):
            with suppress(OSError):
                stranger = socket.create_connection(("127.0.0.1", rng.choice(ports)), 5)
                stranger.sendall(garbage(rng))
                held.append(stranger)
            if rng.random() < 0.5 and held:
                gone = held.pop(rng.randrange(len(held)))
                if rng.random() < 0.5:
                    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                gone.close()
        assert works() and works()
        for stranger in held:
            stranger.close()
        assert [one.process.poll() for one in workers] == [None, None]
    finally:
        dr.shutdown()
        for one in workers:
            one.stop()


# -- the pieces ------------------------------------------------------------------------------------


def out_of_descriptors() -> None:
    """What needs descriptors says so, and what does not goes on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, hard))
    try:
        Channel()
    except ConfigurationError as error:
        print("refused:", error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    Channel().close()
    print("made")


def test_a_channel_is_refused_where_descriptors_are_out() -> None:
    with Child(out_of_descriptors) as child:
        text = child.expect("refused:")
        assert "descriptors left of" in text and "ulimit -n" in text and "expected 24" in text
        child.expect("made")
        child.finish()


def test_a_channel_takes_no_more_descriptors_than_are_asked_for(key: Path) -> None:
    before = descriptors(os.getpid())
    channel = Channel(listen="tcp://127.0.0.1:*", keys=KeyPair.load(key))
    try:
        assert descriptors(os.getpid()) - before <= wire_descriptors.ENOUGH - 4
    finally:
        channel.close()


def test_a_worker_without_descriptors_refuses_a_group_and_lives(
    worker: ListeningWorker, key: Path, fresh_session: Callable[..., Any]
) -> None:
    fresh_session(workers=[worker.address], key=key, timeout=60)
    goes_on(3)
    pid = worker.process.pid
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid) + 8, LIMIT))
    with pytest.raises(dr.DistruntimeError, match="descriptors left"):
        dr.distributed.new_group([0], timeout=30)
    goes_on(3)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    dr.distributed.all_reduce(
        [torch.ones(3, device="remote")], group=dr.distributed.new_group([0], timeout=60)
    )
    goes_on(3)


class Ends:
    """Accepted connections of one listener, and their other ends."""

    def __init__(self, most: int) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.strangers = Strangers(most)
        self.strangers.listen(self.server.fileno())
        self.near: list[socket.socket] = []
        self.far: list[socket.socket] = []

    def add(self, source: str = "127.0.0.1") -> int:
        self.far.append(socket.create_connection(self.server.getsockname(), 5, source_address=(source, 0)))
        self.near.append(self.server.accept()[0])
        self.strangers.add(self.near[-1].fileno())
        return self.near[-1].fileno()

    def ended(self) -> list[int]:
        """Which have been hung up on."""
        found = []
        for k, far in enumerate(self.far):
            far.setblocking(False)
            with suppress(BlockingIOError):
                if far.recv(1) == b"":
                    found.append(k)
        return found

    def close(self) -> None:
        for one in (self.server, *self.near, *self.far):
            one.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends(8)
    yield found
    found.close()


def test_the_oldest_strangers_are_hung_up_on(ends: Ends) -> None:
    fds = [ends.add() for _ in range(10)]
    ends.strangers.names.pop(fds[1])  # was heard
    assert ends.strangers.crowd_out() == [fds[0], *fds[2:4]]
    until(lambda: ends.ended() == [0, 2, 3])
    assert list(ends.strangers.names) == fds[4:] and ends.strangers.crowd_out() == []


def test_strangers_of_one_host_leave_another_its_way_in(ends: Ends) -> None:
    other = ends.add("127.0.0.2")
    fds = [ends.add() for _ in range(20)]
    assert ends.strangers.crowd_out() == fds[:15]
    assert other in ends.strangers.names


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere nobody tells how much has come through a connection"
)
def test_who_says_nothing_goes_before_who_is_in_a_handshake(ends: Ends) -> None:
    handshake, greeting, endless = ends.add(), ends.add(), ends.add()
    for far, said in zip(ends.far, (300, 64, 10_000)):
        far.sendall(b"x" * said)
        near = ends.near[ends.far.index(far)]
        near.settimeout(20)
        while said:
            said -= len(near.recv(said))
    silent = [ends.add() for _ in range(6)]
    gone = ends.strangers.crowd_out()
    assert gone == silent[:3]
    ends.strangers.most = 1
    assert ends.strangers.crowd_out() == [*silent[3:], endless, greeting, handshake]


def test_a_descriptor_that_is_another_sockets_by_now_is_left_alone(ends: Ends) -> None:
    fds = [ends.add() for _ in range(9)]
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as far,
        server.accept()[0] as near,
    ):
        os.dup2(near.fileno(), fds[0])
        assert ends.strangers.crowd_out() == fds[:3]
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
        until(lambda: ends.ended() == [0, 1, 2])  # its own end was closed with the number


def test_until_a_listener_is_known_nobody_is_hung_up_on(ends: Ends) -> None:
    strangers = Strangers(0)
    strangers.add(ends.add())
    assert strangers.crowd_out() == []


def test_an_eighth_of_the_descriptors_is_for_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in (
        (64, 16),
        (140, 17),
        (256, 32),
        (1024, 48),
        (1 << 20, 48),
        (resource.RLIM_INFINITY, 48),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert wire_descriptors.most_strangers() == most


@pytest.mark.parametrize(
    "limits, wanted", [((1024, 4096), 4096), ((1024, 1024), None), ((256, resource.RLIM_INFINITY), 1 << 20)]
)
def test_the_soft_limit_is_raised_to_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: int | None
) -> None:
    said: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: said.append(new))
    wire_descriptors.raise_limit()
    assert said == ([] if wanted is None else [(wanted, limits[1])])


def test_a_tally_writes_ten_lines_and_then_a_sum_a_minute() -> None:
    written: list[str] = []
    now = [100.0]
    tally = Tally(written.append, lambda: now[0])
    for k in range(25):
        tally.note(f"line {k}")
    assert written == [f"line {k}" for k in range(10)] and tally.due == 60.0
    now[0] += 59
    tally.look()
    assert len(written) == 10 and tally.due == 1.0
    now[0] += 1
    tally.look()
    assert (
        written[10:] == ["15 more lines of this kind in 60 s, the last of them: line 24"]
        and tally.due is None
    )
    tally.note("line 25")
    now[0] += 30
    tally.note("line 26")
    assert len(written) == 11
    tally.finish()
    tally.finish()
    assert written[11:] == ["2 more lines of this kind in 30 s, the last of them: line 26"]
    now[0] += 30
    tally.look()
    tally.note("after a minute without any")
    assert written[12:] == ["after a minute without any"]


def test_a_tally_loses_nothing() -> None:
    written: list[str] = []
    now, rng = [0.0], random.Random(0)
    tally = Tally(written.append, lambda: now[0])
    for _ in range(2000):
        now[0] += rng.choice([0.0, 0.1, 5.0, 70.0])
        tally.note("line")
    tally.finish()
    sums = [int(line.split()[0]) for line in written if "more lines" in line]
    assert sum(sums) + written.count("line") == 2000
