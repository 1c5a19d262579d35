"""What a function's Python reads while it is recorded: each read becomes a guard, or a reason to record anew.

Each instruction is looked at before it runs, with its operands. A call of a C function reads all that its
arguments hold. If the function is not known to depend on them alone, what it gives is a reason.
"""

from __future__ import annotations

import ctypes
import decimal
import functools
import gc
import mmap
import operator
import sys
import types
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..log.line import line_from, line_text, of_a_library, own_line
from . import operands
from .anchors import Anchor
from .arithmetic import Arithmetic, Term, operator_of
from .functions import (
    draws,
    gives_again,
    is_c,
    is_traced,
    is_trusted,
    name_of,
    of_arguments,
    of_torch,
    starts_thread,
)
from .instructions import Reading
from .reach import Reach
from .seen import MISSING, PLAIN, TENSOR, Key, Seen, content_of, elements_of, key_of, keys_of, looked_up

_CONTAINERS = (dict, list, set, deque)
_FIXED = (*PLAIN, tuple, frozenset, range, slice, type(...), type(NotImplemented))
_SIMPLE = frozenset(PLAIN)
_HOLDERS = (types.FunctionType, types.MethodType, staticmethod, classmethod, functools.partial, property)
_CODE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.CodeType,
)
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()), types.MappingProxyType)
_BUFFERS = (np.ndarray, bytearray, memoryview, mmap.mmap, ctypes.Array, ctypes.Structure)
# Python looks an attribute of these up in the object and in its class.
_GENERIC = (object, dict, list, tuple, set, frozenset, str, bytes, int, float, complex, bytearray, deque)
_GENERIC += (types.ModuleType, types.FunctionType, BaseException, OrderedDict, property)
_DATA = (types.GetSetDescriptorType, types.MemberDescriptorType)
# These take an object, and read nothing in it.
_BLIND = frozenset(
    map(id, (isinstance, issubclass, id, callable, setattr, delattr, hash, print, type, super, object, len))
)
# A list with more plain values is compared as a whole.
_MOST = 64
# So many bytes of buffers are compared with what they were, in all.
_MOST_BYTES = 65536
# So many things are looked at behind one argument.
_MOST_DEEP = 10_000
_GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
_PICKLING = ("_pickle", "_json", "copyreg", "json", "pickle")


