"""Kinds of state: functions and what they hold, global names, modules, and what is patched of Python's."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import itertools
import math
import operator
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from state_kinds import Here, State, even, kind
from state_of_classes import Holder

# These global names are rebound.
rebound = 1.0
listed = [1.0]

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


# -- iterators that live outside -----------------------------------------------------------------------------


@kind("recorded or refused", "count")
def iterator_that_counts(here: Here) -> State:
    numbers = itertools.count(1)
    return (lambda: next(numbers)), (lambda k: next(numbers))


@kind("recorded or refused", "generator")
def generator_outside(here: Here) -> State:
    numbers = (k for k in range(99))
    return (lambda: next(numbers)), (lambda k: next(numbers))


@kind("recorded or refused", "iterator")
def iterator_of_a_list(here: Here) -> State:
    numbers = iter([*range(99)])
    return (lambda: next(numbers)), (lambda k: next(numbers))


@kind("recorded or refused", "cycle")
def iterator_that_gives_the_same(here: Here) -> State:
    """Each call gets an equal value, until one is skipped."""
    numbers = itertools.cycle([1.0, 2.0])

    def read() -> float:
        first = next(numbers)
        next(numbers)
        return first

    return read, (lambda k: next(numbers))


@kind("recorded or refused", "generator")
def generator_that_is_sent_to(here: Here) -> State:
    def echo() -> Any:
        v = 1.0
        while True:
            v = (yield v) or v

    values = echo()
    next(values)
    return (lambda: next(values)), (lambda k: values.send(float(k)))


@kind("refused", "change")
def list_that_is_emptied(here: Here) -> State:
    """It is as long as before when the call ends."""
    values = [float(k) for k in range(30)]

    def read() -> float:
        found = values.pop()
        values.insert(0, found)
        return found

    return read, (lambda k: None)


# -- global names and modules --------------------------------------------------------------------------------


@kind()
def global_that_is_rebound(here: Here) -> State:
    here.put(sys.modules[__name__], "rebound", 1.0)
    return (lambda: rebound), (lambda k: globals().update(rebound=float(k)))


@kind()
def global_list(here: Here) -> State:
    listed[0] = 1.0
    return (lambda: listed[0]), (lambda k: listed.__setitem__(0, float(k)))


@kind()
def global_by_name(here: Here) -> State:
    here.put(sys.modules[__name__], "rebound", 1.0)
    return (lambda: globals()["rebound"]), (lambda k: globals().update(rebound=float(k)))


@kind()
def global_that_hides_a_builtin(here: Here) -> State:
    here.callback(lambda: globals().pop("divmod", None))

    def change(k: int) -> None:
        globals()["divmod"] = lambda a, b: (float(k), 0)

    return (lambda: divmod(7, 4)[0]), change


@kind()
def builtin_that_is_patched(here: Here) -> State:
    def change(k: int) -> None:
        here.put(builtins, "hex", lambda number: "x" * k)

    return (lambda: len(hex(1))), change


@kind()
def function_of_the_library_that_is_patched(here: Here) -> State:
    return (lambda: math.fabs(-1)), (lambda k: here.put(math, "fabs", lambda number: float(k)))


@kind(wide=True)
def class_of_the_library_that_is_patched(here: Here) -> State:
    def read() -> float:
        with contextlib.nullcontext(1.0) as found:
            return found

    def change(k: int) -> None:
        here.put(contextlib, "nullcontext", lambda found=None: contextlib.closing(_Closed(float(k))))

    return read, change


class _Closed(float):
    def close(self) -> None:
        pass


@kind()
def attribute_of_a_module(here: Here) -> State:
    module: Any = types.ModuleType("some")
    module.v = 1.0
    return (lambda: module.v), (lambda k: setattr(module, "v", float(k)))


def _imported(here: Here, name: str, text: str) -> Any:
    """Return a module of the user's that was imported from a folder."""
    folder = here.enter_context(tempfile.TemporaryDirectory())
    Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, folder)
    here.callback(sys.path.remove, folder)
    here.callback(sys.modules.pop, name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


@kind()
def attribute_of_an_imported_module(here: Here) -> State:
    module = _imported(here, "user_a", "v = 1.0")
    return (lambda: module.v), (lambda k: setattr(module, "v", float(k)))


@kind()
def global_of_a_function_of_an_imported_module(here: Here) -> State:
    module = _imported(here, "user_b", "v = 1.0\ndef get():\n    return v\n")
    return (lambda: module.get()), (lambda k: setattr(module, "v", float(k)))


@kind()
def function_of_an_imported_module_patched(here: Here) -> State:
    module = _imported(here, "user_c", "def get():\n    return 1.0\n")
    return (lambda: module.get()), (lambda k: setattr(module, "get", lambda: float(k)))


@kind()
def getattr_of_a_module(here: Here) -> State:
    module = _imported(here, "user_d", "values = [1.0]\ndef __getattr__(name):\n    return values[0]\n")
    return (lambda: module.scale), (lambda k: module.values.__setitem__(0, float(k)))


@kind()
def import_inside_the_function(here: Here) -> State:
    module = _imported(here, "user_e", "v = 1.0")

    def read() -> float:
        import user_e  # type: ignore[import-not-found]

        return user_e.v

    return read, (lambda k: setattr(module, "v", float(k)))


@kind()
def import_of_a_name_inside_the_function(here: Here) -> State:
    module = _imported(here, "user_f", "v = 1.0")

    def read() -> float:
        from user_f import v

        return v

    return read, (lambda k: setattr(module, "v", float(k)))


@kind()
def module_by_name(here: Here) -> State:
    module = _imported(here, "user_g", "v = 1.0")
    return (lambda: sys.modules["user_g"].v), (lambda k: setattr(module, "v", float(k)))


@kind()
def module_that_is_reloaded(here: Here) -> State:
    module = _imported(here, "user_h", "v = 1.0\ndef get():\n    return v\n")

    def change(k: int) -> None:
        path = Path(str(module.__file__))
        path.write_text(f"v = {k}.0\ndef get():\n    return v\n" + "#" * k, encoding="utf-8")
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))

    return (lambda: module.get()), change


