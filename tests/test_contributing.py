"""The five changes of CONTRIBUTING.md can be made as the page says: in a copy of the tree, and run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from distruntime.wire.messages import MESSAGES, PROTOCOL
from pages import programs
from processes import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WALKS = dict(
    re.findall(
        r"^### ([^\n]+)\n(.*?)(?=^##)", PAGE.partition("## Five changes in thirty minutes")[2], re.M | re.S
    )
)
# What a copy of the tree needs.
PARTS = ("distruntime", "worker", "docs", "examples", "tests", "pyproject.toml", "CONTRIBUTING.md")
# A command that is not run here, and why.
NOT_HERE = {"tests/help/fuzzing.py record": "it takes two minutes, and tests/hostile has what it checks"}
# So many files may be changed for one.
MOST = 4


def blocks(walk: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block of a walk."""
    return re.findall(r"^```(diff|python|console)\n(.*?)^```$", walk, re.M | re.S)


def pattern(lines: list[str]) -> str:
    """Return a regular expression for whole lines, in which `…` is the rest of one."""
    return "".join(f"{re.escape(line).replace('…', '.*')}\n" for line in lines)


def change(tree: Path, diff: str) -> None:
    """Make a change: the lines of the block without those that are added must stand in the file, once."""
    name, *lines = diff.splitlines()
    path = tree / name.removeprefix("--- ")
    text = path.read_text(encoding="utf-8")
    before = [line[1:] for line in lines if line[0] != "+"]
    found = re.findall(f"^{pattern(before)}", text, re.M)
    assert len(found) == 1, f"{path.name} has {before} {len(found)} times, expected once"
    kept = iter(found[0].splitlines())
    after = []
    for line in lines:
        old = next(kept) if line[0] != "+" else ""
        if line[0] == " ":
            after.append(old)
        elif line[0] == "-":
            removed = old
        else:
            # What `…` stood for is as it was.
            rest = removed[len(before[0].partition("…")[0]) :] if line.endswith("…") else ""
            after.append(line[1:].removesuffix("…") + rest)
    path.write_text(text.replace(found[0], "".join(f"{line}\n" for line in after)), encoding="utf-8")


def filled(text: str) -> str:
    numbers = {"OLD": PROTOCOL, "NEW": PROTOCOL + 1, "NUMBER": len(MESSAGES)}
    return re.sub(r"\b(OLD|NEW|NUMBER)\b", lambda found: str(numbers[found[0]]), text)


def test_there_are_five_changes() -> None:
    assert len(WALKS) == 5
    for walk in WALKS.values():
        kinds = [kind for kind, _ in blocks(walk)]
        assert kinds[-1] == "console"
        changed = {text.splitlines()[0] for kind, text in blocks(walk) if kind == "diff"}
        made = [text for kind, text in blocks(walk) if kind == "python" and "/" in text.splitlines()[0]]
        assert len(changed) + len(made) <= MOST


def test_a_change_that_does_not_fit_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("one\ntwo\ntwo\n", encoding="utf-8")
    change(tmp_path, "--- file\n o…\n+more\n")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "one\nmore\ntwo\ntwo\n"
    for wrong in ("--- file\n two\n+more\n", "--- file\n three\n+more\n"):
        with pytest.raises(AssertionError, match="expected once"):
            change(tmp_path, wrong)


@pytest.mark.timeout(600)
@pytest.mark.slow(reason="makes a copy of the tree for each change, and starts workers in it")
@pytest.mark.parametrize("name", WALKS)
def test_a_change_is_made_as_the_page_says(name: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tree / part)
        else:
            shutil.copy(ROOT / part, tree / part)
    home = tmp_path / "home"
    home.mkdir()
    variables = {
        **os.environ,
        "PATH": programs(tmp_path / "programs"),
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "worker")]),
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        # A busy machine takes long to start a worker from a fresh tree.
        "DISTRUNTIME_TIMEOUT": "200",
        "DISTRUNTIME_STATE": str(home / ".local" / "state" / "distruntime"),
    }
    ran = 0
    for kind, text in blocks(WALKS[name]):
        if kind == "diff":
            change(tree, filled(text))
        elif kind == "python":
            (tree / text.splitlines()[0].removeprefix("# ")).write_text(text, encoding="utf-8")
        else:
            for command in re.findall(r"^\$ (.+)$", text, re.M):
                if any(part in command for part in NOT_HERE):
                    continue
                done = subprocess.run(
                    command, shell=True, cwd=tree, env=variables, capture_output=True, text=True, timeout=500
                )
                assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
                ran += 1
    assert ran
