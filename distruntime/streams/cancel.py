"""`dr.cancel`: what is queued is dropped, after Ctrl-C in a loop for example; functions are interrupted."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import UsageError, without_our_frames
from ..log.handle import Handle
from ..log.log import Log
from ..log.mesh_log import workers_of
from ..log.node import Node
from ..session.session import active_session, session_of_log
from ..wire.messages import Cancel


@without_our_frames
def cancel(node: object = None) -> None:
    """Drop what a node, or every node, has been given and has not begun. Return at once.

    All streams count, and the meshes that have a member on the node: these are cancelled on all members.
    Reading a dropped result raises `StreamCancelled`. A function of yours that runs is interrupted, as by
    Ctrl-C. An operator that runs, ends. What is issued afterwards runs.

    A function stops at its next line of Python. If it is in a sleep, in a lock or in C, it stops when that
    returns. The worker says so after five seconds; `dr.restart(node, force=True)` ends the worker.

    Args:
        node: a node's number; all nodes if left out, but for lost ones. Or what a function has returned: then
            only that call is dropped, or interrupted.

    Raises:
        PlacementError: there is no such node. NodeFailed: it is lost.
    """
    handle = getattr(node, "_handle", None)
    if isinstance(handle, Handle):
        _cancel_call(handle)
        return
    if node is not None and not isinstance(node, int):
        raise UsageError(
            f"dr.cancel of {type(node).__name__}: expected a node's number, or what one call of a function "
            "on one worker has returned"
        )
    session = active_session()
    with session.lock:
        nodes = session.living(node)
        meshes = [mesh for mesh in session.meshes if not set(mesh.workers()).isdisjoint(nodes)]
        for log in (*meshes, *nodes):
            drop(log, range(1 if log.order is None else log.order.count))


def _cancel_call(handle: Handle) -> None:
    """Drop the call that has made a value, or interrupt it."""
    log = handle.place.node
    session = session_of_log(log)
    session.require_open()
    if not isinstance(log, Node):
        raise UsageError("dr.cancel of a mesh's tensor: cancel those of its members, x.member(k)")
    with log.lock:
        log.flush()
        session.post(log, Cancel(0, handle.born[0], True))


def drop(log: Log, streams: Iterable[int]) -> None:
    """Have the workers of a log drop what these of its streams have been given and have not begun."""
    session = session_of_log(log)
    with log.lock:
        log.flush()
        # Functions that are on their way are dropped too, so the next call sends them again.
        coming = [d for d, h in log.code.items() if isinstance(h, Handle) and h.born[0] > log.acknowledged]
        for digest in coming:
            del log.code[digest]
        if coming:
            session.places.forget(log)
        for stream in streams:
            position = log.base if log.order is None else log.order.cancelled(stream)
            message = Cancel(log.stream_on_wire(stream), position, False)
            for worker in workers_of(log):
                session.post(worker, message)
