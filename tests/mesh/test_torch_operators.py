"""Operators for which rules of torch's DTensor are wrong, equal to serial code: losses and others."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import loss_parallel

import distruntime as dr
from fewer import fewer
from meshes import make, mesh, same, two_workers

__all__ = ["mesh", "two_workers"]

Placement = Replicate | Shard
Function = Callable[..., torch.Tensor]

LOSSES: dict[str, Function] = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "soft_margin_loss": F.soft_margin_loss,
    "binary_cross_entropy": F.binary_cross_entropy,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "l1_loss": F.l1_loss,
}


@contextmanager
def _whole_table() -> Iterator[None]:
    """Skip what torch before 2.13 has no sharding strategy for; it says so."""
    try:
        yield
    except NotImplementedError as error:
        if "sharding strategy" in str(error) and torch.__version__ < "2.13":
            pytest.skip(f"torch {torch.__version__}: {error}")
        raise


def agree(
    mesh: dr.mesh.DeviceMesh,
    run: Function,
    operands: Sequence[torch.Tensor],
    layouts: Sequence[Sequence[Placement]],
    with_gradients: int = 1,
) -> None:
    """Compare a function of DTensors with that of local tensors, and the gradients of the first operands."""
    serial = [t.clone().requires_grad_(k < with_gradients) for k, t in enumerate(operands)]
    cut = [
        distribute_tensor(t, mesh, layout).requires_grad_(k < with_gradients)
        for k, (t, layout) in enumerate(zip(operands, layouts))
    ]
    with _whole_table():
        found = run(*cut)
    wanted = run(*serial)
    assert isinstance(found, DTensor)
    same(found, wanted)
    if not with_gradients:
        return
    with _whole_table():
        found.full_tensor().square().sum().backward()
    wanted.square().sum().backward()
    for t, local in list(zip(cut, serial))[:with_gradients]:
        assert t.grad is not None and local.grad is not None
        same(t.grad, local.grad, atol=1e-4)


# Four members in one line show nothing that two in a line and four in a square do not.
@pytest.mark.parametrize("mesh", fewer(["2", "2x2"], 4, "other losses, 2 s each"), indirect=True)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients(mesh: dr.mesh.DeviceMesh, name: str) -> None:
    """The gradient of a mean was too large by the number of members."""
    x, target = torch.rand(2, 8, 4, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
    kinds = [[Replicate()] * mesh.ndim, [Shard(0)] * mesh.ndim, [Shard(1)] * mesh.ndim]
    for own, others in itertools.product(kinds, kinds):
        agree(mesh, LOSSES[name], (x, target), (own, others))
    for own in kinds:
        agree(mesh, lambda a, b: LOSSES[name](a, b, reduction="sum"), (x, target), (own, own))
    agree(mesh, lambda a, b: LOSSES[name](a, b, reduction="none"), (x, target), kinds[1:])


@pytest.mark.parametrize("rows", fewer([7, 3], 4, "other losses"))
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_uneven_shards(two_workers: None, name: str, rows: int) -> None:
    """The mean of the shards' means is another one, and of three rows one of four members has none."""
    x, target = torch.rand(2, rows, 5, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
    for dim in (0, 1):
        agree(make("4"), LOSSES[name], (x, target), ([Shard(dim)], [Shard(dim)]))


@pytest.mark.parametrize("mesh", fewer(["2", "2x2"], 3, "another loss, 1 s"), indirect=True)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_classes_of_which_some_do_not_count(mesh: dr.mesh.DeviceMesh, reduction: str) -> None:
    """It was the average of the shards' means, of which one had two targets that count, and one had none."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    target, weight = torch.tensor([0, 1, -100, 3, -100, -100, 2, 2]), torch.tensor([1.0, 2.0, 0.5, 3.0])
    whole = [Replicate()] * mesh.ndim
    for own, rows in itertools.product((whole, [Shard(0)] * mesh.ndim, [Shard(1)] * mesh.ndim), repeat=2):
        rows = whole if rows == [Shard(1)] * mesh.ndim else rows
        agree(mesh, lambda a, b: F.cross_entropy(a, b, reduction=reduction), (x, target), (own, rows))
        agree(
            mesh,
            lambda a, b, w: F.cross_entropy(a, b, w, reduction=reduction),
            (x, target, weight),
            (own, rows, whole),
        )


def test_classes_of_pixels(mesh: dr.mesh.DeviceMesh) -> None:
    generator = torch.Generator().manual_seed(0)
    x, target = (
        torch.randn(4, 4, 8, 2, generator=generator),
        torch.randint(4, (4, 8, 2), generator=generator),
    )
    target[0] = -100
    for dim in (0, 1, 2):
        agree(mesh, F.cross_entropy, (x, target), ([Shard(dim)] * mesh.ndim, [Replicate()] * mesh.ndim))


def test_losses_after_loss_parallel(two_workers: None) -> None:
    """It removes the handlers of its operators at its end."""
    mesh, x, target = make("2"), torch.randn(8, 4), torch.tensor([0, 1, -100, 3, -100, -100, -100, 2])
    with loss_parallel():
        F.cross_entropy(distribute_tensor(x, mesh, [Shard(1)]), target.to(mesh.device))
    agree(mesh, F.cross_entropy, (x, target), ([Shard(0)], [Shard(0)]))


CONVOLUTIONS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "padded": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (4, 4, 8, 8), (4, 4, 3, 3)),
    "strided": (lambda x, w, b: F.conv2d(x, w, b, stride=2), (4, 4, 8, 8), (4, 4, 3, 3)),
    "by channel": (lambda x, w, b: F.conv2d(x, w, b, groups=4, dilation=2), (4, 4, 8, 8), (4, 1, 3, 3)),
    "of lines": (lambda x, w, b: F.conv1d(x, w, b, padding=1), (4, 4, 8), (4, 4, 3)),
    "transposed": (lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), (4, 4, 8, 8), (4, 4, 3, 3)),
    "of one image": (lambda x, w, b: F.conv2d(x, w, b), (4, 8, 8), (4, 4, 3, 3)),
}


@pytest.mark.parametrize("mesh", fewer(["2", "2x2"], 4, "another cut"), indirect=True)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_however_images_are_cut(mesh: dr.mesh.DeviceMesh, name: str) -> None:
    """Cut along their width, eight columns became two."""
    run, images, kernel = CONVOLUTIONS[name]
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(shape, generator=generator) for shape in (images, kernel, (4,))]
    whole: list[Placement] = [Replicate()] * mesh.ndim
    for dim in range(len(images)):
        agree(mesh, run, operands, ([Shard(dim)] * mesh.ndim, whole, whole), with_gradients=3)
    cut: list[Placement] = [Shard(0)] * mesh.ndim
    agree(mesh, run, operands, (whole, cut, cut), with_gradients=3)


@pytest.mark.parametrize("name", fewer(["cumsum", "cumprod", "logcumsumexp"], 3, "another operator"))
def test_running_sums_along_dimensions_from_behind(mesh: dr.mesh.DeviceMesh, name: str) -> None:
    """Each member had those of its own shard."""
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) + 0.1
    # torch's gradient of a product makes a tensor that is no DTensor, which it refuses.
    gradients = 0 if name == "cumprod" else 1
    for dim, cut in itertools.product((-1, -2, 0, 1), (0, 1)):
        agree(mesh, lambda t: getattr(t, name)(dim), (x,), ([Shard(cut)] * mesh.ndim,), gradients)  # noqa: B023


def test_whether_any_is_a_number_to_multiply(mesh: dr.mesh.DeviceMesh) -> None:
    """It was counted on each member: twice the product for two."""
    x = torch.arange(32.0).reshape(4, 8) - 8
    for cut in (0, 1):
        t = distribute_tensor(x, mesh, [Shard(cut)] * mesh.ndim) > 0
        for dim, keepdim in itertools.product((-1, 0, 1), (False, True)):
            same(t.any(dim, keepdim) * t.sum(), (x > 0).any(dim, keepdim) * (x > 0).sum())
        same(t.any() * t.sum(), (x > 0).any() * (x > 0).sum())
        same(t.any((0, -1)) * 3.0, (x > 0).any() * 3.0)
        same((t & False).any(), torch.tensor(False))


def test_gradients_of_one_index_from_behind(mesh: dr.mesh.DeviceMesh) -> None:
    """Where each member had one row, its gradient was a column."""
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    for cut, dim in itertools.product((0, 1), (-1, -2)):
        agree(mesh, lambda t: t.select(dim, -1), (x,), ([Shard(cut)] * mesh.ndim,))  # noqa: B023
        agree(mesh, lambda t: torch.trapezoid(t, dx=3.0, dim=dim), (x,), ([Shard(cut)] * mesh.ndim,))  # noqa: B023


def test_losses_of_several_threads(two_workers: None) -> None:
    """While one thread's loss was torch's own, the other's was torch's own, too, with its mistakes."""
    mesh = make("4")
    found: dict[int, list[torch.Tensor]] = {8: [], 7: []}

    def train(rows: int) -> None:
        t = distribute_tensor(torch.arange(rows * 4.0).reshape(rows, 4), mesh, [Shard(0)])
        for _ in range(40):
            found[rows].append(F.mse_loss(t, t * 0.5).full_tensor())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=train, args=(rows,)) for rows in (8, 8, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for rows, count in ((8, 80), (7, 40)):
        x = torch.arange(rows * 4.0).reshape(rows, 4)
        same(torch.stack(found[rows]), F.mse_loss(x, x * 0.5).expand(count))


def test_losses_inside_context_parallel(two_workers: None) -> None:
    """It puts another table of handlers there, in which none was left to torch."""
    mesh, x = make("4"), torch.arange(32.0).reshape(8, 4)
    t, positions = distribute_tensor(x, mesh, [Shard(0)]), torch.arange(16.0).to(mesh.device)
    with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
        same(F.mse_loss(t, t * 0.5), F.mse_loss(x, x * 0.5))
        assert torch.equal(t, t)


def test_a_sum_that_is_filled(mesh: dr.mesh.DeviceMesh) -> None:
    """Each member's part of the sum was filled: for four, 1 - x was 4 - x in a cosine loss."""
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    cut: list[Placement] = [Shard(1)] * mesh.ndim
    total = distribute_tensor(x, mesh, cut).sum(1)
    same(torch.empty_like(total).fill_(3.0), torch.full((5,), 3.0))
    same(total.long().fill_(3), torch.full((5,), 3))
    for sign in (1.0, -1.0):
        target = torch.full((5,), sign)
        whole: list[Placement] = [Replicate()] * mesh.ndim
        agree(mesh, F.cosine_embedding_loss, (x, x.roll(1, 0), target), (cut, cut, whole), 2)


@pytest.mark.parametrize("mesh", ["2", "2x2"], indirect=True)
def test_gradients_of_adaptive_pools(mesh: dr.mesh.DeviceMesh) -> None:
    """Of one image that is cut along its height, each member's gradient was that of a part."""
    for size in ((5, 7, 8), (4, 6, 7, 8)):
        x = torch.randn(size, generator=torch.Generator().manual_seed(0))
        for dim in range(len(size)):
            agree(mesh, lambda t: F.adaptive_avg_pool2d(t, (2, 3)), (x,), ([Shard(dim)] * mesh.ndim,))
