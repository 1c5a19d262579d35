"""What only cycles hold, where a recording has to know what is left."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

from ..guards.functions import is_traced
from ..log.handle import Handle
from ..session.holders import tracked, tracked_ids
from .side_effects import others_run


class _Made:
    """An object that is made with a recording. gc.freeze() would hide it, too."""


class Young:
    """What was made since a recording has begun.

    It was in Python's first generation, which is empty at the beginning, until a collection took it on.
    """

    def __init__(self) -> None:
        self._first = _Made()
        self._made = set[int]()
        # So many generations may have it now.
        self._generations = 2
        # It says that a generator or coroutine was made and has not ended, or that nobody can know.
        self.reasons: list[str] = []

    def collects(self, phase: str, info: dict[str, int]) -> None:
        """Note what is there before Python collects it or takes it on. Python calls this."""
        if phase == "start":
            self._made |= tracked_ids(partial(gc.get_objects, 0))
            self._generations = 3 if info["generation"] else self._generations

    def ids(self) -> set[int]:
        """Return the ids of the objects that were made.

        What another thread has made looks no different, and the call may depend on it. So everything counts
        as old where other threads run.
        """
        self._made |= tracked_ids(partial(gc.get_objects, 0))
        return set() if others_run() else self._made

    def end(self) -> None:
        """Collect what was made, and say what is left midway. The package's own generators do not count."""
        found = [
            one
            for generation in range(self._generations)
            for one in tracked({*_PREFIXES, _Made}, partial(gc.get_objects, generation))
        ]
        # Asking Python how many are frozen takes 14 ms where torch's are.
        if not any(one is self._first for one in found):
            self.reasons.append("gc.freeze() was called meanwhile, and hides what was made")
        midway = [
            weakref.ref(one)
            for one in found
            if type(one) in _PREFIXES and id(one) in self._made and _unfinished(one)
        ]
        del found
        gc.collect(1)
        for known in midway:
            if (one := known()) is not None and _unfinished(one):
                name = one.__name__
                self.reasons.append(f"it leaves the generator {name!r} midway, and a replay does not")


_PREFIXES: dict[type, str] = {
    types.GeneratorType: "gi",
    types.CoroutineType: "cr",
    types.AsyncGeneratorType: "ag",
}


def _unfinished(one: object) -> bool:
    prefix = _PREFIXES[type(one)]
    code: types.CodeType = getattr(one, f"{prefix}_code")
    return getattr(one, f"{prefix}_frame") is not None and is_traced(code.co_filename)


@contextmanager
def young_cycles_end() -> Iterator[Young]:
    """Let go of the cycles that were made in the block, at its end, if it ends well.

    A whole collection looks at all objects of the process, some 0.2 s. Only what Python itself has taken on
    to the oldest meanwhile stays.
    """
    young = Young()
    gc.collect(0)
    gc.callbacks.append(young.collects)
    try:
        yield young
        young.end()
    finally:
        gc.callbacks.remove(young.collects)


def still_held(refs: Collection[int]) -> set[int]:
    """Return which of these values are held by more than cycles. It collects all of them: 0.2 s."""
    if not refs:
        return set()
    gc.collect()
    handles: list[Handle] = tracked({Handle}, gc.get_objects)
    return {one.ref for one in handles if one.ref in refs}
