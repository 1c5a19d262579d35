"""Predictions of results' metadata that the worker checks, and what to do where one was wrong."""

from __future__ import annotations

from collections.abc import Callable

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
