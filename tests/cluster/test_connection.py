"""One node's connection, without sockets, threads or clocks: from the first search to a later one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from distruntime.cluster.connection import (
    ATTEMPT,
    LONGEST_ATTEMPT,
    LONGEST_PAUSE,
    RESETS,
    SHORTEST_PAUSE,
    Connection,
)
from distruntime.cluster.connector import Connector
from distruntime.wire.channel import HANG_UPS
from distruntime.wire.messages import Join
from distruntime.wire.zeromq.connections import PeerEvent

ADDRESS = "tcp://10.0.0.1:29400"


@pytest.fixture
def connection() -> Connection:
    made = Connection(1, ADDRESS)
    made.seek("new", 0.0)
    return made


def report(connection: Connection, kind: str, peer: bytes, now: float, final: bool = True) -> bool:
    return connection.happened(PeerEvent(kind, peer, ADDRESS, final=final), now)  # type: ignore[arg-type]


def reach(connection: Connection, now: float) -> bytes:
    peer = connection.dial(now)
    assert report(connection, "connected", peer, now)
    connection.answered(peer, now)
    connection.welcomed(peer)
    return peer


def test_it_is_dialled_greeted_and_welcomed(connection: Connection) -> None:
    assert connection.is_due(0.0)
    peer = connection.dial(0.0)
    assert not connection.is_due(0.0) and not connection.abandoned
    assert report(connection, "connected", peer, 0.5)
    assert connection.answered(peer, 2.0) == ("new", 1.5)
    connection.welcomed(peer)
    assert connection.mode is None and not connection.first
    assert not connection.is_due(1e9) and not connection.attempts and not connection.abandoned


def test_it_is_greeted_once_on_a_connection_though_two_come_at_its_address(connection: Connection) -> None:
    peer = connection.dial(0.0)
    assert report(connection, "connected", peer, 0.1)
    assert not report(connection, "connected", peer, 0.2)


def test_each_connection_has_a_name_of_its_own(connection: Connection) -> None:
    names = set()
    for k in range(5):
        names.add(peer := connection.dial(float(k)))
        report(connection, "disconnected", peer, float(k))
    assert len(names) == 5 and set(connection.abandoned) == names


def test_a_pause_follows_each_attempt_that_fails_and_grows(connection: Connection) -> None:
    now, pauses = 0.0, []
    for _ in range(7):
        peer = connection.dial(now)
        report(connection, "disconnected", peer, now)
        before = now
        while not connection.is_due(now):
            now += 0.05
        pauses.append(round(now - before, 1))
    assert pauses[0] == SHORTEST_PAUSE and pauses == sorted(pauses) and pauses[-1] == LONGEST_PAUSE


def test_an_attempt_that_nobody_answers_ends_and_the_next_one_gets_longer(connection: Connection) -> None:
    now = 0.0
    for expected in (ATTEMPT, 2 * ATTEMPT, LONGEST_ATTEMPT, LONGEST_ATTEMPT):
        connection.dial(now)
        connection.expire(now + expected - 0.01)
        assert connection.attempts
        connection.expire(now + expected + 0.01)
        assert not connection.attempts
        now += expected + 10


def test_a_worker_that_dials_is_given_all_the_time(connection: Connection) -> None:
    awaited = Connection(0, "")
    awaited.seek("new", 0.0)
    assert not awaited.is_due(1e9)
    awaited.join(b"it", "new", b"incarnation", 0.0)
    awaited.expire(1e9)
    assert awaited.has_joined(b"incarnation") and not awaited.has_joined(b"another")


def test_the_first_answer_of_several_connections_counts() -> None:
    awaited = Connection(0, "")
    awaited.seek("again", 0.0)
    awaited.join(b"older", "again", b"w", 0.0)
    awaited.join(b"newer", "again", b"w", 1.0)
    awaited.welcomed(b"older")
    assert awaited.abandoned == [b"newer"] and not awaited.attempts


@pytest.mark.parametrize("first", [True, False])
def test_a_refused_key_ends_the_first_meeting_only(connection: Connection, first: bool) -> None:
    if not first:
        reach(connection, 0.0)
        connection.seek("again", 1.0)
    report(connection, "auth_failed", connection.dial(2.0), 2.0)
    assert (connection.failure is not None) is first
    assert connection.failure is None or "the keys do not match" in connection.failure


@pytest.mark.parametrize("first", [True, False])
def test_handshakes_that_surely_failed_mean_another_key_after_some(
    connection: Connection, first: bool
) -> None:
    if not first:
        reach(connection, 0.0)
        connection.seek("again", 0.0)
    for k in range(RESETS + 1):
        assert connection.failure is None
        report(connection, "handshake_failed", connection.dial(float(k)), float(k))
    assert (connection.failure is not None) is first


def test_one_that_hangs_up_in_the_handshake_is_dialled_by_libzmq_itself(connection: Connection) -> None:
    peer = connection.dial(0.0)
    for _ in range(HANG_UPS - 1):
        report(connection, "handshake_failed", peer, 0.0, final=False)
        assert peer in connection.attempts and connection.failure is None
    report(connection, "handshake_failed", peer, 0.0, final=False)
    assert connection.failure is not None and connection.abandoned == [peer]


def test_one_of_this_machine_that_hangs_up_in_the_handshake_is_dialled_anew() -> None:
    """It may have ended, and the machine would say so; libzmq alone would dial on for a whole attempt."""
    local = Connection(0, "ipc:///tmp/worker")
    local.seek("new", 0.0)
    peer = local.dial(0.0)
    assert local.is_local and not local.has_ended
    report(local, "handshake_failed", peer, 1.0, final=False)
    assert local.has_ended and local.abandoned == [peer] and local.failure is None
    assert local.is_due(1.0 + SHORTEST_PAUSE)


def test_a_refusal_ends_the_first_meeting_and_is_news_once_later(connection: Connection) -> None:
    peer = connection.dial(0.0)
    report(connection, "connected", peer, 0.0)
    connection.refused(peer, "no room", 0.0)
    assert connection.failure == "no room"
    later = Connection(0, ADDRESS)
    later.seek("new", 0.0)
    reach(later, 0.0)
    later.seek("new", 1.0)
    assert [later.refused(later.dial(t), why, t) for t, why in ((1.0, "a"), (2.0, "a"), (3.0, "b"))] == [
        True,
        False,
        True,
    ]
    assert later.failure is None


def test_another_search_abandons_what_the_one_before_has_begun(connection: Connection) -> None:
    reach(connection, 0.0)
    connection.seek("again", 1.0)
    peer = connection.dial(1.0)
    connection.seek("again", 2.0)
    assert peer in connection.attempts
    connection.seek("new", 3.0)
    assert connection.abandoned == [peer] and connection.is_due(3.0)
    connection.seek(None, 4.0)
    assert not connection.is_due(1e9)


def test_why_nobody_has_answered(connection: Connection) -> None:
    assert "nothing answers at" in connection.unanswered(7.0) and "within 7 s" in connection.unanswered(7.0)
    peer = connection.dial(0.0)
    report(connection, "connected", peer, 0.0)
    assert "accepts connections but did not answer as a worker within 7 s" in connection.unanswered(7.0)
    report(connection, "handshake_failed", peer, 0.0)
    assert "the keys do not match" in connection.unanswered(7.0)


def test_one_that_asks_for_a_place_again_and_again_is_kept_once() -> None:
    """Its connection may be a stranger's, where the user has said that there is to be no key."""
    session = SimpleNamespace(
        closed=None, name="s", lasting=False, challenge=SimpleNamespace(name="c"), greet=lambda *_: None
    )
    connector = Connector(
        session,  # type: ignore[arg-type]
        [""],
        ["new"],
        keep=1.0,
        grace=1.0,
        restart_workers=False,
    )
    connector.greeted(b"first", Join(None, 1, "here", b"1"))
    for _ in range(100):
        connector.greeted(b"second", Join(None, 2, "here", b"2"))
    assert len(connector._joins._surplus) == 1 and connector.knows(b"first")
