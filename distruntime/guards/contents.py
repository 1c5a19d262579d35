"""What containers and buffers hold, where a function reads it."""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import threading
import types
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from ..log.line import of_a_library
from .anchors import Anchor
from .generators import GENERATORS
from .notes import Notes
from .reachable import Reachable, is_remote
from .seen import HEAP, MISSING, PLAIN, SIMPLE, content_of, elements_of, key_of, keys_of, looked_up

CONTAINERS = (dict, list, set, deque)
# Nothing in these changes.
FIXED = (*PLAIN, tuple, frozenset, range, slice, type(...), type(NotImplemented))
_CODE = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
    *(types.MethodType, types.CodeType),
)
_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)
# C code that is called by C code reads what these belong to, or keep: `map(table.get, names)`.
_KEEPING = (*_BOUND, types.MethodType, functools.partial, functools._lru_cache_wrapper)
VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()), types.MappingProxyType)
# What these hold decides nothing, but for what their methods give.
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
BUFFERS = (np.ndarray, np.void, bytearray, memoryview, mmap.mmap, ctypes.Array, ctypes.Structure)
# C code of these modules keeps nothing in its objects that changes.
_STEADY = frozenset(
    "operator numpy weakref torch functools re _sre datetime decimal fractions struct _struct typing types "
    "contextvars _contextvars _json itertools".split()
)
# A list with more plain values is compared as a whole.
_MOST = 64
# So many bytes of buffers are compared with what they were, in all.
_MOST_BYTES = 65536
# So many things are looked at behind one argument.
_MOST_DEEP = 10_000


@dataclass(slots=True)
class Met:
    """What was met behind arguments: floats, tensors of this process or of workers, and counted steps."""

    floats: list[float] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)
    local: bool = False
    remote: bool = False


