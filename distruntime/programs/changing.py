"""Numbers of a program that follow a float of the user's, such as a learning rate that changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .seen import Seen, same

# The floats that a call has found, by path.
Floats = Mapping[str, float]


@dataclass(frozen=True)
class Form:
    """How a number follows from floats: "v", "-v" or "1 - v * w", with the paths of v and w."""

    text: str
    paths: tuple[str, ...]

    def value(self, floats: Floats) -> float:
        """Return the number for these floats."""
        first = floats[self.paths[0]]
        if self.text == "v":
            return first
        return -first if self.text == "-v" else 1 - first * floats[self.paths[1]]


@dataclass(frozen=True)
class Number:
    """A float word of a program, by its number, and each form that gave it in both recordings.

    They must agree: if they do not, nobody knows which of them it follows.
    """

    word: int
    forms: tuple[Form, ...]


def explained(
    one: Sequence[float], other: Sequence[float], before: Floats, after: Floats
) -> tuple[list[Number], int]:
    """Return how each number that differs between two recordings follows from floats that differ.

    The second result is the first number that follows from none, or -1. `before` and `after` are the floats
    that the two calls found.
    """
    changed = [path for path in before if path in after and not same(before[path], after[path])]
    found: list[Number] = []
    for word, (a, b) in enumerate(zip(one, other)):
        if same(a, b):
            continue
        forms = [
            form
            for form in _candidates(changed, before)
            if all(path in after for path in form.paths)
            and same(form.value(before), a)
            and same(form.value(after), b)
        ]
        if not forms:
            return found, word
        found.append(Number(word, tuple(forms)))
    return found, -1


def _candidates(changed: Sequence[str], floats: Floats) -> list[Form]:
    found = [Form(text, (path,)) for path in changed for text in ("v", "-v")]
    found += [Form("1 - v * w", (path, other)) for path in changed for other in floats]
    return found


def numbers_of(
    numbers: Sequence[Number], seen: Sequence[Seen], arguments: Mapping[str, int]
) -> Callable[[Sequence[object]], list[float] | None]:
    """Return what computes these numbers at a call from its arguments; None if forms of one disagree."""
    paths = {path for number in numbers for form in number.forms for path in form.paths}
    readers = {one.path: one.now for one in seen if one.path in paths}

    def compute(leaves: Sequence[object]) -> list[float] | None:
        floats: dict[str, float] = {}
        for path in paths:
            value = leaves[arguments[path]] if path in arguments else readers[path]()
            if type(value) is not float:
                return None
            floats[path] = value
        found: list[float] = []
        for number in numbers:
            value, *others = [form.value(floats) for form in number.forms]
            if any(not same(value, other) for other in others):
                return None
            found.append(value)
        return found

    return compute
