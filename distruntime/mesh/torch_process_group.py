"""The master's stand-in for a process group along a dimension of a mesh.

What torch.distributed calls on it, all members do.

DTensor, tensor parallelism and FSDP2 ask a mesh for process groups. These have a name, a size and rank 0,
as the master speaks for all members at once; what is called on them with a mesh's tensors becomes one
instruction, in which every line of members does its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn, TypeGuard

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from ..collectives.adjoints import Collective
from ..errors import NotSupportedError, UsageError
from ..log.mesh_log import MeshLog
from ..streams.order import has_streams
from ..streams.stream import Stream, current_stream, kept_number, numbered_stream
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor, shapes_of
from .line_groups import Lines
from .operation import even_splits, issue_along, perform, reduction_named

BACKEND = "distruntime"
# torch sends objects in tensors of these dtypes. This process has one object for all members. A tensor of
# another dtype may differ from member to member.
_OBJECTS = (torch.uint8, torch.int64)
_in_cpp: Any = _distributed_c10d


class _Results(torch.futures.Future[Any]):
    """The results of an operation on a stream of its own. What is to follow them follows them there."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """Call `callback` at once: what it issues goes to the stream."""
        with self._stream:
            return super().then(callback)


class Issued(dist.Work):
    """What torch waits for after an operation. What follows on the members waits by itself."""

    def __init__(self, results: Sequence[torch.Tensor], stream: Stream | None = None) -> None:
        super().__init__()
        self._results, self._stream = list(results), stream

    def wait(self, timeout: Any = None) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def result(self) -> list[torch.Tensor]:
        """Return the results."""
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that has the results."""
        future: torch.futures.Future[Any]
        future = torch.futures.Future() if self._stream is None else _Results(self._stream)
        future.set_result(self._results)
        return future

    def lasting(self) -> dist.Work:
        """Return what torch's C++ code may keep.

        Where nobody else keeps this object, C++ code has a half of it without these methods. It would wait
        for that half without end.
        """
        work: dist.Work = _in_cpp._create_work_from_future(self.get_future())
        return work


class MastersRank(int):
    """The rank by which torch knows the master, which speaks for all members. Arithmetic gives plain ints.

    So what is given a rank can tell this one from one that the user has chosen.
    """


# Its stubs have one signature of several.
_ProcessGroup: Any = dist.ProcessGroup


