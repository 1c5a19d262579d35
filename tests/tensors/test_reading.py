"""Reading values: every way there is, what it waits for and what it does not.

The last part is about what the master can learn about its waits.
"""

from __future__ import annotations

import concurrent.futures
import functools
import io
import math
import os
import re
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.operators import defined
from distruntime.session.session import active_session
from distruntime.session.stalls import Stall, Stalls
from distruntime_worker.session.config import WorkerConfig
from distruntime_worker.session.daemon import serve
from processes import processor_seconds, slots, stop, stopped, until, waits_less


@contextmanager
def occupied(node: int = 0) -> Iterator[torch.Tensor]:
    """Keep a worker computing, in steps of milliseconds, for the length of a `with` block.

    Yield what it computes in the end.
    """
    with dr.on(node):
        x = torch.ones(500, 500, device=REMOTE)
    for _ in range(4_000):  # ten seconds and more, of which most is dropped
        x = x @ x * 1e-4
    try:
        yield x
    finally:
        dr.default_stream(node, "cpu").cancel()


def dropped(future: dr.types.Fetched) -> bool:
    """Wait for what a worker was computing; return whether it was dropped before it was there."""
    return isinstance(future.exception(timeout=60), dr.errors.StreamCancelled)


# Every way


@pytest.mark.parametrize("value", [True, 7, -(1 << 62), 2.5, 1e-30, 3 - 4j])
def test_scalars_come_back_as_pythons_own(session: object, value: Any) -> None:
    local = torch.tensor(value)
    x = local.to(REMOTE)
    assert x.item() == local.item() and type(x.item()) is type(local.item())
    assert bool(x) == bool(local)
    assert x.tolist() == local.tolist()
    if not isinstance(value, complex):
        assert int(x) == int(local) and float(x) == float(local)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 5e-324, -0.0])
def test_extreme_floats_survive(session: object, value: float) -> None:
    got = torch.tensor(value, dtype=torch.float64).to(REMOTE).item()
    assert (
        math.isnan(got)
        if math.isnan(value)
        else (got == value and math.copysign(1, got) == math.copysign(1, value))
    )


def test_format_round_and_index(session: object) -> None:
    loss = torch.full((), 2.31742, device=REMOTE)
    assert f"{loss:.3f}" == "2.317"
    assert f"{loss:.1e}" == "2.3e+00"
    assert float(round(loss, 2)) == pytest.approx(2.32)
    assert [10, 20, 30][torch.ones((), dtype=torch.int64, device=REMOTE)] == 20
    assert list(range(torch.full((), 3, device=REMOTE))) == [0, 1, 2]
    assert math.floor(loss) == 2 and math.ceil(loss) == 3


def test_a_tensor_of_many_elements_is_no_scalar(session: object) -> None:
    x = torch.ones(2, device=REMOTE)
    reads: list[Callable[[torch.Tensor], object]] = [lambda t: t.item(), bool, float, int]
    for read in reads:
        with pytest.raises((RuntimeError, ValueError)) as local:
            read(torch.ones(2))
        with pytest.raises(local.type, match=r"(?i)boolean value|one element|scalar"):
            read(x)
    assert torch.ones(1, 1, device=REMOTE).item() == 1
    with pytest.raises(RuntimeError):
        bool(torch.ones(0, device=REMOTE))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int64,
        torch.bool,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (40, 50), (3, 1, 2)])
