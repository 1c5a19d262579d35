"""A mesh's members on this worker: an instruction of its log runs for each of them.

With one member here, a mesh's value stands in its slot as any other. With several (the GPUs of one machine),
it is a `Shards`, and a `Lanes` runs the instruction once for each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from distruntime.errors import ProtocolError
from distruntime.wire.messages import FIRST_TEMPLATE, Failure, Plain

from .functions import seedings
from .objects import Poisoned, memory_of
from .step import Run, Slots, Step, Words, list_word
from .streams import Stream
from .template import Template

# It stands in a template for the device of whichever member runs it.
MEMBER: Plain = ["device", "member"]


class Shards(list[object]):
    """What stands in the slot of a mesh's value: those of its members here, in their order."""


class MeshState:
    """One mesh as this worker sees it."""

    def __init__(self, number: int, devices: list[str]) -> None:
        self.number, self.devices = number, devices
        # So many words have come.
        self.received = 0
        # These are as in a worker's own log: see State.
        self.templates, self.info = dict[Plain, Run](), dict[Plain, Step]()
        self.next_template = FIRST_TEMPLATE
        # The key is the number of a dimension; the value has each member's [group, rank] along it.
        self.lines: dict[int, list[list[int]]] = {}
        self.generators = Generators(len(devices))
        # The thread of the worker's own default stream runs it, in turns.
        self.default = Stream(0, torch.device("cpu"))
        self.streams: dict[int, Stream] = {0: self.default}

    def enter(self, start: int, words: int) -> None:
        """Take note of a segment that has come (the reader)."""
        if start != self.received:
            raise ProtocolError(
                f"a segment of mesh {self.number} begins at {start}, and {self.received} words have come"
            )
        self.received += words

    def member_device(self, pattern: Plain, lane: int) -> Plain:
        """Return a pattern of arguments with a member's device filled in."""
        if pattern == MEMBER:
            return ["device", self.devices[lane]]
        if isinstance(pattern, list):
            return [self.member_device(item, lane) for item in pattern]
        return pattern


class Generators:
    """The random generators of members that share this worker's CPU: each draws what it would draw on a CPU
    of its own.

    Until members are seeded one by one they draw from equal states; see `DeviceMesh.manual_seed`.
    """

    def __init__(self, count: int) -> None:
        self._states: list[torch.Tensor | None] = [None] * count
        self._seeded = seedings[0]
        self._base = torch.get_rng_state()

    def __enter__(self) -> None:
        self._base = torch.get_rng_state()
        # The worker's own generator was seeded: so are all that stand for it.
        if self._seeded != seedings[0]:
            self._states = [None] * len(self._states)

    def draw(self, lane: int, run: Run, slots: Slots, p: Words, i: int) -> int:
        """Run one member's instruction with its generator."""
        state = self._states[lane]
        torch.set_rng_state(self._base if state is None else state)
        after = run(slots, p, i)
        if state is not None or self._seeded != seedings[0]:
            self._states[lane] = torch.get_rng_state()
        return after

    def __exit__(self, *_: object) -> None:
        self._seeded = seedings[0]
        if all(state is not None for state in self._states):
            torch.set_rng_state(self._base)


class Lanes(Step):
    """The templates of one instruction, one for each member here, on `devices`."""

    def __init__(
        self,
        templates: list[Template],
        devices: list[torch.device],
        spread: Callable[[Slots, torch.UntypedStorage, Failure], None],
        generators: Generators | None,
    ) -> None:
        first = templates[0]
        self.lanes, self.devices, self._spread, self._generators = templates, devices, spread, generators
        self.runs: list[Run] = [template.run for template in templates]
        self.name, self.reads, self.writes, self.mutates = (
            first.name,
            first.reads,
            first.writes,
            first.mutates,
        )
        self.unsaid, self.views, self.length = first.unsaid, first.views, first.length
        self.pattern, self.kin = first.pattern, first.kin

    def run(self, slots: Slots, p: Words, i: int, /) -> int:
        """Run the instruction at `i` for each member; return the index of the word after it."""
        if self._generators is None:
            return self._each(slots, p, i, self.runs)
        with self._generators:
            runs: list[Run] = [partial(self._generators.draw, k, run) for k, run in enumerate(self.runs)]
            return self._each(slots, p, i, runs)

    def drop(self, slots: Slots, p: Words, i: int, error: BaseException, /) -> int:
        """Let the instruction at `i` fail for each member."""
        drops: list[Run] = [partial(_drop, template, error) for template in self.lanes]
        return self._each(slots, p, i, drops)

    def _each(self, slots: Slots, p: Words, i: int, runs: list[Run]) -> int:
        """Let each of `runs` act on its member's values."""
        kin = [] if self.kin is None else list_word(p[i + self.kin] or [])
        refs = [*(p[i + k] for k in self.reads), *kin]
        operands = [slots.get(ref) for ref in refs]
        made = [Shards() for _ in self.writes]
        for lane, run in enumerate(runs):
            own = {ref: value[lane] if type(value) is Shards else value for ref, value in zip(refs, operands)}
            run(own, p, i)
            for k, results in zip(self.writes, made):
                results.append(own.get(p[i + k]))
            for k in self.mutates:
                self._note(slots, p[i + k], lane, own[p[i + k]])
            for ref in kin:
                self._note(slots, ref, lane, own[ref])
        for k, results in zip(self.writes, made):
            slots[p[i + k]] = results
        return i + self.length

    def _note(self, slots: Slots, ref: Plain, lane: int, after: object) -> None:
        """Poison what was to be written and was not, under all its names."""
        whole = slots.get(ref)
        if isinstance(after, Poisoned) and type(whole) is Shards and after is not whole[lane]:
            memory, whole[lane] = memory_of(whole[lane]), after
            if memory is not None:
                self._spread(slots, memory, after.failure)


def _drop(step: Step, error: BaseException, slots: Slots, p: Words, i: int) -> int:
    return step.drop(slots, p, i, error)
