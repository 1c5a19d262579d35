"""Workers that are forked from a process that has imported torch.

They are as those that are started, and end as they do.
"""

from __future__ import annotations

import json
import os
import random
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy
import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.cluster import local_workers
from distruntime.cluster import nursery as nurseries
from distruntime.cluster.local_workers import LocalWorker, start_worker
from distruntime.session.launched import last_words
from distruntime.session.session import active_session
from distruntime.wire.channel import Channel
from distruntime.wire.codec import decode
from distruntime.wire.keys import KeyPair
from distruntime.wire.messages import Join
from distruntime_worker import nursery as worker_nursery
from distruntime_worker.publishing import published
from processes import PATH, STARTING, Child, state, stop, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")

THREADS = 3


class Master:
    """The socket that workers dial, and the workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key: KeyPair | None = None
        self.workers: list[LocalWorker] = []
        self.channel = Channel(listen=f"ipc://{folder}/s")

    def start(self, count: int = 1, fork: bool = True) -> list[LocalWorker]:
        """Start workers, and wait until all of them have joined."""
        for node in range(count):
            self.workers.append(
                start_worker(
                    node, master=self.channel.address, threads=THREADS, directory=self.folder, fork=fork
                )
            )
        self.joined = self.joins(count)
        return self.workers[-count:]

    def joins(self, count: int) -> dict[int | None, Join]:
        found: dict[int | None, Join] = {}

        def all_there() -> bool:
            for _, frames in self.channel.receive(0.1):
                message = decode(bytes(memoryview(frames[0])))  # type: ignore[arg-type]
                assert isinstance(message, Join)
                found[message.node] = message
            return len(found) == count

        until(all_there)
        return found


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    made = Master(tmp_path)
    yield made
    for worker in made.workers:
        worker.terminate()
    for worker in made.workers:
        worker.stop()
    made.channel.close()


def gone(pid: int) -> bool:
    """Whether no such process runs; a zombie whose parent died counts as gone."""
    return state(pid) in ("", "Z")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()[1])


def descriptors(pid: int) -> list[str]:
    """Return what a process has open, without the numbers of pipes and sockets."""
    folder = Path(f"/proc/{pid}/fd")
    return sorted(os.readlink(entry).partition(":[")[0] for entry in folder.iterdir())


def test_eight_workers_are_the_children_of_one_process(master: Master) -> None:
    workers = master.start(8)
    pids = [worker.pid for worker in workers]
    assert len(set(pids)) == 8 and {join.pid for join in master.joined.values()} == set(pids)
    (mother,) = {parent(pid) for pid in pids}
    assert parent(mother) == os.getpid()
    assert b"distruntime_worker.nursery" in Path(f"/proc/{mother}/cmdline").read_bytes()
    assert len({join.incarnation for join in master.joined.values()}) == 8


def test_a_forked_worker_has_what_a_started_one_has(master: Master) -> None:
    """Its descriptors, process group, session, limits, signals and directory."""
    (forked,) = master.start(fork=True)
    (started,) = master.start(fork=False)
    assert descriptors(forked.pid) == descriptors(started.pid)
    for worker in (forked, started):
        assert os.getpgid(worker.pid) == os.getsid(worker.pid) == worker.pid
        assert os.readlink(f"/proc/{worker.pid}/cwd") == os.getcwd()

    def status(pid: int) -> dict[str, str]:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        names = ("Umask", "SigBlk", "SigIgn", "SigCgt", "Cpus_allowed")
        return dict(line.split(":\t") for line in lines if line.split(":")[0] in names)

    assert status(forked.pid) == status(started.pid)
    limits = [Path(f"/proc/{worker.pid}/limits").read_text(encoding="utf-8") for worker in (forked, started)]
    assert limits[0] == limits[1]


def ended(worker: LocalWorker) -> str:
    until(lambda: worker.poll() is not None)
    return worker.poll() or ""


def mother(worker: LocalWorker) -> nurseries.Nursery:
    """Return the nursery that has forked a worker."""
    (found,) = (nursery for nursery in nurseries._nurseries if nursery.pid == parent(worker.pid))
    return found


@pytest.mark.slow(reason="starts a program that imports torch, 3 s")
def test_a_process_with_a_thousand_open_files_waits_for_its_workers(tmp_path: Path) -> None:
    """`select` would raise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    files: list[IO[bytes]] = []
    # A nursery that is there already has a small number.
    fixed, nurseries._nurseries[:] = [*nurseries._nurseries], []
    try:
        files += [open(os.devnull, "rb") for _ in range(1100)]
        with (tmp_path / "log").open("ab") as output:
            worker = nurseries.fork_worker(["--version"], dict(os.environ), output, False)
        assert worker is not None and worker.wait(60) == 0, (tmp_path / "log").read_text(encoding="utf-8")
        nurseries._nurseries[0].close()
    finally:
        nurseries._nurseries[:] = fixed
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow(reason="starts a nursery, 3 s")
def test_a_request_has_the_environment_the_directory_and_the_umask_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the nursery was started earlier: `keygen` writes where they say."""

    def keygen(*arguments: str) -> None:
        with (tmp_path / "log").open("ab") as output:
            worker = nurseries.fork_worker(["keygen", *arguments], dict(os.environ), output, False)
        assert worker is not None and worker.wait(60) == 0, (tmp_path / "log").read_text(encoding="utf-8")

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(PATH))
    keygen(str(tmp_path / "first"))
    monkeypatch.setenv("DISTRUNTIME_KEY", str(tmp_path / "second"))
    keygen()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    before = os.umask(0o777)
    try:
        keygen("third")
    finally:
        os.umask(before)
    assert (tmp_path / "first").exists() and (tmp_path / "second").exists()
    assert (tmp_path / "there" / "third").stat().st_mode & 0o777 == 0


@pytest.mark.slow(reason="starts two nurseries, 3 s")
def test_another_environment_takes_another_nursery(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries may have read a variable when they were imported; those of this project are read later."""
    (first,) = master.start()
    monkeypatch.setenv("DISTRUNTIME_ORPHAN_TIMEOUT", "7")
    (second,) = master.start()
    assert parent(first.pid) == parent(second.pid)
    monkeypatch.setenv("SOME_LIBRARY_READS_THIS", "1")
    (third,) = master.start()
    assert parent(third.pid) not in (parent(second.pid), os.getpid())
    assert b"SOME_LIBRARY_READS_THIS=1" in Path(f"/proc/{third.pid}/environ").read_bytes()


