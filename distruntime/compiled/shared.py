"""Whether what a graph gets lies in one memory.

A graph that writes to arguments is traced as if no two of them overlapped. Where they do, a write to one
would not reach the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from operator import attrgetter

import torch
from torch.fx import GraphModule

from ..log.handle import Handle
from ..tensors.tensor import DistributedTensor


class SharesMemory(Exception):
    """A call is none for a graph that was traced for arguments that do not overlap."""


def overlap(values: Iterable[object]) -> bool:
    """Whether two of these tensors, or handles, may be of the same bytes."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for one in values:
        handle = one._handle if isinstance(one, DistributedTensor) else one
        if type(handle) is Handle:
            begin, end = handle.spec.begin, handle.spec.extent
            ranges.setdefault(id(handle.storage), []).append((begin, end))
        elif isinstance(one, torch.Tensor):
            # To torch, tensors of this process overlap if they share a memory.
            ranges.setdefault(one.untyped_storage()._cdata, []).append((0, 1))
    return any(len(found) > 1 and _meet(found) for found in ranges.values())


def _meet(ranges: list[tuple[int, int]]) -> bool:
    ranges = sorted(one for one in ranges if one[1])
    return any(after[0] < before[1] for before, after in pairwise(ranges))


def share_memory(values: Iterable[object]) -> bool:
    """Whether two of these tensors are in one memory."""
    memories = [
        id(one._handle.storage) if isinstance(one, DistributedTensor) else one.untyped_storage()._cdata
        for one in values
        if isinstance(one, torch.Tensor)
    ]
    return len(set(memories)) < len(memories)


def attributes_of(graph: GraphModule) -> list[object]:
    """Return the tensors that a graph has, besides its arguments: the parameters of an optimizer."""
    names = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    found = (attrgetter(name)(graph) for name in names)
    return [*{id(one): one for one in found if isinstance(one, torch.Tensor)}.values()]
