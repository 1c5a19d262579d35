"""torch's own Python functions of operators.

They parse their arguments in C++ and take 1.3 us where an `OpOverload` takes 2.2 us (torch 2.13). Which
overload such a function takes depends on the arguments. So a function is used only where it was seen to hand
the same arguments to the same overload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..values.step import Operator

_MODULES = (torch._C._VariableFunctions, torch._C._nn)


class _Reached(Exception):
    """A call has reached an operator, which does not run."""


class _Look(TorchDispatchMode):
    """Notes the first operator that is reached, with its arguments, and ends the call there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: tuple[object, ...] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing compiles here, and to keep Dynamo away torch would import it: some seconds.
        return False

    def __torch_dispatch__(
        self, func: object, types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> object:
        self.seen = func, args, kwargs or {}
        raise _Reached


def direct(call: Operator) -> Operator:
    """Return an operator without the part of its call that is in Python."""
    return call._op if isinstance(call, torch._ops.OpOverload) else call


def binding(call: Operator) -> Operator | None:
    """Return torch's own Python function that may be this overload's, or None if there is none."""
    if not isinstance(call, torch._ops.OpOverload):
        return None
    namespace, _, base = call._schema.name.partition("::")
    if namespace != "aten" or base.startswith("__"):
        return None
    arguments = call._schema.arguments
    owners: tuple[object, ...] = _MODULES
    if arguments and arguments[0].name == "self":
        owners = (torch._C.TensorBase, *_MODULES)
    for owner in owners:
        found: Operator | None = getattr(owner, base, None)
        if found is not None:
            return found
    return None


def alike(one: Callable[[], object], other: Callable[[], object]) -> bool:
    """Whether two calls reach the same operator with the same arguments. Neither of them runs it."""
    seen = _reached(one)
    return seen is not None and _same(seen, _reached(other))


def _reached(call: Callable[[], object]) -> tuple[object, ...] | None:
    look = _Look()
    try:
        with look:
            call()
    # Whatever it raises, it has not taken these arguments.
    except Exception:
        pass
    return look.seen


def _same(one: object, other: object) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) or one is other:
        return one is other
    return type(one) is type(other) and bool(one == other)
