"""`run_with_restarts`: a training that loses a worker ends with the weights of one that did not."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from agree import REMOTE, there
from distruntime.session.session import active_session
from processes import ListeningWorker, slots, until

STEPS = 12


def lost(n: int = 1) -> dr.errors.NodeFailed:
    return dr.errors.NodeFailed(f"node {n} is lost, says a test")


def training(ckpt: Any, breaks: dict[int, list[int]], async_op: bool = False) -> dict[str, Any]:
    """Train with dropout, shuffled data and a schedule on two nodes, and save every third step.

    Lose a worker at the steps of this attempt.
    """
    torch.manual_seed(7)
    data = torch.randn(32, 6)
    body = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.4), nn.Tanh()).to(dr.place(0))
    head = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 1)).to(dr.place(1))
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)
    things, first, losses = [body, head, optimizer, scheduler], 0, []
    found = ckpt.load()
    if found is not None:
        first, losses = found["step"], found["losses"]
        for thing, state in zip(things, found["things"]):
            thing.load_state_dict(state)
    for step in range(first, STEPS):
        batch = data[torch.randperm(32)[:8]]
        optimizer.zero_grad()
        loss = head(body(there(batch)).to(dr.place(1))).square().mean()
        loss = loss + torch.rand((), device=loss.device) * 0.1
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses = [*losses, loss.item()]
        if step % 3 == 2:
            ckpt.save({"step": step + 1, "losses": losses, "things": things}, async_op=async_op)
        if step in breaks.get(ckpt.attempt, []):
            raise lost()
    return {
        "attempt": ckpt.attempt,
        "losses": losses,
        "weights": [p.detach().cpu() for p in parameters],
        "first": first,
    }


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert all(torch.equal(a, b) for a, b in zip(one["weights"], other["weights"]))


@pytest.mark.parametrize("async_op", [False, True])
def test_it_ends_bit_equal_to_an_undisturbed_run(
    session: object, tmp_path: Path, async_op: bool, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = dr.run_with_restarts(lambda ckpt: training(ckpt, {}), checkpoint=tmp_path / "a")
    assert undisturbed["attempt"] == 0
    # The losses come before the first checkpoint, between two, and just after one.
    breaks = {0: [1], 1: [6], 2: [8]}
    found = dr.run_with_restarts(lambda ckpt: training(ckpt, breaks, async_op), checkpoint=tmp_path / "b")
    assert found["attempt"] == 3 and found["first"] == 9
    said = [record.getMessage() for record in caplog.records if record.name == "distruntime"]
    assert said[:3] == [
        "attempt 1 of 4 ended: node 1 is lost, says a test",
        "attempt 2 of 4 starts from the beginning, as there is no checkpoint",
        "attempt 2 of 4 ended: node 1 is lost, says a test",
    ]
    assert said[-1] == "attempt 4 of 4 starts from step 9"
    equal(found, undisturbed)


def test_a_run_that_was_stopped_goes_on_in_another_session(
    fresh_session: Callable[..., Any], tmp_path: Path
) -> None:
    fresh_session()
    undisturbed = dr.run_with_restarts(lambda ckpt: training(ckpt, {}), checkpoint=tmp_path / "a")
    with pytest.raises(dr.errors.NodeFailed, match="says a test"):
        dr.run_with_restarts(lambda ckpt: training(ckpt, {0: [7]}), max_restarts=0, checkpoint=tmp_path / "b")
    dr.shutdown()
    fresh_session()
    found = dr.run_with_restarts(lambda ckpt: training(ckpt, {}), checkpoint=tmp_path / "b")
    assert found["attempt"] == 0 and found["first"] == 6
    equal(found, undisturbed)


def test_restarts_have_an_end(session: object, tmp_path: Path) -> None:
    attempts = []

    def train(ckpt: Any) -> None:
        attempts.append(ckpt.attempt)
        try:
            raise ValueError("what led to it")
        except ValueError as error:
            raise lost() from error

    with pytest.raises(dr.errors.NodeFailed, match="says a test") as caught:
        dr.run_with_restarts(train, max_restarts=2, checkpoint=tmp_path)
    assert attempts == [0, 1, 2] and str(caught.value.__cause__) == "what led to it"


def test_a_training_without_a_checkpoint_says_that_it_starts_from_the_beginning(
    session: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(ckpt: Any) -> int:
        assert repr(ckpt).endswith(f"attempt {ckpt.attempt + 1} of 4>")
        if not ckpt.attempt:
            raise lost()
        return int(ckpt.attempt)

    assert dr.run_with_restarts(train, checkpoint=tmp_path) == 1
    said = [record.message for record in caplog.records if "starts from" in record.message]
    assert said == ["attempt 2 of 4 starts from the beginning, as there is no checkpoint"]


def _chained() -> None:
    try:
        raise lost()
    except dr.errors.NodeFailed as error:
        raise RuntimeError("the step failed") from error


def _within() -> None:
    try:
        raise dr.errors.ConnectionFailed("gone")
    except dr.errors.ConnectionFailed:
        raise KeyError("cleaning up")  # noqa: B904


def _hidden() -> None:
    try:
        raise lost()
    except dr.errors.NodeFailed:
        raise KeyError("something else") from None


def _raises(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_a_worker_that_is_away_for_longer_than_one_restart_waits(
    fresh_session: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine that starts anew takes long, say. Each wait is as long as the session's, and one restart."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    workers = [ListeningWorker(folders[0], "--listen", "tcp://127.0.0.1:0")]
    address = workers[0].address
    # This machine takes longer to start one.
    fresh_session(workers=[address]).patience = 0.5
    attempts = []

    def return_late() -> None:
        until(lambda: caplog.text.count("no replacement for node 0") >= 2)
        workers.append(ListeningWorker(folders[1], "--listen", address))

    returning = threading.Thread(target=return_late)

    def train(ckpt: Any) -> float:
        attempts.append(ckpt.attempt)
        x = torch.ones(3, device=REMOTE)
        if ckpt.attempt == 0:
            workers[0].process.kill()
            workers[0].process.wait()
            returning.start()
            until(lambda: x.sum().item() is None)
        return x.sum().item()

    try:
        assert dr.run_with_restarts(train, max_restarts=1000, checkpoint=tmp_path / "c") == 3
        assert attempts[0] == 0 and len(attempts) == 2 and attempts[1] >= 3
        assert "attempt 2 of 1001 waits for a replacement of node 0, 0.5 s at most" in caplog.text
        assert f"attempt 2 of 1001 ended: no replacement for node 0 appeared at {address}" in caplog.text
        assert f"within 0.5 s: distruntime-worker --listen {address}" in caplog.text
    finally:
        dr.shutdown()
        if returning.ident is not None:
            returning.join()
        for worker in workers:
            worker.stop()


def test_failed_restarts_have_an_end(fresh_session: Callable[..., Any], tmp_path: Path) -> None:
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0")
    try:
        fresh_session(workers=[worker.address]).patience = 0.2
        attempts = []

        def train(ckpt: Any) -> None:
            attempts.append(ckpt.attempt)
            x = torch.ones(3, device=REMOTE)
            worker.process.kill()
            worker.process.wait()
            until(lambda: x.sum().item() is None)

        with pytest.raises(
            dr.errors.ConnectionFailed, match=r"no replacement for node 0 appeared at .* within 0.2 s"
        ):
            dr.run_with_restarts(train, max_restarts=2, checkpoint=tmp_path / "c")
        assert attempts == [0]
    finally:
        dr.shutdown()
        worker.stop()


def test_restart_waits_as_long_as_the_session_does(fresh_session: Callable[..., Any], tmp_path: Path) -> None:
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0")
    try:
        fresh_session(workers=[worker.address], timeout=45.0)
        assert active_session().patience == 45
        active_session().patience = 0.3
        worker.stop()
        until(lambda: active_session().nodes[0].failed is not None)
        with pytest.raises(dr.errors.ConnectionFailed, match=r"within 0\.3 s"):
            dr.restart(0)
    finally:
        dr.shutdown()
        worker.stop()


CASES: dict[str, tuple[Callable[[], None], bool]] = {
    "lost": (_raises(lost()), True),
    "connection": (_raises(dr.errors.ConnectionFailed("gone")), True),
    "cause": (_chained, True),
    "context": (_within, True),
    "no context": (_hidden, False),
    "another error": (_raises(ValueError("mine")), False),
    "usage": (_raises(dr.errors.UsageError("mine")), False),
}


@pytest.mark.parametrize("case", CASES)
def test_which_errors_lead_to_another_attempt(session: object, tmp_path: Path, case: str) -> None:
    act, again = CASES[case]
    attempts = []

    def train(ckpt: Any) -> str:
        attempts.append(ckpt.attempt)
        if ckpt.attempt == 0:
            act()
        return "done"

    if again:
        assert dr.run_with_restarts(train, checkpoint=tmp_path) == "done" and attempts == [0, 1]
    else:
        with pytest.raises((KeyError, ValueError, dr.errors.UsageError)):
            dr.run_with_restarts(train, checkpoint=tmp_path)
        assert attempts == [0]


def test_ctrl_c_ends_it(session: object, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        dr.run_with_restarts(lambda ckpt: _raises(KeyboardInterrupt())(), checkpoint=tmp_path)


def test_what_an_attempt_leaves_is_gone_before_the_next(session: object, tmp_path: Path) -> None:
    gc.collect()
    before, held = slots(), []

    def train(ckpt: Any) -> None:
        held.append(slots() - before)
        if ckpt.attempt < 2:
            large = [torch.ones(10, device=REMOTE) for _ in range(5)]
            # Nobody reads of this failure.
            large[0][torch.tensor([99])]
            raise lost()

    dr.run_with_restarts(train, checkpoint=tmp_path)
    assert held == [0, 0, 0]
    dr.synchronize()


@pytest.mark.parametrize("max_restarts", [-1, 1.5, None, True, "3"])
def test_how_often_is_a_number(session: object, tmp_path: Path, max_restarts: Any) -> None:
    with pytest.raises(dr.errors.UsageError, match="max_restarts is a number of restarts, 0 or more, got"):
        dr.run_with_restarts(lambda ckpt: None, max_restarts=max_restarts, checkpoint=tmp_path)


def test_a_checkpoint_that_is_no_trainings(session: object, tmp_path: Path) -> None:
    dr.save({"mine": 1}, tmp_path)
    with pytest.raises(
        dr.errors.UsageError, match=r"was not saved by a training of run_with_restarts: dr\.load reads it"
    ):
        dr.run_with_restarts(lambda ckpt: ckpt.load(), checkpoint=tmp_path)


def test_random_states_go_on(fresh_session: Callable[..., Any], tmp_path: Path) -> None:
    fresh_session(simulate_cuda=1)

    def draws() -> list[torch.Tensor]:
        return [torch.rand(3), *(torch.rand(3, device=device).cpu() for device in places)]

    places = [f"remote:{k}" for k in range(4)]
    dr.manual_seed(3, distinct=True)

    def train(ckpt: Any) -> Any:
        if ckpt.attempt == 0:
            draws()
            ckpt.save({})
            kept.append(draws())
            raise lost()
        dr.manual_seed(99)
        torch.manual_seed(98)
        assert ckpt.load() == {}
        return draws()

    kept: list[list[torch.Tensor]] = []
    found = dr.run_with_restarts(train, checkpoint=tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(found, kept[0])) and len(found) == 5
