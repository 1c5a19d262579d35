"""Who holds memory on the workers: `dr.memory()`, and what an allocation that fails says about it."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from agree import REMOTE
from distruntime.session.holders import tracked
from distruntime.session.tables import curve
from processes import Child, ListeningWorker, slots, until

K = 256  # floats in a KiB
TOO_MUCH = 1 << 50  # floats: no machine has 4 PiB, so that this fails at once
# A line of this file, whose path may have blanks.
LINE = re.escape(__file__) + r":\d+"


@pytest.fixture(scope="module", autouse=True)
def _a_session_of_this_file() -> Iterator[None]:
    dr.shutdown()
    yield
    dr.shutdown()


@pytest.fixture(autouse=True)
def _nothing_held(_a_session_of_this_file: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes with a simulated GPU each, and nothing on them.

    pytest keeps a test that failed, with all that it holds.

    The figures are a worker's, and `dr.memory()` does without them after a second. No test here is about
    that, so they may take a minute on a busy machine.
    """
    monkeypatch.setenv("DISTRUNTIME_ASK_TIMEOUT", "60")
    gc.collect()
    if not dr.is_initialized() or len(dr.memory().devices) != 4 or dr.memory().lines:
        dr.shutdown()
        dr.init_master_worker(world_size=2, simulate_cuda=1)


