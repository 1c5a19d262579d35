"""`dr.spmd`: a function that runs once for each member of a mesh, as a rank of torch.distributed.

A call is one instruction for each worker of the mesh, which runs the function in the processes of its
members. What is read of the results is asked for afterwards, so that no worker waits for another's answer.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Generic, ParamSpec, TypeVar, overload

import torch
from torch.utils._pytree import tree_leaves

from ..collectives.groups import groups_of
from ..errors import (
    ConnectionFailed,
    DistruntimeError,
    InternalError,
    NotSupportedError,
    PlacementError,
    UsageError,
    drop_frames,
    without_our_frames,
)
from ..log.failure_log import BESIDE
from ..log.handle import Handle
from ..log.log import relieve
from ..log.node import Node
from ..log.shards import member_of, mesh_of
from ..log.total_order import in_total_order
from ..mesh.mesh import DeviceMesh
from ..operators.proxies import wrap
from ..session.meeting import proposed
from ..session.session import session_of_log
from ..streams.cancel import cancel, cancel_together
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor
from ..tensors.trees import joined
from ..tensors.uneven import UnevenTensor, shapes_of
from ..wire.shield import Lock
from .callee import Callee, Code, Latest, Options, forget, require_python, upload_bytes
from .objects import RemoteObject, issued, object_of
from .pickling import Operand, pack
from .remote import plain
from .results import ByRank

P = ParamSpec("P")
R = TypeVar("R")
# So many functions are kept on a worker for each mesh, those that were called last.
_MOST_CODE = 256


class _Sent(Operand):
    """What was sent to a worker."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Handle) -> None:
        self._handle = handle


