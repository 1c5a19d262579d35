"""The record of what has run, and when, and what the page shows of it: the table and the reasons.

A line of `record.jsonl` is one file in one mode: all of its tests, a slice of them, or a sample. A later run
replaces the line of the same tests and keeps all others, so the record grows from day to day.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from expected import KINDS, NOT_RUN, OPEN, Cause, cause_of
from rows import DEFAULT, DEVICE, LOCAL, MESH, SPMD, Row

SHOWN = [kind for kind in KINDS if kind != NOT_RUN]
HEADING = ["file", "mode", "date", "tests", "run", "passed", "skipped", *SHOWN, "unexplained"]
SAMPLE = "sample"
# The row of the files in which nothing has failed.
FINE = "no failure"
# A page names no reason that holds for fewer tests, unless it is a defect of this project.
FEW = 5
WHOLE = "1/1"
PATH = Path(__file__).with_name("record.jsonl")


class Group(Protocol):
    """Tests that ran in one mode."""

    mode: str
    rows: list[Row]
    of: dict[str, int]


@dataclass
class Entry:
    """A line of the record."""

    file: str
    mode: str
    date: str
    # WHOLE, another slice such as "3/20", or SAMPLE.
    part: str
    # How many tests the file has.
    of: int
    # How many tests passed, were skipped, failed for a reason of a kind, or for none.
    counts: dict[str, int] = field(default_factory=dict)
    # For how many tests each reason holds, as "kind: reason".
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def run(self) -> int:
        return sum(self.counts.values())

    def replaces(self, old: Entry) -> bool:
        """A sample makes room for whole files, and slices for slices of another size."""
        if (self.file, self.mode) != (old.file, old.mode):
            return False
        mine, theirs = (part.partition("/")[2] for part in (self.part, old.part))
        return self.part == old.part or SAMPLE in (self.part, old.part) or mine != theirs

    def cells(self) -> list[str]:
        kinds = [str(self.counts.get(kind) or "") for kind in (*SHOWN, "unexplained")]
        fine = [str(self.counts.get("passed", 0)), str(self.counts.get("skipped") or "")]
        return [self.file, self.mode, self.date, str(self.of), str(self.run), *fine, *kinds]


def entries(found: Sequence[Group], causes: list[Cause], part: str, date: str) -> Iterator[Entry]:
    """Judge what ran: yield an entry for each file."""
    for group in found:
        for file, of in group.of.items():
            counts: Counter[str] = Counter()
            why: Counter[str] = Counter()
            for row in group.rows:
                if row.file != file:
                    continue
                cause = cause_of(row, causes) if row.outcome == "failed" else None
                unexplained = "unexplained" if row.outcome == "failed" else row.outcome
                counts[cause.kind if cause else unexplained] += 1
                if cause:
                    why[f"{cause.kind}: {cause.why}"] += 1
            yield Entry(file, group.mode, date, part, of, dict(counts), dict(why))


def read(path: Path) -> list[Entry]:
    if not path.exists():
        return []
    return [Entry(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, kept: Sequence[Entry]) -> None:
    lines = sorted(json.dumps(asdict(entry)) + "\n" for entry in kept)
    path.write_text("".join(lines), encoding="utf-8")


def with_new(kept: Sequence[Entry], new: Sequence[Entry]) -> list[Entry]:
    """Return the record after a run. What a sample has of a file that ran whole is not kept."""
    whole = {(entry.file, entry.mode) for entry in kept if entry.part != SAMPLE}
    new = [entry for entry in new if entry.part != SAMPLE or (entry.file, entry.mode) not in whole]
    # A file of which nothing ran leaves its old line.
    new = [entry for entry in new if entry.run]
    return [old for old in kept if not any(entry.replaces(old) for entry in new)] + new


def added_up(parts: Sequence[Entry], file: str = "", mode: str = "") -> Entry:
    """Return the sum of entries: of the slices of a file, or of all files."""
    counts: Counter[str] = Counter()
    why: Counter[str] = Counter()
    for entry in parts:
        counts.update(entry.counts)
        why.update(entry.reasons)
    one_file = bool(file)
    of = max(entry.of for entry in parts) if one_file else sum(entry.of for entry in parts)
    date = max(entry.date for entry in parts) if one_file else ""
    return Entry(file or "all", mode, date, WHOLE, of, dict(counts), dict(why))


def by_file(kept: Sequence[Entry]) -> list[Entry]:
    """Return one entry for each file and mode."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in kept:
        groups.setdefault((entry.mode, entry.file), []).append(entry)
    order = [DEVICE, DEFAULT, LOCAL, MESH, SPMD]
    ordered = sorted(groups, key=lambda one: (order.index(one[0]), one[1]))
    return [added_up(groups[mode, file], file, mode) for mode, file in ordered]


