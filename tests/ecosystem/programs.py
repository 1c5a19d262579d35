"""Scripts that say "cuda": each runs as it is on this machine's CPU, and by `distruntime run --as-cuda`.

They are in as_cuda/, as users write such scripts. The last line of each is JSON: the numbers that both runs
must agree on, and `where`, the device on which the script has found its own tensors.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "as_cuda"
# What 16 bits allow.
HALF = 2e-2
# A script that trains makes more values than this on its worker. One that only sends its data there does not.
FEW = 300
# The last line that `distruntime run --as-cuda` says.
SUMMARY = re.compile(r"(\d+) values were made there, and this process waited for them (\d+) times?. (.*)")


@dataclass(frozen=True)
class Program:
    """One script. `library` is the name that pip knows."""

    file: str
    arguments: tuple[str, ...]
    library: str
    tried: str
    tolerance: float = 1e-4

    @property
    def name(self) -> str:
        return " ".join([self.file.removesuffix(".py"), *self.arguments])


def _script(file: str, library: str, tried: str, *arguments: str, tolerance: float = 1e-4) -> Program:
    return Program(file, arguments, library, tried, tolerance)


PROGRAMS = (
    _script("nanogpt.py", "torch", "nanoGPT's style: train, checkpoint, resume, sample"),
    _script("nanogpt.py", "torch", "the same with autocast", "--dtype", "bfloat16", tolerance=HALF),
    _script(
        "nanogpt.py", "torch", "the same with autocast and GradScaler", "--dtype", "float16", tolerance=HALF
    ),
    _script("mingpt.py", "torch", "minGPT's style: a trainer with callbacks, pinned loading, dropout"),
    _script("cleanrl_ppo.py", "gymnasium", "CleanRL's style: PPO on CartPole"),
    _script("mnist.py", "torch", "pytorch/examples' style: mnist, torch.accelerator, a loader's process"),
    _script("word_language_model.py", "torch", "pytorch/examples' style: an LSTM, a saved module"),
    _script("word_language_model.py", "torch", "the same with a Transformer", "--model", "Transformer"),
    _script("vae.py", "torch", "pytorch/examples' style: a VAE"),
    _script("dcgan.py", "torch", "pytorch/examples' style: a DCGAN"),
    _script("hf_trainer.py", "transformers", "Trainer: train, evaluate, save, resume, generate"),
    _script(
        "hf_trainer.py", "transformers", "the same with bf16 and checkpointing", "--bf16", tolerance=HALF
    ),
    _script(
        "accelerate_fp16.py", "accelerate", 'mixed_precision="fp16", state saved and loaded', tolerance=HALF
    ),
    _script("trl_sft.py", "trl", "SFTTrainer: train, save, resume"),
    _script("trl_dpo.py", "trl", "DPOTrainer with a reference model: train, save, resume"),
    _script("lightning_trainer.py", "lightning", "Trainer(): fit, best checkpoint, resume"),
    _script("lightning_trainer.py", "lightning", "the same", "--precision", "bf16-mixed", tolerance=HALF),
    _script("nnsight_patching.py", "nnsight", "read, change and patch a transformer's activations"),
    _script(
        "transformer_lens_patching.py", "transformer-lens", "cache, ablate heads, patch the residual stream"
    ),
)


@dataclass(frozen=True)
class Run:
    """What one run of a script has said."""

    numbers: dict[str, list[float | str]]
    where: str
    values: int = 0
    waits: int = 0
    pretended: str = ""
    error: str = ""


def flat(value: object) -> list[float | str]:
    """Return the numbers and words in what a script has printed."""
    if isinstance(value, list):
        return [number for item in value for number in flat(item)]
    return [float(value)] if isinstance(value, int | float) else [str(value)]


def read(status: int, printed: str, said: str) -> Run:
    """Return what a run has come to, from its output and its errors."""
    lines = printed.strip().splitlines()
    if status or not lines:
        words = said.strip().splitlines()
        return Run({}, "", error=words[-1][:160] if words else f"the process ended with status {status}")
    found = json.loads(lines[-1])
    where = found.pop("where")
    numbers = {name: flat(value) for name, value in found.items()}
    summary = SUMMARY.search(said)
    if summary is None:
        return Run(numbers, where)
    values, waits, pretended = summary.groups()
    names = pretended.removeprefix("Only pretended: ") if pretended.startswith("Only") else ""
    return Run(numbers, where, int(values), int(waits), names)


def run(program: Program, environment: dict[str, str], patience: float, *, as_cuda: bool) -> Run:
    """Run a script as its user would."""
    command = [sys.executable, *(("-m", "distruntime", "run", "--as-cuda") if as_cuda else ())]
    paths = [str(Path(__file__).parent / "site"), os.environ.get("PYTHONPATH", "")]
    # The line at the end of a run says how much was remote.
    kept = {name: value for name, value in environment.items() if name != "DISTRUNTIME_QUIET"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*command, str(FOLDER / program.file), *program.arguments],
                env={
                    **{name: value for name, value in os.environ.items() if name != "DISTRUNTIME_QUIET"},
                    **kept,
                    "PYTHONPATH": os.pathsep.join(path for path in paths if path),
                    # What a script leaves goes with the folder.
                    "TMPDIR": folder,
                },
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=patience,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Run({}, "", error=f"it ran longer than {patience:g} s")
    if os.environ.get("ECOSYSTEM_VERBOSE"):
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    return read(done.returncode, done.stdout, done.stderr)


def judge(here: Run, there: Run, worst: float, tolerance: float) -> str:
    """Return what is wrong with a run by `--as-cuda`; nothing if it did the same work on the worker."""
    if here.error:
        return f"fails here too: {here.error}"
    if there.error:
        return f"fails: {there.error}"
    if not here.where.startswith("cpu"):
        return f"the run on this machine was on {here.where}"
    if not there.where.startswith("remote") or there.values < FEW:
        return (
            f"stays in this process: {there.values} values were made on the worker, its own on {there.where}"
        )
    if worst > tolerance or math.isnan(worst):
        return f"differs by {worst:.1e} of the largest number"
    return ""
