"""Whether the collectives of a group are right, and how fast: `check_collectives`, `distruntime comm`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

import distruntime as dr

from ..collectives.group import ProcessGroup
from ..errors import UsageError, without_our_frames
from ..session.tables import Rows, table_html, table_text
from ..wire.units import size_text

# These sizes are tried, in bytes for each member.
SIZES = (1 << 10, 1 << 20, 16 << 20)

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class CollectiveTime:
    """What one collective of one size took, in seconds, and its rates, in bytes a second.

    `algorithm` is the size by the time. `bus` is what each member's link carries, as nccl-tests counts it
    (its PERFORMANCE.md). It can be held against the hardware, for any collective and number of members.
    """

    collective: str
    nbytes: int
    seconds: float
    algorithm: float
    bus: float


@final
class CollectiveTimes(tuple[CollectiveTime, ...]):
    """One `CollectiveTime` for each collective and size; shown as a table."""

    def _rows(self) -> Rows:
        rows = [["collective", "size", "time", "algorithm", "bus"]]
        for one in self:
            rows.append(
                [
                    one.collective,
                    size_text(one.nbytes),
                    f"{one.seconds * 1e3:.3f} ms",
                    f"{size_text(one.algorithm)}/s",
                    f"{size_text(one.bus)}/s",
                ]
            )
        return rows

    def __repr__(self) -> str:
        return table_text(self._rows())

    def _repr_html_(self) -> str:
        return table_html(self._rows())


@dataclass(frozen=True)
class _Kind:
    """A collective: how it is called, what each member should have, and the bus's share of its size.

    `call` gets the members' inputs of n numbers, and returns their outputs. `right` gets the inputs, as local
    tensors, and a member's number.
    """

    call: Callable[[Tensors, ProcessGroup], Tensors]
    right: Callable[[Tensors, int], torch.Tensor]
    bus: Callable[[int], float]


def _in_place(act: Callable[[Tensors, ProcessGroup], object]) -> Callable[[Tensors, ProcessGroup], Tensors]:
    def call(xs: Tensors, group: ProcessGroup) -> Tensors:
        act(xs, group)
        return xs

    return call


def _all_gather(xs: Tensors, group: ProcessGroup) -> Tensors:
    # The size is that of what comes out.
    outs = [x.new_empty(x.numel()) for x in xs]
    dr.distributed.all_gather_into_tensor(outs, [x[: x.numel() // len(xs)] for x in xs], group)
    return outs


def _reduce_scatter(xs: Tensors, group: ProcessGroup) -> Tensors:
    outs = [x.new_empty(x.numel() // len(xs)) for x in xs]
    dr.distributed.reduce_scatter_tensor(outs, xs, group=group)
    return outs


def _all_to_all(xs: Tensors, group: ProcessGroup) -> Tensors:
    outs = [torch.empty_like(x) for x in xs]
    dr.distributed.all_to_all_single(outs, xs, group=group)
    return outs


def _ring(xs: Tensors, group: ProcessGroup) -> Tensors:
    del group
    return [xs[k - 1].to(x.device) for k, x in enumerate(xs)]


def _sum(xs: Tensors, k: int) -> torch.Tensor:
    del k
    return torch.stack(xs).sum(0)


def _parts(xs: Tensors, k: int) -> list[torch.Tensor]:
    return [x.chunk(len(xs))[k] for x in xs]


_KINDS = {
    "all_reduce": _Kind(
        _in_place(lambda xs, g: dr.distributed.all_reduce(xs, group=g)), _sum, lambda n: 2 * (n - 1) / n
    ),
    "all_gather": _Kind(
        _all_gather, lambda xs, k: torch.cat([x[: x.numel() // len(xs)] for x in xs]), lambda n: (n - 1) / n
    ),
    "reduce_scatter": _Kind(
        _reduce_scatter, lambda xs, k: torch.stack(_parts(xs, k)).sum(0), lambda n: (n - 1) / n
    ),
    "broadcast": _Kind(
        _in_place(lambda xs, g: dr.distributed.broadcast(xs, group_src=0, group=g)),
        lambda xs, k: xs[0],
        lambda n: 1.0,
    ),
    "all_to_all": _Kind(_all_to_all, lambda xs, k: torch.cat(_parts(xs, k)), lambda n: (n - 1) / n),
    "send to the next": _Kind(_ring, lambda xs, k: xs[k - 1], lambda n: 1.0),
}


@without_our_frames
def check_collectives(
    group: ProcessGroup | None = None, sizes: Sequence[int] = SIZES, *, repeat: int = 5
) -> CollectiveTimes:
    """Try each collective of a group: compare what it gives, then time it. Block for seconds.

    Args:
        group: `dr.distributed.new_group(...)`; None: all nodes of the session. For a line of a mesh, name its
            members: `dr.distributed.new_group([mesh.places[k] for k in mesh.lines("data").rows[0]])`.
        sizes: in bytes for each member.
        repeat: so many calls are timed together, behind one that is not.

    Returns:
        The times, which print as a table.

    Raises:
        AssertionError: a collective gives a member something else than it should; the text names both.
        UsageError: the group is of a mesh or has one member, or a size is too small.
    """
    found = dr.distributed.new_group() if group is None else group
    if not isinstance(found, ProcessGroup):
        raise UsageError(
            f"check_collectives takes a group of dr.distributed.new_group(places), "
            f"got {type(found).__name__}. For a line of a mesh, name its members: "
            "dr.distributed.new_group([mesh.places[k] for k in mesh.lines(mode).rows[0]])"
        )
    members = found.size()
    if members < 2:
        raise UsageError("collectives need two members at least: this group has one")
    times = []
    for nbytes in sizes:
        count = nbytes // 4 // members * members
        if count < members:
            raise UsageError(f"a size is {4 * members} bytes at least for {members} members, got {nbytes}")
        # Whole numbers add up to the same in any order.
        given = [torch.arange(count, dtype=torch.float32) % 97 + k for k in range(members)]
        for name, kind in _KINDS.items():
            xs = [x.to(place.device) for x, place in zip(given, found.places, strict=True)]
            made = kind.call(xs, found)
            for k, one in enumerate(made):
                right, got = kind.right(given, k), one.cpu()
                if not torch.equal(got, right):
                    at = int((got != right).nonzero()[0])
                    raise AssertionError(
                        f"{name} of {size_text(nbytes)}: member {k} ({found.places[k]}) got {got[at].item()} "
                        f"at {at}, expected {right[at].item()}"
                    )
            dr.synchronize()
            began = time.perf_counter()
            for _ in range(repeat):
                kind.call(xs, found)
            dr.synchronize()
            seconds = (time.perf_counter() - began) / repeat
            rate = 4 * count / seconds
            times.append(CollectiveTime(name, 4 * count, seconds, rate, rate * kind.bus(members)))
    return CollectiveTimes(times)
