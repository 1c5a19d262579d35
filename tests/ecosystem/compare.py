"""What lanes of other people's programs share: how results are compared, and how a page gets its table."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

# It comes last, as some modules there have names of libraries' modules.
sys.path.append(str(Path(__file__).resolve().parents[1] / "help"))
from revision import revision

WORKS, CHANGED, DIFFERS, HERE, FAILS, NOT_RUN = (
    "works as written",
    "works with a change",
    "differs",
    "stays in this process",
    "fails",
    "not run",
)
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DISTRUNTIME_QUIET": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
}


class Cells(Protocol):
    """A row of a table."""

    def cells(self) -> list[str]: ...


def difference(here: dict[str, list[float | str]], there: dict[str, list[float | str]]) -> float:
    """Return the largest difference of two results, relative to the largest number of its kind."""
    if here.keys() != there.keys():
        return math.inf
    worst = 0.0
    for name, mine in here.items():
        if len(mine) != len(there[name]):
            return math.inf
        size = max((abs(x) for x in mine if isinstance(x, float) and math.isfinite(x)), default=0.0)
        for x, y in zip(mine, there[name]):
            if x == y or (x != x and y != y):
                continue
            if isinstance(x, str) or isinstance(y, str) or not math.isfinite(x - y):
                return math.inf
            worst = max(worst, abs(x - y) / max(size, 1e-6))
    return worst


def version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def grouped(lines: Sequence[list[str]], alike: Sequence[int]) -> list[list[str]]:
    """Make one line of those whose cells at `alike` agree, where the first of them stands.

    Its other cells are lists, all in one order. A cell without words is a dash there, unless all are.
    """
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for line in lines:
        groups.setdefault(tuple(line[k] for k in alike), []).append(line)
    found = []
    for group in groups.values():
        columns = [list(column) for column in zip(*group)]
        lists = ["; ".join(cell or "-" for cell in column) if any(column) else "" for column in columns]
        found.append([group[0][k] if k in alike else words for k, words in enumerate(lists)])
    return found


def table(rows: Sequence[Cells], heading: Sequence[str], alike: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of a table in Markdown, one for the rows that agree in the columns `alike`."""
    cells = [[cell.replace("|", "\\|") for cell in row.cells()] for row in rows]
    cells = grouped(cells, [heading.index(name) for name in alike]) if alike else cells
    widths = [min(60, max(len(line[k]) for line in [heading, *cells])) for k in range(len(heading))]
    for line in [heading, ["-" * width for width in widths], *cells]:
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |"


def rewrite(page: Path, lines: Sequence[str], words: str, mark: str = "table") -> None:
    """Put a table into the page, between its two marks."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition(f"<!-- end of the {mark} -->\n")
    if not (begin and end):
        raise ValueError(f"{page} has no lines `<!-- {mark} -->` and `<!-- end of the {mark} -->`")
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    head = f"{time.strftime('%Y-%m-%d')}, {revision()}, torch {version('torch')}, {machine}. {words}"
    text = "".join([before, begin, head, "\n\n", "\n".join(lines), "\n", end, after])
    page.write_text(text, encoding="utf-8")
