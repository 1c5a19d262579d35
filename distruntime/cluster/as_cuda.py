"""Take-over: a script that says "cuda" runs on the workers as it is. See `init_master_worker(as_cuda=True)`.

Each of torch's functions that takes a device has a twin here that reads "cuda" as the session's place, and
`torch.cuda`'s own functions answer for it. `x.device` of a remote tensor stays "remote", as code that
launches kernels of its own asks that. What has no meaning on workers either does nothing, and is noted for
`dr.takeover()`, or raises, where an answer would be a lie. The end of the session takes all of it back.

The functions are replaced, not watched by a mode of torch's: a mode costs every call of every function, and
belongs to one thread.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex

import torch
from torch._library.custom_ops import CustomOpDef
from torch.autograd import profiler
from torch.jit import _builtins
from torch.nn.parameter import is_lazy
from torch.utils import _device

from ..backend import no_dynamo, no_memory, safetensors_files, torch_load, torch_save
from ..backend.random import get_rng_state, set_rng_state
from ..errors import ConfigurationError, NotSupportedError, drop_frames, of_caller, without_our_frames
from ..log.handle import Residence, next_ref
from ..mesh import data_parallel
from ..session.session import Session, active_session
from ..session.stalls import get_sync_debug_mode, set_sync_debug_mode, stalls
from ..streams import nvtx
from ..streams.stream import Event, Stream, stream
from ..tensors.parameters import keeping
from ..tensors.tensor import DistributedTensor, saving
from .as_cuda_switches import switches

_Function = Callable[..., Any]  # type: ignore[explicit-any]
_ABSENT = object()
_own_reduce = DistributedTensor.__reduce_ex__

# What was replaced, and what stood there.
_replaced: list[tuple[object, str, object]] = []
# TorchScript takes these for torch's own.
_scripted: list[_Function] = []
# How often each function was called that only pretends.
_pretended: Counter[str] = Counter()
# This ref was the last one when the take-over began.
_first = [0]
# It says whether each GPU of the session is a device. Otherwise there is one, the current place.
_all = [False]


def takeover() -> dict[str, int]:
    """Return how often each function of torch was called that did nothing, by its name.

    Raise `UsageError` outside of a session that was begun with `as_cuda`.
    """
    if not _replaced:
        raise ConfigurationError(
            "no take-over is on: dr.takeover() is for sessions of init_master_worker(as_cuda=True)"
        )
    return dict(_pretended)


def summary() -> str:
    """Return a line that says what the take-over has come to so far; nothing where none is on."""
    if not _replaced:
        return ""
    waits = sum(stall.count for stall in stalls())
    names = ", ".join(f"{name} ({count})" for name, count in sorted(_pretended.items()))
    return (
        f'"cuda" meant the workers: {next_ref() - _first[0] - 1} values were made there, and this process '
        f"waited for them {waits} time{'' if waits == 1 else 's'}. "
        + (f"Only pretended: {names}" if names else "Nothing only pretended")
    )


# -- what "cuda" means ---------------------------------------------------------------------------------------


def _places() -> list[Residence]:
    places = active_session().places
    if not _all[0]:
        return [places.current()]
    found = [places.residence(place) for place in places.own]
    return [home for home in found if home.place.local_device != "cpu"] or found


def _number(index: int) -> torch.device:
    places = _places()
    if not 0 <= index < len(places):
        seen = ", ".join(f"cuda:{k} is {home.place}" for k, home in enumerate(places))
        raise of_caller(
            RuntimeError(
                f"CUDA error: invalid device ordinal: cuda:{index} was asked for, and the take-over shows "
                f"{len(places)} ({seen}). "
                + (
                    "These are all GPUs of the session's workers; dr.nodes() lists them"
                    if _all[0]
                    else 'init_master_worker(as_cuda="all"), or --all, shows every GPU of the session'
                )
            )
        )
    device: torch.device = places[index].device
    return device


def _meant(device: object) -> Any:  # type: ignore[explicit-any]
    """Return the place that "cuda" means; any other device as it is."""
    # Without a number it is the current place, which "remote" means too. To find it here costs a microsecond.
    if isinstance(device, str):
        if device == "cuda":
            return _current() if _all[0] else "remote"
        if not device.startswith("cuda:"):
            return device
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type == "cuda":
        if device.index is None:
            return _current() if _all[0] else torch.device("remote")
        return _number(device.index)
    # To torch, a number is a GPU.
    return _number(device) if type(device) is int else device


def _current() -> torch.device:
    """Return the place that "cuda" without a number means."""
    device: torch.device
    device = _number(_current_device()) if _all[0] else active_session().places.current().device
    return device


def _index(device: object) -> torch.device:
    """Return the place that a function of `torch.cuda` is asked about: an index, "cuda:1", None."""
    if device is None or device == -1:
        return _current()
    if isinstance(device, int):
        return _number(device)
    meant: torch.device = torch.device(_meant(device))
    return meant


def _device_count() -> int:
    return len(_places())


def _current_device() -> int:
    current = active_session().places.current()
    places = _places()
    return places.index(current) if current in places else 0


# -- torch's functions that take a device --------------------------------------------------------------------

_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided")


def _replace(owner: object, name: str, new: object) -> None:
    old = owner.__dict__.get(name, _ABSENT) if isinstance(owner, type) else getattr(owner, name, _ABSENT)
    _replaced.append((owner, name, old))
    setattr(owner, name, new)


def _by_keyword(own: _Function) -> _Function:
    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:  # type: ignore[explicit-any]
        # Most calls of local code name nothing.
        if not kwargs:
            return own(*args)
        try:
            device = kwargs.get("device")
            if device is not None:
                kwargs["device"] = _meant(device)
            if kwargs.get("pin_memory"):
                _note("pin_memory")
                kwargs["pin_memory"] = False
            return own(*args, **kwargs)
        except BaseException as error:
            drop_frames(error)
            raise

    # TorchScript knows torch's functions by their ids, so this one keeps its id for good.
    builtin = _builtins._find_builtin(own)
    if builtin is not None:
        _builtins._register_builtin(call, builtin)
        _scripted.append(call)
    return call


def _by_position(own: _Function, at: int) -> _Function:
    """Read the device of a method or an initializer, whose `at`-th argument it is, also by name."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:  # type: ignore[explicit-any]
        try:
            if len(args) > at:
                device = args[at]
                meant = _meant(device)
                if meant is not device:
                    args = (*args[:at], meant, *args[at + 1 :])
            if kwargs:
                for name in ("device", "device_type", "map_location"):
                    if name in kwargs:
                        kwargs[name] = _meant(kwargs[name])
            return own(*args, **kwargs)
        except BaseException as error:
            drop_frames(error)
            raise

    return call


