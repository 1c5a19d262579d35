"""Kinds of state: what the methods read that Python calls by itself."""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections.abc import Iterator, Mapping
from typing import Any

from state_kinds import Here, Holder, State, kind

# -- methods that Python calls -------------------------------------------------------------------------------


class Magic:
    """Its methods read `v`."""

    def __init__(self, v: float = 1.0) -> None:
        self.v = v

    def __getattr__(self, name: str) -> float:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.v

    def __getitem__(self, key: object) -> float:
        return self.v

    def __len__(self) -> int:
        return int(self.v)

    def __iter__(self) -> Any:
        return iter([self.v, self.v])

    def __contains__(self, what: object) -> bool:
        return int(self.v) % 2 == 0

    def __bool__(self) -> bool:
        return int(self.v) % 2 == 0

    def __call__(self) -> float:
        return self.v

    def __eq__(self, other: object) -> bool:
        return int(self.v) % 2 == 0

    def __lt__(self, other: object) -> bool:
        return int(self.v) % 2 == 0

    def __hash__(self) -> int:
        return int(self.v)

    def __index__(self) -> int:
        return int(self.v)

    def __float__(self) -> float:
        return self.v

    def __int__(self) -> int:
        return int(self.v)

    def __str__(self) -> str:
        return str(self.v)

    def __format__(self, spec: str) -> str:
        return spec + str(self.v)

    def __enter__(self) -> float:
        return self.v

    def __exit__(self, *what: object) -> None:
        pass

    def __add__(self, other: float) -> float:
        return self.v + other

    def __rmul__(self, other: float) -> float:
        return self.v * other

    def __round__(self) -> int:
        return int(self.v)

    def __dir__(self) -> list[str]:
        return ["x"] * int(self.v)

    def __reversed__(self) -> Any:
        return iter([self.v])


def _entered(thing: Magic) -> float:
    with thing as found:
        return found


_MAGIC: dict[str, Any] = {
    "getattr": lambda thing: thing.scale,
    "getitem": lambda thing: thing[3],
    "len": len,
    "iter": sum,
    "contains": lambda thing: 2.0 if 3 in thing else 1.0,
    "bool": lambda thing: 2.0 if thing else 1.0,
    "call": lambda thing: thing(),
    "eq": lambda thing: 2.0 if thing == 3 else 1.0,
    "lt": lambda thing: 2.0 if thing < 3 else 1.0,
    "hash": hash,
    "index": operator.index,
    "index_of_a_list": lambda thing: [*range(20)][thing],
    "float": float,
    "int": int,
    "str": lambda thing: float(str(thing)),
    "format": lambda thing: float(f"{thing:1}"),
    "enter": _entered,
    "add": lambda thing: thing + 1,
    "rmul": lambda thing: 2 * thing,
    "round": round,
    "dir": lambda thing: len(dir(thing)) + 1,
    "reversed": lambda thing: next(reversed(thing)),
}


def _magic(name: str, read: Any) -> None:
    def make(here: Here) -> State:
        thing = Magic()
        return (lambda: read(thing)), (lambda k: setattr(thing, "v", float(k)))

    make.__name__ = f"magic_{name}"
    kind()(make)


for _name, _read in _MAGIC.items():
    _magic(_name, _read)


@kind()
def magic_getattribute(here: Here) -> State:
    values = [1.0]

    class Config:
        def __getattribute__(self, name: str) -> Any:
            return values[0] if name == "scale" else object.__getattribute__(self, name)

    config = Config()
    return (lambda: config.scale), (lambda k: values.__setitem__(0, float(k)))


@kind()
def magic_method_patched(here: Here) -> State:
    class Config:
        def __len__(self) -> int:
            return 1

    config = Config()
    return (lambda: len(config)), (lambda k: setattr(Config, "__len__", lambda self: k))


@kind()
def order_by_a_class(here: Here) -> State:
    class Item:
        def __init__(self, v: float) -> None:
            self.v = v

        def __lt__(self, other: Item) -> bool:
            return self.v < other.v

    items = [Item(1.0), Item(20.0)]
    return (lambda: sorted(items)[0].v), (lambda k: setattr(items[0], "v", float(k)))


@kind()
def mapping_of_the_user(here: Here) -> State:
    class Config(Mapping[str, float]):
        def __init__(self) -> None:
            self.values_of = {"a": 1.0}

        def __getitem__(self, key: str) -> float:
            return self.values_of[key]

        def __iter__(self) -> Iterator[str]:
            return iter(self.values_of)

        def __len__(self) -> int:
            return len(self.values_of)

    config = Config()
    return (lambda: config.get("a", 0.0)), (lambda k: config.values_of.update(a=float(k)))


@kind()
def item_of_a_class(here: Here) -> State:
    values = [1.0]

    class Config:
        def __class_getitem__(cls, key: object) -> float:
            return values[0]

    return (lambda: Config[3]), (lambda k: values.__setitem__(0, float(k)))


@kind()
def subclass_check(here: Here) -> State:
    values = [1.0]

    class Meta(type):
        def __subclasscheck__(cls, other: type) -> bool:
            return values[0] > 7

    class Scaled(metaclass=Meta):
        pass

    return (lambda: 2.0 if issubclass(int, Scaled) else 1.0), (lambda k: values.__setitem__(0, float(k)))


@kind()
def class_that_is_made_inside(here: Here) -> State:
    values = [1.0]

    def read() -> float:
        class Config:
            scale = values[0]

        return Config().scale

    return read, (lambda k: values.__setitem__(0, float(k)))


