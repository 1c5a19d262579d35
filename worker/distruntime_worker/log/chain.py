"""The chain of links around an instruction: nothing else puts anything around a step's run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..values.draws import Draws
from ..values.mesh_lanes import MeshState
from ..values.step import Run, Step
from .guard import Shares
from .lost_devices import LostDevices
from .read_only import ReadOnly
from .state import State
from .timing import Timing


class Link(Protocol):
    """One thing that stands around instructions.

    `each` says where it stands for a mesh's instruction: around each member's part, or around the whole.
    """

    each: bool

    def around(self, step: Step, run: Run) -> Run | None:
        """Return what runs `step`, by calling `run`; None where the link has nothing to do with it.

        The chain asks again for each step when a link is switched on. So a link keeps in the step what it has
        learnt of it.
        """


class Chain:
    """The links of one session, and the tables of its logs, which hold what they make of each step.

    Invariant: each entry of a log's `templates` was made by `around`. It is the step's own `run` where no
    link concerns the step.
    """

    def __init__(self, state: State, draws: Draws) -> None:
        self._state, self._draws = state, draws
        self.read_only = ReadOnly(state, self.renew)
        # The links stand from the outermost inwards. What may not be written is refused first: it neither
        # draws nor counts. Draws may wait for another session that has the generators, so memory is asked for
        # after that wait.
        # A device that is lost is not asked for anything.
        self.lost_devices = LostDevices(state, self.renew)
        # The time of an instruction is that of all that is done for it.
        self.timing = Timing(state, self.renew)
        self.links: list[Link] = [self.timing, self.read_only, self.lost_devices, draws, Shares(state)]

    def add_own(self, log: State | MeshState) -> None:
        """Put the runtime's own instructions into the table of a new log (the reader)."""
        for word, step in self._state.own.items():
            log.templates[word] = self.around(step)

    def add(self, log: State | MeshState, number: int, step: Step) -> None:
        """Put a new step into the table of a log (the reader)."""
        log.templates[number], log.info[number] = self.around(step), step

    def renew(self) -> None:
        """Make all tables anew: a link was switched on (the reader)."""
        logs: list[State | MeshState] = [self._state, *self._state.meshes.values()]
        for log in logs:
            self.add_own(log)
            # A stream's thread forgets templates meanwhile, and what it has forgotten must not come back.
            with self._state.gate:
                for number, step in log.info.items():
                    log.templates[number] = self.around(step)

    def around(self, step: Step) -> Run:
        """Return what runs a step: its own run, and the links that concern it around that."""
        if step.parts:
            # A program draws as a whole, and its time is noted as a whole. Around each instruction in it
            # stand the other links.
            whole: list[Link] = [self.timing, self._draws]
            inner = [link for link in self.links if link not in whole]
            step.runs = [_around(part, inner) for part in step.parts]
            return _linked(step, whole)
        return _around(step, self.links)


def _around(step: Step, links: Sequence[Link]) -> Run:
    if not step.lanes:
        return _linked(step, links)
    step.runs = [_linked(lane, [link for link in links if link.each]) for lane in step.lanes]
    return _linked(step, [link for link in links if not link.each])


def _linked(step: Step, links: Iterable[Link]) -> Run:
    run: Run = step.run
    for link in reversed([*links]):
        run = link.around(step, run) or run
    return run
