"""Functions that cannot travel, do not return, end their process, or fail in odd ways: an error, and all else
goes on.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from processes import until


@pytest.fixture(autouse=True)
def _goes_on(session: object) -> Iterator[None]:
    yield
    if dr.is_initialized():
        assert torch.ones(2, device=dr.place(1)).tolist() == [1.0, 1.0]
        dr.synchronize()


def fails(function: Callable[..., object], *args: object, **options: Any) -> dr.errors.RemoteError:
    """Return what a call of a function on node 1 raises."""
    with pytest.raises(dr.errors.RemoteError) as caught:
        dr.fetch(dr.remote(function, **options)(*args, node=1))
    return caught.value


def there(error: BaseException) -> str:
    """Return the worker's traceback."""
    return str(error.__cause__)


# -- what cannot travel --------------------------------------------------------------------------------------


def test_a_function_that_cannot_be_pickled_names_what_it_captures() -> None:
    lock = threading.Lock()
    with pytest.raises(dr.errors.UsageError, match=r"`lock`, a lock, cannot be pickled .* Make it inside"):
        dr.remote(lambda: lock)()
    held = {"name": [1, lock]}
    with pytest.raises(dr.errors.UsageError, match=r"a lock, cannot be pickled"):
        dr.remote(lambda: held)()
    with pytest.raises(
        dr.errors.UsageError, match=r"an argument cannot travel to a worker: .*a lock, cannot"
    ):
        dr.remote(len)([lock])


LOCK = threading.Lock()


class Locked:
    """Travels with its body, as what a test defines does."""

    shared: ClassVar = {"lock": LOCK}

    def __init__(self, own: object = None) -> None:
        super().__init__()
        self.own = own

    def method(self) -> None:
        pass

    @classmethod
    def of_class(cls) -> None:
        pass


class Plain:
    def __init__(self, own: object) -> None:
        super().__init__()
        self.own = own

    def method(self) -> None:
        pass


class Uses:
    def __init__(self) -> None:
        super().__init__()

    @staticmethod
    def method() -> object:
        return [LOCK for _ in range(2)]


def by_default(x: int, held: object = LOCK) -> None:
    pass


def by_keyword(x: int, *, held: object = LOCK) -> None:
    pass


def calls_itself(x: int) -> object:
    return calls_itself(x - 1) if x else LOCK


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (by_default, "held"),
        (by_keyword, "held"),
        (calls_itself, "LOCK"),
        (Plain(LOCK).method, "Plain.own"),
        (functools.partial(len, [LOCK]), r"\[0\]"),
        (functools.partial(len, LOCK), r"partial.args\[0\]"),
        (functools.partial(print, end=LOCK), "end"),
        (functools.partial(by_default), "held"),
        (Locked, "lock"),
        (Locked.of_class, "lock"),
        (Uses, "LOCK"),
        (lambda: Uses(), "LOCK"),
        (lambda: [LOCK for _ in range(2)], "LOCK"),
    ],
)
def test_whatever_captures_what_cannot_be_pickled_is_followed(function: Any, named: str) -> None:
    with pytest.raises(dr.errors.UsageError, match=rf"`{named}`, a lock, cannot be pickled"):
        dr.remote(function)(1)


def test_a_result_that_cannot_be_pickled_stays_there() -> None:
    lock = dr.remote(threading.Lock)(node=1)
    with pytest.raises(dr.errors.RemoteError, match="lock cannot be pickled, so it stays on the worker"):
        dr.fetch(lock)
    assert dr.fetch(lock.locked()) is False  # type: ignore[attr-defined]


def test_a_module_that_is_missing_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "only_here"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def f(): return 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(package.parent))
    import only_here  # type: ignore[import-not-found]

    monkeypatch.setattr("distruntime.log.line._LIBRARIES", (str(package.parent),))
    with pytest.raises(dr.errors.RemoteError, match="the module 'only_here' is not installed on this worker"):
        dr.fetch(dr.remote(only_here.f)(node=1))
    sys.modules.pop("only_here")


