"""A worker that can start no more threads: what needs one fails and says so, and everything else goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.session.session import active_session

WORDS = r"threads and cannot start one more \({}.*ulimit -u.*pids.max"
# A value of so many numbers comes in parts, which a thread sends.
LARGE = 30_000_000


def _no_more() -> None:
    """Let this worker start no thread any more, as where `ulimit -u` is reached."""
    import threading as there

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    there.started_before = there.Thread.start  # type: ignore[attr-defined]
    there.Thread.start = start  # type: ignore[method-assign]


def _again() -> None:
    import threading as there

    there.Thread.start = there.started_before  # type: ignore[attr-defined, method-assign]


@pytest.fixture
def without_threads(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2)
    with dr.on(0):
        dr.remote(_no_more)()
    dr.synchronize()


def works() -> bool:
    return bool((torch.ones(3, device=dr.place(0, "cpu")) + 1).sum().item() == 6.0)


def why(value: torch.Tensor) -> str:
    """Return why a value is not there.

    A read that comes while the stream gets there needs a thread itself, and is tried again.
    """
    for _ in range(100):
        with pytest.raises(RuntimeError, match=WORDS.format("(?:stream-1|sends-parts)")) as raised:
            value.cpu()
        if "(sends-parts)" not in str(raised.value):
            break
    return str(raised.value)


def test_a_stream_without_a_thread_fails_alone(without_threads: None) -> None:
    kept = torch.ones(3, device=dr.place(0, "cpu"))
    with dr.stream(dr.Stream(0, "cpu")):
        for _ in range(2):
            assert "(stream-1)" in why(kept * 2)
    # What another stream has to wait for is there, and so is the value.
    assert works() and kept.sum().item() == 3.0


def _late() -> None:
    """Let each stream get to where a fetch waits for it right behind the reader's first look."""
    import importlib
    import threading as there

    answers = importlib.import_module("distruntime_worker.log.answers").Answers
    reached, looked = answers._reached, [0]

    def look(self: Any, stream: object, position: int) -> bool:
        if there.get_ident() == self._state.reader:
            looked[0] += 1
            if looked[0] % 2:
                return False
        return bool(reached(self, stream, position))

    answers._reached = look


def test_a_small_read_needs_no_thread(without_threads: None) -> None:
    with dr.on(0):
        dr.remote(_late)()
    kept = torch.ones(3, device=dr.place(0, "cpu")) + 1
    for _ in range(5):
        dr.synchronize()
        assert kept.tolist() == [2.0] * 3


def test_a_group_is_not_joined_and_can_be_when_there_is_room(without_threads: None) -> None:
    with pytest.raises(dr.errors.ConfigurationError, match=WORDS.format("join")):
        dr.distributed.new_group([0, 1])
    assert works()
    with dr.on(0):
        dr.remote(_again)()
    dr.synchronize()
    parts = [torch.ones(3, device=dr.place(node, "cpu")) for node in range(2)]
    dr.distributed.all_reduce(parts, group=dr.distributed.new_group([0, 1]))
    assert parts[0].sum().item() == 6.0


def test_a_save_fails_and_leaves_what_was_there(without_threads: None, tmp_path: Path) -> None:
    x = torch.ones(3, device=dr.place(0, "cpu"))
    with pytest.raises((RuntimeError, OSError), match=WORDS.format("ListFolder")):
        dr.save({"x": x}, tmp_path / "saved")
    assert works() and x.sum().item() == 3.0
    with dr.on(0):
        dr.remote(_again)()
    dr.synchronize()
    dr.save({"x": x}, tmp_path / "saved")
    assert dr.load(tmp_path / "saved")["x"].sum().item() == 3.0


def test_a_large_value_is_read_when_there_is_room(without_threads: None) -> None:
    # No shared memory: then a thread sends it in parts.
    active_session().nodes[0].shared = False
    x = torch.ones(LARGE, dtype=torch.uint8, device=dr.place(0, "cpu"))
    # It is there when it is asked for, so whoever receives messages answers.
    dr.synchronize()
    with pytest.raises(RuntimeError, match=WORDS.format("sends-parts")):
        x.cpu()
    assert works()
    with dr.on(0):
        dr.remote(_again)()
    dr.synchronize()
    assert x.cpu().sum().item() == LARGE
