"""A member's process: it runs the functions of `dr.spmd` for one rank, with torch.distributed initialised.

Its worker's nursery forks it, since one process has one default group of torch.distributed only. It ends with
the nursery, and when the worker closes the socket that its standard input is.
"""

from __future__ import annotations

import io
import os
import pdb
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import cloudpickle
import torch
import torch.distributed

from distruntime.errors import NotSupportedError, UsageError

from ..values.objects import class_name
from ..values.step import Operator
from .children import end_with_nursery
from .forked import end_child
from .handing import Device, Incoming, Outgoing, Shared, Stays, receive, written
from .shipped import Package, follow
from .skeleton import arguments, load, load_code, missing

if torch.distributed.is_available():
    from torch._C._distributed_c10d import PrefixStore, TCPStore

# A rank is told by these what it is.
_RANK = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
)
# So many seconds a member has to find the store and the others.
_MEETING = timedelta(seconds=300)


@dataclass(frozen=True)
class Begin:
    """What a member is. It comes first, and again where a function has ended the group of the mesh."""

    name: str
    rank: int
    world: int
    host: str
    port: int
    generation: int
    device: str
    threads: int


@dataclass(frozen=True)
class Wants:
    """What a tensor among the arguments is at the caller: a leaf that requires grad, a parameter, and the
    number of the operand that is its gradient, or -1.
    """

    grad: bool
    parameter: bool
    gradient: int


@dataclass(frozen=True)
class Run:
    """One call. `code` is empty where the member has that of this digest."""

    name: str
    digest: bytes
    code: bytes
    pickled: bytes
    operands: list[object]
    wants: list[Wants | None]
    grad: bool
    dropped: list[int]
    # Nobody calls the code of these digests any more.
    outdated: list[bytes]
    shipped: dict[str, Package]


@dataclass(frozen=True)
class Pickle:
    """A wish for the pickle of what stays here."""

    number: int


@dataclass(frozen=True)
class Done:
    """The result of a call. `grouped` says whether the call has left a default group of torch.distributed."""

    result: object
    grouped: bool = True


@dataclass(frozen=True)
class Raised:
    """What a call has raised."""

    kind: str
    text: str
    traceback: str


@dataclass(frozen=True)
class Object:
    """An operand that is no tensor, pickled."""

    pickled: bytes


