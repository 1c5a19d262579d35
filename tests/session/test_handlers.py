"""Signal handlers that read values break no read, and get true values or are told why not."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.errors import ProtocolError
from distruntime.log.replies import is_plain, require
from distruntime.session import session as inner_session
from distruntime.session.session import Session, active_session
from processes import struck, until

REMOTE = "remote"


def test_a_handler_that_reads_breaks_no_read(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    # A handler that strikes inside the log's own code waits for so long until it is refused. With the five
    # seconds of a session, one to three of them were nearly all the time that this test took.
    monkeypatch.setattr(inner_session, "_INSIDE", 0.2)
    x, y = torch.ones(100, device=REMOTE), torch.zeros(3, device=REMOTE)
    read: list[float] = []
    refused: list[str] = []

    def handler() -> None:
        try:
            read.append(x.sum().item())
        except dr.DistruntimeError as error:
            refused.append(str(error))

    count = 0
    with struck(handler):
        while len(read) < 50:
            count += 1
            y += 1
            assert y[0].item() == count
    assert set(read) == {100.0}
    assert all("signal handler" in text for text in refused), refused


def test_a_message_that_a_handler_has_taken_is_not_missed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler runs after the look whether something has come, and before it is taken.

    It is played, as this is a matter of one bytecode.
    """

    class Struck(deque[Any]):
        def popleft(self) -> Any:
            self.clear()
            return super().popleft()

    opened = active_session()
    monkeypatch.setattr(opened.receiver, "_arrived", Struck([(b"peer", [])]))
    opened.receiver._take_in()
    monkeypatch.undo()
    assert torch.ones(1, device=REMOTE).item() == 1


def test_a_handler_that_strikes_as_the_socket_is_taken_is_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler runs after the lock is taken and before its holder's next line.

    It is played, as this is a matter of one bytecode. The thread waited for itself here, for ever.
    """
    channel, refused = active_session().channel, list[str]()
    x = torch.ones(3, device=REMOTE)

    class Struck:
        """The socket's lock; a handler strikes when a read takes it for the first time."""

        def __init__(self) -> None:
            # It is the very lock that another thread may hold at this moment.
            self._inner, self._left = channel._lock, 1
            self.acquire, self.release = self._inner.acquire, self._inner.release
            self.held_here = self._inner._is_owned  # type: ignore[attr-defined]

        def __enter__(self) -> None:
            self.acquire()
            if self._left and threading.current_thread() is threading.main_thread():
                self._left = 0
                with pytest.raises(dr.DistruntimeError, match="signal handler") as error:
                    x.sum().item()
                refused.append(str(error.value))

        def __exit__(self, *_: object) -> None:
            self.release()

    lock = Struck()
    monkeypatch.setattr(channel, "_lock", lock)
    monkeypatch.setattr(channel, "_held_here", lock.held_here)

    def has_struck() -> bool:
        # The receiver's thread may have the answer before this thread needs the lock.
        assert (x + 1).tolist() == [2.0] * 3
        return bool(refused)

    until(has_struck)
    assert len(refused) == 1


@pytest.mark.parametrize("depth", [65, 400, 1000, 100_000])
def test_an_answer_that_is_nested_deep_is_against_the_protocol(depth: int) -> None:
    value: Any = None
    for _ in range(depth):
        value = ["list", value]
    assert not is_plain(value)
    for form, answer in (("specs", [value]), ("item", value)):
        with pytest.raises(ProtocolError, match="asked for"):
            require(form, answer, None, None)


def test_an_answer_may_be_nested_as_deep_as_operators_need() -> None:
    value: Any = 1
    for _ in range(64):
        value = ["list", value]
    require("specs", [value], None, None)
