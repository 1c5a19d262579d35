"""The memory of a remote tensor, as code sees it that asks how large it is, and who shares it.

Libraries ask so when they save: tensors of one storage are tied weights. FSDP2 gives a parameter's memory on
a mesh back between uses, and takes it again.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

import torch

from ..errors import NotSupportedError, of_caller
from ..log.handle import Handle
from ..log.issue import issue
from ..log.line import user_line
from ..log.storage import Storage
from ..operators.signatures import template
from ..wire.shield import RLock

# No address has more than 64 bits. So whoever hands one of these numbers to C code gets an OverflowError, and
# no C code follows it. `ctypes.c_void_p` alone cuts the upper bits off without a word. Then bit 63 is left,
# and no processor maps such an address for a program.
_FIRST_ADDRESS = 3 << 63
_ALIGNMENT = 512
# A signal's handler may ask for an address while this thread holds it.
_lock = RLock()
_next_address = [_FIRST_ADDRESS]


def nbytes(storage: Storage) -> int:
    """Return how large a memory is; on a mesh, what each member has."""
    return int(storage.spec.extent if storage.resized is None else storage.resized)


def address(storage: Storage) -> int:
    """Return a number for the first byte of a memory; the ranges of two memories do not overlap.

    It is no address. An empty memory has 0, as in torch, and one that has grown has other numbers.
    """
    size = nbytes(storage)
    if size == 0:
        return 0
    with _lock:
        if not hasattr(storage, "addresses") or len(storage.addresses) < size:
            begin = _next_address[0]
            _next_address[0] += (size // _ALIGNMENT + 1) * _ALIGNMENT
            storage.addresses = range(begin, _next_address[0])
    return storage.addresses.start


class HasHandle(Protocol):
    """A proxy as it is seen from here. What is assigned to `x.data` brings another handle."""

    _handle: Handle


class RemoteStorage:
    """The memory that a remote tensor and its views share: its size in bytes, its place, its identity.

    It is what `t.untyped_storage()` returns. On a mesh, the size is what each member has, and it can be
    changed.
    """

    def __init__(self, tensor: HasHandle) -> None:
        # It is one of the tensors that have this memory.
        self.tensor = tensor
        self._storage = tensor._handle.storage

    @property
    def device(self) -> torch.device:
        """The place of the memory."""
        return self.tensor._handle.place.device

    def size(self) -> int:
        """Return the bytes; on a mesh, those that each member has."""
        return nbytes(self._storage)

    nbytes = size
    __len__ = size

    def data_ptr(self) -> int:
        """Return a number that tells this memory from all others. It is no address."""
        return address(self._storage)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteStorage) and other._storage is self._storage

    def __hash__(self) -> int:
        return id(self._storage)

    def resize_(self, size: int) -> None:
        """Change the bytes on each member of a mesh, after what has been issued: 0 gives the memory back.

        Return at once.
        """
        handle = self.tensor._handle
        node = handle.place.node
        if not node.members:
            raise NotSupportedError(
                f"the memory of a remote tensor ({handle.place.place}) cannot be resized alone; "
                "resize the tensor: x.resize_(...)"
            )
        self.resize_shard(size)

    def resize_shard(self, size: int) -> None:
        """Change the bytes wherever the memory is: as `resize_`, also of one member's shard."""
        handle = self.tensor._handle
        node = handle.place.node
        node.require_alive()
        with node.lock:
            number, words = template(
                None,
                type(self.tensor),
                [self.tensor, int(size)],
                {},
                0,
                node,
                name="distruntime::resize_storage",
            )
            issue([number, *words], (), [handle], [self._storage], handle.place, user_line())
        self._storage.resized = int(size)

    def __getattr__(self, name: str) -> NoReturn:
        # Code that asks whether there is such an attribute wants this class.
        raise of_caller(
            AttributeError(
                "the memory of a remote tensor is not in this process, so its storage has no "
                f"{name!r}; dr.fetch(x).untyped_storage() is a local one"
            )
        )
