"""torch's own formulas of composites: their results, the metadata of these, and whether they draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_flatten, tree_map_only

from ..errors import NotSupportedError
from ..log.handle import Residence
from ..log.spec import Spec, spec_of
from ..operators.alias_info import Operator
from ..tensors.tensor import DistributedTensor
from .random import drawing_from

# torch calls each kernel with the arguments of its own operator, which no one type says.
Kernel = Callable[..., object]  # type: ignore[explicit-any]

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
# Each signature has the metadata of its results.
_outputs: dict[tuple[object, ...], list[Spec]] = {}


def formula(op: Operator) -> Kernel:
    """Return torch's formula of a composite in C++.

    `op.decompose` takes the one in Python where there is one, in twice the time.
    """
    return partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


def by_formula(op: Operator, args: Sequence[object], kwargs: dict[str, object]) -> object:
    """Compute a composite by torch's formula.

    `decompose` takes the one in Python, which `vmap` can take apart. It leaves out the dropout of recurrent
    layers (torch 2.13), so these take the one in C++.
    """
    if op is ATTENTION or not draws(op, args):
        return op.decompose(*args, **kwargs)
    if op._overloadname == "data" and isinstance(args[1], DistributedTensor):
        # It reads the batch sizes in the memory of this process.
        args = (args[0], args[1].cpu(), *args[2:])
    return formula(op)(*args, **kwargs)


def draws(op: Operator, args: Sequence[object]) -> bool:
    """Whether a composite draws random numbers: it has a dropout, and it trains."""
    given = list(zip(op._schema.arguments, args))
    return any(a.name.startswith("dropout") and value for a, value in given) and not any(
        a.name == "train" and not value for a, value in given
    )


def by_formula_again(
    op: Operator,
    args: Sequence[object],
    kwargs: dict[str, object],
    place: Residence,
    lower: torch.dtype | None,
    drew_from: DistributedTensor | None,
) -> list[torch.Tensor]:
    """Return a composite's results by its formula, with a graph and the draws of the first time."""
    if drew_from is not None and not place.has_cpu_kernels:
        raise NotSupportedError(
            f"{op}: the gradient of a gradient needs the same dropout again, and a fused kernel of "
            f"{place.place} does not tell it, nor would torch's own there. Leave dropout out, or put "
            "nn.Dropout between the layers"
        )
    drawing = nullcontext() if drew_from is None else drawing_from(drew_from, place)
    autocast = nullcontext() if lower is None else torch.autocast("remote", dtype=lower)
    # `vmap` would refuse the draws. None of these tensors is one of many.
    with torch.enable_grad(), autocast, drawing, temporarily_clear_interpreter_stack():
        return _listed(by_formula(op, args, kwargs))


def specs_by_formula(op: Operator, args: Sequence[object], kwargs: dict[str, object]) -> list[Spec]:
    """Return the metadata of a composite's results. Its formula runs on `meta`, once per signature."""
    flat, shape = tree_flatten((list(args), kwargs))
    key = (
        op,
        str(shape),
        tuple(leaf._handle.spec if type(leaf) is DistributedTensor else leaf for leaf in flat),
    )
    found = _outputs.get(key)
    if found is None:
        if len(_outputs) > 1 << 12:
            _outputs.clear()
        margs, mkwargs = tree_map_only(
            DistributedTensor, lambda t: t._handle.spec.meta(), (list(args), dict(kwargs))
        )
        if op._overloadname == "data":
            # The formula reads the batch sizes.
            batch_sizes = args[1]
            assert isinstance(batch_sizes, torch.Tensor)
            margs[1] = batch_sizes.cpu()
        found = _outputs[key] = [spec_of(o.contiguous()) for o in _listed(op(*margs, **mkwargs))]
    return found


def _listed(results: object) -> list[torch.Tensor]:
    assert isinstance(results, (torch.Tensor, tuple, list))
    return [results] if isinstance(results, torch.Tensor) else list(results)
