"""Issuing one operation of a group: an instruction for each node that has members, all at one moment.

Also what the tensors of members have to be that an operation writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgpack
import torch

from ..errors import NotSupportedError, UsageError
from ..log.handle import Handle, Residence, new_value
from ..log.issue import Between, covered, issue_joint, template_number
from ..log.line import Line, user_line
from ..log.log import relieve
from ..log.node import Node
from ..log.spec import Spec, operand_fields
from ..log.storage import require_writable
from ..log.tape import cuts
from ..log.total_order import in_total_order
from ..operators.signatures import count_written, versions_of
from ..tensors.tensor import DistributedTensor
from ..wire.data_channel import Reduction
from .arguments import at, expect, tensor
from .group import ProcessGroup
from .groups import groups_of
from .splits import NO_SPLITS, ByteSplits
from .work import Outputs, Work, aside

# The first are what a member puts in. The second are its results: new values, or tensors that are written.
Operands = tuple[Sequence[Handle], Sequence[Handle]]

# A group remembers so many operations.
_MOST = 1 << 12


class _Operation(NamedTuple):
    """What an operation is, apart from its operands."""

    name: str
    inplace: bool
    root: int
    reduction: Reduction | None
    splits: ByteSplits


def issue_operation(
    group: ProcessGroup,
    operation: str,
    parts: Sequence[Operands],
    *,
    inplace: bool = False,
    root: int = -1,
    reduction: Reduction | None = None,
    splits: ByteSplits = NO_SPLITS,
) -> None:
    """Issue an operation with these parts, by rank. Block only while a window is full.

    The caller has checked what it can check. Nothing is sent to members on lost nodes. They fail with
    their node.
    """
    what, line = _Operation(operation, inplace, root, reduction, splits), user_line()
    if cuts():
        with covered(line) as note:
            _issue(group, what, parts, line)
            note(*_between(group, what, parts))
    else:
        _issue(group, what, parts, line)


def _issue(group: ProcessGroup, what: _Operation, parts: Sequence[Operands], line: Line) -> None:
    group.require()
    operation, inplace = what.name, what.inplace
    if inplace:
        require_writable([h.storage for _, outs in parts for h in outs], line)
    # Only a copy may have its operands elsewhere than the group has its members: see `Groups.between`.
    homes = (
        [_home(group, rank, part) for rank, part in enumerate(parts)] if operation == "copy" else group.homes
    )
    for home, (ins, outs) in zip(group.homes, parts):
        for handle in (*ins, *outs):
            # It may be of the worker before this one: the place is the same, and the ref another value's.
            if handle.place.node is not home.node:
                handle.place.node.require_alive()
    compiled = _compiled(group, what, parts, homes)

    def issue() -> None:
        # Another thread may have closed the group meanwhile, and then no worker knows it.
        group.require()
        sequence, begun = group.sequence() & 0x3FFFFFFF, False
        groups, capabilities = groups_of(group.session), group.capabilities
        try:
            for node, ranks in group.own.items():
                operands = [h for rank in ranks for h in parts[rank][0]]
                outputs = [h for rank in ranks for h in parts[rank][1]]
                if not capabilities.concurrent:
                    serial = groups.launches(node)
                elif operation != "copy" or not capabilities.tags:
                    # The group's operations keep their order, whatever streams they are on.
                    serial = group.serial[node]
                else:
                    # A copy has a tag of its own, so it may overtake.
                    serial = None
                words = [template_number(node, *compiled[node]), sequence]
                words += [h.ref for rank in ranks for handles in parts[rank] for h in handles]
                begun = True
                issue_joint(
                    words,
                    [] if inplace else outputs,
                    [*operands, *outputs] if inplace else operands,
                    [h.storage for h in outputs] if inplace else [],
                    [homes[rank] for rank in ranks],
                    serial,
                    line,
                )
        except BaseException as error:
            # A signal's handler may raise here. Some members would wait for the others for half an hour.
            if begun:
                groups.end(
                    group,
                    f"{operation} was issued to some of its members only, "
                    f"as {type(error).__name__} came between",
                )
            raise

    in_total_order(group.session, issue)
    for node in group.own:
        relieve(node)


def _between(
    group: ProcessGroup, what: _Operation, parts: Sequence[Operands]
) -> tuple[Between, list[Handle]]:
    """Return what issues the operation again in a program, and what it reads."""
    inplace = what.inplace
    reads = [h for ins, outs in parts for h in ((*ins, *outs) if inplace else ins)]
    makes = [] if inplace else [h for _, outs in parts for h in outs]
    shape = [(len(ins), [(h.spec, h.place) for h in outs]) for ins, outs in parts]

    def again(given: Sequence[Handle], line: Line) -> Sequence[Handle]:
        values, fresh, now = iter(given), list[Handle](), list[Operands]()
        for inputs, outputs in shape:
            ins = [next(values) for _ in range(inputs)]
            outs = [next(values) if inplace else new_value(*output) for output in outputs]
            now.append((ins, outs))
            fresh += outs
        _issue(group, what, now, line)
        return [] if inplace else fresh

    specs = tuple((count, tuple(spec for spec, _ in outs)) for count, outs in shape)
    between = Between(
        what.name,
        (group.number, *what[1:], specs),
        list(group.own),
        [h.ref for h in reads],
        [h.ref for h in makes],
        [h.storage for h in makes],
        again,
        broken=lambda: group.broken or ("a group was closed" if group.closed else None),
    )
    return between, reads


def _require_written(operation: str, parts: Sequence[Operands]) -> None:
    """Raise `UsageError` for an output that cannot be written: its worker would break the group."""
    for _, outs in parts:
        for handle in outs:
            if handle.spec.expanded:
                raise UsageError(
                    "unsupported operation: more than one element of the written-to tensor refers to "
                    "a single memory location: "
                    f"{operation} into {handle.spec} with strides {handle.spec.stride}. Clone it first"
                )


def _compiled(
    group: ProcessGroup, what: _Operation, parts: Sequence[Operands], homes: Sequence[Residence]
) -> dict[Node, tuple[bytes, list[object]]]:
    """Return, by node, what `Node.template` takes: as before, where the group has had such an operation."""
    key = (
        what,
        *[(tuple([h.spec for h in ins]), tuple([h.spec for h in outs])) for ins, outs in parts],
        *([home.place.local_device for home in homes] if what.name == "copy" else ()),
    )
    known = group.templates.get(key)
    if known is not None:
        return known
    if what.inplace:
        _require_written(what.name, parts)
    if len(group.templates) >= _MOST:
        group.templates.clear()
    op, factor = (None, None) if what.reduction is None else (what.reduction.name, what.reduction.factor)
    options: list[object] = [what.root, op, factor, what.inplace, *what.splits]
    compiled: dict[Node, tuple[bytes, list[object]]] = {}
    for node, ranks in group.own.items():
        members = [
            [
                rank,
                homes[rank].place.local_device,
                [operand_fields(h.spec) for h in parts[rank][0]],
                [operand_fields(h.spec) for h in parts[rank][1]],
            ]
            for rank in ranks
        ]
        fields = [f"group::{what.name}", [group.number, options, members], {}, 0]
        compiled[node] = msgpack.packb(fields), fields
    # Ctrl-C may strike above: half of it is never remembered.
    group.templates[key] = compiled
    return compiled


def _home(group: ProcessGroup, rank: int, part: Operands) -> Residence:
    """Return where a member of a copy has its tensor: the group may stand for all devices of two nodes."""
    ins, outs = part
    return ins[0].place if ins else outs[0].place if outs else group.homes[rank]


def require_operation(group: ProcessGroup, operation: str) -> None:
    """Raise `NotSupportedError` if the group's data channel lacks an operation."""
    if operation not in group.capabilities.operations:
        have = ", ".join(sorted(group.capabilities.operations)) or "nothing"
        raise NotSupportedError(
            f"the data channel {group.backend!r} has no {operation}, only {have}: "
            "make a group with another, dr.distributed.new_group(..., backend=...)"
        )


