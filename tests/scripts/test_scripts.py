"""The lane of other people's scripts: its list, what is equal to it, and what is worse than expected."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lane_modules import modules_of

HERE = Path(__file__).parent
SAID = (
    '"cuda" meant the workers: 1901 values were made there, and this process waited for them 59 times. '
    "Only pretended: torch.cuda.nvtx.mark (2)\n"
)


@pytest.fixture(scope="module")
def lane() -> Iterator[ModuleType]:
    pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML, and the libraries need 3.11")
    # `run` puts these two into the path.
    with modules_of(HERE, HERE.parent / "ecosystem") as module:
        yield module("run")


def test_every_entry_of_the_list_names_what_is_there(lane: Any) -> None:
    scripts, commits = lane.read(HERE / "list.toml")
    assert {script.repository for script in scripts} == set(commits)
    assert all(re.fullmatch(r"[0-9a-f]{40}", commit) for commit in commits.values())
    makers = set(re.findall(r"@maker\ndef (\w+)\(", (HERE / "data.py").read_text(encoding="utf-8")))
    keys = [script.key for script in scripts]
    assert len(keys) >= 60 and len(commits) >= 20
    assert sorted(set(keys)) == sorted(keys)
    assert {name for script in scripts for name in script.data} <= makers
    for script in scripts:
        for pattern in (script.result, script.until, script.fails):
            re.compile(pattern)
        assert set(script.preamble.split("+")) <= {"", "seed", "draws", "sums", "cuda"}
        assert (script.close > 1e-4) == bool(script.why_close), f"{script.key} says no reason for `close`"


def script(lane: Any, **more: Any) -> Any:
    return lane.Script("ann/repository", "train.py --device={device}", r"loss ([\d.]+)|word (\w+)", **more)


def test_how_a_script_is_run(lane: Any) -> None:
    tried = script(lane, preamble="draws", cuda="--gpu 0")
    commands = [lane.command(tried, mode)[1:] for mode in ("here", "as_cuda", "own")]
    preamble = [str(HERE / "preamble.py"), "draws", "train.py"]
    assert commands == [
        [*preamble, "--device=cpu"],
        ["-m", "distruntime", "run", "--as-cuda", *preamble, "--device=cuda", "--gpu", "0"],
        ["-m", "distruntime", "run", *preamble, "--device=remote", "--gpu", "0"],
    ]


def test_results_are_found_in_the_output_and_in_files(lane: Any, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"accuracy": [0.5, 1], "seconds": 3}', encoding="utf-8")
    (tmp_path / "log.txt").write_text("loss 2.5\n", encoding="utf-8")
    tried = script(lane, files=["*.json", "*.txt"])
    assert lane.numbers(tried, "loss 1.5 word no\nother 3\n", tmp_path) == {
        "result.json accuracy": [0.5, 1.0],
        "0": [1.5, 2.5],
        "1": ["no"],
    }


@pytest.mark.parametrize(
    ("here", "there", "expected", "settled"),
    [
        ({}, {}, "works as written", True),
        ({}, {"numbers": {"0": [1.6]}}, "differs", False),
        ({}, {"values": 3}, "stays in this process", False),
        ({}, {"error": "ValueError: no"}, "fails", False),
        ({}, {"error": "ValueError: no", "output": "it needs Triton"}, "fails", True),
        ({"error": "ModuleNotFoundError: No module named 'six'"}, {}, "not run", False),
        ({"error": "KeyError: 3"}, {}, "fails", False),
        ({"numbers": {}}, {}, "fails", False),
    ],
)
def test_what_becomes_of_a_script(lane: Any, here: Any, there: Any, expected: str, settled: bool) -> None:
    runs = [
        lane.Run(**{"numbers": {"0": [1.5]}, "seconds": 1.0, "values": 900, **more}) for more in (here, there)
    ]
    result, why, known = lane.judge(script(lane, fails="needs Triton"), *runs)
    assert result == expected
    assert lane.Row("ann/repository", "train.py", result, why, expected=known).settled is settled


def test_a_script_runs_in_a_copy_of_its_commit_until_a_line(
    lane: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    clone = tmp_path / "ann" / "repository"
    clone.mkdir(parents=True)
    lines = [
        "import os, time",
        "print('loss 1.5', os.path.exists('kept'), flush=True)",
        "while 1: time.sleep(9)",
    ]
    (clone / "train.py").write_text("\n".join(lines), encoding="utf-8")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "-m", "A script"]):
        subprocess.run(["git", *words], cwd=clone, check=True, capture_output=True)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, check=True, capture_output=True, text=True)
    commit = done.stdout.strip()
    (clone / "kept").touch()
    assert lane.clone("ann/repository", commit, tmp_path) == ""
    found = lane.run(script(lane, until="loss"), "here", commit, tmp_path, tmp_path)
    assert (found.numbers, found.error) == ({"0": [1.5]}, "") and "False" in found.output


def test_the_end_of_a_run_tells_what_was_remote(lane: Any) -> None:
    found = lane.programs.SUMMARY.search(f"loss 1.5\n{SAID}")
    assert found.groups() == ("1901", "59", "Only pretended: torch.cuda.nvtx.mark (2)")
    assert lane.last_words(f"Traceback\nValueError: no\n{SAID}") == "ValueError: no"


def test_draws_are_the_same_on_every_device_with_the_preamble(tmp_path: Path) -> None:
    file = tmp_path / "draws.py"
    lines = [
        "import torch",
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'",
        "print([round(torch.rand(1).item(), 6), round(torch.rand(1, device=device).item(), 6)])",
        "print(torch.nn.functional.dropout(torch.ones(9).to(device)).sum().item())",
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    preamble = [str(HERE / "preamble.py"), "draws", str(file)]
    outputs = [
        subprocess.run(
            [sys.executable, *ours, *preamble], capture_output=True, text=True, check=True, timeout=100
        ).stdout
        for ours in ((), ("-m", "distruntime", "run", "--as-cuda"))
    ]
    assert outputs[0] == outputs[1] and len(outputs[0].splitlines()) == 2


def test_data_outside_of_the_copy_are_nobodys_and_go(lane: Any, tmp_path: Path, monkeypatch: Any) -> None:
    made, there = tmp_path / "made", tmp_path / "there"
    (made / "text").mkdir(parents=True)
    (made / "text" / "input.txt").write_text("loss 2.5", encoding="utf-8")
    tried = script(lane, data={"text": str(there)})

    def unpack(script: Any, commit: str, clones: Path, folder: Path) -> None:
        (folder / "train.py").write_text(f"print(open('{there}/input.txt').read())", encoding="utf-8")

    monkeypatch.setattr(lane, "unpack", unpack)
    monkeypatch.setattr(lane, "clone", lambda repository, commit, clones: "")
    found = lane.run(tried, "here", "c0ffee", tmp_path, made)
    assert (found.numbers, found.error, there.exists()) == ({"0": [2.5]}, "", False)
    there.mkdir()
    row = lane.tried(tried, "c0ffee", tmp_path, True)
    assert (row.result, row.why, there.exists()) == ("not run", f"{there} is there already", True)


def test_a_notebook_that_says_cuda_runs_on_the_cpu_with_the_preamble(tmp_path: Path) -> None:
    pytest.importorskip("IPython", reason="IPython runs notebooks")
    pytest.importorskip("nbformat", reason="IPython reads notebooks by it")
    cells = [
        "%time 1 + 1\nimport torch",
        "x = torch.ones(3, device='cuda').cuda() + torch.ones(3).to('cuda:0')\n",
        "net = torch.nn.Linear(3, 1, bias=False).cuda().to(torch.device('cuda'))\nnet.weight.data.fill_(2)",
        "print('sum', torch.compile(net, backend='eager')(x).item(), x.device)",
    ]
    book = {
        "cells": [
            {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": cell}
            for cell in cells
        ],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    file = tmp_path / "book.ipynb"
    file.write_text(json.dumps(book), encoding="utf-8")
    command = [sys.executable, str(HERE / "preamble.py"), "seed+cuda", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert "sum 12.0 cpu" in done.stdout
