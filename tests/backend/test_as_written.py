"""What scripts and libraries do with tensors of a device, beyond operators: as written for CUDA."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

import distruntime as dr
from agree import REMOTE


def test_a_local_tensor_is_pinned_and_sent(session: object) -> None:
    """nanoGPT's `get_batch` does this. There is no GPU here that would copy from pinned memory."""
    x = torch.arange(6.0).view(2, 3)
    sent = x.pin_memory().to(REMOTE, non_blocking=True)
    for device in (REMOTE, torch.device("remote:1"), dr.place(1, "cpu")):
        assert x.pin_memory(device) is x
    assert torch.equal(sent.cpu(), x) and sent.device.type == "remote"


@pytest.mark.parametrize("grad", [False, True])
def test_an_encoder_takes_a_padding_mask_in_eval(session: object, grad: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    here = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    nested = nn.TransformerEncoder(layer, 2).eval()
    nested.load_state_dict(here.state_dict())
    there = copy.deepcopy(nested).to(REMOTE)
    x, mask = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 4] = mask[1, 2:] = True
    with torch.set_grad_enabled(grad):
        found = there(x.to(REMOTE), src_key_padding_mask=mask.to(REMOTE)).cpu()
        torch.testing.assert_close(found, here(x, src_key_padding_mask=mask))


def test_a_parameters_own_class_makes_another(session: object) -> None:
    """accelerate's hooks copy parameters so."""
    p = nn.Parameter(torch.ones(3, device=REMOTE), requires_grad=False)
    again = type(p)(p.data, requires_grad=p.requires_grad)
    assert isinstance(again, nn.Parameter) and not again.requires_grad and torch.equal(again.cpu(), p.cpu())
    assert type(p).__module__.split(".")[0] == "torch"


@pytest.mark.parametrize("number", [3, 2.5, True, float("inf"), 1 + 2j])
def test_a_number_is_copied_into_every_element(session: object, number: Any) -> None:
    dtype = torch.complex64 if isinstance(number, complex) else torch.float32
    here, there = torch.zeros(4, dtype=dtype), torch.zeros(4, dtype=dtype, device=REMOTE)
    assert there.copy_(number) is there
    assert torch.equal(there.cpu(), here.copy_(number))


# torch compiles its own formulas at the first use.
@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_forward_derivatives_come_with_a_copy(session: object) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, device=REMOTE), torch.full((3,), 2.0, device=REMOTE))
        local = torch.zeros(3)
        local.copy_(dual)
        primal, tangent = forward_ad.unpack_dual(local)
        assert primal.tolist() == [1.0] * 3 and tangent is not None and tangent.tolist() == [2.0] * 3


def test_what_stays_here_says_so(session: object) -> None:
    x = torch.ones(2, 3, 4, device=REMOTE)
    with pytest.raises(
        RuntimeError, match=r"'lengths' argument .* 1D CPU int64 tensor, but got 1D remote:0 Long"
    ):
        nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]).to(REMOTE), batch_first=True)
    with pytest.raises(dr.errors.NotSupportedError, match=r"x\.cpu\(\)\.__dlpack__"):
        torch.utils.dlpack.to_dlpack(x)
    for make in (torch.nested.nested_tensor, torch.nested.as_nested_tensor):
        with pytest.raises(dr.errors.NotSupportedError, match="pad_sequence"):
            make([torch.ones(2), torch.ones(3)], device=REMOTE)
    assert torch.nested.as_nested_tensor([torch.ones(2)], layout=torch.jagged).is_nested
    capsule = torch.utils.dlpack.to_dlpack(torch.ones(2))
    assert torch.utils.dlpack.from_dlpack(capsule).tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_says_that_it_lives_here(session: object) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert nested.to(torch.float64).dtype == torch.float64
    with pytest.raises(dr.errors.NotSupportedError, match="Pad it first"):
        nested.to(torch.ones(1, device=REMOTE).device)


def test_a_state_that_is_loaded_there_keeps_its_versions(session: object) -> None:
    file = io.BytesIO()
    torch.save(nn.BatchNorm1d(2).state_dict(), file)
    file.seek(0)
    found = torch.load(file, map_location=REMOTE)
    assert found._metadata[""]["version"] == 2 and found["weight"].device.type == "remote"


