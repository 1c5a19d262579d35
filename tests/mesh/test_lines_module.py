"""What users may call of `distruntime.lines`: every public name says what it does, and is on a page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import distruntime as dr

DOCS = Path(__file__).parents[2] / "docs"


def test_all_has_every_function_of_the_module_and_no_other() -> None:
    own = {name for name, value in vars(dr.lines).items() if inspect.getmodule(value) is dr.lines}
    assert {name for name in own if not name.startswith("_")} | {"Lines", "attention"} == set(
        dr.lines.__all__
    )


@pytest.mark.parametrize("name", dr.lines.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    value = getattr(dr.lines, name)
    assert value.__doc__
    assert re.search(
        rf"`(dr\.lines\.)?{name}`|dr\.lines\.{name}\(", (DOCS / "meshes.md").read_text(encoding="utf-8")
    )
    if inspect.isfunction(value):
        assert "at once" in value.__doc__
        assert inspect.signature(value).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("name", [name for name in vars(dr.lines.Lines) if not name.startswith("_")])
def test_a_public_attribute_of_lines_is_documented(name: str) -> None:
    assert inspect.getdoc(inspect.getattr_static(dr.lines.Lines, name))


def test_the_reference_has_a_page_for_the_module() -> None:
    page = (DOCS / "reference" / "distruntime.lines.rst").read_text(encoding="utf-8")
    assert ".. automodule:: distruntime.lines\n" in page
