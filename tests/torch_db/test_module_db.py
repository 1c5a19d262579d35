"""Every module of PyTorch's own module database: five training steps here and on a worker."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from agree import REMOTE, Copier, Disagreement, check, quietly, seed, some

# It warns about packages that it would like and does not need.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

STEPS = 5
# A module has at most so many input variants here, and so many in `make test`.
INPUTS = 12
FEW = 2

# What does not agree, and why. A module that starts to agree must leave this table: the test says so.
KNOWN: dict[str, str] = {}


def _train(info: ModuleInfo, call: ModuleInput, training: bool, device: str) -> Any:
    """SGD trains parameters and floating inputs alike.

    So losses and activations, which have no parameters, train too.
    """
    copier = Copier(device)
    args, kwargs = copier((call.forward_input.args, call.forward_input.kwargs))
    leaves = copier.leaves()
    made_of = Copier(device)((call.constructor_input.args, call.constructor_input.kwargs))
    # Parameters are drawn here, then moved.
    seed(1)
    module = info.module_cls(*made_of[0], **made_of[1]).to(device).train(training)
    trained = [p for p in module.parameters() if p.requires_grad] + leaves
    optimizer = torch.optim.SGD(trained, lr=0.01) if trained else None
    history = []
    seed(3)  # dropout, fractional pooling, RReLU
    for _ in range(STEPS):
        out = module(*args, **kwargs)
        differentiable = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
        if optimizer is not None and differentiable:
            optimizer.zero_grad()
            sum(t.abs().square().mean() for t in differentiable).backward()
            optimizer.step()
        history.append(out)
    return history, [t.grad for t in trained], module.state_dict()


def _run(info: ModuleInfo, training: bool, inputs: int) -> int:
    seed(0)
    # The database draws their samples in float64.
    dtype = torch.float64 if "Fractional" in info.formatted_name else torch.float32
    calls = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)

    def same(call: ModuleInput) -> bool:
        return check(
            lambda: _train(info, call, training, "cpu"), lambda: _train(info, call, training, REMOTE)
        )

    return sum(same(call) for call in some(list(calls), inputs))


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
@pytest.mark.parametrize(
    "inputs", (FEW, pytest.param(INPUTS, marks=pytest.mark.slow(reason="the other inputs of each module")))
)
def test_module(session: object, info: ModuleInfo, inputs: int) -> None:
    def both_modes() -> int:
        return sum(
            _run(info, training, inputs)
            for training in ([True, False] if info.train_and_eval_differ else [True])
        )

    if info.formatted_name in KNOWN:
        with pytest.raises(Disagreement):
            quietly(both_modes)
    else:
        assert quietly(both_modes) > 0, "no input gave a result"
