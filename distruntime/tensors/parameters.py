"""Parameters: those of users' classes, and what each of them keeps when its module moves.

torch makes a parameter of a remote tensor without looking at the class that was asked for. When a module
crosses the border, torch swaps another parameter into each of its own; with it would go the class, the
attributes and the hooks that users have given theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.nn import Parameter

from .subclasses import make_subclass, origin_of
from .tensor import DistributedTensor


class _New(Protocol):
    def __call__(self, cls: type, data: torch.Tensor | None, requires_grad: bool) -> Parameter: ...


_new: _New = Parameter.__new__
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
        for name, value in self._attributes.items():
            setattr(parameter, name, value)
        hooked: _Hooked = parameter  # type: ignore[assignment]
        # After a swap the object still names them, and autograd does not run them.
        if self._hooks is not None:
            hooked._backward_hooks = None
            hooked._backward_hooks = self._hooks
        if self._late_hooks is not None:
            hooked._post_accumulate_grad_hooks = None
            hooked._post_accumulate_grad_hooks = self._late_hooks


@contextmanager
def keeping(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Let parameters keep their class, attributes and hooks, where others are swapped into them."""
    kept = [_Kept(parameter) for parameter in parameters]
    try:
        yield
    finally:
        for one in kept:
            one.give_back()


def install_parameters() -> None:
    """Put this in torch's place."""
    Parameter.__new__ = new_parameter  # type: ignore[method-assign, assignment]
