"""Libraries that ask which device there is: what they are told while a session is open.

accelerate asks a variable of the environment before it looks for GPUs, and with it transformers' `Trainer`,
trl and diffusers' scripts do. Others take a device by name, or have a registry.
"""

from __future__ import annotations

import os
from types import ModuleType

from ..session.session import Session, active
from ..session.spelling import is_remote
from .lightning_accelerator import install_lightning
from .on_import import when_imported
from .safetensors_files import install_safetensors

_VARIABLE = "ACCELERATE_TORCH_DEVICE"


def install_libraries() -> None:
    """Teach libraries what a place is, from now on or from their import on."""
    install_safetensors()
    install_lightning()
    when_imported("transformers.training_args", _lower)


def _lower(module: ModuleType) -> None:
    """Let transformers' `bf16=True` pass where accelerate's device is a place: all places have it."""
    own = module.is_torch_bf16_gpu_available

    def available() -> bool:
        return bool(own()) or (bool(active) and is_remote(os.environ.get(_VARIABLE)))

    module.is_torch_bf16_gpu_available = available  # type: ignore[attr-defined]


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
