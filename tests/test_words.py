"""Comments are sentences: none begins with a word that only goes on with what stands elsewhere."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("distruntime", "worker", "tests", "benchmarks", "examples", "docs")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

FRAGMENT = re.compile(r"(of|which|whose|the same)\b", re.IGNORECASE)


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Return the line and the words of every comment.

    Comments on lines of their own that follow each other are one.
    """
    before = 0
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                number, column = token.start
                alone = not token.line[:column].strip()
                if not (alone and before == number - 1):
                    yield number, token.string.lstrip("# ")
                before = number if alone else 0


def fragments(path: Path) -> list[str]:
    return [f"line {number}: {words}" for number, words in comments(path) if FRAGMENT.match(words)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_comment_begins_as_a_fragment(path: Path) -> None:
    assert fragments(path) == []


def test_a_fragment_is_found(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    lines = [
        "x = 1  # of the session",
        "# A sentence that goes on in a line",
        "# of its own.",
        "y = 2  # Whose?",
    ]
    path.write_text("\n".join([*lines, "z = 3  # offset", "# the same as above", ""]))
    assert fragments(path) == ["line 1: of the session", "line 4: Whose?", "line 6: the same as above"]
