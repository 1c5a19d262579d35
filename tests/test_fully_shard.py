"""torch's own FSDP2 on a mesh: different data on each member, gradients and steps as in serial data parallelism."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import distruntime as dr
from meshes import MLP, SHAPES, copied, make, same, same_gradients, same_parameters, two_workers
from processes import slots, until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_fsdp as of_torch
    from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

__all__ = ["two_workers"]


def batches(mesh: dr.DeviceMesh, step: int, whole: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a tensor with different data on each member (of the first dimension, unless `whole`), and the parts, one of each."""
    count = mesh.size() if whole else mesh.size(0)
    parts = [torch.randn(6, 16, generator=torch.Generator().manual_seed(100 * step + k), device="cpu") for k in range(count)]
    ranks = range(mesh.size()) if whole else [at[0] for at in mesh.coordinates()]
    return dr.from_shards([parts[k] for k in ranks], mesh), parts


def train(mesh: dr.DeviceMesh, sharded: nn.Module, serial: nn.Module, whole: bool = True, clip: bool = False, steps: int = 2) -> None:
    ours, theirs = torch.optim.AdamW(sharded.parameters(), 1e-2), torch.optim.AdamW(serial.parameters(), 1e-2)
    for step in range(steps):
        x, parts = batches(mesh, step, whole)
        (sharded(x) ** 2).mean().backward()
        for part in parts:
            ((serial(part) ** 2).mean() / len(parts)).backward()
        same_gradients(sharded, serial)
        if clip:
            same(clip_grad_norm_(sharded.parameters(), 0.1), clip_grad_norm_(serial.parameters(), 0.1))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(sharded, serial)


def sharded(model: nn.Module, mesh: dr.DeviceMesh, **options: Any) -> nn.Module:
    for part in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(part, mesh=mesh, **options)
    return model


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_by_layer(two_workers: None, shape: str, reshard: bool) -> None:
    """On two dimensions this is HSDP: replicas along the first, shards along the last."""
    mesh, serial = make(shape), MLP()
    model = sharded(copied(serial, mesh), mesh, reshard_after_forward=reshard)
    weight: Any = model[0].weight  # type: ignore[index]
    assert isinstance(weight, DTensor) and weight.to_local().shape == (32 // mesh.size(-1 if mesh.ndim > 1 else 0), 16)
    train(mesh, model, serial, clip=reshard)


def test_within_the_mesh_its_streams_are_the_meshs(two_workers: None) -> None:
    mesh, serial = make("4"), MLP()
    model = sharded(copied(serial, mesh), mesh)
    with mesh:
        train(mesh, model, serial, steps=3)
    state: Any = model
    assert state._get_fsdp_state()._comm_ctx.all_gather_stream.place.members == mesh.places


def test_mixed_precision(two_workers: None) -> None:
    mesh, serial = make("2"), MLP()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = copied(serial, mesh)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    x, parts = batches(mesh, 0, True)
    out = model(x)
    assert out.dtype == torch.float32
    (out**2).mean().backward()
    low = MLP().to(torch.bfloat16)
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in low.parameters()]
    for part in parts:
        (low(part.bfloat16()).float() ** 2).mean().backward()
        for total, p in zip(sums, low.parameters()):
            assert p.grad is not None
            total += p.grad.float() / len(parts)
            p.grad = None
    for p, wanted in zip(model.parameters(), sums):
        assert p.grad is not None and p.dtype == torch.float32
        same(p.grad, wanted, atol=2e-3)


def test_accumulation_without_synchronisation(two_workers: None) -> None:
    mesh, serial = make("2"), MLP()
    model: Any = copied(serial, mesh)
    fully_shard(model, mesh=mesh)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        x, parts = batches(mesh, step, True)
        (model(x) ** 2).mean().backward()
        for part in parts:
            ((serial(part) ** 2).mean() / len(parts)).backward()
    same_gradients(model, serial)


def test_uneven_parameters_are_refused(two_workers: None) -> None:
    mesh = make("2")
    with pytest.raises(dr.NotSupportedError, match="multiple"):
        fully_shard(nn.Linear(4, 7).to(mesh.device), mesh=mesh)


