"""The trace of a session, from its beginning until its master has taken it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from distruntime.wire.messages import TraceKept

from ..log.timing import Recorded
from ..machine.kernels import Kernels
from .executor import Executor

# A reply has so many bytes of a trace at most.
_CHUNK = 1 << 20


class Tracing:
    """The trace of one session, while its master makes one and until it has taken it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._recorded: Recorded | None = None
        self._kernels: Kernels | None = None
        self._data = b""

    def start(self, most: int, then: Callable[[], None]) -> Callable[[int], None]:
        """Begin anew, and call `then`. Return what notes that a segment has arrived (the reader)."""
        self._data = b""
        self._recorded = recorded = self._executor.start_trace(most)
        if self._executor.state.devices.asynchronous:
            kernels = self._kernels = self._kernels or Kernels()

            def begin() -> None:
                kernels.start()
                then()

            _apart(begin)
        else:
            then()
        return recorded.arrived

    def stop(self, then: Callable[[TraceKept], None]) -> None:
        """Note no more. Call `then` with what there is to take (the reader)."""
        recorded, kernels = self._recorded or Recorded(0), self._kernels
        self._recorded = self._kernels = None
        self._executor.stop_trace()

        def keep() -> None:
            launched, why = ([], "") if kernels is None else kernels.stop()
            kept, self._data = recorded.kept(self._executor.state, launched, why)
            then(kept)

        if kernels is None:
            keep()
        else:
            _apart(keep)

    def take(self, offset: int) -> bytes:
        """Return the bytes from an offset on. After the last ones they are forgotten (the reader)."""
        found = self._data[max(0, offset) : offset + _CHUNK]
        if offset + _CHUNK >= len(self._data):
            self._data = b""
        return found

    def close(self) -> None:
        """Let go of an accelerator's profiler: the master is gone (the reader)."""
        kernels, self._kernels = self._kernels, None
        if kernels is not None:
            _apart(kernels.stop)


def _apart(work: Callable[[], object]) -> None:
    threading.Thread(target=work, name="traces", daemon=True).start()
