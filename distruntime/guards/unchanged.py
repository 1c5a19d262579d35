"""Tests whether something is as it was: plain values are compared, and everything else has to be the same.

What two calls have read besides floats is compared without holding any of it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_

import numpy
import torch

from .seen import LISTED, MISSING, SIMPLE, TENSOR, Key, Seen, key_of, same

# So many bytes of a thing are compared.
MOST_BYTES = 1 << 16

Test = Callable[[], bool]
_Bytes = numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.uint8]]


@functools.lru_cache(maxsize=4096)
def _comparing(names: tuple[str, ...]) -> Callable[[Callable[..., object], object, list[object]], bool]:
    """Return what compares the values of names: without a loop, as it runs before each call."""
    terms = [f"read({name!r}, gone) is held[{k}]" for k, name in enumerate(names)]
    # The text holds numbers and quoted names.
    made: Callable[[Callable[..., object], object, list[object]], bool] = eval(
        f"lambda read, gone, held: {' and '.join(terms) or True}", {}
    )
    return made


def test_of(read: Callable[[], Sequence[object]]) -> Test:
    """Return the test of what is read. It may raise where that cannot be read any more, as all tests here."""
    held = [*read()]
    return lambda: alike(read(), held)


def test_of_items(thing: Collection[object]) -> Test:
    """Return the test of a list, or of something like it."""
    held = [*thing]
    return lambda: len(thing) == len(held) and (all(map(is_, thing, held)) or alike([*thing], held))


def test_of_dict(thing: Mapping[str, object]) -> Test:
    """Return the test of a dictionary: its keys, its values, and their order."""
    keys: list[object] = [*thing]
    held = [*thing.values()]
    if all(type(key) is str for key in keys):
        return lambda: (
            [*thing] == keys and (all(map(is_, thing.values(), held)) or alike([*thing.values()], held))
        )
    return lambda: alike([*thing], keys) and alike([*thing.values()], held)


def test_of_object(thing: object) -> Test:
    """Return the test of an object that has a dictionary."""
    held = thing.__dict__
    inside = test_of_dict(held)
    return lambda: thing.__dict__ is held and inside()


def test_of_names(space: Mapping[str, object], names: Sequence[str]) -> Test:
    """Return the test of names in a space. One that is missing may be there later."""
    held, gone = [space.get(name, MISSING) for name in names], [MISSING] * len(names)
    same_names, read = _comparing(tuple(names)), space.get
    return lambda: same_names(read, MISSING, held) or alike([*map(read, names, gone)], held)


def alike(now: Sequence[object], held: list[object]) -> bool:
    """Whether values are as they were. Take over what is equal, so that it is the same at the next look."""
    if len(now) != len(held):
        return False
    for k, (one, before) in enumerate(zip(now, held)):
        if one is not before:
            if not same(one, before):
                return False
            held[k] = one
    return True


def test_of_tensor(thing: torch.Tensor) -> Test:
    """Return the test of a local tensor: of its bytes, or of its version if it has more than is compared."""
    plain = type(thing).__module__.split(".")[0] == "torch"
    if not plain or thing.layout is not torch.strided or thing.device.type != "cpu":
        return test_of(lambda: (thing._version, thing.requires_grad))
    storage, begin = thing.untyped_storage(), thing.data_ptr()
    size = storage.nbytes()
    if size > MOST_BYTES:
        if thing.is_inference():
            return test_of(lambda: (thing.data_ptr(), thing.requires_grad))
        return test_of(lambda: (thing._version, thing.data_ptr(), thing.requires_grad))
    # An array of numpy may share the memory, and no version tells of what is written into that.
    memory: _Bytes = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()

    def read() -> Sequence[object]:
        # Another memory may stand there by now, and this one be gone.
        kept = thing.data_ptr() == begin and storage.nbytes() == size
        return memory.tobytes() if kept else b"", thing.requires_grad, thing.shape, *thing.stride()

    return test_of(read)


# Each read has its path, and what it has given: a plain value, or marks.
Marks = Mapping[Key, tuple[str, object]]
_FLOAT = object()


@dataclass(frozen=True, slots=True)
class _Object:
    """Stands for an object by its id, which is its own as long as it lives."""

    number: int
    # Lists and dictionaries have no weak references.
    alive: weakref.ref[object] | None


def marks(reads: Mapping[Key, Seen], steps: Container[int], renewed: Container[Key]) -> Marks:
    """Return the marks of what was read.

    An optimizer counts its steps in the tensors `steps`, and the call itself has renewed what was read at
    `renewed`. Neither says that anybody else has changed something.
    """
    found: dict[Key, tuple[str, object]] = {}
    for key, one in reads.items():
        if id(one.owner) not in steps and key not in renewed:
            value = one.value
            plain = one.form == "bytes" or value is TENSOR
            listed = tuple(value) if one.form in LISTED else value  # type: ignore[arg-type]
            found[_key(one)] = one.path, value if plain else _mark(listed)
    return found


def changed(before: Marks, after: Marks) -> str:
    """Return the path of something that one call has read and the other has not, or not so."""
    for key, (path, value) in after.items():
        if key not in before or not _alike(before[key][1], value):
            return path
    return next((path for key, (path, _) in before.items() if key not in after), "")


def _key(one: Seen) -> Key:
    """Return what tells a read from others. A function may be asked about another float by each call."""
    if one.form != "given":
        return key_of(one)
    asked: Iterable[object] = one.key  # type: ignore[assignment]
    about = (_FLOAT if type(x) is float else (type(x), x) if type(x) in SIMPLE else id(x) for x in asked)
    return id(one.owner), one.form, tuple(about)


def _mark(value: object) -> object:
    if type(value) is float:
        return _FLOAT
    if type(value) in SIMPLE:
        return value
    if isinstance(value, tuple):
        return tuple(map(_mark, value))
    if isinstance(value, torch.Tensor):
        # torch swaps no tensor that has a weak reference.
        return TENSOR if type(value) is not torch.Tensor else _Object(id(value), None)
    try:
        return _Object(id(value), weakref.ref(value))
    except TypeError:
        return _Object(id(value), None)


def _alike(before: object, after: object) -> bool:
    if isinstance(before, _Object):
        lives = before.alive is None or before.alive() is not None
        return isinstance(after, _Object) and before.number == after.number and lives
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(_alike, before, after))
    return same(before, after)
