"""`torch.cuda`'s own functions and classes, as they answer for the workers."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from typing import Any, NoReturn

import torch

from ...backend.random import get_rng_state, set_rng_state
from ...errors import without_our_frames
from ...session.session import active_session
from ...session.stalls import get_sync_debug_mode, set_sync_debug_mode
from ...streams import nvtx
from ...streams.stream import Event, Stream, stream
from ...tensors.tensor import DistributedTensor
from .functions import TYPES, type_named
from .places import current_device, device_count, place_of
from .replaced import ABSENT, Function, no_class, pretending, refusal, refusing, replace


class _Device(contextlib.ContextDecorator):
    """Stands for `torch.cuda.device`. It is a class, as torch asks `isinstance` of it."""

    def __init__(self, device: object) -> None:
        self._asked = device
        self._entered: list[contextlib.AbstractContextManager[object]] = []

    @without_our_frames
    def __enter__(self) -> None:
        nothing = self._asked is None or self._asked == -1
        context = (
            contextlib.nullcontext()
            if nothing
            else torch.get_device_module("remote").device(place_of(self._asked))
        )
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)


class _DeviceOf(_Device):
    """Stands for `torch.cuda.device_of`: a local tensor changes nothing."""

    def __init__(self, tensor: object) -> None:
        super().__init__(tensor.device if isinstance(tensor, DistributedTensor) else None)


def _rng_state(device: object = "cuda") -> torch.Tensor:
    home = active_session().places.meant(place_of(None if device == "cuda" else device))
    return get_rng_state(home).cpu()


def _set_rng_state(state: torch.Tensor, device: object = "cuda") -> None:
    set_rng_state(state, active_session().places.meant(place_of(None if device == "cuda" else device)))


def _set_rng_states(states: list[torch.Tensor]) -> None:
    for k, state in enumerate(states):
        _set_rng_state(state, k)


def _initial_seed() -> int:
    """Return what the current device was seeded with. Block for one round trip.

    The random states of torch's CPU and of CUDA begin with it.
    """
    return int.from_bytes(bytes(_rng_state()[:8].tolist()), sys.byteorder)


def _place_stream(own: Function) -> Function:
    def call(device: object = None) -> Stream:
        found: Stream = own(place_of(device))
        return found

    return call


class _StreamKind(type):
    """The kind of what stands for `torch.cuda.Stream`: its arguments are those of CUDA's."""

    @without_our_frames
    def __call__(cls, device: object = None, priority: int = 0, **ids: int) -> Stream:
        return Stream(active_session().places.meant(place_of(device)).place, priority=priority)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Stream)


class _CudaStream(metaclass=_StreamKind):
    """Stands for `torch.cuda.Stream`. It is a class, as annotations name it and torch asks `isinstance`."""


def _device_memory_used(device: object = None) -> int:
    free, total = torch.cuda.mem_get_info(device)  # type: ignore[arg-type]
    return total - free


def _memory_stats(device: object = None) -> dict[str, int]:
    return dict(torch.accelerator.memory_stats(place_of(device)))


def _nested_memory_stats(device: object = None) -> dict[str, object]:
    nested: dict[str, Any] = {}  # type: ignore[explicit-any]
    for name, value in _memory_stats(device).items():
        first, second, last = name.split(".")
        nested.setdefault(first, {}).setdefault(second, {})[last] = value
    return nested


class _NoGenerators(tuple[torch.Generator, ...]):
    """Stands for `torch.cuda.default_generators`, which are in the workers."""

    __slots__ = ()

    @without_our_frames
    def __getitem__(self, index: object) -> NoReturn:
        raise refusal(
            "torch.cuda.default_generators",
            "torch.cuda.get_rng_state(k) and set_rng_state have their states, and manual_seed seeds them",
        )


# These do nothing on workers, and whoever calls them asks for nothing.
_IDLE = (
    *("init", "_lazy_init", "ipc_collect", "_sleep", "caching_allocator_enable"),
    *("set_per_process_memory_fraction", "reset_accumulated_memory_stats"),
    *("reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats"),
)
_KERNELS = (
    "a kernel that this process launches reads memory of this process. Let the worker run it: make it an "
    "operator (torch.library.custom_op), whose body runs there"
)
_WITHOUT = "run the step without it; the master issues ahead of the worker, which hides the cost of launching"
_BUSY = "dr.nodes() shows how busy each worker is"
_ALLOCATOR = "the workers' allocators are torch's own"
_SNAPSHOT = "a function of dr.remote that calls it has one of its worker (docs/looking.md)"
_REFUSED = {
    "set_stream": "with torch.cuda.stream(s): makes it the current one of a block",
    "cudart": "dr.nodes() and torch.cuda.mem_get_info() tell what it is mostly asked for",
    "check_error": "errors of the workers' GPUs are raised where a value is read",
    "make_graphed_callables": "call the module itself",
    "graph": _WITHOUT,
    "graph_pool_handle": _WITHOUT,
    "export_dot": _WITHOUT,
    "export_graph_data": _WITHOUT,
    "caching_allocator_alloc": "make a tensor",
    "caching_allocator_delete": "let go of the tensor",
    "caching_allocator_disabled": _ALLOCATOR,
    "change_current_allocator": _ALLOCATOR,
    "use_mem_pool": _ALLOCATOR,
    "memory_snapshot": _SNAPSHOT,
    "list_gpu_processes": "dr.nodes() shows the sessions of each worker",
    "clock_rate": _BUSY,
    "memory_usage": _BUSY,
    "power_draw": _BUSY,
    "temperature": _BUSY,
    "utilization": _BUSY,
    "current_blas_handle": _KERNELS,
    "current_solver_handle": _KERNELS,
    "get_stream_from_external": _KERNELS,
    "_compile_kernel": _KERNELS,
}
_NO_CLASSES = {
    "CUDAGraph": _WITHOUT,
    "CUDAPluggableAllocator": _ALLOCATOR,
    "MemPool": _ALLOCATOR,
    "GreenContext": "dr.Stream shares a device",
    "ExternalStream": _KERNELS,
}
_PLACES = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "mem_get_info"),
    *("reset_peak_memory_stats", "get_device_name", "get_device_properties", "get_device_capability"),
    "synchronize",
)


