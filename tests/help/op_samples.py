"""Runs the entries of PyTorch's own operator database here and on a worker.

Shared by `test_op_db.py` and `long/op_db_dtypes.py`.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from agree import (
    REMOTE,
    Copier,
    Disagreement,
    Expected,
    check_against,
    expectation,
    gradients,
    quietly,
    seed,
    some,
)
from distruntime.session.session import active_session
from distruntime.tensors.worker_functions import issue_function

# The module warns about packages that it would like and does not need.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_utils import SEED
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

# These give uninitialised memory, so only the metadata can agree.
UNINITIALISED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
}
# The in-place form, the method and out= run on so many samples of each entry.
VARIANT_SAMPLES = 3


def entries(dtype: torch.dtype, local: str = "cpu") -> list[OpInfo]:
    """Return the entries that know a dtype on a kind of device."""
    return [op for op in op_db if dtype in op.supported_dtypes(local)]


def differentiable(op: OpInfo, dtype: torch.dtype, local: str = "cpu") -> bool:
    return bool(op.supports_autograd) and dtype in op.supported_backward_dtypes(local)


def samples(op: OpInfo, dtype: torch.dtype, grad: bool = False) -> list[SampleInput]:
    """Return what `op.sample_inputs` gives on the CPU.

    That method looks at the whole stack twice for each entry, and formats it for each sample. Under pytest
    this is a third of the database's time.
    """
    drawn, found = iter(op.sample_inputs_func(op, "cpu", dtype, grad)), []
    while True:
        random.seed(SEED)
        numpy.random.seed(SEED)
        torch.default_generator.manual_seed(SEED)
        sample = next(drawn, None)
        if sample is None:
            return found
        found.append(sample)


class Outcome(NamedTuple):
    """What a form of an entry gave on a sample, and which form and sample that is."""

    where: str
    expected: Expected


def local_outcomes(name: str, dtype: torch.dtype, limit: int, local: str, forms: int) -> list[Outcome]:
    """Return what an entry gives on a device of this process, for `run_entry` in another process."""
    (op,) = (op for op in op_db if op.full_name == name)
    return quietly(
        lambda: [
            Outcome(form.where(), expectation(partial(form.run, local, local)).sent())
            for form in _forms(op, dtype, limit, local, forms)
        ]
    )


def run_entry(
    op: OpInfo,
    dtype: torch.dtype,
    limit: int,
    *,
    local: str = "cpu",
    forms: int = VARIANT_SAMPLES,
    given: Sequence[Outcome] | None = None,
) -> int:
    """Compare one entry on up to `limit` of its sample inputs, its variants on `forms` of them.

    `local` is the device that a worker must agree with: this process uses it, or another one has, and
    `given` is what its `local_outcomes` returned. Raises `Disagreement` at the first difference.
    """
    return int(quietly(lambda: _run_entry(op, dtype, limit, local, forms, given)))


def _run_entry(
    op: OpInfo, dtype: torch.dtype, limit: int, local: str, forms: int, given: Sequence[Outcome] | None
) -> int:
    had_result = number = 0
    for number, form in enumerate(_forms(op, dtype, limit, local, forms), 1):
        if given is None:
            expected = expectation(partial(form.run, local, local))
        else:
            if len(given) < number or given[number - 1].where != form.where():
                raise Disagreement(f"the other process has not drawn this sample: {form.where()}")
            expected = given[number - 1].expected
        try:
            worked = check_against(
                expected, partial(form.run, REMOTE, local), values=op.name not in UNINITIALISED
            )
        except Disagreement as difference:
            raise Disagreement(f"{difference} [{form.where()}]") from difference.__cause__
        had_result += form.name == "function" and worked
    if given is not None and len(given) != number:
        raise Disagreement(f"the other process has drawn {len(given)} samples, and this one {number}")
    return had_result


class _Form(NamedTuple):
    """A form of an entry with a sample: the function itself, the method, in-place or with `out=`."""

    name: str
    function: Callable[..., Any]
    sample: SampleInput
    grad: bool

    def where(self) -> str:
        sample = self.sample
        given = f"args={_brief(sample.args)} kwargs={_brief(sample.kwargs)}"
        return f"{self.name} of input={_brief(sample.input)} {given}"

    def run(self, device: str, local: str) -> Any:
        """Run it on copies of the sample."""
        copy = Copier(device)
        inputs, args, kwargs = copy((self.sample.input, self.sample.args, self.sample.kwargs))
        if local == "cpu":
            _seed_where_it_runs(device)
        else:
            # The other device of this process is seeded too, and the devices of the workers.
            torch.manual_seed(2)
        result = self.function(inputs, *args, **kwargs)
        if not self.grad:
            return result, []
        leaves = copy.leaves()
        # This keeps what is well defined, such as the sizes of eigenvectors but not their signs.
        processed = self.sample.output_process_fn_grad(result)
        return result, gradients(processed, leaves, device)


def _forms(op: OpInfo, dtype: torch.dtype, limit: int, local: str, forms: int) -> Iterator[_Form]:
    seed(0)
    grad = differentiable(op, dtype, local)
    for number, sample in enumerate(some(samples(op, dtype, grad), limit)):
        yield _Form("function", op.op, sample, grad)
        if number >= forms:
            continue
        if op.method_variant is not None:
            yield _Form("method", op.method_variant, sample, grad)
        if op.inplace_variant is not None and not sample.broadcasts_input:
            with_gradient = grad and op.supports_inplace_autograd
            yield _Form("in-place", _on_a_clone(op.inplace_variant), sample, with_gradient)
        if op.supports_out:
            plain = sample.transform(lambda t: t.detach() if isinstance(t, torch.Tensor) else t)
            yield _Form("out=", _into(op.op, resize=False), plain, False)
            yield _Form("resized out=", _into(op.op, resize=True), plain, False)
        yield _Form("memory", _memory(op.op), sample, False)


def _seed_where_it_runs(device: str) -> None:
    """Seed this process, and for the worker's turn that worker. The others run nothing of an entry."""
    torch.default_generator.manual_seed(2)
    if device == REMOTE:
        issue_function(active_session().nodes[0], "manual_seed", [torch.device("cpu"), "2"])