@kind()
def copy_of_the_users(here: Here) -> State:
    box = Holder()

    class Config:
        def __copy__(self) -> Holder:
            return Holder(box.v)

    config = Config()
    return (lambda: copy.copy(config).v), (lambda k: setattr(box, "v", float(k)))  # type: ignore[attr-defined]


# -- what is no Python, where Python looks for a method ------------------------------------------------------


@kind()
def attributes_are_items_by_get(here: Here) -> State:
    class Config(dict[str, float]):
        __getattr__ = dict.get
        __setattr__ = dict.__setitem__  # type: ignore[assignment]

    config = Config(scale=1.0)
    return (lambda: config.scale), (lambda k: setattr(config, "scale", float(k)))


@kind()
def attributes_are_items(here: Here) -> State:
    class Config(dict[str, float]):
        __getattr__ = dict.__getitem__

    config = Config(scale=1.0)
    return (lambda: getattr(config, "scale", 0.0)), (lambda k: config.update(scale=float(k)))


@kind()
def attributes_are_items_of_another_class(here: Here) -> State:
    class Config(dict[str, float]):
        __getattr__ = dict.get

    config = Config(scale=1.0)

    def change(k: int) -> None:
        Config.__getattr__ = lambda self, name: float(k)  # type: ignore[assignment, method-assign]

    return (lambda: config.scale), change


@kind()
def attributes_are_items_of_a_table(here: Here) -> State:
    table = {"scale": 1.0}

    class Config:
        __getattr__ = staticmethod(table.__getitem__)

    config = Config()
    return (lambda: config.scale), (lambda k: table.update(scale=float(k)))


@kind()
def attributes_of_a_module_are_items(here: Here) -> State:
    table, module = {"scale": 1.0}, types.ModuleType("tables")
    setattr(module, "__getattr__", table.get)  # noqa: B010
    return (lambda: module.scale), (lambda k: table.update(scale=float(k)))


@kind()
def property_by_attrgetter(here: Here) -> State:
    class Config(Holder):
        scale = property(operator.attrgetter("v"))

    config = Config()
    return (lambda: config.scale), (lambda k: setattr(config, "v", float(k)))


@kind()
def property_by_len(here: Here) -> State:
    class Items(list[int]):
        size = property(len)

    items = Items([1])
    return (lambda: items.size), (lambda k: items.extend([1] * k))


@kind()
def property_by_attrgetter_of_a_class(here: Here) -> State:
    class Meta(type):
        scale = property(operator.attrgetter("v"))

    class Config(metaclass=Meta):
        v = 1.0

    return (lambda: Config.scale), (lambda k: setattr(Config, "v", float(k)))


@kind()
def property_by_attrgetter_of_super(here: Here) -> State:
    class Base(Holder):
        scale = property(operator.attrgetter("v"))

    class Config(Base):
        def read(self) -> Any:
            return super().scale

    config = Config()
    return config.read, (lambda k: setattr(config, "v", float(k)))


@kind()
def slot_of_super(here: Here) -> State:
    class Base:
        __slots__ = ("v",)
        v: float

    class Config(Base):
        def read(self) -> Any:
            return super().v

    config = Config()
    config.v = 1.0
    return config.read, (lambda k: setattr(config, "v", float(k)))


@kind()
def property_that_remembers(here: Here) -> State:
    values = [1.0]

    class Config:
        @property
        @functools.lru_cache  # noqa: B019
        def scale(self) -> float:
            return values[0]

    config = Config()

    def change(k: int) -> None:
        values[0] = float(k)
        Config.scale.fget.cache_clear()  # type: ignore[attr-defined]

    return (lambda: config.scale), change


@kind()
def map_of_a_function_that_remembers(here: Here) -> State:
    values = [1.0]

    @functools.lru_cache
    def read(key: int) -> float:
        return values[key]

    def change(k: int) -> None:
        values[0] = float(k)
        read.cache_clear()

    return (lambda: sum(map(read, [0]))), change


_BOUND: dict[str, tuple[str, Any, Any]] = {
    "getitem": ("__getitem__", "__getitem__", lambda thing: thing["a"]),
    "iter": ("__iter__", "__iter__", lambda thing: len([*thing])),
    "contains": ("__contains__", "__contains__", lambda thing: 2.0 if 11 in thing else 1.0),
    "add": ("__add__", "__getitem__", lambda thing: thing + "a"),
    "eq": ("__eq__", "__contains__", lambda thing: 2.0 if thing == 11 else 1.0),
    "bool": ("__bool__", "__contains__", lambda thing: 2.0 if thing else 1.0),
}


def _bound(name: str, place: str, method: str, read: Any) -> None:
    def make(here: Here) -> State:
        table: dict[object, float] = {"a": 1.0}
        function = getattr(table, method)
        if place == "__bool__":
            function = functools.partial(function, 11)
        thing = type("Bound", (), {place: function})()
        return (lambda: read(thing)), (lambda k: table.update({"a": float(k), k: 0.0}))

    make.__name__ = f"method_of_a_table_as_{name}"
    kind()(make)


for _name, (_place, _method, _read) in _BOUND.items():
    _bound(_name, _place, _method, _read)


@kind()
def class_that_makes_its_objects_otherwise(here: Here) -> State:
    class Config:
        v: float

        def __new__(cls) -> Config:
            made = object.__new__(cls)
            made.v = 1.0
            return made

    def change(k: int) -> None:
        def new(cls: type) -> Config:
            made = object.__new__(cls)
            made.v = float(k)  # type: ignore[attr-defined]
            return made  # type: ignore[return-value]

        Config.__new__ = staticmethod(new)  # type: ignore[assignment, method-assign]

    return (lambda: Config().v), change
