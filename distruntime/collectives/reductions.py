"""Reductions: `ReduceOp` as users give it, as groups send it, and what a data channel can reduce."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed

from ..errors import NotSupportedError, UsageError, without_our_frames
from ..wire.data_channel import Reduction
from .group import ProcessGroup

ReduceOp = torch.distributed.ReduceOp
# torch's names, such as `ReduceOp.SUM`, are no instances of `ReduceOp`.
Op = ReduceOp | ReduceOp.RedOpType

# These are sums with factors. So the parts of complex numbers may be reduced one by one.
LINEAR = frozenset({"SUM", "AVG", "PREMUL_SUM"})
SUM = Reduction("SUM")

# torch's stubs lack both.
_getstate: Callable[[ReduceOp], tuple[ReduceOp.RedOpType, float | None]] = vars(ReduceOp)["__getstate__"]
_make_premul_sum: Callable[[float], ReduceOp] = vars(torch.distributed)["_make_nccl_premul_sum"]

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def reduction(op: object) -> Reduction:
    """Return what a `ReduceOp` stands for; raise `UsageError` if `op` is none, or lacks its factor."""
    if isinstance(op, ReduceOp.RedOpType):
        found = Reduction(op.name)
    elif isinstance(op, ReduceOp):
        # torch._make_nccl_premul_sum returns an instance, and its factor is only in its state.
        kind, factor = _getstate(op)
        found = Reduction(kind.name, None if factor is None else float(factor))
    else:
        raise UsageError(f"op must be a distruntime.distributed.ReduceOp, got {op!r}")
    if (found.name == "PREMUL_SUM") != (found.factor is not None):
        raise UsageError(f"ReduceOp.{found.name} needs its factor: distruntime.distributed.premul_sum(0.5)")
    return found


def reduction_for(group: ProcessGroup, op: object, dtype: torch.dtype) -> Reduction:
    """Return what a `ReduceOp` stands for; raise `NotSupportedError` where the group cannot reduce by it."""
    found = reduction(op)
    require_reduction(group, found, dtype)
    return found


def require_reduction(group: ProcessGroup, wanted: Reduction, dtype: torch.dtype) -> None:
    """Raise `NotSupportedError` where a group's data channel lacks a reduction for this dtype."""
    name, have = wanted.name, group.capabilities.reductions.get(wanted.name, frozenset())
    reduced = _REAL.get(dtype, dtype) if name in LINEAR else dtype
    if reduced not in have:
        if have:
            dtypes = ", ".join(sorted(str(d)[6:] for d in have))
            raise NotSupportedError(
                f"the data channel {group.backend!r} reduces {dtypes} by {name}, not {str(dtype)[6:]}"
            )
        others = ", ".join(sorted(group.capabilities.reductions)) or "nothing"
        raise NotSupportedError(
            f"the data channel {group.backend!r} has no ReduceOp.{name}, only {others}: "
            "make a group with another backend="
        )


@without_our_frames
def premul_sum(factor: float) -> ReduceOp:
    """Return the reduction that multiplies each input by `factor` and sums, which NCCL has."""
    return _make_premul_sum(factor)
