"""What a worker does where a device fails: torch and the device are played, or there is none."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distruntime.errors import ProtocolError
from distruntime.wire.codec import OPERAND, encode, failure_from
from distruntime.wire.messages import (
    FIRST_TEMPLATE,
    HOST,
    MARK,
    AskPassed,
    Done,
    Failed,
    Fetch,
    OpenStream,
    Segment,
    Signal,
    Welcome,
)
from distruntime_worker.log.waits import DeviceWaits
from distruntime_worker.machine import accelerator, hardware, lost
from distruntime_worker.machine.devices import Devices
from distruntime_worker.session.config import WorkerConfig
from distruntime_worker.session.daemon import Daemon
from distruntime_worker.session.executor import Executor
from distruntime_worker.session.session import Session as SocketSession
from distruntime_worker.session.sessions import Sessions
from distruntime_worker.values import staging, streams
from distruntime_worker.values.objects import Poisoned
from distruntime_worker.values.staging import Staging
from distruntime_worker.values.streams import HostCopy, Stream, Work
from greeting_samples import HELLO

ADD = FIRST_TEMPLATE
DEVICE = torch.device("xpu:0")
# Without a session, these are told of a device that is lost.
AT_START = [watcher for watcher in lost._watchers if watcher is staging._renew]


class Session:
    """An executor without a socket."""

    def __init__(self) -> None:
        self.done: list[Done] = []
        self.failed: list[tuple[int, str]] = []
        self.executor = Executor(Devices(simulate_cuda=2), self._send, lambda *_: None)
        self.executor.learn([[ADD, "aten::add.Tensor", [OPERAND, OPERAND], {}, 1]])
        self.slots = self.executor.slots
        self._position = 0

    def _send(self, message: Any, payload: Any = None, copy: bool = True) -> None:
        self.done += [message] if isinstance(message, Done) else []
        if isinstance(message, Failed):
            self.failed.append((message.request, failure_from(message.failure).text))

    def issue(self, *words: Any, stream: int = 0) -> list[Any]:
        """Run words on a stream; return what failed."""
        work = Work(Segment(1, self._position, [], list(words), []), [], 1)
        self._position += len(words)
        self.executor.works.append(work)
        state = self.executor.state
        with torch.no_grad():
            self.executor.run_stretch(state.streams[stream], work, 0, len(words))
        return self.done[-1].failures


def test_a_copy_to_the_host_of_what_is_not_there_is_an_error_of_that_value() -> None:
    session = Session()
    (failure,) = session.issue(HOST, 77, 2, [])
    assert failure[3] == "the value to be copied is not here"
    assert isinstance(session.slots[2], Poisoned)


def test_a_mark_is_a_word() -> None:
    session = Session()
    assert session.issue(MARK, MARK) == []


def test_a_stream_that_the_device_refuses_poisons_what_is_issued_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(device: torch.device, priority: int) -> None:
        if priority:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr(accelerator, "stream", full)
    session = Session()
    session.slots[1] = torch.ones(3)
    session.executor.open(OpenStream(1, "cuda:0", -1, -1))
    (failure,) = session.issue(ADD, 1, 1, 2, MARK, stream=1)
    assert failure[3] == "CUDA error: all CUDA-capable devices are busy or unavailable"
    assert isinstance(session.slots[2], Poisoned)
    assert session.issue(ADD, 1, 1, 3) == []
    with pytest.raises(ProtocolError, match="no device cuda:9"):
        session.executor.open(OpenStream(2, "cuda:9", 0, -1))


def test_an_error_of_a_backend_is_an_answer_and_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no class of its own, as those of some backends have."""

    session = Session()
    session.executor.state.devices.asynchronous = [DEVICE]
    stream = SimpleNamespace(device=DEVICE, query=failing)
    monkeypatch.setattr(accelerator, "default_streams", lambda: [stream])
    monkeypatch.setattr(accelerator, "moment", failing)
    monkeypatch.setattr(accelerator, "in_use", list)
    for form in ("done", "passed"):
        session.executor.fetch(Fetch(5, 0, [0, 0], form, {}))
        assert session.failed.pop() == (5, "the backend is out of events")
    with pytest.raises(RuntimeError, match="out of events"):
        session.executor.passed([0, 0])


