"""Ranges with a name on a stream: `dr.nvtx`. NVTX shows them in nsys, if this torch has it.

A trace needs nothing of this: it knows the ranges by the names of their instructions.
"""

from __future__ import annotations

import threading

import torch


class _Open(threading.local):
    """The ranges that are open in this thread, the innermost last. A stream has a thread of its own."""

    def __init__(self) -> None:
        self.names: list[str] = []


_open = _Open()
# A torch without CUDA has a stub that raises.
_has_nvtx = hasattr(torch._C, "_nvtx")


def range_push(name: str) -> None:
    """Begin a range."""
    _open.names.append(name)
    if _has_nvtx:
        torch.cuda.nvtx.range_push(name)


def range_pop(name: str) -> None:
    """End the innermost range of a name, and those inside it, whose end was dropped.

    Do nothing if its begin was dropped.
    """
    names = _open.names
    while name in names:
        innermost = names.pop()
        if _has_nvtx:
            torch.cuda.nvtx.range_pop()
        if innermost == name:
            return


def mark(name: str) -> None:
    """Name a moment."""
    if _has_nvtx:
        torch.cuda.nvtx.mark(name)
