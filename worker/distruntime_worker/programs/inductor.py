"""Inductor beside a program's replays: it compiles the program's regions in a thread, for later runs.

Until that is done, and if it cannot be done, the program runs as straight-line code. Inductor keeps what it
has compiled on disk, by content, so the same program compiles faster in the next session.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence

import torch

from distruntime.errors import ProtocolError
from distruntime.wire.messages import ARGUMENT, HELD, Plain
from distruntime.wire.shield import Lock

from ..machine.random_states import states_left
from ..values.objects import Poisoned
from ..values.step import Pattern, Slots, Step, Words
from .definition import Definition, Name
from .regions import Compiled, Inputs, graph_of, regions_of
from .source import NotBegun, Source, Straight

# Inductor compiles one program at a time.
_compiling = Lock()
_WAITS = "in no call so far the arguments had memory of their own"
_TOO_FEW = "no three operators that Inductor may compile stand together"


class Inductor:
    """The compiled form of one program.

    `written` are the arguments and held values that the program writes. `warn` tells the master of an
    instruction's warning.
    """

    def __init__(
        self,
        definition: Definition,
        parts: Sequence[Step],
        written: Sequence[Name],
        device: Callable[[torch.device], torch.device],
        warn: Callable[[Words, int, str], None],
    ) -> None:
        self._definition, self._device, self._warn = definition, device, warn
        self._patterns: list[Pattern] = [part.pattern for part in parts if part.pattern is not None]
        self.regions = regions_of(definition, parts)
        writes = any(region.writes for region in self.regions) and definition.tensors > 0
        self._written = list(written) if writes else []
        self._read = [k for k in range(1, 1 + definition.tensors) if (ARGUMENT, k) not in written]
        # It is what a master may ask for: "compiling", "inductor", or why there is none.
        self.state = _WAITS if self.regions else _TOO_FEW
        self._begun = not self.regions
        self._ready: tuple[Source, Straight] | None = None
        self._complaint = ""

    def ready(self, slots: Slots, p: Words, i: int) -> tuple[Source, Straight] | None:
        """Return the compiled source and its function, if they may run the instruction at `i`."""
        if self._complaint:
            self._warn(p, i, self._complaint)
            self._complaint = ""
        return self._ready if self._ready is not None and self._apart(slots, p, i) else None

    def may_begin(self, slots: Slots, p: Words, i: int) -> bool:
        """Whether the inputs of the run at `i` are to be noted, to compile for their like."""
        return not self._begun and self._apart(slots, p, i)

    def _apart(self, slots: Slots, p: Words, i: int) -> bool:
        """Whether no memory that a region writes has another name in this run.

        A region is compiled for inputs that share no memory, and arguments may.
        """
        if not self._written:
            return True
        taken: set[int] = set()
        for kind, what in self._written:
            assert isinstance(what, int)
            value = slots.get(what if kind == HELD else p[i + what])
            if not isinstance(value, torch.Tensor) or (memory := _memory(value)) in taken:
                return False
            taken.add(memory)
        values = [slots.get(p[i + k]) for k in self._read]
        return all(isinstance(value, torch.Tensor) and _memory(value) not in taken for value in values)

    def begin(self, source: Source, inputs: Inputs) -> None:
        """Compile in a thread of its own, for inputs like these."""
        self._begun, self.state = True, "compiling"
        threading.Thread(target=self._compile, args=(source, inputs), daemon=True).start()

    def _compile(self, source: Source, inputs: Inputs) -> None:
        try:
            with _compiling:
                found = [
                    (region, _compiled(self._graph(k), inputs.of[region.first]))
                    for k, region in enumerate(self.regions)
                    if region.first in inputs.of
                ]
            self._ready = source.with_regions(found)
            self.state = "inductor"
        # Whatever the compiler raises, the program goes on as it is, and its user is told.
        except Exception as error:
            text = str(error).strip().partition("\n")[0][:300]
            self.state = f"Inductor cannot compile it: {type(error).__name__}: {text}"
            self._complaint = f"a program runs as straight-line code. {self.state}"

    def _graph(self, k: int) -> torch.fx.GraphModule:
        return graph_of(self.regions[k], self._definition, self._patterns, self._device)


def inductor_for(
    compile: Plain,
    definition: Definition,
    parts: Sequence[Step],
    written: Sequence[Name],
    device: Callable[[torch.device], torch.device],
    warn: Callable[[Words, int, str], None],
) -> Inductor | None:
    """Return what compiles a program, if its master asks for that."""
    if compile is None:
        return None
    if compile != "inductor":
        raise ProtocolError(f"a program is to be compiled by {compile!r:.40}")
    return Inductor(definition, parts, written, device, warn)


def _memory(value: torch.Tensor) -> int:
    found: int = value.untyped_storage()._cdata
    return found


def _compiled(module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Compiled:
    """Compile a graph for inputs like these, by AOTAutograd and Inductor. Blocks for seconds."""
    # Importing it takes seconds, which no other program should pay.
    inductor = importlib.import_module("torch._inductor")
    # A pool of processes is for the many kernels of GPUs.
    # Inductor draws nothing, and would put back the states that it found seconds ago: what sessions drew
    # meanwhile would be drawn once more.
    with inductor.config.patch(compile_threads=1), torch.no_grad(), states_left():
        call: Compiled = inductor.compile(module, list(inputs))

    def run(*values: torch.Tensor) -> Sequence[torch.Tensor]:
        if Poisoned in map(type, values):
            raise NotBegun
        return call(*values)

    return run
