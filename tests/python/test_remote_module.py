"""`RemoteModule`: a module on a worker that is trained from here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.session.session import active_session

pytestmark = pytest.mark.usefixtures("session")


class Net(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))
        self.head = torch.nn.Linear(width, 1)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x).relu()) * scale
        return out

    def width(self) -> int:
        return self.head.in_features


@pytest.fixture
def net() -> Any:
    return dr.RemoteModule(Net, node=1)


def test_it_trains_as_the_same_module_here(net: Any) -> None:
    twin = Net()
    mine = torch.optim.AdamW(net.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for step in range(4):
        x = torch.randn(8, 3)
        for model, optimizer, data in ((net, mine, x.to(dr.place(1))), (twin, theirs, x)):
            optimizer.zero_grad()
            model(data, scale=2.0).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        del step
    there = dr.fetch(net.state_dict())
    assert list(there) == list(twin.state_dict())
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(there[name], value)


def test_forward_and_backward_are_an_instruction_each(net: Any) -> None:
    x = torch.randn(8, 3).to(dr.place(1))
    for _ in range(2):
        loss = net(x).sum()
        torch.autograd.grad(loss, net.parameters())
    node = active_session().nodes[1]  # type: ignore[attr-defined]
    start = torch.ones(8, 1, device=dr.place(1))
    dr.synchronize()
    begun = node.base + len(node.words)
    made = net(x)
    # The words are a template, the module, plain arguments, six parameters, an operand, a result, the tape.
    assert node.base + len(node.words) - begun == 12
    begun = node.base + len(node.words)
    grads = torch.autograd.grad(made, [*net.parameters()], start)
    # The words are a template, the tape, the gradient that comes and six that go.
    assert node.base + len(node.words) - begun == 9 and len(grads) == 6


def test_modes_and_state_dicts(net: Any) -> None:
    x = torch.randn(8, 3).to(dr.place(1))
    net.eval()
    assert torch.equal(net(x).cpu(), net(x).cpu())
    assert dr.fetch(net.remote.training) is False
    other = Net()
    with torch.no_grad():
        other.head.bias.fill_(5.0)
    net.load_state_dict(other.state_dict())
    assert net.remote.head.bias.tolist() == [5.0]
    assert [name for name, _ in net.named_buffers()] == [name for name, _ in other.named_buffers()]
    assert dr.fetch(net.remote.width()) == 4


def test_hooks_and_frozen_parameters(net: Any) -> None:
    seen = []
    net.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    net.head.weight.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    net.head.bias.requires_grad_(False)
    net(torch.randn(8, 3).to(dr.place(1))).sum().backward()
    assert seen == [(8, 1), (1, 4)]
    assert net.head.bias.grad is None and net.body.get_parameter("0.weight").grad is not None


def test_it_moves_and_is_converted(net: Any) -> None:
    before = dr.fetch(net.state_dict())
    parameter = net.head.weight
    assert net.to(dr.place(0)) is net and net.place == dr.place(0)
    assert net.head.weight is parameter and parameter.place == dr.place(0)
    for name, value in dr.fetch(net.state_dict()).items():
        assert torch.equal(value, before[name])
    net(torch.randn(8, 3).to(REMOTE)).sum().backward()
    assert parameter.grad.place == dr.place(0)
    net.zero_grad()
    net.to(torch.float64)
    assert parameter.dtype == torch.float64
    assert net(torch.randn(8, 3, dtype=torch.float64).to(REMOTE)).dtype == torch.float64


def test_tied_weights_are_tied() -> None:
    def make() -> torch.nn.Module:
        model = torch.nn.Module()
        model.a, model.b = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
        model.b.weight = model.a.weight
        model.forward = lambda x: model.b(model.a(x))
        return model

    net: Any = dr.RemoteModule(make)
    assert list(net.state_dict()) == ["a.weight", "b.weight"] and len(list(net.parameters())) == 1
    net(torch.ones(1, 2, device=REMOTE)).sum().backward()
    assert net.a.weight.grad is not None


def test_what_makes_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="makes a list"):
        dr.RemoteModule(lambda: [1])
    with pytest.raises(dr.errors.UsageError, match="takes what makes a module"):
        dr.RemoteModule(5)  # type: ignore[arg-type]


class Normed(torch.nn.Module):
    """A module with a buffer that its forward pass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x: Any) -> Any:
        """Return it normed."""
        return self.norm(x)


def test_a_copy_has_its_own_buffers() -> None:
    net: Any = dr.RemoteModule(Normed)
    x = torch.arange(12.0, device=REMOTE).reshape(4, 3)
    net(x)
    before = net.norm.running_mean.tolist()
    made = copy.deepcopy(net)
    made(x + 5)
    assert made.norm.running_mean.tolist() != before
    assert net.norm.running_mean.tolist() == before
    made.norm.running_mean.fill_(3)
    assert made.remote.norm.running_mean.tolist() == [3.0] * 3
    made.norm.running_mean = torch.zeros(3, device=REMOTE)
    with pytest.raises(dr.errors.NotSupportedError, match=r"'running_mean' of Normed was replaced"):
        made(x)


