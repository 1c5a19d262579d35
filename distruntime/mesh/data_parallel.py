"""`nn.DataParallel` of remote modules: torch finds no devices for it, and would run it on one in silence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import NotSupportedError, without_our_frames
from ..log.handle import Place
from ..session.session import active_session
from ..tensors.tensor import DistributedTensor

_Parallel: Any = torch.nn.DataParallel
_done: list[bool] = []


def install_data_parallel() -> None:
    """Refuse it where there are several devices of the kind that the module is on. Does its work once."""
    if not _done:
        _done.append(True)
        _Parallel.__init__ = _making(_Parallel.__init__)
        _Parallel.forward = _calling(_Parallel.forward)


def _making(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    @without_our_frames
    def choose(self: Any, module: torch.nn.Module, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        # A caller who names one device wants no more.
        alone = device_ids is not None and len(device_ids) == 1
        if not alone:
            _require_one_device(module)
        init(self, module, device_ids, *args, **kwargs)
        self._alone = alone

    return choose


def _calling(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    @without_our_frames
    def choose(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        # The module may have been sent since.
        if not getattr(self, "_alone", False):
            _require_one_device(self)
        return forward(self, *inputs, **kwargs)

    return choose


def shown() -> Sequence[Place]:
    """Return the places that the script can name. Take-over puts another function here."""
    return active_session().places.own


def _require_one_device(module: torch.nn.Module) -> None:
    """Raise `NotSupportedError` for a remote module that has more than one device of its kind."""
    first = next((p for p in module.parameters() if isinstance(p, DistributedTensor)), None)
    if first is None:
        return
    place = first.place
    kinds = [one.local_device.partition(":")[0] for one in (place.members or (place,))]
    alike = [one for one in shown() if one.local_device.partition(":")[0] == kinds[0]]
    if not place.members and len(alike) < 2:
        return
    raise NotSupportedError(
        f"nn.DataParallel would run all of each batch on {place} and leave other devices idle, because it "
        "finds no devices here to share it among. Replicas live on a mesh: mesh = "
        f'dr.init_device_mesh("{kinds[0]}", ({len(place.members) or len(alike)},)); '
        "dr.parallel.DataParallel(model, mesh) shares a batch among them as this class does. For training, "
        "DistributedDataParallel(model.to(mesh.device), process_group=mesh.get_group()) with "
        "dr.from_shards(batch.chunk(n), mesh) is faster. For one device leave nn.DataParallel out"
    )
