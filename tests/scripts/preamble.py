"""Runs a script behind preambles of the lane: python preamble.py KIND[+KIND] SCRIPT [ARGUMENT ...].

"seed" seeds Python, numpy and torch once, for a script that does not. "draws" also seeds torch anew for each
operator that draws, by its number. For a GPU's generator is not the CPU's, and a worker's is not this
process's. So a script that draws on its device, for dropout say, draws alike wherever its tensors live.
"sums" lets torchvision read files of a data set that were made here, whose sums are not the published ones.
"cuda" is for a script that knows no other word: without a GPU, and without take-over, it then means the CPU.

A notebook (.ipynb) runs cell after cell in IPython, as a user would run it.
"""

from __future__ import annotations

import importlib
import random
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from cuda_word import CudaIsTheCpu
from torch.utils._python_dispatch import TorchDispatchMode

_seed = torch.manual_seed
# torch says that it draws. It chooses a kernel only, and for local tensors below what a mode sees.
_NO_DRAW = torch.ops.aten._fused_sdp_choice.default


class Draws(TorchDispatchMode):
    """Seeds torch, here and on the workers, before each operator that draws."""

    count = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        # A generator of the script's own has a state of its own.
        own = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
        if torch.Tag.nondeterministic_seeded in func.tags and func is not _NO_DRAW and not own:
            self.count += 1
            _seed(self.count)
        return func(*args, **kwargs)


def run_script(path: str) -> None:
    if not path.endswith(".ipynb"):
        runpy.run_path(path, run_name="__main__")
        return
    # Only a notebook needs IPython, which takes a second to import.
    terminal = importlib.import_module("IPython.terminal.interactiveshell")
    shell = terminal.TerminalInteractiveShell.instance()
    shell.safe_execfile_ipy(path, raise_exceptions=True)


def accept_sums() -> None:
    from torchvision.datasets import utils

    utils.check_md5 = lambda *args, **kwargs: True


def main(kinds: str, script: str, *arguments: str) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    wanted = kinds.split("+")
    if "sums" in wanted:
        accept_sums()
    with ExitStack() as stack:
        if "draws" in wanted:
            stack.enter_context(Draws())
        if "cuda" in wanted and not torch.cuda.is_available():
            stack.enter_context(CudaIsTheCpu())
        run_script(script)


if __name__ == "__main__":
    main(*sys.argv[1:])
