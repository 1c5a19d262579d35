"""The published tensors that this process has: each is one object, in whatever it was published and however often it is looked up."""

from __future__ import annotations

import sys
import threading
from typing import Any

from ..log.handle import Storage
from ..log.node import Node
from ..session.session import Session

Key = tuple[str, int]  # of a tensor, or of memory: the daemon that has it, and its number there


class Known:
    """What a session has published or looked up. Strong, as nothing may have a weak reference to a proxy; `sweep` lets go."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # one publish or lookup at a time
        self.homes: dict[str, list[Node]] = {}  # of the session's own publications
        # Their memory: a storage with one holder could get another slot on the worker, which the publication would not see (special.py).
        self.pinned: dict[str, list[Storage]] = {}
        self._proxies: dict[Key, tuple[Any, int]] = {}  # with the ref that each had then
        self._storages: dict[Key, Storage] = {}

    def proxy(self, key: Key) -> Any:
        """Return the proxy of a published tensor, or None."""
        found, ref = self._proxies.get(key, (None, 0))
        if found is not None and found._handle.ref != ref:  # `x.data = y` has made it another
            del self._proxies[key]
            return None
        return found

    def storage(self, key: Key) -> Storage | None:
        """Return what stands for a worker's memory, if some tensor here is in it."""
        return self._storages.get(key)

    def note(self, tensor: Key, memory: Key, proxy: Any) -> None:
        """Remember a published tensor; of one with a history its memory alone, as this would keep the graph."""
        self._storages[memory] = proxy._handle.storage
        if proxy.is_leaf:
            self._proxies[tensor] = proxy, proxy._handle.ref

    def sweep(self) -> None:
        """Let go of what nobody else holds: looked up again, it is made anew."""
        for key in list(self._proxies):
            if (
                _holders(self._proxies[key]) <= _ALONE and self._proxies[key][0]._use_count() == 1
            ):  # nor any graph
                del self._proxies[key]
        for key in list(self._storages):
            if _holders((self._storages[key],)) <= _HELD_TWICE:
                del self._storages[key]


def _holders(entry: tuple[Any, ...]) -> int:
    return sys.getrefcount(entry[0])


_ALONE = _holders(([],))
_HELD_TWICE = _ALONE + 1  # by the dictionary and by the tuple that asks
_known: dict[Session, Known] = {}


def known_of(session: Session) -> Known:
    """Return what a session knows; it is forgotten with the session."""
    if session not in _known:
        _known[session] = Known()
        session.on_close.append(lambda: _forget(session))
    return _known[session]


def _forget(session: Session) -> None:
    _known.pop(session, None)
