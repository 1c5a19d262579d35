"""The fuzzer, with fixed seeds: rounds against a worker, as a stranger, and against a master; and every one
that found something.

`tests/long/fuzz_hour.py` runs other rounds for an hour, and `tests/help/fuzzing.py` as long as it is told to.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import pytest
import torch

import distruntime as dr
import fuzz_seeds
from distruntime.log.failure_log import Cause
from distruntime.log.replies import FORMS, devices_from, is_spec, is_tensor, require
from distruntime.session.failures import remote_error
from distruntime.session.session import active_session
from distruntime.wire.codec import decode, encode
from distruntime.wire.messages import (
    GIVE,
    HOST,
    LEARN,
    MESSAGES,
    PUBLISH,
    STAMP,
    UPLOAD,
    Ack,
    AskStatus,
    CommitSave,
    Failure,
    Goodbye,
    ListenForPeers,
    ListFolder,
    MemoryHeld,
    Notify,
    Peers,
    Question,
    ReadIndex,
    RemoveFiles,
    Reply,
    Segment,
    SweepSaves,
    Welcome,
)
from fuzz_mutations import Mutator
from fuzz_worker import ADD, AgainstWorker, FuzzedWorker, Legitimate, Speaker, hello
from fuzzing import target

# A block has so many rounds. Each takes some tenths of a second.
ROUNDS = {"worker": 20, "raw": 6, "master": 3}
# (against, seed, round) of what has found a defect. What they say changes with the seeds' file and the
# mutations; what each has found has a test of its own too.
FOUND = [
    ("worker", 20261122, 1678),  # a greeting behind what ended the session while a large value was on its way
    ("worker", 3, 1416),  # an upload cut short
    ("worker", 3, 2092),  # peers at addresses that are none
    ("worker", 3, 1607),
    # The next master was taken for the one before it: the kernel had given it the same fd.
    ("worker", 1, 25), ("worker", 1, 119),
    ("master", 1, 5), ("master", 1, 60), ("master", 1, 73),  # replies that are no tensors
    ("master", 1, 28), ("master", 1, 63),  # devices that are none
    # A version before the first: what was published after it, an honest worker refused.
    ("master", 20261122, 726),
    ("master", 20261125, 1631), ("master", 20261123, 160),  # figures that are none
    # A number that comes as the description of a tensor.
    ("master", 20261122, 1980), ("master", 20261121, 1818),
    # Settings that are none; a request that was made as its worker was lost.
    ("master", 1, 35), ("master", 1, 57),
]  # fmt: skip


@pytest.fixture(scope="module", params=["worker", "raw", "master"])
def hostile(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Any]]:
    dr.shutdown()
    folder = tmp_path_factory.mktemp("fuzz")
    os.chmod(folder, 0o700)
    made = target(request.param, folder, 7)
    yield request.param, made
    made.close()


@pytest.mark.parametrize("block", range(2))
def test_fixed_seeds(hostile: tuple[str, Any], block: int) -> None:
    kind, made = hostile
    for number in range(block * ROUNDS[kind], (block + 1) * ROUNDS[kind]):
        made.seed = 7
        made.round(number)


def test_what_has_found_something(hostile: tuple[str, Any]) -> None:
    kind, made = hostile
    for against, seed, number in FOUND:
        if against == kind:
            made.seed = seed
            made.round(number)


# -- the fuzzer itself -----------------------------------------------------------------------------


def test_every_message_has_a_seed() -> None:
    """If it fails for a new message, let a session in `fuzz_seeds.py` send it, and record the seeds again.

    `PYTHONPATH=.:worker:tests/help python tests/help/fuzzing.py record` does that.
    """
    found = {type(m).__name__ for r in fuzz_seeds.load() for s in r.seeds for m in (s.message, *s.payloads)}
    assert {cls.__name__ for cls in MESSAGES} - found == set()


def test_seeds_outlive_a_change_of_the_protocol() -> None:
    assert fuzz_seeds.revived("NoSuchMessage", {}) is None
    message = fuzz_seeds.revived("Fetch", {"request": 3, "no_such_field": 1})
    assert (message.request, message.ref, message.after, message.form, message.options) == (3, 0, [], "", {})
    assert fuzz_seeds.revived("Join", {}).node is None


def test_a_round_is_the_same_bytes_again() -> None:
    recordings = fuzz_seeds.load()

    def bytes_of(number: int) -> list[Any]:
        mutator = Mutator(recordings, Random(f"1:{number}"))
        return [
            item if isinstance(item, bytes) else mutator.frames(item) for item in mutator.session("master")
        ]

    assert [bytes_of(n) for n in range(20)] == [bytes_of(n) for n in range(20)]
    assert bytes_of(1) != bytes_of(2)


def test_most_mutations_are_still_messages() -> None:
    """Else nothing behind `decode` would be fuzzed."""
    mutator = Mutator(fuzz_seeds.load(), Random(3))
    good = 0
    for _ in range(1000):
        frames = mutator.frames(mutator.seed(Random(good).choice(mutator.pool)))
        try:
            decode(frames[0])
            good += 1
        except dr.errors.ProtocolError:
            pass
    assert 500 < good < 1000


def test_a_defect_is_found(tmp_path: Path) -> None:
    """The oracle sees a worker that ends, and one that does not answer."""
    os.chmod(tmp_path, 0o700)
    worker = FuzzedWorker(tmp_path, key=False)
    against = AgainstWorker.__new__(AgainstWorker)
    against.worker = worker
    try:
        worker.check()
        worker.process.terminate()
        worker.process.wait(20)
        with pytest.raises(Exception, match="the worker ended"):
            worker.check()
    finally:
        worker.stop()


# -- what it has found -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [None, [], 1, ["float32", [2]], ["float32", [-1], b""], ["nn", [0], b""],
              ["float32", [1 << 62, 1 << 62], None], ["float32", [2], b"1234567"],
              ["float32", ["2"], b"12345678"], ["float32", [2], "shared"], ["float32", [2], None]],
)  # fmt: skip
def test_a_reply_that_is_no_tensor(value: Any) -> None:
    assert not is_tensor(value, b"1234", None)
    assert is_tensor(["float32", [2], b"12345678"], None, None) and is_tensor(
        ["float32", [1], None], b"1234", None
    )


def test_metadata_and_devices_that_are_none() -> None:
    good: list[Any] = [[2, 3], [3, 1], 0, "float32", 0]
    assert is_spec(good)
    for k, values in enumerate(
        [
            ([2], [-1, 3], [2, "3"], 6, [1 << 61, 1 << 61]),
            ([3], [3, -1], None, [1 << 62, 1]),
            (-1, 1 << 62),
            ("nn", 3),
            (4, "0"),
        ]
    ):
        for value in values:  # type: ignore[attr-defined]
            assert not is_spec([*good[:k], value, *good[k + 1 :]])
    assert not is_spec(good[:4]) and not is_spec(None)
    row: list[Any] = ["cpu", "a cpu", 1, 1, "", 0, 0, "", 0, []]
    assert devices_from([row]) == [tuple(row)]
    for rows in ([], [row, row], [row[:7]], [[*row, 1]], [[None, *row[1:]]], 3, [3]):
        assert devices_from(rows) is None


@pytest.mark.parametrize(
    "kind",
    ["ExceptionGroup", "UnicodeDecodeError", "StopIteration", "KeyError", "no.such.Error", "SystemExit", ""],
)
def test_a_failure_of_any_class_is_an_error_with_words(session: Any, kind: str) -> None:
    node = active_session().nodes[0]
    error = remote_error(node, Cause(Failure(1, 1, kind, "its text", "", "aten::add", ""), ""))
    assert isinstance(error, dr.errors.RemoteError) and "its text" in str(error)


def test_every_form_of_a_reply_refuses_what_it_is_not() -> None:
    for form in FORMS:
        for value in ({"a": object}, [[[]]]):
            assert not fits(form, value), form


def fits(form: str, value: Any) -> bool:
    """Whether a master takes a value for what it has asked for."""
    try:
        require(form, value, None, None)
    except dr.errors.ProtocolError:
        return False
    return True


@pytest.mark.slow(reason="begins and ends many sessions, 6 s")
def test_sessions_that_have_ended_leave_no_descriptors(
    fresh_session: Callable[..., Any], tmp_path: Path
) -> None:
    """atexit held every session, with the shared memory and the wake-up of each."""
    os.chmod(tmp_path, 0o700)
    worker = FuzzedWorker(tmp_path, key=False)
    try:
        counts = []
        for _ in range(5):
            fresh_session(workers=[worker.address])
            assert torch.ones(3, device="remote").sum().item() == 3.0
            dr.shutdown()
            with pytest.raises(dr.errors.ConnectionFailed):
                dr.init_master_worker(workers=[f"ipc://{tmp_path}/nobody"], timeout=0.05)
            gc.collect()
            counts.append(len(os.listdir("/dev/fd")))
        assert counts[-1] <= counts[1], counts
    finally:
        worker.stop()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedWorker]:
    folder = tmp_path_factory.mktemp("worker")
    os.chmod(folder, 0o700)
    made = FuzzedWorker(folder, key=False)
    yield made
    made.stop()


@pytest.fixture
def speaker(worker: FuzzedWorker) -> Iterator[Speaker]:
    """A master in session; the next one is served."""
    made = Speaker(worker)
    made.say(encode(hello()))
    made.hears(Welcome, "Hello")
    yield made
    made.close()
    worker.check()
    Legitimate(worker).compute().leave()


@pytest.mark.parametrize(
    "words",
    [
        [UPLOAD],
        [UPLOAD, 1, "cpu"],
        [STAMP, 1, "cpu", HOST, 1, 2, []],
        [UPLOAD, 1, "cpu", "float32", [1], [1, 2, 3]],
        [GIVE, [[]], 1],
    ],
)
def test_words_that_make_no_sense_end_the_session_with_a_reason(speaker: Speaker, words: list[Any]) -> None:
    speaker.say(encode(Segment(1, 0, [], words, [])))
    assert "segment 1 makes no sense at word" in speaker.hears(Goodbye, "a segment").reason


@pytest.mark.parametrize(
    "words", [[LEARN, [1], 16, 1, 1, 2], [PUBLISH, [1], ["x", 1, True, "", [], b""], []]]
)
def test_a_request_that_is_no_number_ends_the_session(speaker: Speaker, words: list[Any]) -> None:
    """It was answered, by a reply that no master can read."""
    speaker.say(encode(Segment(1, 0, [ADD], [UPLOAD, 1, "cpu", "float32", [1], b"1234", *words], [])))
    assert "answers a request called '[1]'" in speaker.hears(Goodbye, "a segment").reason


def test_a_signal_for_a_node_that_there_is_not(speaker: Speaker) -> None:
    speaker.say(encode(ListenForPeers(1, "")))
    speaker.hears(Reply, "listen", 1)
    speaker.say(encode(Notify(0, 0, 1, 1)))
    assert "Signal for node 1, of which no Peers has told" in speaker.hears(Goodbye, "Notify").reason


_LISTED = ["0" * 16, 0, "here", 1, ["cpu"]]


@pytest.mark.parametrize(
    "fields", [[], ["x", 0, False, "", [], b""], ["x", 1, False, "", [3], b""],
               ["x", 1, True, "", [_LISTED[:4]], b""], ["x", 1, True, "", [[None, *_LISTED[1:]]], b""],
               ["x", 1, True, "", [[*_LISTED[:4], [3]]], b""]],
)  # fmt: skip
def test_a_publication_that_is_none_ends_the_session_of_who_publishes(
    speaker: Speaker, fields: list[Any]
) -> None:
    """Masters of other sessions are told of it, and would take its nonsense for the worker's."""
    speaker.say(encode(Segment(1, 0, [], [PUBLISH, 1, fields, []], [])))
    assert "is no publication" in speaker.hears(Goodbye, "a publication").reason


