"""The arguments of `init_master_worker`: which cannot be, and which are not those of the session that is
open.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from ..collectives.data_channels import Choice
from ..errors import ConfigurationError
from ..launching.ssh_session import need_ssh
from ..session.launcher import Launcher

# What a session was begun with, by the names of the arguments, and with the defaults filled in.
Arguments = Mapping[str, object]

# Where neither `world_size` nor `workers` is given, so many workers are started.
WORLD_SIZE = 2
# A data channel is chosen for these types of devices.
_KINDS = frozenset({"cpu", "cuda", "xpu", "mps", "npu", "hpu", "mtia", "privateuseone"})


def launched(
    world_size: int | None, workers: Sequence[str] | None, listen: str | None, launcher: Launcher | None
) -> tuple[int | None, Sequence[str] | None, str | None]:
    """Return `world_size`, `workers` and `listen`: from the environment where a call names no workers.

    `distruntime launch` sets these variables for its script.

    Raises:
        ConfigurationError: the variables contradict each other, or the call.
    """
    addresses, at = os.environ.get("DISTRUNTIME_WORKERS"), os.environ.get("DISTRUNTIME_LISTEN")
    if workers is not None or listen is not None or launcher is not None or not (addresses or at):
        return world_size, workers, listen
    if addresses and at:
        raise ConfigurationError(
            f"got DISTRUNTIME_WORKERS={addresses} and DISTRUNTIME_LISTEN={at}: the first names workers to "
            "dial, and at the second this process waits for workers. Unset one of the two"
        )
    if addresses:
        # An address of ssh's may have commas in its options.
        return world_size, [name.strip() for name in re.split(r",(?=\s*\w+://)", addresses)], None
    said = os.environ.get("DISTRUNTIME_WORLD_SIZE", "")
    if not said:
        return world_size, None, at
    if not said.isdigit():
        raise ConfigurationError(f"DISTRUNTIME_WORLD_SIZE is a number of workers, got {said!r}")
    count = int(said)
    if world_size not in (None, count):
        raise ConfigurationError(
            f"got world_size={world_size}, and `distruntime launch` has started {count} workers: leave "
            f"world_size out, or launch with -n {world_size}"
        )
    return count, None, at


def check(
    backend: str,
    world_size: int | None,
    max_world_size: int | None,
    workers: Sequence[str] | None,
    listen: str | None,
    simulate_cuda: int,
    data_channel: Choice,
    restart_workers: bool,
    launcher: Launcher | None,
    resume: object,
) -> None:
    """Raise `ConfigurationError` for an argument that cannot be, or that another one excludes."""
    _check_channels(backend, data_channel)
    _check_workers(world_size, max_world_size, workers, listen)
    if isinstance(simulate_cuda, bool) or not isinstance(simulate_cuda, int) or not 0 <= simulate_cuda <= 127:
        raise ConfigurationError(
            "simulate_cuda is a number of GPUs per worker from 0 to 127, the most that torch can tell "
            f"apart; got {simulate_cuda!r}"
        )
    if launcher is not None and not isinstance(launcher, Launcher):
        raise ConfigurationError(f"launcher is a distruntime.workers.Launcher, got {launcher!r}")
    if launcher is not None and workers is not None:
        raise ConfigurationError(
            "workers= attaches to running daemons and launcher= starts workers: give one of the two"
        )
    starts = workers is None and (listen is None or launcher is not None)
    if restart_workers and not starts and not need_ssh(workers or []):
        raise ConfigurationError(
            "restart_workers is for workers that are started here; daemons are their own supervisor's to "
            "restart"
        )
    if simulate_cuda and not starts:
        raise ConfigurationError(
            "simulate_cuda is for workers that are started here; give running daemons --simulate-cuda "
            "themselves, and addresses of ssh:// the option simulate_cuda"
        )
    if resume not in (True, False, "auto"):
        raise ConfigurationError(
            f'resume is True, False or "auto", which attaches to the session if it is there and begins it if '
            f"not; got {resume!r}"
        )


def _check_channels(backend: str, data_channel: Choice) -> None:
    if backend in ("tcp", "tcp+tls", "mpi", "gloo", "nccl", "xccl"):
        raise ConfigurationError(
            f"backend={backend!r} names a channel between workers; the command channel is always ZeroMQ: use "
            f'backend="zmq", data_channel={backend!r}'
        )
    if backend != "zmq":
        raise ConfigurationError(
            f'backend is "zmq", got {backend!r}; addresses of workers go into workers=["tcp://host:port", '
            "...]"
        )
    if not isinstance(data_channel, str) and not (
        isinstance(data_channel, Mapping)
        and set(data_channel) <= _KINDS
        and all(isinstance(name, str) for name in data_channel.values())
    ):
        raise ConfigurationError(
            f'data_channel is a name or {{"cuda": name, "cpu": name}}, got {data_channel!r}; the types of '
            f"devices are {', '.join(sorted(_KINDS))}"
        )


def _check_workers(
    world_size: int | None, max_world_size: int | None, workers: Sequence[str] | None, listen: str | None
) -> None:
    if isinstance(workers, str):
        raise ConfigurationError(f"workers is a list of addresses, got one string: workers=[{workers!r}]")
    if isinstance(workers, int):
        raise ConfigurationError(
            f'workers is a list of addresses, as ["tcp://gpubox:29400"], got {workers!r}: world_size= is the '
            "number of workers to start on this machine"
        )
    if workers is not None and not (
        isinstance(workers, Sequence) and all(isinstance(address, str) for address in workers)
    ):
        raise ConfigurationError(
            f'workers is a list of addresses, as ["tcp://gpubox:29400"], got {workers!r}'
        )
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
    if max_world_size is not None and (
        isinstance(max_world_size, bool)
        or not isinstance(max_world_size, int)
        or listen is None
        or max_world_size < (world_size or 1)
    ):
        raise ConfigurationError(
            f"max_world_size is a number of workers, at least world_size ({world_size}), and goes with "
            f"listen=: got {max_world_size!r}"
            + ("" if listen is not None else ". Elsewhere dr.workers.add_worker() adds one")
        )


def settled(arguments: Arguments) -> Arguments:
    """Return the arguments with the defaults that follow from others, so that equal sessions have equal ones.

    `resume` and `quiet` are left out: they say how a session begins, and not what it is.
    """
    found = {name: value for name, value in arguments.items() if name not in ("resume", "quiet")}
    workers, key = found["workers"], found["key"]
    if workers is not None:
        assert isinstance(workers, Sequence)
        found["workers"], found["world_size"] = list(workers), len(workers)
    elif found["world_size"] is None:
        found["world_size"] = WORLD_SIZE
    if isinstance(key, (str, Path)):
        found["key"] = Path(key).absolute()
    return found


def said(given: Arguments, begun: Arguments) -> frozenset[str]:
    """Return the names of the arguments that say something of a session, as a call without them would not.

    A take-over that is asked for is there if the session was `begun` with one, and each GPU if with all.
    """
    found = {
        name for name, value in given.items() if value not in (None, False) and value not in ("auto", "zmq")
    }
    asked, there = str(given["as_cuda"] or ""), str(begun["as_cuda"] or "")
    if there and ("all" in asked) <= ("all" in there):
        found.discard("as_cuda")
    return frozenset(found - {"timeout"})


def differing(got: Arguments, expected: Arguments, names: Container[str]) -> list[str]:
    """Return what differs in the arguments of these names, as "world_size: got 3, expected 2"."""
    return [
        f"{name}: got {_shown(got[name])}, expected {_shown(expected[name])}"
        for name in got
        if name in names and not _equal(got[name], expected[name])
    ]


def _shown(value: object) -> str:
    return repr(str(value) if isinstance(value, Path) else value)


def _equal(one: object, other: object) -> bool:
    if one == other:
        return True
    # A cell that is run again makes its launcher again.
    return (
        isinstance(one, Launcher)
        and type(one) is type(other)
        and getattr(one, "__dict__", one) == getattr(other, "__dict__", other)
    )
