"""A function that runs is ended by its timeout, by dr.cancel and by stream.cancel, and by nothing else."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.session.session import active_session
from distruntime.wire.keys import KeyPair
from distruntime_worker.python.alarms import alarms
from distruntime_worker.python.running import Around, Interrupted, Running, Why
from processes import STARTING, ListeningWorker, until


def for_ever(begun: Path | None = None) -> None:
    if begun is not None:
        begun.touch()
    limit = time.monotonic() + 200
    while time.monotonic() < limit:
        pass


def test_a_timeout_ends_a_function(session: object) -> None:
    endless = dr.remote(for_ever, returns=object, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"for_ever ran for longer than its timeout of 0\.05 s") as caught:
        dr.fetch(endless(node=1))
    assert isinstance(caught.value, dr.errors.RemoteError)
    assert "while time.monotonic()" in str(caught.value.__cause__) or "pass" in str(caught.value.__cause__)
    assert torch.ones(1, device=dr.place(1)).item() == 1.0


def test_a_timeout_counts_the_call_alone(session: object) -> None:
    brief = dr.remote(lambda: os.getpid(), timeout=30).options(node=1)
    assert dr.fetch(brief()) == dr.nodes()[1].pid
    slow = dr.remote(time.sleep, returns=object)(0.3, node=1)
    # It waits for longer than it may run.
    assert dr.fetch(dr.remote(lambda: 3, returns=object, timeout=0.2)(node=1)) == 3
    dr.fetch(slow)


def cancelled(value: object, text: str = "was interrupted by dr.cancel") -> None:
    with pytest.raises(dr.errors.StreamCancelled, match=text):
        dr.fetch(value)


def test_cancelling_a_node_interrupts_what_runs_and_drops_the_rest(session: object, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    running = dr.remote(for_ever, returns=object)(begun, node=1)
    queued = dr.remote(len, returns=object)([1], node=1)
    other = dr.remote(len, returns=object)([1, 2], node=0)
    until(begun.exists)
    dr.cancel(1)
    cancelled(running)
    cancelled(queued, "before it ran")
    assert dr.fetch(other) == 2 and dr.fetch(dr.remote(len)([1], node=1)) == 1


def test_cancelling_a_stream_interrupts_its_function_alone(session: object, tmp_path: Path) -> None:
    first, second = dr.Stream(1, "cpu"), dr.Stream(1, "cpu")
    # Calls that may draw keep their order, on whatever streams.
    endless = dr.remote(for_ever, returns=object, random=False)
    with dr.stream(first):
        one = endless(tmp_path / "one")
    with dr.stream(second):
        two = endless(tmp_path / "two")
    until(lambda: (tmp_path / "one").exists() and (tmp_path / "two").exists())
    second.cancel()
    cancelled(two)
    first.cancel()
    cancelled(one)


def test_cancelling_one_call_leaves_the_others(session: object, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    running = dr.remote(for_ever, returns=object)(begun, node=1)
    x = torch.ones(3, device=dr.place(1)) + 1
    dropped = dr.remote(len, returns=object)([1], node=1)
    after = dr.remote(len, returns=object)([1, 2], node=1)
    dr.cancel(dropped)
    until(begun.exists)
    dr.cancel(running)
    cancelled(running)
    cancelled(dropped, "before it ran")
    assert dr.fetch([x, after])[1] == 2
    dr.cancel(after)
    assert dr.fetch(after) == 2
    with pytest.raises(dr.errors.UsageError, match="expected a node's number"):
        dr.cancel("one")


def careful(folder: Path) -> None:
    try:
        (folder / "begun").touch()
        limit = time.monotonic() + 200
        while time.monotonic() < limit:
            time.sleep(0.001)
    except Exception:
        (folder / "caught").touch()
    finally:
        (folder / "cleaned").touch()


def test_a_function_cleans_up_when_it_is_cancelled(session: object, tmp_path: Path) -> None:
    running = dr.remote(careful, returns=object)(tmp_path, node=0)
    until((tmp_path / "begun").exists)
    dr.cancel(running)
    cancelled(running)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "cleaned"]


def test_the_end_of_a_session_ends_its_functions(tmp_path: Path) -> None:
    dr.shutdown()
    KeyPair.generate().save(tmp_path / "key")
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0", "--key", str(tmp_path / "key"))
    folder = tmp_path / "of the function"
    folder.mkdir()
    try:
        dr.init_master_worker(workers=[worker.address], key=tmp_path / "key", quiet=True, timeout=STARTING)
        running = dr.remote(careful, returns=object)(folder)
        until((folder / "begun").exists)
        active_session().ending.shut_down(timeout=0.1)
        until((folder / "cleaned").exists)
        del running
    finally:
        dr.shutdown()
        worker.stop()


# -- an interrupt strikes inside the call only ---------------------------------------------------------------


def body(calls: list[int]) -> int:
    for k in range(3):
        calls.append(k)
    return len(calls)


def strike_calls(around: Around, run: Callable[[Running], object], interrupts: int) -> tuple[int, int]:
    """Run calls, and interrupt each somewhere: count those that were interrupted, and what ran after each."""
    current: list[Running] = []
    ended = threading.Event()

    def strike() -> None:
        last: Running | None = None
        while not ended.is_set():
            if current and current[-1] is not last:
                last = current[-1]
                last.interrupt(Why())

    thread = threading.Thread(target=strike)
    outside = interrupted = 0
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        limit = time.monotonic() + 60
        while (interrupted < interrupts or outside < 2 * interrupts) and time.monotonic() < limit:
            # As in `Calls._run`.
            call = around.call("f", None)
            current[:] = [call]
            try:
                try:
                    call.begin()
                    run(call)
                finally:
                    call.finish()
            except Interrupted:
                call.finish()
                interrupted += 1
            # This is the next instruction.
            outside += body([]) == 3
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)
    return interrupted, outside


@pytest.fixture
def around() -> Iterator[Around]:
    """What stands around calls, without a master."""
    made = Around(lambda message: None, lambda thread: None, lambda: True)
    yield made
    made.close()


@pytest.mark.slow(reason="interrupts for 5 s")
def test_no_interrupt_strikes_outside_of_its_call(around: Around) -> None:
    interrupted, outside = strike_calls(around, lambda call: body([]), 500)
    assert interrupted >= 500 and outside >= 1000


def test_an_interrupt_leaves_no_lock_taken_where_a_function_prints(around: Around) -> None:
    """It once struck where the worker entered a `Condition`: then all of its sessions waited, for ever."""
    sent: list[Any] = []
    around._send = sent.append

    def prints(call: Running) -> None:
        for k in range(3):
            call.write("stdout", f"{k}")
            call.patient()

    interrupted, outside = strike_calls(around, prints, 600)
    assert interrupted >= 600 and outside >= 1200 and sent
    rung = threading.Event()
    # In a thread of its own, since a lock that stayed taken would block for ever.
    threading.Thread(target=lambda: alarms.after(0.0, rung.set), daemon=True).start()
    assert rung.wait(30)


def test_an_interrupt_strikes_when_our_own_code_is_over(around: Around) -> None:
    call = around.call("f", None)
    call.begin()
    ran: list[str] = []

    def ours() -> None:
        call.interrupt(Why())
        ran.append("ours")

    with pytest.raises(Interrupted):
        call.unstruck(ours)
        ran.append("the user's")
    call.finish()
    assert ran == ["ours"]


def test_what_was_sent_too_late_is_taken_back(around: Around) -> None:
    call = around.call("f", None)
    call.begin()
    held: list[Any] = []

    def late() -> None:
        # No bytecode of the other thread runs between the two: the interrupt is pending, and taken back.
        call.interrupt(Why())

    thread = threading.Thread(target=late)
    with pytest.raises(Interrupted):
        thread.start()
        while True:
            held.append(None)
            held.clear()
    call.finish()
    call.interrupt(Why())
    assert body([]) == 3


def test_a_function_that_cannot_be_interrupted_is_told_of(
    session: object, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It waits in C, which no exception of Python's reaches."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def stuck(begun: Path, pipe: bytes) -> None:
        from distruntime_worker.python import running

        running._STUCK = 0.05
        begun.touch()
        # It blocks until somebody writes.
        ctypes.CDLL(None).open(pipe, os.O_RDONLY)

    running = dr.remote(stuck, returns=object)(tmp_path / "begun", bytes(pipe), node=1)
    until((tmp_path / "begun").exists)
    dr.cancel(1)
    told: list[str] = []

    def is_told() -> bool:
        told.append(capsys.readouterr().err)
        return "has not ended" in "".join(told)

    until(is_told)
    os.close(os.open(pipe, os.O_WRONLY))
    cancelled(running)
    dr.fetch(dr.remote(_patient)(node=1))
    err = "".join(told)
    assert "[node 1] " in err and "stuck was interrupted 0.05 s ago and has not ended" in err
    assert "dr.restart(node, force=True)" in err
    assert torch.ones(1, device=REMOTE).item() == 1.0


def _patient() -> None:
    from distruntime_worker.python import running

    running._STUCK = 5.0
