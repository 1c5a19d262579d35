"""The mark `cluster`, as a user's own tests use it, in a pytest of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import pytest, torch
import distruntime as dr

seen = []

@pytest.mark.cluster(nodes=2, cuda=1)
def test_marked():
    assert [len(node.devices) for node in dr.nodes()] == [2, 2]
    seen.append(dr.nodes()[0].pid)

@pytest.mark.cluster(2, 1)
@pytest.mark.parametrize("k", [1, 2])
def test_shares_the_session(cluster, k):
    assert seen == [cluster.nodes[0].pid]

@pytest.mark.cluster(nodes=2, cuda=1)
def test_sets_a_place():
    assert torch.ones(1, device="remote").place == dr.place(0, "cuda:0")
    dr.set_place(1, "cpu")
    dr.set_implicit_waits(False)

@pytest.mark.cluster(nodes=2, cuda=1)
def test_begins_at_the_first_place():
    assert torch.ones(1, device="remote").place == dr.place(0, "cuda:0")
    assert seen == [dr.nodes()[0].pid]

@pytest.mark.cluster(nodes=2, cuda=1)
def test_leaves_a_failure():
    torch.ones(2, device="remote")[torch.full((1,), 9).to("remote")]

@pytest.mark.cluster(nodes=2, cuda=1)
def test_ends_its_session():
    dr.shutdown()

def test_uses_the_fixture(cluster):
    assert len(dr.nodes()) == 2 and seen != [cluster.nodes[0].pid]

def test_not_marked():
    pass

@pytest.mark.cluster(gpus=1)
def test_wrong():
    pass
"""


def _pytest(folder: Path, *options: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "worker")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    return done.stdout + done.stderr


@pytest.mark.slow(reason="runs pytest in a process of its own, 9 s")
def test_a_marked_test_has_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS, encoding="utf-8")
    # Where distruntime is installed, pytest finds the plugin by itself, under the other name.
    out = _pytest(tmp_path, "-p", "no:distruntime", "-p", "distruntime.pytest_plugin", "-rA")
    passed = {name for name in re.findall(r"^PASSED .*::(\S+)", out, re.M)}
    assert passed >= {"test_marked", "test_shares_the_session[1]", "test_shares_the_session[2]"}, out
    assert passed >= {"test_sets_a_place", "test_begins_at_the_first_place"}, out
    assert passed >= {"test_ends_its_session", "test_uses_the_fixture", "test_not_marked"}, out
    assert re.findall(r"^ERROR .*::(\S+)", out, re.M) == ["test_leaves_a_failure", "test_wrong"], out
    assert "IndexError" in out and "got {'nodes': 2, 'cuda': 0, 'gpus': 1}" in out


def test_the_plugin_alone_imports_no_torch() -> None:
    code = "import sys, distruntime.pytest_plugin; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.stdout == "False\n", done.stderr
