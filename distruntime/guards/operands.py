"""The operands of the instruction that a frame is at: the values that Python keeps on the frame's stack.

Python shows a frame's variables and not its stack. So the depth of the stack is worked out from the bytecode,
and the values are read where the interpreter keeps them. Where that is, is a fact of each version.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FrameType
from typing import TypeVar

from ..log.line import as_key

T = TypeVar("T")
# So many codes are remembered by each function.
_MOST = 16384

_WORD = ctypes.sizeof(ctypes.c_void_p)
# From Python 3.11, a frame object points to the interpreter's own frame. In that one the variables begin at
# this word, and the stack follows them. In Python 3.10 the frame object has both itself.
_VARIABLES = {(3, 10): 44, (3, 11): 9, (3, 12): 9, (3, 13): 9, (3, 14): 10}
_VERSION = sys.version_info[:2]
_INSIDE = _VERSION == (3, 10)
_variables = _VARIABLES.get(_VERSION, 0) * _WORD
_pointer = ctypes.c_void_p.from_address
_object = ctypes.py_object.from_address
# A generator begins with its own object on the stack, which Python's table of effects does not count.
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Nothing follows these.
_ENDS = frozenset(
    "RETURN_VALUE RETURN_CONST RAISE_VARARGS RERAISE JUMP_FORWARD JUMP_BACKWARD JUMP_ABSOLUTE "
    "JUMP_BACKWARD_NO_INTERRUPT INTERPRETER_EXIT".split()
)


def once(find: Callable[[CodeType], T]) -> Callable[[CodeType], T]:
    """Remember what a function finds, by the code that it was given.

    `dis` shows each constant by its `repr`, which of a remote tensor among the globals would read a value. So
    the function does not see what `as_key` leaves out.
    """
    kept = functools.lru_cache(maxsize=_MOST)(find)

    @functools.wraps(find)
    def found(code: CodeType) -> T:
        return kept(as_key(code))

    return found


def known() -> bool:
    """Whether this module knows where this interpreter keeps its stacks."""
    return sys.implementation.name == "cpython" and _VERSION in _VARIABLES


@once
def depths(code: CodeType) -> Mapping[int, int]:
    """Return how many values are on the stack before each instruction, by its offset."""
    instructions = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    behind = {one.offset: other.offset for one, other in itertools.pairwise(instructions)}
    by_offset = {one.offset: one for one in instructions}
    handlers = [] if _INSIDE else dis._parse_exception_table(code)  # type: ignore[attr-defined]
    begin = 1 if code.co_flags & _GENERATOR and _VERSION in ((3, 10), (3, 11), (3, 12)) else 0
    found: dict[int, int] = {}
    todo = [(0, begin)]
    # The handler's own values lie on those of the block that it guards.
    todo += [(one.target, one.depth + one.lasti + 1) for one in handlers]
    while todo:
        at, depth = todo.pop()
        if at in found or at not in by_offset:
            continue
        found[at] = depth
        one = by_offset[at]
        argument = one.arg if one.opcode >= dis.HAVE_ARGUMENT else None
        # Python 3.14 names the beginning of the loop at its end, and does not jump there.
        if (one.opcode in dis.hasjrel or one.opcode in dis.hasjabs) and one.opname != "END_ASYNC_FOR":
            todo.append((one.argval, depth + dis.stack_effect(one.opcode, argument, jump=True)))
        if one.opname not in _ENDS:
            effect = dis.stack_effect(one.opcode, argument, jump=False)
            todo.append((behind.get(at, -1), depth + effect))
    return found


@once
def _slots(code: CodeType) -> int:
    """Return how many variables stand before the stack."""
    cells = (
        code.co_cellvars if _INSIDE else [name for name in code.co_cellvars if name not in code.co_varnames]
    )
    return code.co_nlocals + len(cells) + len(code.co_freevars)


def place(frame: FrameType) -> int:
    """Return where the interpreter keeps a frame. A generator has its own place for as long as it lives.

    Its frame object may be made later, at the address of another one that is gone.
    """
    found = id(frame) if _INSIDE else _pointer(id(frame) + 3 * _WORD).value
    assert found is not None
    return found


def _value(address: int) -> object:
    """Return the object at an address; None for an empty slot."""
    word = _pointer(address).value
    if _VERSION < (3, 14) or not word:
        return _object(address).value if word else None
    # The low bits of a word say who counts the reference, from Python 3.14. Both of them mark a bare number,
    # and an empty slot may have one.
    if word & 3 == 3:
        return word >> 2
    return ctypes.cast(word & ~3, ctypes.py_object).value if word > 3 else None


def operand(frame: FrameType, depth: int, below: int = 0) -> object:
    """Return the value that so many others lie above, where the stack is so deep."""
    at = _slots(frame.f_code) + depth - 1 - below
    return _value(place(frame) + _variables + at * _WORD)


def cell(frame: FrameType, number: int) -> CellType | None:
    """Return the cell that an instruction names by its argument; None if it has none yet."""
    at = number + frame.f_code.co_nlocals if _INSIDE else number
    found = _value(place(frame) + _variables + at * _WORD)
    return found if isinstance(found, CellType) else None


def called(frame: FrameType, depth: int, name: str, count: int) -> tuple[object, tuple[object, ...]]:
    """Return the function that an instruction of this name and argument calls, and its arguments."""
    at = functools.partial(operand, frame, depth)
    if name == "CALL_FUNCTION_EX":
        keywords = 1 if _VERSION >= (3, 14) else count & 1
        given, named = at(keywords), at(0) if keywords else None
        # Below the arguments is an empty slot, from Python 3.13. Before, it is below the function.
        function = at(keywords + (2 if _VERSION >= (3, 13) else 1))
        flat = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        return function, (*flat, *(named.values() if isinstance(named, dict) else ()))
    behind = count + (name in ("CALL_FUNCTION_KW", "CALL_KW"))
    arguments = tuple(map(at, range(behind - 1, behind - 1 - count, -1)))
    if name in ("CALL_FUNCTION", "CALL_FUNCTION_KW"):
        return at(behind), arguments
    # A method stands below the object that it is called on. Below a function, or above it, nothing stands.
    lower, upper = at(behind + 1), at(behind)
    if lower is None:
        return upper, arguments
    return lower, (arguments if upper is None else (upper, *arguments))
