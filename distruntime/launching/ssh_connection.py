"""One connection of the system's `ssh`: a shell there, then the agent in its place, and forwarded sockets.

All goes through one process and one login. It is a master of ssh's own multiplexing, so that sockets can be
forwarded while it runs. Why ssh did not get there is one line with what to do: ssh itself says so in many
ways.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import final

from ..errors import ConfigurationError, ConnectionFailed
from ..wire import scratch
from ..wire.shield import Lock
from . import ssh_agent
from .ssh_address import SshAddress
from .ssh_probe import MARK

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


# So many seconds lie between two signs of life, and after so many without an answer ssh gives up.
_ALIVE_INTERVAL, _ALIVE_COUNT = 5, 3
# A request to the running ssh process takes so many seconds at most.
_CONTROL = 15.0
_PIECE = 1 << 16

# These hold whatever the user's config says. Its other settings stay: keys, agents, jump hosts, ciphers.
_SETTINGS = (
    # Nobody sits in front of it who could answer.
    "BatchMode=yes",
    "ControlMaster=yes",
    "ControlPersist=no",
    f"ServerAliveInterval={_ALIVE_INTERVAL}",
    f"ServerAliveCountMax={_ALIVE_COUNT}",
    # A killed process leaves its sockets in the folder.
    "StreamLocalBindUnlink=yes",
    # The user's own forwarded ports belong to the user's own connection.
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "RequestTTY=no",
    "PermitLocalCommand=no",
    "ForwardX11=no",
    "LogLevel=ERROR",
)


class Broken(Exception):
    """The connection is no more."""


@final
class SshConnection:
    """A running `ssh` and what it says.

    One thread reads; any thread sends and forwards.

    Args:
        control: the path of the socket by which it takes requests.
        errors: the file for what ssh itself says.
        patience: seconds for the connection to come about.
    """

    def __init__(self, address: SshAddress, control: Path, errors: Path, patience: float) -> None:
        self.address, self._control, self._errors = address, control, errors
        self._buffered = b""
        self._sending = Lock()
        control.unlink(missing_ok=True)
        settings = [*_SETTINGS, f"ConnectTimeout={max(1, round(patience))}"]
        options = [word for setting in settings for word in ("-o", setting)]
        port = ["-p", str(address.port)] if address.port else []
        with errors.open("wb") as said:
            try:
                self.process = subprocess.Popen(
                    ["ssh", "-T", "-S", str(control), *options, *port, "--", address.destination, "exec sh"],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    # Ctrl-C in the master's terminal is the master's alone.
                    start_new_session=True,
                )
            except FileNotFoundError:
                raise no_ssh_here() from None
            except OSError as error:
                raise ConnectionFailed(f"{address.shown}: ssh cannot be started: {error.strerror}") from None

    def said(self) -> str:
        """Return what ssh itself has said."""
        with suppress(OSError):
            return self._errors.read_text(encoding="utf-8", errors="replace")[-4000:]
        return ""

    def failure(self) -> ConnectionFailed:
        """Return why there is no connection."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        return explained(self.address, self.said(), self.process.poll())

    # -- lines -----------------------------------------------------------------------------------------

    def send(self, text: str) -> None:
        """Send lines; raise `Broken` where there is no connection."""
        data = text.encode("utf-8")
        assert self.process.stdin is not None
        with self._sending:
            try:
                while data:
                    data = data[self.process.stdin.write(data) or 0 :]
            # A closed file raises the second one.
            except (OSError, ValueError):
                raise Broken from None

    def ask(self, **request: object) -> None:
        """Send a request to the agent."""
        self.send(json.dumps(request) + "\n")

    def lines(self, deadline: float | None, still: Callable[[], bool]) -> Iterator[str]:
        """Yield what comes with the mark, without it.

        Block for each line; end at the deadline (of `time.monotonic`) or once `still()` is False. Raise
        `Broken` at the end of the connection.
        """
        assert self.process.stdout is not None
        descriptor, ready = self.process.stdout.fileno(), select.poll()
        ready.register(descriptor, select.POLLIN)
        while still():
            while b"\n" in self._buffered:
                line, _, self._buffered = self._buffered.partition(b"\n")
                if line.startswith(MARK.encode()):
                    yield line[len(MARK) :].decode("utf-8", "replace").strip()
            left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
            if left <= 0:
                return
            if ready.poll(left * 1000):
                piece = os.read(descriptor, _PIECE)
                if not piece:
                    raise Broken
                self._buffered += piece

    def become_agent(self, python: str, deadline: float, still: Callable[[], bool]) -> None:
        """Put the agent in the place of the shell. It says hello.

        Raise `ConnectionFailed` if the Python does not start in time.
        """
        source = Path(ssh_agent.__file__).read_text(encoding="utf-8")
        below, name = Path(scratch.__file__).read_text(encoding="utf-8"), scratch.__name__
        start = f"import sys; print('{MARK}ready', flush=True); exec(sys.stdin.readline())"
        self.send(f"exec {shlex.quote(python)} -u -c {shlex.quote(start)}\n")
        # A shell may read more than the line that it runs, so nothing follows that line yet.
        for line in self.lines(deadline, still):
            if line == "ready":
                # The agent finds this module without its package, which may not be there.
                made = f"import types; made = sys.modules[{name!r}] = types.ModuleType({name!r})"
                self.send(f"{made}; exec({below!a}, made.__dict__); exec({source!a})\n")
                return
        raise ConnectionFailed(f"{self.address.shown}: {python} does not start in time")

    # -- forwarded sockets -----------------------------------------------------------------------------

    def forward(self, here: Path, host: str, port: int) -> None:
        """Let a socket here lead to a port there. Block for a moment; raise `ConnectionFailed`."""
        self._request("-L", f"{here}:{_bracketed(host)}:{port}")

    def forward_back(self, port: int, target: str) -> int:
        """Let a port of the loopback there lead to a socket or an endpoint here; return the port.

        Args:
            port: 0: any free one.
            target: a socket's path, or host:port.
        """
        said = self._request("-R", f"127.0.0.1:{port}:{target}")
        return port or int(said.split()[-1])

    def _request(self, option: str, what: str) -> str:
        words = ["ssh", "-F", "none", "-S", str(self._control), "-O", "forward", option, what]
        try:
            done = subprocess.run(
                [*words, "--", self.address.destination],
                capture_output=True,
                # The other machine may speak another language than this process reads.
                encoding="utf-8",
                errors="replace",
                timeout=_CONTROL,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise ConnectionFailed(
                f"{self.address.shown}: ssh did not forward a socket within {_CONTROL:g} s"
            ) from None
        if done.returncode:
            if self.process.poll() is not None:
                raise self.failure()
            raise explained(self.address, "forwarding failed: " + (done.stderr.strip() or "no reason given"))
        return done.stdout.strip()

    # -- the end ---------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Let the agent know that nothing more is asked. Return at once."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.close()

    def close(self, patience: float = 2.0) -> None:
        """End the process. Block until it has ended."""
        self.hang_up()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(2.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._control.unlink(missing_ok=True)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
