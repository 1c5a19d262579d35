"""Weights that live in parts, on the places that use them or on grids, and fused weights."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from cut_layers import assert_as_serial, cases, over, spaced
from distruntime.testing import check_adjoint
from parts import numbers

pytestmark = pytest.mark.usefixtures("twelve")

nn = dr.nn
Make = Callable[[dr.mesh.Partition], Any]
# The inputs' partition, the layer, the serial one and the size of the inputs.
Case = tuple[tuple[int, ...], Make, Callable[[], Any], tuple[int, ...]]


def _cut(shape: tuple[int, ...], start: int = 5) -> dr.mesh.Partition:
    return spaced(shape, start)


LAYERS: dict[str, Case] = {
    "linear, inputs gathered": (
        (2, 3),
        lambda P: nn.Linear(P, 5, 7, form="gather", cut_weights=True),
        lambda: torch.nn.Linear(5, 7),
        (3, 5),
    ),
    "linear, sums scattered": (
        (2, 3),
        lambda P: nn.Linear(P, 5, 7, form="scatter", cut_weights=True),
        lambda: torch.nn.Linear(5, 7),
        (3, 5),
    ),
    "linear, more places than features": (
        (1, 7),
        lambda P: nn.Linear(P, 2, 5, form="gather", cut_weights=True),
        lambda: torch.nn.Linear(2, 5),
        (3, 2),
    ),
    "linear, columns": (
        (1, 1),
        lambda P: nn.Linear(P, 5, 7, P_y=_cut((1, 3)), cut_weights=True),
        lambda: torch.nn.Linear(5, 7),
        (3, 5),
    ),
    "linear, rows": (
        (1, 3),
        lambda P: nn.Linear(P, 5, 7, P_y=_cut((1, 1)), cut_weights=True),
        lambda: torch.nn.Linear(5, 7),
        (3, 5),
    ),
    "linear, nothing cut": (
        (2, 1),
        lambda P: nn.Linear(P, 5, 7, cut_weights=True),
        lambda: torch.nn.Linear(5, 7),
        (3, 5),
    ),
    "linear, a grid": (
        (1, 1, 2),
        lambda P: nn.Linear(P, 5, 7, P_y=_cut((1, 1, 3)), P_w=_cut((3, 2), 2)),
        lambda: torch.nn.Linear(5, 7),
        (2, 3, 5),
    ),
    "linear, a grid without bias": (
        (1, 4),
        lambda P: nn.Linear(P, 6, 2, bias=False, P_y=_cut((1, 3)), P_w=_cut((3, 4), 0)),
        lambda: torch.nn.Linear(6, 2, bias=False),
        (3, 6),
    ),
    "linear, a grid of one column": (
        (1, 1),
        lambda P: nn.Linear(P, 5, 7, P_y=_cut((1, 3)), P_w=_cut((3, 1), 5)),
        lambda: torch.nn.Linear(5, 7),
        (3, 5),
    ),
    "embedding, columns": (
        (2, 1),
        lambda P: nn.Embedding(P, 11, 7, padding_idx=3, P_y=_cut((2, 1, 3)), cut_weights=True),
        lambda: torch.nn.Embedding(11, 7, padding_idx=3),
        (),
    ),
    "convolution, channels and space": (
        (1, 2, 1, 2),
        lambda P: nn.Conv2d(P, 3, 5, 3, padding=1, form="gather", cut_weights=True),
        lambda: torch.nn.Conv2d(3, 5, 3, padding=1),
        (2, 3, 4, 7),
    ),
    "convolution, groups": (
        (1, 3, 2),
        lambda P: nn.Conv1d(P, 6, 9, 3, groups=3, cut_weights=True),
        lambda: torch.nn.Conv1d(6, 9, 3, groups=3),
        (2, 6, 9),
    ),
    "convolution, a grid": (
        (1, 2, 1),
        lambda P: nn.Conv1d(P, 3, 5, 3, stride=2, padding=1, P_y=_cut((1, 3, 1)), P_w=_cut((3, 2, 1), 2)),
        lambda: torch.nn.Conv1d(3, 5, 3, stride=2, padding=1),
        (2, 3, 7),
    ),
    "convolution, a grid and space": (
        (1, 2, 1, 2),
        lambda P: nn.Conv2d(
            P, 3, 5, 3, padding=1, padding_mode="circular", P_y=_cut((1, 3, 1, 2)), P_w=_cut((3, 2, 1, 2), 0)
        ),
        lambda: torch.nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular"),
        (2, 3, 3, 6),
    ),
    "transposed, a grid and space": (
        (1, 3, 2),
        lambda P: nn.ConvTranspose1d(P, 4, 5, 3, stride=2, P_y=_cut((1, 2, 2)), P_w=_cut((2, 3, 2), 7)),
        lambda: torch.nn.ConvTranspose1d(4, 5, 3, stride=2),
        (2, 4, 5),
    ),
}


QUICK = {
    "linear, sums scattered",
    "linear, columns",
    "linear, a grid",
    "embedding, columns",
    "convolution, channels and space",
    "convolution, a grid",
}


@pytest.mark.parametrize("name", cases(LAYERS, QUICK))
def test_a_layer_with_weights_in_parts_is_the_serial_one(name: str) -> None:
    shape, make, serial, size = LAYERS[name]
    on = spaced(shape)
    x = torch.arange(20).reshape(4, 5) % 11 if name.startswith("embedding") else None
    layer = assert_as_serial(make, serial, on, size, x=x)
    inputs = on.scatter(numbers(size, 3) if x is None else x)
    if x is None:
        assert check_adjoint(layer, inputs) < 1e-12
    key, value = next(iter(layer.named_parameters()))
    # Nothing of a part comes from another place, and its gradient is the adjoint.
    run = lambda ws: torch.func.functional_call(layer, {key: ws[0]}, (inputs,))  # noqa: E731
    assert check_adjoint(run, [value]) < 1e-12
    if "nothing cut" not in name:
        assert len(layer.weight) > 1
        assert sum(part.numel() for part in layer.weight) == serial().weight.numel()


def test_a_state_is_loaded_onto_other_partitions() -> None:
    x = numbers((3, 5), 1)
    torch.manual_seed(2)
    serial = torch.nn.Sequential(torch.nn.Linear(5, 7)).double()
    P, Q = spaced((1, 2)), spaced((1, 4), 3)
    grid = nn.Linear(P, 5, 7, P_y=_cut((1, 3)), P_w=_cut((3, 2), 0), dtype=torch.float64)
    columns = nn.Linear(Q, 5, 7, form="gather", cut_weights=True, dtype=torch.float64)
    models = [torch.nn.Sequential(grid), torch.nn.Sequential(columns)]
    file = io.BytesIO()
    models[0].load_state_dict(serial.state_dict())
    torch.save(models[0].state_dict(), file)
    file.seek(0)
    models[1].load_state_dict(torch.load(file))
    for model, on, to in ((models[0], P, grid.mixing.target), (models[1], Q, Q)):
        for one in (model, copy.deepcopy(model)):
            torch.testing.assert_close(to.gather(one(on.scatter(x))).detach(), serial(x).detach())
        assert list(model.state_dict()) == ["0.weight", "0.bias"]
    # Right from one set of places to another.
    models[0].load_state_dict(models[1].state_dict(), assign=True)
    torch.testing.assert_close(grid.mixing.target.gather(grid(P.scatter(x))).detach(), serial(x).detach())
    with pytest.raises(
        RuntimeError, match=r"size mismatch for 0.weight: .*\[7, 4\].* is torch.Size\(\[7, 5\]"
    ):
        models[1].load_state_dict({**serial.state_dict(), "0.weight": torch.ones(7, 4)})
    with pytest.raises(RuntimeError, match=r'Missing key.*"0.bias"'):
        models[1].load_state_dict({"0.weight": serial[0].weight})
    assert models[1].load_state_dict({}, strict=False).missing_keys == ["0.weight", "0.bias"]
    assert repr(columns) == "Linear(in_features=5, out_features=7, bias=True)"


def test_parts_are_drawn_by_the_size_of_the_whole() -> None:
    layer = nn.Linear(spaced((1, 4)), 4096, 64, form="scatter", cut_weights=True)
    first, second = (part.cpu() for part in layer.weight[:2])
    assert tuple(first.shape) == (64, 1024) and not torch.equal(first, second)
    # The bound of a layer of 4,096 inputs, not of 1,024.
    assert 0.95 / 64 < first.abs().max() <= 1 / 64
    # The largest of 64 numbers.
    assert 0.5 / 64 < layer.bias[0].cpu().abs().max() <= 1 / 64
    layer.reset_parameters()
    assert not torch.equal(layer.weight[0].cpu(), first)
    padded = nn.Embedding(over([0], (1,)), 300, 64, padding_idx=3, P_y=over([0, 4], (1, 2)), cut_weights=True)
    for part in padded.weight:
        assert abs(float(part.detach().std()) - 1) < 0.1 and not part[3].any()


def test_training_with_weights_in_parts_is_the_serial_one() -> None:
    whole, cut, grid = over([4], (1, 1)), over([4, 0, 8], (1, 3)), over([0, 4, 8, 1, 5, 9], (2, 3))
    out = over([1, 2], (1, 2))
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 5)).double()
    ours = torch.nn.Sequential(
        nn.Linear(whole, 6, 10, P_y=cut, cut_weights=True),
        nn.Each(torch.nn.GELU()),
        nn.Linear(cut, 10, 5, P_y=out, P_w=grid),
    ).double()
    ours.load_state_dict(theirs.state_dict())
    steps = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (theirs, ours)]
    error = nn.MSELoss(out)
    for step in range(5):
        x, y = numbers((4, 6), step), numbers((4, 5), 9)
        losses = [torch.nn.functional.mse_loss(theirs(x), y), error(ours(whole.scatter(x)), y)]
        torch.testing.assert_close(losses[1].detach().cpu(), losses[0].detach())
        norms = []
        for value, own, model in zip(losses, steps, (theirs, ours)):
            own.zero_grad()
            value.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            own.step()
        torch.testing.assert_close(norms[1].cpu(), norms[0])
    for (name, p), q in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(p.cpu(), q, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("cut_weights", [False, True])
def test_a_fused_weight_is_cut_weight_by_weight(cut_weights: bool) -> None:
    # A column layer that is cut as one would have all of q and half of k on its first place.
    whole, heads = over([4], (1, 1, 1)), over([4, 0, 8], (1, 1, 3))
    torch.manual_seed(0)
    theirs = [torch.nn.Linear(6, 3 * 5).double(), torch.nn.Linear(5, 6).double()]
    for P in (whole, spaced((1, 1, 3))):
        how: dict[str, Any] = dict(P_y=heads) if P is whole else dict(form="gather")
        on = heads if P is whole else P
        qkv = nn.Linear(P, 6, 3 * 5, fused=3, cut_weights=cut_weights, dtype=torch.float64, **how)
        last = nn.Linear(on, 5, 6, P_y=whole, dtype=torch.float64, cut_weights=cut_weights)
        qkv.load_state_dict(theirs[0].state_dict())
        last.load_state_dict(theirs[1].state_dict())
        here, there = (numbers((2, 3, 6), 1).requires_grad_() for _ in range(2))
        parts = [y.chunk(3, -1) for y in qkv(P.scatter(there))]
        for k, value in enumerate(theirs[0](here).chunk(3, -1)):
            torch.testing.assert_close(on.gather([part[k] for part in parts]).detach(), value.detach())
        z = whole.gather(last([q * k.tanh() + v for q, k, v in parts]))
        q, k, v = theirs[0](here).chunk(3, -1)
        y = theirs[1](q * k.tanh() + v)
        torch.testing.assert_close(z.detach(), y.detach())
        for layer in theirs:
            layer.zero_grad()
        for value in (y, z):
            value.square().sum().backward()
        torch.testing.assert_close(there.grad, here.grad)
        grads = [p.grad for p in qkv.parameters()]
        if cut_weights:
            feeds = [qkv._feeds[name][0] for name in ("weight", "bias")]
            grads = [
                feed.joined([p.grad for p in getattr(qkv, n)]) for feed, n in zip(feeds, ("weight", "bias"))
            ]
        for found, p in zip(grads, theirs[0].parameters(), strict=True):
            torch.testing.assert_close(found.cpu(), p.grad)
        assert check_adjoint(qkv, P.scatter(numbers((2, 3, 6), 2))) < 1e-12


def test_what_does_not_fit_says_what() -> None:
    P, P_y, P_w = spaced((1, 2)), _cut((1, 3)), _cut((3, 2), 0)
    image = spaced((2, 2, 1))
    errors: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (
            lambda: nn.Linear(P, 4, 6, P_y=P_y, P_w=_cut((2, 3))),
            dr.errors.UsageError,
            r"P \(1, 2\) and P_y \(1, 3\) it is \(3, 2\), got \(2, 3\)",
        ),
        (lambda: nn.Linear(P, 4, 6, P_w=P_w), dr.errors.NotSupportedError, "with P_w takes P_y"),
        (lambda: nn.Linear(P, 4, 6, P_y=P_y, P_w=3), dr.errors.UsageError, "P_w, .* got int"),
        (
            lambda: nn.Linear(spaced((2, 2)), 4, 6, P_y=_cut((2, 3)), P_w=P_w),
            dr.errors.UsageError,
            "no dimension before 1 is cut",
        ),
        (
            lambda: nn.Conv1d(image, 4, 6, 3, P_y=_cut((2, 3, 1)), P_w=_cut((3, 2, 1), 0)),
            dr.errors.UsageError,
            "parts of space.* no dimension before 1 is cut",
        ),
        (
            lambda: nn.Linear(P, 4, 6, fused=3, form="scatter"),
            dr.errors.UsageError,
            'fused=3 .* and form "scatter"',
        ),
        (
            lambda: nn.Linear(P, 4, 7, fused=3, form="gather"),
            dr.errors.UsageError,
            "a multiple of 3 outputs, .* got 7",
        ),
    ]
    for call, kind, text in errors:
        with pytest.raises(kind, match=text):
            call()
