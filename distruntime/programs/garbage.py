"""What only cycles hold, where a recording has to know what is left."""

from __future__ import annotations

import gc
import types
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ..guards.functions import is_traced
from ..log.handle import Handle


@contextmanager
def young_cycles_end() -> Iterator[list[str]]:
    """Let go of the cycles that were made in the block, at its end, if it ends well. The names of generators
    and coroutines that were made in the block, and have not ended behind it, are in the list then.

    A whole collection looks at all objects of the process, some 0.2 s. What was there before is out of sight
    meanwhile, unless the user has put something out of sight himself: nobody could tell the two apart later.
    """
    mine, midway = not gc.get_freeze_count(), list[str]()
    before = set[int]() if mine else {id(one) for one in _unfinished()}
    try:
        if mine:
            gc.freeze()
        yield midway
        gc.collect()
        midway += [one.__name__ for one in _unfinished() if id(one) not in before]
    finally:
        if mine:
            gc.unfreeze()


def _unfinished() -> list[types.FunctionType]:
    """Return the generators and coroutines that have not ended, but for this package's own."""
    found = [(one, _PREFIXES.get(type(one))) for one in gc.get_objects()]
    return [
        one
        for one, prefix in found
        if prefix is not None
        and getattr(one, f"{prefix}_frame") is not None
        and is_traced(getattr(one, f"{prefix}_code").co_filename)
    ]


_PREFIXES: dict[type, str] = {
    types.GeneratorType: "gi",
    types.CoroutineType: "cr",
    types.AsyncGeneratorType: "ag",
}


def still_held(refs: Collection[int]) -> set[int]:
    """Return which of these values are held by more than cycles. It collects all of them: 0.2 s."""
    if not refs:
        return set()
    gc.collect()
    return {one.ref for one in gc.get_objects() if type(one) is Handle and one.ref in refs}
