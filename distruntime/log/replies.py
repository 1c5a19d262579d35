"""What workers answer, checked where it arrives.

A worker that answers nonsense is dropped, and nobody who waits sees it.
"""

from __future__ import annotations

import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import TypeGuard, get_args, get_origin

from ..errors import ProtocolError
from ..wire.codec import dtype_named, failure_from, unpack_constant
from ..wire.messages import (
    MESSAGES,
    ChannelOffer,
    DeviceRow,
    FoundVersion,
    Listed,
    Plain,
    Question,
    StoredTensor,
    Versions,
    WorkerReport,
)

# A tensor has at most so many elements: no memory holds more, and torch's own arithmetic overflows beyond.
_MOST = 1 << 62


def _integers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int for n in value)


def is_dtype(name: object) -> TypeGuard[str]:
    """Whether this is the name of a dtype."""
    try:
        return isinstance(name, str) and dtype_named(name) is not None
    except ProtocolError:
        return False


def count(sizes: object) -> int:
    """Return how many elements a tensor of these sizes has; -1 where they are no sizes."""
    if not isinstance(sizes, list) or len(sizes) > 64:
        return -1
    found = 1
    for n in sizes:
        if type(n) is not int or n < 0:
            return -1
        found *= n
    return found if found < _MOST else -1


def is_spec(fields: object) -> TypeGuard[list[object]]:
    """Whether this is a tensor's metadata, as `spec_from_wire` takes it."""
    if not isinstance(fields, list) or len(fields) != 5:
        return False
    sizes, strides, offset, dtype, bits = fields
    if not _integers(sizes) or not _integers(strides) or not is_dtype(dtype):
        return False
    if type(offset) is not int or type(bits) is not int or offset < 0 or not 0 <= bits < 4:
        return False
    if count(sizes) < 0 or len(strides) != len(sizes) or any(s < 0 for s in strides):
        return False
    return offset + sum((n - 1) * s for n, s in zip(sizes, strides)) < _MOST >> 4


def is_plain(value: Plain) -> bool:
    """Whether this is a result that is no tensor."""
    try:
        unpack_constant(value)
    except ProtocolError:
        return False
    return True


def _is_described(fields: object) -> bool:
    return is_spec(fields) or is_plain(typing.cast("Plain", fields))


def _is_complex(value: object) -> bool:
    parts = value[1:] if isinstance(value, list) and value[:1] == ["complex"] else []
    return len(parts) == 2 and all(type(part) in (int, float) for part in parts)


def _is_failure(fields: object) -> bool:
    try:
        return failure_from(fields) is not None
    except ProtocolError:
        return False


def is_tensor(value: object, payload: Sized | None, room: Sized | None) -> bool:
    """Whether this is a tensor with its bytes.

    Here, in the payload frame, or in `room`, which the master has made for them.
    """
    if not isinstance(value, list) or len(value) != 3 or not is_dtype(value[0]):
        return False
    elements = count(value[1])
    if elements < 0:
        return False
    nbytes, data = elements * dtype_named(value[0]).itemsize, value[2]
    if data in ("shared", "parts"):
        return room is not None and nbytes <= len(room)
    if data is None:
        return payload is not None and len(payload) == nbytes
    return isinstance(data, bytes) and len(data) == nbytes


# -- replies by the type that a question names -----------------------------------------------------


class _Unfit(Exception):
    """A part of a reply is not what was asked for."""


Reader = Callable[[object], object]


def _is_version(number: int) -> bool:
    """Whether this can be a publication's version, and so can the one after it."""
    return 0 < number < 1 << 53


def _fits(row: object) -> bool:
    """Whether what the classes of a row's fields do not say holds as well."""
    match row:
        case ChannelOffer(python=python):
            return len(python) == 2
        case FoundVersion(version=version) | Listed(version=version):
            return _is_version(version)
        case StoredTensor(spec=spec):
            return spec is None or is_spec(spec)
        case Versions(versions=versions):
            return all(map(_is_version, versions))
        case WorkerReport(devices=devices, busy=busy):
            return 0 < len(devices) == len(busy) == len({row.name for row in devices})
    return True


