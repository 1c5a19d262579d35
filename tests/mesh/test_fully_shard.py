"""torch's own FSDP2 on a mesh: different data on each member, gradients and steps as in serial data
parallelism.
"""

from __future__ import annotations

import gc
import warnings
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
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import distruntime as dr
from meshes import MLP, SHAPES, copied, make, same, same_gradients, same_parameters, two_workers, whole
from processes import slots, until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

__all__ = ["two_workers"]


def batches(mesh: dr.mesh.DeviceMesh, step: int, whole: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a tensor with different data on each member (of the first dimension, unless `whole`), and the
    parts, one of each.
    """
    count = mesh.size() if whole else mesh.size(0)
    parts = [
        torch.randn(6, 16, generator=torch.Generator().manual_seed(100 * step + k), device="cpu")
        for k in range(count)
    ]
    ranks = range(mesh.size()) if whole else [at[0] for at in mesh.coordinates()]
    return dr.from_shards([parts[k] for k in ranks], mesh), parts


def train(
    mesh: dr.mesh.DeviceMesh,
    sharded: nn.Module,
    serial: nn.Module,
    whole: bool = True,
    clip: bool = False,
    steps: int = 2,
) -> None:
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


def sharded(model: nn.Module, mesh: dr.mesh.DeviceMesh, **options: Any) -> nn.Module:
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
    assert isinstance(weight, DTensor) and weight.to_local().shape == (
        32 // mesh.size(-1 if mesh.ndim > 1 else 0),
        16,
    )
    train(mesh, model, serial, clip=reshard)


def test_within_the_mesh_its_streams_are_the_meshs(two_workers: None) -> None:
    mesh, serial = make("4"), MLP()
    model = sharded(copied(serial, mesh), mesh)
    with mesh:
        train(mesh, model, serial, steps=3)
    state: Any = model
    assert state._get_fsdp_state()._comm_ctx.all_gather_stream.place.members == mesh.places


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_two_meshes_of_one_shape(two_workers: None) -> None:
    """torch makes a mesh of both dimensions, which equalled that of other members: what it remembered of one
    was for the other.
    """
    for places in (None, [dr.place(k, f"cuda:{g}") for g in (1, 0) for k in (1, 0)]):
        mesh = (
            make("2x2")
            if places is None
            else dr.init_device_mesh(places, (2, 2), mesh_dim_names=("dp", "tp"))
        )
        serial = MLP()
        model = copied(serial, mesh)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        train(mesh, sharded(model, mesh["dp"]), serial, whole=False)


def in_both(mesh: dr.mesh.DeviceMesh) -> nn.Module:
    model = copied(MLP(), mesh)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return sharded(model, mesh["dp"])


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_two_meshes_of_the_same_members_that_count_their_dimensions_otherwise(two_workers: None) -> None:
    """The DTensors of the second one have a mesh of the first one, which torch has remembered."""
    places = [dr.place(k, f"cuda:{g}") for g in (0, 1) for k in (0, 1)]
    first = dr.init_device_mesh(places, (2, 2, 1), mesh_dim_names=("dp", "tp", "pp"))
    serial = MLP()
    parallelize_module(copied(serial, first), first["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    mesh = dr.init_device_mesh(places, (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    for p, q in zip(in_both(mesh).parameters(), serial.parameters()):
        assert isinstance(p, DTensor) and isinstance(p.device_mesh, dr.mesh.DeviceMesh)
        assert p.device_mesh.coordinates() == mesh["dp", "tp"].coordinates()
        everywhere = p.detach().redistribute(placements=[Replicate(), Replicate()])
        same(everywhere.redistribute(placements=p.placements), q)


def test_joined_dimensions_are_of_the_first_ones_mesh(two_workers: None) -> None:
    join: Any = dr.mesh.DeviceMesh._concatenate
    places = [dr.place(k, f"cuda:{g}") for g in (0, 1) for k in (0, 1)]
    fine = dr.init_device_mesh(places, (2, 1, 2), mesh_dim_names=("dp", "one", "tp"))
    flat = dr.init_device_mesh(places, (4,), mesh_dim_names=("dp",))
    other = dr.init_device_mesh(places[::-1], (2, 2), mesh_dim_names=("dp", "tp"))
    coarse = dr.init_device_mesh(places, (2, 2), mesh_dim_names=("dp", "tp"))
    assert join([coarse["tp"], fine["one"], fine["dp"]]).coordinates() == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 0, 1),
        (1, 0, 1),
    ]
    assert join([coarse["dp"], fine["tp"]]).lines("tp") is coarse.lines("tp")
    for stranger in (fine["tp"], other["tp"]):
        with pytest.raises(dr.errors.UsageError, match=r"shows no dimensions of .*: join those that mesh"):
            stranger._dims_of(flat)


def test_layers_that_both_cut_draw_each_number_once(two_workers: None) -> None:
    for p in in_both(make("2x2")).parameters():
        assert isinstance(p, DTensor)
        drawn = whole(nn.init.normal_(p))
        assert drawn[0].unique().numel() == p.numel()
        assert all(torch.equal(t, drawn[0]) for t in drawn)


def test_mixed_precision(two_workers: None) -> None:
    mesh, serial = make("2"), MLP()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
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
    until(
        lambda: max(a - b for a, b in zip([slots(0), slots(1)], before)) <= 2
    )  # what the mesh itself keeps: coordinates


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


def test_what_both_dimensions_cut_is_laid_out_anew_for_each_member(two_workers: None) -> None:
    """FSDP2 joins two slices of a mesh to one. Each member has to take its own part there."""
    mesh, serial = make("2x2"), MLP()
    model = copied(serial, mesh)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sharded(model, mesh["dp"])
    for p, q in zip(model.parameters(), serial.parameters()):
        assert isinstance(p, DTensor) and isinstance(p.device_mesh, dr.mesh.DeviceMesh)
        given, rows = torch.randn(q.shape), [Shard(0), Shard(0)]
        other = distribute_tensor(given, p.device_mesh, rows)
        same(p.detach().redistribute(placements=rows), q.detach())
        same(other.clone().lerp_(p.detach(), 0.5), given.lerp(q.detach(), 0.5))
        same(p.detach().clone().lerp_(other, 0.5), q.detach().lerp(given, 0.5))


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
    set_optimizer_state_dict(
        models[1], optimizers[1], state["optimizer"], options=StateDictOptions(full_state_dict=True)
    )
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
    with pytest.raises(dr.errors.NotSupportedError, match="use fully_shard"):
        FullyShardedDataParallel(copied(MLP(), mesh), device_mesh=mesh)
    with pytest.raises(dr.errors.UsageError, match=r"which mesh: fully_shard\(module, mesh=mesh\)"):
        fully_shard(copied(MLP(), mesh))
    with pytest.raises(
        dr.errors.UsageError, match=r"'0.weight' is in this process: module.to\(mesh.device\) first"
    ):
        fully_shard(MLP(), mesh=mesh)
    with pytest.raises(dr.errors.NotSupportedError, match="CPUOffloadPolicy"):
        fully_shard(copied(MLP(), mesh), mesh=mesh, offload_policy=CPUOffloadPolicy())
    kept = copied(MLP(), mesh)
    kept.register_parameter("here", nn.Parameter(torch.ones(1)))
    fully_shard(kept, mesh=mesh, ignored_params={kept.here})  # type: ignore[arg-type]
    assert isinstance(kept[0].weight, DTensor) and kept.here.device.type == "cpu"  # type: ignore[index, union-attr]
