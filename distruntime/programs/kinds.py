"""What a program knows of each kind of call: its signature, the recordings, the plans, and how they have
fared.

A signature tells one kind of call from another: its tensors' metadata, autograd's facts about them, and its
plain values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from ..errors import UsageError
from ..guards.seen import MISSING, PLAIN, SIMPLE
from ..log.line import line_text, user_line
from ..tensors.tensor import DistributedTensor
from .begins import Placed
from .plan import Plan, Tries
from .returned import has_hooks, layout_of, local_leaf
from .run import Run


def signature_of(
    args: tuple[object, ...], kwargs: dict[str, object], names: Collection[str]
) -> tuple[list[object], object]:
    """Return the leaves of a call's arguments, and what tells this kind of call from others.

    `names` are those of tensors' attributes that are a part of it.
    """
    flat = not kwargs
    key: list[object] = []
    memories: dict[int, int] = {}
    leaves = list(args)
    if not flat or any(not isinstance(leaf, (DistributedTensor, *PLAIN)) for leaf in leaves):
        leaves, tree = tree_flatten((args, kwargs))
        key += (tree, *_kinds_of_keys(tree))
    for k, leaf in enumerate(leaves):
        layout = None if type(leaf) is DistributedTensor else layout_of(leaf)
        if layout is not None:
            key += (layout, *_beside(leaf, names))  # type: ignore[arg-type]
            leaf = local_leaf(leaf)
            leaves = [*leaves[:k], leaf, *leaves[k + 1 :]]
        if type(leaf) is DistributedTensor:
            handle = leaf._handle
            # Where it begins in its memory is no part of the kind: the batches of one tensor are alike.
            spec = handle.spec if not handle.spec.offset else handle.spec.at(0)
            key += (spec, handle.place)
            key += _beside(leaf, names)
            # Two arguments that are one tensor are one name in a recording. Two that share memory are one
            # memory in the order of streams.
            first = memories.setdefault(id(handle.storage), k)
            if first != k:
                key.append((first, _first_name(leaves, handle.ref)))
        elif type(leaf) is float:
            key.append(float)
        elif isinstance(leaf, torch.Tensor):
            remedy = (
                'send it first, x.to("remote")' if type(leaf) is torch.Tensor else "pass its plain tensors"
            )
            raise UsageError(
                "a program's tensors are remote, and an argument is a "
                f"{type(leaf).__name__} on {leaf.device}\n"
                f"  called at {line_text(user_line())}\n  {remedy}"
            )
        else:
            key.append(_exactly(leaf))
    return leaves, tuple(key)


def _exactly(value: object) -> object:
    """Return what tells a value from others that Python may call equal to it."""
    kind = type(value)
    # What is equal to an object with attributes may have others.
    if kind not in SIMPLE and (not isinstance(value, PLAIN) or getattr(value, "__dict__", None)):
        return _Is(value)
    if isinstance(value, (float, complex)):
        # 0.0 and -0.0 are equal in Python, and NaN is not equal to itself.
        return kind, (float if isinstance(value, float) else complex).__repr__(value)
    return kind, value


def _beside(tensor: torch.Tensor, names: Collection[str]) -> list[object]:
    """Return what decides about an argument besides its metadata: autograd's facts, and attributes.

    `names` are those of the attributes that this program has read. Those of other values than plain ones are
    a reason to record.
    """
    wants = tensor.requires_grad
    found: list[object] = [wants]
    if wants:
        leaf = tensor.is_leaf
        found += (leaf, leaf and tensor.grad is None, has_hooks(tensor))
    for name in names:
        value = tensor.__dict__.get(name, MISSING)
        found.append(_exactly(value) if isinstance(value, PLAIN) else value is MISSING)
    return found


def _kinds_of_keys(tree: TreeSpec) -> Iterator[object]:
    """Give the classes of keys in dictionaries: a tree calls 1, 1.0 and True the same key."""
    if tree.type is not None and issubclass(tree.type, dict):
        # That of a `defaultdict` begins with what makes its values.
        keys = tree.context[1] if issubclass(tree.type, defaultdict) else tree.context
        yield from (_kind_of_key(key) for key in keys if type(key) is not str)
    for child in tree.children():
        yield from _kinds_of_keys(child)


def _kind_of_key(key: object) -> object:
    if isinstance(key, (tuple, frozenset)):
        return type(key), *map(_kind_of_key, key)
    return (float, repr(key)) if type(key) is float else type(key)


def _first_name(leaves: Sequence[object], ref: int) -> int:
    """Return the first argument that is the value of this ref."""
    return next(
        k for k, leaf in enumerate(leaves) if type(leaf) is DistributedTensor and leaf._handle.ref == ref
    )


class _Is:
    """An object as a part of a key: it is equal to itself only."""

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def __hash__(self) -> int:
        return id(self._thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and other._thing is self._thing


# So many kinds of calls are remembered, and so many recordings and plans of each.
_MOST_KINDS, _MOST_RUNS, _MOST_PLANS = 256, 8, 8


class Kinds:
    """The kinds of calls of one program, by signature."""

    def __init__(self) -> None:
        # The function has read attributes of these names of its arguments.
        self.names: dict[str, None] = {}
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
