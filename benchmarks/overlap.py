"""DistributedDataParallel over a mesh on a slow network: a step against the longer thing that it does."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

import distruntime as dr

from . import floors
from .harness import Figure, seconds
from .sleeping import slow_channel

# A reduction takes so many seconds on the quick machine, and a layer's backward pass about as many.
SLOW, LAYERS = 0.05, 12
# The weight of a layer fills a bucket of its own: 1 MiB. Its input is a square of this size.
SIZE = 512


class Layer(torch.nn.Module):
    """A weight, after some products that have none."""

    one: torch.Tensor

    def __init__(self, products: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(SIZE))
        self.register_buffer("one", torch.eye(SIZE))
        self._products = products

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        for _ in range(self._products):
            x = x @ self.one
        return x @ self.weight


def _products(slow: float) -> int:
    """Return how many products take as long as a reduction, here and with one thread."""
    threads, one = torch.get_num_threads(), torch.eye(SIZE)
    torch.set_num_threads(1)
    took = min(seconds(lambda: one @ one) for _ in range(10))
    torch.set_num_threads(threads)
    return max(1, round(slow / took))


def measure(quick: bool) -> list[Figure]:
    """Return how much longer backward and reduction take together than the longer one of them."""
    # On a slower machine a reduction is longer, as issuing is.
    slow = SLOW * floors.slowness()
    dr.distributed.register_data_channel("slow", slow_channel(slow))
    products = _products(slow)
    with dr.init_master_worker(world_size=2, data_channel="slow", quiet=True):
        mesh = dr.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        lines = mesh.lines("dp")
        alone, replica = (
            torch.nn.Sequential(*(Layer(products) for _ in range(LAYERS))).to(mesh.device) for _ in range(2)
        )
        group = mesh.get_group("dp")
        model = DistributedDataParallel(
            replica, process_group=group, bucket_cap_mb=0.9, gradient_as_bucket_view=True
        )
        # Its buffers never change.
        model.require_forward_param_sync = False
        x = torch.ones(SIZE, SIZE, device=mesh.device, requires_grad=True)
        bucket = torch.ones(SIZE, SIZE, device=mesh.device)

        def forward() -> None:
            alone(x)
            dr.synchronize()

        def without() -> None:
            alone(x).sum().backward()
            dr.synchronize()

        def reduce() -> None:
            for _ in range(LAYERS):
                dr.lines.all_reduce(lines, bucket)
            dr.synchronize()

        def step() -> None:
            model(x).sum().backward()
            dr.synchronize()

        took: dict[str, float] = {}
        for name, work in {"forward": forward, "without": without, "reduce": reduce, "step": step}.items():
            # DDP makes its buckets anew after the first step.
            work()
            work()
            took[name] = min(seconds(work) for _ in range(2 if quick else 4))
    backward = took["without"] - took["forward"]
    longer = max(backward, took["reduce"])
    together = took["step"] - took["forward"]
    return [
        Figure(
            "DDP over a mesh, slow network",
            together / longer,
            "times the longer of backward and reduction",
            1.1,
            f"backward alone {backward:.2f} s, {LAYERS} reductions alone {took['reduce']:.2f} s, "
            f"both {together:.2f} s, one after the other {backward + took['reduce']:.2f} s",
        )
    ]
