"""The two phases of a save, driven by the workers' answers in whichever thread brings them, so that nobody needs to wait."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from ..errors import CheckpointError, DistruntimeError, NodeFailed, SessionClosed, WaitTimeout
from ..log.handle import Handle
from ..log.ledger import Cause
from ..log.line import Line, line_text
from ..log.node import Node
from ..session.failures import remote_error
from ..session.requests import Request
from ..session.session import Session
from ..session.timeouts import checked
from ..wire.messages import CommitSave, RemoveFiles, SweepSaves
from ..wire.shield import shield

log = logging.getLogger("distruntime")

VERSION = 1  # of what is in a checkpoint's folder
_LOOK = 0.5  # seconds between looks whether the workers of a save can be reached
_keys = count(-1, -1).__next__  # of failures that no instruction has: see Node.unread


@dataclass(frozen=True)
class Part:
    """What one worker writes."""

    node: Node
    file: str
    written: Request  # answered with the file's size
    report: Handle  # of what that fetch reads


class Saving:
    """A checkpoint that is being written. `wait()` for it; nothing else must be done."""

    def __init__(
        self, session: Session, folder: str, save: str, index: dict[str, Any], line: Line, background: bool
    ) -> None:
        self._session, self.folder, self._save, self._index, self._line = session, folder, save, index, line
        self._background = background
        self._parts: list[Part] = []
        self._looks: list[Request] = []
        self._abandoned = False
        self._whole = Request(0, session.nodes[0])  # no message has it: it is answered when all is over
        self._failure: Callable[[], BaseException] | None = None
        self._filed: tuple[Node, tuple[int, int]] | None = None
        self._settled: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = (
            "being written" if not self._whole.done else "failed" if self._failure is not None else "complete"
        )
        return f"<distruntime checkpoint in {self.folder}, {state}>"

    # -- as users have it --------------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether it is over, one way or the other. Asks nobody."""
        return self._whole.done

    def is_completed(self) -> bool:
        """As `done`, by torch's name."""
        return self.done()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the checkpoint is the one that a load finds; raise what kept it from that.

        Raises `WaitTimeout` after `timeout` seconds, and `NodeFailed` if a worker was lost meanwhile. After any failure the checkpoint
        before it is as it was. Ctrl-C leaves all usable.
        """
        timeout = checked(timeout)
        if not self._whole.done and not self._session.result(self._whole, timeout):
            raise WaitTimeout(
                f"the checkpoint in {self.folder} is not complete within {timeout:g} s\n  saved at {line_text(self._line)}\n"
                "  it goes on: wait again, or look at done()"
            )
        if self._filed is not None:
            node, key = self._filed
            with node.lock:
                node.ledger.unread.pop(key, None)
        if self._failure is not None:
            raise self._failure()

    # -- the phases --------------------------------------------------------------------------------------------------------------

    def begin(self, parts: list[Part], looks: list[Request], settled: Callable[[], None]) -> None:
        """Go on when every worker has written its file and said what is there already; call `settled` when all is over."""
        with shield:  # Ctrl-C in the midst of it would leave a save that never ends, and for which the end of the session waits
            self._parts, self._looks = parts, looks
            self._settled.append(settled)
            _when_all([*(part.written for part in parts), *looks], self._guarded(self._have_written))

    def abandon(self) -> None:
        """Do not make it the current one, unless that is under way already: who waited for it has gone."""
        self._abandoned = True

    def give_up(self) -> None:
        """Count as over, if it never began: the call that was to begin it has failed."""
        if not self._looks:
            self._end(partial(CheckpointError, f"the checkpoint in {self.folder} was not begun"), silent=True)

    def await_end(self, deadline: float | None = None) -> bool:
        """Block until it is over; raise nothing. Return whether it is.

        Past a deadline (monotonic) wait only for a save that has begun and whose workers can be reached.
        """
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        while not self._whole.done and not self._session.result(self._whole, patience):
            if not self._looks or any(
                node.failed is None and node.presence.absence is not None for node in self._session.nodes
            ):
                return self._whole.done
            patience = _LOOK
        return True

    def _guarded(self, step: Callable[[], None]) -> Callable[[], None]:
        return partial(self._take, step)

    def _take(self, step: Callable[[], None]) -> None:
        """Take a step in a thread that reads the socket for somebody else, who must not meet its errors."""
        try:
            step()
        except DistruntimeError as error:  # a worker, or the session, has gone just now
            self._end(partial(type(error), str(error)))
        except Exception as error:
            log.exception("a defect of distruntime: the checkpoint in %s", self.folder)
            self._end(
                partial(CheckpointError, f"the checkpoint in {self.folder} was not completed: {error!r}")
            )

    def _have_written(self) -> None:
        failed = self._first_failure([*(part.written for part in self._parts), *self._looks])
        if failed is None and self._abandoned:
            failed = partial(CheckpointError, f"the checkpoint in {self.folder} was abandoned by Ctrl-C")
        numbers = [0]
        if failed is None:
            for entry in (entry for look in self._looks for entry in look.value[0]):
                numbers.append(entry[3])
                if not entry[1] and entry[2] != VERSION:
                    failed = partial(
                        CheckpointError,
                        other_version(self.folder, entry[2])
                        + ". Save into another folder, or empty this one",
                    )
        if failed is not None:
            there = [
                part for part in self._parts if part.node.failed is None and self._session.closed is None
            ]
            removals = [self._session.ask(part.node, RemoveFiles, self.folder, [part.file]) for part in there]
            _when_all(removals, self._guarded(partial(self._end, failed)))
            return
        index = {
            "format": "distruntime",
            "version": VERSION,
            "number": max(numbers) + 1,
            "save": self._save,
            **self._index,
        }
        index["files"] = {
            part.file: {"node": part.node.index, "host": part.node.host, "bytes": part.written.value}
            for part in self._parts
        }
        names = list(index["files"])
        weights = {
            "metadata": {"total_size": sum(part.written.value for part in self._parts)},
            "weight_map": {key: names[entry["file"]] for key, entry in self._index["tensors"].items()},
        }
        texts = json.dumps(index, allow_nan=False), json.dumps(weights, indent=1)
        commits = [
            self._session.ask(part.node, CommitSave, self.folder, self._save, *texts) for part in self._parts
        ]
        _when_all(commits, self._guarded(partial(self._have_committed, commits)))

    def _have_committed(self, commits: list[Request]) -> None:
        failed = self._first_failure(commits)
        if (
            failed is not None
        ):  # what was there before stays too: on another disk it may be the one that a load needs
            self._end(failed)
            return
        keep = [part.file for part in self._parts]
        sweeps = [
            self._session.ask(look.node, SweepSaves, self.folder, self._save, keep)
            for look in self._looks
            if look.node.failed is None
        ]
        _when_all(sweeps, self._guarded(partial(self._have_swept, sweeps)))

    def _have_swept(self, sweeps: list[Request]) -> None:
        for sweep in sweeps:
            if sweep.cause is not None:
                log.warning(
                    "%s: old files in %s could not be removed: %s",
                    sweep.node,
                    self.folder,
                    sweep.cause.failure.text,
                )
        self._end(None)

    def _first_failure(self, requests: Sequence[Request]) -> Callable[[], BaseException] | None:
        for request in requests:
            if request.cause is not None:
                failure = request.cause.failure
                cause = request.cause
                if failure.seq == 0:  # of no instruction: what the worker's thread met
                    cause = Cause(
                        replace(failure, op="saving a checkpoint", operands=""), line_text(self._line)
                    )
                if self._background:
                    self._file(request.node, cause)
                return partial(remote_error, request.node, cause)
            if request.lost is not None:
                if self._session.closed is not None:
                    return partial(
                        SessionClosed,
                        f"the session was shut down before the checkpoint in {self.folder} was complete",
                    )
                text = f"the checkpoint in {self.folder} was not completed, as {request.node} {request.lost}. The one before it is as it was"
                return partial(NodeFailed, text)
        return None

    def _file(self, node: Node, cause: Cause) -> None:
        """Let the next `synchronize` raise it, or `shutdown`, if nobody waits before."""
        key = (0, _keys())
        with node.lock:
            node.ledger.unread[key] = cause
        self._filed = node, key

    def _end(self, failure: Callable[[], BaseException] | None, silent: bool = False) -> None:
        if self._whole.done:
            return
        self._failure = failure
        if failure is not None and self._background and not silent:
            log.warning("a checkpoint failed: %s", str(failure()).partition("\n")[0])
        self._parts, self._looks, self._index = [], [], {}
        while self._settled:
            self._settled.pop()()
        self._whole.finish()


class _All:
    """Calls `then` once, when the last of several requests is answered."""

    def __init__(self, left: int, then: Callable[[], None]) -> None:
        self._left, self._then, self._lock = left, then, threading.RLock()

    def __call__(self, _: Request) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._then()


def _when_all(requests: Sequence[Request], then: Callable[[], None]) -> None:
    gathering = _All(len(requests), then)
    for request in requests:
        request.when_done(gathering)
    if not requests:
        then()


def other_version(folder: str, version: int) -> str:
    """Return what an error says of a checkpoint of another version."""
    return f"{folder} holds a checkpoint of version {version}, and this distruntime knows version {VERSION}"