class _Team:
    """The members' processes of one mesh: an object on each of its workers."""

    def __init__(self, mesh: DeviceMesh) -> None:
        log = mesh._mesh_log
        self.log, self.home = log, mesh._home
        self.places = {
            node: log.session.places.residence(log.members[ranks[0]], numbered=False)
            for node, ranks in log.ranks.items()
        }
        self._callee = Callee("dr.spmd", "members")
        self._calls = count()
        self._members: dict[Node, RemoteObject] = {}
        groups_of(session_of_log(log)).meeting.require_routes([node.index for node in log.ranks], "dr.spmd")
        for number, (node, ranks) in enumerate(log.ranks.items()):
            devices = [str(log.members[k].local_device) for k in ranks]
            args = (ranks, len(log.members), number, len(log.ranks), devices, node.index)
            self._members[node] = object_of(self._callee, *args, home=self.places[node])
        node, first = next(iter(self._members.items()))
        listen = Callee("dr.spmd", "method listen")
        try:
            found: object = fetch(object_of(listen, first, proposed(node)))
        except DistruntimeError:
            # What the other workers have failed with is known with this.
            for members in self._members.values():
                with suppress(DistruntimeError):
                    fetch(members)
            raise
        match found:
            case (str(host), int(port)):
                self._address = host, port
            case _:
                raise InternalError(f"a worker's store is at {found!r:.80}")
        self._meet(node)
        self._code: dict[bytes, dict[Node, Handle]] = {}
        self._callees: dict[tuple[object, ...], Callee] = {}

    def _meet(self, first: Node) -> None:
        """Have all workers reach the store at the first one. Block until they have.

        Raise `ConnectionFailed` if one cannot within the time that workers have to find each other.
        """
        reach, (host, port) = Callee("dr.spmd", "method reach"), self._address
        asked = {node: object_of(reach, members, host, port) for node, members in self._members.items()}
        for node, request in asked.items():
            if why := fetch(request):
                raise ConnectionFailed(
                    f"{node} does not reach {first} at {host}:{port}, where the processes of dr.spmd meet: "
                    f"{why}. They listen at ports that the system gives out, so all ports must be open "
                    f"between these hosts. On {node.host}, this shows whether one is: nc -vz {host} {port}"
                )

    def _code_at(self, code: Code, node: Node) -> _Sent:
        there = self._code.pop(code.digest, {})
        if node not in there:
            there[node] = upload_bytes(code.pickled, self.places[node])
        while len(self._code) >= _MOST_CODE:
            self._code.pop(next(iter(self._code)))
        # The one that was called last stands last.
        self._code[code.digest] = there
        return _Sent(there[node])

    def forget(self, code: Code) -> None:
        """Let go of code that nobody calls any more, and of what its calls have returned."""
        self._code.pop(code.digest, None)
        for key in [key for key in list(self._callees) if key[0] == code.digest]:
            self._callees.pop(key, None)

    def call(
        self,
        name: str,
        code: Code,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        returns: object,
        timeout: float | None,
    ) -> object:
        """Issue a call; return its result. Block where only the workers can tell what it is."""
        session_of_log(self.log).require_open()
        # A part that is issued before the lost one would fail for itself.
        self.log.require_alive()
        packed, given = pack(args, kwargs)
        require_python(self.log, name, code.pickled, packed)
        operands, wants = self._operands(name, given)
        callee = self._callee_of(name, code.digest, packed, operands, wants)
        # Workers would wait for each other if another thread issued a call or a collective between two parts.
        running = in_total_order(
            self.log.session, lambda: self._issue(callee, code, packed, operands, wants, timeout)
        )
        for node in running:
            relieve(node)
        parts = [part._handle for part in running.values()]
        options = Options(returns=returns)
        found = [
            issued(callee.child(f"rank {k}", name, "method take"), options, running[node], lane)
            for k, (node, lane) in enumerate(self.log.lanes)
        ]
        leaves = [getattr(leaf, "_handle", None) for leaf in tree_leaves(found)]
        cancel_together(parts, [handle for handle in leaves if isinstance(handle, Handle)])
        return joined(found, self._joined)

    def _issue(
        self,
        callee: Callee,
        code: Code,
        packed: bytes,
        operands: Sequence[object],
        wants: Sequence[list[int] | None],
        timeout: float | None,
    ) -> dict[Node, RemoteObject]:
        """Issue the parts of a call, one for each worker (in one moment); return their results."""
        name, call = callee.name, next(self._calls)
        running: dict[Node, RemoteObject] = {}
        # Whatever has to be sent is sent before the first worker begins.
        sent = {node: self._code_at(code, node) for node in self._members}
        try:
            for node, members in self._members.items():
                own = [[self._at(operand, k) for operand in operands] for k in self.log.ranks[node]]
                running[node] = object_of(
                    callee.child("beside", f"{name}{BESIDE}", "method run") if running else callee,
                    *(members, call, *self._address, name, code.digest, sent[node], packed, own),
                    *(wants, torch.is_grad_enabled(), timeout),
                )
        except BaseException:
            # The others would wait for a part that was not issued: its worker is lost, or Ctrl-C came.
            if running:
                cancel([*running.values()])
            raise
        cancel_together([part._handle for part in running.values()], ())
        if len(running) > 1:
            # A worker where the call has not begun tells the others why. Its own part says that.
            after = self._callee.child("after", name, "members after")
            for node, members in self._members.items():
                object_of(after, members, call, *self._address, name, running[node])
        return running

    def _callee_of(
        self,
        name: str,
        digest: bytes,
        packed: bytes,
        operands: Sequence[object],
        wants: Sequence[list[int] | None],
    ) -> Callee:
        """Return what remembers the results of a call: one for each function and sizes of its operands."""
        specs = [x._handle.spec if isinstance(x, DistributedTensor) else None for x in operands]
        short = packed if len(packed) <= 256 else hashlib.sha256(packed).digest()
        key = digest, short, tuple(specs), str(wants)
        found = self._callees.pop(key, None) or Callee(name, "method run")
        while len(self._callees) >= _MOST_CODE:
            self._callees.pop(next(iter(self._callees)))
        self._callees[key] = found
        return found

    def _operands(
        self, name: str, given: Sequence[torch.Tensor | Operand]
    ) -> tuple[list[object], list[list[int] | None]]:
        """Return the operands of a call, the gradients of parameters last, and what each is at the caller."""
        operands: list[object] = [*given]
        wants: list[list[int] | None] = []
        for operand in given:
            want = None
            if isinstance(operand, ByRank):
                if len(operand) != len(self.log.members):
                    raise UsageError(
                        f"{name} got a list by {len(operand)} ranks, and its mesh has "
                        f"{len(self.log.members)}: a list by rank goes to functions of its own mesh"
                    )
            elif isinstance(operand, UnevenTensor):
                if operand._residence is not self.home:
                    raise PlacementError(
                        f"{name} runs on {self.home.place}, and one of its arguments is on "
                        f"{operand.place}: put its shards together there, dr.from_shards([...], mesh)"
                    )
                if operand.requires_grad:
                    raise NotSupportedError(
                        f"{name} was given a tensor that requires grad and whose shards have different "
                        f"shapes ({shapes_of(operand._shards)}): gradients of the caller's tensors are for "
                        "shards of one shape. Pass x.detach(), and return what you need of its gradient"
                    )
            elif isinstance(operand, DistributedTensor):
                if operand._handle.place is not self.home:
                    raise PlacementError(
                        f"{name} runs on {self.home.place}, and one of its arguments is on "
                        f"{operand.place}: move it there, x.to(mesh.device)"
                    )
                gradient = operand.grad if operand.requires_grad and operand.is_leaf else None
                number = -1
                if isinstance(gradient, DistributedTensor):
                    number = len(operands)
                    operands.append(gradient)
                parameter = isinstance(operand, torch.nn.Parameter)
                want = [int(operand.requires_grad), int(parameter), number]
            # A local tensor is sent to each worker.
            elif len(self.log.ranks) > 1 and not isinstance(operand, torch.Tensor):
                raise PlacementError(
                    f"{name} runs on {len(self.log.ranks)} workers, and one of its arguments is an object of "
                    "one of them: dr.fetch(x) brings a copy that can be passed"
                )
            wants.append(want)
        return operands, wants

    def _at(self, operand: object, k: int) -> object:
        """Return what the `k`-th member gets of an operand."""
        if isinstance(operand, ByRank):
            return operand[k]
        if isinstance(operand, UnevenTensor):
            return operand._shards[k]
        if isinstance(operand, DistributedTensor):
            return wrap(DistributedTensor, member_of(operand._handle, k))
        return operand

    def _joined(self, found: list[object]) -> object:
        """Return the members' parts of their results as one: a tensor of the mesh, or a list by rank."""
        tensors = [x for x in found if isinstance(x, DistributedTensor)]
        if len(tensors) < len(found) or len({id(x._handle.spec) for x in tensors}) > 1:
            return ByRank(found)
        return wrap(DistributedTensor, mesh_of(self.log, self.home, [x._handle for x in tensors]))


