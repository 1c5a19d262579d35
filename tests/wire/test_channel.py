"""The channel on real sockets: messages, events, threads, interrupts, keys, strangers."""

from __future__ import annotations

import _signal
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import zmq

from distruntime.errors import ConfigurationError
from distruntime.wire.channel import Channel, ChannelClosed, Frames, PeerEvent, PeerGone
from distruntime.wire.keys import KeyPair
from distruntime.wire.link import Delivery, Link
from distruntime.wire.shield import shield
from distruntime.wire.zeromq import zero_copy
from distruntime.wire.zeromq.frames import FRAME, ROOM, Joined
from distruntime.wire.zeromq.inbox import LARGE
from network import Network
from processes import Child, pause, waits_less

DEADLINE = 20.0
KEYS = KeyPair.generate()

Make = Callable[..., Channel]

_later: dict[Channel, list[PeerEvent]] = {}  # events that event() has not returned yet


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes channels that the test need not close."""
    made: list[Channel] = []

    def build(
        listen: str | None = None, keys: KeyPair | None = None, name: bytes | None = None, **options: Any
    ) -> Channel:
        made.append(Channel(listen=listen, keys=keys, name=name, **options))
        return made[-1]

    yield build
    _later.clear()
    for channel in made:
        channel.close()


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:*"


@pytest.fixture(params=[None, KEYS], ids=["open", "curve"])
def keys(request: pytest.FixtureRequest) -> KeyPair | None:
    found: KeyPair | None = request.param
    return found


def receive(channel: Channel, count: int = 1, wait: float = 1.0) -> list[tuple[bytes, Frames]]:
    """Return `count` messages, waiting for so many seconds at a time."""
    deadline = time.monotonic() + max(DEADLINE, 2 * wait)
    messages: list[tuple[bytes, Frames]] = []
    while len(messages) < count:
        assert time.monotonic() < deadline, f"{len(messages)} of {count} messages came"
        messages += channel.receive(wait)
    return messages


def unknown(channel: Channel, peer: bytes) -> bool:
    """Whether the channel says that it has no such peer (any more): it may hear of a hang-up before its
    socket has let go of the peer.
    """
    channel.receive(0)
    try:
        channel.send(peer, [b"x"])
    except PeerGone:
        return True
    return False


def content(frame: bytes | zmq.Frame | Joined) -> bytes:
    return frame if isinstance(frame, bytes) else frame.bytes


def event(channel: Channel, *kinds: str) -> PeerEvent:
    """Return the next event of one of the kinds, which is not always the last that came."""
    deadline = time.monotonic() + DEADLINE
    later = _later.setdefault(channel, [])
    while time.monotonic() < deadline:
        later += channel.events()
        while later:
            found = later.pop(0)
            if found.kind in kinds:
                return found
        channel.receive(0.05)
    raise AssertionError(f"no {kinds} event came")


def pair(
    make: Make, address: str, keys: KeyPair | None = None, name: bytes | None = b"bob"
) -> tuple[Channel, Channel]:
    """Return a listener, and a dialler that has been heard by it as `name` and knows it as b"listener"."""
    listener, dialler = make(address, keys), make(None, keys, name)
    dialler.connect(listener.address, b"listener")
    dialler.send(b"listener", [b"first"])
    [(peer, frames)] = receive(listener)
    assert frames == [b"first"] and (name is None or peer == name)
    assert event(listener, "connected").peer == peer
    assert event(dialler, "connected").peer == b"listener"
    return listener, dialler


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        threading.Event().wait(0.002)


def test_messages_travel_both_ways_with_all_their_frames(
    make: Make, address: str, keys: KeyPair | None
) -> None:
    listener, dialler = pair(make, address, keys)
    large = os.urandom(LARGE)
    dialler.send(b"listener", [b"head", b"", memoryview(large), bytearray(b"tail")])
    [(peer, frames)] = receive(listener)
    assert peer == b"bob"
    assert [type(frame) for frame in frames] == [bytes, bytes, zmq.Frame, bytes]
    assert [content(frame) for frame in frames] == [b"head", b"", large, b"tail"]
    listener.send(peer, [b"back"])
    assert receive(dialler) == [(b"listener", [b"back"])]


def test_a_dialler_without_a_name_can_be_answered(make: Make, address: str) -> None:
    listener, dialler = pair(make, address, name=None)
    dialler.send(b"listener", [b"x"])
    [(peer, _)] = receive(listener)
    listener.send(peer, [b"y"])
    assert receive(dialler) == [(b"listener", [b"y"])]


def test_what_is_sent_before_the_peer_listens_arrives(make: Make, tmp_path: Path) -> None:
    dialler = make(None)
    dialler.connect(f"ipc://{tmp_path}/later", b"listener")
    dialler.send(b"listener", [b"early"])
    listener = make(f"ipc://{tmp_path}/later")
    assert receive(listener)[0][1] == [b"early"]


@pytest.mark.parametrize("dialled", ["ipc", "tcp"])
def test_pauses_between_attempts_grow_unless_this_machine_is_dialled(
    make: Make, tmp_path: Path, dialled: str
) -> None:
    """Workers may wait for minutes for a script's session. It is to find them at once."""
    channel = make()
    channel.connect("tcp://127.0.0.1:9" if dialled == "ipc" else f"ipc://{tmp_path}/x", b"other")
    channel.connect(f"ipc://{tmp_path}/s" if dialled == "ipc" else "tcp://127.0.0.1:9", b"listener")
    # libzmq has the option from the last call on, and 0 says that pauses do not grow.
    assert (channel._socket.reconnect_ivl_max == 0) == (dialled == "ipc")


