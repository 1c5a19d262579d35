"""Putting one instruction into a log, on the stream that is current.

Every way of calling a worker ends here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ..wire.codec import Buffer
from ..wire.link import Delivery
from ..wire.messages import FORGET
from .current import StreamOfPlace, current_streams
from .handle import Handle, Residence
from .line import Line
from .log import Log
from .spec import NO_TENSOR, Spec
from .storage import Storage, put_into, require_writable, root_of
from .tape import recorded, tick
from .uses import Lent, Memory, Use

_DRAWS = torch.Tag.nondeterministic_seeded
# So many words of calls wait for the fetch of their results, where nothing is in flight: see `await_fetch`.
_AWAITING = 32


class Tagged(Protocol):
    """An operator as it is seen from here."""

    @property
    def tags(self) -> Sequence[torch.Tag]:
        """What torch says about it."""


def stream_at(place: Residence) -> int:
    """Return the number of the current stream of a place."""
    entered = current_streams.get().get((place.place.node, place.place.local_device))
    return entered.number if entered is not None and entered.residence.node is place.node else 0


Streams = Mapping[tuple[int, str], StreamOfPlace]


@dataclass(frozen=True)
class Between:
    """What a program issues that names more than one stream of one log: a copy, a collective, an event.

    A program is cut there, and `again` issues it as it was issued while it was recorded.
    """

    # The name of its kind, and all that two of them must agree in to be the same.
    kind: str
    key: tuple[object, ...]
    logs: Sequence[Log]
    # These are the refs of what it reads, and of what it makes, and the memory of the latter.
    reads: Sequence[int]
    makes: Sequence[int]
    storages: Sequence[Storage]
    # It takes the values that are read, and returns those that are made.
    again: Callable[[Sequence[Handle], Line], Sequence[Handle]]
    # An object that it gives a new state, or whose state it reads: an event.
    sets: object = None
    uses: object = None
    # It says why it cannot be issued again, or nothing.
    broken: Callable[[], str | None] = lambda: None


class Noted(NamedTuple):
    """A `Between`, the streams that were current, and the specs of what it reads."""

    tick: int
    between: Between
    streams: Streams
    operands: Sequence[tuple[Spec, Residence]]
    line: Line


class _Notes(threading.local):
    """What this thread's program has issued between its parts."""

    found: list[Noted]


_notes = _Notes()


@contextmanager
def noting() -> Iterator[list[Noted]]:
    """Let what this thread issues between a program's parts be noted in the list, until the block ends."""
    found: list[Noted] = []
    _notes.found = found
    try:
        yield found
    finally:
        _notes.found = []


# It notes a `Between` that was issued, and what that has read.
Note = Callable[[Between, Sequence[Handle]], None]


@contextmanager
def covered(line: Line) -> Iterator[Note]:
    """Let what the block issues be noted as one `Between`, which the block says at its end."""
    at = tick()

    def note(between: Between, reads: Sequence[Handle]) -> None:
        operands = [(handle.spec, handle.place) for handle in reads]
        # A wait for another node is not sent at once, and its words belong to this.
        for log in between.logs:
            log.flush()
        _notes.found.append(Noted(at, between, current_streams.get(), operands, line))

    recorded.covered = True
    try:
        yield note
    finally:
        recorded.covered = False


def issue(
    words: Sequence[object],
    fresh: Sequence[Handle],
    operands: Sequence[Handle],
    written: Sequence[Memory],
    place: Residence,
    line: Line,
    random: Tagged | bool = False,
) -> None:
    """Append one instruction and note which values it makes and which storages it changes.

    Never waits: its caller may hold the lock.

    `random` is whether it draws random numbers, or the operator, whose tags say so: the generator counts as a
    storage that it writes.
    """
    node = place.node
    if written:
        require_writable(written, line)
    with node.lock:
        try:
            if node.order is None:
                _append(words, fresh, written, node, line)
                return
            # The order is looked up under the lock, as another thread may just have opened the node's first
            # stream.
            settle(node)
            changed = written
            if random and (random is True or _DRAWS in random.tags):
                changed = (*written, node.order.generator)
            node.order.issue(stream_at(place), words, fresh, operands, changed, line)
        except BaseException:
            node.in_doubt, node.struck = True, node.latest
            if node.latest is words:
                # The words are in, and nobody may have noted the writes. With streams, `settle` lets what
                # comes next come after them.
                for storage in written:
                    storage.written = node.base + len(node.words)
            node.take_turn()
            raise


def issue_default(
    words: Sequence[object],
    fresh: Sequence[Handle],
    operands: Sequence[Handle],
    node: Log,
    line: Line,
    written: Sequence[Memory] = (),
) -> None:
    """Issue what concerns a whole worker, its generators or settings.

    It runs after all that was issued before, and before all that is issued later. See `issue`.
    """
    with node.lock:
        try:
            if node.order is None:
                _append(words, fresh, written, node, line)
            else:
                settle(node)
                node.order.fence()
                node.order.issue(0, words, fresh, operands, (*written, node.order.generator), line)
                node.order.spread()
        except BaseException:
            node.in_doubt = True
            raise


def settle(log: Log) -> None:
    """Let what comes next come after all that is in the log, if an exception has struck in the midst.

    Ctrl-C, and whatever else a signal's handler raises, may come when an instruction is in the log, and what
    it writes is not noted yet. Whoever issues one says by `in_doubt` that this has happened. Call under the
    lock.
    """
    if log.in_doubt:
        if log.order is None:
            log.checked = log.base + len(log.words)
        else:
            log.order.settle()
        # It stands last, as an exception may strike in here, too.
        log.in_doubt = False


