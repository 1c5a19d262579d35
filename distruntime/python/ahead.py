"""A call whose answer comes, and is kept until somebody has it."""

from __future__ import annotations

import concurrent.futures
from contextlib import suppress

from ..session.requests import Request
from .call import Call


class Ahead:
    """A call whose answer comes. Calling this blocks for it."""

    def __init__(self, call: Call) -> None:
        self._call, self._question = call, call.ask()
        # It has a value when the answer has come. Somebody who was interrupted while he waited asks again, so
        # the answer is kept until then.
        self.came: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._question[0].when_done(self._arrived)

    def __call__(self) -> object:
        return self._call.answered(self._question, [])

    @property
    def failed(self) -> bool:
        """Whether the answer is a failure."""
        request = self._question[0]
        return request.done and (request.cause is not None or request.lost is not None)

    def _arrived(self, request: Request[object]) -> None:
        # Nobody may wait any more.
        with suppress(concurrent.futures.InvalidStateError):
            self.came.set_result(None)
