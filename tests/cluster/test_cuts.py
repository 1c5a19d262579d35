"""Sessions survive their connections: each instruction runs once, and what waits gets its answer."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from cut_training import Trouble, counted, same, train, whole_words
from distruntime.cluster import connection
from distruntime.session.session import active_session
from distruntime.wire.channel import Channel
from distruntime.wire.codec import decode, encode
from distruntime.wire.keys import KeyPair
from distruntime.wire.messages import Goodbye, Hello, Join, Refused, Welcome
from fewer import fewer
from greeting_samples import hello
from network import Network
from processes import (
    PATH,
    ListeningWorker,
    StruckWhileWaiting,
    free_port,
    opened,
    resident,
    steady,
    stopped,
    until,
    window_is_full,
    within,
)
from tests.hostile.test_security import bytes_of

SILENCE = 0.5  # seconds after which a worker is called unreachable here
STEPS = 30
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ListeningWorker]:
    folder = tmp_path_factory.mktemp("cuts")
    KeyPair.generate().save(folder / "key")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTRUNTIME_UNREACHABLE", str(SILENCE))
        started = ListeningWorker(folder, "--listen", "tcp://127.0.0.1:0", "--key", str(folder / "key"))
    yield started
    started.stop()
    assert "Traceback" not in started.text()


@pytest.fixture
def network(daemon: ListeningWorker) -> Iterator[Network]:
    with Network(daemon.address) as made:
        yield made


@pytest.fixture
def attach(daemon: ListeningWorker, network: Network, fresh_session: Start) -> Start:
    """Opens a session with the daemon, by way of the network."""

    def begin(**options: Any) -> Any:
        session = fresh_session(
            **{
                "workers": [network.address],
                "key": daemon.log.parent / "key",
                "unreachable": SILENCE,
                "grace": 120,
                **options,
            }
        )
        whole_words()
        return session

    return begin


@pytest.fixture(scope="module")
def undisturbed(daemon: ListeningWorker) -> list[torch.Tensor]:
    dr.shutdown()
    dr.init_master_worker(workers=[daemon.address], key=daemon.log.parent / "key", timeout=60)
    whole_words()
    result = train(STEPS)
    dr.shutdown()
    return result


def test_a_worker_that_answers_later_than_an_attempt_takes_is_found_again(
    attach: Start, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ATTEMPT", 0.7)
    attach(unreachable=20)
    x = torch.ones(3, device="remote")
    assert x.sum().item() == 3
    # A handshake and a greeting take eight ways, 1.2 s: longer than an attempt. The handshake's six are well
    # within its 2 s.
    network.slow(0.15)
    network.tear()
    assert dr.fetch(x.sum(), timeout=60).item() == 3


def unreachable(node: int = 0) -> None:
    until(lambda: active_session().nodes[node].state == "unreachable")


@pytest.mark.parametrize("seed", fewer(range(20), 7, "another seed, 2 s"))
def test_a_training_through_a_bad_network_ends_as_an_undisturbed_one(
    attach: Start, network: Network, undisturbed: list[torch.Tensor], seed: int
) -> None:
    attach()
    with Trouble(network, seed, STEPS) as trouble:
        same(train(STEPS, trouble), undisturbed)
    counted()


@pytest.mark.parametrize("length", fewer([1.0, 6.0], 2, "a longer cut, 3 s"))
def test_a_training_goes_on_after_a_cut(
    attach: Start,
    network: Network,
    undisturbed: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    length: float,
) -> None:
    monkeypatch.setattr(
        "distruntime.cluster.connection.ATTEMPT", 1.0
    )  # so that several attempts are made to reach the worker
    attach()
    ends: list[threading.Timer] = []

    def disturb(step: int) -> None:
        if step == 10:
            network.cut()
            ends.append(threading.Timer(length, network.mend))
            ends[0].start()

    same(train(STEPS, disturb), undisturbed)
    ends[0].join()
    counted()


@pytest.mark.slow(reason="starts a daemon that imports torch, 4 s")
def test_a_worker_that_is_reached_by_another_way_is_the_same(
    attach: Start, network: Network, undisturbed: list[torch.Tensor]
) -> None:
    attach()
    for _ in range(2):
        with ExitStack() as ways:

            def disturb(step: int, ways: ExitStack = ways) -> None:
                if step % 10 == 5:
                    ways.close()  # the connections of the last one end with it
                    network.retarget(ways.enter_context(Network(network.target)).address)
                    network.tear()

            same(train(STEPS, disturb), undisturbed)
            counted()
            network.retarget(network.target)


def test_issuing_goes_on_until_the_window_is_full(
    attach: Start, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach()
    x = torch.zeros((), device="remote")
    x += 1
    assert x.item() == 1
    monkeypatch.setattr(sys.modules["distruntime.log.log"], "WINDOW", 3000)
    with network.broken():
        unreachable()
        issued = [0]

        def issue() -> None:
            for _ in range(5000):
                x.add_(1)
                issued[0] += 1

        thread = threading.Thread(target=issue)
        thread.start()
        until(window_is_full)
        assert 100 < int(str(steady(lambda: issued[0], 0.5))) < 5000
        (info,) = dr.nodes()
        assert info.state == "unreachable" and re.match(r"unreachable since \d\d:\d\d:\d\d: ", info.why)
        assert "unreachable" in repr(dr.nodes())
        assert within(3.0, lambda: repr(x))
        pending = dr.fetch_async(x)
        assert not pending.done() and thread.is_alive()
    thread.join(60)
    assert x.item() == 5001
    assert 101 <= pending.result(60).item() <= 5001
    counted()


def test_ctrl_c_leaves_a_read_that_waits_for_the_network(attach: Start, network: Network) -> None:
    attach()
    x = torch.ones(5, device="remote")
    with network.broken():
        unreachable()
        for wait in (lambda: x.sum().item(), lambda: x.cpu(), dr.synchronize, lambda: dr.fetch([x, x + 1])):
            with pytest.raises(KeyboardInterrupt), StruckWhileWaiting():
                wait()
        x += 1
    assert x.sum().item() == 10
    counted()


def test_after_the_grace_time_a_worker_is_lost(attach: Start, network: Network) -> None:
    session = attach(grace=2.0)
    x = torch.ones(5, device="remote")
    dr.synchronize()
    lost = r"was unreachable for \d s, since \d\d:\d\d:\d\d \("
    with network.broken():
        unreachable()
        old, pending, y = session.nodes[0], dr.fetch_async(x), x + 1
        with pytest.raises(dr.errors.NodeFailed, match=lost):
            y.sum().item()
        with pytest.raises(dr.errors.NodeFailed, match=lost):
            pending.result(20)
        with pytest.raises(dr.errors.NodeFailed, match=lost):
            x.add_(1)
        with pytest.raises(dr.errors.NodeFailed, match=lost):
            dr.synchronize(0)
        assert dr.nodes()[0].state == "lost"
    until(lambda: session.nodes[0] is not old)  # it is there again, and begins anew
    assert torch.ones(3, device="remote").sum().item() == 3
    with pytest.raises(dr.errors.NodeFailed, match=lost):
        x.cpu()


def test_an_issuer_that_waits_for_room_is_told_of_the_loss(
    attach: Start, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(grace=2.0)
    x = torch.zeros((), device="remote")
    x += 1
    monkeypatch.setattr(sys.modules["distruntime.log.log"], "WINDOW", 3000)
    with network.broken(), pytest.raises(dr.errors.NodeFailed, match="was unreachable for"):
        for _ in range(100_000):
            x.add_(1)


def test_memory_of_an_upload_that_was_cut_may_be_written_again(attach: Start, network: Network) -> None:
    attach()
    for k in range(3):
        data = torch.arange(750_000.0) + k
        network.slow(0.02 * k)  # so that it is cut before it has begun, or in its midst
        cutter = threading.Timer(0.01 * k, network.cut)
        cutter.start()
        there = data.to("remote")  # returns although nothing arrives
        data.fill_(-1)
        cutter.join()
        network.slow(0.0)
        network.mend()
        assert torch.equal(there.cpu(), torch.arange(750_000.0) + k)
    counted()


@pytest.mark.parametrize("size", [1 << 18, 750_000, 1 << 20, (1 << 20) + 9, 4_200_000 // 4, 2_000_000])
def test_large_values_that_are_there_already_are_read_whole(
    attach: Start, network: Network, size: int
) -> None:
    """The worker's reader answers, and must hear that they have arrived.

    What comes meanwhile must not be lost, nor run too early.
    """
    attach()
    x = torch.arange(float(size), device="remote")
    for k in range(4):
        dr.synchronize()
        pending = dr.fetch_async(x)
        x += 1
        if k == 2:
            network.tear()
        assert torch.equal(pending.result(60), torch.arange(float(size)) + k)
    counted()


def test_events_between_nodes_outlast_the_cut_of_one(
    daemon: ListeningWorker, network: Network, fresh_session: Start, tmp_path: Path
) -> None:
    key = daemon.log.parent / "key"
    other = ListeningWorker(
        tmp_path, "--listen", "tcp://127.0.0.1:0", "--key", str(key), DISTRUNTIME_UNREACHABLE=str(SILENCE)
    )
    fresh_session(workers=[network.address, other.address], key=key, unreachable=SILENCE, grace=120)
    streams = [dr.Stream(0, "cpu"), dr.Stream(1, "cpu")]
    counts = [torch.zeros((), device=stream.device) for stream in streams]
    dr.synchronize()
    for _ in range(2):
        with network.broken():
            unreachable()
            for here, there in ((0, 1), (1, 0)):
                with dr.stream(streams[here]):
                    counts[here].add_(1)
                    counts[here].record_stream(streams[here])
                    event = streams[here].record_event()
                event.wait(streams[there])
                with dr.stream(streams[there]):
                    counts[there].mul_(2)
    assert [count.item() for count in counts] == [6.0, 3.0]
    counted(0)
    counted(1)
    dr.shutdown()
    other.stop()


def test_a_worker_that_has_given_the_session_up_says_so(
    attach: Start, network: Network, daemon: ListeningWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DISTRUNTIME_STATE", str(tmp_path / "state"))
    session = attach(session="kept-a-second", keep=1.0)
    x = torch.ones(5, device="remote")
    dr.synchronize()
    network.cut()
    network.tear()  # else nobody would know of the cut there
    until(lambda: "its master was away for 1 s" in daemon.text())
    old = session.nodes[0]
    network.mend()
    with pytest.raises(
        dr.errors.NodeFailed, match=r"does not have this session any more: .* no session 'kept-a-second'"
    ):
        x.cpu()
    until(lambda: session.nodes[0] is not old)
    assert torch.ones(3, device="remote").sum().item() == 3
    dr.shutdown()


# -- connections that overtake each other


def stranger(address: str, key: Path, message: Any) -> Channel:
    """Send a message on a connection of its own."""
    channel = Channel(keys=KeyPair.load(key))
    channel.connect(address, b"there")
    until(lambda: any(event.kind == "connected" for event in channel.events()))
    channel.send(b"there", [encode(message)])
    return channel


def moved(node: Any, peer: bytes | None) -> None:
    until(lambda: node.link.peer not in (None, peer))


def answer(channel: Channel) -> Any:
    found: list[Any] = []
    until(lambda: found.extend(channel.receive(0.05)) or found)
    return decode(bytes_of(found[0][1][0]))


def test_an_old_greeting_that_comes_late_costs_nothing(attach: Start, daemon: ListeningWorker) -> None:
    """The kernel may deliver the bytes of a silent connection, which was given up, after the next one's."""
    session = attach()
    x = torch.ones(5, device="remote")
    assert x.sum().item() == 5
    for _ in range(3):
        until(lambda: session.nodes[0].link.kept or x.add_(0) is x)
        node = session.nodes[0]
        dr.synchronize()
        peer = node.link.peer
        channel = stranger(
            daemon.address, daemon.log.parent / "key", session.connector.hello("again", node.link.received)
        )
        moved(node, peer)
        assert x.sum().item() == 5
        channel.close()
        assert x.sum().item() == 5
    counted()


