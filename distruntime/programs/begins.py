"""Where tensors begin in their memories.

The batches `x[i:i + 32]` of one tensor are one kind of call, so a plan must not depend on where its arguments
begin. Two equal recordings tell: what is the same although an argument began elsewhere does not depend on it,
and what has moved as far as an argument follows that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..log.spec import Spec
from ..tensors.tensor import DistributedTensor
from .recording import Cut, Name, Recording

# The byte of its memory at which each argument begins; -1 of what is no tensor.
Begins = tuple[int, ...]


class Placed(NamedTuple):
    """A kind of call whose instructions depend on where its arguments begin, and where they do."""

    kind: object
    begins: Begins


def begins_of(leaves: Sequence[object]) -> Begins:
    """Return where arguments begin."""
    return tuple(leaf._handle.spec.begin if isinstance(leaf, DistributedTensor) else -1 for leaf in leaves)


def alike(one: Spec | None, other: Spec | None) -> bool:
    """Whether two specs differ in their offsets at most."""
    return one is other or (one is not None and other is not None and one.at(0) is other.at(0))


def followed(one: Spec | None, other: Spec | None, before: Begins, after: Begins) -> tuple[int, ...] | None:
    """Return the arguments that a value follows: it has moved as far as they, from one call to another.

    That is nothing if it stays, and None if it is of another kind or follows none.
    """
    if one is other or one is None or other is None:
        return () if one is other else None
    far = other.begin - one.begin
    found = tuple(k for k, (a, b) in enumerate(zip(before, after)) if a >= 0 and b - a == far)
    return (found or None) if alike(one, other) else None


def line_of_offset(one: Recording, other: Recording) -> str:
    """Return the line of an instruction that has another offset, if that is all in which two recordings
    differ.
    """
    if len(one.body) != len(other.body) or one.streams != other.streams:
        return ""
    found = ""
    for k, (a, b) in enumerate(zip(one.body, other.body)):
        if a == b:
            continue
        if isinstance(a, Cut) or isinstance(b, Cut):
            return ""
        names = one.placed.get(a.template), other.placed.get(b.template)
        if names[0] is None or names[0] != names[1]:
            return ""
        if (a.log, a.words, a.makes, a.kin) != (b.log, b.words, b.makes, b.kin):
            return ""
        found = found or other.line_of(k)
    return found


class Moves:
    """How far the values of a plan move with its arguments.

    `begins` are those of its two recordings, and `follows` has the arguments that a value follows.
    """

    def __init__(self, begins: tuple[Begins, Begins], follows: Mapping[Name, Sequence[int]]) -> None:
        before, after = begins
        # Nobody knows what would be if one of these began elsewhere.
        self.fixed = [k for k, (a, b) in enumerate(zip(before, after)) if a == b >= 0]
        self._follows = {name: (found[0], after[found[0]]) for name, found in follows.items()}
        # These have moved alike. If they do not, nobody knows which of them a value follows.
        several = {found for names in follows.values() if len(found := tuple(names)) > 1}
        self.together = [[(k, after[k]) for k in found] for found in several]

    def apart(self, leaves: Sequence[object]) -> bool:
        """Whether arguments that have moved alike do not in this call."""
        return any(
            len({_begin(leaves[k]) - begin for k, begin in together}) > 1 for together in self.together
        )

    def of(self, name: Name) -> tuple[int, int] | None:
        """Return the argument that a value follows, and where that began when the value was recorded."""
        return self._follows.get(name)


def moved(spec: Spec, follows: tuple[int, int], leaves: Sequence[Any]) -> Spec:
    """Return what a value is in a call, from what it was when it was recorded.

    `leaves` has the handles of the arguments that are tensors.
    """
    argument, begin = follows
    return spec.at(spec.offset + (leaves[argument].spec.begin - begin) // spec.dtype.itemsize)


def _begin(leaf: object) -> int:
    return leaf._handle.spec.begin  # type: ignore[attr-defined, no-any-return]
