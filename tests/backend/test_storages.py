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