def test_copies_keep_values_dtype_and_shape(
    session: object, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    local = torch.randn(shape).mul(3).to(dtype)
    x = local.to(REMOTE)
    for back in (x.cpu(), dr.fetch(x), x.to("cpu"), x.to(device="cpu"), x.detach().cpu()):
        assert back.device.type == "cpu" and type(back) is torch.Tensor
        assert back.dtype is dtype and back.shape == local.shape and torch.equal(back, local)
        back.zero_() if back.dtype is not torch.bool else back.logical_not_()  # it is the reader's own memory
    assert x.tolist() == local.tolist()
    assert torch.equal(x.cpu(), local)


def test_a_base_shows_what_was_written_to_a_list_of_its_views(session: object) -> None:
    views: list[Callable[[Any], Any]] = [
        lambda t: t.split(2)[0],
        lambda t: t.unbind(0)[0],
        lambda t: t.chunk(2)[0],
        lambda t: t.tensor_split(2)[0],
        lambda t: t.split([1, 3])[0],
        lambda t: t.hsplit(2)[0],
    ]
    for view in views:
        x = torch.zeros(4, 1 << 18, device=REMOTE)
        dr.synchronize()
        part = view(x)
        for _ in range(20):
            part.add_(1)
        assert x[0, 0].item() == 20
        part.add_(1)
        assert x.cpu()[0, 0] == 21  # a read that does not wait for the view's last writer sees less


def test_views_are_read_as_they_are(session: object) -> None:
    local = torch.arange(24.0).reshape(4, 6)
    x = local.to(REMOTE)
    for view in (
        lambda t: t.t(),
        lambda t: t[1:3, ::2],
        lambda t: t[:, :1].expand(4, 5),
        lambda t: t.flatten()[3:7],
        lambda t: t.unfold(1, 3, 2),
    ):
        assert torch.equal(view(x).cpu(), view(local))
        assert view(x).cpu().stride() == view(local).clone().stride()
        assert view(x).tolist() == view(local).tolist()
    z = torch.tensor([1 + 2j, 3 - 1j]).to(REMOTE)
    assert z.conj().tolist() == [1 - 2j, 3 + 1j]
    assert z.conj().imag.tolist() == [-2, 1]


def test_large_tensors_both_ways(session: object) -> None:
    local = torch.randn(3_000, 1_001)
    x = local.to(REMOTE)
    local_copy = local.clone()
    local.zero_()  # the upload has returned: the memory is ours again
    assert torch.equal(x.cpu(), local_copy)
    y = x * 2
    both = dr.fetch([x, y, x.t()])
    x.zero_()
    assert (
        torch.equal(both[0], local_copy)
        and torch.equal(both[1], local_copy * 2)
        and torch.equal(both[2], local_copy.t())
    )


def test_what_has_been_read_or_sent_can_be_resized(session: object) -> None:
    """torch's `Tensor.numpy` leaves behind memory that nobody may resize any more.

    `fully_shard` resizes what it gathers.
    """
    for count in (3, 5_000, 300_000):
        local = torch.ones(count)
        x = local.to(REMOTE) + 1
        assert torch.equal(x.cpu(), local + 1)
        assert local.resize_(2 * count).shape == x.resize_(2 * count).shape == x.cpu().shape
        assert x[:count].sum().item() == 2 * count


def test_fetch_keeps_the_trees_shape_and_its_ties(session: object) -> None:
    x, y = torch.ones(2, device=REMOTE), torch.zeros(3, device=REMOTE)
    model = torch.nn.Linear(2, 2).to(REMOTE)
    tree = {
        "a": [x, (y, 3, "text", None)],
        "again": x,
        "local": torch.ones(1),
        "state": model.state_dict(),
        "parameter": model.weight,
    }
    got = dr.fetch(tree)
    assert list(got) == list(tree) and type(got["a"][1]) is tuple and got["a"][1][1:] == (3, "text", None)
    assert got["a"][0] is got["again"] and got["local"] is tree["local"]
    assert isinstance(got["parameter"], torch.nn.Parameter) and got["parameter"].requires_grad
    assert type(got["state"]) is type(tree["state"])
    # Two tensors of one memory are tied, although they are two.
    assert got["state"]["weight"].data_ptr() == got["parameter"].data_ptr()
    assert dr.fetch(5) == 5 and dr.fetch([]) == []


def test_memory_that_was_sent_may_be_written_at_once(session: object) -> None:
    local = torch.zeros(1 << 15)
    # The worker reads nothing yet, and so much does not fit into what the system keeps for it.
    with stopped(dr.nodes()[0].pid):
        sent = [local.to(REMOTE) for _ in range(16)]
        local.fill_(1)
    assert not any(x.any() for x in dr.fetch(sent))


# They are as long as one word takes, and longer.
@pytest.mark.parametrize("length", [3, 5000])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint16],
)
def test_small_tensors_of_every_layout_are_sent(session: object, dtype: torch.dtype, length: int) -> None:
    line = torch.arange(2 * length).to(dtype)
    grid = line.reshape(2, length)
    layouts = [line, line[::2], line[1:], grid.t(), grid[:, :1], grid[0].expand(3, length), line[:0], line[0]]
    if dtype.is_complex:
        layouts += [line.conj(), line.conj().imag, line.imag]
    for local in [*layouts, grid.clone().requires_grad_(dtype.is_floating_point)]:
        sent = local.to(REMOTE)
        assert sent.dtype == local.dtype and torch.equal(sent.detach().cpu(), local.detach())
        target = torch.zeros(local.shape, dtype=local.dtype, device=REMOTE)
        view = target.view(-1)
        target.copy_(local.detach())
        assert torch.equal(view.cpu(), local.detach().reshape(-1))
    numbers = torch.tensor([1.5, -2.5], device=REMOTE)
    numbers.copy_(torch.tensor([3, 4]))
    assert numbers.tolist() == [3.0, 4.0]
    with pytest.raises(RuntimeError, match="size"):
        numbers.copy_(torch.ones(3))


