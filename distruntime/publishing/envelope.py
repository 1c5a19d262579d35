"""What a signature of a publication covers, how it is made and opened, and the published tensors that are
here.

It covers the structure, the metadata of the tensors, the name, the owner, the version and the Python. An
envelope is opened only if a key that is trusted has signed it, for this name, in this session, as this
version. Nothing in it is unpickled here. Each published tensor of this process is one object, however often
it is published and looked up.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from ..errors import UntrustedError, UsageError
from ..log.node import Node
from ..log.storage import Storage
from ..session.session import Session
from ..tensors.tensor import DistributedTensor
from ..wire.codec import daemons_from
from ..wire.messages import DaemonRecord
from ..wire.shield import RLock
from .signing import person, require_trusted, sign, verify

_FORMAT = 1


@dataclass(frozen=True)
class Opened:
    """An envelope whose signature holds. `daemons` have its tensors."""

    version: int
    daemons: list[DaemonRecord]
    leaves: list[list[object]]
    pickled: bytes


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def seal(
    session: str,
    name: str,
    version: int,
    daemons: Sequence[DaemonRecord],
    leaves: Sequence[list[object]],
    pickled: bytes,
) -> bytes:
    """Return a signed envelope."""
    body: bytes = msgpack.packb(
        [_FORMAT, person(), session, name, version, _python(), daemons, leaves, pickled]
    )
    envelope: bytes = msgpack.packb([body, *sign(body)])
    return envelope


def open_envelope(envelope: object, session: str, name: str, version: int, shown: str) -> Opened:
    """Return what is in an envelope.

    Raises:
        UntrustedError: nobody has signed it, or nobody who is trusted, or it was signed as something else.
        UsageError: another Python made it, or another distruntime.
    """
    parts = _unpacked(envelope)
    match parts:
        case [bytes(sealed), bytes(public), bytes(signature)] if verify(sealed, public, signature):
            body = _unpacked(sealed)
        case _:
            raise UntrustedError(
                f"what a worker holds as {shown!r} does not match its signature: it was changed on the "
                "way or on the worker. Publish it again"
            )
    if not isinstance(body, list) or not body or body[0] != _FORMAT or len(body) != 9:
        raise _unknown_form(shown)
    _, by, signed_session, signed_name, signed_version, python, listed, leaves, pickled = body
    require_trusted(public, repr(shown), str(by)[:80])
    if (signed_session, signed_name, signed_version) != (session, name, version):
        raise UntrustedError(
            f"what a worker holds as {shown!r} was signed as {signed_name!r} of session {signed_session!r}, "
            f"version {signed_version}, and not as {name!r} of {session!r}, version {version}: somebody has "
            "put it in another's place"
        )
    if python != _python():
        raise UsageError(
            f"{shown!r} was published by Python {python}, and this is Python {_python()}: pickled classes "
            f"and functions fit one minor version only. Look it up with Python {python}, or publish its "
            "state, dr.publish(name, model.state_dict()), and load that: this process cannot open it "
            "either way"
        )
    daemons = daemons_from(listed)
    if daemons is None:
        raise _unknown_form(shown)
    return Opened(version, daemons, leaves, pickled)


def _unknown_form(shown: str) -> UsageError:
    return UsageError(
        f"{shown!r} was published by another distruntime, in a form that this one does not know: use the "
        "same on both sides"
    )


def _unpacked(data: object) -> object:
    try:
        return msgpack.unpackb(data)
    except Exception:
        # msgpack raises a dozen classes for bytes that are none of its own, and all mean this.
        return None


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
