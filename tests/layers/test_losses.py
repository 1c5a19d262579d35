"""Losses over partitions are the serial ones: values and gradients, by all reductions, on up to 12 places."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from cut_layers import cases, over, spaced
from parts import numbers

pytestmark = pytest.mark.usefixtures("twelve")

nn = dr.nn
SIZE = (3, 4, 7)
Make = Callable[..., torch.Tensor]


def _plain(seed: int) -> torch.Tensor:
    return numbers(SIZE, seed)


def _share(seed: int) -> torch.Tensor:
    return _plain(seed).sigmoid()


def _logarithm(seed: int) -> torch.Tensor:
    return _plain(seed).log_softmax(1)


def _count(seed: int) -> torch.Tensor:
    return _plain(seed).abs().mul(4).floor()


# The loss, its options, its inputs and its targets.
ELEMENTS: dict[str, tuple[str, dict[str, Any], Make, Make]] = {
    "squares": ("MSELoss", {}, _plain, _plain),
    "distances": ("L1Loss", {}, _plain, _plain),
    "smooth": ("SmoothL1Loss", dict(beta=0.7), _plain, _plain),
    "huber": ("HuberLoss", dict(delta=0.6), _plain, _plain),
    "probabilities": ("BCELoss", {}, _share, _share),
    "probabilities, weighted": ("BCELoss", dict(weight=_share(5)[:1]), _share, _share),
    "logits": ("BCEWithLogitsLoss", {}, _plain, _share),
    "logits, weighted": (
        "BCEWithLogitsLoss",
        dict(weight=_share(5)[:, :1], pos_weight=_share(6)[0, :, :1]),
        _plain,
        _share,
    ),
    "divergence": ("KLDivLoss", {}, _logarithm, _share),
    "divergence of logarithms": ("KLDivLoss", dict(log_target=True), _logarithm, _logarithm),
    "poisson": ("PoissonNLLLoss", {}, _plain, _count),
    "poisson, whole": ("PoissonNLLLoss", dict(log_input=False, full=True, eps=1e-6), _share, _count),
}


def assert_as_serial(
    theirs: Any, ours: Any, on: dr.mesh.Partition, x: torch.Tensor, target: torch.Tensor
) -> None:
    """Compare the loss and the gradient of the inputs, which may be repeated along what `on` cuts."""
    here, there = (x.clone().requires_grad_() for _ in range(2))
    expected = theirs(here, target)
    found = ours(on.scatter(there), target)
    expected.sum().backward()
    if ours.reduction == "none":
        # Where classes are cut, places with the same batch have the same losses.
        cut = expected.dim() < x.dim()
        first = [k for k in range(len(on)) if not (cut and len(on.shape) > 1 and on.index(k)[1])]
        if not cut:
            torch.testing.assert_close(on.gather(found).detach(), expected.detach())
        sum(found[k].sum().cpu() for k in first).backward()
    else:
        torch.testing.assert_close(found.cpu().detach(), expected.detach())
        assert found.place == on.places[0]
        found.backward()
    torch.testing.assert_close(there.grad, here.grad)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")
@pytest.mark.parametrize(
    "name",
    cases(ELEMENTS, set(ELEMENTS) - {"probabilities", "logits", "divergence of logarithms", "poisson"}),
)
def test_a_loss_of_elements_is_the_serial_one(name: str) -> None:
    kind, options, inputs, targets = ELEMENTS[name]
    words = ["mean", "sum", "none", *(["batchmean"] if kind == "KLDivLoss" else [])]
    # Some places of the second one have nothing.
    for word, shape in zip(words, [(2, 1, 3), (5,), (1, 2, 3), (2, 2)]):
        on = spaced(shape)
        assert_as_serial(
            getattr(torch.nn, kind)(reduction=word, **options),
            getattr(nn, kind)(on, reduction=word, **options),
            on,
            inputs(1),
            targets(2),
        )


@pytest.mark.parametrize("shape", [(4,), (2, 1, 3), (2, 3, 1), (1, 5)])
@pytest.mark.parametrize("reduction", cases(["mean", "sum", "none"], {"mean"}))
def test_a_cross_entropy_is_the_serial_one(reduction: str, shape: tuple[int, ...]) -> None:
    on = spaced(shape)
    target = torch.arange(21).reshape(3, 7) % 4
    target[0, 2] = -100
    cut = len(shape) > 1 and shape[1] > 1
    weight = None if cut else torch.tensor([1.0, 2.0, 0.5, 3.0]).double()
    options: dict[str, Any] = dict(reduction=reduction, weight=weight, label_smoothing=0.0 if cut else 0.1)
    theirs, ours = torch.nn.CrossEntropyLoss(**options), nn.CrossEntropyLoss(on, **options)
    assert_as_serial(theirs, ours, on, numbers(SIZE, 1), target)


def test_what_is_ignored_may_be_the_number_of_no_class() -> None:
    on, target = spaced((2, 1, 3)), torch.arange(21).reshape(3, 7) % 4
    target[target == 2] = 255
    options: dict[str, Any] = dict(weight=torch.tensor([1.0, 2.0, 0.5, 3.0]).double(), ignore_index=255)
    theirs, ours = torch.nn.CrossEntropyLoss(**options), nn.CrossEntropyLoss(on, **options)
    assert_as_serial(theirs, ours, on, numbers(SIZE, 1), target)
    cut = spaced((2, 3))
    theirs, ours = torch.nn.CrossEntropyLoss(ignore_index=255), nn.CrossEntropyLoss(cut, ignore_index=255)
    assert_as_serial(theirs, ours, cut, numbers(SIZE, 1), target)


@pytest.mark.parametrize("number", [-1, 4, 255])
@pytest.mark.parametrize("shape", [(2,), (1, 3), (1, 6)], ids=str)
def test_a_target_of_no_class_is_refused(shape: tuple[int, ...], number: int) -> None:
    on = spaced(shape)
    loss = nn.CrossEntropyLoss(on)(on.scatter(numbers((2, 4), 1)), torch.tensor([0, number]))
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        loss.item()
    # Each place with some of the classes has refused it.
    for _ in on.places:
        with contextlib.suppress(IndexError, RuntimeError):
            dr.synchronize()


@pytest.mark.parametrize("kind", ["MSELoss", "L1Loss", "BCEWithLogitsLoss"])
def test_a_mean_of_narrow_numbers_is_finite_where_their_sum_is_not(kind: str) -> None:
    # Some places of this partition have nothing.
    on = spaced((2, 5))
    x, target = torch.full((300, 4, 200), 3.0).half(), torch.zeros(300, 4, 200).half()
    x[0, 0, :100] = -1.5
    assert_as_serial(getattr(torch.nn, kind)(), getattr(nn, kind)(on), on, x, target)


@pytest.mark.parametrize("shape", [(3,), (1, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cross_entropy_of_many_narrow_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # More than float16 can count, and losses whose sum is above that.
    on, rows = spaced(shape), 70_001
    x, target = numbers((rows, 4), 1).to(dtype), torch.arange(rows) % 4
    found = nn.CrossEntropyLoss(on)(on.scatter(x), target)
    assert isinstance(found, torch.Tensor) and found.dtype == dtype
    expected = torch.nn.functional.cross_entropy(x.float(), target)
    torch.testing.assert_close(found.cpu().float(), expected, rtol=4e-3, atol=0)


def test_weights_and_targets_may_be_cut_in_another_way() -> None:
    on = over([5, 2], (2,))
    x, target, weight = numbers((5,), 1), numbers((5,), 2).sigmoid(), numbers((5,), 3).sigmoid()
    here = [part.to(home.device) for part, home in zip(x.split([1, 4]), on.homes)]
    there = [part.to(home.device) for part, home in zip(target.split([1, 4]), on.homes)]
    loss = nn.BCEWithLogitsLoss(on, weight=weight)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(x, target, weight)
    torch.testing.assert_close(loss(here, there).cpu(), expected)
    assert list(loss.state_dict()) == list(torch.nn.BCEWithLogitsLoss(weight=weight).state_dict())
    with pytest.raises(dr.errors.UsageError, match=r"the target of the shard on .* is \(1,\), .* got \(3,\)"):
        loss(here, on.scatter(target))
    with pytest.raises(dr.errors.UsageError, match=r"weight must fit the inputs, \(5,\), .* it is \(4,\)"):
        nn.BCELoss(on, weight=weight[:4])(on.scatter(target), target)
    with pytest.raises(dr.errors.UsageError, match='"none", "mean" or "sum", got \'batchmean\''):
        nn.L1Loss(on, "batchmean")
    with pytest.raises(dr.errors.UsageError, match=r"target of these inputs is \(5,\), got \(3,\)"):
        nn.MSELoss(on)(here, torch.ones(3))
