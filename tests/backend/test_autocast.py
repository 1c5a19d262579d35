"""`torch.autocast("remote")`: regions, the cache of casts, gradients, and models.

Each test compares with the same code under `torch.autocast("cpu")`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import distruntime as dr
from agree import REMOTE, agrees, check, tensor
from distruntime.backend import autocast
from processes import slots

functional = nn.functional
HALF, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32

# Regions


def product(device: str) -> torch.dtype:
    x = tensor(device, 3, 3)
    return (x @ x).dtype


def test_a_region(session: object) -> None:
    assert torch.amp.is_autocast_available(REMOTE) and not torch.is_autocast_enabled(REMOTE)
    with torch.autocast(REMOTE):
        assert torch.is_autocast_enabled(REMOTE) and torch.get_autocast_dtype(REMOTE) is HALF
        assert product(REMOTE) is HALF, "without a dtype: float16, as on a GPU"
        with torch.autocast(REMOTE, dtype=BFLOAT16):
            assert torch.get_autocast_dtype(REMOTE) is BFLOAT16 and product(REMOTE) is BFLOAT16
            with torch.autocast(REMOTE, enabled=False):
                assert product(REMOTE) is FLOAT32
            assert product(REMOTE) is BFLOAT16
        assert product(REMOTE) is HALF
    assert product(REMOTE) is FLOAT32 and not torch.is_autocast_enabled(REMOTE)


def test_a_region_ends_with_an_exception(session: object) -> None:
    with pytest.raises(KeyError), torch.autocast(REMOTE):
        raise KeyError
    assert product(REMOTE) is FLOAT32


@pytest.mark.filterwarnings("ignore:torch.autocast..cpu.. was on around remote operations")
def test_regions_are_of_one_device_type(session: object) -> None:
    with torch.autocast(REMOTE, dtype=HALF):
        assert (product("cpu"), product(REMOTE)) == (FLOAT32, HALF)
        with torch.autocast("cpu", dtype=BFLOAT16):
            assert (product("cpu"), product(REMOTE)) == (BFLOAT16, HALF)
    with torch.autocast("cpu", dtype=BFLOAT16):
        assert (product("cpu"), product(REMOTE)) == (BFLOAT16, FLOAT32)


def test_a_region_as_a_decorator(session: object) -> None:
    @torch.autocast(REMOTE, dtype=BFLOAT16)
    def inside() -> torch.dtype:
        return product(REMOTE)

    assert [inside(), product(REMOTE), inside()] == [BFLOAT16, FLOAT32, BFLOAT16]


def test_a_region_is_of_its_thread(session: object) -> None:
    seen: dict[str, torch.dtype] = {}

    def other() -> None:
        seen["outside"] = product(REMOTE)
        with torch.autocast(REMOTE, dtype=BFLOAT16):
            seen["inside"] = product(REMOTE)

    with torch.autocast(REMOTE, dtype=HALF):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        seen["here"] = product(REMOTE)
    assert seen == {"outside": FLOAT32, "inside": BFLOAT16, "here": HALF}


def test_another_dtype_is_declined_as_on_a_cpu(session: object) -> None:
    texts = []
    for device in ("cpu", REMOTE):
        with (
            pytest.warns(UserWarning, match="target dtype is not supported") as caught,
            torch.autocast(device, dtype=torch.float64),
        ):
            assert product(device) is FLOAT32
        texts.append(str(caught[0].message))
    assert texts[1] == texts[0].replace("CPU", "remote")


def test_operands_that_mix_say_what_mixes(session: object) -> None:
    x = tensor(REMOTE, 3, 3)
    with dr.node(1):
        y = tensor(REMOTE, 3, 3)
    with torch.autocast(REMOTE):
        with pytest.raises(
            dr.errors.PlacementError, match="operands live on different nodes: `self` on node 0 cpu"
        ):
            x @ y
        with pytest.raises(dr.errors.PlacementError, match="`mat2` \\(3, 3\\) is a local tensor"):
            x @ torch.ones(3, 3)
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType in at::autocast::prioritize"):
            torch.cat([x.bfloat16(), x.half()])


# The cache of casts


class Casts(TorchDispatchMode):
    """Counts conversions to autocast's dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += func in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype) and kwargs.get(
            "dtype", args[-1]
        ) in (
            HALF,
            BFLOAT16,
        )
        return func(*args, **kwargs)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize(
    "modes",
    ["grad grad", "no_grad grad no_grad", "grad no_grad", "inference inference", "inference no_grad grad"],
)
@pytest.mark.parametrize("cached", [True, False])
@agrees
def test_parameters_are_cast_once_a_region(device: str, modes: str, cached: bool) -> Any:
    weight, other, view = (
        tensor(device, 3, 3, grad=True),
        tensor(device, 3, 3),
        tensor(device, 3, 3, grad=True)[1:],
    )
    counts: list[int] = []
    for _ in range(2):
        with torch.autocast(device, dtype=BFLOAT16, cache_enabled=cached):
            for mode in modes.split():
                with MODES[mode](), Casts() as casts:
                    weight @ weight
                    # The end of an inner region keeps the casts.
                    with torch.autocast(device, dtype=BFLOAT16):
                        other @ weight
                    view @ other
                counts.append(casts.count)
    return counts, other


