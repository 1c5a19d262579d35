"""`dr.stacks`: where the threads of a worker are."""

from __future__ import annotations

from typing import final

from ..errors import WaitTimeout, without_our_frames
from ..session.session import active_session
from ..wire.deadlines import LOOK
from ..wire.messages import AskStacks
from ..wire.units import printable


@final
class Stacks(str):
    """The Python stacks of a worker's threads. It prints as text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@without_our_frames
def stacks(node: int) -> Stacks:
    """Return the Python stack of each thread of a worker, while it computes or hangs.

    A thread of the worker answers that runs no operators. Block for one round trip, at most 5 s.

    Args:
        node: the number of the worker.

    Raises:
        PlacementError: there is no such node. NodeFailed: it is lost. WaitTimeout: it does not answer, so
            its machine is gone, the process was stopped, or a kernel holds the interpreter's lock.
    """
    session = active_session()
    session.places.devices(node)
    worker = session.nodes[node]
    asked = session.ask(worker, AskStacks)
    if not session.result(asked, LOOK.get()):
        session.requests.discard(asked)
        raise WaitTimeout(
            f"{worker} did not answer within {LOOK.get():g} s. Either nothing reaches it, or no Python runs "
            f"there: `py-spy dump --native --pid {worker.welcome.pid}` on its machine shows more"
        )
    session.raise_for(asked)
    return Stacks(printable(asked.value))
