"""Random functions of floats that this process changes between calls, called as they are and replayed.

The floats are attributes, items of a tuple, of a dictionary and of an object that is replaced, an int and an
argument. Many of them are equal at first, and change alike, so that a number can be taken for another one.
"""

from __future__ import annotations

import linecache
import math
import random
import warnings
from types import SimpleNamespace
from typing import Any

import torch

import distruntime as dr
from agree import REMOTE

_VALUES = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 0.1, 3.0, 6.0, 1e-3, -2.0)
_LEAVES = (
    *("s.a", "s.b", "s.pair[0]", "s.pair[1]", "s.table['k']", "float(s.n)", "s.boxes[0].v", "rate"),
    *("0.5", "1.0", "2.0", "-1.0"),
)
_FORMS = (
    *("min({0}, {1})", "max({0}, {1})", "abs({0})", "({0} + {1})", "({0} * {1})", "({0} - {1})", "(-{0})"),
    *("({0} if {1} > {2} else {3})", "({0} or {1})", "[{0}, {1}][{2} > {3}]", "sorted([{0}, {1}])[0]"),
    *("float(round({0}))", "math.sqrt(abs({0}))", "({0}) ** 2", "float('%.3f' % ({0}))", "sum([{0}, {1}])"),
    *("torch.tensor({0}).item()", "dict(z={0})['z']", "halved({0})"),
)
_LINES = (
    *("x * {}", "x + {}", "y - x * {}", "torch.add(x, y, alpha={})", "torch.clamp(x, max={})"),
    *("torch.where(x > {}, x, y)", "x + torch.norm(y, p=abs({}) + 1)"),
    "x + torch.arange(0, abs({}) % 5 + 1, device=x.device).numel()",
)


def _halved(value: float) -> float:
    return value * 0.5 if value > 0 else value


def _expression(draw: random.Random, depth: int) -> str:
    if depth == 0 or draw.random() < 0.35:
        return draw.choice(_LEAVES)
    return draw.choice(_FORMS).format(*(_expression(draw, depth - 1) for _ in range(4)))


def _change(draw: random.Random, state: SimpleNamespace, rate: float) -> float:
    """Change some of the state to one value; return the argument of the next call."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        value = draw.choice(_VALUES)
        match draw.randrange(7):
            case 0:
                state.a = value
            case 1:
                state.b = value
            case 2:
                state.pair = (value, state.pair[1])
            case 3:
                state.table["k"] = value
            case 4:
                state.n = int(value)
            case 5:
                state.boxes[0] = SimpleNamespace(v=value)
            case _:
                rate = value
    return rate


def compare_numbers(seed: int, calls: int) -> Any:
    """Call a random function so often, as it is and replayed; raise `AssertionError` where they differ.

    Return the program.
    """
    draw = random.Random(seed)
    lines = [
        f"    x = {draw.choice(_LINES).format(_expression(draw, 2))}" for _ in range(draw.randrange(1, 4))
    ]
    source, name = "\n".join(["def step(x, y, rate):", *lines, "    return x"]), f"numbers-{seed}.py"
    # A function without lines cannot be looked at.
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    one = SimpleNamespace(v=1.0)
    state = SimpleNamespace(a=1.0, b=1.0, pair=(1.0, 0.5), table={"k": 1.0}, n=1, boxes=[one])
    found: dict[str, Any] = {"s": state, "torch": torch, "math": math, "halved": _halved}
    exec(compile(source, name, "exec"), found)
    step, program = found["step"], dr.program(found["step"])
    x, y = (torch.tensor(values).to(REMOTE) for values in ([0.3, -1.5, 2.0], [1.0, 2.0, -3.0]))
    rate, results = 1.0, []
    with warnings.catch_warnings():
        # Some run plainly in the end.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(calls):
            if draw.random() < 0.45:
                rate = _change(draw, state, rate)
            try:
                results.append((step(x, y, rate), program(x, y, rate)))
            # A large power is none.
            except OverflowError:
                continue
    for call, (plain, replayed) in enumerate(dr.fetch(results)):
        same = torch.equal(plain.nan_to_num(7e7), replayed.nan_to_num(7e7))
        assert same, f"seed {seed}, call {call}: {plain}, then {replayed}\n{source}"
    return program
