"""The magics of IPython."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest

import distruntime as dr

interactive = pytest.importorskip("IPython.core.interactiveshell")


@pytest.fixture
def shell(session: object) -> Iterator[Any]:
    # What a test types is no history of the user's.
    config = pytest.importorskip("traitlets.config").Config({"HistoryManager": {"hist_file": ":memory:"}})
    made = interactive.InteractiveShell.instance(config=config)
    made.run_cell("import torch, distruntime as dr\n%load_ext distruntime").raise_error()
    yield made
    interactive.InteractiveShell.clear_instance()


def test_a_cell_runs_on_a_node(shell: Any) -> None:
    found = shell.run_cell("%%on 1\nx = torch.ones(2)\ny = x + 1\ny")
    found.raise_error()
    assert found.result.place == dr.place(1) and shell.user_ns["x"].place == dr.place(1)
    assert found.result.tolist() == [2, 2]
    # The context ends with the cell.
    shell.run_cell("z = torch.ones(2)").raise_error()
    assert type(shell.user_ns["z"]) is not type(shell.user_ns["x"]) or shell.user_ns["z"].place != dr.place(1)


def test_a_cell_runs_where_a_name_leads(shell: Any) -> None:
    shell.user_ns["there"] = dr.place(1, "cpu")
    shell.user_ns["mesh"] = dr.init_device_mesh("cpu", (2,))
    for line, place in (("there", dr.place(1)), ("0 cpu", dr.place(0))):
        found = shell.run_cell(f"%%on {line}\ntorch.zeros(3)")
        found.raise_error()
        assert found.result.place == place
    found = shell.run_cell("%%on mesh\ntorch.zeros(3, device='remote')")
    found.raise_error()
    assert len(found.result.place.members) == 2


def test_its_lines_have_the_number_of_the_cell(shell: Any) -> None:
    number = shell.execution_count
    shell.run_cell("%%on 1\nkept = torch.ones(12345)", store_history=True).raise_error()
    assert f"In[{number}]:2   kept = torch.ones(12345)" in repr(dr.memory())


@pytest.mark.parametrize("line", ["", "nowhere", "1 2 3", "torch"])
def test_what_is_no_place_says_what_is(shell: Any, line: str) -> None:
    found = shell.run_cell(f"%%on {line}\nx = 1")
    with pytest.raises(dr.errors.UsageError, match=r"got %%on.*expected a node's number, as %%on 1"):
        found.raise_error()
    assert "magics.py" not in "".join(traceback.format_tb(found.error_in_exec.__traceback__.tb_next))


def test_an_error_names_the_cells_line(shell: Any) -> None:
    found = shell.run_cell(
        "%%on 0\nx = torch.ones(3)\nbad = x[torch.tensor([7], device=x.device)]\nbad.tolist()"
    )
    with pytest.raises(IndexError, match=r"issued at (In \[\d+\]|<ipython-input-\S+>|\S+):3  "):
        found.raise_error()


def test_a_semicolon_hides_the_value(shell: Any) -> None:
    found = shell.run_cell("%%on 0\ntorch.ones(3);")
    found.raise_error()
    assert found.result is None


@pytest.mark.parametrize("cell", ["await later()", "x = [y async for y in z]", "async with a: pass"])
def test_a_cell_that_awaits_says_what_to_write(shell: Any, cell: str) -> None:
    found = shell.run_cell(f"%%on 1\n{cell}")
    with pytest.raises(dr.errors.UsageError, match=r"got a cell with await.*`with dr.on\(1\):`"):
        found.raise_error()
    # A function may be made there.
    shell.run_cell(f"%%on 1\nasync def f():\n    {cell}").raise_error()
