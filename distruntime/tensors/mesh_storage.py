"""The memory of a mesh's tensor, as FSDP2 sees it.

FSDP2 gives a parameter's memory back between uses, and takes it again.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

from ..errors import NotSupportedError
from ..log.handle import Handle
from ..log.issue import issue
from ..log.line import user_line
from ..operators.signatures import template


class HasHandle(Protocol):
    """A proxy as it is seen from here. What is assigned to `x.data` brings another handle."""

    _handle: Handle


class MeshStorage:
    """The size in bytes, on each member, of a tensor on a mesh. It can be changed.

    It is what `t.untyped_storage()` returns.
    """

    def __init__(self, tensor: HasHandle) -> None:
        self._tensor = tensor
        self._storage = tensor._handle.storage

    def size(self) -> int:
        """Return the bytes that it has on each member."""
        spec = self._storage.spec
        if self._storage.resized is not None:
            return int(self._storage.resized)
        return int(spec.extent)

    nbytes = size

    def resize_(self, size: int) -> None:
        """Change the bytes on each member, after what has been issued: 0 gives the memory back.

        Return at once.
        """
        handle = self._tensor._handle
        node = handle.place.node
        node.require_alive()
        with node.lock:
            number, words = template(
                None,
                type(self._tensor),
                [self._tensor, int(size)],
                {},
                0,
                node,
                name="distruntime::resize_storage",
            )
            issue([number, *words], (), [handle], [self._storage], handle.place, user_line())
        self._storage.resized = int(size)

    def data_ptr(self) -> NoReturn:
        """Refuse: the memory is the members'."""
        raise NotSupportedError("a mesh's tensor has no address in this process; compare tensors with `is`")
