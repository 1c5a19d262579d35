"""What a program finds in objects and leaves there anew: `box.h = tanh(box.h + x)`, or a gradient.

A plan puts each call's value under the tensor that its recording has left there. If another tensor stands
there now, left by another kind of call, that one becomes an operand of the replay, as an argument would be,
and the plan's own takes its place. It takes the place of None where the recording has found None, which is
what `zero_grad` leaves of a gradient.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence

import torch

from ..guards.anchors import Anchor, anchored
from ..guards.reachable import Reachable, local_of
from ..guards.seen import Seen, same
from ..log.handle import Residence
from ..log.spec import Spec
from ..tensors.tensor import DistributedTensor
from ..wire.messages import HELD, MADE
from .returned import layout_of
from .run import Run

# What a call must find at a path: the tensor's metadata and place, and whether it wants a gradient; or None.
Kind = tuple[Spec, Residence, bool] | tuple[()]
NOTHING: Kind = ()
_ASSIGNABLE = (dict, OrderedDict, defaultdict, list, deque)


def kind_of(thing: object) -> Kind | None:
    """Return of what kind a tensor is; None of anything that says more than that."""
    if type(thing) is not DistributedTensor or not _bare(thing) or thing._base is not None:
        return None
    return thing._handle.spec, thing._handle.place, thing.requires_grad


def _bare(tensor: object) -> bool:
    """Whether a tensor has no graph, no gradient and no hooks."""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return (
        bool(tensor.is_leaf)  # type: ignore[attr-defined]
        and tensor.grad is None  # type: ignore[attr-defined]
        and not any(getattr(tensor, name, None) for name in hooks)
        and not tensor.is_inference()  # type: ignore[attr-defined]
    )


def kinds_found(reach: Reachable) -> dict[str, Kind | None]:
    """Return of what kind a tensor is at each path, where there is one, and where there may be one later."""
    found: dict[str, Kind | None] = {one.path: NOTHING for one in reach.seen if one.value is None}
    found.update({path: kind_of(tensor) for path, tensor in reach.paths.items()})
    return found


def renewed_kinds(run: Run, entered: Mapping[str, Kind | None], after: Reachable) -> dict[str, Kind]:
    """Return the paths at which another tensor of a kind may stand, each with the kind that was found there.

    They are those where the run has left another tensor. `entered` has what stood at each path before it.
    What the run has returned itself must be the plan's own.
    """
    returned = {str(one.name[1]) for one in run.returned if one.name is not None and one.name[0] == HELD}
    return {
        path: kind
        for path, name in run.state.items()
        if (kind := entered.get(path)) is not None
        and path not in returned
        and (name[0] == MADE or str(name[1]) != path)
        and kind_of(after.paths[path]) is not None
    }


class Carried:
    """The tensors that a plan renews and that others may replace until the next call."""

    def __init__(
        self, after: Reachable, renewed: Sequence[DistributedTensor], kinds: Mapping[str, Kind]
    ) -> None:
        paths: dict[int, list[str]] = {}
        for path, tensor in after.paths.items():
            paths.setdefault(id(tensor), []).append(path)
        self._kinds: dict[int, Kind] = {}
        for tensor in renewed:
            found = {kinds.get(path) for path in paths.get(id(tensor), ())}
            if len(found) == 1 and (kind := found.pop()) is not None:
                self._kinds[id(tensor)] = kind
        # Whoever holds a view of one would see the other one's value.
        for _, tensor in after.tensors.values():
            self._kinds.pop(id(tensor._base), None)
        # These are the places in objects where they stand. A tuple is put there as a whole.
        self._homes: list[Seen] = []
        self._find_homes(after)
        self.own = {path: anchored(t) for path, t in after.paths.items() if id(t) in self._kinds}
        self._refs = frozenset(tensor._handle.ref for _, tensor in after.tensors.values())
        # It cannot find what it leaves: then it is never its own successor.
        self.turns = any(
            self._kinds.get(id(tensor), own) != own for tensor in renewed if (own := kind_of(tensor))
        )

    def _find_homes(self, after: Reachable) -> None:
        inside = [(one, set(self._inside(one.value))) for one in after.seen]
        fixed: set[int] = set()
        for one, found in inside:
            if found and not _assignable(one) and not _within(one.owner):
                fixed |= found
        for key in fixed:
            del self._kinds[key]
        held = {id(one.value) for one, found in inside if found and _within(one.value)}
        for one, found in inside:
            # A tuple that nobody can replace is no home.
            if found and _within(one.owner) and id(one.owner) not in held:
                for key in found & self._kinds.keys():
                    del self._kinds[key]
        self._homes = [one for one, found in inside if found & self._kinds.keys() and _assignable(one)]

    def _inside(self, thing: object) -> Sequence[int]:
        if id(thing) in self._kinds:
            return [id(thing)]
        if isinstance(thing, tuple):
            return [key for item in thing for key in self._inside(item)]
        return self._inside(local_of(thing)) if layout_of(thing) is not None else []

    def taken(self, leaves: Sequence[object]) -> Taken | None:
        """Return what stands where this plan's own tensors would.

        Return None if its own stand there, or something that does not fit.
        """
        found: dict[int, Anchor[DistributedTensor] | None] = {}
        changed: list[tuple[Seen, object]] = []
        try:
            for home in self._homes:
                now = home.now()
                if not self._match(home.value, now, found):
                    return None
                if now is not home.value:
                    changed.append((home, anchored(now) if isinstance(now, DistributedTensor) else now))
        except (LookupError, AttributeError, ValueError):
            return None
        others = {key: other for key, other in found.items() if other is not None}
        refs = [other.thing._handle.ref for other in others.values()]
        # No two of a plan's tensors may be one. Two of them may stand in each other's places.
        given = {leaf._handle.ref for leaf in leaves if isinstance(leaf, DistributedTensor)}
        stay = self._refs - {own.thing._handle.ref for own in self.own.values() if id(own.thing) in others}
        if not changed or len({*refs}) < len(refs) or not (given | stay).isdisjoint(refs):
            return None
        return Taken(others, changed, self._refs.issuperset(refs))

    def _match(self, own: object, now: object, found: dict[int, Anchor[DistributedTensor] | None]) -> bool:
        """Whether what stands at a place may stand there. Note it under the id of the plan's own."""
        kind = self._kinds.get(id(own))
        if kind == NOTHING:
            return now is None
        if kind is not None:
            if not isinstance(now, DistributedTensor) or kind_of(now) != kind:
                return False
            other = None if now is own else anchored(now)
            return found.setdefault(id(own), other) is other
        if isinstance(own, tuple):
            if not isinstance(now, tuple) or type(own) is not type(now) or len(own) != len(now):
                return False
            return all(self._match(a, b, found) for a, b in zip(own, now))
        layout = layout_of(own)
        if layout is not None and own is not now:
            if layout_of(now) != layout or not (_bare(own) and _bare(now)):
                return False
            return self._match(local_of(own), local_of(now), found)
        return same(own, now)


