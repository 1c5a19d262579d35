"""What an attribute is that a function reads: what the object has, its class, and the bases of that."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from .contents import BUFFERS, FIXED, VIEWS, Contents, is_python_method
from .functions import is_c
from .notes import Notes
from .seen import HEAP, MISSING, PLAIN, ask, looked_up

# Python looks an attribute of these up in the object and in its class.
_GENERIC = frozenset(
    kind.__getattribute__
    for kind in (
        *(object, dict, list, tuple, set, frozenset, str, bytes, int, float, complex, bytearray, deque),
        *(types.ModuleType, types.FunctionType, types.SimpleNamespace, BaseException, OrderedDict, property),
    )
)
_DATA = (types.GetSetDescriptorType, types.MemberDescriptorType)
# Each tensor has these in its dictionary.
_OWN = ("_handle", "_local_tensor", "_spec")
# These give the values of a tensor.
_ALIASES = ("data", "T", "mT", "H", "mH", "real", "imag", "__array_interface__")
# What two tensors may differ in that are alike in metadata, autograd's facts and attributes.
_DIFFERENT = frozenset(
    "_version grad_fn _base _is_view is_inference output_nr retains_grad _backward_hooks "
    "_post_accumulate_grad_hooks grad_dtype".split()
)


class Brought(NamedTuple):
    """The ids of a call's arguments, and the names of what was read in the dictionary of one, in order."""

    ids: Collection[int]
    names: dict[str, None]


class Hook(NamedTuple):
    """A function that Python calls for an attribute by itself, and its arguments."""

    function: object
    arguments: tuple[object, ...]


