"""Take-over: files say "cuda:0" of remote tensors, as a GPU's do, and come back to the place."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import distruntime as dr
from processes import STARTING


@pytest.fixture(scope="module", autouse=True)
def _taken() -> Iterator[None]:
    dr.shutdown()
    dr.init_master_worker(world_size=2, as_cuda=True, timeout=STARTING)
    yield
    dr.shutdown()


class Tied(nn.Module):
    """An LSTM whose weights lie in a row, between an encoder and a decoder that share theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(4, 4), nn.Linear(4, 4)
        self.rnn, self.norm = nn.LSTM(4, 4, 2), nn.BatchNorm1d(4)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.decoder(self.norm(self.rnn(self.encoder(x))[0]))
        return found


class Tracked:
    """An object of the user's with tensors in it."""

    def __init__(self) -> None:
        self.best, self.here, self.step = torch.ones(3, device="cuda"), torch.zeros(2), 5


def trained() -> tuple[Any, Any]:
    model = Tied().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1, 2, 3], device="cuda")).square().sum().backward()
    optimizer.step()
    return model, optimizer


def through_a_file(thing: object, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=isinstance(thing, dict))


def through_a_pickle(thing: object) -> Any:
    return pickle.loads(pickle.dumps(thing))


def in_the_old_form(thing: object) -> Any:
    return through_a_file(thing, _use_new_zipfile_serialization=False)


ways = pytest.mark.parametrize("again", [through_a_file, in_the_old_form, through_a_pickle])


@ways
def test_a_module_comes_back_to_the_place(again: Callable[[object], Any]) -> None:
    model, _ = trained()
    found, x = again(model), torch.tensor([1, 2, 3], device="cuda")
    assert {t.place for t in found.state_dict().values()} == {dr.place(0)}
    assert found.decoder.weight is found.encoder.weight and all(p.requires_grad for p in found.parameters())
    found.rnn.flatten_parameters()
    assert torch.equal(found.eval()(x).cpu(), model.eval()(x).cpu())
    torch.optim.SGD(found.parameters(), lr=0.1).step()


@ways
def test_states_of_a_module_and_of_an_optimizer_come_back(again: Callable[[object], Any]) -> None:
    model, optimizer = trained()
    found = again({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "local": torch.ones(1)})
    assert {t.device.type for t in found["model"].values()} == {"remote"}
    assert found["model"]._metadata == model.state_dict()._metadata
    # The steps are on the CPU, as those of a GPU's optimizer.
    kinds = {(name, t.device.type) for s in found["optimizer"]["state"].values() for name, t in s.items()}
    assert kinds == {("step", "cpu"), ("exp_avg", "remote"), ("exp_avg_sq", "remote")}
    assert found["local"].device.type == "cpu"
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    optimizer.step()


@ways
def test_an_object_of_the_users_comes_back(again: Callable[[object], Any]) -> None:
    found = again(Tracked())
    assert found.best.place == dr.place(0) and found.best.tolist() == [1, 1, 1]
    assert found.here.device.type == "cpu" and found.step == 5


def test_what_a_file_says_of_tensors() -> None:
    said: dict[str, list[str]] = {}
    x = torch.arange(6.0, device="cuda")
    file = io.BytesIO()
    torch.save({"there": x, "a view": x[2:], "here": torch.ones(1), "elsewhere": x.to(dr.place(1))}, file)

    def note(storage: object, location: str) -> object:
        said.setdefault(location, []).append(location)
        return storage

    file.seek(0)
    torch.load(file, map_location=note)
    # A place that is no "cuda" of this session's comes back local.
    assert {location: len(found) for location, found in said.items()} == {"cuda:0": 1, "cpu": 2}
    file.seek(0)
    found = torch.load(file)
    found["a view"].fill_(7)
    assert found["there"].tolist() == [0, 1, 7, 7, 7, 7]


def test_safetensors_say_no_device(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, device="cuda")}, tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors")["a"].device.type == "cpu"
    assert load_file(tmp_path / "x.safetensors", device="cuda")["a"].place == dr.place(0)


LOADS = """
import sys, torch
for file in sys.argv[1:]:
    found = torch.load(file, map_location="cpu")
    print(sorted({str(t.device) for t in found.values()}), type(found["decoder.weight"]).__name__, len(found))
    try:
        torch.load(file)
    except RuntimeError as error:
        print(str(error)[:49])
assert "distruntime" not in sys.modules
"""


def test_a_machine_without_a_gpu_loads_a_file_of_ours(tmp_path: Path) -> None:
    model, _ = trained()
    files = [tmp_path / "new.pt", tmp_path / "old.pt"]
    for file in files:
        torch.save(model.state_dict(), file, _use_new_zipfile_serialization=file.stem == "new")
    assert {t.place for t in torch.load(files[0], mmap=True).values()} == {dr.place(0)}
    done = subprocess.run(
        [sys.executable, "-c", LOADS, *map(str, files)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=STARTING,
        check=True,
    )
    says = [
        f"['cpu'] Tensor {len(model.state_dict())}",
        "Attempting to deserialize object on a CUDA device",
    ]
    assert done.stdout.splitlines() == says * 2


def test_a_file_of_a_second_gpu_asks_for_map_location() -> None:
    registry, file = torch.serialization._package_registry, io.BytesIO()
    registry.insert(0, (0, lambda storage: "cuda:1", lambda storage, location: None))
    try:
        torch.save({"a": torch.ones(2)}, file)
    finally:
        registry.pop(0)
    file.seek(0)
    with pytest.raises(
        RuntimeError, match=r"CUDA device 1 but torch\.cuda\.device_count\(\) is 1.*map_location"
    ):
        torch.load(file)
    file.seek(0)
    assert torch.load(file, map_location={"cuda:1": "cuda:0"})["a"].place == dr.place(0)


def test_the_session_gives_files_back(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    x = torch.ones(2, device="remote")
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.load(file).device.type == "cpu"
    with pytest.raises(dr.errors.NotSupportedError, match=r"torch\.save"):
        pickle.dumps(x)
    dr.shutdown()
    dr.init_master_worker(world_size=2, as_cuda=True, timeout=STARTING)
