"""Weights on a worker's disk: which files they are in, and their tensors, read straight onto a device.

These functions travel to workers.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from distruntime.errors import CheckpointError

# From and to, of each dimension that is cut.
Slices = Sequence[tuple[int, int] | None]


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: object) -> torch.Tensor: ...


class _Opened(Protocol):
    """What safetensors opens."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...

    def get_slice(self, name: str) -> _Slice: ...


_INDEXES = (".safetensors.index.json", ".bin.index.json")


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _files(path: str) -> dict[str, list[str] | None]:
    """Return the files that a path means, each with the names that are read of it: None for all."""
    whole = _absolute(path)
    if os.path.isfile(whole):
        return {whole: None}
    if not os.path.isdir(whole):
        raise FileNotFoundError(f"{whole} is neither a file nor a folder on this worker")
    names = sorted(os.listdir(whole))
    for ending in _INDEXES:
        indexes = [name for name in names if name.endswith(ending)]
        if len(indexes) == 1:
            return _indexed(whole, indexes[0])
    for ending in (".safetensors", ".bin", ".pt", ".pth"):
        found = [name for name in names if name.endswith(ending) and not name.startswith(".")]
        if found and (ending == ".safetensors" or len(found) == 1):
            return {os.path.join(whole, name): None for name in found}
    raise FileNotFoundError(
        f"{whole} has no weights: expected *.safetensors (with model.safetensors.index.json where there are "
        f"several), or one file of torch.save; it has {', '.join(names[:8]) or 'nothing'}"
    )


def _indexed(folder: str, index: str) -> dict[str, list[str] | None]:
    with open(os.path.join(folder, index), encoding="utf-8") as file:
        table = json.load(file).get("weight_map")
    if not isinstance(table, dict):
        raise CheckpointError(f"{os.path.join(folder, index)} has no weight_map")
    found: dict[str, list[str] | None] = {}
    for name, part in table.items():
        if os.path.basename(str(part)) != part:
            raise CheckpointError(f"{os.path.join(folder, index)} names a file elsewhere: {part!r:.80}")
        mine = found.setdefault(os.path.join(folder, part), [])
        assert mine is not None
        mine.append(name)
    missing = [path for path in found if not os.path.isfile(path)]
    if missing:
        raise FileNotFoundError(
            f"{index} names {missing[0]}, and it is not there: bring it as docs/data.md does"
        )
    return found


def _is_safetensors(path: str) -> bool:
    with open(path, "rb") as file:
        head = file.read(9)
    # The length of a JSON object comes first.
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < 1 << 30


def _safe_open(path: str, **options: str) -> AbstractContextManager[_Opened]:
    """Open a file of safetensors, which the master's process does without."""
    opened: AbstractContextManager[_Opened] = importlib.import_module("safetensors").safe_open(
        path, **options
    )
    return opened


def sizes_of(path: str) -> dict[str, list[int]]:
    """Return the size of each tensor, by name. Only files of torch.save are read for that."""
    found = {}
    for file, names in _files(path).items():
        if _is_safetensors(file):
            with _safe_open(file, framework="pt") as opened:
                for name in opened.keys() if names is None else names:
                    found[name] = [*opened.get_slice(name).get_shape()]
        else:
            found.update({name: [*t.shape] for name, t in _flat(file, names, torch.device("meta"))})
    return found


def read(
    path: str, device: torch.device, slices: Mapping[str, Slices] | None, dtype: torch.dtype | None
) -> object:
    """Return what is in files of weights, on a device: tensors by name, or whatever torch.save has saved.

    `slices` has the part of each tensor that is wanted. Floating-point tensors become `dtype`.
    """
    files = _files(path)
    alone = next(iter(files))
    if len(files) == 1 and slices is None and not _is_safetensors(alone):
        return _plain(_saved(alone, device), dtype)
    found: dict[str, torch.Tensor] = {}
    for file, names in files.items():
        pairs = (
            _opened(file, names, device, slices)
            if _is_safetensors(file)
            else _cut(file, names, device, slices)
        )
        for name, tensor in pairs:
            if name in found:
                raise CheckpointError(
                    f"{name!r} is in several files of {path}, and no index says which counts"
                )
            found[name] = _cast(tensor, dtype)
    return found


def _opened(
    path: str, names: list[str] | None, device: torch.device, slices: Mapping[str, Slices] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    # safetensors refuses a device whose name it does not know, and it knows few that a plug-in brings. What
    # it reads for the CPU is pages of the file until it is moved.
    from_plugin = device.type == torch._C._get_privateuse1_backend_name()
    read_onto = torch.device("cpu") if from_plugin else device
    with _safe_open(path, framework="pt", device=str(read_onto)) as opened:
        for name in opened.keys() if names is None else names:
            cut = None if slices is None else slices.get(name)
            if cut is None or not any(cut):
                yield name, opened.get_tensor(name).to(device)
            else:
                index = tuple(slice(None) if part is None else slice(*part) for part in cut)
                yield name, _alone(opened.get_slice(name)[index]).to(device)


def _cut(
    path: str, names: list[str] | None, device: torch.device, slices: Mapping[str, Slices] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    here = device if slices is None else torch.device("cpu")
    for name, tensor in _flat(path, names, here):
        cut = None if slices is None else slices.get(name)
        if cut is not None and any(cut):
            index = tuple(slice(None) if part is None else slice(*part) for part in cut)
            tensor = _alone(tensor[index])
        yield name, tensor.to(device)


def _alone(part: torch.Tensor) -> torch.Tensor:
    """Return a part of a tensor in memory of its own, as it may lie anywhere in the whole's."""
    return part.clone(memory_format=torch.contiguous_format)


def _flat(path: str, names: list[str] | None, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    saved = _saved(path, device)
    if not isinstance(saved, Mapping) or not all(isinstance(t, torch.Tensor) for t in saved.values()):
        raise CheckpointError(
            f"{path} holds more than tensors by name, so it has no parts for members: load it to a place, "
            "dr.load(path, node=...), and distribute what is in it"
        )
    for name in saved if names is None else names:
        if name not in saved:
            raise CheckpointError(f"{path} has no {name!r}, which the index says is there")
        yield name, saved[name]


def _saved(path: str, device: torch.device) -> object:
    with open(path, "rb") as file:
        packed = file.read(2) == b"PK"
    saved: object = torch.load(path, map_location=device, weights_only=True, mmap=packed)
    return saved


def _plain(value: object, dtype: torch.dtype | None) -> object:
    """Return a tree with plain dicts, so that its tensors are found."""
    if isinstance(value, torch.Tensor):
        return _cast(value.detach(), dtype)
    if isinstance(value, Mapping):
        return {key: _plain(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        return type(value)(_plain(item, dtype) for item in value)
    return value


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
