"""Failures are values: they poison results, and surface where these are read, in their own class."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.errors import RemoteError
from processes import Child, asleep, slots, stop, until, window_is_full


def here(offset: int = 0) -> str:
    """Return "test_failures.py:N" of the caller's line, plus an offset."""
    return f"{os.path.basename(__file__)}:{sys._getframe(1).f_lineno + offset}"


def out_of_range() -> torch.Tensor:
    """Return a poisoned tensor of one element: an index that only the worker can find wrong."""
    return torch.arange(3.0, device=REMOTE)[torch.tensor([7], device=REMOTE)]


def read_failure(tensor: torch.Tensor) -> BaseException:
    with pytest.raises(RemoteError) as caught:
        tensor.cpu()
    return caught.value


# The original class


def test_an_index_error_is_an_index_error(session: object) -> None:
    poisoned = out_of_range()
    with pytest.raises(IndexError, match="out of bounds") as caught:
        poisoned.item()
    assert isinstance(caught.value, dr.errors.RemoteError)


def test_a_linear_algebra_error_is_one(session: object) -> None:
    inverse = torch.linalg.inv(torch.zeros(2, 2, device=REMOTE))
    with pytest.raises(torch.linalg.LinAlgError, match="singular") as caught:
        inverse.cpu()
    assert isinstance(caught.value, dr.errors.RemoteError)


def test_running_out_of_memory_can_be_caught_as_such(session: object) -> None:
    huge = torch.empty(1 << 46, device=REMOTE)
    with pytest.raises((torch.OutOfMemoryError, RuntimeError), match="memory") as caught:
        huge.sum().item()
    assert isinstance(caught.value, dr.errors.RemoteError)


@pytest.mark.parametrize(
    "kind",
    [
        "torch.OutOfMemoryError",
        "torch._C._LinAlgError",
        "IndexError",
        "KeyError",
        "ZeroDivisionError",
        "StopIteration",
    ],
)
def test_the_classes_that_a_worker_may_name(session: object, kind: str) -> None:
    from distruntime.log.failure_log import Cause
    from distruntime.session.failures import remote_error
    from distruntime.session.session import active_session
    from distruntime.wire.messages import Failure

    original = {
        "torch.OutOfMemoryError": torch.OutOfMemoryError,
        "torch._C._LinAlgError": torch.linalg.LinAlgError,
    }.get(kind) or vars(__import__("builtins"))[kind]
    error = remote_error(
        active_session().nodes[0],
        Cause(Failure(1, 1, kind, "what it said", "Traceback", "aten::op", "(2,) float32"), "x.py:1"),
    )
    assert isinstance(error, original) and isinstance(error, dr.errors.RemoteError)
    assert str(error).startswith("what it said")


@pytest.mark.parametrize(
    "kind",
    [
        "os.system",
        "SystemExit",
        "KeyboardInterrupt",
        "builtins.eval",
        "__import__",
        "numpy.exceptions.AxisError",
    ],
)
def test_a_worker_cannot_choose_any_class(session: object, kind: str) -> None:
    from distruntime.log.failure_log import Cause
    from distruntime.session.failures import remote_error
    from distruntime.session.session import active_session
    from distruntime.wire.messages import Failure

    error = remote_error(
        active_session().nodes[0], Cause(Failure(1, 1, kind, "what it said", "", "aten::op", ""), "")
    )
    assert type(error).__mro__[1] is dr.errors.RemoteError and isinstance(error, RuntimeError)
    assert kind in str(error)


# What poison does


def test_dependents_raise_the_first_cause(session: object) -> None:
    poisoned = out_of_range()
    line = here(-1)  # the line inside out_of_range is what issued it
    del line
    y = torch.relu(poisoned * 2 + 1).sum()
    z = torch.stack([y, torch.ones((), device=REMOTE)])
    first = str(read_failure(poisoned))
    assert str(read_failure(y)) == first
    assert str(read_failure(z)) == first
    assert "aten::index" in first


