"""How many members form groups by modes: data, pipeline and tensor parallelism, experts, nodes.

Arithmetic only: no session, no sockets.

Members are numbered 0, 1, …; the last mode is the innermost, so that its groups hold adjacent members.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from math import prod
from types import MappingProxyType
from typing import SupportsIndex

from ..errors import ConfigurationError, UsageError

Groups = tuple[tuple[int, ...], ...]
Modes = Iterable[tuple[str, float]]

# With one of these modes, several members work on the same data. They are a group of mode "model".
_SAME_DATA = (
    "pipe",
    "tensor",
)


class Layout:
    """Members in groups by modes.

    `Layout([("data", 2), ("pipe", 2), ("tensor", 2)])` has 8 members, with "tensor" innermost.

    `world` is the number of members, if it is to be checked. With a mode "pipe" or "tensor" there is a
    mode "model" too: the members that agree in "data". A layout never changes; `with_experts` and
    `with_nodes` return a larger one. Nothing here blocks. Raises ConfigurationError for sizes that cannot
    be, UsageError for a mode or a member that is not there.
    """

    __slots__ = ("_groups", "_seats", "modes", "world")

    modes: MappingProxyType[str, int]
    world: int

    def __init__(self, modes: Modes, world: int | None = None) -> None:
        pairs = [_checked(mode) for mode in modes]
        names = [name for name, _ in pairs]
        if not pairs:
            raise ConfigurationError('a layout needs modes, as in [("data", 2), ("tensor", 4)], got none')
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigurationError(
                f"mode {twice[0]!r} is there twice, in {names}: give each mode a name of its own"
            )
        product = prod(size for _, size in pairs)
        if world is not None and product != world:
            sizes = " x ".join(f"{name} {size}" for name, size in pairs)
            raise ConfigurationError(
                f"{sizes} are {product} members, but the world has {world}: their product must be the world"
            )
        groups: dict[str, Groups] = {}
        stride = product
        for name, size in pairs:
            stride //= size
            groups[name] = _strided(product, size, stride)
        if "model" not in groups and any(name in groups for name in _SAME_DATA):
            groups["model"] = _transposed(groups["data"]) if "data" in groups else (tuple(range(product)),)
        self.modes = MappingProxyType(dict(pairs))
        self.world = product
        self._take(groups)

    def _take(self, groups: dict[str, Groups]) -> None:
        self._groups = groups
        self._seats = {
            mode: {
                member: (number, rank) for number, group in enumerate(of) for rank, member in enumerate(group)
            }
            for mode, of in groups.items()
        }

    def _with(self, more: dict[str, Groups]) -> Layout:
        for name in more:
            if name in self._groups:
                raise ConfigurationError(f"the layout has a mode {name!r} already")
        larger = object.__new__(Layout)
        larger.modes, larger.world = self.modes, self.world
        larger._take({**self._groups, **more})
        return larger

    def groups(self, mode: str) -> list[list[int]]:
        """Return the members of every group of a mode; a member's place in its list is its rank."""
        return [list(group) for group in self._of(mode)]

    def group(self, mode: str, member: int) -> list[int]:
        """Return the members of the group that a member is in."""
        return list(self._of(mode)[self._seat(mode, member)[0]])

    def size(self, mode: str) -> int:
        """Return how many members each group of a mode has."""
        return len(self._of(mode)[0])

    def __contains__(self, mode: object) -> bool:
        """Return whether there is such a mode."""
        return mode in self._groups

    def uses(self, mode: str) -> bool:
        """Return whether a mode is there and its groups have more than one member. Never raises."""
        return mode in self._groups and self.size(mode) > 1

    def rank(self, mode: str, member: int) -> int:
        """Return a member's rank in its group."""
        return self._seat(mode, member)[1]

    def is_first(self, mode: str, member: int) -> bool:
        """Return whether a member is the first of its group."""
        return self.rank(mode, member) == 0

    def is_last(self, mode: str, member: int) -> bool:
        """Return whether a member is the last of its group."""
        return self.rank(mode, member) == self.size(mode) - 1

    def is_in_first_group(self, mode: str, member: int) -> bool:
        """Return whether a member's group is the first of its mode, the one that holds member 0."""
        return self._seat(mode, member)[0] == 0

    def next(self, mode: str, member: int) -> int:
        """Return the member after a member in its group; after the last comes the first."""
        group = self.group(mode, member)
        return group[(self.rank(mode, member) + 1) % len(group)]

    def previous(self, mode: str, member: int) -> int:
        """Return the member before a member in its group; before the first comes the last."""
        return self.group(mode, member)[self.rank(mode, member) - 1]

    def coordinates(self, member: int) -> dict[str, int]:
        """Return a member's rank in each of the modes that the layout was made of, outermost mode first."""
        return {mode: self.rank(mode, member) for mode in self.modes}

    def member(self, **coordinates: int) -> int:
        """Return the member that sits at coordinates, as in `layout.member(data=1, pipe=0, tensor=1)`.

        Every mode is needed.
        """
        if set(coordinates) != set(self.modes):
            raise UsageError(
                f"a member has coordinates {list(self.modes)}, got {list(coordinates)}: give one for each"
            )
        at = 0
        for mode, size in self.modes.items():
            if not 0 <= coordinates[mode] < size:
                raise UsageError(
                    f"{mode}={coordinates[mode]} is outside the layout: mode {mode!r} has {size}, 0 "
                    f"to {size - 1}"
                )
            at = at * size + coordinates[mode]
        return at

    def with_experts(self, ep: int | None = None, dp: int | None = None) -> Layout:
        """Return this layout with the modes "moe_ep" and "moe_dp".

        Each group of "data" is cut into `dp` groups of `ep` members.

        The members of a "moe_ep" group follow each other in their "data" group and hold different
        experts; those of a "moe_dp" group are `ep` apart and hold the same ones. One of the two sizes is
        enough.
        """
        data = self._of("data")
        size = len(data[0])
        for name, number in (("ep", ep), ("dp", dp)):
            if number is not None and (number < 1 or size % number):
                raise ConfigurationError(
                    f"{name}={number} does not divide the groups of mode 'data', which have {size} members"
                )
        if ep is None and dp is None:
            raise ConfigurationError(
                "with_experts needs ep= or dp=; their product is the size of the groups of mode "
                f"'data', {size}"
            )
        ep = size // dp if ep is None and dp is not None else ep or 1
        if dp is not None and ep * dp != size:
            raise ConfigurationError(
                f"ep={ep} times dp={dp} are {ep * dp} members, but the groups of mode 'data' have {size}"
            )
        experts = tuple(group[start : start + ep] for group in data for start in range(0, size, ep))
        replicas = tuple(group[start::ep] for group in data for start in range(ep))
        return self._with({"moe_ep": experts, "moe_dp": replicas})

    def with_nodes(self, per_node: int = 8) -> Layout:
        """Return this layout with the mode "node": `per_node` members that follow each other are a group."""
        if per_node < 1 or self.world % per_node:
            raise ConfigurationError(
                f"{self.world} members do not fill nodes of {per_node}: per_node must divide {self.world}"
            )
        return self._with({"node": _strided(self.world, per_node, 1)})

    def _of(self, mode: str) -> Groups:
        try:
            return self._groups[mode]
        except KeyError:
            raise UsageError(f"the layout has no mode {mode!r}; it has {sorted(self._groups)}") from None

    def _seat(self, mode: str, member: int) -> tuple[int, int]:
        self._of(mode)
        try:
            return self._seats[mode][member]
        except (KeyError, TypeError):
            raise UsageError(
                f"there is no member {member!r} in a layout of {self.world} members, 0 to {self.world - 1}"
            ) from None

    def __eq__(self, other: object) -> bool:
        """Equal layouts have the same modes in the same order, and the same groups."""
        return (
            isinstance(other, Layout)
            and list(self.modes.items()) == list(other.modes.items())
            and self._groups == other._groups
        )

    def __hash__(self) -> int:
        return hash((tuple(self.modes.items()), tuple(sorted(self._groups))))

    def __repr__(self) -> str:
        more = "".join(f".{mode}" for mode in sorted(set(self._groups) - set(self.modes)))
        return f"Layout({list(self.modes.items())})" + (
            f" with {more[1:].replace('.', ', ')}" if more else ""
        )


