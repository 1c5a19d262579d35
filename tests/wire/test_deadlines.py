"""Every deadline has a default, a variable and a row in docs/sessions.md."""

from __future__ import annotations

import datetime
import inspect
import re
from pathlib import Path

import pytest

import distruntime as dr
from distruntime.wire.deadlines import DEADLINES, GRACE, Deadline

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (Path(__file__).parents[2] / "docs" / "sessions.md").read_text(encoding="utf-8").splitlines()
    if "`DISTRUNTIME_" in line and line.startswith("|")
]


def test_the_page_has_each_deadline() -> None:
    shown = [
        [
            d.name,
            f"{d.seconds:g}",
            "`" + d.argument.replace(", ", "`, `") + "`" if d.argument else "",
            f"`{d.variable}`",
            d.meaning,
        ]
        for d in DEADLINES
    ]
    assert shown == ROWS


@pytest.mark.parametrize("deadline", DEADLINES, ids=lambda d: d.name)
def test_its_argument_exists(deadline: Deadline) -> None:
    for function, argument in re.findall(r"(\w+)\((\w+)=\)", deadline.argument):
        (home,) = [part for part in (dr, dr.distributed, dr.profiler) if function in part.__all__][:1]
        assert argument in inspect.signature(getattr(home, function)).parameters


@pytest.mark.parametrize("deadline", DEADLINES, ids=lambda d: d.name)
def test_the_environment_sets_it_and_an_argument_comes_first(
    deadline: Deadline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(deadline.variable, raising=False)
    assert deadline.get() == deadline.seconds
    monkeypatch.setenv(deadline.variable, "7.5")
    assert deadline.get() == 7.5
    assert deadline.get(3) == 3.0 and deadline.get(datetime.timedelta(minutes=2)) == 120.0


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "inf"])
def test_a_variable_that_makes_no_sense(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GRACE.variable, value)
    with pytest.raises(
        dr.errors.ConfigurationError, match=f"{GRACE.variable} is a number of seconds above 0.*got '{value}'"
    ):
        GRACE.get()


@pytest.mark.parametrize("value", [True, -3, "x", float("inf"), object(), datetime.timedelta(seconds=-1)])
def test_an_argument_that_makes_no_sense(value: object) -> None:
    with pytest.raises(dr.errors.ConfigurationError, match="grace is a number of seconds above 0"):
        GRACE.get(value, "grace")
