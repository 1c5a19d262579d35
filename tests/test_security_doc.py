"""docs/security.md promises nothing without a test: each test that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def names() -> set[str]:
    """Return the names of all tests of the suite."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= {
            node.name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        }
    return found


def test_each_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 30
    assert named <= names(), named - names()


def test_each_row_about_an_attacker_names_a_test_or_says_that_it_can() -> None:
    _, _, attackers = PAGE.partition("## A stranger")
    rows = [
        line for line in attackers.splitlines() if line.startswith("| ") and not line.endswith("| shown by |")
    ]
    assert len(rows) > 20
    for row in rows:
        assert "`test_" in row.rsplit("|", 2)[1] or "trusted with its tensors" in row, row
