"""What a master had issued when it left is finished before the next one of its session reads, or fails there.

Each test holds a worker at a function that waits until a file is there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.errors import StreamCancelled
from distruntime.session.session import active_session
from distruntime.wire.messages import AskMemory
from processes import STARTING, Child, ListeningWorker, until

pytestmark = pytest.mark.usefixtures("own_state")

STEPS = 60


def begin(**options: object) -> None:
    dr.init_master_worker(
        **{"session": "left", "world_size": 1, "resume": "auto", "timeout": STARTING, **options}
    )


def comes(gate: Path) -> int:
    """Wait on the worker until a file is there."""
    while not gate.exists():
        time.sleep(0.01)
    return 0


def never(looks: bool) -> int:
    """Run for as long as the worker lives: in Python, or where nothing can interrupt it."""
    while looks:
        pass
    time.sleep(10_000)
    return 0


def hold(function: Callable[..., int], *arguments: object) -> None:
    dr.remote(function, returns=object, random=False)(*arguments)


def arrive() -> None:
    """Block until the workers have got everything that was issued."""
    session = active_session()
    for node in session.nodes:
        node.flush()
        session.value(session.ask(node, AskMemory))


def issue(gate: Path) -> None:
    """Publish a value that is `STEPS` when everything has run, which waits for the file."""
    x = torch.zeros(3, device=REMOTE)
    dr.publish("x", x)
    hold(comes, gate)
    for _ in range(STEPS):
        x.add_(1)


def reads_behind(gate: Path) -> list[float]:
    """Look the value up, which nothing shows before the file is there; return it."""
    coming = dr.fetch_async(dr.lookup("x"))
    until(lambda: "(issued before this master came)" in (dr.nodes()[0].doing or ""))
    assert not coming.done()
    gate.touch()
    return coming.result(60).tolist()


# -- it is finished ------------------------------------------------------------------------------------------


def test_a_lookup_comes_behind_what_was_issued_before_a_detach(tmp_path: Path) -> None:
    """The published value was read in the middle of the queue, and the rest was dropped without a word."""
    begin()
    issue(tmp_path / "gate")
    dr.detach()
    begin()
    assert reads_behind(tmp_path / "gate") == [STEPS] * 3
    assert dr.lookup("x").add_(1).tolist() == [STEPS + 1] * 3


def dies(gate: str) -> None:
    """Child: a master that is killed when what it has issued has arrived."""
    begin()
    issue(Path(gate))
    arrive()
    print("arrived", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_lookup_comes_behind_what_a_dead_master_had_issued(tmp_path: Path) -> None:
    with Child(dies, str(tmp_path / "gate")) as child:
        child.expect("arrived")
    begin()
    assert reads_behind(tmp_path / "gate") == [STEPS] * 3


def stays(address: str, gate: str) -> None:
    """Child: a master from which the session is taken."""
    begin(workers=[address], world_size=None)
    issue(Path(gate))
    arrive()
    print("arrived", flush=True)
    input()


def test_what_a_live_master_had_issued_is_finished_for_who_takes_its_session(tmp_path: Path) -> None:
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0")
    try:
        with Child(stays, worker.address, str(tmp_path / "gate")) as child:
            child.expect("arrived")
            begin(workers=[worker.address], world_size=None, force=True)
            assert reads_behind(tmp_path / "gate") == [STEPS] * 3
            dr.shutdown()
    finally:
        worker.stop()


def test_the_next_master_but_one_waits_as_well(tmp_path: Path) -> None:
    begin()
    issue(tmp_path / "gate")
    dr.detach()
    begin()
    dr.lookup("x").mul_(2)
    dr.detach()
    begin()
    assert reads_behind(tmp_path / "gate") == [2 * STEPS] * 3


def test_draws_and_settings_come_in_the_order_in_which_masters_came(tmp_path: Path) -> None:
    torch.manual_seed(3)
    want = [torch.zeros(4).normal_().tolist(), torch.rand(4).tolist()]
    begin()
    torch.manual_seed(3)
    x = torch.zeros(4, device=REMOTE)
    dr.publish("x", x)
    dr.config(flush_denormal=True)
    hold(comes, tmp_path / "gate")
    # The settings of a session are taken back before the next one begins.
    x.fill_(1e-40).mul_(1).mul_(1e38).add_(torch.zeros(4, device=REMOTE).normal_())
    dr.detach()
    begin()
    drawn = torch.rand(4, device=REMOTE)
    assert reads_behind(tmp_path / "gate") == want[0]
    assert drawn.tolist() == want[1]


def test_copies_between_nodes_are_finished_too(tmp_path: Path) -> None:
    begin(world_size=2)
    with dr.on(1):
        x = torch.zeros(3, device=REMOTE)
        dr.publish("x", x)
    with dr.on(0):
        hold(comes, tmp_path / "gate")
        y = torch.zeros(3, device=REMOTE)
        for _ in range(STEPS):
            y.add_(1)
            x.copy_(y)
    dr.detach()
    begin(world_size=2)
    coming = dr.fetch_async(dr.lookup("x"))
    until(lambda: all("(issued before" in (node.doing or "") for node in dr.nodes()))
    assert not coming.done()
    (tmp_path / "gate").touch()
    assert coming.result(60).tolist() == [STEPS] * 3


def test_large_uploads_keep_their_bytes_when_their_master_leaves(tmp_path: Path) -> None:
    """The worker found them by a descriptor's number, which the next session of the process uses again."""
    begin()
    x = torch.zeros(200_000, device=REMOTE)
    dr.publish("x", x)
    hold(comes, tmp_path / "gate")
    x.copy_(torch.full((200_000,), 3.0).to(REMOTE))
    dr.detach()
    begin()
    later = torch.full((200_000,), 4.0).to(REMOTE)
    coming = dr.fetch_async(dr.lookup("x"))
    (tmp_path / "gate").touch()
    assert coming.result(60).unique().tolist() == [3.0]
    assert later.unique().tolist() == [4.0]


# -- it is not -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("looks", [True, False], ids=["in Python", "where nothing interrupts it"])
def test_what_never_ends_poisons_what_it_keeps_from_being_written(
    looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRUNTIME_FINISH_TIMEOUT", "0.5")
    begin()
    x, y = torch.zeros(3, device=REMOTE), torch.ones(3, device=REMOTE)
    dr.publish("x", {"whole": x, "row": x[:1]})
    dr.publish("y", y)
    hold(never, looks)
    x[1:].add_(1)
    dr.detach()
    begin()
    found = dr.lookup("x")
    for value in found.values():
        with pytest.raises(StreamCancelled, match=r"its master had left the session.*within 0\.5 s"):
            value.tolist()
    assert dr.lookup("y").tolist() == [1, 1, 1]
    assert (dr.lookup("y") + 1).tolist() == [2, 2, 2]
