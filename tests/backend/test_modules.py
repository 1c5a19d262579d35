"""Modules: moving them, ties, state, parametrizations, and what training code does to parameters."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, prune

import distruntime as dr
from agree import REMOTE, agrees, is_remote, tensor
from distruntime.backend import whole
from distruntime_worker.values.functions import Tape, record, record_attention, replay_backward

ATTENTION = "aten::scaled_dot_product_attention.default"


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(self.table(x) * self.scale))
        return out


def _tied(device: str) -> _Tied:
    torch.manual_seed(0)
    return _Tied().to(device)


def _step(model: _Tied, optimizer: torch.optim.Optimizer, device: str) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.tensor([1, 2, 3, 1]).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_moving_keeps_ties_and_optimizers(session: object) -> None:
    model = _tied("cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    parameters = dict(model.named_parameters())
    local = copy.deepcopy(model)
    local_optimizer = torch.optim.Adam(local.parameters(), lr=0.1)
    for device in (REMOTE, "cpu", REMOTE, "cpu"):
        moved = model.to(device) if device == REMOTE else model.cpu()
        assert moved is model
        assert model.out.weight is model.table.weight
        assert all(is_remote(t) == (device == REMOTE) for t in model.state_dict().values())
        assert {name: id(p) for name, p in model.named_parameters()} == {
            name: id(p) for name, p in parameters.items()
        }
        # As on CUDA, the moments stay where they are, and the user moves them.
        for state in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(device)
        torch.testing.assert_close(
            _step(model, optimizer, device).cpu(), _step(local, local_optimizer, "cpu")
        )
    for name, value in local.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_local_modules_are_converted_as_before(session: object) -> None:
    """The swapping that keeps ties across the border must not reach local modules.

    It refuses what has weak references.
    """
    assert not torch.__future__.get_swap_module_params_on_conversion()
    model = nn.Linear(2, 2)
    references = [weakref.ref(p) for p in model.parameters()]
    assert model.half().double().weight is references[0]()
    nn.Linear(2, 2).to(REMOTE).cpu()
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_a_weak_reference_leaves_the_module_whole(session: object) -> None:
    """torch noticed it halfway: half of the parameters were on the worker."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    reference = weakref.ref(model[1].weight)
    with pytest.raises(
        dr.errors.NotSupportedError, match=r"parameter '1.weight'.*copy.deepcopy\(module\).to"
    ):
        model.to(REMOTE)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert is_remote(copy.deepcopy(model).to(REMOTE)[1].weight) and reference() is model[1].weight
    there = nn.Linear(2, 2).to(REMOTE)
    kept = weakref.ref(there.bias)
    with pytest.raises(dr.errors.NotSupportedError, match="parameter 'bias'"):
        there.cpu()
    assert is_remote(there.weight) and kept() is there.bias


@agrees
def test_conversions_on_the_worker(device: str) -> Any:
    model = _tied(device)
    weight = model.table.weight
    # torch.compile, EMA helpers and profilers hold such references.
    references = [weakref.ref(p) for p in model.parameters()]
    model.double()
    assert model.table.weight is weight and model.out.weight is weight
    halves = copy.deepcopy(model).bfloat16()
    model.to(torch.float32).to(memory_format=torch.channels_last).requires_grad_(False)
    assert all(r() is not None for r in references)
    return halves.state_dict(), model.state_dict(), [p.requires_grad for p in model.parameters()]


@agrees
def test_data_is_the_value(device: str) -> Any:
    model, q = nn.Linear(3, 2, bias=False).to(device), tensor(device, 2, 3)
    model.weight.data = q
    first = model(tensor(device, 4, 3, seed=1))
    # `data` shares the memory and does not copy it.
    q.add_(1)
    second = model(tensor(device, 4, 3, seed=1))
    model.weight.data.mul_(2)
    other = nn.Linear(1, 1, bias=False).to(device)
    other.weight.data = tensor(device, 5, 3, seed=2)  # another shape
    third = other(tensor(device, 4, 3, seed=1))
    third.sum().backward()
    half = nn.Parameter(tensor(device, 3))
    half.data = half.data.half()
    return first, second, third, model.weight, other.weight.grad, other.weight, half