def test_sending_to_an_unknown_peer_says_so(make: Make, address: str) -> None:
    with pytest.raises(PeerGone, match="nobody"):
        make(address).send(b"nobody", [b"x"])


def test_an_impossible_frame_is_refused_before_anything_is_sent(make: Make, address: str) -> None:
    listener, dialler = pair(make, address)
    with pytest.raises(TypeError, match="str"):
        dialler.send(b"listener", [b"x", "text"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="contiguous"):
        dialler.send(b"listener", [b"x", memoryview(b"abcd")[::2]])
    with pytest.raises(ValueError, match="at least one"):
        dialler.send(b"listener", [])
    dialler.send(b"listener", [b"whole"])
    assert receive(listener) == [(b"bob", [b"whole"])]


def test_a_lost_dialler_is_named(make: Make, address: str, keys: KeyPair | None) -> None:
    listener, ann = pair(make, address, keys, b"ann")
    bob = make(None, keys, b"bob")
    bob.connect(listener.address, b"listener")
    bob.send(b"listener", [b"hello"])
    receive(listener)
    ann.close()
    assert event(listener, "disconnected").peer == b"ann"
    bob.close()
    assert event(listener, "disconnected").peer == b"bob"
    wait_for(lambda: unknown(listener, b"ann"))


def test_a_peer_that_left_before_its_message_was_read_is_reported_gone(make: Make, address: str) -> None:
    listener, dialler = make(address), make(None, None, b"hasty")
    dialler.connect(listener.address, b"listener")
    dialler.send(b"listener", [b"first"])
    assert event(dialler, "connected").peer == b"listener"
    dialler.send(b"listener", [b"second"])
    dialler.close()
    receive(listener, 1)
    assert event(listener, "disconnected").peer == b"hasty"


def test_a_lost_listener_is_named_and_found_again(make: Make, address: str, keys: KeyPair | None) -> None:
    listener, dialler = pair(make, address, keys)
    where = listener.address
    listener.close()
    assert event(dialler, "disconnected").peer == b"listener"
    dialler.send(b"listener", [b"kept"])
    second = make(where, keys)
    assert event(dialler, "connected").peer == b"listener"
    assert receive(second) == [(b"bob", [b"kept"])]
    assert event(second, "connected").peer == b"bob"


def test_a_listener_dialled_by_host_name_is_named_after_a_reconnection_too(make: Make) -> None:
    listener, dialler = make("tcp://127.0.0.1:*"), make(None)
    port = listener.address.rpartition(":")[2]
    dialler.connect(f"tcp://localhost:{port}", b"listener")
    for _ in range(2):
        assert event(dialler, "connected").peer == b"listener"
        listener.close()
        assert event(dialler, "disconnected").peer == b"listener"
        listener = make(f"tcp://127.0.0.1:{port}")
    assert event(dialler, "connected").peer == b"listener"


def test_a_new_connection_under_the_same_name_replaces_the_old_one(make: Make, address: str) -> None:
    listener, _ = pair(make, address, name=b"bob")
    again = make(None, None, b"bob")
    again.connect(listener.address, b"listener")
    again.send(b"listener", [b"me"])
    receive(listener)
    assert event(listener, "disconnected").peer == b"bob"
    listener.send(b"bob", [b"you"])
    assert receive(again) == [(b"listener", [b"you"])]


def test_the_end_of_a_connection_is_told_whose_message_was_read_before_its_arrival(
    make: Make, address: str
) -> None:
    """As where the reader is held up between looking for connections and for messages, while more than one
    come.
    """
    listener, silent, speaker = make(address), make(), make()
    for dialler in (silent, speaker):
        dialler.connect(listener.address, b"listener")
        assert event(dialler, "connected").peer == b"listener"
    speaker.send(b"listener", [b"me"])
    wait_for(lambda: listener._inbox.drain() or listener._inbox.messages)
    ((peer, _),) = listener.receive(0)
    speaker.close()
    assert event(listener, "disconnected").peer == peer


def test_events_end_a_wait(make: Make, address: str) -> None:
    listener, dialler = pair(make, address)
    threading.Timer(0.1, dialler.close).start()
    deadline = time.monotonic() + DEADLINE
    while not any(found.kind == "disconnected" for found in listener.events()):
        assert time.monotonic() < deadline
        assert listener.receive(DEADLINE) == []


def test_after_hanging_up_the_peer_is_unknown(make: Make, address: str) -> None:
    listener, dialler = pair(make, address)
    dialler.disconnect(listener.address, b"listener")

    def gone() -> bool:
        dialler.receive(0)  # libzmq hangs up in steps, the later ones when the socket is next used
        listener.receive(0)
        return PeerEvent("disconnected", b"bob", listener.address) in listener.events()

    wait_for(gone)
    wait_for(lambda: unknown(dialler, b"listener"))


@pytest.mark.parametrize(
    "held",
    [(KEYS, None), (None, KEYS), (KEYS, KeyPair.generate())],
    ids=["no key", "needless key", "wrong key"],
)
def test_without_the_right_key_nothing_gets_in(
    make: Make, address: str, held: tuple[KeyPair | None, KeyPair | None]
) -> None:
    listener, stranger, friend = (
        make(address, held[0]),
        make(None, held[1], b"stranger"),
        make(None, held[0], b"friend"),
    )
    stranger.connect(listener.address, b"listener")
    try:
        stranger.send(b"listener", [b"let me in"])
    except PeerGone:
        pass  # libzmq does not dial again where it saw itself that the handshake cannot succeed
    refused, refusal = event(listener, "handshake_failed"), event(stranger, "handshake_failed")
    assert (refused.peer, refusal.peer) == (None, b"listener")
    assert " key" in refused.detail + refusal.detail  # whoever sees it first hangs up on the other
    friend.connect(listener.address, b"listener")
    friend.send(b"listener", [b"hello"])
    assert receive(listener) == [(b"friend", [b"hello"])]
    assert listener.receive(0.3) == []


class Meddler:
    """Passes bytes on to a channel, for one connection to `address`; changes one of what comes while it
    `meddles`.
    """

    def __init__(self, listener: Channel) -> None:
        self.meddles = threading.Event()
        self._server, self._listener = socket.create_server(("127.0.0.1", 0)), listener
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._there)]
        self._threads[0].start()

    def _there(self) -> None:
        with self._server, self._server.accept()[0] as near, raw_connection(self._listener.address) as far:
            self._threads.append(threading.Thread(target=self._back, args=(near, far)))
            self._threads[1].start()
            while data := bytearray(near.recv(1 << 16)):
                data[-1] ^= self.meddles.is_set()
                far.sendall(data)

    def _back(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):  # both are closed when the dialler hangs up
            while data := far.recv(1 << 16):
                near.sendall(data)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE)


