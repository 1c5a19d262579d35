"""The worker's own functions, those that are no operators.

They are called as instructions of the log, or for what they return.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ProtocolError
from ..log.handle import Handle, Place, new_value
from ..log.issue import issue_default
from ..log.line import user_line
from ..log.log import Log
from ..log.node import Node
from ..log.spec import NO_TENSOR
from ..operators.signatures import template
from ..session.requests import Request
from ..session.session import session_of_log
from ..wire.messages import LEARN
from .tensor import DistributedTensor


def issue_function(
    node: Log,
    function: str,
    args: Sequence[object],
    kwargs: dict[str, object] | None = None,
    fresh: Handle | list[Handle] | None = None,
    written: Sequence[DistributedTensor] = (),
) -> None:
    """Issue a call; `fresh` is the handle of its result, if it has one, or a list of several.

    Return at once. `written` are those of its operands that it may write, or poison.
    """
    results: object = 0 if fresh is None else [1] * len(fresh) if isinstance(fresh, list) else 1
    number, words = template(
        None, DistributedTensor, args, kwargs or {}, results, node, name=f"distruntime::{function}"
    )
    handles = [] if fresh is None else fresh if isinstance(fresh, list) else [fresh]
    operands = [
        t._handle
        for a in args
        for t in (a if isinstance(a, list) else (a,))
        if isinstance(t, DistributedTensor)
    ]
    memories = [one._handle.storage for one in written]
    issue_default([number, *words, *(h.ref for h in handles)], handles, operands, node, user_line(), memories)


def read_function(node: Node, function: str, args: Sequence[object] = ()) -> object:
    """Return what a call with constants returns, of numbers, strings and lists.

    Block until everything issued before it has run.
    """
    session = session_of_log(node)
    number, _ = template(None, DistributedTensor, args, {}, 1, node, name=f"distruntime::{function}")
    with node.lock:
        home = session.places.residence(Place(node.index, session.places.devices(node.index)[0]))
        kept = new_value(NO_TENSOR, home)
        request: Request[list[object]] = session.requests.new(node, "specs")
        try:
            issue_default([LEARN, request.number, number, kept.ref], [kept], (), node, user_line())
            node.flush()
        except BaseException:
            # Nobody waits for it.
            session.requests.discard(request)
            raise
    results = session.value(request)
    if len(results) != 1:
        raise ProtocolError(f"{node} answered {len(results)} results of {function}, which has one")
    return results[0]
