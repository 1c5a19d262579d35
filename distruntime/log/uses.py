"""Who uses a memory, and up to where: what the order among streams is kept of."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakValueDictionary


class Use:
    """Who wrote a storage last (at `Storage.written`), and up to where each stream has read it since."""

    __slots__ = ("readers", "writer")

    def __init__(self, writer: int, readers: dict[int, int]) -> None:
        self.writer, self.readers = writer, readers


class Memory(Protocol):
    """A storage as it is seen from here; the last instruction that changes it ends at `written`."""

    written: int
    order: Use | None


class Generators:
    """The random generators of a node, which count as one storage: every draw writes it."""

    def __init__(self) -> None:
        self.written = 0
        self.order: Use | None = None


class Lent:
    """What the user's Python on a worker holds and has handed out, which counts as one storage.

    Nobody can tell which function or object holds it, so every call writes it.
    """

    def __init__(self) -> None:
        self.written = 0
        self.order: Use | None = None
        # The memories that somebody here has, by what the worker calls them.
        self.named: WeakValueDictionary[int, Memory] = WeakValueDictionary()