def threads_of_kernels() -> tuple[int, int]:
    """Return the number that torch says, and how many threads a large operation starts in the worker."""
    tasks = Path(f"/proc/{active_session().workers[0].pid}/task")
    torch.ones(2, device=REMOTE).add_(1).sum().item()
    before = len(list(tasks.iterdir()))
    torch.ones(1 << 22, device=REMOTE).add_(1).sum().item()
    settings = dr.config(node=0)
    assert settings is not None
    return settings[0].num_threads, len(list(tasks.iterdir())) - before


@pytest.mark.slow(reason="starts a nursery, 3 s")
def test_kernels_use_as_many_threads_as_in_a_started_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the nursery has loaded their library with one thread."""
    monkeypatch.setattr(os, "cpu_count", lambda: THREADS + 1)
    counted = []
    for fork in (True, False):
        if not fork:
            monkeypatch.setattr(local_workers, "fork_worker", lambda *_, **__: None)
        dr.shutdown()
        dr.init_master_worker(world_size=1, timeout=STARTING)
        counted.append(threads_of_kernels())
        dr.shutdown()
    assert counted == [(THREADS, THREADS - 1)] * 2


def draw_in_forks() -> None:
    """What each of two forks of a nursery draws, a line each."""
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            worker_nursery.differ_from_siblings()
            number = published._numbered(torch.ones(1))
            print(
                random.random(), numpy.random.random(), number, uuid.uuid4(), secrets.token_hex(8), flush=True
            )
            os._exit(0)
        os.waitpid(pid, 0)


def test_siblings_draw_other_numbers() -> None:
    with Child(draw_in_forks) as child:
        first, second = (child.line().split() for _ in range(2))
        child.finish()
    assert len(first) == len(second) == 5 and not set(first) & set(second)


def test_siblings_that_nobody_seeds_draw_other_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As workers that are started do: torch seeds its generator when it is imported."""
    dr.shutdown()
    # Other tests have seeded this process.
    monkeypatch.setattr(torch.cuda, "_lazy_seed_tracker", torch.cuda._LazySeedTracker())
    dr.init_master_worker(world_size=2, timeout=STARTING)
    try:
        zeros = torch.zeros(4, device=REMOTE)
        first, second = (zeros.to(node=node).clone().uniform_().tolist() for node in range(2))
    finally:
        dr.shutdown()
    assert not set(first) & set(second)


