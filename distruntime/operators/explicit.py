"""Calls whose results depend on torch's default dtype, said so that they do not.

A worker has several masters, and torch has one default dtype for a process. So the worker's stays float32,
and a call that depends on this process's is made explicit: a factory gets its `dtype`, and integers that a
call turns into floating-point numbers are converted before it. Nothing here runs while the default is
float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import NotSupportedError, is_of_caller
from ..log.spec import Spec, spec_of
from .alias_info import tensors_of
from .propagate import NeedsWorker, New, Outcome, Result, Same, propagate

WORKERS_DEFAULT = torch.float32


def _numeric(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _specs(results: Sequence[Result], operands: Sequence[Any]) -> Iterator[Spec]:
    for result in results:
        if isinstance(result, list):
            yield from _specs(result, operands)
        elif isinstance(result, New):
            yield result.spec
        elif isinstance(result, Same):
            yield operands[result.operand]._handle.spec


def _outs(func: torch._ops.OpOverload, kwargs: Mapping[str, Any]) -> set[int]:
    """Return the ids of what a call writes its results to, and computes nothing of."""
    named = (
        kwargs.get(a.name)
        for a in func._schema.arguments
        if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
    )
    return {id(leaf) for leaf in tree_leaves(list(named))}


def depends(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outcome: Outcome
) -> bool:
    """Whether the results of a call may depend on torch's default dtype.

    They do not where a tensor with floating-point or complex numbers takes part, or a dtype is named.
    """
    operands = tensors_of(args, kwargs)
    leaves = tree_leaves((list(args), kwargs))
    if any(isinstance(leaf, torch.dtype) for leaf in leaves):
        return False
    outs = _outs(func, kwargs)
    numeric = [_numeric(t.dtype) for t in operands if id(t) not in outs]
    # A list's members have nothing to do with each other.
    listed = func._schema.name.startswith("aten::_foreach")
    if all(numeric) if listed else any(numeric):
        return False
    return any(_numeric(spec.dtype) for spec in _specs(outcome.results, operands)) or any(
        isinstance(leaf, (float, complex)) for leaf in leaves
    )


def with_dtype(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outcome: Outcome
) -> dict[str, Any] | None:
    """Return the keyword arguments of a factory with its dtype; None if it takes none."""
    names = [a.name for a in func._schema.arguments]
    only = outcome.results[0] if outcome.single else None
    if "dtype" not in names[len(args) :] or not isinstance(only, New):
        return None
    return {**kwargs, "dtype": only.spec.dtype}


def to_promote(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    outcome: Outcome,
    cpu_kernels: bool,
) -> frozenset[int]:
    """Return the numbers of the operands to convert to the default dtype, so that a call does not depend on
    it. There are none if it does not depend on it after all.

    Raise `NotSupportedError` if it does, and no conversion gives what was predicted.
    """
    default = torch.get_default_dtype()
    operands = tensors_of(args, kwargs)
    outs = _outs(func, kwargs)
    results = list(_specs(outcome.results, operands))
    integers = [
        k
        for k, t in enumerate(operands)
        if id(t) not in outs and k not in outcome.written and not _numeric(t.dtype)
    ]
    # Truth values may be a mask, which must stay one.
    for numbers in (integers, [k for k in integers if operands[k].dtype != torch.bool]):
        chosen = {id(operands[k]) for k in numbers}
        if not chosen:
            break
        try:
            found = propagate(func, args, kwargs, partial(_twin, chosen, default), cpu_kernels)
        except NeedsWorker:
            continue
        except Exception as error:
            # The operator takes these as integers only.
            if not is_of_caller(error):
                raise
            continue
        if list(_specs(found.results, operands)) == results:
            return frozenset(numbers)
    made = [r for r in outcome.results if not isinstance(r, Same)]
    if any(spec.dtype in (default, default.to_complex()) for spec in _specs(made, operands)):
        raise NotSupportedError(
            f"{func}: its result depends on torch's default dtype, which is {default} here and "
            f"{WORKERS_DEFAULT} on workers. Convert its operands: x.to({default})"
        )
    return frozenset()


def _twin(chosen: set[int], default: torch.dtype, t: Any) -> Spec:
    spec: Spec = t._handle.spec
    return spec_of(torch.empty_like(spec.meta(), dtype=default)) if id(t) in chosen else spec


def promoted(
    args: Sequence[Any], kwargs: dict[str, Any], numbers: Collection[int]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with the operands of these numbers converted to the default dtype."""
    default, number = torch.get_default_dtype(), count()

    def convert(t: torch.Tensor) -> torch.Tensor:
        if next(number) not in numbers:
            return t
        copy: torch.Tensor = torch.ops.aten._to_copy.default(t, dtype=default)
        return copy

    found: tuple[list[Any], dict[str, Any]] = tree_map_only(torch.Tensor, convert, (list(args), kwargs))
    return found
