"""Regions: stretches of a program that Inductor compiles to one call each.

Some instructions are outside of every region: those that draw random numbers, as Inductor draws others; those
with a number that changes at each replay; those that are one kernel already (`_fused_...`); those with an
offset into an argument's memory; and the worker's own. A region ends where another instruction would have it
write a memory that it gets under two names.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from distruntime.wire.codec import KIN, OPERAND, unpack_constant
from distruntime.wire.messages import ARGUMENT, FLOAT, MADE, NUMBER, Plain

from ..values.step import Pattern, Step
from .definition import Definition, Instruction, Name

# A region of fewer instructions gains less than its call costs.
_FEWEST = 3
# These operators have an offset among their constants.
_PLACED = ("aten::as_strided", "aten::set_")
Compiled = Callable[..., Sequence[torch.Tensor]]  # type: ignore[explicit-any]


@dataclass(frozen=True)
class Region:
    """The instructions from `first` to before `behind`, with what they read and what is read of them."""

    first: int
    behind: int
    inputs: Sequence[Name]
    outputs: Sequence[Name]
    # If it writes what it has not made, it cannot run again.
    writes: bool


def bases_of(definition: Definition, parts: Sequence[Step]) -> dict[Name, set[Name]]:
    """Return what each view that a program makes may be a view of, in the end."""
    bases: dict[Name, set[Name]] = {}
    for instruction in definition.instructions:
        viewed: set[Name] = set()
        for k in parts[instruction.row].views:
            name = instruction.words[k - 1]
            viewed |= bases.get(name, {name})
        if viewed:
            bases.update(((MADE, number), viewed) for number in instruction.makes)
    return bases


def placed_in(definition: Definition, parts: Sequence[Step], moving: Collection[Name]) -> set[int]:
    """Return the instructions with an offset that counts from the begin of the memory of one of these.

    Where an argument begins there, for example, is another place in each run.
    """
    bases = bases_of(definition, parts)
    found: set[int] = set()
    for at, instruction in enumerate(definition.instructions):
        pattern = parts[instruction.row].pattern
        if pattern is None or not isinstance(pattern.call, torch._ops.OpOverload):
            continue
        if pattern.call._schema.name.startswith(_PLACED):
            roots = (root for name in instruction.words for root in bases.get(name, {name}))
            if any(root in moving for root in roots):
                found.add(at)
    return found


def regions_of(definition: Definition, parts: Sequence[Step]) -> list[Region]:
    """Return the regions of a program, in order."""
    last: dict[Name, int] = {}
    for at, instruction in enumerate(definition.instructions):
        for name in (*instruction.words, *(instruction.kin or ())):
            last[name] = at
    end = len(definition.instructions)
    for name in (*(name for _, name in definition.kept), *definition.results):
        last[name] = end
    found: list[Region] = []
    # Inductor would count from where the argument began in the run that it has compiled for.
    arguments = [(ARGUMENT, k) for k in range(1, 1 + definition.tensors)]
    bases, placed = bases_of(definition, parts), placed_in(definition, parts, arguments)
    first, memories = 0, _Memories(bases)
    for at in range(end + 1):
        here = definition.instructions[at] if at < end and at not in placed else None
        fits = here is not None and _fits(here, parts[here.row])
        if here is not None and fits and memories.take(here, parts[here.row]):
            continue
        if at - first >= _FEWEST:
            found.append(_region(definition, parts, first, at, last))
        first, memories = at, _Memories(bases)
        # An instruction that may not follow the others may begin anew.
        if here is None or not fits or not memories.take(here, parts[here.row]):
            first, memories = at + 1, _Memories(bases)
    return found


class _Memories:
    """The memories that a region gets, while it grows: by which names, and which ones it writes.

    To Inductor each input has memory of its own. A view that was made before the region would be read behind
    the write that the operators have behind the read, or the other way round.
    """

    def __init__(self, bases: Mapping[Name, Collection[Name]]) -> None:
        self._bases = bases
        self._made: set[Name] = set()
        # What each memory is called, those with two names, and those that are written.
        self._names: dict[Name, Name] = {}
        self._twice: set[Name] = set()
        self._written: set[Name] = set()

    def take(self, instruction: Instruction, part: Step) -> bool:
        """Add an instruction. Return False if what is written has two names then."""
        for name in instruction.words:
            if name[0] != FLOAT and name not in self._made:
                self._twice.update(
                    root for root in self._roots(name) if self._names.setdefault(root, name) != name
                )
        for k in (*part.mutates, *part.unsaid):
            self._written.update(self._roots(instruction.words[k - 1]))
        self._made.update((MADE, number) for number in instruction.makes)
        return self._written.isdisjoint(self._twice)

    def _roots(self, name: Name) -> Collection[Name]:
        return self._bases.get(name, (name,))


def _fits(instruction: Instruction, part: Step) -> bool:
    pattern = part.pattern
    if pattern is None or not isinstance(pattern.call, torch._ops.OpOverload):
        return False
    namespace, _, base = pattern.call._schema.name.partition("::")
    return (
        namespace in ("aten", "prims")
        and not base.startswith("_fused_")
        and torch.Tag.nondeterministic_seeded not in pattern.call.tags
        and pattern.results != KIN
        and instruction.kin is None
        and all(kind != NUMBER for kind, _ in instruction.words)
    )


def _region(
    definition: Definition, parts: Sequence[Step], first: int, behind: int, last: dict[Name, int]
) -> Region:
    inputs: dict[Name, None] = {}
    made: dict[Name, None] = {}
    writes = False
    for instruction in definition.instructions[first:behind]:
        part = parts[instruction.row]
        writes = writes or bool(part.mutates or part.unsaid)
        for name in instruction.words:
            if name[0] != FLOAT and name not in made:
                inputs[name] = None
        made.update(((MADE, number), None) for number in instruction.makes)
    outputs = [name for name in made if last.get(name, -1) >= behind]
    return Region(first, behind, [*inputs], outputs, writes)


class _Graph:
    """A region as a graph of torch's operators, while it grows."""

    def __init__(self, region: Region, device: Callable[[torch.device], torch.device]) -> None:
        self.graph, self._device = fx.Graph(), device
        self.values: dict[Name, fx.Node] = {
            name: self.graph.placeholder(f"x{k}") for k, name in enumerate(region.inputs)
        }

    def add(self, instruction: Instruction, pattern: Pattern) -> None:
        """Add the call of one instruction."""
        words, makes = iter(instruction.words), iter(instruction.makes)
        args = tuple(self._word(part, words) for part in pattern.args)
        kwargs = {key: self._word(part, words) for key, part in pattern.kwargs.items()}
        node = self.graph.call_function(pattern.call, args, kwargs)  # type: ignore[arg-type]
        self._store(pattern.results, node, makes)

    def _word(self, part: Plain, words: Iterator[Name]) -> object:
        if part == OPERAND or part == ["number"]:
            name = next(words)
            return name[1] if name[0] == FLOAT else self.values[name]
        if isinstance(part, list) and part and part[0] == "list":
            return [self._word(item, words) for item in part[1:]]
        constant = unpack_constant(part)
        return self._device(constant) if isinstance(constant, torch.device) else constant

    def _store(self, results: Plain, node: fx.Node, makes: Iterator[int]) -> None:
        if isinstance(results, list):
            for k, item in enumerate(results):
                if item not in (0, []):
                    self._store(item, self.graph.call_function(operator.getitem, (node, k)), makes)
        elif results == 1:
            self.values[MADE, next(makes)] = node


