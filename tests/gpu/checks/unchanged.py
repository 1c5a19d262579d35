"""Check 29: a script that knows nothing of workers, with a GPU here and with the GPU of a worker."""

from __future__ import annotations

import json
import math
from typing import Any

from box import Box, Failed
from listing import check

SCRIPT = "tests/gpu/script.py"
# Inductor fuses what eager rounds in between, and it rounds to bfloat16 in other places.
CLOSE = {"compiled: ": 1e-3, "compiled, bfloat16: ": 2e-2}


def _found(box: Box, *before: str) -> dict[str, Any]:
    process = box.child(*before, SCRIPT, timeout=75)
    lines = [line for line in process.stdout.splitlines() if line.startswith("found ")]
    if process.returncode or not lines:
        raise Failed(
            f"{' '.join((*before, SCRIPT))} ended with {process.returncode}:\n{process.stdout[-1500:]}\n"
            f"{process.stderr[-3000:]}"
        )
    box.saw("\n".join(line for line in process.stderr.splitlines() if line.startswith("distruntime")))
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("found "))
    return found


def _agree(name: str, here: Any, there: Any) -> bool:
    if isinstance(here, list) and isinstance(there, list):
        return len(here) == len(there) and all(_agree(name, a, b) for a, b in zip(here, there, strict=True))
    bound = next((bound for start, bound in CLOSE.items() if name.startswith(start)), 0.0)
    if isinstance(here, float) and isinstance(there, float) and bound:
        return math.isclose(here, there, rel_tol=bound)
    return bool(here == there)


@check(
    29,
    "a script, unchanged",
    does=f"runs {SCRIPT} with the GPU of this process, and by `run --as-cuda` with a worker's",
    failure=(
        "what is named differs under take-over: switches are distruntime/cluster/cuda/switches.py "
        "and worker/distruntime_worker/machine/settings.py, draws are values/draws.py, the rest is "
        "distruntime/cluster/cuda/."
    ),
    seconds=150,
    needs=("cuda",),
)
def unchanged(box: Box) -> None:
    here = _found(box)
    there = _found(box, "-m", "distruntime", "run", "--as-cuda")
    box.require(list(here) == list(there), f"other entries: {sorted(set(here) ^ set(there))}")
    wrong = []
    for name, value in here.items():
        if _agree(name, value, there[name]):
            box.saw(f"{name}: the same")
        else:
            wrong.append(f"{name}: {there[name]}, here {value}")
    box.require(not wrong, f"{len(wrong)} of {len(here)} differ:\n" + "\n".join(wrong))
