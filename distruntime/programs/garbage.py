"""What only cycles hold, where a recording has to know what is left."""

from __future__ import annotations

import gc
import types
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ..guards.functions import is_traced
from ..log.handle import Handle


class Young:
    """What was made since a recording has begun."""

    def __init__(self) -> None:
        # What was there before is out of sight meanwhile, unless the user has put something out of sight
        # himself: nobody could tell the two apart later.
        self.mine = not gc.get_freeze_count()
        self._old = set[int]() if self.mine else set(map(id, gc.get_objects()))
        # The names of generators and coroutines that were made, and have not ended.
        self.midway: list[str] = []

    def ids(self) -> set[int]:
        """Return the ids of the objects that were made, and are still there."""
        return set(map(id, gc.get_objects())) - self._old

    def unfinished(self) -> list[str]:
        """Return the names of the generators that have not ended, but for this package's own."""
        return [
            one.__name__
            for one in gc.get_objects()
            if (prefix := _PREFIXES.get(type(one))) is not None
            and id(one) not in self._old
            and getattr(one, f"{prefix}_frame") is not None
            and is_traced(getattr(one, f"{prefix}_code").co_filename)
        ]


_PREFIXES: dict[type, str] = {
    types.GeneratorType: "gi",
    types.CoroutineType: "cr",
    types.AsyncGeneratorType: "ag",
}


@contextmanager
def young_cycles_end() -> Iterator[Young]:
    """Let go of the cycles that were made in the block, at its end, if it ends well.

    A whole collection looks at all objects of the process, some 0.2 s.
    """
    young = Young()
    try:
        if young.mine:
            gc.freeze()
        yield young
        gc.collect()
        young.midway += young.unfinished()
    finally:
        if young.mine:
            gc.unfreeze()


def still_held(refs: Collection[int]) -> set[int]:
    """Return which of these values are held by more than cycles. It collects all of them: 0.2 s."""
    if not refs:
        return set()
    gc.collect()
    return {one.ref for one in gc.get_objects() if type(one) is Handle and one.ref in refs}
