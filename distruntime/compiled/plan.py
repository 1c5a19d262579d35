"""A traced graph as it was recorded: what calls of its kind issue, return and take."""

from __future__ import annotations

from collections.abc import Sequence, Set
from operator import attrgetter, itemgetter
from sys import getrefcount
from typing import Any, NamedTuple

import torch

from ..log.current import current_streams
from ..log.handle import Handle, Several
from ..operators.proxies import of_a_function, view_of, wrap, wrap_all, wrap_within
from ..programs.begins import Begins, Moves
from ..programs.layout import Argument, Layout
from ..programs.parts import GIVEN, Values
from ..programs.recording import Name, Recording
from ..session.session import Session
from ..tensors.tensor import DistributedTensor
from ..wire.messages import ARGUMENT, MADE
from .saved import Bundle, SavedForm, Slot, are_watched, bundle, slots

# In so many replays all arguments may be held by others, as in those with `retain_graph=True`.
_MOST_LOOKS = 8
Results = Sequence[object]
_handle_of = attrgetter("_handle")
_spec_of = attrgetter("spec")
_place_of = attrgetter("place")
_storage_of = attrgetter("storage")


class Given(NamedTuple):
    """What is known of the arguments of a call when these are gone: the names of tensors by their refs, what
    these are, where they begin, and what are no tensors.
    """

    names: dict[int, Name]
    tensors: Sequence[Argument | None]
    begins: Begins
    others: Sequence[object]


class Result(NamedTuple):
    """A result of a graph: a value with its name, or a plain one; or why it can be neither."""

    name: Name | None
    plain: object = None
    why: str = ""


def _holders(leaves: Sequence[object], of: Sequence[int]) -> list[int]:
    return [getrefcount(leaves[k]) for k in of]


class _Counted:
    """What one list holds, and nobody else."""


# Python's versions differ in what a look at the count adds to it.
_ALONE = _holders([_Counted()], [0])[0]


class Look:
    """What the arguments of a call look like: their types, and where what was saved stands, by its number."""

    def __init__(self, args: Sequence[object], held: Bundle | None) -> None:
        self.types = [*map(type, args)]
        self.form = None if held is None else held.form
        self.slots = {arg.number: k for k, arg in enumerate(args) if isinstance(arg, Slot)}


class _Seen:
    """The arguments of one call, as far as they make its kind, and what tells calls of that kind quickly.

    Nothing of them is held. What `_kind` makes, to be looked up, costs three times as much.
    """

    def __init__(self, look: Look, leaves: Sequence[object], session: Session) -> None:
        self._types, self._form = look.types, look.form
        owned = [] if look.form is None else [look.slots[n] for n in look.form.owned if n in look.slots]
        # It is False for a backward graph that does not get all that one object owns.
        self.whole = look.form is None or (0 < len(owned) == len(look.form.owned))
        self.owned = owned
        single = {} if look.form is None else {n: look.slots.get(n) for n, _ in look.form.single}
        self._single = [(n, k) for n, k in single.items() if k is not None]
        tensors = [k for k, leaf in enumerate(leaves) if type(leaf) is Handle and k not in {*owned}]
        slots = {*look.slots.values()}
        self._proxies = [k for k in tensors if k not in slots]
        self._plain = [k for k, leaf in enumerate(leaves) if type(leaf) is not Handle]
        self._values = [leaves[k] for k in self._plain]
        self._pick = _picker(tensors)
        handles: Sequence[Handle] = self._pick(leaves)
        self._specs, self._places = [*map(_spec_of, handles)], [*map(_place_of, handles)]
        # Each that is in the memory of one before it, and that one.
        firsts: dict[int, int] = {}
        memories = [*map(id, map(_storage_of, handles))]
        self._shared = [(n, first) for n, m in enumerate(memories) if (first := firsts.setdefault(m, n)) != n]
        self._memories = len(firsts)
        self._place, self._streams = session.places.current(), _entered()

    def leaves(self, args: Sequence[object], held: Bundle | None, session: Session) -> list[object] | None:
        """Return the arguments with handles instead of tensors; None if the call is of another kind.

        What one object owns is its refs. No other argument can be in the memory of these, and what they are
        follows from the plan that has saved them.
        """
        if [*map(type, args)] != self._types:
            return None
        leaves = [*args]
        if held is not None:
            several = held.several
            if held.form is not self._form or several is None or several.handles is not None:
                return None
            for k, ref in zip(self.owned, several.refs):
                leaves[k] = ref
            for n, k in self._single:
                leaves[k] = held.handles[n]
        for k in self._proxies:
            leaves[k] = args[k]._handle  # type: ignore[attr-defined]
        handles = self._pick(leaves)
        if [*map(_spec_of, handles)] != self._specs or [*map(_place_of, handles)] != self._places:
            return None
        memories = [*map(id, map(_storage_of, handles))]
        if len({*memories}) != self._memories or any(memories[n] != memories[k] for n, k in self._shared):
            return None
        if [args[k] for k in self._plain] != self._values:
            return None
        same = session.places.current() is self._place and _entered() == self._streams
        return leaves if same else None


