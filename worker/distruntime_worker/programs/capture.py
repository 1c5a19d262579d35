"""One capture of a program's kernels: the memory that it reads and writes, and its launch.

A graph reads and writes the addresses that it was captured with. So operands are copied into memory of its
own, and what it makes is copied out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from distruntime.wire.messages import ARGUMENT, Plain

from ..values.step import Slots, Words
from .definition import Definition, Name
from .source import Straight


class Device(Protocol):
    """What captures kernels and launches them again."""

    def refusal(self, device: torch.device) -> str:
        """Say why nothing can be captured on a device, or return nothing."""

    def capture(self, device: torch.device, call: Callable[[], None]) -> Callable[[], None]:
        """Note what `call` would launch, and launch nothing. Return what launches all of it."""


class Refused(Exception):
    """A program cannot be captured."""


# What a graph takes for granted of a tensor, besides its address.
Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]


class Place(NamedTuple):
    """Where an operand was. Its memory is held weakly, so that no graph keeps that of a model that is gone.

    A backward pass gets views of parameters that are made anew each time, so no tensor itself is asked for.
    """

    memory: StorageWeakRef
    address: int
    offset: int
    kind: Kind

    def has(self, value: torch.Tensor) -> bool:
        """Whether a tensor is there, and alike. It may have been resized or set in place."""
        return (
            # While there is a weak reference, no other memory gets this number.
            self.memory.cdata == value.untyped_storage()._cdata
            and self.address == value.data_ptr()
            and self.offset == value.storage_offset()
            and self.kind == kind_of(value)
        )


class _Output(NamedTuple):
    """How a value that leaves the graph is made anew: a view of an input's memory, or of a copy."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    # It counts from where the input begins, or the copy's memory.
    offset: int
    # It is in the memory of this input, or in the copy of this number.
    input: Name | None
    copy: int
    # It is here if it is in a held tensor's memory. Others would keep the memory of a fixed operand.
    held: torch.Tensor | None


class Graph:
    """One capture. `own` are its inputs that are copied into memory of its own, by name.

    Whoever runs it knows that its fixed inputs are where they were. It keeps none of them.
    """

    def __init__(
        self,
        device: Device,
        straight: Straight,
        definition: Definition,
        inputs: Mapping[Name, torch.Tensor],
        copied: Collection[Name],
        fixed: Collection[Name],
    ) -> None:
        self.own = {name: _static(inputs[name]) for name in copied}
        self._held = {
            name: (value, value.data_ptr())
            for name, value in inputs.items()
            if name not in self.own and name not in fixed
        }
        first = 1 + definition.tensors
        words: Words = [0, *(-k for k in range(1, first + len(definition.results)))]
        values: Slots = {}
        given = {**inputs, **self.own}
        for (kind, what), value in given.items():
            values[-int(what) if kind == ARGUMENT else what] = value
        where = next(iter(inputs.values())).device
        self._launch = device.capture(where, lambda: straight(values, words, 0))
        self._memories: list[torch.UntypedStorage] = []
        places: dict[int, tuple[Name | None, int]] = {}
        # Held tensors come last: in their memory, a result may have any dtype.
        for name in (*fixed, *self.own, *self._held):
            places[given[name].untyped_storage()._cdata] = name, -1
        # What stays comes first, and then the results.
        refs: list[Plain] = [*(ref for ref, _ in definition.kept), *words[first:]]
        self._outputs = [self._output(values[ref], where, places, given) for ref in refs]

    def _output(
        self,
        value: object,
        where: torch.device,
        places: dict[int, tuple[Name | None, int]],
        given: Mapping[Name, torch.Tensor],
    ) -> _Output:
        if not isinstance(value, torch.Tensor) or not is_plain(value) or value.device != where:
            raise Refused(f"it makes what is no plain tensor on {where}")
        memory = value.untyped_storage()
        if memory._cdata not in places:
            places[memory._cdata] = None, len(self._memories)
            self._memories.append(memory)
        name, copy = places[memory._cdata]
        held = value if name in self._held else None
        offset = int(value.storage_offset())
        if name is not None and held is None:
            if given[name].dtype != value.dtype:
                raise Refused("it returns an argument's memory as another dtype")
            offset -= int(given[name].storage_offset())
        return _Output(value.dtype, value.size(), value.stride(), offset, name, copy, held)

    def holds(self, inputs: Mapping[Name, torch.Tensor]) -> bool:
        """Whether the held tensors are where they were."""
        return all(
            inputs[name] is value and value.data_ptr() == address
            for name, (value, address) in self._held.items()
        )

    def takes(self, inputs: Mapping[Name, torch.Tensor]) -> bool:
        """Whether the operands are of the kind that it was captured for."""
        return all(kind_of(inputs[name]) == kind_of(own) for name, own in self.own.items())

    def run(self, inputs: Mapping[Name, torch.Tensor], written: Collection[Name]) -> list[torch.Tensor]:
        """Launch it; return what stays under the refs of `kept`, and then its results."""
        # What it writes cannot be written twice, so nothing may fail behind the launch.
        copies = [torch.UntypedStorage(memory.nbytes(), device=memory.device) for memory in self._memories]
        for name, own in self.own.items():
            own.copy_(inputs[name])
        self._launch()
        for name in written:
            if name in self.own:
                inputs[name].copy_(self.own[name])
        for copy, memory in zip(copies, self._memories):
            copy.copy_(memory)
        return [self._anew(output, inputs, copies) for output in self._outputs]

    def _anew(
        self, output: _Output, inputs: Mapping[Name, torch.Tensor], copies: Sequence[torch.UntypedStorage]
    ) -> torch.Tensor:
        if output.input is None:
            memory = copies[output.copy]
            empty = torch.empty(0, dtype=output.dtype, device=memory.device)
            return empty.set_(memory, output.offset, output.size, output.stride)
        if output.held is not None:
            return torch.ops.aten.alias(output.held)  # type: ignore[no-any-return]
        base = inputs[output.input]
        return base.as_strided(output.size, output.stride, base.storage_offset() + output.offset)


def is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is neither sparse nor conjugated in place."""
    return value.layout is torch.strided and not value.is_conj() and not value.is_neg()


def kind_of(value: torch.Tensor) -> Kind:
    """Return what a graph takes for granted of a tensor."""
    return value.size(), value.stride(), value.dtype, value.device, is_plain(value)


def place_of(value: torch.Tensor) -> Place:
    """Return where a tensor is."""
    memory = StorageWeakRef(value.untyped_storage())
    return Place(memory, value.data_ptr(), int(value.storage_offset()), kind_of(value))


def _static(value: torch.Tensor) -> torch.Tensor:
    found = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return found.copy_(value)
