"""Inductor beside a program's replays: it compiles the program's regions in a thread, for later runs.

Until that is done, and if it cannot be done, the program runs as straight-line code. Inductor keeps what it
has compiled on disk, by content, so the same program compiles faster in the next session.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import attrgetter, methodcaller

import torch

from distruntime.errors import ConfigurationError, ProtocolError
from distruntime.wire.messages import ARGUMENT, HELD, Plain
from distruntime.wire.shield import Lock

from ..machine import threads
from ..machine.settings import changes, settings
from ..values.objects import Poisoned
from ..values.step import Pattern, Slots, Step, Words
from .compiler import Job, compiled, job_for, prepare
from .definition import Definition, Name
from .regions import OF_AN_INPUT, Compiled, Inputs, Laid, begin_of, graph_of, laid_out, regions_of
from .source import NotBegun, Source, Straight

# Inductor compiles one program at a time.
_compiling = Lock()
_WAITS = "in no call so far the arguments had memory of their own"
_storage_of, _number_of = methodcaller("untyped_storage"), attrgetter("_cdata")
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
        self._written = list(written) if any(region.writes for region in self.regions) else []
        names: list[Name] = [(ARGUMENT, k) for k in range(1, 1 + definition.tensors)]
        names += [name for one in definition.instructions for name in one.words if name[0] == HELD]
        self._read = [name for name in dict.fromkeys(names) if name not in written]
        # It is what a master may ask for: "compiling", "inductor", or why there is none.
        self.state = _WAITS if self.regions else _TOO_FEW
        self._begun = not self.regions
        self._ready: tuple[Source, Straight] | None = None
        # What was compiled, by torch's settings then, and the number of their changes that `_ready` knows of.
        self._made: dict[Hashable, tuple[Source, Straight]] = {}
        self._changes = changes[0]
        self._complaint = ""

    def ready(self, slots: Slots, p: Words, i: int) -> tuple[Source, Straight] | None:
        """Return the compiled source and its function, if they may run the instruction at `i`."""
        if self._complaint:
            self._warn(p, i, self._complaint)
            self._complaint = ""
        return self._ready if self._ready is not None and self._apart(slots, p, i) else None

    def may_begin(self, slots: Slots, p: Words, i: int) -> bool:
        """Whether the inputs of the run at `i` are to be noted, to compile for their like.

        It is asked before each run.
        """
        if self._changes != changes[0]:
            self._follow_settings()
        return not self._begun and self._apart(slots, p, i)

    def _follow_settings(self) -> None:
        """Take what was compiled under torch's settings of now, or let it be compiled."""
        self._changes = changes[0]
        self._ready = self._made.get(tuple(settings()))
        if self._ready is not None:
            self.state = "inductor"
        # What is being compiled ends first.
        elif self.regions and self.state != "compiling":
            self._begun, self.state = False, _WAITS

    def _apart(self, slots: Slots, p: Words, i: int) -> bool:
        """Whether no memory that a region writes has another name in this run.

        A region is compiled for inputs that share no memory, and arguments may.
        """
        if not self._written:
            return True
        try:
            written, read = (_memories(names, slots, p, i) for names in (self._written, self._read))
        except AttributeError:
            # One is poisoned, or no tensor.
            return False
        taken = {*written}
        return len(taken) == len(written) and taken.isdisjoint(read)

    def begin(self, source: Source, inputs: Inputs) -> None:
        """Compile in a thread of its own, for inputs like these."""
        self._begun, self.state = True, "compiling"
        try:
            threads.begin(partial(_compile, weakref.ref(self), source, inputs), "compiles")
        except ConfigurationError as error:
            self.give_up(str(error))

    def job(self, inputs: Inputs) -> Job | None:
        """Return what another process is to compile first, if it can be told."""
        return job_for(self._definition, self.regions, self._patterns, self._device, inputs)

    def finish(self, source: Source, inputs: Inputs, job: Job | None) -> None:
        """Compile what another process has compiled before, if there was a job: it is in Inductor's cache."""
        found, under = [], tuple(settings())
        for k, region in enumerate(self.regions):
            if region.first in inputs.of:
                given = inputs.of[region.first] if job is None else job.inputs_of(region)
                call = compiled(self._graph(k), given)
                found.append((region, _guarded(call, inputs.laid.get(region.first, []))))
        # Settings that have changed meanwhile may be in some regions and not in others.
        if tuple(settings()) == under:
            self._made[under] = source.with_regions(found)
        # The next run looks for it.
        self.state, self._changes = "inductor", -1

    def give_up(self, why: str) -> None:
        """Go on with the program as it is, and tell its user."""
        self._ready = None
        self._made.clear()
        self.state = f"Inductor cannot compile it: {why}"
        self._complaint = f"a program runs as straight-line code. {self.state}"

    def _graph(self, k: int) -> torch.fx.GraphModule:
        return graph_of(self.regions[k], self._definition, self._patterns, self._device)


