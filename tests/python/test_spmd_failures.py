"""A call of `dr.spmd` that fails, is cancelled or loses a worker ends on all members; the next one runs."""

from __future__ import annotations

import fcntl
import os
import pdb
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distruntime as dr
from distruntime_worker.python.children import readable
from distruntime_worker.python.handing import Outgoing, receive
from distruntime_worker.python.outcomes import Outcomes
from processes import free_port, until


def works(mesh: dr.mesh.DeviceMesh) -> bool:
    return bool(dr.fetch(dr.spmd(mesh, lambda: dist.get_world_size())()) == [2, 2])


def test_a_member_that_raises_ends_the_call(mesh: dr.mesh.DeviceMesh) -> None:
    @dr.spmd(mesh, returns=object)
    def fails() -> None:
        if dist.get_rank() == 1:
            raise KeyError("boom")
        dist.barrier()

    with pytest.raises(KeyError, match=r"'boom' \(rank 1 on node 1\)") as caught:
        dr.fetch(fails())
    assert 'raise KeyError("boom")' in str(caught.value.__cause__)
    assert works(mesh)


def test_a_member_that_exits_ends_the_call(
    mesh: dr.mesh.DeviceMesh, capfd: pytest.CaptureFixture[str]
) -> None:
    said = list[str]()

    @dr.spmd(mesh, returns=object)
    def exits() -> None:
        if dist.get_rank() == 1:
            # Some write a line in parts.
            for part in ("one", " and", " two\n", "three"):
                os.write(1, part.encode())
            os._exit(3)
        dist.barrier()

    with pytest.raises(RuntimeError, match=r"rank 1 on node 1 exited with code 3 in .*exits"):
        dr.fetch(exits())
    until(lambda: "[node 1] [rank 1] three" in (said.append(capfd.readouterr().out) or "".join(said)))
    assert "[node 1] [rank 1] one and two\n[node 1] [rank 1] three\n" in "".join(said)
    assert works(mesh)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_does_not_answer_as_the_rank(
    mesh: dr.mesh.DeviceMesh, capfd: pytest.CaptureFixture[str]
) -> None:
    said = list[str]()

    def forks(end: str) -> tuple[int, int]:
        pid = os.fork()
        if pid == 0:
            print("from the child")
            if end == "raises":
                raise ValueError("in the child")
            if end == "exits":
                sys.exit(7)
            return os.getpid(), -1
        return os.getpid(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    before = dr.fetch(dr.spmd(mesh, os.getpid)())
    for end, code in ("returns", 0), ("raises", 1), ("exits", 7):
        assert dr.fetch(dr.spmd(mesh, forks, returns=(object, object))(end)) == (before, [code, code])
    assert dr.fetch(dr.spmd(mesh, os.getpid)()) == before
    until(lambda: "ValueError: in the child" in (said.append(capfd.readouterr().out) or "".join(said)))
    assert "[rank 1] from the child" in "".join(said)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_outlives_its_rank_does_not_hide_the_end(
    mesh: dr.mesh.DeviceMesh, tmp_path: Path
) -> None:
    def leaves_a_child(folder: Path) -> None:
        if dist.get_rank() == 1:
            pid = os.fork()
            if pid == 0:
                time.sleep(200)
            (folder / "child").write_text(str(pid), encoding="utf-8")
            os._exit(3)
        dist.barrier()

    with pytest.raises(RuntimeError, match="rank 1 on node 1 exited with code 3"):
        dr.fetch(dr.spmd(mesh, leaves_a_child, returns=object)(tmp_path))
    os.kill(int((tmp_path / "child").read_text(encoding="utf-8")), signal.SIGKILL)
    assert works(mesh)


def test_what_a_rank_wrote_last_is_in_the_error_of_its_end(mesh: dr.mesh.DeviceMesh) -> None:
    def gives_up() -> None:
        if dist.get_rank() == 1:
            print("no licence for the simulator", flush=True)
            os._exit(3)
        dist.barrier()

    wanted = r"rank 1 on node 1 exited with code 3 in .*gives_up. It wrote last: no licence for the simulator"
    with pytest.raises(RuntimeError, match=wanted):
        dr.fetch(dr.spmd(mesh, gives_up, returns=object)())
    assert works(mesh)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with the one that has forked it")
def test_ranks_that_went_with_their_nursery_say_so(mesh: dr.mesh.DeviceMesh) -> None:
    assert works(mesh)

    @dr.spmd(mesh, returns=object)
    def kills_its_nursery() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    gone = (
        r"rank 1 on node 1 went with the process that had forked it \(pid \d+\), which was ended by SIGKILL"
    )
    with pytest.raises(RuntimeError, match=gone):
        dr.fetch(kills_its_nursery())
    assert works(mesh)


def test_one_that_never_returns_has_a_timeout(mesh: dr.mesh.DeviceMesh) -> None:
    @dr.spmd(mesh, returns=object, timeout=1.0)
    def hangs() -> None:
        if dist.get_rank() == 1:
            signal.pause()

    assert works(mesh)
    with pytest.raises(dr.errors.WaitTimeout, match="did not return within its timeout"):
        dr.fetch(hangs())
    assert works(mesh)


@pytest.mark.parametrize("stop", [lambda: breakpoint(), lambda: pdb.set_trace()])
def test_a_breakpoint_says_that_it_opens_no_prompt(mesh: dr.mesh.DeviceMesh, stop: Any) -> None:
    with pytest.raises(
        dr.errors.NotSupportedError, match=r"opens no prompt .* dr\.remote, where it opens one"
    ):
        dr.fetch(dr.spmd(mesh, stop, returns=object)())
    assert works(mesh)


class Holds:
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_result_that_cannot_be_pickled_stays_there(mesh: dr.mesh.DeviceMesh) -> None:
    held = dr.spmd(mesh, lambda: Holds())()
    wanted = r"^Holds cannot be pickled, so it stays in its member.s process: .*lock.* Pass it to a function"
    with pytest.raises(dr.errors.UsageError, match=wanted):
        dr.fetch(held)
    assert dr.fetch(dr.spmd(mesh, lambda x: x.lock.locked(), returns=object)(held)) == [False, False]


def test_objects_of_ended_processes_say_so(mesh: dr.mesh.DeviceMesh) -> None:
    held = dr.spmd(mesh, lambda: nn.Linear(2, 2))()
    with pytest.raises(ZeroDivisionError):
        dr.fetch(dr.spmd(mesh, lambda: 1 // 0, returns=object)())
    with pytest.raises(dr.errors.UsageError, match="started again after a failure"):
        dr.fetch(dr.spmd(mesh, lambda m: m.weight, returns=object)(held))


def test_an_argument_that_has_failed_on_one_member(mesh: dr.mesh.DeviceMesh) -> None:
    shards = dr.shards(torch.ones(2, device=mesh.device))
    assert len(shards) == 2
    good = torch.ones(3, device=dr.place(0))
    bad = torch.ones(3, device=dr.place(1))[torch.tensor([0, 1, 5], device=dr.place(1))]
    x = dr.from_shards([good, bad], mesh)
    found = dr.spmd(mesh, lambda x: dist.barrier(), returns=object)(x)
    with pytest.raises(IndexError, match=r"out of bounds.* \(.* did not begin on node 1\)"):
        dr.fetch(found[0])
    with pytest.raises(IndexError, match="out of bounds"):
        dr.fetch(found[1])
    with pytest.raises(IndexError):
        bad.cpu()
    assert works(mesh)


# -- cancelled -----------------------------------------------------------------------------------------------


def begun(folder: Path) -> None:
    (folder / str(dist.get_rank())).touch()


def limited() -> Iterator[None]:
    """Yield for longer than the test waits, so that nothing runs for ever."""
    limit = time.monotonic() + 200
    while time.monotonic() < limit:
        yield


def in_collectives(folder: Path) -> None:
    begun(folder)
    for _ in limited():
        dist.all_reduce(torch.ones(4))


def in_python(folder: Path) -> None:
    begun(folder)
    for _ in limited():
        pass


def in_a_sleep(folder: Path) -> None:
    begun(folder)
    time.sleep(200)


def in_backward(folder: Path) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    begun(folder)
    for _ in limited():
        model(torch.randn(8, 64)).sum().backward()


def one_waits(folder: Path) -> None:
    begun(folder)
    if dist.get_rank() == 1:
        time.sleep(200)
    dist.barrier()


def cancelled(value: object) -> None:
    with pytest.raises(dr.errors.StreamCancelled):
        dr.fetch(value)


@pytest.mark.parametrize("body", [in_collectives, in_python, in_a_sleep, in_backward, one_waits])
def test_a_call_that_is_cancelled_ends_on_all_members(
    mesh: dr.mesh.DeviceMesh, tmp_path: Path, body: Any
) -> None:
    calls = [dr.spmd(mesh, body, returns=object)(tmp_path) for _ in range(2)]
    until(lambda: len([*tmp_path.iterdir()]) == 2)
    dr.cancel()
    for item in (*calls[0], *calls[1]):
        cancelled(item)
    assert works(mesh)
    x = [torch.ones(2, device=place) for place in mesh.places]
    dr.distributed.all_reduce(x)
    assert x[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("what", ["a list", "an item", "a tensor", "a shard", "one node"])
def test_whatever_is_cancelled_of_a_call_the_whole_call_ends(
    mesh: dr.mesh.DeviceMesh, tmp_path: Path, what: str
) -> None:
    @dr.spmd(mesh, returns=(object, torch.ones(2, device="meta")))
    def waits(folder: Path) -> tuple[int, torch.Tensor]:
        begun(folder)
        time.sleep(200)
        return 1, torch.ones(2)

    found: tuple[Any, torch.Tensor] = waits(tmp_path)
    until(lambda: len([*tmp_path.iterdir()]) == 2)
    cases = {
        "a list": found[0],
        "an item": found[0][1],
        "a tensor": found[1],
        "a shard": found[1].member(0),
        "one node": 1,
    }
    dr.cancel(cases[what])
    for item in (*found[0], found[1]):
        cancelled(item)
    assert works(mesh)


def test_a_call_that_waits_for_its_turn_is_dropped_alone(mesh: dr.mesh.DeviceMesh, tmp_path: Path) -> None:
    @dr.spmd(mesh, returns=object)
    def waits(folder: Path) -> None:
        begun(folder)
        limit = time.monotonic() + 60
        while not (folder / "go").exists() and time.monotonic() < limit:
            time.sleep(0.001)

    first, second = waits(tmp_path), dr.spmd(mesh, in_python, returns=object)(tmp_path)
    until(lambda: len([*tmp_path.iterdir()]) == 2)
    dr.cancel(second)
    (tmp_path / "go").touch()
    assert dr.fetch(first) == [None, None]
    for item in second:
        cancelled(item)
    assert works(mesh)


def test_an_argument_that_was_dropped_on_one_member_cancels_the_call(
    mesh: dr.mesh.DeviceMesh, tmp_path: Path
) -> None:
    def holds(file: Path) -> None:
        file.touch()
        for _ in limited():
            pass

    good = torch.ones(3, device=dr.place(0))
    held = dr.remote(holds, returns=object)(tmp_path / "held", node=1)
    until((tmp_path / "held").exists)
    dropped = torch.ones(3, device=dr.place(1)) + 1
    dr.cancel(1)
    found = dr.spmd(mesh, lambda x: dist.barrier(), returns=object)(dr.from_shards([good, dropped], mesh))
    for item in (held, *found):
        cancelled(item)
    assert works(mesh)


def test_calls_are_cancelled_at_any_moment(mesh: dr.mesh.DeviceMesh) -> None:
    @dr.spmd(mesh, returns=object)
    def brief() -> int:
        dist.barrier()
        return 1

    for k in range(8):
        calls = [brief() for _ in range(3)]
        # Somewhere between the first and the last of them.
        for _ in range(20_000 * k):
            pass
        dr.cancel(k % 2 if k % 3 else None)
        for call in calls:
            for item in call:
                with suppress(dr.errors.StreamCancelled):
                    assert dr.fetch(item) == 1
        assert works(mesh)


# -- a worker that is lost -----------------------------------------------------------------------------------


# The first worker has the store.
@pytest.mark.parametrize(("body", "killed"), [(in_python, 0), (in_a_sleep, 1)])
def test_the_members_end_with_a_worker_that_is_lost(
    fresh_session: Callable[..., Any], tmp_path: Path, body: Any, killed: int
) -> None:
    fresh_session(world_size=2)
    mesh = dr.init_device_mesh("cpu", (2,))
    found = dr.spmd(mesh, body, returns=object)(tmp_path)
    until(lambda: len([*tmp_path.iterdir()]) == 2)
    os.kill(dr.nodes()[killed].pid, signal.SIGKILL)
    for item in found:
        with pytest.raises(dr.errors.NodeFailed, match=rf"node {killed} .*SIGKILL"):
            dr.fetch(item)
    assert torch.ones(2, device=dr.place(1 - killed)).sum().item() == 2.0


def test_a_worker_may_have_more_files_than_select_takes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    reads, writes = os.pipe()
    try:
        high = fcntl.fcntl(reads, fcntl.F_DUPFD, 1100)
        assert readable([high], 0.0) == []
        os.write(writes, b"x")
        assert readable([high, writes], 1.0) == [high]
        os.close(high)
    finally:
        os.close(reads)
        os.close(writes)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Leave this process none."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 1, before[1]))
    held: list[int] = []
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in held:
            os.close(descriptor)


def test_descriptors_that_are_out_are_named_where_tensors_go_to_a_rank() -> None:
    one, other = socket.socketpair()
    with one, other:
        out = Outgoing()
        out.send(one, out.tensor(torch.ones(3)))
        incoming = receive(other)
        assert incoming is not None
        out.send(one, "again")
        new = Outgoing()
        new.tensor(torch.ones(3))
        acts: list[Callable[[], object]] = [lambda: incoming.tensor(incoming.message)]
        acts += [lambda: receive(other), lambda: new.send(one, "not there")]
        wanted = r"dr\.spmd: .* no file descriptor left of"
        with no_descriptors():
            for act in acts:
                with pytest.raises(dr.errors.ConfigurationError, match=wanted):
                    act()
        assert incoming.tensor(incoming.message).tolist() == [1.0, 1.0, 1.0]
        incoming.close()


def test_a_store_that_is_not_reached_is_given_up_in_time() -> None:
    outcomes, looked = Outcomes(2), list[int]()
    why = outcomes.connect("127.0.0.1", free_port(), lambda: looked.append(1), 0.3)
    assert "127.0.0.1" in why and "\n" not in why and looked
    # Where all members are on one worker, there is no store to reach.
    assert Outcomes(1).connect("127.0.0.1", free_port(), lambda: looked.append(1), 0.3) == ""
