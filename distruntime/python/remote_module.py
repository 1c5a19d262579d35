"""`RemoteModule`: a module that lives on a worker, whose forward and backward are an instruction each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NoReturn

import torch

from ..errors import NotSupportedError, UsageError, drop_frames, without_our_frames
from ..log.handle import Place
from ..session.session import active_session
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor
from .call import invoke
from .callee import Callee, Code, Function, Options
from .objects import RemoteObject, Result, issued, object_of
from .remote import RemoteFunction, residence_of

_host, _unpack = Callee("RemoteModule", "host"), Callee("RemoteModule", "unpack")
_kept, _asking = Options(returns=object), Options(returns="ask")
# A forward pass writes no parameter; what it draws keeps the order of draws.
_passing = Options(writes=())


_CONVERTED = (
    "the tensors of a RemoteModule are converted with the module that has them: use net.to(dtype) or "
    "net.to(place), of the whole"
)

# Torch's own reading of the arguments of `to`.
_To = tuple[torch.device | None, torch.dtype | None, bool, object]
_parse_to: Callable[..., _To]  # type: ignore[explicit-any]
_parse_to = torch._C._nn._parse_to


class _There:
    """The module on its worker, as a `RemoteModule` and its parts know it: no part holds the whole."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hosted: RemoteObject
        # These parts have had their mode set alone: some modules return other things in training.
        self.modes: dict[str, bool] = {}

    def tell(self, what: str, *args: object) -> None:
        """Call a method of the module's host. Return at once."""
        callee = _host.child(what, f"{self.name}.{what}", f"method {what}")
        object_of(callee, self.hosted, *args)


def _refuse_hook(self: RemotePart, *args: object, **kwargs: object) -> NoReturn:
    """Refuse a hook, which nobody would call."""
    raise NotSupportedError(
        f"hooks on {self._path!r} would never be called: the part runs on the worker, with the whole of "
        f"{self._there.name}. A hook on the RemoteModule itself runs here. One that runs there: "
        f"net.remote.{self._path}.register_forward_hook(fn)"
    )


class RemotePart(torch.nn.Module):
    """A part of a `RemoteModule`: it has the parameters and buffers of a module on the worker.

    Its modes, its attributes and whether it requires grad follow there. What would change nothing there is
    refused.
    """

    _there: _There
    _path: str
    # The names of its parameters and buffers on the worker.
    _own: set[str]

    def __init__(self, there: _There, path: str) -> None:
        super().__init__()
        self.__dict__.update(_there=there, _path=path, _own=set[str]())

    def extra_repr(self) -> str:
        """Say where it is, in its repr."""
        return f"{self._path} of {self._there.name}"

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse to run apart."""
        raise NotSupportedError(
            f"{self._path!r} runs on the worker, with the whole of {self._there.name}: "
            f"net.remote.{self._path}(x) runs it alone, there"
        )

    def train(self, mode: bool = True) -> RemotePart:
        """Set the mode, here and on the worker."""
        _set_mode(self, mode)
        self._there.modes[self._path] = mode
        self._there.tell("train", mode, self._path)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> RemotePart:
        """Set whether its parameters require grad, here and on the worker."""
        super().requires_grad_(requires_grad)
        self._there.tell("requires_grad_", requires_grad, self._path)
        return self

    register_forward_hook = _refuse_hook
    register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RemotePart:
        """Refuse conversions of a part: see `RemoteModule._apply`."""
        raise NotSupportedError(_CONVERTED)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Refuse a module that the worker's has not."""
        raise self._refused(name)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Take a parameter that the worker's module has."""
        self._require_own(name)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Take a buffer that the worker's module has."""
        self._require_own(name)
        super().register_buffer(name, tensor, persistent)

    def __setattr__(self, name: str, value: torch.Tensor | torch.nn.Module | None) -> None:
        # Torch's parametrizations are modules of this process, and what they compute is passed to the worker.
        if isinstance(value, torch.nn.Module) or name in self._modules:
            if name != "parametrizations":
                raise self._refused(name)
        elif isinstance(value, torch.nn.Parameter):
            self._require_own(name)
        super().__setattr__(name, value)  # type: ignore[arg-type]
        computed = isinstance(getattr(type(self), name, None), property)
        if not (name.startswith("_") or computed or name in {"training", "parametrizations", *self._own}):
            self._there.tell("set_attribute", self._path, name, value)

    def __delattr__(self, name: str) -> None:
        if isinstance(self._modules.get(name), RemotePart):
            raise self._refused(name)
        super().__delattr__(name)

    def _require_own(self, name: str) -> None:
        if name not in self._own:
            raise self._refused(name)

    def _refused(self, name: str) -> NotSupportedError:
        return _fixed(self._there.name, f"{self._path}.{name}")


