"""`Partition`: how tensors are cut, sent out and brought back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from parts import cut, numbers, whole

old: list[Any] = []  # a partition, and a shard of it, of a session that has ended


@pytest.fixture(scope="module", autouse=True)
def two() -> Iterator[None]:
    dr.shutdown()
    with dr.init_master_worker(world_size=1):
        old[:] = [dr.mesh.Partition([0], 1), torch.ones(2, device="remote")]
    with dr.init_master_worker(world_size=2, data_channel="tcp", simulate_cuda=1):
        yield
    old.clear()


def part(shape: Any, *which: int) -> dr.mesh.Partition:
    """Of places 0, 1 and 2: both nodes' CPUs, and a GPU of the second."""
    have = [dr.types.Place(0, "cpu"), dr.types.Place(1, "cpu"), dr.types.Place(1, "cuda:0")]
    return dr.mesh.Partition([have[k] for k in which], shape)


def test_what_it_says_of_itself() -> None:
    p = dr.mesh.Partition(
        [
            dr.types.Place(0, "cpu"),
            dr.types.Place(0, "cuda:0"),
            dr.types.Place(1, "cpu"),
            dr.types.Place(1, "cuda:0"),
        ],
        [2, 2],
    )
    assert (p.shape, p.dim, len(p)) == ((2, 2), 2, 4)
    assert p.places[1] == dr.types.Place(0, "cuda:0")
    assert [p.index(k) for k in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (
        repr(p) == "<distruntime.mesh.Partition (2, 2): node 0 cpu, node 0 cuda:0, node 1 cpu, node 1 cuda:0>"
    )
    assert (
        dr.mesh.Partition([0, 1], 2).places
        == dr.distributed.new_group([0, 1]).places
        == (dr.types.Place(0, "cuda:0"), dr.types.Place(1, "cuda:0"))
    )
    assert dr.mesh.Partition(None, 2).places == dr.distributed.new_group().places


def test_equal_where_places_and_shape_are() -> None:
    p = part((1, 3), 0, 1, 2)
    assert p == part([1, 3], 0, 1, 2) and hash(p) == hash(part([1, 3], 0, 1, 2))
    assert p != part((3, 1), 0, 1, 2) and p != part((1, 3), 0, 2, 1) and p != "p"


@pytest.mark.parametrize("size", [(7,), (7, 5), (3, 5, 2), (2, 1), (0, 4)])
@pytest.mark.parametrize("shape", [(1,), (3,), (1, 3), (3, 1)])
def test_cut_as_torch_cuts(size: tuple[int, ...], shape: tuple[int, ...]) -> None:
    p = part(shape, *range(max(shape)))
    if len(size) < len(shape):
        with pytest.raises(
            dr.errors.UsageError, match=r"1 dimensions, .* cannot be cut along the 2 of a partition"
        ):
            p.shapes(size)
        return
    x = torch.arange(torch.Size(size).numel()).reshape(size)
    expected = cut(x, shape)
    assert p.shapes(size) == [t.shape for t in expected]
    assert all(torch.equal(x[where], want) for where, want in zip(p.slices(size), expected, strict=True))
    for given in (x, x.to("remote")):
        shards = p.scatter(given)
        assert [t.place for t in shards] == list(p.places)
        assert all(torch.equal(t.cpu(), want) for t, want in zip(shards, expected))
        back = p.gather(shards)
        assert back.device.type == "cpu" and torch.equal(back, whole(expected, shape))


def test_there_and_back_is_differentiable() -> None:
    p = part(3, 0, 1, 2)
    for x in (numbers((7, 2), 0), numbers((7, 2), 0).to("remote")):
        x.requires_grad_()
        back = p.gather([t * t for t in p.scatter(x)])
        (grad,) = torch.autograd.grad((back**3).sum(), [x], create_graph=True)
        here = x.detach().cpu().requires_grad_()
        (want,) = torch.autograd.grad((here**6).sum(), [here], create_graph=True)
        torch.testing.assert_close(grad.detach().cpu(), want.detach())
        grad.sum().backward()
        want.sum().backward()
        torch.testing.assert_close(x.grad.cpu(), here.grad)


def test_shards_are_copies_and_need_not_be_balanced() -> None:
    p = part(3, 0, 1, 2)
    x = torch.arange(6.0).to(p.homes[0].device)
    shards = p.scatter(x)
    shards[0].zero_()
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    assert p.gather(shards).tolist() == [0, 0, 2, 3, 4, 5]
    uneven = [torch.full((n,), float(n)).to(home.device) for n, home in zip((1, 0, 3), p.homes)]
    assert p.gather(uneven).tolist() == [1, 3, 3, 3]


def test_copies_do_where_the_data_channel_has_nothing_else() -> None:
    rows, columns, x = part((3, 1), 0, 1, 2), part((1, 3), 0, 1, 2), numbers((5, 4), 0).requires_grad_()
    outs = dr.primitives.repartition(rows.scatter(x), rows, columns)  # over gloo an all_to_all
    torch.testing.assert_close(columns.gather(outs).detach(), x.detach())
    wide = dr.primitives.halo_exchange(outs, columns, [0, 1])
    torch.autograd.backward([t.sum() for t in wide])
    assert x.grad.tolist() == [[1.0, 2.0, 3.0, 2.0]] * 5  # columns 0 and 1, 2, 3
    with pytest.raises(dr.errors.NotSupportedError, match="has no all_reduce"):
        dr.primitives.all_sum_reduce(outs[1:], part(2, 1, 2), 0)


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a place twice": (
        lambda: part(2, 0, 0),
        dr.errors.UsageError,
        "node 0 cpu was given twice: each member of a partition",
    ),
    "no places": (lambda: part(1), dr.errors.UsageError, "a partition has at least one member"),
    "no list": (lambda: dr.mesh.Partition(3, 1), dr.errors.UsageError, "a partition is made of a list"),
    "no such node": (lambda: dr.mesh.Partition([0, 9], 2), dr.errors.PlacementError, "there is no node 9"),
    "too many places": (
        lambda: part((2, 2), 0, 1, 2),
        dr.errors.UsageError,
        r"shape \(2, 2\) has 4 places, got 3",
    ),
    "a shape of none": (
        lambda: part((), 0),
        dr.errors.UsageError,
        r"the shape of a partition is .* got \(\)",
    ),
    "a shape of nothing": (lambda: part((1, 0), 0), dr.errors.UsageError, r"got \(1, 0\)"),
    "no shape": (lambda: part("2", 0, 1), dr.errors.UsageError, "got '2'"),
    "no tensor": (lambda: part(1, 0).scatter([1.0]), dr.errors.UsageError, "got list"),
    "a number": (
        lambda: part(1, 0).scatter(torch.ones(())),
        dr.errors.UsageError,
        "a tensor of 0 dimensions",
    ),
    "too few shards": (
        lambda: part(2, 0, 1).gather([torch.ones(2)]),
        dr.errors.UsageError,
        "shards must have one shard for each of the 2",
    ),
    "a shard elsewhere": (
        lambda: part(1, 1).gather([torch.ones(2, device="remote")]),
        dr.errors.PlacementError,
        r"shards\[0\] is on node 0",
    ),
    "shards that do not fit": (
        lambda: part(2, 0, 1).gather(
            [torch.ones(2, 2).to(part(1, 0).homes[0].device), torch.ones(2, 3).to(part(1, 1).homes[0].device)]
        ),
        dr.errors.UsageError,
        r"along dimension 1 shard 0 of \(2, 2\) is 2 long and shard 1 of \(2, 3\) is 3",
    ),
    "an ended session": (lambda: old[0].scatter(torch.ones(2)), dr.errors.SessionClosed, "session"),
    "shards of an ended session": (
        lambda: part(1, 0).gather([old[1]]),
        dr.errors.UsageError,
        "of another session",
    ),
    "partitions of two sessions": (
        lambda: dr.primitives.repartition([torch.ones(2)], part(1, 0), old[0]),
        dr.errors.UsageError,
        "P_x and P_y are of different sessions",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_says_why(name: str) -> None:
    call, kind, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        call()