def await_fetch(log: Log) -> None:
    """Let the words that come next wait for a fetch of what they make, which most often follows at once.

    One segment takes both then, in 0.81 to 0.97 of the time of two. The pump sends them if nothing comes.
    Call under the lock.
    """
    session = log.session
    if log.enough == 0 and log.active and not log.tapes:
        log.enough = _AWAITING
        if session.parked[0]:
            session.stir()


def template_number(log: Log, key: bytes, fields: Sequence[object]) -> int:
    """Return the number of the template of `key`; the workers learn it with the next segment.

    Call under the lock.
    """
    number = log.templates.find(key)
    if number is None:
        if log.templates.full:
            _expire_templates(log)
        number = log.templates.add(key, fields)
    return number


def _expire_templates(log: Log) -> None:
    """Drop the templates of the generation before this one, on both sides, and every signature."""
    log.session.places.forget(log)
    if log.order is not None:
        # Instructions of other streams may still need what goes.
        log.order.fence()
    log.words += [FORGET, log.templates.expire()]


def issue_bytes(
    words: Sequence[object],
    data: Buffer,
    fresh: Sequence[Handle],
    written: Sequence[Handle],
    place: Residence,
    line: Line,
) -> Delivery | None:
    """Issue an instruction whose last word is the number of a payload frame.

    Return what tells when the bytes have been read.
    """
    node = place.node
    with node.lock:
        issue([*words, node.attached.add(data)], fresh, written, [h.storage for h in written], place, line)
        node.flush()
        return node.outlet.last


def issue_shared(
    words: Sequence[object],
    release: Callable[[], None],
    fresh: Sequence[Handle],
    written: Sequence[Handle],
    place: Residence,
    line: Line,
) -> None:
    """Issue an instruction that reads shared memory; call `release` when it has run."""
    node = place.node
    with node.lock:
        node.attached.releases.append(release)
        issue(words, fresh, written, [h.storage for h in written], place, line)
        node.flush()


def _append(
    words: Sequence[object], fresh: Sequence[Handle], written: Sequence[Memory], node: Log, line: Line
) -> None:
    born = node.append(words, line)
    for handle in fresh:
        handle.born = born
    for storage in written:
        storage.written = born[0]
    if not fresh and not written:
        node.checked = born[0]


def issue_joint(
    words: Sequence[object],
    fresh: Sequence[Handle],
    operands: Sequence[Handle],
    written: Sequence[Memory],
    homes: Sequence[Residence],
    serial: Storage | None,
    line: Line,
) -> None:
    """Issue an instruction for several places of one node at once. Call under the lock. See `issue`.

    It is on the current stream of the first place, and in the order of the others' too. What has the same
    `serial` keeps the order of the program, whatever streams it is on and whatever rules are off.
    """
    node = homes[0].node
    try:
        settle(node)
        order = node.order
        if not fresh and not written:
            # Otherwise every later read on this stream would wait for the other members. If it fails, their
            # results say so.
            written = (Storage(NO_TENSOR),)
        if order is None:
            _append(words, fresh, written, node, line)
            if serial is not None:
                serial.written = node.base + len(node.words)
            return
        stream = stream_at(homes[0])
        others = {stream_at(home) for home in homes[1:]} - {stream}
        for other in others:
            order.wait(stream, other, order.last[other])
        if serial is not None:
            order.wait(stream, 0 if serial.order is None else serial.order.writer, serial.written)
        order.issue(stream, words, fresh, operands, written, line)
        if serial is not None:
            serial.order, serial.written = Use(stream, {}), order.last[stream]
        for other in others:
            order.wait(other, stream, order.last[stream])
    except BaseException:
        node.in_doubt = True
        raise


# -- what may lie in an object's memory ---------------------------------------------------------------------
#
# Only the worker could tell what an object keeps. So an object, its arguments and what it hands out of its
# own memory count as one memory: a call of the object comes after whatever uses any of that, and before
# whatever uses it later.


def join(home: Residence, memories: Sequence[Memory]) -> None:
    """Let memories count as one from now on. Call under the log's lock, before the call that may keep them.

    What may only be read stays apart: nobody writes it.
    """
    node = home.node
    first = root_of(memories[0])
    for memory in memories[1:]:
        other = root_of(memory)
        if isinstance(other, Lent):
            # It outlives all others.
            first, other = other, first
        if other is first or type(other) is not Storage:
            continue
        if node.order is None:
            first.written = max(first.written, other.written)
        else:
            node.order.merge(first, other, stream_at(home))
        put_into(other, first)


def join_all(home: Residence, owner: Storage, operands: Sequence[Handle]) -> Memory:
    """Let the memories of a known call's operands count as one with `owner`'s: as `join`, and quick.

    Return the one.
    """
    if home.node.order is not None:
        # A thread was on the hot path while another one opened the first stream.
        join(home, [owner, *(handle.storage for handle in operands)])
    first = root_of(owner)
    for handle in operands:
        storage = handle.storage
        if storage is first:
            continue
        if type(storage) is Storage:
            first.written = max(first.written, storage.written)
            put_into(storage, first)
        elif root_of(storage) is not first:
            join(home, [first, storage])
            first = root_of(first)
    return first