def test_a_master_may_begin_anew_what_it_has_given_up(daemon: ListeningWorker) -> None:
    key, greeting = daemon.log.parent / "key", hello(session="anew", token=b"mine")
    channel = stranger(daemon.address, key, greeting)
    assert isinstance(answer(channel), Welcome)
    channel.close()
    for token, kind in ((b"other", Refused), (b"mine", Welcome)):
        channel = stranger(daemon.address, key, replace(greeting, token=token))
        assert isinstance(answer(channel), kind)
        channel.send(b"there", [encode(Goodbye("done"))])
        channel.close()


# -- silence that is none


def quiet_after(act: Callable[[], object], session: Any) -> bool:
    """Whether nobody has lost sight of anybody while something was done."""
    node = session.nodes[0]
    peer, absent = node.link.peer, []
    watcher = threading.Timer(
        0.0,
        lambda: absent.extend(
            1 for _ in iter(lambda: stop.wait(0.02), True) if node.presence.absence is not None
        ),
    )
    stop = threading.Event()
    watcher.start()
    act()
    stop.set()
    watcher.join()
    return not absent and node.link.peer == peer


@pytest.fixture
def patient(daemon: ListeningWorker, fresh_session: Start, tmp_path: Path) -> Iterator[Any]:
    """A session in which a second of silence is too much."""
    worker = ListeningWorker(
        tmp_path, "--listen", "tcp://127.0.0.1:0", "--insecure", DISTRUNTIME_UNREACHABLE="1.0"
    )
    yield fresh_session(workers=[worker.address], unreachable=1.0, insecure=True)
    dr.shutdown()
    worker.stop()


