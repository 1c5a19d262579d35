"""Checks 22 to 24: two workers on one GPU, two workers with a GPU each, two GPUs of one worker."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch

import distruntime as dr
from box import ROOT, Box, Failed, busy, first_line, raised, until
from listing import check


def _example(name: str) -> ModuleType:
    """Import a program of examples/ by its file."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    argv, sys.argv = sys.argv, [name]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = argv
    return module


@check(
    22,
    "two workers on one GPU",
    does=(
        "starts two workers that share the first GPU, copies between them, sums, and runs the README's "
        "example"
    ),
    failure=(
        "finding A1: NCCL refuses two ranks on one card, so copies and collectives between such workers must "
        "go through the host (gloo). Look at distruntime/collectives/data_channels.py (`name_for`), which "
        "knows the cards by their uuid, and at `share_of_gpus` in distruntime/cluster/local_workers.py."
    ),
    seconds=90,
    one_card=True,
)
def one_card(box: Box) -> None:
    with box.session(world_size=2) as places:
        other = box.accelerators(1)[0]
        box.saw(dr.nodes())
        x = torch.arange(4.0, device=places[0])
        moved = x.to(other)
        box.require(moved.cpu().tolist() == [0, 1, 2, 3], "a copy to the other worker arrived changed")
        back = x.to(node=1).to(places[0])  # type: ignore[call-overload]
        box.require(back.cpu().tolist() == [0, 1, 2, 3], "a copy there and back arrived changed")
        sums = [torch.ones(5, device=places[0]), torch.full((5,), 2.0, device=other)]
        dr.distributed.all_reduce(sums, group=dr.distributed.new_group([places[0], other]))
        box.require([t.cpu().tolist() for t in sums] == [[3.0] * 5] * 2, "all_reduce gave a wrong sum")
        box.saw("copies and a sum between both workers are right")
        model = torch.nn.Linear(512, 512).to(places[0])
        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(torch.randn(64, 512, device=places[0])).square().mean()
        loss.backward()
        optimizer.step()
        box.saw(f"the README's model: {loss!r}")
    for name in (
        "01_rfc",
        "07_pipeline",
        *(["06_data_parallel"] * (importlib.util.find_spec("sklearn") is not None)),
    ):
        ended = box.child(str(ROOT / "examples" / f"{name}.py"))
        text = (ended.stdout + ended.stderr).strip()
        box.saw(f"examples/{name}.py ended with {ended.returncode}: {(text.splitlines() or [''])[-1]}")
        # These compare with CPU kernels, whose sums differ from a GPU's in the last digits.
        box.require(
            ended.returncode == 0 or "largest difference" in text, f"examples/{name}.py:\n{text[-1500:]}"
        )


