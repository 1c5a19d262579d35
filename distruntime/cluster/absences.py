"""Workers that are away: whether one is lost, whether anyone listens where it was, and whether what was
started in its place has ended, too.
"""

from __future__ import annotations

import logging
import socket
import threading

from ..log.node import Absence, Node
from ..session.launched import last_words
from ..session.session import Session
from ..wire.identity import has_died
from ..wire.units import span
from .connection import Connection

log = logging.getLogger("distruntime")

# A connection usually takes fewer seconds. Later, somebody looks if anyone listens there at all.
_SOON = 0.3
# Nobody need hear of an absence of fewer seconds.
_BRIEF = 1.0
# Whoever has started a worker says how it ended. On a busy machine that comes some seconds after the end.
_REPORTED = 10.0
# A worker is taken to be dead when nobody was listening so often in a row.
_REFUSALS = 2


def refuses(address: str) -> bool:
    """Whether the machine at an address says that nobody listens there. Block for two seconds at most."""
    transport, _, rest = address.partition("://")
    try:
        if transport == "ipc":
            # A socket of the wrong type never gets a connection: the kernel says EPROTOTYPE if somebody
            # listens, and refuses otherwise. So the worker sees nothing, and does not warn of a stranger.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                probe.connect(rest)
        else:
            host, _, port = rest.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), 2.0).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False


def _is_tunnelled(node: Node) -> bool:
    """Whether a worker is dialled at this machine's own address and runs on another one.

    Then a tunnel ends here, and says nothing about the worker.
    """
    local = any(part in node.address for part in ("://127.", "://localhost", "://[::1]"))
    return local and node.host != socket.gethostname()


def look_for(session: Session, connection: Connection, node: Node, grace: float, now: float) -> None:
    """Say that a worker is away, and declare it lost once that is certain or its time is over."""
    absence, welcome = node.presence.absence, node.welcome
    assert absence is not None
    _probe(connection, absence, now)
    if has_died(welcome.process):
        if session.workers.of(node) is None or now - absence.since > _REPORTED:
            session.lose(node, f"(pid {welcome.pid}) died: the process is gone")
    elif absence.refusals >= _REFUSALS and not _is_tunnelled(node):
        session.lose(node, f"died: its machine answers, and nobody listens at {node.address} any more")
    elif now - absence.since > _BRIEF and not absence.told:
        absence.told = True
        log.warning(
            "%s is unreachable: %s. The session waits for it, %s at most", node, absence.why, span(grace)
        )
    elif now - absence.since > grace:
        session.lose(
            node, f"was unreachable for {span(now - absence.since)}, since {absence.clock} ({absence.why})"
        )


def ended_early(session: Session, node: Node) -> bool:
    """Return whether the worker that was started in a lost one's place has ended, too, and warn of it."""
    worker = session.workers.of(node)
    ended = worker.poll() if worker is not None else None
    if worker is None or ended is None:
        return False
    node.presence.connecting = False
    log.warning(
        "%s: the worker that started in its place ended before it was ready: %s; its last lines:\n  %s",
        node,
        ended,
        "\n  ".join(last_words(worker)),
    )
    return True


def _probe(connection: Connection, absence: Absence, now: float) -> None:
    """Have a thread find out if anyone listens where a connection takes longer than usual."""
    if connection.is_tunnelled:
        # The tunnel's end is here, and says nothing about the worker.
        return

    def probe(absence: Absence) -> None:
        absence.refusals = absence.refusals + 1 if refuses(connection.address) else 0

    for attempt in connection.attempts.values():
        if not attempt.probed and attempt.greeted_at is None and now > attempt.dialled_at + _SOON:
            attempt.probed = True
            name = f"distruntime-probes-{connection.number}"
            threading.Thread(target=probe, args=(absence,), name=name, daemon=True).start()
