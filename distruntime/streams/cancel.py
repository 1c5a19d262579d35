"""`dr.cancel`: what is queued is dropped, after Ctrl-C in a loop for example; functions are interrupted.

A call may have parts on several workers, which wait for each other: `dr.spmd` issues such ones. They are
cancelled together, and they end where one of their workers is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch.utils._pytree import tree_leaves

from ..errors import UsageError, without_our_frames
from ..log.handle import Handle
from ..log.issue import stream_at
from ..log.log import CallPart, Log
from ..log.mesh_log import workers_of
from ..log.node import Node
from ..session.session import active_session, session_of_log
from ..session.spelling import living
from ..wire.messages import Cancel


@without_our_frames
def cancel(node: object = None) -> None:
    """Drop what a node, or every node, has been given and has not begun. Return at once.

    All streams count, and the meshes that have a member on the node: these are cancelled on all members, and
    so are calls of `dr.spmd`. Reading a dropped result raises `StreamCancelled`. A function of yours that
    runs is interrupted, as by Ctrl-C. An operator that runs, ends. What is issued afterwards runs.

    A function stops at its next line of Python. If it is in a sleep, in a lock or in C, it stops when that
    returns. The worker says so after five seconds; `dr.restart(node, force=True)` ends the worker. A function
    of `dr.spmd` stops wherever it is: its processes are ended.

    Args:
        node: a node's number; all nodes if left out, but for lost ones. Or what a function has returned: then
            only that call is dropped, or interrupted.

    Raises:
        PlacementError: there is no such node. NodeFailed: it is lost.
    """
    if node is not None and not isinstance(node, int):
        handles = [h for h in (getattr(leaf, "_handle", None) for leaf in tree_leaves(node)) if h is not None]
        if not handles or not all(isinstance(h, Handle) for h in handles):
            raise UsageError(
                f"dr.cancel of {type(node).__name__}: expected a node's number, or what one call of a "
                "function has returned"
            )
        for part in dict.fromkeys(part for handle in handles for part in _parts(handle)):
            _cancel_part(part, "")
        return
    session = active_session()
    with session.lock:
        nodes = living(session, node)
        meshes = [mesh for mesh in session.meshes if not set(mesh.workers()).isdisjoint(nodes)]
        for log in (*meshes, *nodes):
            drop(log, range(1 if log.order is None else log.order.count))


def _parts(handle: Handle) -> Sequence[CallPart]:
    """Return the parts of the call that has made a value."""
    log, storage = handle.place.node, handle.storage
    session_of_log(log).require_open()
    # A mesh's tensor may be made of what a call has returned on each member.
    for memory in (storage, *(storage.parts or {}).values()):
        if hasattr(memory, "parts_of_call"):
            return memory.parts_of_call
    if not isinstance(log, Node):
        raise UsageError("dr.cancel of a mesh's tensor: cancel those of its members, x.member(k)")
    return [CallPart(log, 0, handle.born[0])]


def _cancel_part(part: CallPart, reason: str) -> None:
    """Drop what one worker runs of a call, or interrupt it."""
    log, session = part.log, session_of_log(part.log)
    assert isinstance(log, Node)
    with log.lock:
        if log.failed is None and part.position > log.acknowledged:
            log.flush()
            session.post(log, Cancel(0, part.position, True, reason))


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
            message = Cancel(log.stream_on_wire(stream), position, False, "")
            for worker in workers_of(log):
                session.post(worker, message)
            for part in _elsewhere(log, stream):
                _cancel_part(part, "")


# -- calls with parts on several workers ---------------------------------------------------------------------


def cancel_together(calls: Sequence[Handle], results: Iterable[Handle]) -> None:
    """Note that these calls, each on a worker, are parts of one: whoever cancels one of them cancels all.

    `results` are what they return. If one of the workers is lost, the other parts end.
    """
    parts = [CallPart(call.place.node, stream_at(call.place), call.born[0]) for call in calls]
    for result in results:
        result.storage.parts_of_call = parts
    if len({part.log for part in parts}) < 2:
        return
    session = session_of_log(parts[0].log)
    with session.lock:
        if _lost not in session.on_loss:
            session.on_loss.append(_lost)
        for part in parts:
            together = part.log.together
            while together and next(iter(together)) <= part.log.acknowledged:
                del together[next(iter(together))]
            together[part.position] = parts
    for part in parts:
        # It may have been lost just now.
        if isinstance(part.log, Node) and part.log.failed is not None:
            _lost(part.log)


def _elsewhere(log: Log, stream: int) -> Iterator[CallPart]:
    """Yield what other workers run of the calls of which this stream has a part."""
    for position, parts in log.together.items():
        if position > log.acknowledged and any((part.log, part.stream) == (log, stream) for part in parts):
            yield from (part for part in parts if part.log is not log)


def _lost(node: Node) -> None:
    """End what other workers run of the calls of which a lost one has a part."""
    together, node.together = node.together, {}
    for parts in together.values():
        for part in parts:
            if part.log is not node:
                _cancel_part(part, f"{node} {node.failed}, and a part of the call ran there")
