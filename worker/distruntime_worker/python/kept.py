"""What a call of `dr.spmd` has left here: results that are taken once, and objects that stay with members."""

from __future__ import annotations

import weakref
from typing import Protocol

from distruntime.errors import UsageError

from .handing import Stays


class Keeper(Protocol):
    """Who has the processes in which the objects are."""

    dropped: list[list[tuple[int, int]]]

    def pickle(self, kept: Kept, lane: int) -> object: ...


class Kept:
    """An object that stays in the process of a member: it is used there, by functions of the same mesh."""

    def __init__(self, members: Keeper, lane: int, generation: int, stays: Stays) -> None:
        self._members, self._lane = weakref.ref(members), lane
        self._generation, self._stays = generation, stays
        weakref.finalize(self, members.dropped[lane].append, (generation, stays.number))

    def __repr__(self) -> str:
        return f"<{self._stays.kind} in the process of a member>"

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UsageError(
            f"this {self._stays.kind} stays in its member's process: use its {name!r} in a function of "
            "dr.spmd that gets it as an argument, and return what you want of it"
        )

    def of(self, members: Keeper, lane: int, generation: int) -> Stays:
        """Return its number for a lane; raise `UsageError` where it is not there."""
        if self._members() is not members or self._lane != lane:
            raise UsageError(
                f"a {self._stays.kind} stays in the process of the member that made it: pass the list that "
                "dr.spmd has returned, of which each member gets its own item, to a function of the same mesh"
            )
        if self._generation != generation:
            raise UsageError(
                f"a {self._stays.kind} is gone with the processes of its mesh, which have been started again "
                "after a failure: make it again"
            )
        return self._stays

    def __reduce__(self) -> tuple[object, ...]:
        members = self._members()
        if members is None:
            raise UsageError(f"this {self._stays.kind} is gone: its mesh has been freed")
        return _unpickled, (members.pickle(self, self._lane),)


def _unpickled(value: object) -> object:
    return value


class Results:
    """What the members here have returned, each to be taken once."""

    def __init__(self, found: list[object]) -> None:
        self._found = found

    def take(self, lane: int) -> object:
        """Return a member's result; nothing here holds it any more."""
        found, self._found[lane] = self._found[lane], None
        return found
