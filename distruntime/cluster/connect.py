"""How a session begins and ends: `init_master_worker`, `detach` and `shutdown`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from ..backend.install import install
from ..collectives.data_channels import Choice
from ..collectives.group import Groups
from ..errors import ConfigurationError, ConnectionFailed, UsageError
from ..session.launcher import Launcher
from ..session.screen import voice
from ..session.session import Session, active, active_session
from ..wire.deadlines import CONNECT, GRACE, KEEP, UNREACHABLE
from ..wire.descriptors import raise_limit
from ..wire.shared import warm_malloc
from .assemble import SessionOptions, attach, attached, gather_at, resume_entry, start
from .card import card_html
from .named_sessions import Entry, checked_name, names, read
from .nodes import nodes_table


def init_master_worker(
    backend: str = "zmq",
    world_size: int | None = None,
    workers: Sequence[str] | None = None,
    listen: str | None = None,
    *,
    session: str | None = None,
    resume: bool = False,
    force: bool = False,
    keep: float | timedelta | None = None,
    restart_workers: bool = False,
    simulate_cuda: int = 0,
    launcher: Launcher | None = None,
    data_channel: Choice = "auto",
    key: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    timeout: float | timedelta | None = None,
    unreachable: float | timedelta | None = None,
    grace: float | timedelta | None = None,
    quiet: bool | None = None,
) -> Session:
    """Open the session of this process. Block until every worker is there.

    Print the nodes and where new tensors go.

    Args:
        backend: the command channel; "zmq" is the one there is.
        world_size: how many workers: to start on this machine (2), or to wait for with `listen`.
        workers: addresses of running daemons to attach to, node 0 first: ["tcp://gpubox:29400"].
        listen: the address that workers dial: "tcp://0.0.0.0:29400".
        session: a name, with which the session outlives this process, or $DISTRUNTIME_SESSION; workers keep
            its values, and a later master gets back what was published.
        resume: attach to the session of that name, on the workers that it has.
        force: take the session over from a master that is using it; without `resume`, drop the one that has
            this name.
        keep: seconds (or a timedelta) that workers keep a named session that has no master; the default is 12
            hours.
        restart_workers: start a worker of this machine again when it dies; its tensors are lost, its node
            number is not.
        launcher: who starts the workers: see `dr.Launcher`; the default starts processes of this machine.
        simulate_cuda: GPUs per started worker that are really CPU tensors, to try placement code on a laptop.
        data_channel: how tensors move between workers: "gloo", "nccl", "tcp", "tcp+tls", "mpi", a registered
            name, or one for each type of device, {"cuda": "nccl", "cpu": "gloo"}, which is what "auto" means.
        key: file with the cluster's key; the default is $DISTRUNTIME_KEY or ~/.config/distruntime/key.
        insecure: talk to other machines without a key: whoever reaches the port may run code.
        timeout: seconds to wait for workers (30).
        unreachable: seconds of silence after which a worker is called unreachable (10).
        grace: seconds that an unreachable worker is waited for before it is lost (600).
        quiet: print nothing. Otherwise a terminal and a notebook get it on standard output, and a file or a
            pipe gets it on standard error, unless False is given.

    Raises:
        ConfigurationError: an argument that cannot be. UsageError: there is a session already.
        ConnectionFailed: a worker does not answer, refuses, has another key or protocol, or is late; there is
            no session to resume, or it is in use.
    """
    name = os.environ.get("DISTRUNTIME_SESSION") or None if session is None else session
    _check(backend, world_size, workers, listen, simulate_cuda, data_channel, restart_workers, launcher)
    if name is not None:
        checked_name(name)
    elif resume or force or keep is not None:
        raise ConfigurationError(
            "resume=, force= and keep= are about a session that has a name: give session= as well"
        )
    wait = CONNECT.get(timeout)
    raise_limit()
    options = SessionOptions(
        name,
        ("force " if force else "") + ("resume" if resume else "new"),
        KEEP.get(keep, "keep") if name is not None else GRACE.get(grace, "grace"),
        GRACE.get(grace, "grace"),
        UNREACHABLE.get(unreachable, "unreachable"),
        Path(key) if key is not None else None,
        insecure,
        wait,
        restart_workers,
        simulate_cuda,
        launcher,
        voice(quiet),
    )
    if active and active[0].closed is None and not active[0].foreign:
        raise UsageError(
            f"init_master_worker was called before: a session with {len(active[0].nodes)} nodes is open. Use "
            "it, or call "
            "distruntime.shutdown() first"
        )
    found = _resumed(name, workers, listen) if resume and name is not None else None
    install()
    warm_malloc()
    say = options.say
    try:
        if found is not None:
            opened = resume_entry(options, found)
        elif workers is not None:
            opened = attach(options, list(workers))
        elif listen is not None:
            assert world_size is not None
            opened = gather_at(options, listen, world_size)
        else:
            opened = start(options, 2 if world_size is None else world_size)
    except (ConnectionFailed, KeyboardInterrupt) as error:
        # A traceback must not begin in the line that says what is waited for.
        say("\n")
        raise error.with_traceback(None) from error.__cause__
    opened.groups = Groups(opened, data_channel)
    opened.start()
    opened.groups.meeting.start()
    opened.card = partial(card_html, opened)
    active[:] = [opened]
    # Registering once is enough, as it stays as long as the process.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    opened.ending.on_close.append(lambda: active.remove(opened) if opened in active else None)
    try:
        opened.groups.channels.require_choice()
    except BaseException:
        opened.shutdown(raise_unread=False)
        raise
    say(nodes_table(opened) + "\n")
    say(f"new tensors go to {opened.places.current().place}   (dr.set_place(...) to change)\n")
    if resume:
        say(attached(opened) + "\n")
    return opened


def _resumed(name: str, workers: Sequence[str] | None, listen: str | None) -> Entry | None:
    """Return where a session's workers are, from what was noted here; None where the caller says it."""
    if workers is not None or listen is not None:
        return None
    entry = read(name)
    if entry is None:
        have = ", ".join(map(repr, names()))
        raise ConnectionFailed(
            f"there is no session {name!r} to resume: "
            + (f"there are {have}" if have else "none is noted here")
            + "; one that was opened elsewhere is found at its workers: workers=[...]"
        )
    return entry