@pytest.mark.slow(reason="a kernel computes for longer than silence is borne: 11 to 15 s in the suite")
def test_a_worker_in_a_long_kernel_is_not_unreachable(patient: Any) -> None:
    x = torch.rand(64, 64, device="remote")
    size = 700

    def kernel() -> float:
        started = time.monotonic()
        torch.linalg.svdvals(torch.rand(size, size, device="remote")).sum().item()
        return time.monotonic() - started

    while (took := kernel()) < 3.5:
        # Its time grows as the cube of the size.
        size = int(size * max(1.1, (4.5 / took) ** (1 / 3)))
    assert any(quiet_after(kernel, patient) for _ in range(3))
    assert x.sum().item() > 0


def test_a_master_whose_threads_stand_still_is_not_unreachable(patient: Any) -> None:
    """As at a debugger's breakpoint: nothing of Python runs."""
    x = torch.ones(5, device="remote")

    def stand() -> None:
        # This call does not let go of the interpreter.
        ctypes.PyDLL(None).usleep(3_500_000)

    assert any(quiet_after(stand, patient) for _ in range(3))
    assert x.sum().item() == 5


def test_a_worker_of_this_machine_that_was_suspended_goes_on(fresh_session: Start) -> None:
    session = fresh_session(world_size=2, unreachable=SILENCE)
    whole_words()
    pids = [info.pid for info in dr.nodes()]
    wanted = train(STEPS, node=1)

    def disturb(step: int) -> None:
        if step in (7, 17):
            with stopped(pids[1]):
                unreachable(1)
                assert torch.ones(3, device="remote").sum().item() == 3  # on node 0

    same(train(STEPS, disturb, node=1), wanted)
    assert [node.welcome.pid for node in session.nodes] == pids
    counted(1)


