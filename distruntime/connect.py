"""How a session comes about: workers started here, attached to, or dialling in; and how it ends."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from .errors import ConfigurationError, ConnectionFailed, UsageError
from .group import Choice, Groups
from .install import install
from .launch import LocalWorker, start_workers
from .node import Node
from .replies import is_devices
from .session import Session, active
from .table import nodes_table
from .wait import is_timeout
from .wire.channel import Channel, PeerEvent
from .wire.codec import encode
from .wire.keys import choose
from .wire.messages import PROTOCOL, Hello, Join, Refused, Welcome
from .wire.shared import warm_malloc

log = logging.getLogger("distruntime")


def init_master_worker(
    backend: str = "zmq",
    world_size: int | None = None,
    workers: Sequence[str] | None = None,
    listen: str | None = None,
    *,
    simulate_cuda: int = 0,
    data_channel: Choice = "auto",
    key: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    timeout: float = 30.0,
    quiet: bool | None = None,
) -> Session:
    """Open the session of this process. Block until every worker is there; print where new tensors go, if at a terminal.

    Args:
        backend: the command channel; "zmq" is the one there is.
        world_size: how many workers: to start on this machine (2), or to wait for with `listen`.
        workers: addresses of running daemons to attach to, node 0 first: ["tcp://gpubox:29400"].
        listen: the address that workers dial: "tcp://0.0.0.0:29400".
        simulate_cuda: GPUs per started worker that are really CPU tensors, to try placement code on a laptop.
        data_channel: how tensors move between workers: "gloo", "nccl", "tcp", "mpi", a registered name, or one for each type of device,
            {"cuda": "nccl", "cpu": "gloo"}, which is what "auto" means.
        key: file with the cluster's key; the default is $DISTRUNTIME_KEY or ~/.config/distruntime/key.
        insecure: talk to other machines without a key: whoever reaches the port may run code.
        timeout: seconds to wait for workers.
        quiet: print nothing; the default is quiet unless standard output is a terminal.

    Raises:
        ConfigurationError: an argument that cannot be. UsageError: there is a session already.
        ConnectionFailed: a worker does not answer, refuses, has another key or protocol, or is late.
    """
    _check(backend, world_size, workers, listen, simulate_cuda, data_channel, timeout)
    if active and active[0].closed is None and not active[0].foreign:
        raise UsageError(
            f"init_master_worker was called before: a session with {len(active[0].nodes)} nodes is open. Use it, or call "
            "distruntime.shutdown() first"
        )
    install()
    warm_malloc()
    say = _silent if (quiet if quiet is not None else not sys.stdout.isatty()) else _print
    path = Path(key) if key is not None else None
    try:
        if workers is not None:
            session = _attach(list(workers), path, insecure, timeout, say)
        elif listen is not None:
            assert world_size is not None
            session = _listen(listen, world_size, path, insecure, timeout, say)
        else:
            session = _start(2 if world_size is None else world_size, simulate_cuda, timeout, say)
    except (ConnectionFailed, KeyboardInterrupt) as error:
        say("\n")  # else the traceback would begin in the line that says what is waited for
        raise error.with_traceback(None) from error.__cause__
    session.groups = Groups(session, data_channel)
    session.start()
    session.groups.meeting.begin()
    active[:] = [session]
    atexit.unregister(_at_exit)  # once: what it is registered with stays as long as the process
    atexit.register(_at_exit)
    session.on_close.append(lambda: active.remove(session) if session in active else None)
    try:
        session.groups.require_choice()
    except BaseException:
        session.shutdown(raise_unread=False)
        raise
    say(nodes_table(session) + "\n")
    say(f"new tensors go to {session.places.current().place}   (dr.set_place(...) to change)\n")
    return session


def _check(
    backend: str,
    world_size: int | None,
    workers: Sequence[str] | None,
    listen: str | None,
    simulate_cuda: int,
    data_channel: Choice,
    timeout: float,
) -> None:
    if backend in ("tcp", "mpi", "gloo", "nccl"):
        raise ConfigurationError(
            f"backend={backend!r} is how workers would talk to each other; the command channel is always ZeroMQ: use "
            f'backend="zmq", data_channel={backend!r}'
        )
    if backend != "zmq":
        raise ConfigurationError(f'backend is "zmq", got {backend!r}; addresses of workers go into workers=["tcp://host:port", ...]')
    if not isinstance(data_channel, str) and not (
        isinstance(data_channel, Mapping)
        and set(data_channel) <= {"cpu", "cuda"}
        and all(isinstance(name, str) for name in data_channel.values())
    ):
        raise ConfigurationError(f'data_channel is a name or {{"cuda": name, "cpu": name}}, got {data_channel!r}')
    if isinstance(workers, str):
        raise ConfigurationError(f"workers is a list of addresses, got one string: workers=[{workers!r}]")
    if workers is not None and not workers:
        raise ConfigurationError("workers is an empty list: name the daemons, or leave it out to start workers on this machine")
    if workers is not None and listen is not None:
        raise ConfigurationError("workers= attaches to running daemons and listen= waits for them to dial in: give one of the two")
    if workers is not None and world_size not in (None, len(workers)):
        raise ConfigurationError(f"world_size={world_size} but workers names {len(workers)}: leave world_size out")
    if listen is not None and world_size is None:
        raise ConfigurationError(f"listen={listen!r} needs world_size=: how many workers will dial in")
    if world_size is not None and (isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1):
        raise ConfigurationError(f"world_size is a number of workers, at least 1, got {world_size!r}")
    if isinstance(simulate_cuda, bool) or not isinstance(simulate_cuda, int) or not 0 <= simulate_cuda <= 127:
        raise ConfigurationError(
            f"simulate_cuda is a number of GPUs per worker from 0 to 127, the most that torch can tell apart; got {simulate_cuda!r}"
        )
    if not is_timeout(timeout):
        raise ConfigurationError(f"timeout is a number of seconds to wait for workers, got {timeout!r}")
    if simulate_cuda and (workers is not None or listen is not None):
        raise ConfigurationError("simulate_cuda is for workers that are started here; give running daemons --simulate-cuda themselves")


def _print(text: str) -> None:
    print(text, end="", flush=True)


def _silent(text: str) -> None:
    """Say nothing: the output is not a terminal."""


def _hello(session: Session) -> bytes:
    shared = session.challenge.name if session.challenge is not None else ""
    return encode(Hello(PROTOCOL, session.name, torch.__version__, platform.python_version(), socket.gethostname(), shared))


def _start(count: int, simulate_cuda: int, timeout: float, say: Callable[[str], None]) -> Session:
    """Start workers on this machine; they dial an ipc socket in a directory that only this user can enter."""
    directory = Path(tempfile.mkdtemp(prefix="distruntime-"))  # mode 0700
    address = f"ipc://{directory}/master"
    channel = Channel(listen=address, keys=None)
    session = Session(channel, [], f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
    session.on_close.append(lambda: shutil.rmtree(directory, ignore_errors=True))
    # One core is the master's: a worker whose kernels wait for a thread that cannot run is ten times slower (seen on 2 cores).
    threads = max(1, ((os.cpu_count() or 1) - 1) // count)
    started = time.monotonic()
    say(f"starting {count} worker{'s' if count > 1 else ''} ")
    try:
        session.local_workers = start_workers(
            count, address=address, key=None, threads=threads, simulate_cuda=simulate_cuda, directory=directory
        )
        _gather(session, count, timeout, say, "start")
    except BaseException:
        _abandon(session)
        raise
    say(f" ready in {time.monotonic() - started:.1f} s\n")
    return session


def _listen(address: str, count: int, key: Path | None, insecure: bool, timeout: float, say: Callable[[str], None]) -> Session:
    channel = Channel(listen=address, keys=choose(address, path=key, insecure=insecure))
    session = Session(channel, [], f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
    say(f"waiting at {channel.address} for {count} worker{'s' if count > 1 else ''} ")
    try:
        _gather(session, count, timeout, say, f"dial {channel.address}")
    except BaseException:
        _abandon(session)
        raise
    say("\n")
    return session


def _gather(session: Session, count: int, timeout: float, say: Callable[[str], None], verb: str) -> None:
    """Wait until `count` workers have joined and welcomed the session; node numbers as they ask for, else in order of arrival."""
    deadline, tick = time.monotonic() + timeout, time.monotonic()
    joined: dict[int, tuple[bytes, float]] = {}
    welcomed: dict[int, Node] = {}
    while len(welcomed) < count:
        if time.monotonic() > deadline:
            missing = count - len(welcomed)
            raise ConnectionFailed(
                f"{missing} of {count} workers did not {verb} within {timeout:.0f} s{_last_words(session.local_workers)}"
            )
        for index, worker in enumerate(session.local_workers):
            if index not in welcomed and (ended := worker.poll()) is not None:
                raise ConnectionFailed(f"worker {index} ended before it was ready ({ended}){_last_words([worker])}")
        if time.monotonic() > tick:
            say(".")
            tick += 0.25
        for event in session.channel.events():
            if event.kind in ("auth_failed", "handshake_failed"):
                log.warning("refused a connection (%s): %s", event.kind.replace("_", " "), event.detail or event.address)
        for peer, frames in session.channel.receive(0.05):
            session.take(peer, frames)
        for peer, message in session.greetings:
            if isinstance(message, Join):
                wish = message.node
                if wish is not None and not 0 <= wish < count:
                    raise ConnectionFailed(f"a worker on {message.host} asks to be node {wish}; this session has nodes 0 to {count - 1}")
                index = wish if wish is not None and wish not in joined else next(k for k in range(count + 1) if k not in joined)
                if index < count:
                    joined[index] = peer, time.monotonic()
                    session.send(peer, [_hello(session)])
            elif isinstance(message, Refused):
                raise ConnectionFailed(f"a worker refused: {message.reason}")
            else:
                for index, (known, at) in joined.items():
                    if known == peer:
                        welcomed[index] = _node(session, index, peer, session.channel.address, message, time.monotonic() - at)
        session.greetings.clear()
    for index in sorted(welcomed):
        session.add_node(welcomed[index])


def _attach(addresses: list[str], key: Path | None, insecure: bool, timeout: float, say: Callable[[str], None]) -> Session:
    keys = {choose(address, path=key, insecure=insecure) for address in addresses}
    if len(keys) > 1:
        raise ConfigurationError("some of these addresses need a key and some do not: name the key file for all of them with key=")
    channel = Channel(keys=keys.pop())
    session = Session(channel, [], f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
    peers = {f"node-{k}".encode(): k for k in range(len(addresses))}
    deadline, started = time.monotonic() + timeout, time.monotonic()
    tick = started + 0.5
    welcomed: dict[int, Node] = {}
    seen: dict[int, list[PeerEvent]] = {k: [] for k in range(len(addresses))}
    say(f"connecting {len(addresses)} worker{'s' if len(addresses) > 1 else ''} ")
    try:
        greeted: dict[int, float] = {}
        for peer, k in peers.items():
            channel.connect(addresses[k], peer)
        while len(welcomed) < len(addresses):
            for event in channel.events():
                number = peers.get(event.peer or b"")
                if number is None:
                    number = next((k for k, a in enumerate(addresses) if a == event.address), None)
                if number is None:
                    continue
                seen[number].append(event)
                if event.kind == "connected" and number not in welcomed:
                    greeted[number] = time.monotonic()
                    session.send(f"node-{number}".encode(), [_hello(session)])
                refusals = [e for e in seen[number] if e.kind in ("auth_failed", "handshake_failed")]
                if refusals:  # libzmq does not dial again after a mismatch of keys
                    raise ConnectionFailed(_unanswered(addresses[number], seen[number], time.monotonic() - started))
            if time.monotonic() > deadline:
                late = [k for k in range(len(addresses)) if k not in welcomed]
                raise ConnectionFailed("\n".join(_unanswered(addresses[k], seen[k], timeout) for k in late))
            if time.monotonic() > tick:
                say(".")
                tick += 0.25
            for peer, frames in channel.receive(0.02):
                session.take(peer, frames)
            for peer, message in session.greetings:
                number = peers[peer]
                if isinstance(message, Refused):
                    raise ConnectionFailed(f"the worker at {addresses[number]} refused: {message.reason}")
                if isinstance(message, Welcome):
                    welcomed[number] = _node(session, number, peer, addresses[number], message, time.monotonic() - greeted[number])
                    say(f"{message.host} ({time.monotonic() - started:.1f} s) ")
            session.greetings.clear()
        for number in range(len(addresses)):
            session.add_node(welcomed[number])
    except BaseException:
        _abandon(session)
        raise
    say("\n")
    return session


def _unanswered(address: str, seen: list[PeerEvent], seconds: float) -> str:
    kinds = {event.kind for event in seen}
    if kinds & {"auth_failed", "handshake_failed"}:
        return (
            f"{address} closed the connection during the handshake: it has another key, or needs one where none was given "
            "(or needs none where one was). Expected: the same key file on both sides (distruntime-worker keygen; key=...)"
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


def _node(session: Session, index: int, peer: bytes, address: str, welcome: Welcome, round_trip: float) -> Node:
    if welcome.protocol != PROTOCOL:
        raise ConnectionFailed(
            f"node {index} ({welcome.host}) speaks protocol {welcome.protocol}, this process {PROTOCOL}: "
            "install the same distruntime on both"
        )
    if not is_devices(welcome.devices):
        raise ConnectionFailed(
            f"node {index} ({welcome.host}) says that its devices are {welcome.devices!r:.80}: is it a distruntime-worker?"
        )
    node = Node(index, peer, address, session.channel.send, session.lock)
    node.welcome, node.round_trip = welcome, round_trip
    node.shared = session.challenge is not None and welcome.shared == session.secret
    return node


def _last_words(workers: Sequence[LocalWorker]) -> str:
    words = [text for worker in workers if (text := str(worker.last_lines(5)))]
    return "; the last lines of its log:\n" + "\n".join(words) if words else ""


def _abandon(session: Session) -> None:
    """Undo a session that did not come about."""
    session.closed = "it did not come about"
    for worker in session.local_workers:
        worker.stop(1.0)
    session.channel.close()
    session.shared.close()
    for callback in session.on_close:
        callback()


def shutdown() -> None:
    """End the session. Workers drop its values; raise the first failure that nobody has read."""
    if active:
        active[0].shutdown()


def is_initialized() -> bool:
    """Whether this process has an open session."""
    return bool(active) and active[0].closed is None and not active[0].foreign


def _at_exit() -> None:
    for session in list(active):
        if not session.foreign and session.closed is None:
            session.shutdown(raise_unread=False)


__all__ = ["init_master_worker", "is_initialized", "shutdown"]
