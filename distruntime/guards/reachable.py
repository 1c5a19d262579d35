"""What a function can reach: its closure and globals, `self`, modules, optimizers, dictionaries and lists.

A walk finds the remote tensors there, each by a path, and the plain values that decide what the function
does. Nobody can see what a call of another package returns (the time, a file), or what lies in C.
"""

from __future__ import annotations

import dis
import functools
import logging
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch

from ..log.line import of_a_library
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor
from .anchors import anchored
from .generators import state_of
from .operands import once
from .own_code import PACKAGE
from .seen import PLAIN, Seen

# So many things are looked at. A list with more plain values than the second counts by its length.
_MOST, _MOST_PLAIN = 100_000, 10_000
# Nothing in these decides what a function computes, or is ours.
_SKIPPED = (types.ModuleType, logging.Logger, threading.Thread, torch.Generator, np.random.Generator)
_SKIPPED_MODULES = ("threading", "_thread", "io", "_io", "asyncio", "weakref", "ctypes", "distruntime")
# Objects of these rooms hold tensors as the user's own do.
_HOLDING = "distruntime.parallel."

# What torch keeps in these, and does not read while it computes.
_BOOKKEEPING = (torch.nn.Module, torch.optim.Optimizer)
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
_UNREAD = ("_non_persistent_buffers_set", "_is_full_backward_hook", "_is_hf_initialized", "defaults")


def local_of(tensor: object) -> torch.Tensor | None:
    """Return the tensor of the members that a DTensor stands for; None of anything else."""
    return getattr(tensor, "_local_tensor", None) if isinstance(tensor, torch.Tensor) else None


def is_remote(thing: object) -> bool:
    """Whether something is a tensor of workers."""
    kinds = (DistributedTensor, UnevenTensor)
    return isinstance(thing, kinds) or isinstance(local_of(thing), kinds)


def _seen(path: str, form: str, owner: object, key: object, value: object) -> Seen:
    owner, value = (anchored(x) if isinstance(x, DistributedTensor) else x for x in (owner, value))
    return Seen(path, form, owner, key, value)


