"""What the preamble "cuda" does. torch.compile finds it here, as a script takes the place of `__main__`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.overrides import TorchFunctionMode


class CudaIsTheCpu(TorchFunctionMode):
    """Lets "cuda" mean the CPU in every call of torch."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(on_cpu, args), **{name: on_cpu(value) for name, value in (kwargs or {}).items()})


def on_cpu(value: object) -> object:
    """Return the CPU for a GPU's name, and everything else as it is."""
    is_gpu = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
    return torch.device("cpu") if is_gpu else value
