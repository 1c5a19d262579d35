"""Kinds of state: what a process and its machine are asked for, as files, the environment and clocks."""

from __future__ import annotations

import builtins
import datetime
import gc
import os
import secrets
import sys
import tempfile
import time
import uuid
import warnings
from pathlib import Path

from state_kinds import Here, State, even, kind

# -- files ---------------------------------------------------------------------------------------------------


def _folder(here: Here) -> Path:
    return Path(here.enter_context(tempfile.TemporaryDirectory()))


@kind("recorded", r"io\.open")
def file_that_is_opened(here: Here) -> State:
    path = _folder(here) / "a"
    path.write_text("1", encoding="utf-8")

    def read() -> float:
        with open(path, encoding="utf-8") as file:
            return float(file.read())

    return read, (lambda k: path.write_text(str(k), encoding="utf-8"))


@kind("recorded", r"io\.(open|text_encoding)")
def file_read_by_its_path(here: Here) -> State:
    path = _folder(here) / "a"
    path.write_text("1", encoding="utf-8")
    return (lambda: float(path.read_text(encoding="utf-8"))), (
        lambda k: path.write_text(str(k), encoding="utf-8")
    )


@kind("recorded or refused", "file|TextIO")
def lines_of_an_open_file(here: Here) -> State:
    path = _folder(here) / "a"
    path.write_text("".join(f"{k}\n" for k in range(99)), encoding="utf-8")
    file = here.enter_context(path.open(encoding="utf-8"))
    return (lambda: float(next(file))), (lambda k: next(file))


@kind("recorded or refused", "file|open|read")
def descriptor_of_a_file(here: Here) -> State:
    path = _folder(here) / "a"
    path.write_text("1", encoding="utf-8")

    def read() -> float:
        number = os.open(path, os.O_RDONLY)
        try:
            return float(os.read(number, 9))
        finally:
            os.close(number)

    return read, (lambda k: path.write_text(str(k), encoding="utf-8"))


@kind("recorded or refused", "exists|stat")
def file_that_exists(here: Here) -> State:
    path = _folder(here) / "a"
    return (lambda: 2.0 if os.path.exists(path) else 1.0), (
        lambda k: path.touch() if even(k) else path.unlink(missing_ok=True)
    )


@kind("recorded or refused", "stat")
def size_of_a_file(here: Here) -> State:
    path = _folder(here) / "a"
    path.write_text("1", encoding="utf-8")
    return (lambda: os.stat(path).st_size), (lambda k: path.write_text("1" * k, encoding="utf-8"))


@kind("recorded or refused", "listdir")
def names_in_a_folder(here: Here) -> State:
    folder = _folder(here)
    return (lambda: len(os.listdir(folder)) + 1), (lambda k: (folder / str(k)).touch())


@kind("guarded or recorded or refused", "getcwd")
def current_folder(here: Here) -> State:
    folder = _folder(here)
    here.callback(os.chdir, os.getcwd())
    (folder / "longer").mkdir()
    os.chdir(folder)
    return (lambda: len(os.getcwd())), (lambda k: os.chdir(folder / "longer" if even(k) else folder))


# -- the process ---------------------------------------------------------------------------------------------

_NAME = "A_STATE_OF_A_PROGRAM"


@kind("guarded")
def environment(here: Here) -> State:
    here.callback(os.environ.pop, _NAME, None)
    os.environ[_NAME] = "1"
    return (lambda: float(os.environ[_NAME])), (lambda k: os.environ.update({_NAME: str(k)}))


@kind("guarded")
def environment_by_getenv(here: Here) -> State:
    here.callback(os.environ.pop, _NAME, None)
    return (lambda: float(os.getenv(_NAME, "1"))), (lambda k: os.environ.update({_NAME: str(k)}))


@kind("guarded or recorded or refused", "environ")
def environment_that_has_a_name(here: Here) -> State:
    here.callback(os.environ.pop, _NAME, None)

    def change(k: int) -> None:
        if even(k):
            os.environ[_NAME] = "1"
        else:
            os.environ.pop(_NAME, None)

    return (lambda: 2.0 if _NAME in os.environ else 1.0), change