@agrees
def test_a_cast_that_code_without_gradients_made_has_them_later(device: str) -> Any:
    weight, x = tensor(device, 3, 3, grad=True), tensor(device, 3, 3)
    with torch.autocast(device, dtype=BFLOAT16):
        with torch.no_grad():
            x @ weight
        loss = (x @ weight).float().sum()
    loss.backward()
    return loss, weight.grad


def test_casts_of_parameters_live_as_long_as_the_outermost_region(session: object) -> None:
    model, x = nn.Linear(4, 4).to(REMOTE), tensor(REMOTE, 2, 4)
    held = slots()
    with torch.autocast(REMOTE):
        with torch.autocast(REMOTE):
            model(x)
        assert slots() - held == 2, "weight and bias in float16"
        with torch.autocast(REMOTE, dtype=BFLOAT16):
            assert model(x).dtype is BFLOAT16, "casts to another dtype are others"
        assert slots() - held == 4
        torch.clear_autocast_cache()
        assert slots() == held
        model(x)
    assert slots() == held


def test_a_parameter_that_is_let_go_of_in_a_region_is_not_taken_for_another(session: object) -> None:
    x = tensor(REMOTE, 3, 3)
    with torch.autocast(REMOTE, dtype=BFLOAT16):
        for k in range(20):
            weight = torch.full((3, 3), float(k), device=REMOTE, requires_grad=True)
            assert torch.equal(
                (x @ weight).float().cpu(), (x.bfloat16() @ weight.detach().bfloat16()).float().cpu()
            )


# Gradients


