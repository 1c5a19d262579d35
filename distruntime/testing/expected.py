"""What the suite of data channels expects, computed here, and how it compares."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

import distruntime as dr

from ..collectives.reductions import Op

KINDS = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)

FACTOR = 0.5
# So many numbers of float32 are 16 MiB.
LARGE = 4 << 20

Tensors = list[torch.Tensor]


class Drawn:
    """Tensors for members at some places, the same in each run."""

    def __init__(self, places: Sequence[dr.types.Place], seed: int) -> None:
        self.places, self.size = list(places), len(places)
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Return small whole numbers, so that sums and products are exact in any dtype."""
        low, high = (0, 2) if dtype == torch.bool else (1, 4)
        whole = torch.randint(
            low, high, shape if shape != (LARGE,) else (LARGE >> 6,), generator=self._random
        ).to(dtype)
        # Drawing so many numbers takes long.
        return whole if whole.shape == shape else whole.repeat(1 << 6)

    def rows(self, dtype: torch.dtype, *shape: int) -> Tensors:
        """Return one such tensor for each member, here."""
        return [self.draw(dtype, *shape) for _ in self.places]

    def there(self, rows: Sequence[torch.Tensor]) -> Tensors:
        """Return them where the members are."""
        return [self.at(rank, row) for rank, row in enumerate(rows)]

    def at(self, rank: int, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor of that member."""
        with dr.on(self.places[rank].node, self.places[rank].local_device):
            return value.to("remote")

    def lists(self, dtype: torch.dtype, *shape: int) -> list[Tensors]:
        """Return a list of zeros for each member, one for each."""
        return [
            self.there_at(rank, [torch.zeros(shape, dtype=dtype) for _ in self.places])
            for rank in range(self.size)
        ]

    def there_at(self, rank: int, values: Sequence[torch.Tensor]) -> Tensors:
        """Return tensors of one member."""
        return [self.at(rank, value) for value in values]


def accelerator_of(node: int) -> dr.types.Place:
    """Return an accelerator of a node, another one for each node where all of them see the same."""
    names = [device.name for device in dr.nodes()[node].devices if device.name != "cpu"]
    if not names:
        raise dr.errors.UsageError(
            f"this data channel takes tensors of GPUs only, and node {node} offers none"
        )
    return dr.place(node, f"accelerator:{names[node % len(names)].partition(':')[2]}")


@contextmanager
def killed(pid: int) -> Iterator[None]:
    """Hold a worker still for the length of a `with` block, then kill it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


def move_to(value: torch.Tensor, place: dr.types.Place) -> torch.Tensor:
    assert isinstance(value, dr.DistributedTensor)
    return value.to(place)


def reduction_op(name: str) -> Op:
    found: Op = (
        dr.distributed.premul_sum(FACTOR) if name == "PREMUL_SUM" else getattr(dr.distributed.ReduceOp, name)
    )
    return found


def reduced_here(op: str, rows: Tensors) -> torch.Tensor:
    dtype = rows[0].dtype
    whole = torch.stack([row.to(torch.float64 if dtype.is_floating_point else torch.int64) for row in rows])
    match op:
        case "SUM":
            result = whole.sum(0)
        case "AVG":
            result = whole.mean(0)
        case "PREMUL_SUM":
            result = (whole * FACTOR).sum(0)
        case "PRODUCT":
            result = whole.prod(0)
        case "MIN":
            result = whole.amin(0)
        case "MAX":
            result = whole.amax(0)
        case _:
            bits = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op]
            result = functools.reduce(bits, whole.unbind())
    return result.to(dtype)


def require_same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """Raise `AssertionError` unless remote tensors hold what local ones do.

    They agree to the bit, but for roundings of what is divided.
    """
    for rank, (here, expected) in enumerate(zip(dr.fetch(list(found)), wanted)):
        # A bool may hold a 2, which compares equal to another that does.
        if here.dtype == torch.bool:
            here, expected = here.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
        if not torch.equal(here, expected):
            torch.testing.assert_close(
                here, expected, msg=functools.partial("[{}] is wrong: {}".format, rank)
            )


def text_of(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype)[6:]}"
