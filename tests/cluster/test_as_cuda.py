"""Take-over: scripts that say "cuda" run on workers as they are, and numbers are those of a CPU."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

import distruntime as dr
from distruntime.backend.install import install
from distruntime.cluster import as_cuda
from distruntime.cluster.local_workers import worker_environment
from processes import STARTING

# torch.cuda's own, by name.
before: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _taken() -> Iterator[None]:
    dr.shutdown()
    # What every session changes is there before and after.
    install()
    random = torch.cuda.random.get_rng_state
    # A torch that was built for CUDA has it, without a GPU too.
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    before.update({name: getattr(torch.cuda, name) for name in dir(torch.cuda)})
    factories = {name: getattr(torch, name) for name in ("zeros", "load", "autocast", "is_autocast_enabled")}
    methods = torch.Tensor.to, torch.Tensor.__dict__.get("new_zeros"), nn.Module.to, torch.autocast.__init__
    # A session has one function for it, with and without the take-over.
    pinning = torch.Tensor.pin_memory
    dr.init_master_worker(world_size=2, as_cuda=True, timeout=STARTING)
    assert torch.Tensor.pin_memory is pinning
    yield
    dr.shutdown()
    # All of it is torch's own again.
    assert [name for name, value in before.items() if getattr(torch.cuda, name) is not value] == []
    assert factories == {name: getattr(torch, name) for name in factories}
    assert methods == (
        torch.Tensor.to,
        torch.Tensor.__dict__.get("new_zeros"),
        nn.Module.to,
        torch.autocast.__init__,
    )
    assert not torch.cuda.is_available() and torch.cuda.random.get_rng_state is random
    assert getattr(torch._C, "_cuda_getCurrentRawStream", None) is raw_stream
    assert not hasattr(dr.Stream, "cuda_stream")
    assert torch.Tensor.pin_memory is pinning


def in_a_thread() -> Any:
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(torch.zeros(2, device="cuda")))
    thread.start()
    thread.join()
    return made[0]


def in_a_context() -> Any:
    with torch.device("cuda"):
        return nn.Linear(2, 2).weight


def by_default() -> Any:
    torch.set_default_device("cuda")
    try:
        return torch.ones(2)
    finally:
        torch.set_default_device(None)


def from_a_file() -> Any:
    file = io.BytesIO()
    torch.save({"a": torch.ones(2, device="cuda")}, file)
    file.seek(0)
    return torch.load(file, map_location="cuda")["a"]


def saved(*, by_a_gpu: bool = False) -> io.BytesIO:
    """Return a file with a tensor, as a process with a GPU writes it or one without."""
    file = io.BytesIO()
    registry = torch.serialization._package_registry
    if by_a_gpu:
        registry.insert(0, (0, lambda storage: "cuda:0", lambda storage, location: None))
    try:
        torch.save({"a": torch.ones(2)}, file)
    finally:
        if by_a_gpu:
            registry.pop(0)
    file.seek(0)
    return file


SPELLINGS: dict[str, Callable[[], Any]] = {
    "a factory": lambda: torch.zeros(2, device="cuda"),
    "with an index": lambda: torch.zeros(2, device="cuda:0"),
    "a device": lambda: torch.arange(3, device=torch.device("cuda")),
    "data": lambda: torch.tensor([1.0, 2.0], device="cuda"),
    "as_tensor": lambda: torch.as_tensor([1], device=torch.device("cuda", 0)),
    "like": lambda: torch.full_like(torch.ones(2), 3.0, device="cuda"),
    "new": lambda: torch.ones(2).new_zeros(3, device="cuda"),
    "to": lambda: torch.ones(2).to("cuda"),
    "to by name": lambda: torch.ones(2).to(device="cuda", dtype=torch.float64, non_blocking=True),
    "to from there": lambda: torch.ones(2, device="cuda").to(torch.device("cuda")),
    "cuda": lambda: torch.ones(2).cuda(),
    "cuda of an index": lambda: torch.ones(2).cuda(0, non_blocking=True),
    "pinned": lambda: torch.ones(2).pin_memory().cuda(non_blocking=True),
    "a module": lambda: nn.Linear(2, 2).cuda().weight,
    "a module to": lambda: nn.Linear(2, 2).to("cuda:0").weight,
    "born there": lambda: nn.Linear(2, 2, device="cuda").weight,
    "a context": in_a_context,
    "the default": by_default,
    "a file": from_a_file,
    "a file, by a function": lambda: torch.load(saved(), map_location=lambda storage, _: storage.cuda(0))[
        "a"
    ],
    "a file, by a dict": lambda: torch.load(saved(), map_location={"cpu": "cuda:0"})["a"],
    "a file of a GPU": lambda: torch.load(saved(by_a_gpu=True))["a"],
    "a type by name": lambda: torch.ones(2).type("torch.cuda.FloatTensor"),
    "a type": lambda: torch.ones(2).type(torch.cuda.LongTensor),
    "another's type": lambda: torch.ones(2).type(torch.ones(2, device="cuda").type()),
    "a type of a remote one": lambda: torch.ones(2, device="cuda").type("torch.cuda.HalfTensor"),
    "a type with sizes": lambda: torch.cuda.FloatTensor(2, 3).fill_(1.0),
    "a type with data": lambda: torch.cuda.LongTensor([1, 2]),
    "nn.DataParallel": lambda: nn.DataParallel(nn.Linear(2, 2)).cuda()(torch.ones(1, 2).cuda()),
    "data_parallel": lambda: nn.parallel.data_parallel(nn.Linear(2, 2).cuda(), torch.ones(1, 2).cuda(), [0]),
    "a number": lambda: torch.ones(2, device=0).to(0),
    "a thread": in_a_thread,
    "a generator": lambda: torch.rand(2, device="cuda", generator=torch.Generator("cuda").manual_seed(1)),
    "the current device": lambda: torch.ones(2).to(f"cuda:{torch.cuda.current_device()}"),
    "torch.accelerator": lambda: torch.ones(2).to(torch.accelerator.current_accelerator()),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_cuda_means_the_workers_in_every_spelling(name: str) -> None:
    found = SPELLINGS[name]()
    assert found.device == dr.place(0).device and found.place == dr.place(0)
    assert found.cpu().device.type == "cpu"


def test_torch_cuda_answers_for_the_workers() -> None:
    cuda = torch.cuda
    assert cuda.is_available() and torch.accelerator.is_available()
    assert (cuda.device_count(), cuda.current_device()) == (1, 0)
    held = torch.ones(1000, device="cuda")
    assert cuda.memory_allocated() >= held.nbytes and cuda.mem_get_info(0)[1] > 1 << 20
    assert cuda.get_device_name() and cuda.get_device_properties("cuda").total_memory > 1 << 20
    cuda.reset_peak_memory_stats()
    cuda.empty_cache()
    cuda.synchronize("cuda:0")
    cuda.manual_seed_all(3)
    # transformers asks the module that these come from.
    assert cuda.random.get_rng_state is cuda.get_rng_state
    assert cuda.memory.memory_allocated is cuda.memory_allocated
    state = cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda").cpu(), first.cpu()) and len(cuda.get_rng_state_all()) == 1
    side, event = cuda.Stream(), cuda.Event(enable_timing=True)
    with cuda.stream(side):
        doubled = held * 2
        event.record()
    cuda.current_stream().wait_stream(side)
    event.synchronize()
    assert doubled.sum().item() == 2000 and isinstance(side, cuda.Stream)
    with cuda.device(0):
        assert torch.ones(1, device="cuda").place == dr.place(0)


def test_autocast_is_asked_and_set_without_a_type() -> None:
    """Libraries that run a forward pass again ask so: the type is "cuda" then."""
    assert not torch.is_autocast_enabled()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_gpu_dtype() is torch.bfloat16 is torch.get_autocast_dtype("cuda")
        assert not torch.is_autocast_enabled("cpu")
    there = torch.ones(2, 2, device="cuda")
    before = torch.get_autocast_gpu_dtype()
    try:
        torch.set_autocast_gpu_dtype(torch.bfloat16)
        torch.set_autocast_enabled(True)
        assert (there @ there).dtype is torch.bfloat16
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    finally:
        torch.set_autocast_enabled(False)
        torch.set_autocast_gpu_dtype(before)
    assert (there @ there).dtype is torch.float32


def test_seeds_of_cuda_leave_this_process_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert torch.cuda.initial_seed() == 0
    torch.cuda.seed()
    first = torch.cuda.initial_seed()
    torch.cuda.seed_all()
    assert len({0, first, torch.cuda.initial_seed()}) == 3
    torch.cuda.manual_seed(5)
    assert torch.cuda.initial_seed() == 5 and torch.initial_seed() == 0
    assert torch.equal(torch.rand(1), expected)


def test_factories_beside_torchs_list_go_there_too() -> None:
    torch.manual_seed(3)
    drawn = torch.normal(0.0, 1.0, (3,), device="cuda")
    torch.manual_seed(3)
    assert torch.equal(drawn.cpu(), torch.normal(0.0, 1.0, (3,)))
    for name in ("fftfreq", "rfftfreq"):
        made = getattr(torch.fft, name)(8, device="cuda")
        assert made.place == dr.place(0) and torch.equal(made.cpu(), getattr(torch.fft, name)(8))
    assert torch.ones(2, device="cuda").get_device() == 0


def test_what_would_be_a_lie_raises_and_what_pretends_is_listed() -> None:
    for ask, text in (
        (torch.cuda.CUDAGraph, "run the step without it"),
        (torch.cuda.cudart, "mem_get_info"),
        (lambda: torch.cuda.graph(None), "run the step without it"),  # type: ignore[arg-type]
    ):
        with pytest.raises(dr.errors.NotSupportedError, match=text):
            ask()
    with pytest.raises(
        RuntimeError, match=r'invalid device ordinal: cuda:1 .*cuda:0 is node 0 cpu.*as_cuda="all"'
    ):
        torch.zeros(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2).cuda(3)
    with torch.cuda.nvtx.range("step"):
        assert (torch.cuda.nvtx.range_push("forward"), torch.cuda.nvtx.range_pop()) == (1, 1)
    torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("anywhere"))
    taken = dr.takeover()
    assert taken["torch.cuda.nvtx.range_start"] == 1 and "torch.cuda.nvtx.range_push" not in taken


# torch's own, and they ask nothing of a device: errors, modules, flags, and storages, which cannot be made.
OWN = re.compile(
    r".*Storage|CudaError|DeferredCudaCallError|StreamContext|cudaStatus|has_half|has_magma|amp|graphs|graph_annotations|jiterator|"
    r"memory|nccl|nvtx|profiler|random|sparse|streams|tunable"
)


def test_each_name_of_torch_cuda_has_an_answer() -> None:
    own = [name for name in torch.cuda.__all__ if getattr(torch.cuda, name) is before[name]]
    assert [name for name in own if not OWN.fullmatch(name)] == []


def test_more_of_torch_cuda_answers() -> None:
    cuda = torch.cuda
    held = torch.ones(1000, device="cuda")
    assert cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] >= held.nbytes
    assert cuda.device_memory_used() > 0 and cuda.get_allocator_backend() == "native"
    assert torch.get_device_module() is torch.get_device_module("cuda")
    side = cuda.Stream(device="cuda:0", priority=-1)
    with cuda.stream(side):
        assert cuda.current_stream() == side and isinstance(side, cuda.Stream)
    assert cuda.current_stream() == cuda.default_stream() and isinstance(cuda.Stream(0), cuda.Stream)
    assert isinstance(held, cuda.FloatTensor) and not isinstance(held, cuda.LongTensor)
    assert not isinstance(torch.ones(1), cuda.FloatTensor)
    assert cuda.FloatTensor().shape == (0,) and cuda.ByteTensor(2, 3).shape == (2, 3)
    assert (
        not torch.empty(2, pin_memory=True).is_pinned()
        and torch.ones(2).pin_memory("cuda").device.type == "cpu"
    )
    cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="blocks until a worker answers"):
            held.sum().item()
    finally:
        cuda.set_sync_debug_mode(0)
    cuda.memory._record_memory_history()
    assert dr.takeover()["torch.cuda.memory._record_memory_history"] == 1


def test_a_default_type_is_a_dtype_and_a_device() -> None:
    try:
        torch.set_default_tensor_type("torch.cuda.DoubleTensor")
        made = torch.ones(2)
        assert made.dtype == torch.float64 and made.place == dr.place(0)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.ones(2).device.type == "cpu" and torch.ones(2).dtype == torch.float32


def test_a_file_keeps_its_module_and_the_versions_of_a_state() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    file = io.BytesIO()
    torch.save({"model": model, "state": model.state_dict(), "local": torch.ones(1)}, file)
    for where in ("cuda", lambda storage, _: storage.cuda(), torch.device("cuda", 0)):
        file.seek(0)
        found = torch.load(file, map_location=where, weights_only=False)
        assert {p.device.type for p in found["model"].parameters()} == {"remote"}
        assert found["state"]._metadata == model.state_dict()._metadata
        assert {t.device.type for t in found["state"].values()} == {"remote"}
    file.seek(0)
    found = torch.load(file, map_location=lambda storage, _: storage, weights_only=False)
    assert found["model"][0].weight.device.type == "cpu"


def test_a_profiler_of_cuda_watches_this_process_alone(capfd: pytest.CaptureFixture[str]) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as watched:
        torch.ones(2, device="cuda") + 1
    assert "aten::add" in {event.key for event in watched.key_averages()}
    assert dr.takeover()["ProfilerActivity.CUDA"] >= 1
    assert "Failed to record CUDA event" not in capfd.readouterr().err


RAGGED = [torch.ones(2), torch.ones(3)]
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a factory": (lambda: torch.zeros(2, device="cuda:7"), r"cuda:7 was asked for, and .* shows 1 .*--all"),
    "to": (lambda: torch.ones(2).to("cuda:7"), "cuda:7 was asked for"),
    "to of a remote one": (lambda: torch.ones(2, device="cuda").to("cuda:7"), "cuda:7 was asked for"),
    "cuda": (lambda: torch.ones(2).cuda(7), "cuda:7 was asked for"),
    "a module": (lambda: nn.Linear(2, 2).cuda(7), "cuda:7 was asked for"),
    "set_device": (lambda: torch.cuda.set_device(9), "cuda:9 was asked for"),
    "synchronize": (lambda: torch.cuda.synchronize(9), "cuda:9 was asked for"),
    "a context": (lambda: torch.cuda.device(9).__enter__(), "cuda:9 was asked for"),
    "a stream": (lambda: torch.cuda.Stream(9), "cuda:9 was asked for"),
    "a file": (lambda: torch.load(saved(), map_location="cuda:7"), "cuda:7 was asked for"),
    "a graph": (lambda: torch.cuda.CUDAGraph(), "CUDAGraph.*run the step without it"),
    "a graph's context": (lambda: torch.cuda.graph(None), "cuda.graph .*run the step without it"),
    "cudart": (lambda: torch.cuda.cudart(), "cudart.*mem_get_info"),
    "a kernel's stream": (lambda: torch.cuda.current_stream().cuda_stream, "cuda_stream.*custom_op"),
    "a raw stream": (lambda: torch._C._cuda_getCurrentRawStream(0), "RawStream.*custom_op"),
    "a generator": (lambda: torch.cuda.default_generators[0], "get_rng_state"),
    "a storage": (lambda: torch.ones(2).untyped_storage().cuda(), r"x\.cuda\(\)"),
    "a pool": (lambda: torch.cuda.MemPool(), "MemPool.*torch's own"),
    "a stream for good": (
        lambda: torch.cuda.set_stream(torch.cuda.Stream()),
        r"with torch\.cuda\.stream\(s\)",
    ),
    "how busy": (lambda: torch.cuda.utilization(), r"dr\.nodes\(\)"),
    "a ragged tensor": (lambda: torch.nested.nested_tensor(RAGGED, device="cuda"), "Pad them"),
    "a ragged one to": (lambda: torch.nested.nested_tensor(RAGGED).cuda(), "Pad it first"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_says_so_at_the_users_line(name: str) -> None:
    ask, text = WRONG[name]
    with pytest.raises((RuntimeError, dr.errors.NotSupportedError), match=text) as failed:
        ask()
    frames = [Path(str(entry.path)) for entry in failed.traceback]
    assert not [path for path in frames if "distruntime" in path.parts and "tests" not in path.parts]


def test_local_code_and_torchscript_stay_as_they_are() -> None:
    assert torch.zeros(2).device.type == "cpu" and torch.ones(2).to("cpu").device.type == "cpu"
    with pytest.warns((DeprecationWarning, FutureWarning)):
        scripted = torch.jit.script(_makes_zeros)
    assert scripted(torch.ones(2)).tolist() == [1.0, 1.0]
    assert (
        torch.zeros(2, device="meta").is_meta
        and nn.Linear(2, 2).to(torch.float64).weight.dtype == torch.float64
    )


def _makes_zeros(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(2)


TRAINS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
loader = DataLoader(data, batch_size=16, pin_memory=device == "cuda")
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=device == "cuda")
scaler = torch.amp.GradScaler(device, enabled=False)
for epoch in range(3):
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, CHECKPOINT)
print(f"loss {loss.item():.6f} on {device}")
"""


