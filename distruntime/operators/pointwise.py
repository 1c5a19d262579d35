"""What an operator that works element by element returns, known from an earlier call of another shape.

torch runs most meta kernels in Python, 80 to 220 us a call. A model's first step calls one such operator with
many shapes, and where all operands are contiguous only the sizes are new. The worker checks this prediction
as it checks a meta kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ..log.spec import Spec, contiguous

Kind = tuple[object, ...]

# The dtype of the result of each kind of call.
_known: dict[Kind, torch.dtype] = {}
_MOST = 1 << 14
_NOT_SIMPLE: tuple[Kind, list[Spec]] = (), []


@cache
def _pointwise(func: torch._ops.OpOverload) -> bool:
    """Whether an operator works element by element and makes one new tensor."""
    schema = func._schema
    # Operators of others may check what torch's do not.
    of_torch = schema.name.startswith("aten::") and not schema.is_mutable
    return of_torch and torch.Tag.pointwise in func.tags and len(schema.returns) == 1


def kind_of(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    spec_of_operand: Callable[[Any], Spec],
) -> tuple[Kind, list[Spec]]:
    """Return what the result's dtype depends on, and the specs of the operands.

    Return nothing if the call is not so simple.
    """
    if not _pointwise(func):
        return _NOT_SIMPLE
    # Truth values become numbers of the default dtype.
    kind: list[object] = [func, torch.get_default_dtype()]
    specs: list[Spec] = []
    for value in (*args, *kwargs, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found = spec_of_operand(value)
            # Whole numbers may be a mistake by their values: a negative power.
            if found.bits or not (found.dtype.is_floating_point or found.dtype is torch.bool):
                return _NOT_SIMPLE
            specs.append(found)
            kind += [found.dtype, bool(found.size)]
        elif type(value) in (int, float):
            kind.append(type(value))
        elif value is None or type(value) in (bool, str, torch.dtype):
            kind += [type(value), value]
        else:
            return _NOT_SIMPLE
    return (tuple(kind), specs) if specs else _NOT_SIMPLE


def predict(kind: Kind, specs: Sequence[Spec]) -> Spec | None:
    """Return the spec of the result; None if it is not known."""
    dtype = _known.get(kind)
    if dtype is None or any(one.stride != contiguous(one).stride for one in specs):
        return None
    size = max((one.size for one in specs), key=lambda size: (len(size), size.numel()))
    if any(one.size != size for one in specs):
        # torch puts dimensions of one element in the order that the operands' strides suggest.
        if min(size) < 2 or not all(_fits(one.size, size) for one in specs):
            return None
    return contiguous(specs[0], size, dtype)


def _fits(small: Sequence[int], large: Sequence[int]) -> bool:
    """Whether a tensor of the small size is repeated to make the large size."""
    return all(n in (1, m) for n, m in zip(reversed(small), reversed(large)))


def learn(kind: Kind, dtype: torch.dtype) -> None:
    """Remember the dtype that calls of a kind return."""
    if len(_known) >= _MOST:
        _known.clear()
    _known[kind] = dtype
