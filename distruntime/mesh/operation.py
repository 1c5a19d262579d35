"""Issuing a collective along the lines of a mesh: one instruction in the mesh's log, for all lines."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
import torch

from ..collectives.adjoints import Collective, Tensors, differentiable, result_of
from ..collectives.groups import groups_of
from ..collectives.operation import require_operation
from ..collectives.reductions import Op, reduction, require_reduction
from ..collectives.splits import NO_SPLITS, ByteSplits, Splits, byte_splits, transposed
from ..errors import NodeFailed, NotSupportedError, PlacementError, UsageError
from ..log.handle import Handle, Residence, new_value
from ..log.issue import Between, covered, issue_joint, template_number
from ..log.line import Line, user_line
from ..log.log import relieve
from ..log.spec import Spec, contiguous, operand_fields
from ..log.tape import cuts
from ..log.total_order import in_total_order
from ..operators.proxies import wrap
from ..session.session import session_of_log
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor, shapes_of
from ..wire.data_channel import Reduction
from .each_member import cut, padded, require_alike
from .line_groups import Lines

# torch's functional collectives pass these names.
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def reduction_named(op: Op | str) -> Reduction:
    """Return what a `ReduceOp`, or torch's name of one, stands for.

    Raise `NotSupportedError` for other names.
    """
    if not isinstance(op, str):
        return reduction(op)
    if op.lower() not in _REDUCTIONS:
        raise NotSupportedError(
            f"the reduction {op!r} does not exist along a mesh; there are {', '.join(_REDUCTIONS)}"
        )
    return Reduction(op.upper())


def require_lines(lines: object) -> None:
    """Raise `UsageError` for what is no lines of a mesh."""
    if not isinstance(lines, Lines):
        raise UsageError(
            "this runs along the lines of a mesh, mesh.lines('tp') or mesh.lines() of all members, "
            f"got {lines!r}"
        )


def on_mesh_of(lines: Lines, value: object) -> DistributedTensor:
    """Return a tensor; raise `PlacementError` unless it lives on the mesh of these lines."""
    remedy = "Send it to all members: x.to(mesh.device)"
    if isinstance(value, DistributedTensor):
        if value._handle.place.node is lines.mesh_log:
            return value
        where = f"lives on {value.place}"
        if value._handle.place.node.members:
            remedy = "Name the shards that it is to have: dr.from_shards([x.member(k), ...], mesh)"
    elif isinstance(value, UnevenTensor):
        where = f"has shards of different shapes ({shapes_of(value._shards)})"
        remedy = "Pad them to one shape"
    elif type(value) in (torch.Tensor, torch.nn.Parameter):
        where = "is a local tensor"
    else:
        where = f"is a {type(value).__name__}"
    raise PlacementError(f"what runs along {lines.mesh_log} takes tensors on it; this one {where}. {remedy}")


def issue_along(
    lines: Lines,
    operation: str,
    inputs: Sequence[torch.Tensor],
    specs: Sequence[Spec] = (),
    into: Sequence[torch.Tensor] = (),
    *,
    root: int = -1,
    reduction: Reduction | None = None,
    splits: ByteSplits = NO_SPLITS,
) -> list[DistributedTensor]:
    """Issue an operation with new results of these specs, or into tensors. Return the results at once."""
    mesh_log = lines.mesh_log
    mesh_log.session.require_open()
    mesh_log.require_alive()
    given, written_to = [on_mesh_of(lines, t) for t in inputs], [on_mesh_of(lines, t) for t in into]
    if (broken := lines.broken) is not None:
        raise NodeFailed(
            f"{lines!r} cannot go on: {broken}. Its members are there: mesh.lines(...) connects them anew"
        )
    if reduction is not None:
        require_reduction(lines.groups[0], reduction, (given or written_to)[0].dtype)
    if operation != "copy":
        require_operation(lines.groups[0], operation)
    home = (given or written_to)[0]._handle.place
    for t in written_to:
        if t._handle.spec.expanded:
            raise NotSupportedError(
                f"{operation} into {t._handle.spec} that is expanded: several elements share memory; "
                "clone it first"
            )
    ins, outs = [t._handle for t in given], [t._handle for t in written_to]

    def put(ins: Sequence[Handle], outs: Sequence[Handle], line: Line) -> list[Handle]:
        return _put(lines, operation, ins, outs, specs, home, root, reduction, splits, line)

    line = user_line()
    if not cuts():
        made = put(ins, outs, line)
    else:
        with covered(line) as note:
            made, count = put(ins, outs, line), len(ins)
            between = Between(
                operation,
                (lines.number, bool(into), root, reduction, splits, tuple(specs)),
                [mesh_log],
                [h.ref for h in (*ins, *outs)],
                [h.ref for h in made],
                [h.storage for h in made],
                lambda given, at: put(given[:count], given[count:], at),
                broken=lambda: lines.broken,
            )
            note(between, [*ins, *outs])
    return [wrap(DistributedTensor, handle) for handle in made] if made else written_to


def _put(
    lines: Lines,
    operation: str,
    ins: Sequence[Handle],
    into: Sequence[Handle],
    specs: Sequence[Spec],
    home: Residence,
    root: int,
    reduction: Reduction | None,
    splits: ByteSplits,
    line: Line,
) -> list[Handle]:
    """Issue an operation along lines; return the values that it makes."""
    mesh_log = lines.mesh_log
    made = [new_value(spec, home) for spec in specs]
    outs = made or into
    op, factor = (None, None) if reduction is None else (reduction.name, reduction.factor)
    options = [root, op, factor, not made, *splits]
    fields = [
        f"group::{operation}",
        [
            lines.number,
            options,
            [operand_fields(h.spec) for h in ins],
            [operand_fields(h.spec) for h in outs],
        ],
        {},
        0,
    ]
    relieve(mesh_log)

    def issue() -> None:
        number = template_number(mesh_log, msgpack.packb(fields), fields)
        words = [number, lines.sequence() & 0x3FFFFFFF, *(h.ref for h in ins), *(h.ref for h in outs)]
        written = [h.storage for h in outs] if not made else []
        concurrent = lines.capabilities.concurrent
        serial = lines.serial if concurrent else groups_of(session_of_log(mesh_log)).launches(mesh_log)
        issue_joint(words, made, ins if made else [*ins, *outs], written, [home], serial, line)

    in_total_order(mesh_log.session, issue)
    return made


def perform(lines: Lines, collective: Collective, x: torch.Tensor) -> torch.Tensor:
    """Issue a collective along lines, below autograd. Return its result on every member, at once."""
    name, by, root, splits = collective
    if isinstance(x, UnevenTensor):
        return _perform_padded(lines, collective, x)
    given = on_mesh_of(lines, x)._handle.spec
    if name == "broadcast" and not 0 <= root < lines.size:
        raise UsageError(f"root is a rank in a line of {lines.size} members, got {root!r}")
    if name == "reduce_scatter" and (not given.size or given.size[0] % lines.size):
        raise NotSupportedError(
            f"reduce_scatter along a mesh cuts the first dimension into {lines.size} equal parts, "
            f"got {tuple(given.size)}: pad it, "
            "or use lists of tensors, dr.primitives.reduce_scatter, which may be uneven"
        )
    if name == "all_to_all":
        spec = contiguous(given, (sum(transposed(splits)[0]), *given.size[1:]))
        return issue_along(lines, name, [x], [spec], splits=byte_splits(splits, given))[0]
    return issue_along(lines, name, [x], [result_of(collective, given, lines.size)], root=root, reduction=by)[
        0
    ]


def _perform_padded(lines: Lines, collective: Collective, x: UnevenTensor) -> torch.Tensor:
    """Issue a collective of lines with tensors of different shapes: pad them to one, and cut the result."""
    require_alike(lines, x)
    into = lines.size if collective.name in ("reduce_scatter", "all_to_all") else 1
    out = lines.size if collective.name in ("all_gather", "all_to_all") else 1
    for k, shard in enumerate(x._shards):
        if shard.shape[0] % into:
            raise NotSupportedError(
                f"{collective.name} along a mesh cuts the first dimension into {lines.size} equal parts, "
                f"member {k} has {tuple(shard.shape)}: pad it"
            )
    whole = padded(x, into)
    if collective.name == "all_to_all":
        rows = whole.shape[0] // into
        collective = collective._replace(splits=((rows,) * lines.size,) * lines.size)
    shapes = [(shard.shape[0] // into, *shard.shape[1:]) for shard in x._shards]
    found = perform(lines, collective, whole)
    assert isinstance(found, DistributedTensor)
    return cut(found, shapes, x._residence, out)


def even_splits(lines: Lines, x: torch.Tensor, output: Sequence[int], inputs: Sequence[int]) -> Splits:
    """Return the splits of an all_to_all along lines; raise `NotSupportedError` unless all are equal."""
    given, size = on_mesh_of(lines, x)._handle.spec, lines.size
    sizes = {int(n) for n in (*output, *inputs)}
    if [len(output), len(inputs)] != [size] * 2 or len(sizes) > 1 or given.size[:1] != (sum(inputs),):
        raise NotSupportedError(
            f"all_to_all along a mesh: each of a line's {size} members sends as many rows to each, which are "
            f"all that it has; got {tuple(given.size)}, sends {list(inputs)}, gets {list(output)}. Uneven "
            "parts are for lists of tensors: dr.functional.all_to_all"
        )
    return (tuple(int(n) for n in inputs),) * size


class LineMembers:
    """The members of a mesh, who have one tensor for all of them, and do collectives along these lines."""

    __slots__ = ("_lines", "size")

    def __init__(self, lines: Lines) -> None:
        self._lines, self.size = lines, lines.size

    def perform(self, collective: Collective, tensors: Tensors) -> Tensors:
        """Issue a collective of one tensor and return its result.

        After a reduce only the root has no zeros.
        """
        lines, (x,) = self._lines, tensors
        if collective.name == "reduce":
            total = perform(lines, collective._replace(name="all_reduce", root=-1), x)
            return [total * (lines.ranks() == collective.root).to(total.dtype)]
        return [perform(lines, collective, x)]

    def others(self, gathered: Tensors) -> Tensors:
        """Return the rows that are not the member's own: each member leaves out another one."""
        (rows,) = gathered
        places = torch.arange(self.size - 1, device=rows.device)
        return [rows.index_select(0, places + (places >= self._lines.ranks()).to(torch.int64))]


def permuted(lines: Lines, x: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
    """Return, at each member, the tensor of the member of its line that sends to it. Return at once.

    The member of rank k sends to `targets[k]`; each rank is the target of one. Autograd sends gradients back.
    """
    splits = tuple(tuple(int(rank == target) for rank in range(lines.size)) for target in targets)
    rows = differentiable(LineMembers(lines), Collective("all_to_all", splits=splits), [x.unsqueeze(0)])
    return rows[0].squeeze(0)
