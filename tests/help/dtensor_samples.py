"""Runs the entries of PyTorch's own operator database on DTensors, operands in every layout that
`DTensorConverter` of torch's tests has.

Shared by `test_torchs_dtensor.py`, where the DTensors are over a mesh's tensors, and `long/dtensor_op_db.py`,
which also asks torch's own single-process `LocalTensor` what DTensor makes of the same calls.
"""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import distruntime as dr
import op_samples
from agree import quietly, seed, some
from op_samples import UNINITIALISED, differentiable

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

RIGHT = "right"


def of_mesh(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return what each member of a mesh has of these tensors. One round trip for each worker."""
    count = len(tensors[0]._handle.place.node.members) if tensors else 0  # type: ignore[attr-defined]
    return list(dr.fetch([[t.member(k) for t in tensors] for k in range(count)]))  # type: ignore[attr-defined]


@dataclass
class Side:
    """Whose DTensors: the mesh, what each of its members has of tensors, what must be entered to use them,
    and seconds to an alarm.
    """

    mesh: Any
    members: Callable[[list[torch.Tensor]], list[list[torch.Tensor]]] = of_mesh
    playing: Callable[[], AbstractContextManager[Any]] = nullcontext
    patience: int = 0


def run_entry(op: OpInfo, side: Side, samples: int, layouts: int) -> Iterator[list[str]]:
    """Yield, for each sample input of an entry, what comes of it in each combination of layouts: RIGHT, or
    what is wrong.
    """
    seed(0)
    grad = differentiable(op, torch.float32)
    drawn = quietly(lambda: op_samples.samples(op, torch.float32, grad))
    for sample in some(drawn, samples):
        plain = sample.transform(
            lambda t: t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
        )
        found = quietly(lambda: _sample(op, plain, grad, side, layouts))  # noqa: B023  # it runs at once
        if found:
            yield found


def _sample(op: OpInfo, sample: SampleInput, grad: bool, side: Side, layouts: int) -> list[str]:
    args, kwargs = (sample.input, *sample.args), sample.kwargs
    weights: list[torch.Tensor] = []

    def run(args: Any, kwargs: Any) -> list[Any]:
        """All that comes out, gradients last."""
        seed(2)
        result = op.op(*args, **kwargs)
        result = tree_map_only(DTensor, lambda t: t.full_tensor(), result)
        # This keeps what is well defined, such as the sizes of eigenvectors but not their signs.
        processed = sample.output_process_fn_grad(result)
        outs = [t for t in tree_leaves(processed) if isinstance(t, torch.Tensor) and t.requires_grad]
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        grads: Any = ()
        if grad and outs and leaves:
            if not weights:
                generator = torch.Generator().manual_seed(1)
                weights.extend(torch.randn(o.shape, dtype=o.dtype, generator=generator) for o in outs)
            grads = torch.autograd.grad(
                outs, leaves, [w.to(o.device) for w, o in zip(weights, outs)], allow_unused=True
            )
            grads = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        return [t.detach() if isinstance(t, torch.Tensor) else t for t in (*tree_leaves(processed), *grads)]

    def there(tree: Any) -> Any:
        """Name the mesh where a sample names the device."""
        home = getattr(side.mesh, "device", "cpu")
        return tree_map(lambda v: home if isinstance(v, (str, torch.device)) and str(v) == "cpu" else v, tree)

    try:
        with _Watch() as watch:
            wanted = run(args, kwargs)
    except (RuntimeError, AssertionError):
        # The plain operator does not run here: it is one of jiterator's.
        return []
    drawn = op.name in UNINITIALISED or watch.drawn
    found = []
    for one in _combinations(side.mesh, args, kwargs, layouts):
        signal.alarm(side.patience)
        try:
            with side.playing():
                got = run(*there(one()))
            found.append(_verdict(wanted, got, side.members, drawn))
        except Exception as error:
            # An error of any kind is a verdict.
            found.append(_words(error))
        finally:
            signal.alarm(0)
    return found


class _Watch(TorchDispatchMode):
    """Whether random numbers are drawn.

    The database puts the generator back behind entries that draw, so each operator is looked at.
    """

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state()
        found = func(*args, **(kwargs or {}))
        self.drawn = self.drawn or not torch.equal(torch.get_rng_state(), before)
        return found


def _combinations(mesh: Any, args: Any, kwargs: Any, layouts: int) -> Iterator[Callable[[], Any]]:
    """The operands in every combination of layouts, at most so many, evenly spread."""
    converter = DTensorConverter(mesh, args, kwargs)
    if not any(isinstance(t, torch.Tensor) for t in tree_leaves((args, kwargs))):
        return
    for choice in some(list(converter.sharding_combs), layouts):

        def one(choice: Any = choice) -> Any:
            converter.sharding_combs = iter([choice])
            found = next(converter)
            if not converter.successful():
                raise NotImplementedError("DTensorConverter: not a tensor that it distributes")
            return found

        yield one


def _verdict(wanted: list[Any], got: list[Any], members: Callable[..., Any], drawn: bool) -> str:
    if len(wanted) != len(got):
        return f"wrong: {len(got)} results for {len(wanted)}"
    tensors = [t for t in got if isinstance(t, torch.Tensor)]
    for have in members(tensors) or [[]]:
        of_member = iter(have)
        for i, (a, b) in enumerate(zip(wanted, got)):
            value = next(of_member) if isinstance(b, torch.Tensor) else b
            if isinstance(a, torch.Tensor) != isinstance(value, torch.Tensor):
                return f"wrong: result {i} is a {type(value).__name__} for a {type(a).__name__}"
            if not isinstance(a, torch.Tensor):
                if (
                    a is not value
                    and a != value
                    and not (isinstance(a, float) and abs(a - value) <= 1e-5 * abs(a))
                ):
                    return f"wrong: result {i} is {value} for {a}"
            elif a.shape != value.shape or a.dtype != value.dtype:
                return (
                    f"wrong: result {i} is {value.dtype} {tuple(value.shape)} for {a.dtype} {tuple(a.shape)}"
                )
            elif not drawn and not _close(a, value):
                return f"wrong: values of result {i}"
    return RIGHT


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=2e-5, equal_nan=True)


def _words(error: Exception) -> str:
    """An error's class and first words, without what tells one process or device from another."""
    ours = isinstance(error, dr.DistruntimeError) and not isinstance(error, dr.errors.RemoteError)
    kind = (
        type(error).__name__
        if ours
        else next(
            c.__name__ for c in type(error).__mro__ if c.__module__.split(".")[0] in ("builtins", "torch")
        )
    )
    text = " ".join(re.split(r"\n  \S+ on node ", str(error))[0].split())
    text = re.sub(r"\b(remote|cpu|cuda|lazy)(:\d+)?\b", "DEVICE", text)
    text = re.sub(r" on (<distruntime\.mesh\.DeviceMesh |DeviceMesh\().*", " on MESH", text)
    return f"{kind}: {text[:200]}"
