"""How a call ends that runs on several workers: its outcome, which torch's store of their mesh has.

Either all members have returned, or one failure is the call's on every worker. The outcome is written once,
by whoever is first. So a worker that is told to stop after all have returned has returned, too.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed

from distruntime import errors
from distruntime.wire.descriptors import require

from ..machine.threads import no_room
from ..values.objects import class_name

if torch.distributed.is_available():
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

MEETING = timedelta(seconds=300)
# One try to reach the store takes so many seconds at most, and so does one wait for an outcome.
_DIAL, _WAIT = timedelta(seconds=2), timedelta(seconds=0.2)
# The store is gone with its worker, and the master has so many seconds to tell of that.
_NEWS = 10.0
_LOOK = 0.05
# A call whose members have all returned has one of these outcomes. In the second one, some members have ended
# their group. The outcome of another call is its failure, in JSON.
_RETURNED, _UNGROUPED = "returned", "returned without a group"
_ALL_RETURNED = {_RETURNED, _UNGROUPED}

# It raises what ends a call here.
Check = Callable[[], None]


class Outcomes:
    """The outcomes of the calls of a mesh that is on so many workers."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._server: TCPStore | None = None
        self._store: Store | None = None
        # It is True if members, here or elsewhere, have ended torch.distributed's group in the last call.
        self.ungrouped = False
        # The calls whose outcomes may still be in the store.
        self._settled: list[int] = []

    def listen(self, host: str) -> int:
        """Start the store here; return its port."""
        require("the store of dr.spmd")
        try:
            self._server = TCPStore(host, 0, is_master=True, timeout=MEETING, wait_for_workers=False)
        except RuntimeError as error:
            # torch says no more than that, where it cannot start a thread.
            if os.strerror(errno.EAGAIN) in str(error):
                raise errors.ConfigurationError(no_room("the store of dr.spmd")) from error
            raise
        port: int = self._server.port
        return port

    def connect(self, host: str, port: int, check: Check, limit: float) -> str:
        """Reach the store, if there are other workers. Return why it was not reached within so many seconds.

        Nothing if it was.
        """
        until = time.monotonic() + limit
        while self._workers > 1 and self._store is None:
            try:
                store = TCPStore(host, port, is_master=False, timeout=_DIAL, wait_for_workers=False)
            except torch.distributed.DistError as error:
                check()
                if time.monotonic() > until:
                    return str(error).partition("\n")[0].rstrip(".")
                continue
            store.set_timeout(MEETING)
            self._store = PrefixStore("calls", store)
        return ""

    def look(self, call: int, check: Check) -> None:
        """Raise what another worker has told of the call, or what ends it here."""
        check()
        if self._store is None:
            return
        told = ""
        try:
            if self._store.check([f"{call}/end"]):
                told = self._store.get(f"{call}/end").decode()
        except torch.distributed.DistError:
            self._lost(check)
        if told and told not in _ALL_RETURNED:
            raise _told(told)

    def agree(self, call: int, ungrouped: bool, check: Check) -> None:
        """Block until each worker's members have returned; raise where one has failed.

        `ungrouped` says whether members here have ended their group.
        """
        store, key = self._store, f"{call}/end"
        if store is None:
            self.ungrouped = ungrouped
            return
        try:
            if ungrouped:
                store.set(f"{call}/ungrouped", "")
            if store.add(f"{call}/done", 1) == self._workers:
                words = _UNGROUPED if store.check([f"{call}/ungrouped"]) else _RETURNED
                told = store.compare_set(key, "", words).decode()
                if told not in _ALL_RETURNED:
                    raise _told(told)
                # Everybody has come so far, and needs nothing of earlier calls.
                for known in self._settled:
                    for name in ("done", "end", "ungrouped"):
                        store.delete_key(f"{known}/{name}")
            while not store.check([key]):
                with suppress(torch.distributed.DistStoreError):
                    store.wait([key], _WAIT)
                self.look(call, check)
            self.ungrouped = store.get(key).decode() == _UNGROUPED
        except torch.distributed.DistNetworkError:
            self._lost(check)
        self.look(call, _nothing)
        self._settled = [call]

    def fail(self, call: int, error: BaseException) -> BaseException | None:
        """Have a call fail on all workers; return its failure.

        That is another worker's where that was first. Return nothing where all members have returned before.
        """
        outcome: BaseException | None = error
        if self._store is not None:
            words = json.dumps([class_name(type(error)), str(error), getattr(error, "traceback_there", "")])
            # If the store is gone with its worker, the others hear of that from the master.
            with suppress(torch.distributed.DistError):
                told = self._store.compare_set(f"{call}/end", "", words).decode()
                if told in _ALL_RETURNED:
                    outcome, self.ungrouped = None, told == _UNGROUPED
                elif told != words:
                    outcome = _told(told)
        if outcome is not None:
            self._settled.append(call)
        return outcome

    def _lost(self, check: Check) -> NoReturn:
        """Give the master a moment to tell which worker is lost."""
        until = time.monotonic() + _NEWS
        while time.monotonic() < until:
            check()
            time.sleep(_LOOK)
        raise RuntimeError("the store of the mesh is gone, which was at the mesh's first worker")


def _nothing() -> None:
    pass


def _told(words: str) -> Exception:
    """Return the failure that another worker has told."""
    kind, text, traceback = json.loads(words)
    return error_of(kind, text, traceback)


def error_of(kind: str, text: str, traceback: str) -> Exception:
    """Return an error that names the class, the text and the traceback of one in another process."""
    module, _, name = kind.rpartition(".")
    known = getattr(errors, name, None) if module == errors.__name__ else None
    made: Exception
    if isinstance(known, type) and issubclass(known, Exception):
        made = known(text)
    else:
        made = type(name, (Exception,), {"__module__": module or "builtins", "__qualname__": name})(text)
    made.traceback_there = traceback  # type: ignore[attr-defined]
    return made
