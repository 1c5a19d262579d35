"""Issuing an operation that writes tensors of its members, and what these have to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import UsageError
from ..log.spec import Spec
from ..tensors.tensor import DistributedTensor
from ..wire.data_channel import Reduction
from .arguments import at, expect, tensor
from .group import ProcessGroup
from .operation import Operands, issue_operation
from .splits import NO_SPLITS, ByteSplits
from .work import Outputs, Work, aside

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Sequence[torch.Tensor]]
Remote = Sequence[Sequence[DistributedTensor]]


def issue_in_place(
    group: ProcessGroup,
    operation: str,
    inputs: Remote,
    outputs: Remote,
    values: Callable[[], Tensors],
    result: Outputs,
    async_op: bool,
    *,
    root: int = -1,
    reduction: Reduction | None = None,
    splits: ByteSplits = NO_SPLITS,
    everything: bool = False,
) -> Work | None:
    """Issue an operation that writes `outputs`, rank by rank.

    Where a gradient is wanted, `values` issues the functional form, and what it returns is copied over them.
    With `async_op` it runs on streams of the group's own, and a `Work` with this `result` waits for it.
    """

    def run() -> None:
        if _wants_gradient(outputs, inputs):
            for out, value in zip((t for row in outputs for t in row), values()):
                out.copy_(value)
            return
        parts: list[Operands] = [
            ([t._handle for t in ins], [t._handle for t in outs]) for ins, outs in zip(inputs, outputs)
        ]
        issue_operation(group, operation, parts, inplace=True, root=root, reduction=reduction, splits=splits)
        for row in outputs:
            for t in row:
                torch.autograd.graph.increment_version(t)

    if not async_op:
        run()
        return None
    return Work(repr(group), aside(group.streams, group.homes, everything, run), result)


def _wants_gradient(outputs: Remote, inputs: Remote) -> bool:
    """Return whether a gradient is wanted; raise what torch raises for outputs that cannot be written then.

    Nothing has been issued when it raises.
    """
    if not torch.is_grad_enabled():
        return False
    written = [t for row in outputs for t in row if t.requires_grad]
    if any(t.is_leaf for t in written):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    return bool(written) or any(t.requires_grad for row in inputs for t in row)


def each(tensors: Sequence[DistributedTensor]) -> Remote:
    """Return a row for each member, with its one tensor."""
    return [[t] for t in tensors]


def only(root: int, row: Sequence[DistributedTensor], size: int) -> Remote:
    """Return a row for each member, which is empty but for the root's."""
    return [row if rank == root else [] for rank in range(size)]


def all_expect(
    lists: Sequence[Sequence[DistributedTensor]], size: Sequence[int], dtype: torch.dtype, name: str
) -> None:
    for i, row in enumerate(lists):
        for j, t in enumerate(row):
            expect(t, size, dtype, f"{name}[{i}][{j}]" if len(lists) > 1 else f"{name}[{j}]")


def expect_whole(tensors: Sequence[DistributedTensor], part: Spec, size: int, name: str) -> None:
    """Raise `UsageError` unless each is what `size` tensors like `part` give, joined or stacked."""
    stacked = (size, *part.size)
    joined = (part.size[0] * size, *part.size[1:]) if part.size else (size,)
    for k, t in enumerate(tensors):
        if tuple(t.shape) not in (stacked, joined) or t.dtype != part.dtype:
            raise UsageError(
                f"{name}[{k}] must be {joined} or {stacked} {str(part.dtype)[6:]}, got {t._handle.spec}"
            )


def at_root(group: ProcessGroup, root: int, tensors: object, name: str) -> list[DistributedTensor]:
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence) or len(tensors) != group.size():
        raise UsageError(
            f"{name} must be a list of {group.size()} tensors, one for each member, on {group.places[root]}"
        )
    return [at(group, root, tensor(t, f"{name}[{k}]"), f"{name}[{k}]") for k, t in enumerate(tensors)]