def _as_type(own: _Function, at: int) -> _Function:
    """As `_by_position`, for what takes the type of a device alone: autocast and scalers."""
    placed = _by_position(own, at)

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:  # type: ignore[explicit-any]
        args = tuple(
            "remote" if k == at and isinstance(a, str) and a.partition(":")[0] == "cuda" else a
            for k, a in enumerate(args)
        )
        kwargs = {
            name: "remote" if name in ("device", "device_type") and str(value).startswith("cuda") else value
            for name, value in kwargs.items()
        }
        return placed(*args, **kwargs)

    return call


def _autocast(own: _Function) -> _Function:
    placed = _as_type(own, 1)

    @functools.wraps(own)
    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        # torch would say "remote", which the script does not know.
        lower = torch.get_device_module("remote").get_amp_supported_dtype()
        meant = torch.get_autocast_dtype("remote") if dtype is None else dtype
        if enabled and str(device_type).partition(":")[0] == "cuda" and meant not in lower:
            warnings.warn(
                "In CUDA autocast, but the target dtype is not supported. Disabling autocast.\n"
                f"CUDA Autocast only supports dtypes of {', '.join(map(str, lower))} currently.",
                stacklevel=2,
            )
            enabled = False
        placed(self, device_type, dtype, enabled, cache_enabled)

    return init


@without_our_frames
def _cuda(
    self: torch.Tensor, device: object = None, non_blocking: bool = False, **options: torch.memory_format
) -> torch.Tensor:
    return self.to(_index(device), non_blocking=non_blocking, **options)  # type: ignore[call-overload, no-any-return]


@without_our_frames
def _module_cuda(self: torch.nn.Module, device: object = None) -> torch.nn.Module:
    return self.to(_index(device))


