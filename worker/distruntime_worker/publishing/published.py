"""What a session has published on this worker: it outlives the session's master, and other sessions may read what is shared.

A `Published` belongs to a session and goes from one of its executors to the next; a `Shelf` is one executor's way to it, and to others'.
What the envelopes hold concerns masters only: here they are bytes.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from distruntime.errors import InternalError, NotSupportedError, ProtocolError, UsageError
from distruntime.wire.codec import failure_fields
from distruntime.wire.messages import ADOPT, PUBLISH, Failed, Failure, Reply

from ..log.read_only import ReadOnly
from ..log.state import State, request_of
from ..values.objects import Poisoned, described, memory_of, spec_fields
from ..values.step import Own

_number = count(secrets.randbits(60)).__next__


def count_anew() -> None:
    """Give out other numbers than the process from which this one was forked."""
    global _number
    _number = count(secrets.randbits(60)).__next__


def _numbered(thing: Any) -> int:
    """Return the number of a tensor or of a storage: the same as long as it lives, and no other's here or in another process."""
    found: int | None = getattr(thing, "_published_as", None)
    if found is None:
        found = thing._published_as = _number()
    return found


@dataclass
class Record:
    """One version of a name. `listed` says which workers have a part of it, [identity, ...]; `envelope` is for masters."""

    version: int
    shared: bool
    what: str
    listed: list[Any]
    envelope: bytes
    tensors: list[Any]  # Poisoned where a write has failed since
    numbers: list[list[int]]  # of each tensor and of its memory

    def rows(self) -> list[list[Any]]:
        """Return [tensor, memory, spec] of each, as it is now; a poisoned one's spec is None."""
        for value, numbers in zip(self.tensors, self.numbers):
            if isinstance(value, torch.Tensor):
                numbers[1] = _numbered(value.untyped_storage())
        return [
            [*n, spec_fields(t) if isinstance(t, torch.Tensor) else None]
            for n, t in zip(self.numbers, self.tensors)
        ]

    def nbytes(self) -> int:
        """Return the bytes of memory that it keeps."""
        storages = {
            storage._cdata: storage.nbytes() for t in self.tensors if (storage := memory_of(t)) is not None
        }
        return sum(storages.values())


