"""Signatures under what is published: whose key made one, and whether this user trusts it.

The key belongs to a person, not to the cluster. Whoever holds the cluster's key may run code on workers, and
that says nothing about whose pickles this process may open. The signatures are Ed25519, by PyNaCl.
"""

from __future__ import annotations

import base64
import binascii
import socket
import stat
from pathlib import Path

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from ..errors import ConfigurationError, UntrustedError
from ..wire.identity import user_name
from ..wire.keys import require_own, user_file, write_private

# A signature covers these bytes first, so that one made for another purpose does not count here.
_CONTEXT = b"distruntime publication\0"
_BANNER = """\
# distruntime signing key: SECRET. What it has signed, your masters open, which runs code.
# `python -m distruntime key` prints the public half, for other people's trusted-keys.
"""


def key_path() -> Path:
    """Return the file of this user's signing key.

    It is $DISTRUNTIME_SIGNING_KEY or ~/.config/distruntime/signing-key.
    """
    return user_file("DISTRUNTIME_SIGNING_KEY", "signing-key")


def trusted_path() -> Path:
    """Return the file that lists the public keys of others.

    It is $DISTRUNTIME_TRUSTED_KEYS or ~/.config/distruntime/trusted-keys.
    """
    return user_file("DISTRUNTIME_TRUSTED_KEYS", "trusted-keys")


def person() -> str:
    """Return "user@host": who signs here, in this process's own words."""
    return f"{user_name()}@{socket.gethostname()}"


def own_key() -> SigningKey:
    """Return this user's signing key. Make one (mode 0600) if there is none.

    Raises `ConfigurationError` for a file that is no key.
    """
    path = key_path()
    try:
        if not path.exists():
            write_private(path, _BANNER + _text(SigningKey.generate().encode()) + "\n")
    except FileExistsError:
        # Another process was faster at its own first use, and this one shares its key.
        pass
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
            f"got signing key {path} with mode {stat.S_IMODE(mode):04o}, expected one that its owner alone "
            f"may read. Do: chmod 600 {path}"
        )
    require_own(path, "a signing key")
    seed = _bytes(words[0]) if len(words) == 1 else None
    if seed is None:
        raise ConfigurationError(
            f"got {path} without a signing key in it. Delete it, and the next dr.publish makes a new one"
        )
    return SigningKey(seed)


def public_line() -> str:
    """Return the line that others add to their trusted-keys: this user's public key and name."""
    return f"{_text(own_key().verify_key.encode())} {person()}"


def sign(body: bytes) -> tuple[bytes, bytes]:
    """Return this user's public key and its signature under `body`."""
    key = own_key()
    return key.verify_key.encode(), key.sign(_CONTEXT + body).signature


def verify(body: bytes, public: object, signature: object) -> bool:
    """Whether this key has signed `body` with this signature. That says nothing about whose key it is."""
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
    """Raise `UntrustedError` unless a public key is this user's own or a listed one.

    `claims` is the name that its holder claims.
    """
    path = key_path()
    if path.exists() and _load(path).verify_key.encode() == public:
        return
    if public in trusted_keys():
        return
    raise UntrustedError(
        f"{what} is signed with the key {_text(public)}, whose holder claims to be {claims}. It is neither "
        f"your own nor listed in {trusted_path()}, and opening what it has signed would run that person's "
        "code here\n"
        "  if you trust them, and `python -m distruntime key` prints this key there, add the line:  "
        f"{_text(public)} {claims}"
    )


def trusted_keys() -> dict[bytes, str]:
    """Return the public keys that are listed, with their comments.

    Raises `ConfigurationError` for a file that others may write.
    """
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
                f"{path}, line {number}: expected a key as `python -m distruntime key` prints it, got "
                f"{line[:60]!r}"
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
