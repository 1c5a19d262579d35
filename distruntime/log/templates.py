"""The templates that one log's workers know, by number, and those that they have still to learn."""

from __future__ import annotations

from collections.abc import Sequence

from ..wire.messages import FIRST_TEMPLATE

_MOST_TEMPLATES = 1 << 15


class Templates:
    """Numbers of templates.

    Two generations live: a thread may have looked up a number and not yet issued it.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._fields: dict[int, Sequence[object]] = {}
        self._next = FIRST_TEMPLATE
        # This is the first number of the current generation.
        self.generation = FIRST_TEMPLATE
        # So many programs would be taught by each of these keys.
        self._holders: dict[bytes, int] = {}
        # The next segment teaches these: rows of a number and the fields of its template.
        self.untold: list[list[object]] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def find(self, key: bytes) -> int | None:
        """Return the number of a template, or None if the workers do not know it."""
        return self._numbers.get(key)

    def fields(self, number: int) -> Sequence[object]:
        """Return what the workers have learnt under a number."""
        return self._fields[number]

    @property
    def full(self) -> bool:
        """Whether the current generation has as many templates as it may have."""
        return self._next - self.generation >= _MOST_TEMPLATES

    def add(self, key: bytes, fields: Sequence[object]) -> int:
        """Return the number of a new template, which the next segment teaches."""
        number = self._numbers[key] = self._next
        self._next += 1
        self._fields[number] = fields
        self.untold.append([number, *fields])
        return number

    def hold(self, key: bytes) -> None:
        """Note that one more program has this key. Two that do the same have one template."""
        self._holders[key] = self._holders.get(key, 0) + 1

    def drop(self, key: bytes) -> int | None:
        """Note that a program of this key is gone, and forget its template if that was the last one.

        Return its number, or None if it stays or if the workers do not know it.
        """
        left = self._holders.pop(key, 1) - 1
        if left > 0:
            self._holders[key] = left
            return None
        number = self._numbers.pop(key, None)
        if number is not None:
            del self._fields[number]
        return number

    def expire(self) -> int:
        """Forget the generation before the current one and begin another; return the first number that stays
        known.
        """
        oldest = self.generation
        self._numbers = {key: number for key, number in self._numbers.items() if number >= oldest}
        self._fields = {number: row for number, row in self._fields.items() if number >= oldest}
        self.generation = self._next
        return oldest
