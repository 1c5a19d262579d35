"""What a master says of a program: the words that its log got, with values named by where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distruntime.errors import ProtocolError
from distruntime.wire.messages import ARGUMENT, FLOAT, HELD, MADE, NUMBER, Plain

from ..values.step import int_word, list_word, text_word

# A value of a program, or a number. It has a kind and, by the kind: the number of a value that the program
# makes, the offset of an argument's word in the instruction, the ref of a value that the session holds, or a
# number itself.
Name = tuple[str, int | float]
_KINDS = (MADE, ARGUMENT, HELD)


@dataclass(frozen=True)
class Row:
    """A template that instructions of a program share: the fields of a template on the wire."""

    name: str
    args: list[Plain]
    kwargs: dict[str, Plain]
    results: Plain


@dataclass(frozen=True)
class Instruction:
    """One instruction of a program: the number of its row, its operand words, and the values that it makes.

    `kin` has the values that were made together with its operands, if it only checks.
    """

    row: int
    words: Sequence[Name]
    makes: Sequence[int]
    kin: Sequence[Name] | None


@dataclass(frozen=True)
class Definition:
    """A whole program. `kept` says which value stands under which ref when it has run."""

    rows: Sequence[Row]
    instructions: Sequence[Instruction]
    kept: Sequence[tuple[int, Name]]
    results: Sequence[Name]
    # So many words of its instruction are refs, and so many are numbers.
    tensors: int
    numbers: int


def definition_from(fields: list[Plain]) -> Definition:
    """Return the program that these fields describe; raise `ProtocolError` where they make no sense."""
    match fields:
        case [list(rows), list(instructions), list(kept), list(results), int(tensors), int(numbers)]:
            return Definition(
                [_row(row) for row in rows],
                [_instruction(row) for row in instructions],
                [(int_word(list_word(row)[0]), _name(list_word(row)[1], _KINDS)) for row in kept],
                [_name(row, _KINDS) for row in results],
                tensors,
                numbers,
            )
    raise ProtocolError(f"a program makes no sense: {fields!r:.80}")


def _row(fields: Plain) -> Row:
    match fields:
        case [str(name), list(args), dict(kwargs), results]:
            return Row(name, args, kwargs, results)
    raise ProtocolError(f"a row of a program makes no sense: {fields!r:.80}")


def _instruction(fields: Plain) -> Instruction:
    match fields:
        case [int(row), list(words), list(makes), kin]:
            return Instruction(
                row,
                [_name(word, (*_KINDS, FLOAT, NUMBER)) for word in words],
                [int_word(number) for number in makes],
                None if kin is None else [_name(word, _KINDS) for word in list_word(kin)],
            )
    raise ProtocolError(f"an instruction of a program makes no sense: {fields!r:.80}")


def _name(fields: Plain, kinds: Sequence[str]) -> Name:
    kind, what = list_word(fields)
    if text_word(kind) not in kinds:
        raise ProtocolError(f"a word of a program is of kind {kind!r:.20}")
    if kind == FLOAT and isinstance(what, float):
        return FLOAT, what
    # These stand in source code, so nothing but a number may.
    return text_word(kind), int_word(what)
