"""torch's functional collectives on tensors of a mesh, as DTensor issues them: each is one instruction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..collectives.adjoints import Collective
from ..operators.special import SPECIAL
from ..tensors.uneven import UnevenTensor, uneven_calls
from .operation import even_splits, issue_along, perform, reduction_named
from .torch_world import lines_named

Arguments = Sequence[Any]

_OF_BOOLS = {"sum": "max", "product": "min"}


def _all_reduce(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    x, op, group = args
    if x.dtype is torch.bool:
        # Some data channels cannot reduce bools. A sum of bools says whether any is true, and a product
        # whether all are.
        by = reduction_named(_OF_BOOLS[op] if op in _OF_BOOLS else op)
        return perform(lines_named(group), Collective("all_reduce", by), x.to(torch.uint8)).to(torch.bool)
    return perform(lines_named(group), Collective("all_reduce", reduction_named(op)), x)


def _all_reduce_(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    x, op, group = args
    if isinstance(x, UnevenTensor):
        return x.copy_(perform(lines_named(group), Collective("all_reduce", reduction_named(op)), x))
    return issue_along(lines_named(group), "all_reduce", [x], into=[x], reduction=reduction_named(op))[0]


def _all_gather(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return perform(lines_named(args[2]), Collective("all_gather"), args[0])


def _all_gather_out(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return issue_along(lines_named(args[2]), "all_gather", [args[0]], into=[kwargs["out"]])[0]


def _reduce_scatter(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return perform(lines_named(args[3]), Collective("reduce_scatter", reduction_named(args[1])), args[0])


def _all_to_all(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    x, output, inputs, group = args
    lines = lines_named(group)
    return perform(lines, Collective("all_to_all", splits=even_splits(lines, x, output, inputs)), x)


def _broadcast(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return perform(lines_named(args[2]), Collective("broadcast", root=args[1]), args[0])


def _shard_dim_alltoall(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Shard by another dimension.

    Each member sends part k along `shard_dim` to member k, and joins what it gets along `gather_dim`.
    """
    x, gather_dim, shard_dim, group = args
    lines = lines_named(group)
    parts = torch.stack(x.chunk(lines.size, shard_dim))
    splits = ((1,) * lines.size,) * lines.size
    got = perform(lines, Collective("all_to_all", splits=splits), parts)
    return torch.cat(list(got.unbind(0)), gather_dim).contiguous()


def _wait(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return args[0]


def _each(one: Callable[..., Any]) -> Callable[..., Any]:
    def coalesced(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
        return [one(cls, func, (x, *args[1:]), kwargs) for x in args[0]]

    return coalesced


def _all_gather_copy_in(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """FSDP2's: lay a member's shards one after the other.

    Here at the start of the output, from where all_gather takes them.
    """
    shards, output, sizes, numel = args[:4]
    into = output.new_empty((int(numel),))
    torch._foreach_copy_(list(torch.split(into, [int(n) for n in sizes])), list(shards))
    return into, output


def _split_with_sizes_copy(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> None:
    """FSDP2's name for one of aten's, which workers have."""
    torch.split_with_sizes_copy(*args, **kwargs)


def _chunk_cat(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> None:
    """FSDP2's name for one of aten's, which workers have."""
    torch._chunk_cat(*args, **kwargs)


def _nothing(cls: Any, func: Any, args: Arguments, kwargs: dict[str, Any]) -> None:
    """For CUDA's allocator: here the log says which streams have used a value."""


def prepare() -> None:
    """Let these operators come here, from wherever they are called."""
    for namespace in ("_c10d_functional", "_c10d_functional_autograd"):
        SPECIAL.update({f"{namespace}::{name}": special for name, special in _TABLE.items()})
        uneven_calls.update({f"{namespace}::{name}": special for name, special in _TABLE.items()})
    uneven_calls["_dtensor::shard_dim_alltoall"] = _shard_dim_alltoall
    SPECIAL["_dtensor::shard_dim_alltoall"] = _shard_dim_alltoall
    SPECIAL["fsdp::all_gather_copy_in"] = _all_gather_copy_in
    SPECIAL["fsdp::split_with_sizes_copy"] = _split_with_sizes_copy
    SPECIAL["fsdp::chunk_cat"] = _chunk_cat
    SPECIAL["fsdp::record_grad_output_stream"] = _nothing


_TABLE: dict[str, Any] = {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce_,
    "all_reduce_coalesced": _each(_all_reduce),
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_out": _all_gather_out,
    "all_gather_into_tensor_coalesced": _each(_all_gather),
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _each(_reduce_scatter),
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
    "wait_tensor": _wait,
    "_wrap_tensor_autograd": _wait,
}
