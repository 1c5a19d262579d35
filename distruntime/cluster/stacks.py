"""`dr.profiler.stacks`: where the threads of a worker are. And where this program is, which workers ask while
somebody looks at them.
"""

from __future__ import annotations

import linecache
import sys
import threading
from types import FrameType
from typing import final

from ..errors import ProtocolError, WaitTimeout, without_our_frames
from ..log.line import file_name, line_number, line_text, of_a_library, own_line
from ..log.log import Log
from ..log.node import Node
from ..log.progress import line_issued
from ..session.requests import Requests
from ..session.session import Session, active_session
from ..wire.deadlines import LOOK
from ..wire.messages import AskMaster, AskStacks, MasterReport, Plain
from ..wire.units import printable

# A worker asks for so many instructions at most, and a text has so many characters.
_MOST, _TEXT = 16, 300


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


def tell_of_program(session: Session) -> None:
    """Let a session answer when its workers ask where the program is."""

    def tell(node: Node, message: AskMaster) -> None:
        session.post(node, _report(session, node, message))

    session.on_asked = tell


def _report(session: Session, node: Node, message: AskMaster) -> MasterReport:
    """Return where the main thread is, for whom it waits, and the lines that a worker asks for."""
    lines: list[Plain] = []
    for row in message.positions[:_MOST]:
        if len(row) != 2 or not all(type(number) is int for number in row):
            raise ProtocolError(f"{row!r:.80} is no position of a log")
        mesh, position = row
        log = node if mesh == -1 else next((one for one in session.meshes if one.number == mesh), None)
        text = "" if log is None else _issued(log, position)
        if text:
            lines.append([mesh, position, text])
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    try:
        at, waits = _program(innermost)
    finally:
        # A frame that is kept keeps the user's tensors.
        del innermost
    return MasterReport(at[:_TEXT], waits[:_TEXT], lines)


def _issued(log: Log, position: int) -> str:
    line = line_issued(log, position)
    return "" if line is None else line_text(own_line(line))[:_TEXT]


def _program(frame: FrameType | None) -> tuple[str, str]:
    """Return the line of the user's own file at which a thread is, and for whom it waits, if it does."""
    waits = ""
    while frame is not None:
        if frame.f_code is Requests.wait.__code__:
            node = frame.f_locals.get("node")
            waits = str(node) if isinstance(node, Log) else "a worker"
        file = frame.f_code.co_filename
        if not of_a_library(file):
            # A frame between two lines has no `f_lineno`.
            number = line_number(frame.f_code, frame.f_lasti)
            source = linecache.getline(file, number).strip()
            return f"{file_name(file)}:{number}" + (f"   {source}" if source else ""), waits
        frame = frame.f_back
    return "", waits
