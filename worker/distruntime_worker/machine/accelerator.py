"""The accelerators of this machine: which there are, which are in use, and their streams and events.

Besides this module, `hardware`, `random_states`, the data channels and `cuda_graphs` know what torch calls
accelerators. No other module of the worker does.

What torch can say of any accelerator is asked of `torch.accelerator`, and the rest of the module that torch
has for this kind: `torch.cuda` (ROCm's devices too), `torch.xpu`, `torch.mps`, or that of a backend from
elsewhere, such as `torch.npu`. A process has one kind at most.

Whoever asks a device for a stream, an event, a state or its memory begins to use it, and on most kinds a
device that is used keeps a context of some 0.5 GB. So nobody asks before `begin`.
"""

from __future__ import annotations

import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch

from distruntime.wire.shield import Lock

# On these a kernel has run when its call returns, and they have no streams.
_AT_ONCE = frozenset({"cpu", "meta"})
# A device of this kind has one stream in most versions of torch, and memory that the host shares.
MPS = "mps"
# These flags below `torch.backends` are for one kind only. `dr.config` has them with "_" for ".".
FLAGS = (
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn.allow_tf32",
    "cudnn.benchmark",
    "cudnn.deterministic",
)
# With this in the environment of the worker, each call waits for its kernels, so that the right one fails.
_NAMES_THE_CAUSE = {
    "cuda": "AMD_SERIALIZE_KERNEL=3" if torch.version.hip else "CUDA_LAUNCH_BLOCKING=1",
    "xpu": "UR_L0_SERIALIZE=2",
    "npu": "ASCEND_LAUNCH_BLOCKING=1",
}
# Simulated devices are called so.
SIMULATED = "cuda"


class Found(NamedTuple):
    """The kind of accelerator that torch can use here, and how many there are.

    `kind` is "" where there is none. `why` is what torch says if it was built for a kind and cannot use it.
    """

    kind: str
    number: int
    why: str


def find() -> Found:
    """Return the accelerators that torch can use here."""
    kind = _built_for()
    if not kind:
        return Found("", 0, "")
    # The count alone would do if it asked the driver. That of NVIDIA's devices asks another library, which
    # counts devices that this torch cannot use.
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if count:
        return Found(kind, count, "")
    said = (str(warning.message).partition(" (Triggered internally")[0] for warning in heard)
    return Found("", 0, "; ".join(f"torch was built for {kind} and says: {text}" for text in said))


def _built_for() -> str:
    """Return the kind that this torch was built for, or that a backend from elsewhere has brought.

    To ask touches no device.
    """
    found = torch.accelerator.current_accelerator()
    return "" if found is None else found.type


def untouched() -> bool:
    """Whether this process has not begun to use an accelerator, so that its forks still can."""
    kind = _built_for()
    begun = getattr(torch.get_device_module(kind), "is_initialized", None) if kind else None
    return begun is None or not begun()


def asynchronous(device: torch.device) -> bool:
    """Whether kernels on this device run later than their call, in the order of its streams."""
    return device.type not in _AT_ONCE


def module(device: torch.device) -> ModuleType:
    """Return what torch has for the kind of a device: `torch.cuda`, for example."""
    found: ModuleType = torch.get_device_module(device)
    return found


# -- devices in use --------------------------------------------------------------------------------

# The devices that this process uses, each with its default stream, in the order of their first use.
_in_use: dict[torch.device, torch.Stream] = {}
# A kernel has failed on these, and nothing runs there any more: see lost.py. The text says so.
lost: dict[torch.device, str] = {}
# Whoever holds it changes what stands in these two, and waits for no device meanwhile.
_changing = Lock()
# Each device has a lock, which one thread holds while it opens that device.
_opening: defaultdict[torch.device, Lock] = defaultdict(Lock)


def begin(device: torch.device) -> None:
    """Take note that this process uses a device from now on.

    Its default stream follows those of the devices in use: what they have been made to wait for, by
    `wait_on_defaults`, it has to wait for too.
    """
    if device in _in_use or not asynchronous(device):
        return
    with _changing:
        opening = _opening[device]
    with opening:
        if device in _in_use or device in lost:
            return
        new = _default_stream(device)
        # The first event opens the context, which takes seconds on some machines.
        new.record_event()
        with _changing:
            for other in _in_use.values():
                new.wait_event(other.record_event())
            _in_use[device] = new


def says_when_dead(device: torch.device) -> str:
    """Return what a device in use says of each call since a kernel has failed there; "" where it is well."""
    try:
        require_well(device)
        _in_use[device].record_event()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def require_well(device: torch.device) -> None:
    """Raise what a device in use says of each call since a kernel has failed there, if one has."""
    stream = _in_use.get(device)
    if stream is not None:
        stream.query()


def names_the_cause(device: torch.device) -> str:
    """Return what to have in the environment, so that the right call fails; "" if nobody knows."""
    return _NAMES_THE_CAUSE.get(device.type, "")


