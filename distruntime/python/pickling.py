"""The user's code and the arguments of calls, as they travel.

A function of the user's own travels with its body, whatever module it is in. What is installed as a package
travels by its name. A remote tensor or object in an argument is a number in the pickle, and an operand of the
instruction. What `dr.fetch` brings of an object comes back as a pickle, the only one of a worker's that this
process opens.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import linecache
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType

import cloudpickle
import msgpack
import numpy
import torch
from torch._library.custom_ops import CustomOpDef

from ..errors import NotSupportedError, UsageError, is_of_handler
from ..guards.captured import parts
from ..guards.own_code import PACKAGE, own_by_value
from ..log.handle import REMOTE_TYPES, Handle, Place
from ..log.line import of_a_library
from ..session.session import Session, active_session
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor
from ..wire.codec import OPERAND_CODE

# An argument may name so many operands before the call is pickled.
_MOST_PLAIN = 1 << 16
# An array of so many bytes is sent without a pickle around it.
_LARGE = 1 << 16
# So many characters of a file travel with a function of it, for tracebacks.
_MOST_SOURCE = 1 << 18


class Operand:
    """What a call hands over by its ref: `handle` is its value on the worker."""

    __slots__ = ()

    _handle: Handle


# What a call hands over by a ref of its own: a local tensor is sent first.
Given = torch.Tensor | Operand


class _Operands:
    """The operands of a call, in the order in which its arguments name them."""

    def __init__(self) -> None:
        self.given: list[Given] = []
        # The keys are identities of what is kept alive here.
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []

    def number(self, thing: object) -> int | None:
        """Return the number of an operand; None for what is no operand."""
        known = self._numbers.get(id(thing))
        if known is not None:
            return known
        operand = _operand(thing)
        if operand is None:
            return None
        self._kept.append(thing)
        self._numbers[id(thing)] = len(self.given)
        self.given.append(operand)
        return len(self.given) - 1


def _operand(thing: object) -> Given | None:
    if isinstance(thing, (DistributedTensor, UnevenTensor, Operand)):
        return thing
    if isinstance(thing, torch.Tensor):
        if isinstance(getattr(thing, "_local_tensor", None), (DistributedTensor, UnevenTensor)):
            raise NotSupportedError(
                "a function gets the members' shards: pass x.to_local() of a DTensor, not the DTensor"
            )
        if type(thing) is torch.Tensor and thing.device.type == "cpu" and thing.layout is torch.strided:
            if thing.requires_grad and torch.is_grad_enabled():
                raise UsageError(
                    "a local tensor that requires grad was passed to a worker, where its history ends: pass "
                    'x.to("remote"), which keeps it, or x.detach()'
                )
            return None if thing.is_quantized else thing.detach()
    if isinstance(thing, numpy.ndarray) and _is_large(thing):
        return torch.from_numpy(thing.reshape(-1).view(numpy.uint8))
    return None


# Numpy's own `generic` takes a parameter, which is `Any` where nobody gives it.
_Array = numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.generic]]  # type: ignore[explicit-any]


def _is_large(array: _Array) -> bool:
    """Whether an array's bytes are sent as a tensor's are, without a pickle around them."""
    plain = type(array) is numpy.ndarray and array.dtype.kind in "biufc"
    return plain and array.nbytes >= _LARGE and array.flags.c_contiguous and array.flags.writeable


class _ByName(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends by their names what cloudpickle would look into."""

    def reducer_override(self, thing: object) -> object:
        """Say how a thing is made there, by its name; leave all else to cloudpickle."""
        # `torch.classes` is such a module: its class is one of torch's own.
        if isinstance(thing, ModuleType) and type(thing) is not ModuleType:
            if sys.modules.get(thing.__name__) is thing:
                return importlib.import_module, (thing.__name__,)
        # The worker does not know the operator, whose kernel is a function like any other.
        elif isinstance(thing, CustomOpDef):
            return functools.partial, (thing._init_fn,)
        # One of this package's functions may stand in the place of torch's own here, and not there.
        elif isinstance(thing, FunctionType) and hasattr(thing, "__wrapped__"):
            place = str(thing.__globals__.get("__name__"))
            own, name = sys.modules.get(thing.__module__), thing.__qualname__
            if place.startswith(PACKAGE) and own is not None and not own.__name__.startswith(PACKAGE):
                return getattr, (own, name)
        return super().reducer_override(thing)


class _Pickler(_ByName):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.operands = _Operands()

    def persistent_id(self, thing: object) -> object:
        """Return what names an operand, or a device; None for what travels as it is."""
        kind = type(thing)
        if kind is torch.device or kind is Place:
            return _device(thing)
        if isinstance(thing, torch._C.Generator):
            raise NotSupportedError(
                "a generator of this process cannot drive draws on a worker: seed with "
                "torch.manual_seed(...), which reaches the workers, or make one inside the function"
            )
        number = self.operands.number(thing)
        if number is not None and isinstance(thing, numpy.ndarray):
            return "array", number, thing.dtype.str, thing.shape
        return number


class _Captured(Exception):
    """Code that is to travel holds something of a worker's."""

    def __init__(self, thing: object, where: object) -> None:
        super().__init__()
        self.thing, self.where = thing, where


