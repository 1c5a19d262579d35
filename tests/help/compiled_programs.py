"""Random functions for `torch.compile`: one list of acts, called as it is and compiled, on values of its own.

An act makes values, views and draws, writes in place to arguments and to what was made, reads, prints, copies
to the other node, makes local tensors, enters a stream or autocast, or calls another compiled one. Between a
forward pass and its backward pass something may be written to: then the gradients are what they would be
without it, or autograd refuses. Which of both depends on what a graph saves. The calls differ in sizes, in
which arguments want gradients or share memory, in the current stream, in the mode of gradients, in a number
and a flag that the function reads. A list of acts follows from its seed.

As in torch itself, a draw that nobody uses is left out of a compiled function, so each is returned. A
gradient that comes from two graphs is summed in another order, and under autocast each use of a parameter has
a cast of its own: gradients are compared with a tolerance, and all else bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import distruntime as dr

_ACTS = (
    "add mul mm relu sin view t row irow slice iadd imul iargument dropout rand normal sum softmax norm "
    "linear attention carry number flag cat where expand item print send local constant stream autocast "
    "inner index detach no_grad turn raise biases rate"
).split()
# Each of these breaks a graph or runs operator by operator, so there are fewer of them.
_RARE = frozenset("item print send local stream index".split())

_DRAWS = frozenset("dropout rand normal".split())


@dataclass(frozen=True)
class Act:
    """One act, and what it picks."""

    name: str
    i: int
    j: int
    f: float
    on: bool


def acts_of(seed: int) -> list[Act]:
    """Return the acts of a function."""
    choose = random.Random(seed)
    names = [name for name in _ACTS for _ in range(1 if name in _RARE else 3)]
    return [
        Act(
            choose.choice(names),
            choose.randrange(1 << 20),
            choose.randrange(1 << 20),
            choose.random(),
            choose.random() < 0.7,
        )
        for _ in range(choose.randrange(3, 16))
    ]


class Gradients(NamedTuple):
    """What a backward pass left, and whether some of it was computed in 16 bits."""

    values: list[torch.Tensor]
    lowered: bool

    def near(self, k: int, other: torch.Tensor) -> bool:
        """Whether a gradient is another one, but for the order in which it was summed."""
        own = self.values[k]
        # Where numbers have become too large, both have the same.
        far = float(own.nan_to_num(0, 0, 0).abs().max())
        # What nearly cancels out is as far off as its parts are.
        return torch.allclose(
            own, other, *((0.02, 0.02 * far) if self.lowered else (1e-5, 1e-6 * far)), equal_nan=True
        )


class Box(torch.nn.Module):
    """What a function keeps: parameters, a buffer, a number and a flag."""

    def __init__(self, acts: Sequence[Act], streams: Sequence[dr.Stream], device: str) -> None:
        super().__init__()
        self.acts, self.streams, self.number, self.flag = acts, streams, 1.0, False
        self.w, self.b = torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4))
        self.c = torch.nn.Parameter(torch.randn(4))
        self.register_buffer("kept", torch.zeros(4))
        self.inner: Callable[[torch.Tensor], torch.Tensor] = lambda x: (x * 2).tanh()
        self.to(device)

    def forward(self, x: torch.Tensor, y: torch.Tensor, rate: float, scale: torch.Tensor) -> list[Any]:
        """Do the acts; return the last values, and those that were drawn."""
        values, drawn = [x, y], []
        for act in self.acts:
            values.append(self._do(act, values, x, rate, scale))
            if act.name in _DRAWS:
                drawn.append(values[-1])
        return [*values[-3:], *drawn]

    def _do(
        self, act: Act, values: list[Any], first: torch.Tensor, rate: float, scale: torch.Tensor
    ) -> torch.Tensor:
        a, b = values[act.i % len(values)], values[act.j % len(values)]
        n, device = act.i, a.device
        match act.name:
            case "add":
                return a + b
            case "mul":
                return a * act.f
            case "mm":
                return a @ self.w
            case "relu":
                return a.relu()
            case "sin":
                return a.sin() + self.b
            case "view":
                return a.reshape(-1).view(-1, 4)
            case "t":
                return a.t().contiguous().t()
            case "row":
                return a + a[n % a.shape[0]]
            case "irow":
                c = a.clone()
                c[n % c.shape[0]].mul_(2)
                return c
            case "slice":
                return (
                    a[:, : 1 + n % 4].expand(-1, 4)
                    if n % 4 == 0
                    else a[:, [k % (1 + n % 4) for k in range(4)]]
                )
            case "iadd":
                c = a * 1
                c.add_(b)
                return c
            case "imul":
                c = b + 0
                c[:, 0] *= act.f
                return c
            case "iargument":
                # The backward pass may need what was there.
                if not first.requires_grad and (len(values) == 2 or not torch.is_grad_enabled()):
                    first.add_(act.f)
                return first * 1
            case "dropout":
                return F.dropout(a, 0.3)
            case "rand":
                return a + torch.rand_like(b)
            case "normal":
                return a + torch.randn(4, device=device)
            case "sum":
                return a + b.sum(0)
            case "softmax":
                return torch.softmax(a, n % 2)
            case "norm":
                return F.layer_norm(a, (4,), self.b, self.b)
            case "linear":
                return F.linear(a, self.w, self.b)
            case "attention":
                return F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None])[0, 0]
            case "carry":
                with torch.no_grad():
                    self.kept.add_(a.detach().sum(0))
                return a + self.kept
            case "number":
                return a * self.number
            case "flag":
                return a - 1 if self.flag else a + 1
            case "cat":
                return torch.cat([a, b])[: a.shape[0]]
            case "where":
                return torch.where(a > 0, a, b)
            case "expand":
                return a + self.b.expand(a.shape[0], 4)
            case "item":
                return a + 1 if b.sum().item() > 0 else a - 1
            case "print":
                print(end="")
                return a * 1
            case "send":
                return (a.to("remote:1") * 2).to(device)
            case "local":
                return (a.cpu() + torch.arange(4)).to(device)
            case "constant":
                return a * torch.tensor([1.0, 2.0, 3.0, act.f], device=device)
            case "stream":
                dr.current_stream().wait_stream(dr.current_stream())
                with self.streams[n % len(self.streams)]:
                    return a * 3
            case "autocast":
                with torch.autocast("remote", dtype=torch.bfloat16, enabled=act.on):
                    # Where it is off, a product of two dtypes is refused, but not if nobody uses it.
                    return (a.float() @ self.w + torch.softmax(a, 1)).float()
            case "inner":
                return self.inner(a)
            case "index":
                return a + a[a[:, 0] > 0].sum(0)
            case "detach":
                return a.detach() + b
            case "no_grad":
                with torch.no_grad():
                    c = a * 2
                return b + c
            case "turn":
                c = (a * 1).t_()
                c.unsqueeze_(n % 2)
                c.squeeze_(n % 2)
                return c.transpose_(0, 1)
            case "raise":
                c = a + 0
                row = c[:1]
                row.unsqueeze_(0)
                row.mul_(act.f)
                return c
            case "biases":
                # Both have the same gradient.
                return (a + self.b + self.c).sin()
            case "rate":
                # In 16 bits, torch rounds a number that it has made a tensor of.
                return (a.float() * rate + scale) / (1 + scale * rate)
        raise ValueError(act.name)


# The outcome of a backward pass that autograd has refused, as what it needs was written to.
REFUSED = ("refused",)
# torch says so of what AOTAutograd compiles, on a CPU too (`backend="aot_eager"`): a function of it returns a
# view that was made in place, and the caller writes to that, with gradients or under `no_grad`.
_OF_VIEWS = (
    "is the output of a function that returns multiple views",
    "is a view and its base or another view of its base has been modified inplace",
)


def _write(value: torch.Tensor, listed: bool) -> None:
    """Write to all of a tensor's elements, unless two of them are one."""
    if 0 not in value.stride():
        with torch.no_grad():
            _ = torch._foreach_mul_([value], -0.75) if listed else value.mul_(-0.75)


