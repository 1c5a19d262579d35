"""A million operations with the garbage collector off: the worker's table and both processes' memory end
where they began. Two minutes.
"""

from __future__ import annotations

import pytest

from tests.tensors.test_leaks import many_operations_leave_nothing


@pytest.mark.timeout(1800)
def test_a_million_operations_leave_nothing() -> None:
    many_operations_leave_nothing(1_000_000)
