"""The checks of `make gpu`: their list, and what a machine without a registry is told."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lane_modules import modules_of

CHECKS = Path(__file__).parent / "gpu" / "checks"


@pytest.fixture
def ours() -> Iterator[None]:
    """Modules of that folder can be imported."""
    with modules_of(CHECKS):
        yield


@pytest.fixture
def wheels(ours: None) -> ModuleType:
    return importlib.import_module("wheels")


def test_there_are_29_checks_in_order_and_each_says_what_its_failure_means(ours: None) -> None:
    listing = importlib.import_module("listing")
    found = listing.checks()
    assert [check.number for check in found] == list(range(1, 30))
    for check in found:
        assert len(check.name) > 5 and len(check.does) > 20 and len(check.failure) > 60, check.number
        assert not check.does.endswith(".") and check.failure.endswith("."), check.number
        assert 10 <= check.seconds <= 150
        assert set(check.needs) <= {"cuda", "two GPUs", "pytest", "expecttest", "transformers"}
        # The parent process gets this as JSON.
        assert listing.Described(*check.described()).number == check.number
    assert len({check.name for check in found}) == 29
    # `FIRST` are those after which nothing can work.
    assert listing.FIRST == (1, 2, 3)


def test_a_file_that_a_failure_names_is_there(ours: None) -> None:
    root = CHECKS.parents[2]
    listing = importlib.import_module("listing")
    for check in listing.checks():
        for path in re.findall(r"[\w/]+/(?:\w+\.py)?", check.failure):
            # Short ones are the worker's.
            found = [(folder / path).exists() for folder in (root, root / "worker" / "distruntime_worker")]
            assert any(found), f"check {check.number} names {path}"


@pytest.fixture
def driver(ours: None) -> ModuleType:
    """The parent process, as a module."""
    spec = importlib.util.spec_from_file_location("gpu_checks", CHECKS / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_counts_and_shortens(driver: ModuleType) -> None:
    rows = [
        driver.Row("1", "one", "ok; left out: a part", 1.25),
        driver.Row("2", "two", f"failed: {'x' * 300}", 2),
    ]
    *table, empty, counts = driver.report([*rows, driver.Row("", "a figure", "left out: no GPU", 0)]).split(
        "\n"
    )
    assert len(table) == 4 and empty == "" and counts == "1 ok, 1 failed, 1 left out"
    assert "1.2" in table[1] and "…" in table[2] and len(table[2]) < 140


@pytest.mark.parametrize(("only", "kept"), [([], 120), ([7], 0)])
def test_checks_leave_time_for_the_figures(driver: ModuleType, only: list[int], kept: int) -> None:
    options = argparse.Namespace(only=only, minutes=10, simulate_cuda=0, device=None)
    run = driver.Run(options, {})
    assert 600 - kept - 1 < run.for_checks() <= 600 - kept
    assert len(driver.NUMBERS) == 29


def test_the_environment_of_a_backend_of_torch(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/given")
    plain = driver.environment_for(argparse.Namespace(device=None))
    assert plain["DISTRUNTIME_TEST_GPUS"] == "1" and plain["PYTHONPATH"].endswith(":/given")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in plain
    other = driver.environment_for(argparse.Namespace(device=str(tmp_path)))
    assert str(tmp_path) in other["PYTHONPATH"] and other["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_missing_packages_are_named_with_their_versions_and_where_they_go(wheels: ModuleType) -> None:
    lacking = wheels.missing(wheels.REQUIRED, find=lambda module: module not in ("zmq", "nacl"))
    assert [package.name for package in lacking] == ["pyzmq", "pynacl"]
    text = wheels.advice(lacking)
    assert "lacks 2 packages" in text and "pyzmq==27.3.0" in text and "pynacl==1.6.2" in text
    assert str(wheels.FOLDER) in text and "--no-index" in text and "msgpack" not in text
    assert f"--python-version {sys.version_info.major}.{sys.version_info.minor}" in text
    assert not wheels.missing(wheels.REQUIRED, find=lambda module: True)


def test_versions_are_those_of_the_constraints_for_a_python(wheels: ModuleType) -> None:
    assert wheels.pinned("numpy", (3, 10)) == "numpy==2.2.6"
    assert wheels.pinned("numpy", (3, 12)) == "numpy==2.4.6"
    for package in (*wheels.REQUIRED, *wheels.OPTIONAL):
        assert wheels.pinned(package.name, (3, 12)).startswith(f"{package.name}=="), package


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, "this Python has no torch"),
        ("2.10.1", "this Python has torch 2.10.1"),
        ("2.16.0", "torch 2.11 to 2.15"),
        ("nonsense", "PYTHON=/path/to/python3"),
        ("2.11.0+cu130", ""),
        ("2.15.0", ""),
    ],
)
def test_a_torch_that_will_not_do(wheels: ModuleType, version: str | None, words: str) -> None:
    found = wheels.torch_problem(version)
    assert words in found and bool(words) == bool(found)


def test_wheels_that_are_there_already_are_not_installed(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch-2.13.0-cp311-cp311-linux_x86_64.whl").touch()
    monkeypatch.setattr(wheels, "FOLDER", tmp_path)
    assert wheels.bring() == []
    (tmp_path / "no_such_package-1.0-py3-none-any.whl").touch()
    commands: list[list[str]] = []
    monkeypatch.setattr(wheels.subprocess, "run", lambda command, check: commands.append(command))
    monkeypatch.setattr(wheels, "SITE", tmp_path / "site")
    assert [path.name for path in wheels.bring()] == ["no_such_package-1.0-py3-none-any.whl"]
    assert {"--no-index", "--no-deps", str(tmp_path / "site")} <= set(commands[0])
