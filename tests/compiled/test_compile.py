"""`torch.compile(backend="distruntime")` gives what the same code gives operator by operator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import distruntime as dr
from agree import REMOTE
from compiled_programs import differs
from distruntime.compiled import graph as graphs
from dynamo import DYNAMO_WARNS
from processes import slots

Compiler = Callable[..., Any]
pytestmark = [
    pytest.mark.filterwarnings("ignore:a graph that torch.compile has traced runs operator by operator"),
    pytest.mark.filterwarnings("ignore:what torch.compile was given runs operator by operator"),
    *DYNAMO_WARNS,
]


def plain(function: Any, **options: object) -> Any:
    return function


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="distruntime", **options)


@pytest.fixture(autouse=True)
def _fresh(session: object) -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[graphs.Graph]:
    """Return the graphs that are compiled from now on."""
    found: list[graphs.Graph] = []
    own = graphs.Graph.__init__

    def init(self: graphs.Graph, *args: Any) -> None:
        own(self, *args)
        found.append(self)

    monkeypatch.setattr(graphs.Graph, "__init__", init)
    return found


def x_at(node: int = 0) -> torch.Tensor:
    return torch.arange(12.0).view(3, 4).to(f"remote:{node}")


def _often(function: Any, *args: Any) -> Any:
    for _ in range(4):
        found = function(*args)
    return found


def _train(make: Compiler, model: nn.Module, batches: list[Any], loss_of: Any) -> list[object]:
    step, optimizer = make(model), torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for batch in batches:
        loss = loss_of(step(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*dr.fetch(losses), *dr.fetch(list(model.parameters())), *dr.fetch(list(model.buffers()))]


class Block(nn.Module):
    """Attention and a network of two layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.more = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(self.norm(x)).view(2, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.more(x)


class Picture(nn.Module):
    """A convolution with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.relu(self.norm(self.cut(x))).mean((2, 3)))


@pytest.mark.parametrize("kind, shape", [(Block, (2, 6, 8)), (Picture, (2, 3, 8, 8))])
def test_a_training_step_is_two_instructions_and_equal(made: Any, kind: Any, shape: Any) -> None:
    batches = [torch.randn(shape).to(REMOTE) for _ in range(6)]
    found = []
    for make in (plain, compiled):
        torch.manual_seed(3)
        found.append(_train(make, kind().to(REMOTE), batches, lambda y: y.square().mean()))
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert len(made) == 2 and all(graph.replays >= 2 and not graph.why for graph in made)


def _mutated(make: Compiler) -> object:
    x = x_at()
    view = x[1]
    _often(make(lambda x: x.mul_(2)), x)
    # AOTAutograd counts a write of a graph that runs operator by operator twice.
    assert x._version >= 4
    return view


def _overlapping(make: Compiler) -> object:
    x = x_at()
    _often(make(lambda a, b: (a.add_(1), b.mul_(2))[0]), x[0], x[:, 0])
    return x


def _same_twice(make: Compiler) -> object:
    function = make(lambda a, b: a.add_(b) * 2)
    x, y = x_at(), x_at()
    return _often(function, x, y), _often(function, x, x), x


def _eval_in_turns(make: Compiler) -> object:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(REMOTE)
    step, found = make(model), []
    for _ in range(3):
        model.train()
        _often(step, x_at())
        model.eval()
        with torch.no_grad():
            found.append(_often(step, x_at()))
    return found


def _retained(make: Compiler) -> object:
    x = x_at().requires_grad_()
    y = _often(make(lambda x: (x**3).sum()), x)
    y.backward(retain_graph=True)
    y.backward()
    return x.grad


def _hooked(make: Compiler) -> object:
    layer, count = nn.Linear(4, 4).to(REMOTE), []
    nn.init.ones_(layer.weight)
    layer.weight.register_hook(lambda gradient: count.append(1))
    for _ in range(4):
        make(layer)(x_at()).sum().backward()
    return len(count), layer.weight.grad


def _checkpointed(make: Compiler) -> object:
    layer, x = nn.Linear(4, 4).to(REMOTE), x_at().requires_grad_()
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    step = make(lambda x: checkpoint(lambda y: layer(y).relu(), x, use_reentrant=False))
    for _ in range(4):
        step(x).sum().backward()
    return x.grad, layer.weight.grad


def _to_places(x: torch.Tensor, one: dr.types.Place, other: dr.types.Place) -> torch.Tensor:
    return (x.to(one) * 2).to(other) + torch.ones(4, device=other)


def _drawn(make: Compiler) -> object:
    torch.manual_seed(5)
    step = make(lambda x: F.dropout(x + torch.rand_like(x) + torch.rand(3, 4, device=x.device), 0.5))
    return [step(x_at()) for _ in range(5)]


def _sizes(make: Compiler) -> object:
    step = make(lambda x: x * x.shape[0])
    return [step(torch.ones(n, 2, device=REMOTE)) for n in (2, 3, 4, 5, 6, 7, 7, 7, 6, 6, 5)]


def _two_places(make: Compiler) -> object:
    step = make(lambda x: x * 2 + torch.ones(4, device=x.device))
    return [(str(y.device), y) for y in (_often(step, x_at(node)) for node in (0, 1, 0))]


def _here_and_there(make: Compiler) -> object:
    step = make(lambda x: x * 2)
    return [_often(step, x) for x in (torch.ones(3), x_at(), torch.ones(3))]


def _streams(make: Compiler) -> object:
    step, streams, x, found = make(lambda x: x.add_(1) * 2), [dr.Stream(), dr.Stream()], x_at(), []
    for k in range(9):
        with streams[k % 2]:
            found.append(step(x))
    return found, x


def _on_a_stream(make: Compiler) -> object:
    stream = dr.Stream()

    def act(x: torch.Tensor) -> torch.Tensor:
        with stream:
            y = x * 2
        dr.current_stream().wait_stream(stream)
        return y + 1

    return _often(make(act), x_at())


def _views_in_place(make: Compiler) -> object:
    def act(x: torch.Tensor) -> object:
        y = (x * 2).t_()
        y.unsqueeze_(0)
        row = y[0, :1].squeeze_(0)
        row.add_(1)
        x.transpose_(0, 1)
        return y.swapaxes_(0, 1), row, (x + 1).as_strided_((2, 3), (1, 2))

    step, found = make(act), []
    for _ in range(4):
        x = x_at()
        found.append((step(x), x, x.stride()))
    return found


def _in_a_program(make: Compiler) -> object:
    step = make(lambda x: x.sin() * 2)
    return _often(dr.program(lambda x: step(x) + 1), x_at())


def _constant_of_which_a_view_is_written(make: Compiler) -> object:
    def act(x: torch.Tensor) -> object:
        row = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        return x * row, row[1:]

    step, found = make(act), []
    for _ in range(5):
        product, view = step(x_at())
        found.append((product, view.clone()))
        view.mul_(7)
    return found


def _inference(make: Compiler) -> object:
    step = make(lambda x: x * 2)
    with torch.inference_mode():
        found = _often(step, x_at())
    return found.is_inference(), found, _often(step, x_at())


def _vmapped(make: Compiler) -> object:
    return _often(make(lambda x: torch.func.vmap(lambda r: r.sin().sum())(x)), x_at())


def _recurrent(make: Compiler) -> object:
    torch.manual_seed(1)
    model, x = nn.LSTM(4, 4).to(REMOTE), torch.ones(3, 2, 4, device=REMOTE)
    step = make(model)
    for _ in range(4):
        out = step(x)[0]
        out.sum().backward()
    return out, [p.grad for p in model.parameters()]


def _local_in_between(make: Compiler) -> object:
    def act(x: torch.Tensor) -> object:
        here = torch.arange(3) + 1
        return x * 2, here, (x + 1).cpu() * 2, x.to("remote:1") * 3

    found = _often(make(act), x_at())
    return [str(y.device) for y in found], found


_offset = 1.0


def _calls_a_remote_function(make: Compiler) -> object:
    global _offset
    add = dr.remote(lambda x: x + _offset)
    step, found = make(lambda x: add(x) * 2), []
    for _offset in (1.0, 1.0, 1.0, 1.0, 5.0, 5.0):
        found.append(step(x_at()))
    return found


CASES: dict[str, Callable[[Compiler], object]] = {
    "in place, a view outside": _mutated,
    "arguments that overlap": _overlapping,
    "a view goes in": lambda make: _often(make(lambda x: x * 2 + x), x_at()[1:]),
    "one argument twice": _same_twice,
    "eval and train in turns": _eval_in_turns,
    "retained": _retained,
    "hooked": _hooked,
    "checkpointed": _checkpointed,
    "draws": _drawn,
    "sizes": _sizes,
    "two places": _two_places,
    "here and there": _here_and_there,
    "streams": _streams,
    "a stream inside": _on_a_stream,
    "in a program": _in_a_program,
    "inference": _inference,
    "views in place": _views_in_place,
    "not an operator's first overload": lambda make: _often(
        make(lambda x: torch.ops.aten.scatter(x, 0, (x[:1] * 0).long(), x * 2)), x_at()
    ),
    "vmap": _vmapped,
    "recurrent": _recurrent,
    "local tensors": _local_in_between,
    "a function of the worker's": _calls_a_remote_function,
    "a constant": lambda make: _often(
        make(lambda x: x[0] * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device) * torch.tensor(2.0)), x_at()
    ),
    "a constant of which a view is written": _constant_of_which_a_view_is_written,
    "a break": lambda make: _often(make(lambda x: (print(end=""), x * 2)[1] + 1), x_at()),
    "a branch": lambda make: _often(make(lambda x: x * 2 if x.sum() > 3 else x), x_at()),
    "a number that is read": lambda make: _often(make(lambda x: x + x.sum().item()), x_at()),
    "what depends on data": lambda make: _often(make(lambda x: x[x > 3].sum()), x_at()),
    "its device": lambda make: _often(make(lambda x: x * (2 if x.device.type == "remote" else 3)), x_at()),
    "its class": lambda make: _often(
        make(lambda x: x * (2 if isinstance(x, dr.DistributedTensor) else 3)), x_at()
    ),
    "a place": lambda make: _often(make(_to_places), x_at(), dr.place(1, "cpu"), dr.place(0, "cpu")),
    "another place": lambda make: [
        _often(step, x_at(), dr.place(0, "cpu"), dr.place(k, "cpu")).device
        for step in [make(_to_places)]
        for k in (0, 1, 0)
    ],
    "its place": lambda make: _often(make(lambda x: x * (x.place.node + 2)), x_at(1)),
    "fullgraph": lambda make: _often(make(lambda x: x.sin().cos(), fullgraph=True), x_at()),
    "nothing remote goes in": lambda make: _often(make(lambda n: torch.arange(n, device=REMOTE) * 2), 5),
    "empty": lambda make: _often(make(lambda x: x[:0] * 2), x_at()),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_compiled_gives_what_it_gives_uncompiled(name: str) -> None:
    found = [
        torch.utils._pytree.tree_flatten(dr.fetch(_tensors_alone(CASES[name](make))))
        for make in (plain, compiled)
    ]
    (one, shape), (other, same_shape) = found
    assert shape == same_shape
    for a, b in zip(one, other):
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


def _tensors_alone(tree: object) -> Any:
    """Return a tree without the graphs of its tensors."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), tree)


def test_replays_are_one_instruction_each(made: Any) -> None:
    step = compiled(lambda x: (x * 2).relu() + 1)
    x = x_at()
    _often(step, x)
    (graph,) = made
    before = graph.replays
    for _ in range(5):
        step(x)
    assert graph.replays == before + 5 and graph.why == ""


@pytest.mark.parametrize("backend", ["distruntime", "inductor"])
def test_a_checkpoint_draws_again_what_it_has_drawn(made: list[graphs.Graph], backend: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Linear(8, 4), nn.Dropout(0.3)).to(REMOTE)

    def block(x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(3, 4, device=x.device)
        return layers(x).tanh() * noise  # type: ignore[no-any-return]

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]

    found = []
    for function in (run, torch.compile(run, backend=backend)):
        torch.manual_seed(1)
        for _ in range(5):
            x = x_at().requires_grad_()
            function(x).square().sum().backward()
            # What is drawn next is what an uncompiled function would leave.
            found.append([x.grad.cpu(), torch.rand(2, device=REMOTE).cpu()])  # type: ignore[union-attr]
    for plainly, at_once in zip(found[:5], found[5:]):
        torch.testing.assert_close(at_once, plainly)
    assert len(made) == 2 and all(graph.replays >= 2 and not graph.why for graph in made)


def test_a_graph_with_tensors_of_this_process_says_so() -> None:
    def act(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, torch.rand(3) + 1

    with pytest.warns(UserWarning, match="operator by operator.*a tensor of this process: rand"):
        compiled(act)(x_at())


def test_places_that_differ_are_both_named_at_the_users_line() -> None:
    with pytest.raises(Exception, match=r"remote:0.+remote:1") as caught:
        compiled(lambda x, y: x + y)(x_at(0), x_at(1))
    assert "test_compile.py" in str(caught.value)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        table = self.linear(x)
        return F.embedding(row, table)  # the line of the failure


@pytest.mark.parametrize("calls_before", range(3))
def test_a_failure_in_a_graph_comes_with_the_line_of_its_operator(calls_before: int) -> None:
    inner = Lookup().to("remote")

    def outer(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return inner(x + 1, row) * 2  # the line of the block

    step, row = compiled(outer), torch.zeros(2, dtype=torch.int64, device="remote")
    for _ in range(calls_before):
        step(x_at(), row)
    found = step(x_at(), row + 7).sum()  # the line of the call
    with pytest.raises(IndexError, match="index out of range") as caught:
        found.item()
    text = str(caught.value)
    issued = next(line for line in text.splitlines() if "issued at" in line)
    assert "return F.embedding(row, table)  # the line of the failure" in issued
    assert "# the line of the call" in text and "eval_with_key" not in text
    # A replay's instruction has its own line, and the line of the call.
    assert ("# the line of the block" in text) == (calls_before < 2)
    assert ("in the program 'forward" in text) == (calls_before == 2)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(Exception, match=r'there is options=\{"compile": "inductor"\}'):
        compiled(lambda x: x * 2, options={"triton.cudagraphs": True})(x_at())


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, object]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"capturable": True}),
    "AdamW, one by one": (torch.optim.AdamW, {"capturable": True, "foreach": False}),
    "NAdam": (torch.optim.NAdam, {"capturable": True}),
    "RMSprop": (torch.optim.RMSprop, {"capturable": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_step_is_one_instruction(name: str, made: list[graphs.Graph]) -> None:
    """It counts its steps on the worker, so it computes as one that the user has made capturable."""
    kind, options = OPTIMIZERS[name]
    asked = {key: value for key, value in options.items() if key != "capturable"}
    found = []
    for make, given in ((plain, options), (compiled, asked)):
        parameters = [nn.Parameter(torch.ones(n, device=REMOTE)) for n in (4, 3)]
        step = make(kind(parameters, **given).step)  # type: ignore[arg-type]
        for k in range(6):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1.0 + k)
            step()
        found.append(dr.fetch(parameters))
    for one, other in zip(*found):
        # torch computes "one by one" with a multiplication that rounds once, where it traces.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0.0)
    assert made[-1].replays >= 2 and made[-1].why == ""


def test_a_fused_optimizer_is_as_it_was(made: list[graphs.Graph]) -> None:
    found = []
    for make in (plain, compiled):
        parameter = nn.Parameter(torch.ones(4, device=REMOTE))
        optimizer = torch.optim.AdamW([parameter], 0.1, fused=True)
        step = make(optimizer.step)
        for _ in range(4):
            parameter.grad = torch.ones_like(parameter)
            step()
        found.append(dr.fetch(parameter))
        assert optimizer.param_groups[0]["capturable"] is False
    assert torch.equal(*found)


def test_an_optimizer_that_has_begun_uncompiled_goes_on_compiled_and_back() -> None:
    found = []
    for make in (plain, compiled):
        parameter = nn.Parameter(torch.ones(4, device=REMOTE))
        optimizer = torch.optim.Adam([parameter], 0.1)
        step = make(optimizer.step)
        for k in range(9):
            parameter.grad = torch.full_like(parameter, 1.0 + k)
            (step if 2 <= k < 6 else optimizer.step)()
        found.append(dr.fetch(parameter))
    torch.testing.assert_close(*found)


def test_a_whole_step_in_one_function() -> None:
    found = []
    for make in (plain, compiled):
        torch.manual_seed(1)
        model = nn.Linear(4, 2).to(REMOTE)
        optimizer = torch.optim.Adam(model.parameters(), 0.1, capturable=True)

        def step(x: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        run = make(step)
        found.append(dr.fetch([run(x_at()) for _ in range(6)] + list(model.parameters())))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other)


def test_inductor_compiles_it_on_the_worker(made: Any) -> None:
    step = compiled(lambda x: ((x * 2).sin() + 1).relu() * 3, options={"compile": "inductor"})
    x = x_at()
    torch.testing.assert_close(dr.fetch(_often(step, x)), ((x.cpu() * 2).sin() + 1).relu() * 3)
    (graph,) = made
    assert graph.compiled() in ("inductor", "compiling") or "compiler" in graph.compiled()


@pytest.mark.parametrize("seed", range(4))
def test_random_functions_give_the_same_compiled(seed: int) -> None:
    assert differs(seed) == ""


def test_a_gradient_of_two_parameters_is_one_for_each() -> None:
    """A cell of a recurrent network adds two biases; clipping would scale a gradient that is shared twice."""
    x, one, other = (torch.ones(4, device=REMOTE, requires_grad=True) for _ in range(3))
    step = compiled(lambda: (x * 2 + one + other).sin())
    for _ in range(6):
        one.grad = other.grad = None
        step().backward(torch.ones(4, device=REMOTE))
        assert one.grad is not None and other.grad is not None
        before = other.grad.tolist()
        one.grad.mul_(2)
        assert other.grad.tolist() == before and other.grad._version == 0


def test_dual_numbers_keep_their_tangents_in_a_graph_that_is_replayed() -> None:
    step, x = compiled(lambda x: (x * 2).sin()), torch.ones(3, device=REMOTE)
    for _ in range(4):
        step(x)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(step(forward_ad.make_dual(x, x))).tangent
        assert tangent is not None
        assert torch.equal(tangent.cpu(), torch.tensor([2.0] * 3).cos() * 2)
    assert step(x).tolist() == torch.tensor([2.0] * 3).sin().tolist()


@pytest.mark.parametrize("backward", [False, True])
def test_what_a_graph_returns_twice_is_as_in_its_first_call(backward: bool) -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        return y, y, y * 2, x, x, y[:1]

    step, found = compiled(both), []
    for _ in range(6):
        x = torch.ones(4, device=REMOTE, requires_grad=backward)
        y, again, doubled, *_, row = step(x)
        with torch.no_grad():
            y.add_(1)
        found.append((y is again, y._version, again._version, again.tolist(), row.tolist(), doubled.tolist()))
    assert found == found[:1] * 6


def test_a_graph_that_was_traced_apart_sees_memory_that_is_shared() -> None:
    """torch's own `aot_eager` gives the old value there."""
    step = compiled(lambda x, y: (x.add_(1), y * 2)[1], dynamic=False)
    for _ in range(4):
        step(torch.zeros(5, 4, device=REMOTE), torch.zeros(5, 4, device=REMOTE))
    base = torch.zeros(16, 4, device=REMOTE)
    assert step(base[:5], base[2:7]).sum().item() == 24


@pytest.mark.parametrize("make", [dr.program, compiled])
def test_what_a_recorded_call_returned_goes_with_its_owner(make: Any) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(REMOTE), x_at()
    before = slots()
    step = make(lambda x: model(x) * 2)
    _often(step, x)
    assert slots() == before


def test_what_dynamo_forgets_is_gone() -> None:
    step, others = compiled(lambda x: x * 2 + 1), set(graphs.alive)
    _often(step, x_at())
    (number,) = set(graphs.alive) - others
    torch._dynamo.reset()
    # What is under way knows its lines, for a failure that may come.
    dr.synchronize()
    gc.collect()
    assert number not in graphs.alive


def test_a_compiled_function_serves_the_next_session(fresh_session: Any) -> None:
    step = compiled(lambda x: x * torch.tensor([1.0, 2.0], device=x.device))
    for _ in range(2):
        fresh_session()
        for _ in range(4):
            assert step(torch.ones(2, device=REMOTE)).tolist() == [1.0, 2.0]


# -- other backends, and modes -------------------------------------------------------------------------------


def trained(compiler: Compiler, steps: int = 6) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).to(REMOTE)
    run, optimizer = compiler(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = run(x_at()).square().mean()
        loss.backward()
        optimizer.step()
    # Warnings of a worker come with what it tells of its log.
    dr.synchronize()
    return loss.detach().cpu()


def test_the_default_backend_is_the_workers_inductor(made: list[graphs.Graph]) -> None:
    assert torch.allclose(trained(torch.compile), trained(plain))
    assert len(made) == 2 and all(one.replays >= 3 for one in made)
    found = dr.profiler.compiled_graphs()[-2:]
    assert [one.name.partition(" ")[0] for one in found] == ["forward", "backward"]
    assert all(one.compiled in ("inductor", "compiling") or "compiler" in one.compiled for one in found)


def test_local_code_goes_to_inductor_itself(made: list[graphs.Graph]) -> None:
    asked = []
    function = torch.compile(lambda x: x.sin() * 2, backend="inductor")
    original = torch._inductor.compile_fx.compile_fx  # type: ignore[attr-defined]

    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        return args[0].forward

    torch._inductor.compile_fx.compile_fx = compile_fx  # type: ignore[attr-defined]
    try:
        assert torch.equal(function(torch.ones(3)), torch.ones(3).sin() * 2)
    finally:
        torch._inductor.compile_fx.compile_fx = original  # type: ignore[attr-defined]
    assert len(asked) == 1 and made == []


@pytest.mark.filterwarnings("ignore:a program has no CUDA graph. the worker has no CUDA device")
@pytest.mark.parametrize("backend", ["inductor", "distruntime"])
def test_a_mode_with_cuda_graphs_asks_for_them(backend: str, made: list[graphs.Graph]) -> None:
    def compiler(model: Any) -> Any:
        return torch.compile(model, backend=backend, mode="reduce-overhead")

    assert torch.equal(trained(compiler), trained(plain))
    assert all(one.compiled().startswith("no CUDA graph") for one in made)


def test_settings_that_do_not_reach_the_worker_are_named() -> None:
    function = torch.compile(lambda x: x * 2, options={"max_autotune": True})
    with pytest.warns(UserWarning, match="do not reach it: max_autotune"):
        assert torch.equal(function(x_at()).cpu(), x_at().cpu() * 2)


@pytest.mark.filterwarnings("ignore:a program has no CUDA graph. the worker has no CUDA device")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "cudagraphs"])
def test_torchs_own_backends_run_their_graphs(backend: str, made: list[graphs.Graph]) -> None:
    assert torch.equal(trained(lambda model: torch.compile(model, backend=backend)), trained(plain))
    assert all(one.replays for one in made) and bool(made) == (backend != "eager")


