"""What is signed of a publication: its structure, the metadata of its tensors, its name, whose it is, and the Python that made it.

An envelope is opened only if a key that is trusted has signed it, for this name, in this session, as this version. Nothing in it is
unpickled here.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from ..errors import UntrustedError, UsageError
from .signing import person, require_trusted, sign, verify

_FORMAT = 1


@dataclass(frozen=True)
class Opened:
    """An envelope whose signature holds. `listed` are the daemons that have its tensors: [identity, node, host, process id]."""

    version: int
    listed: list[Any]
    leaves: list[Any]
    pickled: bytes


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def seal(
    session: str, name: str, version: int, listed: Sequence[Any], leaves: Sequence[Any], pickled: bytes
) -> bytes:
    """Return a signed envelope."""
    body: bytes = msgpack.packb(
        [_FORMAT, person(), session, name, version, _python(), listed, leaves, pickled]
    )
    envelope: bytes = msgpack.packb([body, *sign(body)])
    return envelope


def open_envelope(envelope: object, session: str, name: str, version: int, shown: str) -> Opened:
    """Return what is in an envelope.

    Raises:
        UntrustedError: it is not signed, or by nobody who is trusted, or signed as something else. UsageError: another Python made it.
    """
    parts = _unpacked(envelope)
    if (
        not isinstance(parts, list)
        or len(parts) != 3
        or not isinstance(parts[0], bytes)
        or not verify(*parts)
    ):
        raise UntrustedError(
            f"what a worker holds as {shown!r} is not what anybody has signed: it was changed on the way or on the worker. Publish it again"
        )
    body = _unpacked(parts[0])
    if not isinstance(body, list) or not body or body[0] != _FORMAT or len(body) != 9:
        raise UsageError(
            f"{shown!r} was published by another distruntime, in a form that this one does not know: use the same on both sides"
        )
    _, by, signed_session, signed_name, signed_version, python, listed, leaves, pickled = body
    require_trusted(parts[1], repr(shown), str(by)[:80])
    if (signed_session, signed_name, signed_version) != (session, name, version):
        raise UntrustedError(
            f"what a worker holds as {shown!r} was signed as {signed_name!r} of session {signed_session!r}, version {signed_version}, and "
            f"not as {name!r} of {session!r}, version {version}: somebody has put it in another's place"
        )
    if python != _python():
        raise UsageError(
            f"{shown!r} was published by Python {python}, and this is Python {_python()}: pickled classes and functions fit one minor "
            f"version only. Look it up with Python {python}, or publish its state, dr.publish(name, model.state_dict()), and load that: "
            "this process cannot open it either way"
        )
    return Opened(version, listed, leaves, pickled)


def _unpacked(data: object) -> Any:
    try:
        return msgpack.unpackb(data)
    except Exception:  # whatever msgpack says of bytes that are none of its own
        return None
