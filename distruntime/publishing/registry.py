"""The published tensors that this process has.

Each is one object, however often it is published and looked up.
"""

from __future__ import annotations

import sys

from ..log.node import Node
from ..log.storage import Storage
from ..session.session import Session
from ..tensors.tensor import DistributedTensor
from ..wire.shield import RLock

# It has the daemon's identity, and the number by which that daemon knows the tensor, or the memory.
Key = tuple[str, int]


class Registry:
    """What a session has published or looked up.

    References are strong, since nothing may have a weak reference to a proxy. `drop_unused` lets go.
    """

    def __init__(self) -> None:
        # A publish or a lookup holds it from its beginning to its end.
        self.lock = RLock()
        # Each name of the session's own publications has the nodes that have it.
        self.homes: dict[str, list[Node]] = {}
        # Each name has the memory of its tensors. A storage with one holder could get another slot on the
        # worker, and the publication would not see that (special.py).
        self.pinned: dict[str, list[Storage]] = {}
        # Each proxy stands with the ref that it had when it was added.
        self._proxies: dict[Key, tuple[DistributedTensor, int]] = {}
        self._storages: dict[Key, Storage] = {}

    def proxy(self, key: Key) -> DistributedTensor | None:
        """Return the proxy of a published tensor, or None."""
        found, ref = self._proxies.get(key, (None, 0))
        # `x.data = y` has made it another tensor.
        if found is not None and found._handle.ref != ref:
            del self._proxies[key]
            return None
        return found

    def storage(self, key: Key) -> Storage | None:
        """Return what stands for a worker's memory, if some tensor here is in it."""
        return self._storages.get(key)

    def add(self, tensor: Key, memory: Key, proxy: DistributedTensor) -> None:
        """Remember a published tensor.

        Of one with a history only the memory stays, as the tensor would keep the graph.
        """
        self._storages[memory] = proxy._handle.storage
        if proxy.is_leaf:
            self._proxies[tensor] = proxy, proxy._handle.ref

    def drop_unused(self) -> None:
        """Let go of what nobody else holds, no graph either. A lookup makes it anew."""
        for key in list(self._proxies):
            if _holders(self._proxies[key]) <= _ALONE and self._proxies[key][0]._use_count() == 1:  # type: ignore[attr-defined]
                del self._proxies[key]
        for key in list(self._storages):
            if _holders((self._storages[key],)) <= _HELD_TWICE:
                del self._storages[key]


def _holders(entry: tuple[object, ...]) -> int:
    return sys.getrefcount(entry[0])


_ALONE = _holders(([],))
# The dictionary holds it, and the tuple that asks.
_HELD_TWICE = _ALONE + 1
_registries: dict[Session, Registry] = {}


def registry_of(session: Session) -> Registry:
    """Return what a session has published or looked up. It goes with the session."""
    if session not in _registries:
        _registries[session] = Registry()
        session.ending.on_close.append(lambda: _drop(session))
    return _registries[session]


def _drop(session: Session) -> None:
    _registries.pop(session, None)
