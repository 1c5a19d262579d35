"""CUDA graphs: the kernels of a program as one launch, captured behind a few runs as straight-line code.

Operands are copied for a graph, and what it makes is copied out (`capture.py`). Held tensors are read where
they are, as long as they stay there. So are fixed operands, which were in one and the same memory in each run
before the capture: the parameters of a model, and views of them. What cannot be captured runs as
straight-line code, and the program's user is told why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import torch

from distruntime.wire.messages import ARGUMENT, HELD, MADE, Plain

from ..values.step import Slots, Step, Words
from .capture import Device, Graph, Place, Refused, is_plain, kind_of, place_of
from .definition import Definition, Name
from .regions import placed_in
from .source import Straight

# So many runs come before the capture: libraries choose their kernels meanwhile, and allocate workspaces.
_WARM = 3
# A graph waits for so many runs until its scalars are on the GPU. Attention hands its backward pass a seed on
# the CPU, until its forward pass is a graph: then the seed is where that graph can write it.
_PATIENCE = 20
# A graph is captured so often, as held tensors may get other memory. An operand that has changed so often
# behind a capture is copied, however long it stays then.
_MOST = 4
_EARLY = f"no graph yet: it is captured behind {_WARM} runs as straight-line code"


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
        # Operands are copied, but for those in `_fixed`. `_changes` counts how often one was fixed in vain.
        self._operands = [name for name in self._inputs if name[0] == ARGUMENT or name[1] in moved]
        self._fixed: dict[Name, Place] = {}
        self._changes: Counter[Name] = Counter()
        # It is what a master may ask for: "cudagraphs", or why there is none.
        self.state = _EARLY
        self._runs = self._moves = self._waited = 0
        self._over = False
        self._graph: Graph | None = None

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
            if not isinstance(error, Refused):
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
            if self._waits(inputs):
                return False
            self._require_capturable(inputs)
            self._fixed = {
                name: place_of(inputs[name])
                for name in self._operands
                # What a run leaves in an object is another tensor each time.
                if name[0] == ARGUMENT and self._changes[name] < _MOST
            }
        fixed = {name: place for name, place in self._fixed.items() if place.has(inputs[name])}
        if self._runs < _WARM:
            self._fixed = fixed
            self._runs += 1
            return False
        copied = [name for name in self._operands if name not in fixed]
        if not self._alone() or not self._apart(inputs, copied):
            return False
        graph = self._graph
        if graph is not None and not (graph.takes(inputs) and self._alike(inputs, fixed)):
            return False
        if graph is not None and len(fixed) < len(self._fixed):
            # A model may have got other parameters, or another model came. So all begins anew with this run.
            self._changes.update(name for name in self._fixed if name not in fixed)
            self._graph, self._runs, self.state = None, 0, _EARLY
            return self._begun(straight, inputs)
        if graph is None or not graph.holds(inputs):
            if graph is not None:
                self._moves += 1
            if self._moves == _MOST:
                raise Refused("what it reads has other memory again and again")
            self._fixed, self._graph = fixed, None
            self._graph = Graph(self._device, straight, self._definition, inputs, copied, fixed)
            self.state = "cudagraphs"
        return True

    def _alike(self, inputs: Mapping[Name, torch.Tensor], fixed: Collection[Name]) -> bool:
        """Whether operands that are fixed no more are of the kind that the graph was captured for.

        One call with another shape is straight-line code, and costs no graph.
        """
        return all(
            place.kind == kind_of(inputs[name]) for name, place in self._fixed.items() if name not in fixed
        )

    def _waits(self, inputs: Mapping[Name, torch.Tensor]) -> bool:
        """Whether it reads scalars of the CPU beside an accelerator's tensors, which a later run may not."""
        there = {value.device for value in inputs.values() if value.device.type != "cpu"}
        here = [value for value in inputs.values() if value.device.type == "cpu"]
        if len(there) != 1 or not here or any(value.dim() for value in here) or self._waited == _PATIENCE:
            return False
        self._waited += 1
        self.state = f"no graph yet: it reads a scalar on cpu beside tensors on {there.pop()}"
        return True

    def _require_capturable(self, inputs: Mapping[Name, torch.Tensor]) -> None:
        devices = {value.device for value in inputs.values()}
        # A scalar of the CPU may stand beside an accelerator's tensors, and these say where it runs.
        where = min(
            devices, key=lambda device: (device.type == "cpu", str(device)), default=torch.device("cpu")
        )
        why = self._device.refusal(where)
        if why:
            raise Refused(why)
        if len(devices) != 1:
            raise Refused(f"its tensors are on {', '.join(sorted(map(str, devices))) or 'no device'}")
        if self._definition.numbers:
            raise Refused("a number changes at each call")
        if placed_in(self._definition, self._parts, self._operands):
            raise Refused("an offset counts from the begin of a memory of which it would have a copy")
        for instruction in self._definition.instructions:
            part = self._parts[instruction.row]
            if part.lanes:
                raise Refused("several members of a mesh run it in turns")
            if part.pattern is None or not isinstance(part.pattern.call, torch._ops.OpOverload):
                raise Refused(f"{part.name} is no operator of torch's")
            reads = any(kind in (ARGUMENT, HELD, MADE) for kind, _ in instruction.words)
            if not (part.devices or reads) or any(_elsewhere(device, where) for device in part.devices):
                raise Refused(f"{part.name} makes a tensor that is not on {where}")
        odd = next((value for value in inputs.values() if not is_plain(value)), None)
        if odd is not None:
            raise Refused("it reads a tensor that is sparse, or conjugated in place")

    def _apart(self, inputs: Mapping[Name, torch.Tensor], copied: Sequence[Name]) -> bool:
        """Whether no memory that it writes has another name in this run: operands are copied one by one."""
        if not self._written:
            return True
        names: dict[int, list[Name]] = {}
        for name, value in inputs.items():
            names.setdefault(value.untyped_storage()._cdata, []).append(name)
        written = [inputs[name].untyped_storage()._cdata for name in self._written if name in inputs]
        shared = (names[memory] for memory in written if len(names[memory]) > 1)
        return not any(name in copied for one in shared for name in one)


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
