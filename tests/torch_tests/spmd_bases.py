"""PyTorch's multi-process tests, each rank's part of which runs in a member of `dr.spmd`.

The bases of these tests start a process for each rank, and wait for them. Here one call of `dr.spmd` does
both. Its mesh has as many members as the test has ranks, on two workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_distributed

import distruntime as dr
import spmd_ranks

WORKERS, MEMBERS_OF_A_WORKER = 2, 4
# Seconds of one test. A rank that hangs says where it does, before the call ends.
PATIENCE, TOLD = 90.0, 40.0
# A rank finds these in its environment, as a process that is started would.
_INHERITED = ("BACKEND", "TEMP_DIR", "INIT_METHOD")
_meshes: dict[int, dr.mesh.DeviceMesh] = {}
# A test runs in processes of its own, without SPMD, while this is set.
_plain: list[bool] = []
# These processes are forked from one that has imported torch.
_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["spmd_ranks"])
# Workers take their share of the GPUs that are there.
_device_count = torch.cuda.device_count


def open_session() -> None:
    _meshes.clear()
    with mock.patch.object(torch.cuda, "device_count", _device_count):
        dr.init_master_worker(world_size=WORKERS, simulate_cuda=MEMBERS_OF_A_WORKER, timeout=120)
    dr.config(num_threads=1)


def mesh_of(ranks: int) -> dr.mesh.DeviceMesh:
    """Return the mesh of so many ranks, whose members are on both workers, and keep it."""
    if ranks not in _meshes:
        on = [0] * (ranks - ranks // 2) + [1] * (ranks // 2)
        places = [dr.place(node, f"cuda:{on[:k].count(node)}") for k, node in enumerate(on)]
        _meshes[ranks] = dr.init_device_mesh(places, (ranks,))
    return _meshes[ranks]


def _rank(part: dict[str, Any]) -> str:
    """Run a rank's part: this is what goes to the members."""
    import spmd_ranks

    return spmd_ranks.run(part)


def _healthy() -> float:
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()


def _run_in_members(ranks: int, part: dict[str, Any]) -> list[str]:
    mesh = mesh_of(ranks)
    call: Any = dr.spmd(mesh, _rank, returns=object, timeout=PATIENCE)
    said: list[str] = dr.fetch(call(part))
    # A test may break the group, and pass. The next one needs another group then.
    with contextlib.suppress(Exception):
        dr.fetch(dr.spmd(mesh, _healthy, returns=object, timeout=20.0)())
    return said


def _run_in_processes(ranks: int, part: dict[str, Any]) -> list[str]:
    """Run a test as torch's runner does, in processes of its own."""
    begun = [_alone(rank, ranks, part) for rank in range(ranks)]
    said: list[str] = []
    until = time.monotonic() + PATIENCE
    try:
        waiting = [answers for _, answers in begun]
        while waiting:
            ready = multiprocessing.connection.wait(waiting, max(0.0, until - time.monotonic()))
            if not ready:
                raise AssertionError("WaitTimeout: it did not end")
            for answers in ready:
                waiting.remove(answers)
                try:
                    said.append(answers.recv())
                except EOFError:
                    raise AssertionError("RuntimeError: a rank ended") from None
                if not said[-1].startswith((spmd_ranks.PASSED, spmd_ranks.SKIPPED)):
                    raise AssertionError(said[-1])
        return said
    finally:
        for process, _ in begun:
            process.kill()
            process.join()


def _alone(rank: int, ranks: int, part: dict[str, Any]) -> tuple[Any, Any]:
    answers, answer = _forked.Pipe(duplex=False)
    environment = {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    part = {**part, "environment": {**part["environment"], **environment}}
    process = _forked.Process(target=spmd_ranks.run_alone, args=(answer, part, rank, ranks))
    process.start()
    answer.close()
    return process, answers


def _join(case: Any, ranks: int, file: str) -> None:
    owner = type(case)
    # pytest has put the folders of the test files there. Two of them may have files of one name.
    path = [folder for folder in sys.path if folder.startswith(os.getcwd())]
    path.insert(0, str(Path(sys.modules[owner.__module__].__file__ or "").parent))
    part = spmd_ranks.Part(
        owner.__module__,
        tuple(path),
        owner.__qualname__,
        case._testMethodName,
        file,
        TOLD,
        {name: os.environ[name] for name in _INHERITED if name in os.environ},
    )
    run = _run_in_processes if _plain else _run_in_members
    for said in run(ranks, asdict(part)):
        if said.startswith(spmd_ranks.SKIPPED):
            raise unittest.SkipTest(said.removeprefix(spmd_ranks.SKIPPED))


@contextlib.contextmanager
def in_processes_of_its_own() -> Any:
    _plain.append(True)
    try:
        yield
    finally:
        _plain.pop()


# -- what takes the place of torch's -------------------------------------------------------------------------


def _start_nothing(*args: Any) -> None:
    pass


def _join_processes(self: Any, fn: Callable[..., object]) -> None:
    _join(self, int(self.world_size), self.file_name)


def _begin_continuous(cls: Any) -> None:
    device_type = cls.device_type() if callable(cls.device_type) else "cpu"
    cls.world_size = cls._get_world_size(device_type)
    cls.task_queues = ()


def _wait_continuous(self: Any, fn: Callable[..., object]) -> object:
    def wrapper(self: Any) -> None:
        if self.rank != self.MAIN_PROCESS_RANK:
            fn()
            return
        with tempfile.TemporaryDirectory() as folder:
            _join(self, int(self.world_size), os.path.join(folder, "group"))

    return types.MethodType(wrapper, self)


def take_over() -> None:
    """Have the ranks of tests run in members. It must come before a test file is imported."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE="4")
    os.environ["TEMP_DIR"] = tempfile.mkdtemp()
    # Test files ask for it where they are imported. "remote" is the session's, and not the ranks'.
    torch.accelerator.current_accelerator = lambda *args, **named: None
    spmd_ranks.prepare()
    base = common_distributed.MultiProcessTestCase
    base._spawn_processes = base._start_processes = _start_nothing
    base._join_processes = _join_processes
    continuous = common_distributed.MultiProcContinuousTest
    continuous._ensure_processes_spawned = classmethod(_begin_continuous)
    continuous._worker_run_main_wait = _wait_continuous


def is_wanted(owner: type, test: str) -> bool:
    """Whether a test has ranks in processes, and is not about GPUs."""
    kinds = common_distributed.MultiProcessTestCase, common_distributed.MultiProcContinuousTest
    words = f"{owner.__name__}.{test}".lower()
    return issubclass(owner, kinds) and not any(word in words for word in ("cuda", "nccl", "meta."))
