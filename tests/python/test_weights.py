"""Weights that lie at a worker: files of safetensors and of torch.save, folders of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Replicate, Shard

import distruntime as dr


class Tied(torch.nn.Module):
    """A module with a tied parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(6, 8)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = (self.first(x) + self.second(x)) * self.scale
        return y


@pytest.fixture
def module() -> Tied:
    return Tied()


@pytest.fixture(params=["file.safetensors", "saved.pt", "folder", "index"])
def path(request: pytest.FixtureRequest, module: Tied, tmp_path: Path) -> Path:
    """Weights of the module in each of the forms."""
    state = {name: t.detach().clone() for name, t in module.state_dict().items()}
    if request.param == "saved.pt":
        torch.save(state, tmp_path / "saved.pt")
        return tmp_path / "saved.pt"
    del state["second.weight"]
    if request.param == "file.safetensors":
        save_file(state, tmp_path / "file.safetensors")
        return tmp_path / "file.safetensors"
    halves = dict(list(state.items())[:2]), dict(list(state.items())[2:])
    for k, half in enumerate(halves):
        save_file(half, tmp_path / f"model-{k}.safetensors")
    if request.param == "index":
        save_file({"scale": torch.zeros(3)}, tmp_path / "other.safetensors")
        table = {name: f"model-{k}.safetensors" for k, half in enumerate(halves) for name in half}
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": table}), encoding="utf-8"
        )
    return tmp_path


def test_weights_are_read_where_they_lie(session: object, module: Tied, path: Path) -> None:
    found = dr.load(path, node=1)
    assert {t.place for t in found.values()} == {dr.place(1, "cpu")}
    assert all(torch.equal(t, module.state_dict()[name]) for name, t in dr.fetch(found).items())
    assert dr.load(path, node=dr.place(0, "cpu"), dtype=torch.float64)["scale"].dtype == torch.float64


def test_a_module_made_on_meta_is_filled(session: object, module: Tied, path: Path) -> None:
    with torch.device("meta"):
        model = Tied().requires_grad_(False)
    assert dr.load(path, node=1, into=model) is model
    assert model.first.weight is model.second.weight and not model.first.weight.requires_grad
    x = torch.randn(3, 6)
    assert torch.equal(model(x.to(model.scale.device)).cpu(), module(x))


def test_members_of_a_mesh_read_their_own_slices(session: object, module: Tied, path: Path) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    whole = module.state_dict()
    for name, t in dr.load(path, node=mesh).items():
        assert not isinstance(t, DTensor) and all(torch.equal(s, whole[name]) for s in dr.shards(t))
    found = dr.load(path, node=mesh, placements=lambda name, t: [Shard(t.ndim - 1)])
    for name, t in found.items():
        assert t.placements == (Shard(whole[name].ndim - 1),) and t.shape == whole[name].shape
        parts = whole[name].chunk(2, dim=-1)
        assert all(map(torch.equal, dr.shards(t.to_local()), parts))
    some = dr.load(path, node=mesh, placements={"first.bias": [Shard(0)], "scale": [Replicate()]})
    assert some["first.bias"].placements == (Shard(0),) and not isinstance(some["first.weight"], DTensor)
    assert torch.equal(some["scale"].full_tensor().cpu(), whole["scale"])


def test_a_module_of_dtensors_on_meta_says_who_reads_what(session: object, tmp_path: Path) -> None:
    linear = torch.nn.Linear(6, 8)
    save_file(linear.state_dict(), tmp_path / "linear.safetensors")
    mesh = dr.init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = torch.nn.Linear(6, 8)
    for name, p in list(model.named_parameters()):
        there = DTensor.from_local(p.data[:4], mesh, [Shard(0)], run_check=False)
        setattr(model, name, torch.nn.Parameter(there))
    dr.load(tmp_path / "linear.safetensors", node=mesh, into=model)
    assert model.weight.placements == (Shard(0),) and isinstance(model.weight, torch.nn.Parameter)
    x = torch.randn(3, 6)
    given = DTensor.from_local(x.to(mesh.device), mesh, [Replicate()], run_check=False)
    torch.testing.assert_close(model(given).full_tensor().cpu(), linear(x))


