"""The orders of torch's pipeline schedules, as one order in which this process issues everything.

torch's schedules are written for one rank for each stage, or for some stages. Each rank has an order of its
own. One process issues for all of them here, so their orders are merged. Each place's part keeps its order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.pipelining import schedules as _torch_schedules

from ..errors import ConfigurationError

_torch: Any = _torch_schedules

NAMES = (
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
# What stages do in a step. The other actions send and receive, which nobody has to do within one process.
_DONE_HERE = ("F", "I", "W", "B", "UNSHARD", "RESHARD", "OVERLAP_F_B", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")

Orders = dict[int, list[Any]]


class _StandIn:
    """A stage as torch's schedules see it while they make their orders: it is on rank 0 of several."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, 0
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.submod = None


def class_named(name: object) -> Any:
    """Return torch's class of a schedule; raise `ConfigurationError` for another name."""
    known = {one.lower(): one for one in NAMES}
    if not isinstance(name, str) or name.lower() not in known:
        raise ConfigurationError(f"torch has no pipeline schedule {name!r}; there are {', '.join(NAMES)}")
    return _torch.get_schedule_class(known[name.lower()])


def ranks_of(name: str, homes: Sequence[object]) -> int:
    """Return for how many ranks a schedule is made that has stages at these homes.

    Raises `ConfigurationError` where the stages are not at the homes that the schedule wants.
    """
    found = class_named(name)
    if issubclass(found, _torch.PipelineScheduleSingle):
        return len(homes)
    distinct = list(dict.fromkeys(homes))
    ranks, stages = len(distinct), len(homes)
    if found in (_torch.ScheduleZBVZeroBubble, _torch.ScheduleDualPipeV):
        wanted = [*range(ranks), *reversed(range(ranks))]
        shape = "two stages on each place, in the shape of a V"
        if stages % 2 == 0:
            half = stages // 2
            wanted = [*range(half), *reversed(range(half))]
    else:
        wanted = [k % ranks for k in range(stages)]
        shape = "stage k on place k % places, as many on each"
    got = [distinct.index(home) for home in homes]
    if got != wanted or stages % len(set(wanted)):
        want = (
            f"for {stages} stages the places {wanted}"
            if len(wanted) == stages
            else "an even number of stages"
        )
        raise ConfigurationError(
            f"{name} has {shape}: {want}; the stages are at the places {got}, numbered as they first occur. "
            'Move the stages, or choose "1F1B" or "GPipe", which take a stage anywhere'
        )
    return ranks


def orders_of(name: str, stages: int, ranks: int, microbatches: int) -> Orders:
    """Return each rank's order of torch's schedule, with what FSDP2 has to do in it.

    Raises `ConfigurationError` for numbers that the schedule does not take.
    """
    found = class_named(name)
    local = stages // ranks
    stand_ins = [_StandIn(k * ranks, stages, ranks) for k in range(local)]
    try:
        if issubclass(found, _torch.PipelineScheduleSingle):
            made = found(stand_ins[0], microbatches)
            return lowered(_counted(made.pipeline_order), stages, ranks, microbatches)
        return _kept(found(stand_ins, microbatches).pipeline_order_with_comms)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"{name} does not take {microbatches} micro-batches for {stages} stages on {ranks} places: "
            f"{error}"
        ) from None


def forward_orders(orders: Mapping[int, Sequence[Any]]) -> Orders:
    """Return the forward passes alone, with what FSDP2 has to do in them."""
    kind = _torch._ComputationType.FORWARD
    forward: Orders = {
        rank: [
            part
            for action in order
            for part in (action.sub_actions or (action,))
            if part.computation_type is kind
        ]
        for rank, order in orders.items()
    }
    return {rank: _torch._add_unshard_reshard(order) for rank, order in forward.items()}


def lowered(orders: Orders, stages: int, ranks: int, microbatches: int) -> Orders:
    """Return orders of passes with what FSDP2 has to do in them, as torch adds it."""
    runtime = _torch._PipelineScheduleRuntime([_StandIn(0, stages, ranks)], microbatches)
    runtime._prepare_schedule_with_comms(orders)
    return _kept(runtime.pipeline_order_with_comms)


def _kept(orders: Mapping[int, Sequence[Any]]) -> Orders:
    return {
        rank: [
            action for action in order if action is not None and action.computation_type.value in _DONE_HERE
        ]
        for rank, order in orders.items()
    }


def _counted(orders: Mapping[int, Sequence[Any]]) -> Orders:
    """Return the passes of these orders, each kind numbered in its order.

    torch draws the orders of 1F1B for people, and begins the last rank's forward passes with micro-batch 1.
    """
    found: Orders = {}
    for rank, order in orders.items():
        counts: dict[str, int] = {}
        found[rank] = []
        for action in order:
            if action is None or not action.is_compute_op:
                continue
            kind = action.computation_type
            found[rank].append(action._replace(microbatch_index=counts.get(kind.value, 0)))
            counts[kind.value] = counts.get(kind.value, 0) + 1
    return found


def merged(orders: Mapping[int, Sequence[Any]], last: int) -> list[Any]:
    """Return one order of everything, in which each rank's part has its own order.

    In each round every rank does its next action if what it needs has been done. `last` is the last stage.
    """
    left = {rank: list(order) for rank, order in orders.items()}
    done: set[tuple[int, str, int]] = set()
    found: list[Any] = []
    while any(left.values()):
        round_of = [
            (rank, order[0]) for rank, order in left.items() if order and _ready(order[0], done, last)
        ]
        if not round_of:
            stuck = ", ".join(str(order[0]) for order in left.values() if order)
            raise ConfigurationError(f"the orders of this schedule wait for each other: {stuck}")
        for rank, action in round_of:
            _note(action, done)
            found.append(left[rank].pop(0))
    return found


def _ready(action: Any, done: set[tuple[int, str, int]], last: int) -> bool:
    if action.sub_actions is not None:
        before = set(done)
        for part in action.sub_actions:
            if not _ready(part, before, last):
                return False
            _note(part, before)
        return True
    stage, k = action.stage_index, action.microbatch_index
    match action.computation_type.value:
        case "F":
            return stage == 0 or (stage - 1, "F", k) in done
        case "B" | "I":
            return (stage, "F", k) in done and (stage == last or (stage + 1, "I", k) in done)
        case "W":
            return (stage, "I", k) in done
    return True


def _note(action: Any, done: set[tuple[int, str, int]]) -> None:
    for part in action.sub_actions or (action,):
        # The gradient of a stage's inputs is there after a whole backward pass, too.
        kind = "I" if part.computation_type.value == "B" else part.computation_type.value
        done.add((part.stage_index, kind, part.microbatch_index))


def grid(orders: Mapping[int, Sequence[Any]]) -> list[str]:
    """Return each rank's passes as a line of words such as 0F1: stage, kind, micro-batch."""
    return [
        " ".join(
            f"{part.stage_index}{part.computation_type.value}{part.microbatch_index}"
            for action in order
            for part in (action.sub_actions or (action,))
            if part.is_compute_op
        )
        for _, order in sorted(orders.items())
    ]
