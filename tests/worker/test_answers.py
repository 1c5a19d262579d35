"""Fetches and the threads that answer them, in an executor without a socket."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distruntime.wire.messages import Fetch, OpenStream, Part, Reply
from distruntime_worker.machine.devices import Devices
from distruntime_worker.session.executor import Executor


def test_a_reader_waits_for_no_thread_that_waits_for_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's thread sends a large value, and waits until the reader hears that it has arrived. A fetch
    for it comes just then.

    The stream gets there after the reader has looked, and before the reader looks again.
    """
    sent: list[Any] = []
    parts: list[SimpleNamespace] = []

    def send(message: Any, payload: Any = None, copy: bool = True) -> Any:
        sent.append(message)
        if not isinstance(message, Part):
            return None
        parts.append(SimpleNamespace(done=False))
        return parts[-1]

    executor = Executor(Devices(), send, lambda node, message: None)
    stream = executor.open(OpenStream(1, "cpu", 0, -1))
    executor.slots[7] = torch.ones(1_000_000)
    apart: list[threading.Thread] = []

    def do_apart(work: Any) -> None:
        apart.append(threading.Thread(target=work, daemon=True))
        apart[-1].start()

    executor.state.apart = do_apart
    executor.fetch(Fetch(1, 7, [1, 10], "tensor", {}))
    assert stream.waiting
    stream.reached = 10
    serving = threading.Thread(target=executor._answers.serve, args=(stream, 10), daemon=True)
    serving.start()
    while not parts:
        serving.join(0.01)
        assert serving.is_alive()

    looks = [False, True]
    monkeypatch.setattr(executor._answers, "_reached", lambda *_: looks.pop(0))

    def read() -> None:
        executor.state.reader = threading.get_ident()
        executor.fetch(Fetch(2, 7, [1, 12], "tensor", {}))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(20)
    assert not reader.is_alive()
    # what the reader hears now
    first = len(parts)
    for part in parts[:first]:
        part.done = True
    serving.join(20)
    while len(parts) < 2 * first:
        apart[0].join(0.01)
    for part in parts:
        part.done = True
    apart[0].join(20)
    assert [message.request for message in sent if isinstance(message, Reply)] == [
        1,
        2,
    ] and not stream.waiting