class Published:
    """What one session has published here, by name and version. Any thread may call it."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.identity = secrets.token_hex(
            8
        )  # sessions number their nodes as they like, and workers come and go at one address
        self._records: dict[str, dict[int, Record]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, record: Record) -> None:
        """Keep a version."""
        with self._lock:
            self._records.setdefault(name, {})[record.version] = record

    def versions(self, name: str) -> list[Record]:
        """Return what there is of a name."""
        with self._lock:
            return list(self._records.get(name, {}).values())

    def every(self) -> list[tuple[str, Record]]:
        """Return each version of each name."""
        with self._lock:
            return [(name, record) for name, records in self._records.items() for record in records.values()]

    def drop(self, name: str, which: Callable[[int], bool]) -> bool:
        """Drop the versions of a name that `which` says; return whether there was one."""
        with self._lock:
            records = self._records.get(name, {})
            gone = [records.pop(version) for version in list(records) if which(version)]
            if not records:
                self._records.pop(name, None)
        return bool(gone)  # their tensors die after the lock is free

    def spoil(self, memory: torch.UntypedStorage, cause: Failure) -> None:
        """Poison what is in `memory`: a write that was issued has not happened."""
        poisoned = Poisoned(replace(cause, seq=0, position=0))  # of a log that may be over when it is read
        for _, record in self.every():
            for k, value in enumerate(record.tensors):
                if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == memory._cdata:
                    record.tensors[k] = poisoned


Others = Callable[
    [], Mapping[str, Published]
]  # what other sessions of this worker have published, by session


class Shelf:
    """One executor's part: its instructions, and what its master asks. `others` is called by the reader."""

    def __init__(self, state: State, published: Published, others: Others, read_only: ReadOnly) -> None:
        self.published, self._others, self._state, self.read_only = published, others, state, read_only
        self._found: dict[
            int, tuple[dict[int, tuple[Record, list[Any]]], bool]
        ] = {}  # by token, until they have refs
        self.table = {PUBLISH: Own("publish", self._publish), ADOPT: Own("lookup", self._adopt)}
        state.spoil = published.spoil

    # -- what the master asks (the reader) ---------------------------------------------------------------------------------------

    def answer(self, detail: list[Any]) -> list[Any]:
        """Answer `Ask("published", detail)`: the identity of whose shelf it is here, and what was asked for."""
        mine = self.published
        match detail:
            case ["names"]:
                rows = [_row("", mine, name, record) for name, record in mine.every()]
                for owner, other in self._strangers().items():
                    rows += [
                        _row(owner, other, name, record) for name, record in other.every() if record.shared
                    ]
                return [mine.identity, rows]
            case ["versions", str(name)]:
                return [mine.identity, [record.version for record in mine.versions(name)]]
            case ["find", str(owner), str(name), int(token)]:
                return self._find(owner, name, token)
            case ["settle", str(name), int(version)]:
                return [mine.identity, mine.drop(name, lambda number: number < version)]
            case ["drop", str(name), int(version)]:
                return [mine.identity, mine.drop(name, lambda number: version in (0, number))]
        raise ProtocolError(f"nothing is known about what is published, {str(detail)[:80]}")

    def _strangers(self) -> dict[str, Published]:
        return {owner: other for owner, other in self._others().items() if other is not self.published}

    def _find(self, owner: str, name: str, token: int) -> list[Any]:
        whose: Published | None = (
            self.published if owner in ("", self.published.session) else self._strangers().get(owner)
        )
        if whose is None:
            return ["", []]
        foreign = whose is not self.published
        found = {
            record.version: (record, record.rows())
            for record in whose.versions(name)
            if record.shared or not foreign
        }
        if found:
            if foreign:
                self.read_only.watch()
            self._found[token] = found, foreign
        return [
            whose.identity,
            [[version, record.envelope, rows] for version, (record, rows) in found.items()],
        ]

    # -- instructions (a stream's thread) ----------------------------------------------------------------------------------------

    def _publish(self, slots: dict[int, Any], p: list[Any], i: int) -> int:
        state, request, fields, refs = self._state, request_of(p[i + 1]), p[i + 2], p[i + 3]
        match fields:
            case [str(name), int(version), bool(shared), str(what), list(listed), bytes(envelope)] if (
                version > 0 and _all_workers(listed)
            ):
                pass
            case _:
                raise ProtocolError(f"{str(fields)[:80]} is no publication")
        values: list[Any] = [slots.get(ref) for ref in refs]
        cause = next((value.failure for value in values if isinstance(value, Poisoned)), None)
        if cause is None and (error := self._unfit(values)) is not None:
            cause = state.failure(p, i, error, "publish", described(values[:1]))
        if cause is not None:
            state.send(Failed(request, failure_fields(cause)), None)
            return i + 4
        numbers = [[_numbered(value), _numbered(value.untyped_storage())] for value in values]
        self.published.add(name, Record(version, shared, what, listed, envelope, values, numbers))
        state.send(Reply(request, numbers), None)
        return i + 4

    def _unfit(self, values: list[Any]) -> Exception | None:
        if any(self.read_only.holds(value) for value in values):
            return NotSupportedError(
                "what another session shares cannot be published again: publish a copy, copy=True"
            )
        if not all(isinstance(value, torch.Tensor) for value in values):
            return InternalError("what is to be published is no tensor, or not here")
        return None

    def _adopt(self, slots: dict[int, Any], p: list[Any], i: int) -> int:
        token, version, refs = p[i + 1], p[i + 2], p[i + 3]
        records, foreign = self._found.pop(token, ({}, False))
        record, rows = records.get(version, (None, []))
        for k, ref in enumerate(refs):
            if not ref:
                continue
            value = record.tensors[k] if record is not None and k < len(rows) else None
            if value is None:
                value = Poisoned(
                    self._state.failure(p, i, InternalError("what was looked up is not here"), "lookup", "")
                )
            elif (
                isinstance(value, torch.Tensor) and spec_fields(value) != rows[k][2]
            ):  # by what the log held when it was asked for
                error = UsageError("a tensor has changed its shape since it was published: publish it again")
                value = Poisoned(self._state.failure(p, i, error, "lookup", described([value])))
            elif foreign and isinstance(value, torch.Tensor):
                self.read_only.add(value)
                value = value.detach()  # whose sizes the owner's own operations do not change
            slots[ref] = value
        return i + 4


def _all_workers(listed: list[Any]) -> bool:
    """Whether these are [identity, node, host, pid, [device, ...]]: masters of other sessions are told of them."""
    for row in listed:
        match row:
            case [str(), int(), str(), int(), list(devices)] if all(
                isinstance(device, str) for device in devices
            ):
                continue
        return False
    return True


def _row(owner: str, whose: Published, name: str, record: Record) -> list[Any]:
    return [
        owner,
        whose.identity,
        name,
        record.version,
        record.shared,
        record.what,
        record.listed,
        record.nbytes(),
    ]
