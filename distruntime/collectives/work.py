"""`Work`: what an operation that nobody waits for yet returns, with the methods of torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils._pytree import tree_leaves

from ..errors import DistruntimeError, NodeFailed, UsageError
from ..log.current import current_streams
from ..log.handle import Place, Residence
from ..operators.transfer import read
from ..session.requests import Request
from ..session.timeouts import checked, deadline_in, left_until
from ..streams.stream import Event, Stream, current_stream
from ..tensors.tensor import DistributedTensor

# These are the tensors of an operation: one of each member, or a list of them.
Outputs = Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]
Output = torch.Tensor | Sequence[torch.Tensor]


class Work:
    """An operation that may still run, on all places that take part.

    `wait` makes streams wait, not the program.
    """

    def __init__(
        self, text: str, events: Mapping[Place, Event] | None, outputs: Outputs, source: int = -1
    ) -> None:
        self._text, self._events, self._outputs, self._source = text, events, outputs, source
        self._when_begun: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = "" if self._events is not None else ", not begun"
        return f"<distruntime.distributed.Work of {self._text}{state}>"

    def _events_begun(self) -> Mapping[Place, Event]:
        if self._events is None:
            raise UsageError(
                f"{self!r} waits for a send, and none has been issued: waiting for it now would never end. "
                "Send first"
            )
        return self._events

    def _mark_begun(self, events: Mapping[Place, Event], source: int) -> None:
        self._events, self._source = events, source
        while self._when_begun:
            self._when_begun.pop()()

    def wait(self, timeout: float | None = None) -> bool:
        """Make the places' current streams wait for the operation, before what is issued later.

        Return True at once.

        A stream that has waited for `timeout` seconds goes on. The next read or `synchronize` then raises
        `WaitTimeout`.
        """
        for place, event in self._events_begun().items():
            event.wait(current_stream(place.node, place.local_device), timeout)
        return True

    def block_current_stream(self) -> None:
        """As `wait`."""
        self.wait()

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until every member has done the operation; raise what failed.

        Raises `WaitTimeout` after `timeout` seconds.
        """
        timeout = checked(timeout)
        deadline = deadline_in(timeout)
        for event in self._events_begun().values():
            event.synchronize(left_until(deadline))

    def is_completed(self) -> bool:
        """Return whether every member has done it, or is lost. Asks the workers: a round trip each."""
        return self._events is not None and all(map(_over, self._events.values()))

    def exception(self) -> BaseException | None:
        """Return what the operation failed with, once it has completed.

        Return None while it runs, or after success.
        """
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

    def result(self) -> list[Output]:
        """Return the operation's tensors, one of each member, or a list of them.

        They may still be on their way.
        """
        return list(self._outputs)

    def source_rank(self) -> int:
        """Return the rank that a received tensor came from; -1 for what is no receive, or has not begun."""
        return self._source

    def get_future(self) -> torch.futures.Future[list[Output]]:
        """Return a future of `result()`, which completes when every member has done the operation."""
        future: torch.futures.Future[list[Output]] = torch.futures.Future()
        outputs = self.result()

        def follow() -> None:
            events = list(self._events_begun().values())
            left = [len(events)]

            def done(_: Request[object]) -> None:
                left[0] -= 1
                if left[0] == 0:
                    future.set_result(outputs)

            if not events:
                future.set_result(outputs)
            for event in events:
                event.when_done(done)

        if self._events is None:
            self._when_begun.append(follow)
        else:
            follow()
        return future


def aside(
    streams: dict[Place, Stream], homes: Sequence[Residence], everything: bool, run: Callable[[], None]
) -> dict[Place, Event]:
    """Call `run` while other streams are current at these places. Return an event there for each.

    `streams` has these streams; the first use makes them. With `everything` they come after what the current
    streams have been given until now. Otherwise they do so where nothing else would wait for that.
    """
    current = current_streams.get()
    own = {}
    for home in homes:
        place = home.place
        if place not in streams:
            streams[place] = Stream(place)
        own[place.node, place.local_device] = streams[place]
        order = home.node.order
        # torch's streams come after what has been issued, too.
        if everything or (order is not None and not order.implicit):
            streams[place].wait_stream(current_stream(place.node, place.local_device))
    token = current_streams.set({**current, **own})
    try:
        run()
    finally:
        current_streams.reset(token)
    return {home.place: streams[home.place].record_event() for home in homes}


def _over(event: Event) -> bool:
    try:
        return event.query()
    except NodeFailed:
        # Nothing more happens there.
        return True


def _tensors(value: Outputs | Output) -> list[DistributedTensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, DistributedTensor)]
