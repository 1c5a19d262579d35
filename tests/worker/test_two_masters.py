"""Two sessions at work on one daemon: fair turns, separate memory, and one that exceeds its share harms only
itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import distruntime as dr
from processes import PATH, ListeningWorker

REMOTE = "remote"

# A training that runs ahead of the worker, so that it always has work there, however little of this machine's
# time its master gets: who reads a loss and is then held up has no claim to turns. The marks make both train
# at the same time, whoever started first.
TRAIN = """
import json, sys
from pathlib import Path
import torch, distruntime as dr
from distruntime.wire.messages import AskTurns
from processes import until
address, me, other, steps = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
session = dr.init_master_worker(workers=[address])
torch.manual_seed(0)
first, last = torch.nn.Linear(64, 128), torch.nn.Linear(128, 1)
model = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Dropout(0.1), last).to("remote")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x, y, losses = torch.randn(256, 64, device="remote"), torch.randn(256, 1, device="remote"), []
def step(k):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    if k % 10 == 9:
        losses.append(loss.detach())
for k in range(20):
    step(k)
def turns():
    return {name: seconds for name, _, seconds in session.value(session.ask(session.nodes[0], AskTurns))}
me.touch()
until(other.exists)
before = turns()
for k in range(20, 20 + steps):
    step(k)
losses = [loss.item() for loss in losses]
after = turns()
print(json.dumps([session.name, losses, {name: after[name] - before.get(name, 0.0) for name in after}]))
me.with_suffix(".done").touch()
until(other.with_suffix(".done").exists)  # who is alone takes no turns, and would be counted as if it had
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ListeningWorker]:
    started = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0", "--max-memory", "64MiB")
    yield started
    dr.shutdown()
    started.stop()


def begin(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", TRAIN, *arguments], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_two_masters_train_at_once_in_fair_turns(daemon: ListeningWorker, tmp_path: Path) -> None:
    marks = [str(tmp_path / "a"), str(tmp_path / "b")]
    masters = [begin(daemon.address, marks[k], marks[1 - k], "300") for k in range(2)]
    said = [json.loads(master.communicate(timeout=110)[0].splitlines()[-1]) for master in masters]
    alone = begin(daemon.address, marks[0], marks[0], "300")
    alone_losses = json.loads(alone.communicate(timeout=110)[0].splitlines()[-1])[1]
    assert said[0][1] == said[1][1] == alone_losses  # neither has seen the other
    for name, _, seconds in said:
        assert set(seconds) == {said[0][0], said[1][0]}
        assert 0.45 < seconds[name] / sum(seconds.values()) < 0.55, (
            seconds
        )  # 0.474 to 0.526 on two cores with load 8


def test_who_exceeds_its_share_harms_only_itself(daemon: ListeningWorker, tmp_path: Path) -> None:
    marks = [str(tmp_path / "a"), str(tmp_path / "b")]
    Path(marks[1]).touch()
    Path(marks[1]).with_suffix(".done").touch()
    other = begin(daemon.address, marks[0], marks[1], "200")
    dr.init_master_worker(workers=[daemon.address])
    kept = []
    with pytest.raises(RuntimeError, match=r"may hold 64\.0 MiB on cpu of .* \(--max-memory\)") as caught:
        for _ in range(20):
            kept.append(torch.ones(1 << 20, device=REMOTE))  # 4 MiB
            kept[-1].sum().item()
    assert isinstance(caught.value, (torch.OutOfMemoryError, dr.RemoteError)) and 14 <= len(kept) <= 18
    del kept[-1]  # room for the result of what follows
    assert kept[0].sum().item() == 1 << 20
    del kept, caught
    assert torch.ones(1 << 20, device=REMOTE).sum().item() == 1 << 20
    _, losses, _ = json.loads(other.communicate(timeout=110)[0].splitlines()[-1])
    assert len(losses) == 22 and losses[-1] < losses[0]
