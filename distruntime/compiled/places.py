"""Places in a function that Dynamo traces: what a tensor says of its own, and what names another one.

Dynamo traces with fakes, to which a number and "cuda:1" mean devices of this process.
"""

from __future__ import annotations

from types import MethodDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import torch

from ..backend.on_import import when_imported
from ..errors import PlacementError
from ..log.current import ACCELERATOR, device_name
from ..log.handle import REMOTE_TYPES, Place, Residence
from ..session.session import active_session
from ..session.spelling import destination, is_remote
from ..tensors.tensor import DistributedTensor


def install_places() -> None:
    """Let traced functions name places as others do, once Dynamo is imported."""
    when_imported("torch._dynamo.variables.tensor", _name_places)


def _name_places(module: ModuleType) -> None:
    """Have `x.device`, `x.get_device()`, `x.to(1)` and `x.cuda()` mean what they mean outside."""
    variable = module.TensorVariable
    specialize, number, call = variable.specialize, variable.method_get_device, variable.call_method

    def _specialize(value: torch.Tensor) -> dict[str, Any]:
        found: dict[str, Any] = specialize(value)
        if found["device"].type in REMOTE_TYPES:
            found["device"] = active_session().places.meant(found["device"]).device
        return found

    def method_get_device(self: Any, tx: Any) -> Any:
        home = _home(self)
        if home is None:
            return number(self, tx)
        # The take-over of "cuda" has its own function there.
        asked: Any = SimpleNamespace(_handle=SimpleNamespace(place=home), place=home.place)
        return module.VariableTracker.build(tx, int(DistributedTensor.get_device(asked)))

    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        home = _home(self) if name in ("to", "cuda") else None
        # The take-over has functions in place of torch's methods, and these read what names a device.
        if home is not None and isinstance(getattr(torch.Tensor, name), MethodDescriptorType):
            given = kwargs.get("device", args[0] if args else None)
            try:
                target = _target(home, name, given, tx)
            except (PlacementError, RuntimeError) as error:
                # The call itself raises it then.
                module.unimplemented(
                    gb_type="no such place", context=f"{name} {given}", explanation=str(error), hints=[]
                )
            if target is not None:
                device = module.VariableTracker.build(tx, target.device)
                rest = dict(zip(("non_blocking",), args[1:])) if name == "cuda" else {}
                args = [device, *(args[1:] if name == "to" else ())]
                kwargs = {key: value for key, value in {**rest, **kwargs}.items() if key != "device"}
                name = "to"
        return call(self, tx, name, args, kwargs)

    variable.specialize = staticmethod(_specialize)
    variable.method_get_device, variable.call_method = method_get_device, call_method


def _home(variable: Any) -> Residence | None:
    """Return the place of a traced tensor; None if it is none of a worker's."""
    device = variable.device
    known = variable.class_type is DistributedTensor and isinstance(device, torch.device)
    return active_session().places.meant(device) if known and device.type in REMOTE_TYPES else None


def _target(home: Residence, name: str, given: Any, tx: Any) -> Residence | None:
    """Return the place to which a traced tensor is moved, where torch would not find it."""
    if given is None:
        value: object = None
    else:
        given = given.realize()
        if hasattr(given, "evaluate_expr"):
            # A number that has changed between two calls.
            value = given.evaluate_expr(tx.output)
        elif given.is_python_constant():
            value = given.as_python_constant()
        else:
            return None
    if name == "cuda":
        value = ACCELERATOR if value is None else device_name(value)
    if (
        isinstance(value, (bool, Place))
        or not isinstance(value, (int, str, torch.device))
        or is_remote(value)
    ):
        return None
    found = destination(value, None, home)
    return found if isinstance(found, Residence) else None


def constant_of(constant: Any, place: Place) -> Any:
    """Return what Dynamo knows of a place: it is a constant, and in a graph it is the place's device."""

    class PlaceVariable(constant):  # type: ignore[misc]
        def __init__(self, value: Place, **kwargs: Any) -> None:
            super().__init__(value.device, **kwargs)
            self.value = value

        def as_proxy(self) -> torch.device:
            # A graph would keep the text that it is as it prints.
            return self.value.device

    return PlaceVariable(place)
