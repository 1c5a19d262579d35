"""The two phases of a save: the workers write their files, then all make the checkpoint the current one.

The workers' answers drive it, in whichever thread brings them, so that nobody needs to wait.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import NamedTuple

from ..errors import CheckpointError, DistruntimeError, NodeFailed, SessionClosed, WaitTimeout
from ..log.failure_log import Cause, Key
from ..log.handle import Handle
from ..log.line import Line, line_text
from ..log.node import Node
from ..session.failures import remote_error
from ..session.requests import Request
from ..session.session import Session
from ..session.timeouts import checked, left_until
from ..wire.messages import CommitSave, FolderListing, RemoveFiles, SweepSaves
from ..wire.shield import RLock, shield
from .tree import Json

log = logging.getLogger("distruntime")

# What is in a checkpoint's folder has a form, and this is the form's number.
VERSION = 1
# So many seconds lie between looks whether the workers of a save can be reached.
_LOOK = 0.5
# Failures that no instruction has are filed under negative numbers: see FailureLog.unread.
_keys = count(-1, -1).__next__


class Contents(NamedTuple):
    """What the index of a checkpoint says besides its files: the tensors by their keys, and their tree."""

    tensors: dict[str, dict[str, Json]]
    tree: Json


@dataclass(frozen=True)
class FileWrite:
    """What one worker writes. `written` is answered with the file's size, which it reads from `report`."""

    node: Node
    file: str
    written: Request[int]
    report: Handle


