"""Kinds of state: a list and a dictionary as functions read them, and values that are swapped."""

from __future__ import annotations

import bisect
import datetime
import decimal
import fractions
import heapq
import itertools
import json
import math
import operator
import pathlib
import re
import statistics
import string
import struct
import zlib
from collections.abc import Callable
from typing import Any

import torch

from state_kinds import Here, Holder, State, even, kind

# -- a list, read by a function ------------------------------------------------------------------------------


def _unpacked(values: list[float]) -> float:
    one, *rest = values
    return one + len(rest)


def _matched(values: list[float]) -> float:
    match values:
        case [1.0, *_]:
            return 3.0
        case [first, *_] if first > 10:
            return 2.0
    return 1.0


def _looped(values: list[float]) -> float:
    total = 0.0
    for value in values:
        if value > 8:
            break
        total += value
    return total


# Each reads a list of five floats, and one of them changes. The length stays.
_OF_A_LIST: dict[str, Callable[[list[float]], Any]] = {
    "item": lambda values: values[0],
    "item_from_the_end": lambda values: values[-5],
    "sum": sum,
    "max": max,
    "min": lambda values: min([9.0, *values[:1]]),
    "max_by_key": lambda values: max(values, key=lambda value: value + 1),
    "sorted": lambda values: sorted(values)[-1],
    "any": lambda values: 2.0 if any(value > 7 for value in values) else 1.0,
    "all": lambda values: 2.0 if all(value < 7 for value in values) else 1.0,
    "zip": lambda values: sum(a * b for a, b in zip(values, [1, 2, 3, 4, 5])),
    "map": lambda values: sum(map(abs, values)),
    "filter": lambda values: len(list(filter(lambda value: value > 8, values))) + 1,
    "enumerate": lambda values: sum(k + value for k, value in enumerate(values)),
    "reversed": lambda values: list(reversed(values))[-1],
    "slice": lambda values: values[:2][0],
    "strided_slice": lambda values: values[::-1][-1],
    "unpacked": _unpacked,
    "star_arguments": lambda values: (lambda a, *rest: a)(*values),
    "comprehension": lambda values: sum([2 * value for value in values]),
    "dictionary_comprehension": lambda values: {k: value for k, value in enumerate(values)}[0],
    "set_comprehension": lambda values: max({value for value in values}),
    "generator_expression": lambda values: next(value for value in values),
    "in": lambda values: 2.0 if 6.0 in values else 1.0,
    "index": lambda values: values.index(0.5) + (2 if 6.0 in values[:1] else 1),
    "count": lambda values: values.count(6.0) + 1,
    "compared": lambda values: 2.0 if values == [6.0, 0.5, 0.5, 0.5, 0.5] else 1.0,
    "ordered": lambda values: 2.0 if values < [8.0] else 1.0,
    "copied": lambda values: values.copy()[0],
    "added": lambda values: (values + values)[0],
    "repeated": lambda values: (values * 2)[5],
    "as_a_tuple": lambda values: tuple(values).index(0.5) + max(tuple(values)),
    "as_a_set": lambda values: max(set(values)),
    "as_keys": lambda values: max(dict.fromkeys(values)),
    "f_string": lambda values: float(f"{values[0]:.3f}"),
    "f_string_of_all": lambda values: zlib.crc32(f"{values}".encode()) % 1000,
    "percent": lambda values: float("%.2f" % values[0]),  # noqa: UP031
    "join": lambda values: float("".join(["0", *map(str, values[:1])])),
    "repr": lambda values: zlib.crc32(repr(values).encode()) % 1000,
    "json": lambda values: zlib.crc32(json.dumps(values).encode()) % 1000,
    "hash_of_a_tuple": lambda values: hash(tuple(values)) % 1000,
    "chain": lambda values: next(itertools.chain(values)),
    "product": lambda values: math.prod(values),
    "fsum": math.fsum,
    "mean": statistics.mean,
    "bisect": lambda values: bisect.bisect([2.0, 8.0, 10.5, 12.0], values[0]) + 1,
    "heap": lambda values: heapq.nlargest(1, values)[0],
    "reduce_by_loop": _looped,
    "matched": _matched,
    "packed": lambda values: struct.unpack("<d", struct.pack("<d", values[0]))[0],
    "local_tensor": lambda values: torch.tensor(values).sum().item(),
    "walrus": lambda values: (first := values[0]) + first,
    "iterator": lambda values: next(iter(values)),
    "conditional": lambda values: 2.0 if values[0] > 8 else 1.0,
    "while": lambda values: next(k for k in itertools.count() if k >= values[0]) + 1,
}


