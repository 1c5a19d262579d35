"""`Module.to` between this process and places: parameters are swapped in place.

Then tied weights stay tied and optimizers keep theirs, in both directions. The flag for that is process-wide,
and makes conversions of local modules fail where something holds a weak reference to a parameter. So it is on
only while a conversion crosses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..errors import NotSupportedError, without_our_frames
from ..log.handle import Place
from ..session.session import active, active_session
from ..session.spelling import named, require_alone, twin_on
from ..tensors.parameters import keeping
from ..tensors.tensor import DistributedTensor
from .lazy_modules import set_aside

Convert = Callable[[torch.Tensor], torch.Tensor]


class _Apply(Protocol):
    def __call__(self, module: torch.nn.Module, fn: Convert, recurse: bool, /) -> torch.nn.Module: ...


class _To(Protocol):
    def __call__(self, module: torch.nn.Module, /, *args: object, **kwargs: object) -> torch.nn.Module: ...


_apply: _Apply = torch.nn.Module._apply
# torch's own `Module.to` looks at its arguments itself; its overloads are not repeated here.
_to: _To = torch.nn.Module.to  # type: ignore[assignment]


@without_our_frames
def _apply_across(self: torch.nn.Module, fn: Convert, recurse: bool = True) -> torch.nn.Module:
    future = torch.__future__
    if not active or future.get_swap_module_params_on_conversion():
        return _apply(self, fn, recurse)
    with set_aside(self, fn), active[0].requests.announcer.uploads.together():
        return _convert(self, fn, recurse)


def _convert(self: torch.nn.Module, fn: Convert, recurse: bool) -> torch.nn.Module:
    if not _crosses(self, fn):
        return _apply(self, fn, recurse)
    if isinstance(self, torch.jit.ScriptModule):
        raise NotSupportedError(
            "a scripted module keeps its parameters in C++ and stays where it is; send the original: "
            "module.to(...)"
        )
    # Recurrent layers hold such references themselves, drop them before they move, and make them again after.
    recurrent = [m for m in self.modules() if isinstance(m, torch.nn.RNNBase)]
    for layer in recurrent:
        layer._flat_weight_refs = []
    # torch would notice the first such parameter when those before it have moved.
    for name, p in self.named_parameters(recurse=recurse):
        # It is the first of the weak references to an object, or None.
        if p.__weakref__ is not None:  # type: ignore[attr-defined]
            for layer in recurrent:
                layer._init_flat_weights()
            raise NotSupportedError(
                f"parameter {name!r} cannot be moved in place: something holds a weak reference to it "
                "(torch.export and pipelining leave such references). Nothing has been moved. Send a copy: "
                "copy.deepcopy(module).to(...)"
            )
    future = torch.__future__
    future.set_swap_module_params_on_conversion(True)
    try:
        with keeping(self.parameters(recurse)):
            return _apply(self, fn, recurse)
    finally:
        future.set_swap_module_params_on_conversion(False)


def _crosses(module: torch.nn.Module, fn: Convert) -> bool:
    """Whether a conversion turns local parameters into remote ones or back.

    An empty tensor of each kind shows it.
    """
    samples: dict[bool, torch.Tensor] = {}
    for p in module.parameters():
        remote = isinstance(p, DistributedTensor)
        if remote not in samples:
            samples[remote] = torch.empty(0, dtype=p.dtype, device=p.device)
    with torch.no_grad():
        return any(
            isinstance(fn(sample), DistributedTensor) is not remote for remote, sample in samples.items()
        )


@without_our_frames
def _to_place(
    self: torch.nn.Module, *args: object, node: int | None = None, **kwargs: object
) -> torch.nn.Module:
    """Move a module as `Module.to` does; also take a `Place`, or `node=`."""
    target = args[0] if args else kwargs.get("device")
    if node is None and not isinstance(target, Place):
        return _to(self, *args, **kwargs)
    places = active_session().places
    residence = named(places, target)
    if residence is not None:
        require_alone(target, "node", node)
    else:
        assert node is not None
        first = next((p for p in self.parameters() if isinstance(p, DistributedTensor)), None)
        own = first.place if first is not None else Place(node, "cpu")
        residence = places.residence(twin_on(places, node, target, own))
    rest = args[1:] if args else ()
    return _to(self, residence.device, *rest, **{k: v for k, v in kwargs.items() if k != "device"})


def install_modules() -> None:
    """Let modules move between this process and places."""
    torch.nn.Module._apply = _apply_across  # type: ignore[method-assign]
    torch.nn.Module.to = _to_place  # type: ignore[method-assign, assignment]