def _on_a_clone(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place on a copy: a leaf that wants a gradient may not be written."""
    return lambda first, *args, **kwargs: function(
        tree_map_only(torch.Tensor, torch.clone, first), *args, **kwargs
    )


def _into(function: Callable[..., Any], *, resize: bool) -> Callable[..., Any]:
    """The out= form, into tensors of the right size or into empty ones that it must resize."""

    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        plain = function(first, *args, **kwargs)
        # `out` says the device. torch's parser refuses both together, for it reads another name off a remote
        # `out`.
        kwargs.pop("device", None)
        # `out` is filled: where torch itself leaves a part of it unwritten, both sides must show the same.
        out = tree_map_only(
            torch.Tensor, lambda t: t.new_empty(0) if resize else torch.full_like(t, 3), plain
        )
        out = tuple(out) if isinstance(out, (tuple, list)) else out
        result = function(first, *args, **kwargs, out=out)
        same = [a is b for a, b in zip(tree_leaves(result), tree_leaves(out), strict=True)]
        return out, same

    return run


def _memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """The results' memory in its own order: shows a worker's tensor that is laid out otherwise than its proxy
    says.
    """

    def flat(tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.layout is not torch.strided or not _fills_its_memory(tensor):
            return None
        return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())

    return lambda *args, **kwargs: tree_map_only(torch.Tensor, flat, function(*args, **kwargs))


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    expected = 1
    for step, size in sorted(
        (step, size) for step, size in zip(tensor.stride(), tensor.size(), strict=True) if size != 1
    ):
        if step != expected:
            return False
        expected *= size
    return tensor.numel() > 0


def _brief(value: Any) -> str:
    def leaf(tensor: torch.Tensor) -> str:
        strides = tuple(tensor.stride()) if tensor.layout is torch.strided else tensor.layout
        return f"<{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} {strides}>"

    text = repr(tree_map_only(torch.Tensor, lambda t: _Shown(leaf(t)), value))
    # Another process has the same functions and generators at other addresses.
    return re.sub(r" at 0x[0-9a-f]+", "", text)[:400]


class _Shown(str):
    __repr__ = str.__str__
