"""What one worker says to another arrives once and in order, whatever happens to the network between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from distruntime.wire.channel import Channel
from distruntime.wire.messages import Message, Peers, Signal
from distruntime_worker.collectives import peers
from distruntime_worker.collectives.peers import PeerChannel
from network import Network
from processes import pause, until

SECRET = b"the session's"


class Two:
    """Two workers' channels to each other, and the network between them."""

    def __init__(self, stack: ExitStack) -> None:
        self.heard: list[list[int]] = [[], []]
        self.channels = [PeerChannel("tcp://127.0.0.1:*", None, self._ear(k)) for k in range(2)]
        for channel in self.channels:
            stack.callback(channel.close)
        self.networks = [stack.enter_context(Network(channel.address)) for channel in self.channels]
        for k, channel in enumerate(self.channels):
            channel.meet(Peers(k, SECRET, [network.address for network in self.networks]))

    def _ear(self, k: int) -> Callable[[int, Message], None]:
        def hear(node: int, message: Message) -> None:
            assert node == 1 - k and isinstance(message, Signal)
            self.heard[k].append(message.number)

        return hear


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setenv("DISTRUNTIME_UNREACHABLE", "1")
    with ExitStack() as stack:
        yield Two(stack)


@pytest.mark.parametrize("seed", range(4))
def test_each_message_arrives_once_and_in_order(two: Two, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(400):
        two.channels[0].send(1, Signal(number, ""))
        two.channels[1].send(0, Signal(number, ""))
        if rng.random() < 0.02:
            rng.choice(two.networks).tear()
        if rng.random() < 0.1:
            pause(0.01)
    until(lambda: [len(heard) for heard in two.heard] == [400, 400])
    assert two.heard == [list(range(400))] * 2


def test_a_connection_that_is_there_before_its_dialler_has_noted_it(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader heard of a connection that it did not know yet, and never introduced itself on it: what was
    said there waited for ever.
    """
    connect = Channel.connect

    def slowly(self: Channel, address: str, peer: bytes) -> None:
        connect(self, address, peer)
        pause(0.3)

    monkeypatch.setattr(Channel, "connect", slowly)
    two.channels[0].send(1, Signal(5, ""))
    until(lambda: two.heard[1] == [5], 20)


def test_a_silent_cut_costs_nothing(two: Two) -> None:
    two.channels[0].send(1, Signal(0, ""))
    until(lambda: two.heard[1] == [0])
    with two.networks[1].broken():
        for number in range(1, 50):
            two.channels[0].send(1, Signal(number, ""))
        pause(2.5)  # longer than silence is borne
        assert two.heard[1] == [0]
    until(lambda: len(two.heard[1]) == 50)
    assert two.heard[1] == list(range(50))


def test_another_worker_in_the_place_of_one_begins_to_count_anew(two: Two) -> None:
    two.channels[0].send(1, Signal(7, ""))
    until(lambda: two.heard[1] == [7])
    with ExitStack() as stack:
        other = Two(stack)
        two.channels[0].meet(Peers(0, SECRET, ["", other.networks[1].address]))
        two.channels[0].send(1, Signal(8, ""))
        until(lambda: other.heard[1] == [8])


def test_a_worker_takes_the_place_of_one_that_is_to_be_dialled_again(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new connection was given up when the old one's time had come, and what was said then was lost: a
    group with a restarted worker was never joined.
    """
    # The time to dial again comes after the new worker has been met.
    monkeypatch.setattr(peers, "_PAUSE", 0.5)
    sender = two.channels[0]
    sender.send(1, Signal(7, ""))
    until(lambda: two.heard[1] == [7])
    two.networks[1].tear()
    until(lambda: bool(sender._again))
    with ExitStack() as stack:
        other = Two(stack)
        sender.meet(Peers(0, SECRET, ["", other.networks[1].address]))
        sender.send(1, Signal(8, ""))
        until(lambda: other.heard[1] == [8])
        until(lambda: not sender._again)
        sender.send(1, Signal(9, ""))
        until(lambda: other.heard[1] == [8, 9])
