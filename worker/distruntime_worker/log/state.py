"""What one session holds on a worker.

Its values, its streams, the segments that are being run, and what failed in them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from distruntime.errors import InternalError, ProtocolError, StreamCancelled
from distruntime.wire.messages import FIRST_TEMPLATE, Failure, MemberRef, Message, Plain, mesh_and_stream
from distruntime.wire.shield import RLock

from ..machine import hardware, lost
from ..machine.devices import Devices
from ..values.functions import RANDOM_STATES
from ..values.memory_set import MemorySet
from ..values.mesh_lanes import MeshState, Shards
from ..values.objects import Poisoned, described, failure, memory_of
from ..values.step import Run, Slots, Step, Words, int_word, list_word
from ..values.streams import Mesh, Stream, Work
from .budget import Budget
from .turns import Turn


class Sending(Protocol):
    """What tells whether a payload that was not copied may be written again."""

    @property
    def done(self) -> bool: ...


Sent = Sending | None


class Send(Protocol):
    """Sends a message to the master, with a payload if it has one: see session.py."""

    def __call__(self, message: Message, payload: memoryview | None = None, copy: bool = True) -> Sent: ...


# It sends a message to the worker of a node.
Tell = Callable[[int, Message], None]
# In place of a mesh's number, this is the worker's own log.
OWN_LOG = -1


class Spoilt(NamedTuple):
    """Nothing is believed that was written after these positions of the logs.

    An operation of a group was queued there, and `cause` says why it has left no values in its results.
    """

    since: dict[int, int]
    cause: Failure


class State:
    """The state of one session on one worker, for the reader and each stream's thread.

    `gate` guards what more than one takes out of.
    """

    def __init__(self, devices: Devices, send: Send, turn: Turn, budget: Budget | None) -> None:
        self.devices, self.send, self.turn, self.budget = devices, send, turn, budget
        self.slots: Slots = {}
        if budget is not None:
            budget.watch(self.slots)
        # The key is the first word of an instruction. The chain fills it: see chain.py.
        self.templates: dict[Plain, Run] = {}
        # The master has sent these steps.
        self.info: dict[Plain, Step] = {}
        self.next_template = FIRST_TEMPLATE
        # These are the runtime's own steps, which every log has.
        self.own: dict[Plain, Step] = {}
        # These are the meshes with members here, by number.
        self.meshes: dict[int, MeshState] = {}
        self.default = Stream(0, torch.device("cpu"))
        self.streams: dict[int, Stream] = {0: self.default}
        self.by_thread: dict[int, Stream] = {}
        # The segments in the order of the log; each is done when those before it are.
        self.works: deque[Work] = deque()
        # So many segments have run since the last `Done`.
        self.untold = 0
        # The key is the id of a segment's words.
        self.under_way: dict[int, Work] = {}
        # The whole log has run up to this position.
        self.executed = 0
        # These failures are of instructions without results, such as a check: the next read brings them.
        self.orphans: list[Failure] = []
        # A worker adds to these and takes none away. The way back is another worker, or another session.
        self.spoilt: list[Spoilt] = []
        self.gate = RLock()
        # These are told of a device that is lost, and why its values are.
        self.losing: list[Callable[[torch.device, Failure], None]] = []
        # The user's Python may hold these besides refs, or another session: nothing else says that a write of
        # them has failed.
        self.lent = MemorySet()
        # It tells the publications that a write of a memory has failed.
        self.spoil: Callable[[torch.UntypedStorage, Failure], None] = _unspoilt
        # It tells them that nothing of this session is believed any more.
        self.spoil_all: Callable[[Failure], None] = _nothing_published
        # It has a thread do what waits for the master, where the reader would have to do it.
        self.apart: Callable[[Callable[[], None]], None] = _now
        # It tells the reader why the session cannot go on, from any thread.
        self.breaks: Callable[[str], None] = _unheard
        self.reader = threading.get_ident()
        # It is True once the master has left for good: what it has issued is finished, unheard.
        self.left = False
        # It is True once the session is over, and nothing is worth waiting for.
        self.closed = False

    def one_stream(self) -> bool:
        """Whether the session has one stream here, so that nothing of it runs beside what runs now."""
        return len(self.streams) == 1 and all(len(mesh.streams) <= 1 for mesh in self.meshes.values())

    def log(self, work: Work) -> State | Mesh:
        """Return whose streams and templates a segment names: a mesh's, or this worker's own."""
        return self if work.mesh is None else work.mesh

    def named(self, number: int) -> Stream | None:
        """Return the stream that a message names, of this worker's own log or of a mesh's."""
        whose, stream = mesh_and_stream(number)
        if whose == -1:
            return self.streams.get(stream)
        mesh = self.meshes.get(whose)
        return None if mesh is None else mesh.streams.get(stream)

    def all_streams(self) -> list[Stream]:
        """Return the streams of this worker's own log and of each mesh's."""
        logs = [self.streams, *(mesh.streams for mesh in list(self.meshes.values()))]
        # The reader opens streams meanwhile.
        return [stream for streams in logs for stream in list(streams.values())]

    def waits(self) -> bool:
        """Whether some stream has something to run that its thread has not begun."""
        return any(not stream.queue.empty() for stream in self.all_streams())

    def poisoned(self) -> list[int | MemberRef]:
        """Return the refs of what is poisoned."""
        found: list[int | MemberRef] = []
        for word, value in self.slots.copy().items():
            if isinstance(value, Poisoned):
                found.append(int_word(word))
            elif isinstance(value, Shards):
                ref = int_word(word)
                found += [MemberRef(ref, lane) for lane, one in enumerate(value) if isinstance(one, Poisoned)]
        return found

    def mine(self) -> Stream:
        """Return the stream that this thread runs."""
        return self.by_thread[threading.get_ident()]

    def work(self, p: Words) -> Work:
        """Return the segment whose words `p` is."""
        return self.under_way[id(p)]

    def log_number(self, p: Words) -> int:
        """Return the mesh whose log the words `p` are of, or `OWN_LOG`."""
        mesh = self.work(p).mesh
        return OWN_LOG if mesh is None else mesh.number

    def reached(self, p: Words, i: int) -> dict[int, int]:
        """Return how far each log has run, while this thread runs the instruction at `i` of the words `p`.

        No other log runs meanwhile: between two logs all streams keep the order.
        """
        found = {}
        if self.meshes:
            found[OWN_LOG] = _furthest(self.streams)
            for number, mesh in list(self.meshes.items()):
                found[number] = _furthest(mesh.streams)
        found[self.log_number(p)] = self.work(p).segment.start + i
        return found

    def spoilt_by(self, log: int, position: int) -> Failure | None:
        """Return why nothing is believed that was written up to `position` of a log, if that is so."""
        for since, cause in self.spoilt:
            if position > since.get(log, -1):
                return cause
        return None

    def spoilt_for(self, after: list[int]) -> Failure | None:
        """As `spoilt_by`, for what a fetch waits for: [stream, position, ...]."""
        if self.spoilt:
            for number, position in zip(after[::2], after[1::2]):
                cause = self.spoilt_by(mesh_and_stream(number)[0], position)
                if cause is not None:
                    return cause
        return None

    def failure(self, p: Words, i: int, error: BaseException, op: str, operands: str) -> Failure:
        """Return a new failure of the instruction at `i` of the words `p`, noted in its segment."""
        work, error = self.work(p), lost.look(error, op)
        cause = failure(
            error,
            seq=work.segment.seq,
            position=work.segment.start + i,
            op=op,
            operands=operands,
            part=work.part,
        )
        work.failures.append(cause)
        return cause

    def fail(self, step: Step, slots: Slots, p: Words, i: int, error: BaseException) -> None:
        """Poison the results of the instruction at `i`, and whatever it would have written, with its first
        cause.
        """
        # Each member has a cause of its own.
        if step.lanes:
            step.drop(slots, p, i, error)
            return
        operands = [slots.get(p[i + k]) for k in step.reads]
        cause = next((v.failure for v in operands if isinstance(v, Poisoned)), None)
        if cause is None:
            if any(v is None for v in operands) and not isinstance(error, StreamCancelled):
                error = InternalError(f"an operand of {step.name} is not here: {error!r}")
            elif isinstance(error, (RuntimeError, TypeError)):
                on = [*step.devices, *(v.device for v in operands if isinstance(v, torch.Tensor))]
                lacks = hardware.lacking(dict.fromkeys(on), str(error))
                if lacks:
                    error.args = (f"{error}\n{lacks}: dr.nodes() says what each device lacks",)
            cause = self.failure(p, i, error, step.name, described(operands))
            # A check that was dropped has not failed.
            if not step.writes and not step.mutates and not isinstance(error, StreamCancelled):
                self._blame(step, slots, p, i, cause)
        elif not step.writes and not step.mutates and step.name in RANDOM_STATES:
            # What is drawn from now on does not follow the seed.
            self.orphans.append(cause)
        self.poison(step, slots, p, i, cause)

    def _blame(self, step: Step, slots: Slots, p: Words, i: int, cause: Failure) -> None:
        """Poison what a failed instruction without results has checked: its operands' kin.

        Where they never had any, the next read brings the failure, whatever it reads.
        """
        kin = None if step.kin is None else p[i + step.kin]
        if kin is None:
            self.orphans.append(cause)
            return
        for ref in list_word(kin):
            checked = slots.get(ref)
            memory = memory_of(checked)
            if memory is not None:
                self.spread(slots, memory, cause)
            # It may have been freed.
            if checked is not None:
                slots[ref] = Poisoned(cause)

    def poison(self, step: Step, slots: Slots, p: Words, i: int, cause: Failure) -> None:
        """Poison the results of the instruction at `i`, and whatever it would have written, with `cause`."""
        memories = (memory_of(slots.get(p[i + k])) for k in step.views)
        viewed = next((memory for memory in memories if memory is not None), None)
        for k in step.writes:
            slots[p[i + k]] = Poisoned(cause, viewed)
        for k in step.mutates:
            written = memory_of(slots.get(p[i + k]))
            # Its views and its base hold the same bytes.
            if written is not None:
                self.spread(slots, written, cause)
            slots[p[i + k]] = Poisoned(cause)

    def spread(self, slots: Slots, memory: torch.UntypedStorage, cause: Failure) -> None:
        """Poison everything that is in `memory`."""
        # Other streams add and free meanwhile.
        for ref, value in slots.copy().items():
            if isinstance(value, Shards):
                for lane, one in enumerate(value):
                    if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata == memory._cdata:
                        value[lane] = Poisoned(cause)
            elif isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == memory._cdata:
                slots[ref] = Poisoned(cause)
        self.spoil(memory, cause)


def _furthest(streams: dict[int, Stream]) -> int:
    return max(stream.reached for stream in list(streams.values()))


def request_of(word: object) -> int:
    """Return the request that an instruction is to answer, by its number."""
    if type(word) is not int:
        raise ProtocolError(f"an instruction that answers a request called {str(word)[:40]!r}")
    return word


def _now(work: Callable[[], None]) -> None:
    work()


def _unheard(why: str) -> None:
    """An executor without a session has this."""


def _nothing_published(cause: Failure) -> None:
    """A session that publishes nothing has this."""


def _unspoilt(memory: torch.UntypedStorage, cause: Failure) -> None:
    """A session that publishes nothing has this."""
