"""`dr.parallel.DataParallel`: a batch shared among members, even or not, gives what one device gives."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import distruntime as dr


@pytest.fixture(scope="module")
def mesh() -> Iterator[dr.mesh.DeviceMesh]:
    dr.shutdown()
    dr.init_master_worker(world_size=2, simulate_cuda=2)
    yield dr.init_device_mesh("cuda", (4,))
    dr.shutdown()


def same(model: nn.Module, serial: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), serial.parameters()):
        assert p.grad is not None and q.grad is not None, name
        for shard in dr.shards(p.grad):
            torch.testing.assert_close(shard, q.grad, atol=1e-6, rtol=1e-5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(40, 30), nn.Linear(30, 20)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        self.seen.append(len(x))
        h = self.a(x).tanh()
        return {"out": self.b(h) * scale, "norm": h.square().mean()}


def test_the_tutorials_64_rows_are_16_on_each_of_4(mesh: dr.mesh.DeviceMesh) -> None:
    serial, x, y = Net(), torch.randn(64, 40), torch.randn(64, 20)
    model = dr.parallel.DataParallel(copy.deepcopy(serial), mesh)
    for _ in range(2):
        out = model(x, scale=2.0)
        assert (
            out["out"].shape == (64, 20) and out["out"].place == mesh.places[0] and out["norm"].shape == (4,)
        )
        loss = nn.functional.mse_loss(out["out"], y.to(out["out"].device)) + out["norm"].mean()
        loss.backward()
        wanted = serial(x, scale=2.0)
        expected = nn.functional.mse_loss(wanted["out"], y) + wanted["norm"]
        expected.backward()
        torch.testing.assert_close(loss.detach().cpu(), expected.detach())
        same(model, serial)
    assert model.module.seen == [16, 16]
    assert list(model.state_dict()) == [f"module.{key}" for key in serial.state_dict()]


@pytest.mark.parametrize("rows", [1, 3, 9, 66])
def test_an_uneven_batch(rows: int, mesh: dr.mesh.DeviceMesh) -> None:
    serial, x = nn.Sequential(nn.Linear(40, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(rows, 40)
    model = dr.parallel.DataParallel(copy.deepcopy(serial), mesh)
    out = model(x.to(mesh.places[1]))
    torch.testing.assert_close(out.detach().cpu(), serial(x).detach())
    out.square().mean().backward()
    serial(x).square().mean().backward()
    same(model, serial)


def test_training_with_even_and_uneven_batches_is_the_serial_one(mesh: dr.mesh.DeviceMesh) -> None:
    serial = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model = dr.parallel.DataParallel(copy.deepcopy(serial), mesh)
    ours, theirs = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, serial))
    data, target = torch.randn(42, 6), torch.randint(3, (42,))
    for begin in (0, 16, 32):
        x, y = data[begin : begin + 16], target[begin : begin + 16]
        ours.zero_grad()
        theirs.zero_grad()
        out = model(x)
        nn.functional.cross_entropy(out, y.to(out.device)).backward()
        nn.functional.cross_entropy(serial(x), y).backward()
        ours.step()
        theirs.step()
    for p, q in zip(model.parameters(), serial.parameters()):
        for shard in dr.shards(p.detach()):
            torch.testing.assert_close(shard, q.detach(), atol=1e-6, rtol=1e-5)


def test_gradients_of_the_input_and_buffers(mesh: dr.mesh.DeviceMesh) -> None:
    serial = nn.BatchNorm1d(5)
    model = dr.parallel.DataParallel(copy.deepcopy(serial), mesh)
    x = torch.randn(8, 5, requires_grad=True)
    model(x).square().sum().backward()
    own = torch.randn(0)
    twin = x.detach().clone().requires_grad_()
    own = torch.cat([copy.deepcopy(serial)(part) for part in twin.chunk(4)])
    own.square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    # The first member's statistics count, as in torch.
    serial(x.detach()[:2])
    model.eval()
    torch.testing.assert_close(model(x.detach()).cpu(), serial.eval()(x.detach()))


def test_what_is_refused(mesh: dr.mesh.DeviceMesh) -> None:
    with pytest.raises(dr.errors.UsageError, match=r"takes a module and a mesh.*got Linear and list"):
        dr.parallel.DataParallel(nn.Linear(2, 2), [0, 1])  # type: ignore[arg-type]
    with pytest.raises(dr.errors.PlacementError, match="weight is on node 0 cuda:0, the mesh is"):
        dr.parallel.DataParallel(nn.Linear(2, 2).to(dr.place(0, "cuda:0")), mesh)
    bilinear = dr.parallel.DataParallel(nn.Bilinear(2, 2, 2), mesh)
    with pytest.raises(dr.errors.UsageError, match=r"which has one size: got \[4, 8\]"):
        bilinear(torch.ones(4, 2), torch.ones(8, 2))
