"""Pipelines over places and meshes, by every schedule of torch's: gradients are those of the serial model."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import distruntime as dr
from benchmarks.pipeline import time_of
from distruntime.parallel.orders import NAMES, forward_orders, merged, orders_of
from fewer import fewer
from stages import IN_A_V, four_gpus, places, same_gradients

__all__ = ["four_gpus"]

STAGES, MICRO, WIDTH = 4, 8, 6


def layers(stages: int = STAGES) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(stages)]


def batch(rows: int = 2 * MICRO) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def sent(serial: Sequence[nn.Module], schedule: str) -> list[nn.Module]:
    return [copy.deepcopy(stage).to(place) for stage, place in zip(serial, places(schedule))]


@pytest.mark.parametrize("schedule", NAMES)
def test_every_schedule_gives_the_gradients_of_the_serial_model(schedule: str, four_gpus: None) -> None:
    serial, (x, y) = layers(), batch()
    stages = sent(serial, schedule)
    pipe = dr.parallel.pipeline(stages, MICRO, schedule, nn.functional.mse_loss)
    expected = nn.Sequential(*serial)(x)
    loss = nn.functional.mse_loss(expected, y)
    loss.backward()
    losses: list[torch.Tensor] = []
    output = pipe.step(x, target=y, losses=losses)
    torch.testing.assert_close(output.cpu(), expected.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.stack([one.cpu() for one in losses]).mean(), loss.detach())
    assert not output.requires_grad and not any(one.requires_grad for one in losses)
    same_gradients(stages, serial)
    # Gradients add up, as without a pipeline.
    nn.functional.mse_loss(nn.Sequential(*serial)(2 * x), y).backward()
    there = (2 * x).to(stages[0][0].weight.device)  # type: ignore[index]
    assert pipe.step(there, target=y, return_outputs=False) is None
    same_gradients(stages, serial)


@pytest.mark.parametrize("schedule", fewer(NAMES, 4, "another schedule, 2 s"))
def test_evaluation_leaves_gradients_alone(schedule: str, four_gpus: None) -> None:
    serial, (x, y) = layers(), batch(2 * MICRO + 3)
    stages = sent(serial, schedule)
    pipe = dr.parallel.pipeline(stages, MICRO, schedule, nn.functional.mse_loss)
    pipe.step(x[: 2 * MICRO], target=y[: 2 * MICRO])
    kept = [p.grad.cpu() for p in pipe.parameters() if p.grad is not None]
    losses: list[torch.Tensor] = []
    output = pipe.eval(x, target=y, losses=losses)
    torch.testing.assert_close(output.cpu(), nn.Sequential(*serial)(x).detach(), atol=1e-6, rtol=1e-5)
    assert len(losses) == MICRO and not output.requires_grad
    for p, grad in zip(pipe.parameters(), kept, strict=True):
        assert p.grad is not None and torch.equal(p.grad.cpu(), grad)
    # A step after an evaluation trains, and one without losses computes none.
    assert pipe.eval(x).shape == output.shape
    pipe.zero_grad()
    pipe.step(x[: 2 * MICRO], target=y[: 2 * MICRO])
    for p, grad in zip(pipe.parameters(), kept, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad.cpu(), grad)


class Images(nn.Module):
    """A tower of its own: it takes images."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, WIDTH)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.proj(images.flatten(1))


