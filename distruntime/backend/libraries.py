"""Libraries that ask which device there is: what they are told while a session is open.

accelerate chooses a device for a process, and with it transformers' `Trainer`, trl and diffusers' scripts do.
Where it would choose the CPU, it is told "remote". It has a variable of the environment for that, which a
session does not set: processes that this one starts would inherit it, and have no session. Others take a
device by name, have a registry, or have a function that chooses.

Lightning asks torch.cuda and its kind, and would train on this process's CPU without a word. So it gets
`accelerator="remote"`, which "auto" means too where this process has no accelerator. Its classes are there
once it is imported, so ours are made then.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..errors import NotSupportedError, UsageError, without_our_frames
from ..session.session import active
from ..session.spelling import is_remote
from ..tensors.tensor import DistributedTensor
from .files.safetensors import install_safetensors
from .on_import import Hook, when_imported


def _open() -> bool:
    return bool(active) and active[0].closed is None


def _devices(devices: object) -> int:
    """Return how many devices a user's `devices=` means; one place is what there can be."""
    if devices in (1, "1", "auto", -1, "-1", [0], None):
        return 1
    raise UsageError(
        f'accelerator="remote" trains on one place, and devices={devices!r} asks for others: '
        "write devices=1. dr.set_place(...) chooses the place; for several, use a mesh of DTensors "
        "(docs/meshes.md)"
    )


def _accelerator(base: Any) -> Any:  # type: ignore[explicit-any]
    """Return the class for Lightning's registry, made of its own base class."""

    class RemoteAccelerator(base):  # type: ignore[misc]
        """The current place of a distruntime session."""

        def setup_device(self, device: torch.device) -> None:
            """Require the place: a strategy that we do not know would train on this process's CPU."""
            if device.type != "remote":
                raise NotSupportedError(
                    f'accelerator="remote" does not go with a strategy that trains on {device}: expected '
                    'strategy="auto" or SingleDeviceStrategy(device="remote")'
                )

        def teardown(self) -> None:
            """Do nothing: the session goes on."""

        def get_device_stats(self, device: torch.device) -> dict[str, object]:
            """Return the bytes that are given out at the place. Block until what was issued has run."""
            return {"memory_allocated": torch.get_device_module("remote").memory_allocated(device)}

        @staticmethod
        def parse_devices(devices: object) -> int:
            """Return the number of devices, 1."""
            return _devices(devices)

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            """Return the current place."""
            return [torch.device("remote")]

        @staticmethod
        def auto_device_count() -> int:
            """Return 1."""
            return 1

        @staticmethod
        def is_available() -> bool:
            """Whether there is a session."""
            return _open()

        @staticmethod
        def name() -> str:
            """Return "remote"."""
            return "remote"

    return RemoteAccelerator


def _register(module: ModuleType) -> None:
    """Add the accelerator to a registry, in `lightning.pytorch.accelerators` or a module of its kind."""
    registry = getattr(module, "AcceleratorRegistry", None) or module.ACCELERATOR_REGISTRY
    accelerator = _accelerator(module.Accelerator)
    registry.register("remote", accelerator, description=accelerator.__doc__, override=True)


def _decide(module: ModuleType) -> None:
    """Let "auto" mean the session where it would mean the CPU."""
    connector = getattr(module, "_AcceleratorConnector", None) or module._Connector
    own = connector._choose_auto_accelerator

    def choose() -> str:
        chosen: str = own()
        return "remote" if chosen == "cpu" and _open() else chosen

    connector._choose_auto_accelerator = staticmethod(choose)


def _lower(module: ModuleType) -> None:
    """Let mixed precision be that of "remote": Lightning says "cuda" for all accelerators but two."""
    precision = module.MixedPrecision
    own = precision.__init__

    @functools.wraps(own)
    def init(self: object, precision: str, device: str, *args: object, **kwargs: object) -> None:
        ours = device == "cuda" and _open() and not torch.cuda.is_available()
        own(self, precision, "remote" if ours else device, *args, **kwargs)

    precision.__init__ = init


def _place(module: ModuleType) -> None:
    """Let the strategy for one device have the place as its device, for accelerators it does not know."""
    strategy = module.SingleDeviceStrategy
    own = strategy.root_device

    def root_device(self: Any) -> torch.device:  # type: ignore[explicit-any]
        accelerator = getattr(self, "_accelerator", None)
        if accelerator is not None and type(accelerator).__name__ == "RemoteAccelerator":
            return torch.device("remote")
        device: torch.device = own.fget(self)
        return device

    strategy.root_device = property(root_device)


def install_lightning() -> None:
    """Do all this once Lightning is imported, under each name that it has."""
    names = ("lightning.fabric", "lightning.pytorch"), ("lightning_fabric", "pytorch_lightning")
    for root, trainer in names:
        for name in (root, trainer):
            when_imported(f"{name}.accelerators", _register)
            when_imported(f"{name}.strategies.single_device", _place)
            when_imported(f"{name}.plugins.precision.amp", _lower)
        when_imported(f"{root}.connector", _decide)
        when_imported(f"{trainer}.trainer.connectors.accelerator_connector", _decide)


_Function = Callable[..., Any]  # type: ignore[explicit-any]

