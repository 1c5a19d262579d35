"""The workers of one session that ssh reaches: their keys, their start, and where they appear here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import final

from ..errors import ConfigurationError, ConnectionFailed
from ..session.launcher import LaunchSpec
from ..session.session import Session
from ..wire.keys import KeyPair, choose, default_path
from .ssh import SshLauncher, SshWorker
from .ssh_address import SshAddress, is_ssh
from .ssh_routes import SshRoutes

# A dot is shown so often while workers start, and so often somebody looks.
_DOT, _LOOK = 0.25, 0.02
# Workers that are busy with a step that takes long, as making an environment, are not late.
_LONG_STEPS = 3600.0
# A worker has so many seconds more than its step, to say what was wrong.
_LAST_WORDS = 2.0


def need_ssh(addresses: Sequence[str]) -> bool:
    """Whether ssh leads to one of these addresses."""
    return any(map(is_ssh, addresses))


@final
class SshSession:
    """Which nodes of a session are reached by ssh.

    Args:
        addresses: those of all nodes.
        directory: a folder here that only this user can enter, for sockets and for a key that is made now.
        name: the session's name, or None.
        key: the file with the key that the user has named.
        insecure: whether the user wants no key.
    """

    def __init__(
        self, addresses: Sequence[str], directory: Path, *, name: str | None, key: Path | None, insecure: bool
    ) -> None:
        self.addresses = [SshAddress.parse(text) if is_ssh(text) else None for text in addresses]
        self.directory, self._name = directory, name or ""
        self.endpoints = {
            k: f"ipc://{directory}/worker-{k}" for k, one in enumerate(self.addresses) if one is not None
        }
        if insecure:
            raise ConfigurationError(
                "insecure=True does not go with addresses of ssh://: their workers always have a key, which "
                "ssh hands over. Leave insecure out"
            )
        others = [text for text in addresses if not is_ssh(text)]
        if key is None and not others and name is None:
            # It serves this session alone, and goes with it.
            key = directory / "key"
            KeyPair.generate().save(key)
        elif key is None:
            # A later master of this session, and the workers that run already, have this one.
            for text in others or ["tcp://127.0.0.1:0"]:
                if choose(text) is None:
                    raise ConfigurationError(
                        f"{text} needs no key, and a worker that ssh reaches has one: a session has one key "
                        "for all. Name the key file with key="
                    )
            key = default_path()
        self.key = key
        self.keys = KeyPair.load(key)
        self._launcher: SshLauncher | None = None

    def start(
        self,
        session: Session,
        spec: LaunchSpec,
        *,
        must_run: bool,
        patience: float,
        say: Callable[[str], None],
    ) -> None:
        """Start the workers, or find those that run. Block until all listen; raise why one does not."""
        self._launcher = launcher = SshLauncher(
            self.addresses, session=self._name, must_run=must_run, patience=patience, say=say
        )
        spec = replace(spec, key=self.key)
        session.workers.launch = lambda k: launcher.start(replace(spec, node=k, listen=self.endpoints[k]))
        session.workers.startable = frozenset(self.endpoints)
        session.routes = SshRoutes(session, self.directory)
        session.workers += [None] * len(self.addresses)
        for k in self.endpoints:
            session.workers.start(k)
        self._wait([launcher.workers[k] for k in self.endpoints], patience, say)

    @contextmanager
    def older_ones_stay(self) -> Iterator[None]:
        """Let go of the workers that ran before, if a `with` block fails: the values there are not lost."""
        try:
            yield
        except BaseException:
            for worker in self._launcher.workers.values() if self._launcher is not None else ():
                if worker.found:
                    worker.leave()
            raise

    def _wait(self, workers: Sequence[SshWorker], patience: float, say: Callable[[str], None]) -> None:
        began = time.monotonic()
        dot, deadline = began + _DOT, began + patience
        while late := [worker for worker in workers if not worker.ready.is_set()]:
            for worker in late:
                worker.require_started()
                if (ended := worker.poll()) is not None:
                    words = worker.last_lines(5)
                    raise ConnectionFailed(
                        f"{worker.address.shown}: the worker ended before it was ready ({ended})"
                        + (f"; the last lines of its log:\n{words}" if words else "")
                    )
            now = time.monotonic()
            if any(worker.takes_long for worker in late):
                deadline = max(deadline, now + patience)
            # A worker says by itself what has taken too long, and knows more.
            if now > min(deadline + _LAST_WORDS, began + _LONG_STEPS):
                raise ConnectionFailed(
                    f"{late[0].address.shown} was not ready within {now - began:.0f} s; it was "
                    f"{late[0].step}. Give it longer: timeout="
                )
            if now > dot:
                say(".")
                dot = now + _DOT
            late[0].ready.wait(_LOOK)
