"""What goes wrong with checkpoints: bad folders, full disks, damaged files, workers and masters that die.

The one before stays readable.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE, there
from processes import STARTING, Child, StruckWhileWaiting, blocked, stopped, until

Fresh = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]


def ours(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if "distruntime" in name)


def tree(n: float, size: int = 4) -> dict[str, Any]:
    """A tree of which each part says which one it is, on two nodes and here."""
    whole = torch.full((size,), float(n))
    return {"n": n, "here": whole[:4].clone(), "zero": there(whole, 0), "one": there(whole, 1)}


def is_whole(found: dict[str, Any], n: float | None = None) -> None:
    expected = found["n"] if n is None else n
    assert found["n"] == expected
    for key in ("here", "zero", "one"):
        assert found[key].unique().tolist() == [expected], key


@pytest.fixture
def two(fresh_session: Fresh) -> Any:
    return fresh_session(world_size=2)


@pytest.fixture
def saved(session: object, tmp_path: Path) -> Path:
    """A folder with a checkpoint of tree(1)."""
    dr.save(tree(1), tmp_path / "c")
    return tmp_path / "c"


def file_of(folder: Path, node: int) -> Path:
    (found,) = folder.glob(f"distruntime-*-node{node}.safetensors")
    return found


# -- what cannot be saved ------------------------------------------------------------------------------------


class Thing:
    pass


def _itself() -> list[Any]:
    found: list[Any] = [1]
    found.append({"again": found})
    return found


def _deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(5000):
        found = [found]
    return found


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "object": (
        lambda: {"a": [1, Thing()]},
        dr.errors.UsageError,
        r"tree 'a\.1' is of class .*test_checkpoint_failures\.Thing: a checkpoint holds",
    ),
    "class": (lambda: torch.nn.Linear, dr.errors.UsageError, "the tree is of class type"),
    "set": (
        lambda: {"a": {1}},
        dr.errors.UsageError,
        "tree 'a' is of class set: a checkpoint holds dicts whose keys are str or int",
    ),
    "dtype": (lambda: [torch.float32], dr.errors.UsageError, r"tree '0' is of class torch\.dtype"),
    "key": (
        lambda: {"a": {(1, 2): 3}},
        dr.errors.UsageError,
        r"tree 'a' has the key \(1, 2\), of class tuple",
    ),
    "bool key": (lambda: {True: 3}, dr.errors.UsageError, "the tree has the key True, of class bool"),
    "cycle": (_itself, dr.errors.UsageError, r"tree '1\.again' holds itself"),
    "deep": (_deep, dr.errors.UsageError, "the tree is nested too deeply"),
    "sparse": (
        lambda: [torch.eye(2).to_sparse()],
        dr.errors.NotSupportedError,
        r"tensor '0' is torch\.sparse_coo; .* x\.to_dense\(\)",
    ),
    "meta": (lambda: torch.empty(2, device="meta"), dr.errors.NotSupportedError, "the tensor is on meta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_tree_cannot_hold(session: object, tmp_path: Path, case: str) -> None:
    make, cls, text = REFUSED[case]
    with pytest.raises(cls, match=text):
        dr.save(make(), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_partial_dtensor_is_refused(session: object, tmp_path: Path) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    local = torch.arange(4.0, device=mesh.device)
    x = torch.distributed.tensor.DTensor.from_local(local, mesh, [torch.distributed.tensor.Partial()])
    with pytest.raises(
        dr.errors.NotSupportedError,
        match=r"tensor 'w' is a DTensor with Partial\(sum\), .* x\.redistribute\(placements=",
    ):
        dr.save({"w": x}, tmp_path)
    dr.save({"w": x.to_local()}, tmp_path)
    assert dr.load(tmp_path, place=mesh)["w"].member(1).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("path", [None, 3, b"x", "", ["a"]])
def test_paths_that_are_none(session: object, path: Any) -> None:
    for call in (lambda: dr.save(1, path), lambda: dr.load(path)):
        with pytest.raises(dr.errors.UsageError, match="a checkpoint's path is the name of a folder, got"):
            call()


@pytest.mark.parametrize("async_op", [False, True])
def test_a_poisoned_tensor_is_the_first_cause_and_nothing_is_written(saved: Path, async_op: bool) -> None:
    before = ours(saved)
    bad = there(torch.ones(3), 1)[torch.tensor([7])] * 2
    with pytest.raises(
        IndexError, match=r"index 7 is out of bounds[\s\S]*issued at .*test_checkpoint_failures"
    ):
        saving = dr.save({**tree(2), "bad": bad + 1}, saved, async_op=async_op)
        saving.wait()
    is_whole(dr.load(saved), 1)
    assert ours(saved) == before
    dr.synchronize()


def test_a_tensor_of_a_lost_node(two: Any, tmp_path: Path) -> None:
    one = tree(1)
    dr.save(one, tmp_path)
    os.kill(dr.nodes()[1].pid, signal.SIGKILL)
    until(lambda: two.nodes[1].failed is not None)
    before = ours(tmp_path)
    with pytest.raises(dr.errors.NodeFailed, match=r"node 1 .* Lost with it: 1 tensor"):
        dr.save(one, tmp_path)
    assert ours(tmp_path) == before
    # Node 0 reads it, as it shares the disk.
    found = dr.load(tmp_path)
    is_whole(found, 1)
    assert found["one"].place == dr.place(0)
    with pytest.raises(dr.errors.NodeFailed, match="node 1"):
        dr.load(tmp_path, place=dr.types.Place(1, "cpu"))
    dr.save({"here": 2}, tmp_path)
    assert dr.load(tmp_path) == {"here": 2}


# -- folders and disks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
def test_a_path_that_is_a_file(session: object, tmp_path: Path, async_op: bool) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            NotADirectoryError,
            match=r"was not written; what was there before is as it was: [\s\S]*a checkpoint is a folder",
        ):
            saving = dr.save(tree(1), path, async_op=async_op)
            saving.wait()
    with pytest.raises(NotADirectoryError, match="there is no checkpoint to be read in") as caught:
        dr.load(tmp_path / "file")
    assert "checkpoint: look on node 0" in str(caught.value)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
    dr.synchronize()


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"nobody but root can mount a file system of its own: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_folder_that_is_not_writable(session: object, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", "size=1m") as disk:
        dr.save(tree(1), disk)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(
            OSError,
            match=r"Read-only file system \(.*\n"
            r"  the worker runs as user 0, who must be allowed to write there",
        ):
            dr.save(tree(2), disk)
        is_whole(dr.load(disk), 1)


def test_a_folder_of_another_user(session: object, tmp_path: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "c").mkdir(mode=0o500)
    with pytest.raises(PermissionError, match=r"was not written; [\s\S]* who must be allowed to write there"):
        dr.save(tree(1), tmp_path / "c")


@pytest.mark.parametrize("async_op", [False, True])
def test_a_disk_that_is_full(session: object, tmp_path: Path, async_op: bool) -> None:
    with mounted(tmp_path / "m", "size=2m") as disk:
        dr.save(tree(1), disk)
        before = ours(disk)
        text = r"No space left on device \(.*\n  24000\d\d bytes were to be written, and \d+ are free there: "
        text += "make room, or save elsewhere"
        with pytest.raises(OSError, match=text) as caught:
            saving = dr.save(tree(2, 600_000), disk, async_op=async_op)
            saving.wait()
        assert isinstance(caught.value, dr.errors.RemoteError) and "test_checkpoint_failures.py" in str(
            caught.value
        )
        assert ours(disk) == before
        is_whole(dr.load(disk), 1)
        # A failure that was raised is not raised again.
        dr.synchronize()
        dr.save(tree(3), disk)
        is_whole(dr.load(disk), 3)


def test_a_disk_that_is_full_for_one_of_two(session: object, tmp_path: Path) -> None:
    pid = dr.nodes()[1].pid
    dr.save(tree(1), tmp_path)
    before = ours(tmp_path)
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large[\s\S]*node 1"):
            dr.save(tree(2, 100_000), tmp_path)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    # The file that node 0 had written is gone.
    assert ours(tmp_path) == before
    is_whole(dr.load(tmp_path), 1)


def test_a_failure_in_the_background_is_raised_by_the_next_synchronize(
    session: object, tmp_path: Path, caplog: Any
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    saving = dr.save(tree(1), tmp_path / "file", async_op=True)
    until(saving.done)
    assert "a checkpoint failed: the checkpoint in" in caplog.text
    with pytest.raises(NotADirectoryError):
        dr.synchronize()
    dr.synchronize()
    with pytest.raises(NotADirectoryError):
        # The answer is the same, however often one asks.
        saving.wait()
    with pytest.raises(NotADirectoryError):
        saving.wait()
    dr.synchronize()


def test_a_failure_in_the_background_is_raised_by_shutdown(two: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    dr.save(tree(1), tmp_path / "file", async_op=True)
    with pytest.raises(NotADirectoryError):
        dr.shutdown()


# -- what a load finds ---------------------------------------------------------------------------------------


def test_there_is_none(session: object, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "no"):
        with pytest.raises(
            dr.errors.CheckpointError, match=re.escape(f"there is no checkpoint in {folder} on node 0 (")
        ):
            dr.load(folder)
    assert not (tmp_path / "no").exists()


def test_another_version_is_neither_read_nor_overwritten(saved: Path) -> None:
    index = json.loads((saved / "distruntime.json").read_text(encoding="utf-8"))
    (saved / "distruntime.json").write_text(json.dumps({**index, "version": 2}), encoding="utf-8")
    before = {name: (saved / name).read_bytes() for name in os.listdir(saved)}
    with pytest.raises(
        dr.errors.CheckpointError,
        match="holds a checkpoint of version 2, and this distruntime knows version 1: load it with",
    ):
        dr.load(saved)
    with pytest.raises(
        dr.errors.CheckpointError, match=r"holds a checkpoint of version 2, and .* Save into another folder"
    ):
        dr.save(tree(2), saved)
    assert {name: (saved / name).read_bytes() for name in os.listdir(saved)} == before


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing file": (
        lambda f: file_of(f, 1).unlink(),
        r"is not whole:\n  distruntime-\w+-node1.safetensors: expected \d+ bytes, got on none",
    ),
    "a short file": (
        lambda f: os.truncate(file_of(f, 1), 100),
        r"is not whole:\n  distruntime-\w+-node1.safetensors: expected \d+ bytes, got 100 b",
    ),
    "a bit of a value": (
        lambda f: _flip(file_of(f, 1), -1),
        r"node1.safetensors is damaged: the bytes of 'one' have the checksum \w+, not \w+",
    ),
    "a bit of the header": (lambda f: _flip(file_of(f, 1), 9), r"node1.safetensors is damaged: "),
    "the length of the header": (
        lambda f: _flip(file_of(f, 1), 2),
        r"node1.safetensors is damaged: .*header",
    ),
    "another save's file": (
        lambda f: file_of(f, 1).write_bytes(
            file_of(f, 1)
            .read_bytes()
            .replace(
                json.loads((f / "distruntime.json").read_text(encoding="utf-8"))["save"].encode(), b"0" * 12
            )
        ),
        r"node1.safetensors is damaged: it belongs to save '000000000000'",
    ),
    "an empty index": (
        lambda f: (f / "distruntime.json").write_text("", encoding="utf-8"),
        r"is not whole:\n  distruntime.json on node 0 .*: it is no JSON",
    ),
    "another index": (
        lambda f: (f / "distruntime.json").write_text('{"format": 3}', encoding="utf-8"),
        r"its format is 3, not 'distruntime'",
    ),
    "no format": (
        lambda f: (f / "distruntime.json").write_text("[]", encoding="utf-8"),
        r"distruntime.json on node 0 .*: it makes no sense",
    ),
    "half an index": (
        lambda f: (f / "distruntime.json").write_text(
            json.dumps({**json.loads((f / "distruntime.json").read_text(encoding="utf-8")), "tensors": {}}),
            encoding="utf-8",
        ),
        r"the index of the checkpoint in .* makes no sense: KeyError: 'here'",
    ),
    "a strange tree": (
        lambda f: (f / "distruntime.json").write_text(
            json.dumps(
                {**json.loads((f / "distruntime.json").read_text(encoding="utf-8")), "tree": ["what", 1]}
            ),
            encoding="utf-8",
        ),
        r"makes no sense: ValueError: not a part of a tree: \['what', 1\]",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage(saved: Path, case: str) -> None:
    damage, text = DAMAGE[case]
    damage(saved)
    for place in (None, "cpu"):
        with pytest.raises(dr.errors.CheckpointError, match=text):
            dr.load(saved, place=place)
    dr.synchronize()
    dr.save(tree(2), saved)
    is_whole(dr.load(saved), 2)


def test_an_index_that_names_files_of_others(saved: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    shutil.copy(file_of(saved, 1), secret)
    text = (
        (saved / "distruntime.json")
        .read_text(encoding="utf-8")
        .replace(file_of(saved, 1).name, "../secret.safetensors")
    )
    (saved / "distruntime.json").write_text(text, encoding="utf-8")
    with pytest.raises(dr.errors.CheckpointError, match="is not whole"):
        dr.load(saved)
    shutil.copy(secret, saved / "mine.safetensors")
    (saved / "distruntime.json").write_text(text.replace("../secret", "mine"), encoding="utf-8")
    with pytest.raises(
        dr.errors.CheckpointError,
        match=r"the index in .* names a file 'mine.safetensors', which no save has written",
    ):
        dr.load(saved)
    dr.synchronize()


# -- who dies, and when --------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_before_it_has_written(two: Any, tmp_path: Path) -> None:
    dr.save(tree(1), tmp_path)
    before, pid = ours(tmp_path), dr.nodes()[1].pid
    two_ = tree(2)
    dr.synchronize()
    with stopped(pid):
        saving = dr.save(two_, tmp_path, async_op=True)
        # Then node 0 has written its file.
        until(lambda: len(ours(tmp_path)) > len(before))
        with pytest.raises(
            dr.errors.WaitTimeout,
            match=r"is not complete within 0.01 s\n  saved at .*test_checkpoint_failures",
        ):
            saving.wait(0.01)
        assert not saving.done() and "being written" in repr(saving)
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        dr.errors.NodeFailed, match=r"was not completed, as node 1 .* The one before it is as it was"
    ):
        saving.wait()
    is_whole(dr.load(tmp_path), 1)
    assert ours(tmp_path) == before


def test_ctrl_c_in_a_wait(two: Any, tmp_path: Path) -> None:
    dr.save(tree(1), tmp_path)
    before, two_ = ours(tmp_path), tree(2)
    dr.synchronize()
    with stopped(dr.nodes()[1].pid), pytest.raises(KeyboardInterrupt), StruckWhileWaiting():
        dr.save(two_, tmp_path)
    # This waits for the save that was left.
    is_whole(dr.load(tmp_path), 1)
    assert ours(tmp_path) == before
    dr.save(tree(3), tmp_path)
    is_whole(dr.load(tmp_path), 3)
    dr.synchronize()


def _saves(folder: str, n: int) -> None:
    """The child: saves one checkpoint after the other."""
    with dr.init_master_worker(world_size=2, timeout=STARTING):
        while True:
            n += 1
            saving = dr.save(tree(n, 200_000), folder, async_op=bool(n % 2))
            print(n, flush=True)
            if saving is not None:
                saving.wait()


@pytest.mark.slow(reason="starts a master by hand and kills it, 6 s")
def test_a_master_that_is_killed(fresh_session: Fresh, tmp_path: Path) -> None:
    last = 0
    for k in range(2):
        with Child(_saves, str(tmp_path), last) as child:
            for _ in range(4 + k):
                last = int(child.line())
            os.kill(child.pid, signal.SIGKILL)
        fresh_session(world_size=2)
        found = dr.load(tmp_path)
        is_whole(found)
        assert found["n"] >= last - 1
        last = int(found["n"])
        dr.save(tree(last), tmp_path)
        # The file that the killed one had begun is gone.
        assert len(ours(tmp_path)) == 3
        dr.shutdown()


def test_a_worker_that_is_killed_while_it_writes(fresh_session: Fresh, tmp_path: Path) -> None:
    fresh_session(world_size=2)
    dr.save(tree(1), tmp_path)
    before = ours(tmp_path)
    with dr.node(1):
        large = {"n": 2.0, "x": torch.ones(30_000_000, device=REMOTE)}
    dr.synchronize()
    saving = dr.save(large, tmp_path, async_op=True)
    until(lambda: len(ours(tmp_path)) > len(before))
    os.kill(dr.nodes()[1].pid, signal.SIGKILL)
    try:
        saving.wait()
    except dr.errors.NodeFailed:
        is_whole(dr.load(tmp_path), 1)
    else:
        # It was written before the signal came.
        assert dr.load(tmp_path)["n"] == 2.0


# -- disks that are not shared -------------------------------------------------------------------------------

APART = "/proc/self/cwd/c"  # each worker's own folder


@pytest.fixture
def disks(tmp_path: Path, fresh_session: Fresh) -> Iterator[tuple[list[Path], Callable[[list[int]], Any]]]:
    """Three folders, and a function that opens a session with a worker in each of some of them.

    APART stands for another folder for each worker.
    """
    if not Path("/proc/self/cwd").exists():
        pytest.skip("one path that is another folder for each process is Linux's /proc/self/cwd")
    folders = [tmp_path / f"disk{k}" for k in range(3)]
    started: dict[int, subprocess.Popen[bytes]] = {}

    def attach(which: list[int]) -> Any:
        dr.shutdown()
        for k in which:
            if k not in started:
                folders[k].mkdir()
                path = os.pathsep.join(
                    filter(None, [str(ROOT), str(ROOT / "worker"), os.environ.get("PYTHONPATH")])
                )
                command = [
                    sys.executable,
                    "-m",
                    "distruntime_worker",
                    "--listen",
                    f"ipc://{tmp_path}/w{k}",
                    "--threads",
                    "1",
                ]
                with (tmp_path / f"log{k}").open("wb") as log:
                    started[k] = subprocess.Popen(
                        command,
                        cwd=folders[k],
                        env={**os.environ, "PYTHONPATH": path},
                        stdout=log,
                        stderr=log,
                    )
        return dr.init_master_worker(workers=[f"ipc://{tmp_path}/w{k}" for k in which], timeout=STARTING)

    yield folders, attach
    dr.shutdown()
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.slow(reason="starts workers by hand, 5 s")
def test_each_worker_has_its_own_disk(disks: Any) -> None:
    folders, attach = disks
    attach([0, 1])
    dr.save(tree(1), APART)
    assert [[name.rpartition("-")[2] for name in ours(folders[k] / "c")] for k in (0, 1)] == [
        ["node0.safetensors", "distruntime.json"],
        ["node1.safetensors", "distruntime.json"],
    ]
    is_whole(dr.load(APART), 1)
    # Node 1 reads and sends what node 0 does not have.
    found = dr.load(APART, place=0)
    is_whole(found, 1)
    assert found["one"].place == dr.place(0)
    is_whole(dr.load(APART, place="cpu"), 1)
    # Only node 1 has a part of it.
    dr.save({"n": 2, "x": there(torch.ones(1), 1)}, APART)
    assert ours(folders[0] / "c") == [] and dr.load(APART)["n"] == 2
    dr.save({"n": 3, "x": there(torch.ones(1), 0)}, APART)
    assert ours(folders[1] / "c") == [] and dr.load(APART)["n"] == 3


@pytest.mark.slow(reason="starts workers by hand, 7 s")
def test_a_worker_without_its_disk(disks: Any) -> None:
    _, attach = disks
    attach([0, 1])
    dr.save(tree(1), APART)
    # The nodes have other numbers now, and the files are found all the same.
    attach([1, 0])
    is_whole(dr.load(APART), 1)
    attach([0, 2])
    with pytest.raises(
        dr.errors.CheckpointError,
        match=r"node1.safetensors: expected \d+ bytes, got on none of this session's nodes\n  Bring",
    ):
        dr.load(APART)


@pytest.mark.slow(reason="starts workers by hand, 4 s")
def test_a_save_that_was_made_the_current_one_on_one_disk_only(disks: Any) -> None:
    folders, attach = disks
    attach([0, 1])
    dr.save(tree(1), APART)
    one = folders[1] / "c"
    pid = dr.nodes()[1].pid
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    # There is room for its tensor, and not for the index.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4000, limits[1]))
    with pytest.raises(OSError, match=r"was written, and could not be made the current one: File too large"):
        dr.save({**tree(2), "long": "x" * 10_000}, APART)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    # There are both saves. The index of the first has two names or is in its place.
    assert [len(ours(folders[k] / "c")) for k in (0, 1)] == [
        4,
        4,
    ]
    # It is whole: every worker had written its file before any made it the current one.
    is_whole(dr.load(APART), 2)
    os.remove(file_of_save(one, 2))
    # Otherwise the one before is whole. It is kept until the new one is everywhere.
    is_whole(dr.load(APART), 1)
    dr.save(tree(3), APART)
    is_whole(dr.load(APART), 3)
    assert [len(ours(folders[k] / "c")) for k in (0, 1)] == [2, 2]


def file_of_save(folder: Path, number: int) -> Path:
    """Return the file of a save that has no index in this folder."""
    indexes = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("distruntime*.json")]
    known = {file for index in indexes for file in index["files"]}
    (found,) = [path for path in folder.glob("*.safetensors") if path.name not in known]
    return found


def test_the_end_of_a_session_waits_for_all_saves_whatever_warning_is_raised(
    fresh_session: Callable[..., Any], tmp_path: Path
) -> None:
    session = fresh_session(world_size=1)
    with blocked(dr.default_stream(0)):
        x = torch.zeros(1, device=REMOTE).expand(3)
        x.index_fill_(0, torch.tensor([0], device=REMOTE), 1.0)
        big = torch.zeros(1 << 25, device=REMOTE)
        saves = [dr.save({"big": big}, tmp_path / name, async_op=True) for name in ("one", "two", "three")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="index_fill_ on expanded tensors"):
            session.ending.shut_down()
    for save in saves:
        assert save is not None and save.done()
        save.wait()
