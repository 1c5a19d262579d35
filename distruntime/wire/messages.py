"""Every message of the command channel: one frozen dataclass each, in the order of a session's life.

`docs/protocol.md` has one row for each. A message travels as one frame (its class's place in `MESSAGES`, then its fields) followed by
the payload frames of large tensors, if any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

PROTOCOL = 6  # the contract between master and worker: a change of any message or opcode changes this number

# Words that a segment may hold where an instruction starts. A negative word frees the ref of that number; a word from
# FIRST_TEMPLATE on is a template, followed by its operand words (refs, floats) and the refs of its results.
CHECK = 0  # CHECK, number, [spec, ...], then an instruction: run it, report in `Done` where its results differ from the predicted specs
LEARN = 1  # LEARN, request, then an instruction: run it, reply with the specs of its results (what is not a tensor is replied itself)
UPLOAD = 2  # UPLOAD, ref, device, dtype, sizes, data: a tensor from bytes, the payload frame of that number, or the shared memory of that name
FORGET = 3  # FORGET, number: drop the templates below that number; numbers are never used again
WAIT = 4  # WAIT, stream, position, seconds or None, text: go on when that stream has run up to that position; `text` says who recorded it
AWAIT = 5  # AWAIT, number, seconds or None, text: go on when `Signal` has come with that number
STAMP = 6  # STAMP, ref: the time when this stream gets here, for `elapsed_time`
RELEASE = 7  # RELEASE, ref, count: as a free, of a value that `count` streams use: the last of them frees it
HOST = 8  # HOST, ref, result: a copy of a GPU's value in pinned memory; a fetch of it is answered when the copy is done
TAKE = 9  # TAKE, ref, k, result: of a mesh's value, that of the mesh's k-th member here; both names are for the same memory
GIVE = 10  # GIVE, [ref, ...], result: the value of a mesh, of those of its members here
PUBLISH = 11  # PUBLISH, request, [name, version, shared, what, nodes, envelope], [ref, ...]: keep these values under a name, and reply
ADOPT = 12  # ADOPT, token, version, [ref or 0, ...]: give the values of what `Ask` found under this token these refs; version 0: let go of it
FIRST_TEMPLATE = 16


def stream_number(team: int, stream: int) -> int:
    """Return the number by which messages name a stream of a mesh; a worker's own (`team` -1) keep theirs, which are below 4096."""
    return (team + 1) << 12 | stream


def team_and_stream(number: int) -> tuple[int, int]:
    """Return whose stream a message names (-1: the worker's own), and its number there."""
    return (number >> 12) - 1, number & 4095


@dataclass(frozen=True, slots=True)
class Join:
    """Worker to master: a worker that dials in asks for a place in the session, or for the one that it had.

    `incarnation` is drawn when the worker starts: by it the master knows whether the worker still has what lived there.
    """

    node: int | None
    pid: int
    host: str
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """Master to worker: open a session, or go on with one.

    `mode` is "new"; "again", on a new connection of the same master, which proves itself by the `token` it had given; "resume", of another
    master, which gets what was published; or "force new" and "force resume", in spite of a master that is there. `received` counts the
    messages that have come on earlier connections. When the master is gone, the worker keeps the session for `keep` seconds, or, unless it
    is `lasting`, until it knows that the master has died. `process` is the master's: see identity.py.
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
    process: list[Any]
    shared: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Worker to master: the session is open; this is who I am and what I have.

    `devices` is a list of [name, description, total bytes, free bytes, compute capability, bytes that the caching allocator has given
    out, bytes that it has reserved]; `simulated` says that the GPUs are CPU tensors. `shared` is the secret in the shared memory that
    `Hello.shared` names, empty where the worker cannot read it. The master writes `nonce` there, to show that
    the memory is its own. `received` counts the messages that have come on earlier connections, `age` the seconds since the
    session began. `left` has the sessions here without a master, as [name, its master's process].
    """

    protocol: int
    incarnation: bytes
    received: int
    age: float
    torch: str
    python: str
    host: str
    pid: int
    process: list[Any]
    shared: bytes
    nonce: bytes
    devices: list[Any]
    simulated: bool
    left: list[Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """Either way: no session, and why; `taken` where the session is another master's."""

    reason: str
    taken: bool


@dataclass(frozen=True, slots=True)
class Ack:
    """Either way: so many messages have come on this session's connections. Not counted itself, as are those above."""

    received: int


@dataclass(frozen=True, slots=True)
class Bury:
    """Master to worker: this session's master, a process of the sender's machine, has died; there is no use in keeping its values."""

    session: str


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Master to worker: from now on stretches may name this stream, of this worker's own log (`team` -1) or of a mesh's.

    Number 0, the default stream of every device, is always there.
    """

    stream: int
    device: str
    priority: int
    team: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Master to worker: consecutive instructions of the log.

    `seq` counts a worker's segments from 1; `start` is the number of words before this one, so a position in the log names an
    instruction. `templates` are those that the worker has not seen: [number, operator, arguments, keyword arguments, results].
    `stretches` divides the words among streams, as [stream, words] in the log's order; empty: all are stream 0's.
    """

    seq: int
    start: int
    templates: list[Any]
    words: list[Any]
    stretches: list[Any]


@dataclass(frozen=True, slots=True)
class OpenTeam:
    """Master to worker: from now on segments of this mesh may come. `devices` are those of its members here, in the order of the mesh."""

    team: int
    devices: list[Any]


@dataclass(frozen=True, slots=True)
class OpenLines:
    """Master to worker: along one dimension of a mesh (`number`), which group each member here is in, and its rank: [group, rank], ..."""

    team: int
    number: int
    members: list[Any]


@dataclass(frozen=True, slots=True)
class MeshSegment:
    """Master to worker: the next of this worker's segments; what is in it comes in the payload frame, a `MeshBody`."""

    seq: int


@dataclass(frozen=True, slots=True)
class MeshBody:
    """Master to worker: what `MeshSegment` brings, the same bytes to every worker of a mesh; otherwise as a `Segment`.

    `start` counts the mesh's own words, as do the positions in failures and in `WAIT`; streams are the mesh's own too, but that stream 0
    takes turns with this worker's. An instruction runs for each member here.
    """

    team: int
    start: int
    templates: list[Any]
    words: list[Any]
    stretches: list[Any]


@dataclass(frozen=True, slots=True)
class Done:
    """Worker to master: the segment ran. Carries new failures and the check numbers whose predicted specs were wrong."""

    seq: int
    failures: list[Any]
    corrections: list[Any]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Master to worker: reply with a value, once each stream that `after` names has run up to the position behind it.

    `after` is [stream, position, ...]: the value's last writer, and its maker where that is another stream. `form` is "tensor" (its
    bytes), "item" (a Python number), "text" (as torch prints it, with `options` its print options), "passed" (no value: that the streams
    are there, with the failures that no `Done` has brought yet) or "done" (nothing: that the whole log has run, and every `Done` has
    gone). `options` may name `shared` memory for the bytes.
    """

    request: int
    ref: int
    after: list[Any]
    form: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """Master to worker: reply about the worker itself, at once.

    "info" is the rows of `Welcome.devices`, "memory" [values held, position, refs of the poisoned ones], "status" what it is computing,
    "passed" whether the streams of `detail` are at their positions. "channel" is [why not, capabilities, Python version] of the data
    channel that `detail` names; "listen" opens the worker's own channel to other workers at the host that `detail` proposes: its address.
    "published" is about what sessions have published here: see published.py of the worker.
    """

    request: int
    what: str
    detail: list[Any]


@dataclass(frozen=True, slots=True)
class Signal:
    """Master or worker to worker: what `AWAIT` with this number waits for has happened, or cannot happen any more, and why.

    Between workers too: the one that `Notify` has named sends it.
    """

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Master to worker: drop what this stream has not begun, up to a position; its results are poisoned."""

    stream: int
    position: int


