"""A pytest plugin for PyTorch's own test files, `-p torch_tests_plugin --plan FILE`.

It begins a session, chooses tests, and writes a row for each. If a test fails, it runs again: waiting after
each operator, and without remote tensors. `run.py` judges the rows.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol
from torch.utils._python_dispatch import TorchDispatchMode

import distruntime as dr
from rows import ALIKE, DEFAULT, DEVICE, LOCAL, MESH, PATIENCE, SPMD, Plan, Row, append, twin

# What such an error misses may have been raised too late. Another error would only come again.
TOO_LATE = re.compile(
    r"not raised|does not match|[Ww]arning|not found in|is not true|DID NOT RAISE|poisoned|Unexpected success"
)
# The time of a test ends with this, also while its operations are waited for.
LATE_ALARM = (pytest.fail.Exception,)
# This file has a way of its own: see `inductor_tests.py`.
INDUCTOR = "test_torchinductor"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plan")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Runner(Plan.read(config.getoption("--plan"))))


class InStep(TorchDispatchMode):
    """Waits after each operator. A test that fails without it only, is told of a mistake too late.

    A write that has failed leaves a tensor that cannot be read. `dr.synchronize` raises only once, so it
    says nothing of the next mistake with this tensor. With `reads`, each use of it raises.
    """

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        dr.synchronize()
        if self.reads:
            dr.fetch(result)
        return result


def digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()


def first(names: Iterable[str], most: int, seed: int) -> set[str]:
    """Draw tests. The same seed draws the same ones."""
    return set(sorted(names, key=lambda name: digest(f"{seed} {name}"))[: most or None])


def sample(names: Iterable[str], most: int, seed: int) -> set[str]:
    """Draw tests, with one dtype of each test and operator."""
    by_test: dict[str, list[str]] = {}
    for name in names:
        by_test.setdefault(re.split(r"_(?:remote|cpu)(?=_|$)", name)[0], []).append(name)
    if not most:
        return {name for members in by_test.values() for name in members}
    one_each = [name for members in by_test.values() for name in first(members, 1, seed)]
    return first(one_each, most, seed)


def in_slice(name: str, k: int, of: int) -> bool:
    return int(digest(name), 16) % of == k - 1


def forget(item: pytest.Item) -> None:
    """Let a test make its operands anew: torch's tests of modules keep those of the run before."""
    for value in inspect.unwrap(getattr(item, "function", forget)).__defaults__ or ():
        if isinstance(cache := getattr(value, "_arg_cache", None), dict):
            cache.clear()


@contextlib.contextmanager
def by_default() -> Generator[None]:
    """Make the session's place the default device, also for what a file brings back.

    A file has local tensors, and `map_location="remote"` is what docs/checkpoints.md tells users to say.
    """
    load = torch.load

    @functools.wraps(load)
    def load_there(*args: Any, **named: Any) -> Any:
        # The second argument is the device.
        return load(*args, **named) if len(args) > 1 else load(*args, **{"map_location": "remote", **named})

    torch.load = load_there
    try:
        with torch.device("remote"):
            yield
    finally:
        torch.load = load


def of_a_cpus_class(own: Callable[..., None]) -> Callable[..., None]:
    """Let `torch.FloatTensor`, by which tests mean a CPU's tensors of a dtype, mean those of the place."""

    @functools.wraps(own)
    def check(self: Any, value: object, kind: Any, msg: object = None) -> None:
        is_remote = isinstance(value, torch.Tensor) and value.device.type == "remote"
        if type(kind) is type(torch.FloatTensor) and is_remote:
            value = torch.empty(0, dtype=value.dtype, device="cpu")
        own(self, value, kind, msg)

    return check


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1500]


