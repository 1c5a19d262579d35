"""Collectives with torch.distributed's names and meaning, for one tensor of each member of a group.

The tensors are written, as in torch.distributed. Where a gradient is wanted, the functional form does the
work, and its results are copied over them. Each function returns None at once, and runs on the members'
current streams. With `async_op` it runs beside them, and the function returns a `Work` at once. Roots are
node numbers or places (`src=`, `dst=`), or ranks of the group (`group_src=`, `group_dst=`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import UsageError, WaitTimeout, without_our_frames
from ..log.line import line_text, user_line
from ..log.progress import issued_at
from ..session.spelling import homes_of
from ..session.timeouts import checked, deadline_in, left_until
from ..streams.stream import Event, current_stream
from ..wire.deadlines import ASK
from ..wire.messages import AskStatus
from . import functional
from .arguments import alike_each, expect, lists_each, one_each, root_of, rows_of, session_of
from .group import ProcessGroup, Where
from .groups import groups_of
from .operation import (
    Lists,
    Remote,
    Tensors,
    all_expect,
    at_root,
    each,
    expect_whole,
    issue_in_place,
    only,
    require_operation,
)
from .reductions import Op, ReduceOp, reduction_for
from .splits import byte_splits, require_splits, splits_of, transposed
from .work import Work


@without_our_frames
def all_reduce(
    tensors: Tensors, op: Op = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Make every member's tensor the reduction of all."""
    found, given, spec = alike_each(group, tensors, "tensors")
    require_operation(found, "all_reduce")
    by = reduction_for(found, op, spec.dtype)
    rows = each(given)
    return issue_in_place(
        found,
        "all_reduce",
        rows,
        rows,
        lambda: functional.all_reduce(given, op, found),
        given,
        async_op,
        reduction=by,
    )