class Reachable:
    """What can be reached from `roots`, each with its name, at this moment."""

    def __init__(self, roots: list[tuple[str, object]]) -> None:
        # These are plain values, objects (by identity), lengths, and the versions of local tensors.
        self.seen: list[Seen] = []
        # These remote tensors were found, by id, each at its first path.
        self.tensors: dict[int, tuple[str, DistributedTensor]] = {}
        # A write in place gives a tensor another graph. It is no state that a call leaves.
        self.graphs: list[Seen] = []
        # This has each path of a remote tensor.
        self.paths: dict[str, DistributedTensor] = {}
        # These generators of random numbers were found.
        self.generators: list[tuple[str, Callable[[], object]]] = []
        # These tensors of this process count the steps of an optimizer, by id.
        self.steps: dict[int, torch.Tensor] = {}
        # This package's layers and optimizers stand at these paths: nobody sees what their Python reads. And
        # objects of the user's classes: their Python is looked at.
        self.own: list[str] = []
        self.users: list[str] = []
        self._ids: dict[int, object] = {}
        self._names: dict[str, int] = {}
        self._todo: deque[tuple[str, object]] = deque()
        for path, root in roots:
            if isinstance(root, DistributedTensor):
                self._tensor(path, root)
            else:
                self._todo.append((path, root))
        while self._todo and len(self._ids) < _MOST:
            self._walk(*self._todo.popleft())

    def hidden(self, path: str) -> bool:
        """Whether Python that nobody looks at reads what stands at a path."""
        within = [len(one) for one in self.own if path.startswith((f"{one}.", f"{one}["))]
        if not within:
            return False
        return max(within) > max((len(one) for one in self.users if path.startswith(f"{one}.")), default=-1)

    def by_ref(self) -> dict[int, str]:
        """Return the path of each remote tensor by its ref."""
        found: dict[int, str] = {}
        for path, tensor in self.tensors.values():
            found.setdefault(tensor._handle.ref, path)
        return found

    def _named(self, path: str) -> str:
        """Return the path, with a number behind it if another thing has it already."""
        count = self._names[path] = self._names.get(path, 0) + 1
        return path if count == 1 else f"{path} #{count}"

    # -- the walk --------------------------------------------------------------------------------------------

    def _note(self, path: str, form: str, owner: object, key: object, value: object) -> None:
        """Note a part of something, and what is in it."""
        path = self._named(path)
        if isinstance(value, _SKIPPED[:3]):
            return
        self.seen.append(_seen(path, form, owner, key, value))
        if isinstance(value, DistributedTensor):
            self._tensor(path, value)
        elif not isinstance(value, PLAIN):
            self._todo.append((path, value))

    def _tensor(self, path: str, tensor: DistributedTensor) -> None:
        self.paths[path] = tensor
        if id(tensor) in self.tensors:
            return
        self.tensors[id(tensor)] = path, tensor
        if tensor.is_leaf:
            # The attribute itself may be None now, and a tensor later.
            grad = tensor.grad
            self.seen.append(_seen(f"{path}.grad", "attribute", tensor, "grad", grad))
            if isinstance(grad, DistributedTensor):
                self._tensor(f"{path}.grad", grad)
        else:
            self._graph(path, tensor)
        if isinstance(tensor._base, DistributedTensor):
            # A view keeps it, and so does whoever holds the view.
            self._tensor(f"{path}._base", tensor._base)
        # A tensor that wants no gradient has no hooks.
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks") if tensor.requires_grad else ():
            hooks = getattr(tensor, name, None)
            self._note(f"{path}.{name}", "attribute", tensor, name, hooks)

    def _dtensor(self, path: str, tensor: torch.Tensor) -> None:
        """Look at a DTensor on a mesh: its layout, the tensor of its members, and its gradient."""
        names = ["_local_tensor", "_spec", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"]
        for name in [*names, "grad"] if tensor.is_leaf else names:
            value = getattr(tensor, name, None)
            if name == "_spec" or value is None:
                self.seen.append(_seen(self._named(f"{path}.{name}"), "attribute", tensor, name, value))
            else:
                self._note(f"{path}.{name}", "attribute", tensor, name, value)
        if not tensor.is_leaf:
            self._graph(path, tensor)

    def _graph(self, path: str, tensor: torch.Tensor) -> None:
        # torch makes that of a view of a leaf anew when the leaf is written. It can get no other one.
        if tensor._base is None or not tensor._base.is_leaf:
            self.graphs.append(_seen(f"{path}.grad_fn", "attribute", tensor, "grad_fn", tensor.grad_fn))

    def _walk(self, path: str, thing: object) -> None:
        if id(thing) in self._ids:
            return
        self._ids[id(thing)] = thing
        if isinstance(thing, UnevenTensor):
            self._note(f"{path}._shards", "attribute", thing, "_shards", thing._shards)
            if isinstance(thing._base, DistributedTensor):
                self._tensor(f"{path}._base", thing._base)
        elif isinstance(thing, torch.Tensor) and is_remote(thing):
            self._dtensor(path, thing)
        elif isinstance(thing, torch.Tensor):
            # It is a local one.
            self.seen.append(Seen(path, "version", thing, None, thing._version))
        elif isinstance(thing, types.FunctionType):
            self._function(path, thing)
        elif isinstance(thing, types.MethodType):
            self._todo.append((f"{path}.__self__", thing.__self__))
            # A function of C's stands in one, too.
            self._todo.append((path, thing.__func__))
        elif isinstance(thing, functools.partial):
            self._todo += [(path, thing.func), (f"{path}.args", thing.args)]
            self._todo.append((f"{path}.keywords", thing.keywords))
        elif isinstance(thing, dict):
            self._dict(path, thing)
        elif isinstance(thing, (list, tuple, deque)):
            self._list(path, thing)
        elif isinstance(thing, (set, frozenset)):
            self.seen.append(Seen(path, "length", thing, None, len(thing)))
        elif (state := state_of(thing)) is not None:
            self.generators.append((path, state))
        elif isinstance(thing, type):
            self._class(path, thing)
        else:
            self._object(path, thing)

    def _dict(self, path: str, items: dict[object, object]) -> None:
        self.seen.append(Seen(path, "length", items, None, len(items)))
        for key, value in list(items.items()):
            self._note(f"{path}[{_key_text(key)}]", "item", items, key, value)

    def _list(self, path: str, items: list[object] | tuple[object, ...] | deque[object]) -> None:
        if not isinstance(items, tuple):
            self.seen.append(Seen(path, "length", items, None, len(items)))
        if len(items) > _MOST_PLAIN and all(isinstance(item, PLAIN) for item in items):
            return
        for k, item in enumerate(list(items)):
            self._note(f"{path}[{k}]", "item", items, k, item)

    def _object(self, path: str, thing: object) -> None:
        kind = type(thing)
        # Our layers and optimizers hold tensors of the user's.
        holds = isinstance(thing, torch.nn.Module) or kind.__module__.startswith(_HOLDING)
        skipped = kind.__module__.split(".")[0] in _SKIPPED_MODULES and not holds
        if holds and kind.__module__.startswith(PACKAGE):
            self.own.append(path)
        elif self.own and _of_user(kind):
            self.users.append(path)
        if isinstance(thing, _SKIPPED) or skipped:
            own = getattr(thing, "__wrapped__", None) if kind.__module__ == _OWN else None
            if own is not None:
                self._todo.append((path, own))
            return
        if isinstance(thing, torch.optim.Optimizer):
            for state in thing.state.values():
                step = state.get("step") if isinstance(state, dict) else None
                if type(step) is torch.Tensor and step.numel() == 1 and step.is_floating_point():
                    self.steps[id(step)] = step
        found = getattr(thing, "__dict__", None)
        if isinstance(found, dict):
            if not isinstance(thing, torch.nn.Module):
                self.seen.append(Seen(path, "length", found, None, len(found)))
            books = isinstance(thing, _BOOKKEEPING)
            for name, value in list(found.items()):
                if books and (name in _UNREAD or "state_dict" in name):
                    continue
                if books and name.endswith(_HOOKS):
                    # It is always the same dictionary, so its items are enough.
                    self._todo.append((f"{path}.{name}", value))
                    continue
                inner = path if name in ("_parameters", "_buffers", "_modules") else f"{path}.{name}"
                if inner is path and isinstance(value, dict):
                    self._ids[id(value)] = value
                    for key, part in list(value.items()):
                        self._note(f"{path}.{key}", "item", value, key, part)
                else:
                    self._note(inner, "item", found, name, value)
        for cls in kind.__mro__[:-1]:
            for name in getattr(cls, "__slots__", ()):
                if isinstance(name, str) and name != "__dict__" and hasattr(thing, name):
                    self._note(f"{path}.{name}", "attribute", thing, name, getattr(thing, name))
        self._todo.append((kind.__name__, kind))

    def _class(self, path: str, cls: type) -> None:
        """Look at what a class of the user's says, and at what its functions read."""
        for base in cls.__mro__[:-1]:
            functions = [f for f in vars(base).values() if isinstance(f, types.FunctionType)]
            if not functions or of_a_library(functions[0].__code__.co_filename):
                continue
            for name, value in list(vars(base).items()):
                if isinstance(value, (staticmethod, classmethod)):
                    value = value.__func__
                if name.startswith("__") and not isinstance(value, types.FunctionType):
                    continue
                if isinstance(value, property):
                    self._todo += [(f"{path}.{name}", one) for one in (value.fget,) if one is not None]
                elif isinstance(value, types.FunctionType):
                    self._todo.append((f"{path}.{name}", value))
                else:
                    self._note(f"{path}.{name}", "attribute", base, name, getattr(base, name, value))

    def _function(self, path: str, function: types.FunctionType) -> None:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                value = cell.cell_contents
            # The name has no value yet.
            except ValueError:
                continue
            self._note(name, "cell", cell, None, value)
        self._todo.append((f"{path}.__defaults__", function.__defaults__ or ()))
        if function.__kwdefaults__:
            self._todo.append((f"{path}.__kwdefaults__", function.__kwdefaults__))
        wrapped = function.__dict__.get("__wrapped__")
        if wrapped is not None:
            self._todo.append((path, wrapped))
        if of_a_library(code.co_filename):
            return
        space = function.__globals__
        for name, attributes in globals_read(code):
            if name not in space:
                continue
            value = space[name]
            if isinstance(value, types.ModuleType):
                self._module(name, value, attributes)
            else:
                self._note(name, "item", space, name, value)

    def _module(self, path: str, module: types.ModuleType, attributes: tuple[str, ...]) -> None:
        """Look at what a function may read of a module of the user's."""
        space = vars(module)
        if of_a_library(str(getattr(module, "__file__", None) or "<frozen >")):
            return
        for name in attributes:
            if name in space and not isinstance(space[name], types.ModuleType):
                self._note(f"{path}.{name}", "item", space, name, space[name])


def _of_user(kind: type) -> bool:
    """Whether a class has functions of the user's."""
    functions = (value for base in kind.__mro__ for value in vars(base).values())
    return any(
        isinstance(one, types.FunctionType) and not of_a_library(one.__code__.co_filename)
        for one in functions
    )


_OWN = f"{__name__.partition('.')[0]}.programs.program"


@once
def globals_read(code: types.CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the global names that a function and those inside it read, with the attributes they may read."""
    codes = [*_codes(code)]
    attributes = tuple(dict.fromkeys(name for one in codes for name in one.co_names))
    names = {
        str(step.argval): None
        for one in codes
        for step in dis.get_instructions(one)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return tuple((name, attributes) for name in names)


@once
def chains_read(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the global names that a function and those inside it read, each with the attributes that are
    read of it at once: `("module", "table")` for `module.table`, and `("module",)` for `use(module)`.
    """
    found: dict[tuple[str, ...], None] = {}
    for one in _codes(code):
        chain: tuple[str, ...] = ()
        for step in dis.get_instructions(one):
            if chain and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                chain = *chain, str(step.argval)
            elif step.opname != "EXTENDED_ARG":
                found[chain] = None
                chain = (str(step.argval),) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    found.pop((), None)
    return tuple(found)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _key_text(key: object) -> str:
    return repr(key) if isinstance(key, (str, int)) else f"a {type(key).__name__}"
