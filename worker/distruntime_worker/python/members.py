"""The members of a mesh on this worker, each in a process of its own: what `dr.spmd` runs functions in.

A call is one instruction of this worker for all its members. Workers of one mesh agree at the end of each
call, through torch's store at the first one: either all members have returned, or one member's failure is the
call's on every worker. Then the processes are killed, and the next call starts others.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

import cloudpickle
import torch
import torch.distributed

from distruntime.errors import InternalError, NotSupportedError, SessionClosed, UsageError, WaitTimeout

from . import children
from .children import Child, Nursery
from .handing import Incoming, Outgoing, Stays, read, receive
from .member import Begin, Done, Object, Pickle, Raised, Run, Wants
from .skeleton import Real

if torch.distributed.is_available():
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

# So many seconds lie between looks at what the other workers say.
_LOOK = 0.05
_MEETING = timedelta(seconds=300)
# A member that has closed its socket has so many seconds until its exit code is asked for no more.
_EXIT = 5.0
_PIPE = 1 << 16
# A member that says one of these has lost another one. What that one says, or how it ended, is the cause of
# both, and may take so many seconds to be known.
_LOST = ("losed by peer", "reset by peer", "Broken pipe", "remote process has terminated", "ConnectionError")
_ECHO = 1.0


@dataclass(frozen=True)
class Surroundings:
    """What the session of a master gives its members.

    `host` returns where other workers reach this one, by the host that their master has dialled. `paused` is
    the context in which a thread blocks, and `closed` says whether the session has ended.
    """

    device: Real
    host: Callable[[str], str]
    paused: Callable[[], AbstractContextManager[object]]
    closed: Callable[[], bool]


class Kept:
    """An object that stays in the process of a member: it is used there, by functions of the same mesh."""

    def __init__(self, members: Members, lane: int, generation: int, stays: Stays) -> None:
        self._members, self._lane = weakref.ref(members), lane
        self._generation, self._stays = generation, stays
        weakref.finalize(self, _drop, members.dropped[lane], generation, stays.number)

    def __repr__(self) -> str:
        return f"<{self._stays.kind} in the process of a member>"

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UsageError(
            f"this {self._stays.kind} stays in its member's process: use its {name!r} in a function of "
            "dr.spmd that gets it as an argument, and return what you want of it"
        )

    def of(self, members: Members, lane: int, generation: int) -> Stays:
        """Return its number for a lane; raise `UsageError` where it is not there."""
        if self._members() is not members or self._lane != lane:
            raise UsageError(
                f"a {self._stays.kind} stays in the process of the member that made it: pass the list that "
                "dr.spmd has returned, of which each member gets its own item, to a function of the same mesh"
            )
        if self._generation != generation:
            raise UsageError(
                f"a {self._stays.kind} is gone with the processes of its mesh, which have been started again "
                "after a failure: make it again"
            )
        return self._stays

    def __reduce__(self) -> tuple[object, ...]:
        members = self._members()
        if members is None:
            raise UsageError(f"this {self._stays.kind} is gone: its mesh has been freed")
        return _unpickled, (members.pickle(self, self._lane),)


def _unpickled(value: object) -> object:
    return value


def _drop(dropped: list[tuple[int, int]], generation: int, number: int) -> None:
    dropped.append((generation, number))


class Results:
    """What the members here have returned, each to be taken once."""

    def __init__(self, found: list[object]) -> None:
        self._found = found

    def take(self, lane: int) -> object:
        """Return a member's result; nothing here holds it any more."""
        found, self._found[lane] = self._found[lane], None
        return found


