"""Objects that write down what is done with them, and functions that do it, with tricky bytecode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
    b = a.b

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
