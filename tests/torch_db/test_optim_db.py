"""Every optimizer of PyTorch's own optimizer database, with its default arguments too.

Each makes five steps here and on a worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from agree import REMOTE, check, quietly, tensor
from fewer import fewer

# It warns about packages that it would like and does not need.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

STEPS = 5
# A step of LBFGS has 20 of these inside by default, and all of them do the same.
LBFGS_ITERATIONS = 4


class _Net(torch.nn.Module):
    """Matrices only: some optimizers (Muon) take nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8, bias=False)
        self.second = torch.nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


class _SparseNet(torch.nn.Module):
    """Its gradients are sparse: some optimizers (SparseAdam) take nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(torch.arange(3, device=x.device)).tanh()
        return out


def _train(info: OptimizerInfo, kwargs: dict[str, Any], device: str) -> Any:
    torch.manual_seed(0)
    model = (_SparseNet() if info.only_supports_sparse_grads else _Net()).to(device)
    optimizer = info.optim_cls(model.parameters(), **kwargs)
    x, losses = tensor(device, 16, 6), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        if info.step_requires_closure:
            losses.append(optimizer.step(closure).detach())
        else:
            losses.append(closure().detach())
            optimizer.step()
    return losses, [p.detach() for p in model.parameters()], optimizer.state_dict()["state"]


def _cases() -> Iterator[Any]:
    for info in optim_db:
        name = info.optim_cls.__name__
        forms: list[tuple[str, dict[str, Any]]] = [("", {})]
        forms += [(f" {form}", {form: True}) for form in info.supported_impls]
        inputs = info.optim_inputs_func(device="cpu")
        fewer = {"max_iter": LBFGS_ITERATIONS} if name == "LBFGS" else {}
        yield pytest.param(info, fewer, id=f"{name} as it comes")
        for form, extra in forms:
            # Autograd refuses steps on leaves, which test_autograd covers.
            if "differentiable" in extra:
                continue
            for number, given in enumerate(inputs):
                kwargs = {**given.kwargs, **extra, **fewer}
                yield pytest.param(info, kwargs, id=f"{name} {number} {given.desc}{form}")


@pytest.mark.parametrize(
    ("info", "kwargs"), fewer(_cases(), 3, "an optimizer with other arguments, 0.2 s each")
)
def test_optimizer(session: object, info: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    assert quietly(lambda: check(lambda: _train(info, kwargs, "cpu"), lambda: _train(info, kwargs, REMOTE)))
