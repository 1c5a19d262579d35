"""How a session begins and ends: `init_master_worker`, `detach` and `shutdown`."""

from __future__ import annotations

import atexit
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch

from ..backend.install import await_imports, install
from ..backend.random import follow_seed
from ..backend.torch_settings import follow_determinism
from ..collectives.data_channels import Choice
from ..collectives.groups import Groups
from ..compiled.dynamo import install_dynamo
from ..compiled.one_accelerator import ONE_ACCELERATOR
from ..errors import ConfigurationError, ConnectionFailed, UsageError, without_our_frames
from ..mesh.data_parallel import install_data_parallel
from ..session import session as inner
from ..session.interrupts import watch_prompt
from ..session.launcher import Launcher
from ..session.screen import voice
from ..session.session import active, active_session
from ..wire.deadlines import CONNECT, DIAL, GRACE, KEEP, UNREACHABLE
from ..wire.descriptors import raise_limit
from ..wire.scratch import sweep
from ..wire.shared import warm_malloc
from .arguments import WORLD_SIZE, Arguments, check, differing, launched, said, settled
from .arrivals import SessionOptions
from .as_cuda import require_free, take_over
from .assemble import attach, attached, gather_at, is_older, resume_entry, start
from .named_sessions import Entry, checked_name, names, read
from .nodes import nodes_table
from .user_session import Session


@dataclass(frozen=True)
class _Begun:
    """The session that is open, as its user holds it, and the arguments that it was begun with."""

    session: Session
    arguments: Arguments
    # A command has begun it for a script or a prompt, which asks for it in words of its own.
    for_script: bool = False


_begun: list[_Begun] = []


@without_our_frames
def init_master_worker(
    backend: str = "zmq",
    world_size: int | None = None,
    workers: Sequence[str] | None = None,
    listen: str | None = None,
    *,
    max_world_size: int | None = None,
    session: str | None = None,
    resume: bool | Literal["auto"] = False,
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
    as_cuda: bool | Literal["all", "force", "force all"] = False,
) -> Session:
    """Open the session of this process. Block until every worker is there.

    Print the nodes and where new tensors go. If the session is open already, a call with the
    same arguments returns it at once, so a notebook's cell can run twice. `resume` and `quiet` do not count
    there. In a script of `distruntime launch`, the workers are those that it has started.

    Args:
        backend: the command channel; "zmq" is the one there is.
        world_size: how many workers: to start on this machine (2), or to wait for with `listen`.
        workers: addresses of running daemons to attach to, node 0 first: ["tcp://gpubox:29400"]; or
            $DISTRUNTIME_WORKERS.
        listen: the address that workers dial: "tcp://0.0.0.0:29400"; or $DISTRUNTIME_LISTEN.
        max_world_size: with `listen`: workers that dial while the session runs become new nodes, up to so
            many in all. Without it, `dr.workers.add_worker()` lets one in.
        session: a name, with which the session outlives this process, or $DISTRUNTIME_SESSION; workers keep
            its values, and a later master gets back what was published.
        resume: True attaches to the session of that name, on the workers that it has. "auto" attaches to it
            if it is there, and begins it if not; each worker decides for itself.
        force: take the session over from a master that is using it; without `resume`, drop the one that has
            this name.
        keep: seconds (or a timedelta) that workers keep a named session that has no master; the default is 12
            hours.
        restart_workers: start a worker of this machine again when it dies; its tensors are lost, its node
            number is not.
        launcher: who starts the workers: see `dr.workers.Launcher`; the default starts processes of this
            machine.
        simulate_cuda: the number of GPUs that each started worker simulates with CPU tensors.
        data_channel: how tensors move between workers: "gloo", "nccl", "xccl", "tcp", "tcp+tls", "mpi", a
            registered name, or one for each type of device, as {"cuda": "nccl", "cpu": "gloo"}. "auto" takes
            the devices' own channel where all members can use it, and "gloo" elsewhere.
        key: file with the cluster's key; the default is $DISTRUNTIME_KEY or ~/.config/distruntime/key.
        insecure: talk to other machines without a key: whoever reaches the port may run code.
        timeout: seconds to wait for workers: 30, and 600 with `listen`, where a scheduler may start them.
        unreachable: seconds of silence after which a worker is called unreachable (10).
        grace: seconds that an unreachable worker is waited for before it is lost (600).
        quiet: print nothing. The default is $DISTRUNTIME_QUIET: any text there stands for True. Without it a
            terminal and a notebook get the lines on standard output, and a file or a pipe gets them on
            standard error; False prints on standard output in any case.
        as_cuda: let "cuda" and `torch.cuda` mean the workers until the session ends: True shows one device,
            the current place, and "all" each GPU of the session. "force" and "force all" do so in a process
            that has GPUs, and it reaches none of them then.

    Raises:
        ConfigurationError: an argument that cannot be. UsageError: a session with other arguments is open.
        ConnectionFailed: a worker does not answer, refuses, has another key or protocol, or is late; there is
            no session to resume, or it is in use.
    """
    world_size, workers, listen = launched(world_size, workers, listen, launcher)
    given = dict(locals())
    name = os.environ.get("DISTRUNTIME_SESSION") or None if session is None else session
    check(
        backend,
        world_size,
        max_world_size,
        workers,
        listen,
        simulate_cuda,
        data_channel,
        restart_workers,
        launcher,
        resume,
    )
    if name is not None:
        checked_name(name)
    elif resume or force or keep is not None:
        raise ConfigurationError(
            "resume=, force= and keep= are about a session that has a name: give session= as well"
        )
    wait = (CONNECT if listen is None else DIAL).get(timeout)
    began = time.monotonic()
    options = SessionOptions(
        name,
        ("force " if force else "") + ("auto" if resume == "auto" else "resume" if resume else "new"),
        KEEP.get(keep, "keep") if name is not None else GRACE.get(grace, "grace"),
        GRACE.get(grace, "grace"),
        UNREACHABLE.get(unreachable, "unreachable"),
        Path(key) if key is not None else None,
        insecure,
        wait,
        restart_workers,
        simulate_cuda,
        launcher,
        max_world_size or 0,
        voice(quiet),
    )
    arguments = settled({**given, "session": name})
    if is_initialized():
        return _again(arguments, given)
    if as_cuda:
        require_free(as_cuda)
    raise_limit()
    sweep()
    found = _noted(name, resume is True) if resume and not (workers or listen) and name is not None else None
    _install()
    opened = _open(options, found, world_size, workers, listen)
    opened.groups = Groups(opened, data_channel)
    opened.start()
    opened.groups.meeting.start()
    active[:] = [opened]
    follow_determinism(opened)
    # The workers of an older session go on where they are.
    older = bool(resume) and (resume is True or is_older(opened, time.monotonic() - began))
    if not older:
        follow_seed()
    held = Session(opened)
    _begun[:] = [_Begun(held, arguments)]
    # Registering once is enough, as it stays as long as the process.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    watch_prompt()
    opened.ending.on_close.append(lambda: _forget(opened))
    try:
        opened.groups.channels.require_choice()
        taken = take_over(opened, as_cuda) + "\n" if as_cuda else ""
    except BaseException:
        opened.ending.shut_down(raise_unread=False)
        raise
    say = options.say
    say(nodes_table(opened) + "\n")
    say(f"new tensors go to {opened.places.current().place}   (dr.set_place(...) to change)\n")
    say(taken)
    if older:
        say(attached(opened) + "\n")
    elif name is not None:
        say(f'began session "{name}"\n')
    await_imports()
    return held


