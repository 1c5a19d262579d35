"""CUDA graphs: the kernels of a program as one launch, captured behind a few runs as straight-line code.

A graph reads and writes the addresses that it was captured with. So operands are copied into memory of its
own, held tensors are read where they are, as long as they stay there, and what it makes is copied out. What
cannot be captured runs as straight-line code, and the program's user is told why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

from distruntime.wire.messages import ARGUMENT, HELD, MADE, Plain

from ..values.step import Slots, Step, Words
from .definition import Definition, Name
from .regions import placed_in
from .source import Straight

# So many runs come before the capture: libraries choose their kernels meanwhile, and allocate workspaces.
_WARM = 3
# A graph is captured so often, as held tensors may get other memory.
_MOST = 4
_EARLY = f"no graph yet: it is captured behind {_WARM} runs as straight-line code"


class Device(Protocol):
    """What captures kernels and launches them again."""

    def refusal(self, device: torch.device) -> str:
        """Say why nothing can be captured on a device, or return nothing."""

    def capture(self, device: torch.device, call: Callable[[], None]) -> Callable[[], None]:
        """Note what `call` would launch, and launch nothing. Return what launches all of it."""


class Cuda:
    """The CUDA devices of this process."""

    def refusal(self, device: torch.device) -> str:
        """Say why nothing can be captured on a device, or return nothing."""
        if not torch.cuda.is_available():
            return "the worker has no CUDA device"
        return "" if device.type == "cuda" else f"its tensors are on {device}"

    def capture(self, device: torch.device, call: Callable[[], None]) -> Callable[[], None]:
        """Capture on a stream of its own, with memory of its own."""
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        # With its state registered, each launch draws on from where the generator is then.
        graph.register_generator_state(torch.cuda.default_generators[side.device_index])
        # Whatever still runs may hold memory that the graph reads.
        torch.cuda.synchronize(device)
        with torch.cuda.stream(side):
            # Other threads may allocate meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                # It says only that the capture has failed, and the first error says why.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay


class _Refused(Exception):
    """A program cannot be captured."""


class _Output(NamedTuple):
    """How a value that leaves the graph is made anew: a view of an input's memory, or of a copy."""

    tensor: torch.Tensor
    # It is in the memory of this input, or in the copy of this number.
    input: Name | None
    copy: int


class _Graph:
    """One capture. `own` are its inputs that are copied into memory of its own, by name."""

    def __init__(
        self,
        device: Device,
        straight: Straight,
        definition: Definition,
        inputs: Mapping[Name, torch.Tensor],
        copied: Collection[Name],
    ) -> None:
        self.own = {name: _static(inputs[name]) for name in copied}
        self._held = {name: (value, value.data_ptr()) for name, value in inputs.items() if name not in copied}
        first = 1 + definition.tensors
        words: Words = [0, *(-k for k in range(1, first + len(definition.results)))]
        values: Slots = {}
        for (kind, what), value in {**inputs, **self.own}.items():
            values[-int(what) if kind == ARGUMENT else what] = value
        where = next(iter(inputs.values())).device
        self._launch = device.capture(where, lambda: straight(values, words, 0))
        self._memories: list[torch.UntypedStorage] = []
        places: dict[int, tuple[Name | None, int]] = {}
        for name, value in {**inputs, **self.own}.items():
            places[value.untyped_storage()._cdata] = name, -1
        # What stays comes first, and then the results.
        refs: list[Plain] = [*(ref for ref, _ in definition.kept), *words[first:]]
        self._outputs = [self._output(values[ref], where, places) for ref in refs]

    def _output(
        self, value: object, where: torch.device, places: dict[int, tuple[Name | None, int]]
    ) -> _Output:
        if not isinstance(value, torch.Tensor) or not _plain(value) or value.device != where:
            raise _Refused(f"it makes what is no plain tensor on {where}")
        memory = value.untyped_storage()
        if memory._cdata not in places:
            places[memory._cdata] = None, len(self._memories)
            self._memories.append(memory)
        name, copy = places[memory._cdata]
        if name is not None and name in self.own and self.own[name].dtype != value.dtype:
            raise _Refused("it returns an argument's memory as another dtype")
        return _Output(value, name, copy)

    def holds(self, inputs: Mapping[Name, torch.Tensor]) -> bool:
        """Whether the held tensors are where they were."""
        return all(
            inputs[name] is value and value.data_ptr() == address
            for name, (value, address) in self._held.items()
        )

    def takes(self, inputs: Mapping[Name, torch.Tensor]) -> bool:
        """Whether the operands are of the kind that it was captured for."""
        return all(_alike(inputs[name], own) for name, own in self.own.items())

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
        found, offset = output.tensor, output.tensor.storage_offset()
        if output.input is None:
            empty = torch.empty(0, dtype=found.dtype, device=found.device)
            return empty.set_(copies[output.copy], offset, found.size(), found.stride())
        if output.input not in self.own:
            return torch.ops.aten.alias(found)  # type: ignore[no-any-return]
        base = inputs[output.input]
        return base.as_strided(found.size(), found.stride(), base.storage_offset() + offset)


