"""What tells one kind of call of a program from another: its tensors' metadata and its plain values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._pytree import tree_flatten

from ..errors import UsageError
from ..guards.seen import PLAIN
from ..log.line import line_text, user_line
from ..tensors.tensor import DistributedTensor
from .returned import layout_of, local_leaf


def signature_of(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[list[object], object]:
    """Return the leaves of a call's arguments, and what tells this kind of call from others."""
    flat = not kwargs
    key: list[object] = []
    memories: dict[int, int] = {}
    leaves = list(args)
    if not flat or any(not isinstance(leaf, (DistributedTensor, *PLAIN)) for leaf in leaves):
        leaves, tree = tree_flatten((args, kwargs))
        key.append(tree)
    for k, leaf in enumerate(leaves):
        layout = None if type(leaf) is DistributedTensor else layout_of(leaf)
        if layout is not None:
            key += (layout, leaf.requires_grad)  # type: ignore[attr-defined]
            leaf = local_leaf(leaf)
            leaves = [*leaves[:k], leaf, *leaves[k + 1 :]]
        if type(leaf) is DistributedTensor:
            handle = leaf._handle
            # Where it begins in its memory is no part of the kind: the batches of one tensor are alike.
            spec = handle.spec if not handle.spec.offset else handle.spec.at(0)
            key += (spec, handle.place, leaf.requires_grad)
            # Two arguments that are one tensor are one name in a recording. Two that share memory are one
            # memory in the order of streams.
            first = memories.setdefault(id(handle.storage), k)
            if first != k:
                key.append((first, _first_name(leaves, handle.ref)))
        elif type(leaf) is float:
            key.append(float)
        elif isinstance(leaf, PLAIN):
            key += (type(leaf), leaf)
        elif isinstance(leaf, torch.Tensor):
            remedy = (
                'send it first, x.to("remote")' if type(leaf) is torch.Tensor else "pass its plain tensors"
            )
            raise UsageError(
                "a program's tensors are remote, and an argument is a "
                f"{type(leaf).__name__} on {leaf.device}\n"
                f"  called at {line_text(user_line())}\n  {remedy}"
            )
        else:
            key.append(_Is(leaf))
    return leaves, tuple(key)


def _first_name(leaves: Sequence[object], ref: int) -> int:
    """Return the first argument that is the value of this ref."""
    return next(
        k for k, leaf in enumerate(leaves) if type(leaf) is DistributedTensor and leaf._handle.ref == ref
    )


class _Is:
    """An object as a part of a key: it is equal to itself only."""

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def __hash__(self) -> int:
        return id(self._thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and other._thing is self._thing
