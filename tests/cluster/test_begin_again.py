"""The first cell of a notebook runs twice: `init_master_worker` again, and `resume="auto"`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.session.session import active_session
from processes import STARTING, Child, ListeningWorker, until

pytestmark = pytest.mark.usefixtures("own_state")


def first_cell(**options: Any) -> dr.types.Session:
    """Begin as a notebook's first cell does that names its session."""
    return dr.init_master_worker(session="day", resume="auto", timeout=STARTING, **options)


def publishes(*workers: str) -> None:
    """Child: a kernel that publishes a value, and dies."""
    session = first_cell(workers=list(workers) or None)
    dr.publish("x", torch.full((3,), 2.0, device=REMOTE))
    print("pids", *(node.pid for node in session.nodes), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def kernel(*workers: str) -> list[int]:
    """Run a kernel that dies; return the process ids of its workers."""
    with Child(publishes, *workers) as child:
        pids = [int(pid) for pid in child.expect("pids").split()]
    return pids


# -- in one process ------------------------------------------------------------------------------------------


def test_the_same_arguments_return_the_session_that_is_open() -> None:
    session = dr.init_master_worker(world_size=2, timeout=STARTING)
    x = torch.ones(3, device=REMOTE)
    assert dr.init_master_worker(timeout=STARTING) is session  # two workers are the default
    assert dr.init_master_worker("zmq", 2, timeout=STARTING, quiet=True) is session
    assert (x + 1).tolist() == [2, 2, 2]


def test_other_arguments_say_which_differ() -> None:
    dr.init_master_worker(world_size=1, timeout=STARTING)
    with pytest.raises(dr.errors.UsageError) as caught:
        dr.init_master_worker(world_size=2, timeout=STARTING, simulate_cuda=1, session="day")
    text = str(caught.value)
    assert "world_size: got 2, expected 1; " in text and "simulate_cuda: got 1, expected 0" in text
    assert "session: got 'day', expected None" in text and "distruntime.shutdown()" in text
    assert "timeout" not in text


def test_a_session_that_has_ended_does_not_count() -> None:
    first = dr.init_master_worker(world_size=1, timeout=STARTING)
    dr.shutdown()
    second = dr.init_master_worker(world_size=1, timeout=STARTING)
    assert second is not first and torch.ones(2, device=REMOTE).sum().item() == 2


def test_a_cell_that_names_its_session_runs_twice_in_one_kernel() -> None:
    session = first_cell(world_size=1)
    assert first_cell(world_size=1) is session


@pytest.mark.parametrize("wrong", ["yes", 2, None])
def test_resume_is_one_of_three(wrong: Any) -> None:
    with pytest.raises(dr.errors.ConfigurationError, match=r'resume is True, False or "auto".*got'):
        dr.init_master_worker(session="day", resume=wrong)


# -- after a restart of the kernel ---------------------------------------------------------------------------


@pytest.mark.slow(reason="starts two prompts, 5 s")
def test_the_first_cell_after_the_kernel_has_died(capsys: pytest.CaptureFixture[str]) -> None:
    pids = kernel()
    session = first_cell(quiet=False)
    assert [node.pid for node in session.nodes] == pids
    assert dr.lookup("x").tolist() == [2, 2, 2]
    assert 'attached to session "day": 2 nodes' in capsys.readouterr().out


def test_the_first_cell_the_next_morning(capsys: pytest.CaptureFixture[str]) -> None:
    """All workers have gone meanwhile: the session begins again."""
    for pid in kernel():
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
    session = first_cell(quiet=False)
    assert len(session.nodes) == 2 and not session.names()
    assert torch.ones(2, device=REMOTE).sum().item() == 2
    assert 'began session "day"' in capsys.readouterr().out


def test_other_numbers_than_those_of_the_session_are_refused() -> None:
    kernel()
    with pytest.raises(dr.errors.ConfigurationError, match=r"'day' has 2 workers .* got world_size=3"):
        first_cell(world_size=3)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list[ListeningWorker]]:
    started = []
    for name in "ab":
        (tmp_path / name).mkdir()
        started.append(ListeningWorker(tmp_path / name, "--listen", "tcp://127.0.0.1:0"))
    yield started
    dr.shutdown()
    for worker in started:
        worker.stop()


def test_auto_at_daemons_begins_and_then_attaches(daemons: list[ListeningWorker]) -> None:
    addresses = [daemon.address for daemon in daemons]
    kernel(*addresses)
    session = first_cell(workers=addresses)
    assert dr.lookup("x").tolist() == [2, 2, 2]
    assert session.name == "day" and len(session.nodes) == 2


def test_auto_begins_on_a_daemon_that_was_started_anew(
    daemons: list[ListeningWorker], tmp_path: Path
) -> None:
    """Node 0 has what was published, and node 1 begins."""
    kernel(*(daemon.address for daemon in daemons))
    daemons[1].stop()
    (tmp_path / "c").mkdir()
    daemons[1] = ListeningWorker(tmp_path / "c", "--listen", "tcp://127.0.0.1:0")
    first_cell(workers=[daemon.address for daemon in daemons])
    assert dr.lookup("x").tolist() == [2, 2, 2]
    with dr.on(1):
        assert torch.ones(2, device=REMOTE).sum().item() == 2


def test_auto_does_not_take_a_session_from_a_live_master(daemons: list[ListeningWorker]) -> None:
    address = daemons[0].address
    with Child(holds, address) as child:
        child.expect("holding")
        with pytest.raises(dr.errors.ConnectionFailed, match="the session 'day' is in use"):
            first_cell(workers=[address])
        first_cell(workers=[address], force=True)
        assert dr.lookup("x").tolist() == [1, 1]


def holds(address: str) -> None:
    """Child: a master that is there."""
    first_cell(workers=[address])
    dr.publish("x", torch.ones(2, device=REMOTE))
    print("holding", flush=True)
    input()


# -- what the user holds -------------------------------------------------------------------------------------


def test_completion_offers_what_a_user_needs() -> None:
    session = first_cell(world_size=1)
    offered = [name for name in dir(session) if not name.startswith("_")]
    assert offered == ["detach", "memory", "name", "names", "nodes", "shutdown"]
    x = torch.ones(1000, device=REMOTE)
    dr.publish("x", x)
    assert session.name == "day"
    assert session.nodes[0].state in ("ready", "busy")
    assert session.memory().devices[0].held >= x.nbytes
    assert [one.name for one in session.names()] == ["x"]


def test_a_session_is_shown_as_a_card() -> None:
    session = first_cell(world_size=2)
    lines = repr(session).splitlines()
    assert lines[0] == '<distruntime session "day", open>'
    # The columns are as wide as their widest word: one node may be busy while the other is ready.
    rows = [line.split() for line in lines[1:]]
    assert [(word, number, devices) for word, number, _, _, devices in rows] == [
        ("node", "0", "cpu"),
        ("node", "1", "cpu"),
    ]
    assert {state for _, _, _, state, _ in rows} <= {"ready", "busy"}
    session.shutdown()
    assert repr(session) == '<distruntime session "day", it was shut down>'
    with pytest.raises(dr.errors.SessionClosed):
        session.memory()


def test_a_with_block_ends_the_session() -> None:
    with dr.init_master_worker(world_size=1, timeout=STARTING) as session:
        assert session.name == active_session().name
        assert repr(session).startswith("<distruntime session, open>")
    assert not dr.is_initialized()
