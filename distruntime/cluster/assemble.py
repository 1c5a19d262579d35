"""How a session's workers come together: they are started, attached to, or dial in.

The session may be a new one, or one that a later master resumes.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ..errors import ConfigurationError, ConnectionFailed
from ..launching.ssh_session import SshSession, need_ssh
from ..log.node import Node
from ..publishing.listing import published
from ..session.launcher import LaunchSpec, dialled_at, worker_command
from ..session.session import Session
from ..wire.channel import Channel
from ..wire.deadlines import UNREACHABLE
from ..wire.keys import KeyPair, choose, default_path, is_local, warn_of_strangers
from ..wire.scratch import hold, let_go, remove, scratch_folder
from ..wire.units import span
from .absences import refuses
from .arrivals import SessionOptions, all_or_nothing, meet
from .connector import Connector
from .local_workers import LocalLauncher, log_folder
from .named_sessions import Entry, delete, drop, now, read, write
from .stacks import tell_of_program

log = logging.getLogger("distruntime")

# Workers dial a master that is back within two seconds. So many seconds later, those that have not are gone.
_REDIAL = 5.0


def _connector(
    options: SessionOptions,
    channel: Channel,
    addresses: Sequence[str],
    modes: Sequence[str],
    endpoints: Mapping[int, str] = MappingProxyType({}),
) -> Connector:
    """Return a new session's connector, which knows it."""
    session = Session(channel, [], options.name or f"{os.getpid()}-{secrets.token_hex(4)}")
    session.lasting = options.name is not None
    session.patience = options.timeout
    tell_of_program(session)
    return Connector(
        session,
        addresses,
        modes,
        keep=options.keep,
        grace=options.grace,
        restart_workers=options.restart_workers,
        endpoints=endpoints,
        most=options.most,
    )


def start(options: SessionOptions, count: int) -> Session:
    """Start workers on this machine; in a directory that only this user can enter.

    They dial this process, and end with it; those of a named session are dialled, and end with the session.
    """
    if options.name is None:
        directory = scratch_folder("session", sockets=True)
        # Nobody else can enter the directory, so no key is needed.
        return _start_and_wait(options, f"ipc://{directory}/master", None, count, directory)
    simulate_cuda = options.simulate_cuda
    before = read(options.name)
    there = (
        [k for k, address in enumerate(before.workers) if not refuses(address)]
        if before is not None and before.directory
        else []
    )
    if before is not None and there:
        if options.mode == "new":
            raise ConnectionFailed(
                f"there is a session {options.name!r} already, with {len(there)} "
                f"worker{'s' if len(there) > 1 else ''} on this machine: "
                'resume="auto" attaches to it, force=True begins it anew'
            )
        if (count, simulate_cuda) != (len(before.workers), before.simulate_cuda):
            raise _of_other_size(before, count, simulate_cuda)
        return _attach_local(options, before, [k for k in range(count) if k not in there])
    directory = scratch_folder("session", sockets=True, outlives=True)
    addresses = [f"ipc://{directory}/worker-{k}" for k in range(count)]
    entry = Entry(options.name, tuple(addresses), str(directory), "", False, "", simulate_cuda, now())
    return _attach_local(options, entry, range(count))


def _of_other_size(entry: Entry, count: int | None, simulate_cuda: int) -> ConfigurationError:
    """Return the error of numbers that are not those of a session that is there."""
    workers = len(entry.workers)
    return ConfigurationError(
        f"the session {entry.name!r} has {workers} worker{'s' if workers != 1 else ''} with "
        f"{entry.simulate_cuda} simulated GPUs: got world_size={count}, simulate_cuda={simulate_cuda}. "
        "Give the same numbers, or end that session first: resume=True, then shutdown()"
    )


def _start_and_wait(
    options: SessionOptions, address: str, keys: KeyPair | None, count: int, directory: Path
) -> Session:
    """Start workers that dial this process at an address, and wait for them."""
    channel = Channel(listen=address, keys=keys, silence=options.unreachable)
    connector = _connector(options, channel, [""] * count, [options.mode] * count)
    session = connector.session
    _let_launch(options, session, address, keys, count, directory)
    started = time.monotonic()
    options.say(f"starting {count} worker{'s' if count > 1 else ''} ")
    with all_or_nothing(connector):
        for k in range(count):
            session.workers.start(k)
        meet(options, connector, "start")
        if options.name is not None:
            _note_listening(options, session)
    options.say(f" ready in {time.monotonic() - started:.1f} s\n")
    return session


def _let_launch(
    options: SessionOptions, session: Session, address: str, keys: KeyPair | None, count: int, directory: Path
) -> None:
    """Let a session start workers that dial this process."""
    session.ending.on_close.append(lambda: remove(directory))
    spec = _spec(options, session.name, directory, count, address, has_key=keys is not None)
    master, launcher = dialled_at(session.channel.address), options.launcher or LocalLauncher()
    session.workers.launch = lambda k: launcher.start(replace(spec, node=k, master=master))