class Contents:
    """Notes what is in a container, in part or whole."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._bytes = 0
        self._types: set[type] = set()

    def part(self, owner: object, key: object, frame: types.FrameType) -> None:
        """Note one item of a container."""
        kind = type(owner)
        self.deep(key, None)
        if kind in FIXED:
            return
        if isinstance(owner, types.MappingProxyType):
            owner = gc.get_referents(owner)[0]
        if isinstance(owner, dict):
            self.dunders(kind, frame)
            path = f"{kind.__name__}[{key!r:.40}]" if isinstance(key, PLAIN) else kind.__name__
            try:
                if is_python_method(owner, "__getitem__") or is_python_method(owner, "__contains__"):
                    self._notes.note(
                        path, "given", dict.get, (owner, key, MISSING), dict.get(owner, key, MISSING)
                    )
                else:
                    self._notes.note(path, "item", owner, key, dict.get(owner, key, MISSING))
            # The key is no key: Python raises for it.
            except TypeError:
                return
        elif isinstance(owner, (list, deque)) and isinstance(key, int) and -len(owner) <= key < len(owner):
            self._notes.note(f"{kind.__name__}[{key}]", "item", owner, key, owner[key])
        else:
            self.whole(owner, frame)

    def length(self, owner: object) -> None:
        self._notes.note(f"len({type(owner).__name__})", "length", owner, None, len(owner))  # type: ignore[arg-type]

    def whole(self, owner: object, frame: types.FrameType | None = None) -> None:
        """Note all that a container holds, a buffer's bytes, or that an iterator goes on."""
        kind = type(owner)
        if isinstance(owner, type):
            self.dunders(kind, frame)
            return
        if kind in FIXED or isinstance(owner, (*_CODE, *_BOUND, *_LOCKS)):
            return
        if isinstance(owner, CONTAINERS):
            self.dunders(kind, frame)
            self._items(owner)
        elif isinstance(owner, VIEWS):
            self.whole(gc.get_referents(owner)[0], frame)
        elif isinstance(owner, torch.Tensor):
            self._notes.asks_step(owner, frame)
            self.buffer(owner, frame)
        elif isinstance(owner, BUFFERS) or kind.__module__ == "array":
            self.buffer(owner, frame)
        elif isinstance(owner, GENERATORS):
            self._notes.generator(owner, frame)
        elif frame is None or isinstance(owner, (types.GeneratorType, types.CoroutineType)):
            return
        elif hasattr(kind, "__next__") and not isinstance(kind.__next__, types.FunctionType):
            self._notes.unseen(f"it goes on with {kind.__name__!r} that was begun before", frame, owner)
        elif isinstance(owner, (types.SimpleNamespace, BaseException)):
            # C code compares and prints them.
            self.dunders(kind, frame)
            self._items(vars(owner))
            if isinstance(owner, BaseException):
                self._notes.note(f"{kind.__name__}.args", "attribute", owner, "args", owner.args)
        elif _is_python(owner):
            self.dunders(kind, frame)
        elif kind.__module__.split(".")[0] not in _STEADY and (kind.__hash__ is None or gc.is_tracked(owner)):
            self._notes.unseen(f"it reads an object of {kind.__module__}.{kind.__qualname__}", frame, owner)

    def _items(self, owner: object) -> None:
        self.length(owner)
        kind = type(owner).__name__
        if isinstance(owner, dict):
            keys = list(keys_of(owner))
            if not any(isinstance(key, torch.Tensor) for key in keys):
                self._notes.note(f"the keys of {kind}", "keys", owner, None, keys)
        values = list(elements_of(owner))
        tensors = any(isinstance(value, torch.Tensor) for value in values)
        long = len(values) > _MOST and all(isinstance(value, PLAIN) for value in values)
        if long or (isinstance(owner, (set, frozenset)) and not tensors):
            self._notes.note(f"what {kind} holds", "elements", owner, None, values)
            return
        for key, value in zip(keys if isinstance(owner, dict) else range(len(values)), values):
            self._notes.note(f"{kind}[{key!r:.40}]", "item", owner, key, value)

    def deep(self, thing: object, frame: types.FrameType | None) -> None:
        """Note all that can be reached through containers.

        Without a frame, what nobody can see is no reason. Floats must be what they were, and what counts an
        optimizer's steps decides something.
        """
        if type(thing) not in SIMPLE or type(thing) is float:
            met = Met()
            self.gather(thing, frame, met)
            self.resolve(met, frame)

    def resolve(
        self, met: Met, frame: types.FrameType | None, follows: bool = False, counts: bool = False
    ) -> None:
        """Let what was met decide something, but floats that are followed, or steps that are only counted."""
        for value in () if follows else met.floats:
            self._notes.numbers.pin(value)
        for step in () if counts else met.steps:
            self._notes.asks_step(step, frame)

    def gather(self, thing: object, frame: types.FrameType | None, met: Met, objects: bool = False) -> None:
        """Note all that can be reached through containers, and through objects if they count.

        What was met there is to be resolved.
        """
        todo, known = [thing], set[int]()
        while todo and len(known) < _MOST_DEEP:
            one = todo.pop()
            if type(one) is float:
                met.floats.append(one)
            if type(one) in SIMPLE or id(one) in known:
                continue
            known.add(id(one))
            if isinstance(one, (tuple, frozenset)):
                todo += one
                continue
            if isinstance(one, torch.Tensor):
                self._met_tensor(one, frame, met)
                continue
            self.whole(one, frame)
            if isinstance(one, CONTAINERS):
                todo += elements_of(one)
            elif isinstance(one, _BOUND) or (
                isinstance(one, types.MethodType) and not isinstance(one.__func__, types.FunctionType)
            ):
                # C code that is called by C code reads what it belongs to: `map(table.get, names)`.
                todo.append(one.__self__)
            elif isinstance(one, functools.partial):
                todo += (one.func, one.args, one.keywords)
            elif isinstance(one, functools._lru_cache_wrapper):
                self.cached(one)
            elif objects and not isinstance(one, (torch.nn.Module, *_CODE)):
                space = getattr(one, "__dict__", None)
                todo += [] if space is None else [space]
                todo += self.slots(one)

    def dunders(self, kind: type, frame: types.FrameType | None) -> None:
        """Note the functions of a class that Python calls by itself, for an operator or a loop.

        No frame tells what one reads that is no Python: `__getitem__ = table.__getitem__`.
        """
        if kind in self._types or not kind.__flags__ & HEAP or issubclass(kind, torch.Tensor):
            return
        self._types.add(kind)
        for base in kind.__mro__:
            if base.__flags__ & HEAP:
                for name, value in list(vars(base).items()):
                    if name.startswith("__") and callable(value) and not isinstance(value, type):
                        self._notes.cls(kind, name)
                        value = value.__func__ if isinstance(value, staticmethod) else value
                        if isinstance(value, _KEEPING):
                            self.deep(value, frame)

    def cached(self, function: functools._lru_cache_wrapper[object]) -> None:
        """Note what a function reads that may not be called again, and that it keeps what it gave."""
        code = getattr(function.__wrapped__, "__code__", None)
        if code is not None and not of_a_library(code.co_filename):
            self._notes.note(
                f"the cache of {function.__name__}", "given", _answers, (function,), _answers(function)
            )
            for one in Reachable([(function.__name__, function.__wrapped__)]).seen:
                if not isinstance(one.holder, Anchor) and not isinstance(one.held, Anchor):
                    self._notes.found.setdefault(key_of(one), one)

    def _met_tensor(self, tensor: torch.Tensor, frame: types.FrameType | None, met: Met) -> None:
        self.buffer(tensor, frame)
        if id(tensor) in self._notes.numbers.steps:
            met.steps.append(tensor)
        if is_remote(tensor):
            met.remote = True
        else:
            met.local = True

    def slots(self, owner: object) -> list[object]:
        """Note what stands in an object's slots, and return that."""
        found = []
        for name, slot in ((n, v) for base in type(owner).__mro__ for n, v in list(vars(base).items())):
            own = isinstance(slot, types.MemberDescriptorType) and slot.__objclass__.__flags__ & HEAP
            # A property of a class below it may stand in its place.
            if own and looked_up(type(owner), name) is slot:
                value = getattr(owner, name, MISSING)
                self._notes.note(f"{type(owner).__name__}.{name}", "attribute", owner, name, value)
                found.append(value)
        return found

    def buffer(self, owner: object, frame: types.FrameType | None) -> None:
        """Note the bytes of a buffer, or of a tensor of this process."""
        if isinstance(owner, torch.Tensor) and type(owner) not in (torch.Tensor, torch.nn.Parameter):
            return
        if type(owner) in FIXED or (id(owner), "bytes", None) in self._notes.found:
            return
        content = None if _large(owner) else content_of(owner)
        size = len(content[-1]) if content is not None else 0  # type: ignore[arg-type]
        if content is not None and self._bytes + size <= _MOST_BYTES:
            self._bytes += size
            self._notes.note(f"what {type(owner).__name__} holds", "bytes", owner, None, content)
        elif isinstance(owner, torch.Tensor):
            self._notes.note("the version of a local tensor", "version", owner, None, owner._version)
        elif frame is not None:
            what = (
                f"it reads {type(owner).__name__}, which holds objects or more than {_MOST_BYTES >> 10} KiB"
            )
            self._notes.unseen(what, frame, owner)


def _answers(function: functools._lru_cache_wrapper[object]) -> str:
    """Return what changes when a function has been asked for something new, or has forgotten all."""
    about = function.cache_info()
    return f"{about.misses} {about.currsize}"


def is_python_method(owner: object, name: str) -> bool:
    """Whether Python code runs when Python itself calls this method of an object."""
    return isinstance(
        looked_up(type(owner), name), (types.FunctionType, functools.partialmethod, classmethod)
    )


def _is_python(owner: object) -> bool:
    """Whether what an object holds is in attributes."""
    slots = any("__slots__" in vars(base) for base in type(owner).__mro__)
    return slots or isinstance(getattr(owner, "__dict__", None), dict)


def _large(owner: object) -> bool:
    return isinstance(owner, (torch.Tensor, np.ndarray)) and owner.nbytes > _MOST_BYTES
