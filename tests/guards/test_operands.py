"""Operands of instructions, read off the interpreter's frames: they are what Python really calls and reads.

Objects here write down what is done with them. That has to be what was seen, in that order.
"""

# Its functions are there for their bytecode.
# ruff: noqa: B015, B018, F841, RUF012, RUF059
from __future__ import annotations

import ctypes
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distruntime.guards import operands, tracing
from distruntime.guards.instructions import Reading

# What was done: its kind, and with what.
Event = tuple[object, ...]
done: list[Event] = []


class Noted:
    """An object that writes down what is done with it."""

    def __init__(self, name: str = "made") -> None:
        vars(self)["name"] = name

    def __repr__(self) -> str:
        return str(vars(self)["name"])

    def __call__(self, *given: object, **named: object) -> Noted:
        return self._did("call", self, *given, *named.values())

    def _did(self, *event: object) -> Noted:
        result = Noted(f"result {len(done)}")
        done.append((*event, result if event[0] in ("call", "both", "negative") else None))
        return result

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return object.__getattribute__(self, name)
        return self._did("attribute", self, name)

    def __getitem__(self, key: object) -> Noted:
        return self._did("item", self, key)

    def __contains__(self, item: object) -> bool:
        self._did("contains", self, item)
        return True

    def __add__(self, other: object) -> Noted:
        return self._did("both", self, other)

    __iadd__ = __sub__ = __lt__ = __matmul__ = __add__

    def __neg__(self) -> Noted:
        return self._did("negative", self)

    def __bool__(self) -> bool:
        done.append(("truth", self, None))
        return True

    def __iter__(self) -> Iterator[Noted]:
        done.append(("iterate", self, None))
        return iter([Noted("one"), Noted("other")])

    def __enter__(self) -> Noted:
        done.append(("with", self, None))
        return self

    def __exit__(self, *error: object) -> bool:
        return True

    def __format__(self, form: str) -> str:
        done.append(("text", self, None))
        return form

    async def __aenter__(self) -> Noted:
        done.append(("with", self, None))
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    def __await__(self) -> Iterator[None]:
        yield
        return None


class Plain:
    """A class with methods as they are, and one of them that calls the method of its base."""

    def method(self, *given: object, **named: object) -> Noted:
        result = Noted("method's")
        done.append(("call", Plain.method, self, *given, *named.values(), result))
        return result

    @classmethod
    def of_class(cls, *given: object) -> Noted:
        result = Noted("class's")
        done.append(("call", Plain.of_class.__func__, cls, *given, result))  # type: ignore[attr-defined]
        return result


class Derived(Plain):
    def method(self, *given: object, **named: object) -> Noted:
        super().method("super", *given)
        return super().method(*given, **named)


class Seen:
    """Stands for what makes guards of reads."""

    def __init__(self) -> None:
        self.base = id(sys._getframe(1))
        self.found: list[Event] = []
        self.refused: list[str] = []
        self.entered: list[tuple[str, bool, int]] = []
        self.cells: list[tuple[object, object]] = []
        self.depths: list[tuple[int, int]] = []
        self._open: dict[int, int] = {}

    def cannot_look(self, why: str) -> None:
        self.refused.append(why)

    def enter(self, frame: types.FrameType, resumed: bool) -> None:
        self.entered.append((frame.f_code.co_name, resumed, operands.place(frame)))

    def step(self, frame: types.FrameType, one: Reading) -> None:
        if frame.f_code in _WRITING:
            return
        own = own_depth(frame)
        if own is not None:
            self.depths.append((one.depth, own))
        at = functools.partial(operands.operand, frame, one.depth)
        number = self._open.pop(id(frame), None)
        if number is not None and one.behind:
            self.found[number] = (*self.found[number][:-1], at())
        event: Event = ()
        match one.kind:
            case "cell":
                name, cell = one.name, operands.cell(frame, one.number)
                assert cell is not None
                # The body of a class has its own names.
                self.cells.append((frame.f_locals.get(name, cell.cell_contents), cell.cell_contents))
            case "call":
                function, given = operands.called(frame, one.depth, one.name, one.number)
                if isinstance(function, types.MethodType):
                    function, given = function.__func__, (function.__self__, *given)
                event = "call", function, *given
            case "attribute" | "super":
                event = "attribute", at(), one.name
            case "item" | "both":
                event = one.kind, at(1), at()
            case "slice":
                event = "item", at(2), slice(at(1), at())
            case "contains":
                event = one.kind, at(), at(1)
            case "match" if at(1) is Noted:
                self.found += [("attribute", at(2), name, None) for name in at()]  # type: ignore[attr-defined]
            case "text":
                event = one.kind, at(one.number)
            case "negative" | "truth" | "iterate" | "with":
                event = one.kind, at()
        # Nothing is written down of what is done with other objects.
        if event and (isinstance(event[1], Noted) or event[1] in _METHODS):
            # Python 3.14 looks up the two methods of a `with` one by one.
            if event[0] != "with" or not self.found or self.found[-1][:-1] != event:
                self._open[id(frame)] = len(self.found)
                self.found.append((*event, None))


