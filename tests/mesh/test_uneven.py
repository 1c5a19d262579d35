"""Shards of different shapes on a mesh: FSDP2, tensor parallelism, DTensors and batches as in serial."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    empty,
    full,
    ones,
    rand,
    randn,
    zeros,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import distruntime as dr
from fewer import fewer
from meshes import copied, make, mesh, same, same_gradients, same_parameters, two_workers

__all__ = ["mesh", "two_workers"]

X = torch.arange(21.0).reshape(7, 3) / 7


class Vocabulary(nn.Module):
    def __init__(self, words: int = 13) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding, self.out = nn.Embedding(words, 8), nn.Linear(8, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # FSDP2 warns of a view that a module returns.
        return self.out(self.embedding(ids)) + 0.0  # type: ignore[no-any-return]


IDS = torch.tensor([[0, 3, 4, 7, 8], [11, 12, 6, 5, 1]])


def steps(model: nn.Module, inputs: torch.Tensor, count: int = 3, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


# -- DTensors ------------------------------------------------------------------------------------------------

DTENSOR_CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pointwise": lambda t: (t * 2 + 1).relu().exp(),
    "in place": lambda t: t.clone().mul_(3).add_(t),
    "sum": lambda t: t.sum(),
    "sum of rows": lambda t: t.sum(0),
    "mean": lambda t: t.mean(),
    "mean of columns": lambda t: t.mean(1),
    "largest": lambda t: t.amax(0),
    "which is largest": lambda t: t.argmax(0),
    "norm": lambda t: t.norm(),
    "softmax along the cut": lambda t: t.softmax(0),
    "softmax across": lambda t: t.softmax(-1),
    "matmul": lambda t: t @ t.t(),
    "transposed": lambda t: t.t().contiguous(),
    "cat": lambda t: torch.cat([t, t]),
    "slice": lambda t: t[1:5],
    "where": lambda t: torch.where(t > 1, t, -t),
    "like": lambda t: torch.zeros_like(t).copy_(t),
    "layer norm": lambda t: F.layer_norm(t, (3,)),
    "cumsum": lambda t: t.cumsum(0),
    "mse": lambda t: F.mse_loss(t, t.square()),
}


@pytest.mark.parametrize("name", fewer(DTENSOR_CALLS, 4, "the same on another cut"))
@pytest.mark.parametrize("dim", [0, 1])
def test_operators_and_their_gradients(name: str, dim: int, mesh: dr.mesh.DeviceMesh) -> None:
    call = DTENSOR_CALLS[name]
    here = X.clone().requires_grad_()
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
    there = distribute_tensor(X, mesh, placements).requires_grad_()
    found, wanted = call(there), call(here)
    same(found, wanted)
    # Before torch 2.13 DTensor cannot turn a tensor round, as the gradient of a running sum needs it.
    turns = name == "cumsum" and torch.__version__ < "2.13"
    if wanted.is_floating_point() and not turns:
        wanted.square().sum().backward()
        found.square().sum().backward()
        assert there.grad is not None and here.grad is not None
        same(there.grad, here.grad)


def test_a_dimension_that_is_cut_twice(two_workers: None) -> None:
    t = distribute_tensor(X, make("2x2"), [Shard(0), Shard(0)])
    assert [tuple(shard.shape) for shard in dr.shards(t.to_local())] == [(2, 3), (2, 3), (2, 3), (1, 3)]
    same(t, X)
    same(t.redistribute(placements=[Replicate(), Shard(1)]), X)


@pytest.mark.parametrize("rows", [9, 3, 1])
@pytest.mark.parametrize("cuts", [[Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)]])
def test_a_tensor_there_is_cut_by_members(rows: int, cuts: list[Shard], two_workers: None) -> None:
    whole = torch.arange(rows * 5.0).reshape(rows, 5)
    mesh = make("2x2")
    same(distribute_tensor(whole.to(mesh.device), mesh, cuts), whole)


def test_members_without_a_row(two_workers: None) -> None:
    t = distribute_tensor(X[:2], make("4"), [Shard(0)])
    assert [len(shard) for shard in dr.shards(t.to_local())] == [1, 1, 0, 0]
    same(t * 2, X[:2] * 2)
    same(t.sum(), X[:2].sum())


@pytest.mark.parametrize("make_one", [ones, zeros, rand, randn, empty, full])
def test_factories(make_one: Any, two_workers: None) -> None:
    mesh = make("4")
    more = {"fill_value": 2.5} if make_one is full else {}
    if more:
        t = full((7, 3), 2.5, device_mesh=mesh, placements=[Shard(0)])
    else:
        t = make_one(7, 3, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
        assert t.requires_grad
    assert [tuple(shard.shape) for shard in dr.shards(t.detach().to_local())] == [(2, 3)] * 3 + [(1, 3)]
    value = dr.fetch(t.detach())
    if make_one in (rand, randn):
        assert len(value.unique()) == 21
        torch.manual_seed(8)
        first = dr.fetch(make_one(7, 3, device_mesh=mesh, placements=[Shard(0)]))
        torch.manual_seed(8)
        assert torch.equal(dr.fetch(make_one(7, 3, device_mesh=mesh, placements=[Shard(0)])), first)
    elif make_one is not empty:
        assert torch.equal(value, torch.full((7, 3), {ones: 1.0, zeros: 0.0}.get(make_one, 2.5)))


def test_random_numbers_follow_the_seed(two_workers: None) -> None:
    t = zeros(7, 3, device_mesh=make("4"), placements=[Shard(0)])
    torch.manual_seed(3)
    first = dr.fetch(t.normal_())
    torch.manual_seed(3)
    assert torch.equal(dr.fetch(t.normal_()), first)
    assert len(first.unique()) == 21


# -- models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", fewer([10, 5, 2, 1], 2, "another model, 1 s"))
def test_fully_shard_of_few_rows(rows: int, two_workers: None, tmp_path: Path) -> None:
    mesh = make("4")
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, rows))
    model = copied(serial, mesh)
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(6, 64)
    for one, inputs in ((serial, x), (model, x.to(mesh.device))):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(inputs).square().mean().backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
    same_gradients(model, serial)
    same_parameters(model, serial)
    for name, value in dr.fetch(model.state_dict()).items():
        torch.testing.assert_close(value, serial.state_dict()[name])
    # It goes to a mesh of another size by a checkpoint.
    dr.save(model.state_dict(), tmp_path / "saved")
    found = dr.load(tmp_path / "saved", place=make("2"))
    for name, value in serial.state_dict().items():
        same(found[name], value)
    model.load_state_dict(dr.load(tmp_path / "saved", place=mesh))
    same_parameters(model, serial)


def test_fully_shard_on_the_meta_device(two_workers: None) -> None:
    mesh = make("4")
    with torch.device("meta"):
        model = nn.Linear(64, 10)
    fully_shard(model, mesh=mesh)
    assert model.weight.device.type == "meta"
    model.to_empty(device=mesh.device)
    torch.manual_seed(5)
    model.reset_parameters()
    weight = dr.fetch(model.weight.detach())
    assert weight.shape == (10, 64) and len(weight.unique()) == 640
    x = torch.randn(3, 64)
    same(model(x.to(mesh.device)), F.linear(x, weight, dr.fetch(model.bias.detach())))


def test_remote_alone_is_the_mesh_around_for_shards_on_the_meta_device(two_workers: None) -> None:
    mesh = make("4")
    with torch.device("meta"):
        model = nn.Linear(8, 10)
    fully_shard(model, mesh=mesh)
    with pytest.raises(dr.errors.PlacementError, match=r"do not fit .* name their mesh, device=mesh\.device"):
        torch.empty_like(model.weight, device="remote")
    with mesh:
        # The second call finds shards that are on the mesh.
        for _ in range(2):
            model.to_empty(device="remote")
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    out = model(torch.ones(3, 8, device=mesh.device))
    out.sum().backward()
    same(out, torch.full((3, 10), 8.0))
    same(model.weight.grad.full_tensor(), torch.full((10, 8), 3.0))  # type: ignore[union-attr]


def test_replicas_of_uneven_shards(two_workers: None) -> None:
    mesh = make("2x2")
    serial = Vocabulary()
    model = copied(serial, mesh)
    fully_shard(model, mesh=mesh)
    steps(serial, IDS)
    steps(model, IDS.to(mesh.device))
    same_parameters(model, serial)


def test_fully_shard_of_a_layer_that_is_cut_unevenly_in_columns(two_workers: None) -> None:
    mesh = make("2x2")
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Linear(13, 6), nn.ReLU(), nn.Linear(6, 3))
    model = copied(serial, mesh)
    parallelize_module(model, mesh["tp"], {"0": RowwiseParallel(input_layouts=Replicate())})
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(8, 13)
    for one, inputs in ((serial, x), (model, x.to(mesh.device))):
        optimizer = torch.optim.Adam(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(inputs).square().mean().backward()
            optimizer.step()
    same_parameters(model, serial)


def test_mixed_precision(two_workers: None) -> None:
    mesh = make("4")
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    serial = Vocabulary()
    model = copied(serial, mesh)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    steps(serial, IDS, 1)
    steps(model, IDS.to(mesh.device), 1)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    same_parameters(model, serial, atol=0.1)


def test_a_vocabulary_cut_by_tensor_parallelism(mesh: dr.mesh.DeviceMesh) -> None:
    serial = Vocabulary()
    model = copied(serial, mesh)
    along = mesh if mesh.ndim == 1 else mesh["tp"]
    parallelize_module(
        model,
        along,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "out": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    steps(serial, IDS)
    steps(model, IDS.to(mesh.device))
    same_parameters(model, serial)


def test_loss_parallel_over_an_uneven_vocabulary(two_workers: None) -> None:
    mesh = make("4")
    serial = Vocabulary()
    model = copied(serial, mesh)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "out": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    with loss_parallel():
        steps(model, IDS.to(mesh.device))
    steps(serial, IDS)
    same_parameters(model, serial)


@pytest.mark.parametrize("words", fewer([13, 12, 10], 3, "another model, 2 s"))
def test_fully_shard_over_tensor_parallelism(words: int, two_workers: None, tmp_path: Path) -> None:
    mesh = make("2x2")
    serial = Vocabulary(words)
    model = copied(serial, mesh)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "out": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    ids = IDS.clamp(max=words - 1)
    steps(serial, ids)
    steps(model, ids.to(mesh.device))
    same_parameters(model, serial)
    dr.save(model.state_dict(), tmp_path / "saved")
    found = dr.load(tmp_path / "saved", place=make("4"))
    for name, value in serial.state_dict().items():
        same(found[name], value)


@pytest.mark.slow(reason="records a step of four members, 5 s")
def test_a_program_of_a_step(two_workers: None) -> None:
    mesh = make("4")
    serial = Vocabulary()
    model = copied(serial, mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

    @dr.program
    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    for _ in range(6):
        step(IDS.to(mesh.device))
    assert step.replays >= 3, step.why
    steps(serial, IDS, 6)
    same_parameters(model, serial)


# -- batches -------------------------------------------------------------------------------------------------


def test_an_uneven_last_batch(two_workers: None) -> None:
    mesh = make("4")
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.0), nn.LayerNorm(8), nn.Linear(8, 3))
    model = copied(serial, mesh)
    distribute_module(model, mesh)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (serial, model)]
    for rows in (8, 10, 3):
        x, y = torch.randn(rows, 6), torch.randint(0, 3, (rows,))
        cut = [distribute_tensor(t, mesh, [Shard(0)]) for t in (x, y)]
        for optimizer, one, given in zip(optimizers, (serial, model), ([x, y], cut)):
            optimizer.zero_grad()
            F.cross_entropy(one(given[0]), given[1]).backward()
            optimizer.step()
    same_gradients(model, serial)
    same_parameters(model, serial)


def test_shards_of_a_convolutional_net_under_ddp(two_workers: None) -> None:
    mesh = make("4")
    torch.manual_seed(0)
    serial = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    model = nn.parallel.DistributedDataParallel(copied(serial, mesh), process_group=mesh.get_group())
    x, y = torch.randn(10, 1, 8, 8), torch.randint(0, 3, (10,))
    parts = list(zip(x.chunk(4), y.chunk(4)))
    F.cross_entropy(model(dr.from_shards(x.chunk(4), mesh)), dr.from_shards(y.chunk(4), mesh)).backward()
    # DDP takes the mean of the members' means, as torch's does.
    each = []
    for inputs, wanted in parts:
        one = copy.deepcopy(serial)
        F.cross_entropy(one(inputs), wanted).backward()
        each.append([p.grad for p in one.parameters()])
    for p, gradients in zip(model.parameters(), zip(*each)):
        assert p.grad is not None
        same(p.grad, torch.stack([g for g in gradients if g is not None]).mean(0))


# -- the tensor itself ---------------------------------------------------------------------------------------


@pytest.fixture
def uneven(two_workers: None) -> Any:
    return dr.from_shards([torch.full((k + 1, 2), float(k)) for k in range(4)], make("4"))


def test_sizes_say_what_each_member_has(uneven: Any) -> None:
    mesh = make("4")
    assert repr(uneven.shape) == "torch.Size([<by member: 1, 2, 3, 4>, 2])"
    assert uneven.device == make("4").device or uneven.place.members == mesh.places
    assert [tuple(t.shape) for t in dr.shards(uneven.t())] == [(2, 1), (2, 2), (2, 3), (2, 4)]
    assert [len(t) for t in dr.shards(torch.arange(uneven.shape[0], device=uneven.device))] == [1, 2, 3, 4]
    assert [len(t) for t in dr.shards(torch.zeros(uneven.shape[0], 2, device=uneven.device))] == [1, 2, 3, 4]
    assert "member 3: tensor([[3., 3.]" in repr(uneven)


def test_what_asks_for_one_number_is_told_all(uneven: Any) -> None:
    for ask in (lambda: len(uneven), lambda: int(uneven.shape[0]), lambda: [*uneven]):
        with pytest.raises(dr.errors.UsageError, match=r"member 0: 1, member 1: 2, member 2: 3, member 3: 4"):
            ask()
    # Parts of a list that only some members have would be lost in silence.
    for ask in (lambda: uneven.chunk(2), lambda: uneven.split(2)):
        with pytest.raises(
            dr.errors.UsageError, match=r"another number of tensors on each member \(member 0: 1"
        ):
            ask()
    with pytest.raises(dr.errors.UsageError, match="differs from member to member"):
        assert uneven.shape[0] == 2
    for ask in (
        uneven.tolist,
        uneven.numpy,
        uneven.item,
        uneven.cpu,
        lambda: dr.fetch(uneven),
        lambda: copy.copy(uneven),
    ):
        with pytest.raises(dr.errors.UsageError, match=r"member 0: \(1, 2\).*dr.shards\(x\)"):
            ask()


def test_numbers_that_differ_are_computed_with(uneven: Any) -> None:
    n = uneven.shape[0]
    for number, wanted in ((n**2, [1, 4, 9, 16]), (2**n, [2, 4, 8, 16]), (7 - n // 2, [7, 6, 6, 5])):
        assert [*number.node._local_ints.values()] == wanted
    assert [t.item() for t in dr.shards(uneven.sum() / n)] == [0, 2, 4, 6]
    for ask in (lambda: n / 2, lambda: n / 2.0, lambda: 1 / n, lambda: 1.0 / n):
        with pytest.raises(dr.errors.UsageError, match=r"member 3: 4\), and a float was asked of it"):
            ask()
    for ask in (lambda: torch.tensor(n), lambda: range(n), lambda: float(n)):
        with pytest.raises(dr.errors.UsageError, match=r"member 3: 4\), and one int was asked of it"):
            ask()


def test_what_it_cannot_do_is_refused(uneven: Any) -> None:
    with pytest.raises(
        dr.errors.NotSupportedError, match=r"unsqueeze_ changes the shape .*member 0: \(1, 2\)"
    ):
        uneven.unsqueeze_(0)
    with pytest.raises(dr.errors.PlacementError, match=r"do not fit node 1 cpu.*x.member\(k\)"):
        uneven.to(dr.place(1, "cpu"))
    with pytest.raises(IndexError, match="members 0 to 3, got 7"):
        uneven.member(7)
    mesh = make("4")
    with pytest.raises(
        dr.errors.UsageError, match=r"members 0, 1, 2, 3 are a line: member 0: \(1, 2\).*Pad them"
    ):
        dr.lines.all_reduce(mesh.lines(), uneven)
    with pytest.raises(dr.errors.UsageError, match=r"members 0, 1, 2, 3 are a line"):
        torch.distributed.all_reduce(uneven, group=mesh.get_group())
    with pytest.raises(dr.errors.NotSupportedError, match=r"shards of one shape, and these differ.*pad them"):
        torch.distributed.broadcast(uneven, 0, group=mesh.get_group())
    with pytest.raises(dr.errors.NotSupportedError, match=r"numbers of another shape"):
        uneven.abs().add(1).multinomial(1)
    with pytest.raises(dr.errors.UsageError, match=r"as many dimensions and one dtype: shard 0 is \(1,\)"):
        dr.from_shards([torch.ones(1), torch.ones(1, 2), torch.ones(1), torch.ones(1)], mesh)


def test_gradients_reach_members_and_shards(uneven: Any) -> None:
    there = uneven.clone().requires_grad_()
    (there.member(2) * 3).sum().backward()
    assert [t.unique().tolist() for t in dr.shards(there.grad)] == [[0.0], [0.0], [3.0], [0.0]]
    mesh = make("4")
    parts = [torch.ones(k + 1, requires_grad=True) for k in range(4)]
    (dr.from_shards(parts, mesh) * 2).sum().backward()
    assert [t.grad.tolist() for t in parts if t.grad is not None] == [[2.0] * (k + 1) for k in range(4)]


@pytest.mark.parametrize("along", ["dp", "tp"])
def test_collectives_of_lines_that_are_alike(along: str, two_workers: None) -> None:
    mesh = make("2x2")
    rows = [at[0 if along == "tp" else 1] + 1 for at in mesh.coordinates()]
    shards = [torch.full((2 * n, 2), float(k)) for k, n in enumerate(rows)]
    x = dr.from_shards(shards, mesh)
    lines = mesh.lines(along)
    partner = {k: row[1 - row.index(k)] for row in lines.rows for k in row}
    rank = {k: row.index(k) for row in lines.rows for k in row}
    summed = dr.shards(dr.lines.all_reduce(lines, x))
    gathered = dr.shards(dr.lines.all_gather(lines, x))
    scattered = dr.shards(dr.lines.reduce_scatter(lines, x))
    for k, shard in enumerate(shards):
        both = [shard, shards[partner[k]]][:: 1 if rank[k] == 0 else -1]
        assert torch.equal(summed[k], shard + shards[partner[k]])
        assert torch.equal(gathered[k], torch.cat(both))
        assert torch.equal(scattered[k], summed[k][: rows[k]])
    there = x.clone().requires_grad_()
    dr.lines.all_gather(lines, there).square().sum().backward()
    assert [t.tolist() for t in dr.shards(there.grad)] == [t.mul(4).tolist() for t in shards]


def test_numbers_chosen_by_a_mask(two_workers: None) -> None:
    mesh = make("2")
    shards = [torch.tensor([1.0, -1.0, 2.0]), torch.tensor([-1.0, -3.0, 5.0])]
    x = dr.from_shards(shards, mesh).requires_grad_()
    found = x[x > 0]
    assert [t.tolist() for t in dr.shards(found.detach())] == [[1.0, 2.0], [5.0]]
    (found * 2).sum().backward()
    assert x.grad is not None
    assert [t.tolist() for t in dr.shards(x.grad)] == [[2.0, 0.0, 2.0], [0.0, 0.0, 2.0]]


@pytest.mark.slow(reason="imports torch on four members, 5 s")
def test_functions_get_their_shard(uneven: Any) -> None:
    double = dr.remote(lambda t: t * 2)
    assert [t.tolist() for t in dr.shards(double(uneven))] == [t.mul(2).tolist() for t in dr.shards(uneven)]
    mesh = make("4")

    @dr.spmd(mesh)
    def more(t: torch.Tensor) -> torch.Tensor:
        return t + 1

    assert [t.tolist() for t in dr.fetch(more(uneven))] == [t.add(1).tolist() for t in dr.shards(uneven)]
    with pytest.raises(dr.errors.NotSupportedError, match=r"requires grad.*member 0: \(1, 2\).*x.detach\(\)"):
        more(uneven.clone().requires_grad_())


def test_copies(uneven: Any, tmp_path: Path) -> None:
    other = copy.deepcopy(uneven)
    other.mul_(2)
    assert [t.mul(2).tolist() for t in dr.shards(uneven)] == [t.tolist() for t in dr.shards(other)]
    moved = uneven.to(dr.init_device_mesh(make("4").places[::-1], (4,)).device)
    assert moved.member(0).place == uneven.member(3).place
    assert moved.member(1).tolist() == uneven.member(1).tolist()
    assert uneven.double().dtype is torch.float64
    dr.save({"x": uneven}, tmp_path / "saved")
    found = dr.load(tmp_path / "saved", place=make("4"))["x"]
    assert [t.tolist() for t in dr.shards(found)] == [t.tolist() for t in dr.shards(uneven)]


def test_a_device_means_its_mesh_when_that_is_gone(two_workers: None) -> None:
    device = dr.init_device_mesh("cuda", (2,)).device
    gc.collect()
    others = [make("4"), make("2")]
    x = torch.ones(2, device=device)
    assert len(dr.shards(x)) == 2 and x.device == device
    assert device != others[0].device


def test_a_dtensor_of_them(uneven: Any) -> None:
    t = DTensor.from_local(uneven, make("4"), [Shard(0)], run_check=False)
    assert t.shape == (10, 2)
    same(t.sum(), torch.tensor(2.0 * (0 + 2 + 6 + 12)))