class Reads:
    """What one call has read, of what was there before it."""

    def __init__(self, base: int, numbers: Arithmetic) -> None:
        # The id of the frame that calls the function.
        self.base, self.numbers = base, numbers
        # Each read, by its owner's id, its form and its key.
        self.found: dict[Key, Seen] = {}
        # Why each call must be recorded, with the object that it depends on, if there is one.
        self._reasons: dict[str, object] = {}
        # What is done with the result of the instruction that a frame is at, by the frame's id.
        self._then: dict[int, Callable[[object], None]] = {}
        self._types: set[type] = set()
        # The places of frames that this call has begun. A generator that was begun before has another one.
        self._begun: set[int] = set()
        self._bytes = 0
        self.step_of: dict[str, Callable[[types.FrameType, Reading], None]] = {
            "global": self._global,
            "cell": self._cell,
            "attribute": self._attribute,
            "super": self._super,
            "import": self._import,
            "item": self._item,
            "slice": self._slice,
            "contains": self._contains,
            "iterate": self._iterate,
            "both": self._both,
            "negative": self._negative,
            "truth": self._truth,
            "text": self._text,
            "with": self._with,
            "match": self._match,
            "call": self._call,
        }

    def step(self, frame: types.FrameType, one: Reading) -> None:
        """Note what a frame's next instruction reads.

        It stands in the user's stack, where an error would be taken for one of the user's.
        """
        try:
            # A call that has raised has given nothing.
            if self._then and (then := self._then.pop(id(frame), None)) is not None and one.behind:
                then(operands.operand(frame, one.depth))
            if one.kind:
                self.step_of[one.kind](frame, one)
        except Exception as error:
            kind = f"{type(error).__name__}: {error}"
            self._reason(f"what it reads could not be looked at ({kind})", frame, None)

    def enter(self, frame: types.FrameType, resumed: bool) -> None:
        """Note that a frame begins to run, or goes on."""
        place = operands.place(frame)
        if not resumed:
            self._begun.add(place)
        elif place not in self._begun:
            self._reason(f"the generator {frame.f_code.co_name!r} was begun before", frame.f_back, None)

    def cannot_look(self, why: str) -> None:
        """Note that nobody sees what this call reads."""
        self._reasons.setdefault(f"nobody can see what it reads: {why} ({sys.version.split()[0]})", None)

    # -- notes -----------------------------------------------------------------------------------------------

    def note(self, path: str, form: str, owner: object, key: object, value: object) -> None:
        """Note that something was read, and what it was."""
        held = TENSOR if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor else value
        one = Seen(path, form, owner, key, held)
        name = key_of(one)
        if self.found.setdefault(name, one) is one and isinstance(value, _HOLDERS):
            self._function(value)
        self.numbers.read(name, value)

    def _function(self, value: object) -> None:
        """Note what a function is, as it can be changed where it stands."""
        while isinstance(value, _HOLDERS[1:]):
            inner = value.fget if isinstance(value, property) else getattr(value, "func", None)
            value = inner if inner is not None else getattr(value, "__func__", None)
        if isinstance(value, functools._lru_cache_wrapper):
            value = value.__wrapped__
        if isinstance(value, types.FunctionType) and (id(value), "attribute", "__code__") not in self.found:
            for name in ("__code__", "__defaults__", "__kwdefaults__"):
                self.note(f"{value.__name__}.{name}", "attribute", value, name, getattr(value, name))
            self._whole(value.__kwdefaults__)

    def _reason(self, what: str, frame: types.FrameType | None, owner: object) -> str:
        text = f"{what}\n  at {line_text(own_line(line_from(frame)))}"
        self._reasons.setdefault(text, owner)
        return text

    def _unseen(self, what: str, frame: types.FrameType, owner: object) -> None:
        # torch's own Python depends on nothing else.
        if is_trusted(frame.f_code.co_filename):
            return
        self._reason(
            f"{what}, and nobody can see whether that changes. Read it outside, and pass what it gives as an argument",
            frame,
            owner,
        )

    # -- names and attributes --------------------------------------------------------------------------------

    def _global(self, frame: types.FrameType, one: Reading) -> None:
        name, space = str(one.argument), frame.f_globals
        if name in space:
            self.note(name, "item", space, name, space[name])
        else:
            self.note(name, "item", space, name, MISSING)
            self.note(name, "item", frame.f_builtins, name, frame.f_builtins.get(name, MISSING))

    def _import(self, frame: types.FrameType, one: Reading) -> None:
        name = str(one.argument)
        self.note(name, "item", sys.modules, name, sys.modules.get(name, MISSING))

    def _cell(self, frame: types.FrameType, one: Reading) -> None:
        number, name = one.argument  # type: ignore[misc]
        cell = operands.cell(frame, number)
        if cell is not None:
            try:
                self.note(name, "cell", cell, None, cell.cell_contents)
            # It has no value yet: Python raises for it.
            except ValueError:
                return

    def _attribute(self, frame: types.FrameType, one: Reading) -> None:
        self.attribute(operands.operand(frame, one.depth), str(one.argument), frame)

    def attribute(self, owner: object, name: str, frame: types.FrameType) -> None:
        """Note that an attribute was looked up: in an object, and in its class and the bases of that."""
        kind = type(owner)
        if kind in _FIXED:
            return
        if isinstance(owner, torch.Tensor):
            self._of_tensor(owner, name, frame)
        elif kind is super:
            self._after_class(owner.__self_class__, owner.__thisclass__, name)  # type: ignore[attr-defined]
        elif isinstance(owner, types.CodeType):
            return
        elif isinstance(owner, type):
            self._class(owner, name)
            self._class(kind, name)
            if isinstance(looked_up(kind, name), _DATA) and name != "__dict__":
                self._given_attribute(owner, name, frame)
        elif isinstance(owner, types.MethodType):
            self.attribute(owner.__func__, name, frame)
        elif getattr(kind.__getattribute__, "__objclass__", None) in _GENERIC:
            self._of_object(owner, name, frame)
        elif isinstance(kind.__getattribute__, types.FunctionType):
            self._class(kind, "__getattribute__")
        else:
            self._given_attribute(owner, name, frame)

    def _match(self, frame: types.FrameType, one: Reading) -> None:
        """Note what a pattern with the name of a class reads: `case Point(x, y=1)`."""
        names, kind, owner = (operands.operand(frame, one.depth, below) for below in range(3))
        if not isinstance(kind, type):
            return
        matches = isinstance(owner, kind)
        # An abstract class may be told of another one.
        if type(kind) is not type and not isinstance(owner, torch.Tensor):
            self.note("isinstance()", "given", isinstance, (owner, kind), matches)
        if matches:
            self.attribute(kind, "__match_args__", frame)
            first = getattr(kind, "__match_args__", ())[: one.argument]
            for name in (*first, *names):  # type: ignore[misc]
                self.attribute(owner, str(name), frame)

    def _of_tensor(self, owner: torch.Tensor, name: str, frame: types.FrameType) -> None:
        self._class(type(owner), name)
        if looked_up(type(owner), name) is MISSING:
            self.note(f"a tensor's {name}", "item", owner.__dict__, name, owner.__dict__.get(name, MISSING))
        self._buffer(owner, frame)

    def _of_object(self, owner: object, name: str, frame: types.FrameType) -> None:
        kind = type(owner)
        self._class(kind, name)
        self._dunders(kind)
        found = looked_up(kind, name)
        if isinstance(found, property) or isinstance(owner, _VIEWS):
            return
        self._dunders(type(found))
        if (
            found is not MISSING
            and hasattr(type(found), "__set__")
            and not _is_python_method(found, "__get__")
        ):
            self._given_attribute(owner, name, frame)
            return
        try:
            space = object.__getattribute__(owner, "__dict__")
        # It has slots, or none: its class says all.
        except AttributeError:
            return
        path = f"{owner.__name__ if isinstance(owner, types.ModuleType) else kind.__name__}.{name}"
        self.note(path, "item", space, name, space.get(name, MISSING))
        if kind.__flags__ & _HEAP and not isinstance(owner, types.ModuleType):
            self.note(f"{kind.__name__}.__class__", "attribute", owner, "__class__", kind)
            self.note(f"{kind.__name__}.__dict__", "attribute", owner, "__dict__", space)

    def _given_attribute(self, owner: object, name: str, frame: types.FrameType) -> None:
        """Note an attribute that C code gives, if it gives the same thing each time."""
        if isinstance(owner, _BUFFERS):
            self._buffer(owner, frame)
            return
        try:
            value = getattr(owner, name)
            again = value is getattr(owner, name) or isinstance(value, PLAIN)
        # Python raises it too, or takes a default.
        except AttributeError:
            value, again = MISSING, True
        if again:
            self.note(f"{type(owner).__name__}.{name}", "attribute", owner, name, value)
        elif not is_c(value):
            self._unseen(f"it reads {type(owner).__name__}.{name}", frame, owner)

    def _class(self, kind: type, name: str) -> None:
        """Note what a class and its bases have under a name. Classes of C code cannot change."""
        if kind.__flags__ & _HEAP and (id(kind), "class", name) not in self.found:
            self.note(f"{kind.__name__}.{name}", "class", kind, name, looked_up(kind, name))

    def _after_class(self, kind: type, cls: type, name: str) -> None:
        bases = kind.__mro__
        for base in bases[bases.index(cls) + 1 :]:
            self._class(base, name)
            if name in vars(base):
                break

    def _super(self, frame: types.FrameType, one: Reading) -> None:
        owner, cls = operands.operand(frame, one.depth), operands.operand(frame, one.depth, 1)
        # In a method of a metaclass the owner is a class, and none below the metaclass.
        kind = owner if isinstance(owner, type) and cls in owner.__mro__ else type(owner)
        if isinstance(cls, type) and cls in kind.__mro__:
            self._after_class(kind, cls, str(one.argument))

    def _dunders(self, kind: type) -> None:
        """Note the functions of a class that Python calls by itself, for an operator or a loop."""
        if kind in self._types or not kind.__flags__ & _HEAP:
            return
        self._types.add(kind)
        for base in kind.__mro__:
            if base.__flags__ & _HEAP:
                for name, value in list(vars(base).items()):
                    if name.startswith("__") and isinstance(value, types.FunctionType):
                        self._class(kind, name)

    # -- what containers hold --------------------------------------------------------------------------------

    def _item(self, frame: types.FrameType, one: Reading) -> None:
        key, owner = operands.operand(frame, one.depth), operands.operand(frame, one.depth, 1)
        self._part(owner, key, frame)

    def _part(self, owner: object, key: object, frame: types.FrameType) -> None:
        """Note one item of a container."""
        kind = type(owner)
        self.numbers.pin(key)
        if kind in _FIXED:
            self.numbers.element(owner, key)
            return
        if isinstance(owner, types.MappingProxyType):
            owner = gc.get_referents(owner)[0]
        if isinstance(owner, dict):
            self._dunders(kind)
            path = f"{kind.__name__}[{key!r:.40}]" if isinstance(key, PLAIN) else kind.__name__
            try:
                if _is_python_method(owner, "__getitem__") or _is_python_method(owner, "__contains__"):
                    self.note(path, "given", dict.get, (owner, key, MISSING), dict.get(owner, key, MISSING))
                else:
                    self.note(path, "item", owner, key, dict.get(owner, key, MISSING))
            # The key is no key: Python raises for it.
            except TypeError:
                return
        elif isinstance(owner, (list, deque)) and isinstance(key, int) and -len(owner) <= key < len(owner):
            self.note(f"{kind.__name__}[{key}]", "item", owner, key, owner[key])
        else:
            self._whole(owner, frame)

    def _slice(self, frame: types.FrameType, one: Reading) -> None:
        self._whole(operands.operand(frame, one.depth, 2), frame)

    def _contains(self, frame: types.FrameType, one: Reading) -> None:
        owner, item = operands.operand(frame, one.depth), operands.operand(frame, one.depth, 1)
        if isinstance(owner, (dict, types.MappingProxyType)):
            self._part(owner, item, frame)
        else:
            self._whole(owner, frame)

    def _iterate(self, frame: types.FrameType, one: Reading) -> None:
        owner = operands.operand(frame, one.depth)
        self.numbers.element(owner, None)
        self._whole(owner, frame)

    def _both(self, frame: types.FrameType, one: Reading) -> None:
        right, left = operands.operand(frame, one.depth), operands.operand(frame, one.depth, 1)
        term = self.numbers.follows(operator_of(str(one.argument)), (left, right))
        if term is not None:
            self._follow(frame, term)
            return
        for value in (left, right):
            if isinstance(value, decimal.Decimal):
                self.note("decimal.getcontext()", "given", _decimals, (), _decimals())
            # An operator of a tensor takes a number with it, in a word of its own.
            self._deep(
                value, frame, pins=not isinstance(left, torch.Tensor) and not isinstance(right, torch.Tensor)
            )

    def _follow(self, frame: types.FrameType, term: Term) -> None:
        self._then[id(frame)] = functools.partial(self.numbers.gave, term)

    def _negative(self, frame: types.FrameType, one: Reading) -> None:
        term = self.numbers.follows(operator.neg, (operands.operand(frame, one.depth),))
        if term is not None:
            self._follow(frame, term)

    def _text(self, frame: types.FrameType, one: Reading) -> None:
        self._deep(operands.operand(frame, one.depth, one.argument), frame)  # type: ignore[arg-type]

    def _with(self, frame: types.FrameType, one: Reading) -> None:
        self._dunders(type(operands.operand(frame, one.depth)))

    def _truth(self, frame: types.FrameType, one: Reading) -> None:
        value = operands.operand(frame, one.depth)
        term = self.numbers.term(value)
        if term is not None:
            self.numbers.gave((bool, term), bool(value))
        elif isinstance(value, _CONTAINERS):
            self._length(value)
        elif type(value) not in _FIXED:
            self._whole(value, frame)

    def _length(self, owner: object) -> None:
        self.note(f"len({type(owner).__name__})", "length", owner, None, len(owner))  # type: ignore[arg-type]

    def _whole(self, owner: object, frame: types.FrameType | None = None) -> None:
        """Note all that a container holds, a buffer's bytes, or that an iterator goes on."""
        kind = type(owner)
        if kind in _FIXED or isinstance(owner, _CODE):
            return
        if isinstance(owner, _CONTAINERS):
            self._dunders(kind)
            self._items(owner)
        elif isinstance(owner, _VIEWS):
            self._whole(gc.get_referents(owner)[0], frame)
        elif isinstance(owner, (torch.Tensor, *_BUFFERS)) or kind.__module__ == "array":
            self._buffer(owner, frame)
        elif frame is None or isinstance(owner, (types.GeneratorType, types.CoroutineType)):
            return
        elif hasattr(kind, "__next__") and not isinstance(kind.__next__, types.FunctionType):
            self._unseen(f"it goes on with {kind.__name__!r} that was begun before", frame, owner)
        elif _is_python(owner):
            self._dunders(kind)
        elif kind.__module__.split(".")[0] not in _FOREIGN and (
            kind.__hash__ is None or gc.is_tracked(owner)
        ):
            self._unseen(f"it reads an object of {kind.__module__}.{kind.__qualname__}", frame, owner)

    def _items(self, owner: object) -> None:
        self._length(owner)
        kind = type(owner).__name__
        if isinstance(owner, dict):
            keys = list(keys_of(owner))
            if not any(isinstance(key, torch.Tensor) for key in keys):
                self.note(f"the keys of {kind}", "keys", owner, None, keys)
        values = list(elements_of(owner))
        tensors = any(isinstance(value, torch.Tensor) for value in values)
        long = len(values) > _MOST and all(isinstance(value, PLAIN) for value in values)
        if long or (isinstance(owner, (set, frozenset)) and not tensors):
            self.note(f"what {kind} holds", "elements", owner, None, values)
            return
        for key, value in zip(keys if isinstance(owner, dict) else range(len(values)), values):
            self.note(f"{kind}[{key!r:.40}]", "item", owner, key, value)

    def _deep(self, thing: object, frame: types.FrameType, objects: bool = False, pins: bool = True) -> None:
        """Note all that can be reached from something through containers, and through objects if they count."""
        if type(thing) in _SIMPLE and type(thing) is not float:
            return
        todo, known = [thing], set[int]()
        while todo and len(known) < _MOST_DEEP:
            one = todo.pop()
            if type(one) is float and pins:
                self.numbers.pin(one)
            if type(one) in _SIMPLE or id(one) in known:
                continue
            known.add(id(one))
            if isinstance(one, (tuple, frozenset)):
                todo += one
                continue
            self._whole(one, frame)
            if isinstance(one, _CONTAINERS):
                todo += one.values() if isinstance(one, dict) else one
            elif objects and not isinstance(one, (torch.Tensor, torch.nn.Module, *_CODE)):
                space = getattr(one, "__dict__", None)
                todo += [] if space is None else [space]

    def _buffer(self, owner: object, frame: types.FrameType | None) -> None:
        """Note the bytes of a buffer, or of a tensor of this process."""
        if isinstance(owner, torch.Tensor) and type(owner) not in (torch.Tensor, torch.nn.Parameter):
            return
        if type(owner) in _FIXED or (id(owner), "bytes", None) in self.found:
            return
        content = None if _large(owner) else content_of(owner)
        size = len(content[-1]) if content is not None else 0
        if content is not None and self._bytes + size <= _MOST_BYTES:
            self._bytes += size
            self.note(f"what {type(owner).__name__} holds", "bytes", owner, None, content)
        elif isinstance(owner, torch.Tensor):
            self.note("the version of a local tensor", "version", owner, None, owner._version)
        elif frame is not None:
            what = (
                f"it reads {type(owner).__name__}, which holds objects or more than {_MOST_BYTES >> 10} KiB"
            )
            self._unseen(what, frame, owner)

    # -- calls -----------------------------------------------------------------------------------------------

    def _call(self, frame: types.FrameType, one: Reading) -> None:
        function, arguments = operands.called(frame, one.depth, *one.argument)  # type: ignore[misc]
        term = self.numbers.called(function, arguments)
        if term is not None:
            self._follow(frame, term)
            return
        if arguments and one.argument[0] == "CALL_FUNCTION_EX":  # type: ignore[index]
            for below in (0, 1):
                self._whole(operands.operand(frame, one.depth, below), frame)
        while isinstance(function, functools.partial):
            for name in ("func", "args", "keywords"):
                self.note(f"partial.{name}", "attribute", function, name, getattr(function, name))
            self._deep(function.keywords, frame)
            function, arguments = function.func, (*function.args, *arguments)
        if isinstance(function, types.MethodType):
            function = function.__func__
        self._function(function)
        if isinstance(function, types.FunctionType):
            if not is_traced(function.__code__.co_filename) and gives_again(function, arguments):
                self._given(function, arguments, frame)
            return
        if isinstance(function, type):
            self._dunders(function)
            if _is_made_by_c(function) and id(function) not in _BLIND:
                for argument in arguments:
                    self._deep(argument, frame)
            return
        if isinstance(function, functools._lru_cache_wrapper):
            self._cached(function)
        elif (
            is_c(function) or not hasattr(type(function), "__dict__") or type(function).__module__ in _FOREIGN
        ):
            self._c_call(function, arguments, frame)
        else:
            self._dunders(type(function))

    def _cached(self, function: functools._lru_cache_wrapper[object]) -> None:
        """Note what a function of the user's reads that is not called again, and that it keeps what it gave."""
        code = getattr(function.__wrapped__, "__code__", None)
        if code is not None and not of_a_library(code.co_filename):
            self.note(f"the cache of {function.__name__}", "given", _answers, (function,), _answers(function))
            for one in Reach([(function.__name__, function.__wrapped__)]).seen:
                if not isinstance(one.holder, Anchor) and not isinstance(one.held, Anchor):
                    self.found.setdefault(key_of(one), one)

    def _c_call(self, function: object, arguments: tuple[object, ...], frame: types.FrameType) -> None:
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            arguments = (owner, *arguments)
        for argument in arguments:
            self._dunders(type(argument))
        name = getattr(function, "__name__", "")
        judged = not is_trusted(frame.f_code.co_filename)
        if function is getattr or function is hasattr:
            if len(arguments) > 1:
                self.attribute(arguments[0], str(arguments[1]), frame)
            return
        if id(function) in _BLIND:
            if function is len and isinstance(arguments[0], _CONTAINERS):
                self._length(arguments[0])
            self._asked(function, arguments, frame)
            return
        if gives_again(function, arguments) and (judged or len(arguments) < 2):
            self._given(function, arguments, frame)
            return
        first = arguments[0] if arguments else None
        if name == "item" and id(first) in self.numbers.steps:
            self._then[id(frame)] = functools.partial(self.numbers.item, first)
        if isinstance(first, dict) and name in ("get", "__getitem__", "__contains__", "pop", "setdefault"):
            self._part(first, arguments[1] if len(arguments) > 1 else None, frame)
        else:
            objects = isinstance(function, _GETTERS) or type(function).__module__ in _PICKLING
            objects = objects or str(getattr(function, "__module__", "")) in _PICKLING
            for argument in arguments:
                deep = judged and (objects or isinstance(argument, _GETTERS))
                self._deep(argument, frame, deep, pins=not of_torch(function))
        if function is warnings.warn or function is warnings.warn_explicit:
            self._whole(warnings.filters, frame)
        elif (judged and not of_arguments(function)) or starts_thread(function):
            what = f"it {'draws random numbers in this process, by' if draws(function) else 'calls'} {name_of(function)}()"
            text = self._reason(
                f"{what}, which is not known to give what its arguments decide. Call it outside, and pass what it "
                "gives as an argument",
                frame,
                None,
            )
            self._then[id(frame)] = lambda result: self._reasons.pop(text, None) if result is None else None

    def _asked(self, function: object, arguments: Sequence[object], frame: types.FrameType) -> None:
        """Note what an abstract class says of an object, as another class may be registered with it."""
        if (
            function is isinstance
            and type(arguments[-1]) is not type
            and not isinstance(arguments[-1], tuple)
        ):
            self._given(function, tuple(arguments), frame)

    def _given(self, function: object, arguments: tuple[object, ...], frame: types.FrameType) -> None:
        """Note what a function gives that may be called again at each call."""
        if any(isinstance(one, torch.Tensor) for one in arguments):
            return
        if arguments and getattr(function, "__self__", None) is arguments[0]:
            arguments = arguments[1:]
        path = f"{name_of(function)}()"
        self._then[id(frame)] = lambda result: self.note(path, "given", function, arguments, result)

    # -- the end ---------------------------------------------------------------------------------------------

    def settle(self) -> list[str]:
        """Let go of what only the call itself has held. Return the reasons that are left."""
        self._then.clear()
        self.numbers.settle()
        lone = object()
        # The variable, and the argument of the function that counts.
        spare = sys.getrefcount(lone)
        while True:
            own = Counter(map(id, self._reasons.values()))
            for one in self.found.values():
                own.update((id(one.holder), id(one.held), *map(id, _copied(one))))
            dead: list[object] = []
            gone: list[str] = []
            thing: object = None
            for key, one in self.found.items():
                thing = one.holder
                alone = sys.getrefcount(thing) - spare <= own[id(thing)]
                if one.form == "given":
                    for thing in one.key:  # type: ignore[attr-defined]
                        count = sys.getrefcount(thing) - spare
                        alone = alone or (type(thing) not in _SIMPLE and count <= own[id(thing)])
                if alone:
                    dead.append(key)
            # The iterator of a dictionary's items would hold one more reference.
            for text in list(self._reasons):
                thing = self._reasons[text]
                if sys.getrefcount(thing) - spare <= own[id(thing)]:
                    gone.append(text)
            thing = one = None  # type: ignore[assignment]
            for key in dict.fromkeys(dead):
                del self.found[key]  # type: ignore[arg-type]
            for text in gone:
                del self._reasons[text]
            if not dead and not gone:
                break
        self.numbers.keep(self.found)
        return list(self._reasons)

    def renew(self) -> dict[Key, object]:
        """Let each read say what is there now. Return what was read where that was something else.

        Something that the call itself has put there is no state that it depends on. The next call finds what
        is there now. Values that are not plain count as None.
        """
        changed: dict[Key, object] = {}
        for key, one in list(self.found.items()):
            try:
                now = one.now()
            except (LookupError, AttributeError, ValueError):
                now = MISSING
            if (isinstance(now, torch.Tensor) and one.held is TENSOR) or one.is_as(one.held, now):
                continue
            changed[key] = one.held if type(one.held) in _SIMPLE else None
            one.held = TENSOR if isinstance(now, torch.Tensor) and type(now) is not torch.Tensor else now
            if now is MISSING and one.form != "item" and one.form != "class":
                del self.found[key]
        return changed


