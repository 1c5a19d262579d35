"""What travels with a function of the user's, and whether it is as it was when it travelled.

A function of the user's own travels with its body, whatever module it is in, and with what it names: its
defaults, its closure, the globals that it reads, and what is in these. What is installed as a package travels
by its name, so nothing of it is looked at.
"""

from __future__ import annotations

import array
import datetime
import decimal
import fractions
import functools
import logging
import pathlib
import random
import re
import types
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterator, KeysView, Sized, ValuesView
from copyreg import _slotnames  # type: ignore[attr-defined]
from pickle import dumps
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType

import numpy
import torch
from torch._library.custom_ops import CustomOpDef

from ..errors import is_of_handler
from .own_code import NOT_SENT, PACKAGE, has_body
from .reachable import chains_read, globals_read
from .seen import HEAP, MISSING, PLAIN
from .unchanged import (
    MOST_BYTES,
    Test,
    test_of,
    test_of_dict,
    test_of_items,
    test_of_names,
    test_of_object,
    test_of_tensor,
)

# So many things are looked at, and so many items of one of them.
_MOST, _MOST_ITEMS = 100_000, 10_000
# These travel by a name.
_NAMED = (logging.Logger, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
# These are never changed, or travel by a name.
_FIXED = (
    *_NAMED,
    *PLAIN,
    *(range, slice, types.EllipsisType, types.NotImplementedType, types.CodeType),
    *(types.WrapperDescriptorType, types.MethodDescriptorType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(numpy.generic, numpy.dtype, numpy.ufunc, re.Pattern, uuid.UUID, pathlib.PurePath),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction),
    *(types.GenericAlias, types.UnionType),
)


# -- what travels with something -----------------------------------------------------------------------------


def parts(thing: object) -> list[tuple[str, object]]:
    """Return what travels with something, each with what the user calls it."""
    match thing:
        case FunctionType():
            return _parts_of_function(thing)
        case MethodType():
            return [(f"{thing.__qualname__}.__self__", thing.__self__), (thing.__qualname__, thing.__func__)]
        case types.BuiltinFunctionType() | types.MethodWrapperType():
            return [(f"{thing.__name__}.__self__", thing.__self__)]
        case functools.partial():
            args = [(f"partial.args[{k}]", value) for k, value in enumerate(thing.args)]
            return [("partial.func", thing.func), *args, *thing.keywords.items()]
        case staticmethod() | classmethod():
            return [(thing.__qualname__, thing.__func__)]
        case property():
            return [(f"property.{name}", getattr(thing, name)) for name in ("fget", "fset", "fdel")]
        case type():
            # What Python makes of itself for a class does not travel, as its slots.
            own = [(n, v) for n, v in list(vars(thing).items()) if not hasattr(v, "__objclass__")]
            named = [(f"{thing.__name__}.{name}", value) for name, value in own if name != "_abc_impl"]
            return [*named, *[(base.__name__, base) for base in thing.__bases__], ("metaclass", type(thing))]
        case ModuleType():
            return []
        case dict() | MappingProxyType():
            keys = [("a key", key) for key in list(thing) if not isinstance(key, PLAIN)]
            found = [*keys, *[(str(key), value) for key, value in list(thing.items())]]
        case list() | tuple() | deque() | set() | frozenset():
            found = [(f"[{k}]", value) for k, value in enumerate([*thing])]
        case numpy.ndarray() if thing.dtype.hasobject:
            found = [(f"[{k}]", value) for k, value in enumerate(thing.ravel().tolist())]
        case _:
            found = []
    kind = type(thing)
    held = [(f"{kind.__name__}.{name}", value) for name, value in _attributes(thing).items()]
    return [*found, *held, (kind.__name__, kind)]


def _may_change(thing: object) -> bool:
    """Whether a number or a text may change: it is an array's record, or has attributes by its class."""
    of_users = type(thing).__flags__ & HEAP and not isinstance(thing, _NAMED)
    return isinstance(thing, numpy.void) or bool(of_users and hasattr(thing, "__dict__"))


def _attributes(thing: object) -> dict[str, object]:
    """Return what an object holds under names: in its dictionary, and in the slots of classes in Python."""
    found = dict(getattr(thing, "__dict__", {}))
    for cls in type(thing).__mro__:
        if cls.__flags__ & HEAP and "__slots__" in vars(cls):
            slots = [n for n, v in vars(cls).items() if isinstance(v, types.MemberDescriptorType)]
            found.update({name: getattr(thing, name) for name in slots if hasattr(thing, name)})
    return found


def _parts_of_function(thing: FunctionType) -> list[tuple[str, object]]:
    space = thing.__globals__
    used = [(n, space[n]) for n, _ in globals_read(thing.__code__) if n in space]
    return [*used, *_parts_without_globals(thing)]


def _parts_without_globals(thing: FunctionType) -> list[tuple[str, object]]:
    # A function that is defined later leaves an empty one.
    cells = [(n, v) for n, v in zip(thing.__code__.co_freevars, _contents(thing)) if v is not MISSING]
    defaults = thing.__defaults__ or ()
    taken = thing.__code__.co_varnames[: thing.__code__.co_argcount]
    given = zip(taken[len(taken) - len(defaults) :], defaults)
    own = [(f"{thing.__name__}.{name}", value) for name, value in thing.__dict__.items()]
    return [*cells, *given, *(thing.__kwdefaults__ or {}).items(), *own]


def _contents(thing: FunctionType) -> list[object]:
    try:
        return [cell.cell_contents for cell in thing.__closure__ or ()]
    # A name has no value yet.
    except ValueError:
        return [MISSING if cell == CellType() else cell.cell_contents for cell in thing.__closure__ or ()]


# -- whether it is as it was ---------------------------------------------------------------------------------


class Captured:
    """What travels with something of the user's, as it is now. It is made before that is pickled, so that
    nothing is missed which another thread changes meanwhile.

    `unseen` says what nobody can look at before each call. `name` is what the user calls the whole.
    """

    def __init__(self, thing: object, name: str) -> None:
        self.unseen: dict[str, str] = {}
        # By what the user calls it. A test keeps what it has seen: else something new might pass for it.
        self._labels: list[str] = []
        self.tests: list[Test] = []
        self._ids: dict[int, object] = {}
        todo = deque([(name, thing)])
        while todo and len(self._ids) < _MOST:
            label, one = todo.popleft()
            try:
                todo += self._look(label, one)
            # A class of the user's may raise anything when it is asked what it holds: that is told.
            except Exception as error:
                if is_of_handler(error):
                    raise
                self.unseen[label] = f"a {type(one).__name__}, which does not say what it holds"
        if todo:
            self.unseen["its size"] = f"more than {_MOST:,} things, too many to be compared at each call"
        self._ids.clear()

    def changed(self) -> str:
        """Return what the user calls the first thing that is not as it was; nothing if all is."""
        for label, test in zip(self._labels, self.tests):
            try:
                same = test()
            # What cannot be read any more is not as it was: another thread may change it just now.
            except Exception as error:
                if is_of_handler(error):
                    raise
                return label
            if not same:
                return label
        return ""

    def _look(self, label: str, thing: object) -> list[tuple[str, object]]:
        """Watch a thing; return what is in it."""
        if id(thing) in self._ids or (isinstance(thing, _FIXED) and not _may_change(thing)):
            return []
        self._ids[id(thing)] = thing
        if isinstance(thing, (FunctionType, type, ModuleType)):
            return self._look_at_code(label, thing) if has_body(thing) else []
        # Such an operator travels as its kernel.
        if isinstance(thing, CustomOpDef):
            return [(label, thing._init_fn)]
        kind = type(thing)
        if kind.__module__.split(".")[0] in NOT_SENT and not isinstance(thing, torch.nn.Module):
            # A function of `dr.remote` that another one names goes there as the plain one.
            own = getattr(thing, "__wrapped__", None)
            return [] if own is None else [(label, own)]
        if isinstance(thing, (list, dict, set, frozenset, tuple, deque)) and len(thing) > _MOST_ITEMS:
            if not isinstance(thing, (tuple, frozenset)) or not all(isinstance(one, _FIXED) for one in thing):
                self._watch(
                    label, self._too_large(label, thing, f"a {kind.__name__} of {len(thing):,} items")
                )
            return []
        self._watch(label, self._test(label, thing))
        return parts(thing)

    def _look_at_code(self, label: str, thing: FunctionType | type | ModuleType) -> list[tuple[str, object]]:
        if isinstance(thing, FunctionType):
            if not str(thing.__globals__.get("__name__")).startswith(PACKAGE):
                for test in _tests_of_function(thing):
                    self._watch(label, test)
                return [*self._used(thing), *_parts_without_globals(thing)]
            return []
        if isinstance(thing, type) and not thing.__flags__ & HEAP:
            return []
        if isinstance(thing, type):
            # Python notes this in a class when it pickles the first object of it.
            _slotnames(thing)
        space = vars(thing)
        self._watch(label, test_of_dict(space))
        found = parts(thing) if isinstance(thing, type) else [(f"{label}.{n}", v) for n, v in space.items()]
        # Python's own words in a class or in a module decide about nothing: `__doc__`, `__spec__`.
        return [(n, v) for n, v in found if ".__" not in n or isinstance(v, FunctionType)]

    def _used(self, thing: FunctionType) -> Iterator[tuple[str, object]]:
        """Watch what a function reads of the user's modules, which travel whole; return what it reads."""
        for first, *rest in chains_read(thing.__code__):
            label, found = first, thing.__globals__.get(first, MISSING)
            for name in rest:
                if not isinstance(found, ModuleType) or not has_body(found):
                    break
                label = f"{label}.{name}"
                self._watch(label, test_of_names(vars(found), [name]))
                found = vars(found).get(name, MISSING)
            if found is not MISSING:
                yield label, found

    def _watch(self, label: str, test: Test | None) -> None:
        if test is not None:
            self._labels.append(label)
            self.tests.append(test)

    def _test(self, label: str, thing: object) -> Test | None:
        """Return the test of a thing; None where it never changes, or where nobody can see whether."""
        match thing:
            case torch.Tensor():
                return test_of_tensor(thing)
            case numpy.ndarray():
                if thing.nbytes > MOST_BYTES:
                    return self._too_large(label, thing, f"an array of {thing.nbytes:,} bytes")
                # The elements of an array of objects are looked at by themselves.
                return test_of(lambda: (thing.tobytes(), thing.dtype, *thing.shape))
            case numpy.void():
                return test_of(lambda: (bytes(thing.data), thing.dtype))
            case bytearray() | array.array() | memoryview():
                with memoryview(thing) as seen:
                    size = seen.nbytes
                if size > MOST_BYTES:
                    return self._too_large(label, thing, f"a {type(thing).__name__} of {size:,} bytes")
                return test_of(lambda: (bytes(memoryview(thing)),))
            case random.Random():
                return test_of(lambda: (dumps(thing.getstate()),))
            case MethodType() | functools.partial() | property() | staticmethod() | classmethod():
                return None
            case types.BuiltinFunctionType() | types.MethodWrapperType():
                return None
        if type(thing) in (list, set, deque):
            return test_of_items(thing)  # type: ignore[arg-type]
        if type(thing) in (dict, OrderedDict, MappingProxyType):
            return test_of_dict(thing)  # type: ignore[arg-type]
        held, every = getattr(thing, "__dict__", None), _attributes(thing)
        items = isinstance(thing, (list, dict, set, deque, KeysView, ValuesView))
        if items or len(every) > len(held or ()):
            return test_of(lambda: [*_items(thing), *every, *_attributes(thing).values()])
        if held is None:
            return None if isinstance(thing, (tuple, frozenset)) else self._closed(label, thing)
        return test_of_object(thing)

    def _too_large(self, label: str, thing: Sized, what: str) -> Test:
        """Say that nobody looks at what is in a thing. How much it has is watched."""
        self.unseen[label] = f"{what}, too many to be compared at each call"
        return test_of(lambda: (len(thing),))

    def _closed(self, label: str, thing: object) -> Test | None:
        """Watch an object that holds what only C sees, by its pickle."""
        try:
            size = len(dumps(thing, 5))
        # Any class may raise anything while it is pickled. Then there is no pickle to compare.
        except Exception as error:
            if is_of_handler(error):
                raise
            size = MOST_BYTES + 1
        if size <= MOST_BYTES:
            return test_of(lambda: (dumps(thing, 5),))
        self.unseen[label] = f"a {type(thing).__name__}, which nobody can compare with what it was"
        return None


def _tests_of_function(thing: FunctionType) -> list[Test]:
    code, defaults, named, own = thing.__code__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__
    names, count = [name for name, _ in globals_read(code)], len(own)

    def test() -> bool:
        return (
            thing.__code__ is code
            and thing.__defaults__ is defaults
            and thing.__kwdefaults__ is named
            and len(own) == count
        )

    used = [test_of_names(thing.__globals__, names)] if names else []
    cells = [test_of(lambda: _contents(thing))] if thing.__closure__ else []
    return [test, *used, *cells, *[test_of_dict(space) for space in (named, own) if space]]


def _items(thing: object) -> list[object]:
    """Return the items of a container, whatever its class makes of them."""
    match thing:
        case dict():
            return [*dict.__iter__(thing), *dict.values(thing)]
        case list() | set() | deque() | KeysView() | ValuesView():
            return [*thing]
    return []
