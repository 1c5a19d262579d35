"""Workers on this machine: they come up, they say how they ended, and they do not outlive their master."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distruntime.cluster.local_workers import LocalWorker, start_worker
from distruntime.wire.channel import Channel
from distruntime.wire.codec import decode
from distruntime.wire.keys import KeyPair
from distruntime.wire.messages import Join
from processes import state, stop, until, within

ROOT = Path(__file__).resolve().parents[2]

THREADS = 3

Start = Callable[..., tuple[Channel, list[LocalWorker]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts workers and the channel they dial, and ends both with the test."""
    channels: list[Channel] = []
    workers: list[LocalWorker] = []

    def begin(count: int, key: KeyPair | None = None) -> tuple[Channel, list[LocalWorker]]:
        channels.append(Channel(listen=f"ipc://{tmp_path}/s{len(channels)}", keys=key))
        for node in range(count):
            workers.append(
                start_worker(
                    node,
                    master=channels[-1].address,
                    key=key,
                    threads=THREADS,
                    directory=tmp_path,
                    fork=False,
                )
            )
        return channels[-1], workers

    yield begin
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.stop()
    for channel in channels:
        channel.close()


def joins(channel: Channel, count: int) -> dict[int | None, Join]:
    """Return who has joined, by the node number they ask for."""
    found: dict[int | None, Join] = {}

    def all_there() -> bool:
        for _, frames in channel.receive(0.1):
            message = decode(bytes(memoryview(frames[0])))  # type: ignore[arg-type]
            assert isinstance(message, Join)
            found[message.node] = message
        return len(found) == count

    until(all_there)
    return found


def gone(pid: int) -> bool:
    """Whether no such process runs; a zombie whose parent died counts as gone."""
    return state(pid) in ("", "Z")


def environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {name.decode(): value.decode() for name, _, value in (entry.partition(b"=") for entry in entries)}


def test_two_workers_join_within_seconds_and_prove_themselves(start: Start) -> None:
    def begin() -> tuple[dict[int | None, Join], list[LocalWorker]]:
        channel, started = start(2, KeyPair.generate())
        return joins(channel, 2), started[-2:]

    found, workers = within(20, begin)  # 3 s on two idle cores
    assert {node: join.pid for node, join in found.items()} == {worker.node: worker.pid for worker in workers}
    assert [worker.poll() for worker in workers] == [None, None]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow(reason="starts programs that import torch, 5 s")
def test_threads_are_as_said_and_no_key_is_in_sight(start: Start) -> None:
    key = KeyPair.generate()
    channel, workers = start(2, key)
    joins(channel, 2)
    for worker in workers:
        words = environment(worker.pid)
        assert words["OMP_NUM_THREADS"] == str(THREADS)
        assert "glibc.malloc" in words.get("GLIBC_TUNABLES", "glibc.malloc")
        seen = Path(f"/proc/{worker.pid}/cmdline").read_bytes() + repr(words).encode()
        assert key.secret not in seen
        assert key.secret.decode() not in worker.last_lines()


@pytest.mark.slow(reason="starts programs that import torch, 5 s")
def test_what_a_worker_wrote_and_how_it_ended(start: Start) -> None:
    channel, workers = start(2)
    joins(channel, 2)
    os.kill(workers[0].pid, signal.SIGKILL)
    until(lambda: workers[0].poll() is not None)
    assert workers[0].poll() == "killed by signal 9 (SIGKILL)"
    assert "dialling ipc://" in workers[0].last_lines(3)
    workers[1].stop()
    assert workers[1].poll() == "exited with code 0"
    assert "ended" in repr(workers[1])


def test_a_worker_that_cannot_start_says_why(start: Start, tmp_path: Path) -> None:
    worker = start_worker(0, master="nonsense", threads=1, directory=tmp_path, fork=False)
    until(lambda: worker.poll() is not None)
    assert worker.poll() == "exited with code 2" and "nonsense" in worker.last_lines()
    worker.stop()


@pytest.mark.slow(reason="starts programs that import torch, 3 s")
def test_a_worker_that_does_not_stop_is_killed(start: Start) -> None:
    channel, workers = start(1)
    joins(channel, 1)
    stop(workers[0].pid)
    workers[0].stop(0.2)
    assert workers[0].poll() == "killed by signal 9 (SIGKILL)"


MASTER = """
    import os, signal, sys
    from pathlib import Path
    from distruntime.cluster.local_workers import start_worker
    from distruntime.wire.channel import Channel
    here = Path(sys.argv[1])
    channel = Channel(listen=f"ipc://{here}/s")
    workers = [
        start_worker(node, master=channel.address, threads=1, directory=here, fork=sys.argv[3] == "forked")
        for node in range(2)
    ]
    joined = set()
    while len(joined) < 2:
        joined.update(peer for peer, _ in channel.receive(0.1))
    child = 0
    if sys.argv[2] == "fork":
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
    print(child, *(worker.pid for worker in workers), flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("workers_are", ["forked", "started"])
@pytest.mark.parametrize("child", ["fork", "none"])
def test_workers_end_with_a_master_that_is_killed(tmp_path: Path, child: str, workers_are: str) -> None:
    """With a forked child, as a data loader's worker is: it holds what the master held open."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "worker")])
    arguments = [sys.executable, "-c", textwrap.dedent(MASTER), str(tmp_path), child, workers_are]
    master = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert master.stdout is not None
    forked, *workers = map(int, master.stdout.readline().split())
    try:
        assert len(workers) == 2 and not any(map(gone, workers))
        master.kill()
        master.wait()
        until(lambda: all(map(gone, workers)))
    finally:
        master.stdout.close()
        for pid in filter(None, (forked, *workers)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def test_control_c_at_the_masters_terminal_is_not_the_workers(start: Start) -> None:
    channel, workers = start(1)
    joins(channel, 1)
    assert os.getpgid(workers[0].pid) != os.getpgid(0)
