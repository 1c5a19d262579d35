"""`RemoteModule`: a module that lives on a worker, whose forward and backward are an instruction each."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from ..errors import NotSupportedError, UsageError, drop_frames, without_our_frames
from ..log.handle import Place
from ..session.session import active_session
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor
from .call import invoke
from .callee import Callee, Code, Function, Options
from .objects import RemoteObject, Result, keep
from .remote import RemoteFunction, residence_of

_host, _unpack = Callee("RemoteModule", "host"), Callee("RemoteModule", "unpack")
_kept, _asking = Options(returns=object), Options(returns="ask")
# A forward pass writes no parameter; what it draws keeps the order of draws.
_passing = Options(writes=())


# Torch's own reading of the arguments of `to`.
_To = tuple[torch.device | None, torch.dtype | None, bool, object]
_parse_to: Callable[..., _To]  # type: ignore[explicit-any]
_parse_to = torch._C._nn._parse_to


class RemoteModule(torch.nn.Module):
    """A module on a worker. It is made there, and its weights are never here.

    Its parameters and buffers are proxies of the module's own, under the same names: optimizers, hooks,
    `state_dict`, `load_state_dict`, `dr.save` and clipping take them as they are. A call is one instruction,
    and so is its backward pass; the body runs as plain Python there. `remote` is the module itself as a
    `RemoteObject`, for its other methods.

    `make` is a class or a function that returns a module, called on the worker with `args` and `kwargs`.
    `place` or `node` says where; left out, the current place. Blocks until the module is made.
    """

    @without_our_frames
    def __init__(
        self,
        make: Function,
        *args: object,
        place: object = None,
        node: int | None = None,
        **kwargs: object,
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
        self._name = name
        callee = make.callee() if isinstance(make, RemoteFunction) else Code.callee(make, name)
        # Another module of this name may return something else.
        self._kind = callee.code.digest.hex() if callee.code is not None else ""
        with torch.no_grad():
            made = invoke(callee, _kept, args, kwargs, home, keep)
            self._become(invoke(_host, _kept, (made,), {}, home, keep))

    def _become(self, hosted: object) -> None:
        """Take the tensors of a module that a worker has."""
        assert isinstance(hosted, RemoteObject)
        self.__dict__["_hosted"] = hosted
        with torch.no_grad():
            tensors = _host.child("tensors", f"{self._name}.parameters", "method tensors")
            found = invoke(tensors, _asking, (hosted,), {}, None, keep)
        assert isinstance(found, tuple)
        parameters, buffers, names = found[0], found[1], dict(fetch(found[2]))
        order = []
        for path, tensor in _named(parameters):
            owner, leaf = _owner(self, path)
            known = owner._parameters.get(leaf)
            if known is None:
                known = torch.nn.Parameter(tensor, requires_grad=path not in names["frozen"])
                owner.register_parameter(leaf, known)
            else:
                known.data = tensor
            order.append((owner, leaf))
        for path, first in names["ties"].items():
            owner, leaf = _owner(self, path)
            owner.register_parameter(leaf, self.get_parameter(first))
        for path, tensor in _named(buffers):
            owner, leaf = _owner(self, path)
            owner.register_buffer(leaf, tensor, persistent=path in names["kept"])
        # What stands there when the module is called is what it computes with, whoever has put it there.
        self.__dict__["_order"] = order
        self.__dict__["_held"] = [(*_owner(self, path), tensor) for path, tensor in _named(buffers)]

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteModule:
        """Return a copy, beside the module on its worker."""
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        # The copy's tensors are those of the module's copy.
        made._become(made._hosted)
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
        return self._hosted.module

    @property
    def place(self) -> Place:
        """Where it lives."""
        return self._hosted._handle.place.place

    @property
    def _hosted(self) -> RemoteObject:
        found = self.__dict__["_hosted"]
        assert isinstance(found, RemoteObject)
        return found

    def extra_repr(self) -> str:
        """Say what it is and where, in its repr."""
        return f"{self._name} on {self.place}"

    def forward(self, *args: object, **kwargs: object) -> Result:
        """Run the module on its worker: one instruction, and one for its backward pass."""
        # Some modules return other things in training.
        callee = _host.child(f"forward {self.training} {self._kind}", self._name, "method forward")
        try:
            return invoke(callee, _passing, (self._hosted, self._operands(), [*args], kwargs), {}, None, keep)
        except BaseException as error:
            drop_frames(error)
            raise

    def _tell(self, what: str, *args: object) -> None:
        callee = _host.child(what, f"{self._name}.{what}", f"method {what}")
        invoke(callee, _kept, (self._hosted, *args), {}, None, keep)

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the mode, here and on the worker."""
        super().train(mode)
        if "_hosted" in self.__dict__:
            self._tell("train", mode)
        return self

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
        if dtype is not None:
            self._tell("to", dtype)
        if home is not None and home is not self._hosted._handle.place:
            callee = _host.child("packed", f"{self._name}.to", "method packed")
            with torch.no_grad():
                packed = invoke(callee, _asking, (self._hosted,), {}, None, keep)
                assert isinstance(packed, torch.Tensor)
                moved = packed.to(home.place)
                self._become(invoke(_unpack, _kept, (moved, home.place), {}, home, keep))
        elif dtype is not None:
            self._become(self._hosted)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RemoteModule:
        """Refuse conversions that torch would make of each tensor apart: the module would not follow."""
        raise NotSupportedError(
            "the tensors of a RemoteModule are converted with the module that has them: use "
            "net.to(dtype) or net.to(place)"
        )


def _named(tensors: object) -> list[tuple[str, DistributedTensor]]:
    """Return the named tensors of a result; nothing where it has none, which stays an object."""
    found = tensors.items() if isinstance(tensors, dict) else ()
    return [(str(name), tensor) for name, tensor in found if isinstance(tensor, DistributedTensor)]


def _owner(module: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    """Return the module that holds a name, made as an empty one where there is none yet."""
    *parents, leaf = path.split(".")
    for name in parents:
        child = module._modules.get(name)
        if child is None:
            child = torch.nn.Module()
            module.add_module(name, child)
        module = child
    return module, leaf
