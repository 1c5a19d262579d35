"""Steps as people write them are recorded unchanged: FSDP2, tensor parallelism, a pipeline, a GPT."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distruntime as dr
from agree import REMOTE
from as_program import Case, replayed_as_eager


def _members(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _trained(model: nn.Module, mesh: dr.mesh.DeviceMesh) -> Case:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    def arguments(k: int) -> tuple[torch.Tensor]:
        return (dr.from_shards([torch.full((4, 8), 0.1 * k + j) for j in range(mesh.size())], mesh),)

    parameters = [*model.parameters()]
    return Case(step, arguments, lambda: _members([*parameters, *(p.grad for p in parameters)]))


@pytest.fixture
def mesh(session: Any) -> dr.mesh.DeviceMesh:
    return dr.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def test_a_step_of_fsdp2(mesh: dr.mesh.DeviceMesh) -> None:
    def make() -> Case:
        model = _mlp().to(mesh.device)
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)  # type: ignore[call-overload]
        return _trained(model, mesh)

    program = replayed_as_eager(make)
    assert program.replays >= 4 and not program.why


def test_a_step_of_tensor_parallelism(mesh: dr.mesh.DeviceMesh) -> None:
    def make() -> Case:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return _trained(parallelize_module(_mlp().to(mesh.device), mesh, plan), mesh)

    program = replayed_as_eager(make)
    assert program.replays >= 4 and not program.why


def test_dtensors_are_arguments_and_results(mesh: dr.mesh.DeviceMesh) -> None:
    def make() -> Case:
        w = nn.Parameter(distribute_tensor(torch.randn(8, 8).to(mesh.device), mesh, [Shard(0)]))

        def step(x: torch.Tensor) -> Any:
            w.grad = None
            y = torch.tanh(x @ w)
            y.square().sum().backward()
            with torch.no_grad():
                w.sub_(w.grad * 0.01)  # type: ignore[operator]
            assert isinstance(y, DTensor)
            return y.redistribute(mesh, [Replicate()]), {"y": y.detach()}

        def arguments(k: int) -> tuple[torch.Tensor]:
            return (distribute_tensor(torch.full((4, 8), 0.1 * k).to(mesh.device), mesh, [Shard(0)]),)

        return Case(step, arguments, lambda: _members([w, w.grad]))

    program = replayed_as_eager(make)
    assert program.replays >= 5 and not program.why
    x = distribute_tensor(torch.ones(4, 8).to(mesh.device), mesh, [Shard(0)])
    whole, named = program(x)
    assert isinstance(whole, DTensor) and whole.placements == (Replicate(),)
    assert isinstance(named["y"], DTensor) and named["y"].placements[0].is_shard()
    with pytest.raises(dr.errors.UsageError, match="its graph stays in the program"):
        whole.sum().backward()


@pytest.fixture
def pipeline() -> ModuleType:
    """The example of a pipeline, of two stages."""
    path = Path(__file__).parents[2] / "examples" / "07_pipeline.py"
    found = importlib.util.spec_from_file_location("pipeline_example", path)
    assert found is not None and found.loader is not None
    module = sys.modules["pipeline_example"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    module.STAGES, module.MICRO, module.WIDTH = 2, 4, 8  # type: ignore[attr-defined]
    return module


def test_a_step_of_a_1f1b_pipeline(session: Any, pipeline: ModuleType) -> None:
    def make() -> Case:
        model = pipeline.Pipeline()
        optimizers = [torch.optim.SGD(stage.parameters(), lr=0.5) for stage in model.stages]

        def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
            losses = model.step(x, y)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return losses  # type: ignore[no-any-return]

        def arguments(k: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = pipeline.batch(k)
            return x.to(model.devices[0]), y.to(model.devices[-1])

        return Case(step, arguments, lambda: [p for stage in model.stages for p in stage.parameters()])

    program = replayed_as_eager(make)
    assert program.replays >= 4 and not program.why


SMALL = {
    "GPT2": {"n_positions": 16, "n_layer": 2, "n_head": 2, "n_embd": 16},
    "Llama": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}


@pytest.mark.parametrize("name", SMALL)
def test_a_step_of_a_small_language_model(session: Any, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        **SMALL[name], vocab_size=64, bos_token_id=0, eos_token_id=0
    )
    kind = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[name]

    def make() -> Case:
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config).to(REMOTE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss = model(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()  # type: ignore[no-any-return]

        def arguments(k: int) -> tuple[torch.Tensor]:
            return ((torch.arange(24).view(2, 12) * (k + 1) % 64).to(REMOTE),)

        return Case(step, arguments, lambda: [*model.parameters()][:6])

    # Its dropout draws on the worker.
    program = replayed_as_eager(make)
    assert program.replays >= 4 and not program.why
