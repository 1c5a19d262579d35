"""torch's functions that take a device, with what reads "cuda" in their place; `torch.cuda.FloatTensor`."""

from __future__ import annotations

import functools
import io
import sys
import warnings
from typing import Any, SupportsIndex

import torch
from torch._library.custom_ops import CustomOpDef
from torch.autograd import profiler
from torch.jit import _builtins
from torch.nn.parameter import is_lazy
from torch.utils import _device

from ...backend import no_memory
from ...backend.files import safetensors, torch_load, torch_save
from ...errors import drop_frames, without_our_frames
from ...mesh import data_parallel
from ...tensors.parameters import keeping
from ...tensors.tensor import DistributedTensor, saving
from .places import current_place, device_count, meaning, place_of, shown_places
from .replaced import Function, note, refusal, replace
from .switches import switches

TYPES = (
    *("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "ByteTensor", "CharTensor"),
    *("ShortTensor", "IntTensor", "LongTensor", "BoolTensor"),
)


class _Type(type):
    """The kind of `torch.cuda.FloatTensor` and the like, with which old scripts make tensors."""

    dtype: torch.dtype

    @without_our_frames
    def __call__(cls, *args: Any) -> torch.Tensor:  # type: ignore[explicit-any]
        place = current_place()
        if all(isinstance(size, int) for size in args):
            return torch.empty(args or (0,), dtype=cls.dtype, device=place)
        if isinstance(args[0], DistributedTensor):
            return args[0].to(place, dtype=cls.dtype)
        local: torch.Tensor = getattr(torch, cls.__name__)(*args)
        return local.to(place)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, DistributedTensor) and instance.dtype is cls.dtype


def type_named(name: str) -> _Type:
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


def typed(own: Function) -> Function:
    @functools.wraps(own)
    @without_our_frames
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[explicit-any]
        dtype = _dtype_there(args[0] if args else kwargs.get("dtype"))
        if dtype is None:
            return own(self, *args, **kwargs)
        return self.to(self.device if isinstance(self, DistributedTensor) else place_of(None), dtype=dtype)

    return call


def default_type(own: Function) -> Function:
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


_own_reduce = DistributedTensor.__reduce_ex__

# TorchScript takes these for torch's own.
_scripted: list[Function] = []

_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided")


def _by_keyword(own: Function) -> Function:
    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:  # type: ignore[explicit-any]
        # Most calls of local code name nothing.
        if not kwargs:
            return own(*args)
        try:
            device = kwargs.get("device")
            if device is not None:
                kwargs["device"] = meaning(device)
            if kwargs.get("pin_memory"):
                note("pin_memory")
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


def _by_position(own: Function, at: int) -> Function:
    """Read the device of a method or an initializer, whose `at`-th argument it is, also by name."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:  # type: ignore[explicit-any]
        try:
            if len(args) > at:
                device = args[at]
                meant = meaning(device)
                if meant is not device:
                    args = (*args[:at], meant, *args[at + 1 :])
            if kwargs:
                for name in ("device", "device_type", "map_location"):
                    if name in kwargs:
                        kwargs[name] = meaning(kwargs[name])
            return own(*args, **kwargs)
        except BaseException as error:
            drop_frames(error)
            raise

    return call


def _as_type(own: Function, at: int) -> Function:
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


def _of_cuda(own: Function) -> Function:
    """As `_as_type`, for what is about "cuda" where no type is given: `torch.is_autocast_enabled()`."""
    typed = _as_type(own, 0)

    @functools.wraps(own)
    def call(*args: Any) -> Any:  # type: ignore[explicit-any]
        named = bool(args) and isinstance(args[0], str)
        return typed(*(args if named else ("cuda", *args)))

    return call


def _autocast(own: Function) -> Function:
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
    return self.to(place_of(device), non_blocking=non_blocking, **options)  # type: ignore[call-overload, no-any-return]


@without_our_frames
def _module_cuda(self: torch.nn.Module, device: object = None) -> torch.nn.Module:
    return self.to(place_of(device))


_own_get_device = DistributedTensor.get_device


def _get_device(self: DistributedTensor) -> int:
    """Return the number by which the script knows the tensor's GPU."""
    shown, home = shown_places(), self._handle.place
    return shown.index(home) if home in shown else _own_get_device(self)


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


@without_our_frames
def _storage_cuda(self: torch.UntypedStorage, device: object = None, non_blocking: bool = False) -> object:
    # A function that is given to `torch.load` says so where a storage goes.
    found = torch_load.restore(self, place_of(device))
    if found is None:
        raise refusal("storage.cuda()", "send the tensor, x.cuda(); torch.load takes functions that call it")
    return found


def _tag(storage: torch.UntypedStorage) -> str | None:
    """Return what a file says of where a remote tensor was: what a GPU's file says."""
    home = torch_save.home_of(storage)
    places = shown_places() if home is not None else []
    return f"cuda:{places.index(home)}" if home in places else None


def _restored(storage: torch.UntypedStorage, location: str) -> object:
    """Send what a file, or a dict of places, says of "cuda"."""
    if not location.startswith("cuda"):
        return None
    index, count = torch.device(location).index or 0, device_count()
    if index >= count:
        raise RuntimeError(
            f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is "
            f"{count}. Please use torch.load with map_location to map your storages to an existing device."
        )
    return torch_load.restore(storage, meaning(location))


