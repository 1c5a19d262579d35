"""One rank's part of a multi-process test of PyTorch's, in a member of `dr.spmd`.

A test that begins torch.distributed takes up the default group that SPMD has made, and one that ends it puts
that group aside. So its collectives, its subgroups and its DDP are on SPMD's own group. A test that wants
another group, with other options or of other ranks, makes its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import sys
import unittest
from collections.abc import Generator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.pipelining import _utils as pipeline_errors
from torch.testing._internal import common_distributed, common_utils

import cpu_answers

PASSED, SKIPPED = "passed", "skipped: "
_KEPT = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
_init_process_group = c10d.init_process_group
_destroy_process_group = c10d.destroy_process_group


def prepare() -> None:
    """Let the errors of tests through. It must come before a test file is imported."""
    cpu_answers.before_import()
    common_distributed.MultiProcessTestCase.run_test = _run_test
    # torch 2.13 gave this error another name, and a test file imports it by the old one.
    if renamed := getattr(pipeline_errors, "PipeliningMetadataError", None):
        pipeline_errors.PipeliningShapeError = renamed  # type: ignore[attr-defined]


def _run_test(self: Any, test_name: str, parent_pipe: object) -> None:
    """Run the test, and let its error through: a call of `dr.spmd` brings it to the caller."""
    common_utils.set_rng_seed()
    getattr(self, test_name)()
    if self.destroy_pg_upon_exit and dist.is_initialized():
        dist.destroy_process_group()


# -- the group -----------------------------------------------------------------------------------------------


class Spmd:
    """The default group that SPMD has made in this process."""

    def __init__(self) -> None:
        self._group = dist.GroupMember.WORLD
        self._timeout = c10d._get_default_timeout("gloo")
        self._aside: dict[str, dict[Any, Any]] = {}
        self._backend, self._store = c10d._world.pg_map[self._group]
        self._count, self._begun = c10d._world.group_count, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @contextlib.contextmanager
    def as_a_test_finds_it(self) -> Generator[None]:
        """Put the group aside for a test, and take it up again after it.

        A test that fails leaves it as it is, since SPMD then ends this process.
        """
        self._put_aside()
        # Tests raise the level of what torch.distributed tells, and leave it: torch ends their processes.
        dist.set_debug_level_from_env()
        with (
            mock.patch.object(dist, "init_process_group", self._begin),
            mock.patch.object(c10d, "init_process_group", self._begin),
            mock.patch.object(dist, "destroy_process_group", self._end),
            mock.patch.object(c10d, "destroy_process_group", self._end),
        ):
            yield
        if dist.is_initialized():
            self._end()
        self._take_up(self._timeout)

    def _begin(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        pg_options: Any = None,
        device_id: Any = None,
        **others: Any,
    ) -> None:
        plain = backend in (None, "gloo", "cpu:gloo") and not (group_name or pg_options or others)
        if dist.is_initialized() or not plain or world_size not in (-1, self.world):
            _init_process_group(
                backend,
                init_method,
                timeout,
                world_size,
                rank,
                store,
                group_name,
                pg_options,
                device_id,
                **others,
            )
        else:
            assert rank in (-1, self.rank)
            self._take_up(timeout or self._timeout)

    def _end(self, group: Any = None) -> None:
        if group not in (None, self._group) or dist.GroupMember.WORLD is not self._group:
            _destroy_process_group(group)
        else:
            self._put_aside()

    def _put_aside(self) -> None:
        world = c10d._world
        for group in [*world.pg_map]:
            if group is not self._group:
                _destroy_process_group(group)
        self._aside = {name: dict(getattr(world, name)) for name in _KEPT}
        for name in _KEPT:
            getattr(world, name).clear()
        c10d._unregister_process_group(self._group.group_name)
        c10d._update_default_pg(None)
        world.group_count = 0

    def _take_up(self, timeout: timedelta) -> None:
        world = c10d._world
        for name, kept in self._aside.items():
            getattr(world, name).update(kept)
        c10d._register_process_group(self._group.group_name, self._group)
        c10d._update_default_pg(self._group)
        c10d._set_pg_timeout(timeout, self._group)
        # A subgroup may have the name of one of an earlier test, whose ranks have left their addresses.
        world.group_count = self._count
        self._begun += 1
        world.pg_map[self._group] = self._backend, PrefixStore(f"begun {self._begun}", self._store)


_spmd: list[Spmd] = []


# -- one test ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A rank's part of a test. `path` has the folders of the test's files, and `file` is where ranks meet."""

    module: str
    path: tuple[str, ...]
    owner: str
    test: str
    file: str
    # After so many seconds it says where it is.
    told: float
    environment: dict[str, str]

    def load(self) -> Any:
        """Return the test's class."""
        prepare()
        sys.path[:] = dict.fromkeys([*self.path, *sys.path])
        os.environ.update(self.environment)
        return functools.reduce(getattr, self.owner.split("."), importlib.import_module(self.module))

    def run(self, cls: Any, rank: int, world: int) -> str:
        """Return whether it passed, or why it was skipped. Raise what it raises."""
        # A rank that hangs is ended, and it says before where it is.
        faulthandler.dump_traceback_later(self.told, file=sys.__stderr__)
        try:
            with cpu_answers.in_force():
                if issubclass(cls, common_distributed.MultiProcContinuousTest):
                    cls.rank, cls.world_size = rank, world
                    cls._init_pg(rank, world, self.file)
                    cls._run_test_given_id(self.test)
                else:
                    cls._run(rank, self.test, self.file, None)
        except unittest.SkipTest as reason:
            return f"{SKIPPED}{reason}"
        except SystemExit as end:
            skips = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
            if end.code in skips:
                return f"{SKIPPED}{skips[end.code]}"
            if end.code:
                raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        return PASSED


def run(part: dict[str, Any]) -> str:
    """Run a rank's part in a member."""
    what = Part(**part)
    if not _spmd:
        _spmd.append(Spmd())
    group = _spmd[0]
    with mock.patch.dict(os.environ):
        cls = what.load()
        # torch's runner begins the group after the imports. So some tests count on ranks that begin together.
        dist.barrier()
        # A test that begins torch.distributed at an address of its own starts the store there, too.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        with group.as_a_test_finds_it():
            return what.run(cls, group.rank, group.world)


def run_alone(answer: Connection, part: dict[str, Any], rank: int, world: int) -> None:
    """Run a rank's part in a process of its own, where the test makes its group as torch's runner has it."""
    torch.set_num_threads(1)
    what = Part(**part)
    try:
        said = what.run(what.load(), rank, world)
    # The test's error is the answer, whatever it is.
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    answer.send(said)
    # What hangs at the end of a process is no matter of the test.
    os._exit(0)
