"""Blocking until whole nodes and devices have run what they have, whatever the stream."""

from __future__ import annotations

from ..errors import WaitTimeout, without_our_frames
from ..log.current import DeviceLike
from ..log.handle import Residence
from ..log.line import line_text, user_line
from ..session.fetching import synchronize_node
from ..session.session import active_session
from ..session.spelling import home_of_stream
from ..session.timeouts import checked, deadline_in, left_until
from .stream import numbered_stream


@without_our_frames
def synchronize(
    node: int | None = None, device: DeviceLike | None = None, timeout: float | None = None
) -> None:
    """Block until a node, or every node, has run everything issued so far; raise the first unread failure.

    With `device`, only what was issued to this device's streams of the node (default: the current one)
    counts. Raises `WaitTimeout` after `timeout` seconds. Ctrl-C leaves the session usable.
    """
    session, timeout = active_session(), checked(timeout)
    if device is not None:
        synchronize_device(home_of_stream(node, device), timeout)
        return
    if node is not None:
        session.places.devices(node)
    deadline = deadline_in(timeout)
    for candidate in session.nodes:
        if node is None and candidate.failed is not None:
            continue
        if node is None or candidate.index == node:
            left = left_until(deadline)
            if not synchronize_node(session, candidate, left):
                raise WaitTimeout(
                    f"{candidate} has not run everything within {timeout:g} s\n"
                    f"  waited for at {line_text(user_line())}\n"
                    "  it goes on; wait again, or see what it does: dr.nodes()"
                )


def synchronize_device(residence: Residence, timeout: float | None) -> None:
    """Block until the streams of a device, or of a mesh, have run what they have; see `synchronize`."""
    log, deadline = residence.node, deadline_in(timeout)
    numbers = [0]
    if log.order is not None:
        pools = log.order.pools.items()
        own = residence.place.local_device
        numbers += [number for (name, _), pool in pools if name == own for number in pool]
    for number in numbers:
        left = left_until(deadline)
        numbered_stream(residence, number).synchronize(left)
