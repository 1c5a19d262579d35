"""What an operator will return, found on the master without data: the `meta` kernel runs once per signature.

A meta or FakeTensor call costs 60 to 300 us, a hit in the signature cache about 1 us (research of 2026-11, 2
shared cores).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import NotSupportedError, is_of_handler
from ..log.spec import Spec, spec_of
from .alias_info import aliases, argument_named, tensors_of, writes_lists
from .rehearsal import refusal, rehearse
from .result_sizes import kind_of, learn, predict

_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
# It says for this thread whether torch's profiler hears of operators.
_enable_record_function: Callable[[bool], None] = torch._C._autograd._enable_record_function


class _Predicting(threading.local):
    """Whether this thread runs a meta kernel to find out what a worker's kernel will return."""

    now = False


predicting = _Predicting()


class NeedsWorker(Exception):
    """The metadata of the results depends on data, or only the real kernel knows it: one round trip."""


@dataclass(frozen=True)
class New:
    """A result that is a new tensor; `alias` is the number of the tensor operand whose storage it shares, or
    None.
    """

    spec: Spec
    alias: int | None


@dataclass(frozen=True)
class Same:
    """A result that is the tensor operand of that number itself (in-place operators, `out=`)."""

    operand: int


Result = New | Same | None | list[Any]


@dataclass(frozen=True)
class Outcome:
    """What a call of one signature does to metadata.

    `results` has one entry per result of the operator; `single` says that the operator returns it bare.
    `written` are the numbers of the tensor operands whose memory changes, `reshaped` those whose own metadata
    changes, with the new one, and `rebased` a pair of operands of which the first takes over the storage of
    the second (`set_`). `listed` says that `written` are members of lists: see `writes_lists`.
    """

    results: list[Result]
    single: bool
    written: tuple[int, ...]
    reshaped: tuple[tuple[int, Spec], ...]
    rebased: tuple[int, int] | None = None
    listed: bool = False


# These meta kernels promise what the CPU kernel does not keep (found over op_db, torch 2.13). So the first
# call with each signature asks the worker.
LIARS = {
    "aten::_fft_r2c": "strides",
    "aten::_fft_c2c": "strides",
    "aten::_fft_c2r": "strides",
    "aten::max_unpool2d": "strides",
    "aten::nonzero_static": "strides",
    "aten::multilabel_margin_loss_forward": "shape for a single sample",
    "aten::multi_margin_loss": "shape for a single sample",
    "aten::_linalg_svd": "strides",
    "aten::linalg_eig": "strides",
    "aten::_native_batch_norm_legit_no_training": "shapes of the saved statistics",
    "aten::_embedding_bag": "shapes of the bookkeeping results",
    "aten::_embedding_bag_forward_only": "shapes of the bookkeeping results",
    "aten::_native_multi_head_attention": "that there are no weights where none are needed",
    "aten::_grouped_mm": "takes bfloat16 only, in torch 2.13",
    "prims::signbit": "dtype",
}

# What these meta kernels promise is what the CPU kernel keeps, and CUDA's does not (found over op_db, torch
# 2.13).
LIARS_ON_GPUS = {"aten::log_sigmoid_forward": "shape of the buffer"}

# These do not know the shapes of the saved statistics in eval mode.
_LIARS_IN_EVAL_MODE = frozenset({"aten::native_batch_norm", "aten::_native_batch_norm_legit"})

_LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})
# These meta kernels do not know in which dtype the CPU kernel keeps its statistics, that a result is a lazy
# conjugate, or that a truth value to the power of one keeps its dtype. It matters where an operand has one of
# the dtypes that are named here.
LIARS_OF_DTYPES = {
    # `left=False` solves the conjugate system.
    "aten::_linalg_solve_ex": frozenset({torch.complex64, torch.complex128}),
    "aten::pow": frozenset({torch.bool}),
    "aten::native_layer_norm": _LOW_PRECISION,
    "aten::native_batch_norm": _LOW_PRECISION,
    "aten::_native_batch_norm_legit": _LOW_PRECISION,
    "aten::_batch_norm_with_update": _LOW_PRECISION,
    "aten::native_group_norm": _LOW_PRECISION,
    "aten::_weight_norm_interface": frozenset({torch.float16}),
    # The meta kernel of torch 2.11 promises float32.
    "aten::_scaled_dot_product_flash_attention_for_cpu": frozenset({torch.float64}),
}

# These meta kernels do not know that a kernel lays its result out as its operands are, with channels last.
LIARS_OF_LAYOUTS = {"aten::convolution": "strides"}

