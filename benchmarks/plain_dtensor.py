"""DTensor on this process's own tensors, as rank 0 of a mesh of two: `python -m benchmarks.plain_dtensor`.

It has a process of its own, as making a mesh of workers changes parts of DTensor. The world is torch's fake
one: nobody else is there, and what is measured here needs nobody.
"""

from __future__ import annotations

import sys

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from .mesh import SHAPES, Work, placed, quickest, tensor, works


def main() -> None:
    """Read which placement, operator and how often; print the seconds of one on local tensors, and on
    DTensors of them.
    """
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    table: dict[tuple[str, str], tuple[Work, Work]] = {}
    for name, shape in SHAPES.items():
        x, y, square = torch.ones(shape), torch.ones(shape), torch.ones(20, 20)
        whole = [tensor.DTensor.from_local(t, mesh, placed(name)) for t in (x, y)]
        local, distributed = (
            works(x, y, square),
            works(*whole, tensor.DTensor.from_local(square, mesh, placed("Replicate"))),
        )
        table.update({(name, op): (local[op], distributed[op]) for op in local})
    for line in sys.stdin:
        name, op, bursts = line.split()
        print(*(quickest(work, int(bursts)) for work in table[name, op]), flush=True)


if __name__ == "__main__":
    main()
