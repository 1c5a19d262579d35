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
    with pytest.raises(dr.NotSupportedError, match=r"x\.cpu\(\)\.__dlpack__"):
        torch.utils.dlpack.to_dlpack(x)
    for make in (torch.nested.nested_tensor, torch.nested.as_nested_tensor):
        with pytest.raises(dr.NotSupportedError, match="pad_sequence"):
            make([torch.ones(2), torch.ones(3)], device=REMOTE)
    assert torch.nested.as_nested_tensor([torch.ones(2)], layout=torch.jagged).is_nested
    capsule = torch.utils.dlpack.to_dlpack(torch.ones(2))
    assert torch.utils.dlpack.from_dlpack(capsule).tolist() == [1.0, 1.0]


def test_flex_attention_runs_its_formula_there(session: object) -> None:
    """torch compiles it for the devices that it lists, and takes its formula apart by `vmap` for others."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: object, h: object, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return i >= j

    here = [torch.randn(2, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2)]
    there = [x.detach().to(REMOTE).requires_grad_() for x in here]
    bias = torch.randn(4)
    mask = create_block_mask(causal, 1, 1, 16, 16, device=REMOTE)
    moved = bias.to(REMOTE)
    found = flex_attention(
        *there, score_mod=lambda s, b, h, i, j: s * 2 + moved[h], block_mask=mask, enable_gqa=True
    )
    q, k, v = here[0], *(x.repeat_interleave(2, dim=1) for x in here[1:])
    scores = (q @ k.mT) * 8**-0.5 * 2 + bias[:, None, None]
    expected = scores.masked_fill(~torch.ones(16, 16).tril().bool(), -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(found.detach().cpu(), expected.detach())
    found.square().sum().backward()
    expected.square().sum().backward()
    for x, y in zip(there, here):
        assert x.grad is not None
        torch.testing.assert_close(x.grad.cpu(), y.grad)
    with torch.no_grad():
        assert flex_attention(*(x.detach() for x in there), enable_gqa=True).device.type == "remote"
    # torch's advice is to compile it.
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True))
    q, k, v = here[0], *(x.repeat_interleave(2, dim=1) for x in here[1:])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(compiled(*there).detach().cpu(), expected.detach())


def test_a_compiled_function_may_make_tensors_there(session: object) -> None:
    """Such a call has no proxy among its operands, so Dynamo captures it."""

    def positions(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(3, device=x.device)

    x = torch.ones(3, device=REMOTE)
    assert torch.compile(positions)(x).tolist() == [1.0, 1.0, 1.0]
    assert torch.compile(lambda: torch.arange(3, device=REMOTE))().tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_says_that_it_lives_here(session: object) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert nested.to(torch.float64).dtype == torch.float64
    with pytest.raises(dr.NotSupportedError, match="Pad it first"):
        nested.to(torch.ones(1, device=REMOTE).device)


def test_a_state_that_is_loaded_there_keeps_its_versions(session: object) -> None:
    file = io.BytesIO()
    torch.save(nn.BatchNorm1d(2).state_dict(), file)
    file.seek(0)
    found = torch.load(file, map_location=REMOTE)
    assert found._metadata[""]["version"] == 2 and found["weight"].device.type == "remote"


def test_the_device_module_without_a_device_is_the_sessions(session: object) -> None:
    assert torch.get_device_module() is torch.get_device_module("remote")