# These operators have no meta kernel, and their result is a list. Its length follows from the arguments.
LENGTHS: dict[str, Callable[[Sequence[Any]], int]] = {
    "aten::_histogramdd_bin_edges": lambda args: int(args[0].size(-1))
}

# A meta kernel that cannot tell says one of these.
_SAYS_NOTHING = ("data-dependent", "meta tensors", "Meta tensor", "meta tensor")
# Some of torch's meta kernels take fakes only, and ask them for their device.
_OF_FAKES = "fake_device"


def _replaced(value: Any, twins: Iterator[torch.Tensor]) -> Any:
    """Return an argument with the next twins in the place of its tensors."""
    if isinstance(value, torch.Tensor):
        return next(twins)
    if isinstance(value, (list, tuple)):
        return [next(twins) if isinstance(item, torch.Tensor) else item for item in value]
    return value


@contextmanager
def _unheard() -> Iterator[None]:
    """Let neither a mode that records operators nor torch's profiler hear of what the block calls."""
    profiled = _profiler_enabled()
    if profiled:
        _enable_record_function(False)
    try:
        with _disable_current_modes():
            yield
    finally:
        if profiled:
            _enable_record_function(True)


def propagate(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    spec_of_operand: Callable[[Any], Spec],
    cpu_kernels: bool,
) -> Outcome:
    """Run `func` on the `meta` device; raise torch's own error where the arguments are wrong, `NeedsWorker`
    where meta cannot tell.

    `cpu_kernels` says whether the call will run kernels of a CPU.
    """
    name = func._schema.name
    if name in LIARS or (not cpu_kernels and name in LIARS_ON_GPUS):
        raise NeedsWorker
    if name in _LIARS_IN_EVAL_MODE and not argument_named(func, "training", args, kwargs):
        raise NeedsWorker
    if name.startswith("aten::_nested"):
        raise NotSupportedError(
            f"{func}: nested tensors live here only; remote tensors are strided. "
            "Pad them, or keep a list of tensors"
        )
    kind, specs = kind_of(func, args, kwargs, spec_of_operand, cpu_kernels)
    known = predict(func, kind, specs) if kind else []
    if known:
        results: list[Result] = [New(one, None) for one in known]
        return Outcome(results, len(func._schema.returns) == 1, aliases(func, args, kwargs)[1], ())
    with _unheard():
        few = _few_positions(func, args, kwargs, spec_of_operand)
        found = (
            None if few is None else _propagate_few(func, args, kwargs, spec_of_operand, cpu_kernels, *few)
        )
        if found is None:
            found = _propagate(func, args, kwargs, spec_of_operand, cpu_kernels)
    if kind:
        made = [one.spec for one in found.results if type(one) is New and one.alias is None]
        if len(made) == len(found.results):
            learn(func, kind, specs, made)
    return found


def _few_positions(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    spec_of_operand: Callable[[Any], Spec],
) -> tuple[list[int], list[int]] | None:
    """Return the first position of each kind in the lists of an operator of lists, and the kinds of all.

    Return None where the meta kernel must see all. An operator of lists looks at each position by itself. A
    model has hundreds of parameters and few shapes: seeing them all took half of the first step of a Llama of
    12 layers, in its optimizer (2026-11).
    """
    of_lists = func._schema.name.startswith(("aten::_foreach_", "aten::_fused_"))
    if not of_lists or any(map(_holds_tensors, kwargs.values())):
        return None
    # Optimizers give an empty list for a state that they do not keep.
    lists = [value for value in args if isinstance(value, (list, tuple)) and value]
    # Lists of unlike lengths are a mistake. A tensor beside the lists may have a number for each position.
    if len({len(one) for one in lists}) != 1 or any(isinstance(value, torch.Tensor) for value in args):
        return None
    kinds: dict[tuple[object, ...], int] = {}
    firsts: list[int] = []
    of: list[int] = []
    for k, row in enumerate(zip(*lists)):
        kind = tuple(
            spec_of_operand(one)
            if isinstance(one, torch.Tensor)
            else (type(one), isinstance(one, int) and one)
            for one in row
        )
        if kind not in kinds:
            kinds[kind] = len(firsts)
            firsts.append(k)
        of.append(kinds[kind])
    return (firsts, of) if len(firsts) < len(of) else None


def _holds_tensors(value: object) -> bool:
    return isinstance(value, (torch.Tensor, list, tuple))