def saved_parts(saved: list[Any]) -> list[list[Any]]:
    """Return the weights and the optimizer's state; its group says that it is fused on a GPU."""
    return [[file["model"], file["optimizer"]["state"]] for file in saved]


def test_a_script_finds_the_modules_that_it_finds_without_us(tmp_path: Path) -> None:
    """Python looks in the script's folder, and not in the one where it was started."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "only_here.py").write_text("", encoding="utf-8")
    script = tmp_path / "inner" / "script.py"
    script.write_text(
        "import importlib.util, sys\nprint(sys.path[0], importlib.util.find_spec('only_here'))\n",
        encoding="utf-8",
    )
    root = Path(dr.__file__).resolve().parents[1]
    paths = os.pathsep.join(map(str, (root, root / "worker")))
    environment = {**worker_environment(1), "PYTHONPATH": paths}
    for command in ((sys.executable,), (sys.executable, "-m", "distruntime", "run", "--as-cuda")):
        done = subprocess.run(
            [*command, str(script)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=STARTING,
            check=False,
        )
        assert done.stdout == f"{script.parent} None\n", done.stderr


@pytest.mark.slow(reason="starts a script with a worker: 4 s")
def test_a_script_has_the_devices_that_its_workers_simulate(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nprint(torch.cuda.device_count(), torch.ones(2, device='cuda:1').sum().item())\n",
        encoding="utf-8",
    )
    root = Path(dr.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "distruntime", "run", "--as-cuda", "--all", "--simulate-cuda=2", str(script)],
        env={**worker_environment(1), "PYTHONPATH": os.pathsep.join(map(str, (root, root / "worker")))},
        capture_output=True,
        text=True,
        timeout=STARTING,
        check=False,
    )
    assert done.stdout == "2 2.0\n", done.stderr


@pytest.mark.slow(reason="starts a script twice, once on a worker: 11.5 s in the suite")
def test_a_script_for_cuda_runs_unchanged(tmp_path: Path) -> None:
    """Mixed precision, a scaler, pinned loading, a fused optimizer and a checkpoint, as people write them."""
    printed, saved, said = [], [], []
    for command in ((sys.executable,), (sys.executable, "-m", "distruntime", "run", "--as-cuda")):
        checkpoint = tmp_path / f"{len(command)}.pt"
        (tmp_path / "train.py").write_text(f"CHECKPOINT = {str(checkpoint)!r}\n{TRAINS}", encoding="utf-8")
        done = subprocess.run(
            [*command, str(tmp_path / "train.py")],
            env={**worker_environment(1), "DISTRUNTIME_QUIET": ""},
            capture_output=True,
            text=True,
            timeout=STARTING,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines()[-1])
        said.append(done.stderr.splitlines())
        saved.append(torch.load(checkpoint, map_location="cpu"))
    assert printed[0].split()[-1] == "cpu" and printed[1].split()[-1] == "cuda"
    assert printed[0].split()[1] == printed[1].split()[1]
    # The end of the run says what was remote.
    assert said[0] == [] and re.search(
        r"\d{3} values were made there, .* Only pretended: pin_memory \(24\)$", said[1][-1]
    )
    for there, here in zip(*saved_parts(saved)):
        torch.testing.assert_close(there, here)


def test_a_training_loop_in_this_process_gives_what_a_cpu_gives() -> None:
    def train(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        head = nn.Linear(16, 4)
        model, head = model.to(device), head.to(device)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        for x in DataLoader(torch.randn(8, 2, 5, 16), pin_memory=device == "cuda"):  # type: ignore[arg-type]
            loss = F.cross_entropy(head(model(x[0].to(device)))[:, 0], torch.tensor([1, 3], device=device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])

    torch.testing.assert_close(train("cuda"), train("cpu"))


class Marked(nn.Parameter):
    """A parameter of a user's class."""