def _start_missing(connector: Connector) -> None:
    """Start the workers of a session that was begun before, where they do not dial again by themselves."""
    session, until = connector.session, time.monotonic() + _REDIAL
    while connector.late() and time.monotonic() < until:
        session.receiver.read(0.02)
    for connection in connector.late():
        log.warning(
            "node %d of session %r has not dialled within %.0f s. A new worker starts in its place, and the "
            "tensors there are lost",
            connection.number,
            session.name,
            _REDIAL,
        )
        session.workers.start(connection.number)


def _attach_local(options: SessionOptions, entry: Entry, fresh: Sequence[int]) -> Session:
    """Attach to the workers of a named session on this machine, after starting those in `fresh`."""
    directory, count = Path(entry.directory), len(entry.workers)
    # Its workers own it, too. A new one may have to start there when all of them have died.
    hold(directory)
    modes = ["force new" if k in fresh else options.mode for k in range(count)]
    connector = _connector(options, Channel(silence=options.unreachable), entry.workers, modes)
    session = connector.session
    spec = replace(
        _spec(options, session.name, directory, count, entry.workers[0], has_key=False),
        simulate_cuda=entry.simulate_cuda,
    )
    launcher = options.launcher or LocalLauncher()
    session.workers.address = lambda k: f"ipc://{directory}/worker-{k}"
    session.workers.launch = lambda k: launcher.start(
        replace(spec, node=k, listen=session.workers.address(k))
    )
    for k, connection in enumerate(connector.connections):
        connection.listened = k not in fresh
    started = time.monotonic()
    if fresh:
        options.say(f"starting {len(fresh)} worker{'s' if len(fresh) > 1 else ''} ")
    with all_or_nothing(connector, directory if len(fresh) == count else None):
        session.workers += [None] * count
        for k in fresh:
            session.workers.start(k)
        meet(options, connector)
        _note(session, entry)
        session.ending.on_close.append(lambda: let_go(directory))
        session.ending.on_end.append(lambda: remove(directory))
    if fresh:
        options.say(f" ready in {time.monotonic() - started:.1f} s\n")
    return session


