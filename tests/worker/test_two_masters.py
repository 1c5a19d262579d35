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
from processes import PATH, ListeningWorker, until

REMOTE = "remote"

# A training that always has work at the worker, however little of this machine's time its master gets: who is
# held up before it issues more has no claim to turns. So its stream is blocked until all is issued, here and
# by the other master. The worker answers the question of turns only after it has read what came before it.
# Then the master only notes, again and again, what the worker counts as each session's turns.
# Each training has a second of work and more, as a session that was idle may get 0.1 s before the other one.
TRAIN = """
import json, sys
from pathlib import Path
import torch, distruntime as dr
from distruntime.session.session import active_session
from distruntime.wire.messages import AskTurns
from processes import blocked, pause, until
address, me, other, steps = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
dr.init_master_worker(workers=[address])
session = active_session()
torch.manual_seed(0)
first, last = torch.nn.Linear(64, 128), torch.nn.Linear(128, 1)
model = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Dropout(0.1), last).to("remote")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x, y, losses = torch.randn(2048, 64, device="remote"), torch.randn(2048, 1, device="remote"), []
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
until(other.exists, 200)
with blocked(dr.default_stream(0, "cpu")):
    for k in range(20, 20 + steps):
        step(k)
    coming = [dr.fetch_async(loss) for loss in losses]
    notes = [turns()]
    me.with_suffix(".issued").touch()
    until(other.with_suffix(".issued").exists, 200)
while not coming[-1].done():
    notes.append(turns())
    pause(0.005)
notes.append(turns())
print(json.dumps([session.name, [loss.result().item() for loss in coming], notes]))
me.with_suffix(".done").touch()
# Who is alone takes no turns, and would be counted as if it had.
until(other.with_suffix(".done").exists, 200)
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


@pytest.mark.slow(reason="two masters train long enough for their shares to show")
@pytest.mark.timeout(300)  # three masters import torch
def test_two_masters_train_at_once_in_fair_turns(daemon: ListeningWorker, tmp_path: Path) -> None:
    marks = [str(tmp_path / "a"), str(tmp_path / "b")]
    masters = [begin(daemon.address, marks[k], marks[1 - k], "300") for k in range(2)]
    said = [json.loads(master.communicate(timeout=250)[0].splitlines()[-1]) for master in masters]
    alone = begin(daemon.address, marks[0], marks[0], "300")
    alone_losses = json.loads(alone.communicate(timeout=250)[0].splitlines()[-1])[1]
    assert said[0][1] == said[1][1] == alone_losses  # neither has seen the other
    # The worker's counts only grow, so their sums put the notes of both masters in order. The share counts
    # the time in which both had work: both had begun, and neither had done its last step. A master that hears
    # late of its end would count what the other did alone after it.
    names = {name for name, _, _ in said}
    notes = sorted((note for _, _, own in said for note in own), key=lambda note: sum(note.values()))
    assert all(set(note) == names for note in notes)
    began = {name: own[0][name] for name, _, own in said}
    ended = {name: own[-1][name] for name, _, own in said}
    both = [note for note in notes if all(began[name] < note[name] < ended[name] for name in names)]
    seconds = {name: both[-1][name] - both[0][name] for name in names}
    # The notes cover most of what was to do.
    assert sum(seconds.values()) > 0.5 * sum(ended[name] - began[name] for name in names), both
    for name in names:
        assert 0.45 < seconds[name] / sum(seconds.values()) < 0.55, both


@pytest.mark.timeout(300)
@pytest.mark.slow(reason="starts two masters, 9 s")
def test_who_exceeds_its_share_harms_only_itself(daemon: ListeningWorker, tmp_path: Path) -> None:
    marks = [str(tmp_path / "a"), str(tmp_path / "b")]
    Path(marks[1]).touch()
    Path(marks[1]).with_suffix(".done").touch()
    other = begin(daemon.address, marks[0], marks[1], "200")
    dr.init_master_worker(workers=[daemon.address])
    # The other one has all its steps to do when it may begin.
    until(Path(marks[0]).with_suffix(".issued").exists, 200)
    Path(marks[1]).with_suffix(".issued").touch()
    kept = []
    with pytest.raises(RuntimeError, match=r"may hold 64\.0 MiB on cpu of .* \(--max-memory\)") as caught:
        for _ in range(20):
            kept.append(torch.ones(1 << 20, device=REMOTE))  # 4 MiB
            kept[-1].sum().item()
    assert isinstance(caught.value, (torch.OutOfMemoryError, dr.errors.RemoteError)) and 14 <= len(kept) <= 18
    del kept[-2:]  # room for the result of what follows, also where the last one was refused itself
    assert kept[0].sum().item() == 1 << 20
    del kept, caught
    assert torch.ones(1 << 20, device=REMOTE).sum().item() == 1 << 20
    _, losses, _ = json.loads(other.communicate(timeout=250)[0].splitlines()[-1])
    assert len(losses) == 22 and losses[-1] < losses[0]
