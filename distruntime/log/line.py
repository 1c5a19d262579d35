"""Which line of the user's issued an instruction, and who called it.

It is a `Call` and an offset in its code, resolved to text only when a failure names it.
"""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import final

import torch


class Call:
    """One call of a function of the user's: its code, and the call and the offset that it was called from.

    A frame keeps its own as `f_trace`. That is what a debugger would have Python call for the frame, so no
    frame is marked that one traces, and a call of it does nothing. The callers of a frame stay the same for
    as long as it runs. So the stack is walked once for each call of a function, up to the first frame that is
    marked, and an instruction costs one look at its frame: 0.09 us, against 0.16 us for looking its code up
    in a set, and 5 us for walking 20 frames. A frame that was kept instead would keep the user's tensors.
    """

    __slots__ = ("at", "cell", "code", "outer")

    def __init__(self, code: CodeType, outer: Call | None, at: int) -> None:
        self.code, self.outer, self.at = code, outer, at
        # A notebook's kernel calls the cell so that runs now.
        self.cell: object = getattr(sys.stdout, "parent_header", None) if "ipykernel" in sys.modules else None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Trace nothing."""


@final
class Replayed(Call):
    """A call that has replayed a program, which has these lines, one for each of its instructions."""

    __slots__ = ("lines", "name")

    def __init__(self, call: Call, name: str, lines: Sequence[Line | None]) -> None:
        self.code, self.outer, self.at, self.cell = call.code, call.outer, call.at, call.cell
        self.name, self.lines = name, lines


# A line has a position after an instruction, and the call that issued it with an offset in its code.
Line = tuple[int, "Call | None", int]

# A generator goes on in another caller's frame each time, so nothing is kept in its frame.
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# The code of a module has this name.
_MODULE = "<module>"
# So many calls of a recursion are noted.
_MOST_CALLS = 64
_INSIDE = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    # torch.fx generates code under this name.
    "<eval_with_key>",
)
# It says whether the code of a file is the user's, as far as it has been seen. Codes would not do as keys:
# equal ones of different files are one key.
_users: dict[str, bool] = {}
_gettrace = sys.gettrace
# Frames of files with such names stand between a cell and the value that IPython shows. IPython 8 uses the
# package `decorator` there.
_IPYTHON = re.compile(r"[/\\](IPython[/\\]|site-packages[/\\]decorator\b)")


def inside(code: CodeType) -> bool:
    """Whether code is torch's or this package's."""
    return code.co_filename.startswith(_INSIDE)


def user_line() -> Line:
    """Return the call and offset of the first frame outside torch and this package."""
    return line_from(sys._getframe(1))


def line_from(frame: FrameType | None) -> Line:
    """Return the call and offset of a frame, or of the first around it, outside torch and this package."""
    while frame is not None:
        call = frame.f_trace
        if type(call) is Call:
            return 0, call, frame.f_lasti
        code = frame.f_code
        users = _users.get(code.co_filename)
        if users or (users is None and _is_users(code)):
            return 0, _entered(frame, code), frame.f_lasti
        frame = frame.f_back
    return 0, None, 0


def _is_users(code: CodeType) -> bool:
    found = _users[code.co_filename] = not inside(code)
    return found


def _entered(frame: FrameType, code: CodeType) -> Call:
    """Return the call of a user's frame that has no mark yet, and mark it and its callers."""
    # What executes a module is not shown: an import, a prompt, a notebook, a test runner.
    outer = frame.f_back if code.co_name != _MODULE else None
    if outer is not None and type(known := outer.f_trace) is Call:
        return _marked(frame, code, known, outer.f_lasti)
    _, caller, at = _called_from(outer)
    return _marked(frame, code, caller, at)


def _marked(frame: FrameType, code: CodeType, outer: Call | None, at: int) -> Call:
    call = Call(code, outer, at)
    # A tracer would have Python call the mark for each line of the frame.
    if not code.co_flags & _RESUMED and frame.f_trace is None and _gettrace() is None:
        frame.f_trace = call
    return call


def _called_from(frame: FrameType | None) -> Line:
    """Return what `line_from` returns, without a recursion for each of the callers."""
    unknown: list[FrameType] = []
    line: Line = 0, None, 0
    while frame is not None and len(unknown) < _MOST_CALLS:
        known, code = frame.f_trace, frame.f_code
        if type(known) is Call:
            line = 0, known, frame.f_lasti
            break
        if _users.get(code.co_filename) or _is_users(code):
            unknown.append(frame)
            if code.co_name == _MODULE:
                break
        frame = frame.f_back
    while unknown:
        frame = unknown.pop()
        line = 0, _marked(frame, frame.f_code, line[1], line[2]), frame.f_lasti
    return line


def copied(lines: Iterable[Line | None]) -> list[Line | None]:
    """Return lines that say the same, and keep no code alive that has issued them: theirs are copies.

    Dynamo forgets what it has compiled when the code that it has made for it goes. So what a compiled
    function keeps must not keep that code.
    """
    copies: dict[Call | None, Call | None] = {None: None}
    found: list[Line | None] = []
    for line in lines:
        call = None if line is None else line[1]
        chain: list[Call] = []
        while call is not None and call not in copies:
            chain.append(call)
            call = call.outer
        for one in reversed(chain):
            copy = Call(one.code.replace(), copies[one.outer], one.at)
            copy.cell = one.cell
            copies[one] = Replayed(copy, one.name, one.lines) if isinstance(one, Replayed) else copy
        found.append(line and (line[0], copies[line[1]], line[2]))
    return found


