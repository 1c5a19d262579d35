"""What `init_master_worker` returns: the few things that a user asks of a session.

The session itself is in `session/session.py`. `active_session()` returns it to the code of this package and
to its tests.
"""

from __future__ import annotations

import html
from contextlib import suppress
from types import TracebackType
from typing import final

from ..errors import DistruntimeError, without_our_frames
from ..publishing.listing import Publications, published
from ..session import session as inner
from ..session.tables import table_text
from .memory import Memory, memory
from .nodes import Nodes, node_info, nodes


@final
class Session:
    """The session of this process.

    A context manager: leaving it shuts the session down.
    """

    __slots__ = ("__weakref__", "_session")

    def __init__(self, session: inner.Session) -> None:
        self._session = session

    @property
    def name(self) -> str:
        """The name that you gave it, or else one of its own: other sessions know what it shares by it."""
        return self._session.name

    @property
    def nodes(self) -> Nodes:
        """Its nodes with fresh figures: see `dr.nodes`. Blocks for one round trip, at most 1 s."""
        self._session.require_open()
        return nodes()

    @without_our_frames
    def memory(self, node: int | None = None, *, top: int = 10) -> Memory:
        """Return who holds the memory of a node, or of every node: see `dr.memory`."""
        self._session.require_open()
        return memory(node, top=top)

    @without_our_frames
    def names(self) -> Publications:
        """Return what is published: see `dr.names`. Block for one round trip."""
        self._session.require_open()
        return published(self._session)

    @without_our_frames
    def detach(self, timeout: float | None = None) -> None:
        """Leave a named session; its workers keep its values: see `dr.detach`."""
        self._session.ending.leave(timeout)

    @without_our_frames
    def shutdown(self, *, raise_unread: bool = True, timeout: float | None = None) -> None:
        """End the session; workers drop its values.

        What is in flight may take `timeout` seconds (10). With `raise_unread`, raise the first failure that
        nobody has read, after everything is closed. Block for `timeout` and 5 s at most, and beyond that for
        a checkpoint whose workers can be reached. Ctrl-C ends that, too.
        """
        self._session.ending.shut_down(raise_unread=raise_unread, timeout=timeout)

    def __repr__(self) -> str:
        # It asks no worker, as a debugger may call it at any time.
        session, name = self._session, f' "{self.name}"' if self._session.lasting else ""
        head = f"<distruntime session{name}, {session.closed or 'open'}>"
        if session.closed is not None:
            return head
        rows = [
            [f"node {node.index}", node.host, node.state, ", ".join(row[0] for row in node.welcome.devices)]
            for node in session.nodes
        ]
        return f"{head}\n{table_text(rows)}"

    def _repr_html_(self) -> str:
        session, head = self._session, f"<b>{html.escape(repr(self).partition(chr(10))[0])}</b>"
        if session.closed is not None or session.foreign:
            return head
        tables = Nodes(node_info(session, node) for node in session.nodes)._repr_html_()
        # The names are not known while a worker does not answer.
        with suppress(DistruntimeError):
            own = Publications(one for one in published(session) if one.owner == session.name)
            tables += own._repr_html_() if own else ""
        return f"<div>{head}{tables}</div>"

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, trace)
