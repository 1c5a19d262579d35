"""What a case of the lane is: a short script for a library, and what it is expected to do on a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# A script gets a device and returns what is compared: tensors and numbers, in dicts and lists. One tensor at
# least stays on the device, as it shows where the library has worked.
Script = Callable[[str], dict[str, object]]

EXACT = 1e-4
# What 16 bits allow.
HALF = 2e-2


class NotRun(Exception):
    """This machine cannot run the case, on any device."""


@dataclass(frozen=True)
class Case:
    """One script. `library` is the name that pip knows.

    `change` says what a script for a GPU must change besides the device's name. `fails` says why the case is
    expected to fail or to differ.
    """

    library: str
    tried: str
    script: Script
    change: str = ""
    fails: str = ""
    tolerance: float = EXACT

    @property
    def name(self) -> str:
        return self.script.__name__


CASES: dict[str, Case] = {}


def case(
    library: str, tried: str, *, change: str = "", fails: str = "", tolerance: float = EXACT
) -> Callable[[Script], Script]:
    def add(script: Script) -> Script:
        assert script.__name__ not in CASES, f"two cases are called {script.__name__}"
        CASES[script.__name__] = Case(library, tried, script, change, fails, tolerance)
        return script

    return add
