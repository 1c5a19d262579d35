"""`dr.config`: workers' torch settings are set in order, read, refused, and end with the session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def _two_nodes() -> Iterator[dr.types.Settings]:
    dr.shutdown()
    dr.init_master_worker(world_size=2)
    yield read()
    dr.shutdown()


@pytest.fixture(autouse=True)
def _as_before(_two_nodes: dr.types.Settings) -> Iterator[None]:
    yield
    if dr.is_initialized():
        dr.config(
            **{name: value for name, value in vars(_two_nodes).items() if name != "cuda_matmul_allow_tf32"}
        )
        assert read(0) == read(1) == _two_nodes


def read(node: int = 0) -> dr.types.Settings:
    found = dr.config(node=node)
    assert found is not None and list(found) == [node]
    return found[node]


# Setting and reading


@pytest.mark.slow(reason="starts daemons that import torch, 4 s")
def test_without_arguments_the_settings_of_every_node() -> None:
    found = dr.config()
    assert found is not None and list(found) == [0, 1] and found[0] == found[1]
    assert (
        found[0].num_threads == torch.get_num_threads() == 1
    )  # as a worker that is started on this machine gets it
    assert found[0].float32_matmul_precision == torch.get_float32_matmul_precision()
    assert not found[0].use_deterministic_algorithms


def test_the_settings_print_as_a_table() -> None:
    dr.config(node=1, num_threads=2)
    found = dr.config()
    assert isinstance(found, dict) and found[1].num_threads == 2
    lines = repr(found).splitlines()
    assert len(lines) == 1 + len(fields(dr.types.Settings)) and max(map(len, lines)) < 110
    assert lines[0].split() == ["setting", "node", "0", "node", "1"]
    assert lines[1].split() == ["num_threads", "1", "2"]
    assert found._repr_html_().startswith("<table><tr><th>setting</th><th>node 0</th>")
    dr.config(num_threads=1)
    assert repr(dr.config()).splitlines()[0].split() == ["setting", "nodes", "0,", "1"]


OTHERS: list[tuple[str, Any]] = [
    ("num_threads", 2),
    ("flush_denormal", True),
    ("float32_matmul_precision", "medium"),
    ("cuda_matmul_allow_tf32", True),
    ("cuda_matmul_allow_fp16_reduced_precision_reduction", False),
    ("cuda_matmul_allow_bf16_reduced_precision_reduction", False),
    ("cudnn_allow_tf32", False),
    ("cudnn_benchmark", True),
    ("cudnn_deterministic", True),
    ("mkldnn_enabled", False),
    ("fill_uninitialized_memory", False),
    ("use_deterministic_algorithms", True),
]


@pytest.mark.parametrize("name, value", OTHERS, ids=[name for name, _ in OTHERS])
def test_a_setting_is_set_on_the_node_that_is_named(name: str, value: Any) -> None:
    before = read()
    assert getattr(before, name) != value
    dr.config(node=1, **{name: value})
    assert getattr(read(1), name) == value and read() == before


def test_every_setting_is_tried_here() -> None:
    assert {name for name, _ in OTHERS} == {field.name for field in fields(dr.types.Settings)} - {"warn_only"}


def test_several_at_once_on_every_node() -> None:
    dr.config(
        float32_matmul_precision="high",
        cudnn_benchmark=True,
        use_deterministic_algorithms=True,
        warn_only=True,
    )
    for node in (0, 1):
        settings = read(node)
        assert (
            settings.float32_matmul_precision == "high"
            and settings.cuda_matmul_allow_tf32
            and settings.cudnn_benchmark
        )
        assert settings.use_deterministic_algorithms and settings.warn_only
    dr.config(use_deterministic_algorithms=False)
    assert not read().use_deterministic_algorithms and not read().warn_only


def test_tf32_apart_from_the_precision_has_no_name() -> None:
    dr.config(float32_matmul_precision="high")
    dr.config(cuda_matmul_allow_tf32=False)
    settings = read()
    assert settings.float32_matmul_precision is None and not settings.cuda_matmul_allow_tf32


# What they do


def test_they_hold_for_what_is_issued_afterwards() -> None:
    tiny = torch.full((4,), 1e-310, dtype=torch.float64, device=REMOTE)
    before = tiny * 1
    dr.config(flush_denormal=True)
    flushed = tiny * 1
    dr.config(flush_denormal=False)
    after = tiny * 1
    assert [int((x != 0).sum()) for x in (before, flushed, after)] == [4, 0, 4]


def test_denormals_are_flushed_on_every_thread_of_an_operation() -> None:
    dr.config(num_threads=4)
    tiny = torch.full((1 << 20,), 1e-310, dtype=torch.float64, device=REMOTE)
    assert int(((tiny * 1) != 0).sum()) == 1 << 20  # now there are threads, which keep their own registers
    dr.config(flush_denormal=True)
    flushed = tiny * 1
    dr.config(flush_denormal=False)
    assert int((flushed != 0).sum()) == 0 and int(((tiny * 1) != 0).sum()) == 1 << 20


def threads_of_worker() -> int:
    return len(os.listdir(f"/proc/{dr.nodes()[0].pid}/task"))


def test_operations_use_that_many_threads() -> None:
    x = torch.ones(1 << 20, device=REMOTE)
    assert (x + 1).sum().item() == 2 << 20
    before = threads_of_worker()
    dr.config(num_threads=5)
    assert (x + 1).sum().item() == 2 << 20
    assert threads_of_worker() == before + 4
    assert "5 threads" in dr.nodes()[0].devices[0].description


def test_deterministic_algorithms_refuse_or_warn() -> None:
    x, index, value = (
        torch.zeros(4, device=REMOTE),
        torch.tensor([1], device=REMOTE),
        torch.ones(1, device=REMOTE),
    )
    dr.config(use_deterministic_algorithms=True)
    with pytest.raises(RuntimeError, match="deterministic"):
        x.clone().put_(index, value).cpu()
    dr.config(use_deterministic_algorithms=True, warn_only=True)
    assert x.clone().put_(index, value).tolist() == [0, 1, 0, 0]


def test_setting_returns_at_once_and_reading_waits() -> None:
    dr.profiler.set_sync_debug_mode("error")
    try:
        dr.config(cudnn_benchmark=True)
    finally:
        dr.profiler.set_sync_debug_mode("default")
    assert read().cudnn_benchmark


# What cannot be


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"num_threads": 0}, "num_threads is a number of threads, at least 1, got 0"),
        ({"num_threads": True}, "num_threads is a number of threads, at least 1, got True"),
        ({"num_threads": 2.0}, "num_threads is a number of threads, at least 1, got 2.0"),
        (
            {"float32_matmul_precision": "low"},
            "float32_matmul_precision is one of 'highest', 'high', 'medium', got 'low'",
        ),
        (
            {"float32_matmul_precision": ["high"]},
            "float32_matmul_precision is one of 'highest', 'high', 'medium', got ['high']",
        ),
        ({"cudnn_benchmark": 1}, "cudnn_benchmark is True or False, got 1"),
        ({"mkldnn_enabled": "yes"}, "mkldnn_enabled is True or False, got 'yes'"),
        (
            {"float32_matmul_precision": "high", "cuda_matmul_allow_tf32": True},
            'float32_matmul_precision sets cuda_matmul_allow_tf32 too, True below "highest": give one of the '
            "two",
        ),
        (
            {"warn_only": True},
            "warn_only goes with use_deterministic_algorithms: give both, as "
            "torch.use_deterministic_algorithms takes them",
        ),
    ],
    ids=str,
)
def test_a_wrong_value_is_raised_at_once_and_nothing_is_set(wrong: dict[str, Any], text: str) -> None:
    before = dr.config()
    with pytest.raises(dr.errors.ConfigurationError) as caught:
        dr.config(cudnn_deterministic=True, **wrong)
    assert str(caught.value) == text and dr.config() == before


def test_a_setting_that_is_none_of_torchs_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="num_thread"):
        dr.config(num_thread=2)  # type: ignore[call-arg]


def test_no_such_node() -> None:
    with pytest.raises(dr.errors.PlacementError, match="no node 7"):
        dr.config(node=7, cudnn_benchmark=True)


def test_what_a_worker_refuses_is_raised_by_the_next_synchronize() -> None:
    before = read()
    dr.config(node=0, num_threads=1_000_000)
    x = torch.ones(3, device=REMOTE)
    with pytest.raises(
        RuntimeError, match=r"num_threads=1000000: this worker has \d+ cores and takes \d+ at most"
    ) as caught:
        dr.synchronize()
    assert isinstance(
        caught.value, dr.errors.RemoteError
    ) and "dr.config(node=0, num_threads=1_000_000)" in str(caught.value)
    dr.synchronize()
    assert x.sum().item() == 3 and read() == before


# Sessions


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[str]:
    """A worker that serves one master after another."""
    address = f"ipc://{tmp_path}/w"
    tmp_path.chmod(0o700)
    path = os.pathsep.join([str(ROOT), str(ROOT / "worker")])
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "distruntime_worker",
            "--listen",
            address,
            "--threads",
            "2",
            "--log-level",
            "error",
        ],
        env={**os.environ, "PYTHONPATH": path},
    )
    yield address
    process.kill()
    process.wait()


@pytest.mark.slow(reason="starts daemons that import torch, 6 s")
def test_the_next_session_begins_with_the_settings_of_the_workers_start(daemon: str) -> None:
    dr.shutdown()
    seen = []
    for _ in range(2):
        with dr.init_master_worker(workers=[daemon]):
            seen.append(read())
            for name, value in [*OTHERS, ("num_threads", 3)]:
                dr.config(**{name: value})
            assert read().num_threads == 3 and read() != seen[0]
            tiny = torch.full((4,), 1e-310, dtype=torch.float64, device=REMOTE)
            assert int((tiny * 1 != 0).sum()) == 0
    assert seen[0].num_threads == 2 and seen[1] == seen[0]
    with dr.init_master_worker(workers=[daemon]):
        tiny = torch.full((4,), 1e-310, dtype=torch.float64, device=REMOTE)
        assert int((tiny * 1 != 0).sum()) == 4
