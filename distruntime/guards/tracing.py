"""How the frames of a recorded call are looked at, instruction by instruction.

Python 3.12 and later tell a tool of each instruction of a code that the tool has named. Before, a trace
function is called for each instruction of a frame. A debugger's own function stands aside meanwhile.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import ParamSpec, TypeVar

from ..log.line import of_a_library
from ..wire.shield import RLock
from .functions import is_traced
from .instructions import readings
from .operands import known, once
from .reads import Reads

_MONITORED = sys.version_info >= (3, 12)
P = ParamSpec("P")
R = TypeVar("R")
Local = Callable[[FrameType, str, object], object]


def traced(reads: Reads, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function, and let `reads` see what this thread's Python reads meanwhile."""
    reads.base = id(sys._getframe())
    if not known():
        reads.cannot_look("distruntime does not know how this Python keeps its operands")
        return function(*args, **kwargs)
    if _MONITORED:
        with _monitored(reads):
            return function(*args, **kwargs)
    enter, before = _Tracer(reads).enter, sys.gettrace()
    try:
        sys.settrace(enter)  # type: ignore[arg-type]
        return function(*args, **kwargs)
    finally:
        now = sys.gettrace()
        if now is not enter:
            # Python takes it away if an exception is raised in it, as Ctrl-C does.
            reads.cannot_look("another trace function was set meanwhile, or an exception has ended this one")
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
        if caller is frame or id(caller.f_code) not in HANDS_ON:
            if not is_traced(file):
                return False
            if not of_a_library(file) and file != _GENERATED:
                return True
        caller = caller.f_back
    return True


# Frames of these codes of this package hand a call of the user's on, and count as none. Ids, as a hash of a
# code takes 0.8 us.
HANDS_ON: set[int] = set()
# Python's library gives this name to what it writes itself: the methods of a dataclass.
_GENERATED = "<string>"


class _Tracer:
    """What Python calls for each frame that begins, and for each of its instructions."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        # By id, with the code: Python does not hash all that Dynamo makes.
        self._locals: dict[int, tuple[CodeType, Local]] = {}

    def enter(self, frame: FrameType, event: str, argument: object) -> Local | None:
        """Say what is to be called for each instruction of a frame."""
        if not _looked_at(frame, self._reads.base):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._reads.enter(frame, frame.f_lasti not in _starts(frame.f_code))
        code = frame.f_code
        found = self._locals.get(id(code))
        if found is None:
            found = self._locals[id(code)] = code, self._local(code)
        return found[1]

    def _local(self, code: CodeType) -> Local:
        table, step = readings(code), self._reads.step

        def local(frame: FrameType, event: str, argument: object) -> Local:
            if event == "opcode":
                one = table.get(frame.f_lasti)
                if one is not None:
                    step(frame, one)
            elif event == "return":
                # A generator's frame may go on, and another tracer may look at it then.
                frame.f_trace_opcodes, frame.f_trace_lines = False, True
            return local

        return local


@once
def _starts(code: CodeType) -> frozenset[int]:
    """Return where a frame stands when it begins, and not when a generator goes on or is thrown into."""
    steps = dis.get_instructions(code)
    return frozenset(
        (-1, *(one.offset for one in steps if one.opname == "RESUME" and not (one.arg or 0) & 3))
    )


if _MONITORED:
    _monitoring = getattr(sys, "monitoring")  # noqa: B009
    _events = _monitoring.events
    # Python of the user's may run in a collection, wherever this package's does.
    _lock = RLock()
    # What sees the reads of each thread that records, and the ids of the frames that are looked at.
    _reading: dict[int, tuple[Reads, set[int]]] = {}
    # The codes whose instructions Python tells of, by id: another one may be equal.
    _named: dict[int, CodeType] = {}
    # The number of this tool, while a thread records.
    _tools: list[int] = []
    # Python knows tools by these numbers, and by no others. It has names for 0, 1, 2 and 5.
    _NUMBERS = (4, 3, 5, 2, 1, 0)

    @contextmanager
    def _monitored(reads: Reads) -> Iterator[None]:
        with _lock:
            if not _tools:
                _tools.extend([number for number in _NUMBERS if _monitoring.get_tool(number) is None][:1])
                if _tools:
                    _begin(_tools[0])
            if _tools:
                _reading[threading.get_ident()] = reads, set()
            else:
                reads.cannot_look("other tools have all numbers of sys.monitoring")
        try:
            yield
        finally:
            with _lock:
                _reading.pop(threading.get_ident(), None)
                if _tools and not _reading:
                    _end(_tools.pop())

    def _begin(tool: int) -> None:
        _monitoring.use_tool_id(tool, "distruntime")
        for event, function in _CALLBACKS.items():
            _monitoring.register_callback(tool, event, function)
        # A tool that had the number may have asked not to be told of something.
        _monitoring.restart_events()
        _monitoring.set_events(tool, _events.PY_START | _events.PY_RESUME | _events.PY_THROW)

    def _end(tool: int) -> None:
        _monitoring.set_events(tool, 0)
        for code in _named.values():
            _monitoring.set_local_events(tool, code, 0)
        _named.clear()
        for event in _CALLBACKS:
            _monitoring.register_callback(tool, event, None)
        _monitoring.free_tool_id(tool)

    def _begins(code: CodeType, offset: int) -> object:
        return _enter(code, False)

    def _resumes(code: CodeType, offset: int) -> object:
        return _enter(code, True)

    def _throws(code: CodeType, offset: int, error: BaseException) -> None:
        # Python cannot be asked not to tell of these.
        _enter(code, True)

    def _enter(code: CodeType, resumed: bool) -> object:
        if not is_traced(code.co_filename):
            return _monitoring.DISABLE
        reading = _reading.get(threading.get_ident())
        if reading is not None:
            (reads, frames), frame = reading, sys._getframe(2)
            # One that has ended may have had the id.
            frames.discard(id(frame))
            if _looked_at(frame, reads.base):
                frames.add(id(frame))
                reads.enter(frame, resumed)
                _name(code)
        return None

    def _name(code: CodeType) -> None:
        """Let Python tell of each instruction of a code from now on."""
        with _lock:
            if id(code) not in _named:
                _named[id(code)] = code
                _monitoring.set_local_events(_tools[0], code, _events.INSTRUCTION)

    def _instruction(code: CodeType, offset: int) -> object:
        # What it reads is a fact of the code, so no thread needs to be told of it again.
        one = readings(code).get(offset)
        if one is None:
            return _monitoring.DISABLE
        reading = _reading.get(threading.get_ident())
        if reading is not None:
            (reads, frames), frame = reading, sys._getframe(1)
            # What a library does beneath this package may run the code, too.
            if id(frame) in frames:
                reads.step(frame, one)
        return None

    _CALLBACKS = {
        _events.PY_START: _begins,
        _events.PY_RESUME: _resumes,
        _events.PY_THROW: _throws,
        _events.INSTRUCTION: _instruction,
    }
