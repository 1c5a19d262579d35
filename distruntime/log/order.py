"""The order among the streams of one log: which stream must wait for which. Sends nothing itself.

These rules keep several streams of a node from racing. A log has an `Order` from its second stream on; until
then nothing here is called. Streams are numbered per node, and the log's own positions are their clocks. It
is known of each storage (views share it) who wrote it last and who has read it since. It is known of each
stream up to where it comes after each other stream: a vector clock (Lamport, Fidge, Mattern), so that a wait
that follows from earlier ones is not issued again. See docs/streams.md for the table of rules.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from ..wire.messages import FORGET, RELEASE, WAIT
from .line import Line
from .tape import Named, Stretchable, StretchedLog, Tape, put
from .uses import Generators, Memory, Use

# So many snapshots of a stream's clock are kept. An older position counts as the oldest of them, which only
# costs a wait too many.
_KEPT = 64


class Value(Named, Protocol):
    """A handle as it is seen from here."""

    born: Line

    @property
    def storage(self) -> Memory:
        """The memory that it shares with its views."""


class Ordered(Stretchable, Protocol):
    """A log as it is seen from here."""

    line_table: list[Line]
    freed: list[int]
    checked: int
    executed: int
    enough: int
    asynchronous: bool
    active: bool
    tapes: list[Tape]

    def flush(self, *, gathered: bool = False) -> None:
        """Send what has gathered."""


class Order:
    """The order among the streams of one log. Every method is called under the log's lock."""

    def __init__(self, node: Ordered) -> None:
        self.node = node
        # It is True if reads and writes wait by themselves.
        self.implicit = True
        # There were so many streams so far. Their numbers are used again when a Stream object dies.
        self.count = 1
        # These are the numbers of streams by device and priority.
        self.pools: dict[tuple[str, int], list[int]] = {}
        # These are the numbers that no Stream object stands for.
        self.idle: dict[tuple[str, int], list[int]] = {}
        # This is the position after each stream's last instruction.
        self.last: dict[int, int] = {}
        # This is the position after each stream's last instruction that only checks.
        self.checked = {0: node.checked}
        self.generator = Generators()
        self._clocks: dict[int, dict[int, int]] = {0: {}}
        # Each stream has its clocks as (position, clock from there on), the newest last.
        self._past: dict[int, list[tuple[int, dict[int, int]]]] = {0: []}
        # This stream makes a value, by ref, where it is not 0.
        self._makers: dict[int, int] = {}
        # Each ref has the bits of the streams that use its value besides its maker.
        self._users: dict[int, int] = {}
        # Each stream has the words of its frees. They go with its next instruction or the next flush.
        self._freed: dict[int, list[int]] = {}
        self._since = node.base + len(node.words)
        # This is the position after the last instruction of stream 0 that came past these rules.
        self._strays = 0
        self.last[0] = self._since
        node.words = StretchedLog(self.free, self._stray, node.words, [[0, 0]])

    def open(self) -> int:
        """Return the number of a new stream."""
        number = self.count
        self.count += 1
        self._clocks[number], self._past[number], self.last[number] = {0: self.node.executed}, [], 0
        return number

    # -- instructions ----------------------------------------------------------------------------------------

    def issue(
        self,
        stream: int,
        words: Sequence[object],
        fresh: Sequence[Value],
        operands: Sequence[Value],
        written: Sequence[Memory],
        line: Line,
    ) -> Line:
        """Append one instruction to a stream's log, after the waits that it needs.

        Note what it makes, reads and writes.
        """
        node = self.node
        if node.freed:
            self._collect()
        needs: dict[int, int] = {}
        uses: list[Use] = []
        makers, implicit = self._makers, self.implicit
        for handle in operands:
            storage = handle.storage
            use = storage.order or self._use(storage)
            uses.append(use)
            maker = makers.get(handle.ref, 0)
            if maker != stream:
                # This holds without implicit waits too: on a worker a value that is not made yet is not
                # there, while a GPU's memory always is.
                self.note_use(handle, stream)
                self._need(needs, stream, maker, handle.born[0])
            if use.writer != stream and implicit:
                self._need(needs, stream, use.writer, storage.written)
        if implicit and written:
            self._need(needs, stream, 0, self._strays)
            for storage in written:
                use = storage.order or self._use(storage)
                self._need(needs, stream, use.writer, storage.written)
                for reader, position in use.readers.items():
                    self._need(needs, stream, reader, position)
        for other, position in needs.items():
            self.wait(stream, other, position)
        if stream in self._freed:
            put(node, stream, self._freed.pop(stream))
        end = put(node, stream, words, instruction=True)
        born = (end, line[1], line[2])
        node.line_table.append(born)
        self.last[stream] = end
        for tape in node.tapes:
            tape.touch(end, fresh, operands, written)
        for use in uses:
            use.readers[stream] = end
        self._note(stream, born, fresh, written)
        if len(node.words) > node.enough:
            node.flush(gathered=True)
        return born

    def _note(self, stream: int, born: Line, fresh: Sequence[Value], written: Sequence[Memory]) -> None:
        """Note what an instruction has made and written."""
        end = born[0]
        for storage in written:
            storage.written = end
            storage.order = Use(stream, {})
        for handle in fresh:
            handle.born = born
            known = handle.storage.order
            if stream:
                self._makers[handle.ref] = stream
                if known is None:
                    handle.storage.order = Use(stream, {})
            # It is another name of memory that is there. A write that fails must find it, to poison it too.
            if known is not None:
                known.readers[stream] = end
        if not fresh and not written:
            self.checked[stream] = end

    def _stray(self) -> None:
        self._strays = self.last[0] = self.node.base + len(self.node.words)

    def settle(self) -> None:
        """Let every stream come after all that is in the log, where nobody knows what that uses."""
        for stream in list(self.last):
            # The last instruction may not be noted. A word behind it does nothing, and tells where it is.
            self.last[stream] = put(self.node, stream, [FORGET, 0])
        self.fence()
        self.spread()
        self.checked.update(self.last)

    def find(self, storage: Memory, stream: int) -> None:
        """Let a stream that is to give memory another name come after the last write there."""
        use = storage.order or self._use(storage)
        if self.implicit:
            self.wait(stream, use.writer, storage.written)

    def follow(self, storage: Memory, stream: int) -> None:
        """Let a stream come after all that has used a memory, without a use of its own."""
        if self.implicit and storage.order is not None:
            self.wait(stream, storage.order.writer, storage.written)
            for reader, position in storage.order.readers.items():
                self.wait(stream, reader, position)

    def read(self, storage: Memory, stream: int) -> None:
        """Note that a stream's last instruction has read a memory that none of its operands names."""
        readers = self._use(storage).readers
        readers[stream] = max(self.last[stream], readers.get(stream, 0))

    def introduce(self, storage: Memory, stream: int, read: int) -> None:
        """Note a memory that only this stream has written and read, the latter up to `read`."""
        storage.order = Use(stream, {stream: max(read, self._since)})

    def own(self, refs: Sequence[int], stream: int) -> None:
        """Note that this stream has made values that have no handles."""
        if stream:
            self._makers.update(dict.fromkeys(refs, stream))

    def merge(self, into: Memory, other: Memory, stream: int) -> None:
        """Let `into` stand for both memories. The stream comes after the last write of each."""
        one, two = self._use(into), self._use(other)
        if one.writer == two.writer:
            into.written = max(into.written, other.written)
        else:
            # A memory has one last writer.
            self.find(into, stream)
            self.find(other, stream)
            into.written = self.last[stream]
            one.writer = stream
        for reader, position in two.readers.items():
            one.readers[reader] = max(position, one.readers.get(reader, 0))

    def _use(self, storage: Memory) -> Use:
        use: Use | None = storage.order
        # Only stream 0 has touched it, and who read it before there were streams was not noted.
        if use is None:
            use = storage.order = Use(0, {0: self._since})
        return use

    def remake(self, handle: Value, stream: int, born: Line) -> None:
        """Note that a stream has put another value under a name: from now on it is that stream's."""
        maker = self._makers.pop(handle.ref, 0)
        if maker != stream:
            self._users[handle.ref] = self._users.get(handle.ref, 0) | 1 << maker
        if stream:
            self._makers[handle.ref] = stream
        handle.born = born

    def note_use(self, handle: Value, stream: int) -> None:
        """Note that `stream` uses a value: it is freed after what that stream has been given until then."""
        if self._makers.get(handle.ref, 0) != stream:
            self._users[handle.ref] = self._users.get(handle.ref, 0) | 1 << stream

    def alone(self, handle: Value, stream: int) -> bool:
        """Whether no stream but this one has made or used a value."""
        return self._makers.get(handle.ref, 0) == stream and handle.ref not in self._users

    def _need(self, needs: dict[int, int], stream: int, other: int, position: int) -> None:
        if (
            other != stream
            and needs.get(other, 0) < position
            and not self.comes_after(stream, other, position)
        ):
            needs[other] = position

    # -- clocks ----------------------------------------------------------------------------------------------

    def comes_after(self, stream: int, other: int, position: int) -> bool:
        """Whether `stream` comes after that position of `other` already."""
        known = self._clocks[stream]
        return other == stream or position <= known.get(other, 0) or position <= self.node.executed

    def wait(
        self,
        stream: int,
        other: int,
        position: int,
        text: str = "",
        seconds: float | None = None,
        line: Line | None = None,
    ) -> None:
        """Make `stream` wait for a position of `other`, unless it is known to come after it.

        Past `seconds` the stream fails with `text`.
        """
        if self.comes_after(stream, other, position):
            return
        self.last[stream] = end = put(self.node, stream, [WAIT, other, position, seconds, text])
        if line is not None:
            self.node.line_table.append((end, line[1], line[2]))
        # It may go on without.
        if seconds is not None:
            return
        clock = dict(self._clocks[stream])
        # What the other stream knew there, this one knows now.
        past = self._past[other]
        k = bisect_right(past, position, key=lambda entry: entry[0])
        for third, reached in (past[k - 1][1] if k else {}).items():
            if third != stream and clock.get(third, 0) < reached:
                clock[third] = reached
        clock[other] = max(position, clock.get(other, 0))
        self._clocks[stream] = clock
        self._past[stream].append((end, clock))
        if len(self._past[stream]) > _KEPT:
            del self._past[stream][: _KEPT // 2]

    def cancelled(self, stream: int) -> int:
        """Return up to where a stream is cancelled.

        Forget what it knows from waits that may be dropped now.
        """
        position = self.last[stream]
        self._clocks[stream] = {}
        self._past[stream].append((position, {}))
        return position

    def put(self, stream: int, words: Sequence[object], line: Line) -> None:
        """Append what neither makes nor reads a value: a wait for another node."""
        self.last[stream] = put(self.node, stream, words)
        self.node.line_table.append((self.last[stream], line[1], line[2]))
        # A tape knows by the thread that sends a word whose it is. And work of a mesh that is issued after
        # this must not overtake it: a log whose turn is over sends at once.
        if self.node.tapes or not self.node.active:
            self.node.flush()

    def fence(self) -> None:
        """Make stream 0 wait for everything issued so far."""
        for stream, position in list(self.last.items()):
            if stream:
                self.wait(0, stream, position)

    def spread(self) -> None:
        """Make every stream wait for what stream 0 has been given."""
        for stream in list(self.last):
            self.wait(stream, 0, self.last[0])

    def ready(self, handle: Value, *, meshed: bool = False) -> list[int]:
        """Return [stream, position, ...]: where a value is what a read issued now must see.

        `meshed` is whether stream 0 has a word that tells of a mesh's segments: the read comes after it, too.

        Invariant: the thread of any stream in the result may be the one that reads the value out, and so each
        of them is noted here as a user and as a reader. Whoever adds a stream to the result later leaves it
        out of that: a write then overtakes the read.
        """
        after = self._after(handle)
        if meshed:
            after.setdefault(0, 0)
        use, found = self._use(handle.storage), list[int]()
        for stream, position in after.items():
            position = max(position, self.checked.get(stream, 0))
            found += stream, position
            self.note_use(handle, stream)
            use.readers[stream] = max(position, use.readers.get(stream, 0))
        return found

    def made(self, handle: Value) -> list[int]:
        """Return [stream, position, ...]: where a value is made and was written last.

        Nothing where nobody knows, as without implicit waits the last writer may not come after those before.
        """
        return [n for pair in self._after(handle).items() for n in pair] if self.implicit else []

    def _after(self, handle: Value) -> dict[int, int]:
        after = {self._makers.get(handle.ref, 0): handle.born[0]}
        storage = handle.storage
        writer = 0 if storage.order is None else storage.order.writer
        after[writer] = max(after.get(writer, 0), storage.written)
        return after

    # -- frees -----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        freed = self.node.freed
        while freed:
            self.free(freed.pop())

    def free(self, ref: int) -> None:
        """Free a value on the stream that made it.

        If other streams used it too, the last of them to get there frees it.
        """
        maker, users = self._makers.pop(ref, 0), self._users.pop(ref, 0)
        if not users:
            self._freed.setdefault(maker, []).append(-ref)
            return
        streams = [maker, *(k for k in range(users.bit_length()) if users >> k & 1)]
        for stream in streams:
            self._freed.setdefault(stream, []).extend((RELEASE, ref, len(streams)))

    def append_frees(self) -> None:
        """Append the frees that no instruction took along."""
        self._collect()
        for stream in list(self._freed):
            put(self.node, stream, self._freed.pop(stream))