def _entered() -> list[tuple[object, int]]:
    return [(key, entered.number) for key, entered in current_streams.get().items()]


def _picker(keys: Sequence[object]) -> Any:
    """Return a function that takes what stands under these keys out of a sequence or a mapping."""
    return itemgetter(*keys) if len(keys) > 1 else lambda found: [found[k] for k in keys]


class Plan:
    """A graph that is ready for calls of one kind."""

    def __init__(
        self,
        recording: Recording,
        found: Results,
        results: Sequence[Result],
        given: Given,
        name: str,
        compile: str | None,
        saves: slice | None,
    ) -> None:
        self._name = name
        made = {
            one.name: leaf._handle
            for one, leaf in zip(results, found)
            if one.name is not None and one.name[0] == MADE and isinstance(leaf, DistributedTensor)
        }
        moves = Moves((given.begins, given.begins), {})
        self.layout = Layout(recording, {}, (), made, {}, given.tensors, (), compile, moves, {})
        # What each call returns anew stands at its number: values, arguments, and what it saves.
        self._results = [one.plain for one in results]
        self._new = {k: one.name for k, one in enumerate(results) if one.name and one.name[0] == MADE}
        self._args = {
            k: int(one.name[1]) for k, one in enumerate(results) if one.name and one.name[0] == ARGUMENT
        }
        self._watched: Sequence[int] = ()
        self._exposed: Sequence[int] = ()
        self._saved: dict[int, Name] = {}
        if saves is not None:
            self._saved = {k: name for k, name in self._new.items() if k >= saves.start}
            self._note_exposed(saves, found, given)
        for k, slot in zip([*self._saved][1:], slots(len(self._saved))):
            self._results[k] = slot
        self._note_shared(found)
        self._form = self._saved_form()
        # These are proxies of their own, with what is saved and without it. These lie in another's memory.
        self._own = [k for k in self._order if k not in self._shared]
        self._outer = [k for k in self._own if k not in self._saved]
        self._within = [k for k in self._order if k in self._shared]
        self._passed = {*self._args.values()}
        tensors = [k for k, one in enumerate(given.tensors) if one is not None]
        # The arguments that nobody else has held at any call so far. The backward graph is the last to need
        # what the forward graph has saved, and its worker frees each of them behind its last use.
        self._taken: Sequence[int] = [k for k in tensors if k not in self._passed]
        # So many calls may hold all of them until none is looked at any more. Then it is 0.
        self._looks = _MOST_LOOKS
        self._all: frozenset[int] = frozenset()
        # It is None until a call has shown what those that are like it look like.
        self.last_seen: _Seen | None = None

    def _note_shared(self, found: Results) -> None:
        """Note which results are in another one's memory, and how they are views of it."""
        self._shared: dict[int, tuple[int, object]] = {}
        # What a graph returns twice is one tensor. Autograd copies a gradient that stands at two places: as
        # two tensors in one memory both would become a `grad`, and a write to one would change the other.
        self._again: dict[int, int] = {}
        firsts: dict[int, int] = {}
        for k, leaf in enumerate(found):
            if isinstance(leaf, torch.Tensor) and k not in self._saved:
                first = firsts.setdefault(id(leaf), k)
                if first != k:
                    self._again[k] = first
        memories: dict[int, int] = {}
        # A base comes before its views.
        new = [k for k in self._new if k not in self._again]
        self._order = sorted(new, key=lambda k: found[k]._is_view())  # type: ignore[attr-defined]
        places = {id(found[k]): k for k in self._order if k not in self._saved}
        for k in self._order:
            leaf = found[k]
            assert isinstance(leaf, DistributedTensor)
            if k in self._saved:
                continue
            base = places.get(id(leaf._base))
            first = memories.setdefault(id(leaf._handle.storage), k)
            if base is not None:
                self._shared[k] = base, view_of(leaf)
            elif first != k:
                # Views of what is not returned would give each other gradients through it.
                siblings = leaf._is_view() and leaf._base is found[first]._base  # type: ignore[attr-defined]
                self._shared[k] = first, of_a_function(leaf._handle.spec) if siblings else None

    def _note_exposed(self, saves: slice, found: Results, given: Given) -> None:
        """Note by which arguments and results others can write to what is saved.

        These are one for each memory. What is saved as it came is a tensor, which autograd minds itself.
        """
        checked = range(*saves.indices(len(found)))
        memories = {id(found[k]._handle.storage) for k in checked if k in self._saved}  # type: ignore[attr-defined]
        self._watched = [
            k for k, one in enumerate(given.tensors) if one is not None and id(one.memory) in memories
        ]
        outer = {
            id(found[k]._handle.storage): k  # type: ignore[attr-defined]
            for k in self._new
            if k not in self._saved
        }
        self._exposed = [k for memory, k in outer.items() if memory in memories]

    def _saved_form(self) -> SavedForm:
        """Have one object own what is saved and what nobody else gets."""
        names = [*self._saved.values()]
        others = [name for k, name in self._new.items() if k not in self._saved]
        alone = {name for name in names if name not in others and names.count(name) == 1}
        only = self.layout.only
        return SavedForm(names, [] if only is None else only.keep(alone, self.layout.specs))

    def note(self, look: Look, leaves: Sequence[object], session: Session) -> None:
        """Note the arguments of a call of this kind: most often the next one's are alike."""
        seen, only = _Seen(look, leaves, session), self.layout.only
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            # Tensors of this process do not compare.
            return
        if look.form is None:
            self.last_seen = seen
        elif seen.whole and only is not None:
            slots = {*look.slots.values()}
            named = {made.memory[1] for made in only.made if made.memory[0] == GIVEN}
            # What is returned of what was saved needs a handle.
            if not (self._passed | named) & slots:
                self.last_seen = seen

    def leaves(self, args: Sequence[object], held: Bundle | None, session: Session) -> list[object] | None:
        """Return what `replay` takes; None if nobody knows yet that this is a call of this kind."""
        # Threads may share a plan.
        seen = self.last_seen
        return None if seen is None else seen.leaves(args, held, session)

    def replay(self, args: list[object], leaves: list[object], several: Sequence[Several]) -> Results:
        """Issue it, part by part; return its results. Blocks while a window is full. Empties `args`.

        `leaves` are the arguments with handles instead of tensors, or with the refs of what `several` owns,
        where there is such a one. AOTAutograd counts the versions of what a graph writes to.
        """
        passed = {k: args[k] for k in self._passed}
        watched: list[torch.Tensor] = [args[k] for k in self._watched]  # type: ignore[misc]
        args.clear()
        alone = self._alone(leaves, several)
        values = self.layout.issue(leaves, (), self._name, alone, *several)
        made, out = values.made, [*self._results]
        new, bundled = self._new, bool(self._saved) and not are_watched()
        if not bundled and values.kept is not None:
            self._open(values)
        own = self._outer if bundled else self._own
        for k, proxy in zip(own, wrap_all(DistributedTensor, [made[new[k]] for k in own])):
            out[k] = proxy
        for k in self._within:
            base, view = self._shared[k]
            out[k] = wrap_within(DistributedTensor, made[new[k]], out[base], view)
        for k, number in self._args.items():
            given = passed[number]
            out[k] = wrap(DistributedTensor, given) if type(given) is Handle else given
        for k, first in self._again.items():
            out[k] = out[first]
        if bundled:
            # Nothing could free a graph that owns its own result. What `detach` returns shares its version.
            # Nobody reads anything else of it, so it needs to be no proxy.
            with torch._C._DisableTorchDispatch():
                watched += [out[k].detach() for k in self._exposed]  # type: ignore[attr-defined]
            out[next(iter(self._saved))] = bundle(self._form, values, watched)
        return out

    def _open(self, values: Values) -> None:
        """Put handles of what is owned together among what was made."""
        assert values.kept is not None
        names = [self._form.names[n] for n in self._form.owned]
        values.made.update(zip(names, values.kept.opened()))

    def _alone(self, leaves: Sequence[object], several: Sequence[Several]) -> Set[int]:
        """Return the arguments that may be taken and that nobody else holds.

        A graph that is kept (`retain_graph=True`) holds them all, and then nothing is taken in that call.
        """
        taken, owned = self._taken, False
        single = taken
        if several:
            single = [k for k in taken if type(leaves[k]) is not int]
            owned = _holders(several, [0])[0] == _ALONE
        counts = _holders(leaves, single)
        alone = counts.count(_ALONE) + (len(taken) - len(single) if owned else 0)
        if alone and (self._looks or alone < len(taken)):
            held = {k for k, count in zip(single, counts) if count != _ALONE}
            if not owned:
                held.update(k for k in taken if type(leaves[k]) is int)
            self._taken = [k for k in taken if k not in held]
            self._all, self._looks = frozenset(self._taken), 0
            self.layout.take(self._all)
            return self._all
        if self._looks:
            self._looks -= 1
            if not self._looks:
                self._taken = ()
        return self._all if alone else frozenset()


def handles_of(args: Sequence[object]) -> list[object]:
    """Return arguments with handles instead of tensors."""
    return [arg._handle if isinstance(arg, DistributedTensor) else arg for arg in args]
