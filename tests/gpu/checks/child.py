"""Runs checks, one after the other, and says how each ended. `__main__.py` starts it and may have to end it.

It reads numbers of checks from standard input, a line for each, and prints what the checks see. To the file
descriptor that its first argument names it writes lines of JSON: first the list of the checks, and then how
each of them ended. A process that compares with local code imports it too (see `here.py`).
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from typing import TextIO

import distruntime as dr
from box import Box, LeftOut
from listing import Check, checks


def obstacle(box: Box, check: Check) -> str:
    """Return why a check cannot be tried here, or ""."""
    for need in check.needs:
        if need == "cuda":
            if not box.cuda:
                return "needs CUDA in this process"
        elif need == "two GPUs":
            count = box.cards()
            if count < 2:
                return f"needs two GPUs, and there is {count}"
        elif importlib.util.find_spec(need) is None:
            return f"needs the package {need}"
    return ""


def run(box: Box, check: Check) -> tuple[str, str]:
    """Run one check; return how it ended ("ok", "failed", "left out") and why."""
    box.parts_left_out.clear()
    try:
        why = obstacle(box, check)
        if why:
            return "left out", why
        check.run(box)
    except LeftOut as reason:
        return "left out", str(reason)
    # A check fails by whatever it raises, and the next one goes on.
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if not isinstance(error, AssertionError) else str(error)
        box.saw("".join(traceback.format_tb(error.__traceback__)[-1:]) + text[:4000])
        error.__traceback__ = None
        return "failed", text.strip().partition("\n")[0][:120]
    finally:
        if dr.is_initialized():
            dr.shutdown()
    return "ok", "; ".join(box.parts_left_out)


def main(results: TextIO) -> None:
    """Answer each number."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results")
    parser.add_argument("--simulate-cuda", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    # The parent asks for the stacks before it ends a child that hangs.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    box = Box(options.simulate_cuda, options.quick)
    by_number = {check.number: check for check in checks()}
    print(json.dumps([check.described() for check in by_number.values()]), file=results, flush=True)
    try:
        for line in sys.stdin:
            began = time.monotonic()
            outcome, why = run(box, by_number[int(line)])
            print(json.dumps([outcome, why, time.monotonic() - began]), file=results, flush=True)
    finally:
        box.here.end()


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w") as results:
        main(results)