def test_a_worker_that_is_killed_is_known_to_be_and_its_siblings_go_on(master: Master) -> None:
    first, second = master.start(2)
    os.kill(first.pid, signal.SIGKILL)
    assert ended(first) == "killed by signal 9 (SIGKILL)"
    assert second.poll() is None
    second.stop()
    assert second.poll() == "exited with code 0"
    assert "ended" in repr(second) and "stopping" not in first.last_lines()


def test_a_crash_leaves_its_stack_in_the_log_of_its_worker(master: Master) -> None:
    first, second = master.start(2)
    os.kill(first.pid, signal.SIGSEGV)
    assert ended(first) == "killed by signal 11 (SIGSEGV)"
    words = "\n".join(last_words(first))
    assert "Fatal Python error: Segmentation fault" in words and "Fatal" not in second.last_lines()


def test_a_worker_that_does_not_stop_is_killed(master: Master) -> None:
    (worker,) = master.start()
    stop(worker.pid)
    worker.stop(0.2)
    assert worker.poll() == "killed by signal 9 (SIGKILL)"


def test_workers_outlive_a_nursery_that_is_killed(master: Master) -> None:
    first, second = master.start(2)
    nursery = mother(first)
    os.kill(nursery.pid, signal.SIGKILL)
    until(lambda: not nursery.serves())
    (third,) = master.start()
    assert mother(third) is not nursery
    assert [worker.poll() for worker in (first, second)] == [None, None]
    os.kill(first.pid, signal.SIGKILL)
    assert ended(first) == "ended, and nobody knows how: the process that forked it had ended before"
    second.stop()
    assert gone(second.pid) and second.poll() == ended(first)


@pytest.mark.slow(reason="starts a nursery, 3 s")
def test_nothing_stays_of_a_nursery_that_has_ended(master: Master) -> None:
    (first,) = master.start()
    nursery = mother(first)
    os.kill(nursery.pid, signal.SIGKILL)
    until(lambda: not nursery.serves())
    master.start()
    assert nursery._process.returncode == -signal.SIGKILL and nursery._socket.fileno() == -1


