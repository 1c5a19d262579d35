"""Kinds of state: what the methods read that Python calls by itself."""

from __future__ import annotations

import copy
import operator
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
