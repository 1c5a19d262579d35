"""What wrapper tensors are known to get wrong where the operator database does not look: devices, random
state, refusals, autocast.

Elsewhere: autograd in `test_autograd.py`; `p.data`, ties and weak references in `test_modules.py`; transforms
in `test_func.py`; numbers, texts and indices in `test_values.py`; local code in `test_local_code.py`.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import distruntime as dr
from agree import REMOTE, agrees, check, is_remote, tensor
from distruntime.log.handle import Residence
from dynamo import COMPILES

# Checkpointing and random state


def _dropping(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.3)).to(
        device
    )


@pytest.mark.parametrize("reentrant", [True, False])
@agrees
def test_checkpointed_dropout(device: str, reentrant: bool) -> Any:
    model, x = _dropping(device), tensor(device, 5, 8, grad=True)
    torch.manual_seed(1)
    out = checkpoint(model, x, use_reentrant=reentrant)
    out = checkpoint(model, out, use_reentrant=reentrant)
    noise = torch.rand(3, device=x.device)  # what is drawn in between must not reach the recomputation
    out.square().sum().backward()
    after = torch.rand(3, device=x.device)
    return out, x.grad, [p.grad for p in model.parameters()], noise, after


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_changes_no_gradient(session: object, reentrant: bool) -> None:
    def gradients(through: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        model, x = _dropping(REMOTE), tensor(REMOTE, 5, 8, grad=True)
        torch.manual_seed(1)
        through(model, x).square().sum().backward()
        return [t.grad.cpu() for t in (x, *model.parameters()) if t.grad is not None]

    plain = gradients(lambda model, x: model(x))
    checkpointed = gradients(lambda model, x: checkpoint(model, x, use_reentrant=reentrant))
    assert len(plain) == 5
    torch.testing.assert_close(checkpointed, plain)


@agrees
def test_checkpoint_sequential(device: str) -> Any:
    model, x = _dropping(device), tensor(device, 5, 8, grad=True)
    torch.manual_seed(1)
    out = checkpoint_sequential(model, 2, x, use_reentrant=False)
    out.sum().backward()
    return out, x.grad


@agrees
def test_random_numbers_follow_the_seed(device: str) -> Any:
    torch.manual_seed(5)
    first = [torch.rand(3, device=device), torch.randn(2, 2, device=device), torch.randperm(9, device=device)]
    first += [torch.randint(0, 9, (4,), device=device), torch.bernoulli(torch.full((9,), 0.5).to(device))]
    first += [torch.empty(3, device=device).uniform_(), torch.empty(3, device=device).exponential_()]
    first += [
        torch.multinomial(torch.ones(9).to(device), 4),
        torch.nn.functional.dropout(torch.ones(9).to(device)),
    ]
    torch.manual_seed(5)
    return first, torch.rand(3, device=device)


def test_fork_rng_restores_both_sides(session: object) -> None:
    torch.manual_seed(3)
    newer = inspect.signature(torch.random.fork_rng).parameters["device_type"].default is None
    with torch.random.fork_rng(
        **({} if newer else {"device_type": REMOTE})
    ):  # by default the current accelerator's; torch 2.11: CUDA's
        inside = torch.rand(3, device=REMOTE), torch.rand(3)
    after = torch.rand(3, device=REMOTE), torch.rand(3)
    assert torch.equal(inside[0].cpu(), after[0].cpu()) and torch.equal(inside[1], after[1])
    assert not torch.equal(torch.rand(3, device=REMOTE).cpu(), after[0].cpu())


def test_random_state_is_read_and_set(session: object) -> None:
    state = torch.remote.get_rng_state()
    first = torch.rand(4, device=REMOTE)
    torch.remote.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=REMOTE).cpu(), first.cpu())
    assert not torch.equal(torch.rand(4, device=REMOTE).cpu(), first.cpu())


def test_a_generator_is_used_or_refused(session: object) -> None:
    generator = torch.Generator().manual_seed(7)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    try:
        got = torch.rand(3, device=REMOTE, generator=generator)
    except RuntimeError as refusal:
        assert "generator" in str(refusal).lower()
    else:
        assert torch.equal(got.cpu(), expected), "a generator that was taken was not used"


# Devices


@agrees
def test_to_returns_self_where_torch_promises_it(device: str) -> Any:
    x = tensor(device, 3)
    same = [
        x.to(x.device),
        x.to(x.dtype),
        x.to(x),
        x.to(device),
        x.to(x.device, x.dtype),
        x.to(device=x.device),
        x.to(x.device, non_blocking=True),
    ]
    others = [
        x.to(x.device, copy=True),
        x.to(torch.float64),
        x.clone(),
        x.to(x.device, torch.float64),
        x.to(device, torch.float64),
    ]
    leaf = tensor(device, 3, grad=True)
    assert leaf.to(leaf.device) is leaf
    assert x.float() is x and x.contiguous() is x and x.type(torch.float32) is x
    return [t is x for t in same], [t is x for t in others], others, leaf.to(torch.float64)


@agrees
def test_a_tensor_goes_here_and_back(device: str) -> Any:
    x = tensor(device, 3, 4, grad=True)
    here = [
        x.cpu(),
        x.to("cpu"),
        x.to(device="cpu", dtype=torch.float64),
        x.to("cpu", copy=True),
        x.to(torch.device("cpu")),
        x.t().cpu(),
    ]
    assert not any(is_remote(t) for t in here)
    back = here[0].to(x.device)
    (back * 2 + here[2].to(x)).sum().backward()
    return (
        back * 1,
        x.grad,
        x.to(torch.ones(1)).sum() + 1,
        here[-1].to(device) * 1,
        [t.detach().clone() for t in here],
    )


@agrees
def test_likes_of_a_remote_tensor_elsewhere(device: str) -> Any:
    x = tensor(device, 2, 3)
    makers = [torch.zeros_like, torch.ones_like, torch.empty_like, torch.rand_like, torch.randn_like]
    makers += [lambda t, **k: torch.full_like(t, 2.0, **k), lambda t, **k: torch.randint_like(t, 5, **k)]
    for make in makers:
        assert make(x, device="cpu").device == torch.device("cpu")
        assert make(x, device="meta").device == torch.device("meta")
        assert make(x).device == x.device
        assert make(torch.ones(2), device=x.device).device == x.device
    new = [
        x.new_zeros,
        x.new_ones,
        x.new_empty,
        lambda n, **k: x.new_full((n,), 1.0, **k),
        lambda n, **k: x.new_tensor([1.0] * n, **k),
    ]
    for make_new in new:
        assert make_new(2, device="cpu").device == torch.device("cpu")
        assert make_new(2).device == x.device
    assert x.to("meta").is_meta and x.to(device="meta").device == torch.device("meta")
    torch.manual_seed(0)
    return torch.ones_like(x), torch.rand_like(x), x.new_full((2,), 3), x.new_tensor([1, 2])


@agrees
def test_factories(device: str) -> Any:
    d = torch.device(device)
    made = [
        torch.zeros(2, 3, device=d),
        torch.arange(5, device=d),
        torch.linspace(0, 1, 4, device=d),
        torch.eye(3, device=d),
    ]
    made += [
        torch.tensor([1.5, 2.0], device=d),
        torch.as_tensor([[1, 2]], device=d),
        torch.full((2,), True, device=d),
    ]
    made += [
        torch.from_numpy(np.ones((2, 2))).to(d),
        torch.tensor(np.float32(2.5), device=d),
        torch.as_tensor(np.arange(3), device=d),
    ]
    made += [
        torch.tril_indices(3, 3, device=d),
        torch.hann_window(4, device=d),
        torch.complex(torch.ones(2, device=d), torch.ones(2, device=d)),
    ]
    made += [
        torch.scalar_tensor(3.0, device=d),
        torch.zeros(0, device=d),
        torch.asarray([1, 2], device=d),
        torch.logspace(0, 1, 3, device=d),
    ]
    with d:
        made += [torch.ones(2), torch.arange(3.0), torch.tensor([1, 2]), torch.empty(2).fill_(1)]
    return made


@agrees
def test_the_default_device(device: str) -> Any:
    torch.set_default_device(device)
    try:
        made = torch.ones(2), torch.tensor([3.0]), nn.Linear(2, 2).weight.detach().zero_(), torch.arange(3)
    finally:
        torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu"
    return made


def test_a_place_that_is_not_there(session: object) -> None:
    for number in (
        77,
        127,
        128,
        200,
        300,
    ):  # an index is eight bits in C++ and wraps: what comes out must still be no other place
        with pytest.raises(dr.errors.PlacementError, match=r"remote:0 is node 0|names none of them"):
            torch.zeros(1, device=f"remote:{number}")
        with pytest.raises(dr.errors.PlacementError, match=r"remote:0 is node 0|names none of them"):
            torch.ones(1).to(f"remote:{number}")
    with pytest.raises(RuntimeError):
        torch.zeros(1, device="remote:-3")


def test_more_places_than_a_device_index_can_say(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=3, simulate_cuda=100)
    places = [dr.types.Place(node, f"cuda:{k}") for node in range(3) for k in range(100)]
    for place in places:  # numbers are reused when nothing lives there any more
        x = torch.ones(2, device=REMOTE).to(place)
        assert x.place == place and (x + 1).place == place
        assert torch.zeros(1, device=x.device).place == place
    alive = []
    with pytest.raises(dr.errors.PlacementError, match="127"):
        for place in places:
            alive.append(torch.ones(1, device=REMOTE).to(place))
    assert len(alive) >= 100 and all(x.place == place for x, place in zip(alive, places, strict=False))
    assert sum(x.item() for x in alive) == len(alive)


def test_the_plumbing_shows_nowhere(session: object) -> None:
    x = tensor(REMOTE, 2, 3)
    device = x.device
    assert (
        device.type == "remote" and isinstance(device.index, int) and str(device) == f"remote:{device.index}"
    )
    assert (
        torch.ones(2, device=device).device == device and torch.ones(2, device=str(device)).device == device
    )
    texts = [
        repr(x),
        str(x),
        repr(nn.Parameter(x)),
        repr(x.requires_grad_() * 2),
        repr(device),
        f"{x}",
        repr(nn.Linear(2, 2).to(REMOTE).state_dict()),
    ]
    for text in texts:
        assert not any(word in text.lower() for word in ("lazy", "privateuse", "wrapper", "ref=")), text
    assert isinstance(x, torch.Tensor) and isinstance(x, dr.DistributedTensor)
    assert (
        not x.is_cuda
        and not x.is_meta
        and not x.is_cpu
        and not x.is_sparse
        and x.layout is torch.strided
        and not x.is_pinned()
    )


# Saving and sharing


def test_what_cannot_leave_the_worker_refuses(session: object) -> None:
    x = tensor(REMOTE, 3)
    refused: dict[str, Callable[[], object]] = {
        "pickle": lambda: pickle.dumps(x),
        "numpy": x.numpy,
        "array": lambda: np.asarray(x),
        "share_memory_": x.share_memory_,
        "dlpack": lambda: torch.from_dlpack(x),
        "dlpack method": x.__dlpack__,
        "module": lambda: pickle.dumps(nn.Linear(2, 2).to(REMOTE)),
        "storage": lambda: x.untyped_storage().resize_(0),
        "typed storage": x.storage,
        "pin": x.pin_memory,
    }
    for name, act in refused.items():
        with pytest.raises((dr.errors.NotSupportedError, TypeError)) as caught:
            act()
        assert any(word in str(caught.value) for word in (".cpu()", "fetch", "remote")), (
            f"{name}: {caught.value}"
        )


@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor",
    "ignore:The PyTorch API of nested tensors",
    "ignore:Sparse CSR tensor support",
)
@pytest.mark.parametrize("layout", ["coo", "csr", "quantized", "mkldnn", "nested"])
def test_other_layouts_work_or_refuse(session: object, layout: str) -> None:
    here = torch.eye(3) * 2
    make: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "coo": lambda t: t.to_sparse(),
        "csr": lambda t: t.to_sparse_csr(),
        "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        "mkldnn": lambda t: t.to_mkldnn(),
        "nested": lambda t: torch.nested.as_nested_tensor([t, t[:2]]),
    }
    back: dict[str, Callable[[torch.Tensor], Any]] = {
        "quantized": lambda t: t.dequantize(),
        "nested": lambda t: list(t.unbind()),
    }
    plain = back.get(layout, lambda t: t.to_dense())
    for act in (lambda: make[layout](here.to(REMOTE)), lambda: make[layout](here).to(REMOTE)):
        try:
            there = act()
            result = dr.fetch(plain(there))
        except (dr.errors.NotSupportedError, NotImplementedError) as refusal:
            assert str(refusal)
        else:
            assert there.layout == make[layout](here).layout, "claims another layout"
            torch.testing.assert_close(result, plain(make[layout](here)))


@agrees
def test_saved_files_load_onto_the_worker(device: str) -> Any:
    file = io.BytesIO()
    torch.save({"w": torch.arange(6.0).view(2, 3).t(), "p": nn.Parameter(torch.ones(2)), "n": 3}, file)
    loaded = []
    for where in (device, torch.device(device), lambda storage, _: storage):
        file.seek(0)
        loaded.append(torch.load(file, map_location=where, weights_only=True))
    return loaded[:2], dr.fetch(loaded)


def test_a_fetched_state_is_local_and_tied(session: object) -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).to(REMOTE)
    model[1].weight = model[0].weight
    state = dr.fetch(model.state_dict())
    assert list(state) == list(model.state_dict()) and not any(is_remote(t) for t in state.values())
    assert state["0.weight"].untyped_storage().data_ptr() == state["1.weight"].untyped_storage().data_ptr()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["0.weight"].untyped_storage().data_ptr() == loaded["1.weight"].untyped_storage().data_ptr()
    assert torch.equal(loaded["0.weight"], model[0].weight.detach().cpu())


@agrees
def test_deepcopy_of_a_part(device: str) -> Any:
    x = tensor(device, 4, 4)
    part = copy.deepcopy(x[1:3, 1:])
    x.zero_()
    return part.contiguous()  # torch would copy the whole storage and keep the part's strides


@pytest.mark.parametrize("causal", [True, False])
def test_attention_that_travels_whole_as_for_a_gpu(
    session: object, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    """A GPU chooses its kernel itself: one instruction forward, recorded, and one backward.

    Here a CPU takes its place.
    """
    monkeypatch.setattr(Residence, "has_cpu_kernels", False)

    def attend(device: str) -> Any:
        q, k, v = (tensor(device, 2, 3, 5, 4).requires_grad_() for _ in range(3))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
        out.square().sum().backward()
        return out, q.grad, k.grad, v.grad

    check(lambda: attend("cpu"), lambda: attend(REMOTE), must_work=True)


# autocast, compile


def test_autocast_is_never_without_effect(session: object) -> None:
    """What it does to each operator: test_autocast_lists.py.

    (`torch.autocast("cpu")` leaves them alone, as it leaves CUDA's alone.)
    """
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(REMOTE), tensor(REMOTE, 3, 4)
    with torch.autocast(REMOTE, dtype=torch.bfloat16):
        products = [
            x @ x.t(),
            model(x),
            torch.bmm(x[None], x.t()[None]),
            nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        ]
        exact = [
            x.softmax(-1),
            nn.functional.cross_entropy(products[1], torch.tensor([0, 1, 1]).to(REMOTE)),
            x + x,
        ]
    assert [p.dtype for p in products] == [torch.bfloat16] * 4
    assert [p.dtype for p in exact] == [torch.float32] * 3
    check(lambda: _train_under_autocast("cpu"), lambda: _train_under_autocast(REMOTE), must_work=True)
    with torch.autocast(REMOTE, enabled=False):
        assert (x @ x.t()).dtype is torch.float32


def _train_under_autocast(device: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            out = model(tensor(device, 6, 8))
        assert out.dtype is torch.bfloat16
        loss = out.float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, model.state_dict()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")  # Dynamo's own
@COMPILES
@agrees
def test_compiled_code_is_right_through_graph_breaks(device: str, backend: str) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)

    @torch.compile(backend=backend)
    def step(x: torch.Tensor, here: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = model(x).sum() * 2
        if y > 0:
            y = y + 1
        return y, here * 2 + here.sin()

    out = []
    for seed in range(3):
        loss, local = step(tensor(device, 3, 4, seed=seed), torch.ones(2))
        loss.backward()
        assert not is_remote(local)
        out.append((loss, local))
    compiled = torch.compile(model, backend=backend)
    return out, [p.grad for p in model.parameters()], compiled(tensor(device, 3, 4))


@agrees
def test_a_solution_from_the_right_is_a_lazy_conjugate(device: str) -> Any:
    """torch's meta kernel promises no conjugate, so the first call failed where its result was read."""
    a = torch.complex(torch.eye(3) * 2, torch.ones(3, 3)).to(device)
    b = torch.complex(torch.ones(3, 3), torch.arange(9.0).view(3, 3)).to(device)
    x = torch.linalg.solve(a, b, left=False)
    return x, x @ a, x.is_conj()


@pytest.mark.parametrize("lengths", ["here", "there", "numbers"])
@agrees
def test_the_lengths_of_a_single_sequence(device: str, lengths: str) -> Any:
    scores = tensor(device, 12, 5).log_softmax(1)
    targets = torch.tensor([1, 2, 4]).to(device)
    where = device if lengths == "there" else "cpu"
    given: Any = (torch.tensor(12, device=where), torch.tensor(3, device=where))
    if lengths == "numbers":
        given = (12,), (3,)
    return torch.nn.functional.ctc_loss(scores, targets, *given)


# Lists of tensors


@pytest.mark.parametrize("name", ["addcmul", "addcdiv", "addcmul_", "addcdiv_"])
@agrees
def test_the_factors_of_a_list_stand_in_a_local_tensor(device: str, name: str) -> Any:
    # On a GPU they must be local, too.
    lists = [[tensor(device, 3), tensor(device, 2, 2)] for _ in range(3)]
    call = getattr(torch, f"_foreach_{name}")
    for wrong in (torch.tensor(2.0), torch.ones(3), torch.ones(6)[::2]):
        with pytest.raises(RuntimeError, match=r"^Expected"):
            call(*lists, scalars=wrong)
    return call(*lists, scalars=torch.tensor([2.0, 0.5])), lists[0]


@agrees
def test_a_reference_of_torch_in_python_has_the_kernels_dtype_at_once(device: str) -> Any:
    # The meta kernel of `prims::signbit` promises the operand's.
    return torch._refs.signbit(tensor(device, 2, 3))


@pytest.mark.parametrize("power", [True, 1, 2, 1.0])
@agrees
def test_a_power_of_truth_values_has_the_kernels_dtype_at_once(device: str, power: float) -> Any:
    return (tensor(device, 2, 3) > 1).pow(power)
