"""Random numbers of several sessions on one worker.

Each draws as if it were alone here, although torch has one generator for a device.
"""

from __future__ import annotations

import threading
from threading import get_ident
from time import monotonic

import torch

from ..machine import accelerator, random_states
from .functions import seedings
from .step import Run, Slots, Step, Words

_SEED = "distruntime::manual_seed"
_COMPOSITES = tuple(
    f"distruntime::{name}"
    for name in ("record", "seed_member", "get_rng", "set_rng", "draw_from", "exchange_rng")
)
_CALL = "python::call"
# This argument of a call says whether it may draw.
_RANDOM = 4
# Another session waits so many seconds for a function of the user's that may draw, and no longer.
_LONG = 0.2
_changing = threading.Condition()
# The process's generators hold the state of this one.
_owner: list[Draws] = []
# The random state of the CPU, and of each device in use.
_States = dict[torch.device, torch.Tensor]
_CPU = torch.device("cpu")


def may_draw(step: Step) -> bool:
    """Whether a step may draw random numbers, or reads or sets the state that they come from."""
    if step.parts:
        return step.holds_generators or any(map(may_draw, step.parts))
    if step.name.startswith(_CALL):
        # The master says so of a function that draws nothing.
        return step.pattern is None or step.pattern.args[_RANDOM] is not False
    tags = getattr(step.pattern and step.pattern.call, "tags", ())
    return step.name.startswith(_COMPOSITES) or torch.Tag.nondeterministic_seeded in tags


def _states() -> _States:
    # The other devices are not asked: asking them would begin to use them.
    return {
        _CPU: torch.get_rng_state(),
        **{device: random_states.rng_state(device) for device in accelerator.in_use()},
    }


def _set(states: _States) -> None:
    torch.set_rng_state(states[_CPU])
    for device in accelerator.in_use():
        state = states.get(device)
        if state is None:
            # The device came into use later. Each session begins with one state there, as on the CPU.
            state = _at_start.setdefault(device, random_states.new_rng_state(device))
        random_states.set_rng_state(device, state)


_at_start = _states()


def seed_anew() -> None:
    """Seed torch's generator as at the start of a process.

    A fork has the state of the process that it was forked from.
    """
    global _at_start
    torch.default_generator.seed()
    _at_start = _states()


class Draws:
    """The random state of one session. What draws runs inside `with draws:`; several of its streams may, at
    the same time.

    A function of the user's that runs for long does not keep other sessions from drawing. It then draws from
    the state of whoever has the generators.

    Changing the owner costs some 10 us for a CPU; who draws twice in a row does not pay it.
    """

    each = False

    def __init__(self) -> None:
        self._kept, self._seedings = _at_start, 0
        # So many threads draw now.
        self._inside = 0
        # These of them run functions, each since that time.
        self._functions: dict[int, float] = {}

    def _until_others(self) -> float | None:
        """Return for how many seconds others have to wait at most; None where that is not known."""
        if not self._inside:
            return 0.0
        if self._inside > len(self._functions):
            return None
        return max(0.0, max(self._functions.values()) + _LONG - monotonic())

    def __enter__(self) -> Draws:
        with _changing:
            while _owner != [self] and _owner and (left := _owner[0]._until_others()) != 0.0:
                _changing.wait(left)
            if _owner != [self]:
                if _owner:
                    _owner[0]._kept, _owner[0]._seedings = _states(), seedings[0]
                _set(self._kept)
                seedings[0] = self._seedings
                _owner[:] = [self]
            self._inside += 1
        return self

    def __exit__(self, *_: object) -> None:
        with _changing:
            self._inside -= 1
            if not self._inside:
                _changing.notify_all()

    def around(self, step: Step, run: Run) -> Run | None:
        """Return what runs an instruction that draws with this session's random state."""
        if step.name != _SEED and not may_draw(step):
            return None

        def draw(slots: Slots, p: Words, i: int) -> int:
            with self:
                return run(slots, p, i)

        def draw_in_function(slots: Slots, p: Words, i: int) -> int:
            with self:
                self._functions[get_ident()] = monotonic()
                try:
                    return run(slots, p, i)
                finally:
                    del self._functions[get_ident()]

        return draw_in_function if step.name.startswith(_CALL) else draw