def _set_mode(module: torch.nn.Module, mode: bool) -> None:
    """Set the mode of a module here. The worker is told by whoever calls this."""
    module.training = mode
    for child in module.children():
        if isinstance(child, RemotePart):
            _set_mode(child, mode)
        else:
            child.train(mode)


def _fixed(name: str, path: str) -> NotSupportedError:
    return NotSupportedError(
        f"{path!r} of {name} cannot be put, replaced or removed here, as the module on the worker would not "
        "follow: change it in the function that makes the module, which runs there"
    )


class RemoteModule(torch.nn.Module):
    """A module on a worker. It is made there, and its weights are never here.

    Its parameters and buffers are proxies of the module's own, under the same names: optimizers, hooks,
    `state_dict`, `load_state_dict`, `dr.save` and clipping take them as they are. A call is one instruction,
    and so is its backward pass; the body runs as plain Python there. `remote` is the module itself as a
    `RemoteObject`, for its other methods.

    `make` is a class or a function that returns a module, called on the worker with `args` and `kwargs`.
    `place` or `node` says where; left out, the current place. Blocks until the module is made.
    """

    _there: _There

    @without_our_frames
    def __init__(
        self, make: Function, *args: object, place: object = None, node: int | None = None, **kwargs: object
    ) -> None:
        super().__init__()
        if not callable(make):
            raise UsageError(
                f"dr.RemoteModule takes what makes a module, a class or a function; got {make!r:.60}"
            )
        home = residence_of(place, node) or active_session().places.current()
        if home.node.members:
            raise NotSupportedError(
                f"a RemoteModule lives at one place, and {home.place} are a mesh: a model on a mesh is "
                "distributed by DTensor, FSDP2 or dr.spmd"
            )
        name = getattr(make, "__qualname__", type(make).__name__)
        self.__dict__["_there"] = _There(name)
        callee = make.callee() if isinstance(make, RemoteFunction) else Code.callee(make, name)
        # Another module of this name may return something else.
        self._kind = callee.code.digest.hex() if callee.code is not None else ""
        with torch.no_grad():
            made = invoke(callee, _kept, args, kwargs, home, RemoteObject)
            self._become(object_of(_host, made, home=home))

    def _become(self, hosted: RemoteObject) -> None:
        """Take the tensors of a module that a worker has."""
        self._there.hosted = hosted
        with torch.no_grad():
            tensors = _host.child("tensors", f"{self._name}.parameters", "method tensors")
            found = issued(tensors, _asking, hosted)
        assert isinstance(found, tuple)
        parameters, buffers, names = found[0], found[1], dict(fetch(found[2]))
        for path in names["parts"]:
            self._part(path)
        order = []
        for path, tensor in _named(parameters):
            owner, leaf = self._owner(path)
            known = owner._parameters.get(leaf)
            if known is None:
                known = torch.nn.Parameter(tensor, requires_grad=path not in names["frozen"])
                owner.register_parameter(leaf, known)
            else:
                known.data = tensor
            order.append((owner, leaf))
        for path, first in names["ties"].items():
            owner, leaf = self._owner(path)
            owner.register_parameter(leaf, self.get_parameter(first))
        for path, tensor in _named(buffers):
            owner, leaf = self._owner(path)
            owner.register_buffer(leaf, tensor, persistent=path in names["kept"])
        # What stands there when the module is called is what it computes with, whoever has put it there.
        self.__dict__["_order"] = order
        self.__dict__["_held"] = [(*self._owner(path), tensor) for path, tensor in _named(buffers)]
        # These are the memories of the parameters there, by their names.
        self.__dict__["_memories"] = [(path, tensor._handle.storage) for path, tensor in _named(parameters)]

    def _owner(self, path: str) -> tuple[torch.nn.Module, str]:
        """Return the part that holds a name, made where there is none yet."""
        parent, _, leaf = path.rpartition(".")
        module = self._part(parent)
        if isinstance(module, RemotePart):
            module._own.add(leaf)
        return module, leaf

    def _part(self, path: str) -> torch.nn.Module:
        """Return the part at a path, made where there is none yet."""
        module: torch.nn.Module = self
        names = path.split(".") if path else []
        for k, name in enumerate(names):
            child = module._modules.get(name)
            if child is None:
                child = module._modules[name] = RemotePart(self._there, ".".join(names[: k + 1]))
            module = child
        return module

    def _adopt(self) -> None:
        """Give the module on the worker the parameters that were replaced here."""
        changed: dict[str, object] = {}
        for (owner, leaf), (path, memory) in zip(self.__dict__["_order"], self.__dict__["_memories"]):
            here = owner._parameters.get(leaf)
            if not isinstance(here, DistributedTensor):
                raise NotSupportedError(
                    f"the parameter {path!r} of {self._name} is computed here, or was removed: "
                    "torch.nn.utils.parametrize.remove_parametrizations makes it one again"
                )
            if here._handle.storage is not memory:
                changed[path] = here.detach()
        if changed:
            with torch.no_grad():
                self._there.tell("assign", changed)
                self._become(self._there.hosted)

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteModule:
        """Return a copy, beside the module on its worker."""
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        self._adopt()
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        # The copy's tensors are those of the module's copy.
        made._become(made._there.hosted)
        return made

    def _operands(self) -> list[torch.Tensor]:
        for owner, leaf, tensor in self.__dict__["_held"]:
            if owner._buffers.get(leaf) is not tensor:
                raise NotSupportedError(
                    f"the buffer {leaf!r} of {self._name} was replaced here, and the module has "
                    "the one before: write into it, net.get_buffer(name).copy_(value)"
                )
        return [getattr(owner, leaf) for owner, leaf in self.__dict__["_order"]]

    @property
    def remote(self) -> Result:
        """The module itself, on its worker."""
        self._adopt()
        return self._there.hosted.module

    @property
    def place(self) -> Place:
        """Where it lives."""
        return self._there.hosted._handle.place.place

    @property
    def _name(self) -> str:
        return self._there.name

    def extra_repr(self) -> str:
        """Say what it is and where, in its repr."""
        return f"{self._name} on {self.place}"

    def forward(self, *args: object, **kwargs: object) -> Result:
        """Run the module on its worker: one instruction, and one for its backward pass."""
        # Some modules return other things in training.
        there, modes = self._there, self._there.modes or ""
        callee = _host.child(f"forward {self.training} {modes} {self._kind}", there.name, "method forward")
        try:
            return invoke(
                callee, _passing, (there.hosted, self._operands(), [*args], kwargs), {}, None, RemoteObject
            )
        except BaseException as error:
            drop_frames(error)
            raise

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the mode, here and on the worker."""
        _set_mode(self, mode)
        if "_there" in self.__dict__:
            self._there.modes.clear()
            self._there.tell("train", mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> RemoteModule:
        """Set whether its parameters require grad, here and on the worker."""
        super().requires_grad_(requires_grad)
        self._there.tell("requires_grad_", requires_grad)
        return self

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Take a module of this process beside the parts."""
        self._require_no_part(name)
        super().add_module(name, module)

    def __setattr__(self, name: str, value: torch.Tensor | torch.nn.Module | None) -> None:
        self._require_no_part(name)
        super().__setattr__(name, value)  # type: ignore[arg-type]

    def __delattr__(self, name: str) -> None:
        self._require_no_part(name)
        super().__delattr__(name)

    def _require_no_part(self, name: str) -> None:
        if isinstance(self.__dict__.get("_modules", {}).get(name), RemotePart):
            raise _fixed(self._name, name)

    @without_our_frames
    def to(self, *args: object, **kwargs: object) -> RemoteModule:
        """Convert it on its worker, or move it to another place, worker to worker. Blocks.

        Takes what `torch.nn.Module.to` takes. Parameters stay the same objects, so optimizers keep them.
        """
        place = next((a for a in (kwargs.get("device"), *args) if isinstance(a, Place)), None)
        rest = [a for a in args if not isinstance(a, Place)]
        named_ = {k: v for k, v in kwargs.items() if not isinstance(v, Place)}
        device, dtype, _, _ = _parse_to(*rest, **named_)
        home = residence_of(place or device, None) if place is not None or device is not None else None
        self._adopt()
        hosted = self._there.hosted
        if dtype is not None:
            self._there.tell("to", dtype)
        if home is not None and home is not hosted._handle.place:
            callee = _host.child("packed", f"{self._name}.to", "method packed")
            with torch.no_grad():
                packed = issued(callee, _asking, hosted)
                assert isinstance(packed, torch.Tensor)
                moved = packed.to(home.place)
                self._become(object_of(_unpack, moved, home.place, home=home))
        elif dtype is not None:
            self._become(hosted)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RemoteModule:
        """Refuse conversions that torch would make of each tensor apart: the module would not follow."""
        raise NotSupportedError(_CONVERTED)


def _named(tensors: object) -> list[tuple[str, DistributedTensor]]:
    """Return the named tensors of a result; nothing where it has none, which stays an object."""
    found = tensors.items() if isinstance(tensors, dict) else ()
    return [(str(name), tensor) for name, tensor in found if isinstance(tensor, DistributedTensor)]
