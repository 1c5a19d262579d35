"""Replays among cuts, failures, other sessions and limits: each one runs once, as any instruction does."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from network import Network
from processes import ListeningWorker, blocked, slots


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
        with pytest.raises(dr.StreamCancelled):
            tensor.detach().cpu()


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
    before, node = slots(), session.nodes[0]
    taught = len(node.templates)
    for _ in range(3):
        use()
    gc.collect()
    node.flush()
    assert slots() == before and len(node.templates) == taught


# -- random programs -----------------------------------------------------------------------------------------

ACTS = (
    "add mul mm relu number iadd imul icopy fill view t row irow dropout rand normal sum drop carry swap "
    "grad split fail"
).split()


class Box:
    """What a random program keeps between its calls."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.w, self.s, self.v = (torch.randn(4, 4).to(REMOTE) for _ in range(3))
        self.p = torch.nn.Parameter(torch.randn(4, 4).to(REMOTE))
        self.kept = torch.zeros(4, 4, device=REMOTE)


def _run(acts: list[tuple[str, int, int, float]], box: Box, x: torch.Tensor, index: torch.Tensor) -> Any:
    pool = [x, box.w, box.s, box.v]
    for act, i, j, f in acts:
        u, v = pool[i % len(pool)], pool[j % len(pool)]
        own = (box.w, box.s, box.v)[i % 3]
        match act:
            case "add":
                pool.append(u + v)
            case "mul":
                pool.append(torch.tanh(u * v))
            case "mm":
                pool.append(torch.tanh(u @ v))
            case "relu":
                pool.append(torch.relu(u))
            case "number":
                pool.append(u * f + f)
            case "iadd":
                own.add_(torch.tanh(v), alpha=f)
            case "imul":
                own.mul_(0.5)
            case "icopy":
                own.copy_(torch.tanh(v))
            case "fill":
                own.fill_(f)
            case "view":
                pool.append(own.view(16).view(4, 4) if own.is_contiguous() else own.clone())
            case "t":
                pool.append(own.t())
            case "row":
                pool.append(own[i % 4].clone().expand(4, 4))
            case "irow":
                own[i % 4].add_(f)
            case "dropout":
                pool.append(torch.nn.functional.dropout(u, 0.3))
            case "rand":
                pool.append(torch.rand(4, 4, device=u.device))
            case "normal":
                own.normal_()
            case "sum":
                pool.append(torch.tanh(u.sum()).expand(4, 4))
            case "drop" if len(pool) > 5:
                pool.pop(4)
            case "carry":
                box.kept = torch.tanh(box.kept + u)
                pool.append(box.kept)
            case "swap":
                box.s, box.v = box.v, box.s
            case "split":
                pool.append(torch.cat(u.split(2)[::-1]))
            case "fail":
                pool.append(u[index])
            case "grad":
                (torch.tanh(box.p) * v.detach()).sum().backward()
                assert box.p.grad is not None
                pool.append(box.p.grad.clone())
                if i % 2:
                    box.p.grad = None
    return pool[-1], pool[4:6], {"w": box.w}


def _outcome(box: Box, out: Any) -> Iterator[object]:
    last, some, named = out
    for tensor in (last, *some, named["w"], box.w, box.s, box.v, box.p, box.kept, box.p.grad):
        try:
            yield None if tensor is None else tensor.detach().cpu()
        except IndexError:
            yield "failed"


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_are_equal_to_eager(session: object, seed: int) -> None:
    choose = random.Random(seed)
    acts = [
        (choose.choice(ACTS), choose.randrange(1 << 20), choose.randrange(1 << 20), round(choose.random(), 3))
        for _ in range(choose.randrange(4, 25))
    ]
    data = [torch.randn(4, 4).to(REMOTE) for _ in range(3)]
    good, bad = (torch.tensor([0, k, 1, 2], device=REMOTE) for k in (3, 9))
    seen: list[list[object]] = []
    for replayed in (False, True):
        box = Box(seed)
        dr.manual_seed(seed)

        def step(x: torch.Tensor, index: torch.Tensor, box: Box = box) -> Any:
            return _run(acts, box, x, index)

        act: Any = dr.program(step) if replayed else step
        found: list[object] = []
        for k in range(10):
            out = act(data[k % 3], bad if k == 7 else good)
            found += [k, *_outcome(box, out)]
            del out
        seen.append(found)
    for k, (one, other) in enumerate(zip(*seen, strict=True)):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            assert torch.equal(one, other) or (one.isnan() == other.isnan()).all(), (k, acts)
        else:
            assert one == other, (k, acts)
    assert act.replays >= 6 and not act.why
    # A failure that nothing depends on is still to be told.
    with suppress(IndexError):
        dr.synchronize()