def _install() -> None:
    """Teach torch in this process what a session needs."""
    if torch.cuda.is_initialized():
        # Who has used a GPU here would hear of it from an assertion in torch's C++, some lines later.
        warnings.warn(ONE_ACCELERATOR, stacklevel=3)
    install()
    install_dynamo()
    install_data_parallel()
    warm_malloc()


def _open(
    options: SessionOptions,
    found: Entry | None,
    world_size: int | None,
    workers: Sequence[str] | None,
    listen: str | None,
) -> inner.Session:
    """Open a session: the one that was noted, on workers that run, on those that dial, or on new ones."""
    try:
        if found is not None:
            return resume_entry(options, found, world_size)
        if workers is not None:
            return attach(options, list(workers))
        if listen is not None:
            assert world_size is not None
            return gather_at(options, listen, world_size)
        return start(options, WORLD_SIZE if world_size is None else world_size)
    except BaseException:
        # A traceback must not begin in the line that says what is waited for.
        options.say("\n")
        raise


def _forget(session: inner.Session) -> None:
    if session in active:
        active.remove(session)
        _begun.clear()


def lend_to_script() -> None:
    """Let what a command runs get the session by arguments that leave things open."""
    _begun[0] = replace(_begun[0], for_script=True)


def _again(arguments: Arguments, given: Arguments) -> Session:
    """Return the session that is open, if these arguments are those that it was begun with."""
    begun = _begun[0]
    different = differing(
        arguments, begun.arguments, said(given, begun.arguments) if begun.for_script else arguments
    )
    if different:
        named = begun.arguments["session"] is not None
        raise UsageError(
            "a session that was begun with other arguments is open: "
            + "; ".join(different)
            + ". Give the same arguments to get that session, or end it first: distruntime.shutdown()"
            + (" (distruntime.detach() leaves it to its workers)" if named else "")
        )
    return begun.session


def _noted(name: str, required: bool) -> Entry | None:
    """Return where a session's workers are, from what was noted here; None where nothing was noted."""
    entry = read(name)
    if entry is None and required:
        have = ", ".join(map(repr, names()))
        raise ConnectionFailed(
            f"there is no session {name!r} to resume: "
            + (f"there are {have}" if have else "none is noted here")
            + ". If another machine opened it, name its workers: workers=[...]. "
            'resume="auto" begins a session that does not exist'
        )
    return entry


@without_our_frames
def shutdown(timeout: float | None = None) -> None:
    """End the session, a named one too; workers drop its values.

    Raise the first failure that nobody has read.

    What is in flight gets `timeout` seconds (10) to finish.
    """
    if active:
        active[0].ending.shut_down(timeout=timeout)


def is_initialized() -> bool:
    """Whether this process has an open session."""
    return bool(active) and active[0].closed is None and not active[0].foreign


def _at_exit() -> None:
    for session in list(active):
        if session.foreign or session.closed is not None:
            continue
        # A session that has a name is to stay: shutdown() ends it.
        if session.lasting:
            session.ending.leave()
            continue
        # Python has printed the error that ended the program, and what follows from it helps nobody.
        ended_well = not hasattr(sys, "last_value")
        try:
            session.ending.shut_down(raise_unread=ended_well)
        # It may be of any kind: the operator's own. Nobody can catch what is raised here.
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"the program has ended, and nobody has read this failure:\n{text}\n")


@without_our_frames
def detach(timeout: float | None = None) -> None:
    """Leave a named session: its workers keep its values, and finish what was issued.

    Block until everything that was issued has arrived there.

    Args:
        timeout: seconds to wait for that (10).

    Raises:
        UsageError: the session has no name, so nobody could come back to it. WaitTimeout: a worker could not
            be reached in time; the session is left all the same, without what had not arrived there.
    """
    active_session().ending.leave(timeout)


__all__ = ["detach", "init_master_worker", "is_initialized", "shutdown"]
