"""Holds instructions to what their session may hold: stands around what makes values, where a worker was started with `--max-memory`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch

from distruntime.wire.codec import dtype_named

from ..collectives.mesh_operation import LaneCollective
from ..collectives.operation import Collective
from ..values.functions import resize_storage
from ..values.mesh_lanes import Lanes, Shards
from ..values.objects import Poisoned, described
from ..values.template import Run, Slots, Template
from .state import State

log = logging.getLogger("distruntime.worker")

_META = torch.device("meta")
_MOST = 1024  # sizes that are remembered of one template

Sizes = tuple[list[torch.device], int]  # on each of these devices, so many bytes


def guarded(
    state: State,
    found: Template | Lanes | Collective | LaneCollective,
    devices: list[torch.device],
    call: Any = None,
    args: Any = (),
    kwargs: Any = None,
    results: Any = None,
) -> Run:
    """Return what runs a template's instructions: its own `run`, unless the session has a budget, and they make values.

    `devices` are those that its results will be on, if they are known; `call` and what follows what a `Template` is made from.
    """
    if state.budget is None:
        return found.run
    operator = isinstance(call, torch._ops.OpOverload)
    if not found.writes:
        resize = _resize(call, args)
        return found.run if resize is None or not isinstance(found, (Template, Lanes)) else Resizing(state, found, resize)
    if found.views:  # an operator of views makes no memory
        return found.run
    guard = Guarded(state, found, devices, operator and torch.Tag.dynamic_output_shape not in call.tags)
    if operator and devices and not found.reads:
        guard.shadow = Template(found.name, call, args, kwargs or {}, results, lambda _: _META, _raise)
    if isinstance(found, (Template, Lanes)):
        found.guard = guard
    return guard


def _resize(call: Any, args: list[Any]) -> Callable[[torch.Tensor], int] | None:
    """Return what tells how many bytes an operator will have given a tensor: 0 if that is not known before; None if it changes no size."""
    if call is resize_storage:
        return lambda _: int(args[1])
    if call is torch.ops.aten.resize_.default and all(type(n) is int for n in args[1][1:]):
        return lambda tensor: prod(args[1][1:]) * tensor.itemsize
    schema = getattr(call, "_schema", None)
    out = schema is not None and any(a.kwarg_only and a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return (lambda _: 0) if out or torch.Tag.inplace_view in getattr(call, "tags", ()) else None


def _raise(template: Any, slots: Slots, p: list[Any], i: int, error: BaseException) -> None:
    raise error


def _each(slots: Slots, refs: list[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory among values, also those of several members of a mesh."""
    for ref in refs:
        value = slots.get(ref)
        for one in value if isinstance(value, Shards) else (value,):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                yield one


def _looks(value: Any) -> Any:
    if isinstance(value, Shards):
        return tuple(map(_looks, value))
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


class Guarded:
    """Runs a template's instructions, and drops their results again where the session may not hold them; a `Run`.

    What is known to be large is asked for first: a request for a terabyte must not be tried. How large a result is, is known from the
    master's prediction, from the last time that operands had these shapes, and without operands from torch's meta kernel.
    """

    def __init__(
        self, state: State, template: Template | Lanes | Collective | LaneCollective, devices: list[torch.device], steady: bool
    ) -> None:
        assert state.budget is not None
        self._state, self._budget, self._template, self._devices = state, state.budget, template, devices
        self._steady = steady  # whether operands of the same shapes give results of the same size
        self._writes, self._name = template.writes, template.name.replace("::", ".")
        self._numbers = [k for k in range(1, min(template.writes)) if k not in template.reads]  # offsets of words that are no refs
        self._known: dict[Any, Sizes] = {}
        self.shadow: Template | None = None

    def __call__(self, slots: Slots, p: list[Any], i: int) -> int:
        template, budget = self._template, self._budget
        if self._known or self.shadow is not None:
            try:
                budget.require(*self._sizes(slots, p, i), self._name)
            except torch.OutOfMemoryError as error:
                assert isinstance(template, (Template, Lanes))  # others are never `_steady`: at other workers they are counted on
                self._state.fail(template, slots, p, i, error)
                return i + template.length
        after = template.run(slots, p, i)
        value = slots.get(p[i + self._writes[0]])
        if len(self._writes) == 1 and type(value) is torch.Tensor and value.layout is torch.strided:  # as below, 0.9 us sooner
            total = value.untyped_storage().nbytes()
            made = [(value.device, total)]
        else:
            made = [(one.device, one.untyped_storage().nbytes()) for one in _each(slots, [p[i + k] for k in self._writes])]
            total = sum(nbytes for _, nbytes in made)
        if total >= budget.large:
            on = self._devices or [made[0][0]]
            self._remember(slots, p, i, (on, total // len(on)))
        try:
            for device, nbytes in made:
                budget.add(device, nbytes, self._name)
        except torch.OutOfMemoryError as error:
            operands = described([slots.get(p[i + k]) for k in template.reads])
            cause = self._state.failure(p, i, error, template.name, operands)
            for k in self._writes:
                slots[p[i + k]] = Poisoned(cause)
        return after

    def expect(self, predicted: list[list[Any]], slots: Slots, p: list[Any], i: int) -> None:
        """Take note of what the master says that the instruction at `i` will return."""
        nbytes = sum(prod(sizes) * dtype_named(dtype).itemsize for sizes, _, _, dtype, _ in predicted)
        if nbytes >= self._budget.large:
            operands = _each(slots, [p[i + k] for k in self._template.reads])
            self._remember(slots, p, i, (self._devices or [one.device for one in operands][:1], nbytes))

    def _key(self, slots: Slots, p: list[Any], i: int) -> Any:
        return tuple(_looks(slots.get(p[i + k])) for k in self._template.reads), tuple(p[i + k] for k in self._numbers)

    def _remember(self, slots: Slots, p: list[Any], i: int, sizes: Sizes) -> None:
        if self._steady:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[self._key(slots, p, i)] = sizes

    def _sizes(self, slots: Slots, p: list[Any], i: int) -> Sizes:
        """Return what the instruction at `i` will make, as far as that is known."""
        known = self._known.get(self._key(slots, p, i))
        if known is not None or self.shadow is None:
            return known or ([], 0)
        own: Slots = {}
        try:
            self.shadow.run(own, p, i)
        except Exception as error:  # whatever it is: the real one tells the master
            log.debug("no meta kernel tells the size of %s: %s", self._name, error)
            self.shadow = None
            return [], 0
        nbytes = sum(value.untyped_storage().nbytes() for value in own.values())
        self._remember(slots, p, i, (self._devices, nbytes))
        return self._devices, nbytes


class Resizing:
    """Runs an operator that may change the size of a tensor's memory, and nothing else's; a `Run`."""

    def __init__(self, state: State, template: Template | Lanes, after: Callable[[torch.Tensor], int]) -> None:
        assert state.budget is not None
        self._state, self._budget, self._template, self._after = state, state.budget, template, after
        self._name = template.name.replace("::", ".")

    def __call__(self, slots: Slots, p: list[Any], i: int) -> int:
        template, budget = self._template, self._budget
        refs = [p[i + k] for k in template.mutates or template.reads]
        before = [(one, one.untyped_storage().nbytes()) for one in _each(slots, refs)]
        try:
            for one, old in before:
                budget.require([one.device], max(0, self._after(one) - old), self._name)
            after = template.run(slots, p, i)
            for one, old in before:
                budget.add(one.device, max(0, one.untyped_storage().nbytes() - old), self._name)
        except torch.OutOfMemoryError as error:
            self._state.fail(template, slots, p, i, error)
            return i + template.length
        return after
