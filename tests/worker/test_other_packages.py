"""Operators of other packages (torchvision's): the worker imports the package that their namespace names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from processes import ListeningWorker

PACKAGE = """
import torch

torch.library.define("pictures_for_tests::brighter", "(Tensor x, float by) -> Tensor")
torch.library.define("pictures_for_tests::kept", "(Tensor x) -> Tensor")

@torch.library.impl("pictures_for_tests::brighter", "cpu")
def brighter(x, by):
    return x + by

@torch.library.register_fake("pictures_for_tests::brighter")
def _(x, by):
    return torch.empty_like(x)

# There is a kernel for GPUs only, as FlashAttention's package has it.
@torch.library.custom_op("pictures_for_tests::flash", mutates_args=(), device_types="cuda")
def flash(x: torch.Tensor) -> torch.Tensor:
    return x

@flash.register_fake
def _(x):
    return torch.empty_like(x)

# Its result's shape depends on values, and it has no fake kernel, as torchvision's nms.
@torch.library.impl("pictures_for_tests::kept", "cpu")
def kept(x):
    return x[x > 1]
"""


# The compiled part of a package was built against another torch, as the loader says it.
FAILS = """raise OSError("broken_for_tests.so: undefined symbol: _ZN2at4_ops5empty4callE")\n"""
WORKS_HERE = """
import torch

torch.library.define("broken_for_tests::twice", "(Tensor x) -> Tensor")

@torch.library.register_fake("broken_for_tests::twice")
def _(x):
    return torch.empty_like(x)
"""


def test_a_worker_imports_the_package_of_an_operator(
    fresh_session: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pictures_for_tests.py").write_text(PACKAGE, encoding="utf-8")
    (tmp_path / "broken_for_tests.py").write_text(FAILS, encoding="utf-8")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "broken_for_tests.py").write_text(WORKS_HERE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "here")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0", under=("env",), PYTHONPATH=path)
    try:
        fresh_session(workers=[worker.address])
        import pictures_for_tests  # type: ignore[import-not-found]  # noqa: F401

        x = torch.arange(3.0, device=REMOTE)
        assert torch.ops.pictures_for_tests.brighter(x, 1.5).tolist() == [1.5, 2.5, 3.5]
        assert torch.ops.pictures_for_tests.kept(x).tolist() == [2.0]

        with pytest.raises(NotImplementedError) as failed:
            torch.ops.pictures_for_tests.flash(x).tolist()
        text = str(failed.value)
        assert "Could not run 'pictures_for_tests::flash' with arguments from the 'CPU' backend" in text
        assert "registered at" not in text and "x.to(dr.place(node, device))" in text
        assert f"issued at {__file__}" in text

        # A package that does not load there costs its own operator and nothing else.
        import broken_for_tests  # type: ignore[import-not-found]  # noqa: F401

        with pytest.raises(NotImplementedError) as failed:
            torch.ops.broken_for_tests.twice(x).tolist()
        text = str(failed.value)
        assert (
            f"broken_for_tests::twice.default does not exist in torch {torch.__version__} on this wor" in text
        )
        assert "its import fails with OSError: broken_for_tests.so: undefined symbol" in text
        assert "install the build for this one on the worker" in text
        assert "on node 0" in text and f"torch {torch.__version__} is here" in text
        assert f"issued at {__file__}" in text
        assert (x + 1).tolist() == [1.0, 2.0, 3.0]
        dr.shutdown()
    finally:
        worker.stop()


def test_an_operator_that_the_worker_does_not_have_says_where_it_belongs(session: object) -> None:
    @torch.library.custom_op("only_here_for_tests::plus_one", mutates_args=(), device_types="cuda")
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    plus_one.register_fake(lambda x: torch.empty_like(x))
    with pytest.raises(
        NotImplementedError, match="once the session has begun, with a kernel for this device"
    ):
        plus_one(torch.ones(2, device=REMOTE)).cpu()


def test_an_operator_that_comes_late_is_found(session: object) -> None:
    @torch.library.custom_op("late_for_tests::plus_one", mutates_args=(), device_types="cuda")
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    plus_one.register_fake(lambda x: torch.empty_like(x))
    x = torch.ones(2, device=REMOTE)
    with pytest.raises(
        NotImplementedError, match=r"import that there: dr\.remote\(importlib\.import_module\)"
    ):
        plus_one(x).cpu()

    def define() -> None:
        torch.library.define("late_for_tests::plus_one", "(Tensor x) -> Tensor")
        torch.library.impl("late_for_tests::plus_one", "cpu", lambda x: x + 1)

    dr.fetch(dr.remote(define)())
    assert plus_one(x).tolist() == [2.0, 2.0]
