"""Signatures under what is published: whose key made one, and whether this user trusts it.

The key is a person's, not the cluster's: who holds the cluster's key may run code on workers, which says nothing about whose pickles
this process may open. Ed25519, by PyNaCl.
"""

from __future__ import annotations

import base64
import binascii
import getpass
import os
import socket
import stat
from pathlib import Path

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from ..errors import ConfigurationError, UntrustedError
from ..wire.keys import require_own, user_file, write_private

_CONTEXT = b"distruntime publication\0"  # signatures under anything else are none here
_BANNER = """\
# distruntime signing key: SECRET. What it has signed, your masters open, which runs code.
# `python -m distruntime key` prints the public half, for other people's trusted-keys.
"""


def key_path() -> Path:
    """Return where this user's signing key is: $DISTRUNTIME_SIGNING_KEY, or ~/.config/distruntime/signing-key."""
    return user_file("DISTRUNTIME_SIGNING_KEY", "signing-key")


def trusted_path() -> Path:
    """Return where the public keys of others are listed: $DISTRUNTIME_TRUSTED_KEYS, or ~/.config/distruntime/trusted-keys."""
    return user_file("DISTRUNTIME_TRUSTED_KEYS", "trusted-keys")


def person() -> str:
    """Return "user@host", as what this process signs says of itself."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no name for this user id, as in some containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def own_key() -> SigningKey:
    """Return this user's signing key, made (mode 0600) where there is none; raise `ConfigurationError` for a file that is none."""
    path = key_path()
    try:
        if not path.exists():
            write_private(path, _BANNER + _text(SigningKey.generate().encode()) + "\n")
    except FileExistsError:
        pass  # another process was faster on its own first use: share its key
    except OSError as error:
        raise ConfigurationError(
            f"the signing key cannot be written to {path}: {error.strerror}. Set DISTRUNTIME_SIGNING_KEY"
        ) from error
    return _load(path)


def _load(path: Path) -> SigningKey:
    try:
        mode = path.stat().st_mode
        words = [
            line
            for line in path.read_text(encoding="ascii", errors="replace").splitlines()
            if line and not line.startswith("#")
        ]
    except OSError as error:
        raise ConfigurationError(
            f"the signing key {path} cannot be read: {error.strerror}. It must be readable by you alone"
        ) from error
    if mode & 0o077:
        raise ConfigurationError(
            f"got signing key {path} with mode {stat.S_IMODE(mode):04o}, expected one that its owner alone may read. Do: chmod 600 {path}"
        )
    require_own(path, "a signing key")
    seed = _bytes(words[0]) if len(words) == 1 else None
    if seed is None:
        raise ConfigurationError(
            f"got {path} without a signing key in it. Delete it, and the next dr.publish makes a new one"
        )
    return SigningKey(seed)


def public_line() -> str:
    """Return the line that others put into their trusted-keys: this user's public key, and who that is."""
    return f"{_text(own_key().verify_key.encode())} {person()}"


def sign(body: bytes) -> tuple[bytes, bytes]:
    """Return this user's public key and its signature under `body`."""
    key = own_key()
    return key.verify_key.encode(), key.sign(_CONTEXT + body).signature


def verify(body: bytes, public: object, signature: object) -> bool:
    """Whether this signature of this key is under `body`. Says nothing about whose key it is."""
    if (
        not isinstance(public, bytes)
        or not isinstance(signature, bytes)
        or len(public) != 32
        or len(signature) != 64
    ):
        return False
    try:
        VerifyKey(public).verify(_CONTEXT + body, signature)
    except BadSignatureError:
        return False
    return True


def require_trusted(public: bytes, what: str, claims: str) -> None:
    """Raise `UntrustedError` unless a public key is this user's own or a listed one. `claims` is who its holder says to be."""
    path = key_path()
    if path.exists() and _load(path).verify_key.encode() == public:
        return
    if public in trusted_keys():
        return
    raise UntrustedError(
        f"{what} is signed with the key {_text(public)}, whose holder calls himself {claims}. It is neither your own nor listed in "
        f"{trusted_path()}, and opening what it has signed would run that person's code here\n"
        f"  if you trust them, and `python -m distruntime key` prints this key there, add the line:  {_text(public)} {claims}"
    )


def trusted_keys() -> dict[bytes, str]:
    """Return the public keys that are listed, with their comments; raise `ConfigurationError` for a file that others may write."""
    path = trusted_path()
    try:
        if path.stat().st_mode & 0o022:
            raise ConfigurationError(
                f"got {path} writable by others, who could let their code in here. Do: chmod go-w {path}"
            )
        require_own(path, "trusted keys")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        text, _, comment = line.strip().partition(" ")
        if not text or text.startswith("#"):
            continue
        public = _bytes(text)
        if public is None:
            raise ConfigurationError(
                f"{path}, line {number}: expected a key as `python -m distruntime key` prints it, got {line[:60]!r}"
            )
        found[public] = comment.strip()
    return found


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode("ascii")


def _bytes(text: str) -> bytes | None:
    """Return the 32 bytes of a key, or None if it is none."""
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
    return key if len(key) == 32 else None
