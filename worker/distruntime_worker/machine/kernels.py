"""What runs on this worker's accelerators and when, by torch's own profiler."""

from __future__ import annotations

import time
from typing import NamedTuple

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from distruntime.wire.shield import Lock

# A process has one profiler, and a worker may have several masters.
_in_use = Lock()


class Launched(NamedTuple):
    """What a device has run: its name, the device's stream, when it was launched, began and ended.

    Times are of `time.perf_counter_ns`. The launch is 0 where the profiler does not know it.
    """

    name: str
    stream: str
    launched: int
    began: int
    ended: int


class Kernels:
    """A run of torch's profiler. Its threads may begin and end it, one after the other."""

    def __init__(self, activities: set[ProfilerActivity] | None = None) -> None:
        self._activities = activities
        self._profile: profile | None = None
        self._turn = Lock()
        self._why = ""

    def start(self) -> None:
        """Begin to note kernels. Block until the profiler is ready, some seconds the first time."""
        with self._turn:
            if not _in_use.acquire(blocking=False):
                self._why = "another session of the worker traces them"
                return
            try:
                every = self._activities or supported_activities() - {ProfilerActivity.CPU}
                if not every:
                    raise RuntimeError("torch's profiler has no activity for this kind of device")
                self._profile = profile(activities=every)
                self._profile.start()
            # Torch raises whatever its backend does, and a trace goes on without kernels.
            except Exception as error:
                self._profile, self._why = None, f"torch's profiler does not start: {error}"
                _in_use.release()

    def stop(self) -> tuple[list[Launched], str]:
        """Return what has run since, and why there is nothing, if so. Block until the devices are done."""
        with self._turn:
            running, self._profile = self._profile, None
            if running is None:
                return [], self._why
            try:
                running.stop()
                return _launched(running), ""
            # As above: the rest of the trace is there.
            except Exception as error:
                return [], f"torch's profiler does not stop: {error}"
            finally:
                _in_use.release()


def _launched(running: profile) -> list[Launched]:
    results = running.profiler.kineto_results if running.profiler is not None else None
    if results is None:
        return []
    # The profiler's times are of the machine's clock, which people set.
    ahead = time.time_ns() - time.perf_counter_ns()
    launches: dict[int, int] = {}
    found = []
    for event in results.events():
        if event.device_type() == DeviceType.CPU:
            launches[event.correlation_id()] = event.start_ns()
    for event in results.events():
        if event.device_type() == DeviceType.CPU:
            continue
        began = event.start_ns()
        launched = launches.get(event.correlation_id(), ahead) - ahead
        kind = event.device_type().name.lower()
        stream = f"{kind}:{event.device_index()} stream {event.device_resource_id()}"
        ended = began + event.duration_ns()
        found.append(Launched(event.name(), stream, launched, began - ahead, ended - ahead))
    return found
