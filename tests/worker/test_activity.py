"""A worker looks at its streams while somebody asks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.errors import ProtocolError
from distruntime.session.session import Session
from distruntime.wire.messages import AskActivity, MasterReport
from distruntime_worker.session import activity
from processes import blocked, until


def asked(session: Session, node: int = 0) -> Any:
    return session.value(session.ask(session.nodes[node], AskActivity))


def test_a_stream_that_waits_says_so_and_the_master_says_where_it_is(session: Session) -> None:
    x = torch.ones(3, device="remote")
    dr.synchronize()

    def row() -> Any:
        (mine,) = [one for one in asked(session).sessions if one.name == session.name]
        return mine

    with blocked(dr.current_stream()):
        y = x + 1
        session.nodes[0].flush()
        until(lambda: row().streams[0].seen.endswith("ss"))
        assert row().streams[0].running == "a wait for another node"
        until(lambda: "test_activity.py" in row().at)
        until(lambda: "processes.py" in row().streams[0].line)
    assert y.sum().item() == 6.0
    assert row().held["cpu"] >= 12
    found = asked(session)
    assert 0 < found.every < 5


def test_nothing_is_looked_at_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_LINGER", 0.05)
    looking = activity.Activity({})
    assert looking.rows() == (activity._EVERY, [])
    until(lambda: looking._thread is None)
    assert not looking._looked_at and not [t for t in threading.enumerate() if t.name == "looks"]
    # It begins again.
    looking.rows()
    assert looking._thread is not None
    until(lambda: looking._thread is None)


@pytest.mark.parametrize("lines", [[3], [["a", 1, "b"]], [[1, 2]]])
def test_a_master_that_reports_nonsense_ends_its_session(lines: list[Any]) -> None:
    session: Any = object()
    with pytest.raises(ProtocolError, match="is no line of an instruction"):
        activity.Activity({}).told(session, MasterReport("", "", lines))