def _backward(loss: torch.Tensor) -> bool:
    """Run a backward pass; return whether autograd let it."""
    try:
        loss.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return False
    return True


def run(seed: int, compiler: Callable[[Any], Any], calls: int = 16) -> list[Any]:
    """Return all that so many calls of a function give, write and leave; or the error that ended them."""
    choose = random.Random(f"calls of {seed}")
    torch.manual_seed(seed)
    streams = [dr.Stream(), dr.Stream()]
    box = Box(acts_of(seed), streams, "remote")
    box.inner = compiler(box.inner)
    function = compiler(box)
    found: list[Any] = []
    lowers = any(act.name == "autocast" for act in box.acts)
    base = torch.randn(16, 4).to("remote")
    for _ in range(calls):
        with ExitStack() as around:
            # A call of one kind is one instruction only from the third on.
            usual = choose.random() < 0.65
            rows, kind = (3, 5) if usual else (choose.choice((3, 3, 3, 5, 6)), choose.randrange(6))
            x, y = (torch.randn(rows, 4).to("remote") for _ in range(2))
            if kind == 0:
                x.requires_grad_()
            elif kind == 1:
                x, y = base[:rows], base[2 : 2 + rows]
            elif kind == 2:
                y = x
            elif kind == 3:
                around.enter_context(torch.no_grad())
            box.number, box.flag = choose.choice((1.0, 1.0, 2.5)), choose.random() < 0.2
            stream: AbstractContextManager[object] | None = choose.choice((None, None, *streams))
            lower = choose.choice((None, None, None, torch.bfloat16, torch.float16))
            if usual:
                box.number, box.flag, stream, lower = 1.0, False, None, None
            rate, scale = choose.choice((0.5, 0.5, 0.25, 3.0, 1.5)), torch.tensor(choose.choice((2.0, 0.125)))
            scale.requires_grad_(kind == 4)
            if stream is not None:
                around.enter_context(stream)
            box.zero_grad()
            try:
                with torch.autocast("remote", dtype=lower, enabled=lower is not None):
                    values = function(x, y, rate, scale)
                loss = sum(v.float().square().mean() for v in values)
                assert isinstance(loss, torch.Tensor)
                backward, written = choose.random() < 0.8, choose.randrange(12)
                if written < 6 and loss.requires_grad:
                    _write((box.w, box.b, x, *values)[written], choose.random() < 0.5)
                refused = False
                if loss.requires_grad and backward:
                    refused = not _backward(loss)
                gradients = [p.grad for p in (box.w, box.b, box.c, x, scale) if p.grad is not None]
                if choose.random() < 0.4:
                    for gradient in gradients:
                        gradient.mul_(0.75)
                found.append(dr.fetch([t.detach() for t in (*values, x, y, box.kept)]))
                found.append(
                    REFUSED if refused else Gradients(dr.fetch(gradients), lowers or lower is not None)
                )
            except (RuntimeError, IndexError) as error:
                # Dynamo has its own classes for what torch refuses, and its own words around torch's.
                found.append(f"{type(error).__name__}: {error}")
                break
    found.append(dr.fetch([base, torch.rand(2, device="remote")]))
    return found


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all numbers are the same, NaN among them: 16 bits overflow soon."""
    both = (t.nan_to_num(0.0, torch.inf, -torch.inf) for t in (one, other))
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(*both)


def differs(seed: int) -> str:
    """Say where a function gives something else once it is compiled, or return nothing."""
    outcomes = []
    for compiler in (lambda f: f, lambda f: torch.compile(f, backend="distruntime")):
        outcomes.append(run(seed, compiler))
    torch._dynamo.reset()
    one, other = outcomes
    for k, (a, b) in enumerate(zip(one, other)):
        if isinstance(b, str) and any(words in b for words in _OF_VIEWS):
            return ""
        if isinstance(a, str) or isinstance(b, str):
            if type(a) is not type(b):
                return f"outcome {k}: {a!s:.1000} and {b!s:.1000}"
            continue
        if REFUSED in (a, b):
            continue
        same = a.near if isinstance(a, Gradients) else lambda k, other, own=a: _equal(own[k], other)
        a, b = (one.values if isinstance(one, Gradients) else one for one in (a, b))
        odd = [n for n, (p, q) in enumerate(zip(a, b)) if p.dtype != q.dtype or not same(n, q)]
        if len(a) != len(b) or odd:
            far = [(a[n] - b[n]).abs().max().item() for n in odd if a[n].shape == b[n].shape]
            return f"outcome {k}: values {odd} of {len(a)} and {len(b)}, by {far}"
    return "" if len(one) == len(other) else f"{len(one)} and {len(other)} calls"
