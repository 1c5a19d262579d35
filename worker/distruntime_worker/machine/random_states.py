"""The random states of the accelerators of this machine, and of its CPU where a library sets them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from .accelerator import MPS, module

# The random state of these kinds has so many bytes: a seed and an offset.
_STATE_BYTES = {"cuda": 16, "xpu": 16}
# torch's compiler sets the states of these.
_SET: tuple[ModuleType, ...] = (torch.random, torch.cuda, torch.xpu)
_SetState = Callable[..., None]  # type: ignore[explicit-any]


def manual_seed(device: torch.device, seed: int) -> None:
    """Seed the generator of a device."""
    with torch.accelerator.device_index(device.index):
        module(device).manual_seed(seed)


def rng_state(device: torch.device) -> torch.Tensor:
    """Return a snapshot of a device's random state, a byte tensor on the CPU."""
    found: torch.Tensor = module(device).get_rng_state(*_which(device))
    return found


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set a device's random state."""
    module(device).set_rng_state(state.cpu(), *_which(device))


def rng_state_bytes(device: torch.device) -> int:
    """Return how many bytes a device's random state has; 0 if only the device itself can tell."""
    return _STATE_BYTES.get(device.type, 0)


def new_rng_state(device: torch.device) -> torch.Tensor:
    """Return a random state of a device that nobody has drawn from."""
    generator = torch.Generator(device)
    generator.seed()
    return generator.get_state()


def _which(device: torch.device) -> list[torch.device]:
    # `torch.mps` has one device and takes none by name.
    return [] if device.type == MPS else [device]


@contextmanager
def states_left() -> Iterator[None]:
    """Let no state be set by this thread in torch's own Python. One thread at a time may be in here."""
    mine, own = threading.get_ident(), [(owner, owner.set_rng_state) for owner in _SET]

    def unless_mine(set_state: _SetState) -> _SetState:
        def set_rng_state(*args: object, **kwargs: object) -> None:
            if threading.get_ident() != mine:
                set_state(*args, **kwargs)

        return set_rng_state

    for owner, set_state in own:
        owner.set_rng_state = unless_mine(set_state)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for owner, set_state in own:
            owner.set_rng_state = set_state  # type: ignore[attr-defined]