def _compile(inductor: weakref.ref[Inductor], source: Source, inputs: Inputs) -> None:
    """Compile for a program, unless nobody has it any more. Blocks for seconds."""
    try:
        with _compiling:
            one = inductor()
            job = None if one is None else one.job(inputs)
            # A session that ends lets go of its programs, and nobody wants the process's work then.
            del one
            if job is not None:
                prepare(job, lambda: inductor() is not None)
            one = inductor()
            if one is not None:
                one.finish(source, inputs, job)
    # Whatever the compiler raises, the program goes on as it is.
    except Exception as error:
        one = inductor()
        if one is not None:
            text = str(error).strip().partition("\n")[0][:300]
            one.give_up(f"{type(error).__name__}: {text}{_of_folders(text)}")


def _of_folders(text: str) -> str:
    """Return what an error of Inductor's leaves out of the folders that it takes.

    A disk may be full, and torch gives its compiler no path whole that has a blank.
    """
    folder = importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir()
    if os.strerror(errno.ENOSPC) in text:
        there = folder if os.path.isdir(folder) else os.path.dirname(folder)
        free = shutil.disk_usage(there).free
        return f" ({folder}, {free} bytes free; TORCHINDUCTOR_CACHE_DIR names another)"
    named = {
        tempfile.gettempdir(): "TMPDIR names another",
        folder: "TORCHINDUCTOR_CACHE_DIR names another",
        os.path.dirname(torch.__file__): "an environment elsewhere helps",
    }
    for path, remedy in named.items():
        if "C++ compile error" in text and re.search(r"\s", path):
            return f" ({path} has a blank, where torch's call of the compiler ends a path; {remedy})"
    return ""


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


def _memories(names: Sequence[Name], slots: Slots, p: Words, i: int) -> list[int]:
    """Return the memories of arguments and held values."""
    values = [slots.get(what if kind == HELD else p[i + what]) for kind, what in names]  # type: ignore[index]
    # Each run of a program asks, for all its tensors.
    return [*map(_number_of, map(_storage_of, values))]


def _guarded(call: Compiled, laid: Sequence[Laid]) -> Compiled:
    """Return a compiled region that has not begun where one of its inputs does not exist.

    What it returns lies as its operators lay it out, which the master and the next region take for granted.
    Inductor returns other strides where torch's decompositions do, for example of `cat` with an empty tensor.
    And it returns `x` itself for `x * torch.ones_like(x)`.
    """
    # It lays out each result in the same way at each run.
    others: list[int] | None = None

    def run(*values: torch.Tensor) -> Sequence[torch.Tensor]:
        nonlocal others
        if Poisoned in map(type, values):
            raise NotBegun
        made = call(*values)
        if others is None:
            others = _laid_out_otherwise(made, values, laid)
        return _as_laid(made, laid, others) if others else made

    return run


def _laid_out_otherwise(
    made: Sequence[torch.Tensor], values: Sequence[torch.Tensor], laid: Sequence[Laid]
) -> list[int]:
    """Return which results have other strides, or are in another memory, than those of the operators.

    A view of an input has its strides, as AOTAutograd makes it of that input.
    """
    found: list[int] = []
    for k, (one, own, wanted) in enumerate(zip(made, laid_out({*map(_memory, values)}, made), laid)):
        strides = zip(one.size(), own.stride, wanted.stride)
        differs = own.within != wanted.within or any(n > 1 and a != b for n, a, b in strides)
        if wanted.within != OF_AN_INPUT and (differs or wanted.within in found):
            found.append(k)
    return found


def _as_laid(made: Sequence[torch.Tensor], laid: Sequence[Laid], others: Sequence[int]) -> list[torch.Tensor]:
    """Return results as operators lay them out; `others` are those that are not yet."""
    found = [*made]
    for k in others:
        one, (stride, within, distance) = made[k], laid[k]
        if within is None:
            found[k] = torch.empty_strided(one.shape, stride, dtype=one.dtype, device=one.device).copy_(one)
        else:
            base, empty = found[within], torch.empty(0, dtype=one.dtype, device=one.device)
            begin = (begin_of(base) + distance) // one.element_size()
            found[k] = empty.set_(base.untyped_storage(), begin, one.shape, stride)
    return found
