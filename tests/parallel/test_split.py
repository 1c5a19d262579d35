"""Cutting models into stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distruntime as dr
from distruntime.parallel.splitting import balanced


def test_the_heaviest_part_is_as_light_as_can_be() -> None:
    assert balanced([1, 1, 1, 1], 2) == [2]
    assert balanced([9, 1, 1, 1], 2) == [1]
    assert balanced([1, 2, 3, 4, 5], 3) == [3, 4]
    # No part is empty, also where nothing has a weight.
    assert balanced([0, 0, 7], 3) == [1, 2]
    # What has no weight stays with what comes before it.
    assert balanced([5, 0, 0, 5], 2) == [3]
    assert balanced([5, 0, 5, 0, 0, 5, 0], 3) == [2, 5]


def test_a_sequential_is_cut_between_its_children() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    parts = dr.parallel.split(model, 3)
    assert [list(dict(part.named_children())) for part in parts] == [["0", "1"], ["2"], ["3", "4"]]
    x = torch.randn(4, 8)
    assert torch.equal(parts[2](parts[1](parts[0](x))), model(x))
    keys = [key for part in parts for key in part.state_dict()]
    assert keys == list(model.state_dict())
    named = dr.parallel.split(model, 2, by=["3"])
    assert list(dict(named[1].named_children())) == ["3", "4"]
    (alone,) = dr.parallel.split(model, 1)
    assert torch.equal(alone(x), model(x))


def test_a_child_that_stands_in_several_places_stays_in_all_of_them() -> None:
    """The second one was left out: the parts together were another model."""
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 4), act)
    x = torch.randn(3, 4)
    for parts in (
        dr.parallel.split(model, 2),
        dr.parallel.split(model, 3, by=["1", "3"]),
    ):
        assert [name for part in parts for name in part._modules] == list(model._modules)
        found = x
        for part in parts:
            found = part(found)
        assert torch.equal(found, model(x))
    linear = nn.Linear(4, 4)
    with pytest.raises(dr.errors.UsageError, match=r"1.weight of part 1 is also 0.weight of part 0"):
        dr.parallel.split(nn.Sequential(linear, linear), 2)


class Residual(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + super().forward(input)


def test_a_sequential_with_a_forward_of_its_own_is_traced(session: object) -> None:
    """It was cut between its children, and what its forward adds was lost."""
    model, x, y = Residual(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4), torch.randn(8, 4)
    with pytest.raises(dr.errors.UsageError, match=r"a Residual is no plain nn.Sequential.*example="):
        dr.parallel.split(model, 2)
    parts = dr.parallel.split(model, 2, by=["1"], example=x[:4])
    stages = [part.to(dr.place(k, "cpu")) for k, part in enumerate(parts)]
    output = dr.parallel.pipeline(stages, 2, loss_fn=nn.functional.mse_loss).step(x, target=y)
    torch.testing.assert_close(output.cpu(), model(x).detach())


class Skips(nn.Module):
    """The mask is used in the middle, the first values at the end too, and the middle ones are a result."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.a(x).chunk(2, -1)
        middle = self.b(first) * mask
        return self.c(middle).tanh() + second.sum(-1, keepdim=True), middle


@pytest.mark.parametrize("names", [["b"], ["c"], ["b", "c"]], ids=str)
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_values_that_skip_a_part_are_handed_on(names: list[str], schedule: str, session: object) -> None:
    """The next part was not given what it takes, and results of earlier parts were lost without a word."""
    model, x, y = Skips(), torch.randn(8, 4), torch.randn(8, 4)
    mask = torch.rand(8, 4)
    parts = dr.parallel.split(model, len(names) + 1, by=names, example=(x[:4], mask[:4]))
    stages = [part.to(dr.place(k % 2, "cpu")) for k, part in enumerate(parts)]
    pipe = dr.parallel.pipeline(
        stages,
        4,
        schedule if len(parts) == 2 else "1F1B",
        loss_fn=lambda out, y: nn.functional.mse_loss(out[0], y) + out[1].square().mean(),
    )
    expected = model(x, mask)
    (nn.functional.mse_loss(expected[0], y) + expected[1].square().mean()).backward()
    for given, named in (((x, mask), {}), ((x,), {"mask": mask})):
        pipe.zero_grad()
        found = pipe.step(*given, target=y, **named)
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.cpu(), wanted.detach())
        grads = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
        for name, p in model.named_parameters():
            torch.testing.assert_close(grads[name].cpu(), p.grad)


class Blocks(nn.Module):
    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(n))
        self.head = nn.Linear(8, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def test_any_other_model_is_traced_and_its_parts_go_to_workers(session: object) -> None:
    model, tokens = Blocks(), torch.randint(50, (8, 3))
    parts = dr.parallel.split(model, 2, example=tokens[:4])
    stages = [part.to(dr.place(k, "cpu")) for k, part in enumerate(parts)]
    pipe = dr.parallel.pipeline(
        stages, 2, loss_fn=lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
    )
    target = torch.randint(50, (8, 3))
    output = pipe.step(tokens, target=target)
    expected = model(tokens)
    torch.testing.assert_close(output.cpu(), expected.detach())
    nn.functional.cross_entropy(expected.flatten(0, 1), target.flatten()).backward()
    grads = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name].cpu(), p.grad)
    # The model is as it was, so it can be cut again.
    assert [
        len(list(part.parameters())) > 0
        for part in dr.parallel.split(model, 3, ["layers.1", "head"], example=tokens)
    ]


def test_what_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(dr.errors.UsageError, match="cuts a module, got int"):
        dr.parallel.split(3, 2)  # type: ignore[arg-type]
    with pytest.raises(dr.errors.UsageError, match="from 1 on, got 0"):
        dr.parallel.split(model, 0)
    with pytest.raises(
        dr.errors.UsageError, match=r"names go into by=, dr.parallel.split\(model, 2, by=\['1'\]\)"
    ):
        dr.parallel.split(model, ["1"])  # type: ignore[arg-type]
    with pytest.raises(dr.errors.UsageError, match="2 children cannot be cut into 3 parts"):
        dr.parallel.split(model, 3)
    with pytest.raises(dr.errors.UsageError, match="got 'size'"):
        dr.parallel.split(model, 2, by="size")
    with pytest.raises(dr.errors.UsageError, match="begin at 1 names"):
        dr.parallel.split(model, 2, by=["0", "1"])
    with pytest.raises(dr.errors.UsageError, match="no child 'x' to begin a part with; it has 0, 1"):
        dr.parallel.split(model, 2, by=["x"])
    with pytest.raises(dr.errors.UsageError, match="after its first child"):
        dr.parallel.split(model, 2, by=["0"])
    with pytest.raises(dr.errors.UsageError, match=r"or a list of names, got 'time'"):
        dr.parallel.split(model, 2, by="time")
    with pytest.raises(dr.errors.UsageError, match=r"is no plain nn.Sequential"):
        dr.parallel.split(Blocks(), 2)
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(dr.errors.UsageError, match=r"1.weight of part 1 is also 0.weight of part 0"):
        dr.parallel.split(tied, 2)