def _spec(
    options: SessionOptions, session: str, directory: Path, count: int, address: str, *, has_key: bool
) -> LaunchSpec:
    """Return what all workers of a session are started with."""
    # One core is the master's: a worker whose kernels wait for a thread that cannot run is ten times slower
    # (seen on 2 cores).
    threads = max(1, ((os.cpu_count() or 1) - 1) // count) if is_local(address) else 0
    environment = {UNREACHABLE.variable: str(options.unreachable), "PYTHONFAULTHANDLER": "1"}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return LaunchSpec(
        node=0,
        master="",
        listen="",
        key=(options.key or default_path()) if has_key else None,
        insecure=options.insecure,
        threads=threads,
        simulate_cuda=options.simulate_cuda,
        environment=environment,
        directory=directory,
        logs=log_folder(session, directory),
        workers=count,
        lasting=options.name is not None,
    )


def _note(session: Session, entry: Entry) -> None:
    write(entry)
    session.ending.on_end.append(lambda: delete(entry.name))
    noted = [entry]

    def joined(node: Node) -> None:
        before = noted[0]
        if node.index == len(before.workers):
            where = node.host if before.listen else node.address
            noted[0] = replace(before, workers=(*before.workers, where))
            try:
                write(noted[0])
            except ConfigurationError as error:
                # The thread that reads the socket is here, and must go on.
                log.warning("a later master will not find %s: %s", node, error)

    session.on_return.append(joined)


def _note_listening(options: SessionOptions, session: Session) -> None:
    hosts, listening = tuple(node.host for node in session.nodes), session.channel.address
    _note(
        session, Entry(session.name, hosts, "", str(options.key or ""), options.insecure, listening, 0, now())
    )


def gather_at(options: SessionOptions, address: str, count: int) -> Session:
    """Wait for workers that dial this process; start them, where the user has said how."""
    if options.insecure:
        warn_of_strangers([address])
    keys = choose(address, path=options.key, insecure=options.insecure)
    noted = read(options.name) if options.name is not None and options.mode.endswith("auto") else None
    # Those of a session that is resumed have been started, and dial in again.
    started = options.mode.endswith("resume") or (noted is not None and noted.listen)
    if options.launcher is not None and not started:
        return _start_and_wait(options, address, keys, count, scratch_folder("session", sockets=True))
    channel = Channel(listen=address, keys=keys, silence=options.unreachable)
    connector = _connector(options, channel, [""] * count, [options.mode] * count)
    session = connector.session
    listening = session.channel.address
    options.say(
        f"waiting at {listening} for {count} worker{', which dials' if count == 1 else 's, which dial'} it: "
        f"{worker_command(listening, dials=True)}\n"
    )
    with all_or_nothing(connector):
        if options.launcher is not None and options.mode.endswith("auto"):
            _let_launch(options, session, address, keys, count, scratch_folder("session", sockets=True))
            _start_missing(connector)
        meet(options, connector, f"dial {listening}")
        if options.name is not None:
            _note_listening(options, session)
    options.say("\n")
    return session


def attach(options: SessionOptions, addresses: list[str]) -> Session:
    """Attach to running daemons, and to workers that ssh reaches, which are started where they do not run."""
    directory = scratch_folder("session", sockets=True) if need_ssh(addresses) else None
    with _removed_unless_done(directory):
        by_ssh = None
        if directory is not None:
            by_ssh = SshSession(
                addresses, directory, name=options.name, key=options.key, insecure=options.insecure
            )
        keys = by_ssh.keys if by_ssh is not None else _keys(options, addresses)
        channel = Channel(keys=keys, silence=options.unreachable)
        endpoints = by_ssh.endpoints if by_ssh is not None else {}
        connector = _connector(options, channel, addresses, [options.mode] * len(addresses), endpoints)
    session, started = connector.session, time.monotonic()
    options.say(f"connecting {len(addresses)} worker{'s' if len(addresses) > 1 else ''} ")
    with all_or_nothing(connector, directory), nullcontext() if by_ssh is None else by_ssh.older_ones_stay():
        if by_ssh is not None:
            assert directory is not None
            session.ending.on_close.append(lambda: remove(directory))
            spec = _spec(options, session.name, directory, len(addresses), "", has_key=False)
            by_ssh.start(
                session,
                spec,
                must_run=options.mode.endswith("resume"),
                patience=options.timeout,
                say=options.say,
            )
        meet(options, connector)
        if options.name is not None:
            _note(
                session,
                Entry(
                    options.name, tuple(addresses), "", str(options.key or ""), options.insecure, "", 0, now()
                ),
            )
    options.say(f" ready in {time.monotonic() - started:.1f} s\n" if by_ssh is not None else "\n")
    return session


def resume_entry(options: SessionOptions, entry: Entry, count: int | None) -> Session:
    """Attach to the workers of a session that was noted here.

    Workers of this machine that have died are started again. If all of them have, the mode "auto" begins the
    session, with `count` workers if the user has said how many.
    """
    options = replace(
        options,
        key=options.key or (Path(entry.key) if entry.key else None),
        insecure=options.insecure or entry.insecure,
    )
    may_begin = options.mode.endswith("auto")
    if entry.listen:
        return gather_at(options, entry.listen, len(entry.workers))
    if not entry.directory:
        return attach(options, list(entry.workers))
    dead: list[int] = []
    while True:
        before, dead = dead, [k for k, address in enumerate(entry.workers) if refuses(address)]
        if len(dead) == len(entry.workers):
            drop(entry)
            if may_begin:
                return start(options, count or len(dead))
            raise ConnectionFailed(
                f"the session {entry.name!r} has ended: its workers on this machine expired or died. Start "
                'a new one with resume="auto", or without resume='
            )
        if may_begin and (
            count not in (None, len(entry.workers)) or options.simulate_cuda not in (0, entry.simulate_cuda)
        ):
            raise _of_other_size(entry, count, options.simulate_cuda)
        for k in dead:
            if k not in before:
                log.warning(
                    "node %d of session %r has died. A new worker starts in its place, and the tensors there "
                    "are lost",
                    k,
                    entry.name,
                )
        try:
            return _attach_local(options, entry, dead)
        except ConnectionFailed:
            if all(k in dead or not refuses(address) for k, address in enumerate(entry.workers)):
                raise
            # A process that is being killed listens until the last of its threads has ended.


def _keys(options: SessionOptions, addresses: Sequence[str]) -> KeyPair | None:
    keys = {choose(address, path=options.key, insecure=options.insecure) for address in addresses}
    if options.insecure:
        warn_of_strangers(addresses)
    if len(keys) > 1:
        raise ConfigurationError(
            "some of these addresses need a key and some do not: name the key file for all of them with key="
        )
    return keys.pop()


@contextmanager
def _removed_unless_done(directory: Path | None) -> Iterator[None]:
    """Remove a folder if what is done with it fails."""
    try:
        yield
    except BaseException:
        if directory is not None:
            remove(directory)
        raise


def is_older(session: Session, seconds: float) -> bool:
    """Whether a worker has had this session for longer than so many seconds."""
    return any(node.welcome.age > seconds for node in session.nodes)


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
