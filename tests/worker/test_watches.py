"""What stands around an instruction goes on standing there when another session's values are looked up:
shares of memory, own draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from fewer import fewer
from processes import STARTING, ListeningWorker

SHARE = 16 << 20  # bytes


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ListeningWorker]:
    """A worker process with a share of memory for each session: in this one, the test's own draws would come
    between.
    """
    started = ListeningWorker(
        tmp_path_factory.mktemp("worker"), "--listen", "tcp://127.0.0.1:0", "--max-memory", "16MiB"
    )
    yield started
    started.stop()


Enter = Callable[[str], None]


@pytest.fixture
def enter(daemon: ListeningWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Enter]:
    """Opens a session of a name, or goes on with it; the one that is open is left.

    Alice has published, and bob's is open.
    """
    for variable in ("SIGNING_KEY", "TRUSTED_KEYS", "STATE"):
        monkeypatch.setenv(f"DISTRUNTIME_{variable}", str(tmp_path / variable))
    entered: list[str] = []

    def into(name: str) -> None:
        if dr.is_initialized():
            dr.detach()
        again = name in entered
        dr.init_master_worker(
            workers=[daemon.address], session=name, force=True, resume=again, quiet=True, timeout=STARTING
        )
        entered.append(name)

    dr.shutdown()
    into("alice")
    dr.publish("x", torch.arange(12.0, device=REMOTE), shared=True)
    into("bob")
    yield into
    for name in set(entered):
        into(name)
        dr.shutdown()


GROWS: dict[str, Callable[[], Any]] = {
    "resize_": lambda: torch.empty(0, device=REMOTE).resize_(SHARE).sum().item(),
    "out=": lambda: (
        torch.add(torch.ones(SHARE // 6, device=REMOTE), 1, out=torch.empty(0, device=REMOTE)).sum().item()
    ),
    "a factory": lambda: torch.zeros(SHARE, device=REMOTE).sum().item(),
    "a draw": lambda: torch.rand(SHARE, device=REMOTE).sum().item(),
    "repeat": lambda: torch.ones(1, device=REMOTE).repeat(1 << 40).sum().item(),
}


@pytest.mark.parametrize("when", fewer(["known before", "new after"], 3, "another way to look up, 1 s"))
@pytest.mark.parametrize("grow", GROWS.values(), ids=GROWS)
def test_a_lookup_does_not_lift_the_limit_of_memory(enter: Enter, grow: Callable[[], Any], when: str) -> None:
    if when == "known before":
        with pytest.raises((torch.OutOfMemoryError, dr.errors.RemoteError), match="may hold"):
            grow()
    shared = dr.lookup("alice/x")
    with pytest.raises((torch.OutOfMemoryError, dr.errors.RemoteError), match="may hold"):
        grow()
    assert shared.tolist() == list(range(12))
    assert torch.ones(1000, device=REMOTE).sum().item() == 1000


DRAWS: dict[str, Callable[[str], torch.Tensor]] = {
    "in place": lambda device: torch.empty(5, device=device).normal_(),
    "out=": lambda device: torch.randperm(5, out=torch.empty(5, dtype=torch.int64, device=device)),
    "new": lambda device: torch.rand(5, device=device),
    "dropout": lambda device: torch.nn.functional.dropout(torch.ones(50, device=device), 0.5),
}


@pytest.mark.parametrize("when", ["known before", "new after"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_lookup_leaves_each_session_its_own_random_numbers(
    enter: Enter, draw: Callable[[str], torch.Tensor], when: str
) -> None:
    wanted = {}
    for seed in (5, 9):
        torch.manual_seed(seed)
        wanted[seed] = [draw("cpu") for _ in range(3)]
    if when == "known before":
        draw(REMOTE).cpu()
    dr.lookup("alice/x")
    torch.manual_seed(9)
    assert torch.equal(draw(REMOTE).cpu(), wanted[9][0])
    enter("alice")
    torch.manual_seed(5)
    assert torch.equal(draw(REMOTE).cpu(), wanted[5][0])
    enter("bob")
    dr.lookup("alice/x")
    assert torch.equal(draw(REMOTE).cpu(), wanted[9][1])
    enter("alice")
    assert torch.equal(draw(REMOTE).cpu(), wanted[5][1])


def test_what_is_refused_for_reading_only_does_not_draw(enter: Enter) -> None:
    shared = dr.lookup("alice/x")
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    with pytest.raises(dr.errors.UsageError):
        shared.normal_()
    assert torch.equal(torch.rand(3, device=REMOTE).cpu(), wanted)
    assert shared.tolist() == list(range(12))
