"""Numbers, texts, indices and shapes that leave a worker, and what may mix with remote tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distruntime as dr
from agree import REMOTE, agrees, is_remote, tensor


@agrees(remote_result=False)
def test_python_numbers_and_texts(device: str) -> Any:
    loss, whole, flag = (
        torch.tensor(2.3456).to(device),
        torch.tensor(7).to(device),
        torch.tensor(True).to(device),
    )
    z = torch.tensor(1 + 2j).to(device)
    vector = tensor(device, 3)
    with pytest.raises(RuntimeError, match=r"cannot be converted to Scalar|only one element"):
        vector.item()
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(vector)
    with pytest.raises(TypeError):
        format(vector, ".3f")
    texts = [
        f"{loss:.3f}",
        f"{whole:d}",
        f"{whole:>5}",
        f"{loss:e}",
        format(loss, ".2f"),
        f"{float(whole):.1f}",
        f"{loss.item()}",
    ]
    numbers = [
        int(loss),
        float(whole),
        complex(z),
        bool(flag),
        loss.item(),
        whole.__index__(),
        math.sqrt(loss),
    ]
    lists = [
        vector.tolist(),
        torch.eye(2).to(device).tolist(),
        loss.tolist(),
        list(range(10))[whole],
        len(vector),
        [float(v) for v in vector],
    ]
    return texts, numbers, lists, 7 in whole[None], hash(loss) == id(loss), torch.Size([int(whole), 2])


def test_rounding(session: object) -> None:
    """A torch.Tensor has no `__round__`; a remote one does, as what people write to print a loss."""
    loss = torch.tensor(2.3456).to(REMOTE)
    assert round(loss, 2) == round(loss.item(), 2) and round(loss) == 2


@agrees
def test_tensors_made_of_remote_scalars(device: str) -> Any:
    a, b = torch.tensor(1.5).to(device), torch.tensor(2.5).to(device)
    with pytest.warns(UserWarning, match="copy construct"):
        copied = torch.tensor(a)
    values = (
        torch.tensor([a, b]),
        torch.tensor([[a, 1], [2, b]]),
        torch.as_tensor([a, b], dtype=torch.float64),
        torch.stack([a, b]),
    )
    assert not is_remote(values[0]), "a list of numbers makes a local tensor, as with CUDA"
    return copied, values, torch.tensor([a, b], device=a.device), np.float64(float(a))


@agrees
def test_scalars_mix_with_python_and_local_scalars(device: str) -> Any:
    x = tensor(device, 3)
    one = torch.tensor(2.0)
    return (
        x + one,
        one * x,
        x.clone().add_(one),
        torch.where(x > 0, x, one),
        torch.where(x > 0, x, 0.0),
        x ** torch.tensor(2),
        torch.lerp(x, x + 1, torch.tensor(0.5).to(device)),
        x.masked_fill(x > 0, one),
        2 - x,
        x // 1,
        3 / x,
        x == one,
        np.float32(2.0) * x,
    )


@agrees
def test_indexing(device: str) -> Any:
    x, index, mask = tensor(device, 4, 5), torch.tensor([2, 0]), torch.tensor([True, False, True, False])
    there = index.to(device), mask.to(device)
    y = x.clone()
    y[there[1]] = 1.0
    y[[0, 2], 1] = torch.tensor([5.0, 6.0]).to(device)
    y[..., -1] = 0
    return (
        y,
        x[index],  # a local index goes along, as with CUDA
        x[mask],
        x[there[0]],
        x[there[1]],
        x[[1, 2]],
        x[:, None, 1:3],
        x[x > 0],
        x[torch.tensor(1).to(device)],
        x[..., index, :],
        next(iter(x[0])),
        x.take_along_dim(x.argsort(), 1),
    )


@agrees
def test_shapes_that_depend_on_data(device: str) -> Any:
    x, y = torch.tensor([3, 0, 3, 1, 0]).to(device), torch.tensor([0, 0, 0, 2, 0]).to(device)
    return (
        x.nonzero(),
        # The call is known by now, and gives another shape all the same.
        y.nonzero(),
        y[y > 0],
        x.unique(return_counts=True, return_inverse=True),
        x[x > 0],
        torch.bincount(x),
        x.repeat_interleave(x),
        torch.where(x),
    )


@agrees
def test_views_see_what_is_sent_into_their_memory(device: str) -> Any:
    x, y = torch.zeros(2, 3).to(device), torch.zeros(2, 3).to(device)
    flat, row = x.view(-1), y[1]
    x.copy_(torch.arange(6.0).view(2, 3))
    row.copy_(torch.ones(3))
    return x, flat, y, row


def test_small_tensors_that_were_sent_can_grow(session: object) -> None:
    """Their memory was that of a message where it happened to begin at a multiple of 64 bytes."""
    sent = [torch.full((k,), 1.0).to(REMOTE) for k in range(1, 33)]
    grown = dr.fetch([x.resize_(64) for x in sent])
    assert all(x[k] == 1 for k, x in enumerate(grown))


def test_mixed_places_are_refused(session: object) -> None:
    """CUDA's rule: only zero-dimensional and index tensors come along."""
    there, here = tensor(REMOTE, 3), tensor("cpu", 3)
    mistakes: list[Callable[[], object]] = [
        lambda: there + here,
        lambda: here + there,
        lambda: here.add_(there),
        lambda: torch.add(there, 1, out=here),
        lambda: torch.cat([there, here]),
        lambda: there @ here,
        lambda: sum([here, there]),  # type: ignore[list-item]
        lambda: nn.Linear(3, 3)(there),
        lambda: nn.Linear(3, 3).to(REMOTE)(here),
    ]
    for mistake in mistakes:
        with pytest.raises(dr.errors.PlacementError) as caught:
            mistake()
        assert REMOTE in str(caught.value) or "node" in str(caught.value)
    assert torch.equal(here, tensor("cpu", 3)) and torch.equal(there.cpu(), here)
    here.copy_(there)
    there.copy_(here)


@pytest.mark.parametrize("device", ["cpu", REMOTE])
def test_the_data_of_a_tensor_is_a_tensor_and_stays(session: object, device: str) -> None:
    x: Any = torch.ones(2, device=device)
    for other in (None, 3, [1.0, 2.0]):
        with pytest.raises(
            TypeError, match=f"^Variable data has to be a tensor, but got {type(other).__name__}$"
        ):
            x.data = other
    with pytest.raises(RuntimeError, match="Deleting tensor data is not allowed"):
        del x.data
    assert x.tolist() == [1.0, 1.0]