def test_the_device_module_without_a_device_is_the_sessions(session: object) -> None:
    assert torch.get_device_module() is torch.get_device_module("remote")


@pytest.mark.filterwarnings("ignore:torch.compile does nothing to remote tensors")
def test_what_is_compiled_runs_op_by_op_where_it_gets_remote_tensors(session: object) -> None:
    """With `fullgraph=True` torch would raise at the first operator. Local tensors are compiled as before."""
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=count)
    def scores(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.T, -1)

    layer = nn.Linear(4, 2).to(REMOTE)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    step = torch.compile(optimizer.step, fullgraph=True, backend=count)
    called = torch.compile(lambda: layer(torch.ones(4, device=REMOTE)), fullgraph=True, backend=count)
    compiled = torch.compile(layer, fullgraph=True, backend=count)

    x = torch.arange(12.0).view(3, 4)
    torch.testing.assert_close(scores(x.to(REMOTE)).cpu(), torch.softmax(x @ x.T, -1))
    compiled(x.to(REMOTE)).sum().backward()
    before = dr.fetch(layer.weight)
    step()
    assert not torch.equal(dr.fetch(layer.weight), before) and called().device == layer.weight.device
    assert list(compiled.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
    assert not graphs
    torch.testing.assert_close(scores(x), torch.softmax(x @ x.T, -1))
    assert len(graphs) == 1


class Unconfigured(torch._TorchCompileInductorWrapper):
    """Inductor without options: their import takes seconds."""

    def __init__(self) -> None:
        """Import nothing."""
        self.config = {}

    def reset(self) -> None:
        """Forget nothing; `torch._dynamo.reset` asks each compiler that was used."""


def test_a_graph_that_makes_remote_tensors_of_numbers_is_not_inductors_here(session: object) -> None:
    """nanoGPT's positions are made in such a graph: its inputs are numbers."""

    @torch.compile(backend=Unconfigured())
    def positions(n: int) -> torch.Tensor:
        return torch.arange(n, device=REMOTE) * 2

    assert positions(3).tolist() == [0, 2, 4] and positions(5).tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_ctc_takes_the_lengths_of_sequences_from_here(session: object, mode: Any) -> None:
    """A loader makes them, and a GPU takes them from any device."""
    log_probs = torch.randn(6, 3, 5).log_softmax(-1)
    targets, lengths = torch.randint(1, 5, (3, 2)), (torch.full((3,), 6), torch.tensor([2, 1, 2]))
    losses = []
    for device in ("cpu", REMOTE):
        leaf = log_probs.clone().to(device).requires_grad_()
        with mode():
            loss = nn.functional.ctc_loss(leaf, targets.to(device), *lengths)
        gradient = torch.autograd.grad(loss, leaf)[0].cpu() if loss.requires_grad else None
        losses.append((loss.detach().cpu(), gradient))
    torch.testing.assert_close(*losses)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:torch.compile does nothing to remote tensors")
@pytest.mark.filterwarnings("ignore:what torch.compile was given runs operator by operator. flex_attention")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_flex_attention_is_computed_by_its_formula(session: object, mode: Any) -> None:
    """torch allows some devices by name, and takes no gradients on CPUs. So the formula is written here."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    inputs = [torch.randn(2, 2, 8, 4) for _ in range(3)]
    here, there = ([x.clone().to(d).requires_grad_() for x in inputs] for d in ("cpu", REMOTE))
    query, key, value = here
    later = torch.arange(8)[:, None] < torch.arange(8)
    slope = torch.tensor(0.1, device=REMOTE)
    with mode():
        scores = query @ key.mT / 2 + 0.1 * torch.arange(8)
        expected = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        causal = flex.create_block_mask(
            lambda b, h, i, j: i >= j, None, None, 8, 8, device=REMOTE, BLOCK_SIZE=8
        )
        found = [
            attend(*there, score_mod=lambda s, b, h, i, j: s + slope * j, block_mask=causal)
            for attend in (flex.flex_attention, torch.compile(flex.flex_attention, fullgraph=True))
        ]
    for one in found:
        torch.testing.assert_close(one.detach().cpu(), expected.detach())
    if expected.requires_grad:
        gradients = torch.autograd.grad(found[0].pow(2).sum(), there)
        torch.testing.assert_close(dr.fetch(gradients), torch.autograd.grad(expected.pow(2).sum(), here))
