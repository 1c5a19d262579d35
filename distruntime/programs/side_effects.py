"""What stands around a function while it is recorded, to see what no replay would do."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np
import torch

from ..log.line import of_a_library
from ..log.tape import recorded
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


def _comparable(state: object) -> object:
    """Return what equals another one where the states are equal. A text of it takes 12 ms, and this 6 us."""
    if isinstance(state, dict):
        return {name: _comparable(part) for name, part in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


class LocalDraws:
    """The states of this process's generators of random numbers, as they were."""

    def __init__(self, others: list[tuple[str, Callable[[], object]]]) -> None:
        self._states: list[tuple[str, Callable[[], object], object]] = []
        common: list[tuple[str, Callable[[], object]]] = [
            ("random", random.getstate),
            ("torch (of this process)", lambda: bytes(torch.get_rng_state().numpy())),
            ("numpy.random", lambda: _comparable(np.random.get_state(legacy=False))),
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