def test_code_does_not_travel_to_another_version_of_python(
    session: Any, mesh: dr.mesh.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = session.nodes[1]
    monkeypatch.setattr(node, "welcome", dataclasses.replace(node.welcome, python="3.99.1"))
    wanted = r"cannot travel to node 1 .*, which runs Python 3\.99 and not 3\.\d+ as here: .*Run one version"
    with pytest.raises(dr.errors.ConfigurationError, match=r"test_code_.*<lambda> " + wanted):
        dr.remote(lambda: 1)(node=1)
    with pytest.raises(dr.errors.ConfigurationError, match="an argument of map " + wanted):
        dr.remote(map)(lambda x: x, [1], node=1)
    with pytest.raises(dr.errors.ConfigurationError, match=r"<lambda> " + wanted):
        dr.spmd(mesh, lambda: 1)()
    # What travels by its name is what that Python has.
    assert dr.fetch(dr.remote(sorted)({3, 1}, node=1)) == [1, 3]
    assert dr.fetch(dr.remote(lambda: 1)(node=0)) == 1


# -- what it raises ------------------------------------------------------------------------------------------


class Mine(Exception):
    """An error of the user's."""

    def __init__(self, code: int, lock: object = None) -> None:
        super().__init__(code, lock)


class Mute(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raises_mine() -> None:
    raise Mine(3, threading.Lock())


def test_an_error_of_the_users_own_shows_its_class() -> None:
    error = fails(raises_mine)
    assert "Mine: (3, <unlocked _thread.lock" in str(error)
    assert "raise Mine(3, threading.Lock())" in there(error)


def test_an_error_whose_text_raises() -> None:
    def mute() -> None:
        raise Mute

    error = fails(mute)
    assert "Mute: its text cannot be had: RuntimeError: no text" in str(error)
    assert "raise Mute" in there(error)


def test_the_cause_of_an_error_is_shown_and_no_frame_of_ours() -> None:
    def with_cause() -> None:
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("no such thing") from error

    error = fails(with_cause)
    assert isinstance(error, ValueError)
    text = there(error)
    assert "KeyError: 'key'" in text and "The above exception was the direct cause" in text
    assert '{}["key"]' in text and 'raise ValueError("no such thing") from error' in text
    assert text.count("  File ") == 2
    assert "calls.py" not in text and "python::call" not in text
    lines = [line for line in traceback.format_exception(error) if "distruntime/" in line]
    assert lines == []


def test_frames_of_a_library_are_shown_and_a_group_keeps_its_errors() -> None:
    error = fails(lambda: torch.nn.Linear(2, 2)(torch.ones(3)))
    assert "mat1 and mat2 shapes cannot be multiplied" in str(error)
    assert "torch.nn.Linear(2, 2)(torch.ones(3))" in there(error)
    assert "calls.py" not in there(error)


def test_a_deep_recursion_is_an_error() -> None:
    def deep(k: int) -> int:
        return deep(k + 1) + 1

    error = fails(deep, 0)
    assert isinstance(error, RecursionError) and "deep(k + 1)" in there(error)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (SystemExit, r"called sys.exit\(3\), and the worker goes on"),
        (KeyboardInterrupt, "raised KeyboardInterrupt"),
        (GeneratorExit, "raised GeneratorExit"),
    ],
)
def test_what_is_no_exception_does_not_end_the_worker(kind: type[BaseException], text: str) -> None:
    def ends() -> None:
        raise kind(3)

    with pytest.raises(dr.errors.RemoteError, match=text):
        dr.fetch(dr.remote(ends)(node=1))


# -- generators ----------------------------------------------------------------------------------------------


def test_a_generator_that_is_left_half_way_is_closed(tmp_path: Path) -> None:
    def numbers(closed: Path) -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            closed.touch()

    found = []
    generator = dr.remote(numbers)(tmp_path / "closed", node=1)
    for number in generator:  # type: ignore[attr-defined]
        found.append(dr.fetch(number))
        if len(found) == 2:
            break
    assert found == [0, 1] and not (tmp_path / "closed").exists()
    del generator, number
    dr.synchronize(1)
    until((tmp_path / "closed").exists)


# -- processes -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_does_not_serve_the_session(tmp_path: Path) -> None:
    def forks(folder: Path) -> int:
        pid = os.fork()
        if pid == 0:
            (folder / "child").write_text(str(os.getpid()), encoding="utf-8")
            print("from the child")
            return -1
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)

    assert dr.fetch(dr.remote(forks)(tmp_path, node=1)) == 0
    assert (tmp_path / "child").read_text(encoding="utf-8") != str(dr.nodes()[1].pid)

    def forks_and_raises() -> int:
        pid = os.fork()
        if pid == 0:
            raise ValueError("in the child")
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert dr.fetch(dr.remote(forks_and_raises)(node=1)) == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_multiprocessing_and_subprocess_work(capfd: pytest.CaptureFixture[str]) -> None:
    def uses_processes() -> tuple[list[int], str]:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            squares = pool.map(abs, [-1, -2, -3])
        done = subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True, check=True)
        return squares, done.stdout

    assert dr.fetch(dr.remote(uses_processes, returns=object)(node=1)) == ([1, 2, 3], "7\n")


def test_a_function_that_ends_the_process_is_named(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2)

    def leaves() -> None:
        os._exit(3)

    lost = dr.remote(leaves, returns=object)(node=1)
    with pytest.raises(dr.errors.NodeFailed, match=r"leaves called os\._exit\(3\), which ends the worker"):
        dr.fetch(lost)
    assert torch.ones(1, device=REMOTE).item() == 1.0

    def crashes() -> bytes:
        return ctypes.string_at(0)

    # Python's own report of a crash is in ASCII.
    file = re.escape(ascii(__file__)[1:-1])
    with pytest.raises(dr.errors.NodeFailed, match=rf'(?s)SIGSEGV.*Fatal.*{file}", line \d+ in crashes'):
        dr.fetch(dr.remote(crashes, returns=object)(node=0))
    dr.restart(0)
    assert torch.ones(1, device=REMOTE).item() == 1.0
    dr.shutdown()
