"""Every message of the command channel: one frozen dataclass each, in the order of a session's life.

`docs/protocol.md` has one row for each. A message travels as one frame (its class's place in `MESSAGES`, then
its fields) followed by the payload frames of large tensors, if any. `decode` looks at the class of each
field; what is in a list or a dict whoever receives it checks before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar, get_args

# This is the contract between master and worker. A change of any message or opcode changes this number.
PROTOCOL = 16

# msgpack brings these: the words of a log, the arguments of templates, and whatever a field does not say more
# about.
Plain: TypeAlias = "bool | int | float | str | bytes | list[Plain] | dict[str, Plain] | None"
T_co = TypeVar("T_co", covariant=True)

# A segment may hold these words where an instruction starts. A negative word frees the ref of that number. A
# word from FIRST_TEMPLATE on is a template; the words of its operands (refs, numbers) and the refs of its
# results follow.

# The words are CHECK, number, [spec, ...], then an instruction. The worker runs it, and reports in `Done`
# where its results differ from the predicted specs.
CHECK = 0
# The words are LEARN, request, then an instruction. The worker runs it, and replies with the specs of its
# results. A result that is no tensor is replied itself.
LEARN = 1
# The words are UPLOAD, ref, device, dtype, sizes, data. The worker makes a tensor from bytes, from the
# payload frame of that number, or from the shared memory of that name.
UPLOAD = 2
# The words are FORGET, number. The worker drops the templates below that number. Numbers are never used
# again.
FORGET = 3
# The words are WAIT, stream, position, seconds or None, text. The stream goes on when that other stream has
# run up to that position. The text says who recorded it.
WAIT = 4
# The words are AWAIT, number, seconds or None, text. The stream goes on when `Signal` has come with that
# number.
AWAIT = 5
# The words are STAMP, ref, device. The worker notes the time when this stream gets here on that device, for
# `elapsed_time`.
STAMP = 6
# The words are RELEASE, ref, count. They free a value that `count` streams use: the last of these frees it.
RELEASE = 7
# The words are HOST, ref, result, [stream, position, ...]. The worker copies a GPU's value into pinned
# memory. A fetch of the copy is answered when it is done. The copy has to wait for these positions only.
# Where there are none, it comes after all before it on this stream.
HOST = 8
# The words are TAKE, ref, k, result. They give the value of a mesh's k-th member here a name of its own. Both
# names are for one memory.
TAKE = 9
# The words are GIVE, [ref, ...], result. The worker makes a mesh's value of those of its members here.
GIVE = 10
# The words are PUBLISH, request, [name, version, shared, what, nodes, envelope], [ref, ...]. The worker keeps
# these values under a name, and replies.
PUBLISH = 11
# The words are ADOPT, token, version, [ref or 0, ...]. They give these refs to the values that
# `FindPublished` found under this token. Version 0 lets go of them.
ADOPT = 12
# WATCH, then an instruction: run it, and report in `Warned` what its kernel warns of. CHECK and LEARN do so
# too.
WATCH = 13
# The word is MARK. It stands where a program has recorded an event: a worker's GPU can tell when it gets
# here.
MARK = 14
# The words are DROP, number. They drop one template, of a program that nobody can call any more.
DROP = 15
FIRST_TEMPLATE = 16
# The words that stand before an instruction, and how many words of theirs come before it.
BEFORE_INSTRUCTION = {CHECK: 3, LEARN: 2, WATCH: 1}
# The operator of a template that is a whole program, and the kinds of a program's words: a value that it
# makes, an argument, what the session holds, a number that never changes, and one that an instruction brings.
PROGRAM = "distruntime::program"
MADE, ARGUMENT, HELD, FLOAT, NUMBER = "v", "a", "c", "f", "n"


def stream_number(mesh: int, stream: int) -> int:
    """Return the number by which messages name a stream of a mesh.

    A worker's own (`mesh` -1) keep theirs, which are below 4096.
    """
    return (mesh + 1) << 12 | stream


def mesh_and_stream(number: int) -> tuple[int, int]:
    """Return whose stream a message names (-1: the worker's own), and its number there."""
    return (number >> 12) - 1, number & 4095


class DeviceRow(NamedTuple):
    """A device as its worker describes it, memory in bytes.

    From `capability` to `uuid`, fields are "" and 0 where there is no GPU. `uuid` tells whether two workers
    have the same device. A random state has `state` bytes, 0 where the worker does not know before it uses
    the device. `lacks` names the dtypes that the device cannot compute in.
    """

    name: str
    description: str
    total: int
    free: int
    capability: str
    allocated: int
    reserved: int
    uuid: str
    state: int
    lacks: list[str]


@dataclass(frozen=True, slots=True)
class Join:
    """Worker to master: a worker that dials in asks for a place in the session, or for the one that it had.

    `incarnation` is drawn when the worker starts: by it the master knows whether the worker still has what
    lived there.
    """

    node: int | None
    pid: int
    host: str
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """Master to worker: open a session, or go on with one.

    `mode` is "new"; "again", on a new connection of the same master, which proves itself by the `token` it
    had given; "resume", of another master, which gets what was published; "auto", which is "resume" if the
    session is there and "new" if not; or "force new", "force resume" and "force auto", in spite of a master
    that is there. `received` counts the messages that have come on earlier connections. When the master is
    gone, the worker keeps the session for `keep` seconds, or, unless it is `lasting`, until it knows that
    the master has died. `process` is the master's: see identity.py.
    """

    protocol: int
    session: str
    mode: str
    token: bytes
    keep: float
    lasting: bool
    received: int
    torch: str
    python: str
    host: str
    process: list[Plain]
    shared: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Worker to master: the session is open; this is who I am and what I have.

    `simulated` says that the GPUs are CPU tensors. `shared` is the secret in the shared memory that
    `Hello.shared` names, empty where the worker cannot read it. The master writes `nonce` there, to show that
    the memory is its own. `received` counts the messages that have come on earlier connections, `age` the
    seconds since the session began. `left` has the sessions here without a master, as [name, its master's
    process]. A row of `devices` is a list until the master has checked it.
    """

    protocol: int
    incarnation: bytes
    received: int
    age: float
    torch: str
    python: str
    host: str
    pid: int
    process: list[Plain]
    shared: bytes
    nonce: bytes
    devices: list[DeviceRow]
    simulated: bool
    left: list[Plain]


@dataclass(frozen=True, slots=True)
class Refused:
    """Either way: no session, and why; `taken` where the session is another master's."""

    reason: str
    taken: bool


@dataclass(frozen=True, slots=True)
class Ack:
    """Either way: so many messages have come on this session's connections. Not counted itself, as are those
    above.
    """

    received: int


@dataclass(frozen=True, slots=True)
class Bury:
    """Master to worker: this session's master, a process of the sender's machine, has died; there is no use
    in keeping its values.
    """

    session: str


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Master to worker: from now on stretches may name this stream, of this worker's own log (`mesh` -1) or
    of a mesh's.

    Number 0, the default stream of every device, is always there.
    """

    stream: int
    device: str
    priority: int
    mesh: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Master to worker: consecutive instructions of the log.

    `seq` counts a worker's segments from 1; `start` is the number of words before this one, so a position in
    the log names an instruction. `templates` are those that the worker has not seen: [number, operator,
    arguments, keyword arguments, results]. `stretches` divides the words among streams, as [stream, words] in
    the log's order; empty: all are stream 0's.
    """

    seq: int
    start: int
    templates: list[Plain]
    words: list[Plain]
    stretches: list[list[int]]


@dataclass(frozen=True, slots=True)
class OpenMesh:
    """Master to worker: from now on segments of this mesh may come. `devices` are those of its members here,
    in the order of the mesh.
    """

    mesh: int
    devices: list[str]


@dataclass(frozen=True, slots=True)
class OpenLines:
    """Master to worker: along one dimension of a mesh (`number`), which group each member here is in, and its
    rank: [group, rank], ...
    """

    mesh: int
    number: int
    members: list[list[int]]


@dataclass(frozen=True, slots=True)
class MeshSegment:
    """Master to worker: the next of this worker's segments; what is in it comes in the payload frame, a
    `MeshBody`.
    """

    seq: int


@dataclass(frozen=True, slots=True)
class MeshBody:
    """Master to worker: what `MeshSegment` brings, the same bytes to every worker of a mesh; otherwise as a
    `Segment`.

    `start` counts the mesh's own words, as do the positions in failures and in `WAIT`; streams are the mesh's
    own too, but that stream 0 takes turns with this worker's. An instruction runs for each member here.
    """

    mesh: int
    start: int
    templates: list[Plain]
    words: list[Plain]
    stretches: list[list[int]]


@dataclass(frozen=True, slots=True)
class Done:
    """Worker to master: the segment ran. Carries new failures and the check numbers whose predicted specs
    were wrong.
    """

    seq: int
    failures: list[Plain]
    corrections: list[Plain]


@dataclass(frozen=True, slots=True)
class Warned:
    """Worker to master: the kernel of an instruction has warned. It comes before the segment's `Done`.

    `kind` is the warning's class, which the master finds in an allow-list.
    """

    seq: int
    position: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Printed:
    """Worker to master: what a function of the user's writes while it runs. It comes before the segment's
    `Done`.

    `kind` is "stdout" or "stderr"; "log 30 name" for a record of the logger of that name and its level; or
    "prompt" where a debugger waits for the line that `Typed` brings; or "prompt over" where it does not wait
    any more.
    """

    seq: int
    position: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Typed:
    """Master to worker: the line that the debugger in a function waits for; None where the user ends it."""

    seq: int
    position: int
    text: str | None


@dataclass(frozen=True, slots=True)
class AskMaster:
    """Worker to master: somebody looks at this worker. Say where your program is, and which lines issued what
    is at these positions of the logs, [mesh or -1, position], ...
    """

    positions: list[list[int]]


@dataclass(frozen=True, slots=True)
class MasterReport:
    """Master to worker: the line at which the main thread of the program is, for whom it waits if it does,
    and the lines of what `AskMaster` has named, [mesh or -1, position, line], ...
    """

    at: str
    waits: str
    lines: list[Plain]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Master to worker: reply with a value, once each stream that `after` names has run up to the position
    behind it.

    `after` is [stream, position, ...]: the value's last writer, and its maker where that is another stream.
    `form` is "tensor" (its bytes), "item" (a Python number), "text" (as torch prints it, with `options` its
    print options), "passed" (no value: that the streams are there, with the failures that no `Done` has
    brought yet) or "done" (nothing: that the whole log has run, and every `Done` has gone). `options` may
    name `shared` memory for the bytes.
    """

    request: int
    ref: int
    after: list[int]
    form: str
    options: dict[str, Plain]


@dataclass(frozen=True, slots=True)
class Question(Generic[T_co]):
    """What asks a worker for something outside the log.

    `Reply` brings a `T_co`, or `Failed` why there is none.
    """

    request: int


class MemberRef(NamedTuple):
    """The value of a mesh's k-th member on a worker."""

    ref: int
    member: int


class MemoryHeld(NamedTuple):
    """How many values a session holds on a worker, at which position its log is, and what is poisoned."""

    values: int
    position: int
    poisoned: list[int | MemberRef]


class Status(NamedTuple):
    """Where a stream is in its log, the operator that it runs, if any, and for about how many seconds."""

    position: int
    running: str | None
    seconds: float


class TurnsTaken(NamedTuple):
    """How often a session had the turn while there were several, and for how many seconds."""

    session: str
    turns: int
    seconds: float


class SessionRow(NamedTuple):
    """A session on a worker: whose it is, and what it does there. Times are in seconds.

    `away` counts since the master has gone, and is None while the master is there. About `queued`
    instructions have not begun.
    """

    name: str
    host: str
    pid: int
    lasting: bool
    away: float | None
    age: float
    values: int
    queued: int
    running: str | None
    seconds: float


class WorkerReport(NamedTuple):
    """A worker as it describes itself.

    `address` is where it listens, or which master it dials. `processor` is in percent of one core, and
    `busy` in percent for each of `devices`: None where nobody knows.
    """

    host: str
    pid: int
    address: str
    version: str
    torch: str
    python: str
    age: float
    simulated: bool
    processor: float
    devices: list[DeviceRow]
    busy: list[float | None]
    sessions: list[SessionRow]


class JointRow(NamedTuple):
    """An operation of a group, or of several along a mesh, in which a stream is.

    `key` is the same on each worker that takes part. `nodes` has those that do, and `line` is the master's
    that issued it, empty while nobody has said so.
    """

    name: str
    key: str
    nodes: list[int]
    seconds: float
    line: str


class StreamRow(NamedTuple):
    """What a stream was seen at lately: a letter for each look, the last one now.

    `running` is what it runs now, and `line` is the master's that issued that.
    """

    name: str
    seen: str
    running: str | None
    seconds: float
    line: str
    joint: JointRow | None


class SeenSession(NamedTuple):
    """What a session holds on a worker, by device, and what its streams do.

    `node` is the worker's number there, -1 where it does not know. `at` is the line at which the master's
    program is, and `waits` for whom it waits, empty while the master has not said so.
    """

    name: str
    node: int
    held: dict[str, int]
    streams: list[StreamRow]
    at: str
    waits: str


class Activity(NamedTuple):
    """What a worker's streams do, with `every` seconds between two looks."""

    every: float
    sessions: list[SeenSession]


class ClockTimes(NamedTuple):
    """What a worker's clocks show, in nanoseconds: the one that a trace's rows are in, and the calendar's."""

    steady: int
    calendar: int


class TracedStep(NamedTuple):
    """What a row of a trace names by its number: a step of the log, a fetch or a kernel.

    A `joint` one is an operation of a group.
    """

    name: str
    joint: bool


class TracedThread(NamedTuple):
    """A thread of a worker's trace and how many rows it has.

    `kind` is "stream", "reader", "other", or "kernels" where a device's stream has run them.
    """

    name: str
    kind: str
    rows: int


class TraceKept(NamedTuple):
    """What a worker has noted of a trace.

    `TakeTrace` brings `nbytes` bytes: the rows of all threads, each of six 64-bit numbers, the lowest byte
    first, then `arrived` pairs. `dropped` is how many rows there was no room for. `why` says why there are no
    kernels of an accelerator, where it has one.
    """

    steps: list[TracedStep]
    threads: list[TracedThread]
    arrived: int
    dropped: int
    nbytes: int
    why: str


class ChannelOffer(NamedTuple):
    """Why a worker cannot offer a data channel, or nothing.

    Else what the channel can do; and the Python that runs there.
    """

    why: str
    capabilities: object
    python: list[int]


class DaemonRecord(NamedTuple):
    """A daemon that has tensors of a publication.

    Its `identity` tells a session's place there from any other.
    """

    identity: str
    node: int
    host: str
    pid: int
    devices: list[str]


class Listed(NamedTuple):
    """One version of a name as `dr.names()` counts it.

    Whose it is ("" for the session's own), and on which workers it lives.
    """

    owner: str
    identity: str
    name: str
    version: int
    shared: bool
    what: str
    listed: list[DaemonRecord]
    nbytes: int


class Listing(NamedTuple):
    """What is published on a worker, as far as the session may read it."""

    identity: str
    rows: list[Listed]


class Versions(NamedTuple):
    """The versions of a name that a worker has."""

    identity: str
    versions: list[int]


class StoredTensor(NamedTuple):
    """A published tensor: a number for it and one for its memory, and its spec, None where it is poisoned."""

    tensor: int
    memory: int
    spec: list[object] | None


class FoundVersion(NamedTuple):
    """One version of a publication. What the envelope holds only masters know."""

    version: int
    envelope: bytes
    tensors: list[StoredTensor]


class FoundVersions(NamedTuple):
    """The versions of a name that were found, and the identity of the owner's place on this worker."""

    identity: str
    versions: list[FoundVersion]


class Dropped(NamedTuple):
    """Whether there was anything to drop."""

    identity: str
    any: bool


class FileSize(NamedTuple):
    """A file of a save, in bytes."""

    file: str
    nbytes: int


class IndexSummary(NamedTuple):
    """What an index of a checkpoint says.

    `problem` is what is wrong with it, or nothing; `save` is the id of the save.
    """

    name: str
    problem: str
    version: int
    number: int
    save: str
    files: list[FileSize]


class FolderListing(NamedTuple):
    """The indexes in a folder of checkpoints, and the bytes of each file of tensors."""

    indexes: list[IndexSummary]
    sizes: dict[str, int]


@dataclass(frozen=True, slots=True)
class AskMemory(Question[MemoryHeld]):
    """Master to worker: say how many values this session holds, and which of them are poisoned."""


@dataclass(frozen=True, slots=True)
class AskStatus(Question[Status]):
    """Master to worker: say what this session computes now."""


@dataclass(frozen=True, slots=True)
class AskTurns(Question[list[TurnsTaken]]):
    """Master to worker: say how the sessions have shared this worker's time."""


@dataclass(frozen=True, slots=True)
class AskWorker(Question[WorkerReport]):
    """Master to worker: describe yourself. Whoever holds the key may ask it, without a session too."""


@dataclass(frozen=True, slots=True)
class AskActivity(Question[Activity]):
    """Master to worker: say what your streams have done lately. Whoever holds the key may ask it, as with
    `AskWorker`.

    For ten seconds the worker looks at its streams, and asks their masters where they are.
    """


@dataclass(frozen=True, slots=True)
class AskStacks(Question[str]):
    """Master to worker: say where your threads are. Whoever holds the key may ask it, as with `AskWorker`."""


@dataclass(frozen=True, slots=True)
class StopWorker(Question[str]):
    """Master to worker: end, as at SIGTERM. Whoever holds the key may ask it, as with `AskWorker`."""

    reason: str


@dataclass(frozen=True, slots=True)
class AskPassed(Question[bool]):
    """Master to worker: say whether each stream in `after`, [stream, position, ...], is at the position
    behind it.
    """

    after: list[int]


@dataclass(frozen=True, slots=True)
class AskChannel(Question[ChannelOffer]):
    """Master to worker: say whether you have this data channel, and what it can do."""

    channel: str


@dataclass(frozen=True, slots=True)
class AskClock(Question[ClockTimes]):
    """Master to worker: say what your clocks show."""


@dataclass(frozen=True, slots=True)
class StartTrace(Question[None]):
    """Master to worker: from now on note when each of this session's instructions begins and ends, as long as
    there are fewer than so many rows.
    """

    most: int


@dataclass(frozen=True, slots=True)
class StopTrace(Question[TraceKept]):
    """Master to worker: note no more, and say what there is to take.

    A row is [step, mesh or -1, position, sequence or -1, begin, end]. An instruction that still runs ends at
    -1. A fetch has its request for a position. A kernel has the time of its launch. A pair is a segment that
    has arrived, and when.
    """


@dataclass(frozen=True, slots=True)
class TakeTrace(Question[bytes]):
    """Master to worker: reply with the bytes of the trace from an offset on. After the last ones it is
    forgotten.
    """

    offset: int


@dataclass(frozen=True, slots=True)
class ListenForPeers(Question[str]):
    """Master to worker: open your own channel to other workers at this host, and reply with its address."""

    host: str


@dataclass(frozen=True, slots=True)
class ListPublished(Question[Listing]):
    """Master to worker: list what this session has published, and what other sessions share."""


@dataclass(frozen=True, slots=True)
class ListVersions(Question[Versions]):
    """Master to worker: list the versions that this session has of a name."""

    name: str


@dataclass(frozen=True, slots=True)
class FindPublished(Question[FoundVersions]):
    """Master to worker: find the versions of a name, and hold their values for an `ADOPT` with this token.

    An empty owner is the session itself.
    """

    owner: str
    name: str
    token: int


@dataclass(frozen=True, slots=True)
class DropOlder(Question[Dropped]):
    """Master to worker: drop what this session has published under a name before this version."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class DropPublished(Question[Dropped]):
    """Master to worker: drop this version of what the session has published under a name; version 0: all of
    them.
    """

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class ListFolder(Question[FolderListing]):
    """Master to worker: say which checkpoints are in a folder. A thread replies, as to all that is asked
    about folders.
    """

    folder: str


@dataclass(frozen=True, slots=True)
class ReadIndex(Question[str]):
    """Master to worker: reply with the text of one index."""

    folder: str
    index: str


@dataclass(frozen=True, slots=True)
class CommitSave(Question[None]):
    """Master to worker: make a save that all workers have written the current one.

    `index` and `weights` are the texts of its index, and of the table by which other libraries find a
    tensor's file.
    """

    folder: str
    save: str
    index: str
    weights: str


@dataclass(frozen=True, slots=True)
class SweepSaves(Question[None]):
    """Master to worker: remove the files of other saves than this one, all but those to be kept."""

    folder: str
    save: str
    keep: list[str]


@dataclass(frozen=True, slots=True)
class RemoveFiles(Question[None]):
    """Master to worker: remove these files of a save, as far as they are there."""

    folder: str
    files: list[str]


@dataclass(frozen=True, slots=True)
class Signal:
    """Master or worker to worker: what `AWAIT` with this number waits for has happened, or cannot happen any
    more, and why.

    Between workers too: the one that `Notify` has named sends it.
    """

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Master to worker: drop what this stream has not begun, up to a position; its results are poisoned.

    If it runs a function of the user's, interrupt that. Where it is `alone`, only the one instruction that
    ends at the position is dropped, or interrupted; it fails by the `reason`, where one is given: a worker
    that runs a part of the same call is lost.
    """

    stream: int
    position: int
    alone: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Peers:
    """Master to worker: who you are among the workers of this session, and where the others listen; empty:
    that one has no channel.

    `secret` is the session's: what a worker says first to another, in `Meet`.
    """

    node: int
    secret: bytes
    addresses: list[str]


@dataclass(frozen=True, slots=True)
class Meet:
    """Worker to worker: the first message on a connection; who speaks, and that it belongs to the session.

    `origin` is the same on each connection of this worker in this session. An `Ack` answers: what has come of
    it on earlier ones.
    """

    secret: bytes
    node: int
    origin: bytes


@dataclass(frozen=True, slots=True)
class Notify:
    """Master to worker: once a stream has run up to a position, send `Signal` with this number to a node."""

    stream: int
    position: int
    node: int
    number: int


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """Master to worker: join a group, and reply with nothing when you have, or `Failed` with why not.

    `nodes` has each member's node, by rank; `members` are this worker's own, [rank, device]. `factory` is a
    pickled data channel class that the master has registered, empty where the worker has it. `timeout`
    (seconds) is for joining and for each call.
    """

    request: int
    group: int
    channel: str
    factory: bytes
    nodes: list[int]
    members: list[Plain]
    timeout: float


@dataclass(frozen=True, slots=True)
class Entry:
    """Worker to worker: a member has set a key in the group's store, where members find each other; every
    worker keeps all keys for itself.

    It may come before the group is open here.
    """

    group: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class BreakGroup:
    """Either way: a group has broken, and why; whoever waits in it fails. A worker whose data channel fails
    tells the master, which tells the others.
    """

    group: int
    reason: str


@dataclass(frozen=True, slots=True)
class Taint:
    """Worker to worker: what a member puts into this operation of a group is poisoned, by this failure; its
    bytes will be zeros.

    The sender takes part once every other worker of the group has answered `Tainted`, so nobody takes the
    zeros for values. Or it has taken part over a channel that returns early. Then its bytes are still on
    their way, and are found to be no values.
    """

    group: int
    sequence: int
    failure: list[Plain]


@dataclass(frozen=True, slots=True)
class Tainted:
    """Worker to worker: the answer to `Taint`. Whoever has got something from this worker since, which may
    come from that operation, knows.
    """

    group: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Part:
    """Worker to master: bytes of a large reply that follows, in this message's payload frame, and where they
    belong in it.
    """

    request: int
    offset: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Worker to master: the answer to a request.

    A tensor is [dtype, sizes, data]: its bytes, None when they fill the payload frame, "parts" or "shared"
    when they are there already.
    """

    request: int
    value: object


@dataclass(frozen=True, slots=True)
class Failed:
    """Worker to master: what was requested is poisoned, and by which failure."""

    request: int
    failure: list[Plain]


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Either way: the session is over; the worker drops its values and waits for the next master."""

    reason: str


@dataclass(frozen=True, slots=True)
class Detach:
    """Either way: the master leaves, and the session stays for as long as `Hello.keep` said, answered by an
    `Ack`; or it is made to leave, since another master has taken the session over.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The first cause of a poisoned value, as the worker saw it.

    Not a message: it travels inside `Done` and `Failed`.
    """

    seq: int
    position: int
    # This is the exception's class, "IndexError" or "torch.OutOfMemoryError". The master rebuilds it from an
    # allow-list and never unpickles it.
    kind: str
    text: str
    traceback: str
    op: str
    operands: str
    # It happened at this node, if that is not the worker that tells of it: a copy or a collective has brought
    # it.
    node: int = -1
    # It is the instruction of this number in a program.
    part: int = -1


Message = (
    Join
    | Hello
    | Welcome
    | Refused
    | Ack
    | Bury
    | OpenStream
    | Segment
    | OpenMesh
    | OpenLines
    | MeshSegment
    | MeshBody
    | Done
    | Warned
    | Printed
    | Typed
    | AskMaster
    | MasterReport
    | Fetch
    | AskMemory
    | AskStatus
    | AskTurns
    | AskWorker
    | AskActivity
    | AskStacks
    | StopWorker
    | AskPassed
    | AskChannel
    | AskClock
    | StartTrace
    | StopTrace
    | TakeTrace
    | ListenForPeers
    | ListPublished
    | ListVersions
    | FindPublished
    | DropOlder
    | DropPublished
    | ListFolder
    | ReadIndex
    | CommitSave
    | SweepSaves
    | RemoveFiles
    | Part
    | Reply
    | Failed
    | Signal
    | Cancel
    | Peers
    | Meet
    | Notify
    | OpenGroup
    | Entry
    | BreakGroup
    | Taint
    | Tainted
    | Detach
    | Goodbye
)
MESSAGES: tuple[type[Message], ...] = get_args(Message)
