"""Kinds of state: functions and what they hold, functools, iterators that live outside."""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Any

from state_kinds import Here, State, even, kind

# -- what a function holds -----------------------------------------------------------------------------------


@kind()
def defaults(here: Here) -> State:
    def given(v: float = 1.0) -> float:
        return v

    return (lambda: given()), (lambda k: setattr(given, "__defaults__", (float(k),)))


@kind()
def keyword_defaults(here: Here) -> State:
    def given(*, v: float = 1.0) -> float:
        return v

    return (lambda: given()), (lambda k: setattr(given, "__kwdefaults__", {"v": float(k)}))


@kind()
def keyword_defaults_in_place(here: Here) -> State:
    def given(*, v: float = 1.0) -> float:
        return v

    return (lambda: given()), (lambda k: given.__kwdefaults__.update(v=float(k)))


@kind()
def default_that_is_a_list(here: Here) -> State:
    values = [1.0]

    def given(v: list[float] = values) -> float:
        return v[0]

    return (lambda: given()), (lambda k: values.__setitem__(0, float(k)))


@kind()
def code_of_a_function(here: Here) -> State:
    def given() -> float:
        return 1.0

    def other() -> float:
        return 2.0

    codes = given.__code__, other.__code__
    return (lambda: given()), (lambda k: setattr(given, "__code__", codes[even(k)]))


@kind()
def attribute_of_a_function(here: Here) -> State:
    def given() -> float:
        return given.v  # type: ignore[attr-defined]

    given.v = 1.0  # type: ignore[attr-defined]
    return (lambda: given()), (lambda k: setattr(given, "v", float(k)))


@kind()
def name_of_a_function(here: Here) -> State:
    def given() -> None:
        pass

    return (lambda: len(given.__name__)), (lambda k: setattr(given, "__name__", "x" * k))


@kind()
def closure_cell(here: Here) -> State:
    v = 1.0

    def change(k: int) -> None:
        nonlocal v
        v = float(k)

    return (lambda: v), change


@kind()
def nested_closure_cell(here: Here) -> State:
    v = 1.0

    def outer() -> float:
        def inner() -> float:
            return v

        return inner()

    def change(k: int) -> None:
        nonlocal v
        v = float(k)

    return (lambda: outer()), change


@kind()
def function_in_a_cell(here: Here) -> State:
    def given() -> float:
        return 1.0

    def change(k: int) -> None:
        nonlocal given

        def given() -> float:
            return float(k)

    return (lambda: given()), change


@kind()
def lambda_of_one_code_with_another_cell(here: Here) -> State:
    def made(v: float) -> Any:
        return lambda: v

    table = {"f": made(1.0)}
    return (lambda: table["f"]()), (lambda k: table.update(f=made(float(k))))


@kind("refused", "change")
def counter_of_its_own(here: Here) -> State:
    n = 0

    def read() -> int:
        nonlocal n
        n += 1
        return n

    return read, (lambda k: None)


@kind("refused", "change")
def counter_that_decides_nothing(here: Here) -> State:
    values = {"calls": 0}

    def read() -> float:
        values["calls"] += 1
        return 1.0

    return read, (lambda k: None)


@kind()
def decorated_function(here: Here) -> State:
    values = [1.0]

    def scaled(function: Any) -> Any:
        @functools.wraps(function)
        def inner(*args: Any) -> float:
            return function(*args) * values[0]

        return inner

    @scaled
    def given() -> float:
        return 2.0

    return (lambda: given()), (lambda k: values.__setitem__(0, float(k)))


@kind()
def recursion(here: Here) -> State:
    values = [1.0, 2.0, 3.0]

    def total(k: int) -> float:
        return values[k] + total(k - 1) if k >= 0 else 0.0

    return (lambda: total(2)), (lambda k: values.__setitem__(0, float(k)))


@kind()
def generator_of_its_own(here: Here) -> State:
    values = [1.0]

    def items() -> Any:
        yield from values
        yield 2 * values[0]

    return (lambda: sum(items())), (lambda k: values.__setitem__(0, float(k)))


@kind()
def context_manager_of_its_own(here: Here) -> State:
    values = [1.0]

    @contextlib.contextmanager
    def scaled() -> Any:
        yield values[0]

    def read() -> float:
        with scaled() as found:
            return found

    return read, (lambda k: values.__setitem__(0, float(k)))


@kind()
def callbacks(here: Here) -> State:
    found = [lambda: 1.0]
    return (lambda: sum(one() for one in found)), (lambda k: found.append(lambda: float(k)))


# -- functools and operator ----------------------------------------------------------------------------------


@kind()
def arguments_of_a_partial(here: Here) -> State:
    values = [1.0]
    given = functools.partial(operator.getitem, values, 0)
    return (lambda: given()), (lambda k: values.__setitem__(0, float(k)))


@kind()
def keywords_of_a_partial(here: Here) -> State:
    given = functools.partial(lambda v: v, v=1.0)
    return (lambda: given()), (lambda k: given.keywords.update(v=float(k)))


@kind()
def partial_given_another_state(here: Here) -> State:
    given = functools.partial(lambda v: v, 1.0)

    def change(k: int) -> None:
        given.__setstate__((lambda v: v, (float(k),), {}, None))  # type: ignore[attr-defined]

    return (lambda: given()), change


@kind()
def partial_method(here: Here) -> State:
    class Layer:
        v = 1.0

        def scaled(self, by: float) -> float:
            return self.v * by

        twice = functools.partialmethod(scaled, 2.0)

    layer = Layer()
    return (lambda: layer.twice()), (lambda k: setattr(layer, "v", float(k)))


@kind("guarded or recorded", "cache|given")
def cache_that_is_cleared(here: Here) -> State:
    values = [1.0]

    @functools.lru_cache
    def given() -> float:
        return values[0]

    def change(k: int) -> None:
        values[0] = float(k)
        given.cache_clear()

    return (lambda: given()), change


@kind("guarded or recorded", "cache|given")
def cache_that_is_full(here: Here) -> State:
    """What it holds is dropped by a call with another argument."""
    values = [1.0]

    @functools.lru_cache(maxsize=1)
    def given(key: int) -> float:
        return values[0]

    def change(k: int) -> None:
        values[0] = float(k)
        given(k)

    return (lambda: given(0)), change


@kind("guarded or recorded", "dispatch|given")
def single_dispatch_registered_anew(here: Here) -> State:
    @functools.singledispatch
    def given(what: object) -> float:
        return 1.0

    return (lambda: given(3)), (lambda k: given.register(int, lambda what: float(k)))


@kind()
def reduced(here: Here) -> State:
    values = [1.0, 2.0]
    return (lambda: functools.reduce(operator.add, values)), (lambda k: values.__setitem__(0, float(k)))


@kind()
def sorted_by_a_key_of_functools(here: Here) -> State:
    signs = [1]
    key = functools.cmp_to_key(lambda a, b: signs[0] * (a > b) - signs[0] * (a < b))
    return (lambda: sorted([1, 2, 3], key=key)[0]), (lambda k: signs.__setitem__(0, -1 if even(k) else 1))


@kind()
def builtin_method_kept_outside(here: Here) -> State:
    values = {"a": 1.0}
    get = values.get
    return (lambda: get("a")), (lambda k: values.update(a=float(k)))


@kind()
def slot_method_kept_outside(here: Here) -> State:
    values = [1.0]
    get = values.__getitem__
    return (lambda: get(0)), (lambda k: values.__setitem__(0, float(k)))
