"""`torch.save` of what holds remote tensors: it fetches them, together, and saves local ones."""

from __future__ import annotations

import functools
import io
import types
from contextlib import suppress
from pickle import Pickler
from typing import Any, Protocol

import torch

from ..errors import NotSupportedError, without_our_frames
from ..session.session import active
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor, saving


class _Save(Protocol):
    def __call__(self, obj: object, f: object, *args: object, **kwargs: object) -> None: ...


# torch's own `save` looks at its arguments itself, and this module's stands in its place.
_save: _Save = torch.save  # type: ignore[assignment]


# A walk ends at these.
_ENDS = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage, type, types.FunctionType)


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        return len(memoryview(data))  # type: ignore[arg-type]


class _Finder(Pickler):
    """Walks through an object as pickle does, and notes the remote tensors in it. Nothing is written."""

    def __init__(self) -> None:
        # Large arrays are handed to the callback instead of being copied.
        super().__init__(_Nowhere(), protocol=5, buffer_callback=lambda buffer: False)
        self.found: dict[int, DistributedTensor] = {}

    # Nobody reads what is written, so any reduction will do.
    def reducer_override(self, value: object) -> Any:  # type: ignore[explicit-any]
        if isinstance(value, DistributedTensor):
            self.found[id(value)] = value
        # A number stands for what holds no remote tensor, as it may be large, or may have no name.
        return (int, ()) if isinstance(value, _ENDS) and value is not int else NotImplemented


def _remote_tensors(value: object) -> list[DistributedTensor]:
    finder = _Finder()
    # If something in it cannot be pickled, torch's own walk says so. If that has a way to pickle it all the
    # same, what is missing here is fetched there.
    with suppress(Exception):
        finder.dump(value)
    return list(finder.found.values())


def _local(proxy: DistributedTensor, value: torch.Tensor) -> torch.Tensor:
    """Return a fetched value as pickle is to see it: with what Python has set on the proxy."""
    if not isinstance(value, torch.nn.Parameter):
        value = value.detach().requires_grad_(proxy.requires_grad)
    for name, attribute in proxy.__dict__.items():
        if name not in ("_handle", "_is_param"):
            setattr(value, name, attribute)
    return value


@functools.wraps(_save)
@without_our_frames
def save(obj: object, f: object, *args: object, **kwargs: object) -> None:
    """Save as `torch.save` does; remote tensors become local ones in the file. Block until it is written.

    All of them are fetched together. Tied tensors stay tied.
    """
    if not active or active[0].closed is not None:
        return _save(obj, f, *args, **kwargs)
    # Those of meshes are refused when their turn comes.
    remote = [t for t in _remote_tensors(obj) if not t._handle.place.node.members]
    values = dict(zip(map(id, remote), fetch(remote)))

    def fetched(proxy: torch.Tensor) -> torch.Tensor:
        assert isinstance(proxy, DistributedTensor)
        if proxy._handle.place.node.members:
            raise NotSupportedError(
                f"a tensor on {proxy.place} has a part on each member, and a file would hold one of them: "
                "save the parts, [x.member(k) for k in range(mesh.size())], or one member's, dr.fetch(x)"
            )
        value = values.get(id(proxy))
        return _local(proxy, fetch(proxy) if value is None else value)

    token = saving.set(fetched)
    try:
        return _save(obj, f, *args, **kwargs)
    finally:
        saving.reset(token)