def frames(error: BaseException) -> list[str]:
    # What a function on a worker has raised brings its frames there as the words of its cause.
    there = re.findall(r'File "(.+?)", line (\d+)', str(error.__cause__ or ""))
    here = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    found = [f"{Path(file).name}:{line}" for file, line in [*here, *there]]
    inner = ("contextlib.py", "unraisableexception.py", "case.py", "runner.py", "python.py")
    return [line for line in found if not line.startswith(inner)][-12:]


class Runner:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.twins: dict[str, pytest.Item] = {}
        # What stands around the tests of this mode: a device, or a mesh.
        self.around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        # What stands around a test that runs again without remote tensors.
        self.without: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        self.open: Callable[[], None] = self._open
        torch.set_num_threads(1)
        # A shell starts background jobs with Ctrl-C ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
        if plan.mode == MESH:
            import mesh_bases

            self.open = mesh_bases.open_session
            self.around = mesh_bases.around
        if plan.mode == SPMD:
            import spmd_bases

            spmd_bases.take_over()
            self.open = spmd_bases.open_session
            self.without = spmd_bases.in_processes_of_its_own
        self.open()
        # torch asks for the name of this device when it imports these modules, so the session comes first.
        import old_names

        old_names.give()
        if plan.mode == DEVICE:
            import remote_devices

            remote_devices.add()
            if any(INDUCTOR in file for file in plan.most):
                import inductor_tests

                inductor_tests.give_old_name()
        if plan.mode == DEFAULT:
            from torch.testing._internal import common_distributed, common_utils

            self.around = by_default
            common_utils.TestCase.assertIsInstance = of_a_cpus_class(common_utils.TestCase.assertIsInstance)
            # torch counts what a test has left around it. Where a test's own setUp leaves that out, the
            # device counts as left by the test.
            common_utils.TestCase._prev_torch_function_mode_stack_len = 1
            # torch's pipeline tests ask for a backend of GPUs, and then take the device of this session.
            common_distributed.requires_accelerator_dist_backend = lambda backends=None: lambda test: test

    def _open(self) -> None:
        dr.init_master_worker(world_size=1, timeout=max(PATIENCE, self.plan.patience))
        dr.config(num_threads=1)

    # -- which tests -------------------------------------------------------------------------------------

    def _wanted(self, item: pytest.Item) -> bool:
        owner = getattr(item, "cls", None)
        name = owner.__name__ if owner else ""
        if self.plan.mode == SPMD:
            import spmd_bases

            return bool(owner) and spmd_bases.is_wanted(owner, item.name)
        if name.endswith("LAZY"):
            # It is for torch's lazy backend, which cannot begin beside a session.
            return False
        if name.endswith(("CPU", "META")):
            self.twins[item.nodeid] = item
            return False
        return name.endswith("REMOTE") == (self.plan.mode == DEVICE)

    @pytest.hookimpl(wrapper=True)
    def pytest_pycollect_makeitem(
        self, collector: pytest.Module, name: str, obj: object
    ) -> Generator[None, object, object]:
        found = yield
        if self.plan.mode == DEVICE and name == "CpuTests" and isinstance(obj, type):
            import inductor_tests

            if collector.path.stem == INDUCTOR:
                return inductor_tests.collected(collector, obj)
        return found

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = [item for item in items if self._wanted(item)]
        by_file: dict[str, list[str]] = {}
        for item in wanted:
            by_file.setdefault(item.nodeid.partition("::")[0], []).append(item.nodeid)
        most = self.plan.most
        # A test of ranks has no dtypes in its name.
        choose = first if self.plan.mode == SPMD else sample
        chosen = {
            name for file, names in by_file.items() for name in choose(names, most[file], self.plan.seed)
        }
        if self.plan.slice:
            chosen = {name for name in chosen if in_slice(name, *self.plan.slice)}
        if self.plan.only:
            chosen = {item.nodeid for item in wanted if any(part in item.nodeid for part in self.plan.only)}
        if self.plan.exactly:
            chosen = set(self.plan.exactly)
        chosen -= set(self.plan.done)
        chosen = {name for name in chosen if not any(fnmatchcase(name, slow) for slow in self.plan.without)}
        items[:] = [item for item in wanted if item.nodeid in chosen]
        append(self.plan.rows, {"of": {file: len(names) for file, names in by_file.items()}})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that cannot be imported as a test that has failed."""
        if report.failed and report.nodeid:
            row = Row(f"{report.nodeid}::import", "failed", str(report.longrepr)[-600:])
            append(self.plan.rows, {"of": {report.nodeid: 0}})
            append(self.plan.rows, asdict(row))

    # -- one test ----------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        if self.plan.mode == MESH:
            import mesh_bases

            mesh_bases.speak_of_meshes(item.module)
        with self.around():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note the errors of a test and of its subtests."""
        report = yield
        if report.failed:
            error = call.excinfo.value if call.excinfo else None
            self.errors.append((words(error), frames(error)) if error else (str(report.longrepr)[-600:], []))
        return report

    def _run(self, item: pytest.Item) -> tuple[str, str, list[str]]:
        """Run a test, and return its outcome, its error, and where that was."""
        forget(item)
        setup = item.session._setupstate
        setup.teardown_exact(item if setup.stack else None)
        self.errors: list[tuple[str, list[str]]] = []
        reports = runtestprotocol(item, nextitem=item, log=False)
        if self.errors:
            return "failed", *self.errors[0]
        skips = [report for report in reports if report.skipped and not hasattr(report, "wasxfail")]
        return (
            ("skipped" if skips else "passed"),
            "".join(str(report.longrepr)[-300:] for report in skips),
            [],
        )

    def _again(self, item: pytest.Item, around: Callable[[], Any]) -> str:
        """Run a test in other surroundings, and return its outcome."""
        kept, self.around = self.around, around
        try:
            return self._run(item)[0]
        finally:
            self.around = kept

    def _in_step(self, item: pytest.Item, reads: bool) -> str:
        around = self.around

        @contextlib.contextmanager
        def waiting() -> Generator[None]:
            with around(), InStep(reads):
                yield

        outcome = self._again(item, waiting)
        self._settle(Row(item.nodeid, "failed"))
        return outcome

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        begun = time.monotonic()
        append(self.plan.rows, {"begun": item.nodeid})
        outcome, error, where = self._run(item)
        row = Row(item.nodeid, outcome, error, where)
        self._settle(row)
        if row.outcome == "failed":
            if self.plan.mode in (DEVICE, DEFAULT) and TOO_LATE.search(error):
                row.in_step = self._in_step(item, reads=False)
                if row.in_step == "failed":
                    row.in_step = self._in_step(item, reads=True)
            mate = item if self.plan.mode in (DEFAULT, SPMD) else self.twins.get(twin(item.nodeid))
            if mate is not None and self.plan.mode != LOCAL and not os.environ.get("NO_TWIN"):
                row.here = self._again(mate, self.without)
                if self.plan.mode == SPMD and row.here == "failed":
                    row.here = ALIKE if error.partition(":")[0] in self.errors[0][0] else "failed otherwise"
        item.session._setupstate.teardown_exact(nextitem)
        row.seconds = round(time.monotonic() - begun, 2)
        append(self.plan.rows, asdict(row))
        return True

    def _settle(self, row: Row) -> None:
        """Let no failure of this test reach the next one. A lost session is a failure, and another begins."""
        with contextlib.suppress(Exception, *LATE_ALARM):
            dr.synchronize()
        try:
            with self.around():
                usable = torch.ones(2, device="remote").sum().item() == 2.0
        except (Exception, *LATE_ALARM) as error:
            usable, row.outcome = False, "failed"
            row.error = f"the session was lost: {words(error)}; {row.error}"
        if not usable:
            with contextlib.suppress(Exception):
                dr.shutdown()
            self.open()

    def pytest_unconfigure(self) -> None:
        dr.shutdown()
