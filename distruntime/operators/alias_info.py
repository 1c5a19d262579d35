"""What an operator's schema says of the memory of its arguments and results, and the tensors among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch

from ..wire.undeclared_writes import undeclared_writes

# This is one of torch's operators. Each takes arguments of its own, which its schema says and no type.
Operator: TypeAlias = "torch._ops.OpOverload[..., object]"


_SIZES = {int}


def tensors_of(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments, in the order in which operand words are written."""
    found: list[torch.Tensor] = []
    # Operators take lists of tensors and nothing deeper. torch's pytree, in Python, took a tenth of a model's
    # first step.
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            # The kinds of hundreds of parameters are found in C. Asking torch for each takes 0.2 us.
            kinds = {*map(type, value)}
            if kinds == _SIZES:
                continue
            if all(issubclass(kind, torch.Tensor) for kind in kinds):
                found += value
            else:
                found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


@cache
def writes_lists(func: Operator) -> bool:
    """Whether an operator writes to members of lists. Autograd does not count these, but torch's kernels do.

    Those of fused optimizers and of gradient scaling do not.
    """
    return not func._schema.name.startswith(("aten::_fused", "aten::_amp_foreach")) and any(
        a.alias_info is not None and a.alias_info.is_write and str(a.type) == "List[Tensor]"
        for a in func._schema.arguments
    )


class _Argument(NamedTuple):
    """What a schema says of an argument. `sets` are its alias sets, and `whole` says that lists share it."""

    name: str
    by_keyword: bool
    sets: tuple[str, ...]
    whole: bool
    written: bool


@cache
def _declared(func: Operator) -> tuple[tuple[_Argument, ...], tuple[frozenset[str] | None, ...], bool]:
    """Return what an operator's schema says of its arguments, the alias sets of its results, and whether it
    may write what its schema does not mark.

    Reading them from torch takes 15 us each time.
    """
    arguments = tuple(
        _Argument(
            argument.name,
            argument.kwarg_only,
            tuple(argument.alias_info.before_set) if argument.alias_info is not None else (),
            argument.alias_info is not None and "*" in argument.alias_info.after_set,
            argument.alias_info is not None and argument.alias_info.is_write,
        )
        for argument in func._schema.arguments
    )
    results = tuple(
        None if result.alias_info is None else frozenset(result.alias_info.before_set)
        for result in func._schema.returns
    )
    undeclared = bool(undeclared_writes(func._schema.name, [argument.name for argument in arguments], {}))
    return arguments, results, undeclared


def argument_named(func: Operator, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an argument of a call by its name in the schema; None if the call does not give it."""
    for given, declared in zip(args, _declared(func)[0]):
        if declared.name == name:
            return given
    return kwargs.get(name)


def aliases(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[dict[str, int], tuple[int, ...], list[int | None]]:
    """Return, from the schema: the first tensor operand of each alias set, the operands written, and each
    result's aliased operand.
    """
    arguments, returned, may_write = _declared(func)
    sets: dict[str, int] = {}
    written: list[int] = []
    number = 0
    # A list of views shares this operand's memory: `split(Tensor(a -> *) self) -> Tensor(a)[]`.
    whole: int | None = None
    undeclared: set[str] = set()
    if may_write:
        names = [argument.name for argument in arguments]
        undeclared = undeclared_writes(func._schema.name, names, {**dict(zip(names, args)), **kwargs})
    for k, argument in enumerate(arguments):
        if not argument.by_keyword and k < len(args):
            value = args[k]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        here = len(tensors_of((value,), {}))
        for name in argument.sets:
            sets.setdefault(name, number)
        if argument.whole:
            whole = number
        if argument.written or argument.name in undeclared:
            written += range(number, number + here)
        number += here
    # The binding gives an empty set of names for a list.
    shared = [
        None if names is None else next((sets[name] for name in names if name in sets), whole)
        for names in returned
    ]
    return sets, tuple(written), shared
