"""What a call may write, and what may lie in an object's memory behind it. See `held.py`."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError
from ..log.handle import Handle, Residence, Storage, next_ref
from ..log.issue import stream_at
from ..log.order import Memory
from ..log.read_only import ReadOnlyStorage
from ..log.spec import NO_TENSOR


def written_by(
    name: str, writes: Sequence[int] | None, operands: Sequence[Handle], home: Residence
) -> list[Memory]:
    """Return the memories that a call may change: of an object always, of a tensor unless told.

    Call under the lock, before the call is issued.
    """
    kept = next((h.storage for h in operands if isinstance(h.storage, ReadOnlyStorage)), None)
    if kept is not None and writes is None:
        raise UsageError(
            f"{name} may write its arguments, and a tensor of {kept.name!r} is shared for "
            "reading: say that it writes none of them, dr.remote(writes=()), or pass x.clone()"
        )
    found: list[Memory] = [
        handle.storage
        for k, handle in enumerate(operands)
        if handle.spec is NO_TENSOR or writes is None or k in writes
    ]
    # It may write what was taken out of any object: parameters of a model, for example.
    lent, order = home.node.lent, home.node.order
    if lent.named:
        return [*found, lent]
    # Nobody has any of that, and what was read of it may still be under way.
    if order is not None:
        order.follow(lent, stream_at(home))
    return found


def owner_of(operands: Sequence[Handle]) -> Storage | None:
    """Return the memory of the first object among operands: what a call returns of objects is in it."""
    return next((handle.storage for handle in operands if handle.spec is NO_TENSOR), None)


def object_in(owner: Storage | None, home: Residence) -> Handle:
    """Return the handle of a new object, which is a part of another one if there is one."""
    return Handle(next_ref(), NO_TENSOR, home, owner or Storage(NO_TENSOR))


def kept_by(operands: Sequence[Handle], made: Sequence[Handle]) -> list[Memory]:
    """Return what counts as one memory after a call, an object's first; nothing where it has no object."""
    objects = [handle.storage for handle in (*operands, *made) if handle.spec is NO_TENSOR]
    if not objects:
        return []
    return list(dict.fromkeys((*objects, *(handle.storage for handle in operands))))
