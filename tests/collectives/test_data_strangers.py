"""Who is no member gets nothing from a data channel, puts nothing into it, and does not stop it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from apart import apart, listening
from distruntime.wire.data_channel import Membership
from distruntime_worker.collectives.data_channel import connection as proof
from distruntime_worker.collectives.data_channel import gloo, sockets, tls
from distruntime_worker.collectives.data_channel.connection import read
from distruntime_worker.collectives.data_channel.gloo import Gloo
from distruntime_worker.collectives.data_channel.sockets import SocketChannel
from distruntime_worker.collectives.data_channel.tcp import TCP
from distruntime_worker.collectives.data_channel.tls import TLS
from distruntime_worker.collectives.listening import tcp_sockets
from distruntime_worker.collectives.store import GroupStore
from network import Network
from processes import until, waits_less

MALLORY = Path(__file__).parents[1] / "help" / "mallory.py"
NOBODY = 65534

Fresh = Callable[..., Any]


def stores(size: int, rewrite: Callable[[int, str, bytes], bytes] | None = None) -> list[GroupStore]:
    """The stores of a group whose members are each on a worker of its own; `rewrite` changes what one of them
    hears.
    """
    found: list[GroupStore] = []

    def tell(source: int) -> Callable[[str, bytes], None]:
        def all_others(key: str, value: bytes) -> None:
            for k, store in enumerate(found):
                if k != source:
                    store.arrived(key, rewrite(k, key, value) if rewrite else value)

        return all_others

    found += [GroupStore(1, 20.0, tell(rank)) for rank in range(size)]
    return found


def join(channel: Any, size: int = 2, rewrite: Callable[[int, str, bytes], bytes] | None = None) -> list[Any]:
    """Have all members join a group in this process; return what each got, or its error."""
    results: list[Any] = [None] * size
    own = stores(size, rewrite)

    def enter(rank: int) -> None:
        try:
            results[rank] = channel(Membership(rank, size, torch.device("cpu"), "127.0.0.1", 20.0, own[rank]))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


Members = list[SocketChannel]


@pytest.fixture(params=[TCP, TLS], ids=["tcp", "tcp+tls"])
def members(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Members]:
    """Three members that listen at tcp ports, as those of different machines do."""
    monkeypatch.setattr(sockets, "vicinity", lambda: "")
    joined = join(request.param, 3)
    assert all(isinstance(member, request.param) for member in joined), joined
    yield joined
    for member in joined:
        member.close()


def copies(members: Members, source: int = 0, to: int = 1, tag: int = 7) -> bool:
    """Whether a tensor arrives as it was sent."""
    data = torch.arange(100_000, dtype=torch.int32).view(torch.uint8)
    arrived = torch.zeros_like(data)
    sending = threading.Thread(target=members[source].send, args=(data, to, tag))
    sending.start()
    members[to].receive(arrived, source, tag)
    sending.join(20)
    return torch.equal(data, arrived)


def port(member: SocketChannel) -> int:
    found: int = member._members[member.rank][1]
    return found


def closed(connection: socket.socket) -> bool:
    """Whether the other end has hung up, within the time that strangers have and some more."""
    connection.settimeout(20)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def stranger(member: SocketChannel) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port(member)), 10)


# Tcp and tcp+tls


def test_copies_over_ports(members: Members) -> None:
    for source in range(3):
        for to in {0, 1, 2} - {source}:
            assert copies(members, source, to)


def dial(member: SocketChannel, secret: bytes, rank: int = 0, cover: Any = None) -> socket.socket:
    """Dial as a member would that has this secret; return the connection once the proof is sent."""
    connection = stranger(member)
    if cover is not None:
        connection = cover.around(connection, True)
        cover.greet(connection, 10)
    dialler = proof.Dialler(secret, rank, member.rank)
    connection.sendall(dialler.hello)
    answer = read(connection, proof.ANSWER_SIZE, time.monotonic() + 10)
    # Not `prove`, which would find the other end out: the proof is made with what this one has.
    connection.sendall(proof._proof(secret, b"dialler", dialler.hello + answer[:32]))
    return connection


def test_a_wrong_secret_lets_nobody_in(members: Members) -> None:
    cover = members[0]._cover if isinstance(members[0], TLS) else None  # even with a member's own certificate
    for secret in (bytes(32), os.urandom(32), b""):
        connection = dial(members[1], secret, cover=cover)
        with suppress(OSError):
            connection.sendall(sockets._HEADER.pack(7, 4) + b"evil")
        assert closed(connection)
        connection.close()
    assert not members[1]._arrived and copies(members)


def test_the_right_secret_lets_a_member_in_as_itself_only(members: Members) -> None:
    """Rank 2, which holds the secret and a certificate of its own, says that it is rank 0."""
    if not isinstance(members[0], TLS):
        pytest.skip("tcp has one secret for all members")
    connection = dial(members[1], members[2]._secret, rank=0, cover=members[2]._cover)
    assert closed(connection) and copies(members)
    connection.close()


def test_without_a_members_certificate_no_word_is_heard(members: Members) -> None:
    if not isinstance(members[0], TLS):
        pytest.skip("tcp has no certificates")
    own = tls._Encryption()
    own.learn([own.about(), *[ssl.DER_cert_to_PEM_cert(der) for der in members[1]._cover._members]])  # type: ignore[attr-defined]
    connection = own.around(stranger(members[1]), True)
    with pytest.raises(
        OSError, match=r"(?i)alert|closed|reset|eof"
    ):  # in TLS 1.3 the other end's judgment comes behind the handshake
        own.greet(connection, 10)
        connection.sendall(proof.Dialler(members[1]._secret, 0, 1).hello)
        assert connection.recv(100)
    connection.close()
    plain = stranger(members[1])
    plain.sendall(proof.Dialler(members[1]._secret, 0, 1).hello)
    assert closed(plain) and copies(members)
    plain.close()


def test_what_a_member_has_said_proves_nothing_again(members: Members) -> None:
    """Both ways are recorded by who stands between two members, and said again, to the same one and to the
    other.
    """
    said: list[bytes] = []
    with recorder(port(members[1]), said) as between:
        members[0]._members[1] = ["127.0.0.1", between]
        assert copies(members)
    assert sum(map(len, said)) > 400_000
    if isinstance(members[0], TLS):
        assert torch.arange(1000, 1010, dtype=torch.int32).numpy().tobytes() not in b"".join(said)
    for member in members[1:]:
        with stranger(member) as connection:
            with suppress(OSError):
                connection.sendall(b"".join(said))
            assert closed(connection)
        assert not member._arrived
    assert copies(members, 2, 1)


@contextmanager
def recorder(target: int, said: list[bytes]) -> Iterator[int]:
    """A relay to a port of this machine, which notes what the one who dials says. Yield its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = [listener]

    def forward(source: socket.socket, to: socket.socket, note: list[bytes]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                note.append(data)
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def run() -> None:
        with suppress(OSError):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", target))
                ends.extend((near, far))
                for source, to, note in ((near, far, said), (far, near, [])):
                    threading.Thread(target=forward, args=(source, to, note), daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_who_answers_in_a_members_place_is_found_out(members: Members) -> None:
    """The member gives up at once, and hangs up: another try would not mend this."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        members[0]._members[1] = ["127.0.0.1", listener.getsockname()[1]]

        def answer() -> None:
            with suppress(OSError), listener.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(bytes(proof.ANSWER_SIZE))
                connection.recv(100)

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(OSError, match=r"reaching rank 1 .*(does not hold the group's secret|(?i:ssl))"):
            members[0].send(torch.zeros(8, dtype=torch.uint8), 1, 1)
        answering.join(20)
        assert not answering.is_alive()


def test_half_a_proof_costs_a_place_for_two_seconds(members: Members) -> None:
    hello = proof.Dialler(bytes(32), 0, 1).hello
    with ExitStack() as stack:
        half = [stack.enter_context(stranger(members[1])) for _ in range(10)]
        for k, connection in enumerate(half):
            connection.sendall(hello[: 5 * k])
        assert copies(members)
        assert waits_less(15, lambda: all(map(closed, half)))
    until(lambda: not members[1]._strangers and not members[1]._proving)


def test_a_flood_keeps_nobody_out_and_fills_no_log(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    most = [0]

    def flood() -> None:
        held: list[socket.socket] = []
        while not stop.is_set():
            with suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port(members[1])), 1))
            most[0] = max(most[0], members[1]._proving)
            if len(held) > 300:
                held.pop(0).close()
        for connection in held:
            connection.close()

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        until(lambda: most[0] >= sockets._STRANGERS)
        # These are the first connections of both.
        for source in (0, 2):
            assert copies(members, source, 1)
    finally:
        stop.set()
        flooding.join(20)
    assert most[0] == sockets._STRANGERS
    until(lambda: not members[1]._proving)
    lines = [record for record in caplog.records if record.levelname == "WARNING"]
    assert (
        len(lines) <= 2 and "closed 1 connection that did not prove to be a member's" in lines[0].getMessage()
    )


# On one machine


@pytest.mark.parametrize("channel", [TCP, TLS])
def test_members_of_one_machine_listen_where_only_their_user_gets(channel: type[SocketChannel]) -> None:
    if not sockets.vicinity():
        pytest.skip("what processes share is seen on Linux only")
    before = tcp_sockets()
    members = join(channel)
    assert copies(members) and copies(members, 1, 0)
    after = tcp_sockets()
    assert before is not None and after is not None and after.listening == before.listening
    paths = [Path(path) for path in members[0]._members]
    for path in paths:
        status = path.parent.stat()
        assert stat.S_IMODE(status.st_mode) == 0o700 and status.st_uid == os.geteuid()
    for member in members:
        member.close()
    assert not any(path.exists() for path in paths)
    # At once, and not when it looks up again.
    until(
        lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("tcp-")],
        sockets._LOOK - 1,
    )


# Gloo


def refusals(found: list[Any]) -> str:
    assert not any(isinstance(member, Gloo) for member in found), found
    return " / ".join(map(str, found))


def test_gloo_finds_each_member_at_the_other_ends() -> None:
    members = join(Gloo, 3)
    tensors = [torch.full((1000,), float(rank)) for rank in range(3)]
    threads = [
        threading.Thread(target=member.all_reduce, args=(t, dr.wire.data_channel.Reduction("SUM")))
        for member, t in zip(members, tensors)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(t.eq(3.0).all() for t in tensors)
    for member in members:
        member.close()


def test_gloo_refuses_whoever_relays_between_two_members() -> None:
    """What one hears of the other's address names a relay, which passes everything on, what only members know
    too.
    """
    relays: list[Network] = []
    with ExitStack() as stack:

        def rewritten(hearer: int, key: str, value: bytes) -> bytes:
            where = (
                re.search(rb"\x02\x00(..)\x7f\x00\x00\x01", value, re.S)
                if re.fullmatch(r"\d+/\d+|rank_\d+", key)
                else None
            )
            if where is None:
                return value
            # The member with the greater address connects, and the other listens. With ports alone it may
            # happen that both listen, so member 0 hears of a greater address and member 1 of a smaller one.
            if hearer == 0:
                return value.replace(where[0], where[0][:-1] + b"\x02")
            # In a process of its own: one that is a member's looks at all its sockets.
            relay = stack.enter_context(Network(f"tcp://127.0.0.1:{int.from_bytes(where[1], 'big')}"))
            relays.append(relay)
            return value.replace(
                where[0],
                b"\x02\x00" + int(relay.address.rpartition(":")[2]).to_bytes(2, "big") + bytes(4),
            )

        said = refusals(join(Gloo, 2, rewritten))
        assert relays and "has no connection that ends there" in said


def test_gloo_refuses_who_does_not_know_the_groups_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """One says something else over a connection that looks right, as who had taken a member's place there
    would.
    """
    word = gloo._word
    calls = count()
    monkeypatch.setattr(gloo, "_word", lambda secret, source, to: word(secret, source, 100 + next(calls)))
    assert "whose other end does not know the group's secret" in refusals(join(Gloo))


# Another user of the machine


def mallory(
    ports: set[tuple[str, int]], paths: list[str], folders: list[str], times: int = 1
) -> dict[str, Any]:
    """Let another user try; return what it has got."""
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip("to be another user takes root, and a Python of the system's")
    asked = {
        "ports": sorted(number for _, number in ports),
        "paths": paths,
        "folders": folders,
        "times": times,
    }
    run = subprocess.run(
        [python, "-c", MALLORY.read_text(encoding="utf-8")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=100,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env={},
        cwd="/",
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def unix_paths() -> list[str]:
    """The unix sockets of this machine that have a path and to do with this."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]
    return sorted(
        {
            path
            for line in lines
            if (path := line.split(maxsplit=7)[-1]).startswith("/") and "distruntime" in path
        }
    )


@pytest.mark.parametrize("channel", ["tcp", "tcp+tls", "gloo"])
def test_another_user_gets_nothing_from_workers_of_one_machine(fresh_session: Fresh, channel: str) -> None:
    with fresh_session(data_channel=channel):
        pids = [node.pid for node in dr.nodes()]
        x = torch.ones(4, device="remote")
        assert x.to(node=1).tolist() == [1.0] * 4
        paths = unix_paths()
        assert paths
        found = mallory(
            set().union(*map(listening, pids)), paths, sorted({os.path.dirname(path) for path in paths})
        )
        assert found["reached"] == [] and found["found"] == []
        assert set(found["got"].values()) <= {""}, "not even a greeting: there is gloo's port, or none"
        assert bool(found["got"]) == (channel == "gloo")
        for _ in range(10):
            assert x.to(node=1).tolist() == [1.0] * 4


@pytest.mark.slow(reason="starts workers in network namespaces, as programs")
@pytest.mark.parametrize("channel", ["tcp", "tcp+tls", "gloo"])
def test_another_user_gets_nothing_from_workers_apart(
    fresh_session: Fresh, tmp_path: Path, channel: str
) -> None:
    """Here workers listen at ports: for their master and for each other (ZeroMQ with CURVE), and with their
    data channel.
    """
    with apart(fresh_session, tmp_path, channel):
        pids = [node.pid for node in dr.nodes()]
        command = [listening(pid) for pid in pids]
        x = torch.ones(4, device="remote")
        assert x.to(node=1).tolist() == [1.0] * 4
        for pid, before in zip(pids, command):
            assert len(listening(pid) - before) == 1, "the data channel's port, and no store's"
        found = mallory(set().union(*map(listening, pids)), [], [], times=3)
        data = {number for pid, before in zip(pids, command) for _, number in listening(pid) - before}
        for tried, got in found["got"].items():
            number, what = tried.split(maxsplit=1)
            if int(number) not in data:
                # libzmq's greeting, which names the mechanism CURVE, and nothing else.
                assert got == "" or bytes.fromhex(got)[:1] == b"\xff", tried
            elif channel == "tcp" and what == "new header":
                assert len(got) in (0, 128), "32 random bytes, and a proof over them"
            elif channel == "tcp+tls":
                assert got == "" or got.startswith("15030"), "an alert of TLS"
            else:
                assert got == "", tried
        for _ in range(10):
            assert x.to(node=1).tolist() == [1.0] * 4
        torch.testing.assert_close((x.to(node=1) * 2).cpu(), torch.full((4,), 2.0))
