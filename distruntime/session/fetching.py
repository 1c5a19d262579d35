"""What is asked of a worker's log: a value as it is at a position, or to say when all before it has run."""

from __future__ import annotations

import logging
import mmap
from typing import TypeVar

from ..errors import DistruntimeError
from ..log.line import user_line
from ..log.node import Node
from ..wire.messages import Fetch, Plain
from ..wire.shared import Loan
from ..wire.shield import shield
from .failures import remote_error
from .requests import Request
from .session import Session
from .timeouts import checked

log = logging.getLogger("distruntime")
R = TypeVar("R")


def ask_value(
    session: Session,
    node: Node,
    ref: int,
    after: list[int],
    form: str,
    options: dict[str, Plain],
    buffer: Loan | mmap.mmap | None = None,
) -> Request[R]:
    """Ask for a value, of the type that `form` brings. Return at once.

    Everything up to the positions in `after`, [stream, position, ...], is on its way then.

    `buffer` is where the parts of a large reply are put together.
    """
    session.require_open()
    node.require_alive()
    request: Request[R] = session.requests.new(node, form)
    posted = False
    try:
        request.buffer = buffer
        with node.lock:
            last = max(after[1::2])
            if last > node.base:
                node.flush(last)
                if last > node.base and any(log.flushing for log in session.logs):
                    raise DistruntimeError(
                        "a finalizer or a signal handler that runs inside the log's own sending cannot "
                        "wait for what is still to be sent: let it note what it wants, and read later"
                    )
            message = Fetch(request.number, ref, after, form, options)
            # A signal acts before the worker is asked, or once it is known that it was.
            with shield:
                session.post(node, message)
                posted = True
    except BaseException:
        # Nobody waits for it. But shared memory is the worker's to write once it was asked.
        if not (posted and isinstance(buffer, Loan)):
            session.requests.discard(request)
        raise
    return request


def synchronize_node(session: Session, node: Node, timeout: float | None = None) -> bool:
    """Block until a worker has run everything issued so far; raise its first unread failure.

    Return False past the timeout (seconds).
    """
    drained = drain(session, node, timeout)
    for callback in session.on_synchronize:
        callback()
    if not drained:
        return False
    raise_unread(session, node)
    return True


def drain(session: Session, node: Node, timeout: float | None = None) -> bool:
    """Block until a worker has run everything issued so far. Return False past the timeout (seconds)."""
    timeout = checked(timeout)
    request = until_run(session, node)
    if not session.result(request, timeout):
        session.requests.discard(request)
        return False
    session.raise_for(request)
    return True


def drain_checks(session: Session) -> None:
    """Block until workers have confirmed what new operators return, or have corrected it."""
    for node in session.nodes:
        if node.failed is None and node.checks.waiting:
            drain(session, node)


def until_run(session: Session, node: Node) -> Request[None]:
    """Ask a worker to answer when it has run everything issued so far. Return at once."""
    node.require_alive()
    with node.lock:
        node.follow_meshes(user_line())
        node.flush()
        target = node.base
    request: Request[None] = session.requests.new(node, "done")
    try:
        session.post(node, Fetch(request.number, 0, [0, target], "done", {}))
    except BaseException:
        session.requests.discard(request)
        raise
    return request


def raise_unread(session: Session, node: Node) -> None:
    """Raise the first failure on `node` that nobody has read.

    Later ones depend on it, or come next time.
    """
    if node.failure_log.unread:
        key = next(iter(node.failure_log.unread))
        more = len(node.failure_log.unread) - 1
        cause = node.failure_log.unread[key]
        node.failure_log.unread.clear()
        if more:
            log.warning(
                "%s: besides the operation whose error is raised now, %s%d other%s failed; each of their "
                "results raises its own cause",
                node,
                "at least " if more >= 999 else "",
                more,
                "s" if more > 1 else "",
            )
        raise remote_error(node, cause, lambda: session.poisoned(node))
