"""The templates that one log's workers know, by number, and those that they have still to learn.

Also the predictions of results' metadata that the worker checks, and what to do where one was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


# It is called with the number of the result and the fields of its real spec where a prediction was wrong, and
# then with None and no fields.
Correct = Callable[[int | None, list[object]], None]


class Checks:
    """The predictions of one log that are not confirmed yet. Numbers begin after `last`."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self._open: dict[int, Correct] = {}

    @property
    def waiting(self) -> bool:
        """Whether a prediction is not confirmed yet."""
        return bool(self._open)

    def add(self, correct: Correct) -> int:
        """Return the number of a new prediction for the word CHECK."""
        self.last += 1
        self._open[self.last] = correct
        return self.last

    def correct(self, number: int, result: int, fields: list[object]) -> None:
        """Tell a prediction that it was wrong; ignore one that is not open."""
        correct = self._open.get(number)
        if correct is not None:
            correct(result, fields)

    def confirm(self, last: int) -> None:
        """Close the predictions up to this number: the worker has checked them."""
        for number in [n for n in self._open if n <= last]:
            self._open.pop(number)(None, [])
