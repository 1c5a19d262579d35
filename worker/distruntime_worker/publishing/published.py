"""What a session has published on this worker: it outlives the session's master, and other sessions may read
what is shared.

A `Published` belongs to a session and goes from one of its executors to the next; a `Shelf` is one executor's
way to it, and to others'. What the envelopes hold concerns masters only: here they are bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count

import torch

from distruntime.errors import InternalError, NotSupportedError, ProtocolError, UsageError
from distruntime.wire import messages
from distruntime.wire.codec import daemons_from, failure_fields
from distruntime.wire.shield import Lock

from ..log.chain import ReadOnly, is_on
from ..log.state import State, request_of
from ..machine.accelerator import asynchronous, used_on
from ..machine.lost import keep_for_ever, tolerated
from ..values.objects import Poisoned, described, memory_of, spec_fields
from ..values.step import Own, Slots, Step, Words, int_word, list_word

_number = count(secrets.randbits(60)).__next__


def count_anew() -> None:
    """Give out other numbers than the process from which this one was forked."""
    global _number
    _number = count(secrets.randbits(60)).__next__


def _numbered(thing: torch.Tensor | torch.UntypedStorage) -> int:
    """Return the number of a tensor or of a storage.

    The same as long as it lives, and no other's here or in another process.
    """
    found: int | None = getattr(thing, "_published_as", None)
    if found is None:
        found = _number()
        thing._published_as = found  # type: ignore[union-attr]
    return found


@dataclass
class Record:
    """One version of a name. `listed` says which workers have a part of it; `envelope` is for masters."""

    version: int
    shared: bool
    what: str
    listed: list[messages.DaemonRecord]
    envelope: bytes
    # A tensor is `Poisoned` where a write has failed since.
    tensors: list[torch.Tensor | Poisoned]
    # Each tensor has a number of its own, and one of its memory.
    numbers: list[tuple[int, int]]

    def rows(self) -> list[messages.StoredTensor]:
        """Return the tensors as they are now."""
        rows: list[messages.StoredTensor] = []
        for k, value in enumerate(self.tensors):
            tensor, memory = self.numbers[k]
            if isinstance(value, torch.Tensor):
                memory = _numbered(value.untyped_storage())
                self.numbers[k] = tensor, memory
                rows.append(messages.StoredTensor(tensor, memory, [*spec_fields(value)]))
            else:
                rows.append(messages.StoredTensor(tensor, memory, None))
        return rows

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
        # Sessions number their nodes as they like, and workers come and go at one address.
        self.identity = secrets.token_hex(8)
        self._records: dict[str, dict[int, Record]] = {}
        self._lock = Lock()

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
        # Their tensors die after the lock is free.
        return bool(gone)

    def spoil(self, memory: torch.UntypedStorage, cause: messages.Failure) -> None:
        """Poison what is in `memory`: a write that was issued has not happened."""
        # Its log may be over when it is read.
        poisoned = Poisoned(replace(cause, seq=0, position=0))
        for _, record in self.every():
            for k, value in enumerate(record.tensors):
                if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == memory._cdata:
                    record.tensors[k] = poisoned

    def spoil_all(self, cause: messages.Failure) -> None:
        """Poison everything: nobody knows what is in the session's memory."""
        poisoned = Poisoned(replace(cause, seq=0, position=0))
        for _, record in self.every():
            record.tensors[:] = [poisoned] * len(record.tensors)

    def lose(self, device: torch.device, cause: messages.Failure) -> None:
        """Poison what is on a device that is lost."""
        for _, record in self.every():
            for k, value in enumerate(record.tensors):
                if is_on(value, device):
                    keep_for_ever(value)
                    record.tensors[k] = Poisoned(cause)


# It gives what other sessions of this worker have published, by session.
Others = Callable[[], Mapping[str, Published]]


