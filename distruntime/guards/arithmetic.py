"""Numbers of a program that follow floats which may change, such as a learning rate with a schedule.

While a call is recorded, each float is known by how it came about: a *term*. A term is a tuple: what it does,
and what it does it with. A number whose value changes from one recording to the next follows the terms that
have given it in both. All of them must agree in a replay. What was decided by a float is decided again, and
must come out as it did.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .seen import MISSING, Key, Seen, same

# A term is one of these: ("read", key of a read, index in its tuple or None), ("argument", number), ("step",
# id of a tensor, what it is ahead by), ("constant", value), ("either", terms), (a function, terms).
Term = tuple[object, ...]
_OPERATORS: Mapping[str, Callable[..., object]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}
# Names of Python 3.10.
_NAMES = dict(zip("ADD SUBTRACT MULTIPLY TRUE_DIVIDE FLOOR_DIVIDE MODULO POWER".split(), _OPERATORS))
# Functions of numbers that give a number.
_FUNCTIONS = frozenset(
    map(
        id, (*(f for f in vars(math).values() if callable(f)), abs, pow, min, max, round, float, operator.neg)
    )
)


def operator_of(name: str) -> Callable[..., object] | None:
    """Return what an instruction does, by how Python's disassembler shows it: "*", "-=", "bool(<)"."""
    name = _NAMES.get(name.rpartition("BINARY_")[2].rpartition("INPLACE_")[2], name)
    name = name.removeprefix("bool(").removesuffix(")")
    return _OPERATORS.get(name) or _OPERATORS.get(name.removesuffix("="))


class Arithmetic:
    """How the floats of one call came about."""

    def __init__(
        self, arguments: Mapping[int, float], steps: Mapping[int, tuple[torch.Tensor, float]]
    ) -> None:
        self.values: dict[Term, float] = {}
        # What was decided by floats, and how.
        self.decisions: dict[Term, object] = {}
        self.steps = steps
        self._terms: dict[int, Term] = {}
        # These floats may have come from where no term says: a literal, a default, an item of a list.
        self._literals: set[int] = set()
        # An id is a float's own as long as the float lives.
        self._held: list[object] = []
        for number, value in arguments.items():
            self._know(value, ("argument", number))

    def _know(self, value: object, term: Term) -> None:
        if type(value) is not float:
            return
        if id(value) in self._literals:
            self._pin(term, value)
            return
        known = self._terms.get(id(value))
        if known is not None and known != term:
            among = known[1:] if known[0] == "either" else (known,)
            term = known if term in among else ("either", *among, term)
        self._terms[id(value)] = term
        self.values.setdefault(term, value)
        self._held.append(value)

    def literals(self, values: Iterable[object]) -> None:
        """Note floats that may be computed with by themselves.

        Python keeps equal literals of a module as one object. So `rate = 0.5` outside may be the 0.5 of a
        function. Whoever computes with that object may mean either, so it has no term, and must stay.
        """
        for value in values:
            if isinstance(value, (tuple, frozenset)):
                self.literals(value)
            elif type(value) is float and id(value) not in self._literals:
                self._literals.add(id(value))
                self._held.append(value)
                term = self._terms.pop(id(value), None)
                if term is not None:
                    self._pin(term, value)

    def read(self, key: Key, value: object) -> None:
        """Note that a float, or a tuple or list with floats, was read somewhere."""
        if type(value) is float:
            self._know(value, ("read", key, None))
        elif isinstance(value, list):
            self.literals(value)
        elif isinstance(value, tuple):
            # Some functions take a tuple as a whole.
            for k, one in enumerate(value):
                self._know(one, ("read", key, k))

    def item(self, tensor: object, value: object) -> None:
        """Note that the value of a tensor that counts an optimizer's steps was read."""
        step = self.steps.get(id(tensor))
        if step is not None and isinstance(value, float):
            self._know(value, ("step", id(tensor), value - step[1]))

    def term(self, value: object) -> Term | None:
        """Return how a number came about; None if it is no number, or a constant."""
        return self._terms.get(id(value)) if type(value) is float else None

    def follows(self, function: Callable[..., object] | None, values: Sequence[object]) -> Term | None:
        """Return the term of what a function gives for these numbers; None if it follows no float."""
        if function is None or not any(self.term(value) for value in values):
            return None
        if not all(isinstance(value, (int, float)) for value in values):
            return None
        return (function, *(self.term(value) or ("constant", value) for value in values))

    def called(self, function: object, values: Sequence[object]) -> Term | None:
        """Return the term of what a function of numbers gives, or of what `torch` reads of a step."""
        return self.follows(function, values) if id(function) in _FUNCTIONS else None  # type: ignore[arg-type]

    def gave(self, term: Term, value: object) -> None:
        """Note what a term has given. If that is no float, it has decided something.

        Where Python has raised instead, the numbers that it had must be what they were.
        """
        if value is MISSING:
            for part in term[1:]:
                if part in self.values:
                    self._pin(part, self.values[part])
        elif type(value) is float:
            self._know(value, term)
        else:
            self.decisions[term] = value
            self._held.append(value)

    def settle(self) -> None:
        """Let go of all that only a call that runs needs."""
        self._terms.clear()
        self._literals.clear()
        self._held.clear()

    def keep(self, reads: Container[Key]) -> None:
        """Forget what was read in objects that only the call itself has held."""
        known: dict[Term, Term | None] = {}

        def kept(term: Term) -> Term | None:
            if term not in known:
                kind, *rest = term
                if kind in ("argument", "step", "constant"):
                    known[term] = term
                elif kind == "read":
                    known[term] = term if rest[0] in reads else None
                else:
                    parts = [kept(part) for part in rest]  # type: ignore[arg-type]
                    if kind == "either":
                        parts = list(dict.fromkeys(part for part in parts if part is not None))
                    one = parts[0] if kind == "either" and len(parts) == 1 else (kind, *parts)
                    known[term] = one if parts and None not in parts else None
            return known[term]

        self.values = {one: value for term, value in self.values.items() if (one := kept(term)) is not None}
        self.decisions = {
            one: value for term, value in self.decisions.items() if (one := kept(term)) is not None
        }

    def pin(self, value: object) -> None:
        """Note that a float went where nobody can follow it: it must be what it was."""
        term = self.term(value)
        if term is not None:
            self._pin(term, value)

    def _pin(self, term: Term, value: object) -> None:
        self.decisions[repr, term] = repr(value)
        self._held.append(value)


