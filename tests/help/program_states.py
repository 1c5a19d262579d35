"""What a program does when state that its function reads changes between calls.

It is compared with the function as it is. The kinds of state are in `KINDS`. Each is one function in one of
the modules `state_of_...`, and says in which way a program is right about it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import distruntime as dr
import state_of_buffers
import state_of_classes
import state_of_containers
import state_of_functions
import state_of_iterators
import state_of_layers
import state_of_magic
import state_of_modules
import state_of_objects
import state_of_process
import state_of_torch
import state_of_training
import state_of_values
from agree import REMOTE
from state_kinds import CHANGES, KINDS, Here, Kind

# Importing one enters its kinds.
GROUPS = {
    module.__name__.removeprefix("state_of_"): module
    for module in (
        state_of_buffers,
        state_of_classes,
        state_of_containers,
        state_of_functions,
        state_of_iterators,
        state_of_layers,
        state_of_magic,
        state_of_modules,
        state_of_objects,
        state_of_process,
        state_of_torch,
        state_of_training,
        state_of_values,
    )
}
CALLS = 18


@dataclass
class Tried:
    """The calls of a program: how each differs from the function's own, and how the program did them.

    `way` is "guarded", "recorded" or "refused"; `text` is what `why` says, or the error.
    """

    wrong: list[str]
    way: str
    text: str
    # So many replays came before the first change, and in all.
    early: int
    replays: int

    def complaint(self, kind: Kind) -> str:
        """Return what is not as the kind says, or nothing."""
        if self.wrong:
            return f"silently wrong at {len(self.wrong)} calls: {self.wrong[0]}"
        if self.way not in kind.ways:
            return f"{self.way}, and not {' or '.join(kind.ways)}: {self.text}"
        if self.way != "guarded" and not re.search(kind.word, self.text):
            return f"{self.way}, and the text names no {kind.word}: {self.text}"
        if self.way == "guarded" and not self.early:
            return f"it was replayed, but not before the first change: {self.text}"
        return ""


def _function(kind: Kind, read: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
    def acting(x: torch.Tensor) -> Any:
        return read(x)

    def scaling(x: torch.Tensor) -> torch.Tensor:
        return x * read()

    return acting if kind.acts else scaling


def _argument(k: int, device: str) -> torch.Tensor:
    return torch.full((2,), k + 1.0, dtype=torch.float64, device="cpu").to(device)


def _shown(result: Any) -> str:
    """Return a text of values that tells -0.0 from 0.0, and says that NaN is NaN."""
    leaves = [
        f"{leaf.dtype} {leaf.tolist()}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in tree_leaves(result)
    ]
    return ", ".join(leaves)


def plain(kind: Kind, argument: Callable[[int], int] = lambda k: k) -> list[str]:
    """Return what the calls of a function give that reads such state."""
    with Here("cpu") as here:
        read, change = kind.make(here)
        function, found = _function(kind, read), []
        for k in range(CALLS):
            if k in CHANGES:
                change(k)
            found.append(_shown(function(_argument(argument(k), "cpu"))))
        return found


def tried(kind: Kind) -> Tried:
    """Call a function that reads such state, as it is and as a program."""
    expected = [] if kind.fresh else plain(kind)
    error, early, results = "", 0, []
    with Here(REMOTE) as here, warnings.catch_warnings():
        # What is recorded in vain runs plainly, and `why` says so too.
        warnings.filterwarnings("ignore", message=r"the program '\w+' was recorded 5 times")
        read, change = kind.make(here)
        program = dr.program(_function(kind, read))
        xs = [_argument(k, REMOTE) for k in range(CALLS)]
        for k, x in enumerate(xs):
            if k in CHANGES:
                change(k)
            early = program.replays if k <= CHANGES[0] else early
            try:
                results.append(program(x))
            except (dr.errors.NotSupportedError, dr.errors.UsageError) as raised:
                error = str(raised)
                break
    found = [_shown(result) for result in results]
    if kind.fresh:
        # The argument is k + 1.
        values = [result.tolist()[0] / (k + 1) for k, result in enumerate(results)]
        wrong = [
            f"call {k} has what the one before had"
            for k in range(1, len(values))
            if _near(*values[k - 1 : k + 1])
        ]
    else:
        wrong = [f"call {k} gave {b}, not {a}" for k, (a, b) in enumerate(zip(expected, found)) if a != b]
    way = "refused" if error else "guarded" if program.replays else "recorded"
    return Tried(wrong, way, error or program.why, early, program.replays)


def _near(one: float, other: float) -> bool:
    # The division has rounded.
    return abs(one - other) <= 1e-15 * abs(one)


# A random program draws from these: they are plain numbers, replayed, and change nothing beside them.
DRAWN = [
    name
    for name, one in sorted(KINDS.items())
    if one.ways == ("guarded",) and not (one.acts or one.fresh or one.wide)
]


def tame(number: Any) -> float:
    """Return a number from 0 to 1 that follows another one, as random programs multiply what they get."""
    value = float(number)
    return 0.5 if value != value or abs(value) > 1e15 else value % 7 / 7