@without_our_frames
def broadcast(
    tensors: Tensors,
    src: Where | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Make every member's tensor the root's."""
    found, given, _ = alike_each(group, tensors, "tensors")
    require_operation(found, "broadcast")
    root = root_of(found, src, group_src, ("src", "group_src"))

    def values() -> Tensors:
        copies = functional.broadcast(given[root], found)
        return [value for k, value in enumerate(copies) if k != root]

    others: Remote = [[] if k == root else [t] for k, t in enumerate(given)]
    return issue_in_place(
        found, "broadcast", only(root, [given[root]], len(given)), others, values, given, async_op, root=root
    )


@without_our_frames
def reduce(
    tensors: Tensors,
    dst: Where | None = None,
    op: Op = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Make the root's tensor the reduction of all; the others stay as they are."""
    found, given, spec = alike_each(group, tensors, "tensors")
    require_operation(found, "reduce")
    by = reduction_for(found, op, spec.dtype)
    root = root_of(found, dst, group_dst, ("dst", "group_dst"))
    return issue_in_place(
        found,
        "reduce",
        each(given),
        only(root, [given[root]], len(given)),
        lambda: [functional.reduce(given, op=op, group=found, group_dst=root)],
        given,
        async_op,
        root=root,
        reduction=by,
    )


@without_our_frames
def all_gather(
    tensor_lists: Lists, tensors: Tensors, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Fill each member's list with all members' tensors, in the order of ranks."""
    found, given, spec = alike_each(group, tensors, "tensors")
    require_operation(found, "all_gather")
    lists = lists_each(found, tensor_lists, "tensor_lists", given)
    all_expect(lists, spec.size, spec.dtype, "tensor_lists")

    def values() -> Tensors:
        gathered = functional.all_gather([t.reshape(-1) for t in given], found)
        return [part.view(spec.size) for whole in gathered for part in whole.chunk(found.size())]

    return issue_in_place(found, "all_gather", each(given), lists, values, lists, async_op)


@without_our_frames
def all_gather_into_tensor(
    output_tensors: Tensors, input_tensors: Tensors, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Fill each member's output with all members' inputs, joined along the first or a new dimension."""
    found, given, spec = alike_each(group, input_tensors, "input_tensors")
    require_operation(found, "all_gather")
    _, outs = one_each(found, output_tensors, "output_tensors")
    expect_whole(outs, spec, found.size(), "output_tensors")

    def values() -> Tensors:
        gathered = functional.all_gather([t.reshape(-1) for t in given], found)
        return [whole.view(out.shape) for out, whole in zip(outs, gathered)]

    return issue_in_place(found, "all_gather", each(given), each(outs), values, outs, async_op)


@without_our_frames
def gather(
    tensors: Tensors,
    gather_list: Tensors | None = None,
    dst: Where | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Fill `gather_list`, tensors of the root, with all members' tensors, in the order of ranks."""
    found, given, spec = alike_each(group, tensors, "tensors")
    require_operation(found, "gather")
    root = root_of(found, dst, group_dst, ("dst", "group_dst"))
    outs = at_root(found, root, gather_list, "gather_list")
    all_expect([outs], spec.size, spec.dtype, "gather_list")
    return issue_in_place(
        found,
        "gather",
        each(given),
        only(root, outs, len(given)),
        lambda: functional.gather(given, group=found, group_dst=root),
        outs,
        async_op,
        root=root,
    )


@without_our_frames
def scatter(
    tensors: Tensors,
    scatter_list: Tensors | None = None,
    src: Where | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Fill each member's tensor with its own of `scatter_list`, tensors of the root."""
    found, given, spec = alike_each(group, tensors, "tensors")
    require_operation(found, "scatter")
    root = root_of(found, src, group_src, ("src", "group_src"))
    parts = at_root(found, root, scatter_list, "scatter_list")
    all_expect([parts], spec.size, spec.dtype, "scatter_list")
    return issue_in_place(
        found,
        "scatter",
        only(root, parts, len(given)),
        each(given),
        lambda: functional.scatter(parts, found),
        given,
        async_op,
        root=root,
    )


@without_our_frames
def reduce_scatter(
    outputs: Tensors,
    input_lists: Lists,
    op: Op = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the members' lists place by place, and give member k the k-th result."""
    found, outs, spec = alike_each(group, outputs, "outputs")
    require_operation(found, "reduce_scatter")
    by = reduction_for(found, op, spec.dtype)
    lists = lists_each(found, input_lists, "input_lists", outs)
    all_expect(lists, spec.size, spec.dtype, "input_lists")

    def values() -> Tensors:
        joined = [torch.cat([t.reshape(-1) for t in row]) for row in lists]
        return [v.view(spec.size) for v in functional.reduce_scatter(joined, op, found)]

    return issue_in_place(found, "reduce_scatter", lists, each(outs), values, outs, async_op, reduction=by)


@without_our_frames
def reduce_scatter_tensor(
    outputs: Tensors,
    inputs: Tensors,
    op: Op = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the members' inputs, and give each member its part, along the first or a new dimension."""
    found, outs, spec = alike_each(group, outputs, "outputs")
    require_operation(found, "reduce_scatter")
    by = reduction_for(found, op, spec.dtype)
    _, given, _ = alike_each(found, inputs, "inputs")
    expect_whole(given, spec, found.size(), "inputs")

    def values() -> Tensors:
        reduced = functional.reduce_scatter([t.reshape(-1) for t in given], op, found)
        return [v.view(spec.size) for v in reduced]

    return issue_in_place(
        found, "reduce_scatter", each(given), each(outs), values, outs, async_op, reduction=by
    )


@without_our_frames
def all_to_all(
    output_tensor_lists: Lists,
    input_tensor_lists: Lists,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Give member j the j-th tensor of every member's list.

    `output_tensor_lists[j][i]` becomes `input_tensor_lists[i][j]`.
    """
    first = rows_of(input_tensor_lists, "input_tensor_lists")
    ins = lists_each(group, input_tensor_lists, "input_tensor_lists", first)
    found, _ = one_each(group, first, "input_tensor_lists")
    outs = lists_each(found, output_tensor_lists, "output_tensor_lists", first)
    require_operation(found, "all_to_all")
    dtype = ins[0][0].dtype
    for i, row in enumerate(ins):
        for j, t in enumerate(row):
            expect(t, t.shape, dtype, f"input_tensor_lists[{i}][{j}]")
            expect(outs[j][i], t.shape, dtype, f"output_tensor_lists[{j}][{i}]")

    def values() -> Tensors:
        return [value for row in functional.all_to_all(ins, found) for value in row]

    sizes = tuple(tuple(t.numel() * dtype.itemsize for t in row) for row in ins)
    return issue_in_place(
        found, "all_to_all", ins, outs, values, outs, async_op, splits=(sizes, transposed(sizes))
    )


@without_our_frames
def all_to_all_single(
    outputs: Tensors,
    inputs: Tensors,
    output_split_sizes: Sequence[Sequence[int]] | None = None,
    input_split_sizes: Sequence[Sequence[int]] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Give member j its part of every member's input, one after the other along the first dimension.

    The split sizes have a row for each member: `input_split_sizes[i][j]` rows go from i to j, and
    `output_split_sizes[j][i]` says the same;
    one of the two is enough, and without them the parts are equal.
    """
    found, given = one_each(group, inputs, "inputs")
    require_operation(found, "all_to_all")
    _, outs = one_each(found, outputs, "outputs")
    if output_split_sizes is not None:
        require_splits(found, output_split_sizes, "output_split_sizes")
        if input_split_sizes is None:
            input_split_sizes = [list(column) for column in zip(*output_split_sizes)]
    splits = splits_of(found, given, input_split_sizes, "input_split_sizes")
    if output_split_sizes is not None and [list(row) for row in output_split_sizes] != [
        list(column) for column in zip(*splits)
    ]:
        raise UsageError(
            f"output_split_sizes {output_split_sizes!r} do not say the same as "
            f"input_split_sizes {[list(row) for row in splits]}: rows are members"
        )
    for j, out in enumerate(outs):
        expect(out, (sum(row[j] for row in splits), *given[0].shape[1:]), given[0].dtype, f"outputs[{j}]")

    return issue_in_place(
        found,
        "all_to_all",
        each(given),
        each(outs),
        lambda: functional.all_to_all_single(given, splits, group=found),
        outs,
        async_op,
        splits=byte_splits(splits, given[0]._handle.spec),
    )


@without_our_frames
def barrier(
    group: ProcessGroup | None = None, async_op: bool = False, timeout: float | None = None
) -> Work | None:
    """Block until every member has got to this point of the program on its current stream.

    Raises `WaitTimeout` after `timeout` seconds (default: the group's). It names the late members and
    their work. With `async_op` return at once. A current stream then waits for all members when
    `Work.wait` is called.
    """
    session, timeout = session_of(group), checked(timeout)
    found = groups_of(session).of(homes_of(session, None)) if group is None else group
    require_operation(found, "barrier")
    before = {
        rank: current_stream(p.node, p.local_device).record_event() for rank, p in enumerate(found.places)
    }
    nothing: Remote = [[]] * found.size()
    work = issue_in_place(found, "barrier", nothing, nothing, list, [], async_op, everything=True)
    if work is not None:
        return work
    limit = found.timeout if timeout is None else timeout
    deadline = deadline_in(limit)
    events = [current_stream(p.node, p.local_device).record_event() for p in found.places]
    for event in events:
        try:
            event.synchronize(left_until(deadline))
        except WaitTimeout:
            break
    else:
        return None
    late = [text for rank, event in before.items() if (text := _late(found, rank, event))]
    raise WaitTimeout(
        f"barrier of {found!r}: not all have come within {limit:g} s\n"
        + "".join(f"  {text}\n" for text in late or ["all have come, but not left yet"])
        + f"  waited for at {line_text(user_line())}\n"
        "  it goes on; wait again with another barrier, or see dr.nodes()"
    )


def _late(group: ProcessGroup, rank: int, event: Event) -> str:
    """Return what a member does that has not come to a barrier. Return "" if it has come to `event`."""
    home = group.homes[rank]
    node, session = home.worker, group.session
    asked = session.ask(node, AskStatus)
    if not session.result(asked, ASK.get()) or asked.lost is not None:
        session.requests.discard(asked)
        return f"rank {rank}, {home.place}, is late: {node} does not answer"
    if event.query():
        return ""
    position, name, seconds = asked.value
    doing = f"has run {name} for {seconds:.1f} s" if name is not None else "runs nothing just now"
    where = issued_at(node, position)
    return f"rank {rank}, {home.place}, is late: {node} {doing}" + (f", issued at {where}" if where else "")


@without_our_frames
def destroy_process_group(group: ProcessGroup) -> None:
    """Close a group, after what has been issued to it. Return at once."""
    group.close()
