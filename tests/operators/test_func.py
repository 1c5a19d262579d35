"""torch.func, forward mode, tracing and counting on remote tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import func, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from agree import REMOTE, agrees, tensor

pytestmark = [  # torch's own forward formulas use it; torch 2.15 warns in another class
    pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.:FutureWarning"),
]


def _loss(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x**3).sum()


def _mlp(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(device)


@agrees
def test_grad_vjp_jvp(device: str) -> Any:
    x, v = tensor(device, 4), tensor(device, 4, seed=1)
    value, pull = func.vjp(torch.sin, x)
    return (
        func.grad(_loss)(x),
        func.grad_and_value(_loss)(x),
        func.jvp(_loss, (x,), (v,)),
        func.jvp(func.grad(_loss), (x,), (v,)),  # a Hessian-vector product
        value,
        pull(v),
    )


@agrees
def test_jacobians_and_hessians(device: str) -> Any:
    x = tensor(device, 3)
    return (
        func.jacrev(torch.sin)(x),
        func.jacfwd(torch.sin)(x),
        func.hessian(_loss)(x),
        func.jacfwd(func.jacrev(_loss))(x),
        func.jacrev(func.jacrev(_loss))(x),
        torch.autograd.functional.jacobian(torch.exp, x),
        torch.autograd.functional.hessian(_loss, x),
        torch.autograd.functional.hvp(_loss, x, tensor(device, 3, seed=1)),
        torch.autograd.functional.vhp(_loss, x, tensor(device, 3, seed=1), create_graph=True),
    )


@agrees
def test_vmap(device: str) -> Any:
    x, w = tensor(device, 5, 3), tensor(device, 3, 3, seed=1)
    chunked = func.vmap(lambda v: (w @ v).sum(), chunk_size=2)(x)
    nested = func.vmap(func.vmap(lambda a, b: a * b, in_dims=(0, None)), in_dims=(0, 0))(x, x[:, 0])
    torch.manual_seed(0)
    return (
        func.vmap(lambda v: w @ v)(x),
        func.vmap(torch.dot, in_dims=(1, 1))(x, x),
        func.vmap(lambda v: v.sort().values, out_dims=1)(x),
        chunked,
        nested,
        func.vmap(lambda v: v + torch.rand_like(v), randomness="same")(x),
        func.vmap(lambda v: torch.nn.functional.dropout(v), randomness="different")(x),
    )


@agrees
def test_per_sample_gradients(device: str) -> Any:
    model, x, y = _mlp(device), tensor(device, 6, 3), tensor(device, 6, 2, seed=1)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor], one: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(func.functional_call(model, params, (one[None],)), target[None])

    return func.vmap(func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)


@agrees
def test_ensembles(device: str) -> Any:
    models = [_mlp(device) for _ in range(3)]
    for i, model in enumerate(models):
        nn.init.constant_(model[0].bias, float(i))
    parameters, buffers = func.stack_module_state(models)
    return func.vmap(lambda p, b, x: func.functional_call(models[0], (p, b), (x,)), in_dims=(0, 0, None))(
        parameters, buffers, tensor(device, 4, 3)
    )


@agrees
def test_transforms_of_recurrent_layers_have_their_dropout(device: str) -> Any:
    """torch's formula in Python leaves it out (torch 2.13)."""
    found, lengths = [], torch.tensor([5, 2])
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        torch.manual_seed(0)
        layer = kind(3, 4, num_layers=3, dropout=0.5).to(device)
        x, v = tensor(device, 5, 2, 3), tensor(device, 5, 2, 3, seed=1)

        def loss(x: torch.Tensor, layer: Any = layer) -> torch.Tensor:
            return layer(x)[0].square().sum()  # type: ignore[no-any-return]

        def packed(x: torch.Tensor, layer: Any = layer) -> torch.Tensor:
            return layer(nn.utils.rnn.pack_padded_sequence(x, lengths))[0].data  # type: ignore[no-any-return]

        torch.manual_seed(1)
        found += [func.grad(loss)(x), torch.rand(2, device=device)]
        wanting = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(packed(wanting).square().sum(), wanting, create_graph=True)
        first.square().sum().backward()
        found += [first.clone(), wanting.grad]
        if kind is not nn.LSTM:
            # The kernel of a CPU for LSTMs has no forward mode.
            with forward_ad.dual_level():
                dual = layer(forward_ad.make_dual(x, v))[0]
                found += [part.clone() for part in forward_ad.unpack_dual(dual)]
    return found


@agrees
def test_functionalize(device: str) -> Any:
    def writes(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0].add_(1)
        y.view(-1).mul_(2)
        return y

    return func.functionalize(writes)(tensor(device, 3, 2))


@agrees
def test_forward_mode(device: str) -> Any:
    x, v = tensor(device, 3, grad=True), tensor(device, 3, seed=1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, v)
        out = (dual.sin() * dual).sum()
        value, tangent = forward_ad.unpack_dual(out)
        (slope,) = torch.autograd.grad(tangent, x, retain_graph=True)
    return value.detach(), tangent.detach(), slope


@agrees
def test_a_dual_number_in_inference_mode_is_its_primal(device: str) -> Any:
    with torch.inference_mode(), forward_ad.dual_level():
        x = tensor(device, 3)
        dual = forward_ad.make_dual(x, tensor(device, 3, seed=1))
        dual += 1
        return dual.clone(), x.clone(), dual._is_view(), forward_ad.unpack_dual(dual).tangent is None


@pytest.mark.usefixtures("session")
def test_the_text_of_a_dual_number_has_its_tangent() -> None:
    x = torch.ones(2, device=REMOTE)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x + 1)
        assert "tangent=tensor([2., 2.]" in repr(dual) and "tangent" not in repr(x)


@agrees
def test_make_fx_and_flops(device: str) -> Any:
    x, w = tensor(device, 4, 3), tensor(device, 3, 2, seed=1)
    traced = make_fx(lambda a, b: torch.relu(a @ b).sum(0))(x, w)
    with FlopCounterMode(display=False) as flops:
        (x @ w).sum()
    return traced(x + 1, w), [str(node.target) for node in traced.graph.nodes], flops.get_total_flops()


@agrees
def test_jit(device: str) -> Any:
    model, x = _mlp(device), tensor(device, 4, 3)
    traced = torch.jit.trace(model, x)

    @torch.jit.script
    def scripted(a: torch.Tensor, n: int) -> torch.Tensor:
        for i in range(n):
            a = a * 2 if bool(a.sum() > 0) else a + i
        return a

    return traced(x), scripted(x, 3)
