"""What stands around a function while it is recorded, to see what no replay would do; what cycles hold."""

from __future__ import annotations

import gc
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import numpy as np
import torch

from ..guards.functions import is_traced
from ..guards.generators import comparable
from ..log.handle import Handle
from ..log.line import of_a_library
from ..log.tape import recorded
from ..session.holders import tracked, tracked_ids
from ..wire.shield import Lock

_lock = Lock()
# So many functions are recorded now, in all threads.
_count = 0
_before: list[Callable[[], None]] = []


@contextmanager
def watched(name: str, first: bool, lenient: bool) -> Iterator[None]:
    """Let this thread's function be recorded, until the end of the block."""
    _begin()
    recorded.name, recorded.first, recorded.lenient = name, first, lenient
    try:
        yield
    finally:
        recorded.name, recorded.first, recorded.lenient = "", False, False
        _end()


def _begin() -> None:
    global _count
    with _lock:
        _count += 1
        if _count == 1:
            _put(
                torch.cuda, "is_current_stream_capturing", _capturing(torch.cuda.is_current_stream_capturing)
            )


def _end() -> None:
    global _count
    with _lock:
        _count -= 1
        if not _count:
            while _before:
                _before.pop()()


def _put(owner: object, name: str, function: object) -> None:
    found = getattr(owner, name)
    setattr(owner, name, function)
    _before.append(lambda: setattr(owner, name, found))


def _capturing(own: Callable[[], bool]) -> Callable[[], bool]:
    def is_current_stream_capturing() -> bool:
        # Libraries ask before they read. torch's optimizers ask too, and would refuse what a program can do.
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        return own() if not recorded.name or caller.startswith("torch.optim") else True

    return is_current_stream_capturing


class LocalDraws:
    """The states of this process's generators of random numbers, as they were."""

    def __init__(self, others: list[tuple[str, Callable[[], object]]]) -> None:
        self._states: list[tuple[str, Callable[[], object], object]] = []
        common: list[tuple[str, Callable[[], object]]] = [
            ("random", random.getstate),
            ("torch (of this process)", lambda: bytes(torch.get_rng_state().numpy())),
            ("numpy.random", lambda: comparable(np.random.get_state(legacy=False))),
        ]
        for name, state in (*common, *others):
            self._states.append((name, state, state()))

    def used(self) -> str:
        """Return which of them was used since, and what to do instead; an empty text if none was.

        Nobody can see which thread has used one. So while other threads run, it may not have been this one.
        """
        for what, state, before in self._states:
            if state() != before:
                who = "here or in another thread" if others_run() else "in this process"
                return (
                    f"{what} drew random numbers {who}, and a replay would use the same ones: draw on the "
                    "worker, torch.rand(..., device=x.device), or draw before, and pass the numbers as an "
                    "argument; a seed is set outside too"
                )
        return ""


def others_run() -> bool:
    """Whether other threads run the user's Python. What waits in a library for work does not count."""
    mine = threading.get_ident()
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = top
        while frame is not None and thread != mine:
            file = frame.f_code.co_filename
            if file != "<string>" and not of_a_library(file):
                return True
            frame = frame.f_back
    return False


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
