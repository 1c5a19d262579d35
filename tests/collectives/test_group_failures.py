"""What breaks a group, and what does not: members that die, stop or are late, and masters that go while a
collective waits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE, there
from distruntime.session.session import active_session
from distruntime.wire.channel import Channel
from distruntime.wire.codec import decode, encode
from distruntime.wire.messages import AskStatus, Welcome
from distruntime_worker.session.config import WorkerConfig
from distruntime_worker.session.daemon import Daemon
from fewer import fewer
from greeting_samples import HELLO
from processes import Child, asleep, opened, pause, stop, stopped, until


def each(nodes: list[int], size: int = 3) -> list[torch.Tensor]:
    return [there(torch.full((size,), float(node + 1)), node) for node in nodes]


def busy(node: int, seconds: int = 2) -> torch.Tensor:
    """A zero that is there after so many seconds, about."""
    with dr.node(node):
        work = torch.ones(1000, 1000, device=REMOTE)
    for _ in range(12 * seconds):
        work = work @ work / 1000
    return work[0, 0] - work[1, 1]


def broken(tensors: list[torch.Tensor], text: str) -> None:
    """Hold that reading each raises `NodeFailed` with a text like this."""
    for tensor in tensors:
        with pytest.raises(dr.errors.NodeFailed, match=text):
            tensor.cpu()


def drain() -> None:
    """Read the failures that a test has made on purpose."""
    for node in dr.nodes():
        for _ in range(20):
            try:
                dr.synchronize(node.index)
            except dr.errors.NodeFailed as error:
                if "puts a new worker there" in str(error):
                    break
            except dr.DistruntimeError:
                continue
            else:
                break


OPERATIONS: dict[str, Callable[[list[torch.Tensor], dr.distributed.ProcessGroup], Any]] = {
    "all_reduce": lambda given, group: dr.functional.all_reduce(given, group=group),
    "all_gather": lambda given, group: dr.functional.all_gather(given, group),
    "reduce_scatter": lambda given, group: dr.functional.reduce_scatter(given, group=group),
    "all_to_all": lambda given, group: dr.functional.all_to_all_single(given, group=group),
    "broadcast": lambda given, group: dr.functional.broadcast(given[2], group),
}


def test_a_member_that_dies_breaks_its_groups_and_nothing_else(fresh_session: Any) -> None:
    session = fresh_session(world_size=4)
    group, survivors, others = (
        dr.distributed.new_group([0, 1, 2]),
        dr.distributed.new_group([0, 1]),
        dr.distributed.new_group([3, 0]),
    )
    kept = each([0, 1, 2, 3])
    given = each([0, 1, 2], size=6)
    given[2] = given[2] + busy(2, 20)  # so that it dies before its part
    results = {name: run(given, group) for name, run in OPERATIONS.items()}
    works = dr.distributed.all_reduce(each([0, 1, 2]), group=group, async_op=True)
    fine = dr.functional.all_reduce(kept[:2], group=survivors)
    os.kill(session.workers[2].pid, signal.SIGKILL)
    for tensors in results.values():
        broken(tensors[:2], r"node 2 .*exited: killed by signal 9")
        broken(tensors[2:], r"node 2 .*exited: killed by signal 9")
    assert works is not None
    with pytest.raises(dr.errors.NodeFailed):
        works.synchronize(10)
    with pytest.raises(
        dr.errors.NodeFailed,
        match=r"cannot go on: node 2 .* Make a group of the members that are left: "
        r"dr.distributed.new_group\(\[0, 1\]\)",
    ):
        dr.distributed.all_reduce(each([0, 1, 3]), group=group)
    with pytest.raises(dr.errors.NodeFailed):
        dr.distributed.new_group([0, 1, 2])
    # What was not in it lives on, and so do those who were.
    assert [t.tolist() for t in fine] == [[3.0] * 3] * 2
    assert [kept[k].tolist() for k in (0, 1, 3)] == [[1.0] * 3, [2.0] * 3, [4.0] * 3]
    dr.distributed.all_reduce([kept[3], kept[0]], group=others)
    again = dr.distributed.new_group([0, 1, 3])
    dr.distributed.all_reduce([kept[k] for k in (0, 1, 3)], group=again)
    assert [kept[k].tolist() for k in (0, 1, 3)] == [[12.0] * 3] * 3
    assert kept[0].to(node=3).tolist() == [12.0] * 3
    with pytest.raises(dr.errors.NodeFailed):
        kept[0].to(node=2)
    drain()


@pytest.mark.parametrize("victim, closed", [(0, False), (2, True)])
def test_whoever_dies_the_others_stop_waiting_for_each_other(
    fresh_session: Any, victim: int, closed: bool
) -> None:
    """The others have begun, and none may wait on: gloo knows only of those that are beside it.

    A group that is closed counts too.
    """
    session = fresh_session(world_size=3)
    group = dr.distributed.new_group([0, 1, 2])
    given = each([0, 1, 2], size=1 << 16)
    dr.distributed.all_reduce(given, group=group)
    dr.synchronize()
    stop(session.workers[victim].pid)
    results = [dr.functional.all_reduce(given, group=group), dr.functional.all_gather(given, group=group)]
    if closed:
        group.close()
    others = [node for node in range(3) if node != victim]
    until(
        lambda: all(
            session.value(session.ask(session.nodes[node], AskStatus))[1] is not None for node in others
        )
    )
    os.kill(session.workers[victim].pid, signal.SIGKILL)
    for tensors in results:
        broken([tensors[node] for node in others], rf"node {victim} .*exited: killed by signal 9")
    drain()


def test_a_member_that_dies_while_the_group_is_made(fresh_session: Any) -> None:
    session = fresh_session(world_size=3)
    dr.distributed.barrier(dr.distributed.new_group([0, 1]))
    pid = session.workers[2].pid
    stop(pid)
    killer = threading.Timer(1.0, lambda: os.kill(pid, signal.SIGKILL))
    killer.start()
    try:
        with pytest.raises(dr.errors.NodeFailed, match=r"node 2 .*exited: killed by signal 9"):
            dr.distributed.new_group([0, 1, 2])
    finally:
        killer.join()
    values = each([0, 1])
    dr.distributed.all_reduce(values)
    assert values[0].tolist() == [3.0] * 3


@pytest.mark.parametrize("size", [10, 4 << 20])
def test_a_copy_to_or_from_a_node_that_dies(fresh_session: Any, size: int) -> None:
    session = fresh_session(world_size=3)
    x = there(torch.ones(size))
    first = x.to(node=1)
    assert first.sum().item() == size
    late = there(torch.ones(size), 1) + busy(1, 20)
    copied, further = late.to(node=0), x.to(node=1).to(node=2)
    os.kill(session.workers[1].pid, signal.SIGKILL)
    broken([copied, further], "node 1 ")
    assert x.to(node=2).sum().item() == size
    drain()


def test_a_member_that_stops_is_late_by_the_groups_timeout(fresh_session: Any) -> None:
    session = fresh_session(world_size=3)
    group, values = dr.distributed.new_group([0, 1], timeout=3.0), each([0, 1])
    dr.distributed.all_reduce(values, group=group)
    assert values[0].tolist() == [3.0] * 3
    with stopped(session.workers[1].pid):
        dr.distributed.all_reduce(values, group=group)
        broken(values[:1], "(?i)time")
        assert there(torch.ones(2), 2).to(node=0).tolist() == [1, 1]
    broken(values[1:], "(?i)time|broken")
    with pytest.raises(
        dr.errors.NodeFailed,
        match=r"cannot go on: node 0 .*Make a group of the members that are left: "
        r"dr.distributed.new_group\(\[0, 1\]\)",
    ):
        dr.distributed.all_reduce(values, group=group)
    values = each([0, 1])
    dr.distributed.all_reduce(values)  # a group of its own
    assert values[1].tolist() == [3.0] * 3
    drain()


def test_a_member_that_stops_for_a_while_only_delays(fresh_session: Any) -> None:
    session = fresh_session()
    values = each([0, 1])
    dr.distributed.barrier()
    with stopped(session.workers[1].pid):
        dr.distributed.all_reduce(values)
        pause(0.3)
        work = dr.distributed.all_reduce(values, async_op=True)
        assert work is not None and values[0].shape == (3,)
        with pytest.raises(dr.errors.WaitTimeout):
            work.synchronize(0.2)
    assert [t.tolist() for t in values] == [[6.0] * 3] * 2


def _interrupted() -> None:
    """Child of the next test."""
    with dr.init_master_worker():
        values = each([0, 1])
        group = dr.distributed.new_group([0, 1])
        dr.synchronize()
        with stopped(active_session().workers[1].pid):
            results = dr.functional.all_reduce(values, group=group)
            for wait in (results[0].cpu, lambda: dr.distributed.barrier(group)):
                try:
                    print("waiting", flush=True)
                    wait()
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
        print("then", [t.tolist() for t in results], flush=True)
        dr.distributed.all_reduce(values, group=group)
        print("after", [t.tolist() for t in values], flush=True)


def test_ctrl_c_while_a_collective_is_waited_for_leaves_all_usable() -> None:
    with Child(_interrupted) as child:
        for _ in range(2):
            child.expect("waiting")
            until(lambda: asleep(child.pid))
            child.interrupt()
            child.expect("interrupted")
        assert child.expect("then") == "[[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]"
        assert child.expect("after") == "[[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]"
        child.finish()


# Daemons that outlive their masters


def start_daemon(*arguments: str) -> subprocess.Popen[bytes]:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'worker'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "distruntime_worker", *arguments], env=environment, stderr=subprocess.DEVNULL
    )


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list[tuple[str, int]]]:
    """Two daemons on ipc sockets, [address, pid]."""
    dr.shutdown()
    addresses = [f"ipc://{tmp_path}/w{k}" for k in range(2)]
    started = [start_daemon("--data-address", "127.0.0.1", "--listen", address) for address in addresses]
    yield [(address, process.pid) for address, process in zip(addresses, started)]
    dr.shutdown()
    for process in started:
        process.kill()
        process.wait()


def _leaves(*addresses: str) -> None:
    """Child: a master that goes while a worker waits in a collective for the other."""
    dr.init_master_worker(workers=list(addresses))
    values = each([0, 1])
    dr.distributed.all_reduce(values)
    print("first", values[0].tolist(), flush=True)
    late = values[1] + busy(1, 4)
    dr.functional.all_reduce([values[0], late])
    pause(0.5)
    print("leaving", flush=True)
    sys.stdin.readline()
    os._exit(0)


@pytest.mark.parametrize("how", fewer(["shutdown", "killed"], 2, "another end, 6 s"))
def test_workers_serve_the_next_master_at_once(daemons: list[tuple[str, int]], how: str) -> None:
    addresses = [address for address, _ in daemons]
    if how == "killed":
        with Child(_leaves, *addresses) as child:
            child.expect("leaving")
            child.tell()
            child.finish()
    else:
        session = dr.init_master_worker(workers=addresses)
        values = each([0, 1])
        dr.functional.all_reduce([values[0], values[1] + busy(1, 4)])
        pause(0.3)
        session.shutdown(timeout=0.1)
    for _ in range(2):
        with dr.init_master_worker(workers=addresses, timeout=20.0):
            values = each([0])
            group = dr.distributed.new_group([0])
            dr.distributed.all_reduce(values, group=group)
            assert values[0].tolist() == [1.0] * 3
            dr.fetch(values)


def message_at(channel: Channel) -> Any:
    """Wait for a message; events may end a channel's wait too."""
    messages: list[Any] = []
    until(lambda: messages.extend(channel.receive(1.0)) or messages)
    (message,) = messages
    return message


