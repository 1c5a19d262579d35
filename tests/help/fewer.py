"""Of cases that differ only in data, `make test` runs a few. `make test-all` runs them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

_CASE = type(pytest.param())


def fewer(cases: Iterable[Any], every: int, reason: str) -> list[Any]:
    """Return the cases of a parametrized test. All but the first, and each `every`th after it, are slow.

    Where a test has several names, each case is a `pytest.param` of their values.
    """
    found = [case if isinstance(case, _CASE) else pytest.param(case) for case in cases]
    slow = pytest.mark.slow(reason=reason)
    return [
        case if number % every == 0 else pytest.param(*case.values, id=case.id, marks=[*case.marks, slow])
        for number, case in enumerate(found)
    ]
