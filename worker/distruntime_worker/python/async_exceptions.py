"""Exceptions that Python raises in another thread before its next bytecode, and how one is taken back."""

from __future__ import annotations

import ctypes

set_async_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
set_async_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)


class _TakenBack(BaseException):
    """Takes the place of an interrupt that was sent and has not been raised."""


def take_back(thread: int) -> None:
    """Let nothing be raised in this thread that was sent to it before.

    The call of Python's API with NULL would leave Python's flag for such exceptions set. Then the interpreter
    looks for one at each call and jump, for ever, and under a tracer (a debugger) Python 3.11 does not get
    past that look. An exception that is raised clears the flag.
    """
    try:
        set_async_exception(thread, _TakenBack)
        while True:
            pass
    except _TakenBack:
        return