def test_what_does_not_depend_on_it_is_untouched(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    poisoned = out_of_range()
    y = x + 1
    with pytest.raises(IndexError):
        poisoned.item()
    assert y.tolist() == [2, 2, 2]
    assert x.tolist() == [1, 1, 1]


def test_a_failed_write_poisons_the_tensor_its_base_and_its_views(session: object) -> None:
    base = torch.zeros(4, 4, device=REMOTE)
    view, other, twin = base[1:3], torch.zeros(4, device=REMOTE), base.clone()
    view[torch.tensor([9], device=REMOTE)] = 1.0
    for tensor in (view, base, base[0], base.t()):
        with pytest.raises(IndexError):
            tensor.cpu()
    assert other.sum().item() == 0
    assert twin.sum().item() == 0


def test_a_poisoned_operand_poisons_what_it_is_written_into(session: object) -> None:
    target = torch.zeros(1, device=REMOTE)
    target += out_of_range()
    with pytest.raises(IndexError):
        target.item()


def test_every_result_of_a_failed_operation_is_poisoned(session: object) -> None:
    values, indices = torch.sort(out_of_range())
    for tensor in (values, indices):
        with pytest.raises(IndexError):
            tensor.cpu()


def test_a_failure_is_raised_at_every_read(session: object) -> None:
    poisoned = out_of_range()
    texts = [str(read_failure(poisoned)) for _ in range(3)]
    assert len(set(texts)) == 1


def test_a_failure_reaches_the_operators_that_wait(session: object) -> None:
    poisoned = out_of_range().sum()
    for read in (
        bool,
        int,
        float,
        torch.nonzero,
        lambda t: f"{t:.2f}",
        lambda t: t.tolist(),
        dr.fetch,
        lambda t: dr.fetch_async([t]).result(),
    ):
        with pytest.raises(IndexError, match="out of bounds"):
            read(poisoned)
    assert "out of bounds" in repr(poisoned)  # printing never raises


def test_a_failure_can_be_awaited(session: object) -> None:
    async def main() -> None:
        with pytest.raises(IndexError):
            await dr.fetch_async(out_of_range())

    asyncio.run(main())


def test_a_fetched_tree_raises_if_any_leaf_is_poisoned(session: object) -> None:
    fine = torch.ones(2, device=REMOTE)
    with pytest.raises(IndexError):
        dr.fetch({"fine": fine, "poisoned": out_of_range()})
    assert dr.fetch({"fine": fine})["fine"].tolist() == [1, 1]


def test_a_copy_between_nodes_raises_the_first_cause(session: object) -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        out_of_range().to(node=1).item()


def test_an_upload_of_impossible_size_does_not_end_the_worker(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    huge = torch.empty(1 << 45, dtype=torch.float64, device=REMOTE)
    with pytest.raises(RuntimeError):
        huge[:1].item()
    assert x.sum().item() == 3


# Checks: operators without results


def singular() -> torch.Tensor:
    return torch.zeros(3, 3, device=REMOTE)


@pytest.mark.parametrize(
    "make",
    [
        torch.linalg.inv,
        lambda x: torch.linalg.cholesky(x - torch.eye(3, device=REMOTE)),
        lambda x: torch.linalg.solve(x, torch.ones(3, device=REMOTE)),
        lambda x: torch.linalg.lu_factor(x)[0],
        lambda x: torch.linalg.inv(x) @ x + 1,
    ],
    ids=["inv", "cholesky", "solve", "lu_factor", "what is computed of it"],
)
def test_a_failed_check_poisons_what_it_checks_and_nothing_else(
    session: object, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    for _ in range(2):  # the second time everything is known
        healthy = torch.ones(2, device=REMOTE)
        inverse = make(singular())
        assert healthy.sum().item() == 2
        assert "poisoned: " in repr(inverse)
        with pytest.raises(RuntimeError, match=r"test_failures\.py") as caught:
            inverse.cpu()
        assert isinstance(caught.value, dr.errors.RemoteError)
        assert healthy.tolist() == [1, 1]
        dr.synchronize()


def test_what_a_check_looks_at_stays_as_it_is(session: object) -> None:
    inverse, info = torch.linalg.inv_ex(singular())
    view = inverse.mT
    torch._linalg_check_errors(info, "linalg.inv", is_matrix=True)
    assert info.item() == 1
    for value in (inverse, view, inverse.mT):
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            value.cpu()


def test_a_check_that_passes_costs_and_changes_nothing(session: object) -> None:
    x = torch.eye(3, device=REMOTE)
    for _ in range(3):
        assert torch.equal(torch.linalg.inv(x).cpu(), torch.eye(3))
    dr.synchronize()


def test_a_failed_check_of_what_nobody_holds_is_raised_by_synchronize(session: object) -> None:
    _, info = torch.linalg.inv_ex(singular())
    del _
    torch._linalg_check_errors(info, "linalg.inv", is_matrix=True)
    assert torch.ones(2, device=REMOTE).tolist() == [1, 1]
    with pytest.raises(torch.linalg.LinAlgError):
        dr.synchronize()


def test_a_failed_check_on_a_mesh_poisons_the_member_that_failed(
    fresh_session: Callable[..., Any],
) -> None:
    with fresh_session(world_size=1, simulate_cuda=2):
        mesh = dr.init_device_mesh("cuda", (2,))
        with dr.on(0, "cuda:0"):
            good = torch.eye(3, device=REMOTE)
        with dr.on(0, "cuda:1"):
            bad = torch.zeros(3, 3, device=REMOTE)
        inverse = torch.linalg.inv(dr.from_shards([good, bad], mesh))
        assert torch.equal(inverse.member(0).cpu(), torch.eye(3))
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            inverse.member(1).cpu()
        dr.synchronize()


def test_an_assertion_that_fails_is_raised_by_the_next_read(session: object) -> None:
    x = torch.ones(2, device=REMOTE)
    torch._assert_async(x.sum() > 5, "the sum is small")
    with pytest.raises(RuntimeError, match="the sum is small"):
        x.tolist()
    assert x.tolist() == [1, 1]


# Failures that nobody reads


def test_a_result_that_is_left_undefined_does_not_end_the_worker(session: object) -> None:
    """The last result of a recurrent step is for training only; its meta kernel promises it all the same."""
    gates = [torch.rand(*shape, device=REMOTE) for shape in ((16, 4), (16, 4), (16,), (16,))]
    x, state = torch.rand(5, 2, 4, device=REMOTE), torch.rand(2, 4, device=REMOTE)
    for _ in range(2):  # the first call is checked against the prediction
        out, *_, undefined = torch.ops.aten.mkldnn_rnn_layer(
            x, *gates, state, state, False, [], 2, 4, 1, True, False, False, False
        )
        assert out.isfinite().all().item()
        with pytest.raises(dr.errors.InternalError, match="is not here"):
            undefined.cpu()


def test_an_unread_failure_is_raised_by_synchronize_once(session: object) -> None:
    out_of_range()
    with pytest.raises(IndexError):
        dr.synchronize()
    dr.synchronize()


def test_a_failure_that_was_read_is_not_raised_again(session: object) -> None:
    for read in (lambda t: t.item(), torch.nonzero, dr.fetch, lambda t: (t + 1).item()):
        with pytest.raises(IndexError):
            read(out_of_range())
        dr.synchronize()


def test_an_unread_failure_is_raised_by_shutdown(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    out_of_range()
    with pytest.raises(IndexError, match="out of bounds"):
        dr.shutdown()
    assert not dr.is_initialized()


def test_a_session_used_as_a_context_raises_it_at_the_end(fresh_session: Callable[..., Any]) -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        with fresh_session(world_size=1):
            out_of_range()
    assert not dr.is_initialized()


def test_an_error_of_the_body_is_not_replaced(fresh_session: Callable[..., Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        with fresh_session(world_size=1):
            out_of_range()
            raise ZeroDivisionError


@pytest.mark.slow(reason="fails a hundred thousand times, 6 s")
def test_many_failures_cost_bounded_memory_and_name_the_first(session: object) -> None:
    first = out_of_range()
    for _ in range(3_000):
        out_of_range()
    with pytest.raises(IndexError, match="issued at"):
        dr.synchronize()
    dr.synchronize()
    with pytest.raises(IndexError, match="out of bounds"):
        first.item()


# What the error tells


def test_the_error_names_operator_node_operands_and_line(session: object) -> None:
    x, index = torch.arange(3.0, device=REMOTE), torch.tensor([7], device=REMOTE)
    y = x[index]
    line = here(-1)
    text = str(read_failure(y + 1))
    assert "index 7 is out of bounds" in text.splitlines()[0]
    assert "aten::index.Tensor on node 0" in text
    assert "(3,) float32, (1,) int64" in text
    assert line in text and "y = x[index]" in text


@pytest.mark.parametrize("behind", [0, 1, 3, 50])
def test_the_line_is_there_whenever_the_value_is_asked_for(session: object, behind: int) -> None:
    # With more or less work in the same segment, so that the answer overtakes the segment's acknowledgement
    # or does not.
    for _ in range(20):
        slow = torch.ones(200, 200, device=REMOTE)
        y = out_of_range()
        for _ in range(behind):
            slow = slow @ slow
        with pytest.raises(IndexError, match=r"issued at .*test_failures.py:\d+"):
            y.item()
        dr.synchronize()


def test_the_line_of_a_failure_inside_a_module(session: object) -> None:
    model = torch.nn.Embedding(3, 2).to(REMOTE)
    out = model(torch.tensor([5], device=REMOTE))
    line = here(-1)
    assert line in str(read_failure(out))


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] + x[torch.tensor([7], device=REMOTE)]


def test_the_line_of_a_failure_inside_backward(session: object) -> None:
    x = torch.ones(3, device=REMOTE, requires_grad=True)
    index = torch.tensor([[5]], device=REMOTE)
    picked = torch.gather(x.unsqueeze(0) * 2, 1, index)  # gather's backward will scatter out of bounds
    with pytest.raises(RuntimeError):
        picked.item()
    y = _FailsInBackward.apply(x).sum()
    y.backward()
    assert x.grad is not None
    text = str(read_failure(x.grad))
    assert "test_failures.py" in text and "in range" not in text
    assert "x[torch.tensor([7], device=REMOTE)]" in text


def test_the_line_of_a_failure_in_an_autograd_formula(session: object) -> None:
    x = torch.ones(3, 3, device=REMOTE, requires_grad=True)
    y = torch.linalg.inv(x - x.detach() + torch.eye(3, device=REMOTE))
    bad = torch.full((3, 3), 0.0, device=REMOTE)
    y.backward(bad[torch.tensor([4], device=REMOTE)].expand(3, 3))
    assert x.grad is not None
    assert "bad[torch.tensor([4]" in str(
        read_failure(x.grad)
    )  # the first cause, not the formula that inherited it


# What the master finds itself is raised at once, as torch's own errors


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x @ x,
        lambda x: x.view(7),
        lambda x: x.sum(5),
        lambda x: x[9],
        lambda x: torch.cat([x, x.new_ones(2, 5)]),
        lambda x: x.long().mean(),
        lambda x: x + x.new_ones(4),
        lambda x: x.add_(x.new_ones(5, 2, 3)),
        lambda x: torch.nn.functional.conv2d(x, x),
        lambda x: torch.zeros("a", device=x.device),
    ],
)
def test_shape_and_dtype_mistakes_are_raised_at_once(
    session: object, code: Callable[[torch.Tensor], Any]
) -> None:
    with pytest.raises((RuntimeError, IndexError, TypeError)) as local:
        code(torch.ones(2, 3))
    x = torch.ones(2, 3, device=REMOTE)
    with pytest.raises(local.type) as remote:
        code(x)
    assert not isinstance(
        remote.value, dr.DistruntimeError
    )  # torch's own, from its meta kernel: not always in the same words
    assert x.tolist() == [[1, 1, 1], [1, 1, 1]]


# A worker dies


def test_a_killed_worker_is_an_error_of_what_was_on_it(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2)
    here_, there = torch.ones(3, device=REMOTE), torch.ones(3, device=REMOTE).to(node=1)
    (here_ + 1).sum().item(), (there + 1).sum().item()
    victim = dr.nodes()[1]
    os.kill(victim.pid, signal.SIGKILL)
    for _ in range(2):  # the first read may find it out, the second knows
        with pytest.raises(dr.errors.NodeFailed) as caught:
            there.sum().item()
        text = str(caught.value)
        assert "node 1" in text and victim.host in text and "SIGKILL" in text and "go on" in text, text
    assert (here_ + 1).tolist() == [2, 2, 2]
    for use in (
        lambda: there + 1,  # noqa: F821
        lambda: there.cpu(),  # noqa: F821
        lambda: there.to(node=0),  # noqa: F821
        lambda: dr.fetch(there),  # noqa: F821
        lambda: there.add_(here_.cpu()),  # noqa: F821
    ):
        with pytest.raises(dr.errors.NodeFailed):
            use()
    with dr.on(1), pytest.raises(dr.errors.NodeFailed):
        torch.zeros(3, device=REMOTE)
    assert "lost" in repr(there)
    until(lambda: dr.nodes()[0].state == "ready")  # until its last acknowledgement is there, it is busy
    info = dr.nodes()
    assert info[1].state == "lost" and "SIGKILL" in info[1].why and "SIGKILL" in str(info)
    dr.synchronize()
    with pytest.raises(dr.errors.NodeFailed):
        dr.synchronize(1)
    del there
    dr.shutdown()


def test_a_pending_fetch_wakes_when_its_worker_dies(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2)
    dr.on(0)
    there = torch.ones(3, device=REMOTE).to(node=1)
    there.sum().item()
    victim = dr.nodes()[1].pid
    stop(victim)
    pending = dr.fetch_async(there + 1)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            (there + 2).cpu()
        except dr.errors.NodeFailed as error:
            caught.append(error.with_traceback(None))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(dr.errors.NodeFailed, match="SIGKILL"):
        pending.result(timeout=60)
    waiter.join(60)
    assert len(caught) == 1
    assert torch.ones(2, device=REMOTE).sum().item() == 2


def test_a_death_is_noticed_while_another_node_keeps_the_socket_busy(
    fresh_session: Callable[..., Any],
) -> None:
    fresh_session(world_size=2)
    mine, there = torch.ones(3, device=REMOTE), torch.ones(3, device=REMOTE).to(node=1)
    there.sum().item()
    ended, rounds = threading.Event(), [0]

    def work() -> None:
        while not ended.is_set():
            assert (mine + 1).sum().item() == 6
            rounds[0] += 1

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    victim = dr.nodes()[1].pid
    stop(victim)
    pending = dr.fetch_async(there + 1)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(dr.errors.NodeFailed):
        pending.result(timeout=60)
    seen = rounds[0]
    until(lambda: rounds[0] > seen + 10)
    ended.set()
    worker.join(60)
    assert not worker.is_alive()


def test_a_death_wakes_who_waits_for_room_in_its_window(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["distruntime.log.log"], "WINDOW", 4_000)
    fresh_session(world_size=2)
    x = torch.ones(3, device=REMOTE)
    x.sum().item()
    victim = dr.nodes()[0].pid
    stop(victim)
    caught: list[BaseException] = []

    def fill() -> None:
        try:
            while True:
                x + x
        except dr.errors.NodeFailed as error:
            caught.append(error.with_traceback(None))

    filler = threading.Thread(target=fill, daemon=True)
    filler.start()
    until(window_is_full)
    os.kill(victim, signal.SIGKILL)
    filler.join(60)
    assert len(caught) == 1


def test_a_death_that_nobody_waits_for_is_told_by_the_next_synchronize(
    fresh_session: Callable[..., Any],
) -> None:
    fresh_session(world_size=2)
    there = torch.ones(3, device=REMOTE).to(node=1)
    there.sum().item()
    os.kill(dr.nodes()[1].pid, signal.SIGKILL)
    until(lambda: dr.nodes()[1].state == "lost")
    with pytest.raises(dr.errors.NodeFailed):
        dr.synchronize(1)
    dr.shutdown()
    assert not dr.is_initialized()


def test_all_workers_may_die_and_a_new_session_starts(fresh_session: Callable[..., Any]) -> None:
    start = fresh_session
    start(world_size=2)
    x = torch.ones(3, device=REMOTE)
    for info in dr.nodes():
        os.kill(info.pid, signal.SIGKILL)
    with pytest.raises(dr.errors.NodeFailed):
        x.sum().item()
    dr.shutdown()
    start(world_size=1)
    with pytest.raises(dr.errors.SessionClosed):
        x + 1
    assert torch.ones(3, device=REMOTE).sum().item() == 3


# Ctrl-C


def wait_for_a_stopped_worker() -> None:
    """The child: wait in every way there is. Ctrl-C must end each, and everything works afterwards."""
    torch.set_num_threads(1)
    dr.init_master_worker(world_size=2)
    worker = dr.nodes()[0].pid
    x = torch.ones(3, device=REMOTE)
    assert (x + x).sum().item() == 6
    torch.nonzero(x)
    x.to(node=1)
    future = None

    def awaited() -> None:
        async def main() -> None:
            await dr.fetch_async(x + 5)

        asyncio.run(main())

    ways: dict[str, Callable[[], object]] = {
        "item": lambda: (x + x).sum().item(),
        "cpu": lambda: (x + 1).cpu(),
        "fetch": lambda: dr.fetch([x + 2, x]),
        "result": lambda: dr.fetch_async(x + 3).result(),
        "synchronize": dr.synchronize,
        "nonzero": lambda: torch.nonzero(x),
        "read of a copy": lambda: x.to(node=1).cpu(),
        "await": awaited,
    }
    for name, way in ways.items():
        stop(worker)
        future = dr.fetch_async(x + 4)
        try:
            print("waiting", name)
            way()
            print("no interrupt")
        except KeyboardInterrupt:
            pass
        os.kill(worker, signal.SIGCONT)
        assert future.result(timeout=20).tolist() == [5, 5, 5]
        assert (x + x).sum().item() == 6
        assert x.to(node=1).tolist() == [1, 1, 1]
    stop(worker)
    future = dr.fetch_async(x * 7)
    try:
        print("waiting again")
        future.result()
    except KeyboardInterrupt:
        pass
    os.kill(worker, signal.SIGCONT)
    assert future.result(timeout=20).tolist() == [7, 7, 7]  # an interrupted wait has not given the value up
    dr.synchronize()
    print("usable", slots() < 100)
    dr.shutdown()


def test_ctrl_c_during_a_wait_leaves_the_session_usable() -> None:
    with Child(wait_for_a_stopped_worker) as child:
        waits = 0
        while (line := child.line()).startswith("waiting"):
            waits += 1
            until(lambda: asleep(child.pid))
            child.interrupt()
        assert line == "usable True"
        assert waits == 9
        child.finish()
