"""The lane of libraries: what it calls equal, and what it calls worse than expected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lane_modules import modules_of


@pytest.fixture
def run() -> Iterator[Any]:
    with modules_of(Path(__file__).parent) as module:
        yield module("run")


def script(device: str) -> dict[str, object]:
    return {}


def test_numbers_are_found_in_what_a_script_returns(run: Any) -> None:
    found = {"a": torch.tensor([1.5, 2.0]).bfloat16(), "b": [True, np.float32(3)]}
    assert run.numbers([found, ("x", 4)]) == [1.5, 2.0, 1.0, 3.0, "x", 4.0]


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({"a": [1.0, 100.0]}, 0.0),
        ({"a": [2.0, 100.0]}, 0.01),
        ({"a": [1.0, float("nan")]}, float("inf")),
        ({"a": [1.0]}, float("inf")),
        ({"b": [1.0, 100.0]}, float("inf")),
        ({"a": [1.0, "100"]}, float("inf")),
    ],
)
def test_a_difference_is_relative_to_the_largest_number(run: Any, there: Any, expected: float) -> None:
    assert run.difference({"a": [1.0, 100.0]}, there) == expected


JUDGED: dict[str, Callable[[Any, Any], tuple[Any, str, bool]]] = {
    "equal": lambda run, case: (run.Outcome("c", {"a": [1.0]}, True), run.WORKS, False),
    "other numbers": lambda run, case: (run.Outcome("c", {"a": [2.0]}, True), run.DIFFERS, True),
    "not on the worker": lambda run, case: (run.Outcome("c", {"a": [1.0]}, False), run.HERE, True),
    "raised": lambda run, case: (run.Outcome("c", error="ValueError: x"), run.FAILS, True),
    "not possible": lambda run, case: (run.Outcome("c", not_run="no GPU"), run.NOT_RUN, False),
}


@pytest.mark.parametrize("name", JUDGED)
def test_what_is_worse_than_expected(run: Any, name: str) -> None:
    case = run.Case("a-library", "a script", script)
    there, result, worse = JUDGED[name](run, case)
    found, why = run.judge(case, run.Outcome("c", {"a": [1.0]}), there)
    assert found == result and run.Row(case, "1.0", found, why, 0).worse is worse
    expected = run.Case("a-library", "a script", script, fails="its own kernels")
    assert not run.Row(expected, "1.0", found, why, 0).worse


def test_the_table_of_a_page_is_written_anew(run: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- table -->\nold\n<!-- end of the table -->\nAfter.\n", encoding="utf-8")
    case = run.Case("torch", "a | b", script)
    rows = [run.Row(case, "1.0", run.WORKS, "", 3)]
    run.rewrite(page, list(run.table(rows, run.HEADING)), run.summary(rows))
    text = page.read_text(encoding="utf-8")
    assert text.startswith("Before.\n<!-- table -->\n") and text.endswith(
        "<!-- end of the table -->\nAfter.\n"
    )
    assert "old" not in text and "a \\| b" in text and "1 work as written" in text


def test_rows_that_agree_are_one(run: Any) -> None:
    names = [("torch", "a", run.WORKS, 3), ("timm", "b", run.WORKS, 0), ("torch", "c", run.WORKS, 0)]
    rows = [run.Row(run.Case(lib, tried, script), "1", found, "", n) for lib, tried, found, n in names]
    rows.append(run.Row(run.Case("torch", "d", script), "1", run.FAILS, "ValueError", 1))
    lines = list(run.table(rows, run.HEADING, run.ALIKE))
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]] == [
        ["torch", "1", "a; c", "works as written", "3; 0"],
        ["timm", "1", "b", "works as written", "0"],
        ["torch", "1", "d", "fails: ValueError", "1"],
    ]


def test_a_cell_without_words_is_a_dash_in_a_list(run: Any) -> None:
    grouped = run.table.__globals__["grouped"]
    assert grouped([["a", "x", ""], ["a", "", ""]], [0]) == [["a", "x; -", ""]]


SAID = (
    '"cuda" meant the workers: 1901 values were made there, and this process waited for them 59 times. '
    "Only pretended: torch.cuda.nvtx.mark (2)\n"
)
PRINTED = 'loss 1.5\n{"losses": [1.5, [2]], "word": "a", "where": "%s"}\n'


@pytest.mark.parametrize(
    ("there", "worst", "expected"),
    [
        ((0, PRINTED % "remote:0", SAID), 0.0, ""),
        ((0, PRINTED % "remote:0", SAID), 0.1, "differs"),
        ((0, PRINTED % "cpu", SAID), 0.0, "stays in this process"),
        ((0, PRINTED % "remote:0", ""), 0.0, "stays in this process: 0 values"),
        ((1, "", "Traceback\nValueError: no"), 0.0, "fails: ValueError: no"),
    ],
)
def test_a_script_for_cuda_is_to_do_the_same_work_on_the_worker(
    run: Any, there: tuple[int, str, str], worst: float, expected: str
) -> None:
    programs = run.programs
    here = programs.read(0, PRINTED % "cpu", "")
    found = programs.read(*there)
    assert programs.judge(here, found, worst, 1e-4).startswith(expected)
    assert here.numbers == {"losses": [1.5, 2.0], "word": ["a"]}
    if there[2] == SAID and not there[0]:
        assert (found.values, found.waits, found.pretended) == (1901, 59, "torch.cuda.nvtx.mark (2)")