def test_an_error_of_a_backend_ends_one_session_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    sent: list[Any] = []
    monkeypatch.setattr(Sessions, "greet", lambda self, peer, message: sent.append(message))
    daemon = Daemon(WorkerConfig(listen=f"ipc://{tmp_path}/w"))
    monkeypatch.setattr(SocketSession, "send", lambda self, message, *rest: sent.append(message))
    try:
        for peer in (b"one", b"two"):
            daemon._handle(peer, [encode(replace(HELLO, session=peer.decode()))])
            assert isinstance(sent.pop(), Welcome)
        for message, done in ((AskPassed(3, [0, 0]), False), (Signal(1, ""), True)):
            name = "signal" if done else "passed"
            monkeypatch.setattr(daemon._by_peer[b"one"].executor, name, failing)
            daemon._handle(b"one", [encode(message)])
            assert sorted(daemon._by_name) == (["two"] if done else ["one", "two"])
        failed, goodbye = sent
        assert failed.failure[3] == goodbye.reason == "the backend is out of events"
    finally:
        for session in list(daemon._by_name.values()):
            session.close()
        daemon.close()


def failing(*_: object) -> None:
    raise RuntimeError("the backend is out of events")


class PlayedStream:
    """A stream of `DEVICE`, whose calls all fail once `said` says something."""

    def __init__(self) -> None:
        self.said, self.device = "", DEVICE

    def query(self) -> bool:
        if self.said:
            raise torch.AcceleratorError(f"{self.said}\nand what torch advises")
        return True

    def record_event(self) -> None:
        self.query()

    def wait_event(self, event: None) -> None:
        self.query()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedStream:
    stream = PlayedStream()
    monkeypatch.setattr(accelerator, "_in_use", {DEVICE: stream})
    monkeypatch.setattr(accelerator, "lost", {})
    monkeypatch.setattr(lost, "_watchers", [])
    monkeypatch.setattr(lost.gc, "freeze", lambda: None)
    monkeypatch.setattr(lost, "keep_for_ever", lambda value: None)
    return stream


def test_an_error_of_an_operator_is_not_the_devices(played: PlayedStream) -> None:
    error = RuntimeError("shapes do not fit")
    assert lost.look(error, "aten::add") is error and not accelerator.lost
    with pytest.raises(RuntimeError, match="shapes"), lost.tolerated("aten::add"):
        raise error


def test_who_calls_a_lost_device_first_names_itself_and_all_hear_one_text(played: PlayedStream) -> None:
    one, other = Session(), Session()
    played.said = "device-side assert triggered"
    # A library of the device has its own error.
    told = lost.look(RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), "aten::mm")
    assert isinstance(told, torch.AcceleratorError) and told.args[0] == accelerator.lost[DEVICE]
    assert str(told).startswith(
        "xpu:0 is lost: device-side assert triggered. aten::mm was the first to notice, "
    )
    assert "UR_L0_SERIALIZE=2 in its worker's environment" in str(told)
    again = torch.AcceleratorError(f"{played.said}\nand what torch advises")
    assert str(lost.look(again, "aten::add")) == str(told)
    assert not accelerator.in_use()
    with pytest.raises(torch.AcceleratorError, match="xpu:0 is lost"):
        accelerator.default_stream(DEVICE)
    with pytest.raises(torch.AcceleratorError, match="xpu:0 is lost"):
        lost.require([torch.device("cpu"), DEVICE])
    for session in (one, other):
        renewed: list[int] = []
        session.executor.chain.lost_devices._switched = lambda made=renewed: made.append(1)
        for _ in range(2):
            session.executor.chain.lost_devices.look()
        assert renewed == [1]
        session.slots[1] = torch.ones(2)
        assert session.issue(ADD, 1, 1, 2) == []


def test_an_error_of_a_device_that_is_well_keeps_its_text_beside_a_lost_one(played: PlayedStream) -> None:
    played.said = "device-side assert triggered"
    with lost.tolerated("an event"):
        played.query()
    assert list(accelerator.lost) == [DEVICE]
    error = torch.AcceleratorError("CUDA error: invalid configuration argument")
    assert lost.look(error, "aten::mm") is error
    with pytest.raises(torch.AcceleratorError, match="invalid configuration"), lost.tolerated("an event"):
        raise error