def in_rows(each: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the entries of a table's rows.

    Files of one mode share a row if no test of theirs has failed, and so do the others of one folder. What a
    row adds up stands by file in the record.
    """
    rows: dict[tuple[str, str], list[Entry]] = {}
    for entry in each:
        failed = any(entry.counts.get(kind) for kind in (*KINDS, "unexplained"))
        folder = entry.file.rpartition("/")[0]
        name = f"{folder}/" if folder else entry.file
        rows.setdefault((entry.mode, name if failed else FINE), []).append(entry)
    for (mode, name), group in rows.items():
        whole = added_up(group, group[0].file if len(group) == 1 else f"{name}, {len(group)} files", mode)
        yield replace(whole, date=max(entry.date for entry in group), of=sum(entry.of for entry in group))


def table(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, which reads well on a terminal too."""
    cells = [HEADING, *lines]
    widths = [max(len(line[k]) for line in cells) for k in range(len(HEADING))]
    for line in [HEADING, ["-" * width for width in widths], *lines]:
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |"


def reasons(whole: Entry) -> Iterator[str]:
    """Yield each cause with the number of tests that it explains."""
    order = list(KINDS)

    def place(one: tuple[str, int]) -> tuple[int, int]:
        return order.index(one[0].partition(": ")[0]), -one[1]

    rare = Counter[str]()
    for words, number in sorted(whole.reasons.items(), key=place):
        kind, _, why = words.partition(": ")
        if number < FEW and kind != OPEN:
            rare[kind] += number
        else:
            yield f"- {kind}, {number}: {why}"
    if rare:
        kinds = ", ".join(f"{kind}, {number}" for kind, number in rare.items())
        yield f"- reasons of fewer than five tests each, in `tests/torch_tests/expected.txt`: {kinds}"
    lost = sum(whole.counts.get(kind, 0) for kind in KINDS) - sum(whole.reasons.values())
    if lost:
        yield f"- {lost} more, of lines from before 2026-11-27: a reason each, which was not kept by file"


def shown(found: Sequence[Entry], *, together: bool = False) -> list[str]:
    """Return the table and the reasons of entries; files share rows where they stand `together`."""
    if not found:
        return []
    each = by_file(found)
    whole = added_up(each)
    rows = in_rows(each) if together else each
    return [*table([entry.cells() for entry in [*rows, whole]]), "", *reasons(whole)]


def on_page(page: Path, kept: Sequence[Entry], versions: str) -> None:
    """Write the page's tables: that of ranks, and that of the other modes."""
    ranks = [entry for entry in kept if entry.mode == SPMD]
    others = [entry for entry in kept if entry.mode != SPMD]
    for mark, some in (("table", others), ("table of spmd", ranks)):
        if some:
            whole = added_up(by_file(some))
            last = max(entry.date for entry in some)
            first = f"{last}: {whole.run} tests of {whole.of} have run in all, {versions}."
            rewrite(page, [first, "", *shown(some, together=True)], mark)


def rewrite(page: Path, words: Sequence[str], mark: str) -> None:
    """Put words into the page between its two marks."""
    start, end = f"<!-- {mark} -->\n", f"<!-- end of the {mark} -->\n"
    before, first, rest = page.read_text(encoding="utf-8").partition(start)
    _, second, after = rest.partition(end)
    if not (first and second):
        raise ValueError(f"{page} has no lines {start!r} and {end!r}")
    page.write_text("".join([before, first, "\n".join(words), "\n", second, after]), encoding="utf-8")
