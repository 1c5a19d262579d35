"""Draws of a traced graph that happen twice: the backward pass of a checkpoint computes its dropout again.

AOTAutograd keeps the random state from before the first draw, and draws from it again. It knows devices of
this process only, so each such draw of a proxy raised.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ..backend.formulas import Kernel
from ..backend.on_import import when_imported
from ..backend.random import drawing_from, get_rng_state
from ..log.handle import REMOTE_TYPES, Residence
from ..session.session import active_session
from ..tensors.tensor import DistributedTensor


def install_draws() -> None:
    """Let graphs draw twice, once what draws twice in torch is imported."""
    when_imported("torch._prims.rng_prims", _know_proxies)


def is_state(node: Node) -> bool:
    """Whether a value of a graph is a random state.

    AOTAutograd says that it is on a CPU of this process. It is on a worker.
    """
    if node.op == "placeholder":
        return node.name.startswith("rng_state_output")
    made_by = node.args[0] if node.target is operator.getitem else None
    if not isinstance(made_by, Node) or getattr(made_by.target, "__name__", "") != "run_and_save_rng_state":
        return False
    return bool(node.args[1] == 0)


def _know_proxies(module: ModuleType) -> None:
    first, again = module.run_and_save_rng_state, module.run_with_rng_state
    first.py_impl(DistributedTensor)(_first)
    again.py_impl(DistributedTensor)(_again)
    # A factory, such as `rand`, has no operand. It comes by here at its first draw.
    key = torch._C.DispatchKey.BackendSelect
    of_torch: Kernel = first.py_kernels[key]

    def select(op: Kernel, *args: object, **kwargs: object) -> object:
        device = kwargs.get("device")
        remote = isinstance(device, torch.device) and device.type in REMOTE_TYPES
        return (_first if remote else of_torch)(op, *args, **kwargs)

    first.py_kernels[key] = select


def _place(args: Sequence[object], kwargs: Mapping[str, object]) -> Residence:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, DistributedTensor):
            return leaf._handle.place
    return active_session().places.meant(kwargs.get("device"))  # type: ignore[arg-type]


def _first(op: Kernel, *args: object, **kwargs: object) -> tuple[torch.Tensor, object]:
    return get_rng_state(_place(args, kwargs)), op(*args, **kwargs)


def _again(state: DistributedTensor, op: Kernel, *args: object, **kwargs: object) -> object:
    with drawing_from(state, _place(args, kwargs)):
        return op(*args, **kwargs)