def test_a_device_that_opens_holds_up_none_that_is_open(
    played: PlayedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on, opened = threading.Event(), threading.Event(), torch.device("xpu:1")

    def slow(device: torch.device) -> PlayedStream:
        opening.set()
        assert go_on.wait(60)
        return PlayedStream()

    monkeypatch.setattr(accelerator, "_default_stream", slow)
    beginning = [threading.Thread(target=accelerator.begin, args=[opened]) for _ in range(2)]
    for thread in beginning:
        thread.start()
    assert opening.wait(60)
    waiting = threading.Thread(target=accelerator.wait_on_defaults, args=[[None]])
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive() and accelerator.in_use() == [DEVICE]
    opening.clear()
    go_on.set()
    for thread in beginning:
        thread.join()
    # The second one has found it open.
    assert accelerator.in_use() == [DEVICE, opened] and not opening.is_set()


def test_a_device_that_follows_a_lost_one_begins_all_the_same(
    played: PlayedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = torch.device("xpu:1")
    monkeypatch.setattr(accelerator, "_default_stream", lambda device: PlayedStream())
    devices = Devices()
    devices.names.append("xpu:1")
    played.said = "device-side assert triggered"
    assert devices.real(other) == other
    assert list(accelerator.lost) == [DEVICE] and accelerator.in_use() == [other]


def test_the_buffers_are_others_after_a_loss_that_no_session_hears_of(
    played: PlayedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_ours", list(staging._ours))
    monkeypatch.setattr(lost, "_watchers", AT_START)
    old, played.said = [staging.uploads(), staging.downloads()], "device-side assert triggered"
    with lost.tolerated("giving memory back"):
        played.query()
    assert staging.uploads() is not old[0] and staging.downloads() is not old[1]


def test_marks_are_of_a_device_where_a_stream_is_one_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = torch.device("xpu:0"), torch.device("xpu:1")
    played = [SimpleNamespace(device=device) for device in (one, two)]
    monkeypatch.setattr(accelerator, "default_streams", lambda: played)
    monkeypatch.setattr(accelerator, "stream", lambda device, _: played[0] if device == one else None)
    monkeypatch.setattr(accelerator, "moment", lambda stream: SimpleNamespace(stream=stream))
    default, other = Stream(0, torch.device("cpu")), Stream(1, one)
    for stream in (default, other):
        stream.mark(10)
        for position in (5, 15):
            events = [stream.events(position, device) for device in (None, one, two)]
            found = [[event.stream.device for event in of_device] for of_device in events]
            # An operation of a group runs on one stream, and writes on two devices.
            assert found == ([[one, two], [one], [two]] if stream is default else [[one]] * 3)


@pytest.mark.parametrize("dies", [False, True])
def test_the_buffer_of_a_copy_that_fails_is_kept_or_used_again(
    dies: bool, played: PlayedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    buffers = Staging(1 << 16)
    there = SimpleNamespace(query=lambda: True)

    def refused(stream: object) -> None:
        played.said = "device-side assert triggered" if dies else ""
        raise torch.AcceleratorError("no event")

    monkeypatch.setattr(lost, "keep_for_ever", kept.append)
    monkeypatch.setattr(streams, "downloads", lambda: buffers)
    monkeypatch.setattr(torch, "Event", lambda device: there)
    monkeypatch.setattr(hardware, "has_pinned_memory", lambda device: True)
    monkeypatch.setattr(hardware, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    for name, played_so in {
        "asynchronous": lambda device: True,
        "current_stream": lambda device: None,
        "moment": refused,
    }.items():
        monkeypatch.setattr(accelerator, name, played_so)
    # The values here are the CPU's.
    monkeypatch.setattr(accelerator, "_in_use", {torch.device("cpu"): played})
    with pytest.raises(torch.AcceleratorError, match="is lost" if dies else "no event"):
        try:
            HostCopy(torch.ones(3))
        except torch.AcceleratorError as error:
            raise lost.look(error, "a copy") from None
    gc.collect()
    assert [type(one) for one in kept] == [torch.Tensor] * dies
    assert [len(queue) for queue in buffers._queues.values()] == [1] * (not dies)


class PlayedMoment:
    """An event that happens when it is told to, or fails."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.passed, self.error = threading.Event(), ""

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()
        if self.error:
            raise torch.AcceleratorError(self.error)


def test_each_stream_is_waited_for_by_one_thread_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "Moment", PlayedMoment)
    broken: list[str] = []
    waits, heard = DeviceWaits(broken.append), threading.Semaphore(0)
    told: list[tuple[str, str | None]] = []

    def then(name: str) -> Any:
        def tell(error: BaseException | None) -> None:
            told.append((name, None if error is None else str(error)))
            heard.release()

        return tell

    first, second, other = PlayedMoment("a"), PlayedMoment("a"), PlayedMoment("b")
    before = threading.active_count()
    for k in range(100):
        waits.when_happened([first], then(f"first {k}"))
    waits.when_happened([second, other], then("both"))
    waits.when_happened([other], then("other"))
    assert threading.active_count() <= before + 2 and not told
    other.passed.set()
    heard.acquire()
    assert told == [("other", None)]
    first.passed.set()
    for _ in range(100):
        heard.acquire()
    second.error = "lost"
    second.passed.set()
    heard.acquire()
    assert told[1:] == [*((f"first {k}", None) for k in range(100)), ("both", "lost")]
    # One answer that cannot be given costs no other one, and the session hears why.
    late = PlayedMoment("a")

    def nobody(error: BaseException | None) -> None:
        raise ProtocolError("Signal for node 7, before the workers were told of each other")

    waits.when_happened([late], lambda error: [][0])
    waits.when_happened([late], nobody)
    waits.when_happened([late], then("after it"))
    late.passed.set()
    assert heard.acquire(timeout=60) and told[-1] == ("after it", None)
    assert broken == [
        "a defect of the worker: IndexError('list index out of range')",
        "Signal for node 7, before the workers were told of each other",
    ]
    # What has happened is told on the spot.
    waits.when_happened([other], then("again"))
    assert told[-1] == ("again", None)
    waits.close()


def test_copies_to_the_host_share_a_bounded_number_of_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def pinned(shape: tuple[int], dtype: torch.dtype) -> torch.Tensor:
        made.append(shape[0])
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(hardware, "pinned", pinned)
    monkeypatch.setattr(hardware, "empty_pinned", lambda: None)
    there = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
    staging = Staging(1 << 16)
    one, two = staging.take(5000), staging.take(40_000)
    assert one is not None and one.numel() == 8192 and two is None
    staging.give(there, one)  # type: ignore[arg-type]
    assert staging.take(8000) is one
    staging.give(there, one)  # type: ignore[arg-type]
    # There is room for it once the other one is gone.
    assert staging.take(65_000) is not None and made == [8192, 65_536] and staging.pinned == 65_536


def test_a_buffer_that_is_waited_for_holds_up_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(hardware, "empty_pinned", lambda: None)
    buffers, waited = Staging(1 << 13), threading.Event()
    first = buffers.take(4096)
    assert first is not None
    for wait in (buffers.empty, lambda: buffers._take(8192)):
        passed = threading.Event()

        def synchronize(passed: threading.Event = passed) -> None:
            waited.set()
            passed.wait()

        there: Any = SimpleNamespace(query=passed.is_set, synchronize=synchronize)
        buffers.give(there, first)
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert waited.wait(60)
        waited.clear()
        # What another thread asks for meanwhile is there.
        asked: list[object] = []
        asking = threading.Thread(target=lambda found=asked: found.append(buffers.take(4096)))
        asking.start()
        asking.join(60)
        passed.set()
        waiting.join()
        (second,) = asked
        assert isinstance(second, torch.Tensor)
        first = second
    assert buffers.pinned == 8192 + 4096


@pytest.mark.parametrize(
    ("name", "major", "doubles", "lacks"),
    [
        ("cuda:0", 7, True, ["bfloat16"]),
        ("cuda:0", 9, True, []),
        ("xpu:0", 0, False, ["float64"]),
        ("mps:0", 0, False, ["float64"]),
    ],
)
def test_a_device_says_what_it_lacks(name: str, major: int, doubles: bool, lacks: list[str]) -> None:
    found = hardware.Properties("Card", 1, major, 0, 1, "", doubles)
    assert hardware.lacks(torch.device(name), found) == lacks


def test_an_error_says_which_device_lacks_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hardware.Properties("Card", 1, 0, 0, 1, "", False)
    monkeypatch.setattr(hardware, "properties", lambda device: found)
    devices = [torch.device("cpu"), DEVICE]
    said = "Required aspect fp64 is not supported on the device"
    assert hardware.lacking(devices, said) == "xpu:0 does not compute in float64"
    assert hardware.lacking(devices, "shapes do not fit") == hardware.lacking(devices[:1], said) == ""
