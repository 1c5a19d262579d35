"""Functions of the user's own on workers: `dr.remote`."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.session.session import active_session
from processes import until

pytestmark = pytest.mark.usefixtures("session")


def mixed(x: Any, y: Any, k: float = 2.0) -> Any:
    return x * k + y


@pytest.fixture
def pair() -> tuple[Any, Any]:
    return torch.arange(6.0, device=REMOTE).reshape(2, 3), torch.ones(2, 3, device=REMOTE)


def test_a_call_returns_proxies_of_what_the_body_returns(pair: tuple[Any, Any]) -> None:
    f: Any = dr.remote(mixed)
    for k in (2.0, 3.0):
        got = f(*pair, k=k)
        assert isinstance(got, dr.DistributedTensor)
        assert torch.equal(got.cpu(), mixed(pair[0].cpu(), pair[1].cpu(), k))


def test_a_known_call_is_one_instruction_and_does_not_wait(pair: tuple[Any, Any]) -> None:
    f: Any = dr.remote(mixed)
    f(*pair)
    node = active_session().nodes[0]  # type: ignore[attr-defined]
    dr.synchronize()
    with no_waits():
        before = node.base + len(node.words)
        kept = f(*pair)
    # The words are a template, the function, its plain arguments, two operands and a result.
    assert node.base + len(node.words) - before == 6
    assert kept.sum().item() == 36.0


def test_a_call_and_the_fetch_of_its_object_are_one_segment(pair: tuple[Any, Any]) -> None:
    """Plain arguments and proxies take two ways here."""
    plain: Any = dr.remote(pow, node=0)
    proxies: Any = dr.remote(smallest, node=0)
    node = active_session().nodes[0]
    for f, args in ((plain, (7, 2)), (proxies, pair[:1])):
        for _ in range(2):
            dr.fetch(f(*args))
        dr.synchronize()
        until(lambda: not node.flights and not node.words)
        # The pump sends nothing in between.
        with node.lock:
            before = node.outlet.seq
            kept = f(*args)
            assert node.outlet.seq == before, "the call waits for what follows"
            future = dr.fetch_async(kept)
            assert node.outlet.seq == before + 1
        assert future.result() in (49, 0.0)


def smallest(x: Any) -> float:
    return float(x.min())


def test_a_call_that_nobody_fetches_runs_at_once(tmp_path: Path) -> None:
    mark: Any = dr.remote(Path.touch)
    mark(tmp_path / "first", node=0)
    node = active_session().nodes[0]
    until(lambda: not node.flights and not node.words)
    mark(tmp_path / "second", node=0)
    until((tmp_path / "second").exists)


@contextmanager
def no_waits() -> Iterator[None]:
    dr.profiler.set_sync_debug_mode("error")
    try:
        yield
    finally:
        dr.profiler.set_sync_debug_mode("default")


def test_a_decorator_with_options_and_without() -> None:
    @dr.remote
    def one() -> torch.Tensor:
        return torch.ones(2)

    @dr.remote(node=1, returns=torch.empty(3, device="meta"))
    def two() -> torch.Tensor:
        return torch.ones(3)

    first: Any = one()
    second: Any = two()
    assert first.place.node == 0 and second.place.node == 1
    assert one.__name__ == "one"
    assert first.tolist() == [1.0, 1.0] and second.tolist() == [1.0] * 3


def test_it_runs_where_its_arguments_are_or_where_it_is_told() -> None:
    f: Any = dr.remote(lambda *tensors: torch.ones(1))
    there = torch.ones(2, device=dr.place(1))
    assert f(there).place == dr.place(1)
    assert f(node=1).place == dr.place(1)
    assert f(place=dr.place(1)).place == dr.place(1)
    assert f(place=there.device).place == dr.place(1)
    assert f.options(node=1)().place == dr.place(1)
    with dr.node(1):
        assert f().place == dr.place(1)
    with pytest.raises(dr.errors.PlacementError, match=r"runs on node 0 cpu, and an argument is on node 1"):
        f(there, node=0)


def test_an_argument_of_that_name_is_the_functions_own() -> None:
    f: Any = dr.remote(lambda node: torch.full((), node))
    assert f(node=7).item() == 7


@pytest.mark.parametrize(
    "returns",
    [
        torch.empty(2, 3, device="meta"),
        "fake",
        "ask",
        lambda x, y: torch.empty_like(x),
    ],
)
def test_what_is_declared_need_not_be_asked(pair: tuple[Any, Any], returns: object) -> None:
    f: Any = dr.remote(mixed, returns=returns)
    if returns == "ask":
        got = f(*pair)
    else:
        with no_waits():
            got = f(*pair)
    assert torch.equal(got.cpu(), mixed(pair[0].cpu(), pair[1].cpu()))


def test_results_that_are_not_as_declared_are_an_error_that_says_so(pair: tuple[Any, Any]) -> None:
    f: Any = dr.remote(mixed, returns=torch.empty(7, device="meta"))
    got = f(*pair)
    with pytest.raises(
        dr.errors.RemoteError,
        match=r'mixed returned a tensor \(2, 3\) float32 where a tensor \(7,\) float32 .*"ask"',
    ):
        got.cpu()


def test_trees_of_results() -> None:
    def tree(x: Any) -> Any:
        return x + 1, [x + 2, {"a": x + 3, "b": 5}], None, "text"

    x = torch.zeros(2, device=REMOTE)
    f: Any = dr.remote(tree)
    for _ in range(2):
        one, (two, named), nothing, text = f(x)
        assert [t.tolist() for t in (one, two, named["a"])] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]
        assert dr.fetch([named["b"], nothing, text]) == [5, None, "text"]


def test_numbers_that_change_at_every_call_are_not_asked_about_for_ever() -> None:
    f: Any = dr.remote(lambda x, step, rate: x + step * rate)
    x = torch.zeros(2, device=REMOTE)
    for step in range(4):
        f(x, step, 0.5)
    with no_waits():
        kept = [f(x, step, step / 7) for step in range(10, 20)]
    assert kept[-1][0].item() == pytest.approx(19 * 19 / 7)


def test_sizes_that_follow_a_number_are_asked_about_each_time() -> None:
    f: Any = dr.remote(lambda n: torch.ones(n))
    assert [f(n).shape[0] for n in (1, 2, 3, 4, 5, 5, 6)] == [1, 2, 3, 4, 5, 5, 6]


def test_a_result_in_an_arguments_memory_is_a_view_of_it() -> None:
    f: Any = dr.remote(lambda x: x[1:])
    x = torch.zeros(4, device=REMOTE)
    for _ in range(2):
        view = f(x)
        view.add_(1)
        x.mul_(2)
        assert torch.equal(view.cpu(), x.cpu()[1:])


def test_what_a_function_writes_is_written_and_autograd_notices() -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(y)

    x, y = torch.zeros(3, device=REMOTE), torch.ones(3, device=REMOTE)
    dr.remote(add)(x, y)
    assert x.tolist() == [1.0] * 3
    w = torch.ones(3, device=REMOTE, requires_grad=True)
    loss = (w * x).sum()
    dr.remote(add, writes="x")(x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_function_that_fails_poisons_what_it_was_told_to_write() -> None:
    def fail(x: torch.Tensor) -> None:
        x.add_(1)
        raise ValueError("half way")

    x, z = torch.zeros(3, device=REMOTE), torch.zeros(3, device=REMOTE)
    dr.remote(fail, writes=["x"], returns=object)(x)
    with pytest.raises(dr.errors.RemoteError, match="half way"):
        x.cpu()
    assert z.tolist() == [0.0] * 3


def test_gradients_flow_through_a_body(pair: tuple[Any, Any]) -> None:
    def body(x: Any, y: Any) -> Any:
        h = torch.tanh(x) @ y.T
        return h.exp(), h.argmax()

    f: Any = dr.remote(body)
    for _ in range(2):
        x, y = (t.detach().clone().requires_grad_() for t in pair)
        p, q = (t.cpu().requires_grad_() for t in pair)
        made, index = f(x, y)
        made.sum().backward()
        assert not index.requires_grad
        body(p, q)[0].sum().backward()
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(x.grad.cpu(), p.grad)
        torch.testing.assert_close(y.grad.cpu(), q.grad)


def test_a_backward_is_one_instruction(pair: tuple[Any, Any]) -> None:
    f: Any = dr.remote(lambda x: (x * x).sum())
    x = pair[0].detach().requires_grad_()
    f(x)
    node = active_session().nodes[0]  # type: ignore[attr-defined]
    loss = f(x)
    start = torch.ones((), device=REMOTE)
    dr.synchronize()
    lines = node.base + len(node.words)
    (grad,) = torch.autograd.grad(loss, x, start)
    # The words are a template, the tape, the gradient that comes and the one that goes.
    assert node.base + len(node.words) - lines == 4
    torch.testing.assert_close(grad.cpu(), 2 * pair[0].cpu())


def test_no_grad_reaches_the_body(pair: tuple[Any, Any]) -> None:
    f: Any = dr.remote(lambda x: (torch.is_grad_enabled(), x * 2))
    x = pair[0].detach().requires_grad_()
    enabled, made = f(x)
    assert dr.fetch(enabled) is True and made.requires_grad
    with torch.no_grad():
        enabled, made = f(x)
    assert dr.fetch(enabled) is False and not made.requires_grad


def test_autocast_reaches_the_body(pair: tuple[Any, Any]) -> None:
    f: Any = dr.remote(lambda x, y: x @ y.T)
    assert f(*pair).dtype == torch.float32
    for _ in range(2):
        with torch.autocast(REMOTE, torch.bfloat16):
            assert f(*pair).dtype == torch.bfloat16
        assert f(*pair).dtype == torch.float32


def test_a_local_module_with_remote_parameters_is_an_argument() -> None:
    model = torch.nn.Linear(3, 2).to(REMOTE)
    twin = torch.nn.Linear(3, 2)
    twin.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})
    f: Any = dr.remote(lambda net, x: net(x).square().mean())
    x = torch.randn(5, 3)
    f(model, x.to(REMOTE)).backward()
    twin(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        assert theirs.grad is not None and mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_a_failure_shows_the_bodys_lines_and_the_callers() -> None:
    def broken(x: Any) -> Any:
        raise KeyError("no such thing")

    f: Any = dr.remote(broken, returns=torch.empty(2))
    got = f(torch.ones(2, device=REMOTE))
    with pytest.raises(KeyError, match="no such thing") as caught:
        got.cpu()
    assert isinstance(caught.value, dr.errors.RemoteError)
    assert re.search(r"issued at .*test_functions\.py:\d+ +got = f\(torch\.ones", str(caught.value))
    assert 'raise KeyError("no such thing")' in "".join(traceback.format_exception(caught.value))


def test_a_poisoned_argument_is_the_failure_that_is_read() -> None:
    x = torch.ones(2, device=REMOTE)
    bad = x.index_select(0, torch.tensor([7], device=REMOTE))
    f: Any = dr.remote(lambda t: t + 1, returns=torch.empty(1))
    with pytest.raises(IndexError, match="index_select"):
        f(bad).cpu()


def test_a_function_travels_once(pair: tuple[Any, Any]) -> None:
    heavy = bytes(10_000_000)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x + len(heavy)

    channel = active_session().channel  # type: ignore[attr-defined]
    before = channel.sent_bytes
    shared = active_session().shared  # type: ignore[attr-defined]
    for _ in range(50):
        # A wrapper that is made anew has the same body.
        kept: Any = dr.remote(f)(pair[0])
    assert kept[0, 0].item() == 10_000_000.0
    assert channel.sent_bytes - before < 10_300_000 and shared is not None
    assert len(active_session().nodes[0].code) <= 256  # type: ignore[attr-defined]


def test_functions_are_arguments_and_closures() -> None:
    def twice(x: Any) -> Any:
        return x * 2

    def apply(fn: Callable[[Any], Any], x: Any) -> Any:
        return fn(fn(x))

    x = torch.ones(2, device=REMOTE)
    got: Any = dr.remote(apply)(twice, x)
    assert got.tolist() == [4.0, 4.0]
    got = dr.remote(apply)(dr.remote(twice), x)
    assert got.tolist() == [4.0, 4.0]


def test_a_large_local_argument_and_a_large_result() -> None:
    text = bytes(range(256)) * 20_000
    got = dr.fetch(dr.remote(lambda b: b[::-1])(text))
    assert got == text[::-1]


def test_a_local_tensor_arrives_as_a_tensor_of_the_cpu() -> None:
    got: Any = dr.remote(lambda t: (t.device.type, t.sum()))(torch.ones(3))
    assert dr.fetch(got[0]) == "cpu" and got[1].item() == 3.0


def test_a_place_arrives_as_the_workers_device() -> None:
    got: Any = dr.remote(lambda device: str(torch.ones(1, device=device).device))(dr.place(1), node=1)
    assert dr.fetch(got) == "cpu"


def test_on_a_mesh_it_runs_for_each_member() -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    x = dr.from_shards([torch.ones(2, device=dr.place(k)) * (k + 1) for k in range(2)], mesh)
    f: Any = dr.remote(lambda t: (t * 10, float(t[0])))
    made, numbers = f(x)
    assert [made.member(k)[0].item() for k in range(2)] == [10.0, 20.0]
    assert dr.fetch(numbers) == [1.0, 2.0]


def test_members_of_a_mesh_return_lists_of_their_own_lengths() -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    x = dr.from_shards([torch.full((2,), k + 1.0, device=dr.place(k)) for k in range(2)], mesh)

    def copies(x: Any) -> Any:
        return [x + k for k in range(int(x[0]))]

    made = dr.remote(copies, returns="ask")(x)
    assert [[t.tolist() for t in row] for row in made] == [[[1.0, 1.0]], [[2.0, 2.0], [3.0, 3.0]]]


def test_streams_run_beside_each_other_and_keep_the_order_of_what_they_share() -> None:
    x = torch.zeros(4, device=REMOTE)
    f: Any = dr.remote(lambda t, k: t.add_(k), returns=object, random=False)
    side = dr.Stream()
    for k in range(20):
        with dr.stream(side if k % 2 else dr.default_stream()):
            f(x, 1)
            x.mul_(1)
    assert x.tolist() == [20.0] * 4


def test_what_cannot_travel_is_named() -> None:
    import threading

    lock = threading.Lock()

    def f() -> object:
        return lock

    with pytest.raises(
        dr.errors.UsageError, match=r"f cannot travel to a worker: `lock`, a lock, cannot be pickled"
    ):
        dr.remote(f)()
    with pytest.raises(dr.errors.UsageError, match=r"an argument cannot travel"):
        dr.remote(lambda x: x)(lock)


def test_a_remote_tensor_in_a_closure_is_told_to_be_an_argument() -> None:
    x = torch.ones(2, device=REMOTE)

    def f() -> torch.Tensor:
        return x + 1

    with pytest.raises(dr.errors.UsageError, match=r"`x`.*pass it as an argument"):
        dr.remote(f)()


def test_what_cannot_be_pickled_stays_there() -> None:
    def make() -> object:
        import threading

        return threading.Lock()

    lock: Any = dr.remote(make)()
    with pytest.raises(dr.errors.RemoteError, match="lock cannot be pickled, so it stays on the worker"):
        dr.fetch(lock)
    assert dr.fetch(lock.locked()) is False


@pytest.mark.parametrize("wrong", [5, "text"])
def test_only_what_can_be_called_is_made_remote(wrong: Any) -> None:
    with pytest.raises(dr.errors.UsageError, match="takes a function or a class"):
        dr.remote(wrong)
