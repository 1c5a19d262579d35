"""The lane of PyTorch's own tests: which tests it chooses, and what explains a failure."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from lane_modules import modules_of


@pytest.fixture
def lane() -> Iterator[Any]:
    """Import the lane's modules by their names."""
    with modules_of(Path(__file__).parent) as module:
        yield module


def failed(lane: Any, test: str = "f.py::C::test_a", **others: Any) -> Any:
    return lane("rows").Row(test, "failed", **{"error": "RuntimeError: no storage", **others})


def test_a_sample_has_one_dtype_of_each_test_and_its_seed_draws_it_again(lane: Any) -> None:
    sample = lane("torch_tests_plugin").sample
    names = [f"f.py::C::test_{k}_remote_{dtype}" for k in range(9) for dtype in ("int8", "float32", "bool")]
    assert len({name.rpartition("_")[0] for name in sample(names, 9, 1)}) == 9
    assert len(sample(names, 4, 1)) == 4 and sample(names, 4, 1) == sample(reversed(names), 4, 1)
    assert sample(names, 4, 1) < sample(names, 5, 1)
    assert sample(names, 4, 1) != sample(names, 4, 2)
    assert sample(names, 0, 1) == set(names)


def test_slices_have_each_test_once(lane: Any) -> None:
    in_slice = lane("torch_tests_plugin").in_slice
    names = [f"f.py::C::test_{k}" for k in range(50)]
    slices = [[name for name in names if in_slice(name, k, 3)] for k in (1, 2, 3)]
    assert all(slices) and sorted(itertools.chain(*slices)) == sorted(names)


def test_a_file_is_named_by_its_path_its_bare_name_or_a_test_of_it(lane: Any) -> None:
    is_named = lane("run").is_named
    assert is_named("functorch/test_ops.py", ["test_ops"]) and is_named("test_ops.py", ["test_ops"])
    assert not is_named("functorch/test_ops.py", ["test_ops.py"])
    assert is_named("nn/test_pooling.py", ["test_x", "nn/test_pooling.py::C::test_a"])
    assert not is_named("nn/test_pooling.py", ["test_pool"])


def entry(
    lane: Any, part: str, passed: int, date: str = "2026-11-27", file: str = "f.py", **others: Any
) -> Any:
    return lane("record").Entry(file, "device", date, part, 100, {"passed": passed, **others})


def test_a_later_run_replaces_the_rows_of_its_files_and_keeps_the_others(lane: Any) -> None:
    record = lane("record")
    other = entry(lane, "sample", 5, file="g.py")
    kept = [other, entry(lane, "sample", 3)]
    kept = record.with_new(kept, [entry(lane, "1/2", 40), entry(lane, "1/2", 0, file="g.py")])
    assert kept == [other, entry(lane, "1/2", 40)]
    # A sample leaves the row of a file that ran whole.
    assert record.with_new(kept, [entry(lane, "sample", 9)]) == kept
    kept = record.with_new(kept, [entry(lane, "2/2", 41, "2026-11-28", torch=2)])
    (f, g) = record.by_file(kept)
    assert f.cells()[:7] == ["f.py", "device", "2026-11-28", "100", "83", "81", ""]
    assert (f.counts["torch"], g.run) == (2, 5)
    assert record.with_new(kept, [entry(lane, "1/1", 99)]) == [other, entry(lane, "1/1", 99)]


def test_files_share_rows_of_the_page_where_nothing_failed_or_by_folder(lane: Any) -> None:
    record = lane("record")
    fine = [
        entry(lane, "1/1", 90, file="a.py"),
        entry(lane, "1/1", 8, "2026-11-28", file="nn/b.py", skipped=2),
    ]
    failed = [entry(lane, "1/1", 7, file=file, torch=3, open=1) for file in ("c.py", "nn/d.py", "nn/e.py")]
    failed[0].reasons = {"torch: seldom": 2, "open: a defect": 1, "torch: often": 5}
    lines = record.shown([*fine, *failed], together=True)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert [row[:5] for row in rows[2:]] == [
        ["no failure, 2 files", "device", "2026-11-28", "200", "100"],
        ["c.py", "device", "2026-11-27", "100", "11"],
        ["nn/, 2 files", "device", "2026-11-27", "200", "22"],
        ["all", "", "", "500", "133"],
    ]
    reasons = [line for line in lines if line.startswith("- ")]
    assert reasons[:2] == ["- torch, 5: often", "- open, 1: a defect"] and reasons[2].endswith("torch, 2")
    # A run shows each of its files.
    assert len(record.shown([*fine, *failed])) - len(lines) == 2


