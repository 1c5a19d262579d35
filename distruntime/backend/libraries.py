"""Libraries that ask which device there is: what they are told while a session is open.

accelerate asks a variable of the environment before it looks for GPUs, and with it transformers' `Trainer`,
trl and diffusers' scripts do. Others take a device by name, or have a registry.
"""

from __future__ import annotations

import os

from ..session.session import Session
from .lightning_accelerator import install_lightning
from .safetensors_files import install_safetensors

_VARIABLE = "ACCELERATE_TORCH_DEVICE"


def install_libraries() -> None:
    """Teach libraries what a place is, from now on or from their import on."""
    install_safetensors()
    install_lightning()


def tell_libraries(session: Session) -> None:
    """Name "remote" as accelerate's device until the session ends, unless the user has named one."""
    if _VARIABLE in os.environ:
        return
    os.environ[_VARIABLE] = "remote"
    session.ending.on_close.append(_untell)


def _untell() -> None:
    os.environ.pop(_VARIABLE, None)
