"""What sleeps instead of working: layers that take a while on their workers, and a network that is slow.

Neither needs a processor. So a figure does not depend on how many there are, and who else uses them.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import distruntime as dr
from distruntime_worker.collectives.data_channel.gloo import Gloo


def _sleeps(x: torch.Tensor, pause: float) -> torch.Tensor:
    time.sleep(pause)
    return x + 0


_remote: Any = dr.remote(_sleeps)


class _Sleep(torch.autograd.Function):
    """Sleeps where its input is, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> Any:
        ctx.backward_pause = backward
        return _remote(x, forward) if forward else x + 0

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _remote(grads[0], ctx.backward_pause), None, None


class Sleeper(torch.nn.Module):
    """A layer whose forward pass takes `pause` seconds, and so does each half of its backward pass.

    One half is for its input, the other one for its weight.
    """

    def __init__(self, pause: float, size: int = 1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self._pause = pause

    def forward(self, x: torch.Tensor) -> Any:
        """Sleep."""
        weight = _Sleep.apply(self.weight, 0.0, self._pause)  # type: ignore[no-untyped-call]
        return _Sleep.apply(x, self._pause, self._pause) * weight.mean()  # type: ignore[no-untyped-call]


def slow_channel(pause: float) -> type[dr.distributed.DataChannel]:
    """Return gloo, with all_reduces that take `pause` seconds longer."""

    class Slow(dr.distributed.DataChannel):
        capabilities = Gloo.capabilities

        def __init__(self, membership: dr.distributed.Membership) -> None:
            super().__init__(membership)
            self._gloo = Gloo(membership)

        def send(self, data: torch.Tensor, to: int, tag: int) -> Any:
            return self._gloo.send(data, to, tag)

        def receive(self, data: torch.Tensor, source: int, tag: int) -> Any:
            return self._gloo.receive(data, source, tag)

        def broadcast(self, data: torch.Tensor, root: int) -> Any:
            return self._gloo.broadcast(data, root)

        def all_gather(self, output: torch.Tensor, data: torch.Tensor) -> Any:
            return self._gloo.all_gather(output, data)

        def all_reduce(self, data: torch.Tensor, op: dr.distributed.Reduction) -> Any:
            time.sleep(pause)
            return self._gloo.all_reduce(data, op)

        def abort(self) -> None:
            self._gloo.abort()

        def close(self) -> None:
            self._gloo.close()

    return Slow
