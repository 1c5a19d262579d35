"""What workers answer, checked where it is taken.

A worker that answers nonsense is dropped, and nobody who waits gets to see it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence, Sized

from ..errors import ProtocolError
from ..wire.codec import dtype_named, failure_from

# No memory holds so many elements, and torch's own arithmetic overflows beyond.
_MOST = 1 << 62
# Lists may stand so deep in lists. A thousand would end in a RecursionError, which is nobody's fault but the
# worker's.
_DEEPEST = 64

# It tells whether a value has the form that was asked for.
Form = Callable[[object], bool]


def _is(*kinds: type) -> Form:
    return lambda value: type(value) in kinds


def _list_of(item: Form) -> Form:
    return lambda value: isinstance(value, list) and all(map(item, value))


def _row(*columns: Form) -> Form:
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(columns)
        and all(is_(one) for is_, one in zip(columns, value))
    )


_integer, _text, _real, _integers = _is(int), _is(str), _is(int, float), _list_of(_is(int))


def _dtype(name: object) -> bool:
    try:
        return isinstance(name, str) and dtype_named(name) is not None
    except ProtocolError:
        return False


def count(sizes: object) -> int:
    """Return how many elements a tensor of these sizes has; -1 where they are none."""
    if not isinstance(sizes, list) or len(sizes) > 64:
        return -1
    found = 1
    for n in sizes:
        if type(n) is not int or n < 0:
            return -1
        found *= n
    return found if found < _MOST else -1


def is_spec(fields: object) -> bool:
    """Whether this is a tensor's metadata, as `spec_from_wire` takes it."""
    if not isinstance(fields, list) or not _row(_integers, _integers, _integer, _dtype, _integer)(fields):
        return False
    sizes, strides, offset, _, bits = fields
    if (
        count(sizes) < 0
        or len(strides) != len(sizes)
        or any(s < 0 for s in strides)
        or offset < 0
        or not 0 <= bits < 4
    ):
        return False
    return bool(offset + sum((n - 1) * s for n, s in zip(sizes, strides)) < _MOST >> 4)


def is_plain(value: object, depth: int = 0) -> bool:
    """Whether this is a result that is no tensor."""
    if isinstance(value, list):
        complex_ = len(value) == 3 and value[0] == "complex" and _real(value[1]) and _real(value[2])
        return complex_ or (
            value[:1] == ["list"]
            and depth < _DEEPEST
            and all(is_plain(item, depth + 1) for item in value[1:])
        )
    return value is None or type(value) in (bool, int, float, str)


def _failure(fields: object) -> bool:
    try:
        return failure_from(fields) is not None
    except ProtocolError:
        return False


def is_tensor(value: object, payload: Sized | None, room: Sized | None) -> bool:
    """Whether this is a tensor with its bytes.

    They are here, in the payload frame, or in `room`, which the master has made for them.
    """
    if (
        not isinstance(value, list)
        or len(value) != 3
        or not _dtype(value[0])
        or (elements := count(value[1])) < 0
    ):
        return False
    nbytes, data = elements * dtype_named(value[0]).itemsize, value[2]
    if data in ("shared", "parts"):
        return room is not None and nbytes <= len(room)
    if data is None:
        return payload is not None and len(payload) == nbytes
    return isinstance(data, bytes) and len(data) == nbytes


def is_devices(rows: object) -> bool:
    """Whether this is what a worker has, as in `Welcome.devices`."""
    row = _row(_text, _text, _integer, _integer, _text, _integer, _integer)
    return (
        isinstance(rows, list)
        and bool(rows)
        and all(map(row, rows))
        and len({row[0] for row in rows}) == len(rows)
    )


def _number(value: object) -> bool:
    """Whether this can be a publication's version, and so can the one after it."""
    return type(value) is int and 0 < value < 1 << 53


# See publishing/publish.py.
_listed = _list_of(_row(_text, _integer, _text, _integer, _list_of(_text)))
_publication = _row(_text, _text, _text, _number, _is(bool), _text, _listed, _integer)
_version = _row(
    _number, _is(bytes), _list_of(_row(_integer, _integer, lambda spec: spec is None or is_spec(spec)))
)
_index = _row(_text, _text, _integer, _integer, _text, _list_of(_row(_text, _integer)))


def _sizes(value: object) -> bool:
    return isinstance(value, dict) and all(map(_text, value)) and all(map(_integer, value.values()))


_poisoned = _list_of(lambda ref: type(ref) is int or _row(_integer, _integer)(ref))
# The forms of all that is asked for but tensors.
FORMS: dict[str, Form] = {
    "item": lambda value: (
        type(value) in (bool, int, float)
        or (isinstance(value, list) and is_plain(value) and value[0] == "complex")
    ),
    "text": _text,
    "passed": lambda value: value is None or _list_of(_failure)(value),
    "done": lambda value: value is None,
    "specs": _list_of(lambda fields: is_spec(fields) or is_plain(fields)),
    "ask info": is_devices,
    "ask memory": _row(_integer, _integer, _poisoned),
    "ask status": _row(_integer, lambda name: name is None or type(name) is str, _real),
    "ask passed": _is(bool),
    # See Capabilities.from_wire.
    "ask channel": _row(_text, lambda fields: True, _row(_integer, _integer)),
    "ask listen": _text,
    "ask turns": _list_of(_row(_text, _integer, _real)),
    "ask published names": _row(_text, _list_of(_publication)),
    "ask published versions": _row(_text, _list_of(_number)),
    "ask published find": _row(_text, _list_of(_version)),
    "ask published settle": _row(_text, _is(bool)),
    "ask published drop": _row(_text, _is(bool)),
    "published": _list_of(_row(_integer, _integer)),
    "ask checkpoint look": _row(_list_of(_index), _sizes),
    "ask checkpoint index": _text,
    "ask checkpoint commit": lambda value: value is None,
    "ask checkpoint sweep": lambda value: value is None,
    "ask checkpoint remove": lambda value: value is None,
}


def asked(what: str, detail: Sequence[object]) -> str:
    """Return the form of what is asked for: by what it is about, and by the verb where there are several."""
    verb = f"ask {what} {next(iter(detail), '')}"
    return verb if verb in FORMS else f"ask {what}"


def require(form: str, value: object, payload: Sized | None, room: Sized | None) -> None:
    """Raise `ProtocolError` unless `value` answers what was asked for."""
    if not (is_tensor(value, payload, room) if form == "tensor" else FORMS[form](value)):
        raise ProtocolError(f"asked for {form!r}, it answered {reprlib.repr(value):.80}")