def by_line(memory: dr.types.Memory) -> list[tuple[int, int, str, str]]:
    """Return (KiB, tensors, place, source) of each line."""
    return [(h.nbytes // 1024, h.tensors, str(h.place), h.line.partition("   ")[2]) for h in memory.lines]


def sizes(memory: dr.types.Memory) -> list[tuple[int, int]]:
    """Return (KiB, tensors) of each line."""
    return [row[:2] for row in by_line(memory)]


# dr.memory


def test_devices_have_memory_and_values() -> None:
    kept = [torch.ones(4 * K, device=REMOTE) for _ in range(3)]
    with dr.on(1, "cpu"):
        other = torch.ones(8 * K)
    devices = dr.memory().devices
    assert [(str(d.place), d.values, d.held) for d in devices] == [
        ("node 0 cpu", 0, 0),
        ("node 0 cuda:0", 3, 12 * 1024),
        ("node 1 cpu", 1, 8 * 1024),
        ("node 1 cuda:0", 0, 0),
    ]
    assert all(0 < d.free <= d.total and d.allocated == d.reserved == 0 for d in devices)
    assert len(kept) + other.dim() == 4  # alive until here


def test_bytes_are_summed_by_the_line_that_made_them() -> None:
    many = [torch.ones(4 * K, device=REMOTE) for _ in range(12)]
    one = torch.ones(100 * K, device=REMOTE)
    with dr.on(1, "cpu"):
        there = [*many, torch.ones(2 * K)]
    assert by_line(dr.memory()) == [
        (100, 1, "node 0 cuda:0", "one = torch.ones(100 * K, device=REMOTE)"),
        (48, 12, "node 0 cuda:0", "many = [torch.ones(4 * K, device=REMOTE) for _ in range(12)]"),
        (2, 1, "node 1 cpu", "there = [*many, torch.ones(2 * K)]"),
    ]
    assert len(there) + one.dim() == 14


def test_a_line_that_makes_tensors_in_two_places_has_a_row_for_each() -> None:
    places = dr.place(0, "cpu"), dr.place(0, "cuda:0"), dr.place(1, "cuda:0")
    kept = []
    for place in (*places, *places):
        with dr.on(place):
            kept.append(torch.ones(K))
    assert [row[:3] for row in by_line(dr.memory())] == [
        (2, 2, place) for place in ("node 0 cpu", "node 0 cuda:0", "node 1 cuda:0")
    ] and len(kept) == 6


def test_views_count_once_with_their_base() -> None:
    base = torch.ones(16 * K, device=REMOTE)
    views = [base[:K], base.view(16, K).t(), base[K:].view(torch.int32), base.detach(), base.split(K)]
    memory = dr.memory()
    assert by_line(memory) == [(16, 1, "node 0 cuda:0", "base = torch.ones(16 * K, device=REMOTE)")]
    assert memory.devices[1].values > 16 and len(views) == 5


def test_a_small_view_keeps_all_of_a_base_that_nobody_has_any_more() -> None:
    base = torch.ones(16 * K, device=REMOTE)
    view = base[:4].detach()
    del base
    memory = dr.memory()
    assert by_line(memory) == [(16, 1, "node 0 cuda:0", "view = base[:4].detach()")]
    assert memory.devices[1].values == 1 and view.shape == (4,)


def test_a_tensor_that_grows_counts_with_its_new_size() -> None:
    x = torch.ones(K, device=REMOTE)
    x.resize_(8 * K)
    assert sizes(dr.memory()) == [(8, 1)]


def test_results_whose_shape_the_worker_tells_count() -> None:
    x = torch.ones(4 * K, device=REMOTE)
    places = x.nonzero()  # 8 bytes each
    assert sizes(dr.memory()) == [(8, 1), (4, 1)] and places.shape == (4 * K, 1)


def test_gradients_and_what_backward_needs_count_under_the_line_of_the_step() -> None:
    model = nn.Linear(16, 16, bias=False).to(REMOTE)
    loss = model(torch.ones(16, 16, device=REMOTE)).square().mean()
    before = sum(row[0] for row in sizes(dr.memory()))
    loss.backward()
    del loss
    assert before == 1 + 1 + 1 and sizes(dr.memory()) == [
        (1, 1),
        (1, 1),
    ]  # weight, input, output to square; weight and its gradient


class Tower(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(K, 1, bias=False), nn.Linear(K, 2, bias=False)])
        self.head = nn.Linear(K, 4, bias=False)


def test_layers_hold_parameters_gradients_and_their_optimizers_state() -> None:
    model = Tower().to(REMOTE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = torch.ones(K, device=REMOTE)
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    found = dr.memory(0, by="module")
    assert {(h.line, h.nbytes // 1024, h.tensors) for h in found.lines} == {
        *((f"Tower.{name}", size, 1) for name, size in (("blocks.0", 1), ("blocks.1", 2), ("head", 4))),
        *((f"Tower.{name}, gradients", k, 1) for name, k in (("blocks.0", 1), ("blocks.1", 2), ("head", 4))),
        *((f"Tower.{n}, state of SGD", k, 1) for n, k in (("blocks.0", 1), ("blocks.1", 2), ("head", 4))),
    }
    text = repr(dr.memory(0, by="module", top=2))
    assert "  layer\n" in text and "7 more layers, and what no module has" in text
    assert other.numel() == K
    with pytest.raises(dr.errors.UsageError, match='got by=\'layer\', expected "line", "module"'):
        dr.memory(by="layer")  # type: ignore[arg-type]


def test_an_allocation_that_fails_names_the_layers() -> None:
    model = Tower().to(REMOTE)
    with pytest.raises(RuntimeError, match=r"by layers: 4\.0 KiB Tower\.head, 2\.0 KiB Tower\.blocks\.1, "):
        torch.ones(TOO_MUCH, device=REMOTE).sum().item()
    assert len(model.blocks) == 2


def test_only_the_biggest_are_named() -> None:
    a = torch.ones(3 * K, device=REMOTE)
    b = torch.ones(2 * K, device=REMOTE)
    c = torch.ones(1 * K, device=REMOTE)
    memory = dr.memory(top=1)
    assert sizes(memory) == [(3, 1)] and memory.left_out == 2
    assert repr(memory).splitlines()[-1].split() == "3.0 KiB 2 more lines".split()
    assert dr.memory(top=3).left_out == 0
    assert a.dim() + b.dim() + c.dim() == 3


def test_one_node_alone() -> None:
    here = torch.ones(K, device=REMOTE)
    there = here.to(node=1)
    memory = dr.memory(1)
    assert [str(d.place) for d in memory.devices] == ["node 1 cpu", "node 1 cuda:0"]
    assert [row[2] for row in by_line(memory)] == ["node 1 cuda:0"] and there.dim() == 1
    with pytest.raises(dr.errors.PlacementError, match="no node 5"):
        dr.memory(5)


def test_it_prints_as_tables() -> None:
    x = [torch.ones(2 * K, device=REMOTE) for _ in range(2)]
    text = re.sub(r"\d+\.\d GiB", "# GiB", repr(dr.memory()))
    assert re.sub(LINE, "test_memory.py:LINE", re.sub(r" +", " ", text)) == (
        " node device total free values held\n"
        " 0 cpu # GiB # GiB 0 0 B\n"
        " 0 cuda:0 # GiB # GiB 2 4.0 KiB\n"
        " 1 cpu # GiB # GiB 0 0 B\n"
        " 1 cuda:0 # GiB # GiB 0 0 B\n"
        "\n"
        " held tensors where made by\n"
        " 4.0 KiB 2 node 0 cuda:0 test_memory.py:LINE x = [torch.ones(2 * K, device=REMOTE) for _ in "
        "range(2)]"
    )
    page = dr.memory()._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 2 and "<td>node 0 cuda:0</td>" in page
    assert len(x) < 3 and "range(2)]" in page  # "<" is in this line, and not in the page as such
    assert "<td>node 0 cpu</td>" not in page


def test_source_is_text_in_a_notebook() -> None:
    x = torch.ones(K, device=REMOTE) if 1 < 2 else None
    page = dr.memory()._repr_html_()
    assert "if 1 &lt; 2 else None" in page and "1 < 2" not in page and x is not None


def test_poisoned_values_hold_nothing() -> None:
    good = torch.ones(K, device=REMOTE)
    bad = good[torch.tensor([9999])]
    worse = [torch.zeros(K, device=REMOTE) + bad for _ in range(3)]
    with pytest.raises(IndexError):
        worse[-1].cpu()
    assert by_line(dr.memory()) == [(1, 1, "node 0 cuda:0", "good = torch.ones(K, device=REMOTE)")]


def test_asking_keeps_nothing_alive() -> None:
    before = slots()
    gc.disable()
    try:
        x = torch.ones(K, device=REMOTE)
        memory = dr.memory()
        assert sizes(memory) == [(1, 1)]
        del x
        assert slots() == before and memory.lines
    finally:
        gc.enable()


def test_asking_disturbs_no_other_thread() -> None:
    """Python refuses to finish a tuple that somebody else has a reference to."""
    kept = torch.ones(K, device=REMOTE)
    begun, go_on, built = threading.Event(), threading.Event(), list[object]()

    def slowly() -> Iterator[int]:
        yield 0
        begun.set()
        assert go_on.wait(60)
        yield 1

    def build() -> None:
        try:
            built.append(tuple(slowly()))
        except SystemError as error:
            built.append(error)

    def let_it_go_on(frame: FrameType, event: str, called: Any) -> None:
        if event == "return" and frame.f_code is tracked.__code__:  # it has found what it looks at
            go_on.set()
            thread.join(60)

    thread = threading.Thread(target=build)
    thread.start()
    assert begun.wait(60)
    sys.setprofile(let_it_go_on)
    try:
        memory = dr.memory()
    finally:
        sys.setprofile(None)
    assert built == [(0, 1)] and sizes(memory) == [(1, 1)] and kept.dim() == 1


def test_a_lost_node_is_left_out(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2)
    kept = torch.ones(K, device=REMOTE)
    os.kill(dr.nodes()[1].pid, signal.SIGKILL)
    until(lambda: dr.nodes()[1].state == "lost")
    memory = dr.memory()
    assert (
        [str(d.place) for d in memory.devices] == ["node 0 cpu"]
        and sizes(memory) == [(1, 1)]
        and kept.dim() == 1
    )
    with pytest.raises(dr.errors.NodeFailed):
        dr.memory(1)


# An allocation that fails


def text_of(code: Callable[[], object], kind: type[Exception] = RuntimeError) -> list[str]:
    """Return the lines of the error that `code` raises, without what differs between machines."""
    with pytest.raises(kind) as caught:
        code()
    assert isinstance(caught.value, dr.errors.RemoteError)
    text = str(caught.value).replace(socket.gethostname(), "HOST")
    text = re.sub(r"^\[enforce fail at \w+\.cpp:\d+\] .*?DefaultCPUAllocator", "DefaultCPUAllocator", text)
    return re.sub(LINE, "test_memory.py:LINE", text).splitlines()


def test_an_allocation_that_fails_names_the_allocators_figures_and_who_holds_memory() -> None:
    many = [torch.ones(4 * K, device=REMOTE) for _ in range(12)]
    one = torch.ones(100 * K, device="remote:1")  # simulated GPUs are main memory too
    huge = torch.empty(TOO_MUCH, device=REMOTE)
    assert text_of(lambda: huge.sum().item()) == [
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4503599627370496 bytes. Error "
        "code 12 (Cannot allocate memory)",
        "  aten::empty.memory_format on node 0 (HOST)",
        "  issued at test_memory.py:LINE   huge = torch.empty(TOO_MUCH, device=REMOTE)",
        '  held there: 100.0 KiB by test_memory.py:LINE   one = torch.ones(100 * K, device="remote:1")'
        "  # simulated GPUs are main memory too (1 tensor)",
        "  held there: 48.0 KiB by test_memory.py:LINE   many = [torch.ones(4 * K, device=REMOTE) for _ in "
        "range(12)] (12 tensors)",
    ]
    assert (many[0] + 1).sum().item() == 8 * K and one.dim() == 1  # the worker lives


def test_an_operators_own_memory_fails_the_same_way() -> None:
    row = torch.ones(1 << 25, 1, device=REMOTE)
    # The product would take 4 PiB.
    lines = text_of(lambda: (row @ row.t()).sum().item())
    assert lines[0].startswith("DefaultCPUAllocator: can't allocate memory") and "aten::mm" in lines[1]
    assert lines[2:] == [
        "  called from test_memory.py:LINE   lines = text_of(lambda: (row @ row.t()).sum().item())",
        "  called from test_memory.py:LINE   code()",
        "  issued at test_memory.py:LINE   lines = text_of(lambda: (row @ row.t()).sum().item())",
        "  held there: 128.0 MiB by test_memory.py:LINE   row = torch.ones(1 << 25, 1, device=REMOTE) (1 "
        "tensor)",
    ]


def test_an_upload_that_finds_no_memory_fails_the_same_way() -> None:
    kept = torch.ones(K, device=REMOTE)
    local = torch.ones(64 << 18)
    pid = dr.nodes()[0].pid
    before = resource.prlimit(pid, resource.RLIMIT_AS)  # type: ignore[attr-defined]
    mapped = 4096 * int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (mapped + (80 << 20), before[1]))  # type: ignore[attr-defined]
    try:
        # It needs 64 MiB twice: to see it, and to keep it.
        lines = text_of(lambda: local.to(REMOTE).sum().item(), OSError)
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)  # type: ignore[attr-defined]
    assert "annot allocate memory" in lines[0] and lines[1].startswith("  upload on node 0")
    assert lines[2:] == [
        "  called from test_memory.py:LINE   lines = text_of(lambda: local.to(REMOTE).sum().item(), OSError)",
        "  called from test_memory.py:LINE   code()",
        "  issued at test_memory.py:LINE   lines = text_of(lambda: local.to(REMOTE).sum().item(), OSError)",
        "  held there: 1.0 KiB by test_memory.py:LINE   kept = torch.ones(K, device=REMOTE) (1 tensor)",
    ]
    assert local.to(REMOTE).sum().item() == 64 << 18 and kept.dim() == 1


def test_only_what_was_there_when_it_failed_is_named() -> None:
    gone = torch.ones(50 * K, device=REMOTE)
    with dr.on(1):
        elsewhere = torch.ones(60 * K)
    there = torch.ones(10 * K, device=REMOTE)
    first = torch.empty(TOO_MUCH, device=REMOTE)
    dependent = first * 2
    again = torch.empty(TOO_MUCH, device=REMOTE)
    later = torch.ones(70 * K, device=REMOTE)
    del gone
    for poisoned in (dependent, again):
        lines = text_of(lambda poisoned=poisoned: poisoned.sum().item())  # type: ignore[misc]
        assert lines[3:] == [
            "  held there: 10.0 KiB by test_memory.py:LINE   there = torch.ones(10 * K, device=REMOTE) (1 "
            "tensor)"
        ]
    assert elsewhere.dim() + later.dim() + there.dim() == 3


def test_many_holders_are_summed_up() -> None:
    kept = [
        torch.ones(8 * K, device=REMOTE),
        torch.ones(7 * K, device=REMOTE),
        torch.ones(6 * K, device=REMOTE),
        torch.ones(5 * K, device=REMOTE),
        torch.ones(4 * K, device=REMOTE),
        torch.ones(3 * K, device=REMOTE),
        torch.ones(2 * K, device=REMOTE),
    ]
    huge = torch.empty(TOO_MUCH, device=REMOTE)
    held = text_of(lambda: huge.sum().item())[3:]
    assert [line.split()[2] for line in held] == ["8.0", "7.0", "6.0", "5.0", "4.0", "5.0"] and len(kept) == 7
    assert held[-1] == "  held there: 5.0 KiB by 2 more lines; dr.memory(0) lists them"


def test_a_failure_that_nobody_reads_says_it_too() -> None:
    kept = torch.ones(K, device=REMOTE)
    huge = torch.empty(TOO_MUCH, device=REMOTE)
    lines = text_of(dr.synchronize)
    assert lines[3:] == [
        "  held there: 1.0 KiB by test_memory.py:LINE   kept = torch.ones(K, device=REMOTE) (1 tensor)"
    ]
    dr.synchronize()
    assert kept.sum().item() == K and huge.dim() == 1


def test_other_errors_do_not_speak_of_memory() -> None:
    x = torch.ones(3, device=REMOTE)
    with pytest.raises(IndexError) as caught:
        x[torch.tensor([7])].cpu()
    assert "held there" not in str(caught.value)


@pytest.mark.slow(reason="fails an allocation at each place in turn, 27 s")
def test_an_allocation_that_fails_leaves_nothing_behind() -> None:
    def code() -> None:
        kept = torch.ones(K, device=REMOTE)
        huge = torch.empty(TOO_MUCH, device=REMOTE)
        with pytest.raises(RuntimeError, match=r"held there: 1\.0 KiB"):
            huge.sum().item()
        assert kept.dim() == 1

    code()
    before = slots()
    gc.disable()
    try:
        code()
        assert slots() == before
    finally:
        gc.enable()


# by session


def test_what_sessions_hold_is_told_as_a_total_of_the_others(tmp_path: Path, own_state: None) -> None:
    dr.shutdown()
    worker = ListeningWorker(tmp_path, "--listen", f"ipc://{tmp_path}/worker")
    try:
        with Child(holds_on, worker.address) as child:
            child.expect("holds")
            dr.init_master_worker(workers=[worker.address], session="mine")
            x = torch.ones(K, device=REMOTE)
            dr.synchronize()
            memory = dr.memory(by="session")
            assert [(m.yours, m.sessions, m.nbytes) for m in memory.sessions] == [
                (False, 1, 16384),
                (True, 1, 1024),
            ]
            text = repr(memory)
            assert "1 other session" in text and "this one" in text and "secret" not in text
            del x
            dr.shutdown()
    finally:
        dr.shutdown()
        worker.stop()


def holds_on(address: str) -> None:
    """Child: a session that holds 16 KiB."""
    dr.init_master_worker(workers=[address], session="secret", quiet=True)
    kept = torch.ones(4096, device=REMOTE)
    dr.synchronize()
    print("holds", flush=True)
    sys.stdin.readline()
    del kept


def test_memory_is_by_one_of_three() -> None:
    with pytest.raises(dr.errors.UsageError, match='expected "line", "module" or "session"'):
        dr.memory(by="day")  # type: ignore[arg-type]


def test_a_curve_keeps_peaks() -> None:
    assert curve([0, 0, 8, 0, 0, 0], 3) == "▁█▁"
    assert curve([5, 5], 40) == "▁▁" and curve([], 4) == ""
    assert curve(list(range(8)), 8) == "▁▂▃▄▅▆▇█"
