"""What a plan consists of: the stages of a linear map of shards, and those of its adjoint."""

from __future__ import annotations

from dataclasses import dataclass

Size = tuple[int, ...]
# Each dimension has the lengths of the parts along it.
Cuts = tuple[Size, ...]
# A box has dimension, start and length for each dimension that it does not cover as a whole.
Box = tuple[tuple[int, int, int], ...]
# Each dimension and each part along it has the widths of the halo to the left and to the right.
Widths = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Piece:
    """A part of one tensor that becomes a part of another."""

    source: int
    taken: Box
    target: int
    put: Box
    # The piece has so many elements.
    count: int


@dataclass(frozen=True)
class Member:
    """What one place sends, and what it gets, in one all_to_all."""

    leaving: tuple[Piece, ...]
    arriving: tuple[Piece, ...]


@dataclass(frozen=True)
class Exchange:
    """The same as one all_to_all. `splits`: bytes from each to each, out and in."""

    members: tuple[Member, ...]
    splits: tuple[tuple[Size, ...], tuple[Size, ...]]


@dataclass(frozen=True)
class Moves:
    """Pieces, by target, that cover each target.

    With `sums` each target's first is all of it, and the others are added.
    """

    sizes: tuple[Size, ...]
    arriving: tuple[tuple[Piece, ...], ...]
    sums: bool = False
    exchange: Exchange | None = None


@dataclass(frozen=True)
class Spread:
    """From each source to its targets; `sums`: from each one's targets to it.

    Rows: the one, the many, who of them lives with the one.
    """

    rows: tuple[tuple[int, Size, int], ...]
    sums: bool = False


@dataclass(frozen=True)
class AllSum:
    """The sum of the tensors of each row, for all of them."""

    rows: tuple[Size, ...]


@dataclass(frozen=True)
class Concatenation:
    """One after the other along a dimension, for all of a row; `sums`: cut up so, and each part summed.

    Rows: who, and how long.
    """

    axis: int
    rows: tuple[tuple[Size, Size], ...]
    sums: bool = False


Stage = Moves | Spread | AllSum | Concatenation


@dataclass(frozen=True)
class Plan:
    """A linear map. Without stages it is the identity."""

    stages: tuple[Stage, ...]
    back: tuple[Stage, ...]

    @property
    def adjoint(self) -> Plan:
        """The map of the gradients, whose own adjoint is this one."""
        return Plan(self.back, self.stages)
