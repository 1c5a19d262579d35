"""The ways of values between stages: streams of their own, so that no stage waits for a neighbour that works.

A copy between nodes takes both of them: the one sends while the other one receives. In the stream that
computes, a stage that has finished a pass would wait until its neighbour has, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..log.handle import Residence
from ..streams.stream import Stream


class Ways:
    """The streams of a pipeline's copies: for each place one that sends, and two that receive.

    One receives what goes forward, the other one gradients, as neither may wait for the other.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[Residence, str], Stream] = {}

    def _stream(self, home: Residence, what: str) -> Stream:
        found = self._streams.get((home, what))
        if found is None:
            found = self._streams[home, what] = Stream(home.device)
        return found

    @contextmanager
    def between(self, source: Residence, target: Residence, kind: str) -> Iterator[None]:
        """Let copies from one place to another go these ways. `kind` is "forward" or "back".

        Copies between meshes are the members' own, and copies within a node wait for nobody.
        """
        if source.node is target.node or source.node.members or target.node.members:
            yield
            return
        with self._stream(source, "send"), self._stream(target, kind):
            yield