@check(
    23,
    "NCCL between two workers",
    does="runs the suite of data channels on NCCL, kills a member, and poisons one",
    failure=(
        "a collective of NCCL is wrong, or a member's fault reaches the others as a value (B1), ends their "
        "processes (B2), or lets them wait for half an hour (C2). `gather` and `scatter` that fail at all "
        "but the root are C1. Look at worker/distruntime_worker/collectives/data_channel/torch_group.py and "
        "collectives/operation.py."
    ),
    seconds=120,
    needs=("cuda", "two GPUs"),
)
def nccl(box: Box) -> None:
    from distruntime.testing import check_data_channel

    began = time.monotonic()
    check_data_channel("nccl", sizes=(2,))
    box.saw(f"check_data_channel('nccl', sizes=(2,)) passed in {time.monotonic() - began:.0f} s")
    with box.session(world_size=2, data_channel="nccl") as places:
        ends = [places[0], box.accelerators(1)[0]]
        group = dr.distributed.new_group(ends)
        good = [torch.ones(4, device=place) for place in ends]
        dr.distributed.all_reduce(good, group=group)
        box.require([t.tolist() for t in good] == [[2.0] * 4] * 2, "all_reduce gave a wrong sum")
        healthy = torch.ones(4, device=ends[0])
        # It runs out of memory, and so its value is poisoned.
        poisoned = torch.ones(1 << 50, device=ends[1])[:4]
        dr.distributed.all_reduce([healthy, poisoned], group=group)
        errors = [first_line(raised(lambda value=value: value.tolist())) for value in (healthy, poisoned)]
        healthy_read, poisoned_read = (error or "A VALUE" for error in errors)
        box.saw(f"a poisoned member: the healthy one reads {healthy_read}; itself {poisoned_read}")
        with suppress(dr.DistruntimeError, RuntimeError):
            dr.synchronize()
    box.require(all(errors), "a member's failure was taken for a value by the other (B1)")
    with box.session(world_size=2, data_channel="nccl") as places:
        ends, pids = [places[0], box.accelerators(1)[0]], [node.pid for node in dr.nodes()]
        values = [torch.ones(1 << 20, device=place) for place in ends]
        dr.distributed.all_reduce(values, group=(group := dr.distributed.new_group(ends)))
        dr.synchronize()
        # The other member is in the middle of the sum when this one dies.
        os.kill(pids[1], signal.SIGSTOP)
        try:
            dr.distributed.all_reduce(values, group=group)
        finally:
            os.kill(pids[1], signal.SIGKILL)
        began = time.monotonic()
        error = raised(lambda: values[0].sum().item())
        box.saw(f"a killed member: after {time.monotonic() - began:.1f} s {first_line(error) or 'A VALUE'}")
        box.require(error.startswith("NodeFailed"), f"expected NodeFailed, got {error[:300] or 'a value'}")
        until(lambda: dr.nodes()[1].state == "lost", 30, "the killed worker is lost")
        # It gives up what it has computed since. Another worker in its place knows nothing of that.
        state = dr.nodes()[0].state
        box.require(
            state != "lost" and os.path.exists(f"/proc/{pids[0]}"), f"the other worker went too (B2): {state}"
        )
        dr.restart(0, force=True)
        again = raised(lambda: torch.ones(2, device=dr.place(0, "cpu")).sum().item())
        box.require(not again, f"a worker that was restarted after another's death does not work: {again}")


@check(
    24,
    "two GPUs of one worker",
    does=(
        "copies and sums between two GPUs on streams, times events on the second, and trains on a mesh of "
        "both"
    ),
    failure=(
        "finding B4 (a sum of a group whose members are several GPUs of one worker is not ordered after the "
        "streams of all): worker/distruntime_worker/collectives/groups.py, operation.py. B6 (an event's time "
        "is that of the first GPU): `STAMP` in log/instructions.py. A wrong copy: values/streams.py. A wrong "
        "training: distruntime/mesh/."
    ),
    seconds=110,
    needs=("two GPUs",),
)
def two_cards(box: Box) -> None:
    trials = 5 if box.quick else 30
    wrong: dict[str, str] = {}
    with box.session() as places:
        a, b = places[:2]
        first, second = dr.Stream(a), dr.Stream(b)
        bad = 0
        for k in range(trials):
            with dr.stream(first):
                x = busy(a, 4, box.quick)[0, :4] * 0 + k
            with dr.stream(second):
                y = x.to(b) + 0
            del x
            with dr.stream(first):
                filler = [torch.full((4,), -1.0, device=a) for _ in range(8)]
            bad += y[0].item() != k
            del filler
        box.saw(f"copies from a stream of {a} to one of {b}: {bad} of {trials} wrong")
        if bad:
            wrong["copies between streams"] = f"{bad} of {trials}"
        _sums(box, (a, b), (first, second), trials, wrong)
        with dr.on(b):
            busy(b, 4, box.quick)[0, 0].item()
            start, end = (dr.Event(enable_timing=True) for _ in range(2))
            start.record()
            began = time.perf_counter()
            busy(b, 200, box.quick)
            end.record()
            dr.synchronize()
            wall, told = (time.perf_counter() - began) * 1e3, start.elapsed_time(end)
        box.saw(f"work on {b} took {wall:.0f} ms; its events say {told:.0f} ms")
        # The wall clock also counts what the master takes to issue it.
        if not 0.3 * wall - 5 < told < 1.2 * wall + 5:
            wrong["events of the second GPU"] = f"{told:.0f} ms for {wall:.0f}"
        _meshes(box, [a, b], wrong)
    box.require(not wrong, f"wrong: {wrong}")


