"""Attention over a sequence that is cut along a line of a mesh: keys and values go round as a ring.

Each member has the queries, keys and values of a part of the sequence. In as many steps as there are members,
the keys and values of each pass by all others. Every member merges what its queries find in them, by the
logarithms of the sums of exponentials. The backward pass goes round again, and computes the weights anew. So
no member ever holds the keys of the whole sequence, or all weights.

All members run the same instructions, so none can skip keys that are behind all of its queries. In a balanced
cut, none has to. There, member k of n has the pieces k and 2n - 1 - k of 2n. In each step but the first, two
of the four pairs of pieces count. One of them is the same pair at each member, and a member's rank decides on
the other one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ..errors import UsageError, without_our_frames
from ..streams.order import has_streams
from ..streams.stream import current_stream, kept_number, numbered_stream
from .line_groups import Lines
from .operation import on_mesh_of, permuted, require_lines


@without_our_frames
def attention(
    lines: Lines,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    balanced: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what `scaled_dot_product_attention` would of sequences that each line cuts. Return at once.

    Args:
        query: of shape (..., heads, positions, features), each member's part of the sequence.
        key, value: of shape (..., heads, positions, features), with fewer heads for `enable_gqa`.
        is_causal: whether a position sees only itself and those before it.
        balanced: whether member k of n has the pieces k and 2n - 1 - k of 2n, as torch's `context_parallel`
            cuts, and not the part k of n. Causal attention is twice as fast then.
        scale: the factor of the products, 1 / sqrt(features) if None.

    It has a gradient, but no second one. Raises `PlacementError` for tensors that are not on the mesh of
    these lines, `UsageError` for shapes that do not fit, or lines that are none.
    """
    require_lines(lines)
    for t in (query, key, value):
        on_mesh_of(lines, t)
    shapes = f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
    fits = query.dim() == key.dim() == value.dim() >= 3 and query.shape[-1] == key.shape[-1]
    if not fits or key.shape[:-1] != value.shape[:-1] or query.shape[:-3] != key.shape[:-3]:
        raise UsageError(
            "attention along lines takes queries, keys and values of shape (..., heads, positions, "
            f"features), {shapes}"
        )
    heads, fewer = query.shape[-3], key.shape[-3]
    if heads != fewer and (not enable_gqa or heads % fewer):
        raise UsageError(
            f"there are {heads} heads of queries and {fewer} of keys: give as many, or a multiple and "
            "enable_gqa=True"
        )
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise UsageError(f"causal attention takes as many keys as queries, {shapes}")
    if is_causal and balanced and query.shape[-2] % 2:
        raise UsageError(
            f"in a balanced cut each member has two pieces of one size, and {query.shape[-2]} positions are "
            "odd: pad the sequence, or cut it in order, balanced=False"
        )
    way = _Way(lines, is_causal, balanced, query.shape[-1] ** -0.5 if scale is None else scale)
    # Several heads of queries share a head of keys.
    grouped = query.unflatten(-3, (fewer, -1))
    found: Tensor = _Attention.apply(way, grouped, key.unsqueeze(-3), value.unsqueeze(-3))  # type: ignore[no-untyped-call]
    return found.flatten(-4, -3)


class _Part(NamedTuple):
    """What takes part in a step of a member's queries, or of the keys that it has.

    `pieces` says which of their halves: 0, 1, or both, one of which counts. Without pieces, all rows count.
    `first` says at which members the first half counts, or all rows.
    """

    pieces: tuple[int, ...] = ()
    first: Tensor | None = None

    def take(self, t: Tensor) -> Tensor:
        """Return the rows that take part."""
        halves = [t.chunk(2, -2)[k] for k in self.pieces]
        if len(halves) == 2 and self.first is not None:
            return torch.where(self.first, halves[0], halves[1])
        return halves[0] if halves else t

    def put(self, t: Tensor, fill: float = 0.0) -> Tensor:
        """Return rows in their place among all rows. The others are filled."""
        other = torch.full_like(t, fill)
        if self.first is not None:
            halves = [torch.where(self.first, t, other), torch.where(self.first, other, t)]
            return torch.cat(halves, -2) if self.pieces else halves[0]
        if not self.pieces:
            return t
        return torch.cat([t, other] if self.pieces == (0,) else [other, t], -2)


