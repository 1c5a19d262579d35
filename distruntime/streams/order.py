"""Which logs can have several streams, from when on they have an order among these, and what it is to do."""

from __future__ import annotations

from ..errors import without_our_frames
from ..log.log import Log
from ..log.mesh_log import MeshLog
from ..log.order import Order
from ..session.session import active_session, session_of_log


def has_streams(log: Log) -> bool:
    """Whether a log can have streams: no stream is of several GPUs of one node."""
    several = isinstance(log, MeshLog) and any(len(ranks) > 1 for ranks in log.ranks.values())
    return not (log.asynchronous and several)


def order_of(log: Log) -> Order:
    """Return the order among a log's streams.

    From the first call on, its instructions go the way that knows streams.
    """
    order: Order | None = log.order
    if order is None:
        with log.lock:
            if log.order is None:
                log.order = Order(log)
                session_of_log(log).places.hide(log)
            order = log.order
    assert order is not None
    return order


@without_our_frames
def set_implicit_waits(enabled: bool) -> None:
    """Say whether instructions wait by themselves for other streams' writes and reads; True at first.

    False is CUDA's own rules. It counts for what is issued from now on, in the whole session. A value that is
    not made yet is waited for all the same.
    """
    for node in active_session().nodes:
        if node.failed is None:
            order_of(node).implicit = enabled
