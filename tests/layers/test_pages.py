"""docs/layers.md and docs/testing.md show what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import distruntime as dr
from processes import STARTING

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_show_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    shown = 0
    dr.shutdown()
    with dr.init_master_worker(world_size=4, quiet=True, timeout=STARTING):
        for name in ("layers", "testing"):
            page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
            page, begun = re.subn(r"\ndr\.init_master_worker\(.*", "", page)
            assert begun == 1
            names: dict[str, Any] = {}
            for code, text in re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", page, flags=re.S):
                exec(code, names)
                assert capsys.readouterr().out == text
                shown += bool(text)
    assert shown == 6
