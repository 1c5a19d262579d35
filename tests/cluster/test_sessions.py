"""Sessions that have a name outlive their masters.

Sessions of several masters on one worker do not see each other.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.cluster import named_sessions as registry
from distruntime.cluster.absences import refuses
from distruntime.session.session import active_session
from distruntime.wire.channel import Channel
from distruntime.wire.codec import decode, encode
from distruntime.wire.keys import choose
from distruntime.wire.messages import AskMemory, Goodbye, Reply, Welcome
from forked_masters import start_master
from greeting_samples import HELLO
from network import Network
from processes import PATH, ListeningWorker, until, waits_less

REMOTE = "remote"


pytestmark = pytest.mark.usefixtures("own_state")


def master(code: str, *, status: int = 0) -> str:
    """Run a master in a process of its own; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH)}
    with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
        source = (
            f"import os, signal, torch\nos.dup2(os.open({errors.name!r}, os.O_WRONLY), 2)\n"
            f"import distruntime as dr\n{code}"
        )
        process = start_master(source, environment, output)
        ended = process.wait(110)
        assert process.stdin is not None
        process.stdin.close()
        assert ended == status, Path(errors.name).read_text(encoding="utf-8")
        return Path(output.name).read_text(encoding="utf-8")


KILLED = -signal.SIGKILL