class Texts(nn.Module):
    """The other tower: what the first one has made goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, WIDTH)

    def forward(
        self, images: torch.Tensor, tokens: torch.Tensor, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return images, self.emb(tokens).mean(1) * scale


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(images) @ nn.functional.normalize(texts).T * self.scale


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_stages_have_forwards_of_their_own_and_further_inputs(schedule: str, four_gpus: None) -> None:
    serial = [Images(), Texts(), Both()]
    images, tokens = torch.randn(16, 2, 4), torch.randint(11, (16, 5))
    stages = sent(serial, schedule)

    def loss_fn(logits: torch.Tensor, target: None) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))

    pipe = dr.parallel.pipeline(stages, 4, schedule, loss_fn)
    # Each micro-batch of four has a contrast of its own.
    for k in range(4):
        a, b = images[4 * k : 4 * k + 4], tokens[4 * k : 4 * k + 4]
        (loss_fn(serial[2](*serial[1](serial[0](a), b, scale=2.0)), None) / 4).backward()
    losses: list[torch.Tensor] = []
    pipe.step(images, tokens=tokens, scale=2.0, losses=losses, return_outputs=False)
    assert len(losses) == 4
    same_gradients(stages, serial)


def test_a_frozen_stage_and_an_unused_output(four_gpus: None) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, int]:
            return self.a(x), self.b(x), None, 3

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Linear(WIDTH, WIDTH)

        def forward(self, a: torch.Tensor, b: torch.Tensor, none: None, n: int) -> torch.Tensor:
            return self.c(a) * n

    serial: list[Any] = [nn.Linear(WIDTH, WIDTH), Two(), nn.Tanh(), One()]
    serial = [nn.Linear(WIDTH, WIDTH), Two(), One()]
    serial[0].requires_grad_(False)
    for schedule in ("GPipe", "InterleavedZeroBubble"):
        stages = sent(serial, schedule)
        x, y = batch()
        nn.functional.mse_loss(serial[2](*serial[1](serial[0](x))), y).backward()
        dr.parallel.pipeline(stages, MICRO, schedule, nn.functional.mse_loss).step(x, target=y)
        same_gradients([stages[1].a, stages[2]], [serial[1].a, serial[2]])
        assert all(p.grad is None for p in [*stages[0].parameters(), *stages[1].b.parameters()])
        nn.ModuleList(serial).zero_grad()


def test_a_stage_without_parameters_is_where_the_one_before_is(four_gpus: None) -> None:
    first, last = layers(2)
    stages = [
        copy.deepcopy(first).to(dr.place(0, "cuda:1")),
        nn.ReLU(),
        copy.deepcopy(last).to(dr.place(1, "cuda:0")),
    ]
    pipe = dr.parallel.pipeline(stages, 4, "GPipe", nn.functional.mse_loss)
    x, y = batch()
    nn.functional.mse_loss(last(first(x).relu()), y).backward()
    pipe.step(x, target=y)
    same_gradients([stages[0], stages[2]], [first, last])
    assert repr(pipe).splitlines()[2].split()[:4] == ["node", "0", "cuda:1", "1F0"]


CUTS = ["tensor", "fsdp", "both"]


@pytest.mark.parametrize("schedule", fewer(["1F1B", "GPipe", "InterleavedZeroBubble"], 4, "another cut, 2 s"))
@pytest.mark.parametrize("cut", CUTS)
# torch says so of what RowwiseParallel returns under fully_shard.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_stages_on_meshes(cut: str, schedule: str, four_gpus: None) -> None:
    """Each stage is on two members: cut by features, by parameters with data of their own, or both."""
    shape = (2, 1, 2) if cut == "tensor" else (2, 2, 1)
    mesh = dr.init_device_mesh("cuda", shape, mesh_dim_names=("pp", "dp", "tp"))
    parts = [mesh.select(pp=k) for k in (0, 1)]
    serial = layers(2)
    stages = []
    for own, part in zip(serial, parts):
        stage = copy.deepcopy(own).to(part.device)
        if cut != "fsdp":
            parallelize_module(stage, part["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if cut != "tensor":
            fully_shard(stage, mesh=part["dp"])
        stages.append(stage)
    pipe = dr.parallel.pipeline(stages, 4, schedule, nn.functional.mse_loss)
    batches = [batch(8) for _ in range(shape[1])]
    x, y = (torch.cat(of_all) for of_all in zip(*batches))
    nn.functional.mse_loss(nn.Sequential(*serial)(x), y).backward()
    at = [where[0] for where in parts[0].coordinates()]
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(
            dr.from_shards([batches[k][0] for k in at], parts[0]),
            target=dr.from_shards([batches[k][1] for k in at], parts[1]),
        )
        same_gradients(stages, serial)
    assert not any(isinstance(stage, FSDPModule) for stage in stages) or cut != "tensor"
    wanted = nn.utils.clip_grad_norm_([p for own in serial for p in own.parameters()], 0.1)
    norm = pipe.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm.cpu(), wanted, atol=1e-6, rtol=1e-5)
    same_gradients(stages, serial)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_over_places(norm_type: float, four_gpus: None) -> None:
    serial, (x, y) = layers(), batch()
    stages = sent(serial, "1F1B")
    pipe = dr.parallel.pipeline(stages, MICRO, loss_fn=nn.functional.mse_loss)
    nn.functional.mse_loss(nn.Sequential(*serial)(x), y).backward()
    pipe.step(x, target=y)
    wanted = nn.utils.clip_grad_norm_([p for own in serial for p in own.parameters()], 0.05, norm_type)
    torch.testing.assert_close(pipe.clip_grad_norm_(0.05, norm_type).cpu(), wanted)
    same_gradients(stages, serial)


def test_a_scaler_over_stages(four_gpus: None) -> None:
    serial, (x, y) = layers(2), batch()
    stages = sent(serial, "1F1B")
    scaler = torch.amp.GradScaler("remote", init_scale=1024.0)
    pipe = dr.parallel.pipeline(
        stages, MICRO, loss_fn=lambda out, target: scaler.scale(nn.functional.mse_loss(out, target))
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    plain = torch.optim.SGD(nn.Sequential(*serial).parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        pipe.step(x if step != 1 else x * float("inf"), target=y)
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            plain.zero_grad()
            nn.functional.mse_loss(nn.Sequential(*serial)(x), y).backward()
            plain.step()
    # The step that was not finite has halved the scale, and changed no parameter.
    assert scaler.get_scale() == 512.0
    for stage, own in zip(stages, serial):
        for p, q in zip(stage.parameters(), own.parameters()):
            torch.testing.assert_close(p.detach().cpu(), q.detach(), atol=1e-6, rtol=1e-5)


def test_a_part_of_a_stage_under_ddp_is_refused(four_gpus: None) -> None:
    mesh = dr.init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    inner = nn.parallel.DistributedDataParallel(
        nn.Linear(WIDTH, WIDTH).to(mesh.device), process_group=mesh.get_group("dp")
    )
    with pytest.raises(
        dr.errors.UsageError, match=r"0 of stage 0 is a DistributedDataParallel.* the whole stage"
    ):
        dr.parallel.pipeline([nn.Sequential(inner)], 2, "GPipe", nn.functional.mse_loss)


@pytest.mark.parametrize("schedule", fewer(NAMES, 4, "another schedule, 2 s"))
def test_replicas_under_ddp_reduce_once(schedule: str, four_gpus: None) -> None:
    """Also where a schedule splits the backward pass, whose half for the weights DDP does not see."""
    mesh = dr.init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
    at = [0, 1, 1, 0] if schedule in IN_A_V else [0, 1, 0, 1] if "Interleaved" in schedule else [0, 1]
    parts = [mesh.select(pp=k) for k in at]
    serial = layers(len(at))
    stages = [
        nn.parallel.DistributedDataParallel(
            copy.deepcopy(own).to(part.device), process_group=part.get_group("dp")
        )
        for own, part in zip(serial, parts)
    ]
    pipe = dr.parallel.pipeline(stages, 4, schedule, nn.functional.mse_loss)
    # Gradients of the second step are added to those of the first one.
    for _ in range(2):
        batches = [batch(8), batch(8)]
        x, y = (torch.cat(of_all) for of_all in zip(*batches))
        nn.functional.mse_loss(nn.Sequential(*serial)(x), y).backward()
        pipe.step(
            dr.from_shards([one for one, _ in batches], parts[0]),
            target=dr.from_shards([one for _, one in batches], parts[-1]),
        )
        for stage, own in zip(stages, serial):
            for p, q in zip(stage.parameters(), own.parameters()):
                assert p.grad is not None and q.grad is not None
                for shard in dr.shards(p.grad):
                    torch.testing.assert_close(shard, q.grad, atol=1e-6, rtol=1e-5)


def test_a_step_is_recorded_as_a_program(four_gpus: None) -> None:
    serial, (x, y) = layers(2), batch()
    stages = sent(serial, "1F1B")
    pipe = dr.parallel.pipeline(stages, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    plain = torch.optim.SGD(nn.Sequential(*serial).parameters(), lr=0.1)

    @dr.program
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        pipe.step(x, target=y, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    first, last = stages[0][0].weight.device, stages[1][0].weight.device  # type: ignore[index]
    for k in range(5):
        loss = step((x * (k + 1)).to(first), y.to(last))
        wanted = nn.functional.mse_loss(nn.Sequential(*serial)(x * (k + 1)), y)
        plain.zero_grad()
        wanted.backward()
        plain.step()
        torch.testing.assert_close(loss.cpu(), wanted.detach(), atol=1e-6, rtol=1e-5)
    assert step.replays >= 2


@pytest.mark.slow(reason="records a step of four stages, 8 s")
def test_a_step_over_two_meshes_is_recorded_as_a_program(four_gpus: None) -> None:
    """Each mesh has a tensor of its members' ranks, by which they find their parts. A program reads both."""
    mesh = dr.init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "tp"))
    parts = [mesh.select(pp=k) for k in (0, 1)]
    serial = [nn.Embedding(8, 4), nn.Linear(4, 8)]
    plans: list[ParallelStyle] = [
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    ]
    stages = [
        parallelize_module(copy.deepcopy(own).to(part.device), part, plan)
        for own, part, plan in zip(serial, parts, plans)
    ]

    def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    pipe = dr.parallel.pipeline(stages, 2, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(nn.ModuleList(serial).parameters(), lr=0.1, momentum=0.9)

    @dr.program
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        pipe.step(x, target=y, losses=losses, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean()

    words = torch.randint(8, (4, 9))
    for _ in range(5):
        loss = step(words[:, :-1].to(parts[0].device), words[:, 1:].to(parts[1].device))
        wanted = loss_fn(serial[1](serial[0](words[:, :-1])), words[:, 1:])
        plain.zero_grad()
        wanted.backward()
        plain.step()
        torch.testing.assert_close(loss.cpu(), wanted.detach(), atol=1e-6, rtol=1e-5)
    assert step.replays >= 2 and not step.why


def test_a_step_that_fails_leaves_the_next_one_alone(four_gpus: None) -> None:
    mesh = dr.init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
    serial = layers(2)
    stages = []
    for k, own in enumerate(serial):
        part = mesh.select(pp=k)
        stages.append(fully_shard(copy.deepcopy(own).to(part.device), mesh=part))
    pipe = dr.parallel.pipeline(stages, 4, "1F1B", nn.functional.mse_loss)
    x, y = batch(8)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch|must match"):
        pipe.step(torch.randn(8, WIDTH + 1), target=y)
    nn.functional.mse_loss(nn.Sequential(*serial)(x), y).backward()
    pipe.zero_grad()
    pipe.step(x, target=y)
    same_gradients(stages, serial)


def test_an_error_says_which_pass_it_is_and_logs_no_schedule(
    four_gpus: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch logged a line for each pass of the schedule, above the traceback."""
    stages, (x, y) = sent(layers(2), "1F1B"), batch(8)
    pipe = dr.parallel.pipeline(stages, 4, loss_fn=nn.functional.mse_loss)
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    with pytest.raises(RuntimeError) as caught:
        pipe.step(torch.randn(8, WIDTH + 1), target=y)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["  in 0F0 of the pipeline: stage 0, micro-batch 0"]
    with pytest.raises(
        dr.errors.UsageError, match=r"loss_fn\(output, None\) failed \(.*step\(x, target=y\) gives"
    ):
        pipe.step(x)
    assert not caplog.records
    free = dr.parallel.pipeline(stages, 4, loss_fn=lambda out, _: out.square().mean())
    assert free.step(x).shape == y.shape


def test_a_stage_that_begins_in_place(four_gpus: None) -> None:
    """dr.parallel.split does not cut there. Where somebody else has, the error says what to do."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)
    )
    x, y = batch()
    nn.functional.mse_loss(model(x), y).backward()
    serial = dr.parallel.split(model, 2)
    stages = sent(serial, "1F1B")
    dr.parallel.pipeline(stages, 4, loss_fn=nn.functional.mse_loss).step(x, target=y)
    same_gradients(stages, serial)
    pipe = dr.parallel.pipeline(
        sent(dr.parallel.split(model, 2, by=["1"]), "1F1B"), 4, loss_fn=nn.functional.mse_loss
    )
    with pytest.raises(
        dr.errors.UsageError, match=r"stage 1 writes in place to what stage 0 .* end stage 0 with"
    ):
        pipe.step(x, target=y)
    # Without gradients it may.
    torch.testing.assert_close(pipe.eval(x).cpu(), model(x).detach(), atol=1e-6, rtol=1e-5)


def test_a_loss_that_raises_comes_up_alone(
    four_gpus: None, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """torch would log a line for each pass of all stages."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such class")

    x, y = batch()
    with pytest.raises(ValueError, match="no such class"):
        dr.parallel.pipeline(sent(layers(2), "1F1B"), 4, loss_fn=loss_fn).step(x, target=y)
    assert not caplog.records and "Full Schedule" not in capfd.readouterr().err


class Torn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise dr.errors.NodeFailed("the worker is gone")


class Tearing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Torn.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_what_fails_in_a_backward_pass_comes_up_as_it_is(schedule: str, four_gpus: None) -> None:
    """torch made a RuntimeError of it, and whoever waits for NodeFailed did not get it."""
    x, y = batch()
    parts = [nn.Linear(WIDTH, WIDTH), Tearing(WIDTH, WIDTH), *layers(2)]
    pipe = dr.parallel.pipeline(sent(parts, schedule), 4, schedule, nn.functional.mse_loss)
    with pytest.raises(dr.errors.NodeFailed, match=r"^the worker is gone") as caught:
        pipe.step(x, target=y)
    # The error that torch has put around it would name it, too, and a cycle keeps the tensors of its frames.
    around = caught.value.__context__
    assert isinstance(around, RuntimeError) and around.__cause__ is None and around.__context__ is None


def test_what_is_refused(four_gpus: None) -> None:
    stages = sent(layers(), "1F1B")
    mse = nn.functional.mse_loss
    x, y = batch()
    with pytest.raises(
        dr.errors.ConfigurationError, match="no pipeline schedule '1B1F'; there are 1F1B, GPipe"
    ):
        dr.parallel.pipeline(stages, schedule="1B1F")
    with pytest.raises(
        dr.errors.ConfigurationError, match=r"1F1B does not take 2 micro-batches for 4 stages"
    ):
        dr.parallel.pipeline(stages, 2)
    with pytest.raises(
        dr.errors.ConfigurationError, match=r"for 4 stages the places \[0, 1, 1, 0\].* \[0, 1, 2, 3\]"
    ):
        dr.parallel.pipeline(stages, schedule="ZBVZeroBubble")
    with pytest.raises(dr.errors.ConfigurationError, match="whole number from 1 on, got 0"):
        dr.parallel.pipeline(stages, 0)
    with pytest.raises(dr.errors.UsageError, match="at least one stage, got none"):
        dr.parallel.pipeline([])
    with pytest.raises(dr.errors.UsageError, match="stage 1 is function"):
        dr.parallel.pipeline([stages[0], lambda x: x])  # type: ignore[list-item]
    with pytest.raises(
        dr.errors.PlacementError, match=r"stage 1 is in this process: weight is a local tensor"
    ):
        dr.parallel.pipeline([stages[0], nn.Linear(2, 2)])
    with pytest.raises(
        dr.errors.PlacementError, match=r"stage 0 is in several places: 0.0.weight is on node 0 cuda:0"
    ):
        dr.parallel.pipeline([nn.Sequential(stages[0], stages[1])])
    with pytest.raises(dr.errors.UsageError, match=r"0.weight of stage 1 is also 0.weight of stage 0"):
        dr.parallel.pipeline([stages[0], stages[0]])
    mesh = dr.init_device_mesh("cuda", (4,))
    with pytest.raises(dr.errors.PlacementError, match="stage 0 is on node 0 cuda:0, stage 1 on 4 members"):
        dr.parallel.pipeline([stages[0], nn.Linear(WIDTH, 1).to(mesh.device)])
    pipe = dr.parallel.pipeline(stages, MICRO, loss_fn=mse)
    with pytest.raises(
        dr.errors.UsageError, match=r"cuts the batch into 8 .* got shape \(15, 6\): give 16 rows, .* divisor"
    ):
        pipe.step(x[:15], target=y)
    with pytest.raises(dr.errors.UsageError, match=r"cuts target into 8"):
        pipe.step(x, target=y[:9])
    with pytest.raises(dr.errors.UsageError, match="at most 7"):
        pipe.eval(x[:7])
    with pytest.raises(dr.errors.UsageError, match="no stage takes 'mask'"):
        pipe.step(x, target=y, mask=y)
    with torch.no_grad(), pytest.raises(dr.errors.UsageError, match=r"pipe\.eval"):
        pipe.step(x, target=y)
    with pytest.raises(dr.errors.UsageError, match="loss_fn"):
        dr.parallel.pipeline(stages).step(x)
    whole_loss = dr.parallel.pipeline(stages, MICRO, loss_fn=lambda out, target: out - target)
    with pytest.raises(dr.errors.UsageError, match=r"one number and a gradient, got one of shape \(2, 6\)"):
        whole_loss.step(x, target=y)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": self.a(x)}

    named = dr.parallel.pipeline([Named().to(dr.place(0, "cuda:0")), stages[1]], 2, loss_fn=mse)
    with pytest.raises(dr.errors.UsageError, match="stage 0 returns a dict that has tensors in it"):
        named.step(x, target=y)


# -- orders, which need no worker ----------------------------------------------------------------------------


def local(name: str) -> tuple[int, int]:
    return (4, 2) if name in IN_A_V else (4, 4)


@pytest.mark.parametrize("name", NAMES)
def test_the_merged_order_has_every_pass_once_and_each_after_what_it_needs(name: str) -> None:
    stages, ranks = local(name)
    orders = orders_of(name, stages, ranks, 8)
    everything = merged(orders, stages - 1)
    passes = [
        str(part) for action in everything for part in (action.sub_actions or (action,)) if part.is_compute_op
    ]
    assert len(passes) == len(set(passes))
    forward = [f"{stage}F{k}" for stage in range(stages) for k in range(8)]
    assert sorted(one for one in passes if "F" in one) == sorted(forward)
    for stage in range(stages):
        whole_or_split = [one for one in passes if one[0] == str(stage) and one[1] in "BW"]
        assert len(whole_or_split) == 8
        assert sum(str(action) == f"{stage}REDUCE_GRAD" for action in everything) == 1
    assert [str(a) for a in merged(forward_orders(orders), stages - 1) if a.is_compute_op] != []


def test_bubbles_of_equal_passes_are_those_of_the_papers() -> None:
    """A bubble is (stages - 1) / microbatches of the work, and less where a backward pass is split."""

    def cost(stage: int, kind: str) -> float:
        return 2.0 if kind == "B" else 1.0

    def half(stage: int, kind: str) -> float:
        return cost(stage, kind) / 2

    work = 8 * 3.0
    for name in ("1F1B", "GPipe", "LoopedBFS", "Interleaved1F1B"):
        assert time_of(orders_of(name, 4, 4, 8), 3, cost) == work + 3 * 3.0
    # Two stages of half the size on each place halve it.
    assert time_of(orders_of("Interleaved1F1B", 8, 4, 8), 7, half) == work + 3 * 1.5
    # Gradients of weights fill it.
    assert time_of(orders_of("InterleavedZeroBubble", 4, 4, 8), 3, cost) < work + 3 * 2.0
    assert time_of(orders_of("ZBVZeroBubble", 8, 4, 8), 7, half) <= work + 3.0
