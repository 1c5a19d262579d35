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
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, Protocol

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
        self._watch: Watch = (Traces if sys.version_info < (3, 14) else Events)(self._next, number)

    @property
    def came(self) -> bool:
        """Whether there were so many instructions."""
        return self._left <= 0

    def __enter__(self) -> Strike:
        # Python drops what a handler raises in a finalizer, and the collector would run those of other tests.
        self._collects = gc.isenabled()
        gc.disable()
        self._before = signal.signal(self._number, self._handle)
        self._watch.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._watch.end()
        signal.signal(self._number, self._before)
        if self._collects:
            gc.enable()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # It may strike where `__exit__` begins, which does nothing then.
        self._end()
        assert frame is not None
        self.struck = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        raise self._kind(self.struck)

    def _next(self, code: CodeType, offset: int) -> bool:
        """Count an instruction; return whether the signal is to come behind it."""
        if offset not in _before_calls(code):
            return False
        self._left -= 1
        return self._left == 0


def strikes(
    begin: int = 1, step: int = 1, number: int = signal.SIGINT, kind: type[BaseException] = Struck
) -> Iterator[Strike]:
    """Give a strike at every `step`-th place, until one has not come."""
    for after in itertools.count(begin, step):
        strike = Strike(after, number, kind)
        yield strike
        if not strike.came:
            return


class Watch(Protocol):
    """What shows the instructions of the package as they run, and trips a signal where it is told to."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


Next = Callable[[CodeType, int], bool]


def _ours(code: CodeType) -> bool:
    # A generator is in no frame's `f_back` while it rests.
    return not (code.co_filename.startswith((_TORCH, __file__)) or code.co_flags & inspect.CO_GENERATOR)


class Traces:
    """Instructions by trace functions. Python 3.14 shows them by these in some calls, and not in others."""

    def __init__(self, next: Next, number: int) -> None:
        self._next, self._trip = next, _traced_by("PyErr_SetInterruptEx", [number], _QUIET)

    def begin(self) -> None:
        sys.settrace(self._call)

    def end(self) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if not _ours(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        # Python 3.12 looks at what a frame asks for only when tracing is set.
        sys.settrace(self._call)
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and self._next(frame.f_code, frame.f_lasti):
            # From here on no trace function is Python code: the handler would run in it.
            outer = frame.f_back
            while outer is not None:
                if outer.f_trace == self._step:
                    outer.f_trace = _QUIET
                outer = outer.f_back
            sys.settrace(_QUIET)
            return self._trip
        return self._step


class Events:
    """Instructions by events of `sys.monitoring`, which Python has since 3.12."""

    def __init__(self, next: Next, number: int) -> None:
        self._next, self._monitoring = next, vars(sys)["monitoring"]
        self._tool = self._monitoring.DEBUGGER_ID
        trip = ctypes.PyDLL(None).PyErr_SetInterruptEx
        trip.argtypes = [ctypes.c_int, ctypes.py_object, ctypes.py_object]
        # It returns 0, and 0 events are wanted behind it: the handler would run in a callback of Python's.
        trip.restype = functools.partial(self._monitoring.set_events, self._tool)
        self._trip = functools.partial(trip, number)

    def begin(self) -> None:
        self._monitoring.use_tool_id(self._tool, "strikes")
        self._show(self._step)
        self._monitoring.set_events(self._tool, self._monitoring.events.INSTRUCTION)

    def end(self) -> None:
        if self._monitoring.get_tool(self._tool) is not None:
            self._monitoring.set_events(self._tool, 0)
            self._show(None)
            self._monitoring.free_tool_id(self._tool)

    def _show(self, callback: Callable[..., object] | None) -> None:  # type: ignore[explicit-any]
        self._monitoring.register_callback(self._tool, self._monitoring.events.INSTRUCTION, callback)

    def _step(self, code: CodeType, offset: int) -> object:
        if not _ours(code):
            return self._monitoring.DISABLE
        if self._next(code, offset):
            self._show(self._trip)
        return None