def test_a_named_session_outlives_its_master_and_is_resumed() -> None:
    pids = master(
        """
dr.init_master_worker(session="sae", world_size=2)
x = torch.ones(1000, device="remote")
assert x.sum().item() == 1000
print(*(node.pid for node in dr.nodes()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
        status=KILLED,
    )
    assert registry.names() == ["sae"]
    dr.init_master_worker(session="sae", resume=True)
    assert [node.pid for node in dr.nodes()] == [int(pid) for pid in pids.split()]  # the very workers
    for node in active_session().nodes:  # and what nobody has published is free
        assert active_session().value(active_session().ask(node, AskMemory))[0] == 0
    assert torch.ones(3, device=REMOTE).sum().item() == 3
    dr.shutdown()
    assert registry.names() == []
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.split()))  # its workers end with it


def test_a_master_that_exits_leaves_a_named_session_behind() -> None:
    master("dr.init_master_worker(session='kept', world_size=1)\nprint(torch.ones(2, device='remote').sum())")
    dr.init_master_worker(session="kept", resume=True)
    dr.detach()
    assert not dr.is_initialized()
    dr.init_master_worker(session="kept", resume=True)
    assert torch.ones(2, device=REMOTE).sum().item() == 2


def test_detach_waits_until_what_was_issued_has_arrived() -> None:
    dr.init_master_worker(session="late", world_size=1)
    x = torch.zeros(8, device=REMOTE)
    for _ in range(2000):
        x += 1
    node = active_session().nodes[0]
    dr.detach()
    assert node.link.acknowledged >= node.link.sent - 1 and not node.words
    with pytest.raises(dr.errors.SessionClosed, match="detached"):
        x.sum().item()


def test_a_session_without_a_name_cannot_be_left() -> None:
    dr.init_master_worker(world_size=1)
    with pytest.raises(dr.errors.UsageError, match="has no name"):
        dr.detach()
    assert torch.ones(2, device=REMOTE).sum().item() == 2


def test_resume_of_an_unknown_session_lists_those_that_exist() -> None:
    master("dr.init_master_worker(session='one', world_size=1)")
    with pytest.raises(dr.errors.ConnectionFailed, match="no session 'two' to resume: there are 'one'"):
        dr.init_master_worker(session="two", resume=True)
    with pytest.raises(
        dr.errors.ConnectionFailed,
        match=r"a session 'one' already, with 1 worker.*resume=\"auto\".*force=True",
    ):
        dr.init_master_worker(session="one", world_size=1)


def test_the_environment_names_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUNTIME_SESSION", "ours")
    dr.init_master_worker(world_size=1)
    dr.detach()
    dr.init_master_worker(resume=True)
    assert active_session().name == "ours"


@pytest.mark.parametrize("arguments", [{"resume": True}, {"force": True}, {"keep": 5}])
def test_what_is_about_a_named_session_needs_a_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(dr.errors.ConfigurationError, match="give session="):
        dr.init_master_worker(**arguments)


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "x" * 101, 7, "a b"])
def test_names_that_cannot_be(name: Any) -> None:
    with pytest.raises(dr.errors.ConfigurationError, match="name is made of letters"):
        dr.init_master_worker(session=name)


# -- one daemon, several masters -----------------------------------------------------------------------------


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ListeningWorker]:
    started = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0")
    yield started
    dr.shutdown()
    started.stop()


def test_a_live_session_is_not_taken_over_without_force(daemon: ListeningWorker) -> None:
    dr.init_master_worker(session="mine", workers=[daemon.address])
    x = torch.ones(3, device=REMOTE)
    assert x.sum().item() == 3
    attempt = f"""
for arguments in ({{"resume": True}}, {{}}):
    try:
        dr.init_master_worker(session="mine", workers=["{daemon.address}"], **arguments)
    except dr.errors.ConnectionFailed as error:
        print(error)
"""
    said = master(attempt).splitlines()
    assert len(said) == 2 and all(
        f"in use, by pid {os.getpid()}" in line and "force=True" in line for line in said
    ), said
    assert (x + 1).tolist() == [2, 2, 2]  # the attempts have cost nothing
    master(
        f"dr.init_master_worker(session='mine', workers=['{daemon.address}'], resume=True, "
        "force=True)\ndr.detach()"
    )
    with pytest.raises(dr.errors.NodeFailed, match="taken over"):
        until(lambda: x.sum().item() != 3)
    assert dr.nodes()[0].state == "left"
    for question in (dr.names, lambda: dr.unpublish("y"), lambda: dr.lookup("y")):
        with pytest.raises(dr.errors.NodeFailed, match="taken over"):
            question()


def test_a_daemon_lists_the_sessions_it_has(daemon: ListeningWorker) -> None:
    master(f"dr.init_master_worker(session='first', workers=['{daemon.address}'])")
    with pytest.raises(
        dr.errors.ConnectionFailed, match=r"no session 'second' here; there are 'first' \(without a master\)"
    ):
        dr.init_master_worker(session="second", workers=[daemon.address], resume=True)
    with pytest.raises(
        dr.errors.ConnectionFailed, match=r"a session 'first' already, without a master: resume=\"auto\""
    ):
        dr.init_master_worker(session="first", workers=[daemon.address])
    dr.init_master_worker(session="first", workers=[daemon.address], force=True)
    assert torch.ones(2, device=REMOTE).sum().item() == 2


def test_two_masters_on_one_worker_do_not_see_each_other(daemon: ListeningWorker) -> None:
    """Each draws the numbers that it would draw alone, has its values, and survives the other's death."""
    code = f"""
dr.init_master_worker(workers=["{daemon.address}"])
torch.manual_seed(3)
total = 0.0
for _ in range(200):
    total += torch.randn(7, device="remote").sum().item()
print(repr(total))
"""
    expected = master(code)
    dr.init_master_worker(workers=[daemon.address])
    x = torch.ones(5, device=REMOTE)
    torch.manual_seed(3)
    assert master(code) == expected
    mine = 0.0
    for _ in range(200):
        mine += torch.randn(7, device=REMOTE).sum().item()
    assert repr(mine) == expected.strip()
    master(
        f"dr.init_master_worker(workers=['{daemon.address}'])\nos.kill(os.getpid(), signal.SIGKILL)",
        status=KILLED,
    )
    assert x.sum().item() == 5


def test_a_master_that_dies_without_a_name_leaves_nothing_behind(daemon: ListeningWorker) -> None:
    """Its worker is on its machine and sees it: no memory is kept for nobody."""
    code = (
        f"dr.init_master_worker(workers=['{daemon.address}'])\ntorch.ones(9, device='remote').sum().item()\n"
    )
    master(code + "os.kill(os.getpid(), signal.SIGKILL)", status=KILLED)
    until(lambda: "its master has died" in daemon.text())


def test_a_session_is_kept_for_as_long_as_was_said(daemon: ListeningWorker) -> None:
    master(f"dr.init_master_worker(session='brief', keep=0.3, workers=['{daemon.address}'])")
    until(lambda: "its master was away for" in daemon.text())
    with pytest.raises(dr.errors.ConnectionFailed, match="no session 'brief' here"):
        dr.init_master_worker(session="brief", workers=[daemon.address], resume=True)
    registry.delete("brief")


def test_a_worker_of_a_resumed_session_that_has_died_begins_anew() -> None:
    pids = master(
        "dr.init_master_worker(session='half', world_size=2)\nprint(*(n.pid for n in dr.nodes()), "
        "flush=True)\ndr.detach()"
    ).split()
    os.kill(int(pids[1]), signal.SIGKILL)
    until(
        lambda: (
            not Path(f"/proc/{pids[1]}").exists()
            or "Z" in Path(f"/proc/{pids[1]}/stat").read_text(encoding="utf-8")
        )
    )
    dr.init_master_worker(session="half", resume=True)
    assert dr.nodes()[0].pid == int(pids[0]) and dr.nodes()[1].pid != int(pids[1])
    assert torch.ones(2, device=REMOTE).to(node=1).sum().item() == 2


def test_a_worker_that_is_just_dying_when_its_session_is_resumed_begins_anew_too() -> None:
    pids = master(
        "dr.init_master_worker(session='half', world_size=2)\nprint(*(n.pid for n in dr.nodes()), "
        "flush=True)\ndr.detach()"
    ).split()
    entry = registry.read("half")
    assert entry is not None
    os.kill(int(pids[1]), signal.SIGKILL)
    until(lambda: refuses(entry.workers[1]))
    path = entry.workers[1].removeprefix("ipc://")
    os.unlink(path)
    # Connections are taken, nobody answers, and they are closed: what a process does whose threads end one
    # after the other.
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(path)
        dying.listen()

        def die() -> None:
            end, _ = dying.accept()
            dying.close()
            end.close()

        thread = threading.Thread(target=die)
        thread.start()
        dr.init_master_worker(session="half", resume=True)
        thread.join()
    assert dr.nodes()[0].pid == int(pids[0]) and dr.nodes()[1].pid != int(pids[1])
    assert torch.ones(2, device=REMOTE).to(node=1).sum().item() == 2


def test_a_greeting_that_does_not_arrive_whole_is_said_again(daemon: ListeningWorker) -> None:
    """The worker has the beginning of it, and waits for the rest.

    Its own beats tell the master that the connection lives.
    """
    with Network(daemon.address) as network:
        for options in ({}, {"resume": True}, {"resume": True, "force": True}):
            network.deafen(130)  # the handshake, and the beginning of the greeting
            began = time.monotonic()
            dr.init_master_worker(session="deaf", workers=[network.address], timeout=120, **options)
            assert torch.ones(3, device=REMOTE).sum().item() == 3
            assert time.monotonic() - began < 60
            dr.detach()


def test_a_session_begins_through_a_network_that_resets_connections_for_a_while(
    daemon: ListeningWorker,
) -> None:
    with Network(daemon.address) as network:
        network.refuse()
        mending = threading.Timer(0.5, network.mend)
        mending.start()
        dr.init_master_worker(workers=[network.address])
        mending.join()
        assert torch.ones(3, device=REMOTE).sum().item() == 3
        dr.shutdown()


def test_a_master_that_greets_again_is_not_refused_for_its_own_first_greeting(
    daemon: ListeningWorker,
) -> None:
    """The answer to the first was lost, and its connection lives on, as far as the worker knows."""
    dr.init_master_worker(session="twice", workers=[daemon.address])
    connector = active_session().connector
    with closing(Channel(keys=choose(daemon.address))) as second:
        second.connect(daemon.address, b"again")
        second.send(b"again", [encode(connector.hello("resume"))])
        answers: deque[Any] = deque()
        until(lambda: second.receive(0.1, into=answers) or answers)
        assert isinstance(decode(answers[0][1][0]), Welcome)


def test_the_end_of_a_session_is_heard_when_the_network_is_torn_just_then(daemon: ListeningWorker) -> None:
    with Network(daemon.address) as network:
        for k in range(3):
            dr.init_master_worker(session=f"over-{k}", workers=[network.address])
            assert torch.ones(3, device=REMOTE).sum().item() == 3
            network.tear()
            dr.shutdown()
    until(lambda: daemon.text().count("ended (the master shut the session down)") == 3)


def test_the_end_of_a_session_that_is_not_heard_is_said(
    daemon: ListeningWorker, caplog: pytest.LogCaptureFixture
) -> None:
    with Network(daemon.address) as network:
        dr.init_master_worker(session="silent", workers=[network.address])
        # The end waits for what is in flight: this process's seed.
        dr.synchronize()
        network.cut()
        waits_less(9, dr.shutdown)
        assert (
            "has not heard that the session 'silent' is over, and may keep it until it expires" in caplog.text
        )
        network.mend()
    dr.init_master_worker(session="silent", workers=[daemon.address], force=True)


def test_an_ended_session_leaves_nothing_on_its_worker(daemon: ListeningWorker) -> None:
    """The reader's variables held the last session in which messages had to wait for a large value."""
    dr.init_master_worker(workers=[daemon.address])
    [node] = active_session().nodes
    x = torch.ones(1_000_000).to(REMOTE)  # through shared memory
    node.shared = False
    assert x.sum().item() == 1_000_000 and shared_memory(daemon.process.pid)
    for _ in range(10):
        pending = [dr.fetch_async(x + k) for k in range(4)]
        assert [value.result(60)[0] for value in pending] == [1, 2, 3, 4]
    dr.shutdown()
    until(lambda: not shared_memory(daemon.process.pid), 20)


def shared_memory(pid: int) -> list[str]:
    """Return the masters' memory that a worker has mapped."""
    return [
        line
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
        if "/memfd:distruntime" in line
    ]


JUMPING = """
import itertools, time
_jumps = itertools.cycle([86400.0, -86400.0, 0.0])
_real = time.time
time.time = lambda: _real() + next(_jumps)
"""


def test_clocks_that_jump_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day decides nothing: here it jumps by a day, to and fro, at each look of either side."""
    (tmp_path / "sitecustomize.py").write_text(JUMPING, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *PATH])
    jumps, real = itertools.cycle([86400.0, -86400.0, 0.0]), time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0", PYTHONPATH=path)
    try:
        with Network(worker.address) as network:
            dr.init_master_worker(
                session="jumps", keep=30, workers=[network.address], unreachable=1, grace=20
            )
            x = torch.arange(5.0, device=REMOTE)
            for trouble in (network.tear, network.cut):
                trouble()
                pending = dr.fetch_async(x.add_(1))
                if trouble == network.cut:
                    until(lambda: dr.nodes()[0].state == "unreachable")
                    network.mend()
                assert pending.result(20).tolist() == x.tolist()
            dr.publish("x", x)
            dr.detach()
            dr.init_master_worker(session="jumps", resume=True)
            assert dr.lookup("x").tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
            dr.shutdown()
        assert worker.text().count("goes on") >= 2 and "was away" not in worker.text()
    finally:
        worker.stop()


@pytest.mark.parametrize(
    ("nonsense", "said"),
    [
        ({"session": "a\nb"}, "a session is not called 'a\\nb'"),
        ({"session": ""}, "a session is not called ''"),
        ({"host": "x" * 400}, "nor a machine 'xxx"),
        ({"keep": -1.0}, "a session cannot be kept for -1.0 s"),
        ({"mode": "again and again"}, "a Hello of mode 'again and again'"),
    ],
)
def test_a_greeting_that_makes_no_sense(daemon: ListeningWorker, nonsense: dict[str, Any], said: str) -> None:
    channel = Channel(keys=choose(daemon.address))
    try:
        channel.connect(daemon.address, b"w")
        channel.send(b"w", [encode(replace(HELLO, **nonsense))])
        until(lambda: "dropped a peer" in daemon.text())
    finally:
        channel.close()
    assert said in daemon.text()


def test_a_greeting_names_shared_memory_and_no_file(daemon: ListeningWorker, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"sixteen bytes or more")
    channel = Channel(keys=choose(daemon.address))
    try:
        channel.connect(daemon.address, b"w")
        channel.send(b"w", [encode(replace(HELLO, shared=f"/proc/self/../../{tmp_path}/secret"))])
        arrived: list[object] = []
        until(
            lambda: arrived.extend(decode(bytes(frames[0])) for _, frames in channel.receive(0.05)) or arrived
        )
        assert isinstance(arrived[0], Welcome) and arrived[0].shared == b""
    finally:
        channel.close()


def test_a_greeting_that_comes_twice_begins_one_session(daemon: ListeningWorker) -> None:
    channel = Channel(keys=choose(daemon.address))
    try:
        channel.connect(daemon.address, b"w")
        for _ in range(3):
            channel.send(b"w", [encode(HELLO)])
        channel.send(b"w", [encode(AskMemory(1))])
        arrived: list[object] = []

        def answered() -> bool:
            arrived.extend(decode(bytes(frames[0])) for _, frames in channel.receive(0.05))
            return any(isinstance(message, Reply) for message in arrived)

        until(answered)
        assert [type(message) for message in arrived] == [Welcome, Reply]
        channel.send(b"w", [encode(Goodbye("done"))])
        until(lambda: "ended (done)" in daemon.text())
    finally:
        channel.close()


def test_a_seed_before_the_session_seeds_its_workers(daemon: ListeningWorker, own_state: None) -> None:
    """As it seeds a GPU that torch has not touched yet."""
    torch.manual_seed(11)
    here = torch.rand(5).tolist()
    dr.init_master_worker(workers=[daemon.address])
    assert torch.rand(5, device=REMOTE).tolist() == here
    dr.shutdown()
    # A session that is resumed goes on where it is.
    dr.init_master_worker(workers=[daemon.address], session="seeded")
    first = torch.rand(5, device=REMOTE).tolist()
    assert first == here
    dr.detach()
    torch.manual_seed(11)
    dr.init_master_worker(workers=[daemon.address], session="seeded", resume=True)
    assert torch.rand(5, device=REMOTE).tolist() != here
    dr.shutdown()


def test_the_first_draw_of_a_session_follows_its_seed(daemon: ListeningWorker) -> None:
    dr.init_master_worker(workers=[daemon.address])
    dr.manual_seed(3)
    first = torch.rand(5, device=REMOTE).tolist()
    dr.manual_seed(3)
    assert torch.rand(5, device=REMOTE).tolist() == first
    dr.shutdown()