def graph_of(
    region: Region,
    definition: Definition,
    patterns: Sequence[Pattern],
    device: Callable[[torch.device], torch.device],
) -> fx.GraphModule:
    """Return a region as a graph that takes its inputs and returns a tuple of its outputs."""
    found = _Graph(region, device)
    for instruction in definition.instructions[region.first : region.behind]:
        found.add(instruction, patterns[instruction.row])
    found.graph.output(tuple(found.values[name] for name in region.outputs))
    return fx.GraphModule({}, found.graph)


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors have no memory, and fixed sizes.

    Without a `ShapeEnv`, Inductor looks for nothing in its cache and leaves nothing there.
    """
    # It imports sympy, which workers without compiled programs can do without.
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return FakeTensorMode(shape_env=shapes.ShapeEnv(), static_shapes=True)


class Laid(NamedTuple):
    """How operators lay out a result of a region.

    `within` is the number of an earlier result in whose memory it is, `OF_AN_INPUT`, or None if it has memory
    of its own. It begins so many bytes behind that earlier result.
    """

    stride: tuple[int, ...]
    within: int | None
    distance: int


OF_AN_INPUT = -1


class Inputs:
    """What the regions of a program get, as tensors without memory, noted in a run.

    `laid` says how the operators of each region lay out what it returns.
    """

    def __init__(self) -> None:
        self._mode = fake_mode()
        self.of: dict[int, list[torch.Tensor]] = {}
        self.laid: dict[int, list[Laid]] = {}
        # A weak reference keeps the number of a memory from being another one's.
        self._memories: dict[int, list[StorageWeakRef]] = {}

    def note(self, region: Region, values: Sequence[object]) -> None:
        """Note the inputs of one region."""
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        if len(tensors) == len(values):
            self.of[region.first] = [self._mode.from_tensor(x) for x in tensors]
            self._memories[region.first] = [StorageWeakRef(x.untyped_storage()) for x in tensors]

    def note_made(self, region: Region, values: Sequence[object]) -> None:
        """Note how one region has laid out what it returns."""
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        memories = {one.cdata for one in self._memories.pop(region.first, ())}
        if region.first in self.of and len(tensors) == len(values):
            self.laid[region.first] = laid_out(memories, tensors)


def laid_out(inputs: Collection[int], made: Sequence[torch.Tensor]) -> list[Laid]:
    """Return how results are laid out; `inputs` are the memories of what they were made of."""
    firsts: dict[int, int] = dict.fromkeys(inputs, OF_AN_INPUT)
    found = []
    for k, one in enumerate(made):
        first = firsts.setdefault(one.untyped_storage()._cdata, k)
        distance = begin_of(one) - begin_of(made[first]) if 0 <= first < k else 0
        found.append(Laid(one.stride(), None if first == k else first, distance))
    return found


def begin_of(value: torch.Tensor) -> int:
    """Return at which byte of its memory a tensor begins."""
    return int(value.storage_offset()) * value.element_size()
