"""`dr.cancel`: what is queued on a node is dropped, after Ctrl-C in a loop for example."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import without_our_frames
from ..log.log import Log
from ..log.mesh_log import workers_of
from ..session.session import active_session, session_of_log
from ..wire.messages import Cancel


@without_our_frames
def cancel(node: int | None = None) -> None:
    """Drop what a node, or every node, has been given and has not begun. Return at once.

    All streams count, and the meshes that have a member on the node: these are cancelled on all members.
    Reading a dropped result raises `StreamCancelled`. What runs, ends; what is issued afterwards runs.

    Args:
        node: a node's number; all nodes if left out, but for lost ones.

    Raises:
        PlacementError: there is no such node. NodeFailed: it is lost.
    """
    session = active_session()
    with session.lock:
        nodes = session.living(node)
        meshes = [mesh for mesh in session.meshes if not set(mesh.workers()).isdisjoint(nodes)]
        for log in (*meshes, *nodes):
            drop(log, range(1 if log.order is None else log.order.count))


def drop(log: Log, streams: Iterable[int]) -> None:
    """Have the workers of a log drop what these of its streams have been given and have not begun."""
    session = session_of_log(log)
    with log.lock:
        log.flush()
        for stream in streams:
            position = log.base if log.order is None else log.order.cancelled(stream)
            message = Cancel(log.stream_on_wire(stream), position)
            for worker in workers_of(log):
                session.post(worker, message)