class Graphs:
    """The graph of one program. `written` are the arguments and held values that the program writes, and
    `moved` the refs that name another value when it has run. `alone` is whether no other stream of the
    session can draw meanwhile; `warn` tells the master of an instruction's warning.
    """

    def __init__(
        self,
        definition: Definition,
        parts: Sequence[Step],
        written: Sequence[Name],
        moved: Collection[int],
        alone: Callable[[], bool],
        warn: Callable[[Words, int, str], None],
        device: Device | None = None,
    ) -> None:
        self._definition, self._parts, self._written = definition, parts, written
        self._alone, self._warn, self._device = alone, warn, device or Cuda()
        read = dict.fromkeys(
            name for one in definition.instructions for name in (*one.words, *(one.kin or ()))
        )
        read.update(dict.fromkeys((*(name for _, name in definition.kept), *definition.results)))
        self._inputs = [name for name in read if name[0] in (ARGUMENT, HELD)]
        self._copied = [name for name in self._inputs if name[0] == ARGUMENT or name[1] in moved]
        # It is what a master may ask for: "cudagraphs", or why there is none.
        self.state = _EARLY
        self._runs = self._captures = 0
        self._over = False
        self._graph: _Graph | None = None

    def ran(self, straight: Straight, slots: Slots, p: Words, i: int) -> bool:
        """Run the instruction at `i` as a graph; return False, and do nothing, if it is not to be one."""
        if self._over:
            return False
        inputs: dict[Name, torch.Tensor] = {}
        for kind, what in self._inputs:
            value = slots.get(what if kind == HELD else p[i + int(what)])
            if not isinstance(value, torch.Tensor):
                # It is poisoned, and the straight-line code knows what to do then.
                return False
            inputs[kind, what] = value
        try:
            if not self._begun(straight, inputs):
                return False
            graph = self._graph
            assert graph is not None
        # Whatever the capture raises, the program goes on as it is, and its user is told.
        except Exception as error:
            self._over, self._graph = True, None
            text = str(error).strip().partition("\n")[0][:300]
            if not isinstance(error, _Refused):
                text = f"it cannot be captured: {type(error).__name__}: {text}"
            self.state = f"no CUDA graph: {text}, so it runs as straight-line code"
            self._warn(p, i, f"a program has {self.state}")
            return False
        found = graph.run(inputs, self._written)
        first = 1 + self._definition.tensors
        targets: list[Plain] = [ref for ref, _ in self._definition.kept]
        targets += p[i + first : i + first + len(self._definition.results)]
        slots.update(zip(targets, found))
        return True

    def _begun(self, straight: Straight, inputs: Mapping[Name, torch.Tensor]) -> bool:
        """Whether there is a graph for these inputs. Capture it if it is time."""
        if not self._runs:
            self._require_capturable(inputs)
        if self._runs < _WARM:
            self._runs += 1
            return False
        if not self._alone() or not self._apart(inputs):
            return False
        if self._graph is not None and not self._graph.takes(inputs):
            return False
        if self._graph is None or not self._graph.holds(inputs):
            if self._captures == _MOST:
                raise _Refused("what it reads has other memory again and again")
            self._captures += 1
            self._graph = None
            self._graph = _Graph(self._device, straight, self._definition, inputs, self._copied)
            self.state = "cudagraphs"
        return True

    def _require_capturable(self, inputs: Mapping[Name, torch.Tensor]) -> None:
        devices = {value.device for value in inputs.values()}
        where = min(devices, key=str, default=torch.device("cpu"))
        why = self._device.refusal(where)
        if why:
            raise _Refused(why)
        if len(devices) != 1:
            raise _Refused(f"its tensors are on {', '.join(sorted(map(str, devices))) or 'no device'}")
        if self._definition.numbers:
            raise _Refused("a number changes at each call")
        if placed_in(self._definition, self._parts, self._copied):
            raise _Refused("an offset counts from the begin of a memory of which it would have a copy")
        for instruction in self._definition.instructions:
            part = self._parts[instruction.row]
            if part.lanes:
                raise _Refused("several members of a mesh run it in turns")
            if part.pattern is None or not isinstance(part.pattern.call, torch._ops.OpOverload):
                raise _Refused(f"{part.name} is no operator of torch's")
            reads = any(kind in (ARGUMENT, HELD, MADE) for kind, _ in instruction.words)
            if not (part.devices or reads) or any(_elsewhere(device, where) for device in part.devices):
                raise _Refused(f"{part.name} makes a tensor that is not on {where}")
        odd = next((value for value in inputs.values() if not _plain(value)), None)
        if odd is not None:
            raise _Refused("it reads a tensor that is sparse, or conjugated in place")

    def _apart(self, inputs: Mapping[Name, torch.Tensor]) -> bool:
        """Whether no memory that it writes has another name in this run: operands are copied one by one."""
        if not self._written:
            return True
        memories = {name: value.untyped_storage()._cdata for name, value in inputs.items()}
        return not any(
            memories[name] == memory and name != other and (name in self._copied or other in self._copied)
            for name in self._written
            if name in memories
            for other, memory in memories.items()
        )


def _elsewhere(device: torch.device, where: torch.device) -> bool:
    return device.type != where.type or device.index not in (None, where.index)


def graphs_for(
    compile: Plain,
    definition: Definition,
    parts: Sequence[Step],
    written: Sequence[Name],
    moved: Collection[int],
    alone: Callable[[], bool],
    warn: Callable[[Words, int, str], None],
) -> Graphs | None:
    """Return what makes a graph of a program, if its master asks for that."""
    return Graphs(definition, parts, written, moved, alone, warn) if compile == "cudagraphs" else None


def _plain(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not value.is_conj() and not value.is_neg()


def _alike(value: torch.Tensor, own: torch.Tensor) -> bool:
    kinds = [(x.size(), x.stride(), x.dtype, x.device) for x in (value, own)]
    return kinds[0] == kinds[1] and _plain(value)


def _static(value: torch.Tensor) -> torch.Tensor:
    found = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return found.copy_(value)
