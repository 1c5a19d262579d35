"""Shared memory between a master and workers of its machine: sealed, and only the segments of the master that
a worker talks to.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.errors import ProtocolError
from distruntime.session.session import active_session
from distruntime.wire.identity import process
from distruntime.wire.messages import UPLOAD
from distruntime.wire.shared import Attached, Challenge, SharedPool
from fewer import fewer
from processes import STARTING, Child, ListeningWorker, until

SIZE = 1 << 20
pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="shared memory without a name is Linux's"
)


# -- what a worker maps ----------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    made = SharedPool()
    yield made
    made.close()


def attached(pool: SharedPool) -> tuple[Attached, Challenge]:
    challenge = Challenge(pool)
    return Attached(process(), challenge.name), challenge


def test_a_worker_maps_the_memory_of_a_master_that_has_answered(pool: SharedPool) -> None:
    worker, challenge = attached(pool)
    loan = pool.take(SIZE)
    assert loan is not None
    loan.memory[:5] = b"bytes"
    assert challenge.answered(worker.secret(), worker.nonce)
    assert worker[loan.name][:5] == b"bytes"
    worker[loan.name][:5] = b"other"
    assert loan.memory[:5] == b"other"


def test_many_workers_answer_one_master(pool: SharedPool) -> None:
    challenge = Challenge(pool)
    workers = [Attached(process(), challenge.name) for _ in range(100)]
    assert all(challenge.answered(worker.secret(), worker.nonce) for worker in workers)
    assert all(worker[challenge.name] for worker in workers)


def test_a_segment_of_a_process_that_has_not_answered_is_not_mapped(pool: SharedPool) -> None:
    """A master that names another's process has that one's segments read to it, if naming them is enough."""
    worker, _ = attached(pool)
    loan = pool.take(SIZE)
    assert loan is not None
    with pytest.raises(ProtocolError, match="is not the memory of this session's master"):
        worker[loan.name]
    for secret, nonce in ((b"", worker.nonce), (b"x" * 16, worker.nonce), (worker.secret(), b"")):
        assert not Challenge(pool).answered(secret, nonce)


def test_a_segment_that_holds_tensors_is_no_secret(pool: SharedPool) -> None:
    loan = pool.take(SIZE)
    assert loan is not None
    loan.memory[:32] = b"what a user computes, of somebody"[:32]
    worker = Attached(process(), loan.name)
    assert worker.secret() == b""
    with pytest.raises(ProtocolError, match="is not the memory of this session's master"):
        # The look for a secret has mapped this one.
        worker[loan.name]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/proc/self/fd/0",
        "/proc/1/fd/0",
        "/proc/1/fd/0/../../../etc/passwd",
        "/etc/passwd",
        None,
        3,
        ["x"],
    ],
)
def test_what_is_no_segment_of_the_master_is_refused(pool: SharedPool, name: Any) -> None:
    worker, challenge = attached(pool)
    assert challenge.answered(worker.secret(), worker.nonce)
    with pytest.raises(ProtocolError):
        worker[name]


def test_a_segment_of_another_process_is_refused(pool: SharedPool) -> None:
    other = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys; fd = os.memfd_create('x'); os.ftruncate(fd, 4096); print(fd, flush=True); "
            "sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout is not None
        number = int(other.stdout.readline())
        worker, challenge = attached(pool)
        assert challenge.answered(worker.secret(), worker.nonce)
        with pytest.raises(
            ProtocolError, match=f"of process {other.pid}, and this session's master is process {os.getpid()}"
        ):
            worker[f"/proc/{other.pid}/fd/{number}"]
        other.stdin.close()  # type: ignore[union-attr]


def test_memory_that_may_shrink_is_refused(pool: SharedPool, tmp_path: Path) -> None:
    worker, challenge = attached(pool)
    assert challenge.answered(worker.secret(), worker.nonce)
    (tmp_path / "file").write_bytes(bytes(4096))
    for descriptor in (os.memfd_create("unsealed", os.MFD_CLOEXEC), os.open(tmp_path / "file", os.O_RDWR)):
        os.ftruncate(descriptor, 4096)
        with pytest.raises(ProtocolError, match="may shrink"):
            worker[f"/proc/{os.getpid()}/fd/{descriptor}"]
        os.close(descriptor)


def test_nobody_can_cut_a_segment(pool: SharedPool) -> None:
    loan = pool.take(SIZE)
    assert loan is not None
    descriptor = os.open(loan.name, os.O_RDWR)
    for size in (0, SIZE // 2, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)
    assert len(bytes(loan.memory)) == SIZE


# -- with real workers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ListeningWorker]:
    dr.shutdown()
    started = ListeningWorker(tmp_path_factory.mktemp("worker"), "--listen", "tcp://127.0.0.1:0")
    yield started
    dr.shutdown()
    started.stop()


def hostile(address: str, kind: str) -> None:
    """Name memory in an upload that a worker must not touch; say what came of it."""
    dr.init_master_worker(workers=[address], timeout=STARTING, quiet=True)
    torch.ones(1 << 19).to("remote").sum().item()
    node = active_session().nodes[0]
    descriptor = os.memfd_create("hostile", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, SIZE if kind == "cut later" else 0)
    name = "/proc/1/fd/0" if kind == "another's" else f"/proc/{os.getpid()}/fd/{descriptor}"
    if kind == "past its end":
        (segment, *_) = active_session().shared._all
        name = segment.name
    nbytes = SIZE * 1024 if kind == "past its end" else SIZE
    with node.lock:
        node.words.extend([UPLOAD, 1 << 40, "cpu", "float32", [nbytes // 4], [name, nbytes]])
        node.line_table.append((node.base + len(node.words), None, 0))
        node.flush()
    try:
        dr.synchronize()
        print("taken")
    except dr.DistruntimeError as error:
        print(type(error).__name__, str(error).partition("\n")[0][:200])
    except Exception as error:
        print("poisoned", type(error).__name__)


@pytest.mark.parametrize(
    "kind", fewer(["cut", "cut later", "another's", "past its end"], 2, "starts a program, 3 s")
)
def test_a_master_that_names_memory_it_should_not_harms_its_session_alone(
    daemon: ListeningWorker, kind: str
) -> None:
    with dr.init_master_worker(workers=[daemon.address], timeout=STARTING, quiet=True):
        kept = torch.arange(1 << 19).to("remote")
        with Child(hostile, daemon.address, kind) as child:
            assert not child.line(60).startswith("taken")
        assert daemon.process.poll() is None
        assert torch.equal(kept.cpu(), torch.arange(1 << 19))
        assert torch.equal((torch.ones(1 << 19).to("remote") * 2).cpu(), torch.full((1 << 19,), 2.0))
    until(lambda: "Traceback" not in daemon.text())


def test_large_tensors_go_through_shared_memory_still(daemon: ListeningWorker) -> None:
    with dr.init_master_worker(workers=[daemon.address], timeout=STARTING, quiet=True):
        node = active_session().nodes[0]
        assert node.shared
        before = active_session().channel.sent_bytes
        x = torch.ones(1 << 22).to("remote")
        assert (x * 2).cpu().sum().item() == 2 << 22
        assert active_session().channel.sent_bytes - before < 1 << 16


def without_descriptors(address: str) -> None:
    """Upload what takes a new segment to a worker that has no descriptors left; say what came."""
    dr.init_master_worker(workers=[address], timeout=STARTING, quiet=True)
    torch.ones(1 << 17).to("remote").sum().item()
    pid = dr.nodes()[0].pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), limits[1]))
    try:
        x = torch.arange(1 << 20).to("remote")
        print(torch.equal((x * 2).cpu(), torch.arange(1 << 20) * 2))
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def test_an_upload_to_a_worker_without_descriptors_comes(daemon: ListeningWorker) -> None:
    with Child(without_descriptors, daemon.address) as child:
        assert child.line(60) == "True"
    assert daemon.process.poll() is None