class _CodePickler(_ByName):
    def persistent_id(self, thing: object) -> None:
        """Refuse what is on a worker: the code is sent to others, and outlives it."""
        if isinstance(thing, (DistributedTensor, Operand)):
            raise _Captured(thing, thing._handle.place.place)


def _device(thing: object) -> str | None:
    """Return what a worker calls a remote device; None for one of this process."""
    if isinstance(thing, Place):
        return f"device {thing.local_device}"
    if not isinstance(thing, torch.device) or thing.type not in REMOTE_TYPES:
        return None
    return f"device {active_session().places.meant(thing).place.local_device}"


def pack(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[bytes, list[Given]]:
    """Return a call's arguments as they travel, and its operands: msgpack for plain values, else a pickle."""
    operands = _Operands()

    def operand(thing: object) -> msgpack.ExtType:
        number = operands.number(thing)
        if number is None or number >= _MOST_PLAIN or isinstance(thing, numpy.ndarray):
            raise _NotPlain
        return msgpack.ExtType(OPERAND_CODE, number.to_bytes(2, "big"))

    seen = set[int]()

    def require_plain(values: Iterable[object]) -> None:
        """Raise `_NotPlain` for what msgpack would change: a list that comes twice, and a bytearray."""
        for value in values:
            if type(value) is bytearray:
                raise _NotPlain
            if isinstance(value, (list, dict)):
                if id(value) in seen:
                    raise _NotPlain
                seen.add(id(value))
                require_plain(value.values() if isinstance(value, dict) else value)

    try:
        require_plain((*args, *kwargs.values()))
        # A tuple would come as a list, and a list is the caller's own.
        packed = msgpack.packb([[*args], dict(kwargs)], default=operand, strict_types=True)
    except (_NotPlain, OverflowError, RecursionError, ValueError, TypeError):
        file = io.BytesIO()
        pickler = _Pickler(file)
        _dump(pickler, (tuple(args), dict(kwargs)), "an argument", (args, kwargs))
        return file.getvalue(), pickler.operands.given
    assert isinstance(packed, bytes)
    return packed, operands.given


class _NotPlain(Exception):
    """Msgpack has no form for an argument."""


def pack_code(thing: object, name: str) -> bytes:
    """Return a pickle of a function or a class, with the source of what travels with its body."""
    file = io.BytesIO()
    _dump(_CodePickler(file, protocol=5), (thing, _sources(thing)), name, thing)
    return file.getvalue()


def _sources(thing: object) -> dict[str, str]:
    """Return the text of the file that a function of the user's own is in."""
    code = getattr(inspect.unwrap(thing) if callable(thing) else thing, "__code__", None)
    if not isinstance(code, CodeType) or of_a_library(code.co_filename):
        return {}
    text = "".join(linecache.getlines(code.co_filename))
    return {code.co_filename: text} if 0 < len(text) <= _MOST_SOURCE else {}


def unpickled(data: memoryview, buffers: Sequence[memoryview], session: Session) -> object:
    """Return an object that a worker has pickled, because the user has asked for a copy of it."""
    if session.channel.unproven:
        raise NotSupportedError(
            "this session has no key, so an object may come from anyone, and opening it would run its code "
            "here. Make a key with `distruntime-worker keygen` and leave insecure=True out, or return tensors"
        )
    try:
        return pickle.loads(data, buffers=buffers)
    # Any class of the user's may raise anything while it is unpickled.
    except Exception as error:
        if is_of_handler(error):
            raise
        raise UsageError(
            f"an object of the worker cannot be made here: {type(error).__name__}: {error}. Use it "
            "there, through its attributes and methods, or install its package here"
        ) from None


def _dump(pickler: cloudpickle.Pickler, thing: object, what: str, of: object) -> None:
    try:
        with own_by_value():
            pickler.dump(thing)
    except _Captured as captured:
        name = next((label for label, value in parts(of) if value is captured.thing), "")
        held = f"`{name}`" if name else "a value"
        raise UsageError(f"{what} captures {held} on {captured.where}: pass it as an argument") from None
    except (NotSupportedError, UsageError):
        raise
    # Any class of the user's may raise anything while it is pickled.
    except Exception as error:
        if is_of_handler(error):
            raise
        held = _captured(of)
        where = f": {held} cannot be pickled" if held else ""
        raise UsageError(
            f"{what} cannot travel to a worker{where} ({type(error).__name__}: {error}). Make it inside the "
            "function, or on the worker: dr.remote(maker)(...) returns an object that stays there"
        ) from None


def _captured(thing: object, seen: dict[int, object] | None = None) -> str:
    """Return what is in the way of a pickle, as the user calls it; nothing where that is not found."""
    seen = {} if seen is None else seen
    # A class's methods can have the class, so the way may lead back.
    seen[id(thing)] = thing
    for label, value in parts(thing):
        if id(value) not in seen and not _travels(value):
            inner = _captured(value, seen)
            if inner:
                return inner
            if all(_travels(part) for _, part in parts(value)):
                return f"`{label}`, a {type(value).__name__},"
    return ""


def _travels(value: object) -> bool:
    if isinstance(value, (DistributedTensor, Operand, torch.device)):
        return True
    try:
        with own_by_value():
            cloudpickle.dumps(value, protocol=5)
    # Whatever it raises, it cannot be pickled.
    except Exception as error:
        if is_of_handler(error):
            raise
        return False
    return True