def test_a_byte_changed_on_the_way_ends_the_connection_and_nothing_else(make: Make) -> None:
    """libzmq 4.3.5 may lose track of such a connection, and abort at the next heartbeat: see `_MONITORED` of
    connections.py.
    """
    listener = make("tcp://127.0.0.1:0", KEYS, silence=0.5, patient=True)
    for k in range(4):
        dialler, meddler = make(None, KEYS), Meddler(listener)
        dialler.connect(meddler.address, b"listener")
        dialler.send(b"listener", [b"whole"])
        [(peer, frames)] = receive(listener)
        meddler.meddles.set()
        pause(0.001 * k)  # in which libzmq looks at its commands, or does not
        dialler.send(b"listener", [b"torn"])
        assert frames == [b"whole"] and event(listener, "disconnected").peer == peer
        dialler.close()
        meddler.join()
        pause(0.12)  # a heartbeat
    assert listener.receive(0) == []


def test_a_stranger_who_knows_only_the_public_half_is_refused(make: Make, address: str) -> None:
    own = KeyPair.generate()
    listener, stranger = make(address, KEYS), make(None, own)
    stranger.keys = KeyPair(
        KEYS.public, own.secret
    )  # dials with the cluster's public key, proves only its own
    stranger.connect(listener.address, b"listener")
    stranger.send(b"listener", [b"let me in"])
    assert event(listener, "auth_failed").detail == "key refused (status 400)"
    assert event(stranger, "auth_failed").peer == b"listener"
    assert listener.receive(0.2) == []


