"""What `docs/limits.md` says that remote tensors refuse, they refuse, in the class it says, and name a
remedy.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.session.session import Session

PAGE = (Path(__file__).parent.parent / "docs" / "limits.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \| `(\w+)` \| [^|]+ \| [^|]+ \|$", PAGE, re.M)


def test_the_page_has_rows() -> None:
    assert len(ROWS) > 15


@pytest.mark.parametrize("code, error", ROWS, ids=[code for code, _ in ROWS])
def test_it_refuses(session: Session, code: str, error: str) -> None:
    x, local = torch.ones(3, 3, device="remote"), torch.ones(3, 3)
    y = x.to(node=1)
    module = torch.nn.Linear(3, 1).to("remote")
    names: dict[str, Any] = {
        "x": x,
        "y": y,
        "local": local,
        "module": module,
        "torch": torch,
        "dr": dr,
        "pickle": pickle,
    }
    expected = (
        getattr(dr.errors, error, None)
        or {"TypeError": TypeError, "RuntimeError": RuntimeError, "NotImplementedError": NotImplementedError}[
            error
        ]
    )
    with pytest.raises(expected) as caught:
        exec(code, names)
    assert "lazy" not in str(caught.value) or error == "RuntimeError"  # that one is torch's own text
    dr.synchronize()  # what was raised is not raised again
    assert (x + 1).sum().item() == 18