def _copied(one: Seen) -> Sequence[object]:
    """Return what a note holds in a list or tuple of its own."""
    if one.form == "given":
        return one.key  # type: ignore[return-value]
    return one.held if one.form in ("elements", "keys") else ()  # type: ignore[return-value]


# The type's flag says that Python code has made it, so that Python code may change it.
_HEAP = 1 << 9
_FOREIGN = (
    "operator",
    "numpy",
    "weakref",
    "torch",
    "functools",
    "re",
    "_sre",
    "datetime",
    "decimal",
    "fractions",
)
_FOREIGN += ("struct", "_struct", "typing", "types", "contextvars", "_contextvars", "_json", "itertools")


def _decimals() -> str:
    """Return what the arithmetic of decimals depends on besides its operands."""
    return repr(decimal.getcontext())


def _answers(function: functools._lru_cache_wrapper[object]) -> str:
    """Return what changes when a function has been asked for something new, or has forgotten all."""
    about = function.cache_info()
    return f"{about.misses} {about.currsize}"


def _is_python_method(owner: object, name: str) -> bool:
    """Whether Python code runs when Python itself calls this method of an object."""
    return isinstance(
        looked_up(type(owner), name), (types.FunctionType, functools.partialmethod, classmethod)
    )


def _is_made_by_c(kind: type) -> bool:
    """Whether C code sees the arguments that objects of a class are made of."""
    makers = [(looked_up(kind, name), vars(object)[name]) for name in ("__new__", "__init__")]
    return any(
        one is not plain and not isinstance(one, (types.FunctionType, staticmethod)) for one, plain in makers
    )


def _is_python(owner: object) -> bool:
    """Whether what an object holds is in attributes."""
    slots = any("__slots__" in vars(base) for base in type(owner).__mro__)
    return slots or isinstance(getattr(owner, "__dict__", None), dict)


def _large(owner: object) -> bool:
    return isinstance(owner, (torch.Tensor, np.ndarray)) and owner.nbytes > _MOST_BYTES