def _propagate_few(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    spec_of_operand: Callable[[Any], Spec],
    cpu_kernels: bool,
    firsts: Sequence[int],
    of: Sequence[int],
) -> Outcome | None:
    """Propagate an operator of lists with these positions alone, and say of all what is found of them.

    Return None where it is a mistake, or is not so simple: the meta kernel has to see all positions then.
    """
    fewer = [
        [value[k] for k in firsts] if value and isinstance(value, (list, tuple)) else value for value in args
    ]
    try:
        found = _propagate(func, fewer, kwargs, spec_of_operand, cpu_kernels)
    except Exception as error:
        if is_of_handler(error):
            raise
        return None
    plain = all(isinstance(one, list) and len(one) == len(firsts) for one in found.results) and all(
        type(result) is New and result.alias is None
        for one in found.results
        for result in one  # type: ignore[union-attr]
    )
    if not plain or found.reshaped:
        return None
    results: list[Result] = [[one[k] for k in of] for one in found.results]  # type: ignore[index]
    return Outcome(results, found.single, aliases(func, args, kwargs)[1], (), listed=found.listed)


def _channels_last(spec: Spec) -> bool:
    """Whether the channels of an image or a volume lie beside each other.

    Where it has one pixel, as the weight of a convolution of 1 x 1, they do in any layout.
    """
    return len(spec.size) > 3 and spec.stride[1] == 1 and spec.size[1] > 1 and max(spec.size[2:]) > 1


def _propagate(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    spec_of_operand: Callable[[Any], Spec],
    cpu_kernels: bool,
) -> Outcome:
    operands = tensors_of(args, kwargs)
    dtypes = LIARS_OF_DTYPES.get(func._schema.name)
    if dtypes is not None and any(t.dtype in dtypes for t in operands):
        raise NeedsWorker
    if func._schema.name in LIARS_OF_LAYOUTS and any(map(_channels_last, map(spec_of_operand, operands))):
        raise NeedsWorker
    metas = [spec_of_operand(t).meta() for t in operands]
    twins = iter(metas)
    margs = [_replaced(value, twins) for value in args]
    mkwargs = {name: _replaced(value, twins) for name, value in kwargs.items()}
    if mkwargs.get("device") is not None:
        mkwargs["device"] = torch.device("meta")
    before = [spec_of(m) for m in metas]
    predicting.now = True
    try:
        out = func(*margs, **mkwargs)
    except Exception as error:
        # A meta kernel says by any exception what is wrong with its arguments.
        if is_of_handler(error):
            raise
        if (
            isinstance(error, NotImplementedError)
            or (isinstance(error, RuntimeError) and any(word in str(error) for word in _SAYS_NOTHING))
            or (isinstance(error, AttributeError) and error.name == _OF_FAKES)
        ):
            raise NeedsWorker from None
        raise refusal(func, args, kwargs, before, error, cpu_kernels) or NeedsWorker() from None
    finally:
        predicting.now = False
    rehearse(func, args, kwargs, before, cpu_kernels)
    return outcome(func, args, kwargs, out, metas, before)


def outcome(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: Any,
    metas: list[torch.Tensor],
    before: list[Spec],
) -> Outcome:
    """Return what a call did to the metadata of `metas`, and what it returned."""
    _, written, shared = aliases(func, args, kwargs)
    same = {id(m): k for k, m in enumerate(metas)}
    # Some views are not in their schemas: `_unsafe_view`, and in inference mode `einsum` of one operand.
    memories = {m.untyped_storage()._cdata: k for k, m in reversed([*enumerate(metas)])}
    schema = func._schema
    single = len(schema.returns) == 1

    values = [out] if single else list(out) if schema.returns else []
    results = [_result(func, same, memories, value, alias) for value, alias in zip(values, shared)]
    reshaped = tuple(
        (k, after) for k, m in enumerate(metas) if k in written and (after := spec_of(m)) is not before[k]
    )
    rebased = (0, 1) if schema.name == "aten::set_" and len(metas) == 2 else None
    # Whoever reads the first from now on looks at the second's storage, and must come after this.
    if rebased is not None:
        written = (*written, rebased[1])
    return Outcome(results, single, written, reshaped, rebased, writes_lists(func))


def _result(
    func: torch._ops.OpOverload, same: dict[int, int], memories: dict[int, int], value: Any, alias: int | None
) -> Result:
    if isinstance(value, torch.Tensor):
        if id(value) in same:
            return Same(same[id(value)])
        if value.layout is not torch.strided or value.is_quantized:
            what = value.layout if value.layout is not torch.strided else "quantized"
            raise NotSupportedError(
                f"{func}: the result would be {what}; remote tensors are strided only. "
                "Fetch the operands and compute locally"
            )
        return New(spec_of(value), memories.get(value.untyped_storage()._cdata) if alias is None else alias)
    if isinstance(value, (list, tuple)):
        return [_result(func, same, memories, item, alias) for item in value]
    if value is None:
        return None
    # It is a number or a truth value, which the worker knows.
    raise NeedsWorker
