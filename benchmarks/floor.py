"""Op by op, drained, on one worker, against what torch itself charges: an empty `__torch_dispatch__` plus
making a wrapper.
"""

from __future__ import annotations

from typing import Any

import torch

import distruntime as dr

from .harness import Figure, in_turn, seconds

OPERATIONS = 30_000


class Empty(torch.Tensor):
    """The floor: dispatches to nothing and returns a wrapper that is there already."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            (20, 20),
            strides=(20, 1),
            storage_offset=0,
            dtype=torch.float32,
            device=torch.device("lazy", 5),
            storage_size=1 << 50,
        )

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return EMPTY


EMPTY: Any = Empty()


def measure(quick: bool) -> list[Figure]:
    """Return the figure; one worker, started here."""
    count, rounds = (OPERATIONS // 10, 3) if quick else (OPERATIONS, 9)
    with dr.init_master_worker(world_size=1, quiet=True):
        x, y = torch.ones(20, 20, device="remote"), torch.ones(20, 20, device="remote")

        def drained() -> float:
            def run() -> None:
                for _ in range(count):
                    x + y
                dr.synchronize()

            return seconds(run) / count

        def floor() -> float:
            return seconds(lambda: EMPTY + EMPTY, 10_000) + seconds(Empty, 10_000)

        drained()
        ratio, ours, theirs = in_turn(drained, floor, rounds)
    note = f"{ours * 1e6:.1f} us an operation ({1 / ours:,.0f} a second), floor {theirs * 1e6:.1f} us"
    return [Figure("operation, drained / floor", ratio, "x", 2.5, note)]
