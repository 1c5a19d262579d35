"""What a call prints: it gathers, and goes to the master in pieces."""

from __future__ import annotations

import time
from typing import Protocol

from distruntime.wire.messages import Message, Printed
from distruntime.wire.shield import Lock

from .alarms import Alarm, alarms

# What a function writes is sent in pieces of so many characters, and at the latest after so many seconds.
_PIECE, _DELAY = 1 << 14, 0.05


class Outlet(Protocol):
    """The session of a call, as it is seen from here."""

    def send(self, message: Message) -> None:
        """Send to the master."""

    @property
    def present(self) -> bool:
        """Whether the master is there."""

    def room(self, count: int) -> bool:
        """Whether so many characters may be sent now; they count."""


class Printing:
    """The text of one call. `at` is where its instruction stands, and `kind` what it writes first."""

    def __init__(self, around: Outlet, at: tuple[int, int], kind: str) -> None:
        self._around, self._at, self._kind = around, at, kind
        self._text, self._size, self._left_out = list[str](), 0, 0
        self._sent_at, self._open = 0.0, dict[str, None]()
        self._flush: Alarm | None = None
        self._writing = Lock()

    def write(self, kind: str, text: str) -> None:
        """Have the master show a text, soon."""
        with self._writing:
            if kind != self._kind:
                self._send()
                self._kind = kind
            self._text.append(text)
            self._size += len(text)
            if text.endswith("\n"):
                self._open.pop(kind, None)
            elif kind.startswith("std"):
                self._open[kind] = None
            ended = text.endswith("\n") or not kind.startswith("std")
            if self._size >= _PIECE or (ended and time.monotonic() > self._sent_at + _DELAY):
                self._send()
            elif self._flush is None:
                self._flush = alarms.after(_DELAY, self.send_now)

    def send_now(self) -> None:
        """Send what has gathered."""
        with self._writing:
            self._flush = None
            self._send()

    def _send(self) -> None:
        """Send what has gathered, or count it as left out (under the lock)."""
        if not self._text:
            return
        text, self._text, self._size = "".join(self._text), [], 0
        self._sent_at = time.monotonic()
        if not self._around.room(len(text)):
            self._left_out += len(text)
            return
        if self._left_out:
            text, self._left_out = f"... {self._left_out:,} characters were left out ...\n{text}", 0
        for first in range(0, len(text), _PIECE):
            self._around.send(Printed(*self._at, self._kind, text[first : first + _PIECE]))

    def close(self) -> None:
        """Send the rest: the call is over."""
        with self._writing:
            if self._flush is not None:
                alarms.call_off(self._flush)
                self._flush = None
            self._send()
            for kind in self._open:
                # What follows is not to stand in the same line.
                self._around.send(Printed(*self._at, kind, "\n"))
            if self._left_out and self._around.present:
                text = f"... {self._left_out:,} characters were left out ...\n"
                self._around.send(Printed(*self._at, "stderr", text))
