"""Operations along a dimension of a mesh: one instruction in the mesh's log, in which every line of members does its own.

A mesh of shape (2, 4) has two lines along its last dimension, of four members each, and four along its first. Each line is a group of
the members' data channel; the instruction names the dimension, and each worker knows which groups its members are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import msgpack
import torch

from ..collectives.arguments import require_reduction
from ..collectives.group import ProcessGroup, groups_of
from ..collectives.operation import require_operation
from ..errors import NodeFailed, NotSupportedError, PlacementError, UsageError
from ..log.handle import Handle, Residence, Storage, next_ref
from ..log.issue import issue_joint
from ..log.line import user_line
from ..log.log import relieve
from ..log.mesh_log import MeshLog
from ..log.moment import at_one_moment
from ..log.shards import mesh_of
from ..log.spec import NO_TENSOR, Spec, contiguous, layout
from ..operators.proxies import wrap
from ..operators.transfer import upload
from ..tensors.tensor import DistributedTensor
from ..wire.messages import OpenLines

_REDUCTIONS = {
    "sum": "SUM",
    "avg": "AVG",
    "product": "PRODUCT",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}
_MOST_NUMBERS = 64  # tensors of one number for each member that a mesh keeps


def reduction(op: Any) -> tuple[str, float | None]:
    """Return a reduction's name, and the factor of a PREMUL_SUM, of what torch passes: "avg", a ReduceOp or its options."""
    if isinstance(op, str):
        if op.lower() not in _REDUCTIONS:
            raise NotSupportedError(
                f"the reduction {op!r} does not exist along a mesh; there are {', '.join(_REDUCTIONS)}"
            )
        return _REDUCTIONS[op.lower()], None
    kind = getattr(op, "op", op)
    name = str(kind).rpartition(".")[2]
    if name == "PREMUL_SUM":
        return name, float(op.__getstate__()[1])
    return name, None


def numbers(home: Residence, values: tuple[int, ...]) -> Any:
    """Return a tensor on a mesh, of one int64 that is `values[k]` on member k: never to be written, as it is kept. Return at once."""
    kept = home.numbers
    found = kept.get(values)
    if found is None:
        if len(kept) >= _MOST_NUMBERS:
            kept.clear()
        team: Any = home.node
        places = [team.session.places.residence(place, numbered=False) for place in team.members]
        handles = [upload(torch.tensor(n, device="cpu"), place) for n, place in zip(values, places)]
        found = kept[values] = wrap(DistributedTensor, mesh_of(team, home, handles))
    return found


class Lines:
    """The lines of a mesh along one or several of its dimensions: groups of equal size that cover the members."""

    def __init__(self, team: MeshLog, number: int, rows: Sequence[Sequence[int]]) -> None:
        session = team.session
        self.team, self.number, self.rows = team, number, [list(row) for row in rows]
        self.size = len(rows[0])
        homes = [session.places.residence(place, numbered=False) for place in team.members]
        groups = groups_of(session)
        self.groups: list[ProcessGroup] = []
        try:
            for row in rows:
                self.groups.append(groups.open([homes[k] for k in row]))
        except BaseException:  # Ctrl-C too: they are many
            self.close()
            raise
        self.capabilities = self.groups[0].capabilities
        self.sequence = count(1).__next__
        self.serial = Storage(NO_TENSOR)
        at = {k: [group.number, rank] for group, row in zip(self.groups, rows) for rank, k in enumerate(row)}
        for node, ranks in team.ranks.items():
            session.post(node, OpenLines(team.number, number, [at[k] for k in ranks]))

    def __repr__(self) -> str:
        return f"<{len(self.rows)} line{'s' if len(self.rows) > 1 else ''} of {self.size} in {self.team}>"

    def close(self) -> None:
        """Close the members' groups, after what has been issued. Return at once."""
        for group in self.groups:
            group.close()

    @property
    def broken(self) -> str | None:
        """Why they cannot be used any more."""
        return next(
            (group.broken or "a group was closed" for group in self.groups if group.broken or group.closed),
            None,
        )

    def ranks(self) -> Any:
        """Return a tensor of one int64 that is, on each member, its rank in its line. Return at once."""
        at = {k: rank for row in self.rows for rank, k in enumerate(row)}
        return numbers(self.team.residence(), tuple(at[k] for k in range(len(at))))

    def on_mesh(self, t: Any) -> DistributedTensor:
        """Return `t`; raise `PlacementError` unless it lives on this mesh."""
        remedy = "Send it to all members: x.to(mesh.device)"
        if isinstance(t, DistributedTensor):
            if t._handle.place.node is self.team:
                return t
            where = f"lives on {t.place}"
            if t._handle.place.node.members:
                remedy = "Name the shards that it is to have: dr.from_shards([x.member(k), ...], mesh)"
        else:
            where = (
                "is a local tensor"
                if type(t) in (torch.Tensor, torch.nn.Parameter)
                else f"is a {type(t).__name__}"
            )
        raise PlacementError(f"what runs along {self.team} takes tensors on it; this one {where}. {remedy}")

    def run(
        self,
        operation: str,
        inputs: Sequence[torch.Tensor],
        specs: Sequence[Spec] = (),
        into: Sequence[torch.Tensor] = (),
        *,
        root: int = -1,
        op: str | None = None,
        factor: float | None = None,
        splits: tuple[Any, Any] = ((), ()),
    ) -> list[Any]:
        """Issue an operation with new results of these specs, or into tensors that are written. Return the results at once."""
        team = self.team
        team.session.require_open()
        team.require_alive()
        given, written_to = [self.on_mesh(t) for t in inputs], [self.on_mesh(t) for t in into]
        if (broken := self.broken) is not None:
            raise NodeFailed(
                f"{self!r} cannot go on: {broken}. Its members are there: mesh.lines(...) connects them anew"
            )
        if op is not None:
            require_reduction(self.groups[0], op, (given or written_to)[0].dtype)
        if operation != "copy":
            require_operation(self.groups[0], operation)
        home: Residence = (given or written_to)[0]._handle.place
        made = [Handle(next_ref(), spec, home, Storage(spec)) for spec in specs]
        ins, outs = [t._handle for t in given], made or [t._handle for t in written_to]
        for handle in outs if not made else ():
            if handle.spec.expanded:
                raise NotSupportedError(
                    f"{operation} into {handle.spec} that is expanded: several elements share memory; clone it first"
                )
        options = [root, op, factor, not made, *splits]
        fields = [
            f"group::{operation}",
            [self.number, options, [layout(h.spec) for h in ins], [layout(h.spec) for h in outs]],
            {},
            0,
        ]
        line = user_line()
        relieve(team)

        def issue() -> None:
            number = team.template(msgpack.packb(fields), fields)
            words = [number, self.sequence() & 0x3FFFFFFF, *(h.ref for h in ins), *(h.ref for h in outs)]
            written = [h.storage for h in outs] if not made else []
            serial = self.serial if self.capabilities.concurrent else groups_of(team.session).launches(team)
            issue_joint(words, made, ins if made else [*ins, *outs], written, [home], serial, line)

        at_one_moment(team.session, issue)
        return [wrap(DistributedTensor, handle) for handle in made] if made else list(into)