def test_memory_that_was_sent_small_may_be_written_at_once(session: object) -> None:
    local, remote, total = torch.zeros(4), torch.empty(4, device=REMOTE), torch.zeros(4, device=REMOTE)
    for k in range(100):
        local.fill_(k)
        remote.copy_(local)
        total += remote
    assert total.tolist() == [4950.0] * 4


def test_a_fetch_sees_the_value_at_its_point_of_the_program(session: object) -> None:
    x = torch.zeros(3, device=REMOTE)
    view, futures = x[1:], []
    for k in range(50):
        futures.append((k, dr.fetch_async([x, view])))
        x.add_(1)
        view.add_(0)
    for k, future in futures:
        whole, part = future.result(timeout=60)
        assert whole.tolist() == [k] * 3 and part.tolist() == [k] * 2


def test_a_future_behaves_as_futures_do(session: object) -> None:
    x = torch.full((2,), 4.0, device=REMOTE)
    future = dr.fetch_async({"x": x})
    seen: list[Any] = []
    future.add_done_callback(lambda f: seen.append(f.result()["x"].tolist()))
    assert future.result(timeout=60)["x"].tolist() == [4, 4]
    assert future.done() and future.exception() is None
    until(lambda: seen == [[4, 4]])
    with stopped(dr.nodes()[0].pid):
        late = dr.fetch_async(x + 1)

        def give_up() -> None:
            # The builtin class, also where that of futures is another one (Python 3.10).
            with pytest.raises(TimeoutError, match=r"within 0.2 s\n  waited for at .*test_reading"):
                late.result(timeout=0.2)
            with pytest.raises(dr.errors.WaitTimeout):
                late.exception(timeout=0.01)

        waits_less(1.5, give_up)
        assert not late.done()
    assert late.result(timeout=60).tolist() == [5, 5]


def test_exception_and_waiting_without_result(session: object) -> None:
    futures = [dr.fetch_async(torch.full((2,), float(k), device=REMOTE)) for k in range(5)]
    done, left = concurrent.futures.wait(futures, timeout=60)
    assert len(done) == 5 and not left
    assert sorted(f.result()[0].item() for f in concurrent.futures.as_completed(futures, timeout=60)) == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert futures[0].exception(timeout=60) is None


# What a fetch waits for


def test_a_fetch_does_not_wait_for_what_was_issued_before_or_after_it(session: object) -> None:
    ready = torch.full((3,), 2.0, device=REMOTE)
    ready_large = torch.ones(500, 500, device=REMOTE)
    assert ready.sum().item() == 6 and ready_large.sum().item() == 250_000
    with occupied() as before:
        marker = dr.fetch_async(before.sum())
        assert ready.tolist() == [2, 2, 2]
        assert torch.equal(ready_large.cpu(), torch.ones(500, 500))
        assert "2., 2., 2." in repr(ready)
    assert dropped(marker), "the reads waited for operations that have nothing to do with them"