def test_what_torch_has_saved_comes_as_it_was(session: object, tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    torch.save({"model": {"a": shared, "b": shared[2:4]}, "step": 3}, tmp_path / "saved.pt")
    found = dr.load(tmp_path / "saved.pt", node=1)
    assert dr.fetch(found["step"]) == 3
    found["model"]["b"].zero_()
    assert found["model"]["a"].tolist() == [0, 1, 0, 0, 4, 5]


def test_what_is_not_there_is_named(session: object, module: Tied, tmp_path: Path) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    torch.save({"a": torch.ones(3), "step": 3}, tmp_path / "step.pt")
    torch.save(module, tmp_path / "module.pt")
    (tmp_path / "empty").mkdir()
    wrong: list[tuple[type[Exception], str, dict[str, Any], str]] = [
        (FileNotFoundError, "nothing", {"node": 1}, "neither a file nor a folder on this worker"),
        (FileNotFoundError, "nothing", {"node": mesh}, "neither a file nor a folder on this worker"),
        (FileNotFoundError, "empty", {"node": 1}, r"has no weights: expected \*\.safetensors"),
        (dr.errors.CheckpointError, "step.pt", {"node": mesh}, "holds more than tensors by name"),
        (dr.errors.UsageError, "step.pt", {"node": 1, "into": module}, "holds more than tensors by name"),
        (dr.errors.UsageError, "a.safetensors", {"node": 1, "into": module}, "only the file has a. Load"),
        (dr.errors.UsageError, "a.safetensors", {"placements": [Shard(0)]}, "say at which, node="),
        (dr.errors.UsageError, "a.safetensors", {"node": 1, "placements": [Shard(0)]}, "expected node=mesh"),
        (
            dr.errors.UsageError,
            "a.safetensors",
            {"node": mesh, "placements": [Shard(1)]},
            "one of its dimensions",
        ),
        (dr.errors.PlacementError, "a.safetensors", {"node": "one"}, "expected the number of a node"),
        (Exception, "module.pt", {"node": 1}, "(?s)[Ww]eights.only"),
    ]
    for kind, name, options, why in wrong:
        with pytest.raises(kind, match=why):
            dr.load(tmp_path / name, **options)
    assert module.first.weight.device.type == "cpu"


def test_a_function_that_names_safe_open_travels(session: object, tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")

    def names(path: str) -> list[str]:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())

    assert dr.fetch(dr.remote(names)(str(tmp_path / "a.safetensors"), node=1)) == ["a"]


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    """A small Llama, and its folder with several files."""
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    yield tmp_path, model


@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_model_of_transformers_is_read_there(
    session: object, llama: tuple[Path, Any], on_mesh: bool
) -> None:
    """The page on data has it as a recipe."""
    folder, here = llama

    @dr.remote
    def read_model(folder: str) -> object:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        return model.config, parameters, dict(model.named_buffers())

    where = dr.init_device_mesh("cpu", (2,)) if on_mesh else dr.place(1, "cpu")
    config, parameters, buffers = read_model(str(folder), place=where)
    own = dr.fetch(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(own[0] if on_mesh else own).eval()
    model.load_state_dict(parameters, assign=True, strict=False)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    model.tie_weights()

    assert type(model) is type(here) and model.lm_head.weight is model.model.embed_tokens.weight
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"remote"}
    ids = torch.arange(8).reshape(1, 8)
    there = ids.to(model.device)
    torch.testing.assert_close(model(there).logits.detach().cpu(), here(ids).logits.detach())
    if not on_mesh:
        assert model.generate(there, max_new_tokens=2, do_sample=False).shape == (1, 10)