class Saving:
    """A checkpoint that is being written. `wait()` for it; nothing else must be done."""

    def __init__(
        self, session: Session, folder: str, save: str, contents: Contents, line: Line, background: bool
    ) -> None:
        self._session, self.folder, self._save, self._line = session, folder, save, line
        self._contents: Contents | None = contents
        self._background = background
        self._writes: list[FileWrite] = []
        self._looks: list[Request[FolderListing]] = []
        self._abandoned = False
        # No message has this request. It is answered when all is over.
        self._whole: Request[None] = Request(0, session.nodes[0])
        self._failure: Callable[[], BaseException] | None = None
        self._filed: tuple[Node, Key] | None = None
        self._on_end: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = (
            "being written" if not self._whole.done else "failed" if self._failure is not None else "complete"
        )
        return f"<distruntime checkpoint in {self.folder}, {state}>"

    # -- for users -------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether it is over, one way or the other. Asks nobody."""
        return self._whole.done

    def is_completed(self) -> bool:
        """As `done`, by torch's name."""
        return self.done()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the checkpoint is the one that a load finds; raise what kept it from that.

        Raises `WaitTimeout` after `timeout` seconds, and `NodeFailed` if a worker was lost meanwhile. After
        any failure the checkpoint before it is as it was. Ctrl-C leaves all usable.
        """
        timeout = checked(timeout)
        if not self._whole.done and not self._session.result(self._whole, timeout):
            raise WaitTimeout(
                f"the checkpoint in {self.folder} is not complete within {timeout:g} s\n"
                f"  saved at {line_text(self._line)}\n"
                "  it goes on: wait again, or look at done()"
            )
        if self._filed is not None:
            node, key = self._filed
            with node.lock:
                node.failure_log.unread.pop(key, None)
        if self._failure is not None:
            raise self._failure()

    # -- the phases ------------------------------------------------------------------------------------------

    def track(
        self, writes: list[FileWrite], looks: list[Request[FolderListing]], on_end: Callable[[], None]
    ) -> None:
        """Go on when every worker has written its file and said what is there already.

        `on_end` is called when all is over.
        """
        # Ctrl-C in the midst of it would leave a save that never ends. The end of the session would wait for
        # it.
        with shield:
            self._writes, self._looks = writes, looks
            self._on_end.append(on_end)
            _when_all([*(write.written for write in writes), *looks], self._guarded(self._have_written))

    def written(self, sizes: Sequence[int]) -> int:
        """Return how many bytes are on disk; `sizes` has the bytes of each worker's tensors."""
        return sum(size for size, write in zip(sizes, list(self._writes)) if write.written.done)

    def abandon(self) -> None:
        """Do not make it the current one, unless that is under way already: nobody waits for it any more."""
        self._abandoned = True

    def give_up(self) -> None:
        """Count as over, if it never began: the call that was to begin it has failed."""
        if not self._looks:
            self._end(partial(CheckpointError, f"the checkpoint in {self.folder} was not begun"), silent=True)

    def await_end(self, deadline: float | None = None) -> bool:
        """Block until it is over; raise nothing. Return whether it is.

        Past a deadline (monotonic) wait only for a save that has begun and whose workers can be reached.
        """
        patience = left_until(deadline)
        while not self._whole.done and not self._session.result(self._whole, patience, quietly=True):
            if not self._looks or any(
                node.failed is None and node.presence.absence is not None for node in self._session.nodes
            ):
                return self._whole.done
            patience = _LOOK
        return True

    def _guarded(self, step: Callable[[], None]) -> Callable[[], None]:
        return partial(self._run_step, step)

    def _run_step(self, step: Callable[[], None]) -> None:
        """Run a step in a thread that reads the socket for somebody else, who must not meet its errors."""
        try:
            step()
        except DistruntimeError as error:
            # A worker, or the session, has gone just now.
            self._end(partial(type(error), str(error)))
        except Exception as error:
            log.exception("a defect of distruntime: the checkpoint in %s", self.folder)
            self._end(
                partial(CheckpointError, f"the checkpoint in {self.folder} was not completed: {error!r}")
            )

    def _have_written(self) -> None:
        failed = self._first_failure([*(write.written for write in self._writes), *self._looks])
        if failed is None and self._abandoned:
            failed = partial(CheckpointError, f"the checkpoint in {self.folder} was abandoned by Ctrl-C")
        numbers = [0]
        if failed is None:
            for summary in (summary for look in self._looks for summary in look.value.indexes):
                numbers.append(summary.number)
                if not summary.problem and summary.version != VERSION:
                    failed = partial(
                        CheckpointError,
                        other_version(self.folder, summary.version)
                        + ". Save into another folder, or empty this one",
                    )
        if failed is not None:
            there = [
                write for write in self._writes if write.node.failed is None and self._session.closed is None
            ]
            removals = [
                self._session.ask(write.node, RemoveFiles, self.folder, [write.file]) for write in there
            ]
            _when_all(removals, self._guarded(partial(self._end, failed)))
            return
        assert self._contents is not None
        tensors, tree = self._contents
        files = {
            write.file: {"node": write.node.index, "host": write.node.host, "bytes": write.written.value}
            for write in self._writes
        }
        index = {
            "format": "distruntime",
            "version": VERSION,
            "number": max(numbers) + 1,
            "save": self._save,
            "tensors": tensors,
            "tree": tree,
            "files": files,
        }
        # The k-th tensor file is the k-th in `files`: plans and writes have one order.
        names: dict[Json, str] = dict(enumerate(files))
        weights = {
            "metadata": {"total_size": sum(write.written.value for write in self._writes)},
            "weight_map": {key: names[about["file"]] for key, about in tensors.items()},
        }
        texts = json.dumps(index, allow_nan=False), json.dumps(weights, indent=1)
        commits = [
            self._session.ask(write.node, CommitSave, self.folder, self._save, *texts)
            for write in self._writes
        ]
        _when_all(commits, self._guarded(partial(self._have_committed, commits)))

    def _have_committed(self, commits: Sequence[Request[object]]) -> None:
        failed = self._first_failure(commits)
        if failed is not None:
            # The files of the checkpoint before stay too: on another disk it may be the one that a load
            # needs.
            self._end(failed)
            return
        keep = [write.file for write in self._writes]
        sweeps = [
            self._session.ask(look.node, SweepSaves, self.folder, self._save, keep)
            for look in self._looks
            if look.node.failed is None
        ]
        _when_all(sweeps, self._guarded(partial(self._have_swept, sweeps)))

    def _have_swept(self, sweeps: Sequence[Request[object]]) -> None:
        for sweep in sweeps:
            if sweep.cause is not None:
                log.warning(
                    "%s: old files in %s could not be removed: %s",
                    sweep.node,
                    self.folder,
                    sweep.cause.failure.text,
                )
        self._end(None)

    def _first_failure(self, requests: Sequence[Request[object]]) -> Callable[[], BaseException] | None:
        for request in requests:
            if request.cause is not None:
                failure = request.cause.failure
                cause = request.cause
                if failure.seq == 0:
                    # The worker's thread met it, and no instruction did.
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
                return partial(
                    NodeFailed,
                    f"the checkpoint in {self.folder} was not completed, as {request.node} {request.lost}. "
                    "The one before it is as it was",
                )
        return None

    def _file(self, node: Node, cause: Cause) -> None:
        """Let the next `synchronize` raise it, or `shutdown`, if nobody waits before."""
        key = (0, _keys(), -1)
        with node.lock:
            node.failure_log.unread[key] = cause
        self._filed = node, key

    def _end(self, failure: Callable[[], BaseException] | None, silent: bool = False) -> None:
        if self._whole.done:
            return
        self._failure = failure
        if failure is not None and self._background and not silent:
            log.warning("a checkpoint failed: %s", str(failure()).partition("\n")[0])
        self._writes, self._looks, self._contents = [], [], None
        while self._on_end:
            self._on_end.pop()()
        self._whole.finish()


class _All:
    """Calls `then` once, when the last of several requests is answered."""

    def __init__(self, left: int, then: Callable[[], None]) -> None:
        self._left, self._then, self._lock = left, then, RLock()

    def __call__(self, _: Request[object]) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._then()


def _when_all(requests: Sequence[Request[object]], then: Callable[[], None]) -> None:
    gathering = _All(len(requests), then)
    for request in requests:
        request.when_done(gathering)
    if not requests:
        then()


def other_version(folder: str, version: int) -> str:
    """Return what an error says of a checkpoint of another version."""
    return f"{folder} holds a checkpoint of version {version}, and this distruntime knows version {VERSION}"
