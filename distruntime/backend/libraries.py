"""Libraries that ask which device there is: what they are told while a session is open.

accelerate asks a variable of the environment before it looks for GPUs, and with it transformers' `Trainer`,
trl and diffusers' scripts do. Others take a device by name, have a registry, or have a function that chooses.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..session.session import Session, active
from ..session.spelling import is_remote
from .lightning_accelerator import install_lightning
from .on_import import Hook, when_imported
from .safetensors_files import install_safetensors

_Function = Callable[..., Any]  # type: ignore[explicit-any]

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
    for module in list(sys.modules.values()):
        for name in [name for name, value in vars(module).items() if value is own]:
            setattr(module, name, ours)


def _lower(module: ModuleType) -> None:
    """Let transformers' `bf16=True` pass where accelerate's device is a place: all places have it."""
    own = module.is_torch_bf16_gpu_available

    def available() -> bool:
        return bool(own()) or (bool(active) and is_remote(os.environ.get(_VARIABLE)))

    module.is_torch_bf16_gpu_available = available  # type: ignore[attr-defined]


HOOKS: dict[str, Hook] = {
    "transformers.training_args": _lower,
    "accelerate.utils.modeling": _offer_memory,
    "fastai.torch_core": _lead_fastai,
    "stable_baselines3.common.utils": _lead_baselines,
}


def tell_libraries(session: Session) -> None:
    """Name "remote" as accelerate's device until the session ends, unless the user has named one."""
    if _VARIABLE in os.environ:
        return
    os.environ[_VARIABLE] = "remote"
    session.ending.on_close.append(_untell)


def _untell() -> None:
    # The user may have named another one meanwhile.
    if os.environ.get(_VARIABLE) == "remote":
        del os.environ[_VARIABLE]
