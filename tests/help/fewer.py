"""Of cases that differ only in data, `make test` runs a few. `make test-all` runs them all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

_CASE = type(pytest.param())


def fewer(cases: Iterable[Any], stay: int | Collection[Any], reason: str) -> list[Any]:
    """Return the cases of a parametrized test, of which all but some are slow.

    `stay` says which are not: every so many from the first one on, or those whose first value is in it.
    Where a test has several names, each case is a `pytest.param` of their values.
    """
    found = [case if isinstance(case, _CASE) else pytest.param(case) for case in cases]
    slow = pytest.mark.slow(reason=reason)
    return [
        case
        if (number % stay == 0 if isinstance(stay, int) else case.values[0] in stay)
        else pytest.param(*case.values, id=case.id, marks=[*case.marks, slow])
        for number, case in enumerate(found)
    ]
