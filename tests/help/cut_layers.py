"""Layers over partitions beside the serial ones: the same weights, the same inputs, all gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

import distruntime as dr
from fewer import fewer
from parts import numbers

Make = Callable[..., torch.nn.Module]


def cases(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """The names as parameters: those that are not quick try a layer again, in another way."""
    given = list(names)
    assert set(quick) <= set(given)
    return fewer(given, quick, "it is a further case of a layer that is tried without it")


def over(places: Sequence[int], shape: Sequence[int]) -> dr.mesh.Partition:
    """A partition over places by their numbers, counted node by node."""
    return dr.mesh.Partition([dr.place(k // 4, _device(k % 4)) for k in places], tuple(shape))


def _device(k: int) -> str:
    return f"cuda:{k}" if k < 3 else "cpu"


def spaced(shape: Sequence[int], start: int = 0) -> dr.mesh.Partition:
    """A partition of that shape, over places that go from worker to worker."""
    count = 1
    for n in shape:
        count *= n
    order = [node * 4 + device for device, node in itertools.product(range(4), range(3))]
    return over([order[(start + k) % 12] for k in range(count)], shape)


def pair(make: Make, serial: Make, on: dr.mesh.Partition, dtype: torch.dtype) -> tuple[Any, Any]:
    """A layer over a partition and the serial one, with equal weights."""
    torch.manual_seed(0)
    theirs = serial().to(dtype)
    ours = make(on).to(dtype)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def _gradient(layer: Any, name: str) -> Any:
    """The gradient of a weight, whole, also if the weight lives in parts."""
    value = getattr(layer, name)
    if isinstance(value, torch.Tensor):
        assert value.grad is not None, name
        return value.grad
    return layer._feeds[name][0].joined([part.grad for part in value])


def outputs_on(layer: Any, on: dr.mesh.Partition) -> dr.mesh.Partition:
    found = getattr(layer, "P_y", None) or getattr(getattr(layer, "mixing", None), "target", on)
    assert isinstance(found, dr.mesh.Partition)
    return found


def assert_as_serial(
    make: Make,
    serial: Make,
    on: dr.mesh.Partition,
    size: Sequence[int],
    dtype: torch.dtype = torch.float64,
    x: torch.Tensor | None = None,
    rtol: float = 1e-9,
) -> Any:
    """Compare values, the sizes of shards, gradients of inputs and weights, and buffers. Return our layer."""
    ours, theirs = pair(make, serial, on, dtype)
    given = numbers(size, 1, dtype) if x is None else x
    grad = given.is_floating_point()
    here, there = (given.clone().requires_grad_(grad) for _ in range(2))
    close = dict(rtol=rtol, atol=rtol)
    y = theirs(here)
    shards = ours(on.scatter(there))
    target = outputs_on(ours, on)
    z = target.gather(shards)
    torch.testing.assert_close(z.detach(), y.detach(), **close)
    if all(a.shape == b for a, b in zip(on.scatter(given.detach()), on.shapes(given.shape))):
        cut = target.shapes(y.shape)
        assert [tuple(t.shape) for t in shards] == [tuple(s) for s in cut]
    weights = numbers(y.shape, 2, dtype)
    for out in (y, z):
        ((out * weights).sin() * weights).sum().backward()
    if grad:
        torch.testing.assert_close(there.grad, here.grad, **close)
    # All values come in one wait.
    found = dr.fetch(
        {name: _gradient(ours, name) for name, _ in theirs.named_parameters()} | dict(ours.named_buffers())
    )
    expected = {name: q.grad for name, q in theirs.named_parameters()} | dict(theirs.named_buffers())
    assert list(found) == list(expected)
    for name, q in expected.items():
        torch.testing.assert_close(found[name], q, msg=lambda m, n=name: f"{n}: {m}", **close)
    return ours
