"""The members of a mesh on this worker, each in a process of its own: what `dr.spmd` runs functions in.

A call is one instruction of this worker for all its members. Workers of one mesh agree at the end of each
call: either all members have returned, or one member's failure is the call's on every worker. Then every
worker kills its processes, and the next call starts others.

Invariant: a worker begins a call only when it knows the outcomes of all before. Otherwise new processes of
one worker would wait for old ones of another.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import cloudpickle
import torch
import torch.distributed

from distruntime.errors import InternalError, NotSupportedError, SessionClosed, StreamCancelled, WaitTimeout
from distruntime.wire.deadlines import MEET
from distruntime.wire.shield import RLock

from ..collectives.listening import interface_of
from ..values.objects import Poisoned
from . import children
from .children import Child, Nursery, Surroundings, readable
from .handing import Incoming, Outgoing, Stays, read, receive
from .kept import Kept, Results
from .member import Begin, Done, Object, Pickle, Raised, Run, Wants
from .outcomes import Check, Outcomes, error_of
from .running import here
from .shipped import Package, shipped

# So many seconds lie between looks at what the other workers say, and at what ends the call here.
_LOOK = 0.05
# A call that has not begun here has so many seconds to tell the other workers so.
_TELLING = 30.0
# A member that says one of these has lost another one. What that one says, or how it ended, is the cause of
# both, and may take so many seconds to be known.
_LOST = ("losed by peer", "reset by peer", "Broken pipe", "remote process has terminated", "ConnectionError")
_ECHO = 1.0


class Members:
    """The members of one mesh on this worker.

    `ranks` are their ranks, `world` is how many the mesh has, `nodes` on how many workers, and `node` is this
    worker's number among those, from 0. The session calls this worker `index`.
    """

    def __init__(
        self,
        around: Surroundings,
        ranks: Sequence[int],
        world: int,
        node: int,
        nodes: int,
        devices: Sequence[str],
        index: int,
    ) -> None:
        if not torch.distributed.is_available():
            raise NotSupportedError(
                f"torch {torch.__version__} of this worker was built without torch.distributed, which "
                "dr.spmd runs: install another build of torch there"
            )
        self._around = around
        self._ranks, self._world, self._node, self._nodes = [*ranks], world, node, nodes
        self._index = index
        # Another worker's error may tell of them.
        self._names = [f"rank {rank} on node {index}" for rank in ranks]
        self._devices = [around.device(torch.device(name)) for name in devices]
        # One call at a time has the processes, whichever stream it is on.
        self._lock = RLock()
        self._nursery: Nursery | None = None
        self._children: list[Child] = []
        self._generation = -1
        # It is True once a function has ended the group that the members were in.
        self._ungrouped = False
        # The members have this code, as long as the master keeps it on this worker.
        self._sent: dict[bytes, weakref.ref[torch.Tensor]] = {}
        self._shipped: dict[str, Package] = {}
        # The numbers of objects in the members' processes that nobody here has any more.
        self.dropped: list[list[tuple[int, int]]] = [[] for _ in ranks]
        self._outcomes = Outcomes(nodes)
        # The number of the last call whose outcome is known here.
        self._ran = -1

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
        return host, self._outcomes.listen(host)

    def reach(self, host: str, port: int) -> str:
        """Reach the store of the mesh, before all calls; return why that was not possible, or nothing."""
        if here.call is not None:
            here.call.poll()
        with self._around.paused():
            return self._outcomes.connect(host, port, partial(self._check, "dr.spmd", None), MEET.get())

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
        # An interrupt that struck anywhere would lose what the nursery reports, or leave a part undone.
        if here.call is not None:
            here.call.poll()
        check = partial(self._check, name, deadline)
        with self._around.paused(), self._alone(check):
            results: list[object] = []
            try:
                self._catch_up(call)
                self._start(call, host, port, name, check)
                shown = [
                    None if want is None else Wants(bool(want[0]), bool(want[1]), want[2]) for want in wants
                ]
                self._hand_over(name, digest, code, pickled, operands, shown, grad)
                results = self._results(call, name, check)
                self._outcomes.agree(call, self._ungrouped, check)
                self._ran = call
            except BaseException as error:
                # The others hear of it, whatever it is.
                outcome = self._fail(call, error)
                if outcome is error:
                    raise
                if outcome is not None:
                    raise outcome from None
            self._ungrouped = self._outcomes.ungrouped
            return Results(results)

    def after(self, call: int, host: str, port: int, name: str, part: object) -> None:
        """Tell the other workers where a call has not begun here. `part` is what `run` has left here of it.

        An argument of it had failed, or it was cancelled before it ran.
        """
        if here.call is not None:
            here.call.poll()
        check = partial(self._check, name, time.monotonic() + _TELLING)
        with self._around.paused(), self._alone(check):
            if self._ran < call:
                self._catch_up(call)
                where = f"{name} did not begin on node {self._index}"
                if isinstance(part, Poisoned):
                    cause = part.failure
                    error = error_of(cause.kind, f"{cause.text} ({where})", cause.traceback)
                else:
                    error = InternalError(f"{where}, and has left {part!r:.80}")
                self._fail(call, error)

    @contextmanager
    def _alone(self, check: Check) -> Iterator[None]:
        """Wait until no other call has the processes."""
        while not self._lock.acquire(timeout=_LOOK):
            check()
        try:
            yield
        finally:
            self._lock.release()

    def _catch_up(self, call: int) -> None:
        """Have earlier calls fail elsewhere, too, that were dropped here with all that would tell of it."""
        if self._nodes > 1:
            for dropped in range(self._ran + 1, call):
                why = "dropped by stream.cancel() or dr.cancel() before it ran"
                self._fail(dropped, StreamCancelled(why))

    def _fail(self, call: int, error: BaseException) -> BaseException | None:
        """Have a call fail, and end the processes here; return its failure as `Outcomes.fail` does."""
        outcome = self._outcomes.fail(call, error)
        self._ran = call
        if outcome is not None:
            self._kill()
        return outcome

    def _start(self, call: int, host: str, port: int, name: str, check: Check) -> None:
        if self._children:
            if self._ungrouped:
                self._group(call, host, port, name, check)
            return
        if self._nursery is None or not self._nursery.look():
            if self._nursery is not None:
                left, self._nursery = self._nursery, None
                children.leave(left)
            self._nursery = children.enter()
        self._generation = call
        self._sent.clear()
        # By itself gloo takes the interface of this machine's own name, which may lead to no other machine.
        interface = interface_of(self._around.host("") if self._nodes > 1 else "127.0.0.1")
        own = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
        for lane, rank in enumerate(self._ranks):
            environment = {
                **own,
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
            child = self._nursery.fork(["member"], environment)
            child.prefix = f"[rank {rank}] "
            self._children.append(child)
        fair = max(1, torch.get_num_threads() // len(self._ranks))
        self._group(call, host, port, name, check, 0 if os.environ.get("OMP_NUM_THREADS") else fair)

    def _group(self, call: int, host: str, port: int, name: str, check: Check, threads: int = 0) -> None:
        """Have the members begin torch.distributed, and take so many threads; 0 leaves what they have."""
        self._ungrouped = False
        for lane, (child, rank) in enumerate(zip(self._children, self._ranks)):
            begin = Begin(name, rank, self._world, host, port, call, str(self._devices[lane]), threads)
            self._send(child, Outgoing(), begin)
        self._results(call, f"the start of {name}", check)

    def _local_rank(self, lane: int) -> int:
        # What a script does with it is choose its GPU.
        device = self._devices[lane]
        return lane if device.type == "cpu" or device.index is None else device.index

    def _send(self, child: Child, out: Outgoing, message: object) -> None:
        # `_results` finds out that one has ended.
        with suppress(OSError):
            out.send(child.link, message)

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
        if (packages := shipped()) != self._shipped:
            self._shipped = packages
            self._sent.clear()
        outdated = [one for one, kept in self._sent.items() if kept() is None]
        for one in outdated:
            del self._sent[one]
        body = b"" if digest in self._sent else bytes(code.numpy())
        for lane, child in enumerate(self._children):
            out = Outgoing()
            shown = [self._shown(value, lane, out) for value in operands[lane]]
            dropped, self.dropped[lane][:] = [*self.dropped[lane]], []
            gone = [number for generation, number in dropped if generation == self._generation]
            run = Run(name, digest, body, pickled, shown, wants, grad, gone, outdated, packages)
            self._send(child, out, run)
        self._sent[digest] = weakref.ref(code)

    def _shown(self, value: object, lane: int, out: Outgoing) -> object:
        if isinstance(value, torch.Tensor):
            return out.tensor(value)
        if isinstance(value, Kept):
            return value.of(self, lane, self._generation)
        return Object(cloudpickle.dumps(value, protocol=5))

    def _results(self, call: int, name: str, check: Check) -> list[object]:
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
            ready = readable([*links, *pipes], _LOOK)
            for descriptor, lane in pipes.items():
                child = self._children[lane]
                if descriptor in ready or child.said:
                    child.show(whole=descriptor in ready)
            for descriptor in ready:
                if descriptor in links:
                    lane = links[descriptor]
                    answers[lane] = self._answer(lane, name)
            self._outcomes.look(call, check)
        for child in self._children:
            child.show()
        for answer in answers.values():
            if isinstance(answer, Exception):
                self._await_cause(call, check)
                raise answer
        return [answers[lane] for lane in range(len(self._children))]

    def _answer(self, lane: int, name: str) -> object:
        child, member = self._children[lane], self._names[lane]
        incoming: Incoming | None = None
        with suppress(OSError):
            incoming = receive(child.link)
        child.show()
        if incoming is None:
            assert self._nursery is not None
            ended = self._nursery.end_of(child)
            child.show()
            wrote = f". It wrote last: {child.last:.500}" if child.last else ""
            raise RuntimeError(f"{member} {ended} in {name}{wrote}")
        match incoming.message:
            case Done(result, grouped):
                self._ungrouped = self._ungrouped or not grouped
                found = read(result, lambda part: self._made(part, lane, incoming))
                incoming.close()
                return found
            case Raised() as raised:
                incoming.close()
                found = error_of(raised.kind, f"{raised.text} ({member})", raised.traceback)
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

    def _check(self, name: str, deadline: float | None) -> None:
        """Raise what ends a call here."""
        if here.call is not None:
            here.call.look()
        if self._around.closed():
            raise SessionClosed(f"the session ended while {name} ran")
        if deadline is not None and time.monotonic() > deadline:
            raise WaitTimeout(f"{name} did not return within its timeout; its mesh's processes were ended")

    def _await_cause(self, call: int, check: Check) -> None:
        """Give the other workers a moment to tell of the failure that has made members here fail."""
        until = time.monotonic() + _ECHO
        while self._nodes > 1 and time.monotonic() < until:
            self._outcomes.look(call, check)
            time.sleep(_LOOK)

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
