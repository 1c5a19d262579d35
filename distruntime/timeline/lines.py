"""The user's lines of a log's instructions, as the slices of a trace show them."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType
from typing import NamedTuple

from ..log.line import Call, Line, Replayed, as_key, code_text, line_number, of_a_library

# A slice shows so many of the library's functions that it is in: the innermost ones.
_INNERMOST = 5


class Stretch(NamedTuple):
    """The lines of the instructions between two positions of a log."""

    start: int
    end: int
    lines: Sequence[Line]


class Lines:
    """The lines of one log, by position."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._stretches = sorted(stretches, key=lambda stretch: stretch.end)
        self._ends = [stretch.end for stretch in self._stretches]

    def at(self, position: int) -> Line | None:
        """Return the line of the instruction at a position, if it is known."""
        k = bisect.bisect_right(self._ends, position)
        if k == len(self._ends) or position < self._stretches[k].start:
            return None
        lines = self._stretches[k].lines
        i = bisect.bisect_right(lines, position, key=lambda line: line[0])
        return lines[i] if i < len(lines) else None


class Texts:
    """What slices say of lines, each made once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Call, int], dict[str, str]] = {}
        # Equal codes of different files are one key.
        self._texts: dict[tuple[str, CodeType, int], tuple[str, str]] = {}

    def of(self, line: Line | None) -> Mapping[str, str]:
        """Return the line of the user's own file with its code, and the library's functions in between."""
        if line is None or line[1] is None:
            return {}
        key = line[1], line[2]
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._made(*key)
        return found

    def short(self, line: Line | None) -> str:
        """Return "train.py:12"."""
        return self.of(line).get("line", "an unknown line")

    def _made(self, innermost: Call, offset: int) -> dict[str, str]:
        call, at, layers = innermost, offset, list[str]()
        while of_a_library(call.code.co_filename) and call.outer is not None:
            layers.append(self._layer(call.code, at))
            call, at = call.outer, call.at
        if of_a_library(call.code.co_filename):
            # No line of a user's own has led there.
            call, at, layers = innermost, offset, []
        text, source = self._text(call.code, at)
        found = {"line": text, "code": source}
        if layers:
            found["layer"] = " > ".join(reversed(layers[:_INNERMOST]))
        if isinstance(innermost, Replayed):
            found["program"] = innermost.name
        return found

    def _text(self, code: CodeType, offset: int) -> tuple[str, str]:
        key = code.co_filename, as_key(code), offset
        found = self._texts.get(key)
        if found is None:
            text, _, source = code_text(code, offset).partition("   ")
            found = self._texts[key] = text, source
        return found

    def _layer(self, code: CodeType, offset: int) -> str:
        # Python has the qualified name from 3.11 on.
        name = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
        return f"{name} ({os.path.basename(code.co_filename)}:{line_number(code, offset)})"
