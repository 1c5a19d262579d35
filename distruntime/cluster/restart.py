"""`dr.restart`: another worker in a lost one's place."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from ..errors import ConnectionFailed, UsageError, without_our_frames
from ..launching.ssh_address import is_ssh
from ..log.node import Node
from ..session.session import Session, active_session
from ..wire.deadlines import CONNECT
from ..wire.messages import Goodbye
from .commands import worker_command

log = logging.getLogger("distruntime")


@without_our_frames
def restart(node: int, *, force: bool = False, timeout: float | timedelta | None = None) -> None:
    """Put another worker in a node's place, under the same number. Block until it is there.

    A worker of this machine is started; a daemon must be started by you, and this says how. What lived on the
    node is lost, and tensors that named it keep saying so; make groups and meshes with it again.

    Args:
        node: its number.
        force: end the worker that is there, if it runs. A daemon then begins anew by itself.
        timeout: seconds to wait for the worker (those of `init_master_worker(timeout=)`).

    Raises:
        UsageError: the node runs, and `force` is not set. PlacementError: there is no such node.
        ConnectionFailed: no worker came in time.
    """
    session = active_session()
    wait = session.patience if timeout is None else CONNECT.get(timeout)
    session.places.devices(node)
    old = session.nodes[node]
    if not force and _runs(session, old):
        raise UsageError(
            f"{old} runs (it is {old.state}), and a restart loses the tensors there. To restart it all the "
            f"same: dr.restart({node}, force=True)"
        )
    command = "" if session.workers.can_start(node) else _command(session, old)
    if command and old.failed is not None:
        old.presence.sought = f"start another worker in its place: {command}"
        log.warning("%s is lost. Start another worker in its place within %g s: %s", old, wait, command)
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
        where = f"at {old.address}" if command or is_ssh(old.address) else "on this machine"
        raise ConnectionFailed(
            f"no replacement for node {node} appeared {where} within {wait:g} s"
            + (f". Start one there: {command}. It joins by itself" if command else "")
            + (f"; its last lines:\n{words}" if words else "")
        )


def _runs(session: Session, node: Node) -> bool:
    """Whether a worker is there, as far as this process knows."""
    return (
        node.failed is None
        and node.presence.absence is None
        and session.workers.epitaph(node, wait=0) is None
    )


def _command(session: Session, node: Node) -> str:
    return worker_command(node.address, dials=node.address == session.channel.address)


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
