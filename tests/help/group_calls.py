"""The same collective under plain torch.distributed and from the master: what a case is, how each side runs
it. Imports no distruntime.

`python group_calls.py SIZE` runs every case of a size in processes of their own over gloo and writes the
results to standard output.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
MOVED = (*FLOATS, *INTEGERS, torch.int16, torch.bool, *COMPLEX)
BYTES = (torch.int16, *COMPLEX)
ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
BITS = ("BAND", "BOR", "BXOR")
# 2, 3 and 4 members can share the first dimension.
SHAPE = (12, 2)


@dataclass(frozen=True)
class Case:
    """One call. `op` is a ReduceOp's name, or empty; `ranks` are the members of a subgroup, or empty."""

    name: str
    dtype: torch.dtype
    op: str = ""
    root: int = 0
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = [
            self.name,
            str(self.dtype)[6:],
            self.op,
            f"root {self.root}" if self.root else "",
            f"of {self.ranks}" if self.ranks else "",
        ]
        return " ".join(word for word in words if word)


def cases(size: int) -> Iterator[Case]:
    """Every collective x ReduceOp x dtype of a group of that size; subgroups for one dtype each."""
    reducing = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
    moving = (
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
        "gather",
        "scatter",
        "all_to_all",
        "all_to_all_single",
        "all_to_all_uneven",
    )
    kinds = [(op, dtype) for op in ARITHMETIC for dtype in (*FLOATS, *INTEGERS)] + [
        (op, dtype) for op in BITS for dtype in INTEGERS
    ]
    kinds += [("SUM", dtype) for dtype in COMPLEX] + [("AVG", dtype) for dtype in FLOATS]
    kinds += [(op, torch.bool) for op in ("PRODUCT", "MIN", "MAX", *BITS)]
    for (op, dtype), name in itertools.product(kinds, reducing):
        yield Case(name, dtype, op, root=size - 1 if name == "reduce" else 0)
    for name, dtype in itertools.product(moving, MOVED):
        yield Case(name, dtype)
    for name in ("broadcast", "gather", "scatter"):
        yield Case(name, torch.float32, root=size - 1)
    yield Case("barrier", torch.float32)
    if size > 2:
        for name in (*reducing, *moving):
            yield Case(
                name,
                torch.float32,
                "SUM" if name in reducing else "",
                root=1 if name in ("broadcast", "reduce") else 0,
                ranks=(0, size - 1),
            )


def members(case: Case, size: int) -> list[int]:
    return list(case.ranks) if case.ranks else list(range(size))