def _exactly(*kinds: type) -> Reader:
    def read(value: object) -> object:
        if type(value) in kinds:
            return value
        raise _Unfit

    return read


def _such(fits: Callable[[object], bool]) -> Reader:
    def read(value: object) -> object:
        if fits(value):
            return value
        raise _Unfit

    return read


def _list_of(item: Reader) -> Reader:
    def read(value: object) -> object:
        if isinstance(value, list):
            return [item(one) for one in value]
        raise _Unfit

    return read


def _dict_of(item: Reader) -> Reader:
    def read(value: object) -> object:
        if isinstance(value, dict) and all(type(key) is str for key in value):
            return {key: item(one) for key, one in value.items()}
        raise _Unfit

    return read


def _either(readers: list[Reader]) -> Reader:
    def read(value: object) -> object:
        for reader in readers:
            try:
                return reader(value)
            except _Unfit:
                continue
        raise _Unfit

    return read


def _row_of(make: Callable[[Iterable[object]], object], columns: list[Reader]) -> Reader:
    def read(value: object) -> object:
        if not isinstance(value, list) or len(value) != len(columns):
            raise _Unfit
        row = make(column(one) for column, one in zip(columns, value))
        if not _fits(row):
            raise _Unfit
        return row

    return read


def reader_of(annotation: object) -> Reader:
    """Return what makes a value of this type of what msgpack has brought; it raises for anything else."""
    if annotation is object:
        return _such(lambda _: True)
    if annotation is float:
        return _exactly(int, float)
    if annotation in (bool, int, str, bytes, type(None)):
        return _exactly(typing.cast(type, annotation))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is list:
        return _list_of(reader_of(arguments[0]))
    if origin is dict:
        return _dict_of(reader_of(arguments[1]))
    if origin in (types.UnionType, typing.Union):
        return _either([reader_of(argument) for argument in arguments])
    if isinstance(annotation, type) and issubclass(annotation, tuple):
        columns = [reader_of(kind) for kind in typing.get_type_hints(annotation).values()]
        return _row_of(annotation._make, columns)  # type: ignore[attr-defined]
    raise TypeError(f"no reply is of type {annotation}")


def _reply_type(question: type) -> object:
    (base,) = question.__orig_bases__  # type: ignore[attr-defined]
    (found,) = get_args(base)
    return type(None) if found is None else found


_devices = reader_of(list[DeviceRow])


def devices_from(rows: object) -> list[DeviceRow] | None:
    """Return what a worker says that it has, each device once; None where it says what cannot be."""
    try:
        found = typing.cast("list[DeviceRow]", _devices(rows))
    except _Unfit:
        return None
    return found if found and len({row.name for row in found}) == len(found) else None


# The key is the form that a request asks for: what a `Fetch` names, or the class of a `Question`.
FORMS: Mapping[str, Reader] = {
    # A question that is just being made has no form yet: what comes before it was sent answers nothing.
    "": _such(lambda _: False),
    "item": _such(lambda value: type(value) in (bool, int, float) or _is_complex(value)),
    "text": _exactly(str),
    "passed": _either([_exactly(type(None)), _list_of(_such(_is_failure))]),
    "done": _exactly(type(None)),
    "specs": _list_of(_such(_is_described)),
    "published": _list_of(_such(lambda row: _integers(row) and len(row) == 2)),
    **{cls.__name__: reader_of(_reply_type(cls)) for cls in MESSAGES if issubclass(cls, Question)},
}


def require(form: str, value: object, payload: Sized | None, room: Sized | None) -> object:
    """Return a reply, its rows as the named tuples of the question.

    Raise `ProtocolError` unless it answers that.
    """
    try:
        if form != "tensor":
            return FORMS[form](value)
        if is_tensor(value, payload, room):
            return value
    except _Unfit:
        pass
    raise ProtocolError(f"asked for {form!r}, it answered {reprlib.repr(value):.80}") from None
