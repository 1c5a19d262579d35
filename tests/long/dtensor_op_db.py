"""Every float32 entry of PyTorch's operator database on DTensors over a mesh of two workers, and on torch's
own in one process.

    PYTHONPATH=.:worker:tests/help python tests/long/dtensor_op_db.py [--samples N] [--layouts N] [entry ...]

Each entry's sample inputs are laid out in every combination that `DTensorConverter` of torch's tests knows,
forward and backward, and compared with the plain operator. What does not come out right is compared with what
DTensor itself makes of it: on torch's `LocalTensor`, which plays both ranks, in a process where no mesh of
ours has been made. The exit code says whether anything is ours.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import signal
import subprocess
import sys
from itertools import chain
from typing import Any

import torch
import torch.distributed
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

import distruntime as dr
from dtensor_samples import RIGHT, Side, run_entry
from op_samples import entries

MEMBERS = 2
PATIENCE = 15  # seconds for one call: the rule of some views does not end, in torch 2.13
# What is ours and stays so, and why.
KNOWN = {
    "geqrf": "torch has no meta kernel of it; its fake tensors would compute it, on a device that is not "
    "this process's",
    "native_batch_norm": "its fake kernel takes what it keeps of an evaluation to be a GPU's",
    "_native_batch_norm_legit": "its fake kernel takes what it keeps of an evaluation to be a GPU's",
}


def _of_ranks(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [
        [t._local_tensors[rank] if isinstance(t, LocalTensor) else t for t in tensors]
        for rank in range(MEMBERS)
    ]


def _impatient(number: int, frame: Any) -> None:
    raise TimeoutError(f"no answer within {PATIENCE} s")


def _chosen(names: list[str]) -> list[Any]:
    return [op for op in entries(torch.float32) if not names or op.full_name in names]


def _plain(options: argparse.Namespace) -> None:
    """Write what torch's own DTensor makes of every entry, a line for each."""
    torch.distributed.init_process_group("fake", rank=0, world_size=MEMBERS)
    torch.autograd._enable_record_function(False)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (MEMBERS,))
    side = Side(mesh, _of_ranks, lambda: LocalTensorMode(frozenset(range(MEMBERS))), PATIENCE)
    for op in _chosen(options.entries):
        found = list(run_entry(op, side, options.samples, options.layouts))
        print(json.dumps([op.full_name, found]), flush=True)


def _kind(name: str, ours: str, theirs: str) -> str:
    if ours == RIGHT:
        return "right" if theirs == RIGHT else "right, where LocalTensor is not"
    if ours.startswith("NotSupportedError") and "would have different shapes" in ours:
        return "refused: DTensor would cut unevenly"
    if theirs == RIGHT:
        return f"known: {KNOWN[name]}" if name in KNOWN else "OURS"
    if ours == theirs:
        return "wrong in both" if ours.startswith("wrong") else "refused in the same words"
    return "not right in either, in other words"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("entries", nargs="*")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--layouts", type=int, default=16)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _impatient)
    if options.plain:
        _plain(options)
        return 0
    counts: collections.Counter[str] = collections.Counter()
    of_entries: collections.Counter[str] = collections.Counter()
    samples = 0
    other = subprocess.Popen(
        [sys.executable, __file__, "--plain", *sys.argv[1:]], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    with dr.init_master_worker(world_size=MEMBERS):
        side = Side(dr.init_device_mesh("cpu", (MEMBERS,)), patience=PATIENCE)
        for op in _chosen(options.entries):
            ours = list(run_entry(op, side, options.samples, options.layouts))
            with contextlib.suppress(
                Exception
            ):  # what failed and was not read, as the gradient of a result that could not be
                dr.synchronize()
            name, theirs = json.loads(other.stdout.readline())
            assert (name, [len(s) for s in theirs]) == (op.full_name, [len(s) for s in ours]), name
            samples += len(ours)
            kinds: collections.Counter[str] = collections.Counter()
            shown: collections.Counter[str] = collections.Counter()
            for mine, its in zip(chain(*ours), chain(*theirs)):
                kind = _kind(name, mine, its)
                kinds[kind] += 1
                if kind != "right":
                    shown[f"{kind}: {mine}" + (f" | LocalTensor: {its}" if its != mine else "")] += 1
            for text, count in sorted(shown.items()):
                print(f"  {name} ({count}): {text}", flush=True)
            counts.update(kinds)
            of_entries["; ".join(sorted(kinds)) or "no tensor among its operands"] += 1
    total = f"{sum(of_entries.values())} entries, {samples} samples, {sum(counts.values())} combinations"
    print(f"torch {torch.__version__}: {total}: {dict(counts)}\nentries: {dict(of_entries)}")
    return int(counts["OURS"] > 0)


if __name__ == "__main__":
    sys.exit(main())
