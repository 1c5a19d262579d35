"""What a forward graph saves for its backward graph: one object, instead of a proxy for each tensor.

AOTAutograd hands the tensors that a forward graph saves to autograd, and autograd hands them to the backward
graph. Nobody else looks at them, so each is a `Slot`, a local tensor without elements that says only for
which one it stands. The first is a `Bundle`, and owns the values of all. GPT-2 of 12 layers saves 250
tensors, and making their proxies took 0.6 of the 2.0 ms that issuing its forward pass took (2026-11, two
cores). Handles of those that nobody else can reach would take half of that again: one object owns their refs.

Hooks on saved tensors would see the slots, and so would compiled autograd. Where there are any, the graph
returns proxies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch

from ..errors import NotSupportedError
from ..log.handle import Handle, Several
from ..operators.proxies import wrap
from ..programs.parts import Values
from ..programs.recording import Name
from ..tensors.tensor import DistributedTensor

_NOTHING = torch.empty(0, device="cpu")
_version_of = attrgetter("_version")


class Slot(torch.Tensor):
    """Stands for one tensor that a forward graph has saved, in every call of that graph."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    number: int


class SavedForm:
    """What the calls of one plan save: the names of it, and which of these one object owns together.

    Values are numbered as they are saved. `owned` has their numbers in the order of that object, and `single`
    those of the others, each with its name.
    """

    def __init__(self, names: Sequence[Name], owned: Sequence[Name]) -> None:
        self.owned = [names.index(name) for name in owned]
        self.single = [(k, name) for k, name in enumerate(names) if name not in {*owned}]
        self.names = names


class Bundle(Slot):
    """Stands for the first tensor that one call has saved, and owns the values of all of them.

    A write to its memory counts no version of a slot. So `watched` has tensors that others can write to, and
    that share a memory with what is saved, each with its version at that time.
    """

    form: SavedForm
    handles: Mapping[int, Handle]
    several: Several | None
    watched: Sequence[torch.Tensor]
    versions: Sequence[int]

    def opened(self) -> Mapping[int, Handle]:
        """Return a handle of each value, by its number."""
        if self.several is None:
            return self.handles
        return {**self.handles, **dict(zip(self.form.owned, self.several.opened()))}


def slots(number: int) -> list[torch.Tensor]:
    """Return what stands for all but the first of so many tensors."""
    found: list[torch.Tensor] = []
    for k in range(1, number):
        # It is no view: AOTAutograd detaches views before it saves them.
        slot = torch.Tensor._make_subclass(Slot, _NOTHING)
        slot.number = k
        found.append(slot)
    return found


def bundle(form: SavedForm, values: Values, watched: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what stands for the first of the tensors that a call has saved, and owns them all."""
    found = torch.Tensor._make_subclass(Bundle, _NOTHING)
    made, found.several, found.form, found.number = values.made, values.kept, form, 0
    single = form.single if values.kept is not None else enumerate(form.names)
    found.handles = {k: made[name] for k, name in single}
    found.watched, found.versions = watched, [*map(_version_of, watched)]
    return found


def are_watched() -> bool:
    """Whether somebody wants to see what is saved: hooks, as those of activation checkpoints, or a tracer.

    Compiled autograd traces backward graphs with what was saved.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or bool(torch._dynamo.config.compiled_autograd)


def require_seen(saved: Sequence[object]) -> None:
    """Refuse what compiled autograd is to trace, if a forward graph did not know that it would be traced."""
    if any(isinstance(one, Slot) for one in saved):
        raise NotSupportedError(
            "compiled autograd was entered behind a compiled forward pass, whose saved tensors are one "
            "object in this process. Set torch._dynamo.config.compiled_autograd = True before the forward "
            "pass"
        )


def bundle_of(args: Sequence[object]) -> Bundle | None:
    """Return the bundle among the arguments of a backward graph.

    Raise RuntimeError, in autograd's words, if what it was saved from has been written to.
    """
    kinds = [*map(type, args)]
    if Bundle not in kinds:
        return None
    held = args[kinds.index(Bundle)]
    assert isinstance(held, Bundle)
    if [*map(_version_of, held.watched)] != held.versions:
        _refuse(held)
    return held


def open_slots(args: list[object], held: Bundle) -> None:
    """Replace each slot among the arguments of a backward graph by the handle that it stands for."""
    handles = held.opened()
    for k, arg in enumerate(args):
        if type(arg) is Slot or type(arg) is Bundle:
            args[k] = handles[arg.number]


def _refuse(held: Bundle) -> None:
    for one, version in zip(held.watched, held.versions):
        if one._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a remote tensor of shape {[*one.shape]}, or a view of it, is at version "
                f"{one._version}; expected version {version} instead. A graph that torch.compile has traced "
                "has saved it for its backward pass"
            )


def as_proxies(args: list[object]) -> list[object]:
    """Return arguments with a proxy for each handle, and empty the list."""
    found = [wrap(DistributedTensor, arg) if type(arg) is Handle else arg for arg in args]
    args.clear()
    return found
