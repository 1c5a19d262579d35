"""State that a function reads, changed between calls of its program: each call sees what a plain one sees.

The kinds of state, and in which way a program is right about each, are in `tests/help/state_of_*.py`.
"""

from __future__ import annotations

import pytest

from program_states import GROUPS, KINDS, plain, tried
from state_kinds import Kind

# What these read is equal at each call.
_STEADY = ("counter_that_decides_nothing", "number_of_the_process")


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_a_program_sees_the_change(session: object, kind: Kind) -> None:
    complaint = tried(kind).complaint(kind)
    assert not complaint, complaint


def test_each_kind_changes_what_the_function_gives(session: object) -> None:
    steady = {name for name, kind in KINDS.items() if len({*plain(kind, lambda k: 1)}) == 1}
    assert steady == {*_STEADY}


def test_there_are_kinds_of_all_groups() -> None:
    assert len(KINDS) >= 400
    assert {kind.make.__module__ for kind in KINDS.values()} == {
        module.__name__ for module in GROUPS.values()
    }