class _Way(NamedTuple):
    """How an attention goes round."""

    lines: Lines
    is_causal: bool
    balanced: bool
    scale: float

    def steps(self, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor, list[tuple[_Part, _Part]]]]:
        """Yield the keys and values that a member has in each step, and what meets: queries, and keys."""
        following, widths = torch.cat([key, value], -1), [key.shape[-1], value.shape[-1]]
        for step in range(self.lines.size):
            pair = following
            # They travel while their predecessors are met.
            if step + 1 < self.lines.size:
                following = self.on(pair)
            keys, values = pair.split(widths, -1)
            yield keys, values, self._meeting(step)

    def _meeting(self, step: int) -> list[tuple[_Part, _Part]]:
        if not step or not self.is_causal:
            return [(_Part(), _Part())]
        # Keys come from `step` ranks before, or from behind at the first members.
        earlier = self.lines.ranks() >= step
        if not self.balanced:
            return [(_Part((), earlier), _Part((), earlier))]
        # The tail sees all pieces of the head. Beside that, the head sees earlier pieces, or the tail sees
        # those of later ranks.
        return [(_Part((1,)), _Part((0,))), (_Part((0, 1), earlier), _Part((0, 1), earlier))]

    def on(self, t: Tensor) -> Tensor:
        """Return, at each member, what the member before it has. It travels in a stream of its own."""
        lines, home = self.lines, on_mesh_of(self.lines, t)._handle.place
        targets = [(rank + 1) % lines.size for rank in range(lines.size)]
        if current_stream(home.device).number or not has_streams(lines.mesh_log):
            return permuted(lines, t.contiguous(), targets)
        if lines._beside is None:
            lines._beside = kept_number(home)
        with numbered_stream(home, lines._beside):
            return permuted(lines, t.contiguous(), targets)

    def products(self, query: Tensor, key: Tensor, own: bool) -> Tensor:
        """Return the scaled products of queries and keys; `own` says that both are of the same positions."""
        exact = torch.promote_types(query.dtype, torch.float32)
        found = (query @ key.mT).to(exact) * self.scale
        if not (own and self.is_causal):
            return found
        later = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).triu(1)
        return found.masked_fill(later, -math.inf)


class _Context(FunctionCtx):
    way: _Way
    saved_tensors: tuple[Tensor, ...]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, way: _Way, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found: tuple[Tensor, Tensor] | None = None
        for keys, values, meeting in way.steps(key, value):
            for rows, columns in meeting:
                products = way.products(rows.take(query), columns.take(keys), own=found is None)
                total = products.logsumexp(-1, keepdim=True)
                weights = (products - total).exp()
                out = (weights.to(value.dtype) @ columns.take(values)).to(total.dtype)
                more = rows.put(out), rows.put(total, -math.inf)
                found = more if found is None else _merged(*found, *more)
        assert found is not None
        out, total = found
        result = out.to(query.dtype)
        ctx.way = way
        ctx.save_for_backward(query, key, value, out, total)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        way, (query, key, value, out, total) = ctx.way, ctx.saved_tensors
        exact, own = total.dtype, True
        grad = grad.to(exact)
        along = (grad * out).sum(-1, keepdim=True)
        of_query = torch.zeros_like(query, dtype=exact)
        # The gradients of keys and values go round with them.
        of_pair = torch.zeros_like(torch.cat([key, value], -1), dtype=exact)
        for keys, values, meeting in way.steps(key, value):
            if not own:
                of_pair = way.on(of_pair)
            for rows, columns in meeting:
                q, g = rows.take(query), rows.take(grad)
                k, v = columns.take(keys), columns.take(values)
                weights = (way.products(q, k, own) - rows.take(total)).exp()
                of_products = weights * (g @ v.to(exact).mT - rows.take(along)) * way.scale
                of_query = of_query + rows.put(of_products @ k.to(exact))
                of_both = torch.cat([of_products.mT @ q.to(exact), weights.mT @ g], -1)
                # A head of keys has served several heads of queries.
                of_pair = of_pair + columns.put(of_both.sum(-3, keepdim=True))
            own = False
        of_pair = way.on(of_pair)
        of_key, of_value = of_pair.split([key.shape[-1], value.shape[-1]], -1)
        return None, of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _merged(out: Tensor, total: Tensor, more: Tensor, its: Tensor) -> tuple[Tensor, Tensor]:
    """Return two results of the same queries for other keys as one."""
    both = torch.logaddexp(total, its)
    return out * (total - both).exp() + more * (its - both).exp(), both
