"""What workers' kernels warn of is shown here, at the line that issued it."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE, there
from distruntime.log.failure_log import WorkerWarnings
from distruntime.log.line import user_line

DEPRECATED = "Use of index_fill_ on expanded tensors is deprecated"


@pytest.fixture(autouse=True)
def _every_signature_is_new(session: dr.types.Session) -> Iterator[None]:
    dr.synchronize()
    session.places.forget()
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dr.synchronize()


def warns(device: str = REMOTE) -> torch.Tensor:
    index, x = torch.tensor([0], device=device), torch.zeros(1, device=device).expand(3)
    return x.index_fill_(0, index, 1.0)


LINE = warns.__code__.co_firstlineno + 2


@contextmanager
def heard(action: Any = "always") -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(action)
        yield found


def test_a_warning_comes_back_with_its_class_its_text_and_the_line(session: object) -> None:
    with heard() as here:
        warns("cpu")
    with heard() as found:
        warns()
        dr.synchronize()
    assert [w.category for w in found] == [w.category for w in here] == [UserWarning]
    assert str(found[0].message) == str(here[0].message)
    assert str(found[0].message).startswith(DEPRECATED)
    assert (os.path.basename(found[0].filename), found[0].lineno) == ("test_worker_warnings.py", LINE)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.cpu(),
        lambda x: x.sum().item(),
        lambda x: dr.fetch([x]),
        lambda x: dr.fetch_async(x).result(),
        lambda x: dr.synchronize(),
        repr,
    ],
    ids=["cpu", "item", "fetch", "fetch_async", "synchronize", "repr"],
)
def test_it_is_shown_when_this_process_has_waited(session: object, read: Callable[[Any], object]) -> None:
    with heard() as found:
        read(warns())
        assert len(found) == 1 and found[0].lineno == LINE


def test_it_is_shown_once(session: dr.types.Session) -> None:
    with heard("default") as found:
        for _ in range(5):
            warns()
            dr.synchronize()
        session.places.forget()
        warns()
        dr.synchronize()
    assert len(found) == 1


def test_a_filter_that_makes_it_an_error_raises_it_at_the_wait(session: object) -> None:
    x = warns()
    with heard("error"), pytest.raises(UserWarning, match=DEPRECATED):
        x.cpu()
    assert x.tolist() == [1, 1, 1]


def test_what_is_written_has_its_new_metadata_when_the_warning_is_raised(session: object) -> None:
    x, out = torch.tensor([0, 1, 1], device=REMOTE), torch.empty(0, dtype=torch.int64, device=REMOTE)
    warns()
    with heard("error"), pytest.raises(UserWarning, match=DEPRECATED):
        torch.nonzero(x, out=out)
    assert out.tolist() == [[1], [2]]


def test_all_members_of_a_mesh_have_been_asked_when_the_warning_is_raised(session: dr.types.Session) -> None:
    mesh = dr.init_device_mesh("cpu", (len(dr.nodes()),))
    x = torch.ones(2, device=mesh.device)
    out = torch.empty(0, dtype=torch.int64, device=mesh.device)
    warns()
    with heard("error"), pytest.raises(UserWarning, match=DEPRECATED):
        torch.nonzero(x, out=out)
    assert [out.member(k).tolist() for k in range(len(mesh.places))] == [[[0], [1]]] * len(mesh.places)


def test_a_warning_that_is_raised_ends_no_group(session: object) -> None:
    x, y = there(torch.ones(1), 0), there(torch.ones(1), 1)
    warns()
    with heard("error"):
        group = dr.distributed.new_group([x.place, y.place])
        dr.distributed.all_reduce([x, y], group=group)
        with pytest.raises(UserWarning, match=DEPRECATED):
            dr.synchronize()
    assert x.tolist() == y.tolist() == [2]


def test_an_operator_whose_results_are_predicted_is_heard_too(session: object) -> None:
    with heard() as here:
        torch.ones(3).to(torch.complex32)
    with heard() as found:
        torch.ones(3, device=REMOTE).to(torch.complex32)
        dr.synchronize()
    # torch says this once in a process, and may have said it here.
    assert [str(w.message)[:40] for w in found] == ["ComplexHalf support is experimental and "]
    assert len(here) <= 1


def test_the_members_of_a_mesh_warn_once_each(session: dr.types.Session) -> None:
    mesh = dr.init_device_mesh("cpu", (len(dr.nodes()),))
    whole = dr.from_shards([there(torch.zeros(1), k) for k in range(len(mesh.places))], mesh)
    with heard("default") as found:
        whole.expand(3).index_fill_(0, torch.tensor([0]).to(mesh.device), 1.0)
        line = sys._getframe().f_lineno - 1
        dr.synchronize()
    assert [str(w.message)[: len(DEPRECATED)] for w in found] == [DEPRECATED]
    assert found[0].lineno == line


@pytest.mark.slow(reason="starts a program that imports torch, 4 s")
def test_the_switch_for_determinism_warns_as_here(session: object) -> None:
    def put(device: str) -> torch.Tensor:
        index, value = torch.tensor([0, 0], device=device), torch.ones(2, device=device)
        return torch.zeros(4, device=device).put_(index, value)

    put(REMOTE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with heard() as here:
            put("cpu")
        with heard() as found:
            put(REMOTE)
            dr.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [str(w.message) for w in found] == [str(w.message) for w in here] and len(here) == 1


def test_what_a_worker_says_is_bounded_and_cannot_steer_a_terminal() -> None:
    noted = WorkerWarnings()
    for k in range(10_000):
        noted.note("SystemExit", f"\x1b[2J{k}" + "x" * 100_000, user_line())
    noted.note("DeprecationWarning", "later", None)
    with heard() as found:
        noted.show()
    assert len(found) == 100
    assert all(w.category is UserWarning and len(str(w.message)) == 2000 for w in found)
    assert str(found[0].message).startswith("?[2J0x")
    with heard() as found:
        noted.note("DeprecationWarning", "one", None)
        noted.show()
        noted.show()
    assert [(w.category, str(w.message)) for w in found] == [(DeprecationWarning, "one")]


def test_a_thread_that_is_not_the_users_shows_nothing(session: dr.types.Session) -> None:
    with heard() as found:
        x = warns()
        done = threading.Event()
        dr.fetch_async(x).add_done_callback(lambda _: done.set())
        assert done.wait(60)  # the pump has read the warning, too
        assert not found
        dr.synchronize()
    assert len(found) == 1
