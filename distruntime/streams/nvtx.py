"""`dr.nvtx`: ranges with a name on a worker's stream, as `torch.cuda.nvtx` has them on a GPU's.

A range begins and ends where the stream gets to it, so it has the instructions between. `dr.trace` shows it,
and the worker opens one of NVTX's, too, if its torch has NVTX.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ..errors import UsageError, without_our_frames
from ..log.issue import issue
from ..log.line import user_line
from ..log.tape import recorded
from ..operators.signatures import template
from ..tensors.tensor import DistributedTensor
from ..wire.units import printable
from .stream import Stream, current_stream

__all__ = ["mark", "range", "range_pop", "range_push"]

# So many characters of a name are kept.
_LONGEST = 200


class _Open(threading.local):
    """The ranges that this thread has open, the innermost last: the name, and where it began."""

    def __init__(self) -> None:
        self.ranges: list[tuple[str, Stream | None]] = []


_open = _Open()


@without_our_frames
def range_push(msg: str) -> int:
    """Begin a range on the current stream of the current place; return its depth, from 0. Return at once.

    On a mesh it begins on each member. A program (`dr.program`) holds no ranges: those inside are left out.

    Raises:
        UsageError: the name is no text. NodeFailed: the worker is lost. SessionClosed: there is no session.
    """
    name = _checked(msg)
    stream = None if recorded.name else current_stream()
    if stream is not None:
        _issue(stream, "range_push", name)
    _open.ranges.append((name, stream))
    return len(_open.ranges) - 1


@without_our_frames
def range_pop() -> int:
    """End this thread's innermost range, on the stream where it began; return its depth, from 0.

    Return at once.

    Raises:
        UsageError: no range is open.
    """
    if not _open.ranges:
        raise UsageError("range_pop: this thread has no range open. Call range_push before, or use a `with`")
    name, stream = _open.ranges.pop()
    if stream is not None:
        node = stream.residence.node
        # If the worker is lost or the session is over, its range is, too.
        if node.failed is None and node.session.closed is None:
            _issue(stream, "range_pop", name)
    return len(_open.ranges)


@contextmanager
def range(msg: str) -> Iterator[None]:
    """Name what the block issues to the current stream of the current place. See `range_push`."""
    range_push(msg)
    try:
        yield
    finally:
        range_pop()


@without_our_frames
def mark(msg: str) -> None:
    """Name a moment of the current stream of the current place. Return at once. Raises as `range_push`."""
    name = _checked(msg)
    if not recorded.name:
        _issue(current_stream(), "mark", name)


def _checked(msg: object) -> str:
    if not isinstance(msg, str):
        raise UsageError(f"the name of a range is a text, got {msg!r:.80}")
    return printable(msg)[:_LONGEST]


def _issue(stream: Stream, function: str, name: str) -> None:
    with stream:
        place = stream.residence
        # The name of the operator has the range's, so that a trace and a look at a worker show it.
        called = f"distruntime::{function} {name}"
        number, words = template(None, DistributedTensor, [name], {}, 0, place.node, name=called)
        issue([number, *words], (), (), (), place, user_line())


# Completion at a prompt offers these.
__dir__ = partial(sorted, __all__)
