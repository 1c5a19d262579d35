"""Every wrong input of PyTorch's operator and module databases, here and on a worker: whether the class and
the words agree, and whether the error came at once. Some ten seconds; `tests/torch_db` has a sample of it.

    PYTHONPATH=.:worker:tests/help python tests/long/error_inputs.py [operators | modules]

The exit code says whether classes agree in at least 98 % and words in at least 95 %.
"""

from __future__ import annotations

import collections
import sys

import torch

import distruntime as dr
from error_samples import Verdict, judge, modules, operators, reason

CLASSES, WORDS = 0.98, 0.95


def _line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}" if error else "nothing"


def _show(verdict: Verdict) -> None:
    when = "at once" if verdict.at_once else "when read"
    print(f"  {verdict.mistake.name} ({when}): {reason(verdict) or 'no reason is known'}")
    print(f"    torch: {_line(verdict.local)}")
    print(f"    ours:  {_line(verdict.remote)}")


def main() -> int:
    """Print counts and the list of those that differ."""
    torch.set_num_threads(1)
    sources = {"operators": operators, "modules": modules}
    totals: collections.Counter[str] = collections.Counter()
    with dr.init_master_worker(world_size=1):
        for name in sys.argv[1:] or sources:
            counts: collections.Counter[str] = collections.Counter()
            differ: list[Verdict] = []
            for mistake in sources[name]():
                verdict = judge(mistake)
                if verdict is None:
                    counts["taken here"] += 1
                    continue
                counts["all"] += 1
                counts["class"] += verdict.same_class
                counts["words"] += verdict.same_words
                counts["once"] += verdict.at_once
                if not (verdict.same_class and verdict.same_words):
                    differ.append(verdict)
            print(
                f"{name}: {counts['all']} mistakes ({counts['taken here']} more are none on this CPU). "
                f"Class equal {counts['class']}, words found {counts['words']}, "
                f"raised at once {counts['once']}, when read {counts['all'] - counts['once']}",
                flush=True,
            )
            for verdict in differ:
                _show(verdict)
            totals += counts
    classes, words = (totals[what] / totals["all"] for what in ("class", "words"))
    print(
        f"together: class equal in {classes:.2%} ({CLASSES:.0%} required), "
        f"words found in {words:.2%} ({WORDS:.0%} required)"
    )
    return int(classes < CLASSES or words < WORDS)


if __name__ == "__main__":
    sys.exit(main())
