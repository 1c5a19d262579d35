"""The commands that look at workers: `python -m distruntime status`, `top`, `sessions` and `stacks`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

from .cluster.absences import refuses
from .cluster.connect import init_master_worker
from .cluster.named_sessions import Entry, checked_name, drop, names, now, read
from .cluster.nodes import doing, percent
from .cluster.observe import Answer, Observer
from .errors import ConfigurationError, ConnectionFailed
from .launching.ssh_session import need_ssh
from .session.tables import table_text
from .timeline.top import COMPUTES, JOINS, MASTER, QUEUED, WAITS, Looks, strips
from .wire.identity import user_name
from .wire.messages import AskActivity, AskStacks, AskWorker, SessionRow, StopWorker, WorkerReport
from .wire.units import printable, size_text, span, writable

T = TypeVar("T")

# `top` looks again after so many seconds.
_AGAIN = 1.0
_COLOURS = {COMPUTES: "green", JOINS: "magenta", WAITS: "yellow", QUEUED: "cyan", MASTER: "red"}


def status(options: argparse.Namespace) -> int:
    """Print what workers do, and which sessions they have. Return 1 if one of them did not answer."""
    addresses = options.addresses or _listening(_noted())
    if not addresses:
        print(
            "no session whose workers listen is noted here, so there is nothing to show. An address shows a "
            "worker: python -m distruntime status tcp://gpu1:29400"
        )
        return 0
    with _observer(options, addresses) as observer:
        answers = observer.ask(AskWorker, options.timeout)
    silent = {answer.address for answer in answers if answer.value is None}
    asked = {} if options.addresses else {entry.name: _listening([entry]) for entry in _noted()}
    dead = {name: workers for name, workers in asked.items() if workers and silent.issuperset(workers)}
    # Each gets one line: what its workers have not answered, and what drops its note.
    told = {worker for workers in dead.values() for worker in workers}
    if shown := report([answer for answer in answers if answer.address not in told]):
        print(writable(shown, sys.stdout))
    for name in dead:
        print(f" {_silent(name)}")
    return 1 if silent else 0


def top(options: argparse.Namespace) -> int:
    """Print the same as `status` again and again, and what each stream did lately, until Ctrl-C."""
    if importlib.util.find_spec("rich") is None:
        raise ConfigurationError("`top` needs rich as well:  pip install rich")
    live = importlib.import_module("rich.live").Live
    text = importlib.import_module("rich.text").Text
    at_terminal = sys.stdout.isatty()
    with (
        _observer(options, _addresses(options)) as observer,
        live(auto_refresh=False, screen=True) if at_terminal else nullcontext() as screen,
    ):
        looks, activity = 0, Looks()
        try:
            while options.times is None or looks < options.times:
                if looks:
                    time.sleep(_AGAIN)
                looks += 1
                shown = report(observer.ask(AskWorker, options.timeout))
                seen = activity.text(observer.ask(AskActivity, options.timeout), time.monotonic())
                shown += f"\n\n{seen}" if seen else ""
                if screen is None:
                    print(writable(shown, sys.stdout), flush=True)
                else:
                    whole = text(f"{shown}\n\n Ctrl-C ends this.", no_wrap=True)
                    for began, ended, letter in strips(shown):
                        whole.stylize(_COLOURS.get(letter, ""), began, ended)
                    screen.update(whole, refresh=True)
        except KeyboardInterrupt:
            # That is how a person leaves.
            return 0
    return 0


def stacks(options: argparse.Namespace) -> int:
    """Print where the threads of one worker are."""
    address = options.worker
    if "://" not in address:
        workers = _addresses(options)
        if not address.isdigit() or int(address) >= len(workers):
            raise ConfigurationError(
                f"got {address!r}, expected the address of a worker, or the number of a node: "
                f"{', '.join(f'{k} is {worker}' for k, worker in enumerate(workers))}"
            )
        address = workers[int(address)]
    with _observer(options, [address]) as observer:
        (answer,) = observer.ask(AskStacks, options.timeout)
    print(printable(answer.why if answer.value is None else answer.value))
    return 0 if answer.value is not None else 1


def stop(options: argparse.Namespace) -> int:
    """End workers, with all of their sessions. Return 1 if one of them did not answer."""
    reason = f"`distruntime stop` by {user_name()} on {socket.gethostname()}"
    with _observer(options, options.addresses) as observer:
        answers = observer.ask(lambda request: StopWorker(request, reason), options.timeout)
    for answer in answers:
        told = f"{answer.address}: the worker ends ({answer.value})"
        print(printable(answer.why if answer.value is None else told))
    return 0 if all(answer.value is not None for answer in answers) else 1


def sessions(options: argparse.Namespace) -> int:
    """Print the named sessions that this user has begun on this machine, or end one of them."""
    if options.end is not None:
        return _end(options)
    entries = _noted()
    if not entries:
        print('no session is noted here. A session has a name: init_master_worker(session="day")')
        return 0
    rows = [["session", "begun", "workers", "master", "they listen at"]]
    for entry in entries:
        rows.append(
            [entry.name, f"{span(max(0.0, now() - entry.began))} ago", *_state(entry, options.timeout)]
        )
    print(writable(table_text(rows), sys.stdout))
    return 0


def _end(options: argparse.Namespace) -> int:
    """End a noted session. Its master, if it has one, must be told of it with --force."""
    entry = read(checked_name(options.end))
    if entry is None:
        have = ", ".join(names())
        raise ConfigurationError(
            f"no session {options.end!r} is noted here: "
            + (f"there are {have}" if have else "there is none")
            + ". A session that was begun on another machine is ended there"
        )
    if _has_ended(entry):
        _drop_ended(entry)
        return 0
    answers = [] if entry.listen or need_ssh(entry.workers) else _ask(entry, options.timeout)
    rows = _rows(entry, answers)
    if answers and all(answer.value is not None for answer in answers) and not rows:
        drop(entry)
        print(
            f"the session {entry.name!r} has ended already: none of its workers has it. Its note is dropped"
        )
        return 0
    if answers and all(answer.value is None for answer in answers):
        if not options.force:
            raise ConnectionFailed(f"{_silent(entry.name)}. {answers[0].why}")
        drop(entry)
        print(f"the note of session {entry.name!r} is dropped. Nobody answers at {_where(entry)}")
        return 0
    used = next((row for row in rows if row.away is None), None)
    if used is not None and not options.force:
        raise ConnectionFailed(
            f"the session {entry.name!r} is in use, by {_master(used)}. --force ends it all the same"
        )
    # Who ends a session attaches to it, as its next master would.
    try:
        session = init_master_worker(session=entry.name, resume=True, force=options.force, quiet=True)
    except ConnectionFailed as error:
        if not (options.force and need_ssh(entry.workers)):
            raise
        drop(entry)
        print(f"the note of session {entry.name!r} is dropped. {error}")
        return 0
    count = len(session.nodes)
    session.shutdown(raise_unread=False)
    print(f"the session {entry.name!r} has ended, on {count} node{'s' if count != 1 else ''}")
    return 0


def _noted() -> list[Entry]:
    """Return the noted sessions, after dropping the notes of those that have certainly ended."""
    entries = [entry for name in names() if (entry := read(name)) is not None]
    for entry in entries:
        if _has_ended(entry):
            _drop_ended(entry)
    return [entry for entry in entries if not _has_ended(entry)]


def _has_ended(entry: Entry) -> bool:
    """Whether a session's workers were started on this machine, and none of them listens any more.

    A refused TCP connection is no proof: a tunnel may be closed.
    """
    return bool(entry.directory) and all(refuses(address) for address in entry.workers)


def _drop_ended(entry: Entry) -> None:
    drop(entry)
    text = f"the session {entry.name!r} has ended: nobody listens at {_where(entry)}. Its note is dropped"
    print(text, file=sys.stderr)


def _where(entry: Entry) -> str:
    return entry.workers[0] + (f", and {len(entry.workers) - 1} more" if len(entry.workers) > 1 else "")


def _silent(name: str) -> str:
    """Return what is said of a noted session none of whose workers answers."""
    return (
        f"no worker of the session {name!r} answers. If it is gone, "
        f"`python -m distruntime sessions --end {name} --force` drops its note"
    )


def _ask(entry: Entry, timeout: float) -> list[Answer[WorkerReport]]:
    key = Path(entry.key) if entry.key else None
    with Observer(entry.workers, key=key, insecure=entry.insecure) as observer:
        return observer.ask(AskWorker, timeout)


def _rows(entry: Entry, answers: Sequence[Answer[WorkerReport]]) -> list[SessionRow]:
    return [row for a in answers if a.value is not None for row in a.value.sessions if row.name == entry.name]


def _state(entry: Entry, timeout: float) -> list[str]:
    """Return how many workers of a noted session have it, who its master is, and where they are."""
    if entry.listen:
        return [f"{len(entry.workers)}", "its workers dial in, and cannot be asked", entry.listen]
    where = _where(entry)
    if need_ssh(entry.workers):
        return [f"{len(entry.workers)}", "reached by ssh, and cannot be asked from here", where]
    try:
        answers = _ask(entry, timeout)
    except ConfigurationError as error:
        return [f"? of {len(entry.workers)}", str(error), where]
    rows = _rows(entry, answers)
    if not rows:
        silent = any(answer.value is None for answer in answers)
        why = "unknown: no answer" if silent else "none: the session has ended"
        return [f"0 of {len(entry.workers)}", why, where]
    return [f"{len(rows)} of {len(entry.workers)}", _master(rows[0]), where]


def _addresses(options: argparse.Namespace) -> list[str]:
    """Return the workers that are meant: those named, else those of the named sessions of this user."""
    named: list[str] = getattr(options, "addresses", [])
    if named:
        return named
    wanted = getattr(options, "session", None)
    if wanted is not None and wanted not in (have := [entry.name for entry in _noted()]):
        raise ConfigurationError(
            f"there is no session {wanted!r} noted here: "
            + (f"there are {', '.join(map(repr, have))}" if have else "none is")
        )
    found = _listening([entry for entry in _noted() if wanted in (None, entry.name)])
    if not found:
        raise ConfigurationError(
            "no session whose workers listen is noted here: name the workers, as in "
            f"`python -m distruntime {options.command} tcp://gpu1:29400`"
        )
    return found


def _listening(entries: Sequence[Entry]) -> list[str]:
    """Return the workers of noted sessions that can be asked. What ssh reaches has no address here."""
    listen = [entry for entry in entries if not entry.listen and not need_ssh(entry.workers)]
    return list(dict.fromkeys(worker for entry in listen for worker in entry.workers))


def _observer(options: argparse.Namespace, addresses: Sequence[str]) -> Observer:
    return Observer(
        addresses, key=None if options.key is None else Path(options.key), insecure=options.insecure
    )


def report(answers: Sequence[Answer[WorkerReport]]) -> str:
    """Return what workers have answered, as tables: the workers, and the sessions on them."""
    found = [(answer.address, answer.value) for answer in answers if answer.value is not None]
    gpus = any(share is not None for _, worker in found for share in worker.busy)
    heads = "worker host pid up doing queued CPU".split() + (["GPU"] if gpus else []) + ["memory free"]
    workers = [heads, *(_worker_row(address, worker, gpus) for address, worker in found)]
    rows = [["worker", "session", "up", "master", "values", "queued", "doing"]]
    for address, worker in found:
        for row in worker.sessions:
            name = row.name if row.lasting else f"{row.name} (unnamed)"
            what = doing([row], row.name)
            counts = [str(row.values), _about(row.queued)]
            rows.append([address, name, span(row.age), _master(row), *counts, what])
    parts = [table_text(workers)] if found else []
    parts += [table_text(rows)] if len(rows) > 1 else [" no sessions"] if found else []
    parts += [f" {answer.why}" for answer in answers if answer.value is None]
    # A worker's texts must not steer this terminal.
    return printable("\n\n".join(parts))


def _worker_row(address: str, worker: WorkerReport, gpus: bool) -> list[str]:
    busy = ", ".join(percent(share) for share in worker.busy if share is not None)
    free = " + ".join(size_text(device.free) for device in worker.devices[: 1 if worker.simulated else 8])
    queued = sum(row.queued for row in worker.sessions)
    return [
        *[address, worker.host, str(worker.pid), span(worker.age), doing(worker.sessions), _about(queued)],
        percent(worker.processor),
        *([busy] if gpus else []),
        free,
    ]


def _about(count: int) -> str:
    return f"about {count:,}" if count else "0"


def _master(row: SessionRow) -> str:
    who = f"pid {row.pid} on {row.host}"
    return who if row.away is None else f"none for {span(row.away)} (was {who})"
