"""The memory of values, as the log knows it: who uses it, what it lies in, and whether it may be written."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from ..errors import UsageError
from .line import Line, line_text
from .log import CallPart, Log
from .node import Node
from .spec import Spec
from .uses import Memory, Use


class Storage:
    """The memory that a tensor and its views share.

    `spec` is the largest that it was made for; it tells how large the memory is when only a view is left.
    `written` is the position in the log of the last instruction that changes it. `order` says which streams
    used it, once there are several: see order.py.
    """

    __slots__ = (
        "__weakref__",
        "addresses",
        "given",
        "kin",
        "lies_in",
        "order",
        "parts",
        "parts_of_call",
        "resized",
        "spec",
        "whole",
        "written",
    )

    # These are the numbers that `data_ptr()` tells, once somebody has asked: see remote_storage.py.
    addresses: range

    # The values that one instruction made together with this memory, and the memory of each. Set only where
    # it made several, so that an operation with one result pays nothing: see `relate`. The references are
    # weak because kin name each other.
    kin: Sequence[tuple[int, weakref.ref[Storage]]]

    # The memory whose order is this one's too, in a `HeldStorage`.
    lies_in: Memory

    # The parts of the call that has made it, where several workers run one together. Otherwise it is not set.
    parts_of_call: Sequence[CallPart]

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.written = 0
        self.order: Use | None = None
        # A mesh's storage has here those of its members that somebody has named.
        self.parts: dict[int, Storage] | None = None
        # A member's storage has here those of the meshes' tensors that it is a shard of, by the mesh's log.
        self.whole: dict[Log, weakref.ref[Storage]] | None = None
        # A mesh's storage that was put together has here what keeps its names' order on each worker.
        self.given: dict[Node, Storage] | None = None
        # These are bytes, once somebody has changed them: see remote_storage.py.
        self.resized: int | None = None


class HeldStorage(Storage):
    """A memory whose order is that of another one, in which it may lie.

    A class of its own, so that other storages pay nothing for it. A storage becomes one where it is.
    """

    __slots__ = ()

    @property
    def written(self) -> int:
        """The position of the last instruction that changes what it may lie in."""
        return root_of(self).written

    @written.setter
    def written(self, position: int) -> None:
        root_of(self).written = position

    @property
    def order(self) -> Use | None:
        """Who uses what it may lie in."""
        return root_of(self).order

    @order.setter
    def order(self, use: Use | None) -> None:
        root_of(self).order = use


def root_of(memory: Memory) -> Memory:
    """Return the memory whose order is this one's."""
    # The hot path comes by here, and `isinstance` takes longer.
    while type(memory) is HeldStorage:
        memory = memory.lies_in
    return memory


def put_into(storage: Storage, into: Memory) -> None:
    """Let the order of a memory be that of another one."""
    storage.lies_in = into
    # It stays the object that its handles and views have.
    storage.__class__ = HeldStorage


class ReadOnlyStorage(Storage):
    """The memory of a value of another session.

    A class of its own, so that storages that may be written pay nothing for it.
    """

    __slots__ = ("name",)

    def __init__(self, spec: Spec, name: str) -> None:
        super().__init__(spec)
        self.name = name


def require_writable(storages: Iterable[object], line: Line) -> None:
    """Raise `UsageError` if one of them may be read only; `line` is who wants to write it."""
    for storage in storages:
        if type(storage) is ReadOnlyStorage:
            raise UsageError(
                f"a tensor of {storage.name!r} cannot be written: "
                "another session has published it, and shares it for reading\n"
                f"  written at {line_text(line)}\n"
                "  write to a copy of your own: x.clone(), or copy.deepcopy(model); "
                "a model that is only evaluated: model.eval()"
            )