class Taken:
    """The tensors of others that stand in place of a plan's own.

    They are anchors, as one of a plan's tensors may stand where another one of them would.
    """

    def __init__(
        self,
        others: Mapping[int, Anchor[DistributedTensor]],
        changed: Sequence[tuple[Seen, object]],
        only_moved: bool,
    ) -> None:
        # All of them are the plan's own, in other places.
        self.only_moved = only_moved
        # The key is the id of the plan's own.
        self.others = others
        self._changed = changed

    def instead_of(self, own: Anchor[DistributedTensor]) -> DistributedTensor:
        """Return what has stood where one of the plan's tensors is now."""
        return self.others.get(id(own.thing), own).thing

    def put_own(self) -> None:
        """Put the plan's own in their place."""
        for home, _ in self._changed:
            home.put(home.value)

    def put_back(self) -> None:
        """Put each one where it was."""
        for home, before in self._changed:
            home.put(before.thing if isinstance(before, Anchor) else before)


def _within(owner: object) -> bool:
    """Whether a part of this is never replaced by itself."""
    return isinstance(owner, tuple) or layout_of(owner) is not None


def _assignable(one: Seen) -> bool:
    """Whether something else can be put there without a function of the user's."""
    if one.form == "item":
        return type(one.owner) in _ASSIGNABLE
    if one.form == "cell":
        return True
    if one.form == "attribute":
        if isinstance(one.owner, torch.Tensor):
            return one.key == "grad"
        return type(one.owner).__setattr__ in (object.__setattr__, type.__setattr__)
    return False