def test_the_page_says_how_many_tests_ran_in_all(lane: Any, tmp_path: Path) -> None:
    record, page, path = lane("record"), tmp_path / "page.md", tmp_path / "record.jsonl"
    assert record.read(path) == []
    first = entry(lane, "1/1", 90, torch=6)
    first.reasons = {"torch: what it does": 5}
    record.write(path, [first, entry(lane, "sample", 5, "2026-11-20", file="g.py")])
    page.write_text("words\n<!-- table -->\nold\n<!-- end of the table -->\nmore\n", encoding="utf-8")
    record.on_page(page, record.read(path), "with a torch")
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[:3] == [
        "words",
        "<!-- table -->",
        "2026-11-27: 101 tests of 200 have run in all, with a torch.",
    ]
    assert "- torch, 5: what it does" in lines and any(line.startswith("- 1 more") for line in lines)
    assert lines[-1] == "more" and "old" not in lines
    page.write_text("words\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no lines"):
        record.on_page(page, record.read(path), "")


def test_the_twin_of_a_test_is_the_one_for_cpus(lane: Any) -> None:
    twin = lane("rows").twin
    assert twin("f.py::TestXREMOTE::test_remote_a_remote_int8") == "f.py::TestXCPU::test_cpu_a_cpu_int8"


def test_the_list_names_tests_and_words(lane: Any, tmp_path: Path) -> None:
    expected, path = lane("expected"), tmp_path / "expected.txt"
    path.write_text(
        "# A comment.\n\ndocumented: no storage\n    says storage|address\n\n"
        "torch: what it does to subclasses\n    f.py::*::test_a*\n    g.py::C::test_b\n",
        encoding="utf-8",
    )
    causes = expected.read(path)
    assert [cause.kind for cause in causes] == ["documented", "torch"]

    def why(**row: Any) -> str | None:
        cause = expected.cause_of(failed(lane, **row), causes)
        return cause and cause.why

    assert why() == "no storage"
    assert why(error="ValueError: x") == "what it does to subclasses"
    assert why(error="ValueError: x", test="g.py::C::test_b") == "what it does to subclasses"
    assert why(error="ValueError: x", test="g.py::C::test_c") is None
    assert why(error="ValueError: x", test="g.py::C::test_c", here="failed") == expected.OTHER_VERSION.why
    assert why(error="ValueError: x", test="g.py::C::test_c", in_step="passed") == expected.LATE.why
    promised = "x gave (1,) bool where its meta kernel promised (1,) float32"
    assert why(error=promised, test="g.py::C::test_c", in_step="passed") is None


def test_a_cause_may_hold_in_one_mode(lane: Any, tmp_path: Path) -> None:
    path = tmp_path / "expected.txt"
    path.write_text("torch: what it does to ranks\n    in spmd\n    f.py::*\n", encoding="utf-8")
    (cause,) = lane("expected").read(path)
    assert cause.explains(failed(lane, mode="spmd")) and not cause.explains(failed(lane, mode="mesh"))


def test_what_fails_alone_too_is_explained_by_a_known_cause_first(lane: Any) -> None:
    expected, alike = lane("expected"), lane("rows").ALIKE
    assert expected.cause_of(failed(lane, here=alike), []) is expected.ALIKE_ALONE
    assert expected.cause_of(failed(lane, here="passed"), []) is None
    known = expected.Cause("torch", "it has no storage", tests=["f.py::*"])
    assert expected.cause_of(failed(lane, here=alike), [known]) is known


@pytest.mark.slow(reason="two processes import torch's own test bases")
def test_a_test_of_ranks_finds_the_group_of_spmd(lane: Any, session: Any) -> None:
    """It begins and ends torch.distributed, and a subgroup of one test takes no name of another one's.

    What a test makes torch.distributed tell ends with it.
    """
    folder = str(Path(__file__).parent)

    def part(answered: bool) -> list[object]:

        import torch.distributed as dist

        sys.path.append(folder)
        import spmd_ranks

        if not spmd_ranks._spmd:
            spmd_ranks._spmd.append(spmd_ranks.Spmd())
        before = dist.group.WORLD
        with spmd_ranks._spmd[0].as_a_test_finds_it():
            begun = [dist.is_initialized(), dist.get_debug_level().name]
            dist.set_debug_level(dist.DebugLevel.DETAIL)
            store = dist.HashStore()
            # Two ranks are a group of SPMD's. One rank is a group of the test's own.
            size, rank = (2, int(os.environ["RANK"])) if answered else (1, 0)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            begun.append(dist.group.WORLD is before)
            x = torch.ones(1)
            dist.all_reduce(x, group=dist.new_group([*range(size)]))
            dist.destroy_process_group()
            begun.append(dist.is_initialized())
        dist.barrier()
        return [*begun, x.item(), dist.group.WORLD is before]

    mesh = dr.init_device_mesh("cpu", (2,))
    run: Any = dr.spmd(mesh, part, returns=object, timeout=60)
    for _ in range(2):
        assert dr.fetch(run(True)) == [[False, "OFF", True, False, 2.0, True]] * 2
        assert dr.fetch(run(False)) == [[False, "OFF", False, False, 1.0, True]] * 2


def test_a_list_with_an_unknown_kind_is_refused(lane: Any, tmp_path: Path) -> None:
    path = tmp_path / "expected.txt"
    path.write_text("because: of this\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 1: a cause begins with one of documented, torch"):
        lane("expected").read(path)


def test_the_lanes_own_list_is_read(lane: Any) -> None:
    """Every cause says when it holds: a cause without tests and words would explain everything."""
    causes = lane("expected").read(Path(__file__).parent / "expected.txt")
    assert causes and all(cause.tests or cause.says for cause in causes)