# -- workers that dial


@pytest.fixture
def dialled(daemon: ListeningWorker, fresh_session: Start, tmp_path: Path) -> Iterator[tuple[Any, Network]]:
    """A session that one worker has joined by dialling this process by way of a network."""
    port, key = free_port(), daemon.log.parent / "key"
    with Network(f"tcp://127.0.0.1:{port}") as between, (tmp_path / "log").open("wb") as output:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(PATH),
            "OMP_NUM_THREADS": "1",
            "DISTRUNTIME_UNREACHABLE": str(SILENCE),
        }
        command = [sys.executable, "-m", "distruntime_worker", "--master", between.address, "--key", str(key)]
        worker = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        options = {
            "listen": f"tcp://127.0.0.1:{port}",
            "world_size": 1,
            "key": key,
            "unreachable": SILENCE,
            "grace": 120,
        }
        session = fresh_session(**options)
        whole_words()
        yield session, between
        dr.shutdown()
        worker.terminate()
        worker.wait(20)
        assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")


@pytest.mark.parametrize("seed", fewer(range(4), 4, "another seed, 5 s"))
def test_a_worker_that_dials_comes_back(
    dialled: tuple[Any, Network], undisturbed: list[torch.Tensor], seed: int
) -> None:
    session, between = dialled
    pid = session.nodes[0].welcome.pid
    with Trouble(between, seed, STEPS) as trouble:
        same(train(STEPS, trouble), undisturbed)
    counted()
    assert session.nodes[0].welcome.pid == pid


