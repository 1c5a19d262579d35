"""How a session's workers come together: started here, attached to, or dialling in; for the first time, or again for a later master."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ConfigurationError, ConnectionFailed
from ..log.node import Node
from ..log.replies import devices_from
from ..publishing.listing import published
from ..session.session import Session
from ..session.worker_process import WorkerProcess
from ..wire.channel import HANG_UPS, Channel, PeerEvent
from ..wire.keys import KeyPair, choose, warn_of_strangers
from ..wire.messages import PROTOCOL, Join, Refused, Welcome
from .keeper import Keeper, new_name, new_token, refuses, span
from .local_workers import start_worker
from .named_sessions import Entry, forget, now, read, write
from .scratch import scratch_folder

log = logging.getLogger("distruntime")

_ANSWER = 5.0  # seconds for a worker to answer on its first connection; each further one gets twice as long
_PAUSE, _REFUSALS = (
    0.1,
    5,
)  # seconds after the first handshake that fails, twice as many after each further one, and how many of them


@dataclass(frozen=True)
class Plan:
    """What a user has said about a session. `mode` is that of its greeting, the times are seconds."""

    name: str | None
    mode: str
    keep: float
    grace: float
    unreachable: float
    key: Path | None
    insecure: bool
    timeout: float
    say: Callable[[str], None]


def _session(plan: Plan, channel: Channel) -> Session:
    session = Session(channel, [], plan.name or new_name())
    session.lasting = plan.name is not None
    session.patience = plan.timeout
    session.keeper_to_be = Keeper(session, keep=plan.keep, grace=plan.grace, token=new_token(), made=node_of)
    return session


def start(plan: Plan, count: int, simulate_cuda: int) -> Session:
    """Start workers on this machine; in a directory that only this user can enter.

    They dial this process, and end with it; those of a named session are dialled, and end with the session.
    """
    if plan.name is None:
        return _start_own(plan, count, simulate_cuda, scratch_folder())
    before = read(plan.name)
    there = (
        [k for k, address in enumerate(before.workers) if not refuses(address)]
        if before is not None and before.directory
        else []
    )
    if before is not None and there:
        if plan.mode == "new":
            raise ConnectionFailed(
                f"there is a session {plan.name!r} already, with {len(there)} worker{'s' if len(there) > 1 else ''} on this machine: "
                "resume=True attaches to it, force=True begins it anew"
            )
        if (count, simulate_cuda) != (len(before.workers), before.simulate_cuda):
            raise ConfigurationError(
                f"the session {plan.name!r} has {len(before.workers)} workers with {before.simulate_cuda} simulated GPUs: give the same "
                f"numbers with force=True, got {count} and {simulate_cuda}; or end it first: resume=True, then shutdown()"
            )
        return _attach_local(plan, before, [k for k in range(count) if k not in there])
    directory = scratch_folder()
    addresses = [f"ipc://{directory}/worker-{k}" for k in range(count)]
    entry = Entry(plan.name, tuple(addresses), str(directory), "", False, "", simulate_cuda, now())
    return _attach_local(plan, entry, range(count))


def _start_own(plan: Plan, count: int, simulate_cuda: int, directory: Path) -> Session:
    address = f"ipc://{directory}/master"
    session = _session(plan, Channel(listen=address, silence=plan.unreachable))
    session.on_close.append(lambda: shutil.rmtree(directory, ignore_errors=True))
    session.starter = lambda k: start_worker(
        k,
        master=address,
        threads=_threads(count),
        simulate_cuda=simulate_cuda,
        directory=directory,
        unreachable=plan.unreachable,
    )
    started = time.monotonic()
    plan.say(f"starting {count} worker{'s' if count > 1 else ''} ")
    try:
        for k in range(count):
            session.local_workers.append(session.starter(k))
        _gather(plan, session, count, "start")
    except BaseException:
        _abandon(session)
        raise
    plan.say(f" ready in {time.monotonic() - started:.1f} s\n")
    return session


def _attach_local(plan: Plan, entry: Entry, fresh: Sequence[int]) -> Session:
    """Attach to the workers of a named session on this machine, after starting those in `fresh`."""
    directory, count = Path(entry.directory), len(entry.workers)
    session = _session(plan, Channel(silence=plan.unreachable))
    session.starter = lambda k: start_worker(
        k,
        listen=entry.workers[k],
        threads=_threads(count),
        simulate_cuda=entry.simulate_cuda,
        directory=directory,
        unreachable=plan.unreachable,
    )
    started = time.monotonic()
    if fresh:
        plan.say(f"starting {len(fresh)} worker{'s' if len(fresh) > 1 else ''} ")
    try:
        session.local_workers = [session.starter(k) if k in fresh else None for k in range(count)]
        modes = ["force new" if k in fresh else plan.mode for k in range(count)]
        _connect(plan, session, list(entry.workers), modes)
        _note(session, entry)
        session.on_end.append(lambda: shutil.rmtree(directory, ignore_errors=True))
    except BaseException:
        _abandon(session)
        if len(fresh) == count:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    if fresh:
        plan.say(f" ready in {time.monotonic() - started:.1f} s\n")
    return session


def _note(session: Session, entry: Entry) -> None:
    write(entry)
    session.on_end.append(lambda: forget(entry.name))


def _threads(count: int) -> int:
    # One core is the master's: a worker whose kernels wait for a thread that cannot run is ten times slower (seen on 2 cores).
    return max(1, ((os.cpu_count() or 1) - 1) // count)


def gather_at(plan: Plan, address: str, count: int) -> Session:
    """Wait for workers that dial this process."""
    if plan.insecure:
        warn_of_strangers([address])
    session = _session(
        plan,
        Channel(
            listen=address,
            keys=choose(address, path=plan.key, insecure=plan.insecure),
            silence=plan.unreachable,
        ),
    )
    listening = session.channel.address
    plan.say(f"waiting at {listening} for {count} worker{'s' if count > 1 else ''} ")
    try:
        _gather(plan, session, count, f"dial {listening}")
        if plan.name is not None:
            names = tuple(node.host for node in session.nodes)
            _note(
                session, Entry(plan.name, names, "", str(plan.key or ""), plan.insecure, listening, 0, now())
            )
    except BaseException:
        _abandon(session)
        raise
    plan.say("\n")
    return session


def attach(plan: Plan, addresses: list[str]) -> Session:
    """Attach to running daemons."""
    session = _session(plan, Channel(keys=_keys(plan, addresses), silence=plan.unreachable))
    plan.say(f"connecting {len(addresses)} worker{'s' if len(addresses) > 1 else ''} ")
    try:
        _connect(plan, session, addresses, [plan.mode] * len(addresses))
        if plan.name is not None:
            _note(
                session,
                Entry(plan.name, tuple(addresses), "", str(plan.key or ""), plan.insecure, "", 0, now()),
            )
    except BaseException:
        _abandon(session)
        raise
    plan.say("\n")
    return session


def resume_entry(plan: Plan, entry: Entry) -> Session:
    """Attach to the workers of a session that was noted here. Those of this machine that have died are started again."""
    plan = replace(
        plan,
        key=plan.key or (Path(entry.key) if entry.key else None),
        insecure=plan.insecure or entry.insecure,
    )
    if entry.listen:
        return gather_at(plan, entry.listen, len(entry.workers))
    if not entry.directory:
        return attach(plan, list(entry.workers))
    dead: list[int] = []
    while True:
        before, dead = dead, [k for k, address in enumerate(entry.workers) if refuses(address)]
        if len(dead) == len(entry.workers):
            forget(entry.name)
            shutil.rmtree(entry.directory, ignore_errors=True)
            raise ConnectionFailed(
                f"the session {entry.name!r} is no more: its workers on this machine have ended (their time without a master was over, "
                "or they died). Begin it anew, without resume=True"
            )
        for k in dead:
            if k not in before:
                log.warning(
                    "node %d of session %r has died; it begins anew, and what lived there is lost",
                    k,
                    entry.name,
                )
        try:
            return _attach_local(plan, entry, dead)
        except ConnectionFailed:
            if all(k in dead or not refuses(address) for k, address in enumerate(entry.workers)):
                raise
            # A process that is being killed listens until the last of its threads has ended.


def _keys(plan: Plan, addresses: Sequence[str]) -> KeyPair | None:
    keys = {choose(address, path=plan.key, insecure=plan.insecure) for address in addresses}
    if plan.insecure:
        warn_of_strangers(addresses)
    if len(keys) > 1:
        raise ConfigurationError(
            "some of these addresses need a key and some do not: name the key file for all of them with key="
        )
    return keys.pop()


def _ended(session: Session, welcomed: dict[int, Node]) -> None:
    """Raise `ConnectionFailed` where a worker that was started has ended before it was ready."""
    for index, worker in enumerate(session.local_workers):
        if worker is not None and index not in welcomed and (ended := worker.poll()) is not None:
            raise ConnectionFailed(
                f"worker {index} ended before it was ready ({ended}){_last_words([worker])}"
            )


def _gather(plan: Plan, session: Session, count: int, verb: str) -> None:
    """Wait until `count` workers have joined and welcomed the session; node numbers as they ask for, else in order of arrival."""
    deadline, tick = time.monotonic() + plan.timeout, time.monotonic()
    joined: dict[int, tuple[bytes, float]] = {}
    welcomed: dict[int, Node] = {}
    while len(welcomed) < count:
        if time.monotonic() > deadline:
            missing = count - len(welcomed)
            raise ConnectionFailed(
                f"{missing} of {count} workers did not {verb} within {plan.timeout:.0f} s{_last_words(session.local_workers)}"
            )
        _ended(session, welcomed)
        if time.monotonic() > tick:
            plan.say(".")
            tick += 0.25
        session.strangers.look()
        for event in session.channel.events():
            if event.kind == "disconnected" and event.peer is not None:
                session.parted.add(event.peer)
                for index in [
                    index
                    for index, (peer, _) in joined.items()
                    if peer == event.peer and index not in welcomed
                ]:
                    del joined[index]
            elif event.kind in ("auth_failed", "handshake_failed"):
                session.strangers.note(
                    f"refused a connection ({event.kind.replace('_', ' ')}): {event.detail or event.address}"
                )
        for peer, frames in session.channel.receive(0.05):
            session.take(peer, frames)
        for peer, message in session.greetings:
            if isinstance(message, Join) and any(_is(node, message) for node in welcomed.values()):
                session.early.append((peer, message))
            elif isinstance(message, Join):
                wish = message.node
                if wish is not None and not 0 <= wish < count:
                    raise ConnectionFailed(
                        f"a worker on {message.host} asks to be node {wish}; this session has nodes 0 to {count - 1}"
                    )
                index = (
                    wish
                    if wish is not None and wish not in joined
                    else next(k for k in range(count + 1) if k not in joined)
                )
                if index < count:
                    joined[index] = peer, time.monotonic()
                    session.greet(peer, session.keeper_to_be.hello(plan.mode))
            elif isinstance(message, Refused):
                raise ConnectionFailed(f"a worker refused: {message.reason}")
            else:
                for index, (known, at) in joined.items():
                    if known == peer:
                        welcomed[index] = node_of(
                            session, index, peer, session.channel.address, message, time.monotonic() - at
                        )
        session.greetings.clear()
    for index in sorted(welcomed):
        session.add_node(welcomed[index])


def _is(node: Node, join: Join) -> bool:
    return node.welcome is not None and node.welcome.incarnation == join.incarnation


class _Dialled:
    """A worker that is dialled until it has welcomed the session, on one connection after the other."""

    def __init__(self, number: int, address: str, mode: str) -> None:
        self.number, self.address, self.mode = number, address, mode
        self.peer = b""  # its connection now
        self.seen: list[PeerEvent] = []
        self.greeted_at = 0.0
        self.patience = _ANSWER  # on the connection now
        self.anew_at = 0.0  # when it is dialled again
        self._refusals, self._hang_ups, self._dials = 0, 0, 0

    def dial(self, session: Session) -> None:
        """Give the connection up that there is, and make another."""
        self.give_up(session)
        # Not as the keeper calls those that it makes later.
        self.peer = f"node-{self.number}-{self._dials}".encode()
        self._dials += 1
        self.anew_at = time.monotonic() + self.patience
        self.patience *= 2
        session.channel.connect(self.address, self.peer)

    def give_up(self, session: Session) -> None:
        """Let nothing count any more that comes on the connection that there is."""
        if self.peer:
            session.retired.append(self.peer)
            session.channel.hang_up(self.peer)
            self.peer = b""

    def refused(self, session: Session) -> bool:
        """Note a handshake that failed, and dial again in a moment; return False if that has happened too often."""
        self.give_up(session)
        self.anew_at = time.monotonic() + _PAUSE * 2**self._refusals
        self._refusals += 1
        return self._refusals <= _REFUSALS

    def hung_up(self) -> bool:
        """Note that the other side hung up in the handshake, after which libzmq dials again by itself; return False if too often."""
        self._hang_ups += 1
        return self._hang_ups < HANG_UPS

    def ended(self) -> bool:
        """Whether this is a worker of this machine that was there, and is no more."""
        return self._refusals > 0 and self.address.startswith("ipc://") and refuses(self.address)


def _connect(plan: Plan, session: Session, addresses: list[str], modes: list[str]) -> None:
    """Dial workers, and wait until each has welcomed the session; `modes` are those of its greetings.

    A greeting may be lost with its connection, or on one that seems to live: what has changed the length of a message on the way has left
    the worker waiting for the rest of it. So who does not answer is dialled again, and greeted there.
    """
    channel = session.channel
    deadline, started = time.monotonic() + plan.timeout, time.monotonic()
    tick = started + 0.5
    dialled = [_Dialled(k, address, mode) for k, (address, mode) in enumerate(zip(addresses, modes))]
    welcomed: dict[int, Node] = {}
    for one in dialled:
        one.dial(session)
    while len(welcomed) < len(addresses):
        for event in channel.events():
            found = next(
                (
                    one
                    for one in dialled
                    if event.peer == one.peer or (event.peer is None and event.address == one.address)
                ),
                None,
            )
            if found is None:
                continue
            found.seen.append(event)
            there = found.number in welcomed
            if event.kind == "connected" and not there:
                found.greeted_at = time.monotonic()
                session.greet(found.peer, session.keeper_to_be.hello(found.mode))
            elif event.kind == "disconnected" and there:
                session.parted.add(found.peer)
            elif event.kind in ("auth_failed", "handshake_failed") and not there:
                # Another key fails in the same way as a connection that is reset in its first moments, or as one at a flooded worker.
                if event.kind == "auth_failed" or not (
                    found.refused(session) if event.final else found.hung_up()
                ):
                    raise ConnectionFailed(_unanswered(found.address, found.seen, time.monotonic() - started))
        _ended(session, welcomed)
        late = [one for one in dialled if one.number not in welcomed]
        if time.monotonic() > deadline:
            raise ConnectionFailed(
                "\n".join(_unanswered(one.address, one.seen, plan.timeout) for one in late)
            )
        for one in late:
            if time.monotonic() > one.anew_at:
                if one.ended():
                    raise ConnectionFailed(_unanswered(one.address, one.seen, time.monotonic() - started))
                one.dial(session)
        if time.monotonic() > tick:
            plan.say(".")
            tick += 0.25
        for peer, frames in channel.receive(0.02):
            session.take(peer, frames)
        for peer, message in session.greetings:
            answered = next((one for one in late if one.peer == peer), None)
            if answered is None:  # on a connection that has been given up
                continue
            if isinstance(message, Refused):
                raise ConnectionFailed(f"the worker at {answered.address} refused: {message.reason}")
            if isinstance(message, Welcome):
                round_trip = time.monotonic() - answered.greeted_at
                welcomed[answered.number] = node_of(
                    session, answered.number, peer, answered.address, message, round_trip
                )
                if not session.local_workers:
                    plan.say(f"{message.host} ({time.monotonic() - started:.1f} s) ")
        session.greetings.clear()
    for number in range(len(addresses)):
        session.add_node(welcomed[number])


def _unanswered(address: str, seen: list[PeerEvent], seconds: float) -> str:
    kinds = {event.kind for event in seen}
    if kinds & {"auth_failed", "handshake_failed"}:
        return (
            f"{address} closed the connection during the handshake: it has another key, or needs one where none was given "
            "(or needs none where one was), or has no descriptors left. Expected: the same key file on both sides "
            "(distruntime-worker keygen; key=...)"
        )
    if "connected" in kinds:
        return (
            f"something at {address} accepts connections but did not answer as a worker within {seconds:.0f} s: "
            "is it a distruntime-worker, and not stopped?"
        )
    return (
        f"nothing answers at {address} within {seconds:.0f} s: is the worker running there (distruntime-worker --listen {address}), "
        "and the port open?"
    )


def node_of(
    session: Session, index: int, peer: bytes, address: str, welcome: Welcome, round_trip: float
) -> Node:
    """Return the node of a worker that has welcomed the session."""
    if welcome.protocol != PROTOCOL:
        raise ConnectionFailed(
            f"node {index} ({welcome.host}) speaks protocol {welcome.protocol}, this process {PROTOCOL}: "
            "install the same distruntime on both"
        )
    devices = devices_from(welcome.devices)
    if devices is None:
        raise ConnectionFailed(
            f"node {index} ({welcome.host}) says that its devices are {welcome.devices!r:.80}: is it a distruntime-worker?"
        )
    shared = session.challenge.answered(welcome.shared, welcome.nonce)
    return Node(session, index, peer, address, replace(welcome, devices=devices), round_trip, shared)


def _last_words(workers: Sequence[WorkerProcess | None]) -> str:
    words = [text for worker in workers if worker is not None and (text := str(worker.last_lines(5)))]
    return "; the last lines of its log:\n" + "\n".join(words) if words else ""


def _abandon(session: Session) -> None:
    """Undo a session that did not come about."""
    session.closed = "it did not come about"
    for worker in session.local_workers:
        if worker is not None:
            worker.stop(1.0)
    session.channel.close()
    session.shared.close()
    for callback in session.on_close:
        callback()


def attached(session: Session) -> str:
    """Return what a master is told that has resumed a session."""
    count, names = len(session.nodes), [one for one in published(session) if one.owner == session.name]
    age = max(node.welcome.age for node in session.nodes if node.welcome is not None)
    shown = [f"{one.name} ({one.what}, {', '.join(map(str, one.places[:2]))})" for one in names[:5]]
    rest = f", and {len(names) - 5} more" if len(names) > 5 else ""
    text = f'attached to session "{session.name}": {count} node{"s" if count > 1 else ""}, up {span(age)}, '
    return (
        text
        + f"{len(names)} name{'s' if len(names) != 1 else ''}"
        + (": " + ", ".join(shown) + rest if names else "")
    )
