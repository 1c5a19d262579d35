"""The data channel over MPI, for workers that `mpirun` has started: mpi4py's calls, and nothing of our own
but how they are waited for.

Every call is begun without blocking and looked at until it is done, as that is the only way in which MPI lets
another thread end it. What was begun and never done keeps its memory for ever: MPI may still write there.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import uuid
from typing import Protocol, final

import torch

# This import starts MPI, with MPI_THREAD_MULTIPLE where it can.
from mpi4py import MPI as mpi

from distruntime.errors import ConfigurationError
from distruntime.wire.data_channel import (
    MOVES,
    REDUCES,
    Capabilities,
    DataChannel,
    Membership,
    Reduction,
    numbers,
)

# The module mpi4py would do so when the interpreter is taken apart, but a worker leaves that out.
atexit.register(mpi.Finalize)


class _Request(Protocol):
    def Test(self) -> bool: ...


# It looks for so many seconds without a pause: a large message moves on only while somebody looks at it.
_EAGER = 0.02
# From then on so many seconds lie between looks.
_PAUSE = 0.0002
_TYPES = {
    torch.uint8: mpi.UINT8_T,
    torch.int8: mpi.INT8_T,
    torch.int16: mpi.INT16_T,
    torch.int32: mpi.INT32_T,
    torch.int64: mpi.INT64_T,
    torch.float32: mpi.FLOAT,
    torch.float64: mpi.DOUBLE,
}
_OPS = {
    "SUM": mpi.SUM,
    "PRODUCT": mpi.PROD,
    "MIN": mpi.MIN,
    "MAX": mpi.MAX,
    "BAND": mpi.BAND,
    "BOR": mpi.BOR,
    "BXOR": mpi.BXOR,
}
_REDUCED = numbers(torch.float16, torch.bfloat16)
_INTEGERS = frozenset(d for d in _REDUCED if not d.is_floating_point)

# This names our mpirun, and so tells workers of others from ours.
_job: str = mpi.COMM_WORLD.bcast(uuid.uuid4().hex)
_last_tag: int = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
# These operations were begun and never done. They are here with their memory.
_left_behind: list[object] = []


@final
class MPI(DataChannel):
    """Every collective of torch.distributed, as MPI has them.

    One member a worker, all started by one `mpirun`.
    """

    capabilities = Capabilities(
        frozenset({*MOVES, *REDUCES}),
        {
            **dict.fromkeys(("SUM", "PRODUCT", "MIN", "MAX"), _REDUCED),
            **dict.fromkeys(("BAND", "BOR", "BXOR"), _INTEGERS),
        },
    )

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        self._end = threading.Event()
        membership.store.set(f"mpi-{self.rank}", json.dumps([_job, mpi.COMM_WORLD.rank]))
        members = [json.loads(membership.store.get(f"mpi-{rank}")) for rank in range(self.size)]
        if {job for job, _ in members} != {_job}:
            raise ConfigurationError(
                "the workers of an mpi group are started by one mpirun: mpirun -n 2 distruntime-worker "
                "--master ..."
            )
        ranks = [rank for _, rank in members]
        if len(set(ranks)) < self.size:
            raise ConfigurationError(
                "an mpi group has one member on each worker, got several places of one node"
            )
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise ConfigurationError("this MPI was built without MPI_THREAD_MULTIPLE")
        # The master opens one group at a time, so one tag does for all.
        self._comm = mpi.COMM_WORLD.Create_group(mpi.COMM_WORLD.group.Incl(ranks), 0)

    def _finish(self, request: _Request, *memory: object) -> None:
        started = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - started
            if self._end.is_set() or waited > self.membership.timeout:
                _left_behind.append((request, memory))
                raise (
                    ConnectionAbortedError("the group has ended")
                    if self._end.is_set()
                    else TimeoutError("MPI: not done in time")
                )
            if waited > _EAGER:
                self._end.wait(_PAUSE)
            else:
                # This gives the core to another thread or process that is ready, if there is one.
                time.sleep(0)

    def send(self, data: torch.Tensor, to: int, tag: int) -> None:
        self._finish(self._comm.Isend(_buffer(data), to, tag & _last_tag), data)

    def receive(self, data: torch.Tensor, source: int, tag: int) -> None:
        self._finish(self._comm.Irecv(_buffer(data), source, tag & _last_tag), data)

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        self._finish(self._comm.Ibcast(_buffer(data), root), data)

    def all_gather(self, output: torch.Tensor, data: torch.Tensor) -> None:
        self._finish(self._comm.Iallgather(_buffer(data), _buffer(output)), data, output)

    def gather(self, output: torch.Tensor | None, data: torch.Tensor, root: int) -> None:
        self._finish(
            self._comm.Igather(_buffer(data), None if output is None else _buffer(output), root), data, output
        )

    def scatter(self, output: torch.Tensor, data: torch.Tensor | None, root: int) -> None:
        self._finish(
            self._comm.Iscatter(None if data is None else _buffer(data), _buffer(output), root), data, output
        )

    def all_to_all(
        self, output: torch.Tensor, data: torch.Tensor, output_splits: list[int], data_splits: list[int]
    ) -> None:
        into, out = [output.numpy(), output_splits, mpi.BYTE], [data.numpy(), data_splits, mpi.BYTE]
        self._finish(self._comm.Ialltoallv(out, into), data, output)

    def barrier(self) -> None:
        self._finish(self._comm.Ibarrier())

    def all_reduce(self, data: torch.Tensor, op: Reduction) -> None:
        self._finish(self._comm.Iallreduce(mpi.IN_PLACE, _buffer(data), _OPS[op.name]), data)

    def reduce(self, data: torch.Tensor, root: int, op: Reduction) -> None:
        mine, result = (mpi.IN_PLACE, _buffer(data)) if self.rank == root else (_buffer(data), None)
        self._finish(self._comm.Ireduce(mine, result, _OPS[op.name], root), data)

    def reduce_scatter(self, output: torch.Tensor, data: torch.Tensor, op: Reduction) -> None:
        self._finish(
            self._comm.Ireduce_scatter_block(_buffer(data), _buffer(output), _OPS[op.name]), data, output
        )

    def abort(self) -> None:
        self._end.set()

    def close(self) -> None:
        self._comm.Free()


def _buffer(data: torch.Tensor) -> list[object]:
    return [data.numpy(), _TYPES[data.dtype]]
