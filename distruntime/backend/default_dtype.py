"""`torch.set_default_dtype` and what follows it: each place's tables of signatures.

A worker's own default dtype is float32 and stays so, as its sessions share it. What depends on this process's
default is said to it: see `operators/explicit.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..session.session import active


def install_default_dtype() -> None:
    """Have this process's places follow torch's default dtype, from now on.

    torch's functions are Python code that calls these two, whoever has imported them by name.
    """
    for name in ("_set_default_dtype", "_set_default_tensor_type"):
        setattr(torch._C, name, _followed(getattr(torch._C, name)))


def _followed(change: Callable[[object], None]) -> Callable[[object], None]:
    def changed(default: object) -> None:
        change(default)
        for session in list(active):
            session.places.follow_default_dtype()

    return changed
