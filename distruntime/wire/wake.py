"""An fd that wakes whoever polls it, from any thread and from signal handlers."""

from __future__ import annotations

import os
import sys


class Wake:
    """An fd that signal() makes readable.

    Its fds live as long as the object, so a late signal() cannot hit a stranger's fd.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            self.fd = self._write_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.fd, self._write_fd = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._write_fd, False)

    def signal(self) -> None:
        """Make the fd readable."""
        try:
            os.write(self._write_fd, b"\1\0\0\0\0\0\0\0")
        except BlockingIOError:
            # It is full, and so it is readable already.
            pass

    def clear(self) -> None:
        """Make it unreadable until the next signal()."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            # It is empty already.
            pass

    def __del__(self) -> None:
        os.close(self.fd)
        if self._write_fd != self.fd:
            os.close(self._write_fd)
