"""What the data channels of accelerators have in common: a process group of torch's on one device. Its calls
are queued on the device, and return at once.
"""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from distruntime.wire.data_channel import Membership, Unfinished

from ...machine import accelerator
from .torch_group import TorchGroup, dist

log = logging.getLogger("distruntime.worker")


class Queued:
    """A call that the device has yet to carry out."""

    def __init__(self, work: torch.distributed.Work, event: torch.Event) -> None:
        self._work, self._event = work, event

    def is_completed(self) -> bool:
        """Return whether the bytes have moved; raise `ConnectionError` where the library gives up."""
        # A library's own word that it has completed also stands for an error.
        if self._event.query():
            return True
        if self._work.is_completed() and not self._event.query() and self._failed():
            raise ConnectionError("its library reports an error: see the worker's log")
        return False

    def _failed(self) -> bool:
        try:
            return self._work.exception() is not None
        except TypeError:
            # Some builds of torch cannot hand the error over.
            return True


class DeviceGroup(TorchGroup):
    """Every collective of torch.distributed, in the order of the device's current stream.

    Subclasses make `_group`.
    """

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        self._device = membership.device

    def _here(self) -> AbstractContextManager[object]:
        found: AbstractContextManager[object] = torch.get_device_module(self._device).device(self._device)
        return found

    def _options(self, of: Any) -> Any:  # type: ignore[explicit-any]
        options = of.Options()
        options._timeout = timedelta(seconds=self.membership.timeout)
        return options

    def _done(self, work: torch.distributed.Work) -> Queued:
        # The current stream waits for the library's. This thread does not.
        work.wait()
        return Queued(work, accelerator.current_stream(self._device).record_event())

    def barrier(self) -> Unfinished | None:
        options = dist.BarrierOptions()
        options.device_ids = [self._device.index]
        with self._here():
            return self._done(self._group.barrier(options))

    def abort(self) -> None:
        # It waits for the library's threads, for as long as the group's timeout in the worst case, and the
        # thread that aborts may be the one who hears the master.
        threading.Thread(target=self._abort, name="aborts", daemon=True).start()

    def _abort(self) -> None:
        try:
            self._group.abort()
        except RuntimeError as error:
            log.warning("a data channel on %s does not abort: %s", self._device, error)

    def close(self) -> None:
        self._group.shutdown()
