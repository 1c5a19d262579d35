"""Inductor in a process of its own: it compiles the regions of a program, and leaves what it makes on disk.

Most of the work is Python's, and in the worker's own process it would hold up every stream. The worker
compiles the regions again behind it, and finds them by their content in Inductor's cache: 0.45 s of a thread
instead of 3.7 for the forward pass of a GPT of 12 layers (2026-11, 2 cores, torch 2.13).
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from distruntime.errors import ConfigurationError

from ..machine.random_states import states_left
from ..machine.settings import Setting, configure, settings
from ..python import children
from ..python.children import Child, end_with_nursery, readable
from ..values.step import Pattern
from ..values.template import operator
from .definition import Definition
from .regions import Compiled, Inputs, Region, fake_mode, graph_of

# A job may take so many seconds.
LONGEST = 900.0
# Between two looks whether anybody still wants it.
_LOOK = 0.5
_PIPE = 1 << 16
# The steps beside it come first.
_NICE = 5


class Kind(NamedTuple):
    """What Inductor knows of an input. `nbytes` is the size of its memory."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int
    device: str


@dataclass(frozen=True)
class Job:
    """Regions of a program, with their inputs; `devices` says what the names in its constants mean here."""

    definition: Definition
    regions: Sequence[Region]
    inputs: Mapping[int, Sequence[Kind]]
    devices: Mapping[str, str]
    settings: Sequence[tuple[str, Setting]]

    def inputs_of(self, region: Region) -> list[torch.Tensor]:
        """Return the inputs of a region, without memory.

        The worker compiles for these, too: those that were noted are other ones to Inductor's cache.
        """
        with fake_mode():
            return [_like(kind) for kind in self.inputs[region.first]]


def compiled(module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Compiled:
    """Compile a graph for inputs like these, by AOTAutograd and Inductor. Blocks for seconds."""
    # Importing it takes seconds, which no other program should pay.
    inductor = importlib.import_module("torch._inductor")
    # A pool of processes is for the many kernels of GPUs.
    # Inductor draws nothing, and would put back the states that it found seconds ago: what sessions drew
    # meanwhile would be drawn once more.
    with inductor.config.patch(compile_threads=1), torch.no_grad(), states_left():
        call: Compiled = inductor.compile(module, list(inputs))
    return call


# -- in the worker -------------------------------------------------------------------------------------------


def job_for(
    definition: Definition,
    regions: Sequence[Region],
    patterns: Sequence[Pattern],
    device: Callable[[torch.device], torch.device],
    inputs: Inputs,
) -> Job | None:
    """Return what another process needs to compile these regions; None if an input cannot be described."""
    devices: dict[str, str] = {}

    def noted(name: torch.device) -> torch.device:
        found = device(name)
        devices[str(name)] = str(found)
        return found

    known = [region for region in regions if region.first in inputs.of]
    kinds = {region.first: [_kind(value) for value in inputs.of[region.first]] for region in known}
    if any(kind is None for found in kinds.values() for kind in found):
        return None
    for region in known:
        graph_of(region, definition, patterns, noted)
    return Job(definition, known, kinds, devices, settings())  # type: ignore[arg-type]


def _kind(value: torch.Tensor) -> Kind | None:
    nbytes, offset = value.untyped_storage().nbytes(), int(value.storage_offset())
    plain = value.layout is torch.strided and not value.is_conj() and not value.is_neg()
    if not plain or nbytes % value.element_size():
        return None
    return Kind(value.dtype, tuple(value.size()), value.stride(), offset, nbytes, str(value.device))


def prepare(job: Job, wanted: Callable[[], bool]) -> None:
    """Have a process compile a job. Blocks until it has ended, or until nobody wants it.

    Raise `RuntimeError` if it takes too long. What it cannot do is not told: the caller compiles itself then.
    """
    # There may be no room for another process: a nursery that cannot be started says so in its own words.
    with suppress(OSError, ConfigurationError):
        nursery = children.enter()
        try:
            child = nursery.fork(["compiler"], dict(os.environ))
            try:
                _wait(child, pickle.dumps(job), wanted)
            finally:
                nursery.end(child)
        finally:
            children.leave(nursery)


def _wait(child: Child, job: bytes, wanted: Callable[[], bool]) -> None:
    """Send a job, and wait until its process lets go of the socket."""
    until = time.monotonic() + LONGEST
    child.link.sendall(job)
    child.link.shutdown(socket.SHUT_WR)
    link = child.link.fileno()
    while wanted():
        if time.monotonic() > until:
            raise RuntimeError(f"Inductor was not done after {LONGEST:.0f} s")
        ready = readable([link, *([child.output] if child.output >= 0 else [])], _LOOK)
        if child.output in ready:
            _say(child)
        if link in ready:
            return


def _say(child: Child) -> None:
    """Pass on what Inductor prints, as in this process."""
    data = os.read(child.output, _PIPE)
    if data:
        sys.stderr.write(data.decode(errors="replace"))
    else:
        os.close(child.output)
        child.output = -1


# -- in a process of its own ---------------------------------------------------------------------------------


def main(_: Sequence[str]) -> int:
    """Compile the job that comes over the socket that is standard input; return the exit code."""
    end_with_nursery()
    # A user may not be allowed to.
    with suppress(OSError):
        os.nice(_NICE)
    link = socket.socket(fileno=os.dup(0))
    with link.makefile("rb") as file:
        job: Job = pickle.load(file)
    # The worker meets the same error next, and tells its user.
    with suppress(Exception):
        _work(job)
    # Nothing of a device needs to be taken apart.
    os._exit(0)


def _work(job: Job) -> None:
    own = dict(settings())
    # What is written is not quite what it was before, even if it is the same: torch knows "ieee" and "none".
    configure(**{name: value for name, value in job.settings if own.get(name) != value})
    patterns = [Pattern(operator(row.name), row.args, row.kwargs, row.results) for row in job.definition.rows]
    for region in job.regions:
        module = graph_of(region, job.definition, patterns, lambda name: torch.device(job.devices[str(name)]))
        compiled(module, job.inputs_of(region))


def _like(kind: Kind) -> torch.Tensor:
    """Return a tensor of a kind. It has no memory under a fake mode."""
    whole = torch.empty(kind.nbytes // kind.dtype.itemsize, dtype=kind.dtype, device=kind.device)
    return whole.as_strided(kind.size, kind.stride, kind.offset)