def _checked(mode: object) -> tuple[str, int]:
    """Return a mode as its name and size, or say what is wrong with it."""
    if not (
        isinstance(mode, Sequence)
        and not isinstance(mode, str)
        and len(mode) == 2
        and isinstance(mode[0], str)
    ):
        raise ConfigurationError(f'a mode is a name and a size, as in ("data", 2), got {mode!r}')
    name, size = mode
    # A size is often what a division leaves: `world / (2 * pipe)` is 4.0.
    if isinstance(size, float) and size.is_integer():
        size = int(size)
    if isinstance(size, bool) or not isinstance(size, SupportsIndex) or operator.index(size) < 1:
        raise ConfigurationError(f"mode {name!r} has size {size!r}: a size is a whole number from 1 on")
    return name, operator.index(size)


def _strided(world: int, size: int, stride: int) -> Groups:
    """Return groups of members `stride` apart, for example [0, 2], [4, 6], [1, 3], [5, 7]."""
    return tuple(
        tuple(range(block + start, block + start + size * stride, stride))
        for start in range(stride)
        for block in range(0, world, size * stride)
    )


def _transposed(groups: Groups) -> Groups:
    """Return for each rank the members that have it in their group."""
    return tuple(tuple(sorted(group[rank] for group in groups)) for rank in range(len(groups[0])))
