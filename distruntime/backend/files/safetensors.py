"""safetensors files whose tensors go to a place, or come from one: `load_file(path, device="remote")`.

safetensors reads in Rust, and knows the devices of this process only. So a file is opened for the CPU, and
each tensor is sent where it was wanted. What is saved is fetched together: safetensors itself would wait for
each tensor.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Protocol

import torch

from ...session.spelling import is_remote
from ...tensors.fetch import fetch
from ...tensors.tensor import DistributedTensor
from ..on_import import when_imported


class _Slice(Protocol):
    def __getitem__(self, index: object) -> torch.Tensor: ...


class _Opened(Protocol):
    """What `safetensors.safe_open` returns."""

    def __enter__(self) -> _Opened: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...
    def get_tensors(self, *args: object, **kwargs: object) -> dict[str, torch.Tensor]: ...
    def get_slice(self, name: str) -> _Slice: ...


_Open = Callable[..., _Opened]  # type: ignore[explicit-any]


class _SentSlice:
    def __init__(self, part: _Slice, device: torch.device | str) -> None:
        self._part, self._device = part, device

    def __getitem__(self, index: object) -> torch.Tensor:
        return self._part[index].to(self._device)

    def __getattr__(self, name: str) -> object:
        return getattr(self._part, name)


class _Sent:
    """An open file whose tensors go to a place."""

    def __init__(self, opened: _Opened, device: torch.device | str) -> None:
        self._opened, self._device = opened, device

    def __enter__(self) -> _Sent:
        self._opened.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._opened.get_tensor(name).to(self._device)

    def get_tensors(self, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        found = self._opened.get_tensors(*args, **kwargs)
        return {name: tensor.to(self._device) for name, tensor in found.items()}

    def get_slice(self, name: str) -> _SentSlice:
        return _SentSlice(self._opened.get_slice(name), self._device)

    def __getattr__(self, name: str) -> object:
        return getattr(self._opened, name)


def meant(device: object) -> object:
    """Return the device that a caller of safetensors means. Take-over puts another function here."""
    return device


def _sending(own: _Open) -> _Open:
    # safetensors' own is a class, and libraries write it in annotations: `safe_open | None`.
    class _Kind(type):
        def __call__(
            cls, filename: object, framework: str, device: object = "cpu", *args: object, **kwargs: object
        ) -> _Opened | _Sent:
            where = meant(device)
            if is_remote(where):
                return _Sent(own(filename, framework, "cpu", *args, **kwargs), where)
            return own(filename, framework, where, *args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (own, _Sent))  # type: ignore[arg-type]

    class safe_open(metaclass=_Kind):
        __doc__ = own.__doc__

    # So a function that uses it travels with its name, which is safetensors' own class on a worker.
    safe_open.__module__, safe_open.__qualname__ = "safetensors", "safe_open"
    return safe_open  # type: ignore[return-value]


def _patch(module: ModuleType) -> None:
    own = module.safe_open
    sending = _sending(own)
    # Libraries have imported it by name.
    for user in list(sys.modules.values()):
        if getattr(user, "__dict__", {}).get("safe_open") is own:
            user.safe_open = sending  # type: ignore[attr-defined]


def _patch_saving(module: ModuleType) -> None:
    own, check = module._flatten_as_ptr, module._evaluate_tensors_for_save

    @functools.wraps(own)
    def flatten(tensors: dict[str, torch.Tensor], *rest: object) -> object:
        # This looks at who shares memory, which fetched tensors no longer tell.
        check(tensors)
        remote = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DistributedTensor)}
        if not all(tensor.is_contiguous() for tensor in remote.values()):
            return own(tensors, *rest)
        return own({**tensors, **fetch(remote)}, *rest)

    module._flatten_as_ptr = flatten  # type: ignore[attr-defined]


def install_safetensors() -> None:
    """Let safetensors take places as devices, from now on or from its import on."""
    when_imported("safetensors", _patch)
    when_imported("safetensors.torch", _patch_saving)