def net(device: str, *layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    for layer in layers:
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return nn.Sequential(*layers).to(device)


@pytest.mark.parametrize("dtype", [BFLOAT16, HALF])
@pytest.mark.parametrize("inside", [False, True])
@agrees
def test_gradients_have_the_dtypes_of_the_parameters(device: str, dtype: torch.dtype, inside: bool) -> Any:
    model = net(device, nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    x = tensor(device, 5, 4, grad=True)
    with torch.autocast(device, dtype=dtype):
        out = model(x)
        loss = functional.cross_entropy(out, torch.tensor([0, 2, 1, 1, 0]).to(device))
        with torch.autocast(device, enabled=inside, dtype=dtype):
            loss.backward()
    return out, loss, x.grad, [p.grad for p in model.parameters()]


@agrees
def test_gradients_of_gradients(device: str) -> Any:
    weight, x = tensor(device, 4, 4, grad=True), tensor(device, 3, 4)
    with torch.autocast(device, dtype=BFLOAT16):
        loss = (x @ weight @ weight).float().square().mean()
        (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        penalty = slope.square().sum()
    penalty.backward()
    return slope, weight.grad


@pytest.mark.parametrize("reentrant", [False, True])
@agrees
def test_checkpointed_code_is_run_again_under_its_region(device: str, reentrant: bool) -> Any:
    model = net(device, nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    x = tensor(device, 5, 4, grad=True)
    dtypes = []

    def part(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        dtypes.append(out.dtype)
        return out

    with torch.autocast(device, dtype=BFLOAT16):
        out: Any = checkpoint(part, x, use_reentrant=reentrant)
    out.float().square().sum().backward()
    return dtypes, out, x.grad, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("cast", [None, FLOAT32])
@agrees
def test_custom_functions(device: str, cast: torch.dtype | None) -> Any:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device, cast_inputs=cast)
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            return x @ y

        @staticmethod
        @torch.amp.custom_bwd(device_type=device)
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            x, y = ctx.saved_tensors
            return grads[0] @ y.mT, x.mT @ grads[0]

    x, y = tensor(device, 3, 3, grad=True), tensor(device, 3, 3, seed=1, grad=True)
    with torch.autocast(device, dtype=BFLOAT16):
        out = Product.apply(x, y)  # type: ignore[no-untyped-call]
    out.float().sum().backward()
    return out, x.grad, y.grad


# torch's first jvp warns.
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script:DeprecationWarning", "ignore:.torch.jit.script:FutureWarning"
)
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
# There the casts come below the transform, and here above it.
@agrees(rtol=2e-2, atol=2e-2)
def test_function_transforms(device: str, transform: str) -> Any:
    x, weight = tensor(device, 3, 4), tensor(device, 4, 4, seed=1)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).float().square().mean()

    with torch.autocast(device, dtype=BFLOAT16):
        if transform == "vmap":
            return torch.func.vmap(lambda row: row @ weight)(x)
        return (
            torch.func.grad(loss)(weight)
            if transform == "grad"
            else torch.func.jvp(loss, (weight,), (weight,))
        )


# What travels whole


@pytest.mark.parametrize("mask", [None, FLOAT32, torch.bool])
@agrees
def test_attention(device: str, mask: torch.dtype | None) -> Any:
    q, k, v = (tensor(device, 2, 2, 5, 8, seed=seed, grad=True) for seed in range(3))
    weights = None if mask is None else (tensor(device, 5, 5, seed=4) > 0).to(mask)
    with torch.autocast(device, dtype=BFLOAT16):
        out = functional.scaled_dot_product_attention(q, k, v, weights, is_causal=mask is None)
    out.float().square().sum().backward()
    return out, q.grad, k.grad, v.grad


RECURRENT = {"lstm": (nn.LSTM, BFLOAT16), "gru": (nn.GRU, BFLOAT16), "rnn": (nn.RNN, HALF)}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", list(RECURRENT))
@agrees
def test_recurrent_layers(device: str, kind: str, grad: bool) -> Any:
    make, dtype = RECURRENT[kind]
    layer: Any = net(device, make(4, 6, num_layers=2))[0]
    found = []
    # The first call asks the worker for the dtypes.
    for _ in range(2):
        with torch.autocast(device, dtype=dtype), torch.set_grad_enabled(grad):
            out, state = layer(tensor(device, 5, 2, 4))
        found.append((out, state))
        if grad:
            out.float().square().sum().backward()
    return found, [p.grad for p in layer.parameters()]


@agrees
def test_recurrent_layers_of_packed_sequences(device: str) -> Any:
    layer: Any = net(device, nn.LSTM(4, 6))[0]
    packed = nn.utils.rnn.pack_padded_sequence(tensor(device, 5, 2, 4), torch.tensor([5, 3]))
    with torch.autocast(device, dtype=BFLOAT16):
        out, _ = layer(packed)
    out.data.float().sum().backward()
    return out.data, [p.grad for p in layer.parameters()]


# Both sides are as far from float32. Their second derivatives are rounded elsewhere.
@agrees(rtol=0.03, atol=0.15)
def test_recurrent_layers_differentiated_twice(device: str) -> Any:
    layer: Any = net(device, nn.GRU(4, 6))[0]
    with torch.autocast(device, dtype=BFLOAT16):
        out, _ = layer(tensor(device, 2, 2, 4))
    slopes = torch.autograd.grad(out.float().square().sum(), list(layer.parameters()), create_graph=True)
    sum(s.square().sum() for s in slopes).backward()  # type: ignore[union-attr]
    return slopes, [p.grad for p in layer.parameters()]


@agrees
def test_a_transformer_layer(device: str) -> Any:
    layer = net(device, nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    with torch.autocast(device, dtype=BFLOAT16):
        return layer(tensor(device, 2, 5, 8))


@agrees
def test_the_fused_transformer_layer(device: str) -> Any:
    """`nn.TransformerEncoderLayer` calls it like this without gradients.

    It is on no list, but it calls listed operators from within.
    """
    shapes = [(24, 8), (24,), (8, 8), (8,), (8,), (8,), (8,), (8,), (16, 8), (16,), (8, 16), (8,)]
    attend, rest = (lambda w: (w[:4], w[4:]))(
        [tensor(device, *shape, seed=k) for k, shape in enumerate(shapes)]
    )
    with torch.autocast(device, dtype=BFLOAT16), torch.no_grad():
        return torch._transformer_encoder_layer_fwd(
            tensor(device, 2, 5, 8), 8, 2, *attend, True, False, 1e-5, *rest
        )


def test_on_a_gpu_recurrent_layers_are_lowered_as_a_whole(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1, simulate_cuda=1)
    for make in (nn.LSTM, nn.GRU, nn.RNN):
        layer: Any = make(4, 6).to(REMOTE)
        low: Any = copy.deepcopy(layer).half()
        x = tensor(REMOTE, 5, 2, 4)
        with torch.autocast(REMOTE):
            out, state = layer(x)
        assert out.dtype is HALF and torch.equal(out.cpu(), low(x.half())[0].cpu())
        assert all(t.dtype is HALF for t in (state if isinstance(state, tuple) else [state]))
        out.float().sum().backward()
        assert all(p.grad.dtype is FLOAT32 for p in layer.parameters())
        attended = functional.scaled_dot_product_attention(out, out, out)
        assert attended.dtype is HALF


# Models


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.mix = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        y = self.norms[0](x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        x = x + self.mix(self.norms[1](x))
        logits: torch.Tensor = self.head(x)
        return logits.mean(1)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def trained(device: str, make: Callable[[], nn.Module], x: torch.Tensor, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs, labels = x.to(device), (torch.arange(len(x)) % 5).to(device)
    losses = []
    for _ in range(4):
        with torch.autocast(device, dtype=dtype):
            loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, model.state_dict()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "transformer": (Transformer, lambda: torch.arange(24).reshape(4, 6) % 11),
    "convolutions": (convolutions, lambda: tensor("cpu", 6, 1, 8, 8)),
}


@pytest.mark.parametrize("dtype", [BFLOAT16, HALF])
@pytest.mark.parametrize("name", list(MODELS))
@agrees
def test_training(device: str, name: str, dtype: torch.dtype) -> Any:
    make, data = MODELS[name]
    losses, state = trained(device, make, data(), dtype)
    assert losses[-1] < losses[0]
    return losses, state


@pytest.mark.parametrize("name", list(MODELS))
def test_training_on_a_gpu(fresh_session: Callable[..., Any], name: str) -> None:
    """The list is another one, so only the course is the same, within what bfloat16 can hold."""
    fresh_session(world_size=1, simulate_cuda=1)
    make, data = MODELS[name]
    check(
        lambda: trained("cpu", make, data(), BFLOAT16)[0],
        lambda: trained(REMOTE, make, data(), BFLOAT16)[0],
        rtol=0.05,
        atol=0.02,
        must_work=True,
    )


def test_a_region_of_another_device_says_that_it_does_nothing(session: object) -> None:
    """nanoGPT takes "cpu" for every device that is not "cuda", and would train in float32 without a word."""
    x = torch.ones(2, 2, device=REMOTE)
    with (
        pytest.warns(UserWarning, match=r'was on around remote operations.*torch\.autocast\("remote", dtype'),
        torch.autocast("cpu", torch.bfloat16),
    ):
        assert (x @ x).dtype is torch.float32
    # Nothing remote ran, or it was off, or is the right one.
    here = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (here @ here).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        x @ x
    with torch.autocast(REMOTE, torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16


class Elsewhere:
    """Stands for a place, where there is none of its kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("cpu", BFLOAT16), ("cuda", FLOAT32), ("xpu", FLOAT32), ("mps", FLOAT32), ("npu", FLOAT32)],
)
def test_a_kernel_asks_what_its_place_is(
    session: object, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    """CPUs leave softmax as it is. Accelerators compute it in float32, those from outside of torch too."""
    x = torch.ones(3, dtype=BFLOAT16, device=REMOTE)
    monkeypatch.setattr(autocast, "_place", lambda args: Elsewhere(kind))
    with torch.autocast(REMOTE, dtype=BFLOAT16):
        assert x.softmax(0).dtype is dtype