def raw_connection(address: str) -> socket.socket:
    if address.startswith("ipc://"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address[len("ipc://") :])
        return connection
    host, _, port = address[len("tcp://") :].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE)


def test_noise_that_passes_for_an_old_zmq_peer_is_a_message_of_a_stranger(make: Make, address: str) -> None:
    """ZMTP 1 had no greeting: without keys, the right few bytes are an identity and a message."""
    listener = make(address)
    with raw_connection(listener.address) as stranger:
        stranger.sendall(b"\x01\x00\x06\x00hello")
        [(peer, frames)] = receive(listener)
    assert frames == [b"hello"] and event(listener, "disconnected").peer == peer


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * 4096,
        b"\xff" * 4096,
        bytes(range(256)) * 64,
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE"
        + b"\0" * 15
        + b"\0"
        + b"\0" * 31
        + b"\x06"
        + b"\xff" * 8
        + b"x" * 1000,
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00NULL"
        + b"\0" * 16
        + b"\0"
        + b"\0" * 31
        + b"\x04\x05READY\x02"
        + b"\xff" * 8,
    ],
    ids=["http", "zeros", "ones", "bytes", "curve greeting", "null greeting"],
)
def test_garbage_leaves_the_listener_working(
    make: Make, address: str, keys: KeyPair | None, garbage: bytes
) -> None:
    listener, friend = pair(make, address, keys)
    for _ in range(3):
        with raw_connection(listener.address) as stranger:
            try:
                stranger.sendall(garbage)
            except (BrokenPipeError, ConnectionResetError):
                pass  # hung up on us already, as it may
    friend.send(b"listener", [b"still here"])
    assert (b"bob", [b"still here"]) in receive(listener)
    listener.send(b"bob", [b"good"])
    assert receive(friend) == [(b"listener", [b"good"])]


def test_an_oversized_frame_ends_that_connection_only(make: Make, address: str, keys: KeyPair | None) -> None:
    listener, friend = pair(make, address, keys, b"friend")
    with plain_dealer(listener, keys) as wordy:
        wordy.send(b"x" * FRAME)
        assert len(receive(listener)[0][1][0]) == FRAME
        assert event(listener, "connected").peer == b"wordy"
        wordy.send(b"x" * (FRAME + ROOM + 1))
        assert event(listener, "disconnected").peer == b"wordy"
    friend.send(b"listener", [b"still here"])
    assert (b"friend", [b"still here"]) in receive(listener)


