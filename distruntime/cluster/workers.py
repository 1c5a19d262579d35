"""Workers that come while a session runs: in a lost one's place (`dr.restart`), or as one node more."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from pathlib import Path

from ..errors import ConfigurationError, ConnectionFailed, UsageError, without_our_frames
from ..launching.ssh_address import is_ssh
from ..log.node import Node
from ..session.launcher import worker_command
from ..session.session import Session, active_session
from ..wire.deadlines import CONNECT
from ..wire.keys import choose
from ..wire.messages import Goodbye
from ..wire.shield import Lock
from .connection import Connection
from .connector import Connector

log = logging.getLogger("distruntime")

# One node comes after the other, as each has the next number.
_adding = Lock()
# The thread that reads the socket drops a node that has not come within so many seconds.
_WITHDRAWN = 5.0


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


@without_our_frames
def add_worker(
    address: str | None = None,
    *,
    key: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    timeout: float | timedelta | None = None,
) -> int:
    """Give the session one node more. Block until its worker is there.

    The new node has the next number, and its devices have the next numbers of devices. Groups and meshes that
    are there stay as they are; `dr.distributed.new_group` and `dr.init_device_mesh` can use it at once.

    Args:
        address: where a daemon runs, as "tcp://gpubox:29400". Without it, a session that has started its
            workers starts one more in the same way, and one that began with `listen=` takes the next worker
            that dials.
        key, insecure: as those of `init_master_worker`; the key must be that of the session.
        timeout: seconds to wait for the worker (those of `init_master_worker(timeout=)`).

    Returns:
        The number of the node.

    Raises:
        UsageError: no session is open, or an address is needed. ConfigurationError: the address cannot be, or
            its key is not that of the session. ConnectionFailed: no worker came in time.
    """
    session = active_session()
    wait = session.patience if timeout is None else CONNECT.get(timeout)
    if address is not None:
        _require_usable(session, address, Path(key) if key is not None else None, insecure)
    elif session.workers.launch is None and not session.channel.address:
        raise UsageError(
            "the workers of this session were named by address. Name this one, too: "
            'dr.workers.add_worker("tcp://host:29400")'
        )
    with _adding:
        return _add(session, address, time.monotonic() + wait, wait)


def _require_usable(session: Session, address: str, key: Path | None, insecure: bool) -> None:
    """Raise unless the session can dial an address."""
    if is_ssh(address):
        raise ConfigurationError(
            f"got {address!r}: a session starts workers through ssh when it begins. Name it there, "
            "init_master_worker(workers=[...]), or start distruntime-worker on that machine and give its "
            "address"
        )
    channel = session.channel
    found = choose(address, path=key, insecure=insecure or channel.unproven)
    if found is not None and found != channel.keys:
        raise ConfigurationError(
            f"{address} needs a key, and "
            + ("this session has another one" if channel.keys is not None else "this session has none")
            + ": a session has one key, from its beginning. Begin it with the same key: "
            "init_master_worker(workers=[...], key=...)"
        )


def _add(session: Session, address: str | None, deadline: float, wait: float) -> int:
    starts = address is None and session.workers.launch is not None
    number = len(session.nodes)
    where = session.workers.address(number) if address is None else address
    connector = session.connector
    assert isinstance(connector, Connector)
    connection = connector.add(where)
    assert connection.number == number
    try:
        if starts:
            session.workers.start(number)
        session.requests.wait(
            lambda: len(session.nodes) > number or _hopeless(session, connection),
            session.receiver.read,
            deadline,
        )
        if len(session.nodes) > number:
            return number
        raise ConnectionFailed(_why_none(session, connection, wait))
    finally:
        if len(session.nodes) <= number:
            _take_back(session, connector, connection)


def _hopeless(session: Session, connection: Connection) -> bool:
    """Whether no worker can come any more."""
    return connection.failure is not None or _ended(session, connection.number) is not None


def _ended(session: Session, number: int) -> str | None:
    worker = session.workers[number] if number < len(session.workers) else None
    return worker.poll() if worker is not None else None


def _why_none(session: Session, connection: Connection, wait: float) -> str:
    number = connection.number
    worker = session.workers[number] if number < len(session.workers) else None
    if worker is not None:
        ended, words = worker.poll(), worker.last_lines(5)
        how = (
            f"ended before it was ready ({ended})"
            if ended is not None
            else f"did not start within {wait:g} s"
        )
        return f"worker {number} {how}" + (f"; the last lines of its log:\n{words}" if words else "")
    if connection.address:
        return connection.failure or connection.unanswered(wait)
    return f"no worker has dialled {session.channel.address} within {wait:g} s. Start one: " + worker_command(
        session.channel.address, dials=True
    )


def _take_back(session: Session, connector: Connector, connection: Connection) -> None:
    """Seek a worker no longer that has not come, and end it if this process has started it."""
    number = connection.number
    worker = session.workers[number] if number < len(session.workers) else None
    if worker is not None:
        worker.stop(0)
        del session.workers[number:]
    connector.withdraw(connection)
    session.requests.wait(
        lambda: session.closed is not None or connection not in connector.connections,
        session.receiver.read,
        time.monotonic() + _WITHDRAWN,
    )