def _sums(
    box: Box,
    places: tuple[dr.types.Place, dr.types.Place],
    streams: tuple[dr.Stream, dr.Stream],
    trials: int,
    wrong: dict[str, str],
) -> None:
    """Sum over a group of both GPUs, each on a stream of its own."""
    for backend in ("gloo", *(["nccl"] * (box.cuda and torch.distributed.is_nccl_available()))):
        try:
            group = dr.distributed.new_group(list(places), backend=backend)
        except dr.DistruntimeError as error:
            box.saw(f"a group with {backend}: {first_line(str(error))}")
            continue
        bad = [0, 0]
        for k in range(trials):
            with dr.stream(streams[0]):
                x = busy(places[0], 1, box.quick)[0, :4] * 0 + k
            with dr.stream(streams[1]):
                y = busy(places[1], 8, box.quick)[0, :4] * 0 + 1000
            with dr.stream(streams[1]), dr.stream(streams[0]):
                dr.distributed.all_reduce([x, y], group=group)
            for rank, value in enumerate((x, y)):
                with dr.stream(streams[rank]):
                    after = value * 1
                bad[rank] += after[0].item() != 1000 + k
        box.saw(f"all_reduce by {backend}, a stream for each GPU: {bad[0]} and {bad[1]} of {trials} wrong")
        if any(bad):
            wrong[f"all_reduce by {backend}"] = f"{bad} of {trials}"
        group.close()


def _meshes(box: Box, places: list[dr.types.Place], wrong: dict[str, str]) -> None:
    """Train on a mesh of both GPUs: data parallelism, tensor parallelism, FSDP2."""
    has: Callable[[str], Any] = importlib.util.find_spec
    kinds = {"data": "sklearn", "tp": "transformers", "fsdp": "transformers"}
    for name, package in kinds.items():
        if has(package) is None:
            box.leave_out(f"the mesh example {name}", f"needs the package {package}")
            continue
        mesh = dr.init_device_mesh(places, (2,), mesh_dim_names=("data" if name != "tp" else "tp",))
        try:
            losses, expected = {"data": _data_parallel, "tp": _tensor_parallel, "fsdp": _fsdp}[name](mesh)
        except (dr.DistruntimeError, RuntimeError, Failed) as error:
            wrong[f"mesh, {name}"] = first_line(f"{type(error).__name__}: {error}")
            box.saw(f"mesh, {name}: {error}")
            continue
        apart = max(abs(p - q) for p, q in zip(losses, expected, strict=True))
        box.saw(f"mesh, {name}: losses differ from the serial run's by {apart:.1e}")
        if apart > 1e-3:
            wrong[f"mesh, {name}"] = f"losses differ by {apart:.1e}"


def _data_parallel(mesh: dr.mesh.DeviceMesh) -> tuple[list[float], list[float]]:
    example = _example("09_mesh")
    return example.parallel(mesh)[0], example.serial()[0]


def _tensor_parallel(mesh: dr.mesh.DeviceMesh) -> tuple[list[float], list[float]]:
    from torch.distributed.tensor.parallel import parallelize_module

    example = _example("10_tensor_parallel")
    model = example.llama().to(mesh.device)
    parallelize_module(model, mesh, example.plan())
    losses = [loss.item() for loss in dr.fetch(example.train(model, mesh.device))]
    return losses, [loss.item() for loss in example.train(example.llama(), "cpu")]


def _fsdp(mesh: dr.mesh.DeviceMesh) -> tuple[list[float], list[float]]:
    from torch.distributed.fsdp import fully_shard

    example = _example("11_fsdp")
    model = example.llama().to(mesh.device)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    own = example.train(model, dr.from_shards(example.text.chunk(2), mesh))
    losses = [sum(loss.item() for loss in dr.shards(step)) / 2 for step in own]
    return losses, [loss.item() for loss in example.train(example.llama(), example.text)]
