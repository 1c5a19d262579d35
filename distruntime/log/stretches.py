"""The log of a node that has streams: words divided into stretches, each the consecutive words of one stream.

Knows no stream's rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

# It has a stream and the index of its first word.
Stretch = list[int]


class StretchedLog(list[object]):
    """Takes the place of a node's plain log as soon as the node has a second stream.

    Who still holds the plain log's ways (`log += words`, `log.append(-ref)`: a thread that was on the hot
    path in that moment) writes to stream 0, where everything was until then, and `stray` is called: nobody
    has noted what it reads.
    """

    def __init__(
        self,
        free: Callable[[int], None],
        stray: Callable[[], None],
        words: Iterable[object] = (),
        stretches: Iterable[Stretch] = (),
    ) -> None:
        super().__init__(words)
        self.stretches = list(stretches)
        self.size = len(self)
        self._free, self._stray = free, stray

    def __iadd__(self, words: Sequence[object]) -> StretchedLog:  # type: ignore[misc, override]
        fresh, count = ([0, 0],), len(words)
        if not self.stretches or self.stretches[-1][0] != 0:
            fresh[0][1] = self.size
            self.stretches += fresh
        self.size += count
        self.extend(words)
        self._stray()
        return self

    def append(self, word: object) -> None:
        """Take the word of a free."""
        assert isinstance(word, int)
        self._free(-word)

    def clear(self) -> None:
        """Drop everything."""
        self.stretches.clear()
        self.size = 0
        super().clear()

    def stretched(self, taken: int) -> list[Stretch]:
        """Return the stretches of the first `taken` words as [stream, number of words]."""
        return [
            [stream, min(end, taken) - first]
            for stream, first, end in self.bounds()
            if first < min(end, taken)
        ]

    def rest(self, taken: int) -> StretchedLog:
        """Return a log of what follows the first `taken` words.

        If a finalizer puts words here meanwhile, it lacks them: whoever calls this counts, and calls again.
        """
        # They come before their stretches. Otherwise it could have words that are in no stretch.
        words = self[taken:]
        left = [[stream, max(first - taken, 0)] for stream, first, end in self.bounds() if end > taken]
        return StretchedLog(self._free, self._stray, words, left)

    def bounds(self) -> list[tuple[int, int, int]]:
        """Return (stream, index of its first word, index behind its last) of each stretch."""
        ends = [first for _, first in self.stretches[1:]] + [len(self)]
        return [(stream, first, end) for (stream, first), end in zip(self.stretches, ends)]


class Stretchable(Protocol):
    """A log as it is seen from here: `base` is the position of its first word."""

    words: list[object]
    base: int
    latest: Sequence[object]


def put(node: Stretchable, stream: int, words: Sequence[object], *, instruction: bool = False) -> int:
    """Append words to a stream of a node's log; return the position after them.

    Frees and waits are no instruction, and so never the node's `latest`.
    """
    # A finalizer that runs in here may issue something, and have the log sent. One can run at an allocation
    # or a call. So allocations and calls stand before the log is looked up, or after all is done, and no
    # `isinstance` stands between.
    fresh, count = ([stream, 0],), len(words)
    log: StretchedLog = node.words  # type: ignore[assignment]
    end: int = node.base + log.size + count
    stretches = log.stretches
    if not stretches or stretches[-1][0] != stream:
        fresh[0][1] = log.size
        log.stretches += fresh
    log.size += count
    if instruction:
        node.latest = words
    log.extend(words)
    return end
