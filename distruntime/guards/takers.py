"""Who takes what a frame returns or yields: Python that is looked at, or C code that may decide by it."""

from __future__ import annotations

import dis
import gc
import itertools
import types
from collections import deque
from collections.abc import Collection, Mapping

from . import operands
from .functions import class_of_method, is_traced
from .operands import once
from .seen import looked_up

# These C functions hand on what they get from Python, and look at nothing in it.
_HANDING_ON = frozenset(map(id, (next, iter, list, tuple, deque, zip, enumerate, map, itertools.chain)))
_CALLS = frozenset("CALL CALL_METHOD CALL_FUNCTION CALL_FUNCTION_KW CALL_FUNCTION_EX CALL_KW".split())
# Python's own methods and properties give the result of these instructions as it is.
_GIVING = frozenset(
    "LOAD_ATTR LOAD_METHOD LOAD_SUPER_ATTR BINARY_SUBSCR BINARY_OP UNARY_NEGATIVE UNARY_POSITIVE "
    "UNARY_INVERT SEND YIELD_FROM BEFORE_WITH SETUP_WITH LOAD_SPECIAL".split()
)


def hands_on(function: object) -> bool:
    """Whether a C function gives what Python has given it, as it is."""
    return id(function) in _HANDING_ON or class_of_method(function) is types.GeneratorType


@once
def _instructions(code: types.CodeType) -> Mapping[int, tuple[str, int]]:
    """Return the name and the offset of each instruction, by all offsets from its own to the next one.

    While Python calls Python, a frame stands in what the interpreter keeps behind the call.
    """
    steps = [(one.offset, one.opname) for one in dis.get_instructions(code)]
    ends = [*(offset for offset, _ in steps[1:]), len(code.co_code)]
    return {at: (name, begin) for (begin, name), end in zip(steps, ends) for at in range(begin, end, 2)}


def stays(frame: types.FrameType, base: int, in_c: Collection[int]) -> bool:
    """Whether what a frame gives goes to Python that is looked at.

    `base` is the id of the frame that calls the user's function, and `in_c` has the ids of frames whose last
    call was one of a C function.
    """
    caller = frame.f_back
    if caller is None or id(caller) == base or not is_traced(caller.f_code.co_filename):
        return False
    name, at = _instructions(caller.f_code).get(caller.f_lasti, ("", 0))
    if name in _CALLS:
        return id(caller) not in in_c
    if name == "FOR_ITER":
        return _hands_out(operands.operand(caller, operands.depths(caller.f_code)[at]), frame)
    return name in _GIVING or (name.startswith(("BINARY_", "INPLACE_")) and name != "BINARY_SLICE")


def _hands_out(iterator: object, frame: types.FrameType) -> bool:
    """Whether an iterator gives what a frame gives, as it is."""
    if isinstance(iterator, types.GeneratorType):
        return iterator.gi_frame is frame
    of_class = looked_up(type(iterator), "__next__")
    if isinstance(of_class, types.FunctionType):
        return of_class.__code__ is frame.f_code
    if type(iterator) not in (map, zip, enumerate, itertools.chain):
        return False
    # A `zip` has its iterators in a tuple.
    held = gc.get_referents(iterator)
    held += [inner for one in held if isinstance(one, tuple) for inner in one]
    if type(iterator) is map:
        functions = (getattr(one, "__func__", one) for one in held)
        return any(getattr(one, "__code__", None) is frame.f_code for one in functions)
    return any(isinstance(one, types.GeneratorType) and one.gi_frame is frame for one in held)