class Attributes:
    """Notes attributes that are looked up."""

    def __init__(self, notes: Notes, contents: Contents, brought: Brought) -> None:
        self._notes, self._contents, self._brought = notes, contents, brought

    def read(self, owner: object, name: str, frame: types.FrameType) -> Sequence[Hook]:
        """Note that an attribute was looked up: in an object, and in its class and the bases of that.

        Return what Python calls for it.
        """
        kind = type(owner)
        if kind in FIXED or isinstance(owner, types.CodeType):
            return ()
        if isinstance(owner, torch.Tensor):
            self._of_tensor(owner, name, frame)
        elif kind is super:
            return self.of_super(owner.__self__, owner.__self_class__, owner.__thisclass__, name)  # type: ignore[attr-defined]
        elif isinstance(owner, type):
            return self._of_class(owner, name, frame)
        elif isinstance(owner, types.MethodType):
            return self.read(owner.__func__, name, frame)
        elif kind.__getattribute__ in _GENERIC:
            return self.of_object(owner, name, frame)
        elif isinstance(kind.__getattribute__, types.FunctionType):
            self._notes.cls(kind, "__getattribute__")
            return self._otherwise(owner, name)
        else:
            self._given(owner, name, frame)
        return ()

    def of_super(self, owner: object, kind: type, cls: type, name: str) -> Sequence[Hook]:
        """Note what the bases of a class behind one of them have, as `super()` looks there."""
        found = self._notes.after_class(kind, cls, name)
        if owner is not kind and isinstance(found, property):
            return [Hook(found.fget, (owner,))]
        if owner is not kind and isinstance(found, _DATA):
            read, given = type(found).__get__, (found, owner, kind)
            self._notes.note(f"{kind.__name__}.{name}", "given", read, given, ask(read, given))
        return ()

    def _of_class(self, owner: type, name: str, frame: types.FrameType) -> Sequence[Hook]:
        kind = type(owner)
        self._notes.cls(owner, name)
        self._notes.cls(kind, name)
        self._contents.dunders(kind, frame)
        found = looked_up(kind, name)
        if isinstance(found, property):
            return [Hook(found.fget, (owner,)), *self._otherwise(owner, name)]
        if isinstance(found, _DATA) and name != "__dict__":
            self._given(owner, name, frame)
        there = found is not MISSING or looked_up(owner, name) is not MISSING
        return () if there else self._otherwise(owner, name)

    def _otherwise(self, owner: object, name: str) -> Sequence[Hook]:
        """Return what Python calls for an attribute that is not there."""
        kind = type(owner)
        if isinstance(owner, types.ModuleType):
            space, key = vars(owner), "__getattr__"
            self._notes.note(f"{owner.__name__}.{key}", "item", space, key, space.get(key, MISSING))
            if key in space:
                return [Hook(space[key], (name,))]
        hook = looked_up(kind, "__getattr__")
        if hook is MISSING or isinstance(hook, types.FunctionType) or is_python_method(hook, "__get__"):
            return ()
        bind = getattr(type(hook), "__get__", None)
        return [Hook(hook if bind is None else bind(hook, owner, kind), (name,))]

    def _of_tensor(self, owner: torch.Tensor, name: str, frame: types.FrameType) -> None:
        self._notes.cls(type(owner), name)
        if id(owner) in self._brought.ids:
            # A kind knows whether it has a gradient, if it wants one, and its plain attributes.
            wants = owner.requires_grad and owner.is_leaf and owner.grad is None
            there = owner.__dict__.get(name, MISSING)
            if name not in _OWN and (there is not MISSING or looked_up(type(owner), name) is MISSING):
                self._brought.names[name] = None
            hidden = there is not MISSING and not isinstance(there, PLAIN) and name not in _OWN
            if hidden or name in _DIFFERENT or (name == "grad" and not wants):
                self._notes.unseen(f"it reads {name} of an argument", frame, owner)
        elif name in _ALIASES:
            self._notes.asks_step(owner, frame)
        elif name == "_version":
            self._notes.unseen("it reads how often a tensor was written", frame, owner)
        elif looked_up(type(owner), name) is MISSING:
            self._notes.note(
                f"a tensor's {name}", "item", owner.__dict__, name, owner.__dict__.get(name, MISSING)
            )
        self._contents.buffer(owner, frame)

    def put(self, owner: object, name: str, value: object) -> None:
        """Note a value that is put into an attribute, if C code takes it there."""
        found = looked_up(type(owner), name)
        if isinstance(found, types.MemberDescriptorType) and found.__objclass__.__flags__ & HEAP:
            return
        by_python = is_python_method(found, "__set__")
        if isinstance(found, property):
            by_python = not is_c(found.fset)
        if found is not MISSING and hasattr(type(found), "__set__") and not by_python:
            self._contents.deep(value, None)

    def of_object(self, owner: object, name: str, frame: types.FrameType) -> Sequence[Hook]:
        """Note what stands under a name in an object, and in its class. Return what Python calls for it."""
        kind = type(owner)
        self._notes.cls(kind, name)
        self._contents.dunders(kind, frame)
        found = looked_up(kind, name)
        if isinstance(found, property):
            return [Hook(found.fget, (owner,)), *self._otherwise(owner, name)]
        if isinstance(owner, VIEWS):
            return ()
        self._contents.dunders(type(found), frame)
        if (
            found is not MISSING
            and hasattr(type(found), "__set__")
            and not is_python_method(found, "__get__")
        ):
            self._given(owner, name, frame)
            return ()
        try:
            space = object.__getattribute__(owner, "__dict__")
        # It has slots, or none: its class says all.
        except AttributeError:
            return self._otherwise(owner, name) if found is MISSING else ()
        path = f"{owner.__name__ if isinstance(owner, types.ModuleType) else kind.__name__}.{name}"
        self._notes.note(path, "item", space, name, space.get(name, MISSING))
        if kind.__flags__ & HEAP and not isinstance(owner, types.ModuleType):
            self._notes.note(f"{kind.__name__}.__class__", "attribute", owner, "__class__", kind)
            self._notes.note(f"{kind.__name__}.__dict__", "attribute", owner, "__dict__", space)
        return self._otherwise(owner, name) if found is MISSING and name not in space else ()

    def _given(self, owner: object, name: str, frame: types.FrameType) -> None:
        """Note an attribute that C code gives, if it gives the same thing each time."""
        if isinstance(owner, BUFFERS):
            self._contents.buffer(owner, frame)
            return
        try:
            value = getattr(owner, name)
            again = value is getattr(owner, name) or isinstance(value, PLAIN)
        # Python raises it too, or takes a default.
        except AttributeError:
            value, again = MISSING, True
        if again:
            self._notes.note(f"{type(owner).__name__}.{name}", "attribute", owner, name, value)
        elif not is_c(value):
            self._notes.unseen(f"it reads {type(owner).__name__}.{name}", frame, owner)