class Member:
    """One rank. `link` is the socket to its worker."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._device = torch.device("cpu")
        self._code: dict[bytes, object] = {}
        self._kept: dict[int, object] = {}
        self._shipped: dict[str, Package] = {}
        self._rank = {name: os.environ[name] for name in _RANK}
        self._next = 0

    def serve(self) -> None:
        """Do what the worker asks for until it closes the socket."""
        # A child that outlives the rank would keep the socket open, and hide that the rank has ended.
        os.register_at_fork(after_in_child=self._link.close)
        while (incoming := receive(self._link)) is not None:
            out = Outgoing()
            try:
                reply = self._do(incoming, out)
            # Whatever a user's function raises is the answer.
            except BaseException as error:
                reply = _raised(error)
                del error
            incoming.close()
            sys.stdout.flush()
            sys.stderr.flush()
            out.send(self._link, reply)
            # These hold the arguments, which the worker may free now.
            del incoming, out, reply

    def _do(self, incoming: Incoming, out: Outgoing) -> object:
        match incoming.message:
            case Begin() as begin:
                self._begin(begin)
                return Done(None)
            case Run() as run:
                return Done(self._run(run, incoming, out), torch.distributed.is_initialized())
            case Pickle(number):
                return Done(_pickled(self._kept[number]))
        raise RuntimeError(f"a worker sent {incoming.message!r:.60}")

    def _begin(self, begin: Begin) -> None:
        self._device = torch.device(begin.device)
        backend = "gloo"
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index or 0)
            own = torch.distributed.get_default_backend_for_device(self._device)
            backend = f"cpu:gloo,{self._device.type}:{own}"
        if begin.threads:
            torch.set_num_threads(begin.threads)
        if torch.distributed.is_initialized():
            # Another member has none, so all of them make one.
            torch.distributed.destroy_process_group()
        store = TCPStore(begin.host, begin.port, is_master=False, timeout=_MEETING, wait_for_workers=False)
        torch.distributed.init_process_group(
            backend,
            store=PrefixStore(f"members/{begin.generation}", store),
            rank=begin.rank,
            world_size=begin.world,
        )

    def _run(self, run: Run, incoming: Incoming, out: Outgoing) -> object:
        for digest in run.outdated:
            self._code.pop(digest, None)
        for number in run.dropped:
            self._kept.pop(number, None)
        if run.shipped != self._shipped:
            follow(self._shipped, run.shipped)
            self._shipped = run.shipped
            # Code that is here has what it imported before.
            self._code.clear()
        operands = [self._operand(operand, incoming) for operand in run.operands]
        memories = {x.untyped_storage()._cdata for x in operands if isinstance(x, torch.Tensor)}
        leaves = self._leaves(operands, run.wants)
        function = self._function(run)
        # A library that takes itself for what has started the rank removes these at its end.
        os.environ.update(self._rank)
        args, kwargs = arguments(run.pickled, operands, self._real)
        with torch.set_grad_enabled(run.grad):
            result = _called(run.name, function, args, kwargs)  # type: ignore[arg-type]
        with torch.no_grad():
            for leaf, gradient in leaves:
                if leaf.grad is None:
                    gradient.zero_()
                elif leaf.grad.untyped_storage()._cdata != gradient.untyped_storage()._cdata:
                    gradient.copy_(leaf.grad)

            def tensor(value: torch.Tensor) -> Shared | Device:
                # What shares an argument's memory travels as a copy: that memory has its owner.
                own = value.untyped_storage()._cdata not in memories
                return out.tensor(value if own else value.detach().clone())

            return written(result, tensor, self._keep)

    def _operand(self, shown: object, incoming: Incoming) -> object:
        if isinstance(shown, (Shared, Device)):
            return incoming.tensor(shown)
        if isinstance(shown, Stays):
            return self._kept[shown.number]
        assert isinstance(shown, Object)
        return load(shown.pickled, (), self._real)

    def _leaves(
        self, operands: list[object], wants: list[Wants | None]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Make parameters of what is one at the caller; return those with a gradient there, and that."""
        found = []
        for k, want in enumerate(wants):
            value = operands[k]
            if want is None or not isinstance(value, torch.Tensor):
                continue
            if want.parameter:
                operands[k] = value = torch.nn.Parameter(value, requires_grad=want.grad)
            elif want.grad:
                value.requires_grad_()
            if want.gradient >= 0:
                gradient = operands[want.gradient]
                assert isinstance(gradient, torch.Tensor)
                value.grad = gradient
                found.append((value, gradient))
        return found

    def _function(self, run: Run) -> object:
        if run.digest not in self._code:
            self._code[run.digest] = load_code(run.code, self._real)
        return self._code[run.digest]

    def _real(self, named: torch.device) -> torch.device:
        return self._device if named.type != "cpu" else named

    def _keep(self, value: object) -> Stays:
        self._next += 1
        self._kept[self._next] = value
        return Stays(self._next, type(value).__name__)


def _called(name: str, function: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Call a user's function. It may raise anything."""
    own = os.getpid()
    try:
        try:
            return function(*args, **kwargs)
        finally:
            # A process that the function has forked would answer as the rank.
            if os.getpid() != own:
                end_child()
    except SystemExit as error:
        raise RuntimeError(
            f"{name} called sys.exit({error.code!r}), and the member goes on: return, or raise"
        ) from error
    except ModuleNotFoundError as error:
        # It stays the same error, as of a function of `dr.remote`.
        error.msg = missing(error)
        raise


def _pickled(value: object) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(value, protocol=5)
        return data
    # Any class of the user's may raise anything while it is pickled.
    except Exception as error:
        raise UsageError(
            f"{type(value).__name__} cannot be pickled, so it stays in its member's process: "
            f"{type(error).__name__}: {error}. Pass it to a function of dr.spmd, and return what you want"
        ) from error


def _raised(error: BaseException) -> Raised:
    """Return an error as it travels: without the frames of this process's own code."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(ours):
        tb = tb.tb_next
    file = io.StringIO()
    traceback.print_exception(type(error), error, tb or error.__traceback__, file=file)
    return Raised(class_name(type(error)), str(error), file.getvalue())


def _refuse_prompt(*args: object, **kwargs: object) -> NoReturn:
    raise NotSupportedError(
        "breakpoint() opens no prompt in a function of dr.spmd: call what you look at with dr.remote, where "
        "it opens one, or print"
    )


def main(_: Sequence[str]) -> int:
    """Serve the worker whose socket is standard input; return the exit code."""
    end_with_nursery()
    link = socket.socket(fileno=os.dup(0))
    # A user's function that reads standard input finds nothing there.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    # Its standard input is nobody's, and Python's own debugger would end the function there.
    sys.breakpointhook = pdb.set_trace = _refuse_prompt
    Member(link).serve()
    sys.stdout.flush()
    # Threads of gloo and NCCL need not be taken apart.
    os._exit(0)
