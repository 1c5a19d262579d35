"""Take-over: scripts that say "cuda" run on workers as they are, and numbers are those of a CPU."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
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


@pytest.fixture(scope="module", autouse=True)
def _taken() -> Iterator[None]:
    dr.shutdown()
    # What every session changes is there before and after.
    install()
    random = torch.cuda.random.get_rng_state
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    factories = {name: getattr(torch, name) for name in ("zeros", "load", "autocast", "is_autocast_enabled")}
    methods = torch.Tensor.to, torch.Tensor.__dict__.get("new_zeros"), nn.Module.to, torch.autocast.__init__
    dr.init_master_worker(world_size=2, as_cuda=True, timeout=STARTING)
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


def test_what_would_be_a_lie_raises_and_what_pretends_is_listed() -> None:
    for ask, text in (
        (torch.cuda.CUDAGraph, "run the step without it"),
        (torch.cuda.cudart, "mem_get_info"),
        (lambda: torch.cuda.graph(None), "run the step without it"),  # type: ignore[arg-type]
    ):
        with pytest.raises(dr.NotSupportedError, match=text):
            ask()
    with pytest.raises(
        RuntimeError, match=r'invalid device ordinal: cuda:1 .*cuda:0 is node 0 cpu.*as_cuda="all"'
    ):
        torch.zeros(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2).cuda(3)
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.range_pop()
    assert dr.takeover()["torch.cuda.nvtx.range_push"] == 1


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


def test_a_script_for_cuda_runs_unchanged(tmp_path: Path) -> None:
    """Mixed precision, a scaler, pinned loading, a fused optimizer and a checkpoint, as people write them."""
    printed, saved = [], []
    for command in ((sys.executable,), (sys.executable, "-m", "distruntime", "run", "--as-cuda")):
        checkpoint = tmp_path / f"{len(command)}.pt"
        (tmp_path / "train.py").write_text(f"CHECKPOINT = {str(checkpoint)!r}\n{TRAINS}")
        done = subprocess.run(
            [*command, str(tmp_path / "train.py")],
            env=worker_environment(1),
            capture_output=True,
            text=True,
            timeout=STARTING,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines()[-1])
        saved.append(torch.load(checkpoint))
    assert printed[0].split()[-1] == "cpu" and printed[1].split()[-1] == "cuda"
    assert printed[0].split()[1] == printed[1].split()[1]
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
    own = as_cuda._replace_cuda

    def press() -> None:
        own()
        raise KeyboardInterrupt

    fresh_session(world_size=1)
    dr.shutdown()
    zeros, synchronize = torch.zeros, torch.cuda.synchronize
    monkeypatch.setattr(as_cuda, "_replace_cuda", press)
    with pytest.raises(KeyboardInterrupt):
        fresh_session(world_size=1, as_cuda=True)
    assert not dr.is_initialized()
    assert torch.zeros is zeros and torch.cuda.synchronize is synchronize
    assert not torch.cuda.is_available()
    monkeypatch.undo()
    dr.init_master_worker(world_size=2, as_cuda=True, timeout=STARTING)


def test_it_asks_for_a_word_it_knows(fresh_session: Callable[..., Any]) -> None:
    with pytest.raises(dr.ConfigurationError, match='as_cuda= is True, "all" or "force"'):
        fresh_session(as_cuda="yes")
    fresh_session(world_size=2, simulate_cuda=2, as_cuda="all")
    assert torch.cuda.device_count() == 4
    assert torch.zeros(1, device="cuda:3").place == dr.place(1, "cuda:1")
    torch.cuda.set_device(2)
    assert torch.zeros(1, device="cuda").place == dr.place(1, "cuda:0") and torch.cuda.current_device() == 2
    dr.shutdown()
    with pytest.raises(dr.ConfigurationError, match="no take-over is on"):
        dr.takeover()
    dr.init_master_worker(world_size=2, as_cuda=True, timeout=STARTING)