def _of_a_list(name: str, read: Callable[[list[float]], Any]) -> None:
    def make(here: Here) -> State:
        values = [1.0, 0.5, 0.5, 0.5, 0.5]
        return (lambda: read(values)), (lambda k: values.__setitem__(0, float(k)))

    make.__name__ = f"list_{name}"
    kind()(make)


for _name, _read in _OF_A_LIST.items():
    _of_a_list(_name, _read)

# Each reads a dictionary of two floats, and one of them changes.
_OF_A_DICTIONARY: dict[str, Callable[[dict[str, float]], Any]] = {
    "item": lambda values: values["a"],
    "get": lambda values: values.get("a", 0.0),
    "sum": lambda values: sum(values.values()),
    "max_by_get": lambda values: len(max(values, key=values.get)),  # type: ignore[arg-type]
    "items": lambda values: sum(value for key, value in values.items() if key == "a"),
    "keywords": lambda values: (lambda a, bb: a)(**values),
    "union": lambda values: (values | {"c": 1.0})["a"],
    "copied": lambda values: dict(values)["a"],
    "format": lambda values: float("{a}".format(**values)),
    "percent": lambda values: float("%(a)s" % values),  # noqa: UP031
    "json": lambda values: len(json.dumps(values)),
    "compared": lambda values: 2.0 if values == {"a": 6.0, "bb": 3.0} else 1.0,
    "by_operator": lambda values: operator.itemgetter("a")(values),
}


def _of_a_dictionary(name: str, read: Callable[[dict[str, float]], Any]) -> None:
    def make(here: Here) -> State:
        values = {"a": 1.0, "bb": 3.0}
        return (lambda: read(values)), (lambda k: values.__setitem__("a", float(k)))

    make.__name__ = f"dictionary_{name}"
    kind()(make)


for _name, _read in _OF_A_DICTIONARY.items():
    _of_a_dictionary(_name, _read)

# -- a value that is swapped ---------------------------------------------------------------------------------

# Each has what reads a value, the first value, and the one at a call.
_SWAPPED: dict[str, tuple[Callable[[Any], Any], Any, Callable[[int], Any]]] = {
    "bool_for_int_for_float": (lambda v: len(type(v).__name__), 1, lambda k: True if even(k) else 1.0),
    "int_for_bool": (lambda v: 2.0 if v is True else 1.0, 1, lambda k: True if even(k) else 1),
    "int": (lambda v: v, 1, lambda k: k),
    "large_int": (lambda v: v % 1000, 2**70 + 1, lambda k: 2**70 + k),
    "nan": (lambda v: v, 1.0, lambda k: math.nan if even(k) else float(k)),
    "nan_that_stays": (lambda v: 2.0 if v != v else 1.0, math.nan, lambda k: float("nan") if k < 11 else 1.0),
    "infinity": (lambda v: v, 1.0, lambda k: math.inf if even(k) else -math.inf),
    "negative_zero": (lambda v: v, 0.0, lambda k: -0.0 if even(k) else 0.0),
    "sign_of_zero": (lambda v: math.copysign(1, v), 0.0, lambda k: -0.0 if even(k) else 0.0),
    "sign_of_zero_in_a_tuple": (
        lambda v: math.copysign(1, v[0]),
        (0.0,),
        lambda k: (-0.0,) if even(k) else (0.0,),
    ),
    "str": (lambda v: float(v), "1", lambda k: str(k)),
    "str_of_equal_length": (lambda v: 2.0 if v == "relu" else 1.0, "tanh", lambda k: "relu"),
    "bytes": (lambda v: v[0], b"\1", lambda k: bytes([k])),
    "complex": (lambda v: v.imag, 1j, lambda k: complex(0, k)),
    "none": (lambda v: 1.0 if v is None else v, None, lambda k: float(k)),
    "ellipsis": (lambda v: 1.0 if v is ... else v, ..., lambda k: float(k)),
    "tuple": (lambda v: v[0], (1.0, 2), lambda k: (float(k), 2)),
    "equal_tuple_of_another_type": (
        lambda v: len(type(v[0]).__name__),
        (1,),
        lambda k: (True,) if even(k) else (1.0,),
    ),
    "range": (lambda v: len(v), range(1), lambda k: range(k)),
    "slice": (lambda v: sum([1, 2, 3][v]), slice(1), lambda k: slice(3) if even(k) else slice(2)),
    "frozenset": (lambda v: max(v), frozenset({1, 0}), lambda k: frozenset({k, 0})),
    "decimal": (lambda v: float(v), decimal.Decimal(1), lambda k: decimal.Decimal(k)),
    "fraction": (lambda v: float(v), fractions.Fraction(1), lambda k: fractions.Fraction(k)),
    "date": (lambda v: v.day, datetime.date(2020, 1, 1), lambda k: datetime.date(2020, 1, k)),
    "duration": (
        lambda v: v.total_seconds(),
        datetime.timedelta(seconds=1),
        lambda k: datetime.timedelta(seconds=k),
    ),
    "path": (lambda v: len(v.name), pathlib.PurePath("/a/b"), lambda k: pathlib.PurePath("/a", "b" * k)),
    "type": (lambda v: float(v(1.5)), float, lambda k: int if even(k) else float),
    "torch_size": (lambda v: v.numel(), torch.Size([1]), lambda k: torch.Size([k])),
    "torch_dtype": (
        lambda v: v.itemsize,
        torch.float32,
        lambda k: torch.float64 if even(k) else torch.float16,
    ),
    "torch_device": (
        lambda v: len(str(v)),
        torch.device("cpu"),
        lambda k: torch.device("meta" if even(k) else "cpu"),
    ),
    "torch_memory_format": (
        lambda v: 1.0 if v is torch.contiguous_format else 2.0,
        torch.contiguous_format,
        lambda k: torch.channels_last if even(k) else torch.contiguous_format,
    ),
    "compiled_pattern": (
        lambda v: len(v.findall("abab")),
        re.compile("ab"),
        lambda k: re.compile("a|b" if even(k) else "b"),
    ),
    "template": (
        lambda v: float(v.substitute(a=1)),
        string.Template("$a"),
        lambda k: string.Template(f"{k}$a"),
    ),
    "builtin_function": (lambda v: v(-3.5), abs, lambda k: math.floor if even(k) else abs),
}


