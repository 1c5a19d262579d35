"""What a signature of a publication covers, and how it is made and opened.

It covers the structure, the metadata of the tensors, the name, the owner, the version and the Python.
An envelope is opened only if a key that is trusted has signed it, for this name, in this session, as this
version. Nothing in it is unpickled here.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from ..errors import UntrustedError, UsageError
from ..wire.codec import daemons_from
from ..wire.messages import DaemonRecord
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
