"""`torch.simulated`: the simulated accelerator, as `torch.cuda` is for CUDA's.

SIMULATED_DEVICES             so many devices has the machine: 2
SIMULATED_VISIBLE_DEVICES     these of them does this process see, as CUDA_VISIBLE_DEVICES says it
SIMULATED_MEMORY              so many bytes has each: 1 GiB
SIMULATED_DELAY_US            each kernel takes at least so many microseconds: 0
SIMULATED_SCRIBBLE            1: memory that is free has no use any more, so it is filled with 0x7f
SIMULATED_LAUNCH_BLOCKING     1: each launch waits for its kernel
"""

from __future__ import annotations

import uuid
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

_Device = torch.device | str | int | None


class Properties(NamedTuple):
    name: str
    total_memory: int
    uuid: uuid.UUID
    major: int = 1
    minor: int = 0
    multi_processor_count: int = 1


def set_delay(microseconds: int) -> None:
    """Let each kernel take at least so long from now on."""
    torch.ops.simulated.set_delay(microseconds)


def _index(device: _Device) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


# -- devices ----------------------------------------------------------------------------------------


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return any(torch.ops.simulated.in_use(k) for k in range(device_count()))


def _is_in_bad_fork() -> bool:
    return bool(torch.ops.simulated.in_bad_fork())


def device_count() -> int:
    return int(torch.ops.simulated.device_count())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(_index(device))


class device(torch.accelerator.device_index):
    """A context manager in which `device` is the current one."""

    def __init__(self, device: _Device) -> None:
        super().__init__(_index(device))


def get_device_properties(device: _Device = None) -> Properties:
    number = torch.ops.simulated.number_on_machine(_index(device))
    # Every process of the machine finds the device under this number, whatever it calls it itself.
    own = uuid.uuid5(uuid.UUID(int=uuid.getnode()), f"simulated {number}")
    return Properties("Simulated accelerator", torch.ops.simulated.memory(), own)


def get_device_name(device: _Device = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: _Device = None) -> tuple[int, int]:
    found = get_device_properties(device)
    return found.major, found.minor


# -- streams and memory: what `torch.accelerator` has, under the names that `torch.cuda` has --------


def synchronize(device: _Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: _Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def memory_reserved(device: _Device = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


# -- random numbers ---------------------------------------------------------------------------------


def _generator(device: _Device) -> torch.Generator:
    found = torch.ops.simulated.default_generator(_index(device))
    assert isinstance(found, torch.Generator)
    return found


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for k in range(device_count()):
        _generator(k).manual_seed(seed)


def initial_seed() -> int:
    return _generator(None).initial_seed()


def get_rng_state(device: _Device = "simulated") -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = "simulated") -> None:
    _generator(device).set_state(new_state)


# -- autocast ---------------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def autoload() -> None:
    """torch calls this at the end of `import torch`."""
    import importlib
    import sys

    from torch.utils import backend_registration

    backend_registration.rename_privateuse1_backend("simulated")
    torch.ops.load_library(str(Path(__file__).parent / "libsimulated.so"))
    module: ModuleType = sys.modules[__name__]
    torch._register_device_module("simulated", module)
    backend_registration.generate_methods_for_privateuse1_backend()
    # Some meta kernels are Python, and they import this when they first run. Here they run on each stream's
    # thread, and two threads that begin to import it at once end in a circular import.
    importlib.import_module("torch._dynamo")
