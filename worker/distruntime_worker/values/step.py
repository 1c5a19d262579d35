"""A step: one instruction of a log, as whoever stands around its run, or drops it, sees it.

Steps are the templates of a master's operators (`Template`, and `Lanes` for a mesh's members), the operations
of groups (`Collective`, and `LaneCollective` along a mesh), programs (`Program`), and the runtime's own
instructions (`Own`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from distruntime.errors import InternalError
from distruntime.wire.messages import Plain

# These are the words of a segment.
Words = list[Plain]
# These are the values of a session by ref: tensors, `Poisoned`, `Shards` of a mesh's members, and what
# functions of the worker return. The key is a word, and a word need not be a ref: one of another kind finds
# nothing here, or raises.
Slots = dict[Plain, object]
T = TypeVar("T")
Run = Callable[[Slots, Words, int], int]


def _word(kind: type[T], name: str) -> Callable[[Plain], T]:
    def word(found: Plain) -> T:
        """Return a word that must be of one kind; raise `TypeError` for any other."""
        if isinstance(found, kind):
            return found
        raise TypeError(f"the word {found!r:.80} is no {name}")

    return word


int_word = _word(int, "number")
text_word = _word(str, "text")
list_word: Callable[[Plain], list[Plain]] = _word(list, "list")


def real_word(word: Plain) -> float | None:
    """Return a word that must be a real number or None; raise `TypeError` for any other."""
    if word is None or isinstance(word, (int, float)):
        return word
    raise TypeError(f"the word {word!r:.80} is no real number")


# Torch's operators and the worker's functions: each takes arguments of its own, which no type says.
Operator = Callable[..., object]  # type: ignore[explicit-any]


class Pattern(NamedTuple):
    """What the template of an operator was compiled from."""

    call: Operator
    args: list[Plain]
    kwargs: dict[str, Plain]
    results: Plain


class Guard(Protocol):
    """What holds a step to its session's share of memory."""

    def expect(self, predicted: Plain, slots: Slots, p: Words, i: int) -> None:
        """Note what the master has predicted of the results of the instruction at `i`."""

    def run(self, run: Run, slots: Slots, p: Words, i: int) -> int:
        """Run the instruction at `i`, if there is memory for it; return the index after it."""


class Step(Protocol):
    """What one instruction runs, and which of its words name values, by their offsets from its first word.

    Class attributes are what holds for a step that says nothing else.
    """

    # Errors name the step so: "aten::add.Tensor" for a template, "all_reduce of group 7" for a group's
    # operation.
    name: str
    # It runs the instruction at an index of the words, and returns the index of the word after it.
    run: Run
    length: int = 0
    reads: Sequence[int] = ()
    writes: Sequence[int] = ()
    # The step writes these operands. It writes the second ones although its schema does not say so.
    mutates: Sequence[int] = ()
    unsaid: Sequence[int] = ()
    # If it only checks, the refs of its operands' kin stand there, as a list. It poisons them if it fails.
    kin: int | None = None
    # Its results may be views of these operands.
    views: Sequence[int] = ()
    # Its results will be on these devices, as far as that is known.
    devices: Sequence[torch.device] = ()
    # It is None where the step is no operator.
    pattern: Pattern | None = None
    # If it is True, other workers count on the step, so it takes part even where it is dropped.
    joint: bool = False
    # These are the steps of a mesh's members, where several are here.
    lanes: Sequence[Step] = ()
    # These are the steps of a program's instructions, each once.
    parts: Sequence[Step] = ()
    # While it runs, no other session may draw random numbers, even if it draws none itself.
    holds_generators: bool = False
    # The members' steps, or a program's, run these. The chain replaces them: see chain.py.
    runs: Sequence[Run] = ()
    # It holds the step to its session's share of memory, if anything does: see guard.py.
    guard: Guard | None = None

    def drop(self, slots: Slots, p: Words, i: int, error: BaseException, /) -> int:
        """Poison what the instruction at `i` would have made or written; return the index after it."""


class Own(Step):
    """An instruction of the runtime itself. It names no operands, as it sees to them itself."""

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self.run = run

    def drop(self, slots: Slots, p: Words, i: int, error: BaseException, /) -> int:
        """Raise `InternalError`: `Cancelling` knows how each of these is dropped, and no link refuses one."""
        raise InternalError(f"{self.name} cannot be dropped as a template is: see cancel.py") from error
