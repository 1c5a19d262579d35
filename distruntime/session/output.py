"""What functions on workers print and log, shown here: under the cell that has called them, in a notebook.

The thread that reads the socket notes a text. The next thread that waits for a worker shows it, or the pump.
A breakpoint in a function opens its prompt where the main thread waits for a worker.
"""

from __future__ import annotations

import contextvars
import logging
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from ..errors import InternalError
from ..log.line import Line, line_number
from ..log.node import Node
from ..wire.messages import Printed, Typed
from ..wire.units import printable, writable

log = logging.getLogger("distruntime")

# So many texts are noted. A session's worker sends no more than a megabyte at once.
_MOST = 10_000
# A thread waits so many seconds for another one that is showing what came before.
_PATIENCE = 1.0
_SHOWING = "showing"
_RECORD = re.compile(r"log (\d{1,3}) (.{1,200})", re.DOTALL)


# A breakpoint that nobody has answered for so many seconds is told of.
_TOLD = 0.5


class _Text(NamedTuple):
    node: Node
    kind: str
    text: str
    line: Line | None


@dataclass
class _Prompt:
    """A debugger that waits for a line, of the function at this position."""

    node: Node
    seq: int
    position: int
    text: str
    line: Line | None
    since: float
    told: bool = False


class Output:
    """The output of one session's functions that nobody has been shown.

    `clear` takes away what a terminal shows of a wait.
    """

    def __init__(self, clear: Callable[[], None]) -> None:
        self._clear = clear
        self._noted: deque[_Text] = deque(maxlen=_MOST)
        # The one thread that shows, under _SHOWING.
        self._shower: dict[str, int] = {}
        # Each stream of this process has here who has begun a line in it, that is not ended.
        self._begun: dict[str, int] = {}
        self._prompts: list[_Prompt] = []
        # The session is over, or ending: nobody is asked any more.
        self._ended = False
        # It sends a line to a debugger.
        self.post: Callable[[Node, Typed], object] = _nowhere

    def __bool__(self) -> bool:
        return bool(self._noted or self._prompts)

    def note(self, node: Node, message: Printed, line: Line | None) -> None:
        """Note what a worker has sent (whoever reads the socket)."""
        if message.kind == "prompt over":
            where = node, message.seq, message.position
            self._prompts[:] = [p for p in self._prompts if (p.node, p.seq, p.position) != where]
        elif message.kind != "prompt":
            self._noted.append(_Text(node, message.kind, message.text, line))
        elif self._ended:
            self.post(node, Typed(message.seq, message.position, None))
        else:
            now = time.monotonic()
            self._prompts.append(_Prompt(node, message.seq, message.position, message.text, line, now))

    # -- breakpoints -----------------------------------------------------------------------------------------

    def answer(self) -> None:
        """Open the prompt of each debugger that waits (a thread that waits; only the main one does so).

        Ctrl-C leaves the prompt, and the next wait opens it again.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        while self._prompts:
            prompt = self._prompts[0]
            if prompt.node.failed is None:
                text, _, last = prompt.text.rpartition("\n")
                if text:
                    self._noted.append(_Text(prompt.node, "stdout", text + "\n", prompt.line))
                    prompt.text = last
                self.show(patient=True)
                try:
                    typed: str | None = input(f"[node {prompt.node.index}] {last}")
                except EOFError:
                    typed = None
                self.post(prompt.node, Typed(prompt.seq, prompt.position, typed))
            # The function may have been ended meanwhile.
            self._prompts[:] = [other for other in self._prompts if other is not prompt]

    def tell(self) -> None:
        """Say of each debugger that waits, and that nobody waits for, how its prompt is opened (the pump)."""
        for prompt in self._prompts:
            if not prompt.told and time.monotonic() > prompt.since + _TOLD:
                prompt.told = True
                text = "a function stands at a breakpoint: dr.synchronize() opens its prompt\n"
                self._noted.append(_Text(prompt.node, "stderr", text, prompt.line))

    def end(self) -> None:
        """Let no debugger wait any more: the session ends."""
        self._ended = True
        while self._prompts:
            prompt = self._prompts.pop()
            if prompt.node.failed is None:
                self.post(prompt.node, Typed(prompt.seq, prompt.position, None))

    # -- texts -----------------------------------------------------------------------------------------------

    def show(self, patient: bool = False) -> None:
        """Show what is noted. A thread that is `patient` returns when it is shown, whoever does that."""
        limit = time.monotonic() + _PATIENCE if patient else 0.0
        while self._noted or (patient and self._shower.get(_SHOWING, _me()) != _me()):
            if not self._show_alone():
                if time.monotonic() >= limit:
                    return
                # Another thread writes to a screen.
                time.sleep(0.0005)

    def _show_alone(self) -> bool:
        """Show what is noted, unless another thread does. As in `Requests`, Ctrl-C leaves no mark behind."""
        me = _me()
        again = self._shower.get(_SHOWING) == me
        try:
            if self._shower.setdefault(_SHOWING, me) != me:
                return False
            while self._noted:
                try:
                    text = self._noted.popleft()
                except IndexError:
                    break
                self._put(text)
            return True
        finally:
            try:
                mine = not again and self._shower[_SHOWING] == me
            except KeyError:
                mine = False
            if mine:
                del self._shower[_SHOWING]

    def _put(self, noted: _Text) -> None:
        record = _RECORD.fullmatch(noted.kind)
        if record is not None:
            self._log(noted, int(record[1]), record[2])
            return
        stream: TextIO | None = sys.stderr if noted.kind == "stderr" else sys.stdout
        if stream is None:
            return
        self._clear()
        text = writable(self._prefixed(noted), stream)
        cell = None if noted.line is None or noted.line[1] is None else noted.line[1].cell
        parent = getattr(stream, "_parent_header", None)
        try:
            if cell is not None and isinstance(parent, contextvars.ContextVar):
                # A kernel shows a text under the cell that this variable names.
                token = parent.set(cell)
                try:
                    stream.write(text)
                finally:
                    parent.reset(token)
            else:
                stream.write(text)
            stream.flush()
        except (OSError, ValueError) as error:
            # The user has closed it, or nobody reads the pipe.
            log.debug("what %s has written cannot be shown: %s", noted.node, error)

    def _prefixed(self, noted: _Text) -> str:
        """Return a text with the node in front of each line."""
        kind, node, prefix = noted.kind, noted.node.index, f"[node {noted.node.index}] "
        begun = self._begun.pop(kind, None)
        found = [] if begun in (None, node) else ["\n"]
        for k, piece in enumerate(re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", noted.text)):
            found.append(piece if k == 0 and begun == node else prefix + piece)
        if not noted.text.endswith("\n"):
            self._begun[kind] = node
        return "".join(found)

    def _log(self, noted: _Text, level: int, name: str) -> None:
        logger = logging.getLogger(printable(name))
        if not logger.isEnabledFor(level):
            return
        self._clear()
        file, number = "<unknown>", 0
        if noted.line is not None and noted.line[1] is not None:
            code = noted.line[1].code
            file, number = code.co_filename, line_number(code, noted.line[2])
        text = f"[node {noted.node.index}] {noted.text}"
        logger.handle(logger.makeRecord(logger.name, level, file, number, text, (), None))


def _nowhere(node: Node, message: Typed) -> None:
    raise InternalError("a line for a debugger, before there is a session")


def _me() -> int:
    return threading.get_ident()
