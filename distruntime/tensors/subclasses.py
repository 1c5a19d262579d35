"""Subclasses of `torch.Tensor` that are made of a remote tensor: `x.as_subclass(Mine)`.

fastai's, torchvision's and MONAI's tensors are such, and so are parameters of lazy modules. torch would give
the proxy another Python object, and it can have one only. So each such class gets a twin here, which is a
subclass of it and a proxy: what the class does to torch's functions comes first, and below it the operators
are those of a plain proxy.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from ..errors import NotSupportedError, of_caller, without_our_frames
from ..log.handle import REMOTE_TYPES
from ..log.spec import Spec
from ..operators.alias_info import Operator
from ..operators.dispatch import dispatch
from ..operators.proxies import Answering, reshape_wrapper, wrap_view
from ..session.session import active_session
from .tensor import DistributedTensor

# Whatever torch's functions take.
Function = Callable[..., Any]  # type: ignore[explicit-any]
T = TypeVar("T", bound=torch.Tensor)

# Parameters' classes have this: their results are plain tensors.
_disabled: object = torch._C._disabled_torch_function_impl
_make_wrapper: Function = torch.Tensor._make_wrapper_subclass
_make_subclass: Function = torch.Tensor._make_subclass


# This is how torch's tensors read and replace the dict of their attributes.
_attributes: types.GetSetDescriptorType = torch.Tensor.__dict__["__dict__"]


class SubclassTensor(DistributedTensor):
    """A remote tensor of a user's class. `origin` is that class."""

    origin: type[torch.Tensor]

    def _get_attributes(self) -> dict[str, object]:
        found: dict[str, object] = _attributes.__get__(self)
        return found

    def _set_attributes(self, new: dict[str, object]) -> None:
        """Replace the attributes, but not the value: fastai gives results the attributes of an operand."""
        own = _attributes.__get__(self).get("_handle")
        _attributes.__set__(self, new if own is None else {**new, "_handle": own})

    __dict__ = property(_get_attributes, _set_attributes)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        name, text = self.origin.__name__, super().__repr__()
        return text.replace("tensor(", f"{name}(", 1).replace(
            "\n" + " " * len("tensor("), "\n" + " " * len(f"{name}(")
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Issue an operator on plain proxies of the operands; what it wrote is given back as it came."""
        given: dict[int, tuple[SubclassTensor, DistributedTensor, Spec]] = {}

        def plain(tensor: SubclassTensor) -> DistributedTensor:
            if id(tensor) not in given:
                handle = tensor._handle
                # Its views are inference tensors where it is one.
                given[id(tensor)] = tensor, wrap_view(DistributedTensor, handle, tensor), handle.spec
            return given[id(tensor)][1]

        def below(value: object) -> object:
            # To map a tree of one leaf costs 10 us.
            if isinstance(value, SubclassTensor):
                return plain(value)
            return tree_map_only(SubclassTensor, plain, value) if isinstance(value, (list, tuple)) else value

        plain_args = [below(value) for value in args]
        plain_kwargs = {name: below(value) for name, value in (kwargs or {}).items()}
        kinds = {DistributedTensor if issubclass(kind, SubclassTensor) else kind for kind in types}
        found = dispatch(DistributedTensor, func, tuple(kinds), plain_args, plain_kwargs)
        if found is NotImplemented:
            return found
        own: dict[int, SubclassTensor] = {}
        for tensor, proxy, spec in given.values():
            own[id(proxy)] = tensor
            # It was resized or turned in place.
            if tensor._handle.spec is not spec:
                reshape_wrapper(tensor, tensor._handle.spec)
        if isinstance(found, DistributedTensor):
            return own.get(id(found), found)
        return tree_map_only(DistributedTensor, lambda proxy: own.get(id(proxy), proxy), found)


# A class keeps its twin under this name, and both go together.
_TWIN = "_distruntime_twin"


def remote_class(cls: type) -> type[DistributedTensor]:
    """Return the class of remote tensors that are of a user's class."""
    if not issubclass(cls, torch.Tensor):
        raise of_caller(TypeError(f"cls must be a subclass of torch.Tensor, got {cls!r}"))
    if cls is torch.Tensor:
        return DistributedTensor
    if issubclass(cls, DistributedTensor):
        return cls
    if _TWIN not in cls.__dict__:
        if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise NotSupportedError(
                f"{cls.__name__} has a __torch_dispatch__ of its own, and so have remote tensors: let it "
                f"hold the tensor, torch.Tensor._make_wrapper_subclass({cls.__name__}, x.shape, device=...)"
            )

        def torch_function(
            twin: type,
            func: Function,
            kinds: Sequence[type],
            args: Sequence[object] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            own = tuple(getattr(kind, "origin", kind) for kind in kinds)
            return cls.__torch_function__(func, own, args, kwargs or {})

        twin = types.new_class(
            cls.__name__,
            (cls, SubclassTensor),
            {},
            lambda body: body.update(
                {
                    "__module__": cls.__module__,
                    "__qualname__": cls.__qualname__,
                    "origin": cls,
                    "__torch_function__": _disabled
                    if cls.__torch_function__ is _disabled
                    else classmethod(torch_function),
                    "__torch_dispatch__": SubclassTensor.__dict__["__torch_dispatch__"],
                    # What the class itself says of pickling is asked of the fetched value.
                    "__reduce_ex__": DistributedTensor.__reduce_ex__,
                }
            ),
        )
        setattr(cls, _TWIN, twin)
    found: type[SubclassTensor] = cls.__dict__[_TWIN]
    return found


def origin_of(cls: type) -> type:
    """Return the user's class that a class of remote tensors is the twin of; any other class as it is."""
    found: type = getattr(cls, "origin", cls) if issubclass(cls, SubclassTensor) else cls
    return found


def _of_kind(
    kind: type[DistributedTensor], view: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor
) -> torch.Tensor:
    """Return a view of a remote tensor as a proxy of a class.

    torch's operators make it, so autograd knows it as a view. A proxy that merely had the same handle would
    have another version, and autograd would not see what is written through it.
    """

    def answer() -> DistributedTensor:
        made = view(tensor)
        assert isinstance(made, DistributedTensor)
        found: DistributedTensor = wrap_view(kind, made._handle, tensor, view)
        return found

    with torch._C.DisableTorchFunctionSubclass():
        if kind is DistributedTensor:
            return view(tensor)
        with Answering(view, tensor, answer):
            return view(tensor)


def plain_operands(args: Sequence[object]) -> Sequence[object]:
    """Return a kernel's arguments with plain proxies for tensors of users' classes."""
    if not any(isinstance(a, SubclassTensor) for a in args):
        return args
    return [a.as_subclass(torch.Tensor) if isinstance(a, SubclassTensor) else a for a in args]


@without_our_frames
def as_subclass(self: DistributedTensor, cls: type[T]) -> T:
    """Return the same value as a tensor of class `cls`, as `Tensor.as_subclass`. Return at once."""
    found: T = _of_kind(remote_class(cls), torch.ops.aten.alias.default, self)  # type: ignore[assignment]
    return found


# torch's compiler compares the parameters of this function with those of its own twin of it, and lets these
# pass.
@without_our_frames
def make_subclass(*args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[explicit-any]
    """Make a leaf of a class of a tensor's value, as torch does; also of a remote one's."""
    if len(args) < 2 or not isinstance(args[1], DistributedTensor):
        local: torch.Tensor = _make_subclass(*args, **kwargs)
        return local
    found = _of_kind(remote_class(args[0]), torch.ops.aten.detach.default, args[1])
    with torch._C.DisableTorchFunctionSubclass():
        return found.requires_grad_(bool(kwargs.get("require_grad", args[2] if len(args) > 2 else False)))


# The device's place among the arguments of `_make_wrapper_subclass`, where it has no name.
_DEVICE = 7


def make_wrapper(*args: Any, **kwargs: Any) -> Any:  # type: ignore[explicit-any]
    """Make a wrapper subclass as torch does; one that says "remote" has the device that proxies have in C++.

    With the other one, autograd would look for a device of this process. DTensor makes its wrappers here, so
    what is not remote takes the shortest way.
    """
    device = kwargs.get("device") if len(args) <= _DEVICE else args[_DEVICE]
    if device is not None and torch.device(device).type == "remote":
        cls = args[0]
        if cls.device is torch.Tensor.device:
            cls.device = property(_place_of)
        lazy = active_session().places.meant(torch.device(device)).lazy
        if len(args) <= _DEVICE:
            kwargs["device"] = lazy
        else:
            args = (*args[:_DEVICE], lazy, *args[_DEVICE + 1 :])
    return _make_wrapper(*args, **kwargs)


def _place_of(self: torch.Tensor) -> torch.device:
    device: torch.device = torch.Tensor.device.__get__(self)
    return active_session().places.meant(device).device if device.type in REMOTE_TYPES else device


def install_subclasses() -> None:
    """Put these in torch's place."""
    DistributedTensor.as_subclass = as_subclass  # type: ignore[method-assign, assignment]
    torch.Tensor._make_wrapper_subclass = staticmethod(make_wrapper)  # type: ignore[method-assign]
    torch.Tensor._make_subclass = staticmethod(make_subclass)  # type: ignore[method-assign, assignment]
