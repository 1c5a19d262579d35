"""How a session ends: its workers drop what they have, or are left with it for a later master."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, final
from weakref import WeakSet

from torch.utils.data import get_worker_info

from ..errors import SessionClosed, UsageError, WaitTimeout
from ..log.failure_log import Cause, WorkerWarnings
from ..log.log import Log
from ..log.node import Node
from ..log.progress import under_way
from ..wire.channel import Channel
from ..wire.deadlines import DETACH, SHUTDOWN
from ..wire.link import Delivery
from ..wire.messages import Detach, Goodbye, Message
from ..wire.shared import SharedPool
from ..wire.shield import shield
from ..wire.strangers import Tally
from .failures import remote_error
from .launched import LaunchedWorkers
from .places import Places
from .receiver import Pump, Receiver
from .requests import Requests
from .timeouts import checked, deadline_in

log = logging.getLogger("distruntime")

# Workers may take so many seconds to hear of the end.
_LAST_WORD = 1.0
# The session's own thread may take so many seconds to end, and as many all its workers before they are
# killed.
_LAST_STEPS = 2.0


class Outliving(Protocol):
    """What outlives a session and holds some of what belongs to it."""

    def part(self) -> None:
        """Let go of what belongs to the session, which has ended."""


# A program or a compiled graph may be there for as long as the process, and a session would stay with it.
outliving: WeakSet[Outliving] = WeakSet()


def closed_in_a_child() -> SessionClosed:
    """Return the error of who uses the session in a forked child, which a DataLoader may have made."""
    if get_worker_info() is None:
        loads = ""
    else:
        loads = (
            ". This is a process of a DataLoader: num_workers=0 lets the session's process load, and "
            "dr.data.data_loader has its processes at a worker"
        )
    return SessionClosed(
        "remote tensors belong to the process that made them; this is a forked child of it. "
        f"Fetch before you fork (dr.fetch), or call init_master_worker in the child{loads}"
    )


def _part() -> None:
    for one in list(outliving):
        one.part()


class Owner(Protocol):
    """What the end of a session needs of it."""

    channel: Channel
    closed: str | None
    lasting: bool
    name: str
    nodes: list[Node]
    places: Places
    pump: Pump
    receiver: Receiver
    requests: Requests
    shared: SharedPool
    strangers: Tally
    warnings: WorkerWarnings
    workers: LaunchedWorkers

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child of the process that owns the session."""

    @property
    def logs(self) -> Sequence[Log]:
        """What has a command log."""

    def post(self, node: Node, message: Message) -> Delivery:
        """Send one message to a worker; while it cannot be reached, the message waits."""

    def require_open(self) -> None:
        """Raise `SessionClosed` if the session has ended."""


