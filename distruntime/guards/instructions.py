"""Which instructions of Python's bytecode read something, and which of their operands they read."""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping
from types import CodeType
from typing import NamedTuple

from .operands import depths, once


class Reading(NamedTuple):
    """What an instruction reads: its kind, a name and a number, and how deep the stack is before it.

    `behind` says whether it stands behind one whose result matters.
    """

    kind: str
    name: str
    number: int
    depth: int
    behind: bool


# Python's table of effects counts a call's operands at the first of its two instructions in Python 3.11.
_CALL = "PRECALL" if sys.version_info[:2] == (3, 11) else "CALL"
# The kind of each instruction, by its name. An operand is named by how many values lie above it.
_KINDS = {
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), "global"),
    **dict.fromkeys(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"), "cell"),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"), "attribute"),
    "LOAD_SUPER_ATTR": "super",
    "IMPORT_NAME": "import",
    "BINARY_SUBSCR": "item",
    "BINARY_SLICE": "slice",
    "CONTAINS_OP": "contains",
    **dict.fromkeys(("GET_ITER", "GET_YIELD_FROM_ITER"), "iterate"),
    **dict.fromkeys(
        "UNPACK_SEQUENCE UNPACK_EX LIST_EXTEND DICT_UPDATE DICT_MERGE LIST_TO_TUPLE GET_LEN "
        "MATCH_MAPPING MATCH_SEQUENCE".split(),
        "iterate",
    ),
    **dict.fromkeys(("MATCH_KEYS", "COMPARE_OP"), "both"),
    **dict.fromkeys(("UNARY_NOT", "TO_BOOL", "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP"), "truth"),
    "UNARY_NEGATIVE": "negative",
    **dict.fromkeys(("UNARY_POSITIVE", "UNARY_INVERT"), "iterate"),
    **dict.fromkeys(("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE"), "text"),
    **dict.fromkeys("SETUP_WITH BEFORE_WITH SETUP_ASYNC_WITH BEFORE_ASYNC_WITH LOAD_SPECIAL".split(), "with"),
    "MATCH_CLASS": "match",
    **dict.fromkeys(("RETURN_VALUE", "YIELD_VALUE"), "give"),
    **dict.fromkeys(("STORE_SUBSCR", "STORE_SLICE"), "put"),
    "STORE_ATTR": "set",
    **dict.fromkeys(("BUILD_SET", "SET_ADD", "SET_UPDATE", "BUILD_MAP", "MAP_ADD"), "hash"),
    **dict.fromkeys("CALL_FUNCTION CALL_METHOD CALL_FUNCTION_KW CALL_FUNCTION_EX CALL_KW".split(), "call"),
    _CALL: "call",
}
_BINARY_OF_3_10 = {
    f"BINARY_{name}"
    for name in "ADD SUBTRACT MULTIPLY TRUE_DIVIDE FLOOR_DIVIDE MODULO POWER MATRIX_MULTIPLY LSHIFT RSHIFT "
    "AND OR XOR".split()
}


# The result of these is looked at, at the instruction behind them.
_WITH_RESULT = ("call", "both", "negative")


@once
def readings(code: CodeType) -> Mapping[int, Reading]:
    """Return what each instruction of code reads, by its offset.

    The instruction behind one whose result matters is in it too, of the kind "".
    """
    deep, found = depths(code), dict[int, Reading]()
    first, matters = -1, False
    for one in dis.get_instructions(code):
        if one.opname == "CACHE" or one.opname == "CALL" != _CALL:
            continue
        first = one.offset if first < 0 else first
        # It belongs to the instruction behind it. Some versions tell of the first of these alone.
        if one.opname == "EXTENDED_ARG":
            continue
        kind, name, number, depth = _kind(one), str(one.argval), one.arg or 0, deep.get(one.offset, -1)
        if kind in ("call", "hash", "put"):
            name = one.opname
        elif kind == "both":
            name = one.argrepr or one.opname
        elif kind == "text":
            # A format lies above the value.
            number = int(one.opname == "FORMAT_WITH_SPEC" or number & 4 > 0)
        if depth > -1 and (kind or matters):
            found[first] = Reading(kind, name, number, depth, matters)
        first, matters = -1, kind in _WITH_RESULT
    return found


def _kind(one: dis.Instruction) -> str:
    name = one.opname
    if name == "BINARY_OP" and one.argrepr == "[]":
        return "item"
    if name == "CALL_INTRINSIC_1" and one.argrepr == "INTRINSIC_UNARY_POSITIVE":
        return "iterate"
    if name.startswith("POP_JUMP") and "NONE" not in name:
        return "truth"
    if name == "BINARY_OP" or name.startswith("INPLACE_") or name in _BINARY_OF_3_10:
        return "both"
    return _KINDS.get(name, "")
