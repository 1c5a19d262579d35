"""`dr.workers.on_nodes`: hear of workers that are lost, and of those that come in their place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal, final

from ..errors import UsageError, without_our_frames
from ..log.node import Node
from ..session.session import Session, active_session

log = logging.getLogger("distruntime")


@dataclass(frozen=True)
class NodeChange:
    """What has happened to a node: its worker is "lost", and `why` says how, or a worker has "joined"."""

    node: int
    what: Literal["lost", "joined"]
    host: str
    pid: int
    why: str = ""


Listener = Callable[[NodeChange], object]


@final
class _Changes:
    """Tells listeners what happens in one session, in a thread of its own.

    The thread that sees a change reads the session's socket. A listener that waited there for a worker would
    wait for ever.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.listeners: list[Listener] = []
        self._waiting: SimpleQueue[NodeChange | None] = SimpleQueue()
        session.on_loss.append(self._lost)
        session.on_return.append(self._joined)
        session.ending.on_close.append(lambda: self._waiting.put(None))
        threading.Thread(target=self._tell, name="distruntime-tells-of-nodes", daemon=True).start()

    def _lost(self, node: Node) -> None:
        why = str(node.failed or "")
        self._waiting.put(NodeChange(node.index, "lost", node.host, node.welcome.pid, why))

    def _joined(self, node: Node) -> None:
        self._waiting.put(NodeChange(node.index, "joined", node.host, node.welcome.pid))

    def _tell(self) -> None:
        while (change := self._waiting.get()) is not None:
            for listener in list(self.listeners):
                try:
                    listener(change)
                except Exception:
                    # It is the user's function. The others are to hear of the change, too.
                    log.exception("a function that dr.workers.on_nodes() was given failed for %s", change)


_open: list[_Changes] = []


@without_our_frames
def on_nodes(listener: Listener) -> Callable[[], None]:
    """Call a function at each change of a node, until the session ends. Return at once.

    A change is a worker that is lost, or one that has come: see `NodeChange`. The calls
    come one after the other, in a thread of their own, so the function may wait for workers. What it raises
    goes to the log.

    Args:
        listener: it gets a `NodeChange`.

    Returns:
        A function that ends the calls.

    Raises:
        UsageError: no session is open, or `listener` cannot be called.
    """
    if not callable(listener):
        raise UsageError(f"on_nodes takes a function that gets a NodeChange, got {listener!r}")
    session = active_session()
    if not _open or _open[0].session is not session:
        _open[:] = [_Changes(session)]
        session.ending.on_close.append(_open.clear)
    changes = _open[0]
    changes.listeners.append(listener)

    def end() -> None:
        with suppress(ValueError):
            changes.listeners.remove(listener)

    return end