def test_an_old_join_that_comes_late_costs_nothing(
    dialled: tuple[Any, Network], daemon: ListeningWorker
) -> None:
    session, _ = dialled
    x = torch.ones(5, device="remote")
    assert x.sum().item() == 5
    for _ in range(3):
        welcome, peer = session.nodes[0].welcome, session.nodes[0].link.peer
        join = Join(None, welcome.pid, welcome.host, welcome.incarnation)
        channel = stranger(session.channel.address, daemon.log.parent / "key", join)
        moved(session.nodes[0], peer)
        assert x.sum().item() == 5
        channel.close()
        assert x.sum().item() == 5
    counted()


@pytest.mark.slow(reason="a worker's place comes free only after its grace: 10.0 s")
def test_a_place_that_comes_free_while_a_session_begins_is_given_to_who_waits(
    fresh_session: Start, tmp_path: Path
) -> None:
    address, answers = f"ipc://{tmp_path}/master", list[Any]()

    def dial() -> None:
        with closing(Channel()) as second:
            with closing(Channel()) as first:
                for channel, incarnation in ((first, b"first"), (second, b"second")):
                    channel.connect(address, b"master")
                    channel.send(b"master", [encode(Join(None, 1, "here", incarnation))])
                    if channel is first:
                        answers.append(answer(channel))
                assert not second.receive(0.3)
            answers.append(answer(second))

    thread = threading.Thread(target=dial)
    thread.start()
    with pytest.raises(dr.errors.ConnectionFailed, match="1 of 1 workers did not dial"):
        fresh_session(listen=address, world_size=1, timeout=10)
    thread.join()
    assert [type(one) for one in answers] == [Hello, Hello]


# -- what is left behind


def test_ended_sessions_leave_nothing_at_a_worker(daemon: ListeningWorker, fresh_session: Start) -> None:
    pid, most = daemon.process.pid, 0
    descriptors = lambda: len(opened(pid))  # noqa: E731
    for k in range(6):
        fresh_session(workers=[daemon.address], key=daemon.log.parent / "key")
        x = torch.ones(25_000_000, device="remote")
        x[:1_000_000].cpu()  # by shared memory, which the worker maps
        del x
        x = torch.zeros(25_000_000, device="remote")
        x.sum().item()
        dr.shutdown()
        if k == 1:
            until(lambda: not any("memfd" in name for name in opened(pid)))
            before, most = descriptors(), resident(pid)
    until(lambda: descriptors() <= before)
    until(lambda: resident(pid) < most + (40 << 20))
