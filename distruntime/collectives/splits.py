"""Splits: how much each member of an all_to_all sends to each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import UsageError
from ..log.spec import Spec
from ..tensors.tensor import DistributedTensor
from .group import ProcessGroup

# Row i has the number of rows that member i sends to each member.
Splits = tuple[tuple[int, ...], ...]
# Each rank has here how many bytes that member sends to each, and how many it gets from each.
ByteSplits = tuple[Splits, Splits]
NO_SPLITS: ByteSplits = ((), ())


def transposed(splits: Splits) -> Splits:
    """Return the splits of the way back."""
    return tuple(zip(*splits))


def byte_splits(splits: Splits, spec: Spec) -> ByteSplits:
    """Return, by rank, the bytes to each member and from each member, for rows like those of `spec`."""
    row = spec.dtype.itemsize * torch.Size(spec.size[1:]).numel()
    sent = tuple(tuple(n * row for n in rows) for rows in splits)
    return sent, transposed(sent)


def splits_of(
    group: ProcessGroup,
    tensors: Sequence[DistributedTensor],
    splits: Sequence[Sequence[int]] | None,
    name: str,
) -> Splits:
    """Return how many rows of each member's tensor go to each; raise `UsageError` where that does not fit."""
    size, rest = group.size(), tuple(tensors[0].shape[1:])
    for rank, t in enumerate(tensors):
        if t.dim() == 0 or tuple(t.shape[1:]) != rest or t.dtype != tensors[0].dtype:
            raise UsageError(
                "tensors must be alike but for their first dimension: "
                f"[0] is {tensors[0]._handle.spec}, [{rank}] is {t._handle.spec}"
            )
    if splits is None:
        for rank, t in enumerate(tensors):
            if t.shape[0] % size:
                raise UsageError(
                    f"[{rank}] has {t.shape[0]} rows, which {size} members cannot share equally: say {name}="
                )
        return tuple((t.shape[0] // size,) * size for t in tensors)
    require_splits(group, splits, name)
    for rank, (t, row) in enumerate(zip(tensors, splits)):
        if any(type(n) is not int or n < 0 for n in row) or sum(row) != t.shape[0]:
            raise UsageError(
                f"{name}[{rank}] must be {size} numbers that sum to the {t.shape[0]} rows of the tensor, "
                f"got {row!r}"
            )
    return tuple(map(tuple, splits))


def require_splits(group: ProcessGroup, splits: object, name: str) -> None:
    """Raise `UsageError` unless there is a number for each pair of members."""
    size = group.size()
    rows = (
        [len(row) if isinstance(row, Sequence) else -1 for row in splits]
        if isinstance(splits, Sequence)
        else []
    )
    if rows != [size] * size:
        raise UsageError(
            f"{name} must have {size} rows of {size} numbers, one for each pair of members, got {splits!r}"
        )