def test_the_test_in_which_a_process_ended_has_failed(lane: Any, tmp_path: Path) -> None:
    said = [
        {"of": {"f.py": 7}},
        {"begun": "f.py::a"},
        {"test": "f.py::a", "outcome": "passed"},
        {"begun": "f.py::b"},
    ]
    path = tmp_path / "rows"
    path.write_text("".join(json.dumps(line) + "\n" for line in said), encoding="utf-8")
    found = lane("run").Found("device")
    assert lane("run").Found("device").take(path, "") == "ended early"
    assert found.take(path, "ended with status -11") == "ended with status -11"
    assert {row.mode for row in found.rows} == {"device"}
    assert [(row.test, row.outcome, row.error) for row in found.rows] == [
        ("f.py::a", "passed", ""),
        ("f.py::b", "failed", "the process ended with status -11"),
    ]
    (line,) = lane("record").entries([found], [], "1/1", "2026-11-27")
    assert (line.file, line.mode, line.of, line.counts) == (
        "f.py",
        "device",
        7,
        {"passed": 1, "unexplained": 1},
    )
    run = lane("run").Run([found], 60.0, "1/1", "2026-11-27")
    lane("run").keep(path, run)
    assert lane("run").kept(path) == run


def test_what_has_needed_all_its_time_and_failed_runs_again_with_more(
    lane: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rows = lane("run"), lane("rows")
    most = {"f.py": 7, "g.py": 3}
    plan = rows.Plan("device", most, "", [], [], [])
    names = [f"{file}::C::test_{name}" for file in most for name in ("fails", "is_slow", "is_explained")]
    found = run.Found("device", [failed(lane, names[0], seconds=plan.patience - 1)])
    found.rows += [failed(lane, name, seconds=plan.patience) for name in names[1:3]]
    found.rows.append(rows.Row(names[4], "passed", seconds=plan.patience + 1))
    before = list(found.rows)
    asked = []

    def run_group(plan: Any, folder: Path) -> Any:
        asked.append(plan)
        return run.Found("device", [rows.Row(name, "passed") for name in plan.exactly])

    monkeypatch.setattr(run, "run_group", run_group)
    explained = [lane("expected").Cause("torch", "it has no storage", tests=names[2:3])]
    run.run_slow_ones_again(found, plan, tmp_path, explained)
    (again,) = asked
    assert (again.most, again.exactly) == ({"f.py": 7}, names[1:2])
    assert again.patience == run.MORE * plan.patience
    assert found.rows == [before[0], rows.Row(names[1], "passed"), *before[2:]]
    run.run_slow_ones_again(found, plan, tmp_path, explained)
    assert len(asked) == 1


@pytest.mark.slow(reason="a process of the lane's own begins a session")
def test_a_child_runs_what_is_named_exactly_and_ends_it_with_its_time(lane: Any, tmp_path: Path) -> None:
    (tmp_path / "test_f.py").write_text(
        "import threading, unittest\n"
        "class T(unittest.TestCase):\n"
        "    def test_a(self): threading.Event().wait()\n"
        "    def test_a_b(self): pass\n",
        encoding="utf-8",
    )
    plan = lane("rows").Plan("local", {"test_f.py": 0}, "", [], [], [])
    plan.exactly, plan.patience = ["test_f.py::T::test_a"], 1
    found = lane("run").run_group(plan, tmp_path)
    assert (found.deaths, found.of) == ([], {"test_f.py": 2})
    assert [(row.test, row.outcome, row.error) for row in found.rows] == [
        ("test_f.py::T::test_a", "failed", "Failed: Timeout (>1.0s) from pytest-timeout.")
    ]
    assert found.rows[0].seconds >= plan.patience


def test_a_folder_without_tests_is_refused(
    lane: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = lane("sources")
    monkeypatch.setenv("TORCH_TESTS", str(tmp_path))
    with pytest.raises(sources.NoSources, match=r"has no test_torch.py: name the folder `test`"):
        sources.test_folder()
    (tmp_path / "test_torch.py").touch()
    assert sources.test_folder() == tmp_path.resolve()


def test_a_process_of_its_own_says_which_tests_fail_without_remote_tensors(lane: Any, tmp_path: Path) -> None:
    (tmp_path / "test_f.py").write_text(
        "import os, unittest\n"
        "class T(unittest.TestCase):\n"
        "    def test_passes(self): pass\n"
        "    def test_fails(self): self.fail()\n"
        "    def test_dies(self): os._exit(3)\n"
        "    def test_is_skipped(self): self.skipTest('why')\n"
        "    def test_passes_too(self): pass\n",
        encoding="utf-8",
    )
    names = [f"test_f.py::T::test_{name}" for name in ("passes", "fails", "dies", "is_skipped", "passes_too")]
    found = lane("alone").outcomes([*names, "test_f.py::T::test_is_not_there"], tmp_path)
    assert [found.get(name) for name in names] == ["passed", "failed", "failed", "skipped", "passed"]
