"""Weights at a worker: how fast they become a usable module, and what that costs the memory here.

The files have 2 GB. Both sides read them from the cache of the operating system, and touch each page.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import distruntime as dr

from .harness import Figure, daemon, in_turn

_LAYERS = 16
# The kernel counts the most memory anew when a 5 is written here.
_RESET = Path("/proc/self/clear_refs")


def _module(width: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))


def _write(folder: Path, width: int) -> int:
    """Write the weights of a module as a folder of files; return their bytes."""
    table = {}
    for k in range(_LAYERS):
        name = f"model-{k}.safetensors"
        save_file({f"{k}.weight": torch.full((width, width), float(k))}, folder / name)
        table[f"{k}.weight"] = name
    text = ", ".join(f'"{key}": "{name}"' for key, name in table.items())
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{text}}}}}', encoding="utf-8")
    return _LAYERS * width * width * 4


def _touched(model: torch.nn.Module) -> torch.Tensor:
    """Return a number that needs each weight."""
    return torch.stack([p.detach().sum() for p in model.parameters()]).sum()


def _here(folder: Path, width: int) -> float:
    """Return the seconds of reading the weights in this process into a module made on `meta`."""
    with torch.device("meta"):
        model = _module(width)
    started = time.perf_counter()
    found = {}
    for k in range(_LAYERS):
        found.update(load_file(folder / f"model-{k}.safetensors"))
    model.load_state_dict(found, assign=True)
    _touched(model).item()
    return time.perf_counter() - started


def _there(folder: Path, width: int) -> float:
    """Return the seconds of the same at a worker."""
    with torch.device("meta"):
        model = _module(width)
    started = time.perf_counter()
    dr.load(folder, node=0, into=model)
    _touched(model).item()
    return time.perf_counter() - started


def _peak() -> int:
    """Return the most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def alone(folder: str, width: int, address: str) -> None:
    """Load once, and print by how many bytes this process has grown. It has done nothing else."""
    with dr.init_master_worker(workers=[address], quiet=True):
        torch.ones(2, device="remote").sum().item()
        # What was the most before must not hide what comes now.
        if _RESET.exists():
            _RESET.write_text("5", encoding="utf-8")
        before = _peak()
        _there(Path(folder), width)
        print(_peak() - before)


def measure(quick: bool = False) -> list[Figure]:
    """Compare with reading here, and measure the growth in a process of its own."""
    width, rounds = (512, 2) if quick else (5760, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nbytes = _write(folder, width)
        with daemon() as address:
            with dr.init_master_worker(workers=[address], quiet=True):
                _there(folder, width)
                ratio, here, there = in_turn(
                    lambda: _here(folder, width), lambda: _there(folder, width), rounds
                )
            code = f"from benchmarks import weights; weights.alone({name!r}, {width}, {address!r})"
            told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        grown = int(told.stdout) / 1e6
    gigabytes = nbytes / 1e9
    return [
        Figure(
            "weights at a worker: speed against reading them here",
            ratio,
            "x",
            0.8,
            f"{gigabytes:.2f} GB in {there:.2f} s there, {here:.2f} s here",
            most=False,
        ),
        Figure("weights at a worker: growth of this process", grown, "MB", 100.0, f"{gigabytes:.2f} GB read"),
    ]