# Two threads that call at the same time share the processes of a mesh.
_making = Lock()


def _team_of(mesh: DeviceMesh) -> _Team:
    kept = mesh._whole._kept
    with _making:
        found: _Team | None = kept.get("spmd")
        if found is None:
            found = kept["spmd"] = _Team(mesh)
    return found


class SpmdFunction(Generic[P, R]):
    """A function that runs on the members of a mesh: see `spmd`."""

    def __init__(self, fn: Callable[P, R], mesh: DeviceMesh, returns: object, timeout: float | None) -> None:
        if not callable(fn) or isinstance(fn, type):
            raise UsageError(f"dr.spmd(mesh) takes a function, got {fn!r:.60}")
        functools.update_wrapper(self, fn)
        self._fn, self._mesh = fn, mesh
        self._name = getattr(fn, "__qualname__", type(fn).__name__).replace("<locals>.", "")
        self._returns, self._timeout = returns, timeout
        self._latest = Latest(fn, self._name, functools.partial(_forget, mesh))

    def __repr__(self) -> str:
        return f"<function {self._name} on the members of {self._mesh!r}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it on each member: see `spmd`."""
        try:
            code = self._latest.callee().code
            assert code is not None
            # Its type is the function's own, which is right of tensors.
            found: R = _team_of(self._mesh).call(  # type: ignore[assignment]
                self._name, code, args, kwargs, self._returns, self._timeout
            )
            return found
        except BaseException as error:
            drop_frames(error)
            raise

    def __reduce__(self) -> tuple[object, ...]:
        # A function that calls another is a rank already.
        return plain, (self._fn,)


def _forget(mesh: DeviceMesh, callee: Callee) -> None:
    team: _Team | None = mesh._whole._kept.get("spmd")
    if team is not None and callee.code is not None:
        team.forget(callee.code)
    forget(callee)


@overload
def spmd(
    mesh: DeviceMesh, fn: Callable[P, R], *, returns: object = None, timeout: float | None = None
) -> SpmdFunction[P, R]: ...


@overload
def spmd(
    mesh: DeviceMesh, fn: None = None, *, returns: object = None, timeout: float | None = None
) -> Callable[[Callable[P, R]], SpmdFunction[P, R]]: ...


@without_our_frames
def spmd(
    mesh: DeviceMesh,
    fn: Callable[P, R] | None = None,
    *,
    returns: object = None,
    timeout: float | None = None,
) -> SpmdFunction[P, R] | Callable[[Callable[P, R]], SpmdFunction[P, R]]:
    """Return a function that runs once for each member of a mesh; also a decorator, `@dr.spmd(mesh)`.

    Each member runs it in a process of its own on its worker, as a rank of `torch.distributed`, which is
    initialised: gloo for CPUs, and NCCL for NVIDIA GPUs. A tensor of the mesh arrives as the member's own
    shard, in shared memory: what the function writes into it is there afterwards, and so is the gradient of a
    parameter that had one. All else arrives as it is. A call is an instruction of the log: it returns at
    once, except that the first one with arguments of given sizes waits to hear what it returns.

    Tensors of one size become a tensor of the mesh. Tuples, lists and dicts are opened. All else comes as a
    list by rank. `dr.fetch` brings its values; a model or an optimizer in it stays in its member's process,
    and a later call that gets the list gets its member's item.

    If a member raises, the call fails with its error, the other members are ended, and the next call starts
    new processes. `timeout` is in seconds. `returns` is as with `dr.remote`, for one member's result.
    """
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"dr.spmd takes a mesh, got {mesh!r:.60}: dr.init_device_mesh makes one")
    if fn is None:
        return lambda fn: SpmdFunction(fn, mesh, returns, timeout)
    return SpmdFunction(fn, mesh, returns, timeout)
