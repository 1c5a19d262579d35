"""Libraries that ask which device there is: what they are told while a session is open.

accelerate chooses a device for a process, and with it transformers' `Trainer`, trl and diffusers' scripts do.
Where it would choose the CPU, it is told "remote". It has a variable of the environment for that, which a
session does not set: processes that this one starts would inherit it, and have no session. Other libraries
take a device by name, or have a registry.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import torch

from ..errors import NotSupportedError, without_our_frames
from ..session.session import active
from ..session.spelling import is_remote
from ..tensors.tensor import DistributedTensor
from .lightning_accelerator import install_lightning
from .on_import import when_imported
from .safetensors_files import install_safetensors

# Who sets it has chosen.
_VARIABLE = "ACCELERATE_TORCH_DEVICE"


def install_libraries() -> None:
    """Teach libraries what a place is, from now on or from their import on."""
    install_safetensors()
    install_lightning()
    when_imported("accelerate.state", _choose)
    when_imported("transformers.training_args", _train)
    when_imported("triton.runtime.jit", _launch)


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
                    "an operator (torch.library.custom_op) in a package that is installed there, and call "
                    "that operator"
                )
        return own(self, *args, **kwargs)

    kernel.run = run
