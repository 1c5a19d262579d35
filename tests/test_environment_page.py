"""docs/environment.md has each variable that the code reads, once; docs/sessions.md has the deadlines."""

from __future__ import annotations

import re
from pathlib import Path

from distruntime.wire.deadlines import DEADLINES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
OURS, OTHERS = PAGE.split("## Variables of other programs")


def rows(text: str) -> list[list[str]]:
    """Return the rows of tables that begin with a variable."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [row for row in cells if row[0].startswith("`")]


def sources() -> str:
    files = [*(ROOT / "distruntime").rglob("*.py"), *(ROOT / "worker").rglob("*.py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def test_the_tables_have_each_variable_of_distruntime() -> None:
    in_code = set(re.findall(r"\bDISTRUNTIME_[A-Z_]*[A-Z]\b", sources()))
    assert len(in_code) > 15
    # tests/wire/test_deadlines.py compares the table of deadlines.
    here = in_code - {d.variable for d in DEADLINES}
    assert sorted(row[0] for row in rows(OURS)) == sorted(f"`{name}`" for name in here)
    assert "(sessions.md#deadlines)" in OURS


def test_the_variables_of_other_programs_are_those_in_the_code() -> None:
    code = sources()
    named = [name for row in rows(OTHERS) for name in re.findall(r"`([A-Z][A-Z_]+)`", row[0])]
    assert [name for name in named if name not in code] == []
    read = re.findall(r"environ\w*(?:\.get|\.setdefault|\.pop)?[(\[]\s*\"([A-Z][A-Z_]+)\"", code)
    ours = "DISTRUNTIME_"
    assert sorted({name for name in read if not name.startswith(ours) and name not in named}) == []
