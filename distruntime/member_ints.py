"""Numbers that differ from member to member, and the few steps of torch that depend on the rank.

In a program of one rank per process, a rank is an int. Here one process speaks for all members, so what depends on the rank is a
symbolic int that knows each member's value: torch has one, for its single-process debugging class LocalTensor, and marks the functions
of DTensor that are to run once for each rank (`maybe_run_for_local_tensor`). On a mesh's tensors these run once for each member, on the
members' own shards.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed import _local_tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .errors import NotSupportedError, UsageError
from .shards import member_of, mesh_of
from .tensor import DistributedTensor
from .wrap import wrap


class _Varying(_local_tensor.LocalIntNode):
    """torch's own, but for questions that have no one answer: to torch's, what differs from member to member equals nothing."""

    def int_(self) -> NoReturn:
        raise self._refused("one int was asked of it")

    guard_int = int_

    def _refused(self, what: str) -> UsageError:
        shown = ", ".join(f"member {k}: {n}" for k, n in list(self._local_ints.items())[:4]) + (
            ", ..." if len(self._local_ints) > 4 else ""
        )
        return UsageError(
            f"this number differs from member to member ({shown}), and {what}: one program speaks for all members, and takes one way. "
            "Compute with the tensor that it is, mesh.coordinate(dim), and torch.where, or with one member's tensors, t.member(k)"
        )


class _Undecided:
    """The answer to whether such a number equals another: it differs, too, which is said to whoever needs one."""

    def __init__(self, error: UsageError) -> None:
        self._error = error

    def __repr__(self) -> str:
        return "<differs from member to member>"

    _graph_repr = __repr__

    def bool_(self) -> NoReturn:
        raise self._error

    def guard_bool(self, file: str, line: int) -> NoReturn:
        raise self._error

    expect_true = guard_size_oblivious = guard_bool

    def guard_or_false(self, file: str, line: int) -> bool:
        """Return False, for those who look for a shorter way: a slice for whether it is everything."""
        return False

    statically_known_true = guard_or_false

    def guard_or_true(self, file: str, line: int) -> bool:
        """Return True."""
        return True

    def is_bool(self) -> bool:
        return True

    def is_int(self) -> bool:
        return False

    is_float = is_symbolic = is_constant = is_nested_int = is_int

    def sym_not(self) -> _Undecided:
        return self


def _computed(name: str) -> Callable[..., Any]:
    method = getattr(_local_tensor.LocalIntNode, name)

    def compute(self: _Varying, *others: Any) -> Any:
        found = method(self, *others)
        return _Varying(found._local_ints) if type(found) is _local_tensor.LocalIntNode else found

    return compute


def _compared(name: str, sign: str) -> Callable[..., Any]:
    compare = getattr(operator, name)

    def ask(self: _Varying, other: Any) -> Any:
        others = getattr(other, "_local_ints", None)
        answers = {compare(n, other.maybe_as_int() if others is None else others[k]) for k, n in self._local_ints.items()}
        if len(answers) > 1:
            return _Undecided(self._refused(f"so does whether it is {sign} {other}"))
        return torch._C._get_constant_bool_symnode(answers.pop())

    return ask


for _name in ("add", "sub", "mul", "mod", "neg", "floordiv", "int_floordiv", "sym_max", "sym_min", "sym_sum"):
    setattr(_Varying, _name, _computed(_name))
for _name, _sign in {"eq": "equal to", "ne": "unlike", "lt": "below", "le": "at most", "gt": "above", "ge": "at least"}.items():
    setattr(_Varying, _name, _compared(_name, _sign))


def varying(values: Sequence[int]) -> Any:
    """Return the int that is `values[k]` on member k; a plain one where all are equal."""
    if len(set(values)) == 1:
        return values[0]
    return torch.SymInt(_Varying(dict(enumerate(values))))


def varies(value: Any) -> bool:
    """Whether a value is an int that differs from member to member."""
    return isinstance(value, torch.SymInt) and isinstance(value.node, _local_tensor.LocalIntNode)


def _at(value: Any, k: int) -> Any:
    if isinstance(value, DistributedTensor) and value._handle.place.node.members:
        return wrap(type(value), member_of(value._handle, k))
    return value.node._local_ints[k] if varies(value) else value


def run_for_each(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function once for each member, on its shards and its numbers; return the results as a mesh's."""
    flat, shape = tree_flatten((list(args), kwargs))
    homes = [t._handle.place for t in flat if isinstance(t, DistributedTensor) and t._handle.place.node.members]
    count = len(homes[0].node.members) if homes else len(next(v for v in flat if varies(v)).node._local_ints)
    found = []
    with torch.no_grad():
        for k in range(count):
            own, named = tree_unflatten([_at(value, k) for value in flat], shape)
            found.append(function(*own, **named))
    name = getattr(function, "__qualname__", str(function))
    return _joined(found, homes[0] if homes else None, name)


def _joined(found: list[Any], home: Any, name: str) -> Any:
    first = found[0]
    if isinstance(first, torch.Tensor):
        shapes = [tuple(t.shape) for t in found]
        if len(set(shapes)) > 1:
            shown = ", ".join(f"member {k}: {shape}" for k, shape in enumerate(shapes[:4])) + (", ..." if len(shapes) > 4 else "")
            raise NotSupportedError(
                f"{name}: the members' shards would have different shapes ({shown}), and a mesh's tensor has one. Make the size a multiple "
                "of the number of members, or use lists of tensors, which may be uneven: distruntime.primitives"
            )
        if all(t.device.type == "meta" for t in found):  # a model that has no memory yet
            return first
        if home is None or not all(isinstance(t, DistributedTensor) for t in found):
            raise NotSupportedError(
                f"{name}: torch asks for this process's own part here, and this process speaks for all members of a mesh. "
                "distruntime.fetch(x) gives the whole of a DTensor, distruntime.fetch(model.state_dict()) of a model"
            )
        alike = len({t.stride() for t in found}) == 1  # views must stay views: what is written to them is the tensor's
        handles = [(t if alike else t.contiguous())._handle for t in found]
        return wrap(DistributedTensor, mesh_of(home.node, home, handles))
    if isinstance(first, int) and not isinstance(first, bool):
        return varying(found)
    if isinstance(first, (list, tuple)):
        return type(first)(_joined(list(items), home, name) for items in zip(*found))
    return first


def per_member(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that depends on the rank, so that on a mesh's tensors it runs for each member."""

    @functools.wraps(function)
    def choose(*args: Any, **kwargs: Any) -> Any:
        flat, _ = tree_flatten((args, kwargs))
        if any(varies(value) for value in flat):
            return run_for_each(function, args, kwargs)
        return function(*args, **kwargs)

    return choose