def _swapped(name: str, read: Callable[[Any], Any], first: Any, later: Callable[[int], Any]) -> None:
    def make(here: Here) -> State:
        box = Holder(first)
        return (lambda: read(box.v)), (lambda k: setattr(box, "v", later(k)))

    make.__name__ = f"swapped_{name}"
    kind()(make)


for _name, (_read, _first, _later) in _SWAPPED.items():
    _swapped(_name, _read, _first, _later)

# -- what is missing, and what calls back --------------------------------------------------------------------


@kind()
def key_that_comes(here: Here) -> State:
    values: dict[str, float] = {}

    def read() -> float:
        try:
            return values["a"]
        except KeyError:
            return 1.0

    def change(k: int) -> None:
        if even(k):
            values["a"] = 2.0
        else:
            values.pop("a", None)

    return read, change


@kind()
def key_that_comes_while_another_goes(here: Here) -> State:
    values = {"b": 2.0}

    def change(k: int) -> None:
        values.clear()
        values["a" if even(k) else "b"] = float(k)

    return (lambda: values.get("a", 1.0)), change


@kind()
def index_that_comes(here: Here) -> State:
    values = [1.0]

    def read() -> float:
        try:
            return values[1]
        except IndexError:
            return 1.0

    return read, (lambda k: values.append(2.0))


@kind()
def first_that_is_true(here: Here) -> State:
    box = Holder(0.0)
    return (lambda: box.v or 1.0), (lambda k: setattr(box, "v", float(k) if even(k) else 0.0))


@kind()
def key_of_a_sort(here: Here) -> State:
    signs = [1]
    return (lambda: sorted([1, 2, 3], key=lambda v: signs[0] * v)[0]), (
        lambda k: signs.__setitem__(0, -1 if even(k) else 1)
    )


@kind()
def callback_of_a_substitution(here: Here) -> State:
    values = [1.0]
    return (lambda: float(re.sub("a", lambda match: str(values[0]), "a"))), (
        lambda k: values.__setitem__(0, float(k))
    )


@kind()
def callback_of_json(here: Here) -> State:
    values = [1.0]
    return (lambda: float(json.dumps(object(), default=lambda thing: values[0]))), (
        lambda k: values.__setitem__(0, float(k))
    )


@kind()
def callback_of_accumulation(here: Here) -> State:
    values = [1.0]
    return (lambda: [*itertools.accumulate([1, 2], lambda a, b: a + b * values[0])][1]), (
        lambda k: values.__setitem__(0, float(k))
    )
