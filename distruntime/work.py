"""`Work`: what an operation that nobody waits for yet returns, with the methods of torch's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from .errors import DistruntimeError
from .event import Event
from .group import ProcessGroup
from .stream import current_stream
from .tensor import DistributedTensor
from .transfer import read

Tensors = Sequence[DistributedTensor]


class Work:
    """A collective that may still run, on all members. `wait` makes streams wait, not this process."""

    def __init__(self, group: ProcessGroup, events: dict[int, Event], outputs: Any, source: int = -1) -> None:
        self._group, self._events, self._outputs, self._source = group, events, outputs, source

    def __repr__(self) -> str:
        return f"<distruntime.Work of {self._group!r}>"

    def wait(self, timeout: float | None = None) -> bool:
        """Make what is issued from now on to the members' current streams wait for the operation. Return True, at once.

        Past `timeout` seconds of its waiting a stream goes on, and the next read or `synchronize` raises `WaitTimeout`.
        """
        for rank, event in self._events.items():
            place = self._group.places[rank]
            event.wait(current_stream(place.node, place.device), timeout)
        return True

    def block_current_stream(self) -> None:
        """As `wait`."""
        self.wait()

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until every member has done the operation; raise what failed. Raises `WaitTimeout` after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for event in self._events.values():
            event.synchronize(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def is_completed(self) -> bool:
        """Return whether every member has done it. Asks the workers: a round trip each."""
        return all(event.query() for event in self._events.values())

    def exception(self) -> BaseException | None:
        """Return what the operation failed with, once it has completed; None while it runs or if it has not failed."""
        if not self.is_completed():
            return None
        for tensor in _tensors(self._outputs):
            try:
                read(tensor._handle, "text", "explicit exception()")
            except DistruntimeError as error:
                return error.with_traceback(None)
        return None

    def is_success(self) -> bool:
        """Return whether the operation has completed and not failed."""
        return self.is_completed() and self.exception() is None

    def result(self) -> list[Any]:
        """Return the operation's tensors, one of each member (or a list of them); they may still be on their way."""
        return list(self._outputs)

    def source_rank(self) -> int:
        """Return the rank that a received tensor came from; -1 for what is no receive."""
        return self._source

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of `result()`, which completes when every member has done the operation."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        left = [len(self._events)]
        outputs = self.result()

        def done(_: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                future.set_result(outputs)

        if not self._events:
            future.set_result(outputs)
        for event in self._events.values():
            event.when_done(done)
        return future


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []
