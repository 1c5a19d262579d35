"""The data channel for CPUs: torch's ProcessGroupGloo, for any number of groups and no global one.

gloo asks nobody who he is. So when all members are connected, and before a tensor moves, each sees for itself
who is at the other ends: its connections must be those that the others have, seen from their side, and what
only members know must come over each of them.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import final

import torch

from distruntime.errors import ConfigurationError
from distruntime.wire.data_channel import MOVES, REDUCES, Capabilities, Membership, numbers
from distruntime.wire.deadlines import MEET

from ..listening import LISTENING, Endpoint, TCPSockets, next_descriptors, sockets_among, tcp_sockets
from ..store import GroupStore
from .torch_group import TorchGroup, dist

log = logging.getLogger("distruntime.worker")

# torch 2.11, 2.13 and 2.15 agree here; every pair of reduction and dtype was tried. gloo has no int16. AVG
# takes floating point only. A SUM of bools leaves a 2 where two are true, and a 2 is no bool.
_NUMBERS = numbers(torch.int16)
_FLOATS = frozenset(d for d in _NUMBERS if d.is_floating_point)
_INTEGERS = _NUMBERS - _FLOATS
_BOOL = {torch.bool}
# No tensor has this tag, and nothing is ever sent with it.
_NEVER = (1 << 31) - 1
# No tensor has this tag. It is for the words that only members know.
_WORD = _NEVER - 1
# The worker tries so often to make a device while nothing else of this process begins to listen.
_TRIES = 20
# A word that only members know has so many bytes.
_SECRET = 32
# A device opens fewer descriptors than this, also where other threads open some meanwhile.
_OPENED = 24


@final
class Gloo(TorchGroup):
    """Every collective of torch.distributed, over TCP."""

    capabilities = Capabilities(
        frozenset({*MOVES, *REDUCES}),
        {
            "SUM": _NUMBERS,
            "AVG": _FLOATS,
            **dict.fromkeys(("PRODUCT", "MIN", "MAX"), _NUMBERS | _BOOL),
            **dict.fromkeys(("BAND", "BOR", "BXOR"), _INTEGERS | _BOOL),
        },
    )

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        options = dist.ProcessGroupGloo._Options()
        device, where = _device(membership.host)
        options._devices = [device]
        options._timeout = timedelta(seconds=membership.timeout)
        store = membership.store
        store.set(f"gloo-{self.rank}-listens", json.dumps(where))
        if self.rank == 0:
            store.set("gloo-secret", os.urandom(_SECRET))
        near = next_descriptors(self.size + _OPENED)
        self._group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        try:
            self._compare_ends(where, near)
            self._exchange_words(store.get("gloo-secret"))
        except BaseException:
            self.abort()
            raise

    # -- who is at the other ends ------------------------------------------------------------------

    def _compare_ends(self, where: Endpoint | None, near: Sequence[int]) -> None:
        """Raise `ConnectionError` unless there is a connection to each member, which that one has too.

        `near` has the descriptors that the connections most likely have.
        """
        store = self.membership.store
        places = [_endpoint(json.loads(store.get(f"gloo-{rank}-listens"))) for rank in range(self.size)]
        alone = isinstance(store, GroupStore) and store.members == 1
        own = self._connections(where, places, near if alone and None not in places else ())
        store.set(f"gloo-{self.rank}-ends", json.dumps(own))
        for rank in range(self.size):
            others = {
                (_endpoint(there), _endpoint(here))
                for here, there in json.loads(store.get(f"gloo-{rank}-ends"))
            }
            if rank == self.rank or where is None or places[rank] is None:
                continue
            # Such a pair ends where this member or the other one listens, so no connection of another group
            # counts.
            if not any(pair in others and (pair[0] == where or pair[1] == places[rank]) for pair in own):
                raise self._not_with(rank, "has no connection that ends there")

    def _connections(
        self, where: Endpoint | None, places: Sequence[Endpoint | None], near: Sequence[int]
    ) -> list[tuple[Endpoint, Endpoint]]:
        """Return the connections that end where this member or another one listens.

        Where this process has one member only, there is one for each other member. If `near` has as many, the
        other descriptors are not looked at. With looks at all, one more group cost a worker of 400 groups 45
        ms of processor time, and 3 ms without (2 cores, 2026-11).
        """
        if where is None:
            return []

        def ours(sockets: TCPSockets | None) -> list[tuple[Endpoint, Endpoint]]:
            connected = sockets.connected if sockets is not None else ()
            return [pair for pair in connected if pair[0] == where or pair[1] in places]

        own = ours(sockets_among(near))
        return own if near and len(own) == self.size - 1 else ours(tcp_sockets())

    def _exchange_words(self, secret: bytes) -> None:
        """Raise `ConnectionError` unless each member says over its connection what only a member can."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent = {rank: _word(secret, self.rank, rank) for rank in others}
        came = {rank: torch.zeros_like(sent[rank]) for rank in others}
        patience = timedelta(seconds=min(self.membership.timeout, MEET.get()))
        receiving = {rank: self._group.recv([came[rank]], rank, _WORD) for rank in others}
        sending = {rank: self._group.send([sent[rank]], rank, _WORD) for rank in others}
        for rank in others:
            try:
                receiving[rank].wait(patience)
                sending[rank].wait(patience)
            except RuntimeError as error:
                raise self._not_with(rank, f"has a connection that does not work: {error}") from error
            if not torch.equal(came[rank], _word(secret, rank, self.rank)):
                raise self._not_with(
                    rank, "has a connection whose other end does not know the group's secret"
                )

    def _not_with(self, rank: int, why: str) -> ConnectionError:
        return ConnectionError(
            f"gloo at rank {self.rank} is not connected with rank {rank}: it {why}. Expected a connection of "
            "the two alone; somebody who is no member has come between, or addresses are translated on the "
            'way. No tensor was sent. Where others can be on the way, use data_channel="tcp+tls"'
        )

    def abort(self) -> None:
        # gloo can be stopped from outside in one way only: an operation that times out closes every
        # connection of its group, and what waits raises. An operation with a member that is gone does not
        # time out. It fails, and closes nothing. So this tries each member, until one is there.
        for peer in range(self.size):
            if peer != self.rank:
                try:
                    self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER).wait(
                        timedelta(milliseconds=1)
                    )
                except RuntimeError:
                    # This closes the connections, or the next member is tried.
                    continue

    def close(self) -> None:
        del self._group


