"""Memory that may lie in an object on a worker: what it was handed, and what came out of it.

Only the worker could tell what an object keeps. So an object, its arguments and what it hands out of its own
memory count as one memory: a call of the object comes after whatever uses any of that, and before whatever
uses it later.
"""

from __future__ import annotations

from collections.abc import Sequence

from .handle import Handle, Residence, Storage
from .issue import stream_at
from .order import Lent, Memory, Use
from .spec import Spec


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


def lent_storage(spec: Spec, home: Residence, name: int) -> Storage:
    """Return the memory that a worker's own Python holds, too, and calls by this number."""
    lent = home.node.lent
    found = lent.named.get(name)
    if not isinstance(found, Storage):
        found = lent.named[name] = Storage(spec)
        _put(found, lent)
    return found


def join(home: Residence, memories: Sequence[Memory]) -> None:
    """Let memories count as one from now on. Call under the log's lock, behind the call that may keep them.

    What may only be read stays apart: nobody writes it.
    """
    node = home.node
    first = root_of(memories[0])
    for memory in memories[1:]:
        other = root_of(memory)
        if isinstance(other, Lent):
            # It outlives all others.
            first, other = other, first
        if other is first or type(other) is not Storage:
            continue
        if node.order is None:
            first.written = max(first.written, other.written)
        else:
            node.order.merge(first, other, stream_at(home))
        _put(other, first)


def join_written(home: Residence, owner: Storage, operands: Sequence[Handle], end: int) -> None:
    """Note a known call, which ends at `end` and has written all operands: as `join`, and quick."""
    if home.node.order is not None:
        # A thread was on the hot path while another one opened the first stream.
        join(home, [owner, *(handle.storage for handle in operands)])
    first = root_of(owner)
    first.written = end
    for handle in operands:
        storage = handle.storage
        if storage is first:
            continue
        if type(storage) is Storage:
            _put(storage, first)
        elif root_of(storage) is not first:
            storage.written = end
            join(home, [first, storage])
            first = root_of(first)


def _put(storage: Storage, into: Memory) -> None:
    storage.lies_in = into
    # It stays the object that its handles and views have.
    storage.__class__ = HeldStorage
