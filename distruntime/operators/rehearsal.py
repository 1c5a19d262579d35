"""What the CPU's own kernel says of a call that is a mistake.

Meta kernels compute shapes. Where arguments are wrong, many of them raise another class than the kernel does,
and other words: a search for these finds nothing. Most meta kernels look at no dtypes. A kernel checks its
arguments before it computes, so a *rehearsal* calls it in this process, on operands that hold no values. A
call is rehearsed on the first sight of its signature only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from ..errors import is_of_handler, of_caller
from ..log.spec import Spec

# Operands up to so many elements are filled with zeros, since kernels of indices read them. Larger ones are
# pages that nobody has touched, and cost next to nothing.
_FILLED = 1 << 16
# No rehearsal has more elements: a kernel that takes what its meta kernel has refused computes.
_MOST = 1 << 28
# Operators whose kernel has taken what their meta kernel refuses. Their workers decide from then on.
_doubted: set[torch._ops.OpOverload] = set()

# Elements of common dtypes are ones; other dtypes cannot be filled everywhere.
_COMMON = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
# What was rehearsed element by element and taken: an operator, each operand's dtype and whether it has
# dimensions, and the types of the other arguments. Other shapes and numbers need no rehearsal.
_taken: set[tuple[object, ...]] = set()


def _of_several_dtypes(specs: Sequence[Spec]) -> bool:
    return specs[0].dtype is torch.bool or any(spec.dtype is not specs[0].dtype for spec in specs)


def _of_fractions(specs: Sequence[Spec]) -> bool:
    return any(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in specs)


def _of_another_dtype(specs: Sequence[Spec]) -> bool:
    # Indices stand between the two.
    return specs[0].dtype is not specs[-1].dtype


def _of_whole_numbers(specs: Sequence[Spec]) -> bool:
    return not (specs[0].dtype.is_floating_point or specs[0].dtype.is_complex)


def _of_truth_values(specs: Sequence[Spec]) -> bool:
    return specs[0].dtype is torch.bool


def _into_numbers(specs: Sequence[Spec]) -> bool:
    # The second tensor, if there is one, is `out`.
    return len(specs) == 2 and specs[1].dtype is not torch.bool


# Operators whose kernels refuse dtypes that their meta kernels take, with what makes a call suspicious. The
# time of a rehearsal depends on the shapes, so only suspicious calls are rehearsed. These are the mistakes
# that people make: mixed precision, labels for logits, masks for numbers. Others fail on the worker, and are
# raised where the result is read.
_SUSPICIOUS: dict[str, Callable[[Sequence[Spec]], bool]] = {
    **dict.fromkeys(
        (
            *("aten::mm", "aten::addmm", "aten::addbmm", "aten::mv", "aten::convolution"),
            *("aten::linalg_cross", "aten::_cdist_forward", "aten::binary_cross_entropy"),
            *("aten::grid_sampler_2d", "aten::grid_sampler_3d"),
        ),
        _of_several_dtypes,
    ),
    # The meta kernels of torch 2.11 do not look at these dtypes. Those of torch 2.13 do, and refuse the call
    # before it is rehearsed.
    **dict.fromkeys(("aten::bmm", "aten::addmv"), _of_several_dtypes),
    **dict.fromkeys(
        (
            *("aten::index_put", "aten::index_put_", "aten::index_add", "aten::index_add_"),
            *("aten::index_copy", "aten::index_copy_", "aten::put", "aten::put_"),
        ),
        _of_another_dtype,
    ),
    **dict.fromkeys(
        (
            *("aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax", "aten::glu"),
            *("aten::hardswish", "aten::huber_loss", "aten::smooth_l1_loss", "aten::nll_loss_forward"),
            *("aten::log_sigmoid_forward", "aten::_prelu_kernel", "aten::_adaptive_avg_pool2d"),
            *("aten::adaptive_max_pool2d", "aten::upsample_bilinear2d", "aten::var", "aten::std"),
        ),
        _of_whole_numbers,
    ),
    **dict.fromkeys(
        ("aten::bitwise_and", "aten::bitwise_or", "aten::bitwise_xor", "aten::bitwise_not"), _of_fractions
    ),
    **dict.fromkeys(
        ("aten::argmax", "aten::argmin", "aten::topk", "aten::median", "aten::kthvalue"), _of_truth_values
    ),
    **dict.fromkeys(("aten::all", "aten::any"), _into_numbers),
}
_SPEAKS_OF_TYPES = re.compile("type|not implemented for|complex|bool|integ", re.IGNORECASE)


def refusal(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    specs: Sequence[Spec],
    said: Exception,
    cpu_kernels: bool,
) -> Exception | None:
    """Return what the CPU's kernel says of a call that its meta kernel refuses by `said`.

    Return None if that kernel takes the call. The meta kernel is wrong then, or speaks for a GPU, and only
    the worker knows. Return `said` if there is no such kernel. `cpu_kernels` says whether the call will run
    kernels of a CPU.
    """
    of_caller(said)
    if func in _doubted or _elements(specs) > _MOST:
        return None
    try:
        _call(func, args, kwargs, [_stand_in(spec) for spec in specs])
    except Exception as error:
        if is_of_handler(error):
            raise
        # A kernel says by any exception what is wrong with its arguments. These words say nothing of them:
        # there is no kernel, there is no memory for the rehearsal, or a GPU may have a kernel.
        silent = "Could not run" in str(error) or "allocate memory" in str(error)
        if silent or (not cpu_kernels and isinstance(error, NotImplementedError)):
            return said
        return of_caller(error)
    _doubted.add(func)
    return None


def rehearse(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    specs: Sequence[Spec],
    cpu_kernels: bool,
) -> None:
    """Raise what the CPU's kernel says of a call whose operands have the wrong dtypes.

    Only dtypes count here, since no stand-in has values. `cpu_kernels` says whether the call will run kernels
    of a CPU. What the table calls suspicious is a mistake on a GPU too, with few exceptions.
    """
    if func._schema.name.startswith("aten::_foreach_"):
        # A GPU has kernels of its own for lists.
        if cpu_kernels:
            _rehearse_lists(func, args, kwargs, specs)
        return
    if cpu_kernels and torch.Tag.pointwise in func.tags:
        others = [type(leaf) for leaf in tree_flatten((list(args), kwargs))[0]]
        key = func, *map(_kind, specs), *others
        if key in _taken or not all(spec.dtype in _COMMON and spec.size.numel() for spec in specs):
            return
        _raise_of_dtypes(func, args, kwargs, [_of_ones(spec) for spec in specs])
        _taken.add(key)
        return
    suspicious = _SUSPICIOUS.get(func._schema.name)
    # A GPU may take truth values for numbers.
    if suspicious is None or (suspicious is _of_truth_values and not cpu_kernels):
        return
    if suspicious(specs) and _elements(specs) <= _MOST:
        _raise_of_dtypes(func, args, kwargs, [_stand_in(spec) for spec in specs])


def _rehearse_lists(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], specs: Sequence[Spec]
) -> None:
    """Rehearse an operator of lists with one position of each combination of dtypes."""
    rest = iter(specs)
    values = tree_map_only(torch.Tensor, lambda _: next(rest), [*args, *kwargs.values()])
    # A tensor beside the lists is a number, or has one for each position.
    if any(isinstance(value, Spec) and len(value.size) for value in values):
        return
    positions: dict[tuple[object, ...], int] = {}
    for k, row in enumerate(zip(*(value for value in values if isinstance(value, (list, tuple))))):
        tensors = [one for one in row if isinstance(one, Spec)]
        if all(spec.dtype in _COMMON and spec.size.numel() for spec in tensors):
            positions.setdefault(tuple(map(_kind, row)), k)
    key = func, frozenset(positions), *(_kind(value) for value in values)
    if not positions or key in _taken:
        return
    shorter = [
        [value[k] for k in positions.values()] if isinstance(value, (list, tuple)) else value
        for value in values
    ]
    twins = tree_map_only(Spec, _of_ones, shorter)
    flat = [leaf for leaf in tree_flatten(twins)[0] if isinstance(leaf, torch.Tensor)]
    _raise_of_dtypes(func, twins[: len(args)], dict(zip(kwargs, twins[len(args) :])), flat)
    _taken.add(key)


def _kind(value: object) -> object:
    """Return what of an argument a rehearsal depends on."""
    return (value.dtype, len(value.size) > 0) if isinstance(value, Spec) else type(value)


def _of_ones(spec: Spec) -> torch.Tensor:
    """Return a CPU tensor of this dtype and of as many dimensions, with one element."""
    return torch.ones((1,) * len(spec.size), dtype=spec.dtype, device="cpu")


def _raise_of_dtypes(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], twins: list[torch.Tensor]
) -> None:
    try:
        _call(func, args, kwargs, twins)
    except Exception as error:
        if is_of_handler(error):
            raise
        # A kernel says by any exception what is wrong with its arguments. It may also dislike the values of
        # the stand-ins, which are not the user's.
        if _SPEAKS_OF_TYPES.search(str(error)):
            raise of_caller(error) from None


def _call(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], twins: list[torch.Tensor]
) -> None:
    """Call an operator's CPU kernel with `twins` in the place of its tensors."""
    given = iter(twins)
    args, kwargs = tree_map_only(torch.Tensor, lambda _: next(given), (list(args), dict(kwargs)))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    # Local numbers that are drawn at random must not depend on what was rehearsed.
    with (
        torch._C._DisableAutocast(),
        torch.random.fork_rng([], enabled=torch.Tag.nondeterministic_seeded in func.tags),
    ):
        func(*args, **kwargs)


def _elements(specs: Sequence[Spec]) -> int:
    return sum(spec.size.numel() for spec in specs)


def _stand_in(spec: Spec) -> torch.Tensor:
    """Return a CPU tensor of this metadata, without values where it is large."""
    made = spec.empty("cpu")
    if spec.size.numel() <= _FILLED:
        # Some dtypes have no kernel that fills.
        made.untyped_storage().fill_(0)  # type: ignore[attr-defined]
    return made