class Shelf:
    """One executor's part: its instructions, and what its master asks. `others` is called by the reader."""

    def __init__(self, state: State, published: Published, others: Others, read_only: ReadOnly) -> None:
        self.published, self._others, self._state, self.read_only = published, others, state, read_only
        # The key is the token; an entry stays until its values have refs.
        self._found: dict[int, tuple[dict[int, tuple[Record, list[messages.StoredTensor]]], bool]] = {}
        self.table: dict[messages.Plain, Step] = {
            messages.PUBLISH: Own("publish", self._publish),
            messages.ADOPT: Own("lookup", self._adopt),
        }
        state.spoil, state.spoil_all = published.spoil, published.spoil_all
        state.losing.append(published.lose)

    # -- what the master asks (the reader) ---------------------------------------------------------

    def listing(self) -> messages.Listing:
        """Return what this session has published, and what others share."""
        mine = self.published
        rows = [_row("", mine, name, record) for name, record in mine.every()]
        for owner, other in self._strangers().items():
            rows += [_row(owner, other, name, record) for name, record in other.every() if record.shared]
        return messages.Listing(mine.identity, rows)

    def versions(self, name: str) -> messages.Versions:
        """Return which versions there are of a name."""
        return messages.Versions(
            self.published.identity, [record.version for record in self.published.versions(name)]
        )

    def drop_older(self, name: str, version: int) -> messages.Dropped:
        """Drop what there is of a name before a version."""
        gone = self.published.drop(name, lambda number: number < version)
        return messages.Dropped(self.published.identity, gone)

    def drop(self, name: str, version: int) -> messages.Dropped:
        """Drop one version of a name, or all of them (0)."""
        gone = self.published.drop(name, lambda number: version in (0, number))
        return messages.Dropped(self.published.identity, gone)

    def find(self, owner: str, name: str, token: int) -> messages.FoundVersions:
        """Return the versions of a name, and hold them for an `ADOPT` with this token."""
        known: Published | None = self._strangers().get(owner)
        whose = self.published if owner in ("", self.published.session) else known
        if whose is None:
            return messages.FoundVersions("", [])
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
        versions = [
            messages.FoundVersion(version, record.envelope, rows) for version, (record, rows) in found.items()
        ]
        return messages.FoundVersions(whose.identity, versions)

    def _strangers(self) -> dict[str, Published]:
        return {owner: other for owner, other in self._others().items() if other is not self.published}

    # -- instructions (a stream's thread) ----------------------------------------------------------

    def _publish(self, slots: Slots, p: Words, i: int) -> int:
        state, request, fields, refs = self._state, request_of(p[i + 1]), p[i + 2], p[i + 3]
        match fields:
            case [str(name), int(version), bool(shared), str(what), list(rows), bytes(envelope)] if (
                version > 0 and (listed := daemons_from(rows)) is not None
            ):
                pass
            case _:
                raise ProtocolError(f"{str(fields)[:80]} is no publication")
        values = [slots.get(ref) for ref in list_word(refs)]
        cause = next((value.failure for value in values if isinstance(value, Poisoned)), None)
        cause = cause or state.spoilt_by(state.log_number(p), state.work(p).segment.start + i)
        if cause is None and (error := self._unfit(values)) is not None:
            cause = state.failure(p, i, error, "publish", described(values[:1]))
        if cause is not None:
            state.send(messages.Failed(request, failure_fields(cause)), None)
            return i + 4
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        numbers = [(_numbered(value), _numbered(value.untyped_storage())) for value in tensors]
        for value in tensors if shared else ():
            state.lent.add(value.untyped_storage())
        self.published.add(name, Record(version, shared, what, listed, envelope, [*tensors], numbers))
        state.send(messages.Reply(request, numbers), None)
        return i + 4

    def _unfit(self, values: list[object]) -> Exception | None:
        if any(self.read_only.holds(value) for value in values):
            return NotSupportedError(
                "what another session shares cannot be published again: publish a copy, copy=True"
            )
        if not all(isinstance(value, torch.Tensor) for value in values):
            return InternalError("what is to be published is no tensor, or not here")
        return None

    def _adopt(self, slots: Slots, p: Words, i: int) -> int:
        token, version, refs = int_word(p[i + 1]), int_word(p[i + 2]), list_word(p[i + 3])
        records, foreign = self._found.pop(token, ({}, False))
        found = records.get(version)
        tensors, rows = (found[0].tensors, found[1]) if found is not None else ([], [])
        for k, ref in enumerate(refs):
            if not ref:
                continue
            value = tensors[k] if k < len(rows) else None
            if value is None:
                value = Poisoned(
                    self._state.failure(p, i, InternalError("what was looked up is not here"), "lookup", "")
                )
            elif isinstance(value, torch.Tensor) and spec_fields(value) != rows[k].spec:
                # This compares with what the log held when it was asked for.
                error = UsageError("a tensor has changed its shape since it was published: publish it again")
                value = Poisoned(self._state.failure(p, i, error, "lookup", described([value])))
            elif foreign and isinstance(value, torch.Tensor):
                self.read_only.add(value)
                # The owner's own operations do not change the sizes of this one.
                value = value.detach()
            if isinstance(value, torch.Tensor) and asynchronous(value.device):
                # The publisher's streams own the memory, and this session may be the last to let go of it.
                with tolerated("a lookup"):
                    used_on(value, self._state.mine().on(value.device))
            slots[ref] = value
        return i + 4


def _row(owner: str, whose: Published, name: str, record: Record) -> messages.Listed:
    return messages.Listed(
        owner,
        whose.identity,
        name,
        record.version,
        record.shared,
        record.what,
        record.listed,
        record.nbytes(),
    )
