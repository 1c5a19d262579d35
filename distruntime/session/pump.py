"""The quiet thread of a session: it reads while nobody waits, and sends what has gathered."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, final

from ..log.log import Log
from ..wire.channel import ChannelClosed
from .receiver import Receiver
from .requests import Requests

log = logging.getLogger("distruntime")

# The pump looks at intervals of so many seconds: while something is in flight, while another thread reads the
# socket and must not be disturbed, and while nothing is in flight.
_TICK, _WAITED, _IDLE = 0.001, 0.005, 0.2
# It rests so many times as long as its last look took of a core, 5 ms at most. A look at the logs of 1,024
# workers takes a millisecond, so a look each millisecond took half of a core.
_REST = 4


class Owner(Protocol):
    """What the pump needs of its session."""

    receiver: Receiver
    requests: Requests

    @property
    def logs(self) -> Sequence[Log]:
        """What has a command log."""


@final
class Pump:
    """The thread of one session. `stir` wakes it, and `parked[0]` says whether it sleeps."""

    def __init__(self, session: Owner) -> None:
        self._session = session
        # An Event would not do: its lock is taken in Python code, where Ctrl-C can come before the code that
        # gives it back, and then nobody gets it.
        self._stirred: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.stir, self.parked = partial(self._stirred.put, None), [False]
        self._over = False
        self.thread = threading.Thread(target=self._run, name="distruntime-pump", daemon=True)

    def start(self) -> None:
        """Begin to pump."""
        self.thread.start()

    def stop(self, timeout: float) -> None:
        """Block until the thread has ended, for `timeout` seconds at most. Return at once in that thread."""
        self._over = True
        self.stir()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(timeout)

    def _run(self) -> None:
        took = 0.0
        while not self._over:
            if self._active():
                rest = min(max(_TICK, _REST * took), _WAITED)
                time.sleep(_WAITED if self._session.requests.attended else rest)
            else:
                self.parked[0] = True
                # Something may have been sent before the mark stood.
                if not self._active():
                    with suppress(queue.Empty):
                        self._stirred.get(timeout=_IDLE)
                self.parked[0] = False
                while not self._stirred.empty():
                    self._stirred.get_nowait()
            began = time.thread_time()
            try:
                self._session.requests.glance(self._session.receiver.read)
                for node in self._session.logs:
                    waits = node.words or node.freed or node.outlet.unsent
                    if waits and not node.busy and not node.gathering():
                        node.flush()
                self._session.requests.announcer.show()
                if self._session.requests.output:
                    self._session.requests.output.tell()
                    self._session.requests.output.show()
            except ChannelClosed:
                return
            except Exception:
                # Without the pump nobody would take acknowledgements while no thread waits.
                log.exception("the pump met an error; it goes on")
            took = time.thread_time() - began

    def _active(self) -> bool:
        return len(self._session.requests) > 0 or any(
            node.flights or node.words for node in self._session.logs
        )