def test_inductor_by_its_older_name_is_the_workers(made: list[graphs.Graph]) -> None:
    step = torch._dynamo.optimize("inductor")(lambda x: x * 2 + 1)
    assert torch.equal(_often(step, x_at()), x_at() * 2 + 1)
    assert [one._compile for one in made] == ["inductor"]
    # What is local goes to Inductor here.
    assert torch.equal(step(torch.ones(3)), torch.full((3,), 3.0)) and len(made) == 1


@pytest.mark.parametrize("backend", ["distruntime", "aot_eager", "inductor"])
def test_an_operator_with_a_check_in_it(backend: str) -> None:
    step = torch.compile(lambda x: torch.linalg.inv(x) * 2, backend=backend)
    for _ in range(4):
        assert torch.equal(step(torch.eye(3).to(REMOTE)).cpu(), torch.eye(3) * 2)


@torch.library.custom_op("compiled_tests::bump", mutates_args=("x",))
def bump(x: torch.Tensor, by: float) -> None:
    x.add_(by)


def test_an_operator_of_the_users_that_writes() -> None:
    def act(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        bump(y, 3.0)
        return y + 1

    step = compiled(act)
    for _ in range(4):
        assert torch.equal(step(x_at()).cpu(), x_at().cpu() * 2 + 4)


def test_results_in_one_memory_count_their_writes_together() -> None:
    """A graph whose arguments want no gradient returns views as they are."""

    def act(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y, y[0], y.t()

    step = compiled(act)
    for _ in range(5):
        weight = torch.ones(4, 8, device=REMOTE, requires_grad=True)
        y, row, turned = step(x_at().detach())
        loss = (weight[: y.shape[0], : y.shape[1]] * y).sum()
        row.add_(1)
        assert row._base is y and turned._base is y and y._version == turned._version == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_is_made_in_a_graph_is_at_the_place_of_the_call() -> None:
    step = compiled(lambda x: x + torch.ones(4, device="remote"))
    for k in (0, 1, 0, 1, 0, 1):
        with dr.node(k):
            found = step(x_at(k))
        assert found.place.node == k and torch.equal(found.cpu(), x_at().cpu() + 1)


def test_dynamo_explains_a_function_of_remote_tensors() -> None:
    def act(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        print(end="")
        return y * 2

    here, there = (torch._dynamo.explain(act)(x) for x in (torch.ones(3), x_at()))
    assert (here.graph_count, here.op_count) == (there.graph_count, there.op_count) == (2, 1)


def test_another_backend_runs_operator_by_operator_and_says_so(made: list[graphs.Graph]) -> None:
    function = torch.compile(lambda x: x * 2, backend=lambda graph, inputs: graph.forward)
    with pytest.warns(UserWarning, match='by this backend.*backend="distruntime"'):
        assert torch.equal(function(x_at()).cpu(), x_at().cpu() * 2)
    assert made == []


def test_a_graph_that_nobody_may_call_is_not_shown() -> None:
    before = len(dr.profiler.compiled_graphs())
    trained(compiled, steps=1)
    torch._dynamo.reset()
    gc.collect()
    assert len(dr.profiler.compiled_graphs()) <= before


def test_a_recording_does_not_keep_the_stream_that_it_was_made_on() -> None:
    """A worker has a thread for each stream that is kept, and a graph a recording for each stream."""
    step, x, numbers = compiled(lambda x: x * 2 + 1), x_at(), set[int]()
    for _ in range(5):
        with dr.Stream() as stream:
            _often(step, x)
        numbers.add(stream.number)
        del stream
    assert len(numbers) == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_parameter_is_told_from_a_tensor_that_wants_a_gradient(first: bool) -> None:
    function = compiled(lambda x: x * 2 if isinstance(x, nn.Parameter) else x * 3)
    for is_parameter in (first, not first, first):
        x = x_at()[0].clone()
        given = nn.Parameter(x) if is_parameter else x.requires_grad_()
        assert function(given).tolist() == (x.detach() * (2 if is_parameter else 3)).tolist()