_METHODS = (Plain.method, Plain.of_class.__func__)  # type: ignore[attr-defined]
_WRITING = {one.__code__ for one in vars(Noted).values() if isinstance(one, types.FunctionType)}


def own_depth(frame: types.FrameType) -> int | None:
    """Return how deep the interpreter itself says that the stack is, where it says so."""
    word = ctypes.sizeof(ctypes.c_void_p)
    code, version = frame.f_code, sys.version_info[:2]
    if version == (3, 10):
        return ctypes.c_int.from_address(id(frame) + 10 * word).value
    own = operands.place(frame) + 8 * word
    if version == (3, 11):
        return ctypes.c_int.from_address(own).value - operands._slots(code)
    if version == (3, 14):
        top = ctypes.c_void_p.from_address(own).value or 0
        return (top - own - 2 * word) // word - operands._slots(code)
    return None


def seen(function: Callable[..., object], *given: object) -> Seen:
    """Call a function while it is looked at."""
    done.clear()
    found = Seen()
    tracing.traced(found, function, *given)  # type: ignore[arg-type]
    return found


# -- functions with tricky bytecode --------------------------------------------------------------------------


def nested_calls(a: Noted) -> None:
    a(a(1, two=a(3)), *[a(4)], five=a(6), **{"seven": a(8)})
    a(*(1, 2))
    a(**{"x": 1})
    a(*[], **{})
    a(1, 2, 3, x=4, y=5)


def methods(a: Noted) -> None:
    a.method(1, x=2).further(3)
    a.called
    plain = Plain()
    plain.method(a, 1, x=a.y)
    plain.method(*[a], **{"z": 1})
    plain.of_class(1)
    Plain.method(plain, 2)
    bound = plain.method
    bound(3, w=4)
    Derived().method(5, v=6)


def items(a: Noted) -> None:
    a[0][1, 2][1:2][a["x"] : a["y"]]
    (a[1] + a[2]) - -a[3] @ a
    a < a[4]
    a in a
    3 not in a
    b = a
    b += a[5]
    [*a, *a[6]]
    one, other = a
    first, *rest = a[7]
    f"{a:x} {a[8]:>{3}} {a}"


def branches(a: Noted) -> None:
    x = a and a.x
    y = x or a.y
    z = a.z if not y else a.w
    while a(z):
        break
    assert a(y)


def comprehensions(a: Noted) -> None:
    [a(x) for x in a(1)]
    {a(x): a.y for x in a(2) if a(3)}
    list(a(x, y) for x in [1, 2] for y in a)
    [[a(x, y) for y in (1, 2)] for x in (a(9), 3)]
    [(lambda: a(x))() for x in (1, 2)]