def test_a_local_parameter_takes_remote_data() -> None:
    layer = nn.Linear(3, 2)
    layer.weight.mark = "kept"  # type: ignore[assignment]
    layer.bias = Marked(torch.zeros(2))
    weight, here = layer.weight, torch.arange(6.0).view(2, 3)
    layer.weight.data = here.cuda()
    layer.bias.data = torch.ones(2, device="cuda")
    assert layer.weight is weight and weight.is_leaf and weight.requires_grad and weight.mark == "kept"
    assert type(layer.bias).__name__ == "Marked" and isinstance(layer.bias, Marked)
    assert {p.device.type for p in layer.parameters()} == {"remote"}
    layer(torch.ones(1, 3, device="cuda")).sum().backward()
    assert torch.equal(layer.weight.grad.cpu(), torch.ones(2, 3))
    assert torch.equal(layer.weight.data.cpu(), here)
    # Local data stay local, and what is read through `data` has no history.
    local = nn.Parameter(torch.zeros(2))
    local.data = torch.ones(2)
    assert local.data.device.type == "cpu" and not local.data.requires_grad and local.sum() == 2


def test_files_of_safetensors_go_there_too(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    for device in ("cuda", "cuda:0", 0):
        found = load_file(tmp_path / "x.safetensors", device=device)["a"]
        assert found.device.type == "remote" and found.tolist() == [1, 1]


def test_a_device_context_is_of_a_class() -> None:
    again = torch.cuda.device(0)
    assert isinstance(again, torch.cuda.device) and not isinstance("cuda", torch.cuda.device)
    with again, again, torch.cuda.device_of(torch.ones(1)), torch.cuda.device(None):
        assert torch.ones(1, device="cuda").device.type == "remote"

    class Mine(torch.cuda.device):  # type: ignore[misc]
        pass

    with Mine("cuda:0"):
        assert torch.ones(1, device="cuda").device.type == "remote"


def test_what_fails_half_way_leaves_nothing(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = as_cuda.replace_cuda

    def press() -> None:
        own()
        raise KeyboardInterrupt

    fresh_session(world_size=1)
    dr.shutdown()
    zeros, synchronize = torch.zeros, torch.cuda.synchronize
    monkeypatch.setattr(as_cuda, "replace_cuda", press)
    with pytest.raises(KeyboardInterrupt):
        fresh_session(world_size=1, as_cuda=True)
    assert not dr.is_initialized()
    assert torch.zeros is zeros and torch.cuda.synchronize is synchronize
    assert not torch.cuda.is_available()
    monkeypatch.undo()
    dr.init_master_worker(world_size=2, as_cuda=True, timeout=STARTING)


def test_it_asks_for_a_word_it_knows(fresh_session: Callable[..., Any]) -> None:
    with pytest.raises(
        dr.errors.ConfigurationError, match='as_cuda= is True, "all", "force" or "force all", got'
    ):
        fresh_session(as_cuda="yes")
    fresh_session(world_size=2, simulate_cuda=2, as_cuda="all")
    assert torch.cuda.device_count() == 4
    assert torch.zeros(1, device="cuda:3").place == dr.place(1, "cuda:1")
    for k in range(4):
        number = torch.zeros(1, device=k).get_device()
        assert number == k and torch.zeros(1, device=number).place == torch.zeros(1, device=f"cuda:{k}").place
    torch.cuda.set_device(2)
    assert torch.zeros(1, device="cuda").place == dr.place(1, "cuda:0") and torch.cuda.current_device() == 2
    dr.shutdown()
    with pytest.raises(dr.errors.ConfigurationError, match="no take-over is on"):
        dr.takeover()
    dr.init_master_worker(world_size=2, as_cuda=True, timeout=STARTING)


def test_a_process_with_gpus_of_its_own_is_asked_and_forced(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for asked, remedy in ((True, '"force"'), ("all", '"force all"')):
        with pytest.raises(
            dr.errors.ConfigurationError, match=f"has 3 GPUs of its own.* write as_cuda={remedy}"
        ):
            fresh_session(as_cuda=asked)
    fresh_session(world_size=1, simulate_cuda=2, as_cuda="force all", quiet=False)
    assert "and nothing here reaches 3 GPUs of this process" in capsys.readouterr().out
    assert torch.cuda.device_count() == 2
    assert torch.zeros(1, device="cuda:1").place == dr.place(0, "cuda:1")
    dr.shutdown()
    assert torch.cuda.device_count() == 3
    monkeypatch.undo()
    dr.init_master_worker(world_size=2, as_cuda=True, timeout=STARTING)


def test_the_traceback_of_a_script_begins_in_the_script(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(
        'import torch\nbad = torch.ones(3, device="cuda")[torch.tensor([9], device="cuda")]\nbad.tolist()\n',
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "distruntime", "run", "--as-cuda", str(path)],
        env=worker_environment(1),
        capture_output=True,
        text=True,
        timeout=STARTING,
        check=False,
    )
    assert done.returncode == 1
    told = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert told[1] == f'  File "{path}", line 3, in <module>'
    assert not any("runpy" in line or "__main__.py" in line for line in told)
    assert any(line.startswith("IndexError: index 9") for line in told)