def test_a_master_that_comes_while_the_worker_has_not_seen_its_predecessor_die(tmp_path: Path) -> None:
    """Step by step, in this process: the end of the one connection and the Hello of the next are taken in
    together.
    """
    tmp_path.chmod(0o700)
    hello = encode(replace(HELLO, mode="force new"))
    daemon = Daemon(WorkerConfig(listen=f"ipc://{tmp_path}/w"))
    first, second = Channel(), Channel()
    try:
        for master in (first, second):
            master.connect(f"ipc://{tmp_path}/w", b"worker")
            until(lambda master=master: any(event.kind == "connected" for event in master.events()))
            master.send(b"worker", [hello])
            daemon._handle(*message_at(daemon._channel))
            _, (welcome,) = message_at(master)
            assert isinstance(decode(welcome), Welcome)
            master.close()
    finally:
        for channel in (first, second, daemon):
            channel.close()


def test_a_master_that_is_gone_before_its_greeting_is_read_keeps_no_session_in_use(tmp_path: Path) -> None:
    """Step by step, in this process: two masters, of which the first has given up, perhaps as another worker
    of its does not answer.
    """
    tmp_path.chmod(0o700)
    hello = replace(HELLO, mode="new", lasting=True)
    daemon = Daemon(WorkerConfig(listen=f"ipc://{tmp_path}/w"))
    first, second = Channel(), Channel()
    waiting: list[Any] = []
    try:
        for master, token in ((first, b"1" * 16), (second, b"2" * 16)):
            master.connect(f"ipc://{tmp_path}/w", b"worker")
            until(lambda master=master: any(event.kind == "connected" for event in master.events()))
            master.send(b"worker", [encode(replace(hello, token=token))])
            waiting.append(message_at(daemon._channel))
            if master is first:
                first.close()
                until(lambda: daemon._channel._connections.poll(0))  # its end is there to be read
        for message in waiting:
            daemon._handle(*message)
        _, (answer,) = message_at(second)
        assert isinstance(decode(answer), Welcome), decode(answer)
    finally:
        for channel in (first, second, daemon):
            channel.close()


def test_groups_come_and_go_without_leaving_connections(session: object) -> None:
    """Closed groups let go of their sockets on the workers."""

    pid = active_session().workers[0].pid

    def sockets() -> int:
        return sum(name.startswith("socket:") for name in opened(pid))

    def once() -> None:
        group = dr.distributed.new_group([0, 1])
        values = each([0, 1])
        dr.distributed.all_reduce(values, group=group)
        assert values[0].tolist() == [3.0] * 3
        group.close()
        dr.synchronize()

    once()
    before = sockets()
    for _ in range(10):
        once()
    until(lambda: sockets() <= before + 2)