@contextmanager
def plain_dealer(listener: Channel, keys: KeyPair | None) -> Iterator[zmq.Socket[bytes]]:
    """A socket that sends what it is told to, in libzmq's own messages."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.routing_id, dealer.reconnect_ivl = 0, b"wordy", -1
        if keys is not None:
            dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = (
                keys.public,
                keys.secret,
                keys.public,
            )
        dealer.connect(listener.address)
        yield dealer


def place(index: int, start: int, size: int) -> bytes:
    return struct.pack(">IQQ", index, start, size)


@pytest.mark.parametrize(
    "messages",
    [
        [[b"", b""]],
        [[b"", b"", b"head"]],
        [[b"", b"x", b"y"]],
        [[b"", place(1, 0, 4), b"ab"], [b"", b"", b"head"]],
        [[b"", place(1, 0, 4), b"ab"], [b"", place(1, 2, 4), b"abc"]],
        [[b"", place(1, 0, 4), b"ab"], [b"", place(1, 1, 4), b"ab"]],
        [[b"", place(1, 0, 4), b"ab"], [b"", place(1, 2, 5), b"ab"]],
        [[b"", place(1, 0, 4), b"ab"], [b"", place(2, 0, 4), b"ab"]],
        [[b"", place(2, 0, 2), b"ab"], [b"", place(1, 0, 2), b"ab"]],
        [[b"", place(1, 0, 4), b""]],
        [[b"", place(1, 0, 4), b"ab", b"cd"]],
        [[b"", place(1, 0, 1 << 63), b"ab"]],
        [[b"", place(1, 0, (1 << 64) - 1), b"ab"]],
        [[b"", place(5, 0, 2), b"ab"], [b"", b"", b"head"]],
    ],
)
def test_pieces_that_do_not_fit_together_are_a_message_that_is_none(
    make: Make, messages: list[list[bytes]]
) -> None:
    listener, friend = pair(make, "tcp://127.0.0.1:*", None, b"friend")
    with plain_dealer(listener, None) as wordy:
        for message in messages:
            wordy.send_multipart(message)
        assert [frames for peer, frames in receive(listener) if peer == b"wordy"] == [[b""]]
        wordy.send_multipart([b"", place(1, 0, 4), b"ab"])
        wordy.send_multipart([b"a message that has nothing of it"])
        assert receive(listener) == [(b"wordy", [b"a message that has nothing of it"])]
        wordy.send_multipart([b"", place(1, 0, 4), b"ab"])
        wordy.send_multipart([b"", place(1, 2, 4), b"cd"])
        wordy.send_multipart([b"", b"", b"head", b"tail"])
        [(_, frames)] = receive(listener)
        assert [content(frame) for frame in frames] == [b"head", b"abcd", b"tail"]
        wordy.send_multipart([b"", place(1, 0, 4), b"ab"])
        wait_for(lambda: listener.receive(0) == [] and listener._inbox._coming)
    assert event(listener, "disconnected").peer == b"wordy"
    wait_for(lambda: listener.receive(0) == [] and not listener._inbox._coming)
    friend.send(b"listener", [b"still here"])
    assert (b"friend", [b"still here"]) in receive(listener)


@pytest.mark.parametrize("size", [FRAME - 1, FRAME, FRAME + 1, 2 * FRAME, 2 * FRAME + 1])
@pytest.mark.parametrize("copy", [True, False])
def test_every_frame_of_a_message_may_be_large(
    make: Make, address: str, keys: KeyPair | None, size: int, copy: bool
) -> None:
    listener, dialler = pair(make, address, keys)
    large = [os.urandom(size) for _ in range(3)]
    dialler.send(b"listener", [large[0], b"", memoryview(large[1]), b"small", bytearray(large[2])], copy=copy)
    dialler.send(b"listener", [b"next"])
    (_, frames), (_, then) = receive(listener, 2)
    assert [content(frame) for frame in frames] == [large[0], b"", large[1], b"small", large[2]]
    assert type(frames[0]) is bytes and then == [b"next"]
    assert listener.received_bytes == dialler.sent_bytes == 5 + 3 * size + 5 + 4


def test_a_large_message_is_sent_again_whole_on_the_next_connection(make: Make) -> None:
    listener, link, large = make("tcp://127.0.0.1:*"), Link(), os.urandom(3 * FRAME)
    first, second = make(), make()
    first.connect(listener.address, b"listener")
    first.send(b"listener", [b"hello"])
    [(peer, _)] = receive(listener)
    listener.resume(link, peer, 0)
    listener.send(link, [b"small"])
    sent = [listener.send(link, [b"head", memoryview(large)], copy=copy) for copy in (True, False)]
    first.close()
    assert event(listener, "disconnected").peer == peer
    second.connect(listener.address, b"listener")
    second.send(b"listener", [b"hello"])
    [(peer, _)] = receive(listener)
    listener.resume(link, peer, 1)
    got = receive(second, 2)
    assert [[content(frame) for frame in frames] for _, frames in got] == [[b"head", large]] * 2
    link.acknowledge(3)
    assert all(isinstance(one, Delivery) and one.done for one in sent)


def test_large_messages_that_wait_for_the_socket_arrive_whole(make: Make, address: str) -> None:
    listener, dialler = pair(make, address)
    large = os.urandom(2 * FRAME)
    with dialler._lock:
        threads = [
            threading.Thread(target=dialler.send, args=(b"listener", [b"head", large])) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
    dialler.events()
    assert all([content(frame) for frame in frames] == [b"head", large] for _, frames in receive(listener, 3))


@pytest.mark.parametrize("copy", [True, False])
def test_large_frames(make: Make, address: str, keys: KeyPair | None, copy: bool) -> None:
    listener, dialler = pair(make, address, keys)
    payload = bytearray(os.urandom(1 << 20) * 64)
    tracker = dialler.send(b"listener", [b"head", memoryview(payload)], copy=copy)
    assert (tracker is None) == copy
    [(_, frames)] = receive(listener)
    assert isinstance(frames[1], Joined)
    assert frames[1].buffer == payload
    if tracker is not None:
        tracker.wait(DEADLINE)
        assert tracker.done


@pytest.mark.timeout(180)
def test_no_message_is_lost_when_others_send_while_one_waits(make: Make, address: str) -> None:
    """ZMQ_FD is edge-triggered: a send by another thread swallows the edge of what arrives meanwhile."""
    listener, dialler = pair(make, address)
    rounds, senders = 400, 3
    stop = threading.Event()

    def echo() -> None:
        while not stop.is_set():
            for peer, frames in listener.receive(0.5):
                if frames[0] != b"noise":
                    listener.send(peer, [content(frames[0])])

    def noise() -> None:
        while not stop.is_set():
            dialler.send(b"listener", [b"noise"])
            stop.wait(0.0002)

    threads = [threading.Thread(target=echo), *(threading.Thread(target=noise) for _ in range(senders))]
    for thread in threads:
        thread.start()
    try:
        for number in range(rounds):
            dialler.send(b"listener", [b"%d" % number])
            start = time.monotonic()
            assert receive(dialler, wait=DEADLINE) == [(b"listener", [b"%d" % number])]
            assert time.monotonic() - start < DEADLINE, "found only because the wait ran out"
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("to", [b"listener", b"nobody"])
def test_a_send_that_swallows_an_edge_wakes_who_waits(make: Make, address: str, to: bytes) -> None:
    """A refused one does, too. A waiter may be at any point of its poll, so this stands in its place."""
    listener, dialler = pair(make, address)
    dialler.receive(0)
    listener.send(b"bob", [b"x"])
    # libzmq's send looks at its commands, and so swallows the edge, if it has not for a while.
    wait_for(lambda: bool(select.select([dialler._fd], [], [], 0)[0]))
    dialler._waiting = True
    while select.select([dialler._fd], [], [], 0)[0]:
        with suppress(PeerGone):
            dialler.send(to, [b"y"])
    assert select.select([dialler._wake.fd], [], [], 0)[0]
    dialler._waiting = False
    assert receive(dialler) == [(b"listener", [b"x"])]


def test_many_threads_send_whole_messages(make: Make, address: str) -> None:
    listener, dialler = pair(make, address)
    threads, each = 8, 300

    def send(number: int) -> None:
        for index in range(each):
            dialler.send(b"listener", [b"%d" % number, b"%d" % index, b"end"])

    started = [threading.Thread(target=send, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    found = receive(listener, threads * each)
    for thread in started:
        thread.join()
    order: dict[bytes, list[int]] = {}
    for _, frames in found:
        number, index, end = (content(frame) for frame in frames)
        assert end == b"end"
        order.setdefault(number, []).append(int(index))
    assert all(indices == list(range(each)) for indices in order.values()) and len(order) == threads


def test_wake_ends_a_wait_and_is_not_forgotten(make: Make, address: str) -> None:
    channel = make(address)
    channel.wake()
    assert channel.receive(DEADLINE) == []
    threading.Timer(0.1, channel.wake).start()
    start = time.monotonic()
    assert channel.receive(None) == []
    assert time.monotonic() - start < DEADLINE


def test_a_wait_ends_with_its_time(make: Make, address: str) -> None:
    channel = make(address)
    start = time.monotonic()
    assert channel.receive(0.2) == []
    assert 0.15 < time.monotonic() - start < DEADLINE
    assert channel.receive(0) == []


def test_control_c_interrupts_a_wait_and_loses_nothing(make: Make, address: str) -> None:
    listener, dialler = pair(make, address)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        listener.receive(None)
    dialler.send(b"listener", [b"after"])
    assert receive(listener) == [(b"bob", [b"after"])]


@pytest.mark.parametrize("large", [False, True])
def test_control_c_at_any_moment_cuts_no_message(make: Make, address: str, large: bool) -> None:
    listener, dialler = pair(make, address)
    stop = threading.Event()
    count, armed = 50 if large else 1000, False
    tail = b"tail" * (FRAME // 3 if large else 1)

    def interrupt() -> None:
        while not stop.wait(0.005):
            os.kill(os.getpid(), signal.SIGINT)

    class Interrupted(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted

    sent = interrupted = 0
    got: list[bytes] = []
    before = signal.signal(signal.SIGINT, handler)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        deadline = time.monotonic() + 3 * DEADLINE
        while (sent < count or not interrupted) and time.monotonic() < deadline:
            try:
                armed = True
                while sent < count or not interrupted:
                    dialler.send(b"listener", [b"head", b"%d" % sent, tail])
                    sent += 1
                armed = False
            except Interrupted:
                interrupted += (
                    1  # the message may or may not have gone: it is sent again under the same number
                )
    finally:
        armed = False
        stop.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    dialler.send(b"listener", [b"head", b"last", tail])
    while not got or got[-1] != b"last":
        for _, frames in receive(listener):
            assert len(frames) == 3 and frames[0] == b"head" and content(frames[2]) == tail
            got.append(content(frames[1]))
    assert interrupted and sent >= count
    numbers = list(dict.fromkeys(got))[:-1]
    assert numbers == [b"%d" % number for number in range(len(numbers))]
    assert len(numbers) - sent in (
        0,
        1,
    )  # one may have gone although the interrupt kept it from being counted


def test_control_c_that_comes_just_before_the_shield_is_up_leaves_it_whole() -> None:
    """Before `signal.signal` sets a handler, it runs those of signals that have come."""

    def strike(frame: FrameType, event: str, called: Any) -> None:
        if (
            event == "c_call"
            and called is _signal.signal
            and frame.f_code.co_name in ("__enter__", "_look_at_others")
        ):
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        sys.setprofile(strike)
        with shield:
            said.append("never here")
    with pytest.raises(KeyboardInterrupt):
        with shield:
            signal.raise_signal(signal.SIGINT)
            said.append("still in")
    assert said == ["still in"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_closing_is_prompt_and_ends_a_wait(make: Make, address: str, keys: KeyPair | None) -> None:
    _, dialler = pair(make, address, keys)
    dialler.send(b"listener", [b"x" * 1000] * 5)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            while True:
                dialler.receive(None)
        except ChannelClosed as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()

    def close() -> None:
        dialler.close()
        dialler.close()
        thread.join(DEADLINE)

    waits_less(5, close)
    assert raised
    for use in (lambda: dialler.receive(0), lambda: dialler.send(b"listener", [b"x"]), dialler.events):
        with pytest.raises(ChannelClosed):
            use()
    dialler.wake()


def test_closing_with_unsent_messages_to_nobody_is_prompt(make: Make) -> None:
    channel = make(None)
    channel.connect("tcp://127.0.0.1:9", b"nobody")
    channel.send(b"nobody", [b"x" * 1_000_000])
    waits_less(5, channel.close)


@pytest.mark.filterwarnings(
    "ignore:.*multi-threaded.*fork.*:DeprecationWarning"
)  # Python >= 3.12 warns; forking is the point here
def test_a_forked_child_cannot_use_or_harm_it(make: Make, address: str, keys: KeyPair | None) -> None:
    listener, dialler = pair(make, address, keys)
    child = os.fork()
    if not child:
        code = 1
        try:
            listener.close()
            dialler.close()
            dialler.send(b"listener", [b"from the child"])
        except ChannelClosed:
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    dialler.send(b"listener", [b"from the parent"])
    assert receive(listener) == [(b"bob", [b"from the parent"])]


def test_unusable_addresses_are_named(make: Make, tmp_path: Path) -> None:
    for address in ("nonsense", "tcp://127.0.0.1:99999", f"ipc://{tmp_path}/{'x' * 200}", "http://host:1"):
        with pytest.raises(ConfigurationError, match="Expected"):
            make(address)
    for address in ("nonsense", "http://host:1"):
        with pytest.raises(ConfigurationError, match="Expected"):
            make(None).connect(address, b"peer")
    taken = make("tcp://127.0.0.1:*")
    with pytest.raises(ConfigurationError, match="in use"):
        make(taken.address)


def test_addresses_are_reported_as_they_are(make: Make) -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        address = make(f"tcp://{host}:0").address
        assert address.startswith(f"tcp://{host}:") and not address.endswith(":0")


def test_the_socket_file_is_private(make: Make, tmp_path: Path) -> None:
    make(f"ipc://{tmp_path}/s")
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_a_send_never_waits_for_who_uses_the_socket(make: Make, address: str) -> None:
    """Its holder may be in a finalizer that waits for a lock of the sender's: what is sent meanwhile goes
    when it lets go.
    """
    listener, dialler = pair(make, address)
    with dialler._lock:
        threads = [
            threading.Thread(target=dialler.send, args=(b"listener", [b"meanwhile"])) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        assert not any(thread.is_alive() for thread in threads)
    dialler.events()
    assert [frames for _, frames in receive(listener, 3)] == [[b"meanwhile"]] * 3


def hasty_and_late(address: str) -> None:
    """Two diallers, one after the other, in a process whose fds are not the listener's."""
    for word in (b"h", b"l"):
        client = Channel()
        client.connect(address, b"server")
        assert event(client, "connected")
        for _ in range(2):
            sent = client.send(b"server", [word * (1 << 16)], copy=False)
            wait_for(lambda: sent is not None and sent.done)  # noqa: B023
            print("sent")
            input()
        client.close()


