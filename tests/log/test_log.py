"""The parts of a log: its base, which a worker and a mesh share, templates, predictions and failures."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.log.failure_log import Cause, FailureLog
from distruntime.log.log import Log
from distruntime.log.mesh_log import MeshLog
from distruntime.log.node import Node
from distruntime.log.templates import Checks, Templates
from distruntime.session.session import Session
from distruntime.wire.messages import FIRST_TEMPLATE, Done, Failure
from processes import blocked, until


@pytest.mark.parametrize("kind", [Node, MeshLog])
def test_a_log_overrides_no_concrete_method(kind: type[Log]) -> None:
    own = {
        name for name, value in vars(kind).items() if inspect.isfunction(value) or isinstance(value, property)
    }
    shared = {name for name in own & vars(Log).keys() if name != "__init__"}
    assert shared == Log.__abstractmethods__
    assert not inspect.isabstract(kind)


def test_the_first_log_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Log(None, 0, None, None, active=True, checks=0)  # type: ignore[abstract, arg-type]


def test_two_generations_of_templates_live() -> None:
    templates = Templates()
    first = templates.add(b"first", ["op"])
    assert (first, templates.find(b"first"), templates.find(b"second")) == (FIRST_TEMPLATE, first, None)
    assert templates.untold == [[first, "op"]]
    assert templates.expire() == first and templates.find(b"first") == first
    second = templates.add(b"second", ["op"])
    assert templates.expire() == second
    assert (templates.find(b"first"), templates.find(b"second"), len(templates)) == (None, second, 1)


def test_a_prediction_is_corrected_until_it_is_confirmed() -> None:
    checks, told = Checks(100), []  # type: ignore[var-annotated]
    numbers = [checks.add(lambda *what, k=k: told.append((k, *what))) for k in range(2)]
    assert numbers == [101, 102] and checks.last == 102
    checks.correct(101, 0, ["spec"])
    checks.correct(7, 0, ["nobody's"])
    checks.confirm(101)
    checks.confirm(101)
    checks.correct(101, 0, ["too late"])
    assert told == [(0, 0, ["spec"]), (0, None, [])]
    checks.confirm(200)
    assert told[2:] == [(1, None, [])]


def _cause(kind: str = "builtins.ValueError") -> Cause:
    return Cause(Failure(1, 1, kind, "text", "", "aten::add", ""), "x.py:1")


def test_a_failure_that_was_read_stays_for_who_reads_again() -> None:
    failure_log, cause = FailureLog(), _cause()
    failure_log.file((1, 4), cause)
    assert (1, 4) in failure_log and (1, 5) not in failure_log and failure_log.unread == {(1, 4): cause}
    assert failure_log.read((1, 4)) is cause and failure_log.read((1, 5)) is None
    assert not failure_log.unread and failure_log.read((1, 4)) is cause


def test_nobody_is_told_of_a_cancellation_that_somebody_has_asked_for() -> None:
    failure_log, cause = FailureLog(), _cause("distruntime.errors.StreamCancelled")
    failure_log.file((1, 4), cause)
    assert not failure_log.unread and failure_log.read((1, 4)) is cause


def test_the_oldest_of_too_many_failures_goes() -> None:
    failure_log = FailureLog()
    for position in range(1001):
        failure_log.file((1, position), _cause())
    assert (1, 0) not in failure_log and (1, 1) in failure_log and (1, 1000) in failure_log
    assert len(failure_log.unread) == 1000 and (1, 1000) not in failure_log.unread


@pytest.mark.parametrize(("on_mesh", "gone"), [(False, False), (True, False), (False, True)])
def test_a_segment_that_ctrl_c_kept_from_going_goes_by_itself(
    session: Session, on_mesh: bool, gone: bool
) -> None:
    """A read of its values waited for ever: nothing else was left to send. One that is `gone` runs once."""
    mesh = dr.init_device_mesh("cpu", (len(session.nodes),)) if on_mesh else None
    x = torch.ones(3, device="remote" if mesh is None else mesh.device)
    log = x._handle.place.node
    dr.synchronize()
    until(lambda: not log.flights)
    send = log.outlet.send

    def interrupted(*args: object, **kwargs: object) -> None:
        log.outlet.send = send
        if gone:
            send(*args, **kwargs)
        raise KeyboardInterrupt

    with log.lock:
        # No word may be sent meanwhile but the one of the operation.
        log.flush()
        log.enough = 1 << 30
        x.add_(1)
        log.outlet.send = interrupted
        with pytest.raises(KeyboardInterrupt):
            log.flush()
    until(lambda: log.outlet.unsent is None and not log.flights)
    # What is issued now comes behind all that has been sent.
    assert (x + 0).tolist() == [2, 2, 2]


def test_a_worker_that_is_lost_while_its_mesh_sends_is_waited_for_no_more(
    fresh_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finalizer that reads may learn of the loss between two workers."""
    session = fresh_session(world_size=2)
    mesh = dr.init_device_mesh("cpu", (2,))
    x = torch.ones(3, device=mesh.device)
    log = x._handle.place.node
    dr.synchronize()
    until(lambda: not log.flights)
    carry = Node.carry

    def lossy(self: Node, *about: Any) -> int:
        number = carry(self, *about)
        if self.index == 0:
            session.lose(session.nodes[1], "is lost, for a test")
        return number

    with log.lock:
        monkeypatch.setattr(Node, "carry", lossy)
        y = x + 1
        log.flush()
    assert session.nodes[1].failed is not None and not session.nodes[1].flights
    until(lambda: not log.flights, 20.0)
    assert y.member(0).tolist() == [2, 2, 2]