def longer(spec: Spec, times: int) -> Spec:
    """Return the spec of so many tensors, one after the other along the first dimension."""
    return contiguous(spec, (spec.size[0] * times, *spec.size[1:]) if spec.size else (times,))


# -- below autograd ------------------------------------------------------------------------------------------------------------------


def run_all_reduce(lines: Lines, x: torch.Tensor, op: Any = "SUM") -> Any:
    """Return the sum, or another reduction ("AVG", a ReduceOp), of each line's tensors, at each of its members."""
    name, factor = reduction(op)
    return lines.run("all_reduce", [x], [contiguous(lines.on_mesh(x)._handle.spec)], op=name, factor=factor)[
        0
    ]


def run_all_gather(lines: Lines, x: torch.Tensor) -> Any:
    """Return each line's tensors one after the other along the first dimension, at each of its members."""
    return lines.run("all_gather", [x], [longer(lines.on_mesh(x)._handle.spec, lines.size)])[0]


def run_reduce_scatter(lines: Lines, x: torch.Tensor, op: Any = "SUM") -> Any:
    """Return each member's part of the reduction of its line's tensors, cut along the first dimension."""
    spec, (name, factor) = lines.on_mesh(x)._handle.spec, reduction(op)
    size = spec.size[0] if spec.size else 0
    if not spec.size or size % lines.size:
        raise NotSupportedError(
            f"reduce_scatter along a mesh cuts the first dimension into {lines.size} equal parts, got {tuple(spec.size)}: pad it, "
            "or use lists of tensors, dr.primitives.reduce_scatter, which may be uneven"
        )
    part = contiguous(spec, (size // lines.size, *spec.size[1:]))
    return lines.run("reduce_scatter", [x], [part], op=name, factor=factor)[0]


def run_all_to_all(lines: Lines, x: torch.Tensor, output: Sequence[int], inputs: Sequence[int]) -> Any:
    """Return what a line's members have for each other: rows `inputs[k]` of each go to member k, `output[k]` come from it."""
    own: Spec = lines.on_mesh(x)._handle.spec
    sizes = {int(n) for n in (*output, *inputs)}
    if [len(output), len(inputs)] != [lines.size] * 2 or len(sizes) > 1 or own.size[:1] != (sum(inputs),):
        raise NotSupportedError(
            f"all_to_all along a mesh: each of a line's {lines.size} members sends as many rows to each, which are all that it has; got "
            f"{tuple(own.size)}, sends {list(inputs)}, gets {list(output)}. Uneven parts are for lists of tensors: dr.functional.all_to_all"
        )
    spec = contiguous(own, (sum(output), *own.size[1:]))
    row = spec.nbytes // max(1, spec.size[0]) if spec.size[0] else own.nbytes // max(1, own.size[0])
    table = [[n * row for n in inputs]] * lines.size, [[n * row for n in output]] * lines.size
    return lines.run("all_to_all", [x], [spec], splits=table)[0]


def run_broadcast(lines: Lines, x: torch.Tensor, root: int) -> Any:
    """Return the tensor of each line's member of rank `root`, at each of its members."""
    if not 0 <= root < lines.size:
        raise UsageError(f"root is a rank in a line of {lines.size} members, got {root!r}")
    return lines.run("broadcast", [x], [contiguous(lines.on_mesh(x)._handle.spec)], root=root)[0]


# -- with their adjoints -------------------------------------------------------------------------------------------------------------


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lines: Lines, op: Any, x: Any) -> Any:
        ctx.lines, ctx.op, out = lines, op, run_all_reduce(lines, x, op)
        if reduction(op)[0] in ("MIN", "MAX"):
            ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        name = reduction(ctx.op)[0]
        if name in ("SUM", "AVG", "PREMUL_SUM"):
            return None, None, _apply(_AllReduce, ctx.lines, ctx.op, grad)
        if name not in ("MIN", "MAX"):
            raise NotSupportedError(
                f"all_reduce along a mesh has no gradient for {name}: use SUM, AVG, MIN or MAX"
            )
        x, out = ctx.saved_tensors
        chosen = (x == out).to(grad.dtype)  # members that are equal share, as torch.amax's gradient does
        total, ways = _apply(_AllReduce, ctx.lines, "SUM", grad), run_all_reduce(ctx.lines, chosen)
        return None, None, total * chosen / ways


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lines: Lines, x: Any) -> Any:
        ctx.lines, ctx.shape = lines, x.shape
        return run_all_gather(lines, x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, _apply(_ReduceScatter, ctx.lines, "SUM", grad.contiguous()).view(ctx.shape)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lines: Lines, op: Any, x: Any) -> Any:
        ctx.lines, ctx.op = lines, op
        return run_reduce_scatter(lines, x, op)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        name, factor = reduction(ctx.op)
        if name not in ("SUM", "AVG", "PREMUL_SUM"):
            raise NotSupportedError(f"reduce_scatter along a mesh has no gradient for {name}: use SUM or AVG")
        scale = 1 / ctx.lines.size if name == "AVG" else 1.0 if factor is None else factor
        return None, None, _apply(_AllGather, ctx.lines, grad.contiguous()) * scale


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lines: Lines, x: Any, output: Any, inputs: Any) -> Any:
        ctx.lines, ctx.output, ctx.inputs = lines, output, inputs
        return run_all_to_all(lines, x, output, inputs)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, _apply(_AllToAll, ctx.lines, grad.contiguous(), ctx.inputs, ctx.output), None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lines: Lines, x: Any, root: int) -> Any:
        ctx.lines, ctx.root = lines, root
        return run_broadcast(lines, x, root)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        total = _apply(_AllReduce, ctx.lines, "SUM", grad)
        return None, total * (ctx.lines.ranks() == ctx.root).to(grad.dtype), None


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)  # torch leaves it untyped