@kind("guarded or recorded", "eval")
def evaluated_text(here: Here) -> State:
    box = Holder()
    return (lambda: eval("box.v", {"box": box})), (lambda k: setattr(box, "v", float(k)))


@kind()
def function_with_globals_of_its_own(here: Here) -> State:
    space: dict[str, Any] = {"v": 1.0}
    exec("def get():\n    return v", space)
    get = space["get"]
    return (lambda: get()), (lambda k: space.update(v=float(k)))


@kind("guarded or recorded", "thread")
def function_in_another_thread(here: Here) -> State:
    values = [1.0]
    pool = here.enter_context(ThreadPoolExecutor(1))
    return (lambda: pool.submit(lambda: values[0]).result()), (lambda k: values.__setitem__(0, float(k)))


@kind()
def coroutine(here: Here) -> State:
    values = [1.0]

    async def inner() -> float:
        return values[0]

    async def outer() -> float:
        return await inner()

    def read() -> float:
        try:
            outer().send(None)
        except StopIteration as end:
            return end.value
        return 0.0

    return read, (lambda k: values.__setitem__(0, float(k)))


@kind("guarded or recorded", "_getframe|frame")
def frame_of_the_caller(here: Here) -> State:
    box = Holder()

    def given() -> float:
        return sys._getframe(1).f_locals["mine"]

    def read() -> float:
        mine = box.v
        return given() + 0 * mine

    return read, (lambda k: setattr(box, "v", float(k)))


@kind()
def function_found_by_its_name(here: Here) -> State:
    class Table:
        def one(self) -> float:
            return 1.0

        def two(self) -> float:
            return 2.0

    table, names = Table(), ["one"]
    return (lambda: getattr(table, names[0])()), (lambda k: names.__setitem__(0, "two" if even(k) else "one"))
