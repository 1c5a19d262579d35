"""Comments are sentences: none begins with a word that only goes on with what stands elsewhere.

In the two packages and in what the tests share, a comment also stands above what it explains, begins as a
sentence and ends with a full stop.
"""

from __future__ import annotations

import re
import tokenize
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("distruntime", "worker", "tests", "benchmarks", "examples", "docs")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
STRICT = [
    *(path for folder in ("distruntime", "worker", "tests/help") for path in (ROOT / folder).rglob("*.py")),
    ROOT / "tests" / "conftest.py",
]

FRAGMENT = re.compile(r"(of|which|whose|the same)\b", re.IGNORECASE)
AFTER_A_HASH = re.compile(rf"#[# ]*{FRAGMENT.pattern}", re.IGNORECASE)
# A sentence may begin with code, or with one of these names, which are written in lower case.
NAMES = "glibc|gloo|libzmq|malloc|mkstemp|msgpack|numpy|pyzmq|safetensors|setdefault|stdin|torch|transformers"
BEGINS = re.compile(rf"[A-Z0-9`\"]|[\w/]+(\.\w|\()|({NAMES})\b")
# What begins with these words is a phrase, as "Seconds between looks" or "Whether it is on".
PHRASE = re.compile(r"(Bytes|Characters|Else|Seconds|Whether)\b")
HEADING = re.compile(r"-- .+ --")
PRAGMA = re.compile(r"(type: ignore|noqa|fmt: )")


def comments(path: Path) -> list[tuple[int, str, bool]]:
    """Return the line and the words of every comment, and whether it has lines of its own.

    Comments on lines of their own that follow each other are one.
    """
    before = -1
    found: list[tuple[int, str, bool]] = []
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                number, column = token.start
                alone = not token.line[:column].strip()
                words = token.string.lstrip("# ")
                if alone and before == number - 1:
                    start, first, _ = found[-1]
                    found[-1] = start, f"{first} {words}", True
                else:
                    found.append((number, words, alone))
                before = number if alone else -1
    return found


def fragments(path: Path) -> list[str]:
    # Reading the comments of all files takes 15 s, and few files have such a word behind a hash at all.
    if not AFTER_A_HASH.search(path.read_text(encoding="utf-8")):
        return []
    return [f"line {number}: {words}" for number, words, _ in comments(path) if FRAGMENT.match(words)]


def not_sentences(path: Path) -> list[str]:
    """Return the comments that stand behind code, or do not look like sentences."""
    found = []
    for number, words, alone in comments(path):
        if PRAGMA.match(words) or HEADING.match(words):
            continue
        if not alone:
            found.append(f"line {number}, behind code: {words}")
        elif not BEGINS.match(words) or PHRASE.match(words) or not words.endswith("."):
            found.append(f"line {number}: {words}")
    return found


def by_file(paths: list[Path], find: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """Return what is found in files, without those in which nothing is."""
    return {str(path.relative_to(ROOT)): found for path in paths if (found := find(path))}


def test_no_comment_begins_as_a_fragment() -> None:
    assert by_file(FILES, fragments) == {}


def test_comments_are_sentences_above_what_they_explain() -> None:
    assert by_file(STRICT, not_sentences) == {}


def test_a_fragment_is_found(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    lines = [
        "x = 1  # of the session",
        "# A sentence that goes on in a line",
        "# of its own.",
        "y = 2  # Whose?",
    ]
    path.write_text("\n".join([*lines, "z = 3  # offset", "# the same as above", ""]), encoding="utf-8")
    assert fragments(path) == ["line 1: of the session", "line 4: Whose?", "line 6: the same as above"]


def test_what_is_no_sentence_is_found(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    lines = [
        "# -- a heading ----------",
        "",
        "# torch names this, and `x` holds",
        "# it for a while.",
        "x = 1  # type: ignore[name-defined]",
        "y = 2  # Seconds.",
        "# the queue of answers",
        "z = 3",
        "# Whether the queue is full.",
        "# It may be.",
        "w = 4",
        "# The queue is full",
    ]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    assert not_sentences(path) == [
        "line 6, behind code: Seconds.",
        "line 7: the queue of answers",
        "line 9: Whether the queue is full. It may be.",
        "line 12: The queue is full",
    ]
