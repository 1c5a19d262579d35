"""Holds instructions to what their session may hold.

Stands around what makes values, where a worker was started with `--max-memory`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from math import prod

import torch

from distruntime.wire.codec import dtype_named
from distruntime.wire.messages import Plain

from ..values.functions import resize_storage
from ..values.mesh_lanes import Shards
from ..values.objects import Poisoned, described
from ..values.step import Run, Slots, Step, Words, int_word, list_word, text_word
from ..values.template import Template
from .state import State

log = logging.getLogger("distruntime.worker")

_META = torch.device("meta")
# So many sizes of one template are remembered.
_MOST = 1024

# It has the devices, and how many bytes there are on each of them.
Sizes = tuple[list[torch.device], int]


class Shares:
    """The link that holds instructions to what their session may hold, if it has a budget."""

    each = False

    def __init__(self, state: State) -> None:
        self._state = state

    def around(self, step: Step, run: Run) -> Run | None:
        """Return what runs a step that makes values, or gives them more memory, and counts that."""
        if self._state.budget is None:
            return None
        if not step.writes:
            resize = _resize(step.pattern.call, step.pattern.args) if step.pattern is not None else None
            return Resizing(self._state, step, run, resize) if resize is not None else None
        # An operator of views makes no memory.
        if step.views:
            return None
        # What it has learnt of sizes stays when another link is switched on.
        step.guard = step.guard or Guarded(self._state, step)
        return partial(step.guard.run, run)


def _resize(call: object, args: list[Plain]) -> Callable[[torch.Tensor], int] | None:
    """Return what tells how many bytes an operator will have given a tensor.

    0 if that is not known before; None if it changes no size.
    """
    if call is resize_storage:
        nbytes = int_word(args[1])
        return lambda _: nbytes
    if call is torch.ops.aten.resize_.default and all(isinstance(n, int) for n in list_word(args[1])[1:]):
        elements = prod(int_word(n) for n in list_word(args[1])[1:])
        return lambda tensor: elements * tensor.itemsize
    schema = getattr(call, "_schema", None)
    out = schema is not None and any(
        a.kwarg_only and a.alias_info is not None and a.alias_info.is_write for a in schema.arguments
    )
    return (lambda _: 0) if out or torch.Tag.inplace_view in getattr(call, "tags", ()) else None


def _raise(template: object, slots: Slots, p: Words, i: int, error: BaseException) -> None:
    raise error


def _each(slots: Slots, refs: list[Plain]) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory among values, also those of several members of a mesh."""
    for ref in refs:
        value = slots.get(ref)
        for one in value if isinstance(value, Shards) else (value,):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                yield one


def _looks(value: object) -> object:
    if isinstance(value, Shards):
        return tuple(map(_looks, value))
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