Tensors = Sequence[torch.Tensor]
Lists = Sequence[Sequence[torch.Tensor]]
Remote = Sequence[Sequence[DistributedTensor]]


def issue_in_place(
    group: ProcessGroup,
    operation: str,
    inputs: Remote,
    outputs: Remote,
    values: Callable[[], Tensors],
    result: Outputs,
    async_op: bool,
    *,
    root: int = -1,
    reduction: Reduction | None = None,
    splits: ByteSplits = NO_SPLITS,
    everything: bool = False,
) -> Work | None:
    """Issue an operation that writes `outputs`, rank by rank.

    Where a gradient is wanted, `values` issues the functional form, and what it returns is copied over them.
    With `async_op` it runs on streams of the group's own, and a `Work` with this `result` waits for it.
    """

    def run() -> None:
        if _wants_gradient(outputs, inputs):
            for out, value in zip((t for row in outputs for t in row), values()):
                out.copy_(value)
            return
        parts: list[Operands] = [
            ([t._handle for t in ins], [t._handle for t in outs]) for ins, outs in zip(inputs, outputs)
        ]
        written = [t for row in outputs for t in row]
        before = versions_of(written)
        try:
            issue_operation(
                group, operation, parts, inplace=True, root=root, reduction=reduction, splits=splits
            )
            torch.autograd.graph.increment_version(written)
        except BaseException:
            # What a signal's handler raises may strike when the operation is in the logs.
            count_written(before)
            raise

    if not async_op:
        run()
        return None
    return Work(repr(group), aside(group.streams, group.homes, everything, run), result)


