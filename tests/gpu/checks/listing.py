"""The list of the checks. A check is a function that a decorator puts there, with what a reader must know."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from box import Box

# These hold the checks.
MODULES = (
    "first_steps",
    "suites",
    "lost_devices",
    "operators",
    "layers",
    "in_order",
    "moving",
    "models",
    "many_workers",
    "many_sessions",
    "programs",
    "ranks",
    "compiled",
    "unchanged",
)
# If one of these fails, no check after it can work.
FIRST = (1, 2, 3)


class Described(NamedTuple):
    """What the parent process knows of a check."""

    number: int
    name: str
    does: str
    failure: str
    seconds: float
    one_card: bool


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        number: its place in the order.
        name: what the table calls it.
        does: what it does.
        failure: what it means if it fails, and where to look.
        run: the function. It raises if the check fails.
        seconds: it is ended after so many.
        needs: what it cannot do without: "cuda" in this process, "two GPUs", or the name of a module.
        one_card: whether this process and its workers may see one GPU only.
    """

    number: int
    name: str
    does: str
    failure: str
    run: Callable[[Box], None]
    seconds: float
    needs: tuple[str, ...]
    one_card: bool

    def described(self) -> Described:
        """Return all but the function."""
        return Described(self.number, self.name, self.does, self.failure, self.seconds, self.one_card)


_found: dict[int, Check] = {}


def check(
    number: int,
    name: str,
    *,
    does: str,
    failure: str,
    seconds: float = 30,
    needs: tuple[str, ...] = (),
    one_card: bool = False,
) -> Callable[[Callable[[Box], None]], Callable[[Box], None]]:
    """Put a function into the list."""

    def put(run: Callable[[Box], None]) -> Callable[[Box], None]:
        assert number not in _found or _found[number].run.__qualname__ == run.__qualname__, (
            f"two checks {number}"
        )
        _found[number] = Check(number, name, does, failure, run, seconds, needs, one_card)
        return run

    return put


def checks() -> list[Check]:
    """Return all checks in their order."""
    for module in MODULES:
        importlib.import_module(module)
    return [_found[number] for number in sorted(_found)]