def test_a_fetch_waits_for_its_own_operands_only_although_more_work_follows(session: object) -> None:
    mine = torch.ones(300, 300, device=REMOTE)
    for _ in range(3):
        mine = mine @ mine * 1e-3
    asked = dr.fetch_async(mine)
    with occupied() as after:
        marker = dr.fetch_async(after.sum())
        asked.result(timeout=60)
    assert dropped(marker)


def test_a_busy_node_holds_up_no_other(session: object) -> None:
    with occupied(node=1) as busy:
        marker = dr.fetch_async(busy.sum())
        assert torch.ones(3, device=REMOTE).add(1).sum().item() == 6
    assert dropped(marker)


def test_several_fetches_pipeline(session: object) -> None:
    # One round trip each would take 40 times the delay. The worker is stopped, so that it answers nothing
    # before all are asked.
    x = torch.ones(3, device=REMOTE)
    x.sum().item()
    with stopped(dr.nodes()[0].pid):
        futures = [dr.fetch_async(x + k) for k in range(40)]
        assert not any(f.done() for f in futures)
    assert [f.result(timeout=60)[0].item() for f in futures] == [k + 1 for k in range(40)]


# Printing


def counted(code: Callable[[], Any]) -> tuple[Any, int]:
    """Run `code`; return its result and how many requests it made."""
    session = active_session()
    before = session.requests.new(session.nodes[0], "done")
    session.requests.discard(before)
    out = code()
    after = session.requests.new(session.nodes[0], "done")
    session.requests.discard(after)
    return out, after.number - before.number - 1


@pytest.mark.parametrize(
    "local",
    [
        torch.arange(6.0).reshape(2, 3), torch.tensor(3.5), torch.empty(0), torch.empty(2, 0),
        torch.tensor([True, False]), torch.arange(3), torch.tensor([1e-8, 1.0, 1e8]), torch.tensor([1 + 2j]),
        torch.ones(2, dtype=torch.float64), torch.ones(3, dtype=torch.int8), torch.randn(40, 50),
        torch.tensor([math.nan, math.inf, -1.0]), torch.ones(2, 2).t(), torch.tensor([1 + 2j]).conj(),
        torch.ones(2, dtype=torch.bfloat16),
    ],
)  # fmt: skip
def test_a_tensor_prints_as_torch_prints_it_with_its_place(session: object, local: torch.Tensor) -> None:
    x = local.to(REMOTE)
    text, requests = counted(lambda: repr(x))
    assert requests == 1
    where = f"device='remote:{x.device.index}' (node 0 cpu)"
    assert where in " ".join(text.split())
    squeezed = "".join(text.split())
    for part in (", " + where, where + ", ", where):
        squeezed = squeezed.replace("".join(part.split()), "")
    assert squeezed == "".join(repr(local).split())


def test_print_options_are_the_masters(session: object) -> None:
    x = torch.tensor([1.23456789, 2.0]).to(REMOTE)
    torch.set_printoptions(precision=2)
    try:
        assert "1.23," in repr(x)
    finally:
        torch.set_printoptions(profile="default")
    assert "1.2346" in repr(x)


def test_gradients_and_parameters_say_so(session: object) -> None:
    x = torch.ones(2, device=REMOTE, requires_grad=True)
    assert "requires_grad=True" in repr(x)
    assert "grad_fn=<AddBackward0>" in repr(x + 1)
    assert repr(torch.nn.Parameter(x)).startswith("Parameter containing:\ntensor(")
    assert str(x) == repr(x) and f"{x}" == repr(x)


def test_a_huge_tensor_is_summarised_before_it_travels(session: object) -> None:
    x = torch.zeros(1, device=REMOTE).expand(1 << 20, 1 << 20)  # four tebibytes, if it were copied
    pid = dr.nodes()[0].pid
    before = time.process_time() + processor_seconds(pid)
    text, requests = counted(lambda: repr(x))
    # It is processor time, as a busy machine may let both processes wait.
    assert time.process_time() + processor_seconds(pid) - before < 4
    assert requests == 1
    assert "..." in text and len(text) < 2_000
    large = torch.ones(2_000, 2_000, device=REMOTE)
    assert "..." in repr(large) and len(repr(large)) < 2_000


