"""Layers over partitions are the serial ones: values, gradients, the adjoint test, over 1 to 12 places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from cut_layers import assert_as_serial, cases, spaced
from distruntime.collectives import copies
from distruntime.collectives.copies import move
from distruntime.layers import exchange
from distruntime.testing import check_adjoint
from parts import numbers, readable

pytestmark = pytest.mark.usefixtures("twelve")

nn = dr.nn
Case = tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...]]

WINDOWS: dict[str, Case] = {
    "conv1d": ("Conv1d", dict(kernel_size=3, padding=1), (1, 1, 3), (2, 2, 11)),
    "conv1d, stride": ("Conv1d", dict(kernel_size=3, stride=2), (1, 1, 3), (2, 2, 14)),
    "conv1d, stride beyond the kernel": ("Conv1d", dict(kernel_size=2, stride=5), (1, 1, 4), (1, 2, 33)),
    "conv1d, dilation": ("Conv1d", dict(kernel_size=3, dilation=4, padding=2), (1, 1, 4), (1, 2, 17)),
    "conv1d, a halo over two neighbours": ("Conv1d", dict(kernel_size=9, padding=4), (1, 1, 4), (1, 2, 9)),
    "conv1d, padding alone": ("Conv1d", dict(kernel_size=2, padding=4), (1, 1, 3), (1, 2, 2)),
    "conv1d, twelve places": ("Conv1d", dict(kernel_size=5, padding=2), (1, 1, 12), (1, 2, 29)),
    "conv1d, places without outputs": ("Conv1d", dict(kernel_size=4, stride=3), (1, 1, 12), (1, 2, 14)),
    "conv1d, places without inputs": ("Conv1d", dict(kernel_size=1, padding=4), (1, 1, 12), (1, 2, 5)),
    "conv1d, same": ("Conv1d", dict(kernel_size=4, dilation=2, padding="same"), (1, 1, 3), (2, 2, 11)),
    "conv1d, groups": ("Conv1d", dict(kernel_size=3, groups=2, padding=1), (2, 1, 3), (3, 2, 11)),
    "conv1d, circular": (
        "Conv1d",
        dict(kernel_size=5, padding=7, padding_mode="circular"),
        (1, 1, 4),
        (2, 2, 7),
    ),
    "conv1d, reflected from elsewhere": (
        "Conv1d",
        dict(kernel_size=3, padding=6, padding_mode="reflect", stride=2),
        (1, 1, 4),
        (1, 2, 9),
    ),
    "conv1d, more groups than one place has": (
        "Conv1d",
        dict(kernel_size=3, groups=2, padding=1),
        (1, 3, 2),
        (2, 2, 7),
    ),
    "conv1d, groups of uneven parts": (
        "Conv1d",
        dict(kernel_size=2, groups=5, channels=(10, 15)),
        (1, 4, 1),
        (1, 10, 5),
    ),
    "conv2d, depthwise": (
        "Conv2d",
        dict(kernel_size=3, padding=1, groups=4, channels=(4, 8), stride=2),
        (1, 3, 1, 2),
        (2, 4, 5, 7),
    ),
    "conv2d, replicated": (
        "Conv2d",
        dict(kernel_size=3, padding=(2, 1), padding_mode="replicate"),
        (1, 1, 2, 3),
        (1, 2, 5, 7),
    ),
    "conv2d, reflected, channels cut": (
        "Conv2d",
        dict(kernel_size=4, padding="same", padding_mode="reflect"),
        (1, 2, 1, 2),
        (1, 2, 5, 7),
    ),
    "conv3d, circular": (
        "Conv3d",
        dict(kernel_size=2, padding=1, padding_mode="circular"),
        (2, 1, 2, 1, 3),
        (1, 2, 3, 3, 5),
    ),
    "conv2d": ("Conv2d", dict(kernel_size=3, padding=1), (1, 1, 2, 2), (2, 2, 7, 9)),
    "conv2d, batch and space": (
        "Conv2d",
        dict(kernel_size=3, stride=2, padding=1),
        (2, 1, 2, 3),
        (3, 2, 9, 13),
    ),
    "conv2d, unlike": (
        "Conv2d",
        dict(kernel_size=(2, 5), stride=(1, 3), padding=(1, 2), dilation=(2, 1)),
        (1, 1, 3, 2),
        (1, 2, 10, 15),
    ),
    "conv2d, batch only": ("Conv2d", dict(kernel_size=3), (4,), (3, 2, 5, 5)),
    "conv3d": ("Conv3d", dict(kernel_size=3, padding=1), (1, 1, 2, 1, 3), (1, 2, 4, 5, 7)),
    "conv3d, stride": ("Conv3d", dict(kernel_size=2, stride=2), (1, 1, 2, 1, 2), (1, 2, 5, 4, 7)),
    "transposed 1d": ("ConvTranspose1d", dict(kernel_size=3), (1, 1, 3), (2, 2, 8)),
    "transposed 1d, stride": (
        "ConvTranspose1d",
        dict(kernel_size=4, stride=2, padding=1, output_padding=1),
        (1, 1, 4),
        (1, 2, 9),
    ),
    "transposed 1d, gaps": ("ConvTranspose1d", dict(kernel_size=1, stride=4), (1, 1, 12), (1, 2, 5)),
    "transposed 1d, dilation": (
        "ConvTranspose1d",
        dict(kernel_size=3, dilation=3, stride=2),
        (1, 1, 3),
        (1, 2, 7),
    ),
    "transposed 2d": (
        "ConvTranspose2d",
        dict(kernel_size=3, stride=2, padding=1),
        (1, 1, 2, 2),
        (1, 2, 5, 4),
    ),
    "transposed 2d, groups": ("ConvTranspose2d", dict(kernel_size=2, groups=2), (2, 1, 1, 2), (2, 2, 3, 5)),
    "transposed 2d, groups of cut channels": (
        "ConvTranspose2d",
        dict(kernel_size=3, groups=4, channels=(8, 12), stride=2, padding=1, output_padding=1),
        (1, 2, 2, 1),
        (2, 8, 4, 3),
    ),
    "transposed 3d": ("ConvTranspose3d", dict(kernel_size=2, stride=2), (1, 1, 2, 2, 1), (1, 2, 3, 3, 2)),
    "max 1d": ("MaxPool1d", dict(kernel_size=3, stride=2, padding=1), (1, 1, 4), (2, 2, 15)),
    "max 1d, ceil": ("MaxPool1d", dict(kernel_size=3, stride=3, ceil_mode=True), (1, 1, 3), (2, 2, 10)),
    "max 1d, dilation": ("MaxPool1d", dict(kernel_size=3, stride=1, dilation=3), (1, 1, 3), (2, 2, 15)),
    "max 2d": ("MaxPool2d", dict(kernel_size=2), (2, 1, 1, 3), (3, 2, 7, 13)),
    "max 3d": ("MaxPool3d", dict(kernel_size=3, stride=2, padding=1), (1, 1, 2, 2, 2), (1, 2, 5, 7, 5)),
    "mean 1d": ("AvgPool1d", dict(kernel_size=3, stride=2, padding=1), (1, 1, 4), (2, 2, 15)),
    "mean 1d, of what is there": (
        "AvgPool1d",
        dict(kernel_size=4, stride=2, padding=2, count_include_pad=False),
        (1, 1, 3),
        (2, 2, 13),
    ),
    "mean 2d, ceil": (
        "AvgPool2d",
        dict(kernel_size=3, stride=2, padding=1, ceil_mode=True),
        (1, 1, 2, 3),
        (1, 2, 8, 14),
    ),
    "mean 2d, divisor": ("AvgPool2d", dict(kernel_size=2, divisor_override=3), (1, 1, 2, 2), (1, 2, 7, 8)),
    "mean 3d": ("AvgPool3d", dict(kernel_size=2), (1, 1, 2, 1, 2), (1, 2, 5, 4, 6)),
    "nearest": ("Upsample", dict(scale_factor=2), (1, 1, 3), (1, 2, 7)),
    "nearest, smaller": ("Upsample", dict(size=5, mode="nearest-exact"), (1, 1, 4), (1, 2, 13)),
    "linear": ("Upsample", dict(scale_factor=2.5, mode="linear"), (1, 1, 3), (1, 2, 7)),
    "bilinear": ("Upsample", dict(scale_factor=2, mode="bilinear"), (1, 1, 2, 3), (1, 2, 5, 6)),
    "bilinear, corners": (
        "Upsample",
        dict(size=(9, 4), mode="bilinear", align_corners=True),
        (1, 1, 2, 2),
        (1, 2, 4, 6),
    ),
    "bicubic": ("Upsample", dict(scale_factor=1.7, mode="bicubic"), (1, 1, 2, 3), (1, 2, 7, 8)),
    "bicubic, corners": (
        "Upsample",
        dict(size=(12, 3), mode="bicubic", align_corners=True),
        (2, 1, 3, 2),
        (1, 1, 4, 7),
    ),
    "trilinear": ("Upsample", dict(size=5, mode="trilinear"), (1, 1, 2, 1, 2), (1, 1, 3, 4, 4)),
}


# One of each layer, and of each thing that a plan can have.
QUICK = {
    "conv1d, stride",
    "conv1d, circular",
    "conv1d, groups of uneven parts",
    "conv2d",
    "conv2d, replicated",
    "conv3d, stride",
    "transposed 1d, stride",
    "transposed 2d",
    "transposed 2d, groups of cut channels",
    "transposed 3d",
    "max 1d, ceil",
    "max 2d",
    "max 3d",
    "mean 1d, of what is there",
    "mean 2d, ceil",
    "mean 3d",
    "nearest, smaller",
    "linear",
    "bilinear",
    "bicubic",
    "trilinear",
}


def _makers(kind: str, options: dict[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    options = dict(options)
    channels = options.pop("channels", (2, 4)) if kind.startswith("Conv") else ()
    return (
        lambda on, **more: getattr(nn, kind)(on, *channels, **options, **more),
        lambda **more: getattr(torch.nn, kind)(*channels, **options, **more),
    )


@pytest.mark.parametrize("name", cases(WINDOWS, QUICK))
def test_a_layer_of_windows_is_the_serial_one(name: str) -> None:
    kind, options, shape, size = WINDOWS[name]
    make, serial = _makers(kind, options)
    on = spaced(shape)
    layer = assert_as_serial(make, serial, on, size)
    # Its gradient is the adjoint.
    xs = on.scatter(numbers(size, 3))
    assert check_adjoint(layer, xs) < 1e-12
    if hasattr(layer, "weight"):

        def run(values: list[torch.Tensor]) -> Any:
            return torch.func.functional_call(layer, {"weight": values[0]}, (xs,))

        assert check_adjoint(run, [layer.weight]) < 1e-12


BESIDE = [
    "conv1d, a halo over two neighbours",
    "conv1d, twelve places",
    "conv1d, places without outputs",
    "conv1d, more groups than one place has",
    "conv2d",
    "conv2d, batch and space",
    "conv2d, depthwise",
    "conv3d, stride",
    "transposed 1d, dilation",
    "transposed 2d",
    "max 1d",
    "mean 2d, ceil",
    "bilinear",
    "bicubic",
]


@pytest.mark.parametrize(
    "name", cases(BESIDE, {"conv1d, a halo over two neighbours", "conv2d, depthwise", "max 1d"})
)
def test_beside_the_interior_and_in_another_order_of_places(name: str) -> None:
    kind, options, shape, size = WINDOWS[name]
    make, serial = _makers(kind, options)
    on = spaced(shape, 5)
    layer = assert_as_serial(lambda on: make(on, overlap=True), serial, on, size)
    assert check_adjoint(layer, on.scatter(numbers(size, 3))) < 1e-12


def test_the_exchange_is_beside_the_interior_where_a_place_has_many_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[bool] = []
    plain = exchange._beside

    def noted(on: dr.mesh.Partition, beside: bool, run: Callable[[], None]) -> None:
        begun.append(beside)
        plain(on, beside, run)

    monkeypatch.setattr(exchange, "_beside", noted)
    on = spaced((1, 1, 2))
    for outputs, length, overlap, wanted in (
        (8, 2**14 - 2, None, False),
        (8, 2**14, None, True),
        (8, 2**14, False, False),
        (8, 20, True, True),
    ):
        layer = nn.Conv1d(on, 1, outputs, 3, padding=1, overlap=overlap)
        layer(on.scatter(torch.ones(1, 1, length)))
        assert begun.pop() == wanted and not begun


def test_without_implicit_waits_the_exchange_is_waited_for() -> None:
    make, serial = _makers("Conv2d", dict(kernel_size=3, padding=1))
    dr.set_implicit_waits(False)
    try:
        assert_as_serial(lambda on: make(on, overlap=True), serial, spaced((1, 1, 2, 2)), (2, 2, 7, 9))
    finally:
        dr.set_implicit_waits(True)


@pytest.mark.parametrize(
    ("split", "dim", "options"),
    [
        ([7, 0, 4], 2, {}),
        ([0, 7, 4], 2, dict(padding_mode="replicate")),
        ([1, 10, 0], 2, dict(padding_mode="circular", stride=2)),
        ([2, 9, 0], 2, dict(padding_mode="reflect")),
        ([5, 0, 1], 1, dict(groups=3)),
    ],
    ids=str,
)
def test_shards_that_are_not_balanced(split: list[int], dim: int, options: dict[str, Any]) -> None:
    on = spaced((1, 3, 1) if dim == 1 else (1, 1, 3))
    x = numbers((1, 6, 11), 0)
    xs = [t.to(home.device) for t, home in zip(x.split(split, dim), on.homes)]
    layer = nn.Conv1d(on, 6, 9, 3, padding=2, dtype=torch.float64, **options)
    serial = torch.nn.Conv1d(6, 9, 3, padding=2, **options).double()
    layer.load_state_dict(serial.state_dict())
    ys, expected = layer(xs), serial(x)
    assert [y.shape for y in ys] == on.shapes(expected.shape)
    torch.testing.assert_close(on.gather(ys).detach(), expected.detach())
    assert check_adjoint(layer, xs) < 1e-12


def test_a_second_derivative() -> None:
    on, x = spaced((1, 1, 3)), numbers((1, 2, 11), 0)
    found = []
    for layer, scatter, gather in (
        (nn.Conv1d(on, 2, 3, 3, padding=1, dtype=torch.float64), on.scatter, on.gather),
        (torch.nn.Conv1d(2, 3, 3, padding=1).double(), lambda t: t, lambda t: t),
    ):
        layer.load_state_dict({name: numbers(p.shape, 5) for name, p in layer.state_dict().items()})
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(gather(layer(scatter(leaf))).sin().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(*found)


def test_what_does_not_depend_on_a_failed_shard_is_whole() -> None:
    on = spaced((1, 1, 4))
    xs = on.scatter(torch.ones(1, 1, 16))
    xs[0] = xs[0][torch.full((1,), 9).to(xs[0].device)]
    assert readable(nn.MaxPool1d(on, 3, 1, 1)(xs)) == [False, False, True, True]


def _needed(layer: torch.nn.Module, on: dr.mesh.Partition, size: tuple[int, ...]) -> list[int]:
    """How many elements each place reads that it does not have, as gradients of the serial layer tell."""
    x = torch.ones(size, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    found = []
    for outputs, own in zip(on.slices(y.shape), on.slices(size)):
        (grad,) = torch.autograd.grad(y[outputs].sum(), x, retain_graph=True)
        grad[own] = 0
        found.append(int(grad.count_nonzero()))
    return found


@pytest.mark.parametrize(
    ("shape", "size", "options"),
    [
        ((1, 1, 2, 2), (2, 2, 7, 9), dict(kernel_size=3, padding=1)),
        ((1, 1, 3, 4), (1, 2, 13, 17), dict(kernel_size=(3, 5), padding=(1, 2))),
        ((2, 1, 1, 3), (3, 2, 5, 17), dict(kernel_size=4, stride=(1, 2))),
        ((1, 1, 5), (1, 2, 12), dict(kernel_size=9, padding=4)),
    ],
    ids=str,
)
def test_what_moves_is_what_the_outputs_need(
    shape: tuple[int, ...], size: tuple[int, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on, kind = spaced(shape), f"Conv{len(shape) - 2}d"
    layer = getattr(nn, kind)(on, 2, 3, **options, dtype=torch.float64)
    serial = getattr(torch.nn, kind)(2, 3, **options).double()
    with torch.no_grad():
        # No gradient is zero by chance.
        serial.weight.fill_(1)
    needed = _needed(serial, on, size)
    moved: list[int] = []

    def noted(t: torch.Tensor, place: Any) -> Any:
        moved.append(t.numel())
        return move(t, place)

    xs = [t.requires_grad_() for t in on.scatter(numbers(size, 0))]
    monkeypatch.setattr(exchange, "move", noted)
    monkeypatch.setattr(copies, "move", noted)
    outs = layer(xs)
    assert sum(moved) == sum(needed)
    moved.clear()
    torch.autograd.backward([y.sum() for y in outs if y.numel()])
    assert sum(moved) == sum(needed)
