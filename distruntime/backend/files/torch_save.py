"""`torch.save` of what holds remote tensors: it fetches them, together, and saves local ones.

torch's own `save` walks through the object here, into no file. Each remote tensor is pickled as a local one
whose memory is still empty. Then all memories are fetched together, so a failure leaves an older file as it
is. At last torch writes the file, with the pickle that the walk has made. So `__getstate__` and its like are
called once.
"""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import IO, Protocol

import torch
from torch.utils.hooks import warn_if_has_hooks

from ...errors import NotSupportedError, without_our_frames
from ...log.handle import Residence
from ...log.storage import Storage
from ...session.session import active
from ...tensors.copying import own_attributes
from ...tensors.fetch import Kind, fetch
from ...tensors.remote_storage import RemoteStorage, nbytes
from ...tensors.tensor import DistributedTensor, saving


class _Save(Protocol):
    def __call__(self, obj: object, f: object, *args: object, **kwargs: object) -> None: ...


# torch's own `save` looks at its arguments itself, and this module's stands in its place.
_save: _Save = torch.save  # type: ignore[assignment]
_arguments = inspect.signature(torch.save)
_Number = Callable[[object, object], object]


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        return len(memoryview(data))  # type: ignore[arg-type]


class _Walked(BaseException):
    """The walk is at its end, and nothing has been written."""


class _Noted(Protocol):
    """A local memory, with the place of the remote one that it stands for."""

    _distruntime_home: Residence


def home_of(storage: torch.UntypedStorage) -> Residence | None:
    """Return the place whose memory a storage stands for while `save` runs; None for any other storage."""
    return getattr(storage, "_distruntime_home", None)


class _Memories:
    """Local memories of the sizes of remote ones, which are filled when all are known."""

    def __init__(self) -> None:
        # Each entry has what remote tensors share, its local memory, and one of these tensors.
        self._all: dict[int, tuple[Storage, torch.UntypedStorage, DistributedTensor]] = {}

    def of(self, proxy: DistributedTensor) -> torch.UntypedStorage:
        """Return the local memory of a remote tensor."""
        _refuse_mesh(proxy)
        handle = proxy._handle
        found = self._all.get(id(handle.storage))
        size = max(nbytes(handle.storage), handle.spec.extent)
        if found is None:
            memory = torch.UntypedStorage(size, device="cpu")
            noted: _Noted = memory  # type: ignore[assignment]
            noted._distruntime_home = handle.place
            self._all[id(handle.storage)] = handle.storage, memory, proxy
            return memory
        storage, memory, other = found
        if size > memory.nbytes():
            memory.resize_(size)
        if proxy.element_size() < other.element_size():
            self._all[id(storage)] = storage, memory, proxy
        return memory

    def tensor(self, proxy: DistributedTensor) -> torch.Tensor:
        """Return the local tensor that pickle is to see."""
        spec = proxy._handle.spec
        value = torch.empty(0, dtype=spec.dtype, device="cpu")
        value.set_(self.of(proxy), spec.offset, spec.size, spec.stride)
        if spec.bits:
            torch._C._set_conj(value, proxy.is_conj())
            torch._C._set_neg(value, proxy.is_neg())
        return _like(proxy, value)

    def fill(self) -> None:
        """Fetch all memories together. Block until they are here."""
        wanted = [(memory, proxy) for _, memory, proxy in self._all.values() if memory.nbytes()]
        whole = [proxy._stretched(memory.nbytes()) for memory, proxy in wanted]
        # Each is freed when it is in its memory.
        fetched = fetch(whole)[::-1]
        for memory, _ in wanted:
            value = fetched.pop().view(torch.uint8)
            torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory, 0, value.shape, (1,)).copy_(value)


class _Pickler(Protocol):
    def dump(self, value: object, /) -> None: ...


