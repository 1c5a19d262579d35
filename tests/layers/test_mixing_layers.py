"""Channels and features that are cut, norms, embeddings, and trainings, over up to 12 places."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from cut_layers import assert_as_serial, cases, over, pair, spaced
from distruntime.testing import check_adjoint
from parts import numbers

pytestmark = pytest.mark.usefixtures("twelve")

nn = dr.nn

CHANNELS = {
    "inputs are gathered": ("Conv2d", (1, 3, 1, 2), dict(form="gather"), (5, 7)),
    "sums are scattered": ("Conv2d", (1, 3, 1, 2), dict(form="scatter"), (5, 7)),
    "the fewer move: inputs": ("Conv1d", (2, 4, 1), {}, (4, 6)),
    "the fewer move: outputs": ("Conv1d", (1, 2, 2), {}, (7, 3)),
    "transposed, gathered": ("ConvTranspose1d", (1, 3, 2), dict(form="gather"), (5, 7)),
    "transposed, scattered": ("ConvTranspose2d", (1, 3, 2, 1), dict(form="scatter"), (5, 7)),
    "three dimensions": ("Conv3d", (1, 2, 2, 1, 2), dict(form="scatter"), (4, 3)),
    "more places than channels": ("Conv1d", (1, 6, 2), dict(form="gather"), (4, 3)),
    "more places than channels, scattered": ("Conv1d", (1, 6, 2), dict(form="scatter"), (4, 3)),
}


@pytest.mark.parametrize(
    "name",
    cases(CHANNELS, {"inputs are gathered", "transposed, scattered", "more places than channels, scattered"}),
)
def test_a_convolution_with_channels_cut_is_the_serial_one(name: str) -> None:
    kind, shape, options, channels = CHANNELS[name]
    size = (2, channels[0], 7, 6, 5)[: len(shape)]
    plain = dict(kernel_size=3, padding=1)
    on = spaced(shape)
    assert_as_serial(
        lambda P: getattr(nn, kind)(P, *channels, **plain, **options),
        lambda: getattr(torch.nn, kind)(*channels, **plain),
        on,
        size,
    )
    layer = getattr(nn, kind)(on, *channels, **plain, **options, bias=False, dtype=torch.float64)
    assert check_adjoint(layer, on.scatter(numbers(size, 3))) < 1e-12


def test_only_one_side_has_its_channels_cut() -> None:
    whole, cut = over([5], (1, 1, 1)), over([2, 6, 0], (1, 3, 1))
    for P, P_y in ((whole, cut), (cut, whole), (over([1, 4], (1, 1, 2)), over([0, 4, 8, 9], (1, 2, 2)))):
        assert_as_serial(
            lambda P, P_y=P_y: nn.Conv1d(P, 5, 7, 3, padding=1, P_y=P_y),
            lambda: torch.nn.Conv1d(5, 7, 3, padding=1),
            P,
            (2, 5, 9),
        )


LINEAR: dict[str, tuple[tuple[int, ...], dict[str, Any], tuple[int, ...]]] = {
    "rows": ((4, 1), {}, (7, 5)),
    "rows of rows": ((2, 3, 1), {}, (3, 4, 5)),
    "gathered": ((2, 3), dict(form="gather"), (3, 5)),
    "scattered": ((2, 3), dict(form="scatter"), (3, 5)),
    "what moves less": ((1, 2, 4), {}, (2, 3, 5)),
    "more places than features": ((1, 12), {}, (2, 5)),
}


@pytest.mark.parametrize("name", cases(LINEAR, {"rows of rows", "gathered", "scattered"}))
def test_linear_is_the_serial_one(name: str) -> None:
    shape, options, size = LINEAR[name]
    on = spaced(shape)
    assert_as_serial(lambda P: nn.Linear(P, 5, 7, **options), lambda: torch.nn.Linear(5, 7), on, size)
    layer = nn.Linear(on, 5, 7, dtype=torch.float64, **options)
    xs = on.scatter(numbers(size, 3))
    assert check_adjoint(layer, xs) < 1e-12
    weight = layer.weight.detach()
    run = lambda ws: torch.func.functional_call(layer, {"weight": ws[0]}, (xs,))  # noqa: E731
    assert check_adjoint(run, [weight]) < 1e-12


def test_linear_by_broadcast_and_by_sum() -> None:
    whole, cut = over([7], (1, 1)), over([0, 4, 8, 1], (1, 4))
    for P, P_y in ((whole, cut), (cut, whole)):
        assert_as_serial(
            lambda P, P_y=P_y: nn.Linear(P, 6, 5, P_y=P_y), lambda: torch.nn.Linear(6, 5), P, (3, 6)
        )


def test_a_block_of_a_column_and_a_row_layer_has_the_gradient_of_its_input() -> None:
    # One of the systems before this one forgets the sum over places here.
    whole, cut = over([4], (1, 1, 1)), over([4, 0, 8], (1, 1, 3))
    torch.manual_seed(0)
    serial = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.GELU(), torch.nn.Linear(9, 6)).double()
    block = torch.nn.Sequential(
        nn.Linear(whole, 6, 9, P_y=cut), nn.Each(torch.nn.GELU()), nn.Linear(cut, 9, 6, P_y=whole)
    ).double()
    block.load_state_dict(serial.state_dict())
    here, there = (numbers((2, 3, 6), 1).requires_grad_() for _ in range(2))
    serial(here).square().sum().backward()
    whole.gather(block(whole.scatter(there))).square().sum().backward()
    torch.testing.assert_close(there.grad, here.grad)


NORMS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "batch 1d": ("BatchNorm1d", (3,), {}, (4, 1), (7, 3)),
    "batch 1d with length": ("BatchNorm1d", (3,), {}, (2, 1, 3), (5, 3, 7)),
    "batch 2d": ("BatchNorm2d", (3,), {}, (2, 1, 1, 3), (3, 3, 5, 7)),
    "batch 2d, channels cut": ("BatchNorm2d", (5,), {}, (2, 3, 1, 1), (3, 5, 4, 5)),
    "batch 2d, only channels": ("BatchNorm2d", (5,), {}, (1, 4), (3, 5, 4, 5)),
    "batch 2d, empty places": ("BatchNorm2d", (2,), {}, (3, 1, 2, 1), (2, 2, 3, 2)),
    "batch 2d, plain": ("BatchNorm2d", (3,), dict(affine=False, momentum=None), (2, 1, 2), (3, 3, 4, 4)),
    "batch 2d, untracked": ("BatchNorm2d", (3,), dict(track_running_stats=False), (2,), (3, 3, 4, 4)),
    "batch 3d": ("BatchNorm3d", (2,), {}, (1, 1, 1, 2, 2), (2, 2, 3, 4, 5)),
    "layer": ("LayerNorm", (6,), {}, (2, 3, 1), (3, 4, 6)),
    "layer, cut": ("LayerNorm", (7,), {}, (2, 1, 3), (3, 4, 7)),
    "layer, two dimensions": ("LayerNorm", ((4, 7),), dict(bias=False), (1, 2, 3), (3, 4, 7)),
    "layer, plain": ("LayerNorm", (7,), dict(elementwise_affine=False), (1, 4), (3, 7)),
    "layer, empty places": ("LayerNorm", (3,), {}, (1, 4), (3, 3)),
    "rms": ("RMSNorm", (6,), {}, (2, 3, 1), (3, 4, 6)),
    "rms, cut": ("RMSNorm", (7,), dict(eps=1e-6), (2, 1, 3), (3, 4, 7)),
}


QUICK_NORMS = {
    "batch 1d",
    "batch 2d, channels cut",
    "batch 3d",
    "layer, cut",
    "rms, cut",
}


@pytest.mark.parametrize("name", cases(NORMS, QUICK_NORMS))
def test_a_norm_is_the_serial_one(name: str) -> None:
    kind, arguments, options, shape, size = NORMS[name]
    on = spaced(shape)
    make: Callable[..., Any] = lambda P: getattr(nn, kind)(P, *arguments, **options)  # noqa: E731
    serial: Callable[..., Any] = lambda: getattr(torch.nn, kind)(*arguments, **options)  # noqa: E731
    ours = assert_as_serial(make, serial, on, size)
    if name not in ("batch 1d", "batch 3d"):
        assert_as_serial(make, serial, on, size, torch.float32, rtol=2e-5)
    ours.eval()
    theirs = serial().double().eval()
    theirs.load_state_dict(copy.deepcopy(dr.fetch(dict(ours.state_dict()))))
    x = numbers(size, 5)
    torch.testing.assert_close(on.gather(ours(on.scatter(x))).detach(), theirs(x).detach())


def test_places_without_channels_take_running_statistics() -> None:
    on, x = spaced((1, 3)), numbers((4, 2, 5, 3), 0)
    ours, theirs = pair(lambda P: nn.BatchNorm2d(P, 2), lambda: torch.nn.BatchNorm2d(2), on, torch.float64)
    ours.eval(), theirs.eval()
    here, there = (x.clone().requires_grad_() for _ in range(2))
    expected, found = theirs(here), on.gather(ours(on.scatter(there)))
    torch.testing.assert_close(found.detach(), expected.detach())
    for y in (expected, found):
        y.sin().sum().backward()
    torch.testing.assert_close(there.grad, here.grad)
    torch.testing.assert_close(ours.weight.grad.cpu(), theirs.weight.grad)


def test_statistics_of_large_numbers_keep_their_digits() -> None:
    on, x = spaced((3, 1, 2)), numbers((6, 2, 50), 0, torch.float32) + 10_000
    ours, theirs = pair(lambda P: nn.BatchNorm1d(P, 2), lambda: torch.nn.BatchNorm1d(2), on, torch.float32)
    torch.testing.assert_close(on.gather(ours(on.scatter(x))).detach(), theirs(x).detach(), rtol=0, atol=2e-2)


def test_an_embedding_is_the_serial_one() -> None:
    x = torch.arange(20).reshape(4, 5) % 11
    for shape in ((4,), (2, 3)):
        assert_as_serial(
            lambda P: nn.Embedding(P, 11, 6, padding_idx=2),
            lambda: torch.nn.Embedding(11, 6, padding_idx=2),
            spaced(shape),
            (),
            x=x,
        )
    ids, columns = over([3, 7], (2, 1)), over([0, 1, 4, 5, 8, 9], (2, 1, 3))
    assert_as_serial(
        lambda P: nn.Embedding(P, 11, 7, P_y=columns), lambda: torch.nn.Embedding(11, 7), ids, (), x=x
    )


def _network(P: Any, rows: Any, one: Any) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        nn.Conv2d(P, 2, 4, 3, padding=1),
        nn.BatchNorm2d(P, 4),
        nn.Each(torch.nn.ReLU()),
        nn.MaxPool2d(P, 2),
        nn.Conv2d(P, 4, 6, 3, stride=2, padding=1),
        nn.Each(torch.nn.Tanh()),
        nn.Repartition(P, one),
        nn.Each(torch.nn.Flatten()),
        nn.Linear(rows, 6 * 3 * 3, 5),
    )


def _serial() -> torch.nn.Sequential:
    n = torch.nn
    return n.Sequential(
        n.Conv2d(2, 4, 3, padding=1),
        n.BatchNorm2d(4),
        n.ReLU(),
        n.MaxPool2d(2),
        n.Conv2d(4, 6, 3, stride=2, padding=1),
        n.Tanh(),
        n.Identity(),
        n.Flatten(),
        n.Linear(6 * 3 * 3, 5),
    )


@pytest.mark.parametrize(
    ("optimizer", "shape"),
    [
        (torch.optim.SGD, (1, 1, 2, 2)),
        pytest.param(
            torch.optim.AdamW, (1, 1, 3, 4), marks=pytest.mark.slow(reason="it trains over twelve places")
        ),
    ],
)
def test_five_steps_of_training_are_the_serial_ones(optimizer: Any, shape: tuple[int, ...]) -> None:
    P = spaced(shape)
    # The last layer's weights are elsewhere, so that a norm is one over several places.
    one, rows = over([5], (1, 1, 1, 1)), over([5], (1, 1))
    torch.manual_seed(0)
    theirs, ours = _serial().double(), _network(P, rows, one).double()
    ours.load_state_dict(theirs.state_dict())
    steps = [optimizer(m.parameters(), lr=0.05) for m in (theirs, ours)]
    entropy = nn.CrossEntropyLoss(rows)
    for step in range(5):
        x, y = numbers((6, 2, 11, 13), step), torch.arange(6) % 5
        expected = torch.nn.functional.cross_entropy(theirs(x), y)
        loss = entropy(ours(P.scatter(x)), y)
        torch.testing.assert_close(loss.detach().cpu(), expected.detach())
        norms = []
        for value, own, model in ((expected, steps[0], theirs), (loss, steps[1], ours)):
            own.zero_grad()
            value.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            own.step()
        # One of the systems before this one adds norms, where squares are to be added.
        torch.testing.assert_close(norms[1].cpu(), norms[0])
    for (name, p), q in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(p.cpu(), q, msg=lambda m, n=name: f"{n}: {m}")
    # Onto another partition, through a file.
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    Q = spaced((2, 1, 1, 3), 4)
    other = _network(Q, rows, one).double()
    other.load_state_dict(torch.load(file))
    x = numbers((6, 2, 11, 13), 9)
    for model in (ours, other, theirs):
        model.eval()
    expected = theirs(x).detach()
    for model, on in ((ours, P), (other, Q), (copy.deepcopy(ours), P)):
        torch.testing.assert_close(rows.gather(model(on.scatter(x))).detach(), expected)


def test_weights_are_drawn_as_torch_draws_them() -> None:
    P = over([3, 1], (1, 2, 1, 1))
    for make, serial in (
        (lambda: nn.Conv2d(P, 4, 6, 3, form="gather"), lambda: torch.nn.Conv2d(4, 6, 3)),
        (lambda: nn.Linear(over([3, 1], (1, 2)), 4, 6), lambda: torch.nn.Linear(4, 6)),
    ):
        torch.manual_seed(7)
        wanted = serial().state_dict()
        torch.manual_seed(7)
        for name, value in make().state_dict().items():
            assert torch.equal(value.cpu(), wanted[name]), name


def test_a_repartition_prints_its_partitions() -> None:
    P = over([3, 1], (2,))
    assert repr(nn.Repartition(P, P)) == f"Repartition({P!r}, {P!r})"


def test_what_does_not_fit_says_what() -> None:
    P, x = over([0, 1], (1, 2, 1, 1)), torch.ones(2, 4, 6, 6)
    errors: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: nn.Conv2d(3, 4, 4, 3), dr.errors.UsageError, "is a distruntime.mesh.Partition, got int"),
        (
            lambda: nn.Conv2d(4, 4, 3),
            TypeError,
            r"^Conv2d\(\) missing.*'kernel_size'. It takes P, in_channels",
        ),
        (lambda: nn.Linear(4, 4), TypeError, r"^Linear\(\) missing.*'out_features'. It takes P, in_features"),
        (
            lambda: nn.Conv2d(P, 4, 4, 3, groups=2, form="gather"),
            dr.errors.NotSupportedError,
            "leave out P_y and",
        ),
        (
            lambda: nn.ConvTranspose2d(P, 6, 6, 3, groups=3),
            dr.errors.NotSupportedError,
            "a multiple of 2, .* got 3",
        ),
        (
            lambda: nn.Conv2d(P, 4, 4, 3, padding=6, padding_mode="reflect")(P.scatter(x)),
            dr.errors.UsageError,
            'mode="reflect" pads 6 elements along dimension 2 by at most 5, got 6',
        ),
        (lambda: nn.Conv1d(P, 4, 4, 3), dr.errors.UsageError, "3 dimensions, and P has 4"),
        (
            lambda: nn.Conv2d(P, 4, 4, 3)(P.scatter(x)[:1]),
            dr.errors.UsageError,
            "one shard for each of the 2",
        ),
        (lambda: nn.Conv2d(P, 4, 4, 3)(x), dr.errors.UsageError, "xs must be a list"),
        (lambda: nn.Conv2d(P, 4, 4, 3, P_y=P), dr.errors.UsageError, "P_y differs from P"),
        (lambda: nn.Conv2d(P, 4, 4, 3, form="sum"), dr.errors.UsageError, 'form is "gather" or "scatter"'),
        (
            lambda: nn.Conv2d(P, 5, 4, 3)(P.scatter(x)),
            dr.errors.UsageError,
            "5 input channels, .* 4 together",
        ),
        (lambda: nn.Conv2d(P, 4, 4, 9)(P.scatter(x)), dr.errors.UsageError, "does not fit 6 inputs"),
        (lambda: nn.MaxPool2d(P, 2, return_indices=True), dr.errors.NotSupportedError, "return_indices"),
        (lambda: nn.Upsample(P, scale_factor=2, mode="area"), dr.errors.NotSupportedError, "got mode='area'"),
        (lambda: nn.BatchNorm2d(P, 5)(P.scatter(x)), dr.errors.UsageError, "5 features, .* 4 channels"),
        (
            lambda: nn.BatchNorm2d(P, 4)(P.scatter(torch.ones(1, 4, 1, 1))),
            dr.errors.UsageError,
            "more than 1 value",
        ),
        (
            lambda: nn.BatchNorm2d(P, 4, track_running_stats=False).eval()(P.scatter(torch.ones(1, 4, 1, 1))),
            dr.errors.UsageError,
            "more than 1 value",
        ),
        (lambda: nn.LayerNorm(over([0], (1,)), (6, 6)), dr.errors.UsageError, "as many dimensions"),
        (lambda: nn.Linear(P, 5, 5)(P.scatter(x)), dr.errors.UsageError, "with 5 features"),
        (lambda: nn.Each(torch.nn.Linear(2, 2)), dr.errors.UsageError, "without parameters"),
    ]
    for call, kind, text in errors:
        with pytest.raises(kind, match=text) as caught:
            call()
        # The traceback ends in the user's line, or in torch's own code.
        assert Path(dr.__file__).parent not in Path(caught.traceback[-1].path).parents


@pytest.mark.slow(reason="records a step over four members, 6 s")
def test_a_training_step_is_recorded_as_a_program() -> None:
    P = spaced((1, 1, 2, 2))
    found = []
    for wrap in (lambda step: step, dr.program):
        torch.manual_seed(3)
        model = torch.nn.Sequential(nn.Conv2d(P, 2, 3, 3, padding=1), nn.BatchNorm2d(P, 3)).double()
        optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(P)

        def step(
            xs: Any, targets: Any, model: Any = model, optimizer: Any = optimizer, loss: Any = loss
        ) -> Any:
            optimizer.zero_grad()
            value = loss(model(xs), targets)
            value.backward()
            optimizer.step()
            return value.detach()

        wrapped = wrap(step)
        x, y = numbers((2, 2, 7, 6), 1), numbers((2, 3, 7, 6), 2)
        found.append([wrapped(P.scatter(x + k), P.scatter(y)).item() for k in range(5)])
    assert wrapped.replays >= 3, wrapped.why
    assert found[0] == found[1]
