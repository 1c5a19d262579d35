"""What only cycles hold, where a recording has to know what is left."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from ..log.handle import Handle


@contextmanager
def young_cycles_end() -> Iterator[Callable[[], set[int]]]:
    """Let go of the cycles that were made in the block, at its end, if it ends well.

    It gives a function that returns the ids of the objects that were made since and are still there.

    A whole collection looks at all objects of the process, some 0.2 s. What was there before is out of sight
    meanwhile, unless the user has put something out of sight himself: nobody could tell the two apart later.
    """
    mine = not gc.get_freeze_count()
    if mine:
        gc.freeze()
    old = set() if mine else _ids()
    try:
        yield lambda: _ids() - old
        gc.collect()
    finally:
        if mine:
            gc.unfreeze()


def _ids() -> set[int]:
    return set(map(id, gc.get_objects()))


def still_held(refs: Collection[int]) -> set[int]:
    """Return which of these values are held by more than cycles. It collects all of them: 0.2 s."""
    if not refs:
        return set()
    gc.collect()
    return {one.ref for one in gc.get_objects() if type(one) is Handle and one.ref in refs}