@kind("guarded or recorded or refused", "environ")
def environment_in_bytes(here: Here) -> State:
    here.callback(os.environ.pop, _NAME, None)
    os.environ[_NAME] = "1"
    return (lambda: float(os.environb[_NAME.encode()])), (lambda k: os.environ.update({_NAME: str(k)}))


@kind("guarded or recorded or refused", "environ")
def environment_that_is_copied(here: Here) -> State:
    here.callback(os.environ.pop, _NAME, None)
    os.environ[_NAME] = "1"
    return (lambda: float(dict(os.environ)[_NAME])), (lambda k: os.environ.update({_NAME: str(k)}))


@kind("guarded or recorded", "getpid")
def number_of_the_process(here: Here) -> State:
    mine = os.getpid()
    return (lambda: os.getpid() - mine + 1), (lambda k: None)


@kind()
def arguments_of_the_process(here: Here) -> State:
    here.put(sys, "argv", ["1"])
    return (lambda: float(sys.argv[0])), (lambda k: setattr(sys, "argv", [str(k)]))


@kind()
def argument_in_place(here: Here) -> State:
    here.put(sys, "argv", ["1"])
    return (lambda: float(sys.argv[0])), (lambda k: sys.argv.__setitem__(0, str(k)))


@kind()
def attribute_of_sys(here: Here) -> State:
    here.put(sys, "state_of_a_program", 1.0)
    return (lambda: sys.state_of_a_program), (  # type: ignore[attr-defined]
        lambda k: setattr(sys, "state_of_a_program", float(k))
    )


@kind("guarded or recorded", "getrecursionlimit")
def limit_of_recursion(here: Here) -> State:
    first = sys.getrecursionlimit()
    here.callback(sys.setrecursionlimit, first)
    return (lambda: sys.getrecursionlimit() - first + 1), (lambda k: sys.setrecursionlimit(first + k))


@kind("guarded or recorded", "get_threshold")
def threshold_of_the_collector(here: Here) -> State:
    first = gc.get_threshold()
    here.callback(gc.set_threshold, *first)
    return (lambda: gc.get_threshold()[0] - first[0] + 1), (lambda k: gc.set_threshold(first[0] + k))


@kind("guarded or recorded", "warn")
def filters_of_warnings(here: Here) -> State:
    here.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")

    def read() -> float:
        try:
            warnings.warn("some", RuntimeWarning, stacklevel=1)
        except RuntimeWarning:
            return 2.0
        return 1.0

    return read, (lambda k: warnings.simplefilter("error" if even(k) else "ignore"))


@kind()
def input_that_is_patched(here: Here) -> State:
    """Its answer is kept where a guard can see it."""
    answers = ["1"]
    here.put(builtins, "input", lambda: answers[0])
    return (lambda: float(input())), (lambda k: answers.__setitem__(0, str(k)))


# -- clocks, and what no two calls get -----------------------------------------------------------------------


@kind("recorded or refused", "time", fresh=True)
def time_of_day(here: Here) -> State:
    return (lambda: time.time()), (lambda k: None)


@kind("recorded or refused", "monotonic", fresh=True)
def monotonic_clock(here: Here) -> State:
    return (lambda: time.monotonic_ns() % 10**12), (lambda k: None)


@kind("recorded or refused", "perf_counter", fresh=True)
def clock_of_high_resolution(here: Here) -> State:
    return (lambda: time.perf_counter()), (lambda k: None)


@kind("recorded or refused", "now", fresh=True)
def date_of_now(here: Here) -> State:
    return (lambda: datetime.datetime.now().timestamp()), (lambda k: None)


@kind("recorded or refused", "urandom", fresh=True)
def bytes_of_the_system(here: Here) -> State:
    return (lambda: int.from_bytes(os.urandom(6), "little")), (lambda k: None)


@kind("recorded or refused", "secrets|randbits|random", fresh=True)
def secret_numbers(here: Here) -> State:
    return (lambda: secrets.randbits(48)), (lambda k: None)


@kind("recorded or refused", "uuid|urandom", fresh=True)
def unique_name(here: Here) -> State:
    return (lambda: uuid.uuid4().int % 2**48), (lambda k: None)
