"""State that a function reads, changed between calls of its program: each call sees what a plain one sees.

The kinds of state, and in which way a program is right about each, are in `tests/help/state_of_*.py`.
"""

from __future__ import annotations

import pytest

from distruntime.programs import watch
from program_states import GROUPS, KINDS, tried
from state_kinds import Kind


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_a_program_sees_the_change(session: object, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    # Beside other threads a draw is not refused, and pytest may have some.
    monkeypatch.setattr(watch, "_others", lambda: False)
    complaint = tried(kind).complaint(kind)
    assert not complaint, complaint


def test_there_are_kinds_of_all_groups() -> None:
    assert len(KINDS) >= 250
    assert {kind.make.__module__ for kind in KINDS.values()} == {
        module.__name__ for module in GROUPS.values()
    }
