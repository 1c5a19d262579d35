"""A call while it is recorded: what stands there before it, the call itself, and what is behind it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from ..guards.arithmetic import Arithmetic
from ..guards.attributes import Brought
from ..guards.reachable import Reachable
from ..guards.reads import Reads
from ..guards.seen import PLAIN
from ..guards.tracing import traced
from ..guards.unchanged import marks
from ..log.current import current_streams
from ..log.issue import noting
from ..log.tape import not_in_a_program, recorded
from ..session.session import active_session
from ..tensors.tensor import DistributedTensor
from ..wire.messages import ARGUMENT, HELD
from .begins import begins_of
from .carried import kinds_found, renewed_kinds
from .handlers import Handlers
from .recorder import record, taping
from .recording import Name
from .returned import Stripped, dressed, handle_of, has_hooks, local_leaf, returned_from, stripped
from .run import Run, replaced, require_unchanged, state_behind, unsteady
from .side_effects import LocalDraws, watched, young_cycles_end
from .steady import left_otherwise


class Attempt:
    """A call that is to become a recorded one. It holds tensors, so nothing holds it behind the recording."""

    def __init__(
        self,
        name: str,
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        leaves: list[object],
        names: dict[str, None],
    ) -> None:
        """Look at what stands there before the call."""
        self.name, self.leaves = name, leaves
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._session = active_session()
        tensors = [(k, leaf) for k, leaf in enumerate(leaves) if isinstance(leaf, DistributedTensor)]
        self._roots: list[tuple[str, object]] = [(name, fn)]
        self._roots += [
            (f"argument {k}", leaf)
            for k, leaf in enumerate(leaves)
            if not isinstance(leaf, (DistributedTensor, *PLAIN))
        ]
        # A mesh keeps what each member's rank is. The layouts of DTensors read it.
        self._roots += [
            (f"the ranks {key} of mesh {mesh.number}", tensor)
            for mesh in self._session.meshes
            for key, tensor in mesh.residence().numbers.items()
        ]
        before = self.before = Reachable(self._roots)
        self._counted = {key: (tensor, tensor.item()) for key, tensor in before.steps.items()}
        self.terms = Arithmetic(
            {k: leaf for k, leaf in enumerate(leaves) if type(leaf) is float}, self._counted
        )
        given = tree_flatten((args, kwargs))[0]
        self.reads = Reads(self.terms, Brought(frozenset(map(id, given)), names))
        self._paths = before.by_ref()
        self._arguments = {leaf._handle.ref: k for k, leaf in reversed(tensors)}
        # These arguments are also found from the function.
        self.pinned = [k for ref, k in self._arguments.items() if ref in self._paths]
        self._names: dict[int, Name] = {ref: (HELD, path) for ref, path in self._paths.items()}
        self._names.update({ref: (ARGUMENT, k) for ref, k in self._arguments.items()})
        self._draws = LocalDraws(before.generators)
        # The memory at each path.
        self.memories = [(path, tensor._handle.storage) for path, tensor in before.paths.items()]
        self._entered = kinds_found(before)
        self._current = current_streams.get()
        # What each tensor is, by what the user calls it.
        handles = [(path, tensor._handle) for path, tensor in before.paths.items()]
        handles += [(f"argument {k}", leaf._handle) for k, leaf in tensors]
        self._specs = [(path, handle, handle.spec) for path, handle in handles]
        known = (*(tensor for _, tensor in before.tensors.values()), *(leaf for _, leaf in tensors))
        self._versions = [(tensor, _version(tensor)) for tensor in known]
        wanting = [
            (k, leaf) for k, leaf in enumerate(given) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        self._hooked = [k for k, leaf in wanting if has_hooks(leaf)]
        self._gradients = [(k, leaf, leaf.grad) for k, leaf in wanting if leaf.is_leaf]
        # Arguments with a graph that each call brings anew.
        self._graphs = [(k, leaf, leaf.grad_fn) for k, leaf in wanting]
        # The memories of which it asks where a tensor begins in them.
        self._asked: list[object] = []

    def call(self, first: bool, lenient: bool, handlers: Handlers) -> Stripped:
        """Call the function, and note what it does. Return what it returns."""
        recorded.asked = self._asked
        with (
            taping(self._session.logs) as self._tapes,
            watched(self.name, first, lenient),
            noting() as self._notes,
            young_cycles_end() as young,
        ):
            with self._graphs_looked_at():
                result = traced(self.reads, self._called, handlers)
            found = self._found = stripped(result, self._names, self.name)
            del result
            reasons = self.reads.settle(young.ids())
        drawn = self._draws.used()
        hooked = [f"argument {k} has hooks, and another one may have others" for k in self._hooked]
        reasons = [*([drawn] if drawn else ()), *reasons, *hooked, *young.reasons]
        # It says why each call must be recorded, if that is so.
        self.unfit = f"each call is recorded, since {reasons[0]}" if reasons else ""
        return found

    @contextmanager
    def _graphs_looked_at(self) -> Iterator[None]:
        """Note whether a backward pass enters the graph that an argument came with."""

        def note(k: int, grads: object) -> None:
            self.reads.notes.reasons.setdefault(
                f"it goes backward through the graph of argument {k}, and another call brings another graph. "
                "Let the function compute the argument, or pass x.detach()",
                None,
            )

        hooks: list[RemovableHandle] = []
        try:
            for k, _, graph in self._graphs:
                if graph is not None:
                    hooks.append(graph.register_prehook(partial(note, k)))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _called(self, handlers: Handlers) -> object:
        self.reads.base = id(sys._getframe())
        try:
            handlers.run()
            return self._fn(*self._args, **self._kwargs)
        finally:
            handlers.wait()

    def look_behind(self, first: bool) -> None:
        """Look at what the call has done and left. Raise `NotSupportedError` for what no replay can do."""
        found, paths, arguments = self._found, self._paths, self._arguments
        recorded.name, recorded.first = self.name, first
        try:
            self._require_plain()
            recording = record(self._tapes, self._notes, self._names, first, self._current)
            steps = {key: tensor for key, (tensor, was) in self._counted.items() if tensor.item() == was + 1}
            self.unfit = self.unfit or self._asks_steps(steps) or self._changed_in_place()
            recording.unfit = self.unfit or recording.unfit
            changed = self.reads.notes.renew()
            after = self.after = Reachable(self._roots)
            if not first:
                require_unchanged(self.before, after, steps)
            # These are the handles of the tensors that were returned.
            self.handles = [handle_of(leaf) for leaf in found.leaves]
            refs = {handle.ref for handle in self.handles if handle is not None}
            state = state_behind(recording, after, paths, arguments, refs, first)
        finally:
            recorded.name, recorded.first = "", False
        self.run = Run(
            recording,
            state,
            {path: tensor._handle.spec for path, tensor in after.paths.items()},
            returned_from(found, recording, arguments, paths),
            found.tree,
            self.terms.values,
            steps,
            changed,
            begins_of(self.leaves),
            recording.crossed(),
            marks(self.reads.notes.found, steps, changed),
            self.terms.decisions,
        )
        # What was returned, as the caller gets it.
        self.given = dressed(found, {after.paths[path]._handle.ref for path in state}, self.name)
        # At these paths another tensor of this kind may stand.
        self.kinds = renewed_kinds(self.run, self._entered, after)
        # It has put these objects in place of others, with tensors that it has left in them.
        self.replaced = replaced(self.before, after, state)
        written = {id(tensor): tensor for tensor, version in self._versions if _version(tensor) != version}
        # It has changed these in place: what is found, what stood at these paths, and arguments.
        self.changed = [tensor for key, tensor in written.items() if key in after.tensors]
        self.changed_paths = [path for path, tensor in self.before.paths.items() if id(tensor) in written]
        self.changed_arguments = [k for k, leaf in enumerate(self.leaves) if id(leaf) in written]

    def _require_plain(self) -> None:
        if recorded.mixed:
            raise not_in_a_program("hold what a signal handler has issued", "issue it outside")
        if len(self._session.logs) != len(self._tapes):
            raise not_in_a_program("make a mesh", "make it before")
        now = [local_leaf(leaf) for leaf in tree_flatten((self._args, self._kwargs))[0]]
        if len(now) != len(self.leaves) or any(a is not b for a, b in zip(now, self.leaves)):
            raise not_in_a_program("change the lists and dictionaries of its arguments", "return new ones")
        for k, leaf, gradient in self._gradients:
            if leaf.grad is not gradient:
                raise not_in_a_program(
                    f"leave a gradient in argument {k}, as a replay's argument is another tensor",
                    "return torch.autograd.grad(loss, x), or let the function name the parameter itself",
                )

    def _asks_steps(self, steps: Mapping[int, torch.Tensor]) -> str:
        """Say what it decides by the number of an optimizer's steps that nobody can follow."""
        found = next((text for key, text in self.reads.notes.asked.items() if key in steps), "")
        return f"each call is recorded, since {found}" if found else ""

    def _changed_in_place(self) -> str:
        """Say what has got another shape, or another graph by a write, which no replay would give it."""
        for path, handle, spec in self._specs:
            if handle.spec is not spec:
                return f"each call is recorded, since it changes the shape or the strides of {path} in place"
        held = [(one.path, one.owner, one.value) for one in self.before.graphs]
        given = [(f"argument {k}", leaf, graph) for k, leaf, graph in self._graphs]
        for path, tensor, graph in (*held, *given):
            if tensor.grad_fn is not graph:  # type: ignore[attr-defined]
                return f"each call is recorded, since it writes {path} in place, which has a graph"
        return ""

    def asks_for_begins(self) -> bool:
        """Whether the call has asked where an argument begins in its memory."""
        return any(
            isinstance(leaf, DistributedTensor) and leaf._handle.storage in self._asked
            for leaf in self.leaves
        )

    def unsteady(self, lasts: Sequence[Run]) -> str:
        """Say what the call has not left of the kind that it found, or return nothing.

        `lasts` are the recording that it agrees with, and the one before it.
        """
        before, after, run = self.before, self.after, self.run
        read, found = [last.changed for last in lasts], self.reads.notes.found
        odd = left_otherwise(before, after, run.changed, found, run.steps, read)
        return odd or unsteady(before, after, self.kinds, run)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