# Who sets it has chosen.
_VARIABLE = "ACCELERATE_TORCH_DEVICE"


def install_libraries() -> None:
    """Teach libraries what a place is, from now on or from their import on."""
    install_safetensors()
    install_lightning()
    for module, hook in HOOKS.items():
        when_imported(module, hook)


def _lead_fastai(module: ModuleType) -> None:
    # A user says False here, or in the call, to stay on this process's CPU.
    _lead(module, "default_device", lambda use=-1: module.defaults.use_cuda is None)


def _lead_baselines(module: ModuleType) -> None:
    _lead(module, "get_device", lambda device="auto": device == "auto")


def _lead(module: ModuleType, name: str, left: _Function) -> None:
    """Let a function that chooses a device choose the current place where it finds no GPU here.

    `left` says of a call's arguments whether the choice was left to it. Otherwise it would choose this
    process's CPU, and nothing would tell the user.
    """
    own = getattr(module, name)

    @functools.wraps(own)
    def choose(*args: Any, **kwargs: Any) -> torch.device:  # type: ignore[explicit-any]
        found: torch.device = own(*args, **kwargs)
        if active and found.type == "cpu" and left(*args, **kwargs):
            return torch.device("remote")
        return found

    _replace(own, choose)


def _offer_memory(module: ModuleType) -> None:
    """Let `device_map="auto"` of transformers, diffusers and accelerate fill the current place.

    Without a GPU here it would fill this process's memory, and the model would stay here.
    """
    own, size = module.get_max_memory, module.convert_file_size_to_int

    @functools.wraps(own)
    def get_max_memory(max_memory: dict[int | str, int | str] | None = None) -> dict[int | str, int | str]:
        given = {k: v for k, v in (max_memory or {}).items() if is_remote(k) and isinstance(k, str)}
        # It knows the names of some devices. What it returned is handed to it again.
        theirs = None if max_memory is None else {k: v for k, v in max_memory.items() if k not in given}
        found: dict[int | str, int | str] = own(theirs)
        if active and max_memory is None and set(found) <= {"cpu"}:
            return {"remote": torch.get_device_module("remote").mem_get_info()[0], **found}
        return {**{k: size(v) if isinstance(v, str) else v for k, v in given.items()}, **found}

    _replace(own, get_max_memory)


def _replace(own: _Function, ours: _Function) -> None:
    """Put a function in the place of a library's, also where a module has imported that by some name."""
    # There may be None among them, and other threads may import meanwhile.
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        for name in [name for name, value in list(vars(module).items()) if value is own]:
            setattr(module, name, ours)


def _ours() -> bool:
    """Whether there is a session here, and the user has chosen no device for accelerate."""
    return bool(active) and not active[0].foreign and _VARIABLE not in os.environ


def _choose(module: ModuleType) -> None:
    """Let accelerate's device be the session's where it would be the CPU."""
    state = module.PartialState
    own = state.default_device.fget

    @functools.wraps(own)
    def default_device(self: object) -> torch.device:
        device: torch.device = own(self)
        return torch.device("remote") if device.type == "cpu" and _ours() else device

    state.default_device = property(default_device)


def _train(module: ModuleType) -> None:
    """Let transformers' arguments have the session's device where they would have the CPU, and `bf16=True`.

    All places have bfloat16.
    """
    bf16 = module.is_torch_bf16_gpu_available

    def available() -> bool:
        return bool(bf16()) or _ours() or (bool(active) and is_remote(os.environ.get(_VARIABLE)))

    module.is_torch_bf16_gpu_available = available  # type: ignore[attr-defined]
    arguments = module.TrainingArguments
    own = arguments._setup_devices.func

    @functools.wraps(own)
    def set_up(self: Any) -> torch.device:  # type: ignore[explicit-any]
        device: torch.device = own(self)
        return torch.device("remote") if device.type == "cpu" and not self.use_cpu and _ours() else device

    arguments._setup_devices = type(arguments.__dict__["_setup_devices"])(set_up)
    # A cached property is told its name where a class body has it.
    arguments._setup_devices.__set_name__(arguments, "_setup_devices")


def _launch(module: ModuleType) -> None:
    """Have Triton refuse a proxy by name: it would launch the kernel on a GPU of this process."""
    kernel = module.JITFunction
    own = kernel.run

    @functools.wraps(own)
    @without_our_frames
    def run(self: Any, *args: object, **kwargs: object) -> object:  # type: ignore[explicit-any]
        for operand in (*args, *kwargs.values()):
            if isinstance(operand, DistributedTensor):
                raise NotSupportedError(
                    f"the Triton kernel {getattr(self, '__name__', '?')!r} reads memory of a GPU of this "
                    f"process, and its operand lives on {operand.place}. Let the worker launch it: make it "
                    "an operator (torch.library.custom_op), whose body runs there, and call that operator"
                )
        return own(self, *args, **kwargs)

    kernel.run = run


HOOKS: dict[str, Hook] = {
    "accelerate.state": _choose,
    "transformers.training_args": _train,
    "triton.runtime.jit": _launch,
    "accelerate.utils.modeling": _offer_memory,
    "fastai.torch_core": _lead_fastai,
    "stable_baselines3.common.utils": _lead_baselines,
}