@pytest.mark.parametrize("known", [True, False])
def test_a_connection_is_not_taken_for_the_one_that_had_its_fd(make: Make, address: str, known: bool) -> None:
    """The last words of a peer that has gone lie unread when the next one connects: the kernel has given that
    one its fd.
    """
    server = make(address)
    with Child(hasty_and_late, server.address) as diallers:
        diallers.expect("sent")
        if known:
            receive(server)
            assert event(server, "connected")
        diallers.tell()
        diallers.expect("sent")
        diallers.tell()
        # By the second one, whose connection the server's own thread has accepted after the end of the first.
        diallers.expect("sent")
        peers = {content(frames[0])[:1]: peer for peer, frames in receive(server, 2 if known else 3)}
        diallers.tell()
        diallers.expect("sent")
        receive(server)
        assert [e.kind for e in server.events() if e.peer == peers[b"l"]] == ["connected"]
        diallers.tell()
        diallers.finish()
        wait_for(lambda: ("disconnected", peers[b"l"]) in [(e.kind, e.peer) for e in server.events()])


def test_who_waits_for_the_rest_of_a_frame_that_does_not_come_gives_the_connection_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message whose length was changed on the way looks so.

    The patient side waits as long as a slow network takes for one frame.
    """
    monkeypatch.setattr("distruntime.wire.zeromq.options._SLOWEST", 1 << 30)
    listener, dialler = (
        make("tcp://127.0.0.1:0", KEYS, silence=0.5, patient=True),
        make(None, KEYS, silence=60.0),
    )
    with Network(listener.address) as network:
        network.deafen(100_000)
        dialler.connect(network.address, b"listener")
        dialler.send(b"listener", [b"whole"])
        [(peer, frames)] = receive(listener)
        dialler.send(b"listener", [bytes(1 << 18)])
        assert frames == [b"whole"] and event(listener, "disconnected").peer == peer
        assert event(dialler, "disconnected").peer == b"listener"


FIRST = """
import sys, threading, zmq
from distruntime.wire.channel import Channel
sys.setswitchinterval(1e-6)
pushes, real = [], zmq.Context.socket
def socket(self, kind, *args, **kwargs):
    made = real(self, kind, *args, **kwargs)
    if kind == zmq.PUSH:
        pushes.append(made)  # pyzmq's own
    return made
zmq.Context.socket = socket
channel, together = Channel(listen="tcp://127.0.0.1:0"), threading.Barrier(8)
def send():
    together.wait()
    try:
        channel.send(b"nobody", [b"head", bytes(100_000)], copy=False)
    except Exception:
        pass
threads = [threading.Thread(target=send) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(pushes))
"""


@pytest.mark.slow(reason="sends large frames from many threads, 4 s")
def test_first_large_frames_of_several_threads_share_one_socket_of_pyzmqs() -> None:
    """Two would use it side by side, or one of them after its end."""
    for _ in range(5):
        assert (
            subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=60).stdout
            == "1\n"
        )


def test_ctrl_c_waits_while_pyzmq_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread starts with the first frame that is not copied. Ctrl-C could leave it forgotten."""
    made: list[bytes] = []

    def frame(data: bytes, **_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        made.append(data)

    monkeypatch.setattr(zero_copy, "_begun", [])
    monkeypatch.setattr(zmq, "Frame", frame)
    with pytest.raises(KeyboardInterrupt):
        zero_copy._begin()
    assert made == [b""] and zero_copy._begun == [True]