def _device(host: str) -> tuple[object, Endpoint | None]:
    """Return a device of gloo's, and where it listens; nothing where the system does not say."""
    with LISTENING:
        near = next_descriptors(_OPENED)
        device = dist.ProcessGroupGloo.create_device(hostname=host)
        listening = sockets_among(near).listening
    if len(listening) == 1:
        return device, next(iter(listening))
    # Other threads have opened or closed something meanwhile.
    for _ in range(_TRIES):
        with LISTENING:
            before = tcp_sockets()
            device = dist.ProcessGroupGloo.create_device(hostname=host)
            after = tcp_sockets()
        if before is None or after is None:
            return device, None
        new = after.listening - before.listening
        if len(new) == 1:
            return device, next(iter(new))
        if not new:
            log.warning(
                "where gloo listens cannot be seen here: who is at the other ends of its connections is not "
                "looked at"
            )
            return device, None
    raise ConfigurationError(
        f"another library of this worker has begun to listen somewhere, {_TRIES} times while gloo did: try "
        "again"
    )


def _endpoint(listed: object) -> Endpoint | None:
    match listed:
        case [str(host), int(port)]:
            return host, port
    return None


def _word(secret: bytes, source: int, to: int) -> torch.Tensor:
    """Return what one member says to another."""
    return torch.frombuffer(
        bytearray(hmac.digest(secret, f"gloo {source} {to}".encode("ascii"), "sha256")), dtype=torch.uint8
    )
