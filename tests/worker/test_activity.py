"""A worker looks at its streams while somebody asks, and its memory over time stays a short list."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.errors import ProtocolError
from distruntime.session.session import Session
from distruntime.wire.messages import AskActivity, MasterReport
from distruntime_worker.machine.devices import Devices
from distruntime_worker.session import activity, history
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
    assert found.devices[0] == "cpu" and found.memory[-1].nbytes[0] > 1 << 20 and 0 < found.every < 5


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


def test_the_history_of_memory_stays_short_and_covers_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    past = history.History(Devices(("cpu",)))
    for second in range(5000):
        now[0] = float(second)
        past.look()
    rows = past.rows()
    assert 100 < len(rows) <= history._MOST + 1
    assert rows[0].ago > 4900 and rows[-1].ago == 0 and rows[-1].nbytes[0]
    assert [row.ago for row in rows] == sorted((row.ago for row in rows), reverse=True)