def _operand(lines: Any, x: Any) -> DistributedTensor:
    if not isinstance(lines, Lines):
        raise UsageError(
            f"this runs along the lines of a mesh, mesh.lines('tp') or mesh.lines() of all members, got {lines!r}"
        )
    return lines.on_mesh(x)


def all_reduce(lines: Lines, x: torch.Tensor, op: Any = "SUM") -> Any:
    """Return the sum, or another reduction ("AVG", a ReduceOp), of each line's tensors, at each of its members. Differentiable."""
    return _apply(_AllReduce, lines, op, _operand(lines, x))


def all_gather(lines: Lines, x: torch.Tensor) -> Any:
    """Return each line's tensors one after the other along the first dimension, at each of its members. Differentiable."""
    return _apply(_AllGather, lines, _operand(lines, x))


def reduce_scatter(lines: Lines, x: torch.Tensor, op: Any = "SUM") -> Any:
    """Return each member's part of the reduction of its line's tensors, cut along the first dimension. Differentiable."""
    return _apply(_ReduceScatter, lines, op, _operand(lines, x))


def all_to_all(lines: Lines, x: torch.Tensor, output: Sequence[int], inputs: Sequence[int]) -> Any:
    """Return what a line's members have for each other: rows `inputs[k]` of each go to member k, `output[k]` come from it."""
    return _apply(_AllToAll, lines, _operand(lines, x), list(output), list(inputs))


def broadcast(lines: Lines, x: torch.Tensor, root: int) -> Any:
    """Return the tensor of each line's member of rank `root`, at each of its members. Differentiable."""
    return _apply(_Broadcast, lines, _operand(lines, x), root)
