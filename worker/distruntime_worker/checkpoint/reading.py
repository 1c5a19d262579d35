"""Reading a checkpoint's files: tensors, small ones together, and sums that tell whether two are alike."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from distruntime.errors import CheckpointError
from distruntime.wire.codec import dtype_name, dtype_named, tensor_bytes

from .plan import OURS, CheckpointPlan, plan_of, restored


def read(packed: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Return tensors of files in memory of their own on a device, after one that says that all are there."""
    plan, _ = plan_of(packed)
    found = [torch.zeros((), dtype=torch.int64)]
    for values, stride in _values(plan):
        if stride is not None:
            target = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=device)
            found.append(target.copy_(values))
        elif device.type == "cpu":
            found.append(values.clone())
        else:
            found.append(values.to(device))
    return found


def read_packed(packed: torch.Tensor) -> torch.Tensor:
    """Return the bytes of many small tensors of files in one."""
    plan, _ = plan_of(packed)
    parts = [bytes(tensor_bytes(values)) for values, _ in _values(plan)]
    return (
        torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        if any(parts)
        else torch.empty(0, dtype=torch.uint8)
    )


def sums(packed: torch.Tensor) -> torch.Tensor:
    """Return the checksums of tensors, as their files have them."""
    plan, _ = plan_of(packed)
    folder, files = plan["folder"], dict[str, _File]()
    found = []
    for name, key, *_ in plan["tensors"]:
        if name not in files:
            files[name] = _File(folder, name, plan["save"])
        found.append(files[name].sum_of(key))
    return torch.tensor(found, dtype=torch.int64)


def _values(plan: CheckpointPlan) -> Iterator[tuple[torch.Tensor, list[int] | None]]:
    """Yield the values of each tensor of a plan, in the file's memory, and the strides that it is to have."""
    folder, files = plan["folder"], dict[str, _File]()
    for name, key, dtype, sizes, stride in plan["tensors"]:
        if name not in files:
            files[name] = _File(folder, name, plan["save"])
        yield files[name].tensor(key, dtype_named(dtype), sizes), stride


class _Opened(Protocol):
    """What safetensors opens."""

    def metadata(self) -> dict[str, str] | None: ...

    def keys(self) -> list[str]: ...

    def get_tensor(self, key: str) -> torch.Tensor: ...


def _opened(path: str) -> _Opened:
    file: _Opened = safe_open(path, framework="pt")
    return file


class _File:
    """A file of a save, opened and checked."""

    def __init__(self, folder: str, name: str, save: str) -> None:
        if not OURS.fullmatch(name):
            raise CheckpointError(
                f"the index in {folder} names a file {name!r:.80}, which no save has written"
            )
        self._path = os.path.join(folder, name)
        try:
            self._file = _opened(self._path)
            metadata = self._file.metadata() or {}
        except SafetensorError as error:
            raise self._damaged(str(error)) from None
        except OSError as error:
            raise CheckpointError(
                f"{self._path} cannot be read: {error}; it is part of the checkpoint, which is of no use "
                "without it"
            ) from None
        keys, sums = sorted(self._file.keys()), str(metadata.get("crc32", "")).split()
        if metadata.get("distruntime") != save or len(sums) != len(keys):
            raise self._damaged(
                f"it belongs to save {metadata.get('distruntime')!r:.40}, and the index to {save!r}"
            )
        self._sums = dict(zip(keys, sums))

    def sum_of(self, key: str) -> int:
        """Return the checksum of a tensor's bytes. Raise `CheckpointError` if the file has none."""
        try:
            return int(self._sums[key], 16)
        except (KeyError, ValueError):
            raise self._damaged(f"it has no checksum of {key!r}") from None

    def tensor(self, key: str, dtype: torch.dtype, sizes: list[int]) -> torch.Tensor:
        """Return a tensor in the memory of the file.

        Raise `CheckpointError` if its bytes are not those that were written.
        """
        if key not in self._sums:
            raise self._damaged(f"it has no tensor {key!r}")
        try:
            found: torch.Tensor = self._file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise self._damaged(str(error)) from None
        if f"{zlib.crc32(tensor_bytes(found)):08x}" != self._sums[key]:
            raise self._damaged(
                f"the bytes of {key!r} have the checksum {zlib.crc32(tensor_bytes(found)):08x}, not "
                f"{self._sums[key]}"
            )
        values = restored(found, dtype)
        if list(values.shape) != sizes:
            raise self._damaged(
                f"{key!r} is {tuple(values.shape)} {dtype_name(values.dtype)}, and the index says "
                f"{tuple(sizes)} {dtype_name(dtype)}"
            )
        return values

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged: {why}. Expected: the file as dr.save wrote it; take another copy of "
            "the checkpoint"
        )
