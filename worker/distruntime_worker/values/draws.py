"""Random numbers of several sessions on one worker.

Each draws as if it were alone here, although torch has one generator for a device.
"""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from .functions import seedings
from .step import Run, Slots, Step, Words

_SEED = "distruntime::manual_seed"
_COMPOSITES = tuple(
    f"distruntime::{name}" for name in ("record", "seed_member", "get_rng", "set_rng", "exchange_rng")
)
_changing = threading.Condition()
# The process's generators hold the state of this one.
_owner: list[Draws] = []
_States = list[torch.Tensor]


def may_draw(step: Step) -> bool:
    """Whether a step may draw random numbers, or reads or sets the state that they come from."""
    tags = getattr(step.pattern and step.pattern.call, "tags", ())
    return step.name.startswith(_COMPOSITES) or torch.Tag.nondeterministic_seeded in tags


def _states() -> _States:
    # Only GPUs that are in use are asked: asking the others would begin to use them.
    gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.get_rng_state(), *(gpu.get_state() for gpu in gpus)]


def _set(states: _States) -> None:
    torch.set_rng_state(states[0])
    if torch.cuda.is_initialized():
        for gpu, state in zip(torch.cuda.default_generators, states[1:]):
            gpu.set_state(state)


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

    Changing the owner costs some 10 us for a CPU; who draws twice in a row does not pay it.
    """

    each = False

    def __init__(self) -> None:
        self._kept, self._seedings = _at_start, 0
        # So many threads draw now.
        self._inside = 0

    def __enter__(self) -> Draws:
        with _changing:
            while _owner != [self] and _owner and _owner[0]._inside:
                _changing.wait()
            if _owner != [self]:
                if _owner:
                    _owner[0]._kept, _owner[0]._seedings = _states(), seedings[0]
                _set(self._kept)
                seedings[0] = self._seedings
                _owner[:] = [self]
            self._inside += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

        return draw
