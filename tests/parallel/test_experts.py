"""`dr.parallel.Experts`: tokens go to experts and back, and gradients are those of the serial mixture."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import distruntime as dr
from fewer import fewer
from stages import four_gpus

__all__ = ["four_gpus"]

EXPERTS, WIDTH, TOKENS, CHOICES = 4, 6, 10, 2


def make() -> tuple[nn.Linear, nn.ModuleList]:
    """Return a router and experts."""
    torch.manual_seed(0)
    router = nn.Linear(WIDTH, EXPERTS, dtype=torch.float64)
    experts = [
        nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)).double() for _ in range(EXPERTS)
    ]
    return router, nn.ModuleList(experts)


def routed(router: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, chosen = router(x).softmax(-1).topk(CHOICES)
    return weights, chosen


def serial(
    router: nn.Module, experts: nn.ModuleList, x: torch.Tensor, capacity: int | None = None
) -> torch.Tensor:
    """Run each expert on all tokens of a member, and leave out those that it is not to have."""
    weights, chosen = routed(router, x)
    flat, weights, chosen = x.flatten(0, -2), weights.reshape(-1, CHOICES), chosen.reshape(-1, CHOICES)
    total = torch.zeros_like(flat)
    for k, expert in enumerate(experts):
        gates = torch.where(chosen == k, weights, 0)
        if capacity is not None:
            fits = (chosen.T.flatten() == k).cumsum(0).reshape(CHOICES, -1).T <= capacity
            gates = gates * fits
        total = total + gates.sum(-1, keepdim=True) * expert(flat)
    return total.unflatten(0, x.shape[:-1])


def mesh_of(ep: int) -> dr.mesh.DeviceMesh:
    return dr.init_device_mesh("cuda", [("moe_dp", 4 / ep), ("moe_ep", ep)])


def batches(tokens: str) -> list[torch.Tensor]:
    x = torch.randn(4, 2, TOKENS // 2, WIDTH, dtype=torch.float64)
    if tokens == "of other numbers":
        return [x[0], x[1][:, :3], x[2][:1], x[3][:0]]
    if tokens == "of one kind":
        # Nearly all tokens of two members choose the same experts.
        x[:2] = x[:1, :1, :1] + 0.01 * x[:2]
    return list(x)


@pytest.mark.parametrize("ep", fewer([4, 1, 2], 3, "another cut, 1 s"))
@pytest.mark.parametrize("tokens", ["mixed", "of one kind", "of other numbers"])
@pytest.mark.parametrize("capacity", [None, 3])
def test_gradients_are_those_of_the_serial_mixture(
    ep: int, tokens: str, capacity: int | None, four_gpus: None
) -> None:
    mesh = mesh_of(ep)
    router, own = make()
    xs = batches(tokens)
    there = copy.deepcopy(router).to(mesh.device)
    experts = dr.parallel.Experts(list(own), mesh, capacity=capacity)
    given = dr.from_shards(xs, mesh).requires_grad_()
    out = experts(given, *routed(there, given))
    out.square().sum().backward()
    experts.reduce_gradients()
    xs = [x.requires_grad_() for x in xs]
    wanted = [serial(router, own, x, capacity) for x in xs]
    (sum(y.square().sum() for y in wanted) / 4).backward()
    for mine, y in zip(dr.shards(out.detach()), wanted, strict=True):
        torch.testing.assert_close(mine, y.detach(), atol=1e-12, rtol=1e-12)
    assert given.grad is not None
    for mine, x in zip(dr.shards(given.grad), xs, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(mine, x.grad * 4, atol=1e-12, rtol=1e-12)
    for p, q in zip(there.parameters(), router.parameters()):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(torch.stack(dr.shards(p.grad)).mean(0), q.grad, atol=1e-12, rtol=1e-12)
    # Every replica of an expert has the gradient, not only one.
    for name, p in experts.experts.named_parameters():
        assert p.grad is not None
        k, rest = name.split(".", 1)
        for member, mine in enumerate(dr.shards(p.grad)):
            rank = member % ep
            expert = own.get_submodule(str(rank * (EXPERTS // ep) + int(k)))
            grad = expert.get_parameter(rest).grad
            # An expert without tokens has no gradient, or zeros.
            assert grad is not None
            torch.testing.assert_close(mine, grad, atol=1e-12, rtol=1e-12)


def test_replicas_stay_equal_over_steps(four_gpus: None) -> None:
    """Without the reduction over "moe_dp" each replica would be trained on its own tokens alone."""
    mesh = mesh_of(2)
    router, own = make()
    there = copy.deepcopy(router).to(mesh.device)
    experts = dr.parallel.Experts(list(own), mesh)
    everyone = mesh.lines()
    plain = torch.optim.SGD([*router.parameters(), *own.parameters()], lr=0.5, momentum=0.9)
    optimizer = torch.optim.SGD([*there.parameters(), *experts.parameters()], lr=0.5, momentum=0.9)

    @dr.program
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (experts(x, *routed(there, x)) - 1).square().mean()
        loss.backward()
        experts.reduce_gradients()
        for p in there.parameters():
            if p.grad is not None:
                p.grad = dr.lines.all_reduce(everyone, p.grad, "avg")
        optimizer.step()
        return dr.lines.all_reduce(everyone, loss.detach(), "avg")

    for _ in range(6):
        xs = batches("mixed")
        plain.zero_grad()
        wanted = sum((serial(router, own, x) - 1).square().mean() for x in xs) / 4
        assert isinstance(wanted, torch.Tensor)
        wanted.backward()
        plain.step()
        assert abs(step(dr.from_shards(xs, mesh)).item() - wanted.item()) < 1e-10
    assert step.replays and not step.why
    for p in experts.parameters():
        a, b, c, d = dr.shards(p.detach())
        assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b)
    for name, p in experts.state_dict().items():
        torch.testing.assert_close(p.cpu(), own.state_dict()[name], atol=1e-10, rtol=1e-10)


def test_a_state_is_that_of_all_experts(four_gpus: None) -> None:
    _, own = make()
    _, other = make()
    for p in other.parameters():
        p.data.normal_()
    model = nn.ModuleDict({"moe": dr.parallel.Experts(list(own), mesh_of(2))})
    state = model.state_dict()
    assert list(state) == [f"moe.{name}" for name in own.state_dict()]
    for name, t in own.state_dict().items():
        assert torch.equal(dr.fetch(state)[f"moe.{name}"], t)
    model.load_state_dict({f"moe.{name}": t for name, t in other.state_dict().items()})
    found = dr.fetch(model.state_dict())
    assert all(torch.equal(found[f"moe.{name}"], t) for name, t in other.state_dict().items())
    # Onto a mesh that shares the experts out otherwise.
    again = nn.ModuleDict({"moe": dr.parallel.Experts(list(own), mesh_of(4))})
    again.load_state_dict(model.state_dict())
    found = dr.fetch(again.state_dict())
    assert all(torch.equal(found[f"moe.{name}"], t) for name, t in other.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"moe.0.0.weight": other.state_dict()["0.0.weight"]})


def test_what_is_refused(four_gpus: None) -> None:
    mesh = mesh_of(2)
    router, own = make()
    with pytest.raises(dr.errors.ConfigurationError, match="3 experts among 2 members"):
        dr.parallel.Experts(list(own)[:3], mesh)
    with pytest.raises(dr.errors.ConfigurationError, match="whole number of tokens from 1 on, got 0"):
        dr.parallel.Experts(list(own), mesh, capacity=0)
    with pytest.raises(dr.errors.UsageError, match="expert 1, Linear, is unlike expert 0"):
        dr.parallel.Experts([own[0], nn.Linear(WIDTH, WIDTH)], mesh)
    with pytest.raises(dr.errors.UsageError, match="all experts and a mesh"):
        dr.parallel.Experts(list(own), "cuda")  # type: ignore[arg-type]
    plain = dr.init_device_mesh("cuda", (4,), mesh_dim_names=("data",))
    with pytest.raises(dr.errors.UsageError, match="no dimension 'ep'"):
        dr.parallel.Experts(list(own), plain, ep="ep")
    with pytest.raises(
        dr.errors.UsageError, match=r"ep='moe_ep': this mesh .* it has data. Name the dimension"
    ):
        dr.parallel.Experts(list(own), plain)
    with pytest.raises(dr.errors.UsageError, match="a list of all experts, got one Linear"):
        dr.parallel.Experts(nn.Linear(2, 2), mesh)  # type: ignore[arg-type]
    experts = dr.parallel.Experts(list(own), mesh)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    weights, chosen = routed(router, x)
    with pytest.raises(dr.errors.PlacementError, match=r"takes tensors on .* got one on cpu"):
        experts(x, weights, chosen)
    x, weights, chosen = (t.detach().to(mesh.device) for t in (x, weights, chosen))
    with pytest.raises(dr.errors.UsageError, match=r"got \(3, 6\), \(3, 2\) and \(3, 1\)"):
        experts(x, weights, chosen[:, :1])
    with pytest.raises(
        dr.errors.UsageError, match=r"are whole numbers, as topk gives them, got torch.float64"
    ):
        experts(x, weights, weights)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_the_norm_of_all_experts(norm_type: float, four_gpus: None) -> None:
    """Each member knows the norm of its own experts. Clipped by that, replicas of the router would differ."""

    class Stage(nn.Module):
        def __init__(self, router: nn.Module, experts: nn.Module) -> None:
            super().__init__()
            self.router, self.experts = router, experts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(self.experts, dr.parallel.Experts):
                return self.experts(x, *routed(self.router, x))
            return serial(self.router, self.experts, x)  # type: ignore[arg-type]

    mesh = dr.init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "ep"))
    own, stages = [], []
    for k in range(2):
        part, (router, experts) = mesh.select(pp=k), make()
        own.append(Stage(router, experts))
        there = dr.parallel.Experts(list(experts), part, ep="ep", dp=None)
        stages.append(Stage(copy.deepcopy(router).to(part.device), there))
    x, y = (torch.randn(2, TOKENS, WIDTH, dtype=torch.float64) for _ in "xy")
    pipe = dr.parallel.pipeline(stages, 2, "GPipe", nn.functional.mse_loss)
    pipe.step(dr.from_shards(list(x), mesh.select(pp=0)), target=dr.from_shards(list(y), mesh.select(pp=1)))
    nn.functional.mse_loss(nn.Sequential(*own)(x.flatten(0, 1)), y.flatten(0, 1)).backward()
    for stage in stages:
        experts = stage.experts
        assert isinstance(experts, dr.parallel.Experts)
        experts.reduce_gradients()
        everyone = experts._mesh.lines()
        for p in stage.router.parameters():
            p.grad = dr.lines.all_reduce(everyone, p.grad, "avg")  # type: ignore[arg-type]
    first = torch.nn.utils.get_total_norm([p.grad for p in own[0].experts.parameters()], norm_type)  # type: ignore[misc]
    found = stages[0].experts.grad_norm(norm_type)  # type: ignore[operator]
    for mine in dr.shards(found):
        torch.testing.assert_close(mine, first)
    wanted = nn.utils.clip_grad_norm_([p for stage in own for p in stage.parameters()], 0.1, norm_type)
    torch.testing.assert_close(pipe.clip_grad_norm_(0.1, norm_type).cpu(), wanted)
    for stage, twin in zip(stages, own):
        for p, q in zip(stage.router.parameters(), twin.router.parameters()):
            for mine in dr.shards(p.grad):  # type: ignore[arg-type]
                torch.testing.assert_close(mine, q.grad)
