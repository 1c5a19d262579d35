"""`dr.restart`: another worker in a lost one's place."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from ..errors import ConnectionFailed, UsageError
from ..log.node import Node
from ..session.session import Session, active_session
from ..wire.deadlines import CONNECT
from ..wire.messages import Goodbye

log = logging.getLogger("distruntime")


def restart(node: int, *, timeout: float | timedelta | None = None) -> None:
    """Begin anew on a node: same number, new incarnation. Block until it is there.

    A worker of this machine is ended, if it runs, and started; a daemon must be running, and drops what this
    session has there. What lived on the node is lost, and tensors that named it keep saying so; groups and
    meshes with it are made anew.

    Args:
        node: its number.
        timeout: seconds to wait for the worker (those of `init_master_worker(timeout=)`).

    Raises:
        PlacementError: there is no such node. ConnectionFailed: no worker came in time.
    """
    session = active_session()
    wait = session.patience if timeout is None else CONNECT.get(timeout)
    session.places.devices(node)
    old = session.nodes[node]
    replace_worker(session, old, "was restarted by dr.restart()")
    deadline = time.monotonic() + wait
    worker = session.workers.of(old)
    old.presence.connecting = True
    try:
        session.requests.wait(
            lambda: session.nodes[node] is not old or (worker is not None and worker.poll() is not None),
            session.receiver.read,
            deadline,
            old,
        )
    finally:
        old.presence.connecting = False
    if session.nodes[node] is old:
        words = worker.last_lines(5) if worker is not None else ""
        where = f"at {old.address}" if not session.workers.can_start else "on this machine"
        raise ConnectionFailed(
            f"no worker came {where} within {wait:g} s to be node {node} again"
            + (f"; its last words:\n{words}" if words else "")
        )


def replace_worker(session: Session, old: Node, why: str) -> None:
    """Give a node up, if it is not lost yet, and have another worker take its place. Return at once."""
    if session.closed is not None:
        raise UsageError("the session is over")
    if old.failed is None:
        session.post(old, Goodbye(why))
        worker = session.workers.of(old)
        session.lose(old, why, quietly=True)
        if worker is not None:
            worker.stop()
    session.connector.revive(old)