def test_printing_gives_up_after_two_seconds(
    tmp_path: Path, fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The worker runs in a thread of this process, and an operator of the test's own ends there when the test
    # says so.
    free = threading.Event()

    def hold(x: torch.Tensor) -> torch.Tensor:
        assert free.wait(60)
        return x.clone()

    library = torch.library.Library("test_reading", "FRAGMENT")
    library.define("hold(Tensor x) -> Tensor")
    library.impl("hold", hold, "CPU")
    # So nothing travels: the worker knows it already.
    monkeypatch.setattr(defined, "_kernels", {})
    library.impl("hold", torch.empty_like, "Meta")
    ended, address = threading.Event(), f"ipc://{tmp_path}/worker"
    interval = sys.getswitchinterval()
    worker = threading.Thread(target=serve, args=(WorkerConfig(listen=address), ended))
    worker.start()
    try:
        fresh_session(workers=[address])
        pending = torch.ops.test_reading.hold(torch.ones(3, device=REMOTE)).sum()
        texts = [repr(pending)]
        until(
            lambda: "no answer" not in texts[-1] or texts.append(repr(pending))
        )  # a busy machine may not even answer what it does
        assert not free.is_set()
        assert re.match(
            r"<remote scalar float32, 4 B, node 0 cpu: computing "
            r"\(\d+ ahead of it, test_reading\.hold for [\d.]+ s\)\.  \.cpu\(\) waits",
            texts[-1],
        )
        free.set()
        dr.synchronize()
        assert repr(pending).startswith("tensor(3.")
    finally:
        free.set()
        dr.shutdown()
        ended.set()
        worker.join(30)
        sys.setswitchinterval(interval)
    assert not worker.is_alive()


def test_printing_what_is_ready_does_not_wait_for_what_runs(session: object) -> None:
    ready = torch.ones(3, device=REMOTE)
    ready.sum().item()
    with occupied() as before:
        marker = dr.fetch_async(before.sum())
        assert "tensor([1., 1., 1.]" in repr(ready)
    assert dropped(marker)


def test_printing_at_a_stopped_worker_returns(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    x.sum().item()
    with stopped(dr.nodes()[0].pid):
        text = waits_less(5, lambda: repr(x))
        assert text.startswith("<remote 3 float32, 12 B, node 0 cpu: ")
    assert repr(x).startswith("tensor([1., 1., 1.]")


def test_printing_leaves_nothing_behind(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    repr(x)
    before = slots()
    for _ in range(20):
        repr(x), str(x), f"{x}"
    assert slots() == before


def test_nodes_print_within_a_second_although_one_is_stopped(session: object) -> None:
    with stopped(dr.nodes()[1].pid):
        # There are two tables of two nodes.
        assert len(waits_less(4, lambda: str(dr.nodes())).splitlines()) == 6


# What the master learns about its waits


@pytest.fixture
def sync_mode() -> Iterator[Callable[[str | int], None]]:
    yield dr.profiler.set_sync_debug_mode
    dr.profiler.set_sync_debug_mode("default")


IMPLICIT: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: float(x[0]), lambda x: x.cpu(),
    lambda x: x.tolist(), repr, lambda x: torch.nonzero(x), lambda x: x[x > 0], lambda x: f"{x.sum():.1f}",
    lambda x: x.to("cpu"), lambda x: torch.zeros(x.shape).copy_(x),
]  # fmt: skip


@pytest.mark.parametrize("wait", IMPLICIT)
def test_implicit_waits_warn_with_the_users_line(
    session: object, sync_mode: Callable[[str | int], None], wait: Callable[[torch.Tensor], Any]
) -> None:
    x = torch.ones(3, device=REMOTE)
    sync_mode("warn")
    with pytest.warns(UserWarning, match=r"(?s)blocks.*test_reading.py:\d+") as warned:
        wait(x)
    assert {warning.filename for warning in warned} == {__file__}


@pytest.mark.parametrize("wait", IMPLICIT)
def test_implicit_waits_can_be_forbidden(
    session: object, sync_mode: Callable[[str | int], None], wait: Callable[[torch.Tensor], Any]
) -> None:
    x = torch.ones(3, device=REMOTE)
    sync_mode(2)
    assert dr.profiler.get_sync_debug_mode() == 2
    with pytest.raises(dr.errors.UsageError, match=r"(?s)blocks.*test_reading.py:\d+.*fetch_async"):
        wait(x)
    sync_mode("default")
    wait(x)


def test_explicit_waits_are_never_reported(session: object, sync_mode: Callable[[str | int], None]) -> None:
    x = torch.ones(3, device=REMOTE)
    sync_mode("error")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dr.fetch(x).tolist() == [1, 1, 1]
        assert dr.fetch_async([x]).result()[0].tolist() == [1, 1, 1]
        dr.synchronize()
        y = x + 1
        y.add_(1)
        z = torch.ones(3).to(REMOTE) + y
    sync_mode("default")
    assert z.tolist() == [4, 4, 4]


def test_the_mode_is_checked(session: object) -> None:
    for mode in ("loud", 3, None, -1):
        with pytest.raises(dr.errors.UsageError, match="default"):
            dr.profiler.set_sync_debug_mode(mode)  # type: ignore[arg-type]
    assert dr.profiler.get_sync_debug_mode() == 0


def test_advice_about_shapes_is_for_shapes_that_depend_on_data() -> None:
    rows = [
        ("aten.nonzero.default", "train.py:3"),
        ("aten.arange.start", "train.py:4"),
        ("aten.add.out", "a:1"),
    ]
    advice = Stalls(Stall(line, why, 100, 1.0) for why, line in rows).advice()
    assert len(advice) == 1 and "aten.nonzero waited for the shape of its result at train.py:3" in advice[0]


def test_argument_checks_of_distributions_have_their_own_advice(session: object) -> None:
    """The line was the user's, which reads nothing, and the advice was to collect what it reads."""
    x = torch.ones(3, device=REMOTE)
    dr.profiler.stalls(reset=True)
    for _ in range(25):
        # torch.compile, once used, switches these checks off for a process.
        torch.distributions.Normal(x, x, validate_args=True)
    (row,) = [row for row in dr.profiler.stalls() if "test_reading" in row.line]
    assert row.why == "an argument check" and row.count >= 25
    (advice,) = dr.profiler.stalls().advice()
    assert "torch.distributions checked an argument at " in advice and "validate_args=False" in advice
    dr.profiler.stalls(reset=True)
    for _ in range(25):
        torch.distributions.Normal(x, x, validate_args=False)
    assert not dr.profiler.stalls()
    for _ in range(25):
        (x + 1).sum().item()
    assert {row.why for row in dr.profiler.stalls()} == {"item"}


def test_lines_of_libraries_that_are_known_to_wait() -> None:
    for line, remedy in (
        (
            "transformers/trainer.py:1914   and (torch.isnan(loss) or torch.isinf(loss))",
            "logging_nan_inf_filter=",
        ),
        ("transformers/masking_utils.py:307   if fast_all(padding_mask):", "attn_implementation="),
        ("transformers/trainer.py:99   loss.item()", "dr.fetch(list)"),
    ):
        (advice,) = Stalls([Stall(f"/site-packages/{line}", "item", 30, 1.0)]).advice()
        assert remedy in advice and advice.startswith("30 reads one by one at /site-packages/transformers/")


def test_a_hooks_name_is_not_worth_a_wait(session: object) -> None:
    """TransformerLens names a hook after the representation of its function, a partial of activations."""
    names: dict[str, Any] = {}
    code = "def name(function): return function.__repr__()"
    exec(compile(code, os.path.join("x", "transformer_lens", "hook_points.py"), "exec"), names)
    x = torch.ones(3, device=REMOTE)
    dr.profiler.stalls(reset=True)
    assert "<remote 3 float32, 12 B, node 0 cpu: not fetched" in names["name"](functools.partial(print, x))
    assert not dr.profiler.stalls()
    assert "tensor([1., 1., 1.]" in repr(functools.partial(print, x))


def test_a_value_that_ipython_shows_is_a_wait_of_the_cell(session: object) -> None:
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactive.InteractiveShell.instance()
    dr.profiler.stalls(reset=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdout", io.StringIO())
            shell.run_cell("import torch, distruntime\nx = torch.ones(3, 3, device='remote')\nx + 7")
        assert [(stall.why, stall.line.split()[-3:]) for stall in dr.profiler.stalls()] == [
            ("repr", ["x", "+", "7"])
        ]
    finally:
        interactive.InteractiveShell.clear_instance()


def test_stalls_are_summed_up_by_line(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    dr.profiler.stalls(reset=True)
    started = time.perf_counter()
    for _ in range(7):
        (x + 1).sum().item()
    line = f"{os.path.basename(__file__)}:{sys._getframe().f_lineno - 1}"
    short = time.perf_counter() - started
    x.cpu()
    rows = {row.line.partition("   ")[0].rpartition("/")[2]: row for row in dr.profiler.stalls()}
    assert rows[line].count == 7 and rows[line].why == "item" and "sum().item()" in rows[line].line
    assert 0 < rows[line].seconds <= short
    assert len(rows) == 2 and [row.seconds for row in dr.profiler.stalls()] == sorted(
        (row.seconds for row in dr.profiler.stalls()), reverse=True
    )
    dr.profiler.stalls(reset=True)
    assert dr.profiler.stalls() == []


def test_equal_lines_and_reasons_are_one_stall(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    dr.profiler.stalls(reset=True)
    for _ in range(3):  # as at a prompt, where every line is compiled anew
        exec("(x + 1).sum().item(), (x + 2).sum().item()", {"x": x})
    assert [(row.line, row.why, row.count) for row in dr.profiler.stalls()] == [("<string>:1", "item", 6)]


def test_code_that_python_does_not_hash_has_lines(session: object, tmp_path: Path) -> None:
    def made(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.sum().item()
        return y

    code = made.__code__
    # Dynamo writes such constants into the code that it makes, and runs it for the user's.
    compiled = types.FunctionType(code.replace(co_consts=(*code.co_consts, {})), globals())
    x = torch.ones(300, device=REMOTE)
    dr.profiler.stalls(reset=True)
    with dr.trace(tmp_path / "trace.json", quiet=True):
        y = compiled(x)
    number = code.co_firstlineno
    where = os.path.basename(__file__)
    assert f"{where}:{number + 2} " in dr.profiler.stalls()[0].line
    assert any(f"{where}:{number + 1} " in one.line for one in dr.memory(top=100).lines)
    assert f"{where}:{number + 1}" in (tmp_path / "trace.json").read_text(encoding="utf-8")
    assert y.shape == (300,)


def test_a_wait_that_is_given_up_is_a_stall(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    x.sum().item()
    dr.profiler.stalls(reset=True)
    with stopped(dr.nodes()[0].pid):
        repr(x)
        with pytest.raises(TimeoutError):
            dr.fetch_async(x).result(timeout=0.01)
    (row,) = dr.profiler.stalls()
    assert row.why == "repr" and row.seconds > 1


def test_a_fetch_of_nothing_remote_waits_for_nobody(session: object) -> None:
    dr.profiler.stalls(reset=True)
    assert dr.fetch({"a": 3}) == {"a": 3}
    assert dr.profiler.stalls() == [] and repr(dr.profiler.stalls()) == "no waits so far"


def test_stalls_print_as_a_table(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    dr.profiler.stalls(reset=True)
    x.sum().item()
    head, row = repr(dr.profiler.stalls()).splitlines()
    assert head.split() == ["waited", "times", "for", "at"]
    assert re.fullmatch(r" +\d+\.\d{4} s +1 +item +.+test_reading\.py:\d+   x\.sum\(\)\.item\(\)", row), row
    assert dr.profiler.stalls()._repr_html_().count("<tr>") == 2


def test_many_reads_at_a_line_bring_advice(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    dr.profiler.stalls(reset=True)
    for _ in range(25):
        (x + 1).sum().item()
    for _ in range(21):
        (x > 0).nonzero()
    dr.fetch(x)
    rows = {row.why.split()[0]: row.count for row in dr.profiler.stalls()}
    texts = sorted(dr.profiler.stalls().advice(), key=lambda text: "reads" in text)
    assert len(texts) == 2 and repr(dr.profiler.stalls()).splitlines()[-2:] == dr.profiler.stalls().advice()
    assert texts[1].startswith(f"{rows['item']} reads one by one at ") and "dr.fetch(list) once" in texts[1]
    assert "times aten.nonzero waited for the shape of its result at " in texts[0]
    assert dr.profiler.stalls()._repr_html_().count("<p>") == 2


@pytest.mark.parametrize("wait", [*IMPLICIT, dr.fetch])
def test_every_implicit_wait_is_a_stall(session: object, wait: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(500, 500, device=REMOTE)
    for _ in range(3):
        x = x @ x * 1e-3  # so that there is something to wait for
    dr.profiler.stalls(reset=True)
    wait(x[0])
    assert [row.line.partition(":")[0].rpartition("/")[2] for row in dr.profiler.stalls()] == [
        "test_reading.py"
    ]


def test_waiting_for_room_in_the_window_is_a_stall(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["distruntime.log.log"], "WINDOW", 200)  # words: some fifty operations
    fresh_session(world_size=1)
    x = torch.ones(400, 400, device=REMOTE)
    y = x @ x
    y.sum().item()
    dr.profiler.stalls(reset=True)
    futures = []
    for _ in range(400):
        y = x @ x
        futures.append(dr.fetch_async(y[0, 0]))  # each sends what has gathered: the window fills with little
    assert any("window" in row.why or "ahead" in row.why for row in dr.profiler.stalls()), (
        dr.profiler.stalls()
    )


# Refusals


def test_numpy_refuses_unless_forced(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    for refused in (x.numpy, lambda: numpy.asarray(x), lambda: numpy.array(x)):
        with pytest.raises(TypeError, match="cpu"):
            refused()
    assert x.numpy(force=True).tolist() == [1, 1, 1]


def test_signals_reach_a_waiting_master(session: object) -> None:
    """A handler runs at once although the main thread waits for a stopped worker."""
    x = torch.ones(3, device=REMOTE)
    x.sum().item()
    pid = dr.nodes()[0].pid
    hits: list[float] = []

    def go_on(*_: object) -> None:
        hits.append(time.monotonic())
        os.kill(pid, signal.SIGCONT)

    before = signal.signal(signal.SIGALRM, go_on)
    try:
        stop(pid)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert (x + 1).sum().item() == 6
        assert len(hits) == 1
    finally:
        signal.signal(signal.SIGALRM, before)
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[:0], lambda x: x + 1])
def test_what_is_fetched_is_local_wherever_new_tensors_go(session: object, view: Any) -> None:
    """A reply may be taken by a thread that is inside a place's context."""
    x = torch.arange(6.0, device=REMOTE).reshape(2, 3)
    with dr.on(1):
        got = dr.fetch(view(x))
    assert got.device.type == "cpu" and torch.equal(got, view(torch.arange(6.0).reshape(2, 3)))


def test_python_suggests_a_name_for_a_mistyped_one(session: object, capfd: Any) -> None:
    x = torch.ones(3, device=REMOTE)
    # Python looks among fewer than 750 names.
    assert len(dir(x)) < 750 and {"to", "get_node", "shape", "__len__"} <= {*dir(x)}
    with pytest.raises(AttributeError) as raised:
        x.too  # type: ignore[attr-defined]  # noqa: B018
    # Python's own hook writes what a prompt shows.
    sys.__excepthook__(raised.type, raised.value, None)
    assert "Did you mean: 'to'?" in capfd.readouterr().err