@agrees
def test_a_parameter_from_a_tensor(device: str) -> Any:
    parameter = nn.Parameter(tensor(device, 3))
    frozen = nn.Parameter(tensor(device, 3, seed=1), requires_grad=False)
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, torch.Tensor) and parameter.is_leaf
    module = nn.Module()
    module.p, module.q = parameter, frozen
    module.register_buffer("b", tensor(device, 2))
    flat = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(flat * 2, module.parameters())
    assert [name for name, _ in module.named_parameters()] == ["p", "q"] and list(module.state_dict()) == [
        "p",
        "q",
        "b",
    ]
    return parameter, frozen, copy.deepcopy(parameter), parameter.detach()


@agrees
def test_state_dicts_load(device: str) -> Any:
    source, target, assigned = _tied(device), _tied(device), _tied(device)
    with torch.no_grad():
        for p in source.parameters():
            p.add_(1)
    target.load_state_dict(source.state_dict())
    assigned.load_state_dict(source.state_dict(), assign=True)
    from_here = _tied(device)
    from_here.load_state_dict(_tied("cpu").state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        target.load_state_dict({**source.state_dict(), "scale": tensor(device, 9)})
    return target.state_dict(), assigned.state_dict(), from_here.state_dict()


@agrees
def test_from_meta(device: str) -> Any:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    model.to_empty(device=device)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    with torch.device(device):
        born_there = nn.Linear(3, 2)
    nn.init.constant_(born_there.weight, 2.0)
    return model(tensor(device, 4, 3)), model.state_dict(), born_there.weight


@agrees
def test_deepcopy_keeps_structure(device: str) -> Any:
    model = _tied(device)
    twin = copy.deepcopy(model)
    assert twin.out.weight is twin.table.weight and twin.out.weight is not model.out.weight
    x = tensor(device, 4, 6)
    pair = copy.deepcopy([x, x])
    assert pair[0] is pair[1] and pair[0] is not x
    leaf = copy.deepcopy(tensor(device, 3, grad=True))
    x.zero_()
    with pytest.raises(RuntimeError, match="deepcopy protocol"):
        copy.deepcopy(tensor(device, 3, grad=True) * 2)
    return twin.state_dict(), pair[1], leaf, copy.copy(leaf)


@agrees
def test_reparametrized(device: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(tensor(device, 5, 3)).square().sum().backward()
        optimizer.step()
    prune.l1_unstructured(model[2], "bias", amount=2)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    return model(tensor(device, 5, 3)), model.state_dict()


@agrees
def test_averages_of_models(device: str) -> Any:
    model = _tied(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for _ in range(3):
        _step(model, optimizer, device)
        averaged.update_parameters(model)
        ema.update_parameters(model)
    torch.optim.swa_utils.update_bn(
        [torch.tensor([1, 5]), torch.tensor([2, 3])], averaged, device=torch.device(device)
    )
    return averaged.state_dict(), ema.state_dict()


@pytest.mark.parametrize("foreach", [None, False, True])
@agrees
def test_clipping(device: str, foreach: bool | None) -> Any:
    parameters = [tensor(device, 3, seed=i, grad=True) for i in range(3)]
    sum((p**3).sum() for p in parameters).backward()
    norm = nn.utils.clip_grad_norm_(parameters, 0.5, foreach=foreach)
    largest = nn.utils.clip_grad_norm_(parameters, 0.2, norm_type=float("inf"), foreach=foreach)
    nn.utils.clip_grad_value_(parameters, 0.1, foreach=foreach)
    return (
        norm,
        largest,
        nn.utils.get_total_norm([p.grad for p in parameters], foreach=foreach),
        [p.grad for p in parameters],
    )


@agrees
def test_lbfgs(device: str) -> Any:
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    model.to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(tensor(device, 8, 3)) - tensor(device, 8, 1, seed=1)).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure).detach() for _ in range(2)], model.state_dict()