@without_our_frames
def _set_device(device: object) -> None:
    torch.get_device_module("remote").set_device(place_of(device))


def _answer(name: str, new: object) -> None:
    """Replace a function of `torch.cuda`, also in the module there that it comes from."""
    own = getattr(torch.cuda, name, ABSENT)
    for module in (
        *(
            torch.cuda.random,
            torch.cuda.memory,
            torch.cuda.streams,
            torch.cuda.graphs,
            torch.cuda.green_contexts,
        ),
        torch.cuda,
    ):
        if getattr(module, name, ABSENT) is own:
            replace(module, name, new)


def _answers(module: Any) -> dict[str, object]:  # type: ignore[explicit-any]
    """Return what answers for the workers, by its name. `module` is `torch.remote`."""
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": device_count,
        "current_device": current_device,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "set_device": _set_device,
        "device": _Device,
        "device_of": _DeviceOf,
        "empty_cache": module.empty_cache,
        "manual_seed": module.manual_seed,
        "manual_seed_all": module.manual_seed_all,
        # A generator of its own draws the seed: torch's would be seeded anew.
        "seed": lambda: module.manual_seed(torch.Generator().seed()),
        "seed_all": lambda: module.manual_seed(torch.Generator().seed()),
        "initial_seed": _initial_seed,
        "get_rng_state": _rng_state,
        "set_rng_state": _set_rng_state,
        "get_rng_state_all": lambda: [_rng_state(k) for k in range(device_count())],
        "set_rng_state_all": _set_rng_states,
        "default_generators": _NoGenerators(),
        "Stream": _CudaStream,
        "Event": Event,
        "stream": stream,
        "current_stream": _place_stream(module.current_stream),
        "default_stream": _place_stream(module.default_stream),
        "memory_stats": _memory_stats,
        "memory_stats_as_nested_dict": _nested_memory_stats,
        "device_memory_used": _device_memory_used,
        "host_memory_stats": dict,
        "host_memory_stats_as_nested_dict": dict,
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "get_allocator_backend": lambda: "native",
        "can_device_access_peer": lambda device, peer_device: False,
        "is_tf32_supported": lambda: bool(torch.cuda.get_device_capability()[0] >= 8),
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": get_sync_debug_mode,
        "get_gencode_flags": lambda: "",
        "memory_summary": lambda device=None, abbreviated=False: "the workers' memory: see dr.memory()",
        "get_arch_list": lambda: [],
    }


def replace_cuda() -> None:
    cuda, module = torch.cuda, torch.get_device_module("remote")
    for name in _PLACES:
        answer = getattr(module, name)
        _answer(name, _asked(answer))
    for old, name in (
        ("memory_cached", "memory_reserved"),
        ("max_memory_cached", "max_memory_reserved"),
        ("reset_max_memory_allocated", "reset_peak_memory_stats"),
        ("reset_max_memory_cached", "reset_peak_memory_stats"),
    ):
        _answer(old, _asked(getattr(module, name)))
    for name, answer in _answers(module).items():
        _answer(name, answer)
    for name in ("range_push", "range_pop", "mark"):
        replace(cuda.nvtx, name, getattr(nvtx, name))
    for name in TYPES:
        replace(cuda, name, type_named(name))
    for owner in (torch.accelerator, type(module)):
        replace(owner, "is_available", lambda *args: True)
    replace(torch.accelerator, "device_count", device_count)
    _replace_idle()
    _replace_refused()


def _replace_idle() -> None:
    cuda = torch.cuda
    for name in _IDLE:
        if hasattr(cuda, name):
            _answer(name, pretending(f"torch.cuda.{name}"))
    # A range that another thread may end belongs to no stream.
    for name in ("range_start", "range_end"):
        replace(cuda.nvtx, name, pretending(f"torch.cuda.nvtx.{name}"))
    for name in ("start", "stop"):
        replace(cuda.profiler, name, pretending(f"torch.cuda.profiler.{name}"))
    for name in ("enable", "tuning_enable"):
        replace(cuda.tunable, name, pretending(f"torch.cuda.tunable.{name}"))
    replace(cuda.memory, "_record_memory_history", pretending("torch.cuda.memory._record_memory_history"))


def _replace_refused() -> None:
    cuda = torch.cuda
    for name in ("_dump_snapshot", "_snapshot"):
        replace(cuda.memory, name, refusing(f"torch.cuda.memory.{name}", _SNAPSHOT))
    for name, instead in _REFUSED.items():
        if hasattr(cuda, name):
            _answer(name, refusing(f"torch.cuda.{name}", instead))
    for name, instead in _NO_CLASSES.items():
        if hasattr(cuda, name):
            _answer(name, no_class(name, instead))
    # Libraries that launch kernels import the first, and ask a stream for the second.
    replace(torch._C, "_cuda_getCurrentRawStream", refusing("torch._C._cuda_getCurrentRawStream", _KERNELS))
    replace(Stream, "cuda_stream", property(refusing("stream.cuda_stream", _KERNELS)))


def _asked(answer: Function) -> Function:
    @functools.wraps(answer)
    @without_our_frames
    def call(device: object = None) -> object:
        return answer(place_of(device))

    return call
