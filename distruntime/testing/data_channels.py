"""The suite that each data channel passes (`docs/data_channel.md`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import cast

import torch

import distruntime as dr

from ..collectives.groups import groups_of
from ..collectives.reductions import Op
from ..session.session import active_session
from ..wire.data_channel import MOVES, REDUCES
from .expected import (
    KINDS,
    LARGE,
    Drawn,
    accelerator_of,
    killed,
    move_to,
    reduced_here,
    reduction_op,
    require_same,
    text_of,
)

_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
# A member's death must be noticed within so many seconds.
_PROMPT = 30.0
_ROUNDS = 3


def check_data_channel(
    channel: str | type[dr.distributed.DataChannel], sizes: Sequence[int] = (2, 3)
) -> None:
    """Check that a data channel does what its `capabilities` declare, and refuses the rest.

    Block for seconds.

    Operations give what is computed here, for each dtype and reduction declared; tensors of all dtypes,
    empty, strided and large ones (16 MiB) arrive whole; copies on several streams do not disturb each other;
    groups can be closed and made again; a member that is killed ends the others' waiting. Workers are started
    here, as many as the largest of `sizes`, and ended. Where a session is open, made with this data channel,
    its workers are used, and none is killed.

    Args:
        channel: a name, or a subclass of `DataChannel`, which is registered by its own name.
        sizes: of the groups to try, at least 2 each.

    Raises:
        AssertionError: something is not as declared; the text names operation, dtype and size. UsageError: it
            cannot be tried here.
    """
    name = channel if isinstance(channel, str) else channel.__name__
    if not isinstance(channel, str):
        dr.distributed.register_data_channel(name, channel)
    if not sizes or min(sizes) < 2:
        raise dr.errors.UsageError(f"sizes are numbers of members, at least 2 each, got {sizes!r}")
    ours = not dr.is_initialized()
    if ours:
        dr.init_master_worker(world_size=max(sizes), data_channel=name, quiet=True)
    try:
        for size in sizes:
            _Check(name, size).all()
        dr.synchronize()
        if ours:
            _Check(name, max(sizes)).deaths()
    finally:
        if ours:
            # Nodes that were killed raise here, and so may what failed before.
            with suppress(dr.DistruntimeError):
                dr.shutdown()


class _Check(Drawn):
    """The checks with one number of members."""

    def __init__(self, name: str, size: int) -> None:
        if len(dr.nodes()) < size:
            raise dr.errors.UsageError(
                f"groups of {size} members are tried, and the session has {len(dr.nodes())} nodes: give "
                "sizes="
            )
        self.name, self.size = name, size
        homes = [active_session().places.residence(dr.place(k, "cpu")) for k in range(size)]
        if groups_of(active_session()).channels.name_for(homes, None) != name:
            raise dr.errors.UsageError(
                f"copies in this session use another data channel: open it with data_channel={name!r}"
            )
        self.places = [dr.place(k, "cpu") for k in range(size)]
        try:
            self.group = dr.distributed.new_group(self.places, backend=name)
        except dr.errors.NotSupportedError:
            # This data channel takes tensors of GPUs only.
            self.places = [accelerator_of(k) for k in range(size)]
            self.group = dr.distributed.new_group(self.places, backend=name)
        self.has = self.group.capabilities
        super().__init__(self.places, seed=size)

    def all(self) -> None:
        """Run the checks that leave the session as it was."""
        self.refusals()
        for operation in sorted(self.has.operations):
            cast(Callable[[], None], getattr(self, operation))()
        if "send" in self.has.operations and self.has.tags:
            self.streams()
        self.again()
        self.group.close()

    # -- help ----------------------------------------------------------------------------------------------

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Raise `AssertionError`, naming what was tried, for whatever is raised in a `with` block."""
        try:
            yield
        except (dr.DistruntimeError, AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise AssertionError(
                f"data channel {self.name!r}, {self.size} members, {what}: {error}"
            ) from error

    def shapes(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtypes and shapes that every operation which moves data is tried with."""
        return [*((dtype, (5, 3)) for dtype in KINDS), (torch.float32, ()), (torch.int32, (0, 4))]

    # -- what moves ----------------------------------------------------------------------------------------

    def send(self) -> None:
        """Copies: of every dtype and form, and between every two members."""
        for dtype, shape in [*self.shapes(), (torch.float32, (LARGE,))]:
            self._copy(0, 1, self.draw(dtype, *shape), lambda x: x)
        base = self.draw(torch.float32, 64, 48)
        for form in (
            torch.t,
            lambda x: x[::3, 1::2],
            lambda x: x[1:2].expand(8, 48),
            lambda x: x.to(torch.complex64).conj(),
        ):
            self._copy(1, 0, base, form)
        for source in range(self.size):
            for target in {*range(self.size)} - {source}:
                self._copy(source, target, self.draw(torch.float32, 1000), lambda x: x)

    def _copy(
        self, source: int, target: int, value: torch.Tensor, form: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        wanted = form(value)
        with self.trying(f"copy from rank {source} to {target} of {text_of(wanted)}"):
            moved = move_to(form(self.at(source, value)), self.places[target])
            require_same([moved], [wanted])

    def streams(self) -> None:
        """Copies side by side: four pairs of streams, both ways, and all arrive where they should."""
        here, there = self.places[:2]
        pairs = [
            (dr.Stream(here.node, here.local_device), dr.Stream(there.node, there.local_device))
            for _ in range(4)
        ]
        values = [self.draw(torch.int32, 1 << 16) + 10 * k for k in range(len(pairs))]
        forth, back = self.there_at(0, values), self.there_at(1, [-v for v in values])
        with self.trying(
            f"{len(pairs)} copies of {text_of(values[0])} at once, each on a stream of its own, both ways"
        ):
            for _ in range(_ROUNDS):
                arrived = []
                for k, (first, second) in enumerate(pairs):
                    with dr.stream(first), dr.stream(second):
                        arrived += [move_to(forth[k], there), move_to(back[k], here)]
                require_same(arrived, [form for v in values for form in (v, -v)])

    def broadcast(self) -> None:
        for dtype, shape in [*self.shapes(), (torch.float32, (LARGE,))]:
            for root in (0, self.size - 1) if shape != (LARGE,) else (0,):
                rows = self.rows(dtype, *shape)
                with self.trying(f"broadcast from rank {root} of {text_of(rows[0])}"):
                    tensors = self.there(rows)
                    dr.distributed.broadcast(tensors, group=self.group, group_src=root)
                    require_same(tensors, [rows[root]] * self.size)
        wide = self.there(self.rows(torch.float32, 6, 4))
        with self.trying("broadcast of transposed tensors, (4, 6) float32"):
            wanted = wide[0].cpu().t()
            dr.distributed.broadcast([t.t() for t in wide], group=self.group)
            require_same([t.t() for t in wide], [wanted] * self.size)

    def all_gather(self) -> None:
        for dtype, shape in self.shapes():
            rows = self.rows(dtype, *shape)
            with self.trying(f"all_gather of {text_of(rows[0])}"):
                lists = self.lists(dtype, *shape)
                dr.distributed.all_gather(lists, self.there(rows), group=self.group)
                for found in lists:
                    require_same(found, rows)

    def gather(self) -> None:
        for dtype, shape in self.shapes():
            for root in (0, self.size - 1):
                rows = self.rows(dtype, *shape)
                with self.trying(f"gather to rank {root} of {text_of(rows[0])}"):
                    found = self.there_at(root, [torch.zeros_like(row) for row in rows])
                    dr.distributed.gather(self.there(rows), found, group=self.group, group_dst=root)
                    require_same(found, rows)

    def scatter(self) -> None:
        for dtype, shape in self.shapes():
            for root in (0, self.size - 1):
                rows = self.rows(dtype, *shape)
                with self.trying(f"scatter from rank {root} of {text_of(rows[0])}"):
                    tensors = self.there([torch.zeros_like(row) for row in rows])
                    dr.distributed.scatter(
                        tensors, self.there_at(root, rows), group=self.group, group_src=root
                    )
                    require_same(tensors, rows)

    def all_to_all(self) -> None:
        for dtype, shape in self.shapes():
            table = [self.rows(dtype, *shape) for _ in self.places]
            with self.trying(f"all_to_all of {text_of(table[0][0])}"):
                lists = self.lists(dtype, *shape)
                dr.distributed.all_to_all(
                    lists, [self.there_at(rank, row) for rank, row in enumerate(table)], group=self.group
                )
                for rank, found in enumerate(lists):
                    require_same(found, [row[rank] for row in table])
        # The parts are uneven, and some are empty.
        splits = [[(3 * i + j) % 4 for j in range(self.size)] for i in range(self.size)]
        rows = [self.draw(torch.int64, sum(row), 2) for row in splits]
        with self.trying(f"all_to_all_single of int64 with the splits {splits}"):
            parts = [row.split(sizes) for row, sizes in zip(rows, splits)]
            wanted = [torch.cat([part[rank] for part in parts]) for rank in range(self.size)]
            outputs = self.there([torch.zeros_like(t) for t in wanted])
            dr.distributed.all_to_all_single(
                outputs, self.there(rows), input_split_sizes=splits, group=self.group
            )
            require_same(outputs, wanted)

    def barrier(self) -> None:
        with self.trying("barrier"):
            for _ in range(_ROUNDS):
                dr.distributed.barrier(self.group, timeout=_PROMPT)

    # -- what is reduced -----------------------------------------------------------------------------------

    def _declared(self) -> Iterator[tuple[str, Op, torch.dtype]]:
        for op in sorted(self.has.reductions):
            for dtype in sorted(self.has.reductions[op], key=str):
                yield op, reduction_op(op), dtype

    def all_reduce(self) -> None:
        for op, given, dtype in self._declared():
            for shape in ((7, 3), (), (0, 3)):
                rows = self.rows(dtype, *shape)
                with self.trying(f"all_reduce by {op} of {text_of(rows[0])}"):
                    tensors = self.there(rows)
                    dr.distributed.all_reduce(tensors, given, group=self.group)
                    require_same(tensors, [reduced_here(op, rows)] * self.size)
        # The check takes float32 or int32 if the channel can.
        op, given, dtype = min(self._declared(), key=lambda declared: abs(declared[2].itemsize - 4))
        rows = self.rows(dtype, LARGE)
        with self.trying(f"all_reduce by {op} of {text_of(rows[0])}"):
            tensors = self.there(rows)
            dr.distributed.all_reduce(tensors, given, group=self.group)
            require_same(tensors, [reduced_here(op, rows)] * self.size)
        rows = self.rows(dtype, 6, 4)
        with self.trying(f"all_reduce by {op} of transposed tensors, {text_of(rows[0].t())}"):
            tensors = self.there(rows)
            dr.distributed.all_reduce([t.t() for t in tensors], given, group=self.group)
            require_same(tensors, [reduced_here(op, rows)] * self.size)

    def reduce(self) -> None:
        for op, given, dtype in self._declared():
            for root in (0, self.size - 1):
                rows = self.rows(dtype, 7, 3)
                with self.trying(f"reduce by {op} to rank {root} of {text_of(rows[0])}"):
                    tensors = self.there(rows)
                    dr.distributed.reduce(tensors, op=given, group=self.group, group_dst=root)
                    require_same(
                        tensors,
                        [reduced_here(op, rows) if rank == root else row for rank, row in enumerate(rows)],
                    )

    def reduce_scatter(self) -> None:
        for op, given, dtype in self._declared():
            rows = self.rows(dtype, 5 * self.size, 3)
            with self.trying(f"reduce_scatter by {op} of {text_of(rows[0])}"):
                outputs = self.there([torch.zeros(5, 3, dtype=dtype) for _ in rows])
                dr.distributed.reduce_scatter_tensor(outputs, self.there(rows), given, group=self.group)
                require_same(outputs, list(reduced_here(op, rows).chunk(self.size)))

    # -- groups, refusals and failures ---------------------------------------------------------------------

    def refusals(self) -> None:
        """What is not declared raises `NotSupportedError` in the call, and nothing of it is issued."""
        issued = self.group.sequence()
        for operation in {*MOVES, *REDUCES} - self.has.operations:
            self._refused(operation, torch.float32, "SUM")
        for operation in self.has.operations & set(REDUCES):
            for op in _REDUCTIONS:
                for dtype in {*KINDS, torch.int8, torch.int32} - self.has.reductions.get(op, frozenset()):
                    # A complex number may count as two real ones.
                    if not dtype.is_complex:
                        self._refused(operation, dtype, op)
        assert self.group.sequence() == issued + 1, (
            f"data channel {self.name!r}: something that was refused has been issued all the same"
        )

    def _refused(self, operation: str, dtype: torch.dtype, op: str) -> None:
        rows = self.there(self.rows(dtype, 2 * self.size))
        table = [[t] * self.size for t in rows]
        calls: dict[str, Callable[[], object]] = {
            "send": lambda: move_to(rows[0], self.places[1]),
            "broadcast": lambda: dr.distributed.broadcast(rows, group=self.group),
            "all_gather": lambda: dr.distributed.all_gather(table, rows, group=self.group),
            "gather": lambda: dr.distributed.gather(rows, table[0], group=self.group),
            "scatter": lambda: dr.distributed.scatter(rows, table[0], group=self.group),
            "all_to_all": lambda: dr.distributed.all_to_all(table, table, group=self.group),
            "barrier": lambda: dr.distributed.barrier(self.group),
            "all_reduce": lambda: dr.distributed.all_reduce(rows, reduction_op(op), group=self.group),
            "reduce": lambda: dr.distributed.reduce(rows, op=reduction_op(op), group=self.group),
            "reduce_scatter": lambda: dr.distributed.reduce_scatter_tensor(
                [t[:2] for t in rows], rows, reduction_op(op), group=self.group
            ),
        }
        try:
            calls[operation]()
        except dr.errors.NotSupportedError:
            return
        reduced = f" by {op} of {str(dtype)[6:]}" if operation in REDUCES else ""
        raise AssertionError(
            f"data channel {self.name!r}, {self.size} members: {operation}{reduced} is not declared, and not "
            "refused"
        )

    def again(self) -> None:
        """Several groups of the same members side by side, closed and made again."""
        for _ in range(_ROUNDS):
            with self.trying("groups of the same members, made, used and closed again and again"):
                groups = [dr.distributed.new_group(self.places, backend=self.name) for _ in range(2)]
                for group in groups:
                    self._use(group)
                groups[0].close()
                self._use(groups[1])
                groups[1].close()

    def _use(self, group: dr.distributed.ProcessGroup) -> None:
        rows = self.rows(torch.uint8, 9)
        tensors = self.there(rows)
        if "broadcast" in self.has.operations:
            dr.distributed.broadcast(tensors, group=group)
            require_same(tensors, [rows[0]] * self.size)
        elif "barrier" in self.has.operations:
            dr.distributed.barrier(group, timeout=_PROMPT)

    def deaths(self) -> None:
        """A member that is killed while others wait for it ends their waiting."""
        pids = [node.pid for node in dr.nodes()]
        if self.has.operations & {"broadcast", "all_gather", "barrier"} and self.size > 2:
            rows = self.there(self.rows(torch.float32, 1000))
            dr.synchronize()
            with killed(pids[self.size - 1]):
                if "broadcast" in self.has.operations:
                    dr.distributed.broadcast(rows, group=self.group, group_src=self.size - 1)
                elif "all_gather" in self.has.operations:
                    dr.distributed.all_gather([[t] * self.size for t in rows], rows, group=self.group)
                else:
                    dr.distributed.barrier(self.group, async_op=True)
            self._fails("a collective whose last rank was killed", rows[0])
        if "send" in self.has.operations:
            # Nobody has read the failure of the one before at this member.
            with suppress(dr.errors.NodeFailed):
                dr.synchronize(1)
            value = self.at(1, self.draw(torch.float32, LARGE))
            dr.synchronize(1)
            with killed(pids[1]):
                arrived = move_to(value, self.places[0])
            self._fails("a copy whose source was killed", arrived)

    def _fails(self, what: str, result: torch.Tensor) -> None:
        try:
            dr.fetch(result, timeout=_PROMPT)
            dr.synchronize(result.place.node, timeout=_PROMPT)  # type: ignore[attr-defined]
        except dr.errors.NodeFailed:
            return
        except dr.errors.WaitTimeout as error:
            raise AssertionError(
                f"data channel {self.name!r}, {what}: abort() does not end the others' waiting: {error}"
            ) from error
        raise AssertionError(f"data channel {self.name!r}, {what}: it came to an end all the same")
