"""What is let go of on the master is gone from the worker, with the garbage collector off: a cycle here is
memory on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

# Meta kernels import it on first use, and its import leaves frames in cycles: torch's, once.
import torch._dynamo
from torch import nn

import distruntime as dr
from agree import REMOTE
from processes import Child, resident, slots

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leaves_nothing(code: Callable[[], object]) -> None:
    """Run `code` twice, the first time to fill caches; hold that neither run leaves a value on the worker."""
    before = slots()
    code()
    first = slots() - before
    code()
    second = slots() - before - first
    assert (first, second) == (0, 0), (
        f"{first} values stay after the first run, {second} more after the second"
    )


# Operations of every kind that the log knows


def _results_of_all_kinds() -> None:
    x = torch.rand(6, 6, device=REMOTE)
    values, indices = x.max(dim=1)
    u, s, v = torch.linalg.svd(x)
    x.split(2)
    y = x[1:3].t()
    y.mul_(2)
    x.t_()
    x.resize_(4, 9)
    torch.add(x, 1, out=torch.empty(0, device=REMOTE))
    mask = torch.rand(5, device=REMOTE) > 0.5
    torch.nonzero(mask)
    torch._foreach_add_([torch.ones(2, device=REMOTE) for _ in range(3)], 1.5)
    z = torch.rand(100, 100).to(REMOTE)
    z.copy_(torch.rand(100, 100))
    values.sum().item(), bool(mask.any()), repr(x), f"{s.sum():.2f}", z.cpu(), dr.fetch([u, v, indices])


def test_operations_leave_nothing(session: object) -> None:
    leaves_nothing(_results_of_all_kinds)


def test_copies_between_nodes_leave_nothing(session: object) -> None:
    def code() -> None:
        there = torch.rand(30, 30, device=REMOTE).to(node=1)
        there.to(node=0)

    on_the_other = slots(1)
    leaves_nothing(code)
    assert slots(1) == on_the_other


# Autograd: the graph lives on the master, its saved values on the worker


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 3 * x**2 * grads[0]


def _train() -> None:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)
    ).to(REMOTE)
    x, y = torch.rand(5, 8, device=REMOTE), torch.randint(4, (5,), device=REMOTE)
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(model.parameters()),
    ):
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        loss.item()


def _differentiate_twice() -> None:
    x = torch.rand(4, device=REMOTE, requires_grad=True)
    (slope,) = torch.autograd.grad(_Cube.apply(x).sum(), x, create_graph=True)
    slope.sum().backward()
    x.register_hook(lambda g: g * 2)
    (x * x).sum().backward()
    torch.func.vmap(torch.func.grad(lambda a: (a * a).sum()))(torch.rand(3, 4, device=REMOTE))


def _attend_and_recur() -> None:
    q = torch.rand(1, 2, 4, 8, device=REMOTE, requires_grad=True)
    nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    net = nn.LSTM(4, 6).to(REMOTE)
    net(torch.rand(3, 2, 4, device=REMOTE))[0].sum().backward()


def _autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(REMOTE)
    # An LSTM in bfloat16 needs AVX-512, and a GRU runs everywhere.
    recurrent = nn.GRU(4, 6).to(REMOTE)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(REMOTE)
    with torch.autocast(REMOTE, dtype=torch.bfloat16):
        with torch.no_grad():
            model(torch.rand(2, 4, device=REMOTE)), recurrent(torch.rand(3, 2, 4, device=REMOTE))
        loss = (
            model(torch.rand(2, 4, device=REMOTE)).float().sum()
            + recurrent(torch.rand(3, 2, 4, device=REMOTE))[0].float().sum()
        )
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def _autocast_raises() -> None:
    def code() -> None:
        weight = torch.rand(4, 4, device=REMOTE, requires_grad=True)
        with torch.autocast(REMOTE):
            torch.rand(2, 4, device=REMOTE) @ weight @ torch.rand(3, 3, device=REMOTE)

    _raises(RuntimeError, code)


@pytest.mark.parametrize(
    "code", [_train, _differentiate_twice, _attend_and_recur, _autocast, _autocast_raises]
)
def test_autograd_leaves_nothing(session: object, code: Callable[[], None]) -> None:
    leaves_nothing(code)


def test_a_graph_that_is_never_run_backward_leaves_nothing(session: object) -> None:
    def code() -> None:
        w = torch.rand(4, 4, device=REMOTE, requires_grad=True)
        torch.tanh(w @ w).sum()

    leaves_nothing(code)


# Exceptions: a traceback holds frames, a frame holds proxies, and an exception kept in a local would close
# the circle


def _raises(kind: type[BaseException], code: Callable[[], object]) -> None:
    try:
        code()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def _shapes() -> None:
    a, b = torch.rand(2, 3, device=REMOTE), torch.rand(2, 3, device=REMOTE)
    _raises(RuntimeError, lambda: a @ b)


def _poisoned_read() -> None:
    x = torch.rand(3, device=REMOTE)
    y = x[torch.tensor([7], device=REMOTE)]
    _raises(IndexError, lambda: y.sum().item())
    _raises(IndexError, lambda: dr.fetch([x, y]))
    _raises(IndexError, lambda: dr.fetch_async([x, y]).result())


def _poisoned_unread() -> None:
    torch.rand(3, device=REMOTE)[torch.tensor([7], device=REMOTE)]
    _raises(IndexError, dr.synchronize)


def _poisoned_first_time() -> None:
    bad = torch.rand(3, device=REMOTE)[torch.tensor([7], device=REMOTE)]
    _raises(IndexError, lambda: torch.nonzero(bad))  # waits for the worker to describe its result


def _places() -> None:
    x = torch.rand(3, device=REMOTE)
    with dr.node(1):
        y = torch.rand(3, device=REMOTE)
    _raises(dr.errors.PlacementError, lambda: x + y)
    _raises(dr.errors.PlacementError, lambda: x + torch.rand(3))
    _raises(dr.errors.NotSupportedError, x.share_memory_)
    _raises(TypeError, x.numpy)


def _backward() -> None:
    w = torch.rand(3, device=REMOTE, requires_grad=True)

    def refuse(grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("hook")

    y = w * 2
    y.register_hook(refuse)
    _raises(KeyError, lambda: y.sum().backward())


@pytest.mark.parametrize(
    "code", [_shapes, _poisoned_read, _poisoned_unread, _poisoned_first_time, _places, _backward]
)
def test_an_exception_leaves_nothing(session: object, code: Callable[[], None]) -> None:
    leaves_nothing(code)


def test_an_abandoned_future_leaves_nothing(session: object) -> None:
    def code() -> None:
        for _ in range(20):
            dr.fetch_async([torch.rand(3, device=REMOTE), torch.rand(200, 200, device=REMOTE)])
        dr.synchronize()

    leaves_nothing(code)


# Many operations


def operate(count: int) -> None:
    """The child: `count` operations with the collector off, pausing before and after so that memory can be
    looked at.
    """
    torch.set_num_threads(1)
    gc.disable()
    dr.init_master_worker(world_size=1)
    worker = dr.nodes()[0].pid
    x = torch.rand(20, 20, device=REMOTE)
    w = torch.rand(20, 20, device=REMOTE, requires_grad=True)

    def work(count: int) -> None:
        for k in range(count // 40):
            for _ in range(20):
                y = x + x
            y.mul_(0.5)
            y[2:4].t()
            loss = torch.tanh(y @ w).sum()
            loss.backward()
            w.grad = None
            if k % 50 == 0:
                loss.item()
                dr.fetch_async(y).result()
        dr.synchronize()

    work(20_000)
    print("slots", slots())
    print("worker", worker)
    input()
    work(count)
    print("slots", slots())
    input()
    dr.shutdown()


def many_operations_leave_nothing(count: int) -> None:
    with Child(operate, count) as child:
        held = child.expect("slots")
        worker = int(child.expect("worker"))
        before = resident(child.pid), resident(worker)
        child.tell()
        assert child.expect("slots", 900) == held
        after = resident(child.pid), resident(worker)
        child.tell()
        child.finish()
    grown = [b - a for a, b in zip(before, after)]
    assert max(grown) < 4 * MIB, f"master and worker grew by {grown} bytes over {count} operations"


@pytest.mark.slow(reason="issues 200,000 operations, 12 s")
def test_200_000_operations_leave_nothing() -> None:
    many_operations_leave_nothing(200_000)  # a million: tests/long/test_million_operations.py