def test_memory_of_gathered_parameters_is_given_back(two_workers: None) -> None:
    mesh = make("2")
    dr.synchronize()
    gc.collect()
    before = [slots(0), slots(1)]
    model = sharded(copied(MLP(), mesh), mesh)
    x, _ = batches(mesh, 0, True)
    for _ in range(3):
        (model(x) ** 2).mean().backward()
    del model, x
    gc.collect()
    until(lambda: max(a - b for a, b in zip([slots(0), slots(1)], before)) <= 2)  # what the mesh itself keeps: coordinates


def test_resharding_to_a_part(two_workers: None) -> None:
    mesh, serial = make("4"), MLP()
    train(mesh, sharded(copied(serial, mesh), mesh, reshard_after_forward=2), serial)


def test_replicas(two_workers: None) -> None:
    mesh, serial = make("4"), MLP()
    model = copied(serial, mesh)
    replicate(model, mesh=mesh)
    train(mesh, model, serial)


def test_distributed_data_parallel(two_workers: None) -> None:
    mesh, serial = make("2"), MLP()
    model = nn.parallel.DistributedDataParallel(copied(serial, mesh), process_group=mesh.get_group())
    train(mesh, model, serial)


def test_state_dicts(two_workers: None) -> None:
    mesh, serial = make("4"), MLP()
    model = sharded(copied(serial, mesh), mesh)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for name, value in serial.state_dict().items():
        assert whole[name].device.type == "cpu" and torch.equal(whole[name], value)
        assert torch.equal(dr.fetch(model.state_dict())[name], value)
    doubled = {name: value.to(mesh.device) * 2 for name, value in serial.state_dict().items()}
    set_model_state_dict(model, doubled, options=StateDictOptions(full_state_dict=True))
    for p, q in zip(model.parameters(), serial.parameters()):
        same(p, q * 2)