def handlers(a: Noted) -> None:
    for number in range(3):
        try:
            a(number)
            try:
                if a(1, number):
                    raise ValueError(a(2))
                a(3)
            finally:
                a(4, a.x)
        except (ValueError, KeyError) as error:
            a(5, error)
            try:
                a(7)[a(8)].x
                raise KeyError from error
            except KeyError:
                a(9)
                continue
            finally:
                a(10)
        else:
            a(11)
    try:
        a(None, len(3))  # type: ignore[arg-type]
    except TypeError:
        a.handled(12)


def contexts(a: Noted) -> None:
    with a as b, b(1) as c:
        a(c, b)
        with a.x:
            raise ValueError(a(2))
    for k in range(2):
        with a(k):
            if k:
                return None
            a(3)


def _gives(a: Noted) -> Iterator[object]:
    try:
        got = yield a(1)
        a(2, got)
        yield from _further(a)
        yield a(a(3), (yield 4))
    finally:
        a(5)


def _further(a: Noted) -> Iterator[object]:
    for k in range(2):
        with a(k):
            yield a.x


def generators(a: Noted) -> None:
    one = _gives(a)
    a(next(one))
    a(one.send(6))
    for x in one:
        a(7, x)
    two = _gives(a)
    next(two)
    try:
        two.throw(ValueError(8))
    except ValueError:
        a(9)
    three = _gives(a)
    next(three)
    three.close()


async def _waits(a: Noted) -> object:
    async with a as b:
        a(1, await _inner(b))
    found = [a(x) async for x in _counts(a)]
    async for y in _counts(a):
        a(2, y)
    return a(found, *[await _inner(a) for _ in range(2)])


async def _inner(a: Noted) -> Noted:
    await a
    return a(3)


async def _counts(a: Noted) -> Any:
    for k in range(2):
        yield a(k)
        await a


def coroutines(a: Noted) -> None:
    waiting: Any = _waits(a)
    try:
        while True:
            waiting.send(None)
    except StopIteration:
        a(4)


def patterns(a: Noted) -> None:
    for subject in ([1, a], {"x": a, "y": 2}, 3):
        match subject:
            case [1, Noted() as b]:
                a(b, 1)
            case {"x": b, **rest} if a(rest):
                a(b, rest)
            case Plain(x=1):
                a(2)
            case 1 | 2 | 3:
                a(4)
    match a:
        case Noted(one=b, other=c):
            a(b, c)


def closures(a: Noted) -> None:
    b, unused = a.b, 1

    def inner(c: object, d: object = 2) -> Noted:
        e = a(b, c)
        return (lambda: a(e, c, d))()

    class Inside:
        x = a(b)
        y = [a(k, b) for k in (1, 2)]

        def method(self) -> object:
            return a(__class__, self)  # type: ignore[name-defined]

    inner(3)
    inner(4, d=5)
    Inside().method()


def many_names() -> Callable[[Noted], None]:
    """Return a function with so many names, constants and jumps that arguments of instructions are long."""
    lines = [f"    a.name_{k}({k}.5, x{k}=a[{k}.25])" for k in range(300)]
    lines += ["    if a(1):", *(f"        a.again_{k}" for k in range(300))]
    space: dict[str, Any] = {}
    exec(compile("\n".join(["def long(a):", *lines]), __file__, "exec"), space)
    return space["long"]  # type: ignore[no-any-return]


FUNCTIONS = (nested_calls, methods, items, branches, comprehensions, handlers, contexts, generators)
FUNCTIONS += (coroutines, patterns, closures, many_names())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_each_operand_is_what_python_uses(function: Callable[..., object]) -> None:
    found = seen(function, Noted("a"))
    for k, (event, was) in enumerate(zip(found.found, done)):
        assert event == was, (k, found.found[max(k - 3, 0) : k + 3], done[max(k - 3, 0) : k + 3])
    assert len(found.found) == len(done) > 5
    assert all(one is other for one, other in found.cells)
    # Python 3.12 and 3.13 do not say how deep their stacks are.
    assert all(one == other for one, other in found.depths)
    assert bool(found.depths) == (sys.version_info[:2] not in ((3, 12), (3, 13)))


