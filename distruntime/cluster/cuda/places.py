"""What "cuda", "cuda:1" and a number mean while the take-over is on."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import of_caller
from ...log.handle import Residence
from ...session.session import active_session

# It says whether each GPU of the session is a device. Otherwise there is one, the current place.
every_gpu = [False]


def shown_places() -> list[Residence]:
    places = active_session().places
    if not every_gpu[0]:
        return [places.current()]
    found = [places.residence(place) for place in places.own]
    return [home for home in found if home.place.local_device != "cpu"] or found


def numbered(index: int) -> torch.device:
    places = shown_places()
    if not 0 <= index < len(places):
        seen = ", ".join(f"cuda:{k} is {home.place}" for k, home in enumerate(places))
        raise of_caller(
            RuntimeError(
                f"CUDA error: invalid device ordinal: cuda:{index} was asked for, and the take-over shows "
                f"{len(places)} ({seen}). "
                + (
                    "These are all GPUs of the session's workers; dr.nodes() lists them"
                    if every_gpu[0]
                    else 'init_master_worker(as_cuda="all"), or --all, shows every GPU of the session'
                )
            )
        )
    device: torch.device = places[index].device
    return device


def meaning(device: object) -> Any:  # type: ignore[explicit-any]
    """Return the place that "cuda" means; any other device as it is."""
    # Without a number it is the current place, which "remote" means too. To find it here costs a microsecond.
    if isinstance(device, str):
        if device == "cuda":
            return current_place() if every_gpu[0] else "remote"
        if not device.startswith("cuda:"):
            return device
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type == "cuda":
        if device.index is None:
            return current_place() if every_gpu[0] else torch.device("remote")
        return numbered(device.index)
    # To torch, a number is a GPU.
    return numbered(device) if type(device) is int else device


def current_place() -> torch.device:
    """Return the place that "cuda" without a number means."""
    device: torch.device
    device = numbered(current_device()) if every_gpu[0] else active_session().places.current().device
    return device


def place_of(device: object) -> torch.device:
    """Return the place that a function of `torch.cuda` is asked about: an index, "cuda:1", None."""
    if device is None or device == -1:
        return current_place()
    if isinstance(device, int):
        return numbered(device)
    meant: torch.device = torch.device(meaning(device))
    return meant


def device_count() -> int:
    return len(shown_places())


def current_device() -> int:
    current = active_session().places.current()
    places = shown_places()
    return places.index(current) if current in places else 0