# torch's own descriptor, and that of remote tensors.
_data: Any = torch.Tensor.data  # type: ignore[explicit-any]
_remote_data: Any = DistributedTensor.data  # type: ignore[explicit-any]


@without_our_frames
def _get_data(self: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (_remote_data if isinstance(self, DistributedTensor) else _data).__get__(self)
    return found


@without_our_frames
def _set_data(self: torch.nn.Parameter, other: torch.Tensor) -> None:
    """Let a local parameter become a remote one, as CUDA's parameters do: `layer.weight.data = there`."""
    if isinstance(self, DistributedTensor) or not isinstance(other, DistributedTensor):
        (_remote_data if isinstance(self, DistributedTensor) else _data).__set__(self, other)
        return
    with keeping([self]):
        torch.utils.swap_tensors(self, torch.nn.Parameter(other.data, self.requires_grad))


# -- the old names of types ----------------------------------------------------------------------------------

_TYPES = (
    *("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "ByteTensor", "CharTensor"),
    *("ShortTensor", "IntTensor", "LongTensor", "BoolTensor"),
)


class _Type(type):
    """The kind of `torch.cuda.FloatTensor` and the like, with which old scripts make tensors."""

    dtype: torch.dtype

    @without_our_frames
    def __call__(cls, *args: Any) -> torch.Tensor:  # type: ignore[explicit-any]
        place = _current()
        if all(isinstance(size, int) for size in args):
            return torch.empty(args or (0,), dtype=cls.dtype, device=place)
        if isinstance(args[0], DistributedTensor):
            return args[0].to(place, dtype=cls.dtype)
        local: torch.Tensor = getattr(torch, cls.__name__)(*args)
        return local.to(place)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, DistributedTensor) and instance.dtype is cls.dtype


def _type_named(name: str) -> _Type:
    made = _Type(name, (), {"__module__": "torch.cuda"})
    made.dtype = getattr(torch, name).dtype
    return made


def _dtype_there(kind: object) -> torch.dtype | None:
    """Return the dtype of a type of tensors on "cuda", by its class or its name; None for any other."""
    if isinstance(kind, str) and kind.startswith(("torch.cuda.", "torch.remote.")):
        local = getattr(torch, kind.rpartition(".")[2], None)
        dtype: torch.dtype | None = getattr(local, "dtype", None)
        return dtype
    return kind.dtype if isinstance(kind, _Type) else None


def _typed(own: _Function) -> _Function:
    @functools.wraps(own)
    @without_our_frames
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[explicit-any]
        dtype = _dtype_there(args[0] if args else kwargs.get("dtype"))
        if dtype is None:
            return own(self, *args, **kwargs)
        return self.to(self.device if isinstance(self, DistributedTensor) else _index(None), dtype=dtype)

    return call


def _default_type(own: _Function) -> _Function:
    there = [False]

    @functools.wraps(own)
    def call(kind: object, /) -> None:
        dtype = _dtype_there(kind)
        if dtype is not None:
            torch.set_default_dtype(dtype)
            torch.set_default_device("cuda")
        else:
            own(kind)
            if there[0]:
                torch.set_default_device(None)
        there[0] = dtype is not None

    return call


# -- files ---------------------------------------------------------------------------------------------------


@without_our_frames
def _storage_cuda(self: torch.UntypedStorage, device: object = None, non_blocking: bool = False) -> object:
    # A function that is given to `torch.load` says so where a storage goes.
    found = torch_load.restore(self, _index(device))
    if found is None:
        raise _refusal("storage.cuda()", "send the tensor, x.cuda(); torch.load takes functions that call it")
    return found


def _tag(storage: torch.UntypedStorage) -> str | None:
    """Return what a file says of where a remote tensor was: what a GPU's file says."""
    home = torch_save.home_of(storage)
    places = _places() if home is not None else []
    return f"cuda:{places.index(home)}" if home in places else None


def _restored(storage: torch.UntypedStorage, location: str) -> object:
    """Send what a file, or a dict of places, says of "cuda"."""
    if not location.startswith("cuda"):
        return None
    index, count = torch.device(location).index or 0, _device_count()
    if index >= count:
        raise RuntimeError(
            f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is "
            f"{count}. Please use torch.load with map_location to map your storages to an existing device."
        )
    return torch_load.restore(storage, _meant(location))


@without_our_frames
def _reduce(self: DistributedTensor, protocol: SupportsIndex) -> str | tuple[object, ...]:
    """Pickle the values, as those of a GPU are. Block until they are here."""
    if is_lazy(self) or saving.get() is not None:
        return _own_reduce(self, protocol)
    file = io.BytesIO()
    torch.save(self, file)
    return torch.storage._load_from_bytes, (file.getvalue(),)


# -- what is left of this process's CUDA ---------------------------------------------------------------------


def _without_cuda(own: _Function) -> _Function:
    """Profile the CPU alone: this process has no CUDA to profile, and torch would warn at each operator."""

    @functools.wraps(own)
    def init(self: object, *args: Any, use_device: object = None, **kwargs: Any) -> None:  # type: ignore[explicit-any]
        if use_device == "cuda":
            _note("ProfilerActivity.CUDA")
            use_device = None
        own(self, *args, use_device=use_device, **kwargs)

    return init


def _without_autocast(own: _Function) -> _Function:
    @functools.wraps(own)
    def register(self: CustomOpDef, device_type: str, cast_inputs: torch.dtype) -> object:
        if device_type == "cuda":
            _note("torch.library.register_autocast")
        return own(self, device_type, cast_inputs)

    return register


@without_our_frames
def _in_one(  # type: ignore[explicit-any]
    module: torch.nn.Module,
    inputs: object,
    device_ids: object = None,
    output_device: object = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> object:
    """Stand for the function `torch.nn.parallel.data_parallel`, as the class `nn.DataParallel` does."""
    made = torch.nn.DataParallel(module, device_ids, output_device, dim)  # type: ignore[arg-type]
    return made(*(inputs if isinstance(inputs, tuple) else (inputs,)), **(module_kwargs or {}))


def _replace_functions() -> None:
    # torch keeps the result, and it must have torch's own functions in it.
    _device._device_constructors()
    factories: list[_Function] = [f for f in _device._device_constructors() if f is not None]
    for function in factories:
        if getattr(torch, function.__name__, None) is function:
            _replace(torch, function.__name__, _by_keyword(function))
    for name in (*_LIKE, "from_file", "empty_permuted"):
        if getattr(torch, name, None) is not None and not hasattr(getattr(torch, name), "__wrapped__"):
            _replace(torch, name, _by_keyword(getattr(torch, name)))
    for name in _NEW:
        _replace(torch.Tensor, name, _by_keyword(getattr(torch.Tensor, name)))
    for kind in (torch.Tensor, DistributedTensor):
        _replace(kind, "to", _by_position(kind.to, 1))
        _replace(kind, "cuda", _cuda)
        _replace(kind, "type", _typed(kind.type))
    _replace(torch, "set_default_tensor_type", _default_type(torch.set_default_tensor_type))
    _replace(no_memory, "has_gpu", lambda: False)
    _replace(no_memory, "ignored", _note)
    _replace(no_dynamo, "ignored", _note)
    _replace(CustomOpDef, "register_autocast", _without_autocast(CustomOpDef.register_autocast))
    for owner, name, new in switches(_note):
        _replace(owner, name, new)
    _replace(torch.nn.Parameter, "data", property(_get_data, _set_data))
    _replace(torch.nn.Module, "to", _by_position(torch.nn.Module.to, 1))
    _replace(torch.nn.Module, "cuda", _module_cuda)
    _replace(_device.DeviceContext, "__init__", _by_position(_device.DeviceContext.__init__, 1))
    _replace(torch, "load", _by_position(torch.load, 1))
    _replace(torch.UntypedStorage, "cuda", _storage_cuda)
    _replace(torch.UntypedStorage, "to", _by_position(torch.UntypedStorage.to, 1))
    registry = torch.serialization._package_registry
    _replace(torch.serialization, "_package_registry", [(0, _tag, _restored), *registry])
    _replace(DistributedTensor, "__reduce_ex__", _reduce)
    for name in ("nested_tensor", "as_nested_tensor"):
        _replace(torch.nested, name, _by_keyword(getattr(torch.nested, name)))
    # With a type, nn.DataParallel would look for the module's parameters on "cuda:0". Without one it calls
    # the module itself, which `mesh/data_parallel.py` refuses where there are several devices.
    _replace(sys.modules["torch.nn.parallel.data_parallel"], "_get_available_device_type", lambda: None)
    _replace(torch.nn.parallel, "data_parallel", _in_one)
    _replace(data_parallel, "shown", lambda: [home.place for home in _places()])
    _replace(profiler.profile, "__init__", _without_cuda(profiler.profile.__init__))
    _replace(safetensors_files, "meant", _meant)
    _replace(torch.autocast, "__init__", _autocast(torch.autocast.__init__))
    # These compare a device's type with that of the arguments.
    for name in ("custom_fwd", "custom_bwd"):
        _replace(torch.amp, name, _as_type(getattr(torch.amp, name), 1))
    _replace(torch.amp.GradScaler, "__init__", _as_type(torch.amp.GradScaler.__init__, 1))
    for name in ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype"):
        _replace(torch, name, _as_type(getattr(torch, name), 0))
    _replace(torch, "get_device_module", _as_type(torch.get_device_module, 0))
    generator = type(torch.Generator)
    _replace(generator, "__call__", _by_position(generator.__call__, 1))


# -- torch.cuda ----------------------------------------------------------------------------------------------


def _note(name: str) -> None:
    _pretended[name] += 1


def _pretending(name: str, value: object = None) -> _Function:
    def call(*args: object, **kwargs: object) -> object:
        _note(name)
        return value

    return call


def _refusal(name: str, instead: str) -> NotSupportedError:
    return NotSupportedError(
        f"{name} is about a GPU of this process, and the workers own the GPUs: {instead}"
    )


def _refusing(name: str, instead: str) -> _Function:
    @without_our_frames
    def call(*args: object, **kwargs: object) -> NoReturn:
        raise _refusal(name, instead)

    return call


def _no_class(name: str, instead: str) -> type:
    """Return what stands for a class of `torch.cuda` that cannot be made; annotations go on naming it."""
    return type(name, (), {"__new__": _refusing(f"torch.cuda.{name}", instead), "__module__": "torch.cuda"})


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
            else torch.get_device_module("remote").device(_index(self._asked))
        )
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)