@agrees
def test_optimizer_state_moves_and_resumes(device: str) -> Any:
    model = _tied(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optimizer, device)
    file = io.BytesIO()
    torch.save(dr.fetch({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model = _tied(device)
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    # This moves the state to where the parameters are.
    optimizer.load_state_dict(saved["optimizer"])
    loss = _step(model, optimizer, device)
    return loss, model.state_dict(), optimizer.state_dict()["state"]


@agrees
def test_differentiable_optimizer(device: str) -> Any:
    x = tensor(device, 3, grad=True)
    inner = x.clone()
    optimizer = torch.optim.SGD([inner], lr=torch.tensor(0.1).to(device), differentiable=True)
    inner.grad = (x**2).clone()
    optimizer.step()
    inner.sum().backward()
    return x.grad, inner


@agrees
def test_recurrent_modules_on_packed_sequences(device: str) -> Any:
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True).to(device)
    x = tensor(device, 3, 5, 3, grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(
        x, torch.tensor([5, 2, 3]), batch_first=True, enforce_sorted=False
    )
    assert packed.batch_sizes.device.type == "cpu"
    out, (h, c) = lstm(packed)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    assert lengths.device.type == "cpu"
    (padded.square().sum() + h.sum()).backward()
    sequences = nn.utils.rnn.pack_sequence([tensor(device, 4, 3), tensor(device, 2, 3)])
    return padded, lengths, h, c, x.grad, [p.grad for p in lstm.parameters()], lstm(sequences)[0].data


@agrees
def test_a_gradient_of_a_gradient_knows_the_dropout_of_a_recurrent_layer(device: str) -> Any:
    found = []
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        torch.manual_seed(0)
        layer = kind(3, 4, num_layers=3, dropout=0.5).to(device)
        x = tensor(device, 5, 2, 3, grad=True)
        torch.manual_seed(1)
        out = layer(x)[0]
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        first.square().sum().backward()
        # What is drawn next is what would have been drawn without it.
        weights = [p.grad for p in layer.parameters()]
        found += [out, first.clone(), x.grad, weights, torch.rand(3, device=device)]
    return found


def test_a_program_knows_it_too(session: object) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4, num_layers=2, dropout=0.5).to(REMOTE)

    def penalty(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        return first.square().sum().detach()

    step = dr.program(penalty)
    x = tensor(REMOTE, 5, 2, 3)
    found = []
    for run in (penalty, step):
        torch.manual_seed(1)
        found.append([run(x).item() for _ in range(5)])
    assert found[0] == found[1] and len(set(found[0])) == 5 and step.replays


@agrees
def test_gradients_of_recurrent_layers_for_many_at_once(device: str) -> Any:
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4, num_layers=2, dropout=0.5).to(device)
    x = tensor(device, 5, 2, 3, grad=True)
    torch.manual_seed(1)
    total = layer(x)[0].sum((0, 1))
    (batched,) = torch.autograd.grad(total, x, torch.eye(4, device=device), is_grads_batched=True)
    return batched, torch.rand(3, device=device)


@agrees
def test_batch_norm_statistics(device: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).to(
        device
    )
    for seed in range(3):
        model(tensor(device, 4, 2, 6, 6, seed=seed))
    model.eval()
    return model(tensor(device, 4, 2, 6, 6)), model.state_dict()


def test_a_model_that_is_dropped_is_freed(session: object) -> None:
    """By reference counts alone: a cycle on the master would be memory held on the worker."""
    gc.disable()
    try:
        model = nn.Linear(3, 3).to(REMOTE)
        model(tensor(REMOTE, 2, 3)).sum().backward()
        reference = weakref.ref(model)
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_what_a_worker_records_takes_its_keywords_by_name() -> None:
    """Attention with gradients, as a real GPU has it.

    All of its arguments come in the schema's order, `scale` and `enable_gqa` too.
    """
    q = torch.randn(1, 2, 3, 4)
    out, tape = record(None, ATTENTION, [True] * 3, q, q, q, None, 0.0, True, 0.5, False)
    wanted = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.5)
    torch.testing.assert_close(out, wanted)
    assert [g.shape for g in replay_backward(tape, torch.ones_like(out))] == [q.shape] * 3


def test_what_a_worker_records_has_the_strides_that_were_promised_or_its_own() -> None:
    """A fused kernel's result lies as its query does. A contiguous copy of it is a kernel for nothing."""
    q = torch.randn(1, 3, 2, 4).transpose(1, 2)
    own, _ = record(None, ATTENTION, [True] * 3, q, q, q, None, 0.0, True, None, False)
    asked, _ = record([[24, 12, 4, 1]], ATTENTION, [True] * 3, q, q, q, None, 0.0, True, None, False)
    assert own.stride() == q.stride() and asked.stride() == (24, 12, 4, 1)
    assert own.equal(asked)


def test_a_worker_takes_the_kernels_of_attention_that_the_master_names() -> None:
    q = torch.randn(1, 2, 3, 4)
    wanted = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    for kernels, name in (([0], "UnsafeView"), ([1, 0], "ScaledDotProductFlashAttentionForCpu")):
        args = [True] * 3, q, q, q, None, 0.0, True, None, False
        out, tape = record_attention(kernels, None, ATTENTION, *args)
        assert isinstance(tape, Tape) and tape.outputs[0].grad_fn.name() == f"{name}Backward0"
        torch.testing.assert_close(out, wanted)
    assert torch.backends.cuda.flash_sdp_enabled()


def test_the_kernels_that_a_program_names(session: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a CPU the master chooses the kernel itself."""
    home = torch.ones(1, device=REMOTE)._handle.place
    op = torch.ops.aten.scaled_dot_product_attention.default
    with sdpa_kernel(SDPBackend.MATH):
        assert whole._chosen(op, home) is None
    monkeypatch.setattr(type(home), "has_cpu_kernels", False)
    assert whole._chosen(op, home) is None
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
        assert whole._chosen(op, home)[:2] == (3, 0)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        assert 2 not in whole._chosen(op, home)
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(True)


def test_recurrent_layers_within_others_move(session: object) -> None:
    model = nn.Sequential(nn.Sequential(nn.LSTM(2, 3)), nn.GRU(3, 3))
    held = weakref.ref(model[1].weight_hh_l0)
    with pytest.raises(dr.errors.NotSupportedError, match=r"1\.weight_hh_l0"):
        model.to(REMOTE)
    assert {p.device.type for p in model.parameters()} == {"cpu"} and held() is not None
    # The layers have their own references again.
    assert all(ref() is not None for ref in model[1]._flat_weight_refs) and model[1]._flat_weight_refs
    del held
    assert {p.device.type for p in model.to(REMOTE).parameters()} == {"remote"}


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_convolution_with_channels_last_has_its_strides_at_once(session: object, kernel: int) -> None:
    """torch's meta kernel promises another layout."""
    layer = nn.Conv2d(8, 16, kernel).to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 12, 12).to(memory_format=torch.channels_last)
    expected = layer(x)
    found = layer.to(REMOTE)(x.to(REMOTE))
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found.detach().cpu(), expected.detach())


@pytest.mark.parametrize("wanted", [True, False])
def test_attention_that_wants_no_weights_has_none(session: Any, wanted: bool) -> None:
    torch.manual_seed(0)
    x, weight, out = torch.randn(2, 3, 8), torch.randn(24, 8), torch.randn(8, 8)
    bias, last = torch.randn(24), torch.randn(8)

    def run(device: str) -> Any:
        q, *rest = (t.to(device) for t in (x, weight, bias, out, last))
        return torch._native_multi_head_attention(q, q, q, 8, 2, *rest, need_weights=wanted)

    local = run("cpu")
    # The first call asks, and the second knows.
    for found in (run(REMOTE), run(REMOTE)):
        assert torch.allclose(found[0].cpu(), local[0], atol=1e-6)
        assert (found[1] is None) is (local[1] is None) is not wanted