def value(dtype: torch.dtype, *seeds: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """Equal on both sides. Small whole numbers: sums and products of any order are exact, so results must be
    equal bit for bit.
    """
    generator = torch.Generator().manual_seed(hash(seeds) & 0xFFFF)
    numbers = torch.randint(0, 4, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(numbers.double(), (3 - numbers).double()).to(dtype)
    return numbers.to(dtype)


def splits(n: int) -> list[list[int]]:
    """How many rows go from each member to each: unequal, and some none."""
    rows = [[(i + 2 * j) % 4 for j in range(n)] for i in range(n)]
    return rows


def inputs(case: Case, rank: int, n: int) -> Any:
    """What a member puts in, by its rank in the group."""
    make = lambda *seeds, shape=SHAPE: value(case.dtype, rank + 1, *seeds, shape=shape)  # noqa: E731
    match case.name:
        case "scatter" | "reduce_scatter" | "all_to_all":
            return [make(k) for k in range(n)]
        case "all_to_all_uneven":
            return make(shape=(sum(splits(n)[rank]), 2))
        case "barrier":
            return None
        case _:
            return make()


def outputs(case: Case, rank: int, n: int) -> Any:
    """What a member's results are written into, which holds other numbers before."""
    make = lambda shape=SHAPE: value(case.dtype, 100, rank, shape=shape)  # noqa: E731
    match case.name:
        case "all_gather" | "gather" | "all_to_all":
            return [make() for _ in range(n)]
        case "all_gather_into_tensor":
            return make((SHAPE[0] * n, *SHAPE[1:]))
        case "reduce_scatter_tensor":
            return make((SHAPE[0] // n, *SHAPE[1:]))
        case "all_to_all_uneven":
            return make((sum(row[rank] for row in splits(n)), 2))
        case "scatter" | "reduce_scatter" | "all_to_all_single":
            return make()
        case _:
            return None


def under_torch(case: Case, rank: int, n: int, group: Any, root: int) -> list[torch.Tensor]:
    """Run a case as one member; return what it ends up with, its inputs included."""
    given, into = inputs(case, rank, n), outputs(case, rank, n)
    # torch's gloo has no word for these dtypes, but only bytes move anyway.
    if not case.op and case.dtype in BYTES:
        given, into = _viewed(given, torch.uint8), _viewed(into, torch.uint8)
    op = getattr(dist.ReduceOp, case.op) if case.op else None
    at_root = rank == case.root
    match case.name:
        case "all_reduce":
            dist.all_reduce(given, op, group=group)
        case "reduce":
            before = given.clone()
            dist.reduce(given, root, op, group=group)
            if not at_root:
                # gloo leaves intermediate sums in it.
                given = before
        case "broadcast":
            dist.broadcast(given, root, group=group)
        case "reduce_scatter":
            dist.reduce_scatter(into, given, op, group=group)
        case "reduce_scatter_tensor":
            dist.reduce_scatter_tensor(into, given, op, group=group)
        case "all_gather":
            dist.all_gather(into, given, group=group)
        case "all_gather_into_tensor":
            dist.all_gather_into_tensor(into, given, group=group)
        case "gather":
            dist.gather(given, into if at_root else None, root, group=group)
        case "scatter":
            dist.scatter(into, given if at_root else None, root, group=group)
        # gloo's process group has it for one tensor only, so it is compared with its definition.
        case "all_to_all":
            for k in range(n):
                dist.scatter(
                    into[k], given if k == rank else None, dist.get_global_rank(group, k), group=group
                )
        case "all_to_all_single":
            dist.all_to_all_single(into, given, group=group)
        case "all_to_all_uneven":
            rows = splits(n)
            dist.all_to_all_single(into, given, [row[rank] for row in rows], rows[rank], group=group)
        case "barrier":
            dist.barrier(group)
    return [t.view(case.dtype) for t in _flat([given, into])]


def _viewed(values: Any, dtype: torch.dtype) -> Any:
    if isinstance(values, list):
        return [_viewed(v, dtype) for v in values]
    return values if values is None else values.view(dtype)


def _flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [t for v in values or [] if v is not None for t in _flat(v)]


# Each case has the results of each rank.
Results = dict[Case, list[list[torch.Tensor]]]


def expected(*sizes: int) -> subprocess.Popen[bytes]:
    """Start plain torch.distributed on every case of these sizes, in processes of its own; see `collect`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, sizes)], stdout=subprocess.PIPE, env=environment
    )


def collect(process: subprocess.Popen[bytes], timeout: float = 110.0) -> dict[int, Results]:
    """Block until the results are there, by size."""
    # The end of the block closes the pipe, also where the results come too late.
    assert process.stdout is not None
    with process.stdout:
        written, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0
    results: dict[int, Results] = pickle.load(io.BytesIO(written))
    return results


def _member(rank: int, size: int, path: str) -> None:
    torch.set_num_threads(1)
    # torch has newer names for some of these.
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{path}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = {}
    groups: dict[tuple[int, ...], Any] = {(): dist.group.WORLD}
    for case in cases(size):
        ranks = members(case, size)
        if case.ranks not in groups:
            groups[case.ranks] = dist.new_group(ranks)
        if rank in ranks:
            group = groups[case.ranks]
            found[case] = under_torch(case, ranks.index(rank), len(ranks), group, ranks[case.root])
    Path(path, f"result-{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _results(size: int) -> Results:
    with tempfile.TemporaryDirectory() as path:
        # torch is imported here, and has no threads yet, so the members need not import it again.
        fork = multiprocessing.get_context("fork")
        members_ = [fork.Process(target=_member, args=(k, size, path)) for k in range(size)]
        for process in members_:
            process.start()
        for process in members_:
            process.join()
        assert [process.exitcode for process in members_] == [0] * size
        by_rank = [pickle.loads(Path(path, f"result-{k}").read_bytes()) for k in range(size)]
    return {case: [by_rank[k][case] for k in members(case, size)] for case in cases(size)}


def _main(*sizes: int) -> None:
    sys.stdout.buffer.write(pickle.dumps({size: _results(size) for size in sizes}))


if __name__ == "__main__":
    # What is pickled must have a module that others find.
    import group_calls

    group_calls._main(*map(int, sys.argv[1:]))
