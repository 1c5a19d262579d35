"""Many random programs on a mesh: `python tests/long/mesh_programs_many.py [seconds]`, with tests/ in the path."""

from __future__ import annotations

import sys
import time

import torch

import distruntime as dr
from mesh_programs import Program


def main(seconds: float) -> None:
    torch.set_num_threads(1)
    done = read = 0
    for count in (1, 2):
        end = time.monotonic() + seconds / 2
        with dr.init_master_worker(world_size=2, simulate_cuda=count):
            mesh = dr.init_device_mesh("cuda", (2, count), mesh_dim_names=("dp", "tp"))
            while time.monotonic() < end:
                read += Program(done, mesh).run()
                done += 1
            dr.synchronize()
    print(f"{done} programs, {read} values read, all right")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
