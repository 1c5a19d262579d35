"""`dr.workers.add_worker`: a session that runs gets one node more, which groups, meshes and copies use."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.session.session import active_session
from processes import STARTING, ListeningWorker, free_port, until

Dialler = Callable[..., None]


def listen(address: str, **options: Any) -> None:
    options = {"insecure": True, "timeout": STARTING, "world_size": 1, **options}
    dr.init_master_worker(listen=address, **options)


def sums(nodes: list[int]) -> list[float]:
    """Return what each member has after an all_reduce of three ones."""
    xs = [torch.ones(3, device=REMOTE).to(node=k) for k in nodes]  # type: ignore[call-overload]
    dr.distributed.all_reduce(xs, group=dr.distributed.new_group(nodes))
    return [x.sum().item() for x in xs]


def test_one_more_worker_of_this_machine(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    kept = torch.arange(6.0).to(REMOTE)
    assert dr.workers.add_worker() == 1
    assert {node.state for node in dr.nodes()} <= {"ready", "busy"} and len(dr.nodes()) == 2
    # The new device has the next number, and the others keep theirs.
    assert torch.ones(2, device="remote:1").place == dr.place(1, "cpu")  # type: ignore[attr-defined]
    assert kept.to("remote:1").tolist() == [0, 1, 2, 3, 4, 5] and kept.sum().item() == 15
    assert sums([0, 1]) == [6, 6]
    older = dr.distributed.new_group([0, 1])
    assert dr.workers.add_worker() == 2
    assert sums([2, 0, 1]) == [9, 9, 9]
    xs = [torch.ones(1, device=f"remote:{k}") for k in range(2)]
    dr.distributed.all_reduce(xs, group=older)
    assert [x.item() for x in xs] == [2, 2]


def test_a_mesh_and_a_function_use_the_new_node(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2)
    first = dr.init_device_mesh("cpu", (2,))
    x = dr.from_shards([torch.ones(2), torch.ones(2)], first)
    dr.workers.add_worker()
    second = dr.init_device_mesh("cpu", (3,))
    y = dr.from_shards([torch.ones(1) * k for k in range(3)], second)
    assert (x + 1).member(1).tolist() == [2, 2] and (y * 2).member(2).tolist() == [4]
    assert dr.fetch(dr.remote(os.getpid, node=2)()) == dr.nodes()[2].pid


def test_the_new_worker_is_lost_and_restarted_as_others_are(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    node = dr.workers.add_worker()
    os.kill(dr.nodes()[node].pid, signal.SIGKILL)
    until(lambda: dr.nodes()[node].state == "lost")
    dr.restart(node)
    assert sums([0, node]) == [6, 6]


def test_others_compute_while_a_worker_comes(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2)
    over, errors = threading.Event(), list[BaseException]()

    def work(node: int) -> None:
        x, count = torch.zeros(8).to(f"remote:{node}"), 0
        try:
            while not over.is_set() or count == 0:
                x, count = x + 1, count + 1
                assert x.to(f"remote:{1 - node}")[0].item() == count
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(node,)) for node in range(2)]
    for thread in threads:
        thread.start()
    added = [dr.workers.add_worker(), dr.workers.add_worker()]
    over.set()
    for thread in threads:
        thread.join()
    assert not errors and added == [2, 3]
    assert sums([3, 2, 1, 0]) == [12] * 4


def test_a_running_daemon_is_named_by_its_address(fresh_session: Callable[..., Any], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    first, second = (ListeningWorker(folder, "--listen", "tcp://127.0.0.1:0") for folder in folders)
    try:
        fresh_session(workers=[first.address])
        with pytest.raises(
            dr.errors.UsageError, match=r"Name this one, too: dr.workers.add_worker\(.tcp://host:29400"
        ):
            dr.workers.add_worker()
        assert dr.workers.add_worker(second.address) == 1
        assert sums([0, 1]) == [6, 6]
    finally:
        dr.shutdown()
        first.stop()
        second.stop()


def test_an_address_where_nobody_listens(fresh_session: Callable[..., Any], tmp_path: Path) -> None:
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0")
    try:
        session = fresh_session(workers=[worker.address])
        nowhere = f"tcp://127.0.0.1:{free_port()}"
        for _ in range(2):
            with pytest.raises(dr.errors.ConnectionFailed, match=f"nothing answers at {nowhere} within 1 s"):
                dr.workers.add_worker(nowhere, timeout=1.0)
            assert len(session.nodes) == len(session.connector.connections) == 1
        # The number is free again.
        assert torch.ones(2, device=REMOTE).sum().item() == 2
    finally:
        dr.shutdown()
        worker.stop()


def test_addresses_that_cannot_be(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    with pytest.raises(dr.errors.ConfigurationError, match=r"expected tcp://host:port or ipc://path"):
        dr.workers.add_worker("gpubox")
    with pytest.raises(dr.errors.ConfigurationError, match=r"starts workers through ssh when it begins"):
        dr.workers.add_worker("ssh://gpubox")
    with pytest.raises(
        dr.errors.ConfigurationError, match=r"needs a key, and this session has none: .* key=\.\.\."
    ):
        dr.workers.add_worker("tcp://127.0.0.1:29400")
    assert len(active_session().nodes) == 1


def test_a_worker_that_dials_gets_the_place_that_was_made_for_it(address: str, dial: Dialler) -> None:
    dial()
    listen(address)
    with pytest.raises(
        dr.errors.ConnectionFailed, match=rf"no worker has dialled {address} within 0.2 s. Start one: "
    ):
        dr.workers.add_worker(timeout=0.2)
    dial()
    # It dials before or after the place is made.
    assert dr.workers.add_worker() == 1
    assert sums([0, 1]) == [6, 6]


def test_workers_join_up_to_the_most(address: str, dial: Dialler, caplog: pytest.LogCaptureFixture) -> None:
    dial()
    listen(address, max_world_size=2)
    dial()
    until(lambda: len(dr.nodes()) == 2, STARTING)
    assert sums([0, 1]) == [6, 6]
    dial()
    until(lambda: "the session has all its workers. It gets no place" in caplog.text)
    assert len(dr.nodes()) == 2


def test_the_most_is_a_number_that_goes_with_listen() -> None:
    dr.shutdown()
    for options in (
        {"max_world_size": 4},
        {"listen": "tcp://127.0.0.1:0", "world_size": 3, "max_world_size": 2},
    ):
        with pytest.raises(
            dr.errors.ConfigurationError, match=r"at least world_size \(.*\), and goes with listen="
        ):
            dr.init_master_worker(**options)  # type: ignore[arg-type]


def test_a_later_master_finds_the_added_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUNTIME_STATE", str(tmp_path))
    dr.shutdown()
    dr.init_master_worker(world_size=1, session="grown", timeout=STARTING)
    try:
        assert dr.workers.add_worker() == 1
        kept = torch.ones(4).to("remote:1")
        dr.publish("kept", kept)
        dr.detach()
        dr.init_master_worker(session="grown", resume=True, timeout=STARTING)
        assert len(dr.nodes()) == 2
        assert dr.lookup("kept").sum().item() == 4 and sums([0, 1]) == [6, 6]
        assert dr.workers.add_worker() == 2
    finally:
        dr.shutdown()
