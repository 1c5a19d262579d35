"""A master that holds the key and says nonsense of meshes: its worker says what is wrong, ends that session,
and serves the next.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from distruntime.wire.channel import Channel
from distruntime.wire.codec import decode, encode
from distruntime.wire.messages import (
    CHECK,
    GIVE,
    HOST,
    LEARN,
    MESSAGES,
    PROTOCOL,
    TAKE,
    UPLOAD,
    Cancel,
    Fetch,
    Goodbye,
    MeshBody,
    MeshSegment,
    Message,
    Notify,
    OpenGroup,
    OpenLines,
    OpenMesh,
    OpenStream,
    Refused,
    Segment,
    stream_number,
)
from greeting_samples import hello
from processes import ListeningWorker, resident, until
from tests.hostile.test_security import (  # noqa: F401 - the fixture is used by being here
    FIELDS,
    Target,
    _attackers_leave,
    bytes_of,
    computes,
    messages_out_of_place,
    talk,
)

BIG = 1 << 62
ONE = [UPLOAD, 7, "member", "float32", [1], b"\0\0\0\0"]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ListeningWorker]:
    """A worker of two simulated GPUs, for all of these masters."""
    folder = tmp_path_factory.mktemp("meshes")
    os.chmod(folder, 0o700)
    started = ListeningWorker(folder, "--listen", f"ipc://{folder}/s", "--insecure", "--simulate-cuda", "2")
    yield started
    started.stop()


class Master:
    """Speaks to a worker message by message."""

    def __init__(self, worker: ListeningWorker) -> None:
        self.worker, self._heard = worker, list[Message]()
        self._channel = talk(Target(worker.address, None), None, [])
        self.say(hello(session="hostile"))

    def say(self, *messages: Message | bytes | tuple[Message, Message | bytes]) -> None:
        """Send messages; of a pair the second is the payload frame of the first."""
        for message in messages:
            parts = message if isinstance(message, tuple) else (message,)
            self._channel.send(
                b"target", [part if isinstance(part, bytes) else encode(part) for part in parts]
            )

    def hears(self, kind: type[Message]) -> Any:
        """Wait for a message of a class, and return it."""

        def found() -> Message | None:
            self._heard += [decode(bytes_of(frames[0])) for _, frames in self._channel.receive(0.05)]
            return next((m for m in self._heard if isinstance(m, kind)), None)

        until(found)
        message = found()
        assert message is not None
        self._heard.remove(message)
        return message


@pytest.fixture
def master(worker: ListeningWorker) -> Iterator[Master]:
    made = Master(worker)
    yield made
    channel: Channel = made._channel
    channel.close()


def body(
    *words: Any, mesh: int = 0, start: int = 0, templates: Any = (), stretches: Any = ()
) -> tuple[Message, Message]:
    return MeshSegment(1), MeshBody(mesh, start, list(templates), list(words), list(stretches))


MESH = OpenMesh(0, ["cuda:0", "cuda:1"])
ADD = [16, "aten::add.Tensor", [["operand"], ["operand"]], {}, 1]
SUM = [
    16,
    "group::all_reduce",
    [0, [-1, "SUM", None, False, [], []], [["float32", [1], None]], [["float32", [1], None]]],
    {},
    0,
]

NONSENSE: dict[str, tuple[list[Any], str]] = {
    "no members": ([OpenMesh(0, [])], r"mesh 0 of members on \[\] cannot be opened"),
    "members elsewhere": ([OpenMesh(0, ["cuda:0", "cuda:9"])], "mesh 0 of members on .*cuda:9.* cannot be opened"),
    "members that are none": ([OpenMesh(0, [None, 3, ["cpu"]])], "mesh 0 of members .* cannot be opened"),
    "a member twice": ([OpenMesh(0, ["cpu", "cpu"])], "mesh 0 of members .* cannot be opened"),
    "a million members": ([OpenMesh(0, ["cpu"] * 1_000_000)], r"mesh 0 of members on \['cpu', .* cannot be opened"),
    "a mesh twice": ([MESH, MESH], "mesh 0 of members .* cannot be opened"),
    "the worker's own log as a mesh": ([OpenMesh(-1, ["cpu"])], "mesh -1 of members .* cannot be opened"),
    "a number that is none": ([OpenMesh(BIG, ["cpu"])], f"mesh {BIG} of members .* cannot be opened"),
    "lines of no mesh": ([OpenLines(0, 0, [[1, 0]])], "lines 0 of mesh 0, which is not open"),
    "lines of another mesh": ([MESH, OpenLines(1, 0, [[1, 0], [1, 1]])], "lines 0 of mesh 1, which is not open"),
    "lines of too few": ([MESH, OpenLines(0, 0, [[1, 0]])], "lines 0 of mesh 0 make no sense"),
    "lines that are none": ([MESH, OpenLines(0, 0, [1, [1, "0"]])], "lines 0 of mesh 0 make no sense"),
    "lines that overlap": ([MESH, OpenLines(0, 0, [[1, 0], [1, 0]])], "lines 0 of mesh 0 make no sense"),
    "lines of no group": ([MESH, OpenLines(0, 0, [[BIG, 0], [1, -1]])], f"there is no group {BIG}"),
    "a segment of no mesh": ([body(mesh=0)], "MeshSegment without the body of a mesh that is open"),
    "a segment without a body": ([MESH, MeshSegment(1)], r"segment 1 of a mesh came after 0, with 0 bodies"),
    "a body without a segment": ([MESH, body()[1]], "a master does not send MeshBody"),
    "another message for a body": ([MESH, (MeshSegment(1), Goodbye("x"))], "MeshSegment without the body"),
    "bytes for a body": ([MESH, (MeshSegment(1), b"\xdf\xff\xff\xff\xff")], "a frame of 5 bytes is not a message"),
    "a length that is not there": ([MESH, (MeshSegment(1), b"\xdd\xff\xff\xff\xff" + b"\x01" * 9)], "a frame of 14 bytes is not a message"),
    "a segment out of order": ([MESH, (MeshSegment(BIG), body()[1])], f"segment {BIG} of a mesh came after 0"),
    "a segment that comes again": ([MESH, body(), body()], "segment 1 of a mesh came after 1"),
    "words out of order": ([MESH, body(start=BIG)], f"a segment of mesh 0 begins at {BIG}, and 0 words have come"),
    "templates that are none": ([MESH, body(templates=[None])], "a template makes no sense: None"),
    "a template out of order": ([MESH, body(templates=[[BIG, "aten::add.Tensor", [], {}, 1]])], f"template {BIG} of mesh 0 came where 16"),
    "another log's": ([MESH, Segment(1, 0, [ADD], [], []), (MeshSegment(2), MeshBody(0, 0, [], [16, 1, 2, 3], []))], "KeyError: 16"),
    "lines that there are not": ([MESH, body(templates=[SUM])], "group::all_reduce of mesh 0 makes no sense: KeyError"),
    "words that are none": ([MESH, body("x", None)], "segment 1 makes no sense at word 0 of 2: TypeError"),
    "an instruction cut short": ([MESH, body(TAKE, 1)], "segment 1 makes no sense at word 0 of 2: IndexError"),
    "a shard of nobody": ([MESH, body(*ONE, TAKE, 7, 2, 8)], "segment 1 makes no sense at word 6 of 10: IndexError"),
    "a shard named by a text": ([MESH, body(*ONE, TAKE, 7, "x", 8)], "segment 1 makes no sense at word 6 of 10: TypeError"),
    "shards that are not there": ([MESH, body(GIVE, [BIG, 3], 8)], f"segment 1 makes no sense at word 0 of 3: KeyError: {BIG}"),
    "shards that are no list": ([MESH, body(GIVE, 5, 8)], "segment 1 makes no sense at word 0 of 3: TypeError"),
    "too few shards": ([MESH, body(GIVE, [], 8, 16, 8, 8, 9, templates=[ADD])], "segment 1 makes no sense at word 3 of 7: IndexError"),
    "a copy to the host of all": ([MESH, body(*ONE, HOST, 7, 8, [])], "segment 1 makes no sense at word 6 of 10: TypeError"),
    "members of no mesh": ([Segment(1, 0, [], ONE, [])], "segment 1 makes no sense at word 0 of 6: TypeError: .*in no mesh's log"),
    "a check of no instruction": ([MESH, body(*ONE, CHECK, 1, [], TAKE, 7, 0, 8)], "CHECK stands before an instruction only"),
    "a question about no instruction": ([MESH, body(LEARN, 1, GIVE, [], 8)], "LEARN stands before an instruction only"),
    "a stretch of no stream": ([MESH, body(*ONE, stretches=[[1, 6]])], r"segment 1: \[1, 6\] is no stretch"),
    "a stretch that is none": ([MESH, body(*ONE, stretches=[[0, -6]])], r"segment 1: \[0, -6\] is no stretch"),
    "stretches of too much": ([MESH, body(*ONE, stretches=[[0, BIG]])], f"segment 1: stretches of {BIG} words for 6"),
    "a stream of no mesh": ([OpenStream(1, "cpu", 0, 0)], "a stream of mesh 0, which is not open"),
    "a stream of no log": ([OpenStream(1, "cpu", 0, -2)], "a stream of mesh -2, which is not open"),
    "the default stream again": ([MESH, OpenStream(0, "cpu", 0, 0)], "stream 0 cannot be opened"),
    "a stream of many bits": ([MESH, OpenStream(4096, "cpu", 0, 0)], "stream 4096 cannot be opened"),
    "a stream elsewhere": ([MESH, OpenStream(1, "cuda:9", 0, 0)], "stream 1: this worker has no device cuda:9"),
    "a cancel of no stream": ([MESH, Cancel(stream_number(0, 1), 5, False, "")], "there is no stream 4097"),
    "a cancel of no mesh": ([Cancel(stream_number(BIG >> 13, 0), 5, False, "")], "there is no stream"),
    "a cancel of minus one": ([Cancel(-1, 5, False, "")], "there is no stream -1"),
    "a fetch after no stream": ([MESH, Fetch(1, 1, [stream_number(0, 3), 0], "tensor", {})], "a fetch after"),
    "a signal after no stream": ([Notify(stream_number(3, 0), 0, 1, 1)], "a fetch after"),
}  # fmt: skip


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_about_a_mesh_ends_the_session_with_its_reason(master: Master, what: str) -> None:
    messages, reason = NONSENSE[what]
    master.say(*messages)
    said = master.hears(Goodbye).reason
    assert re.search(reason, said), said
    assert len(said) < 1000 and "defect" not in said
    assert master.worker.process.poll() is None and "Traceback" not in master.worker.text()


def test_members_that_are_not_in_a_group_as_the_lines_say(master: Master) -> None:
    """Ranks that there are not, and those of other workers."""
    for rows in ([[1, 0], [1, 7]], [[1, 0], [1, 2]], [[1, -1], [1, 1]]):
        master.say(hello(session="hostile"), MESH)
        master.say(
            OpenGroup(1, 1, "tcp", b"", [0, 0, 1], [[0, "cuda:0"], [1, "cuda:1"]], 1.0), OpenLines(0, 0, rows)
        )
        assert "lines 0 of mesh 0" in master.hears(Goodbye).reason


def test_strangers_open_no_mesh(worker: ListeningWorker) -> None:
    """Whole messages from one who has no session."""
    master = Master(worker)
    before = worker.text().count("dropped a peer")
    said: list[Message] = [
        MESH,
        OpenLines(0, 0, [[1, 0]]),
        MeshSegment(1),
        body()[1],
        OpenStream(1, "cpu", 0, 0),
    ]
    stranger = talk(Target(worker.address, None), None, [[encode(message)] for message in said])
    messages_out_of_place(Target(worker.address, None))
    until(lambda: worker.text().count("dropped a peer") >= before + len(said))
    assert "OpenMesh from a peer that has no session here" in worker.text() and stranger.receive(0.0) == []
    master.say(MESH, body(*ONE))  # the master's own session has gone on
    assert master.hears(next(m for m in MESSAGES if m.__name__ == "Done")).failures == []
    master.say(Goodbye("x"))


@pytest.mark.parametrize("seed", range(3))
def test_random_messages_about_meshes_harm_no_later_master(
    worker: ListeningWorker, fresh_session: Callable[..., Any], seed: int
) -> None:
    """Fields of all classes, and of the right ones, in messages that follow what makes some of them
    plausible.
    """
    random_ = random.Random(seed)
    numbers = [0, 1, 2, -1, 7, 16, 17, 4095, 4096, 1 << 31, BIG]
    vocabulary = [*numbers, *range(12), [7], [7, 8], [], "x", None, 1.5, b"\0\0\0\0", [1], "member"]

    def word() -> Any:
        return random_.choice(vocabulary)

    attacker = Master(worker)
    before = resident(worker.process.pid)
    for _ in range(150):
        kind = random_.choice([OpenMesh, OpenLines, MeshSegment, MeshBody, OpenStream])
        fields = [random_.choice(FIELDS + numbers) for _ in range(len(kind.__dataclass_fields__))]
        words = [word() for _ in range(random_.randrange(12))]
        templates = random_.choice([[], [ADD], [SUM], [[16, *fields]], [[word() for _ in range(5)]]])
        stretches = random_.choice([[], [[0, len(words)]], [[word(), word()]], [word()]])
        attacker.say(hello(session="hostile"), MESH)
        attacker.say(
            random_.choice([MESH, msgpack.packb([MESSAGES.index(kind), *fields]), OpenStream(1, "cpu", 0, 0)])
        )
        attacker.say((MeshSegment(1), MeshBody(0, 0, templates, [*ONE, *words], stretches)))
    attacker.say(Goodbye("done"), hello(protocol=PROTOCOL + 1))
    attacker.hears(Refused)
    assert worker.process.poll() is None, worker.text()
    fresh_session(workers=[worker.address])
    assert computes() and worker.process.poll() is None, worker.text()
    assert resident(worker.process.pid) < before + (256 << 20)