class MeshGroup(_ProcessGroup):  # type: ignore[misc]
    """The process group of a dimension of a mesh. `lines` opens the members' own groups, at the first use."""

    def __init__(self, name: str, size: int, lines: Callable[[], Lines], ranks: Sequence[int] = ()) -> None:
        super().__init__(0, size)
        self._name = name
        self.use(lines, ranks)
        self._desc = "a dimension of a distruntime mesh"

    def use(self, lines: Callable[[], Lines], ranks: Sequence[int]) -> None:
        """Say which lines of members it stands for, and each member's rank in its line."""
        self._lines = lines
        self._found: Lines | None = None
        self._beside: tuple[MeshLog, int] | None = None
        self.ranks = list(ranks)

    @property
    def lines(self) -> Lines:
        """The members' groups."""
        found = self._found
        if found is None or found.broken is not None:
            found = self._found = self._lines()
        return found

    def _stream(self, x: DistributedTensor, opts: Any) -> Stream | None:
        """Return the stream of an operation that the caller does not wait for, None where it has none.

        DistributedDataParallel reduces a bucket of gradients there, beside the rest of the backward pass. The
        group keeps the stream's number alone, so that the mesh's place can go.
        """
        home, log = x._handle.place, self.lines.mesh_log
        if not getattr(opts, "asyncOp", False) or current_stream(home.device).number or not has_streams(log):
            return None
        if self._beside is None or self._beside[0] is not log:
            self._beside = log, kept_number(home)
        return numbered_stream(home, self._beside[1])

    def rank(self) -> int:
        """Return 0, as `MastersRank`."""
        return MastersRank(0)

    # torch calls this name.
    def getBackendName(self) -> str:
        """Return "distruntime"."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """The name by which functional collectives find it."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What it is."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def __repr__(self) -> str:
        return f"<distruntime process group {self._name}, {self.size()} members in a line>"

    def _expect(self, what: str, unit: str, got: int, wanted: int) -> None:
        """Raise `UsageError` here for what the members' channel would break the group over."""
        if got != wanted:
            size = self.lines.size
            ranks = (
                f". This group has {self.size()} ranks, for every device of the session: "
                "name the mesh's, group=mesh.get_group(dim)"
            )
            raise UsageError(
                f"{what} has {wanted} {unit} where a line has {size} members, got {got}"
                + (ranks if self.size() != size else "")
            )

    def allreduce(self, tensors: Any, opts: Any = None) -> Issued:
        """Reduce each member's tensor in place."""
        by = reduction_named(getattr(opts, "reduceOp", opts))
        given = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        stream = None
        for t in given:
            if by.name in ("MIN", "MAX") and not is_on_mesh(t):
                # It is one value for all members, since this process speaks for all: DTensor's
                # `torch.equal` asks so.
                continue
            if isinstance(t, UnevenTensor):
                t.copy_(perform(self.lines, Collective("all_reduce", by), t))
                continue
            x = on_mesh(t)
            stream = self._stream(x, opts)
            with nullcontext() if stream is None else stream:
                issue_along(self.lines, "all_reduce", [x], into=[x], reduction=by)
        return Issued(given, stream)

    def broadcast(self, tensors: Any, opts: Any) -> Issued:
        """Overwrite each member's tensor by the root's."""
        given = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        for t in given:
            # torch broadcasts an object of its own, and this process speaks for all members.
            if is_local(t):
                continue
            lines, x = self.lines, on_mesh(t)
            issue_along(lines, "broadcast", [x], into=[x], root=int(opts.rootRank))
        return Issued(given)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Issued:
        """Give each member its part of the root's list."""
        self._expect("scatter's list", "tensors", len(inputs[0]), self.lines.size)
        if any(isinstance(t, UnevenTensor) for t in inputs[0]):
            # All members of a line get the root's whole list, and each takes its own.
            size = self.lines.size
            lists = perform(
                self.lines,
                Collective("broadcast", root=int(opts.rootRank)),
                torch.stack(inputs[0]).flatten(0, 1),
            )
            own = lists.unflatten(0, (size, lists.shape[0] // size)).index_select(
                0, self.lines.ranks().reshape(1)
            )
            outputs[0].copy_(own.squeeze(0))
            return Issued(outputs)
        whole = torch.cat([on_mesh(t).reshape(-1) for t in inputs[0]])
        issue_along(
            self.lines, "scatter", [on_mesh(whole)], into=[on_mesh(outputs[0])], root=int(opts.rootRank)
        )
        return Issued(outputs)

    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> Issued:
        if is_local(given) and given.dtype in _OBJECTS:
            output.view(-1).copy_(given.reshape(-1).repeat(self.size()))
            return Issued([output])
        if isinstance(given, UnevenTensor):
            whole = perform(self.lines, Collective("all_gather"), given.reshape(-1))
            output.copy_(whole.reshape(output.shape))
            return Issued([output])
        self._expect(
            "all_gather's output",
            "elements",
            on_mesh(output).numel(),
            on_mesh(given).numel() * self.lines.size,
        )
        issue_along(self.lines, "all_gather", [given], into=[output])
        return Issued([output])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Issued:
        """Fill each member's list with all members' tensors."""
        # This is `all_gather_object`. The object is the same for all members.
        if is_local(inputs[0]):
            for t in outputs[0]:
                t.copy_(inputs[0])
            return Issued(outputs[0])
        self._expect("all_gather's list", "tensors", len(outputs[0]), self.lines.size)
        for t in outputs[0]:
            self._expect("all_gather's output", "elements", on_mesh(t).numel(), on_mesh(inputs[0]).numel())
        issue_along(self.lines, "all_gather", [inputs[0]], into=outputs[0])
        return Issued(outputs[0])

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any) -> Issued:
        by = reduction_named(getattr(opts, "reduceOp", opts))
        if isinstance(given, UnevenTensor):
            part = perform(self.lines, Collective("reduce_scatter", by), given.reshape(-1))
            output.copy_(part.reshape(output.shape))
            return Issued([output])
        self._expect(
            "reduce_scatter's input",
            "elements",
            on_mesh(given).numel(),
            on_mesh(output).numel() * self.lines.size,
        )
        issue_along(self.lines, "reduce_scatter", [given], into=[output], reduction=by)
        return Issued([output])

    # torch calls these names from 2.13 on.
    all_gather_single, reduce_scatter_single = (_allgather_base, _reduce_scatter_base)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Issued:
        """Gather several tensors."""
        for output, given in zip(outputs, inputs):
            self._allgather_base(output, given)
        return Issued(outputs)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Issued:
        """Reduce and scatter several tensors."""
        for output, given in zip(outputs, inputs):
            self._reduce_scatter_base(output, given, opts)
        return Issued(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Issued:
        """Give each member its part of the reduction of all members' lists."""
        return self._reduce_scatter_base(
            outputs[0], torch.cat([on_mesh(t).reshape(-1) for t in inputs[0]]), opts
        )

    def reduce(self, tensors: Any, opts: Any) -> Issued:
        """Reduce into the root's tensor; the others' stay as they are."""
        for t in tensors:
            total = perform(self.lines, Collective("all_reduce", reduction_named(opts.reduceOp)), on_mesh(t))
            t.copy_(torch.where(self.lines.ranks() == int(opts.rootRank), total, t))
        return Issued(tensors)

    def alltoall_base(self, output: Any, given: Any, got: Any, sent: Any, opts: Any = None) -> Issued:
        """Exchange parts of one size along the first dimension."""
        x, n = on_mesh(given), self.size()
        parts = [x.shape[0] // n if x.dim() else 0] * n
        splits = even_splits(self.lines, x, list(got) or parts, list(sent) or parts)
        on_mesh(output).copy_(perform(self.lines, Collective("all_to_all", splits=splits), x))
        return Issued([output])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Issued:
        """Exchange lists of tensors of one shape: member k of a line gets each member's k-th tensor."""
        size = self.lines.size
        self._expect("all_to_all's input", "tensors", len(inputs), size)
        self._expect("all_to_all's output", "tensors", len(outputs), size)
        shapes = {tuple(on_mesh(t).shape) for t in (*inputs, *outputs)}
        if len(shapes) > 1:
            raise NotSupportedError(
                f"all_to_all along a mesh takes tensors of one shape, got {sorted(shapes)}: pad them, or use "
                "lists of tensors, which may be uneven: dr.functional.all_to_all"
            )
        splits = ((1,) * size,) * size
        got = perform(self.lines, Collective("all_to_all", splits=splits), torch.stack(inputs))
        for output, part in zip(outputs, got.unbind(0)):
            output.copy_(part)
        return Issued(outputs)

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotSupportedError(
            "along a mesh all members do the same: there are all_reduce, reduce, broadcast, scatter, "
            "all_gather, reduce_scatter, all_to_all and all_to_all_single. For one member and another, copy "
            "their tensors: x.member(k).to(y.place), dr.functional"
        )

    gather = send = recv = recv_anysource = allreduce_coalesced = allgather_coalesced = _refuse

    def barrier(self, opts: Any = None) -> Issued:
        """Return at once: the logs keep all members in step."""
        return Issued([])


def is_local(t: Any) -> bool:
    """Whether a tensor is this process's own."""
    return isinstance(t, torch.Tensor) and not isinstance(t, (DistributedTensor, UnevenTensor))


def is_on_mesh(t: Any) -> TypeGuard[DistributedTensor]:
    """Whether a tensor is on a mesh."""
    return isinstance(t, DistributedTensor) and bool(t._handle.place.node.members)


def on_mesh(t: Any) -> DistributedTensor:
    """Return a tensor that is on a mesh; raise `UsageError` for another."""
    if is_on_mesh(t):
        return t
    if isinstance(t, UnevenTensor):
        raise NotSupportedError(
            "this collective of a mesh takes shards of one shape, and these differ "
            f"({shapes_of(t._shards)}): pad them, or use lists of tensors, dr.functional"
        )
    where = f"lives on {t.place}" if isinstance(t, DistributedTensor) else "is a local tensor"
    raise UsageError(
        f"a process group of a mesh takes tensors on that mesh; this one {where}. Send it to all "
        "members: x.to(mesh.device)"
    )
