"""What libraries that ask for a device are told. Those that are no requirement of the tests run in
`make ecosystem`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

import distruntime as dr
from agree import REMOTE
from distruntime.backend import libraries
from distruntime.backend.on_import import when_imported

VARIABLE = "ACCELERATE_TORCH_DEVICE"


# The parts of accelerate and Triton that a session teaches.
STATE = """
import torch

class PartialState:
    @property
    def default_device(self):
        return torch.device(DEVICE)

DEVICE = "cpu"
"""
JIT = """
class JITFunction:
    def __init__(self, function):
        self.function, self.__name__ = function, function.__name__

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)

    def run(self, *args, grid, **kwargs):
        return self.function(*args, **kwargs)
"""


def taught(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> Any:
    """Import a module of a library that is not installed."""
    if name in sys.modules or importlib.util.find_spec(name.partition(".")[0]) is not None:
        pytest.skip(f"{name} is installed")
    parts = name.split(".")
    for k in range(1, len(parts) + 1):
        # What is set here is gone after the test.
        monkeypatch.setitem(sys.modules, ".".join(parts[:k]), ModuleType("none"))
        del sys.modules[".".join(parts[:k])]
        if k < len(parts):
            folder.joinpath(*parts[:k]).mkdir()
            folder.joinpath(*parts[:k], "__init__.py").touch()
    folder.joinpath(*name.split(".")).with_suffix(".py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module(name)


def test_accelerate_has_the_session_where_it_would_have_the_cpu(
    session: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    state = taught(tmp_path, monkeypatch, "accelerate.state", STATE)
    assert state.PartialState().default_device == torch.device(REMOTE)
    # A process that this one starts has no session, so nothing tells it of one.
    code = f"import os; print(os.environ.get({VARIABLE!r}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "None\n"
    # A user's own word stands, and so does another device.
    monkeypatch.setenv(VARIABLE, "cpu")
    assert state.PartialState().default_device == torch.device("cpu")
    monkeypatch.delenv(VARIABLE)
    state.DEVICE = "cuda"
    assert state.PartialState().default_device == torch.device("cuda")


def test_without_a_session_accelerate_has_the_cpu(
    fresh_session: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dr.shutdown()
    state = taught(tmp_path, monkeypatch, "accelerate.state", STATE)
    assert state.PartialState().default_device == torch.device("cpu")


def test_transformers_arguments_take_bfloat16(session: object, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = importlib.import_module("transformers.training_args")
    monkeypatch.delenv(VARIABLE, raising=False)
    assert arguments.is_torch_bf16_gpu_available()
    monkeypatch.setenv(VARIABLE, "cpu")
    assert arguments.is_torch_bf16_gpu_available() == torch.cuda.is_available()
    monkeypatch.setenv(VARIABLE, "remote")
    assert arguments.is_torch_bf16_gpu_available()


def test_a_triton_kernel_refuses_a_proxy_by_name(
    session: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_one(x: torch.Tensor, size: int) -> int:
        return size

    kernel = taught(tmp_path, monkeypatch, "triton.runtime.jit", JIT).JITFunction(add_one)
    assert kernel[1](torch.ones(2), size=2) == 2
    with pytest.raises(
        dr.errors.NotSupportedError, match=r"Triton kernel 'add_one' .* node 0 cpu.*custom_op"
    ) as failed:
        kernel[1](torch.ones(2, device=REMOTE), size=2)
    assert failed.traceback[-1].path == tmp_path / "triton" / "runtime" / "jit.py"


def test_safetensors_are_loaded_to_a_place(session: object, tmp_path: Path) -> None:
    path, tensors = tmp_path / "x.safetensors", {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    save_file({name: t.to(REMOTE) for name, t in tensors.items()}, path)
    for device in (REMOTE, "remote:1", dr.place(1), torch.ones(1, device="remote:1").device):
        loaded = load_file(path, device=device)
        assert {str(t.device) for t in loaded.values()} == {str(torch.zeros(1, device=device).device)}
        torch.testing.assert_close(dr.fetch(loaded), tensors)
    with safe_open(path, "pt", device=REMOTE) as file:
        assert sorted(file.keys()) == ["a", "b"] and file.get_slice("a").get_shape() == [2, 3]
        part = file.get_slice("a")[:, 1:]
        assert part.device.type == "remote" and part.tolist() == [[1, 2], [4, 5]]
        assert file.get_tensor("b").device.type == "remote"
    assert {t.device.type for t in load_file(path).values()} == {"cpu"}


def test_all_tensors_of_a_safetensors_file_are_fetched_together(session: object, tmp_path: Path) -> None:
    tensors = {str(k): torch.full((3,), float(k), device=REMOTE) for k in range(5)}
    dr.profiler.stalls(reset=True)
    save_file({**tensors, "local": torch.ones(2)}, tmp_path / "x.safetensors")
    assert sum(stall.count for stall in dr.profiler.stalls()) == 1
    loaded = load_file(tmp_path / "x.safetensors")
    assert [loaded[name].tolist() for name in tensors] == [[k] * 3 for k in range(5)]
    with pytest.raises(RuntimeError, match="share memory"):
        save_file({"a": tensors["0"], "b": tensors["0"].view(3, 1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="non contiguous"):
        save_file({"a": torch.ones(2, 3, device=REMOTE).t()}, tmp_path / "x.safetensors")


def test_an_open_file_has_a_class_to_be_asked_for(session: object, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "some.safetensors")
    for device in ("cpu", REMOTE):
        with safe_open(tmp_path / "some.safetensors", "pt", device) as file:
            assert isinstance(file, safe_open)
    assert not isinstance(1, safe_open)
    # Annotations say so.
    assert safe_open | None


def test_a_model_with_tied_weights_is_saved_and_loaded(session: object, tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        return model.to(REMOTE)

    model, again, path = tied(), tied(), tmp_path / "model.safetensors"
    save_model(model, str(path))
    assert len(load_file(path)) == 3
    load_model(again, path, device=REMOTE)
    torch.testing.assert_close(dr.fetch(again.state_dict()), dr.fetch(model.state_dict()))


def test_a_library_is_taught_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_library").mkdir()
    (tmp_path / "a_library" / "__init__.py").write_text("device = 'cpu'\n", encoding="utf-8")
    (tmp_path / "a_library" / "part.py").write_text(
        "import a_library\nseen = a_library.device\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    when_imported("a_library", lambda module: setattr(module, "device", REMOTE))
    when_imported("a_library.part", lambda module: setattr(module, "taught", True))
    try:
        part = importlib.import_module("a_library.part")
        assert part.seen == REMOTE and part.taught
        # The module is as if nobody had watched.
        library = sys.modules["a_library"]
        assert library.__spec__ is not None and library.__loader__ is library.__spec__.loader
        assert type(library.__loader__).__module__ == "_frozen_importlib_external"
        assert importlib.reload(part).seen == REMOTE and part.taught
        when_imported("a_library", lambda module: print("at once"))
        assert capsys.readouterr().out == "at once\n"
        with pytest.raises(ModuleNotFoundError, match=r"a_library\.missing"):
            importlib.import_module("a_library.missing")
    finally:
        for name in ("a_library", "a_library.part"):
            sys.modules.pop(name, None)


def test_a_library_that_another_thread_is_importing_is_taught_behind_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import gates\ngates.begun.set()\nassert gates.go.wait(60)\nlate = 1\n"
    (tmp_path / "slow_library.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    gates = ModuleType("gates")
    begun, go = threading.Event(), threading.Event()
    vars(gates).update(begun=begun, go=go)
    monkeypatch.setitem(sys.modules, "gates", gates)
    found: list[int] = []
    importing = threading.Thread(target=importlib.import_module, args=("slow_library",))
    teaching = threading.Thread(
        target=when_imported, args=("slow_library", lambda module: found.append(module.late))
    )
    try:
        importing.start()
        assert begun.wait(60)
        teaching.start()
        go.set()
        for thread in (importing, teaching):
            thread.join(60)
        assert found == [1]
    finally:
        go.set()
        sys.modules.pop("slow_library", None)


def test_the_device_that_the_user_names_meanwhile_stays(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dr.shutdown()
    monkeypatch.delenv(VARIABLE, raising=False)
    fresh_session(world_size=1)
    monkeypatch.setenv(VARIABLE, "cpu")
    dr.shutdown()
    assert os.environ[VARIABLE] == "cpu"


def test_a_library_that_cannot_be_taught_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "__init__.py").write_text("__version__ = '9.1'\n", encoding="utf-8")
    (tmp_path / "newer" / "__main__.py").write_text(
        "import newer\nprint('ran', newer.__version__)\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("newer", "newer.__main__"):
        when_imported(name, lambda module: module.renamed)
    try:
        # Whoever looks at the library without importing it finds what its own loader says.
        spec = importlib.util.find_spec("newer")
        assert spec is not None and "9.1" in spec.loader.get_source("newer")  # type: ignore[union-attr]
        with pytest.warns(UserWarning, match=r"teach newer 9\.1 about remote.*AttributeError: .*'renamed'"):
            newer = importlib.import_module("newer")
        runpy.run_module("newer", run_name="__main__", alter_sys=True)
        assert capsys.readouterr().out == "ran 9.1\n"
        with pytest.warns(UserWarning, match="AttributeError"):
            when_imported("newer", lambda module: module.renamed)
        assert inspect.getsource(newer) == "__version__ = '9.1'\n"
    finally:
        sys.modules.pop("newer", None)


@pytest.mark.parametrize("first", ["library", "session"])
def test_a_library_that_chooses_a_device_chooses_the_current_place(
    fresh_session: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The functions are written as those of stable-baselines3, fastai and accelerate are."""
    common, fastai = tmp_path / "stable_baselines3" / "common", tmp_path / "fastai"
    utils = tmp_path / "accelerate" / "utils"
    for folder in (common, fastai, utils):
        folder.mkdir(parents=True)
    (utils / "modeling.py").write_text(
        "def convert_file_size_to_int(size):\n    return int(size)\n"
        "def get_max_memory(max_memory=None):\n"
        "    assert max_memory is None or set(max_memory) <= {'cpu'}\n"
        "    return {'cpu': 9} if max_memory is None else max_memory\n",
        encoding="utf-8",
    )
    (fastai / "loading.py").write_text(
        "from accelerate.utils.modeling import get_max_memory as most\n", encoding="utf-8"
    )
    (common / "utils.py").write_text(
        "import torch\ndef get_device(device='auto'):\n"
        "    return torch.device('cpu' if device in ('auto', 'cuda') else device)\n",
        encoding="utf-8",
    )
    (common / "policies.py").write_text(
        "from stable_baselines3.common.utils import get_device\n", encoding="utf-8"
    )
    (fastai / "torch_core.py").write_text(
        "import torch, types\ndefaults = types.SimpleNamespace(use_cuda=None)\n"
        "def default_device(use=-1):\n    if use != -1:\n        defaults.use_cuda = use\n"
        "    return torch.device('cpu')\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ("stable_baselines3.common.policies", "fastai.torch_core", "fastai.loading")
    # Who says None there forbids an import.
    monkeypatch.setitem(sys.modules, "forbidden", None)
    taught = ("stable_baselines3.common.utils", "fastai.torch_core", "accelerate.utils.modeling")
    # Another session of this process may have watched for them already.
    monkeypatch.setattr("distruntime.backend.on_import._hooks", {})
    try:
        if first == "library":
            policies, core, loading = map(importlib.import_module, names)
            assert policies.get_device() == core.default_device() == torch.device("cpu")
        fresh_session(world_size=1)
        for name in taught:
            when_imported(name, libraries.HOOKS[name])
        policies, core, loading = map(importlib.import_module, names)
        assert policies.get_device() == policies.get_device(device="auto") == torch.device("remote")
        assert policies.get_device("cpu") == policies.get_device("cuda") == torch.device("cpu")
        assert core.default_device() == torch.device("remote")
        assert core.default_device(False) == core.default_device() == torch.device("cpu")
        core.default_device(None)
        assert list(loading.most()) == ["remote", "cpu"] and loading.most()["remote"] > 1 << 20
        assert loading.most({"cpu": 3}) == {"cpu": 3}
        assert loading.most({"cpu": 3, "remote:0": "4"}) == {"remote:0": 4, "cpu": 3}
        dr.shutdown()
        assert loading.most() == {"cpu": 9}
        assert policies.get_device() == core.default_device() == torch.device("cpu")
    finally:
        for name in [
            name for name in sys.modules if name.partition(".")[0] in ("stable_baselines3", "fastai")
        ]:
            del sys.modules[name]