class _DeviceOf(_Device):
    """Stands for `torch.cuda.device_of`: a local tensor changes nothing."""

    def __init__(self, tensor: object) -> None:
        super().__init__(tensor.device if isinstance(tensor, DistributedTensor) else None)


def _rng_state(device: object = "cuda") -> torch.Tensor:
    home = active_session().places.meant(_index(None if device == "cuda" else device))
    return get_rng_state(home).cpu()


def _set_rng_state(state: torch.Tensor, device: object = "cuda") -> None:
    set_rng_state(state, active_session().places.meant(_index(None if device == "cuda" else device)))


def _set_rng_states(states: list[torch.Tensor]) -> None:
    for k, state in enumerate(states):
        _set_rng_state(state, k)


def _place_stream(own: _Function) -> _Function:
    def call(device: object = None) -> Stream:
        found: Stream = own(_index(device))
        return found

    return call


class _StreamKind(type):
    """The kind of what stands for `torch.cuda.Stream`: its arguments are those of CUDA's."""

    @without_our_frames
    def __call__(cls, device: object = None, priority: int = 0, **ids: int) -> Stream:
        return Stream(active_session().places.meant(_index(device)).place, priority=priority)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Stream)


class _CudaStream(metaclass=_StreamKind):
    """Stands for `torch.cuda.Stream`. It is a class, as annotations name it and torch asks `isinstance`."""