def test_what_was_saved_goes_on_as_it_would_have(two_workers: None, tmp_path: Path) -> None:
    """The page's way to save and to load a sharded model and its optimizer, a schedule among them."""
    mesh, whole = make("2"), StateDictOptions(full_state_dict=True, cpu_offload=True)
    models = [sharded(copied(MLP(), mesh), mesh) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in models]
    schedules: list[Any] = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]

    def step(k: int, seed: int) -> None:
        (models[k](batches(mesh, seed, True)[0]) ** 2).mean().backward()
        optimizers[k].step()
        optimizers[k].zero_grad()
        schedules[k].step()

    step(0, 0)
    state = {
        "model": dr.fetch(models[0].state_dict()),
        "optimizer": get_optimizer_state_dict(models[0], optimizers[0], options=whole),
        "schedule": schedules[0].state_dict(),
    }
    torch.save(state, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    set_model_state_dict(models[1], state["model"], options=StateDictOptions(full_state_dict=True))
    set_optimizer_state_dict(models[1], optimizers[1], state["optimizer"], options=StateDictOptions(full_state_dict=True))
    schedules[1].load_state_dict(state["schedule"])
    for k in range(2):
        step(k, 1)
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(dr.fetch(p), dr.fetch(q))
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"] == 0.0025


def test_activation_checkpointing_draws_the_same_numbers_again(two_workers: None) -> None:
    mesh = make("2")
    layers = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
    found = []
    for saved in (True, False):
        model = copied(layers, mesh)
        fully_shard(model, mesh=mesh)
        x, _ = batches(mesh, 0, True)
        torch.manual_seed(5)
        out = checkpoint(model, x, use_reentrant=False) if saved else model(x)
        out.square().sum().backward()
        found.append([dr.fetch(p.grad) for p in model.parameters()])
    for one, two in zip(*found):
        torch.testing.assert_close(one, two)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("shape", ["2", "2x2"])
def test_a_model_that_is_made_without_memory(two_workers: None, shape: str) -> None:
    mesh, serial = make(shape), MLP()
    with torch.device("meta"):
        model: Any = MLP()
    if mesh.ndim > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = sharded(model, mesh["dp"] if mesh.ndim > 1 else mesh).to_empty(device=mesh.device)
    for part in (model, serial):
        for k, p in enumerate(part.parameters()):
            torch.nn.init.constant_(p, 0.1 * k)
    train(mesh, model, serial, whole=mesh.ndim == 1)


def test_what_there_is_not(two_workers: None) -> None:
    mesh = make("2")
    with pytest.raises(dr.NotSupportedError, match="use fully_shard"):
        FullyShardedDataParallel(copied(MLP(), mesh), device_mesh=mesh)
    with pytest.raises(dr.UsageError, match=r"which mesh: fully_shard\(module, mesh=mesh\)"):
        fully_shard(copied(MLP(), mesh))
    with pytest.raises(dr.UsageError, match=r"'0.weight' is in this process: module.to\(mesh.device\) first"):
        fully_shard(MLP(), mesh=mesh)
    with pytest.raises(dr.NotSupportedError, match="CPUOffloadPolicy"):
        fully_shard(copied(MLP(), mesh), mesh=mesh, offload_policy=CPUOffloadPolicy())
    kept = copied(MLP(), mesh)
    kept.register_parameter("here", nn.Parameter(torch.ones(1)))
    fully_shard(kept, mesh=mesh, ignored_params={kept.here})  # type: ignore[arg-type]
    assert isinstance(kept[0].weight, DTensor) and kept.here.device.type == "cpu"  # type: ignore[index, union-attr]


# -- the models of torch's own tests -----------------------------------------------------------------------------------------------


def drawn(count: int, *shape: int, seed: int = 0) -> list[torch.Tensor]:
    return list(torch.randn((count, *shape), generator=torch.Generator().manual_seed(seed)))


def given(parts: Sequence[torch.Tensor], mesh: dr.DeviceMesh) -> torch.Tensor:
    """Return a tensor of which each member has its own part, or that of its row of members."""
    whole = len(parts) == mesh.size()
    return dr.from_shards([parts[k if whole else at[0]] for k, at in enumerate(mesh.coordinates())], mesh)


def trains(model: nn.Module, serial: nn.Module, mesh: dr.DeviceMesh, batches: Sequence[Sequence[torch.Tensor]]) -> None:
    """Train both, and compare losses, gradients and parameters: `serial` with the mean of the gradients of all parts of a batch."""
    both = [torch.optim.Adam([p for p in m.parameters() if p.requires_grad], 1e-2) for m in (model, serial)]
    for parts in batches:
        loss = model(given(parts, mesh)).sum()
        loss.backward()
        wanted = []
        for part in parts:
            wanted.append(serial(part).sum())
            (wanted[-1] / len(parts)).backward()
        same(given([w.detach() for w in wanted], mesh) - loss.detach(), torch.zeros((), dtype=loss.dtype), atol=1e-4)
        same_gradients(model, serial)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        same_parameters(model, serial)


def stacked(mesh: dr.DeviceMesh, count: int = 3, shard: bool = True, **options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    serial = nn.Sequential(*(of_torch.MLP(16, with_buffer=k == 1) for k in range(count)))
    model: Any = copied(serial, mesh)
    for part in (*model, model) if shard else ():
        fully_shard(part, mesh=mesh, **options)
    return model, serial


_ADVICE = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # about views, of what RowwiseParallel returns


@_ADVICE
@pytest.mark.parametrize("checkpointed", [True, False])
def test_mlps_of_torchs_tests_with_tensor_parallelism(two_workers: None, checkpointed: bool) -> None:
    mesh = make("2x2")
    torch.manual_seed(0)
    serial = of_torch.MLPStack(16)
    model: Any = copied(serial, mesh)
    model.parallelize(mesh["tp"], mesh["dp"], checkpointed, reshard_after_forward=checkpointed)
    trains(model, serial, mesh, [drawn(2, 2, 4, 16, seed=k) for k in range(2)])


@_ADVICE
def test_mlps_of_torchs_tests_over_a_sequence(two_workers: None) -> None:
    mesh = make("2x2")
    torch.manual_seed(0)
    serial = of_torch.MLPStack(16, with_seq_parallel=True)
    model: Any = copied(serial, mesh)
    model.parallelize(mesh["tp"], mesh["dp"], False)
    parts = drawn(2, 2, 4, 16)
    out = model(given(parts, mesh)).to_local()  # of each member some positions of its row's part
    for found, at in zip(dr.shards(out.detach()), mesh.coordinates()):
        torch.testing.assert_close(found, serial(parts[at[0]]).chunk(2, 1)[at[1]].detach())
    (out.sum() / 8).backward()
    for part in parts:
        (serial(part).sum() / 16).backward()
    same_gradients(model, serial)


@pytest.mark.parametrize(("shape", "checkpointed", "tied"), [("2", True, True), ("2x2", False, False)])
def test_transformer_of_torchs_tests(two_workers: None, shape: str, checkpointed: bool, tied: bool) -> None:
    mesh = make(shape)
    torch.manual_seed(0)
    serial = Transformer(ModelArgs(n_layers=1, dropout_p=0.0, weight_tying=tied, checkpoint_activations=checkpointed))
    model: Any = copied(serial, mesh)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    trains(model, serial, mesh, [list(torch.randint(8, (mesh.size(), 2, 8))) for _ in range(2)])


@_ADVICE
@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
def test_parameters_with_uneven_rows_are_cut_by_columns(two_workers: None) -> None:
    """torch's transformer with 23 words, whose embedding is its output's weight; a bias of 23 is left alone."""
    mesh = make("2")
    mode = of_torch.DEVICEInitMode.DEVICE_NEVER
    serial = of_torch.TransformerWithSharedParams(mesh.get_group(), mode, False, True)  # type: ignore[no-untyped-call]
    serial.output_proj.bias.requires_grad_(False)
    model: Any = copied(serial, mesh)
    by_columns: dict[str, Any] = {"mesh": mesh, "shard_placement_fn": lambda p: Shard(p.ndim - 1)}
    for layer in (*model.transformer.encoder.layers, *model.transformer.decoder.layers):
        fully_shard(layer, **by_columns)
    fully_shard(model, ignored_params={model.output_proj.bias}, **by_columns)
    source, target = serial.get_input("cpu")
    out, wanted = model(source.to(mesh.device), target.to(mesh.device)), serial(source, target)
    same(out, wanted)
    model.get_loss((None, target.to(mesh.device)), out).backward()
    serial.get_loss((None, target), wanted).backward()
    same_gradients(model, serial)
    assert tuple(model.embed_tokens.weight.to_local().shape) == (23, 8) and model.embed_tokens.weight is model.output_proj.weight


@pytest.mark.parametrize("used", [[0], [1], [0, 1]])
def test_outputs_and_modules_that_are_not_used(two_workers: None, used: list[int]) -> None:
    """What was gathered ahead for a backward that never came is waited for at the end of the one that did."""
    mesh = make("2")
    torch.manual_seed(0)
    serial = of_torch.DoubleLinear(16)
    model: Any = copied(serial, mesh)
    for part in (model.lin1, model.lin2, model):
        fully_shard(part, mesh=mesh)
    parts = drawn(2, 3, 16)
    for _ in range(2):
        outs = model(given(parts, mesh))
        sum(outs[k].sum() for k in used).backward()
        for part in parts:
            outs = serial(part)
            (sum(outs[k].sum() for k in used) / 2).backward()
    for p, q in zip(model.parameters(), serial.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            same(p.grad, q.grad)


def test_some_parameters_frozen(two_workers: None) -> None:
    mesh = make("2")
    model, serial = stacked(mesh, shard=False)
    for m in (model, serial):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_("bias" in name and not name.startswith("1."))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    trains(model, serial, mesh, [drawn(2, 3, 16, seed=k) for k in range(2)])


def test_prefetching_and_gathering_by_hand(two_workers: None) -> None:
    mesh = make("2")
    model: Any
    model, serial = stacked(mesh)
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    handle = model[0].unshard(async_op=True)
    handle.wait()
    assert not isinstance(model[0].in_proj.weight, DTensor)
    same(model[0].in_proj.weight, serial[0].in_proj.weight)  # and it is given back, although it was looked at
    model[0].reshard()
    assert isinstance(model[0].in_proj.weight, DTensor)
    trains(model, serial, mesh, [drawn(2, 3, 16, seed=k) for k in range(2)])


@pytest.mark.parametrize("reshard", [True, False, 2, None])
def test_what_parameters_are_after_a_forward(two_workers: None, reshard: bool | int | None) -> None:
    mesh = make("4")
    model, serial = stacked(mesh, 2, reshard_after_forward=reshard)
    model(torch.ones(2, 16, device=mesh.device))
    weight: Any = model[0].in_proj.weight
    assert isinstance(weight, DTensor) == (reshard is not False)
    held = weight.to_local() if isinstance(weight, DTensor) else weight
    assert held.shape[0] == 64 // (1 if reshard is False else 2 if reshard == 2 else 4)
    same_parameters(model, serial)
    for part in (*model, model):
        part.reshard()  # type: ignore[operator]
    assert all(isinstance(p, DTensor) and p.to_local().shape[0] == p.shape[0] // 4 for p in model.parameters())
    same_parameters(model, serial)


def test_changes_before_the_first_forward(two_workers: None) -> None:
    mesh = make("2")
    model, serial = stacked(mesh)
    for m in (model, serial):
        m.to(torch.float64)
    trains(model, serial, mesh, [[part.double() for part in drawn(2, 3, 16)]])
    assert all(p.dtype == torch.float64 and p.to_local().dtype == torch.float64 for p in model.parameters())  # type: ignore[attr-defined]


def test_several_forwards_and_a_part_alone(two_workers: None) -> None:
    mesh = make("2")
    model, serial = stacked(mesh)
    one, other = drawn(2, 3, 16)
    for m, x, y in ((model, one.to(mesh.device), other.to(mesh.device)), (serial, one, other)):
        (m(x).sum() + m(y).sum()).backward()
        m[0](y).sum().backward()  # type: ignore[index]
    same_gradients(model, serial)


def test_a_method_beside_forward(two_workers: None) -> None:
    mesh = make("2")

    class Embeds(of_torch.MLP):
        def embed(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.forward(x)
            return found * 2

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Embeds(16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.last(self.inner.embed(x))
            return found

    torch.manual_seed(0)
    serial = Uses()
    model: Any = copied(serial, mesh)
    for part in (model.inner, model):
        fully_shard(part, mesh=mesh)
    register_fsdp_forward_method(model.inner, "embed")
    trains(model, serial, mesh, [drawn(2, 3, 16)])


def test_steps_within_backward(two_workers: None) -> None:
    mesh = make("2")
    model, serial = stacked(mesh)
    own = {p: torch.optim.Adam([p], 1e-2, foreach=True) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        own[p].step()  # type: ignore[index]
        own[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    whole = torch.optim.Adam(serial.parameters(), 1e-2)
    for k in range(2):
        parts = drawn(2, 3, 16, seed=k)
        model(given(parts, mesh)).sum().backward()
        for part in parts:
            (serial(part).sum() / 2).backward()
        whole.step()
        whole.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    same_parameters(model, serial)


def test_inputs_of_this_process_go_to_the_members(two_workers: None) -> None:
    mesh = make("2")

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x: torch.Tensor, more: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> torch.Tensor:
            return x @ self.weight + more[0] + more[1]["b"]

    model: Any = Sum().to(mesh.device)
    fully_shard(model, mesh=mesh)
    same(model(torch.ones(4, 4), (torch.ones(4, 4), {"b": torch.ones(4, 4)})), torch.full((4, 4), 3.0))


def test_replicas_summed_at_the_last_of_several_batches(two_workers: None) -> None:
    mesh = make("2x2")
    model: Any
    model, serial = stacked(mesh, 2)
    for k in range(3):
        model.set_requires_all_reduce(k == 2)
        parts = drawn(4, 3, 16, seed=k)
        model(given(parts, mesh)).sum().backward()
        for part in parts:
            (serial(part).sum() / 4).backward()
    same_gradients(model, serial)


def test_a_divisor_of_ones_own(two_workers: None) -> None:
    mesh = make("2")
    model: Any
    model, serial = stacked(mesh, 2)
    model.set_gradient_divide_factor(1.0)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing in its sums
    parts = drawn(2, 3, 16)
    model(given(parts, mesh)).sum().backward()
    for one in parts:
        serial(one).sum().backward()
    same_gradients(model, serial)


def test_a_mesh_of_one_member(two_workers: None) -> None:
    mesh = dr.init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    serial = of_torch.MLP(7)
    model: Any = copied(serial, mesh)
    for part in (model.in_proj, model):
        fully_shard(part, mesh=mesh)
    trains(model, serial, mesh, [drawn(1, 3, 7)])


def test_a_scaler_skips_the_step_of_all_members_for_one_ones_overflow(two_workers: None) -> None:
    mesh = make("2")
    model, serial = stacked(mesh, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("remote", init_scale=4.0)
    fine = drawn(2, 3, 16)
    scaler.scale(model(given([fine[0], torch.full((3, 16), float("inf"))], mesh)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    same_parameters(model, serial)
    optimizer.zero_grad()
    scaler.scale(model(given(fine, mesh)).sum()).backward()
    scaler.unscale_(optimizer)
    for part in fine:
        (serial(part).sum() / 2).backward()
    same_gradients(model, serial)