@dataclass(frozen=True)
class Number:
    """Words of a program, by their numbers, and the terms that gave them in both recordings."""

    words: tuple[int, ...]
    terms: tuple[Term, ...]


def explained(
    one: Sequence[float], other: Sequence[float], before: Mapping[Term, float], after: Mapping[Term, float]
) -> tuple[list[Number], int]:
    """Return how each number that differs between two recordings follows from floats.

    The second result is the first number that follows from none, or -1. `before` and `after` are the terms of
    the two calls. The calls must have read and decided the same, but for those floats.
    """
    differing = [k for k, (a, b) in enumerate(zip(one, other)) if not same(a, b)]
    if not differing:
        return [], -1
    by_values: dict[tuple[str, str], list[Term]] = {}
    for term, value in before.items():
        if term in after and not same(value, after[term]):
            by_values.setdefault((repr(value), repr(after[term])), []).append(term)
    found: dict[tuple[str, str], list[int]] = {}
    for k in differing:
        key = repr(one[k]), repr(other[k])
        if key not in by_values:
            return [], k
        found.setdefault(key, []).append(k)
    return [Number(tuple(words), tuple(by_values[key])) for key, words in found.items()], -1


def leaves_of(terms: Iterable[Term]) -> set[Term]:
    """Return the reads, arguments and steps that terms come from."""
    found: set[Term] = set()
    todo = list(terms)
    while todo:
        term = todo.pop()
        if term[0] in ("read", "argument", "step"):
            found.add(term)
        elif term[0] != "constant":
            todo += term[1:]  # type: ignore[arg-type]
    return found


def unmoved(
    floats: Sequence[float], numbers: Iterable[Number], terms: Mapping[Term, float]
) -> dict[Term, object]:
    """Return decisions for what may have given words that did not change, such as `max(rate, 0.01)`.

    Nobody knows whether a word comes from there. So a replay asks that it gives the same again.
    """
    follows = {word for number in numbers for word in number.words}
    fixed = {repr(value) for word, value in enumerate(floats) if word not in follows}
    return {(repr, term): shown for term, value in terms.items() if (shown := repr(value)) in fixed}


def numbers_of(
    numbers: Sequence[Number],
    decisions: Mapping[Term, object],
    reads: Mapping[Key, Seen],
    steps: Mapping[int, torch.Tensor],
) -> Callable[[Sequence[object]], list[float] | None] | None:
    """Return what computes these numbers at a call from its arguments.

    It gives None where terms of one number disagree, where something is decided in another way, or where what
    stands there is no float any more. Return None if there is nothing to compute or to decide.
    """
    free = leaves_of(term for number in numbers for term in number.terms)
    # No guard looks at steps.
    decided = [
        (term, value)
        for term, value in decisions.items()
        if any(leaf in free or leaf[0] == "step" for leaf in leaves_of([term]))
    ]
    if not numbers and not decided:
        return None
    # Nothing else that was read is held.
    used = free | leaves_of(term for term, _ in decided)
    reads = {leaf[1]: reads[leaf[1]] for leaf in used if leaf[0] == "read"}  # type: ignore[index, misc]

    def value_of(term: Term, leaves: Sequence[object], known: dict[Term, object]) -> object:
        if term in known:
            return known[term]
        kind, *rest = term
        if kind == "constant":
            return rest[0]
        if kind == "argument":
            found = leaves[rest[0]]  # type: ignore[call-overload]
        elif kind == "read":
            found = reads[rest[0]].now()  # type: ignore[index]
            found = found if rest[1] is None else found[rest[1]]  # type: ignore[index]
        elif kind == "step":
            found = steps[rest[0]].item() + rest[1]  # type: ignore[index, operator]
        else:
            values = [value_of(part, leaves, known) for part in rest]  # type: ignore[arg-type]
            if kind == "either":
                if any(not same(values[0], value) for value in values):
                    raise ValueError
                found = values[0]
            else:
                found = kind(*values)  # type: ignore[operator]
        if kind in ("argument", "read", "step") and type(found) is not float:
            raise ValueError
        known[term] = found
        return found

    def compute(leaves: Sequence[object]) -> list[float] | None:
        known: dict[Term, object] = {}
        found: list[float] = []
        try:
            if any(value_of(term, leaves, known) != value for term, value in decided):
                return None
            for number in numbers:
                first, *others = [value_of(term, leaves, known) for term in number.terms]
                if any(not same(first, other) for other in others):
                    return None
                found.append(first)  # type: ignore[arg-type]
        # A float is gone, or Python raises for what it is now.
        except (LookupError, AttributeError, ValueError, ArithmeticError, TypeError):
            return None
        return found

    return compute
