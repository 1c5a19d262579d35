"""The key of a cluster: one CURVE key pair that the master and every worker hold.

Whoever holds the key file is both a legitimate master and a legitimate worker, and may run code on every
worker (as with munge's key or Erlang's cookie). The file has zmq.auth's certificate format, mode 0600.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
import zmq.utils.z85

from ..errors import ConfigurationError
from .address import host_of, require_port

log = logging.getLogger("distruntime")

_BANNER = """\
#   distruntime cluster key, in the format of zmq.auth: a CURVE **secret** certificate.
#   Whoever can read it may run code on every worker. Copy it to each machine of the cluster (mode 0600) and
#   to nobody else.
metadata
curve
    public-key = "{public}"
    secret-key = "{secret}"
"""


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, each half 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @staticmethod
    def generate() -> KeyPair:
        """Return a new key pair."""
        public, secret = zmq.curve_keypair()
        return KeyPair(public, secret)

    def text(self) -> str:
        """Return what a key file holds."""
        return _BANNER.format(public=self.public.decode("ascii"), secret=self.secret.decode("ascii"))

    def token(self) -> str:
        """Return a word that only holders of the key know, and that does not tell the key.

        Whoever shows it may read a worker's figures (`distruntime-worker --metrics`), and nothing else.
        """
        return hmac.new(self.secret, b"distruntime metrics", "sha256").hexdigest()

    def save(self, path: Path) -> None:
        """Write the key to `path` (mode 0600), its directory made (0700) where missing; never overwrites.

        Raises:
            ConfigurationError: `path` exists or cannot be written.
        """
        try:
            write_private(path, self.text())
        except FileExistsError:
            raise ConfigurationError(
                f"got a key path that is taken, {path}: a key is never overwritten, since workers may still "
                "use it. Give another path, or delete the file first."
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"the key cannot be written to {path}: {error.strerror}. Give a path that can be written."
            ) from error

    @staticmethod
    def load(path: Path) -> KeyPair:
        """Read the key that `save` or `distruntime-worker keygen` wrote.

        Raises:
            ConfigurationError: no such file, others may read it, or it holds no key pair.
        """
        try:
            mode = path.stat().st_mode
            public, secret = _read(path) if stat.S_ISREG(mode) else (b"", None)
        except FileNotFoundError:
            raise ConfigurationError(
                f"got no key file at {path}, expected the key that the master and all workers share. "
                f"Make one with `distruntime-worker keygen {path}` and copy it to each machine."
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"the key file {path} cannot be read: {error.strerror}. It must be readable by you alone."
            ) from error
        if not stat.S_ISREG(mode):
            raise ConfigurationError(
                f"got {path} as the key file, expected a regular file. Make one: distruntime-worker keygen "
                "FILE"
            )
        if mode & 0o077:
            raise ConfigurationError(
                f"got key file {path} with mode {stat.S_IMODE(mode):04o}, expected one that its owner alone "
                f"may read. Do: chmod 600 {path}"
            )
        require_own(path, "a key")
        if not _is_key(public) or secret is None or not _is_key(secret) or zmq.curve_public(secret) != public:
            raise ConfigurationError(
                f"got key file {path} without a whole key pair, expected what `distruntime-worker keygen` "
                "writes. Copy the cluster's key to it again, or make a new key for all."
            )
        return KeyPair(public, secret)


def default_path() -> Path:
    """Return where the cluster's key is looked for.

    $DISTRUNTIME_KEY, or ~/.config/distruntime/key (XDG_CONFIG_HOME is honoured).
    """
    return user_file("DISTRUNTIME_KEY", "key")


def user_file(variable: str, name: str) -> Path:
    """Return the path that an environment variable names, or that of a file in ~/.config/distruntime
    (XDG_CONFIG_HOME is honoured).
    """
    named = os.environ.get(variable)
    if named:
        return Path(named).expanduser()
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "distruntime" / name


def write_private(path: Path, text: str) -> None:
    """Write a new file (mode 0600), its directory made (0700) where missing.

    Raise `FileExistsError` where there is one, or `OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # mkstemp gives the file the mode 0600.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text)
        # The key appears whole or not at all, and it never replaces another one.
        os.link(temporary, path)
    finally:
        os.unlink(temporary)


def require_own(path: Path, what: str) -> None:
    """Raise `ConfigurationError` unless this user, or root, alone decides what is in a file; `OSError` where
    there is none.

    The mode of the file itself does not say that: its owner may be another, and whoever may write its folder
    replaces the file.
    """
    for place, status in ((path, path.stat()), (folder := path.resolve().parent, folder.stat())):
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigurationError(
                f"got {what} at {path}, but {place} belongs to user {status.st_uid}, who can change it; this "
                f"process is user {os.geteuid()}'s. Copy the file to where only you can write, or do: chown "
                f"{os.geteuid()} {place}"
            )
        # Where a group has the user's own number, that user is its one member, as many systems set it up. In
        # a sticky folder one replaces one's own files.
        others = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid != os.geteuid() else 0)
        if status.st_mode & others and not status.st_mode & stat.S_ISVTX:
            raise ConfigurationError(
                f"got {what} at {path}, but others may write {place}, and so change it. Do: chmod go-w "
                f"{place}"
            )


def needs_key(address: str) -> bool:
    """Return whether peers at `address` must prove themselves.

    All but those of a socket file in a directory private to its owner.
    """
    return not _is_private(address)


def choose(address: str, *, path: Path | None = None, insecure: bool = False) -> KeyPair | None:
    """Return the key to use at `address`, or None where none is needed.

    A named key file is always used. Without one, loopback addresses use the default key, made on first use;
    other addresses use the default key if it exists.

    Args:
        path: the key file the user named, if any.
        insecure: the user accepts that whoever reaches `address` may run code: see `warn_of_strangers`.

    Raises:
        ConfigurationError: the address cannot be, or it needs a key and there is none.
    """
    if not address.startswith(("tcp://", "ipc://")):
        raise ConfigurationError(f"got address {address!r}, expected tcp://host:port or ipc://path")
    require_port(address)
    if path is not None:
        return KeyPair.load(path)
    if insecure or not needs_key(address):
        return None
    default = default_path()
    if default.exists():
        return KeyPair.load(default)
    if not is_local(address):
        raise ConfigurationError(
            f"got {address} without a key, expected a key for every address that other machines can reach: "
            "workers run code for whoever may talk to them. Make one with `distruntime-worker keygen` and "
            f"copy {default} to each machine, or accept the risk with --insecure (in Python: insecure=True)."
        )
    try:
        KeyPair.generate().save(default)
    except ConfigurationError:
        # If the file exists by now, another process was faster at its own first use, and this one shares its
        # key.
        if not default.exists():
            raise
    return KeyPair.load(default)


def warn_of_strangers(addresses: Sequence[str]) -> None:
    """Say in the log, once for all of them, what it means that `choose` was told insecure=True for these
    addresses.
    """
    open_to = [address for address in addresses if needs_key(address)]
    if open_to:
        who = "every user of this machine" if all(map(is_local, open_to)) else "whoever reaches that address"
        log.warning(
            "insecure: at %s%s nobody has to prove who they are, and nothing is encrypted: %s may run code "
            "as this user, and read and change every tensor (docs/security.md)",
            open_to[0],
            f" and {len(open_to) - 1} more" if len(open_to) > 1 else "",
            who,
        )


def is_local(address: str) -> bool:
    """Return whether only this machine can reach `address`.

    A host name other than localhost counts as not local.
    """
    if address.startswith(("ipc://", "inproc://")):
        return True
    host = host_of(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _is_private(address: str) -> bool:
    # Linux's abstract sockets have no file and so no owner.
    if not address.startswith("ipc://") or address.startswith("ipc://@"):
        return False
    try:
        status = Path(address[len("ipc://") :]).parent.stat()
    except OSError:
        # choose() cannot vouch for what is not there. Binding there fails on its own.
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except ValueError:
        # There is no key in it.
        return b"", None


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == 40 and len(zmq.utils.z85.decode(text)) == 32
    except (ValueError, KeyError):
        return False
