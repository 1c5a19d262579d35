"""Why ssh did not get there, in one line with what to do: ssh itself says so in many ways."""

from __future__ import annotations

import re
import signal

from ..errors import ConfigurationError, ConnectionFailed
from .ssh_address import SshAddress

# The first pattern that is found in what ssh has said decides. The line may use {host}, {command}, {said}.
_CAUSES = (
    (
        r"Could not resolve hostname",
        "ssh knows no host {host!r}: {said}. Check the spelling, or add the host to ~/.ssh/config",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed",
        "its host key has changed since ssh has seen it last, so another machine may be answering. Ask who "
        "runs it. If it was installed anew: `ssh-keygen -R {known}`, then `{command}` once by hand",
    ),
    (
        r"Host key verification failed|No .* host key is known|authenticity of host",
        "its host key is not known here. Run `{command}` once by hand, and compare the fingerprint before "
        "you accept it",
    ),
    (
        r"UNPROTECTED PRIVATE KEY FILE|bad permissions",
        "ssh does not use a private key that others may read: {said}. Do: chmod 600 FILE",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "ssh was not let in ({said}). distruntime types no password: `{copy}` puts your key there, and "
        "`ssh-add` unlocks a key that has a passphrase",
    ),
    (
        r"Bad configuration option|Bad owner or permissions|bad configuration|Can't open user config",
        "ssh does not accept its own configuration: {said}",
    ),
    (
        r"Connection refused",
        "nobody accepts ssh there: {said}. Is sshd running, and is the port right (ssh://{host}:PORT)?",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Host is down",
        "the machine does not answer: {said}. Is it on, and is there a way to it (a VPN, or ProxyJump in "
        "~/.ssh/config)?",
    ),
    (
        r"administratively prohibited|forwarding failed|forwarding request failed|refused.*forward",
        "its sshd forwards no connections: {said}. The worker is reached through ssh, so sshd_config there "
        "needs AllowTcpForwarding yes",
    ),
)


def no_ssh_here() -> ConfigurationError:
    """Return the error of a machine that has no ssh program."""
    return ConfigurationError(
        "got an address that begins with ssh://, and this machine has no program ssh. Install OpenSSH's "
        "client (apt install openssh-client), or start workers by hand and name them as tcp://host:port"
    )


def explained(address: SshAddress, said: str, code: int | None = None) -> ConnectionFailed:
    """Return the error of a connection that ssh could not make, or that has ended too soon.

    Args:
        said: what ssh wrote to its standard error.
        code: how ssh has ended, if it has.
    """
    lines = [line.strip().rstrip(".") for line in said.splitlines() if line.strip(" @\t\r\n")]
    for pattern, text in _CAUSES:
        found = re.search(pattern, said, re.IGNORECASE)
        if found is not None:
            line = next((line for line in lines if re.search(pattern, line, re.IGNORECASE)), lines[-1])
            return ConnectionFailed(f"{address.shown}: {_filled(text, address, line)}")
    how = f"; its last line: {lines[-1]}" if lines else ", and said nothing"
    ended = f"ssh has ended ({_code(code)})" if code is not None else "ssh did not get there in time"
    return ConnectionFailed(f"{address.shown}: {ended}{how}. Try by hand: {address.command} echo it works")


def _filled(text: str, address: SshAddress, line: str) -> str:
    known = f"[{address.host}]:{address.port}" if address.port else address.host
    copy = address.command.replace("ssh", "ssh-copy-id", 1)
    said = re.sub(r"^(ssh|kex_exchange_identification|mux_client_forward): ", "", line)
    return text.format(host=address.host, command=address.command, said=said, known=known, copy=copy)


def _code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
