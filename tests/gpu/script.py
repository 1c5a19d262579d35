"""What a script for a GPU does, as it is. Check 29 runs it with a GPU here, and with one on a worker."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

found: dict[str, Any] = {}


def total(tensor: torch.Tensor) -> float:
    return tensor.double().abs().sum().item()


def switches() -> None:
    a, b = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = a @ b
    torch.backends.cuda.matmul.allow_tf32 = True
    fast = a @ b
    torch.backends.cuda.matmul.allow_tf32 = False
    found["TF32 is another product"] = not torch.equal(exact, fast)
    found["TF32 off again"] = torch.equal(exact, a @ b)
    found["products"] = [total(exact), total(fast)]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    x, w = torch.randn(4, 8, 32, 32, device="cuda"), torch.randn(16, 8, 3, 3, device="cuda")
    torch.backends.cudnn.allow_tf32 = False
    found["convolution"] = total(F.conv2d(x, w))
    q = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.float16)
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend):
            found[f"attention, {backend.name}"] = total(F.scaled_dot_product_attention(q, q, q))


def draws() -> None:
    torch.cuda.manual_seed(3)
    first = torch.rand(5, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(5, device="cuda")
    torch.cuda.set_rng_state(state)
    found["the state again"] = torch.equal(second, torch.rand(5, device="cuda"))
    found["draws"] = [*first.tolist(), *second.tolist()]
    generator = torch.Generator(device="cuda").manual_seed(7)
    found["a generator"] = torch.randperm(10, generator=generator, device="cuda").tolist()


def times() -> None:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.Stream()
    x = torch.randn(1024, 1024, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        began.record()
        for _ in range(10):
            x = x @ x / 32
        ended.record()
    torch.cuda.current_stream().wait_stream(stream)
    found["behind the stream"] = total(x)
    ended.synchronize()
    found["time passed"] = 0 < began.elapsed_time(ended) < 10_000
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    found["allocated"] = torch.cuda.memory_allocated() - before
    del block
    torch.cuda.synchronize()
    found["given back"] = torch.cuda.memory_allocated() - before
    found["peak"] = torch.cuda.max_memory_allocated() - before
    major, _ = torch.cuda.get_device_capability()
    found["the card"] = [torch.cuda.get_device_name(), major, torch.cuda.device_count()]


def trained(name: str, dtype: torch.dtype | None, compiled: bool = False) -> None:
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    model: Any = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10)).to("cuda")
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(256, 32, generator=draw), torch.randint(0, 10, (256,), generator=draw))
    losses = []
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=32, pin_memory=True):
            x, y = x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)
            with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
                out = run(x)
                loss = F.cross_entropy(out, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
    found[f"{name}: what comes out"] = str(out.dtype)
    found[f"{name}: losses"] = losses
    found[f"{name}: scale"] = scaler.get_scale()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt"
        torch.save(model.state_dict(), file)
        loaded = torch.load(file, weights_only=True)["0.weight"]
        found[f"{name}: loaded where it was"] = loaded.device == model[0].weight.device
        on_cpu = torch.load(file, map_location="cpu", weights_only=True)
        found[f"{name}: weights"] = sum(total(tensor) for tensor in on_cpu.values())


warnings.simplefilter("ignore")
torch.manual_seed(0)
switches()
draws()
times()
trained("float32", None)
trained("bfloat16", torch.bfloat16)
trained("float16", torch.float16)
trained("compiled", None, compiled=True)
trained("compiled, bfloat16", torch.bfloat16, compiled=True)
print("found", json.dumps(found))
