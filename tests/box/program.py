"""The program that runs in every weather, as the master: it uses each way between master and workers, and
between workers, in rounds. What it computed is printed as one digest.

It prints a line of JSON for each thing that whoever changes the weather may wait for.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import distruntime as dr

# These are numbers of float32: 1 MB goes to a worker and comes back in a round, and 200 KB between workers.
UPLOAD, SHARED = 250_000, 50_000
OPERATIONS = 100


def say(**words: object) -> None:
    sys.stdout.write(json.dumps({"time": time.time(), **words}) + "\n")
    sys.stdout.flush()


def rounds(number: int, spmd: bool) -> Iterator[list[Tensor]]:
    """Compute on all nodes; yield what each round has computed, as local tensors."""
    torch.manual_seed(7)
    nodes = [node.index for node in dr.nodes()]
    places = [dr.place(node, "cpu") for node in nodes]
    group = dr.distributed.new_group(nodes)
    mesh = dr.init_device_mesh("cpu", (len(nodes),), mesh_dim_names=("data",))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to(mesh.device)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stages = [nn.Linear(32, 32).to(place) for place in places]
    pipe = dr.parallel.pipeline(stages, microbatches=4, schedule="1F1B", loss_fn=nn.functional.mse_loss)
    numbers = torch.Generator().manual_seed(3)
    weights = [torch.randn(32, 32, generator=numbers).to(place) / 6 for place in places]
    shared = [torch.randn(SHARED, generator=numbers).to(place) for place in places]

    @dr.spmd(mesh)
    def totals(x: Tensor) -> Tensor:
        y = x * (dist.get_rank() + 1)
        dist.all_reduce(y)
        return y

    for k in range(number):
        say(at=f"round {k}")
        if not sys.stdin.readline():
            # Nobody is left who could say so, and a signal is on its way.
            signal.pause()
        found: list[Tensor] = []
        # Operations on each node, and what they came to.
        for weight in weights:
            x = weight.clone()
            for _ in range(OPERATIONS):
                x = torch.tanh(x @ weight)
            found.append(x.sum().cpu())
        # From here to a worker and back.
        there = torch.randn(UPLOAD, generator=numbers).to(places[k % len(places)])
        found.append(dr.fetch_async(there * 2).result(600))
        # From worker to worker, and all at once.
        dr.distributed.all_reduce(shared, group=group)
        shared = [x / len(places) + j for j, x in enumerate(shared)]
        moved = shared[k % len(places)].to(places[(k + 1) % len(places)])
        found += [x[::1000].cpu() for x in (*shared, moved)]
        # A step of FSDP2, one of a pipeline, and a call on each member of the mesh.
        batch = dr.from_shards([torch.randn(16, 64, generator=numbers) for _ in nodes], mesh)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        found += dr.shards(loss.detach())
        losses: list[Tensor] = []
        pipe.step(torch.randn(8, 32, generator=numbers), target=torch.zeros(8, 32), losses=losses)
        found += [one.cpu() for one in losses]
        x = torch.full((3,), float(k), device=mesh.device)
        # Where processes of their own cannot reach each other, a sum of the session's comes to the same.
        found.append(totals(x).cpu() if spmd else torch.full((3,), float(k)) * sum(range(1, len(nodes) + 1)))
        # A name for what is there, as the next master finds it.
        dr.publish("shared", {"shared": shared[0]})
        found.append(dr.lookup("shared")["shared"][::500].cpu())
        yield found
    dr.unpublish("shared")


def main(options: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    began = time.monotonic()
    digest, step = hashlib.sha256(), began
    lengths: list[float] = []
    try:
        dr.init_master_worker(backend="zmq", **options["begin"])
        say(at="session", hosts=[node.host for node in dr.nodes()], seconds=time.monotonic() - began)
        for found in rounds(options["rounds"], options.get("spmd", True)):
            for tensor in found:
                digest.update(tensor.detach().contiguous().numpy().tobytes())
            lengths.append(round(time.monotonic() - step, 2))
            step = time.monotonic()
        dr.shutdown()
    except Exception as error:
        say(failed=f"{type(error).__name__}: {error}", seconds=time.monotonic() - began)
        try:
            dr.shutdown()
        except Exception as later:
            say(also=f"{type(later).__name__}: {later}")
        say(ended=True, seconds=time.monotonic() - began)
        return 1
    say(result=digest.hexdigest(), rounds=lengths, seconds=time.monotonic() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