def test_parameters_that_were_replaced_are_what_it_computes_with() -> None:
    net: Any = dr.RemoteModule(torch.nn.Linear, 2, 2)
    x = torch.ones(1, 2, device=REMOTE)
    given = {"weight": torch.ones(2, 2, device=REMOTE), "bias": torch.zeros(2, device=REMOTE)}
    assert torch.func.functional_call(net, given, (x,)).tolist() == [[2.0, 2.0]]
    net.load_state_dict({name: value * 2 for name, value in given.items()}, assign=True)
    assert net(x).tolist() == [[4.0, 4.0]]
    net.weight = torch.nn.Parameter(torch.zeros(2, 2, device=REMOTE))
    assert net(x).tolist() == [[0.0, 0.0]]
    net(x).sum().backward()
    assert net.weight.grad.tolist() == [[1.0, 1.0]] * 2


class WithExtra(torch.nn.Linear):
    """A module that returns more in training."""

    def forward(self, x: Any) -> Any:
        """Return the result, and in training its sum."""
        made = super().forward(x)
        return (made, made.sum()) if self.training else made


def test_a_module_may_return_something_else_in_training() -> None:
    net: Any = dr.RemoteModule(WithExtra, 2, 2)
    x = torch.ones(1, 2, device=REMOTE)
    for _ in range(2):
        assert net.train()(x)[1].shape == ()
        assert net.eval()(x).shape == (1, 2)


class Dropping(torch.nn.Module):
    """A module with a part that has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5))
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        """Return one number a row."""
        return self.head(self.body(x))


def test_what_is_done_to_a_part_reaches_the_worker() -> None:
    net: Any = dr.RemoteModule(Dropping)
    x = torch.ones(64, 3, device=REMOTE)
    assert [name for name, _ in net.named_modules()] == [name for name, _ in Dropping().named_modules()]
    assert net.body.eval() is net.body
    assert dr.fetch(net.remote.body.training) is False and dr.fetch(net.remote.training) is True
    assert torch.equal(net(x).cpu(), net(x).cpu())
    net.train()
    assert not torch.equal(net(x).cpu(), net(x).cpu())
    getattr(net.body, "1").p = 0.0
    assert torch.equal(net(x).cpu(), net(x).cpu())
    net.head.requires_grad_(False)
    assert not net.remote.head.weight.requires_grad and not net.head.weight.requires_grad
    net(x).sum().backward()
    assert [p.grad is None for p in net.parameters()] == [False, False, True, True]
    net.head.weight.data = torch.zeros(1, 4, device=REMOTE)
    net.head.bias = torch.nn.Parameter(torch.full((1,), 7.0, device=REMOTE))
    assert net(x)[0].item() == 7.0 and net.remote.head.bias.tolist() == [7.0]
    net.head.bias.data = torch.full((1,), 9.0, device=REMOTE)
    net.to(dr.place(1))
    assert net.remote.head.bias.tolist() == [9.0]


def test_what_would_not_reach_the_worker_is_refused() -> None:
    net: Any = dr.RemoteModule(Dropping)
    fixed = "would not follow"
    for text, act in {
        "would never be called": lambda: net.head.register_forward_hook(print),
        "hooks on 'body'": lambda: net.body.register_full_backward_hook(print),
        "converted with the module": lambda: net.head.half(),
        "runs on the worker": lambda: net.head(1),
        f"'head' of Dropping .*{fixed}": lambda: setattr(net, "head", torch.nn.Linear(1, 1)),
        f"'body.x' .*{fixed}": lambda: setattr(net.body, "x", torch.nn.Linear(1, 1)),
        f"'body.y' .*{fixed}": lambda: net.body.add_module("y", torch.nn.Linear(1, 1)),
        f"'body' .*{fixed}": lambda: delattr(net, "body"),
        f"'head.z' .*{fixed}": lambda: net.head.register_buffer("z", torch.ones(1)),
        f"'head.w' .*{fixed}": lambda: net.head.register_parameter("w", None),
    }.items():
        with pytest.raises(dr.errors.NotSupportedError, match=text):
            act()


class Doubled(torch.nn.Module):
    """A parametrization."""

    def forward(self, w: Any) -> Any:
        """Return twice the parameter."""
        return w * 2


def test_torchs_parametrizations_are_computed_here() -> None:
    parametrize = torch.nn.utils.parametrize
    net: Any = dr.RemoteModule(torch.nn.Sequential, torch.nn.Linear(2, 1))
    layer = getattr(net, "0")
    before = layer.weight.tolist()
    parametrize.register_parametrization(layer, "weight", Doubled())
    net(torch.ones(1, 2, device=REMOTE)).sum().backward()
    assert layer.parametrizations.weight.original.grad.tolist() == [[2.0, 2.0]]
    with pytest.raises(dr.errors.NotSupportedError, match="is computed here"):
        net.to(dr.place(1))
    parametrize.remove_parametrizations(layer, "weight")
    assert getattr(net.remote, "0").weight.tolist() == [[2 * value for value in before[0]]]