def test_it_is_seen_again_and_again() -> None:
    a = Noted("a")
    for _ in range(3):
        assert [event[:-1] for event in seen(branches, a).found][:2] == [("truth", a), ("attribute", a, "x")]
        assert not seen(lambda: None).found


def test_equal_functions_are_each_looked_at() -> None:
    spaces: list[dict[str, Any]] = [{}, {}]
    for space in spaces:
        exec(compile("def calls(a):\n    a(1)", __file__, "exec"), space)
    one, other = [space["calls"] for space in spaces]
    assert one.__code__ == other.__code__ and one.__code__ is not other.__code__
    a = Noted("a")
    assert len(seen(lambda: (one(a), other(a))).found) == 2


# -- generators ----------------------------------------------------------------------------------------------


def test_a_generator_that_was_begun_before_goes_on() -> None:
    def counts() -> Iterator[int]:
        yield from range(9)

    begun = [counts() for _ in range(20)]
    for one in begun:
        next(one)

    def goes_on() -> None:
        # The objects of their frames are made where those of frames that have ended were.
        for _ in range(50):
            list(counts())
        for one in begun:
            next(one)

    found = seen(goes_on)
    places = {place for name, resumed, place in found.entered if not resumed}
    again = [place for name, resumed, place in found.entered if resumed and place not in places]
    assert len(set(again)) == len(begun)
    # Those of the call itself have begun where they go on.
    own = [place for name, resumed, place in found.entered if resumed and place in places]
    assert len(own) >= 50


def test_a_generator_that_was_begun_before_is_thrown_into() -> None:
    def catches() -> Iterator[int]:
        try:
            yield 1
        except ValueError:
            yield 2

    begun = catches()
    next(begun)
    entered = seen(lambda: begun.throw(ValueError())).entered
    assert [resumed for name, resumed, place in entered if name == "catches"] == [True]


# -- where nobody can look -----------------------------------------------------------------------------------


@pytest.mark.parametrize("unknown", ["version", "implementation", "no lock"])
def test_an_unknown_interpreter_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, unknown: str) -> None:
    assert operands.known()
    if unknown == "version":
        monkeypatch.setattr(operands, "_VERSION", (3, 99))
    elif unknown == "implementation":
        monkeypatch.setattr(sys.implementation, "name", "pypy")
    else:
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not operands.known()
    found = seen(nested_calls, Noted("a"))
    assert not found.found and "does not know how this Python" in found.refused[0]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python has no sys.monitoring")
@pytest.mark.parametrize("taken", [(4,), (3, 4, 5), (0, 1, 2, 3, 4, 5)])
def test_other_tools_have_numbers(taken: tuple[int, ...]) -> None:
    monitoring = sys.monitoring  # type: ignore[attr-defined]
    free = [number for number in taken if monitoring.get_tool(number) is None]
    for number in free:
        monitoring.use_tool_id(number, "another")
    try:
        found = seen(nested_calls, Noted("a"))
    finally:
        for number in free:
            assert monitoring.get_tool(number) == "another"
            monitoring.free_tool_id(number)
    if len(taken) == 6:
        assert not found.found and "numbers of sys.monitoring" in found.refused[0]
    else:
        assert len(found.found) == len(done) and not found.refused


def test_two_threads_see_what_each_of_them_reads() -> None:
    a = [Noted("a"), Noted("b")]
    found: list[Seen] = []
    together = threading.Barrier(2)

    def reads(own: Noted, k: int) -> None:
        for _ in range(30):
            own(k)
        together.wait(20)
        for _ in range(30):
            own(k).x

    def look(k: int) -> None:
        one = Seen()
        found.append(one)

        def work() -> None:
            together.wait(20)
            reads(a[k], k)

        tracing.traced(one, work)  # type: ignore[arg-type]

    threads = [threading.Thread(target=look, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for one in found:
        calls = [event for event in one.found if event[0] == "call"]
        assert len(calls) == 60 and len({event[1] for event in calls}) == 1
        assert len(one.found) == 90
    assert {one.found[0][1] for one in found} == {*a}
