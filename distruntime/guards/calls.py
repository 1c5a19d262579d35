"""What a call reads: all that its arguments hold, where C code is called, and what it gives."""

from __future__ import annotations

import collections
import contextvars
import functools
import operator
import string
import types
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch

from .arithmetic import Term
from .attributes import Attributes, Hook
from .contents import CONTAINERS, FIXED, VIEWS, Contents, Met, is_python_method
from .functions import (
    adds,
    draws,
    gives_again,
    is_c,
    is_foreign,
    is_traced,
    is_trusted,
    leaves_values,
    name_of,
    of_arguments,
    of_torch,
    starts_thread,
)
from .generators import GENERATORS
from .notes import DRAW_OUTSIDE, DRAWS, Notes
from .reachable import is_remote
from .seen import HEAP, MISSING, SIMPLE, elements_of, keys_of, looked_up
from .takers import hands_on

# These take an object, and read nothing in it.
_BLIND = frozenset(
    map(id, (isinstance, issubclass, id, callable, setattr, delattr, hash, print, type, super, object, len))
)
_GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
_PICKLING = ("_pickle", "_json", "copyreg", "json", "pickle")
# These methods of objects give what stands in their slots. Who reads their dictionaries is seen.
_REDUCING = ("__reduce_ex__", "__reduce__", "__getstate__")
_FORMATS = ("format", "format_map")
# C code of these classes calls functions that it gets.
_CALLING = (map, filter, collections.defaultdict)