def _check(
    backend: str,
    world_size: int | None,
    workers: Sequence[str] | None,
    listen: str | None,
    simulate_cuda: int,
    data_channel: Choice,
    restart_workers: bool,
    launcher: Launcher | None,
) -> None:
    if backend in ("tcp", "tcp+tls", "mpi", "gloo", "nccl"):
        raise ConfigurationError(
            f"backend={backend!r} is how workers would talk to each other; the command channel is always "
            "ZeroMQ: use "
            f'backend="zmq", data_channel={backend!r}'
        )
    if backend != "zmq":
        raise ConfigurationError(
            f'backend is "zmq", got {backend!r}; addresses of workers go into workers=["tcp://host:port", '
            "...]"
        )
    if not isinstance(data_channel, str) and not (
        isinstance(data_channel, Mapping)
        and set(data_channel) <= {"cpu", "cuda"}
        and all(isinstance(name, str) for name in data_channel.values())
    ):
        raise ConfigurationError(
            f'data_channel is a name or {{"cuda": name, "cpu": name}}, got {data_channel!r}'
        )
    if isinstance(workers, str):
        raise ConfigurationError(f"workers is a list of addresses, got one string: workers=[{workers!r}]")
    if workers is not None and not workers:
        raise ConfigurationError(
            "workers is an empty list: name the daemons, or leave it out to start workers on this machine"
        )
    if workers is not None and listen is not None:
        raise ConfigurationError(
            "workers= attaches to running daemons and listen= waits for them to dial in: give one of the two"
        )
    if workers is not None and world_size not in (None, len(workers)):
        raise ConfigurationError(
            f"world_size={world_size} but workers names {len(workers)}: leave world_size out"
        )
    if listen is not None and world_size is None:
        raise ConfigurationError(f"listen={listen!r} needs world_size=: how many workers will dial in")
    if world_size is not None and (
        isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1
    ):
        raise ConfigurationError(f"world_size is a number of workers, at least 1, got {world_size!r}")
    if isinstance(simulate_cuda, bool) or not isinstance(simulate_cuda, int) or not 0 <= simulate_cuda <= 127:
        raise ConfigurationError(
            "simulate_cuda is a number of GPUs per worker from 0 to 127, the most that torch can tell "
            f"apart; got {simulate_cuda!r}"
        )
    if launcher is not None and not isinstance(launcher, Launcher):
        raise ConfigurationError(f"launcher is a distruntime.Launcher, got {launcher!r}")
    if launcher is not None and workers is not None:
        raise ConfigurationError(
            "workers= attaches to running daemons and launcher= starts workers: give one of the two"
        )
    starts = workers is None and (listen is None or launcher is not None)
    if restart_workers and not starts:
        raise ConfigurationError(
            "restart_workers is for workers that are started here; daemons are their own supervisor's to "
            "restart"
        )
    if simulate_cuda and not starts:
        raise ConfigurationError(
            "simulate_cuda is for workers that are started here; give running daemons --simulate-cuda "
            "themselves"
        )


def shutdown(timeout: float | None = None) -> None:
    """End the session, a named one too; workers drop its values.

    Raise the first failure that nobody has read.

    What is in flight gets `timeout` seconds (10) to finish.
    """
    if active:
        active[0].shutdown(timeout=timeout)


def is_initialized() -> bool:
    """Whether this process has an open session."""
    return bool(active) and active[0].closed is None and not active[0].foreign


def _at_exit() -> None:
    for session in list(active):
        if session.foreign or session.closed is not None:
            continue
        # A session that has a name is to stay: shutdown() ends it.
        if session.lasting:
            session.detach()
        else:
            session.shutdown(raise_unread=False)


def detach(timeout: float | None = None) -> None:
    """Leave a named session: its workers keep its values, and finish what was issued.

    Block until everything that was issued has arrived there.

    Args:
        timeout: seconds to wait for that (10).

    Raises:
        UsageError: the session has no name, so nobody could come back to it. WaitTimeout: a worker could not
            be reached in time; the session is left all the same, without what had not arrived there.
    """
    active_session().detach(timeout)


__all__ = ["detach", "init_master_worker", "is_initialized", "shutdown"]
