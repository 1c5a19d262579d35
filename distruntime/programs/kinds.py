"""What a program knows of each kind of call: the recordings, the plans, and how they have fared."""

from __future__ import annotations

from .begins import Placed
from .plan import Plan
from .run import Run
from .vain import Tries

# So many kinds of calls are remembered, and so many recordings and plans of each.
_MOST_KINDS, _MOST_RUNS, _MOST_PLANS = 256, 8, 8


class Kinds:
    """The kinds of calls of one program, by signature."""

    def __init__(self) -> None:
        self.plans: dict[object, list[Plan]] = {}
        self.runs: dict[object, list[Run]] = {}
        # These depend on where their arguments begin in their memory: each place is a kind of its own.
        self.placed: dict[object, str] = {}
        # The kinds of all places share one.
        self._tries: dict[object, Tries] = {}

    def forget(self, signature: object) -> None:
        """Forget what was recorded of a kind."""
        self.plans.pop(signature, None)
        self.runs.pop(signature, None)

    def note(self, signature: object, brought_a_plan: bool, why: str) -> None:
        """Note how a recording has fared, and why it was made."""
        placed = self.placed.get(signature.kind) if isinstance(signature, Placed) else None
        self.tries_of(signature).note(brought_a_plan, placed or why)

    def tries_of(self, signature: object) -> Tries:
        """Return how the recordings of a kind have fared."""
        kind = signature.kind if isinstance(signature, Placed) else signature
        found = self._tries.get(kind)
        if found is None:
            if len(self._tries) >= _MOST_KINDS:
                self._tries.pop(next(iter(self._tries)))
            found = self._tries[kind] = Tries()
        return found

    def same(self, signature: object, run: Run) -> tuple[Run | None, str]:
        """Return an earlier run that has done the same, if there is one, or else how the last one differs.

        Remember the run.
        """
        runs = self.runs.setdefault(signature, [])
        if len(self.runs) > _MOST_KINDS:
            self.forget(next(iter(self.runs)))
        fit = [one for one in runs if not one.recording.unfit]
        if run.recording.unfit:
            runs[:] = [*fit[-_MOST_RUNS:], run]
            return None, ""
        same = next((one for one in reversed(fit) if not one.difference(run)), None)
        why = ""
        if same is not None:
            # The last one's floats say most.
            fit = [one for one in fit if one is not same]
        elif fit:
            why = f"it differs from the recording before: {fit[-1].difference(run)}"
            placed = next(filter(None, (one.depends_on_begins(run) for one in reversed(fit))), "")
            if placed and not isinstance(signature, Placed):
                return self.same(self.place(signature, run, placed), run)[0], placed
        runs[:] = [*fit[-_MOST_RUNS:], run]
        return same, why

    def place(self, kind: object, run: Run, why: str) -> object:
        """Let calls that begin elsewhere be other kinds from now on. Return the kind of this one."""
        if isinstance(kind, Placed):
            return kind
        if len(self.placed) >= _MOST_KINDS:
            self.placed.clear()
        self.placed[kind] = why
        self.plans.pop(kind, None)
        for one in self.runs.pop(kind, ()):
            self.runs.setdefault(Placed(kind, one.begins), []).append(one)
        return Placed(kind, run.begins)

    def keep(self, signature: object, plan: Plan, instead: Plan | None) -> bool:
        """Let a plan be the first that is tried. A plan that did the same is never tried again.

        Return whether there was none.
        """
        plans = self.plans.setdefault(signature, [])
        rest = [one for one in plans if one is not instead and not one.does_as(plan)]
        new = len(rest) == len(plans)
        plans[:] = [plan, *rest[: _MOST_PLANS - 1]]
        return new
