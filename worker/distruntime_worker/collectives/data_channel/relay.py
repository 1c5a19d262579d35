"""The data channel for workers that reach each other only through ssh: their own channel carries the bytes.

It goes wherever that channel goes, is encrypted as that is, and survives its cuts. Each message travels in
pieces. The receiver says which ones it has taken, so that a sender is never far ahead.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping
from typing import final

import torch

from distruntime.wire.codec import tensor_bytes
from distruntime.wire.data_channel import (
    MOVES,
    REDUCES,
    Capabilities,
    DataChannel,
    Membership,
    Reduction,
    numbers,
)

from ..store import GroupStore

# A piece has so many bytes at most: one frame, with what is around it.
_PIECE = 1 << 18
# So many pieces of a message are on their way.
_WINDOW = 16
# It stands before the first piece of a message, and is its size.
_SIZE = struct.Struct("!Q")

_NUMBERS = numbers()
_FLOATS = frozenset(d for d in _NUMBERS if d.is_floating_point)
_INTEGERS = _NUMBERS - _FLOATS
_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@final
class Relay(DataChannel):
    """Every collective, over the workers' own channel. One member reduces for all."""

    capabilities = Capabilities(
        frozenset({*MOVES, *REDUCES}),
        {
            **dict.fromkeys(("SUM", "PRODUCT", "MIN", "MAX"), _NUMBERS),
            "AVG": _FLOATS,
            **dict.fromkeys(("BAND", "BOR", "BXOR"), _INTEGERS),
        },
    )

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        store = membership.store
        assert isinstance(store, GroupStore)
        self._store = store
        # Collectives come in one order on all members.
        self._collectives = 0
        store.set(f"relay-{self.rank}", b"")
        for rank in range(self.size):
            store.get(f"relay-{rank}")

    # -- messages ----------------------------------------------------------------------------------

    def send(self, data: torch.Tensor, to: int, tag: int) -> None:
        self._put(to, f"t{tag}", tensor_bytes(data))

    def receive(self, data: torch.Tensor, source: int, tag: int) -> None:
        self._take(source, f"t{tag}", tensor_bytes(data))

    def _put(self, to: int, name: str, body: memoryview) -> None:
        """Send a message. Return when it has been received."""
        key, count = f"{self.rank}>{to} {name}", max(1, -(-len(body) // _PIECE))
        try:
            for k in range(count):
                if k >= _WINDOW:
                    self._store.take(f"{key} has {k - _WINDOW}")
                head = _SIZE.pack(len(body)) if k == 0 else b""
                self._store.post(to, f"{key} {k}", head + bytes(body[k * _PIECE : (k + 1) * _PIECE]))
            for k in range(max(0, count - _WINDOW), count):
                self._store.take(f"{key} has {k}")
        except TimeoutError as error:
            raise ConnectionError(
                f"relay at rank {self.rank}: sending {len(body)} bytes to rank {to} failed: {error}"
            ) from error

    def _take(self, source: int, name: str, body: memoryview) -> None:
        """Receive a message of a known size."""
        key, count = f"{source}>{self.rank} {name}", max(1, -(-len(body) // _PIECE))
        try:
            for k in range(count):
                piece = memoryview(self._store.take(f"{key} {k}"))
                if k == 0:
                    (size,) = _SIZE.unpack(piece[: _SIZE.size])
                    piece = piece[_SIZE.size :]
                    if size != len(body):
                        raise ConnectionError(
                            f"relay at rank {self.rank}: receiving {len(body)} bytes from rank {source} "
                            f"failed: it sends {size}"
                        )
                # The memory of an empty tensor cannot be written, not even with nothing.
                if piece:
                    body[k * _PIECE : k * _PIECE + len(piece)] = piece
                self._store.post(source, f"{key} has {k}", b"")
        except TimeoutError as error:
            raise ConnectionError(
                f"relay at rank {self.rank}: receiving {len(body)} bytes from rank {source} failed: {error}"
            ) from error

    def _exchange(self, sent: Mapping[int, memoryview], received: Mapping[int, memoryview]) -> None:
        """Send to and receive from several members at a time, as the next collective."""
        self._collectives += 1
        name = f"c{self._collectives}"
        errors: list[Exception] = []

        def put(to: int, body: memoryview) -> None:
            try:
                self._put(to, name, body)
            except Exception as error:
                # The thread of the caller raises it, below.
                errors.append(error)

        threads = [threading.Thread(target=put, args=item, daemon=True) for item in sent.items()]
        for thread in threads:
            thread.start()
        for source, body in received.items():
            self._take(source, name, body)
        for thread in threads:
            thread.join()
        if errors:
            raise errors.pop()

    # -- collectives -------------------------------------------------------------------------------

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        body = tensor_bytes(data)
        if self.rank == root:
            self._exchange(dict.fromkeys(self._others(), body), {})
        else:
            self._exchange({}, {root: body})

    def all_gather(self, output: torch.Tensor, data: torch.Tensor) -> None:
        parts = output.chunk(self.size)
        parts[self.rank].copy_(data)
        self._exchange(
            dict.fromkeys(self._others(), tensor_bytes(data)),
            {rank: tensor_bytes(parts[rank]) for rank in self._others()},
        )

    def gather(self, output: torch.Tensor | None, data: torch.Tensor, root: int) -> None:
        if output is None:
            self._exchange({root: tensor_bytes(data)}, {})
            return
        parts = output.chunk(self.size)
        parts[self.rank].copy_(data)
        self._exchange({}, {rank: tensor_bytes(parts[rank]) for rank in self._others()})

    def scatter(self, output: torch.Tensor, data: torch.Tensor | None, root: int) -> None:
        if data is None:
            self._exchange({}, {root: tensor_bytes(output)})
            return
        parts = data.chunk(self.size)
        output.copy_(parts[self.rank])
        self._exchange({rank: tensor_bytes(parts[rank]) for rank in self._others()}, {})

    def all_to_all(
        self, output: torch.Tensor, data: torch.Tensor, output_splits: list[int], data_splits: list[int]
    ) -> None:
        here, there = output.split(output_splits), data.split(data_splits)
        here[self.rank].copy_(there[self.rank])
        self._exchange(
            {rank: tensor_bytes(there[rank]) for rank in self._others()},
            {rank: tensor_bytes(here[rank]) for rank in self._others()},
        )

    def barrier(self) -> None:
        word, words = torch.zeros(1, dtype=torch.uint8), torch.zeros(self.size, dtype=torch.uint8)
        self.all_gather(words, word)

    def all_reduce(self, data: torch.Tensor, op: Reduction) -> None:
        self.reduce(data, 0, op)
        self.broadcast(data, 0)

    def reduce(self, data: torch.Tensor, root: int, op: Reduction) -> None:
        if self.rank != root:
            self._exchange({root: tensor_bytes(data)}, {})
            return
        parts = {rank: torch.empty_like(data) for rank in self._others()}
        self._exchange({}, {rank: tensor_bytes(part) for rank, part in parts.items()})
        parts[root] = data.clone()
        total = parts[0]
        # Each member gets the same sum in each run: the order is that of the ranks.
        for rank in range(1, self.size):
            total = _OPS[op.name](total, parts[rank])
        data.copy_(total / self.size if op.name == "AVG" else total)

    def reduce_scatter(self, output: torch.Tensor, data: torch.Tensor, op: Reduction) -> None:
        whole = data.clone()
        self.reduce(whole, 0, op)
        # What moves comes as bytes.
        into = output.view(-1).view(torch.uint8)
        self.scatter(into, whole.view(-1).view(torch.uint8) if self.rank == 0 else None, 0)

    # -- the end -----------------------------------------------------------------------------------

    def abort(self) -> None:
        """The store has ended, and whoever waits in it has been woken."""

    def close(self) -> None:
        """Nothing is open."""