@final
class Ending:
    """The end of one session, and what others want to be done then."""

    def __init__(self, session: Owner) -> None:
        self._session = session
        # It is True once the workers have been told to end the session. Those that are this session's alone
        # then exit, and nobody is to hear of that as a loss.
        self.told = False
        # The session calls these while its workers still answer. Each hears until when
        # (monotonic) to wait for those that cannot be reached; None stands for as long as it takes.
        self.before: list[Callable[[float | None], None]] = []
        # The session calls these when this process has let go of it.
        self.on_close: list[Callable[[], None]] = [_part]
        # The session calls these when it is over, and not only left by this process.
        self.on_end: list[Callable[[], None]] = []

    def shut_down(self, *, raise_unread: bool = True, timeout: float | None = None) -> None:
        """End the session: what is in flight may take `timeout` seconds (10), then workers drop their values.

        Raise the first failure that nobody has read, after everything is closed. Block for `timeout` and 5 s
        at most, and beyond that for a checkpoint whose workers can be reached. Ctrl-C ends that, too.
        """
        session = self._session
        limit = SHUTDOWN.get() if timeout is None else checked(timeout)
        if session.closed is None and not session.foreign:
            try:
                session.requests.output.end()
                self._shut_down(limit, raise_unread)
            finally:
                session.requests.output.show(patient=True)
                session.warnings.show()

    def _shut_down(self, limit: float | None, raise_unread: bool) -> None:
        session = self._session
        unread: list[tuple[Node, Cause]] = []
        try:
            deadline = self._prepare(limit)
            if raise_unread:
                unread = self._unread(deadline)
        finally:
            self.told = True
            try:
                late = self._part(Goodbye("the master shut the session down"), time.monotonic() + _LAST_WORD)
                if late and session.lasting:
                    log.warning(
                        "%s has not heard that the session %r is over, and may keep it until it expires",
                        late[0],
                        session.name,
                    )
            finally:
                # Ctrl-C may have come again. This takes no more than 2 s for the pump, and as many for all
                # workers together.
                with shield:
                    self._close("it was shut down")
                    session.workers.stop(time.monotonic() + _LAST_STEPS)
                    for callback in (
                        *self.on_close,
                        *([] if any(node.presence.taken for node in session.nodes) else self.on_end),
                    ):
                        callback()
        if unread:
            raise remote_error(*unread[0])

    def leave(self, timeout: float | None = None) -> None:
        """Leave the session to its workers: see `dr.detach`. Block as `shut_down` does."""
        session = self._session
        limit = DETACH.get() if timeout is None else checked(timeout)
        session.require_open()
        if not session.lasting:
            raise UsageError(
                "this session has no name, so nobody could come back to it: name it, "
                "init_master_worker(session=...), or end it with shutdown()"
            )
        late: list[Node] = []
        try:
            deadline = self._prepare(limit)
            for node in session.logs:
                node.flush()
            late = self._part(Detach("the master leaves"), deadline)
        finally:
            with shield:
                self._close('it was detached; resume="auto" attaches to it again')
                session.workers.leave()
                for callback in self.on_close:
                    callback()
        if late:
            raise WaitTimeout(
                f"not all that was issued to {late[0]} has arrived there within {limit:g} s; the rest is lost"
            )

    def _prepare(self, limit: float | None) -> float | None:
        """Wait for what must be over before the end; return until when (monotonic) the rest is waited for.

        Workers that cannot be reached are waited for once, not once for each thing that is waited for.
        """
        deadline = deadline_in(limit)
        for callback in self.before:
            callback(deadline)
        if limit is None or any(
            node.failed is None and node.presence.absence is not None for node in self._session.nodes
        ):
            return deadline
        return time.monotonic() + limit

    def _unread(self, deadline: float | None) -> list[tuple[Node, Cause]]:
        """Wait for what is in flight; return the first failure of each worker that nobody has read."""
        session = self._session
        for node in session.logs:
            node.flush()
        there = [node for node in session.nodes if node.failed is None and node.presence.absence is None]
        busy = next((n for n in there if n.flights), None)

        def idle() -> bool:
            here = [n for n in there if n.failed is None and n.presence.absence is None]
            return not any(n.flights for n in here)

        leave = "Ctrl-C ends the session now"
        if not session.requests.wait(idle, session.receiver.read, deadline, busy, leave):
            for node in there:
                count = under_way(node)
                if count and node.failed is None:
                    log.warning(
                        "%s has not run %s operation%s in time; the end of the session drops %s",
                        node,
                        f"{count:,}",
                        "s" if count > 1 else "",
                        "them" if count > 1 else "it",
                    )
        return [
            (n, n.failure_log.unread[next(iter(n.failure_log.unread))])
            for n in session.nodes
            if n.failure_log.unread
        ]

    def _part(self, word: Message, deadline: float | None) -> list[Node]:
        """Say the last word to each worker, and wait until it has arrived there.

        Return the workers where it has not.
        """
        session = self._session
        said = {node: session.post(node, word) for node in session.nodes if node.failed is None}

        def late() -> list[Node]:
            # A word may get its number a moment later, as another thread may just be using the socket.
            return [
                n for n, d in said.items() if not 0 < d.number <= d.link.acknowledged and n.failed is None
            ]

        session.requests.wait(lambda: not late(), session.receiver.read, deadline, next(iter(said), None))
        return late()

    def _close(self, why: str) -> None:
        session = self._session
        session.closed = why
        session.places.forget()
        session.requests.lose(None, "shutdown")
        session.pump.stop(_LAST_STEPS)
        session.channel.close()
        session.strangers.finish()
        session.shared.close()