def give_up(device: torch.device, text: str) -> None:
    """Use a device no more. `text` says why."""
    with _changing:
        lost[device] = text
        _in_use.pop(device, None)


def in_use() -> list[torch.device]:
    """Return the devices that this process uses."""
    return list(_in_use)


def default_stream(device: torch.device) -> torch.Stream:
    """Return the stream to which threads issue that have entered no other; begin to use the device.

    Raise `torch.AcceleratorError` if it is lost.
    """
    begin(device)
    found = _in_use.get(device)
    if found is None:
        raise torch.AcceleratorError(lost[device])
    return found


def default_streams() -> list[torch.Stream]:
    """Return the default stream of each device in use."""
    return list(_in_use.values())


def wait_on_defaults(events: Sequence[torch.Event]) -> list[RuntimeError]:
    """Make the default streams of all devices wait for `events`, also of those that are not in use yet.

    Return what the devices have raised.
    """
    errors: list[RuntimeError] = []
    with _changing:
        for stream in _in_use.values():
            for event in events:
                try:
                    stream.wait_event(event)
                except RuntimeError as error:
                    errors.append(error)
    return errors


def _default_stream(device: torch.device) -> torch.Stream:
    # Torch names no default stream of any accelerator. A thread that has entered none issues to it.
    found: list[torch.Stream | BaseException] = []

    def look() -> None:
        try:
            found.append(torch.accelerator.current_stream(device))
        except BaseException as error:
            # It is raised below, in the thread that has asked.
            found.append(error)

    thread = threading.Thread(target=look, name="looks-for-a-stream")
    thread.start()
    thread.join()
    (stream,) = found
    if isinstance(stream, BaseException):
        raise stream
    return stream


# -- streams and events ----------------------------------------------------------------------------


def stream(device: torch.device, priority: int) -> torch.Stream | None:
    """Return a new stream of a device, or None if kernels there run at once.

    A device with one stream has that for all.
    """
    if not asynchronous(device):
        return None
    begin(device)
    if _one_stream(device.type):
        return _in_use[device]
    return torch.Stream(device=device, priority=priority)


def copying_stream(device: torch.device) -> torch.Stream | None:
    """Return a new stream for copies beside the others of a device, or None if it has one stream."""
    return None if _one_stream(device.type) else stream(device, 0)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream of a device to which this thread issues."""
    return torch.accelerator.current_stream(device)


class entered:
    """The context in which this thread issues to a stream, and makes new tensors on its device.

    None changes nothing, and neither does a stream of a device that is lost.
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        self._inner: torch.Stream | None = None
        if stream is not None and not _one_stream(stream.device.type) and stream.device not in lost:
            # A `torch.Stream` keeps what it was entered from, so one object cannot be entered by two threads.
            self._inner = torch.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            )

    def __enter__(self) -> None:
        if self._inner is not None:
            try:
                self._inner.__enter__()
            except torch.AcceleratorError:
                # The device is lost, and what is issued there now fails and says so.
                self._inner = None

    def __exit__(self, *_: object) -> None:
        if self._inner is not None:
            # The device was lost meanwhile.
            with suppress(torch.AcceleratorError):
                self._inner.__exit__(None, None, None)


class Moment(torch.Event):
    """An event that knows whose it is: it happens when the device has run what `stream` was given so far.

    Torch's `synchronize` of it spins.
    """

    stream: torch.Stream


def moment(stream: torch.Stream) -> Moment:
    """Return an event at the end of what a stream was given so far."""
    found = Moment(stream.device)
    found.record(stream)
    found.stream = stream
    return found


@contextmanager
def all_in_order(first: torch.Stream | None, devices: Iterable[torch.device]) -> Iterator[None]:
    """Have what this thread issues to these devices begin after `first`, and `first` go on after all of it.

    One thread issues an operation of a group for members on several devices. The master has ordered the
    stream of the first member alone, and the other devices have current streams of their own here.
    """
    if first is None:
        yield
        return
    found = [current_stream(device) for device in dict.fromkeys(devices) if asynchronous(device)]
    others = [stream for stream in found if stream != first]
    if others:
        begun = first.record_event()
        for stream in others:
            stream.wait_event(begun)
    try:
        yield
    finally:
        for stream in others:
            first.wait_event(stream.record_event())


def timed_event(stream: torch.Stream) -> torch.Event:
    """Return an event that knows when the stream has got to what was issued so far."""
    event = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return event


def used_on(value: torch.Tensor, stream: torch.Stream) -> None:
    """Keep torch's allocator from giving a value's memory away before what was issued to `stream` has run."""
    if _records(value.device.type):
        value.record_stream(stream)


@cache
def _records(kind: str) -> bool:
    """Whether the allocator of a kind hands memory on in the order of streams, and can be told of others."""
    key = torch._C._dispatch_key_for_device(kind)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::record_stream", key))


@cache
def _one_stream(kind: str) -> bool:
    return kind == MPS and not hasattr(torch.mps, "Stream")
