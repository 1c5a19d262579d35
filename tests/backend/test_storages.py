"""Storages of torch on the device "remote" are refused in words, and local ones are as ever."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr

REFUSED: dict[str, Callable[[], Any]] = {
    "untyped": lambda: torch.UntypedStorage(8, device="remote"),
    "empty": lambda: torch.UntypedStorage(device="remote"),
    "a place": lambda: torch.UntypedStorage(8, device=torch.device("remote:1")),
    "torch's own name": lambda: torch.UntypedStorage(8, device="privateuseone"),
    "typed": lambda: torch.TypedStorage(8, dtype=torch.float32, device="remote"),
    "sent": lambda: torch.ones(3).untyped_storage().to(device="remote"),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
def test_a_storage_there_is_refused(session: object, make: Callable[[], Any]) -> None:
    with pytest.raises(
        dr.errors.NotSupportedError, match=r"torch\.empty\(nbytes, dtype=torch\.uint8, device="
    ):
        make()


def test_local_storages_are_as_before(session: object) -> None:
    assert torch.UntypedStorage(8).nbytes() == torch.UntypedStorage(8, device="cpu").nbytes() == 8
    assert torch.UntypedStorage([1, 2]).tolist() == [1, 2]
    assert torch.UntypedStorage(8, device="meta").device.type == "meta"
    tensor = torch.arange(3)
    assert copy.deepcopy(tensor).tolist() == tensor.clone().untyped_storage().tolist()[::8] == [0, 1, 2]
    file = io.BytesIO()
    torch.save(tensor.untyped_storage(), file)
    file.seek(0)
    assert torch.load(file).tolist() == tensor.untyped_storage().tolist()
    with pytest.raises(RuntimeError, match="device type at start of device string"):
        torch.UntypedStorage(8, device="nonsense")


@pytest.mark.parametrize("device", ["cpu", "remote"])
def test_a_tensor_takes_the_memory_of_another_one(session: object, device: str) -> None:
    y = torch.arange(10.0, device=device)

    def empty(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor((), device=device, dtype=dtype)

    x = empty().set_(y.untyped_storage(), storage_offset=1, size=torch.Size([4]), stride=[2])  # type: ignore[call-overload]
    x[0] = 9
    assert (x.tolist(), x.storage_offset(), y[1].item()) == ([9, 3, 5, 7], 1, 9)
    assert empty().set_(y, 2, (2, 3), (3, 1)).tolist() == [[2, 3, 4], [5, 6, 7]]
    assert empty().set_(y[4:6].untyped_storage()).tolist() == y.tolist()
    bits = empty(torch.int64).set_(y.untyped_storage(), 1, (2,))
    assert bits.tolist() == y.view(torch.int64)[1:3].tolist()
    assert (empty().set_(y[2:4]).tolist(), empty().set_().shape) == ([2, 3], torch.Size([0]))


def test_memory_there_does_not_grow_for_another_tensor(session: object) -> None:
    y = torch.arange(10.0, device="remote")
    with pytest.raises(dr.errors.NotSupportedError, match=r"has 10 elements, and 12 are asked for"):
        torch.tensor((), device="remote").set_(y.untyped_storage(), 8, (4,))