@dataclass(frozen=True, slots=True)
class Peers:
    """Master to worker: who you are among the workers of this session, and where the others listen; empty: that one has no channel.

    `secret` is the session's: what a worker says first to another, in `Meet`.
    """

    node: int
    secret: bytes
    addresses: list[str]


@dataclass(frozen=True, slots=True)
class Meet:
    """Worker to worker: the first message on a connection; who speaks, and that it belongs to the session.

    `origin` is the same on each connection of this worker in this session. An `Ack` answers: what has come of it on earlier ones.
    """

    secret: bytes
    node: int
    origin: bytes


@dataclass(frozen=True, slots=True)
class Notify:
    """Master to worker: once a stream has run up to a position, send `Signal` with this number to that node."""

    stream: int
    position: int
    node: int
    number: int


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """Master to worker: join a group, and reply with nothing when you have, or `Failed` with why not.

    `nodes` has each member's node, by rank; `members` are this worker's own, [rank, device]. `factory` is a pickled data channel class
    that the master has registered, empty where the worker has it. `timeout` (seconds) is for joining and for each call.
    """

    request: int
    group: int
    channel: str
    factory: bytes
    nodes: list[int]
    members: list[Any]
    timeout: float


@dataclass(frozen=True, slots=True)
class Entry:
    """Worker to worker: a member has set a key in the group's store, where members find each other; every worker keeps all keys for itself.

    It may come before the group is open here.
    """

    group: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class BreakGroup:
    """Either way: a group has broken, and why; whoever waits in it fails. A worker whose data channel fails tells the master, which
    tells the others.
    """

    group: int
    reason: str


@dataclass(frozen=True, slots=True)
class Taint:
    """Worker to worker: what a member puts into this operation of a group is poisoned, by this failure; its bytes will be zeros.

    The sender takes part once every other worker of the group has answered `Tainted`, so nobody takes the zeros for values.
    """

    group: int
    sequence: int
    failure: list[Any]


@dataclass(frozen=True, slots=True)
class Tainted:
    """Worker to worker: the answer to `Taint`."""

    group: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Part:
    """Worker to master: bytes of a large reply that follows, in this message's payload frame, and where they belong in it."""

    request: int
    offset: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Worker to master: the answer to a request.

    A tensor is [dtype, sizes, data]: its bytes, None when they fill the payload frame, "parts" or "shared" when they are there already.
    """

    request: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """Worker to master: what was requested is poisoned, and by which failure."""

    request: int
    failure: list[Any]


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Either way: the session is over; the worker drops its values and waits for the next master."""

    reason: str


@dataclass(frozen=True, slots=True)
class Detach:
    """Either way: the master leaves, and the session stays for as long as `Hello.keep` said, answered by an `Ack`; or it is made to leave,
    since another master has taken the session over.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The first cause of a poisoned value, as the worker saw it. Not a message: it travels inside `Done` and `Failed`."""

    seq: int
    position: int
    kind: str  # the exception's class, "IndexError" or "torch.OutOfMemoryError": rebuilt from an allow-list, never unpickled
    text: str
    traceback: str
    op: str
    operands: str
    node: int = (
        -1
    )  # where it happened, if that is not the worker that tells of it: a copy or a collective has brought it


Message = (
    Join
    | Hello
    | Welcome
    | Refused
    | Ack
    | Bury
    | OpenStream
    | Segment
    | OpenTeam
    | OpenLines
    | MeshSegment
    | MeshBody
    | Done
    | Fetch
    | Ask
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
