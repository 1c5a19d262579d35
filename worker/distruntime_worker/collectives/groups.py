"""The groups of one session on one worker.

Who is in them, whether they hold, and which of their operations carry poisoned values.
"""

from __future__ import annotations

import logging
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial

import torch

from distruntime.errors import ConfigurationError, ProtocolError
from distruntime.wire.data_channel import Factory, Membership, checked
from distruntime.wire.descriptors import require
from distruntime.wire.messages import Entry, Message, OpenGroup, Tainted
from distruntime.wire.shield import Lock

from ..machine import threads
from ..machine.devices import Devices
from .data_channel import find
from .group import Broken, Group, Report, Tell

log = logging.getLogger("distruntime.worker")

# So many bytes of entries are kept for groups that are not open here yet.
_EARLY = 16 << 20


class Groups:
    """All groups of a session on this worker."""

    def __init__(self, devices: Devices, report: Report, on_broken: Broken) -> None:
        self._devices, self._report, self._on_broken = devices, report, on_broken
        self._groups: dict[int, Group] = {}
        self._ended = False
        # It guards what follows. It also makes sure that what is early goes to its group when that is opened.
        self._opening = Lock()
        # This is the last group that was opened here. The master opens them in the order of their numbers.
        self._latest = 0
        # This keeps, by group, who said what before it was open here.
        self._early: dict[int, list[tuple[int, Entry]]] = {}
        self._room = _EARLY

    def __getitem__(self, number: int) -> Group:
        found = self._groups.get(number)
        if found is None:
            raise ProtocolError(f"there is no group {number}")
        return found

    def get(self, number: int) -> Group | None:
        """Return a group, if it is here."""
        return self._groups.get(number)

    def open(
        self, message: OpenGroup, host: str, tell: Tell, then: Callable[[BaseException | None], None]
    ) -> None:
        """Begin to join a group.

        `then` is called, in a thread of its own, when all own members have, or with what went wrong.
        """
        if message.group <= self._latest or self._ended:
            raise ProtocolError(f"group {message.group} cannot be opened")
        named: dict[int, str] = {}
        for member in message.members:
            match member:
                case [int(rank), str(device)] if 0 <= rank < len(message.nodes):
                    named[rank] = device
                case _:
                    raise ProtocolError(
                        f"group {message.group} of {len(message.nodes)} has members {message.members!r:.80}"
                    )
        group = Group(message, list(named), self._report, tell, self._on_broken)
        try:
            for rank, device in named.items():
                group.devices[rank] = self._devices.real(torch.device(device))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ProtocolError(
                f"group {message.group} of members {message.members!r:.80}: {error}"
            ) from error
        with self._opening:
            self._groups[message.group], self._latest = group, message.group
            early = self._early.pop(message.group, [])
            for number in [number for number in self._early if number < message.group]:
                del self._early[number]
            self._room = _EARLY - sum(_size(entry) for rows in self._early.values() for _, entry in rows)
        for node, entry in early:
            if node in group.nodes:
                group.store.arrived(entry.key, entry.value)
            else:
                log.warning("node %d has set a key of group %d, which it is not in", node, group.number)
        try:
            threads.begin(partial(self._join, group, message, host, then), "join")
        except ConfigurationError as error:
            group.end(f"it was never joined: {error}")
            then(error)

    def _join(
        self, group: Group, message: OpenGroup, host: str, then: Callable[[BaseException | None], None]
    ) -> None:
        errors: list[BaseException] = []

        def join(rank: int, factory: Factory) -> None:
            try:
                membership = Membership(
                    rank, len(group.nodes), group.devices[rank], host, message.timeout, group.store
                )
                group.enter(rank, factory(membership))
            except Exception as error:
                errors.append(error)

        try:
            require(f"group {group.number}")
            factory = (
                checked(message.channel, _unpickled(message.factory))
                if message.factory
                else find(message.channel)
            )
            threads = [
                threading.Thread(target=join, args=(rank, factory), daemon=True) for rank in group.devices
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except Exception as error:
            errors.append(error)
        if errors:
            group.end(f"it was never joined: {errors[0]}")
        then(errors[0] if errors else None)

    def end(self, number: int, reason: str) -> None:
        """Break one group, if it is still there."""
        group = self._groups.get(number)
        if group is not None:
            group.end(reason)

    def close(self, number: int) -> None:
        """Close one group; it is forgotten."""
        group = self[number]
        try:
            group.close()
        finally:
            del self._groups[number]

    def close_all(self) -> None:
        """Close every group: nothing is left to run. Block until what a device has queued has run."""
        for number in list(self._groups):
            try:
                self.close(number)
            except Exception:
                # No value depends on it, and the master has left.
                log.exception("group %d does not close", number)

    def end_all(self, reason: str) -> None:
        """Break every group: the session is over."""
        self._ended = True
        for group in list(self._groups.values()):
            group.end(reason)
        with self._opening:
            self._early.clear()

    def receive(self, node: int, message: Message) -> None:
        """Act on what another worker says of a group."""
        match message:
            case Entry(group=number):
                with self._opening:
                    group = self._groups.get(number)
                    # What comes for an older group that is not here is late: that group is closed.
                    if group is None and number > self._latest and not self._ended:
                        self._keep(node, message)
                if group is not None:
                    if node not in group.nodes:
                        raise ProtocolError(f"Entry for group {number} by node {node}, which is not in it")
                    group.store.arrived(message.key, message.value)
            case Tainted(group=number, sequence=sequence):
                group = self._groups.get(number)
                if group is not None:
                    group.answered(sequence, node)

    def _keep(self, node: int, entry: Entry) -> None:
        """Keep an entry until its group is opened here (the lock is held).

        Raise `ProtocolError` where that is too much.
        """
        if _size(entry) > self._room:
            raise ProtocolError(
                f"more than {_EARLY >> 20} MiB of entries for groups that are not open here, the last for "
                f"group {entry.group}"
            )
        self._room -= _size(entry)
        self._early.setdefault(entry.group, []).append((node, entry))


def _unpickled(factory: bytes) -> object:
    # It comes from the master, which may run any code here anyway.
    try:
        return pickle.loads(factory)
    except Exception as error:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ConfigurationError(
            f"the registered data channel does not load on this worker (Python {version}): {error!r}"
        ) from error


def _size(entry: Entry) -> int:
    # Python itself needs some 256 bytes for an entry.
    return 256 + len(entry.key) + len(entry.value)
