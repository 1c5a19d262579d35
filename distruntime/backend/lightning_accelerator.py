"""Lightning's `accelerator="remote"`, which "auto" means too where this process has no accelerator.

Lightning asks torch.cuda and its kind which devices there are, and would train on this process's CPU without
a word. Its classes are there once it is imported, so ours are made then.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from ..errors import NotSupportedError, UsageError
from ..session.session import active
from .on_import import when_imported


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


def _choose(module: ModuleType) -> None:
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
        when_imported(f"{root}.connector", _choose)
        when_imported(f"{trainer}.trainer.connectors.accelerator_connector", _choose)