def _device_memory_used(device: object = None) -> int:
    free, total = torch.cuda.mem_get_info(device)  # type: ignore[arg-type]
    return total - free


def _memory_stats(device: object = None) -> dict[str, int]:
    return dict(torch.accelerator.memory_stats(_index(device)))


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
        raise _refusal(
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
_SNAPSHOT = 'dr.memory_snapshot("x.pickle", node=0) writes one of a worker, in this format'
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
    torch.get_device_module("remote").set_device(_index(device))


def _answer(name: str, new: object) -> None:
    """Replace a function of `torch.cuda`, also in the module there that it comes from."""
    own = getattr(torch.cuda, name, _ABSENT)
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
        if getattr(module, name, _ABSENT) is own:
            _replace(module, name, new)


def _replace_cuda() -> None:
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
    answers: dict[str, object] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": _device_count,
        "current_device": _current_device,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "set_device": _set_device,
        "device": _Device,
        "device_of": _DeviceOf,
        "empty_cache": module.empty_cache,
        "manual_seed": module.manual_seed,
        "manual_seed_all": module.manual_seed_all,
        "seed": lambda: module.manual_seed(torch.seed()),
        "seed_all": lambda: module.manual_seed(torch.seed()),
        "initial_seed": torch.initial_seed,
        "get_rng_state": _rng_state,
        "set_rng_state": _set_rng_state,
        "get_rng_state_all": lambda: [_rng_state(k) for k in range(_device_count())],
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
    for name, answer in answers.items():
        _answer(name, answer)
    for name in _IDLE:
        if hasattr(cuda, name):
            _answer(name, _pretending(f"torch.cuda.{name}"))
    for name in ("range_push", "range_pop", "mark"):
        _replace(cuda.nvtx, name, getattr(nvtx, name))
    # A range that another thread may end belongs to no stream.
    for name in ("range_start", "range_end"):
        _replace(cuda.nvtx, name, _pretending(f"torch.cuda.nvtx.{name}"))
    for name in ("start", "stop"):
        _replace(cuda.profiler, name, _pretending(f"torch.cuda.profiler.{name}"))
    for name in ("enable", "tuning_enable"):
        _replace(cuda.tunable, name, _pretending(f"torch.cuda.tunable.{name}"))
    _replace(cuda.memory, "_record_memory_history", _pretending("torch.cuda.memory._record_memory_history"))
    for name in ("_dump_snapshot", "_snapshot"):
        _replace(cuda.memory, name, _refusing(f"torch.cuda.memory.{name}", _SNAPSHOT))
    for name, instead in _REFUSED.items():
        if hasattr(cuda, name):
            _answer(name, _refusing(f"torch.cuda.{name}", instead))
    for name, instead in _NO_CLASSES.items():
        if hasattr(cuda, name):
            _answer(name, _no_class(name, instead))
    for name in _TYPES:
        _replace(cuda, name, _type_named(name))
    # Libraries that launch kernels import the first, and ask a stream for the second.
    _replace(torch._C, "_cuda_getCurrentRawStream", _refusing("torch._C._cuda_getCurrentRawStream", _KERNELS))
    _replace(Stream, "cuda_stream", property(_refusing("stream.cuda_stream", _KERNELS)))
    for owner in (torch.accelerator, type(module)):
        _replace(owner, "is_available", lambda *args: True)
    _replace(torch.accelerator, "device_count", _device_count)


def _asked(answer: _Function) -> _Function:
    @functools.wraps(answer)
    @without_our_frames
    def call(device: object = None) -> object:
        return answer(_index(device))

    return call


# -- on and off ----------------------------------------------------------------------------------------------


def require_free(as_cuda: bool | str) -> None:
    """Raise `ConfigurationError` if this process has GPUs, and nothing forces the take-over."""
    if as_cuda not in (True, "all", "force"):
        raise ConfigurationError(f'as_cuda= is True, "all" or "force", got {as_cuda!r}')
    if torch.cuda.is_available() and as_cuda != "force":
        raise ConfigurationError(
            f'as_cuda: this process has {torch.cuda.device_count()} GPUs of its own, and "cuda" can mean one '
            'thing only. Hide them (CUDA_VISIBLE_DEVICES=""), or write as_cuda="force": then nothing here '
            "reaches them until the session ends"
        )


def take_over(session: Session, as_cuda: bool | str) -> str:
    """Let "cuda" mean the session until it ends; return a line that says so."""
    _all[0] = as_cuda == "all"
    _pretended.clear()
    _first[0] = next_ref()
    session.ending.on_close.append(give_back)
    _replace_functions()
    _replace_cuda()
    seen = ", ".join(f"cuda:{k} is {home.place}" for k, home in enumerate(_places()))
    return (
        f'"cuda" means the workers ({seen}), and torch.cuda answers for them. '
        "dr.takeover() lists what only pretended"
    )


def give_back() -> None:
    """Put all that was replaced back."""
    while _replaced:
        owner, name, old = _replaced.pop()
        if old is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, old)
