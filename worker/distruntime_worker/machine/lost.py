"""Devices that are lost. A kernel has failed there, and since then each call that concerns the device fails.

Kernels run later than their call, so whoever calls the device next hears of it first: an operator, or what
notes an event. All hear of it by `look`, which makes one text of it. Nothing on the device can be read again
before the process ends.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from distruntime.wire.shield import Lock

from . import accelerator

log = logging.getLogger("distruntime.worker")

_looking = Lock()
# These are called with a device that is lost and the text.
_watchers: list[Callable[[torch.device, str], None]] = []


def watch(watcher: Callable[[torch.device, str], None]) -> None:
    """Have a function called when a device is lost, in whichever thread notices, until it is forgotten."""
    with _looking:
        _watchers.append(watcher)


def forget(watcher: Callable[[torch.device, str], None]) -> None:
    """Call a function no more."""
    with _looking:
        _watchers[:] = [one for one in _watchers if one != watcher]


def look(error: BaseException, op: str) -> BaseException:
    """Return the error to tell for one that `op` has raised.

    Where a device is lost and the error comes of that, it is the one that all hear.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return error
    found: list[tuple[torch.device, str]] = []
    with _looking:
        for device in accelerator.in_use():
            said = accelerator.says_when_dead(device)
            if said:
                found.append((device, _text(device, said, op)))
                accelerator.give_up(*found[-1])
        watchers = list(_watchers)
    if found:
        # What is garbage by now and not collected may have memory of the device: see `keep_for_ever`.
        gc.freeze()
    for device, text in found:
        log.error("%s", text)
        for watcher in watchers:
            watcher(device, text)
    # Another thread may lose a device meanwhile.
    lost = list(accelerator.lost.items())
    texts = [text for device, text in lost if _is_of(error, device, text)]
    texts = texts or [text for _, text in found]
    return error if not texts or str(error) in texts else torch.AcceleratorError(texts[0])


def _is_of(error: RuntimeError, device: torch.device, text: str) -> bool:
    """Whether an error is one of a lost device, whose text this is: its calls all fail in the same words."""
    said = str(error)
    return said == text or text.startswith(_begins(device, said.partition("\n")[0]))


def _begins(device: torch.device, said: str) -> str:
    return f"{device} is lost: {said}. "


def _text(device: torch.device, said: str, op: str) -> str:
    variable = accelerator.names_the_cause(device)
    named = f" {variable} in its worker's environment lets the right one fail." if variable else ""
    return (
        f"{_begins(device, said)}{op} was the first to notice, and something before it may be the cause, as "
        f"kernels run later than their call.{named} Nothing on {device} of this worker can be read or used "
        "any more; what is elsewhere can"
    )


@contextmanager
def tolerated(op: str) -> Iterator[None]:
    """Go on where a device is lost inside, as what it would have done does not matter any more."""
    try:
        yield
    except RuntimeError as error:
        if str(look(error, op)) not in accelerator.lost.values():
            raise


def require(devices: Iterable[torch.device]) -> None:
    """Raise `torch.AcceleratorError` if one of these devices is lost."""
    for device in devices:
        if device in accelerator.lost:
            raise torch.AcceleratorError(accelerator.lost[device])


def keep_for_ever(value: object) -> None:
    """Never let go of a value of a lost device.

    The allocator notes events when such memory is given back that several streams have used. That fails, in a
    destructor, which ends the process.
    """
    # Python's own end would let go of what a list holds.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
