"""docs/tutorial.md can be followed from top to bottom, through real sshds and for a second user.

For root, on Linux, with openssh-server.
"""

from __future__ import annotations

import doctest
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pages import follow, of_any_machine, programs, steps
from processes import ROOT, until
from sshd import Account, unavailable

_WHY = unavailable()
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY)

# What these commands do is done here already.
INSTALLS = ("python3 -m venv ", ". ~/dr/", "pip install ")
# How long something took, and so what took longest, differs from run to run.
FIGURES = ("distruntime why-slow ",)


@pytest.fixture
def account() -> Iterator[Account]:
    with Account() as made:
        for name in ("gpubox", "gpu1", "gpu2"):
            made.ready_machine(name)
        yield made


def shown(text: str) -> list[str]:
    """Return the lines that the page shows or a step prints, without what differs from run to run."""
    # The page's reader has installed it elsewhere. A busy machine makes the program wait more often.
    text = re.sub(r"\S+/bin/python\S*", "PYTHON", text)
    return of_any_machine(re.sub(r"waited for them \d+ times?", "waited for them", text))


@pytest.mark.timeout(300)
@pytest.mark.slow(reason="starts nine workers in six sessions, half of them over ssh")
def test_the_tutorial_can_be_followed_from_top_to_bottom(account: Account, tmp_path: Path) -> None:
    todo = steps((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))
    todo = [step for step in todo if not step.text.startswith(INSTALLS)]
    path = os.pathsep.join([str(account.bin), programs(tmp_path / "bin")])
    printed = follow(todo, tmp_path, PATH=path, DISTRUNTIME_KEY=str(tmp_path / "key"))
    assert len(todo) > 30
    for step, text in zip(todo, printed, strict=True):
        if step.text.startswith(FIGURES):
            assert shown(text)[1] == shown(step.shows)[1], text
        else:
            want, got = ("\n".join([*shown(part), ""]) for part in (step.shows, text))
            same = doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)
            assert same, f"{step.text}\n{text}"
    until(lambda: not account.processes(), 30.0)
    assert account.left() == []