@pytest.mark.parametrize(
    "question, reason",
    [
        (ListFolder(1, 3), "ListFolder.folder must be str, got int"),  # type: ignore[arg-type]
        (ListFolder(1, None), "ListFolder.folder must be str, got NoneType"),  # type: ignore[arg-type]
        (ListFolder([], "a"), "ListFolder.request must be int, got list"),  # type: ignore[arg-type]
        (ReadIndex(1, "a", b"x"), "ReadIndex.index must be str, got bytes"),  # type: ignore[arg-type]
        (SweepSaves(1, "a", "b", [3]), "SweepSaves of files called [3]"),  # type: ignore[list-item]
        (RemoveFiles(1, "a", "b"), "RemoveFiles.files must be list, got str"),  # type: ignore[arg-type]
        (RemoveFiles(1, "a", [["b"]]), "RemoveFiles of files called [['b']]"),  # type: ignore[list-item]
        (CommitSave(1, "a", "b", "c", {}), "CommitSave.weights must be str, got dict"),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_folders_of_checkpoints_that_are_none_end_the_session_with_a_reason(
    speaker: Speaker, question: Any, reason: str
) -> None:
    speaker.say(encode(question))
    assert reason in speaker.hears(Goodbye, "a question").reason


def test_a_question_with_fields_too_few_or_too_many_ends_the_session(speaker: Speaker) -> None:
    speaker.say(msgpack.packb([MESSAGES.index(ReadIndex), 1, "a"]))
    assert "ReadIndex has 3 fields, got 2" in speaker.hears(Goodbye, "a question").reason


@pytest.mark.parametrize("received", [-1, 1, 1 << 62])
def test_an_acknowledgement_that_cannot_be_ends_the_session_with_a_reason(
    speaker: Speaker, received: int
) -> None:
    speaker.say(encode(Ack(received)))
    assert "messages acknowledged, of 0" in speaker.hears(Goodbye, "Ack").reason


GOOD: dict[str, Any] = {
    "ListPublished": ["a", [["", "a", "x", 1, True, "Linear", [["a", 0, "here", 1, ["cpu"]]], 8]]],
    "ListVersions": ["a", [1, 2]],
    "FindPublished": ["a", [[1, b"", [[1, 2, [[2], [1], 0, "float32", 0]], [1, 2, None]]]]],
    "DropOlder": ["a", True],
    "DropPublished": ["a", False],
    "published": [[1, 2]],
    "ListFolder": [[["distruntime.json", "", 1, 1, "0" * 12, [["a", 3]]]], {"a": 3}],
    "ReadIndex": "{}",
    "CommitSave": None,
    "SweepSaves": None,
    "RemoveFiles": None,
    "AskMemory": [3, 4, [5, [6, 0]]],
    "AskStatus": [1, None, 0.5],
    "AskTurns": [["a", 1, 0.5]],
    "AskWorker": [
        *[
            "a",
            1,
            "tcp://a:1",
            "0",
            "2",
            "3",
            1.0,
            False,
            0.5,
            [["cpu", "a cpu", 1, 1, "", 0, 0, "", 0, []]],
            [None],
        ],
        [["a", "here", 1, True, None, 1.0, 3, 4, "aten::mm", 0.5]],
    ],
    "AskActivity": [
        0.05,
        [
            [
                *["a", 0, {"cpu": 4}],
                [["stream 0", "cg.", "aten::mm", 0.5, "a.py:1", ["all_reduce", "1", [0, 1], 0.5, "a.py:1"]]],
                *["a.py:1", ""],
            ]
        ],
    ],
    "AskStacks": "thread",
    "StopWorker": "pid 1 on here",
    "AskPassed": True,
    "AskChannel": ["", {}, [3, 11]],
    "AskClock": [5, 7],
    "StartTrace": None,
    "StopTrace": [[["aten::mm", False]], [["stream 0", "stream", 1]], 2, 0, 80, ""],
    "TakeTrace": b"rows",
    "ListenForPeers": "tcp://127.0.0.1:1",
}


def test_every_question_has_a_good_answer_here() -> None:
    assert {cls.__name__ for cls in MESSAGES if issubclass(cls, Question)} <= set(GOOD)


@pytest.mark.parametrize("form", GOOD)
def test_what_is_answered_is_checked_where_it_is_taken(form: str) -> None:
    """`dr.names()` and `dr.load()` unpacked what a worker had answered, and raised a `ValueError` of
    Python's.
    """
    assert fits(form, GOOD[form])
    for bad in ([3], ["a"], ["a", ["b"]], ["a", [[]]], ["a", None], 3, [[], {"a": ""}], [[["a"]], {}]):
        assert not fits(form, bad)


@pytest.mark.parametrize(
    "form, bad",
    [
        ("ListVersions", ["a", [0]]),
        ("ListVersions", ["a", [1 << 53]]),
        ("FindPublished", ["a", [[0, b"", []]]]),
        ("FindPublished", ["a", [[1, b"", [[1, 2, [[2], [1], 0, "float99", 0]]]]]]),
        ("AskChannel", ["", {}, [3]]),
        ("AskMemory", [3, 4, [[]]]),
        ("AskMemory", [True, 4, []]),
        ("AskPassed", 1),
        # The answer to a question that was not sent.
        ("", None),
    ],
)
def test_an_answer_that_cannot_be_is_refused(form: str, bad: Any) -> None:
    assert not fits(form, bad)


def test_an_answer_has_the_type_that_its_question_names() -> None:
    held = require("AskMemory", [3, 4, []], None, None)
    assert isinstance(held, MemoryHeld) and held.values == 3


@pytest.mark.parametrize("addresses", [[], [None, ""], [["a"]]])
def test_peers_that_are_none(speaker: Speaker, addresses: list[Any]) -> None:
    speaker.say(encode(ListenForPeers(1, "")))
    speaker.hears(Reply, "listen", 1)
    speaker.say(encode(Peers(0, b"secret", addresses)))
    assert "Peers makes no sense" in speaker.hears(Goodbye, "Peers").reason


@pytest.mark.parametrize(
    "address", ["", "float99", "tcp://", "tcp://no.such.host.at.all:1", "ipc://" + "x" * 200]
)
def test_a_peer_at_an_address_that_is_none_costs_nothing_but_its_signal(
    speaker: Speaker, address: str
) -> None:
    """A worker that lies about where it listens; the master passes that on."""
    speaker.say(encode(ListenForPeers(1, "")))
    speaker.hears(Reply, "listen", 1)
    speaker.say(encode(Peers(0, b"secret", ["", address])))
    speaker.say(encode(Notify(0, 0, 1, 1)))
    speaker.say(encode(AskStatus(2)))
    speaker.hears(Reply, "status", 2)


def test_the_file_of_seeds_is_small_and_whole() -> None:
    assert fuzz_seeds.FILE.stat().st_size < 400_000
    for name, by, rows in msgpack.unpackb(fuzz_seeds.FILE.read_bytes()):
        assert by in ("master", "worker", "peer") and rows, name