@without_our_frames
def _reduce(self: DistributedTensor, protocol: SupportsIndex) -> str | tuple[object, ...]:
    """Pickle the values, as those of a GPU are. Block until they are here."""
    if is_lazy(self) or saving.get() is not None:
        return _own_reduce(self, protocol)
    file = io.BytesIO()
    torch.save(self, file)
    return torch.storage._load_from_bytes, (file.getvalue(),)


def _without_cuda(own: Function) -> Function:
    """Profile the CPU alone: this process has no CUDA to profile, and torch would warn at each operator."""

    @functools.wraps(own)
    def init(self: object, *args: Any, use_device: object = None, **kwargs: Any) -> None:  # type: ignore[explicit-any]
        if use_device == "cuda":
            note("ProfilerActivity.CUDA")
            use_device = None
        own(self, *args, use_device=use_device, **kwargs)

    return init


def _without_autocast(own: Function) -> Function:
    @functools.wraps(own)
    def register(self: CustomOpDef, device_type: str, cast_inputs: torch.dtype) -> object:
        if device_type == "cuda":
            note("torch.library.register_autocast")
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


def replace_functions() -> None:
    # torch keeps the result, and it must have torch's own functions in it.
    _device._device_constructors()
    factories: list[Function] = [f for f in _device._device_constructors() if f is not None]
    for function in factories:
        if getattr(torch, function.__name__, None) is function:
            replace(torch, function.__name__, _by_keyword(function))
    for name in (*_LIKE, "from_file", "empty_permuted"):
        if getattr(torch, name, None) is not None and not hasattr(getattr(torch, name), "__wrapped__"):
            replace(torch, name, _by_keyword(getattr(torch, name)))
    # torch's own list of factories has these under names of their C++ functions, or not at all.
    for module, name in ((torch, "normal"), (torch.fft, "fftfreq"), (torch.fft, "rfftfreq")):
        replace(module, name, _by_keyword(getattr(module, name)))
    for name in _NEW:
        replace(torch.Tensor, name, _by_keyword(getattr(torch.Tensor, name)))
    for kind in (torch.Tensor, DistributedTensor):
        replace(kind, "to", _by_position(kind.to, 1))
        replace(kind, "cuda", _cuda)
        replace(kind, "type", typed(kind.type))
    replace(DistributedTensor, "get_device", _get_device)
    replace(torch, "set_default_tensor_type", default_type(torch.set_default_tensor_type))
    replace(no_memory, "has_gpu", lambda: False)
    replace(no_memory, "ignored", note)
    replace(CustomOpDef, "register_autocast", _without_autocast(CustomOpDef.register_autocast))
    for owner, name, new in switches(note):
        replace(owner, name, new)
    replace(torch.nn.Parameter, "data", property(_get_data, _set_data))
    replace(torch.nn.Module, "to", _by_position(torch.nn.Module.to, 1))
    replace(torch.nn.Module, "cuda", _module_cuda)
    replace(_device.DeviceContext, "__init__", _by_position(_device.DeviceContext.__init__, 1))
    replace(torch, "load", _by_position(torch.load, 1))
    replace(torch.UntypedStorage, "cuda", _storage_cuda)
    replace(torch.UntypedStorage, "to", _by_position(torch.UntypedStorage.to, 1))
    registry = torch.serialization._package_registry
    replace(torch.serialization, "_package_registry", [(0, _tag, _restored), *registry])
    replace(DistributedTensor, "__reduce_ex__", _reduce)
    for name in ("nested_tensor", "as_nested_tensor"):
        replace(torch.nested, name, _by_keyword(getattr(torch.nested, name)))
    # With a type, nn.DataParallel would look for the module's parameters on "cuda:0". Without one it calls
    # the module itself, which `mesh/data_parallel.py` refuses where there are several devices.
    replace(sys.modules["torch.nn.parallel.data_parallel"], "_get_available_device_type", lambda: None)
    replace(torch.nn.parallel, "data_parallel", _in_one)
    replace(data_parallel, "shown", lambda: [home.place for home in shown_places()])
    replace(profiler.profile, "__init__", _without_cuda(profiler.profile.__init__))
    replace(safetensors, "meant", meaning)
    replace(torch.autocast, "__init__", _autocast(torch.autocast.__init__))
    # These compare a device's type with that of the arguments.
    for name in ("custom_fwd", "custom_bwd"):
        replace(torch.amp, name, _as_type(getattr(torch.amp, name), 1))
    replace(torch.amp.GradScaler, "__init__", _as_type(torch.amp.GradScaler.__init__, 1))
    for name in ("get_autocast_dtype", "set_autocast_dtype"):
        replace(torch, name, _as_type(getattr(torch, name), 0))
        replace(torch, name.replace("_dtype", "_gpu_dtype"), _of_cuda(getattr(torch, name)))
    for name in ("is_autocast_enabled", "set_autocast_enabled"):
        replace(torch, name, _of_cuda(getattr(torch, name)))
    replace(torch, "get_device_module", _as_type(torch.get_device_module, 0))
    generator = type(torch.Generator)
    replace(generator, "__call__", _by_position(generator.__call__, 1))
