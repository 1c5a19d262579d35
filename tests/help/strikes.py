"""A signal that strikes at every place where Python lets one, for tests of what an interruption leaves."""

from __future__ import annotations

import ctypes
import dis
import functools
import gc
import inspect
import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
# Python runs a signal's handler behind a call, at a jump back, and where a function begins. These
# instructions may call one.
_CALLING = (
    *("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RETURN", "YIELD", "RESUME", "SEND"),
    *("BINARY", "INPLACE", "UNARY", "COMPARE", "CONTAINS", "STORE_ATTR", "LOAD_ATTR", "LOAD_METHOD"),
    *("STORE_SUBSCR", "DELETE", "FOR_ITER", "GET_ITER", "BEFORE_WITH", "SETUP_WITH", "WITH_", "UNPACK"),
    *("POP_JUMP_BACKWARD", "LIST_EXTEND", "FORMAT"),
)


class Struck(Exception):
    """What the handler raises."""


Traced = Callable[[FrameType, str, object], object]


def _traced_by(function: str, given: Sequence[int], then: object) -> Traced:
    """Return a trace function that is a C function of Python's, called once; `then` takes its place.

    Python runs no handler in it, but where the traced code would let it run.
    """
    # It gets the frame, the event and the argument behind its own, and looks at none of them. It returns 0
    # or 1.
    called = getattr(ctypes.PyDLL(None), function)
    called.argtypes = [ctypes.c_int] * len(given) + [ctypes.py_object] * 3
    called.restype = [then, then].__getitem__
    return functools.partial(called, *given)


# It does nothing.
_QUIET = _traced_by("Py_IsInitialized", [], None)


@functools.cache
def _before_calls(code: CodeType) -> frozenset[int]:
    """Return the offsets of instructions behind which one that may call a handler comes next."""
    steps = list(dis.get_instructions(code))
    found, calling = set(), {step.offset for step in steps if step.opname.startswith(_CALLING)}
    for step, behind in itertools.pairwise(steps):
        jumps = step.argval if "JUMP" in step.opname or step.opname == "FOR_ITER" else None
        if behind.offset in calling or jumps in calling:
            found.add(step.offset)
    return frozenset(found)


class Strike:
    """A context in which one signal comes, after so many instructions of the package that may call.

    `struck` says where its handler has raised, or nothing.
    """

    def __init__(self, after: int, number: int = signal.SIGINT, kind: type[BaseException] = Struck) -> None:
        self._left, self._number, self._kind, self.struck = after, number, kind, ""
        self._trip = _traced_by("PyErr_SetInterruptEx", [number], _QUIET)

    @property
    def came(self) -> bool:
        """Whether there were so many instructions."""
        return self._left <= 0

    def __enter__(self) -> Strike:
        # Python drops what a handler raises in a finalizer, and the collector would run those of other tests.
        self._collects = gc.isenabled()
        gc.disable()
        self._before = signal.signal(self._number, self._handle)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        signal.signal(self._number, self._before)
        if self._collects:
            gc.enable()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        sys.settrace(None)
        signal.signal(self._number, self._before)
        assert frame is not None
        self.struck = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        raise self._kind(self.struck)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        # A generator is in no frame's `f_back` while it rests.
        if code.co_filename.startswith((_TORCH, __file__)) or code.co_flags & inspect.CO_GENERATOR:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        # Python 3.12 looks at what a frame asks for only when tracing is set.
        sys.settrace(self._call)
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and frame.f_lasti in _before_calls(frame.f_code):
            self._left -= 1
            if self._left == 0:
                # From here on no trace function is Python code: the handler would run in it.
                outer = frame.f_back
                while outer is not None:
                    if outer.f_trace == self._step:
                        outer.f_trace = _QUIET
                    outer = outer.f_back
                sys.settrace(_QUIET)
                return self._trip
        return self._step