def of_a_library(file: str) -> bool:
    """Whether code in a file is of Python's own library, of an installed package, or of this one and its
    worker's.
    """
    return file.startswith((*_INSIDE, *_LIBRARIES, "<frozen ")) or _installed(file)


def shown_line(line: Line) -> Line:
    """Return the line of the cell whose value IPython shows, where a line is IPython's own."""
    _, call, at = line
    while call is not None and call.outer is not None and _IPYTHON.search(call.code.co_filename):
        call, at = call.outer, call.at
    return 0, call, at


def own_line(line: Line) -> Line:
    """Return the line of the user's own file that led to a line of a library; that line if none has."""
    _, call, at = line
    while call is not None and call.outer is not None and of_a_library(call.code.co_filename):
        call, at = call.outer, call.at
    return (0, call, at) if call is not None and not of_a_library(call.code.co_filename) else line


# -- as text -----------------------------------------------------------------------------------------------

# So many callers are shown: the outermost ones, and the innermost ones.
_OUTERMOST, _INNERMOST = 3, 12
# A line of a `.pth` file, or PYTHONPATH, may add the packages of another Python: these folders are theirs.
_SITES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
# In a checkout the worker's package is nowhere near. It is found and not imported.
_WORKER = importlib.util.find_spec("distruntime_worker")
_LIBRARIES = tuple(
    folder + os.sep
    for folder in {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
        site.getusersitepackages(),
        *(_WORKER.submodule_search_locations or () if _WORKER else ()),
    }
)
# `pytest` and `jupyter` are such scripts: a line that starts a program.
_SCRIPTS = sysconfig.get_path("scripts") + os.sep


def _installed(file: str) -> bool:
    return any(site in file for site in _SITES)


def place_of(line: Line) -> tuple[CodeType | None, int]:
    """Return what tells a line from others, whoever has called it."""
    return (None if line[1] is None else as_key(line[1].code)), line[2]


def as_key(code: CodeType) -> CodeType:
    """Return code that says the same lines and that a dict takes as a key.

    Dynamo writes constants into code that Python does not hash, such as the globals of a function that it has
    inlined. They are left out. A hash takes 0.8 us.
    """
    if _is_hashed(code):
        return code
    return code.replace(co_consts=tuple(one if _is_hashed(one) else None for one in code.co_consts))


def _is_hashed(thing: object) -> bool:
    try:
        hash(thing)
    except TypeError:
        return False
    return True


def line_text(line: Line | None) -> str:
    """Return "train.py:41   z = x + y" of an instruction's line."""
    return "an unknown line" if line is None or line[1] is None else code_text(line[1].code, line[2])


def text_of_part(line: Line | None, part: int) -> str:
    """Return the line of an instruction; of one of a program, its own line and the one that replayed it."""
    text = line_text(line)
    call = None if line is None else line[1]
    if isinstance(call, Replayed) and len(call.lines) == 1:
        part = 0
    if not isinstance(call, Replayed) or not 0 <= part < len(call.lines):
        return text
    return f"{line_text(call.lines[part])}\n  in the program {call.name!r}, replayed at {text}"


def code_text(code: CodeType | None, offset: int) -> str:
    """Return what `line_text` returns of an offset in a code."""
    if code is None:
        return "an unknown line"
    number = line_number(code, offset)
    source = linecache.getline(code.co_filename, number).strip()
    return f"{file_name(code.co_filename)}:{number}" + (f"   {source}" if source else "")


def line_number(code: CodeType, offset: int) -> int:
    """Return the number of the line that an offset in a code is in."""
    number = code.co_firstlineno
    for start, end, found in code.co_lines():
        if start <= offset < end and found is not None:
            number = found
    return number


def file_name(name: str) -> str:
    """Return a file's name; of a cell of IPython or Jupyter, "In[3]"."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    cell = None if shell is None else shell.compile.format_code_name(name)
    return name if cell is None else str(cell[1])


def callers_text(call: Call | None) -> list[str]:
    """Return the lines that led to a call, the outermost first. Libraries' frames are folded."""
    found: list[tuple[CodeType, int]] = []
    while call is not None and call.outer is not None:
        found.append((call.outer.code, call.at))
        call = call.outer
    lines: list[str] = []
    folded = 0
    for code, offset in reversed(found):
        if of_a_library(code.co_filename) or code.co_filename.startswith(_SCRIPTS):
            folded += 1
            continue
        # What has called the user's outermost function says nothing.
        if folded and lines:
            lines.append(_folded(folded))
        folded = 0
        lines.append(f"called from {code_text(code, offset)}")
    if folded and lines:
        lines.append(_folded(folded))
    hidden = len(lines) - _OUTERMOST - _INNERMOST
    if hidden > 1:
        lines[_OUTERMOST:-_INNERMOST] = [f"({hidden} more calls)"]
    return lines


def _folded(calls: int) -> str:
    return f"({calls} call{'s' if calls > 1 else ''} in libraries)"
