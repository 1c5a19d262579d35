"""Counts of what was sent and has come: when the other end is told, and when memory may be written again."""

from __future__ import annotations

import random

import pytest

from distruntime.errors import ProtocolError
from distruntime.wire.link import EVERY, LARGE, MUCH, Delivery, Link

MiB = 1 << 20


@pytest.mark.parametrize("before", range(EVERY))
@pytest.mark.parametrize(
    "sizes", [[MiB] * 2 + [900_000], [MiB] * 4 + [1], [MiB] * 5, [100], [MiB] * 70 + [5]]
)
def test_a_value_in_parts_is_acknowledged_to_its_last_part(before: int, sizes: list[int]) -> None:
    link = Link(b"peer")
    for _ in range(before):  # so that an acknowledgement falls due at any of the parts
        link.count(0, False)
    known = [link.received for nbytes in sizes if link.count(nbytes, True)]
    if link.count(0, False):  # the reply, which ends the value
        known.append(link.received)
    assert known and known[-1] >= before + len(sizes)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_not_acknowledged_is_bounded(seed: int) -> None:
    draw, link = random.Random(seed), Link(b"peer")
    messages = bytes_ = 0
    for _ in range(2000):
        nbytes, more = draw.choice([0, 0, 100, 60_000, MiB]), draw.random() < 0.3
        messages, bytes_ = messages + 1, bytes_ + nbytes
        if link.count(nbytes, more):
            messages = bytes_ = 0
        assert messages < EVERY and bytes_ < MUCH + MiB
        assert more or bytes_ < LARGE


def test_one_in_so_many_small_messages_is_acknowledged() -> None:
    link = Link(b"peer")
    due = [number for number in range(1, 4 * EVERY + 1) if link.count(0, False)]
    assert due == [EVERY, 2 * EVERY, 3 * EVERY, 4 * EVERY]


def test_memory_is_the_users_again_when_it_has_arrived_or_is_copied() -> None:
    link, data = Link(b"peer"), bytearray(b"abc")
    sent = Delivery(link, [b"head", memoryview(data)])
    assert not sent.done  # it has no number: somebody else is using the socket
    link.keep(sent)
    assert not sent.done
    link.peer = None
    assert sent.done
    data[:] = b"xyz"
    assert [bytes(frame) for frame in link.kept[0].frames] == [b"head", b"abc"]
    link.peer = b"another"
    assert not sent.done
    link.acknowledge(1)
    assert sent.done and not link.kept


class _Reads:
    done = False


def test_memory_that_zeromq_still_reads_is_not_the_users() -> None:
    link, reads = Link(b"peer"), _Reads()
    sent = Delivery(link, [memoryview(bytearray(3))])
    sent.trackers = [reads]
    link.keep(sent)
    link.peer = None
    assert not sent.done
    reads.done = True
    assert sent.done


def test_counts_that_cannot_be() -> None:
    link = Link(b"peer")
    for _ in range(3):
        link.keep(Delivery(link, [b"x"]))
    link.acknowledge(2)
    for wrong in (1, 4, -1):
        with pytest.raises(ProtocolError, match="acknowledged"):
            link.acknowledge(wrong)
    assert [kept.number for kept in link.kept] == [3]
