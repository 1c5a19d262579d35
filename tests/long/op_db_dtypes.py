"""Every entry of PyTorch's operator database in every other dtype, here and on a worker, with the count. Half
an hour; not in `make test`.

    PYTHONPATH=.:worker:tests/help python tests/long/op_db_dtypes.py [dtype ...]

Of what works locally, at least 98 % must agree: the exit code says whether it does.
"""

from __future__ import annotations

import collections
import sys

import torch

import distruntime as dr
from agree import Disagreement
from op_samples import entries, run_entry

SAMPLES = 20
DTYPES = (
    *("float64", "float16", "bfloat16", "complex64", "complex128", "complex32"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
    *("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"),
)
REQUIRED = 0.98


def _run(name: str) -> tuple[int, int, dict[str, str]]:
    """How many entries agreed, how many raise on both sides, and what differs in the others."""
    dtype = getattr(torch, name)
    agreed, raising, wrong = 0, 0, {}
    for op in entries(dtype):
        try:
            if run_entry(op, dtype, SAMPLES):
                agreed += 1
            else:
                raising += 1
        except Disagreement as difference:
            wrong[op.full_name] = str(difference)
        except (
            RuntimeError,
            AssertionError,
            NotImplementedError,
            TypeError,
            ValueError,
        ) as error:  # the database cannot make this sample
            print(
                f"  {op.full_name} {name}: no sample: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:120]}",
                flush=True,
            )
    return agreed, raising, wrong


def main() -> int:
    torch.set_num_threads(1)
    totals: collections.Counter[str] = collections.Counter()
    with dr.init_master_worker():
        for name in sys.argv[1:] or DTYPES:
            agreed, raising, wrong = _run(name)
            totals.update(agreed=agreed, raising=raising, wrong=len(wrong))
            print(f"{name}: {agreed} agree, {len(wrong)} do not, {raising} raise on both sides", flush=True)
            for entry, text in wrong.items():
                print(f"  {entry}: {text}", flush=True)
    share = totals["agreed"] / (totals["agreed"] + totals["wrong"])
    print(
        f"together: {totals['agreed']} agree, {totals['wrong']} do not: {share:.2%} of what works locally "
        f"({REQUIRED:.0%} required)"
    )
    return int(share < REQUIRED)


if __name__ == "__main__":
    sys.exit(main())
