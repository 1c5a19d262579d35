"""Kinds of Python state, for the tests of what a program sees: how each is read, and how it changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

# What reads the state, and what changes it before the call of this number. `read` returns a number; an `act`
# takes the function's tensor instead, and returns another one.
State = tuple[Callable[..., Any], Callable[[int], object]]

# The state changes before these calls, after five or more in which nothing did: a plan was replayed by then.
CHANGES = (6, 10, 11, 15)


class Here(ExitStack):
    """Where state is made: the device of its tensors, and what is undone when the calls are over."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def put(self, owner: object, name: str, value: object) -> None:
        """Set an attribute until the end."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(lambda: name in vars(owner) and delattr(owner, name))
        setattr(owner, name, value)


@dataclass(frozen=True)
class Kind:
    """One kind of state.

    `ways` are those in which a program may be right about it. "guarded": it is replayed while nothing
    changes. "recorded": it is never replayed, and `why` names what it is. "refused": it raises, and the error
    names it. `word` is a regular expression of that name.
    """

    name: str
    make: Callable[[Here], State]
    ways: tuple[str, ...]
    word: str
    # It acts on the function's tensor.
    acts: bool
    # It gives something else at each call, and two runs do not give the same.
    fresh: bool
    # It also changes what other code computes.
    wide: bool


KINDS: dict[str, Kind] = {}


def kind(
    ways: str = "guarded", word: str = "", *, acts: bool = False, fresh: bool = False, wide: bool = False
) -> Callable[[Callable[[Here], State]], Callable[[Here], State]]:
    """Enter a kind of state. `ways` are one or more ways, with " or " between them."""

    def enter(make: Callable[[Here], State]) -> Callable[[Here], State]:
        found = tuple(ways.split(" or "))
        assert set(found) <= {"guarded", "recorded", "refused"} and make.__name__ not in KINDS, make
        assert word or found == ("guarded",), make
        KINDS[make.__name__] = Kind(make.__name__, make, found, word, acts, fresh, wide)
        return make

    return enter


def even(k: int) -> bool:
    """Whether a call's number is even: state of two values changes with it, and begins as at an odd one."""
    return k % 2 == 0


class Holder:
    """It has one value, and others beside it."""

    def __init__(self, v: Any = 1.0) -> None:
        self.v = v
