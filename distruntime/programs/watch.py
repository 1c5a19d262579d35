"""What stands around a function while it is recorded, to see what no replay would do."""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ..errors import NotSupportedError
from ..log.tape import not_in_a_program, recorded

_lock = threading.Lock()
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
            for module in (builtins, io):
                _put(module, "open", _opening(module.open))
            # The paths of Python 3.10 have a name of their own for it.
            accessor = getattr(pathlib, "_NormalAccessor", None)
            if accessor is not None:
                _put(accessor, "open", staticmethod(_opening(accessor.open)))
            _put(os._Environ, "__getitem__", _reading(os._Environ.__getitem__))


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


def _opening(own: Callable[..., object]) -> Callable[..., object]:
    def opened(file: object, mode: str = "r", *args: object, **kwargs: object) -> object:
        if recorded.name and not recorded.first and not set(str(mode)) & set("wax+") and not _imports():
            raise not_in_a_program(
                f"read a file ({file!r:.60}), as a replay would not read it again",
                "read it before, and pass what was read as an argument",
            )
        return own(file, mode, *args, **kwargs)

    return opened


def _reading(own: Callable[..., str]) -> Callable[..., str]:
    def read(environment: object, key: str) -> str:
        if recorded.name and not recorded.first and _asked_by_user():
            raise not_in_a_program(
                f"read the environment ({key!r:.60}), as a replay would not read it again",
                "read it before, and pass the value as an argument",
            )
        return own(environment, key)

    return read


def _imports() -> bool:
    """Whether this thread imports a module just now."""
    frame = sys._getframe(1)
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _asked_by_user() -> bool:
    """Whether the first caller outside Python's own library is no package."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if (
            "site-packages" in file
            or "dist-packages" in file
            or "distruntime" in frame.f_globals.get("__name__", "")
        ):
            return False
        if not file.startswith(("<frozen ", os.path.dirname(os.__file__))):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class LocalDraws:
    """The states of this process's generators of random numbers, as they were."""

    def __init__(self, others: list[tuple[str, Callable[[], object]]]) -> None:
        self._states: list[tuple[str, Callable[[], object], object]] = []
        common: list[tuple[str, Callable[[], object]]] = [
            ("random", random.getstate),
            ("torch (of this process)", lambda: bytes(torch.get_rng_state().numpy())),
            ("numpy.random", lambda: str(np.random.get_state(legacy=False))),
        ]
        for name, state in (*common, *others):
            self._states.append((name, state, state()))

    def require_unused(self, name: str) -> str:
        """Raise `NotSupportedError` if one of them was used since, or return its name if that is not certain.

        Nobody can see which thread has used one. So while other threads run, it may not have been this one.
        """
        for what, state, before in self._states:
            if state() != before:
                if others_run():
                    return what
                raise NotSupportedError(
                    f"the program {name!r} draws random numbers in this process, by {what}: each replay "
                    "would use the same ones\n  draw on the worker, torch.rand(..., device=x.device), or "
                    "draw before, and pass the numbers as an argument; a seed is set outside too"
                )
        return ""


def others_run() -> bool:
    """Whether threads of the user's run beside this one."""
    mine = threading.current_thread()
    return any(
        thread is not mine and not thread.name.startswith("distruntime-") for thread in threading.enumerate()
    )