class Members:
    """The members of one mesh on this worker.

    `ranks` are their ranks, `world` is how many the mesh has, `nodes` on how many workers, and `node` is this
    worker's number among those, from 0.
    """

    def __init__(
        self,
        around: Surroundings,
        ranks: Sequence[int],
        world: int,
        node: int,
        nodes: int,
        devices: Sequence[str],
    ) -> None:
        if not torch.distributed.is_available():
            raise NotSupportedError(
                f"torch {torch.__version__} of this worker was built without torch.distributed, which "
                "dr.spmd runs: install another build of torch there"
            )
        self._around = around
        self._ranks, self._world, self._node, self._nodes = [*ranks], world, node, nodes
        self._devices = [around.device(torch.device(name)) for name in devices]
        # One call at a time has the processes, whichever stream it is on.
        self._lock = threading.RLock()
        self._nursery: Nursery | None = None
        self._children: list[Child] = []
        self._generation = -1
        # It is True once a function has ended the group that the members were in.
        self._ungrouped = False
        self._sent: set[bytes] = set()
        # The numbers of objects in the members' processes that nobody here has any more.
        self.dropped: list[list[tuple[int, int]]] = [[] for _ in ranks]
        self._server: TCPStore | None = None
        self._store: Store | None = None
        # The numbers of the last call that ran here, and of the last one that failed here.
        self._ran = self._failed = -1
        self._half = b""

    def __del__(self) -> None:
        if "_nursery" in vars(self):
            self.close()

    def close(self) -> None:
        """End the processes."""
        self._kill()
        if self._nursery is not None:
            children.leave(self._nursery)
            self._nursery = None

    def listen(self, proposed: str) -> tuple[str, int]:
        """Start the store of the mesh here; return where the others reach it."""
        host = self._around.host(proposed)
        self._server = TCPStore(host, 0, is_master=True, timeout=_MEETING, wait_for_workers=False)
        return host, self._server.port

    # -- one call --------------------------------------------------------------------------------------------

    def run(
        self,
        call: int,
        host: str,
        port: int,
        name: str,
        digest: bytes,
        code: torch.Tensor,
        pickled: bytes,
        operands: Sequence[Sequence[object]],
        wants: Sequence[Sequence[int] | None],
        grad: bool,
        timeout: float | None,
    ) -> Results:
        """Run a function once for each member here; return their results.

        `operands` has, for each member, the operands of its call.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock, self._around.paused():
            self._ran = call
            try:
                self._connect(host, port)
                self._start(call, host, port, name, deadline)
                shown = [
                    None if want is None else Wants(bool(want[0]), bool(want[1]), want[2]) for want in wants
                ]
                self._hand_over(name, digest, code, pickled, operands, shown, grad)
                results = self._results(call, name, deadline)
                self._agree(call, name, deadline)
                return Results(results)
            except BaseException as error:
                # The others hear of it, whatever it is; also where this thread was told to stop.
                first = self._tell_failure(call, error)
                self._kill()
                if first is None:
                    raise
            raise first

    def after(self, call: int, name: str) -> None:
        """Tell the other workers where a call has not begun here: an argument of it had failed."""
        if self._ran < call:
            self._ran = call
            self._tell_failure(
                call,
                RuntimeError(
                    f"{name} did not begin on worker {self._node} of the mesh: an argument of it had failed"
                ),
            )

    def _connect(self, host: str, port: int) -> None:
        if self._nodes > 1 and self._store is None:
            store = TCPStore(host, port, is_master=False, timeout=_MEETING, wait_for_workers=False)
            self._store = PrefixStore("calls", store)

    def _start(self, call: int, host: str, port: int, name: str, deadline: float | None) -> None:
        if self._children:
            if self._ungrouped:
                self._group(call, host, port, name, deadline)
            return
        if self._nursery is None or not self._nursery.look():
            if self._nursery is not None:
                children.leave(self._nursery)
            self._nursery = children.enter()
        self._generation = call
        self._sent.clear()
        for lane, rank in enumerate(self._ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(self._world),
                "LOCAL_RANK": str(self._local_rank(lane)),
                "LOCAL_WORLD_SIZE": str(len(self._ranks)),
                "GROUP_RANK": str(self._node),
                "GROUP_WORLD_SIZE": str(self._nodes),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                # Whoever begins torch.distributed anew joins the store that is there.
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            self._children.append(self._nursery.fork(["member"], environment))
        threads = (
            0 if os.environ.get("OMP_NUM_THREADS") else max(1, torch.get_num_threads() // len(self._ranks))
        )
        self._group(call, host, port, name, deadline, threads)

    def _group(
        self, call: int, host: str, port: int, name: str, deadline: float | None, threads: int = 0
    ) -> None:
        """Have the members begin torch.distributed, and take so many threads; 0 leaves what they have."""
        self._ungrouped = False
        for lane, (child, rank) in enumerate(zip(self._children, self._ranks)):
            begin = Begin(name, rank, self._world, host, port, call, str(self._devices[lane]), threads)
            self._send(child, Outgoing(), begin)
        self._results(call, f"the start of {name}", deadline)

    def _local_rank(self, lane: int) -> int:
        # What a script does with it is choose its GPU.
        device = self._devices[lane]
        return lane if device.type == "cpu" or device.index is None else device.index

    def _send(self, child: Child, out: Outgoing, message: object) -> None:
        try:
            out.send(child.link, message)
        except OSError:
            # It has ended, which `_results` finds out.
            pass

    def _hand_over(
        self,
        name: str,
        digest: bytes,
        code: torch.Tensor,
        pickled: bytes,
        operands: Sequence[Sequence[object]],
        wants: list[Wants | None],
        grad: bool,
    ) -> None:
        body = b"" if digest in self._sent else bytes(code.numpy())
        for lane, child in enumerate(self._children):
            out = Outgoing()
            shown = [self._shown(value, lane, out) for value in operands[lane]]
            dropped, self.dropped[lane][:] = [*self.dropped[lane]], []
            gone = [number for generation, number in dropped if generation == self._generation]
            self._send(child, out, Run(name, digest, body, pickled, shown, wants, grad, gone))
        self._sent.add(digest)

    def _shown(self, value: object, lane: int, out: Outgoing) -> object:
        if isinstance(value, torch.Tensor):
            return out.tensor(value)
        if isinstance(value, Kept):
            return value.of(self, lane, self._generation)
        return Object(cloudpickle.dumps(value, protocol=5))

    def _results(self, call: int, name: str, deadline: float | None) -> list[object]:
        """Block until each member has answered; return the answers. Raise what the first failure was."""
        answers: dict[int, object] = {}
        lost_at = 0.0
        while len(answers) < len(self._children):
            if any(isinstance(answer, Exception) for answer in answers.values()):
                # These have lost another member, whose own end says more: it is heard of in a moment.
                echo = next(answer for answer in answers.values() if isinstance(answer, Exception))
                lost_at = lost_at or time.monotonic()
                if time.monotonic() > lost_at + _ECHO:
                    raise echo
            waiting = [lane for lane in range(len(self._children)) if lane not in answers]
            pipes = {child.output: lane for lane, child in enumerate(self._children) if child.output >= 0}
            links = {self._children[lane].link.fileno(): lane for lane in waiting}
            ready, _, _ = select.select([*links, *pipes], [], [], _LOOK)
            for descriptor in ready:
                if descriptor in pipes:
                    self._print(pipes[descriptor])
            for descriptor in ready:
                if descriptor in links:
                    lane = links[descriptor]
                    answers[lane] = self._answer(lane, name)
            self._look(call, name, deadline)
        for lane in range(len(self._children)):
            self._print(lane)
        for answer in answers.values():
            if isinstance(answer, Exception):
                self._await_cause(call, name, deadline)
                raise answer
        return [answers[lane] for lane in range(len(self._children))]

    def _answer(self, lane: int, name: str) -> object:
        child, rank = self._children[lane], self._ranks[lane]
        incoming: Incoming | None
        try:
            incoming = receive(child.link)
        except OSError:
            incoming = None
        self._print(lane)
        if incoming is None:
            raise RuntimeError(f"rank {rank} {self._end_of(child)} in {name}")
        match incoming.message:
            case Done(result, grouped):
                self._ungrouped = self._ungrouped or not grouped
                found = read(result, lambda part: self._made(part, lane, incoming))
                incoming.close()
                return found
            case Raised() as raised:
                incoming.close()
                found = _error(raised.kind, f"{raised.text} (rank {rank})", raised.traceback)
                if any(word in raised.text for word in _LOST):
                    return found
                raise found
        raise InternalError(f"a member's process sent {incoming.message!r:.80}")

    def _made(self, part: object, lane: int, incoming: Incoming) -> object:
        if isinstance(part, Stays):
            return Kept(self, lane, self._generation, part)
        found = incoming.tensor(part)  # type: ignore[arg-type]
        # The memory of a GPU is the other process's, and would go with it.
        return found if found.device.type == "cpu" else found.clone()

    def _end_of(self, child: Child) -> str:
        assert self._nursery is not None
        until = time.monotonic() + _EXIT
        while child.code is None and self._nursery.look(_LOOK) and time.monotonic() < until:
            pass
        if child.code is None:
            return "closed its socket"
        if child.code < 0:
            return f"was ended by {signal.Signals(-child.code).name}"
        return f"exited with code {child.code}"

    def _look(self, call: int, name: str, deadline: float | None) -> None:
        """Raise what another worker has told of the call, or what ends it here."""
        if self._around.closed():
            raise SessionClosed(f"the session ended while {name} ran")
        if deadline is not None and time.monotonic() > deadline:
            raise WaitTimeout(
                f"{name} did not return within its timeout; the processes of its mesh were ended"
            )
        if self._store is not None and self._store.check([f"{call}/end"]):
            self._raise_told(call)

    def _print(self, lane: int) -> None:
        """Print what a member has printed, with its rank before each line."""
        child = self._children[lane]
        try:
            data = os.read(child.output, _PIPE) if child.output >= 0 else b""
        except BlockingIOError:
            return
        if not data:
            if child.output >= 0:
                os.close(child.output)
                child.output = -1
            return
        for line in data.decode(errors="replace").splitlines():
            print(f"[rank {self._ranks[lane]}] {line}", flush=True)

    # -- among the workers -----------------------------------------------------------------------------------

    def _agree(self, call: int, name: str, deadline: float | None) -> None:
        """Block until each worker's members have returned; raise where one has failed."""
        store = self._store
        if store is None:
            return
        if self._ungrouped:
            store.set(f"{call}/ungrouped", "")
        if store.add(f"{call}/done", 1) == self._nodes:
            store.set(f"{call}/end", "")
            for key in ("done", "end", "ungrouped"):
                store.delete_key(f"{call - 1}/{key}")
            self._ungrouped = store.check([f"{call}/ungrouped"])
            return
        while True:
            try:
                store.wait([f"{call}/end"], timedelta(seconds=_LOOK * 4))
            except torch.distributed.DistStoreError:
                self._look(call, name, deadline)
                continue
            self._raise_told(call)
            # All of them hear of it, or none does.
            self._ungrouped = store.check([f"{call}/ungrouped"])
            return

    def _raise_told(self, call: int) -> None:
        assert self._store is not None
        told = self._store.get(f"{call}/end")
        if told:
            kind, text, traceback = json.loads(told)
            raise _error(kind, text, traceback)

    def _await_cause(self, call: int, name: str, deadline: float | None) -> None:
        """Give the other workers a moment to tell of the failure that has made members here fail."""
        until = time.monotonic() + _ECHO
        while self._store is not None and time.monotonic() < until:
            self._look(call, name, deadline)
            time.sleep(_LOOK)

    def _tell_failure(self, call: int, error: BaseException) -> Exception | None:
        """Tell the other workers of a failure; return theirs where one of them was first."""
        if self._store is None or self._failed >= call:
            return None
        self._failed = call
        words = json.dumps([_kind(error), str(error), getattr(error, "traceback_there", "")])
        try:
            # The first one that fails is the cause.
            told = self._store.compare_set(f"{call}/end", "", words)
        except torch.distributed.DistError:
            # The store is gone with its worker, which the other ones see too.
            return None
        return None if told == words.encode() or not told else _error(*json.loads(told))

    # -- what stays there ------------------------------------------------------------------------------------

    def pickle(self, kept: Kept, lane: int) -> object:
        """Return a copy of an object that stays in a member's process."""
        with self._lock, self._around.paused():
            stays = kept.of(self, lane, self._generation)
            child = self._children[lane]
            self._send(child, Outgoing(), Pickle(stays.number))
            found = self._answer(lane, f"a copy of a {stays.kind}")
            assert isinstance(found, bytes)
            return cloudpickle.loads(found)

    def _kill(self) -> None:
        if self._nursery is not None:
            for child in self._children:
                self._nursery.end(child)
        self._children = []


def _kind(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _error(kind: str, text: str, traceback: str) -> Exception:
    """Return an error that names the class, the text and the traceback of one in another process."""
    module, _, name = kind.rpartition(".")
    made = type(name, (Exception,), {"__module__": module or "builtins", "__qualname__": name})(text)
    made.traceback_there = traceback
    return made  # type: ignore[no-any-return]
