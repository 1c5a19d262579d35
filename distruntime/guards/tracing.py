"""How the frames of a recorded call are looked at, instruction by instruction.

Python 3.12 and later tell a tool of each instruction of a code that the tool has named. Before, a trace function
is called for each instruction of a frame. A debugger's own function stands aside meanwhile.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import TypeVar

from ..log.line import of_a_library
from .functions import is_traced
from .instructions import readings
from .reads import Reads

_MONITORED = sys.version_info >= (3, 12)
# The number of this tool among those that Python knows: debuggers, coverage and profilers have 0 to 2.
_TOOL = 4
Local = Callable[[FrameType, str, object], object]
R = TypeVar("R")


def traced(reads: Reads, function: Callable[[], R]) -> R:
    """Call a function, and let `reads` see what this thread's Python reads meanwhile."""
    if _MONITORED:
        with _monitored(reads):
            return function()
    enter, before = _Tracer(reads).enter, sys.gettrace()
    try:
        sys.settrace(enter)  # type: ignore[arg-type]
        return function()
    finally:
        now = sys.gettrace()
        if now is not enter:
            # Python takes it away if an exception is raised in it, as Ctrl-C does.
            reads.blind("another trace function was set meanwhile, or an exception has ended this one")
        # A debugger that the function has begun goes on.
        if now is None or now is enter:
            sys.settrace(before)
            # A tracer in C, such as coverage's, takes its own place at the next call. It counts the frames
            # that begin and end, so that must be in this one.
            _nothing()


def _nothing() -> None:
    pass


def _looked_at(frame: FrameType, base: int) -> bool:
    """Whether a frame runs for the user's Python. What a library does beneath this package does not."""
    caller: FrameType | None = frame
    while caller is not None and id(caller) != base:
        file = caller.f_code.co_filename
        if not is_traced(file):
            return False
        if not of_a_library(file) and file != _GENERATED:
            return True
        caller = caller.f_back
    return True


# Python's library gives this name to what it writes itself: the methods of a dataclass.
_GENERATED = "<string>"


class _Tracer:
    """What Python calls for each frame that begins, and for each of its instructions."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._locals: dict[CodeType, Local] = {}
        # Where a generator's frame was when an exception came.
        self._raised = (0, 0)

    def enter(self, frame: FrameType, event: str, argument: object) -> Local | None:
        """Say what is to be called for each instruction of a frame."""
        if not _looked_at(frame, self._reads.base):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._reads.enter(frame, frame.f_lasti in _resumptions(frame.f_code))
        code = frame.f_code
        found = self._locals.get(code)
        if found is None:
            found = self._locals[code] = self._local(code)
        return found

    def _local(self, code: CodeType) -> Local:
        table, step = readings(code), self._reads.step

        def local(frame: FrameType, event: str, argument: object) -> Local:
            if event == "opcode":
                one = table.get(frame.f_lasti)
                if one is not None:
                    step(frame, one)
            elif code.co_flags & _GENERATOR:
                self._may_end(frame, event)
            return local

        return local

    def _may_end(self, frame: FrameType, event: str) -> None:
        """Look whether a generator's frame ends. It goes on to an end if it was left by an exception."""
        at = id(frame), frame.f_lasti
        if event == "exception":
            self._raised = at
        elif event == "return":
            if self._raised == at or frame.f_lasti not in _yields(frame.f_code):
                self._reads.ends(frame)
            # Another tracer may look at it from now on.
            frame.f_trace_opcodes, frame.f_trace_lines = False, True


@functools.lru_cache(maxsize=16384)
def _yields(code: CodeType) -> frozenset[int]:
    """Return where a generator's frame stands when it waits."""
    return frozenset(one.offset for one in dis.get_instructions(code) if one.opname.startswith("YIELD_"))


@functools.lru_cache(maxsize=16384)
def _resumptions(code: CodeType) -> frozenset[int]:
    """Return where a generator's frame stands when it goes on."""
    if sys.version_info < (3, 11):
        return frozenset(range(len(code.co_code))) if code.co_flags & _GENERATOR else frozenset()
    steps = dis.get_instructions(code)
    return frozenset(one.offset for one in steps if one.opname == "RESUME" and (one.arg or 0) & 3)


_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


if _MONITORED:
    _monitoring = sys.monitoring
    _events = _monitoring.events
    _lock = threading.Lock()
    # What sees the reads of each thread that records.
    _reading: dict[int, Reads] = {}

    @contextmanager
    def _monitored(reads: Reads) -> Iterator[None]:
        with _lock:
            if not _reading:
                _monitoring.use_tool_id(_TOOL, "distruntime")
                for event, function in _CALLBACKS.items():
                    _monitoring.register_callback(_TOOL, event, function)
                _monitoring.restart_events()
                _monitoring.set_events(_TOOL, _events.PY_START | _events.PY_RESUME)
            _reading[threading.get_ident()] = reads
        try:
            yield
        finally:
            with _lock:
                del _reading[threading.get_ident()]
                if not _reading:
                    _monitoring.set_events(_TOOL, 0)
                    for code in _named:
                        _monitoring.set_local_events(_TOOL, code, 0)
                    _named.clear()
                    _monitoring.free_tool_id(_TOOL)

    # The codes whose instructions Python tells of.
    _named: set[CodeType] = set()

    def _begins(code: CodeType, offset: int) -> object:
        return _enter(code, False)

    def _resumes(code: CodeType, offset: int) -> object:
        return _enter(code, True)

    def _enter(code: CodeType, resumed: bool) -> object:
        if not is_traced(code.co_filename):
            return _monitoring.DISABLE
        reads = _reading.get(threading.get_ident())
        if reads is not None:
            frame = sys._getframe(2)
            if _looked_at(frame, reads.base):
                reads.enter(frame, resumed)
                if code not in _named:
                    _named.add(code)
                    _monitoring.set_local_events(_TOOL, code, _events.INSTRUCTION)
        return None

    def _instruction(code: CodeType, offset: int) -> object:
        one = readings(code).get(offset)
        if one is None:
            return _monitoring.DISABLE
        reads = _reading.get(threading.get_ident())
        if reads is not None:
            reads.step(sys._getframe(1), one)
        return None

    _CALLBACKS = {
        _events.PY_START: _begins,
        _events.PY_RESUME: _resumes,
        _events.INSTRUCTION: _instruction,
    }