def _wants_gradient(outputs: Remote, inputs: Remote) -> bool:
    """Return whether a gradient is wanted; raise what torch raises for outputs that cannot be written then.

    Nothing has been issued when it raises.
    """
    if not torch.is_grad_enabled():
        return False
    written = [t for row in outputs for t in row if t.requires_grad]
    if any(t.is_leaf for t in written):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    return bool(written) or any(t.requires_grad for row in inputs for t in row)


def each(tensors: Sequence[DistributedTensor]) -> Remote:
    """Return a row for each member, with its one tensor."""
    return [[t] for t in tensors]


def only(root: int, row: Sequence[DistributedTensor], size: int) -> Remote:
    """Return a row for each member, which is empty but for the root's."""
    return [row if rank == root else [] for rank in range(size)]


def all_expect(
    lists: Sequence[Sequence[DistributedTensor]], size: Sequence[int], dtype: torch.dtype, name: str
) -> None:
    for i, row in enumerate(lists):
        for j, t in enumerate(row):
            expect(t, size, dtype, f"{name}[{i}][{j}]" if len(lists) > 1 else f"{name}[{j}]")


def expect_whole(tensors: Sequence[DistributedTensor], part: Spec, size: int, name: str) -> None:
    """Raise `UsageError` unless each is what `size` tensors like `part` give, joined or stacked."""
    stacked = (size, *part.size)
    joined = (part.size[0] * size, *part.size[1:]) if part.size else (size,)
    for k, t in enumerate(tensors):
        if tuple(t.shape) not in (stacked, joined) or t.dtype != part.dtype:
            raise UsageError(
                f"{name}[{k}] must be {joined} or {stacked} {str(part.dtype)[6:]}, got {t._handle.spec}"
            )


def at_root(group: ProcessGroup, root: int, tensors: object, name: str) -> list[DistributedTensor]:
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence) or len(tensors) != group.size():
        raise UsageError(
            f"{name} must be a list of {group.size()} tensors, one for each member, on {group.places[root]}"
        )
    return [at(group, root, tensor(t, f"{name}[{k}]"), f"{name}[{k}]") for k, t in enumerate(tensors)]