def test_no_report_is_lost_where_two_read_at_once(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler reads, or another thread, while a report is acted on."""
    identify, inside = nurseries.process, []

    def interrupted(pid: int) -> object:
        if not inside:
            inside.append(pid)
            for nursery in nurseries._nurseries:
                nursery.read()
            inside.clear()
        return identify(pid)

    monkeypatch.setattr(nurseries, "process", interrupted)
    workers = master.start(2)
    assert all(worker.pid for worker in workers)
    for worker in workers:
        worker.terminate()
    assert [ended(worker) for worker in workers] == ["exited with code 0"] * 2


def test_a_forked_process_takes_no_report_from_its_parent(master: Master) -> None:
    (worker,) = master.start()
    nursery = mother(worker)
    os.kill(worker.pid, signal.SIGKILL)
    assert select.select([nursery._socket], [], [], 60.0)[0]
    child = os.fork()
    if child == 0:
        os._exit(1 if nursery.serves() else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert ended(worker) == "killed by signal 9 (SIGKILL)"


def test_a_session_outlives_its_nursery_and_restarts_a_worker_without_it() -> None:
    dr.shutdown()
    dr.init_master_worker(world_size=2, restart_workers=True, timeout=STARTING)
    try:
        pids = [node.pid for node in dr.nodes()]
        os.kill(parent(pids[0]), signal.SIGKILL)
        assert torch.ones(2, device=REMOTE).to(node=1).sum().item() == 2.0
        dr.restart(0, force=True, timeout=STARTING)
        assert torch.ones(2, device=REMOTE).to(node=0).sum().item() == 2.0
        assert dr.nodes()[1].pid == pids[1] and dr.nodes()[0].pid != pids[0]
    finally:
        dr.shutdown()


def start_and_wait(folder: str) -> None:
    """Start two workers; print their process ids and the nursery's."""
    master = Master(Path(folder))
    workers = master.start(2)
    print("pids", parent(workers[0].pid), *(worker.pid for worker in workers), flush=True)
    signal.pause()


def test_a_nursery_and_its_workers_end_with_a_master_that_is_killed(tmp_path: Path) -> None:
    with Child(start_and_wait, str(tmp_path)) as child:
        pids = [int(pid) for pid in child.expect("pids", STARTING).split()]
        assert len(pids) == 3 and not any(map(gone, pids))
        os.kill(child.pid, signal.SIGKILL)
        until(lambda: all(map(gone, pids)))


def test_a_worker_that_is_ended_before_it_was_forked(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nursery is just importing torch: nobody waits for that."""
    monkeypatch.setenv("ANOTHER_NURSERY", "1")
    worker = start_worker(0, master=master.channel.address, threads=1, directory=master.folder)
    worker.stop()
    assert worker.poll() == "killed by signal 15 (SIGTERM)" and worker.pid == 0


def test_a_nursery_that_cannot_start_is_a_worker_that_cannot(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    worker = start_worker(0, master=master.channel.address, threads=1, directory=master.folder)
    assert ended(worker) == "exited with code 1" and "Python" in worker.last_lines()


def by_hand(patch: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a nursery in which something is otherwise; return its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    source = (
        f"import sys; from distruntime_worker import nursery; {patch}; sys.exit(nursery.main(sys.argv[1:]))"
    )
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", source, str(os.getpid())],
            stdin=theirs,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(PATH), "OMP_NUM_THREADS": "1"},
        )
    ours.settimeout(STARTING)
    return ours, process


@pytest.mark.slow(reason="starts a nursery, 3 s")
def test_an_idle_nursery_ends() -> None:
    control, process = by_hand("nursery._IDLE = 0.0")
    with control:
        assert process.wait(STARTING) == 0
        with pytest.raises(BrokenPipeError):
            control.send(b"{}")


@pytest.mark.slow(reason="starts a program that imports torch, 3 s")
def test_a_nursery_that_has_ended_is_woken_by_nothing() -> None:
    """A worker's end would write into a socket that is closed, or into another one of its number."""
    code = (
        "import os, signal; from distruntime_worker import nursery; "
        "print(nursery.main([str(os.getppid())]), signal.set_wakeup_fd(-1))"
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with theirs:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=STARTING,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(PATH), "OMP_NUM_THREADS": "1"},
        )
    assert done.stdout == "0 -1\n", done.stderr


@pytest.mark.slow(reason="starts nurseries, 5 s")
def test_a_nursery_that_takes_no_request_any_more_is_replaced(master: Master) -> None:
    """An idle one refuses the next request and is still ending: on a busy machine that takes a while."""
    ending = mother(*master.start())
    ending._socket.shutdown(socket.SHUT_WR)
    for _ in range(2):
        assert mother(*master.start()) is not ending
    assert ending.ended


@pytest.mark.slow(reason="starts a program that imports torch, 3 s")
def test_where_a_fork_is_not_safe_a_nursery_starts_the_worker_as_a_program(tmp_path: Path) -> None:
    control, process = by_hand("nursery._may_fork = lambda: False")
    key = tmp_path / "key"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH)}
    request = {"number": 5, "arguments": ["keygen", str(key)], "environment": environment, "umask": 0o77}
    with control, (tmp_path / "log").open("wb") as output, open(os.devnull, "rb") as nothing:
        socket.send_fds(control, [json.dumps(request).encode()], [nothing.fileno(), output.fileno()])
        number, pid, code = json.loads(control.recv(4096))
        assert (number, code) == (5, None) and pid != process.pid
        assert json.loads(control.recv(4096)) == [5, pid, 0]
    assert "made" in (tmp_path / "log").read_text(encoding="utf-8") and key.exists()
    assert process.wait(STARTING) == 0


def test_nothing_is_forked_elsewhere_than_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no /proc either, which tells of threads."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Path, "iterdir", lambda path: open(path / "not there", encoding="utf-8"))
    assert not worker_nursery._may_fork()


def test_a_process_with_threads_does_not_fork() -> None:
    """torch's own threads, for one, would be missing in the worker."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert not worker_nursery._may_fork()
    finally:
        over.set()
        thread.join()