def test_an_acknowledgement_tells_of_several_segments_of_a_mesh(
    fresh_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with more to do tells of 8 segments at once, and of a failure at once."""
    session = fresh_session(world_size=2)
    mesh = dr.init_device_mesh("cpu", (2,))
    x, table = torch.ones(3, device=mesh.device), torch.zeros(2, device=mesh.device)
    log = x._handle.place.node
    dr.synchronize()
    until(lambda: not log.flights)
    told: list[tuple[int, bool]] = []
    done = Node.done

    def noted(self: Node, message: Done) -> None:
        if self.index == 0:
            told.append((message.seq, bool(message.failures)))
        done(self, message)

    monkeypatch.setattr(Node, "done", noted)
    with blocked(dr.default_stream(0, "cpu")):
        session.nodes[0].flush()
        first = session.nodes[0].outlet.seq
        for k in range(20):
            # The pump sends nothing in between.
            with log.lock:
                y = x + 1
                if k == 9:
                    bad = table[x.long() + 7]
                    log.flush()
                    failing = session.nodes[0].outlet.seq
                log.flush()
        last = session.nodes[0].outlet.seq
    until(lambda: not log.flights)
    numbers = [seq for seq, _ in told]
    # The wait itself is the worker's own segment.
    assert numbers[0] == first and numbers[-1] == last
    assert [seq for seq, failed in told if failed] == [failing]
    assert max(b - a for a, b in itertools.pairwise(numbers)) == 8
    assert len(numbers) <= 6
    assert y.member(1).tolist() == [2, 2, 2]
    with pytest.raises(IndexError):
        bad.member(0).tolist()
    with pytest.raises(IndexError):
        bad.member(1).tolist()


def test_a_segment_that_is_missing_ends_the_session(fresh_session: Callable[..., Any]) -> None:
    (node,) = fresh_session(world_size=1).nodes
    x = torch.ones(3, device="remote")
    dr.synchronize()
    node.outlet.seq += 1
    with pytest.raises(dr.errors.NodeFailed, match=r"segment \d+ came after \d+"):
        dr.fetch(x + 1, timeout=60)