class Guarded:
    """Runs a step's instructions, and drops their results again where the session may not hold them.

    What is known to be large is asked for first: a request for a terabyte must not be tried. How large a
    result is, is known from the master's prediction, from the last time that operands had these shapes, and
    without operands from torch's meta kernel.
    """

    def __init__(self, state: State, step: Step) -> None:
        assert state.budget is not None
        self._state, self._budget, self._step, self._devices = state, state.budget, step, [*step.devices]
        call: object = step.pattern.call if step.pattern is not None else None
        operator = call if isinstance(call, torch._ops.OpOverload) else None
        # It is True if operands of the same shapes give results of the same size. An operation of a group is
        # never dropped for its size, as other workers count on it.
        self._steady = operator is not None and torch.Tag.dynamic_output_shape not in operator.tags
        self._writes, self._name = step.writes, step.name.replace("::", ".")
        # These are the offsets of words that are no refs.
        self._numbers = [k for k in range(1, min(step.writes)) if k not in step.reads]
        self._known: dict[object, Sizes] = {}
        self.shadow: Template | None = None
        if operator is not None and step.pattern is not None and step.devices and not step.reads:
            self.shadow = Template(step.name, *step.pattern, lambda _: _META, _raise)

    def run(self, run: Run, slots: Slots, p: Words, i: int) -> int:
        """Run the instruction at `i` by calling `run`."""
        step, budget = self._step, self._budget
        if self._known or self.shadow is not None:
            try:
                budget.require(*self._sizes(slots, p, i), self._name)
            except torch.OutOfMemoryError as error:
                return step.drop(slots, p, i, error)
        after = run(slots, p, i)
        value = slots.get(p[i + self._writes[0]])
        # This does what stands below, 0.9 us sooner.
        if len(self._writes) == 1 and type(value) is torch.Tensor and value.layout is torch.strided:
            total = value.untyped_storage().nbytes()
            made = [(value.device, total)]
        else:
            made = [
                (one.device, one.untyped_storage().nbytes())
                for one in _each(slots, [p[i + k] for k in self._writes])
            ]
            total = sum(nbytes for _, nbytes in made)
        if total >= budget.large:
            on = self._devices or [made[0][0]]
            self._remember(slots, p, i, (on, total // len(on)))
        try:
            for device, nbytes in made:
                budget.add(device, nbytes, self._name)
        except torch.OutOfMemoryError as error:
            operands = described([slots.get(p[i + k]) for k in step.reads])
            cause = self._state.failure(p, i, error, step.name, operands)
            for k in self._writes:
                slots[p[i + k]] = Poisoned(cause)
        return after

    def expect(self, predicted: Plain, slots: Slots, p: Words, i: int) -> None:
        """Take note of what the master says that the instruction at `i` will return."""
        nbytes = 0
        for spec in list_word(predicted):
            sizes, _, _, dtype, _ = list_word(spec)
            nbytes += prod(int_word(n) for n in list_word(sizes)) * dtype_named(text_word(dtype)).itemsize
        if nbytes >= self._budget.large:
            operands = _each(slots, [p[i + k] for k in self._step.reads])
            self._remember(slots, p, i, (self._devices or [one.device for one in operands][:1], nbytes))

    def _key(self, slots: Slots, p: Words, i: int) -> object:
        looks = tuple(_looks(slots.get(p[i + k])) for k in self._step.reads)
        return looks, tuple(p[i + k] for k in self._numbers)

    def _remember(self, slots: Slots, p: Words, i: int, sizes: Sizes) -> None:
        if self._steady:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[self._key(slots, p, i)] = sizes

    def _sizes(self, slots: Slots, p: Words, i: int) -> Sizes:
        """Return what the instruction at `i` will make, as far as that is known."""
        known = self._known.get(self._key(slots, p, i))
        if known is not None or self.shadow is None:
            return known or ([], 0)
        own: Slots = {}
        try:
            self.shadow.run(own, p, i)
        except Exception as error:
            # Whatever the error is, the real kernel tells the master.
            log.debug("no meta kernel tells the size of %s: %s", self._name, error)
            self.shadow = None
            return [], 0
        nbytes = sum(one.untyped_storage().nbytes() for one in _each(own, [*own]))
        self._remember(slots, p, i, (self._devices, nbytes))
        return self._devices, nbytes


class Resizing:
    """Runs an operator that may change the size of a tensor's memory, and nothing else's; a `Run`."""

    def __init__(self, state: State, step: Step, run: Run, after: Callable[[torch.Tensor], int]) -> None:
        assert state.budget is not None
        self._budget, self._step, self._run, self._after = state.budget, step, run, after
        self._name = step.name.replace("::", ".")

    def __call__(self, slots: Slots, p: Words, i: int) -> int:
        step, budget = self._step, self._budget
        refs = [p[i + k] for k in step.mutates or step.reads]
        before = [(one, one.untyped_storage().nbytes()) for one in _each(slots, refs)]
        try:
            for one, old in before:
                budget.require([one.device], max(0, self._after(one) - old), self._name)
            after = self._run(slots, p, i)
            for one, old in before:
                budget.add(one.device, max(0, one.untyped_storage().nbytes() - old), self._name)
        except torch.OutOfMemoryError as error:
            return step.drop(slots, p, i, error)
        return after
