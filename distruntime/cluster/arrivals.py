"""Waiting until the workers of a session have come, or saying what became of those that have not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConnectionFailed
from ..log.handle import ranges
from ..log.node import Node
from ..session.launcher import Launcher, WorkerProcess, dialled_at, worker_command
from ..session.session import Session
from ..wire.address import trial_of
from ..wire.messages import Detach, Goodbye
from ..wire.scratch import remove
from .connection import Connection
from .connector import Connector

# Workers that have come may take so many seconds to hear that the session did not come about.
_LAST_WORD = 0.3
# An error names so many workers that have come.
_MOST_NAMED = 8


@dataclass(frozen=True)
class SessionOptions:
    """What a user has said about a session. `mode` is that of its greeting, the times are seconds."""

    name: str | None
    mode: str
    keep: float
    grace: float
    unreachable: float
    key: Path | None
    insecure: bool
    timeout: float
    restart_workers: bool
    simulate_cuda: int
    launcher: Launcher | None
    # Workers that dial become new nodes up to so many.
    most: int
    say: Callable[[str], None]


def meet(options: SessionOptions, connector: Connector, verb: str = "") -> None:
    """Read the socket until each node has a worker; raise `ConnectionFailed` where that will not be.

    `verb` says what workers do that are waited for: "start", or "dial" and where; "" where they are dialled.
    """
    session, started = connector.session, time.monotonic()
    tick, said = started + (0.0 if verb else 0.5), set[int]()
    while late := connector.late():
        if time.monotonic() > started + options.timeout:
            raise ConnectionFailed(_too_late(options, connector, late, verb))
        for connection in late:
            require_running(session, connection)
        if time.monotonic() > tick:
            options.say(".")
            tick += 0.25
        session.receiver.read(0.02)
        for node in [] if session.workers else list(connector.nodes.values()):
            if node.index not in said:
                said.add(node.index)
                options.say(
                    _arrival(
                        node, time.monotonic() - started, bool(verb), len(said), len(connector.connections)
                    )
                )
    connector.all_met()
    session.nodes += [connector.nodes[k] for k in range(len(connector.nodes))]


def _too_late(options: SessionOptions, connector: Connector, late: list[Connection], verb: str) -> str:
    if not verb:
        return "\n".join(connection.unanswered(options.timeout) for connection in late)
    missing, come = ranges([connection.number for connection in late]), list(connector.nodes.values())
    text = (
        f"{len(late)} of {len(connector.connections)} workers did not {verb} within {options.timeout:.0f} s: "
        + (f"node {missing} is missing" if len(late) == 1 else f"nodes {missing} are missing")
    )
    for node in come[:_MOST_NAMED]:
        text += f"; {node} has come (pid {node.welcome.pid})"
    if len(come) > _MOST_NAMED:
        text += f"; {len(come) - _MOST_NAMED} more have come"
    if verb != "start":
        address = connector.session.channel.address
        text += f". Start each with {worker_command(address, dials=True)}"
        # A name may stand for another machine there, and a firewall be between.
        if trial := trial_of(dialled_at(address)):
            text += f". If it runs, this shows on its machine whether it gets here: {trial}"
    else:
        text += ". This machine may be busy. Give them longer: timeout= or DISTRUNTIME_TIMEOUT"
    if connector.refused:
        text += f". This process {connector.refused[-1]}"
    return text + last_words(connector.session.workers)


def _arrival(node: Node, seconds: float, dials: bool, come: int, count: int) -> str:
    """Return what is said when a worker has come."""
    return (
        f"\n {node} after {seconds:.1f} s, {come} of {count} " if dials else f"{node.host} ({seconds:.1f} s) "
    )


def require_running(session: Session, connection: Connection) -> None:
    """Raise `ConnectionFailed` where a worker that was started has ended before it was ready."""
    number = connection.number
    worker = session.workers[number] if number < len(session.workers) else None
    if worker is not None and (ended := worker.poll()) is not None:
        raise ConnectionFailed(f"worker {number} ended before it was ready ({ended}){last_words([worker])}")


def last_words(workers: Sequence[WorkerProcess | None]) -> str:
    words = [text for worker in workers if worker is not None and (text := str(worker.last_lines(5)))]
    return "; the last lines of its log:\n" + "\n".join(words) if words else ""


@contextmanager
def all_or_nothing(connector: Connector, directory: Path | None = None) -> Iterator[None]:
    """Undo a session that does not come about in a `with` block, and remove the directory made for it."""
    session = connector.session
    try:
        yield
    except BaseException:
        why = "the session did not come about"
        for node in [node for node in connector.nodes.values() if node.failed is None]:
            # A session that has a name may be an older one, whose values must stay.
            session.post(node, Detach(why) if session.lasting else Goodbye(why))
        session.closed = "it did not come about"
        for worker in session.workers:
            if worker is not None:
                worker.stop(1.0)
        session.channel.close(_LAST_WORD if connector.nodes else 0.0)
        session.shared.close()
        for callback in session.ending.on_close:
            callback()
        if directory is not None:
            remove(directory)
        raise
