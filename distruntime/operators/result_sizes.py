"""What some operators return, known from an earlier call with operands of other sizes.

torch runs most meta kernels in Python: 80 to 220 us for an addition, and 1,000 us for a batch norm. A model's
first step calls one such operator with many sizes, and where all operands are contiguous only the sizes are
new. The worker checks this prediction as it checks a meta kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ..log.spec import Spec, contiguous

Kind = tuple[object, ...]

# Each result of these operators has the sizes of the operand at its position. Others work element by element.
_LIKE = {
    "aten::_softmax": (0,),
    "aten::_softmax_backward_data": (1,),
    "aten::_log_softmax": (0,),
    "aten::_log_softmax_backward_data": (1,),
    "aten::native_batch_norm": (0, 1, 1),
    "aten::native_batch_norm_backward": (1, 2, 2),
}
# The dtypes of the results of each kind of call.
_known: dict[Kind, list[torch.dtype]] = {}
_MOST = 1 << 14
_NOT_SIMPLE: tuple[Kind, list[Spec]] = (), []


@cache
def _like(func: torch._ops.OpOverload) -> tuple[int, ...] | None:
    """Return the positions of the operands that have the sizes of the results.

    Return none for an operator that works element by element and makes one new tensor, and None for others.
    """
    schema = func._schema
    # Operators of others may check what torch's do not.
    if not schema.name.startswith("aten::") or schema.is_mutable:
        return None
    if torch.Tag.pointwise in func.tags and len(schema.returns) == 1:
        return ()
    return _LIKE.get(schema.name) if schema.overload_name == "" else None


def kind_of(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    spec_of_operand: Callable[[Any], Spec],
    cpu_kernels: bool,
) -> tuple[Kind, list[Spec]]:
    """Return what the results' dtypes depend on, and the specs of the operands.

    Return nothing if the call is not so simple. `cpu_kernels` says whether it will run kernels of a CPU. They
    refuse dtypes that others take.
    """
    like = _like(func)
    if like is None:
        return _NOT_SIMPLE
    # Truth values become numbers of the default dtype.
    kind: list[object] = [func, torch.get_default_dtype(), cpu_kernels]
    specs: list[Spec] = []
    for value in (*args, *kwargs, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found = spec_of_operand(value)
            # Whole numbers may be a mistake by their values: a negative power.
            if found.bits or not (found.dtype.is_floating_point or found.dtype is torch.bool):
                return _NOT_SIMPLE
            specs.append(found)
            kind += [found.dtype, len(found.size) if like else bool(found.size)]
        elif type(value) is float or (type(value) is int and not like):
            kind.append(type(value))
        elif value is None or type(value) in (int, bool, str, torch.dtype):
            kind += [type(value), value]
        elif like and type(value) is list and all(type(item) is bool for item in value):
            kind += value
        else:
            return _NOT_SIMPLE
    return (tuple(kind), specs) if specs else _NOT_SIMPLE


def predict(func: torch._ops.OpOverload, kind: Kind, specs: Sequence[Spec]) -> list[Spec]:
    """Return the specs of the results; nothing if they are not known."""
    dtypes = _known.get(kind)
    if dtypes is None:
        return []
    sizes = _sizes(_like(func) or (), specs)
    return [contiguous(specs[0], size, dtype) for size, dtype in zip(sizes, dtypes)]


def _sizes(like: tuple[int, ...], specs: Sequence[Spec]) -> list[torch.Size]:
    if any(one.stride != contiguous(one).stride for one in specs):
        return []
    if like:
        # Optional operands are not there.
        if max(like) >= len(specs):
            return []
        whole = specs[like[0]].size
        # The others have a number for each channel.
        fit = all(one.size == whole or (len(like) > 1 and one.size == whole[1:2]) for one in specs)
        return [specs[k].size for k in like] if fit else []
    size = max((one.size for one in specs), key=lambda size: (len(size), size.numel()))
    if any(one.size != size for one in specs):
        # torch puts dimensions of one element in the order that the operands' strides suggest.
        if min(size) < 2 or not all(_fits(one.size, size) for one in specs):
            return []
    return [size]


def _fits(small: Sequence[int], large: Sequence[int]) -> bool:
    """Whether a tensor of the small size is repeated to make the large size."""
    return all(n in (1, m) for n, m in zip(reversed(small), reversed(large)))


def learn(func: torch._ops.OpOverload, kind: Kind, specs: Sequence[Spec], results: Sequence[Spec]) -> None:
    """Remember the dtypes of what a call of a kind has returned, if it has the sizes that it should have."""
    if [one.size for one in results] == _sizes(_like(func) or (), specs):
        if len(_known) >= _MOST:
            _known.clear()
        _known[kind] = [one.dtype for one in results]