class _Walk:
    """What torch takes as `pickle_module`, in both of its calls."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self.memories = _Memories()
        self.pickled: bytes | None = None
        # torch has given each of these a number. In the second call it does so again.
        self.numbered: list[object] = []
        self.Pickler = _pickler(self, module.Pickler)

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)

    def close(self) -> None:
        """Let go of everything: a class is part of a cycle, and this one holds the walk."""
        self.memories, self.pickled, self.numbered = _Memories(), None, []


def _pickler(walk: _Walk, base: type) -> type[_Pickler]:
    class Pickler(base):  # type: ignore[misc]
        """In the first call it pickles, and in the second one it writes what it has pickled."""

        def __init_subclass__(cls) -> None:
            # torch's function numbers storages. It holds them all, so the class must not keep it.
            number: _Number = cls.persistent_id

            def persistent_id(self: Pickler, value: object) -> object:
                if isinstance(value, RemoteStorage):
                    value = walk.memories.of(value.tensor)  # type: ignore[arg-type]
                found = number(self, value)
                if found is not None:
                    walk.numbered.append(value)
                return found

            cls.persistent_id = persistent_id

        def __init__(self, file: IO[bytes], protocol: int) -> None:
            self._file, self._protocol, self._written = file, protocol, io.BytesIO()
            super().__init__(self._written, protocol=protocol)

        def reducer_override(self, value: object) -> object:
            if isinstance(value, DistributedTensor):
                return walk.memories.tensor(value).__reduce_ex__(self._protocol)
            above = getattr(super(), "reducer_override", None)
            return NotImplemented if above is None else above(value)

        def dump(self, value: object) -> None:
            try:
                if walk.pickled is None:
                    super().dump(value)
                    walk.pickled = self._written.getvalue()
                    raise _Walked
                for one in tuple(walk.numbered):
                    self.persistent_id(one)
                self._file.write(walk.pickled)
            finally:
                del type(self).persistent_id

    return Pickler


def _refuse_mesh(proxy: DistributedTensor) -> None:
    if proxy._handle.place.node.members:
        raise NotSupportedError(
            f"a tensor on {proxy.place} has a part on each member, and a file would hold one of them: "
            "save the parts, [x.member(k) for k in range(mesh.size())], or one member's, dr.fetch(x)"
        )


def _like(proxy: DistributedTensor, value: torch.Tensor) -> torch.Tensor:
    """Return a local value as pickle is to see it: with what Python has set on the proxy."""
    made = Kind.of(proxy).made_of(value)
    if not isinstance(made, torch.nn.Parameter):
        warn_if_has_hooks(proxy)
        with torch._C.DisableTorchFunctionSubclass():
            made.requires_grad_(proxy.requires_grad)
    for name, attribute in own_attributes(proxy):
        if name != "_is_param":
            setattr(made, name, attribute)
    return made


def _fetched(proxy: torch.Tensor) -> torch.Tensor:
    """Return the local copy that another pickle is to see, which somebody makes while torch walks."""
    assert isinstance(proxy, DistributedTensor)
    _refuse_mesh(proxy)
    return _like(proxy, fetch(proxy).detach())


@functools.wraps(_save)
@without_our_frames
def save(obj: object, f: object, *args: object, **kwargs: object) -> None:
    """Save as `torch.save` does; remote tensors become local ones in the file. Block until it is written.

    All of them are fetched together. Tied tensors stay tied, and views share their memory. Under take-over
    the file says "cuda:0" of them.
    """
    if not active or active[0].closed is not None:
        return _save(obj, f, *args, **kwargs)
    options = _arguments.bind(obj, f, *args, **kwargs).arguments
    del options["obj"], options["f"]
    walk = _Walk(options.pop("pickle_module", _arguments.parameters["pickle_module"].default))
    token = saving.set(_fetched)
    try:
        with suppress(_Walked):
            _save(obj, _Nowhere(), **options, pickle_module=walk)
        walk.memories.fill()
        _save(obj, f, **options, pickle_module=walk)
    finally:
        saving.reset(token)
        walk.close()
