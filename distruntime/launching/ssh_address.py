"""The address of a worker that is reached by ssh: `ssh://me@gpubox:2222?devices=cuda:0&setup=auto`."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import final
from urllib.parse import parse_qsl, urlencode, urlsplit

from ..errors import ConfigurationError

SCHEME = "ssh://"
# The options of an address, and what each says.
OPTIONS = {
    "address": "the host by which other workers reach this one",
    "devices": "the devices that the worker offers, as cuda:0,cuda:1",
    "max_memory": "the limit of one session's memory on each device, as 8GiB or 50%",
    "python": "the Python there that runs the worker",
    "setup": "auto: make an environment there if something is missing",
    "simulate_cuda": "how many GPUs the worker simulates",
    "threads": "threads of torch's kernels there",
}
# A name that begins with a hyphen would be an option to ssh, and its config gives '%' a meaning.
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*\Z")
_HOST = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*\Z|[0-9A-Fa-f:]+\Z")


def is_ssh(address: str) -> bool:
    """Whether an address is one of ssh's."""
    return address.startswith(SCHEME)


@final
@dataclass(frozen=True)
class SshAddress:
    """What an address says. `text` is the address as the user wrote it; `port` is 0 where ssh is to choose.

    `options` has what the user gave, checked.
    """

    text: str
    user: str
    host: str
    port: int
    options: dict[str, str]

    @staticmethod
    def parse(text: str) -> SshAddress:
        """Return what an address says; raise `ConfigurationError` for one that cannot be."""
        try:
            parts = urlsplit(text)
            port = parts.port
            host, user, password = parts.hostname or "", parts.username or "", parts.password
        except ValueError as error:
            raise _unusable(text, str(error)) from None
        # `urlsplit` writes a host in lower case, and an alias of ssh's config may have capitals.
        at = parts.netloc.rpartition("@")[2].lower().find(host)
        host = parts.netloc.rpartition("@")[2][at : at + len(host)]
        if password is not None:
            raise _unusable(
                text.replace(f":{password}@", ":...@", 1),
                "it has a password, and ssh takes none from a program. Use a key: `ssh-copy-id HOST`",
            )
        if not _HOST.match(host):
            raise _unusable(text, f"{host!r} is no host")
        if "@" in parts.netloc and not _NAME.match(user):
            raise _unusable(text, f"{user!r} is no user")
        if port == 0:
            raise _unusable(text, "0 is no port")
        if parts.path not in ("", "/") or parts.fragment:
            raise _unusable(text, f"{parts.path or '#' + parts.fragment!r} behind the host means nothing")
        return SshAddress(text, user, host, port or 0, _options(text, parts.query))

    @property
    def destination(self) -> str:
        """What `ssh` is given: "me@gpubox"."""
        return f"{self.user}@{self.host}" if self.user else self.host

    @property
    def shown(self) -> str:
        """The address without its options."""
        return self.text.partition("?")[0].rstrip("/")

    def changed(self, name: str, value: str) -> str:
        """Return the address with another Python (`python=`), or with an environment (`setup=auto`)."""
        others = {option: said for option, said in self.options.items() if option not in ("python", "setup")}
        return f"{self.shown}?{urlencode({name: value, **others}, safe='/:,~')}"

    @property
    def command(self) -> str:
        """The command by which a person gets there."""
        return shlex.join(["ssh", *(("-p", str(self.port)) if self.port else ()), self.destination])


def _options(text: str, query: str) -> dict[str, str]:
    known = ", ".join(sorted(OPTIONS))
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise _unusable(
            text, f"{query!r} are no options. Expected name=value&name=value, of {known}"
        ) from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in OPTIONS:
            raise _unusable(text, f"there is no option {name!r}. There are {known}")
        if name in found:
            raise _unusable(text, f"it has the option {name!r} twice")
        if not value.strip():
            raise _unusable(text, f"its option {name!r} is empty. It says {OPTIONS[name]}")
        found[name] = value.strip()
    if found.get("setup", "auto") != "auto":
        raise _unusable(text, f"setup={found['setup']}: there is setup=auto alone")
    for name in ("threads", "simulate_cuda"):
        if not found.get(name, "0").isdecimal():
            raise _unusable(text, f"{name}={found[name]} is no number")
    if re.search(r"\s", found.get("address", "")):
        raise _unusable(text, f"address={found['address']!r} is no host")
    return found


def _unusable(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"got address {text!r}: {why}. Expected ssh://user@host:port?option=value, where user, port and "
        "options may be left out"
    )
