"""What a compiled function computes of numbers and tensors of this process, and what it sends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import distruntime as dr
from agree import REMOTE
from distruntime.compiled.graph import alive
from dynamo import DYNAMO_WARNS

# A graph that runs operator by operator says so, and warnings are errors.
pytestmark = DYNAMO_WARNS
Function = Callable[[torch.Tensor, Any], Any]
NUMBERS = (1.0, 0.2, 0.3, 0.3, 0.4, -0.5, 0.6)
FLOAT, FLOAT32, FLOAT64 = (
    float,
    torch.tensor,
    lambda number: torch.tensor(number, dtype=torch.float64),
)


@pytest.fixture(autouse=True)
def _fresh(session: object) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Function) -> Function:
    return torch.compile(function, backend="distruntime")


def written(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    rate.mul_(2)
    return x * rate


def written_behind(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    found = (x + rate).sin()
    rate.mul_(2)
    return found


def batch_written_behind(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    row = rate.view(1)
    found = (x + row.to(x)).sin()
    row.mul_(2)
    return found


def batch(x: torch.Tensor, rate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.stack([rate, rate * 2, rate + 1])
    return x * rows.to(x), rows + 1


def both(x: torch.Tensor, rate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x * rate + torch.tensor(2.0) * rate, rate * 3, torch.arange(3) + 1


FUNCTIONS: dict[str, tuple[Function, tuple[Callable[[float], Any], ...]]] = {
    "numbers": (lambda x, rate: x * rate + rate * 2.0, (FLOAT, FLOAT32, FLOAT64)),
    "a temperature": (lambda x, rate: torch.softmax(x / rate, -1), (FLOAT, FLOAT32, FLOAT64)),
    "integers": (lambda x, rate: x * rate + rate, (lambda number: torch.tensor(int(10 * number)),)),
    "a gradient": (lambda x, rate: (x * rate).sin().sum() - rate * rate, (FLOAT, FLOAT32, FLOAT64)),
    "results from here": (both, (FLOAT32, FLOAT64)),
    "a batch": (batch, (FLOAT32, FLOAT64)),
    # torch 2.13 itself loses a write to such a tensor of float64, with every backend that traces.
    "a write": (written, (FLOAT32,)),
    "a write behind its use": (written_behind, (FLOAT32,)),
    "a write behind the use of a batch": (batch_written_behind, (FLOAT32, FLOAT64)),
}


def outcome(function: Function, number: Any, device: str, backward: bool) -> list[torch.Tensor]:
    x = torch.arange(3.0).to(device).requires_grad_(backward)
    found = function(x, number)
    results = [*found] if isinstance(found, tuple) else [found]
    if backward:
        results[0].sum().backward()
        assert x.grad is not None
        results.append(x.grad)
    results += [number] if isinstance(number, torch.Tensor) else []
    # Each is where it would be if x was on a GPU.
    assert [one.device.type for one in results if one.device.type != "cpu"] == ["remote"] * (
        1 + backward
    ) or (device == "cpu")
    return [one.detach().cpu() for one in results]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_of_this_process_change_from_call_to_call(name: str, backward: bool) -> None:
    function, kinds = FUNCTIONS[name]
    made, graphs = compiled(function), {*alive.values()}
    for kind in kinds:
        before = sum(graph.replays for graph in graphs)
        for number in NUMBERS:
            wanted = outcome(function, kind(number), "cpu", backward)
            found = outcome(made, kind(number), REMOTE, backward)
            for one, other in zip(found, wanted, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
            graphs |= {*alive.values()}
        # Dynamo makes tensors of floats from the second one on, and a kind of call is recorded at its second.
        assert sum(graph.replays for graph in graphs) - before >= (len(NUMBERS) - 3) * (1 + backward)


def test_a_number_of_this_process_has_a_gradient_here() -> None:
    """Its backward graph brings it here, and so runs operator by operator. What was saved is handed to it."""
    made, found = compiled(lambda x, rate: (x * rate).sin().sum() * rate), list[object]()
    for function, device in ((lambda x, rate: (x * rate).sin().sum() * rate, "cpu"), (made, REMOTE)):
        for number in NUMBERS:
            x = torch.arange(3.0).to(device).requires_grad_()
            rate = torch.tensor(number, requires_grad=True)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "a graph that torch.compile has traced runs operator by")
                function(x, rate).backward()
            assert rate.grad is not None and x.grad is not None and rate.grad.device.type == "cpu"
            found.append([rate.grad.tolist(), x.grad.tolist()])
    assert found[: len(NUMBERS)] == found[len(NUMBERS) :]


@pytest.mark.filterwarnings("ignore:a graph that torch.compile has traced runs operator by operator")
def test_a_number_is_met_at_two_places() -> None:
    made = compiled(lambda x, rate: (x[0] * rate, x[1] * rate, x[0] * torch.tensor(3.0)))
    for number in NUMBERS:
        x = torch.arange(3.0).to("remote:0"), torch.arange(3.0).to("remote:1")
        found = made(x, torch.tensor(number))
        assert [str(one.device) for one in found] == ["remote:0", "remote:1", "remote:0"]
        assert all(torch.equal(one.cpu(), torch.arange(3.0) * number) for one in found[:2])


def test_a_number_goes_to_the_place_of_the_call() -> None:
    """Dynamo guards no current place, and the trace has met the number at the one that was."""
    made = compiled(
        lambda rate: torch.ones(3, device=REMOTE) * rate + torch.tensor([1.0, 2.0, 3.0]).to(REMOTE)
    )
    for node in (0, 1, 0):
        for number in NUMBERS:
            with dr.node(node):
                found = made(torch.tensor(number))
            assert str(found.device) == f"remote:{node}"
            assert torch.equal(found.cpu(), torch.ones(3) * number + torch.tensor([1.0, 2.0, 3.0]))


def test_a_batch_is_sent_as_it_lies() -> None:
    made = compiled(lambda row, rate: row.view(2, 2).t().to(REMOTE) * rate)
    for number in NUMBERS:
        found = made(torch.arange(4.0), number)
        assert found.stride() == (1, 2)
        assert torch.equal(found.cpu(), torch.arange(4.0).view(2, 2).t() * number)


def filled(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    x.copy_(row)
    x[0] = row[1]
    return x * 2


def test_a_batch_is_copied_into_a_remote_tensor() -> None:
    made, graphs = compiled(filled), {*alive.values()}
    for k in range(5):
        x, there, row = torch.zeros(3), torch.zeros(3, device=REMOTE), torch.arange(3.0) + k
        assert torch.equal(made(there, row).cpu(), filled(x, row))
        assert torch.equal(there.cpu(), x)
    assert sum(graph.replays for graph in {*alive.values()} - graphs) == 3


@pytest.mark.filterwarnings("ignore:a graph that torch.compile has traced runs operator by operator")
def test_copies_in_a_graph_that_runs_operator_by_operator() -> None:
    """It has `aten::copy`, which gives what `copy_` would leave."""
    made = compiled(lambda x, y, row: (filled(x, row), filled(y, x), filled(row, y), y.cpu() * 2))
    for k in range(3):
        x, y, row = torch.zeros(3).to("remote:0"), torch.zeros(3).to("remote:1"), torch.arange(3.0) + k
        wanted = torch.zeros(3), torch.zeros(3), torch.arange(3.0) + k
        results = filled(wanted[0], wanted[2]), filled(wanted[1], wanted[0]), filled(wanted[2], wanted[1])
        assert all(torch.equal(one.cpu(), other) for one, other in zip(made(x, y, row), results))
        assert all(torch.equal(one.cpu(), other) for one, other in zip((x, y, row), wanted))


def test_a_kept_graph_is_run_backward_twice() -> None:
    made = compiled(lambda x, rate: ((x * rate).sin() * rate).sum())
    for number in NUMBERS:
        x = torch.arange(3.0).to(REMOTE).requires_grad_()
        loss = made(x, number)
        loss.backward(retain_graph=True)
        assert x.grad is not None
        once = x.grad.clone()
        loss.backward()
        assert torch.equal(x.grad.cpu(), once.cpu() * 2)


def test_a_learning_rate_of_this_process_follows_its_schedule() -> None:
    before, found = {*alive.values()}, []
    for compiles in (False, True):
        weight = torch.nn.Parameter(torch.ones(4, device=REMOTE))
        optimizer = torch.optim.SGD([weight], torch.tensor(0.1), momentum=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.9**k)
        step: Any = torch.compile(optimizer.step, backend="distruntime") if compiles else optimizer.step
        for k in range(6):
            weight.grad = torch.full((4,), k + 1.0, device=REMOTE)
            step()
            schedule.step()
        found.append(weight.detach().cpu())
    # torch's optimizer multiplies first where it is compiled, and rounds twice.
    torch.testing.assert_close(*found)
    # The first step makes the momentum, in a graph of its own. The others are a first call, and a recording.
    assert sorted(graph.replays for graph in {*alive.values()} - before) == [0, 3]


def test_a_checkpoint_draws_again_beside_a_number_of_this_process() -> None:
    """The random state that its backward graph gets is a worker's, though a trace takes it for a CPU's."""

    def inner(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x * rate, 0.5).sin()

    def function(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(inner, x, rate, use_reentrant=False)
        return found.sum() * rate

    outcomes = []
    for made in (function, compiled(function)):
        torch.manual_seed(0)
        for number in NUMBERS:
            outcomes.append(outcome(made, torch.tensor(number), REMOTE, True))
    for one, other in zip(outcomes[: len(NUMBERS)], outcomes[len(NUMBERS) :], strict=True):
        assert all(map(torch.equal, one, other))


def test_what_was_sent_is_freed() -> None:
    """Each call sends numbers of its own, and its worker lets go of them."""
    made, x = compiled(lambda x, rate: x * rate + rate), torch.arange(3.0).to(REMOTE)
    for number in NUMBERS:
        made(x, number)
    dr.synchronize()
    before = torch.remote.memory_allocated(0)
    for number in NUMBERS * 3:
        made(x, number)
    dr.synchronize()
    assert torch.remote.memory_allocated(0) == before


class Sensor:
    """What an operator of the user's reads: it gives another value each time."""

    value = 0.0


@torch.library.custom_op("compiled_tests::sensor", mutates_args=())
def sensor() -> torch.Tensor:
    Sensor.value += 1
    return torch.full((3,), Sensor.value)


@sensor.register_fake
def _() -> torch.Tensor:
    return torch.empty(3)


def test_an_operator_of_the_users_is_asked_at_each_call() -> None:
    made, x = compiled(lambda x, rate: x * rate * sensor().to(x)), torch.ones(3, device=REMOTE)
    Sensor.value = 0.0
    for k, rate in enumerate((torch.ones(()), 1.0) * 4):
        assert made(x, rate).tolist() == [k + 1.0] * 3


def test_tensors_that_depend_on_remote_ones_are_computed_operator_by_operator() -> None:
    def function(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        return x.cpu() * rate

    with pytest.warns(
        UserWarning, match="operator by operator, as without it: it has a tensor of this process"
    ):
        found = compiled(function)(torch.ones(3, device=REMOTE), torch.tensor(2.0))
    assert torch.equal(found, torch.full((3,), 2.0))
