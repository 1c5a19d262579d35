"""Parameters: those of users' classes, and what each of them keeps when its module moves.

torch makes a parameter of a remote tensor without looking at the class that was asked for. When a module
crosses the border, torch swaps another parameter into each of its own; with it would go the class, the
attributes and the hooks that users have given theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

import torch
from torch.nn import Parameter

from .subclasses import make_subclass, origin_of
from .tensor import DistributedTensor


class _New(Protocol):
    def __call__(self, cls: type, data: torch.Tensor | None, requires_grad: bool) -> Parameter: ...


class _NewWithoutShape(Protocol):
    def __call__(self, requires_grad: bool, device: torch.device, dtype: torch.dtype) -> torch.Tensor: ...


_new: _New = Parameter.__new__
_swap_tensors: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
# These belong to the value.
_OWN = ("_handle", "_is_param")


def _of_user(cls: type) -> bool:
    return issubclass(cls, Parameter) and cls is not Parameter


def new_parameter(cls: type, data: torch.Tensor | None = None, requires_grad: bool = True) -> Parameter:
    """Make a parameter as torch does; one of a user's class also of a remote tensor."""
    kind = origin_of(cls)
    if type(data) is DistributedTensor and _of_user(kind):
        found: Parameter = make_subclass(kind, data, requires_grad)  # type: ignore[assignment]
        return found
    return _new(kind, data, requires_grad)


def without_shape(kind: type, requires_grad: bool, like: torch.Tensor) -> torch.Tensor:
    """Make a parameter or a buffer of a lazy module, where `like` is and of its dtype."""
    # The types of torch's class claim the arguments of `Parameter`.
    make: _NewWithoutShape = kind  # type: ignore[assignment]
    return make(requires_grad, like.device, like.dtype)


class _Hooked(Protocol):
    """A tensor with the hooks that torch keeps on it."""

    _backward_hooks: object
    _post_accumulate_grad_hooks: object


class _Kept:
    """What a user has given a parameter."""

    def __init__(self, parameter: Parameter) -> None:
        self._parameter = parameter
        self._kind = origin_of(type(parameter))
        self._attributes = {k: v for k, v in parameter.__dict__.items() if k not in _OWN}
        hooked: _Hooked = parameter  # type: ignore[assignment]
        self._hooks, self._late_hooks = hooked._backward_hooks, hooked._post_accumulate_grad_hooks

    def give_back(self) -> None:
        """Give the parameter what it has lost."""
        parameter = self._parameter
        if _of_user(self._kind) and not isinstance(parameter, self._kind):
            grad, parameter.grad = parameter.grad, None
            twin = make_subclass(self._kind, parameter.data, parameter.requires_grad)
            torch.utils.swap_tensors(parameter, twin)
            parameter.grad = grad
        parameter.__dict__.update(self._attributes)
        hooked: _Hooked = parameter  # type: ignore[assignment]
        # After a swap the object still names them, and autograd does not run them.
        if self._hooks is not None:
            hooked._backward_hooks = None
            hooked._backward_hooks = self._hooks
        if self._late_hooks is not None:
            hooked._post_accumulate_grad_hooks = None
            hooked._post_accumulate_grad_hooks = self._late_hooks


class _Moving(threading.local):
    """Whether this thread moves a module."""

    now = False


_moving = _Moving()


@contextmanager
def keeping(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Let parameters keep their class, attributes and hooks, where others are swapped into them."""
    kept = [_Kept(parameter) for parameter in parameters]
    before, _moving.now = _moving.now, True
    try:
        try:
            yield
        finally:
            for one in kept:
                one.give_back()
    finally:
        _moving.now = before


def _of_an_older_graph(grads: object) -> NoReturn:
    raise RuntimeError(
        "this result was computed before a parameter of the module was moved, so its gradient would go to "
        "the old one: compute it again after module.to(...)"
    )


def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
    """Swap two tensors as torch does, and their values too.

    torch swaps no tensor that a graph holds. In a module that moves, the graph keeps the old parameter: what
    it has saved stays as it is, and its backward pass raises where it comes to that.
    """
    handles = [tensor.__dict__.get("_handle") for tensor in (t1, t2)]
    if not _moving.now or t1._use_count() == t2._use_count() == 1:  # type: ignore[attr-defined]
        _swap_tensors(t1, t2)
    else:
        if t1.requires_grad:
            torch.autograd.graph.get_gradient_edge(t1).node.register_prehook(_of_an_older_graph)
        t1.__class__, t2.__class__ = t2.__class__, t1.__class__
        t1.__dict__, t2.__dict__ = t2.__dict__, t1.__dict__
        torch._C._swap_tensor_impl(t1, t2)
    if None not in handles:
        t2._handle, t1._handle = handles  # type: ignore[attr-defined]


def install_parameters() -> None:
    """Put these in torch's place."""
    Parameter.__new__ = new_parameter  # type: ignore[method-assign, assignment]
    torch.utils.swap_tensors = swap_tensors
