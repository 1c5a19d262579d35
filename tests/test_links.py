"""Links of Markdown files lead to a file, a heading or an address; the files that their text names exist."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
FOLDERS = ["benchmarks", "distruntime", "docs", "examples", "tests", "worker"]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[str]:
    for token in tokens(page):
        for child in token.children or []:
            if child.type in ("link_open", "image"):
                yield str(child.attrGet("href" if child.type == "link_open" else "src"))


def named_files(page: Path) -> Iterator[str]:
    """Yield each path of a Python file, from the root of the repository, that stands as code in the text."""
    for token in tokens(page):
        for child in token.children or []:
            if child.type == "code_inline":
                yield from re.findall(rf"\b(?:{'|'.join(FOLDERS)})/[\w/]+\.py\b", child.content)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to headings. From the second of a name on they end in a number."""
    found: Counter[str] = Counter()
    for opening, inline in pairwise(tokens(page)):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or [])
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found[name] += 1
    return {f"{name}-{k}" if k else name for name, times in found.items() for k in range(times)}


def fault(page: Path, link: str, root: Path = ROOT) -> str | None:
    """Return what is wrong with a link, None if nothing is. Nothing is asked for over the network."""
    address = urlsplit(link)
    if address.scheme == "mailto":
        return None if re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s]+", address.path) else "no address of a mailbox"
    if address.scheme or address.netloc:
        complete = address.scheme in ("http", "https") and address.hostname and "." in address.hostname
        return None if complete else "no https address"
    target = (page.parent / unquote(address.path)).resolve() if address.path else page
    if not target.is_relative_to(root):
        return "outside the repository"
    if not target.exists():
        return "no such file"
    if address.fragment and address.fragment not in (anchors(target) if target.suffix == ".md" else ()):
        return "no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    found = [(link, fault(page, link)) for link in links(page)]
    assert [(link, wrong) for link, wrong in found if wrong] == []


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert [name for name in named_files(page) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    """`tests/x.py::test_y` is a function of that file."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", text)
    missing = [
        (file, name)
        for file, name in named
        if not (ROOT / file).is_file() or f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_each_row_of_another_system_is_shown_by_something() -> None:
    page = ROOT / "docs" / "from_other_systems.md"
    rows = [line.split(" | ") for line in page.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    assert len(rows) > 110 and {len(row) for row in rows} == {3}
    # What there is no need for, and what is not there, has no test.
    told = re.compile(r"]\(|`(tests|examples)/\w|shown by")
    silent = [
        row for row in rows if not told.search(row[2]) and not row[1].startswith(("not needed", "not there"))
    ]
    assert silent == []


def test_the_pages_have_links_and_name_files() -> None:
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} <= {page.name for page in PAGES}
    assert sum(len(list(links(page))) for page in PAGES) > 30
    assert sum(len(list(named_files(page))) for page in PAGES) > 30


@pytest.mark.parametrize(
    "link, wrong",
    [
        ("other.md", None),
        ("other.md#what-it-is-1", None),
        ("#a-call-for-drx", None),
        ("https://pytorch.org/docs", None),
        ("mailto:ann@example.org", None),
        ("missing.md", "no such file"),
        ("other.md#what-it-is-2", "no such heading"),
        ("#missing", "no such heading"),
        ("data.txt#L3", "no such heading"),
        ("../../etc/hostname", "outside the repository"),
        ("https:/pytorch.org", "no https address"),
        ("htps://pytorch.org", "no https address"),
        ("https://pytorch", "no https address"),
        ("mailto:ann", "no address of a mailbox"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, link: str, wrong: str | None) -> None:
    page = tmp_path / "page.md"
    code = "`[c](code.md)`\n\n    [d](code.md)\n"
    page.write_text(
        f"# A call, for `dr.x`?\n| a | [b]({link}) |\n|---|---|\n\n[e]({link})\n\n{code}", encoding="utf-8"
    )
    (tmp_path / "other.md").write_text(
        "# What it is\n\n## What it is\n\n```\n# What it is\n```\n", encoding="utf-8"
    )
    (tmp_path / "data.txt").write_text("", encoding="utf-8")
    assert list(links(page)) == [link, link]
    assert fault(page, link, tmp_path) == wrong
