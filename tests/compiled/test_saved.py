"""What a compiled forward graph saves for its backward graph is as safe as what torch saves here."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import distruntime as dr
from agree import REMOTE
from distruntime.compiled import saved
from distruntime.log.handle import Handle, Several
from distruntime.session.holders import held
from distruntime.session.session import active_session
from dynamo import DYNAMO_WARNS
from processes import slots

pytestmark = [*DYNAMO_WARNS]
# The first calls are recorded, and the later ones replayed.
CALLS = 5
Function = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(autouse=True)
def _fresh(session: object) -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(12.0).view(3, 4) / 12
    w = torch.arange(16.0).view(4, 4) / 16
    return x.to(device).requires_grad_(), w.to(device).requires_grad_()


def _output(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.exp()
    return y, (y * y).sum()


def _view_of_an_output(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.exp()
    return y, (y.t() @ y).sum()


def _layer(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = F.linear(x.sin(), w)
    return y + 1, y.sin().sum()


# A function, and what is written to between its forward pass and its backward pass.
WRITES: dict[str, tuple[Function, Callable[..., torch.Tensor]]] = {
    "an output": (_output, lambda x, w, y: y),
    "a view of an output": (_view_of_an_output, lambda x, w, y: y[0]),
    "an output that is detached": (_view_of_an_output, lambda x, w, y: y.detach()),
    "a parameter": (_layer, lambda x, w, y: w),
    "a view of a parameter": (_layer, lambda x, w, y: w.detach()[1:]),
    "what is not saved": (_layer, lambda x, w, y: y),
    "an argument of which a result is saved": (_output, lambda x, w, y: x),
}


def _outcomes(device: str, function: Function, written: Callable[..., torch.Tensor]) -> list[str]:
    """Return what the backward pass of each of some calls gives, or that it refuses."""
    step = torch.compile(function, backend="aot_eager")
    found = []
    for _ in range(CALLS):
        x, w = _inputs(device)
        y, loss = step(x, w)
        with torch.no_grad():
            written(x, w, y).mul_(2)
        try:
            loss.backward()
            found.append(str([None if one.grad is None else one.grad.cpu().tolist() for one in (x, w)]))
        except RuntimeError as error:
            found.append(str(error).partition(":")[0])
    return found


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_what_is_saved_is_refused_as_here(name: str) -> None:
    here, there = (_outcomes(device, *WRITES[name]) for device in ("cpu", REMOTE))
    assert there == here
    refused = "one of the variables needed for gradient computation has been modified by an inplace operation"
    harmless = name in ("what is not saved", "an argument of which a result is saved")
    assert (here == [refused] * CALLS) is not harmless


def _deep(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = F.gelu(F.layer_norm(x @ w, (4,)))
    return x.sum()


def _gradients(run: Callable[..., torch.Tensor]) -> list[Any]:
    x, w = _inputs(REMOTE)
    run(x, w).backward()
    return [x.grad.tolist(), w.grad.tolist()]  # type: ignore[union-attr]


def test_it_is_one_proxy_for_all() -> None:
    step = torch.compile(_deep, backend="distruntime")
    for _ in range(CALLS):
        assert _gradients(step) == _gradients(_deep)
    x, w = _inputs(REMOTE)
    gc.collect()
    before = sum(isinstance(one, dr.DistributedTensor) for one in gc.get_objects())
    loss = step(x, w)
    after = sum(isinstance(one, dr.DistributedTensor) for one in gc.get_objects())
    # The result, and the parameter, whose views are saved, is there already.
    assert after - before == 1
    loss.backward()


def test_what_no_backward_pass_takes_is_freed() -> None:
    step = torch.compile(_deep, backend="distruntime")
    for _ in range(CALLS):
        _gradients(step)
    x, w = _inputs(REMOTE)
    gc.collect()
    gc.disable()
    try:
        before = slots()
        loss = step(x, w)
        held = slots() - before
        del loss
        assert held > 4 and slots() == before
        # What watches an output is no part of the output.
        view = torch.compile(_view_of_an_output, backend="distruntime")
        for _ in range(CALLS):
            found = view(x, w)
        before = slots()
        found = view(x, w)
        assert slots() == before
        del found
        assert slots() < before
    finally:
        gc.enable()


def test_calls_that_are_open_at_once_have_their_own() -> None:
    step = torch.compile(_deep, backend="distruntime")
    for _ in range(CALLS):
        # A graph that is never kept has buffers of its own that AOTAutograd reuses.
        step(*_inputs(REMOTE)).backward(retain_graph=True)
    pairs = []
    for k in range(3):
        x, w = _inputs(REMOTE)
        x = (x.detach() + k).requires_grad_()
        pairs.append(((x, w, step(x, w)), (x.detach().requires_grad_(), w.detach().requires_grad_())))
    for k in (1, 0, 2):
        (x, w, loss), (twin, weight) = pairs[k]
        loss.backward(retain_graph=True)
        loss.backward()
        for _ in range(2):
            _deep(twin, weight).backward()
        assert torch.equal(x.grad.cpu(), twin.grad.cpu())  # type: ignore[union-attr]
        assert torch.equal(w.grad.cpu(), weight.grad.cpu())  # type: ignore[union-attr]


def test_hooks_on_saved_tensors_see_tensors() -> None:
    step = torch.compile(_deep, backend="distruntime")
    expected = _gradients(_deep)
    seen: list[torch.Tensor] = []

    def pack(one: torch.Tensor) -> torch.Tensor:
        seen.append(one)
        return one * 1

    for _ in range(CALLS):
        with saved_tensors_hooks(pack, lambda one: one):
            assert _gradients(step) == expected
        with save_on_cpu():
            assert _gradients(step) == expected
        assert _gradients(step) == expected
    assert len(seen) > 4 * CALLS and not any(isinstance(one, saved.Slot) for one in seen)


def test_a_graph_that_is_recorded_amid_replays_opens_what_was_saved() -> None:
    """Another current stream makes another kind of call: the backward graph is recorded once more."""
    step = torch.compile(_deep, backend="distruntime")
    expected = _gradients(_deep)
    for _ in range(CALLS):
        assert _gradients(step) == expected
    x, w = _inputs(REMOTE)
    loss = step(x, w)
    with dr.stream(dr.Stream()):
        loss.backward()
    assert [x.grad.tolist(), w.grad.tolist()] == expected  # type: ignore[union-attr]


@torch._dynamo.config.patch(compiled_autograd=True)
def test_compiled_autograd_sees_tensors() -> None:
    expected = _gradients(_deep)

    @torch.compile(backend="distruntime")
    def step(x: torch.Tensor, w: torch.Tensor) -> None:
        _deep(x, w).backward()

    for _ in range(CALLS):
        x, w = _inputs(REMOTE)
        step(x, w)
        assert [x.grad.tolist(), w.grad.tolist()] == expected  # type: ignore[union-attr]


def test_compiled_autograd_behind_the_forward_pass_is_told_what_to_set() -> None:
    step = torch.compile(_deep, backend="distruntime")
    for _ in range(CALLS):
        _gradients(step)
    loss = step(*_inputs(REMOTE))
    entered = importlib.import_module("torch._dynamo.compiled_autograd")._enable(
        torch.compile(backend="eager")
    )
    with entered, pytest.raises(dr.errors.NotSupportedError, match="compiled_autograd = True before"):
        loss.backward()


# -- one object owns what is saved -------------------------------------------------------------------------


def _saved_values() -> list[Several]:
    return [one for one in gc.get_objects() if type(one) is Several and one.handles is None]


def test_one_object_owns_what_only_the_backward_graph_gets(
    fresh_session: Callable[..., object],
) -> None:
    fresh_session()
    step = torch.compile(_deep, backend="distruntime")
    expected = _gradients(_deep)
    for _ in range(CALLS):
        assert _gradients(step) == expected
    x, w = _inputs(REMOTE)
    gc.collect()
    before = sum(type(one) is Handle for one in gc.get_objects())
    loss = step(x, w)
    assert [len(one.refs) > 4 for one in _saved_values()] == [True]
    # The result's.
    assert sum(type(one) is Handle for one in gc.get_objects()) - before == 1
    loss.backward()
    # The backward graph has replayed without a handle of these, too.
    assert _saved_values() == [] and [x.grad.tolist(), w.grad.tolist()] == expected  # type: ignore[union-attr]


def test_what_one_object_owns_is_seen_by_whoever_looks_for_memory(
    fresh_session: Callable[..., object],
) -> None:
    fresh_session()
    step = torch.compile(_deep, backend="distruntime")
    for _ in range(CALLS):
        _gradients(step)
    x, w = _inputs(REMOTE)
    node = active_session().nodes[0]
    gc.collect()
    _, before = held([node])
    loss = step(x, w)
    (several,) = _saved_values()
    _, after = held([node])
    # The result and what is saved.
    assert after.total() - before.total() == 1 + len(several.refs)
    # Nobody owns anything else for that.
    assert several.handles is None
    loss.backward()


def test_a_second_stream_that_begins_in_between_orders_what_was_saved(
    fresh_session: Callable[..., object],
) -> None:
    fresh_session()
    step = torch.compile(_deep, backend="distruntime")
    expected = _gradients(_deep)
    for _ in range(CALLS):
        assert _gradients(step) == expected
    x, w = _inputs(REMOTE)
    loss = step(x, w)
    assert len(_saved_values()) == 1
    other = dr.Stream()
    with dr.stream(other):
        torch.ones(2, device=REMOTE).add_(1)
    loss.backward()
    assert [x.grad.tolist(), w.grad.tolist()] == expected  # type: ignore[union-attr]
    for _ in range(2):
        assert _gradients(step) == expected


@pytest.mark.parametrize("number", [0, 1])
def test_a_session_with_several_streams_has_no_handles_of_what_is_saved(
    fresh_session: Callable[..., object], number: int
) -> None:
    fresh_session()
    streams = [dr.Stream(), dr.Stream()]
    step = torch.compile(_deep, backend="distruntime")
    expected = _gradients(_deep)
    with dr.stream(streams[0] if number else None):
        for _ in range(CALLS):
            assert _gradients(step) == expected
        x, w = _inputs(REMOTE)
        loss = step(x, w)
        assert [len(one.refs) > 4 for one in _saved_values()] == [True]
        loss.backward()
        assert _saved_values() == [] and [x.grad.tolist(), w.grad.tolist()] == expected  # type: ignore[union-attr]
    # The graph of one stream runs backward on another one, and is kept for a third.
    with torch._functorch.config.patch(donated_buffer=False):
        for k in range(2 * CALLS):
            x, w = _inputs(REMOTE)
            with dr.stream(streams[k % 2]):
                loss = step(x, w)
                loss.backward(retain_graph=k % 3 == 0)
            if k % 3 == 0:
                x.grad = w.grad = None
                with dr.stream(streams[(k + 1) % 2]):
                    loss.backward()
            assert [x.grad.tolist(), w.grad.tolist()] == expected  # type: ignore[union-attr]
    del x, w, loss
    gc.collect()
    dr.synchronize()


def test_a_graph_that_is_kept_is_run_again_and_taken_at_last() -> None:
    step = torch.compile(_deep, backend="distruntime")
    with torch._functorch.config.patch(donated_buffer=False):
        for k in range(2 * CALLS):
            x, w = _inputs(REMOTE)
            loss = step(x, w)
            for _ in range(k % 3):
                loss.backward(retain_graph=True)
            loss.backward()
            twin, weight = _inputs(REMOTE)
            for _ in range(k % 3 + 1):
                _deep(twin, weight).backward()
            assert torch.equal(x.grad.cpu(), twin.grad.cpu())  # type: ignore[union-attr]
            assert torch.equal(w.grad.cpu(), weight.grad.cpu())  # type: ignore[union-attr]


def test_hooks_that_come_when_it_is_replayed_see_tensors() -> None:
    step = torch.compile(_deep, backend="distruntime")
    expected = _gradients(_deep)
    for _ in range(CALLS):
        assert _gradients(step) == expected
    seen: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda one: (seen.append(one), one)[1], lambda one: one):
        assert _gradients(step) == expected
    assert len(seen) > 4 and not any(isinstance(one, saved.Slot) for one in seen)
    assert _gradients(step) == expected


# -- calls like the last one -------------------------------------------------------------------------------


def _sum_and_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return (x * w).sum()


@pytest.mark.filterwarnings("ignore:a graph that torch.compile has traced runs operator by operator")
def test_arguments_that_share_memory_now_are_another_kind_of_call() -> None:
    run = torch.compile(_sum_and_product, backend="distruntime")
    for k in range(3 * CALLS):
        x, w = (one.detach() for one in _inputs(REMOTE))
        here, there = (one.detach() for one in _inputs("cpu"))
        base, twin = torch.zeros(6, 4, device=REMOTE), torch.zeros(6, 4)
        # Twice of two memories, and then once of one; these rows of it are alike in all but that.
        pairs = (
            ((base[:3], base[1:4]), (twin[:3], twin[1:4])) if k % 3 == 2 else ((x, x * 2), (here, here * 2))
        )
        assert run(*pairs[0]).item() == _sum_and_product(*pairs[1]).item()
        assert torch.equal(pairs[0][0].cpu(), pairs[1][0]) and torch.equal(pairs[0][1].cpu(), pairs[1][1])
        del w, there


def test_kinds_of_calls_in_turns_are_told_apart() -> None:
    run = torch.compile(lambda x, n: (x * n).sum(0), backend="distruntime", dynamic=True)
    for k in range(4 * CALLS):
        x = torch.arange(float(4 * (2 + k % 3)), device=REMOTE).view(-1, 4)
        x = x.t().contiguous().t() if k % 4 == 3 else x
        assert torch.equal(run(x, 2 + k % 2).cpu(), (x.cpu() * (2 + k % 2)).sum(0))
