"""Wrong inputs of PyTorch's own databases are told in torch's class and words.

This is a third of them; `tests/long/error_inputs.py` takes all, and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from error_samples import Mistake, judge, modules, operators, reason

SHARE = 3


@pytest.mark.parametrize("source", [operators, modules])
def test_wrong_inputs(session: object, source: Callable[[], Iterator[Mistake]]) -> None:
    wrong, late, judged = [], 0, 0
    for mistake in list(source())[::SHARE]:
        verdict = judge(mistake)
        # This CPU has nothing against it.
        if verdict is None:
            continue
        judged += 1
        late += not verdict.at_once
        if not (verdict.same_class and verdict.same_words) and reason(verdict) is None:
            wrong.append(f"{mistake.name}: {verdict.local!r} here, {verdict.remote!r} there")
    assert not wrong, "\n" + "\n".join(wrong)
    # Versions before 2.13 list fewer wrong inputs of modules. The late ones depend on values, or need a
    # worker to tell.
    assert judged > (40 if torch.__version__ >= "2.13" else 30) and late < 0.1 * judged