class Calls:
    """Notes what calls read, and what is done with what they give."""

    def __init__(self, notes: Notes, contents: Contents, attributes: Attributes) -> None:
        self._notes, self._contents, self._attributes = notes, contents, attributes
        # What is done with the result of the instruction that a frame is at, by the frame's id. A call that
        # has raised gives `MISSING`.
        self.then: dict[int, Callable[[object], object]] = {}
        # The ids of frames whose last call was one of a C function, which may look at what Python gives it.
        self.in_c: set[int] = set()

    def follow(self, frame: types.FrameType, term: Term) -> None:
        """Note what a frame's instruction gives, if it follows from floats by this term."""
        self.then[id(frame)] = functools.partial(self._notes.numbers.gave, term)

    def call(self, function: object, arguments: tuple[object, ...], frame: types.FrameType) -> None:
        """Note what a call of a function reads, before it is called."""
        self.in_c.discard(id(frame))
        term = self._notes.numbers.called(function, arguments)
        if term is not None:
            self.follow(frame, term)
            return
        if isinstance(function, types.FunctionType):
            # A program calls what was compiled as it was written.
            function = vars(function).get("_torchdynamo_orig_callable", function)
        while isinstance(function, functools.partial):
            partial: functools.partial[object] = function
            for name in ("func", "args", "keywords"):
                self._notes.note(f"partial.{name}", "attribute", partial, name, getattr(partial, name))
            self._contents.deep(partial.keywords, frame)
            function, arguments = partial.func, (*partial.args, *arguments)
        if isinstance(function, types.MethodType):
            if not isinstance(function.__func__, types.FunctionType):
                arguments = (function.__self__, *arguments)
            function = function.__func__
        self._notes.function(function)
        if isinstance(function, types.FunctionType):
            if not is_traced(function.__code__.co_filename):
                self._untraced(function, arguments, frame)
            return
        if isinstance(function, type):
            self._contents.dunders(function, frame)
            self._asked(function, arguments, frame)
            made = looked_up(function, "__init__")
            if isinstance(made, types.FunctionType) and not is_traced(made.__code__.co_filename):
                self._contents.gather(arguments, None, Met())
            if _is_made_by_c(function) and id(function) not in _BLIND:
                self._made(function, arguments, frame)
            return
        if isinstance(function, functools._lru_cache_wrapper):
            self._contents.cached(function)
            # It looks for an answer by them.
            self._contents.deep(arguments, None)
        elif is_c(function) or not is_python_method(function, "__call__"):
            self._c_call(function, arguments, frame)
        else:
            self._contents.dunders(type(function), frame)
            by = looked_up(type(function), "__call__")
            if isinstance(by, types.FunctionType) and not is_traced(by.__code__.co_filename):
                self._untraced(by, arguments, frame)

    def _made(self, kind: type, arguments: tuple[object, ...], frame: types.FrameType) -> None:
        """Note what C code reads that makes an object of a class."""
        self._enters_c(kind, frame)
        if draws(kind) and all(one is None for one in arguments):
            self._draws(kind, arguments, frame)
        if not is_trusted(frame.f_code.co_filename):
            if kind in _CALLING or kind.__module__ == "itertools":
                self._handed(arguments, frame)
            self._got(kind, arguments, frame)
        met = Met()
        self._contents.gather(arguments, frame, met)
        counts = hands_on(kind) or kind is dict
        if kind is float and met.steps:
            self.then[id(frame)] = functools.partial(self._notes.numbers.item, met.steps[0])
            counts = True
        self._contents.resolve(met, frame, counts=counts)

    def _untraced(
        self, function: types.FunctionType, arguments: tuple[object, ...], frame: types.FrameType
    ) -> None:
        """Note all that a function gets that nobody looks at, as this package's own and `torch.ops`."""
        met = Met()
        self._contents.gather(arguments, None, met)
        self._contents.resolve(met, frame, follows=True)
        if gives_again(function, arguments):
            self._given(function, arguments, frame)
        else:
            self._takes(met, frame)

    def hooked(self, hooks: Iterable[Hook], frame: types.FrameType) -> None:
        """Note what functions read that Python calls for an attribute. Frames tell that of those in Python.

        No instruction behind it shows what such a function gave, as one does behind a call.
        """
        for function, arguments in hooks:
            if isinstance(getattr(function, "__func__", function), types.FunctionType):
                continue
            known = len(self._notes.reasons)
            self.call(function, arguments, frame)
            if self.then.pop(id(frame), None) is not None and len(self._notes.reasons) == known:
                self._notes.unseen(f"{name_of(function)}() gives an attribute", frame, None)

    def _c_call(self, function: object, arguments: tuple[object, ...], frame: types.FrameType) -> None:
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            arguments = (owner, *arguments)
        for argument in arguments:
            self._contents.dunders(type(argument), frame)
        name = getattr(function, "__name__", "")
        judged = not is_trusted(frame.f_code.co_filename)
        if function is getattr or function is hasattr:
            if len(arguments) > 1:
                self.hooked(self._attributes.read(arguments[0], str(arguments[1]), frame), frame)
            return
        if name == "__getattribute__" and len(arguments) == 2:
            # A class with its own hands on to this one.
            self.hooked(self._attributes.of_object(arguments[0], str(arguments[1]), frame), frame)
            return
        if id(function) in _BLIND:
            if function is len and not isinstance(arguments[0], (torch.Tensor, *FIXED)):
                if not is_python_method(arguments[0], "__len__"):
                    self._contents.length(arguments[0])
            if function is setattr and len(arguments) == 3:
                self._attributes.put(arguments[0], str(arguments[1]), arguments[2])
            self._asked(function, arguments, frame)
            return
        if gives_again(function, arguments) and (judged or len(arguments) < 2):
            self._given(function, arguments, frame)
            return
        self._enters_c(function, frame)
        if judged and not leaves_values(function):
            self._handed(arguments, frame)
        first = arguments[0] if arguments else None
        if isinstance(first, contextvars.ContextVar) and name == "get":
            # It may raise now, or give what it was offered.
            given = first, MISSING
            self._notes.note(first.name, "given", contextvars.ContextVar.get, given, first.get(MISSING))
            return
        if name == "item" and id(first) in self._notes.numbers.steps:
            self.then[id(frame)] = functools.partial(self._notes.numbers.item, first)
        if isinstance(first, dict) and name in ("get", "__getitem__", "__contains__", "pop", "setdefault"):
            self._contents.part(first, arguments[1] if len(arguments) > 1 else None, frame)
        else:
            objects = isinstance(function, _GETTERS) or type(function).__module__ in _PICKLING
            objects = objects or str(getattr(function, "__module__", "")) in _PICKLING
            if judged:
                self._got(function, arguments, frame)
            if name in _REDUCING:
                self._contents.slots(first)
            met = Met()
            for argument in arguments:
                deep = judged and (objects or isinstance(argument, _GETTERS))
                self._contents.gather(argument, frame, met, deep)
            if adds(function):
                # What is added, and how much there is then, is followed.
                met.steps.clear()
                self._contents.gather(arguments[1:], frame, met)
            counts = hands_on(function) or leaves_values(function)
            self._contents.resolve(met, frame, of_torch(function), counts)
            if of_torch(function):
                self._takes(met, frame)
        if function is warnings.warn or function is warnings.warn_explicit:
            self._contents.whole(warnings.filters, frame)
        elif draws(function) or (judged and any(type(one) is torch._C.Generator for one in arguments)):
            self._draws(function, arguments, frame)
        elif (judged and not of_arguments(function)) or starts_thread(function):
            self._unknown(function, frame)

    def _enters_c(self, function: object, frame: types.FrameType) -> None:
        if not hands_on(function):
            self.in_c.add(id(frame))

    def _takes(self, met: Met, frame: types.FrameType) -> None:
        """Note that torch takes floats. With a remote tensor, those that matter are words of a log."""
        followed = [value for value in met.floats if self._notes.numbers.term(value) is not None]
        if followed:
            self.then[id(frame)] = functools.partial(self._took, followed, met.remote and not met.local)

    def _took(self, floats: Sequence[float], in_place: bool, result: object) -> None:
        """Pin floats that may have gone into a tensor of this process, or have decided something there."""
        if not _has_remote(result) and not (result is None and in_place):
            for value in floats:
                self._notes.numbers.pin(value)

    def _handed(self, arguments: tuple[object, ...], frame: types.FrameType) -> None:
        """Note functions that C code may call: `map(os.stat, paths)`."""
        for one in arguments:
            if (is_c(one) or is_foreign(one)) and not of_arguments(one) and not draws(one):
                what = f"C code may call {name_of(one)}()"
                self._notes.unseen(f"{what}, which does not depend on its arguments alone", frame, None)

    def entered(self, owner: object, frame: types.FrameType) -> None:
        """Note what an object is that a `with` enters. This package's Python reads that of an autocast."""
        self._contents.dunders(type(owner), frame)
        if isinstance(owner, torch.autocast):
            self._contents.whole(vars(owner), frame)

    def _got(self, function: object, arguments: tuple[object, ...], frame: types.FrameType) -> None:
        """Note the attributes that C code reads by their names."""
        if isinstance(function, operator.attrgetter):
            self._by_name(function, arguments, frame)
        hidden = any(one is getattr or one is hasattr for one in arguments)
        for getter in (one for one in arguments if isinstance(one, operator.attrgetter)):
            for items in (one for one in arguments if one is not getter and type(one) not in SIMPLE):
                if isinstance(items, dict):
                    self._by_name(getter, [*keys_of(items)], frame)
                elif isinstance(items, CONTAINERS):
                    self._by_name(getter, [*elements_of(items)], frame)
                elif isinstance(items, VIEWS) or type(items) in (tuple, frozenset):
                    self._by_name(getter, [*items], frame)  # type: ignore[misc]
                else:
                    hidden = True
        texts = str in (getattr(function, "__objclass__", None), type(getattr(function, "__self__", None)))
        if texts and getattr(function, "__name__", "") in _FORMATS:
            hidden = hidden or _names_attributes(str(arguments[0]))
        if hidden:
            self._notes.unseen(f"{name_of(function)}() reads attributes by their names", frame, None)

    def _by_name(
        self, getter: operator.attrgetter[object], owners: Iterable[object], frame: types.FrameType
    ) -> None:
        for owner in owners:
            for name in getter.__reduce__()[1]:
                now = owner
                *outer, last = str(name).split(".")
                for part in outer:
                    self.hooked(self._attributes.read(now, part, frame), frame)
                    if isinstance(looked_up(type(now), part), property):
                        # To ask it would run code of the user's once more.
                        self._notes.unseen(f"{name_of(getter)}() asks a property", frame, None)
                        return
                    now = getattr(now, part, None)
                self.hooked(self._attributes.read(now, last, frame), frame)

    def _unknown(self, function: object, frame: types.FrameType) -> None:
        """Note that a function gives what nobody knows, unless it gives nothing."""
        text = self._notes.reason(
            f"it calls {name_of(function)}(), which is not known to give what its arguments decide. Call it "
            "outside, and pass what it gives as an argument",
            frame,
            None,
        )
        # A foreign function may write into what it gets.
        if not is_foreign(function):
            self.then[id(frame)] = lambda gave: self._notes.reasons.pop(text, None) if gave is None else None

    def _draws(self, function: object, arguments: tuple[object, ...], frame: types.FrameType) -> None:
        """Note that something is asked of a generator of random numbers. The call's own has got a seed."""
        owner = next((one for one in arguments if isinstance(one, GENERATORS)), None)
        # Without a seed, the system gives one.
        fresh = getattr(function, "__name__", "") == "seed" or isinstance(function, type)
        if fresh and all(one is None or one is owner for one in arguments):
            owner = None
        self._notes.reason(f"{DRAWS} {name_of(function)}(). {DRAW_OUTSIDE}", frame, owner)

    def _asked(self, function: object, arguments: Sequence[object], frame: types.FrameType) -> None:
        """Note what an object's class is, and what an abstract one says of it: another may be registered."""
        if function is not isinstance and (function is not type or len(arguments) != 1):
            return
        self.class_of(arguments[0])
        if function is isinstance and type(arguments[-1]) not in (type, tuple):
            self._given(function, tuple(arguments), frame)

    def class_of(self, owner: object) -> None:
        """Note what the class of an object is: it may get another one."""
        kind = type(owner)
        if kind.__flags__ & HEAP and not isinstance(owner, (torch.Tensor, type)):
            self._notes.note(f"{kind.__name__}.__class__", "attribute", owner, "__class__", kind)

    def _given(self, function: object, arguments: tuple[object, ...], frame: types.FrameType) -> None:
        """Note what a function gives that may be called again at each call."""
        if any(isinstance(one, torch.Tensor) for one in arguments):
            return
        # A bound method is made for each call.
        if arguments and getattr(function, "__self__", None) is arguments[0]:
            function = getattr(type(arguments[0]), str(getattr(function, "__name__", "")), function)
        path = f"{name_of(function)}()"
        self.then[id(frame)] = lambda result: self._notes.note(path, "given", function, arguments, result)


def _names_attributes(text: str) -> bool:
    """Whether a text for `str.format` reads attributes: "{0.lr}", and "{0:{1.width}}"."""
    return any(
        "." in field or (spec and "{" in spec and _names_attributes(spec))
        for _, field, spec, _ in string.Formatter().parse(text)
        if field is not None
    )


def _has_remote(result: object) -> bool:
    return is_remote(result) or (isinstance(result, (tuple, list)) and any(map(_has_remote, result)))


def _is_made_by_c(kind: type) -> bool:
    """Whether C code sees the arguments that objects of a class are made of."""
    makers = [(looked_up(kind, name), vars(object)[name]) for name in ("__new__", "__init__")]
    return any(
        one is not plain and not isinstance(one, (types.FunctionType, staticmethod)) for one, plain in makers
    )
