"""Replays among cuts, failures, other sessions and limits: each one runs once, as any instruction does."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from as_program import Case, replayed_as_eager
from network import Network
from processes import ListeningWorker, blocked, slots, until


def _state(device: Any) -> Any:
    torch.manual_seed(0)
    return SimpleNamespace(
        w=torch.randn(4, 4).to(device),
        h=torch.zeros(4, 4).to(device),
        p=torch.nn.Parameter(torch.randn(4, 4).to(device)),
    )


def _advance(box: Any, x: torch.Tensor) -> torch.Tensor:
    box.p.grad = None
    (torch.tanh(box.p) * x).sum().backward()
    box.w.add_(box.p.grad, alpha=0.1)
    box.h = torch.tanh(box.h + x)
    with torch.no_grad():
        box.p.sub_(box.p.grad * 0.5)
    return box.h.sum() + box.w[1]


def test_a_cut_amid_replays_loses_none_and_repeats_none(
    fresh_session: Callable[..., Any], tmp_path: Path
) -> None:
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0")
    try:
        with Network(worker.address) as network:
            fresh_session(workers=[network.address])
            mine, theirs = _state("cpu"), _state(REMOTE)
            program = dr.program(lambda x: _advance(theirs, x))
            expected, found = [], []
            for k in range(24):
                x = torch.full((4, 4), 0.1 * k)
                expected.append(_advance(mine, x))
                if k in (8, 16):
                    network.refuse()
                found.append(program(x.to(REMOTE)))
                if k in (10, 18):
                    network.mend()
            assert program.replays >= 20
            assert all(torch.equal(a.detach(), b.detach().cpu()) for a, b in zip(expected, found))
            assert torch.equal(mine.p.detach(), theirs.p.detach().cpu())
            dr.shutdown()
    finally:
        worker.stop()


def test_under_a_limit_of_memory_each_instruction_counts(
    fresh_session: Callable[..., Any], tmp_path: Path
) -> None:
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0", "--max-memory", "24MiB")
    try:
        fresh_session(workers=[worker.address])
        mine, theirs = _state("cpu"), _state(REMOTE)
        program = dr.program(lambda x: _advance(theirs, x))
        for k in range(8):
            x = torch.full((4, 4), 0.1 * k)
            assert torch.equal(_advance(mine, x).detach(), program(x.to(REMOTE)).detach().cpu())
        assert program.replays >= 4

        def large(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.repeat_interleave(1 << 12, output_size=1 << 22).sum(), n + 1

        program = dr.program(large)
        few = torch.ones(1 << 10, device=REMOTE)
        n = torch.zeros((), device=REMOTE)
        for _ in range(3):
            assert program(few, n)[0].item() == 1 << 22
        held = torch.ones(10 << 18, device=REMOTE)
        total, more = program(few, n)
        assert program.replays == 2 and more.item() == 1
        with pytest.raises(
            torch.OutOfMemoryError, match=r"max-memory[\s\S]*in the program 'large', replayed"
        ):
            total.item()
        del held, total
        assert program(few, n)[0].item() == 1 << 22
        dr.shutdown()
    finally:
        worker.stop()


def test_a_failure_poisons_what_depends_on_it_and_names_both_lines(session: object) -> None:
    emb, other = torch.randn(5, 3).to(REMOTE), torch.zeros(2, device=REMOTE)

    def look(i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = emb[i] * 2  # this line
        other.add_(1)
        return a + 1, other + 1

    program = dr.program(look)
    good, bad = torch.tensor([1, 2]).to(REMOTE), torch.tensor([1, 77]).to(REMOTE)
    for _ in range(3):
        program(good)
    for k in range(3):
        c, b = program(bad)  # that line
        # What does not depend on it is there.
        assert b.tolist() == [5.0 + 2 * k] * 2 == other.add(1).tolist()
        with pytest.raises(IndexError) as caught:
            c.cpu()
        text = str(caught.value)
        assert "index 77 is out of bounds" in text and "# this line\n" in text
        assert "in the program 'look', replayed at " in text and "# that line" in text
        c, b = program(good)
        assert torch.equal(c.cpu(), emb.cpu()[[1, 2]] * 2 + 1)
    assert program.replays == 7


def test_a_poisoned_argument_poisons_what_reads_it(session: object) -> None:
    w = torch.zeros(3, device=REMOTE)
    program = dr.program(lambda x, y: (x + 1, y.add_(1), w + 1))
    y = torch.zeros(3, device=REMOTE)
    for _ in range(3):
        program(torch.ones(3, device=REMOTE), y)
    bad = torch.ones(3, device=REMOTE)[torch.tensor([1, 9, 0], device=REMOTE)]
    a, b, c = program(bad, y)
    assert b.tolist() == [4.0] * 3 and c.tolist() == [1.0] * 3
    with pytest.raises(IndexError):
        a.tolist()
    assert program.replays == 2


def test_a_replay_that_is_dropped_poisons_all_that_it_would_write(session: object) -> None:
    box = _state(REMOTE)
    program = dr.program(lambda x: _advance(box, x))
    x = torch.ones(4, 4, device=REMOTE)
    for _ in range(5):
        program(x)
    with blocked(dr.default_stream(0, "cpu")):
        lost = program(x)
        dr.cancel(0)
    for tensor in (lost, box.w, box.h, box.p, box.p.grad):
        with pytest.raises(dr.errors.StreamCancelled):
            tensor.detach().cpu()


@pytest.mark.slow(reason="replays for 3 s")
def test_many_replays_count_in_the_window_as_what_they_do(session: Any) -> None:
    w = torch.zeros(3, device=REMOTE)

    def long(x: torch.Tensor) -> None:
        for _ in range(2000):
            w.add_(x)

    program = dr.program(long)
    x = torch.ones(3, device=REMOTE)
    for _ in range(2):
        program(x)
    node = session.nodes[0]
    dr.synchronize(0)
    with blocked(dr.default_stream(0, "cpu")):
        count = 0
        while not node.busy:
            program(x)
            count += 1
        assert count < 200
    assert w[0].item() == 2000 * (count + 2)


def test_a_program_that_nobody_holds_leaves_nothing_at_the_worker(session: Any) -> None:
    x = torch.ones(3, device=REMOTE)

    def use() -> None:
        program = dr.program(lambda x: x * 2 + 1)
        for _ in range(4):
            program(x)
        assert program.replays == 2

    use()
    node = session.nodes[0]
    # Programs of other tests leave nothing either.
    gc.collect()
    node.flush()
    before = slots()
    taught = len(node.templates)
    for _ in range(3):
        use()
    gc.collect()
    node.flush()
    assert slots() == before and len(node.templates) == taught


def test_a_program_of_two_nodes_names_the_one_that_is_lost(fresh_session: Callable[..., Any]) -> None:
    session = fresh_session(world_size=2)
    w = torch.ones(3).to(dr.place(1, "cpu"))
    program = dr.program(lambda x: (x * 2, x.to(w.device) + w))
    x = torch.ones(3).to(dr.place(0, "cpu"))
    for _ in range(4):
        _, there = program(x)
    assert program.replays == 2 and there.tolist() == [2.0] * 3
    os.kill(session.nodes[1].welcome.pid, signal.SIGKILL)
    until(lambda: session.nodes[1].failed is not None)
    with pytest.raises(dr.errors.NodeFailed, match="node 1"):
        program(x)
    assert (x + 1).tolist() == [2.0] * 3


# -- two sessions --------------------------------------------------------------------------------------------

OTHER = """
import sys, torch
import distruntime as dr
from test_hard_times import in_a_shared_worker
torch.set_num_threads(1)
dr.init_master_worker(workers=[sys.argv[1]])
print("ready", flush=True)
sys.stdin.readline()
print("replays", in_a_shared_worker(7), flush=True)
dr.shutdown()
"""


def in_a_shared_worker(seed: int) -> int:
    """Replay a step that draws, carries state and trains, and compare; return how often it was replayed."""

    def make() -> Case:
        box, streams = _state(REMOTE), [dr.Stream()]

        def step(x: torch.Tensor) -> torch.Tensor:
            with streams[0]:
                drawn = torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)
            return _advance(box, drawn)

        return Case(step, lambda k: (torch.full((4, 4), 0.1 * k).to(REMOTE),), lambda: (box.w, box.h, box.p))

    return int(replayed_as_eager(make, calls=25, seed=seed).replays)


@pytest.mark.slow(reason="a second master imports torch")
def test_two_sessions_replay_programs_on_one_worker(
    fresh_session: Callable[..., Any], tmp_path: Path
) -> None:
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0")
    paths = [*sys.path, str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, worker.address],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        fresh_session(workers=[worker.address])
        assert other.stdin is not None and other.stdout is not None
        while "ready" not in (line := other.stdout.readline()):
            assert line
        other.stdin.write("go\n")
        other.stdin.flush()
        assert in_a_shared_worker(3) >= 20
        found, _ = other.communicate(timeout=100)
        assert "replays 2" in found
        dr.shutdown()
    finally:
        other.kill()
        other.wait()
        worker.stop()
