"""Kinds of state: attributes of objects and classes, and the methods that Python calls by itself."""

from __future__ import annotations

import abc
import copy
import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Iterator, Mapping
from typing import Any

from state_kinds import Here, State, even, kind


class Holder:
    """It has one value, and others beside it."""

    def __init__(self, v: Any = 1.0) -> None:
        self.v = v


# -- attributes of classes -----------------------------------------------------------------------------------


@kind()
def class_attribute_without_methods(here: Here) -> State:
    class Config:
        scale = 1.0

    return (lambda: Config.scale), (lambda k: setattr(Config, "scale", float(k)))


@kind()
def class_attribute_through_an_instance(here: Here) -> State:
    class Config:
        scale = 1.0

    config = Config()
    return (lambda: config.scale), (lambda k: setattr(Config, "scale", float(k)))


@kind()
def class_attribute_hidden_by_an_instance(here: Here) -> State:
    class Config:
        scale = 1.0

    config = Config()
    return (lambda: config.scale), (lambda k: setattr(config, "scale", float(k)))


@kind()
def base_class_attribute(here: Here) -> State:
    class Base:
        scale = 1.0

    class Config(Base):
        pass

    config = Config()
    return (lambda: config.scale), (lambda k: setattr(Base, "scale", float(k)))


@kind()
def base_class_attribute_hidden(here: Here) -> State:
    class Base:
        scale = 1.0

    class Config(Base):
        pass

    return (lambda: Config.scale), (lambda k: setattr(Config, "scale", float(k)))


@kind()
def bases_of_a_class(here: Here) -> State:
    class One:
        scale = 1.0

    class Config(One):
        pass

    def change(k: int) -> None:
        Config.__bases__ = (type("Other", (One,), {"scale": float(k)}),)

    return (lambda: Config().scale), change


@kind()
def class_of_an_object(here: Here) -> State:
    class One:
        scale = 1.0

    class Other:
        scale = 2.0

    thing: Any = One()
    return (lambda: thing.scale), (lambda k: setattr(thing, "__class__", Other if even(k) else One))


@kind()
def name_of_a_class(here: Here) -> State:
    class Config:
        pass

    return (lambda: len(Config.__name__)), (lambda k: setattr(Config, "__name__", "x" * k))


@kind()
def metaclass_attribute(here: Here) -> State:
    class Meta(type):
        scale = 1.0

    class Config(metaclass=Meta):
        pass

    return (lambda: Config.scale), (lambda k: setattr(Meta, "scale", float(k)))


@kind()
def metaclass_property(here: Here) -> State:
    values = [1.0]

    class Meta(type):
        @property
        def scale(cls) -> float:
            return values[0]

    class Config(metaclass=Meta):
        pass

    return (lambda: Config.scale), (lambda k: values.__setitem__(0, float(k)))


@kind()
def method_patched_on_a_class(here: Here) -> State:
    class Layer:
        def factor(self) -> float:
            return 1.0

    layer = Layer()
    return (lambda: layer.factor()), (lambda k: setattr(Layer, "factor", lambda self: float(k)))


@kind()
def method_hidden_by_a_subclass(here: Here) -> State:
    class Base:
        def factor(self) -> float:
            return 1.0

    class Layer(Base):
        pass

    layer = Layer()
    return (lambda: layer.factor()), (lambda k: setattr(Layer, "factor", lambda self: float(k)))


@kind()
def method_hidden_by_an_instance(here: Here) -> State:
    class Layer:
        def factor(self) -> float:
            return 1.0

    layer = Layer()
    return (lambda: layer.factor()), (lambda k: setattr(layer, "factor", lambda: float(k)))


@kind()
def static_method_patched(here: Here) -> State:
    class Layer:
        @staticmethod
        def factor() -> float:
            return 1.0

    return (lambda: Layer.factor()), (lambda k: setattr(Layer, "factor", staticmethod(lambda: float(k))))


@kind()
def class_method_over_the_class(here: Here) -> State:
    class Layer:
        scale = 1.0

        @classmethod
        def factor(cls) -> float:
            return cls.scale

    return (lambda: Layer.factor()), (lambda k: setattr(Layer, "scale", float(k)))


@kind()
def bound_method_that_was_set(here: Here) -> State:
    class Layer:
        def factor(self) -> float:
            return 1.0

    layer = Layer()

    def change(k: int) -> None:
        layer.factor = types.MethodType(lambda self: float(k), layer)  # type: ignore[method-assign]

    return (lambda: layer.factor()), change


@kind()
def bound_method_kept_outside(here: Here) -> State:
    class Layer:
        v = 1.0

        def factor(self) -> float:
            return self.v

    layer = Layer()
    factor = layer.factor
    return (lambda: factor()), (lambda k: setattr(layer, "v", float(k)))


@kind()
def super_in_a_method(here: Here) -> State:
    class Base:
        def factor(self) -> float:
            return 1.0

    class Layer(Base):
        def factor(self) -> float:
            return super().factor() + 1

    layer = Layer()
    return (lambda: layer.factor()), (lambda k: setattr(Base, "factor", lambda self: float(k)))


@kind("guarded or recorded", "isinstance|Scaled")
def registration_at_an_abstract_class(here: Here) -> State:
    class Scaled(metaclass=abc.ABCMeta):  # noqa: B024
        pass

    class Config:
        pass

    config = Config()
    return (lambda: 2.0 if isinstance(config, Scaled) else 1.0), (lambda k: Scaled.register(Config))


@kind()
def instance_check(here: Here) -> State:
    values = [1.0]

    class Meta(type):
        def __instancecheck__(cls, thing: object) -> bool:
            return values[0] > 7

    class Scaled(metaclass=Meta):
        pass

    return (lambda: 2.0 if isinstance(3, Scaled) else 1.0), (lambda k: values.__setitem__(0, float(k)))


@kind()
def class_in_a_table_swapped(here: Here) -> State:
    classes = [type("C", (), {"v": 1.0})]
    return (lambda: classes[0]().v), (lambda k: classes.__setitem__(0, type("C", (), {"v": float(k)})))


# -- attributes of objects -----------------------------------------------------------------------------------


@kind()
def attribute(here: Here) -> State:
    box = Holder()
    return (lambda: box.v), (lambda k: setattr(box, "v", float(k)))


@kind()
def attribute_that_also_decides(here: Here) -> State:
    """A replay may follow the float, as long as the other branch is not taken."""
    box = Holder()
    return (lambda: box.v if box.v < 11 else box.v * 2), (lambda k: setattr(box, "v", float(k)))


@kind()
def attribute_that_is_rounded(here: Here) -> State:
    """Before the last change the number is the float itself."""
    box = Holder()

    def change(k: int) -> None:
        box.v = k + 0.5 if k > 11 else float(k)

    return (lambda: box.v // 1), change


@kind()
def attribute_beside_one_that_is_nan(here: Here) -> State:
    """No number is NaN, so none follows what is computed with it."""
    box, other = Holder(), Holder(float("nan"))
    return (lambda: (box.v % 4 + 1) / 7 if other.v != 1.0 else other.v), (
        lambda k: setattr(box, "v", float(k))
    )


@kind()
def namespace(here: Here) -> State:
    box = types.SimpleNamespace(v=1.0)
    return (lambda: box.v), (lambda k: setattr(box, "v", float(k)))


@kind()
def attribute_that_appears(here: Here) -> State:
    box = Holder()

    def change(k: int) -> None:
        if even(k):
            box.more = 2.0  # type: ignore[attr-defined]
        else:
            vars(box).pop("more", None)

    return (lambda: 2.0 if hasattr(box, "more") else 1.0), change


@kind()
def attribute_by_a_changing_name(here: Here) -> State:
    box, names = types.SimpleNamespace(a=1.0, b=2.0), ["a"]
    return (lambda: getattr(box, names[0])), (lambda k: names.__setitem__(0, "b" if even(k) else "a"))


@kind()
def dictionary_of_an_object_replaced(here: Here) -> State:
    box = Holder()
    return (lambda: box.v), (lambda k: setattr(box, "__dict__", {"v": float(k)}))


@kind()
def vars_of_an_object(here: Here) -> State:
    box = Holder()
    return (lambda: vars(box)["v"] + len(vars(box))), (lambda k: setattr(box, "v", float(k)))


@kind()
def slots(here: Here) -> State:
    class Slotted:
        __slots__ = ("v",)

    box = Slotted()
    box.v = 1.0  # type: ignore[attr-defined]
    return (lambda: box.v), (lambda k: setattr(box, "v", float(k)))  # type: ignore[attr-defined]


@kind()
def slots_that_were_empty(here: Here) -> State:
    class Slotted:
        __slots__ = ("v",)

    box = Slotted()
    return (lambda: getattr(box, "v", 1.0)), (lambda k: setattr(box, "v", float(k)))


@kind()
def property_over_a_nested_dictionary(here: Here) -> State:
    class Config:
        def __init__(self) -> None:
            self._d = {"a": {"b": [1.0]}}

        @property
        def v(self) -> float:
            return self._d["a"]["b"][0]

    config = Config()
    return (lambda: config.v), (lambda k: config._d["a"]["b"].__setitem__(0, float(k)))


@kind()
def property_replaced(here: Here) -> State:
    class Config:
        v = property(lambda self: 1.0)

    config = Config()
    return (lambda: config.v), (lambda k: setattr(Config, "v", property(lambda self: float(k))))


@kind()
def cached_property(here: Here) -> State:
    class Config:
        w = 1.0

        @functools.cached_property
        def v(self) -> float:
            return self.w

    config = Config()
    _ = config.v

    def change(k: int) -> None:
        config.w = float(k)
        vars(config).pop("v", None)

        _ = config.v

    return (lambda: config.v), change


@kind()
def descriptor(here: Here) -> State:
    class Scaled:
        v = 1.0

        def __get__(self, owner: object, kind: object) -> float:
            return self.v

    own = Scaled()

    class Config:
        scale = own

    config = Config()
    return (lambda: config.scale), (lambda k: setattr(own, "v", float(k)))


@kind()
def descriptor_of_data(here: Here) -> State:
    class Scaled:
        def __get__(self, owner: Any, kind: object) -> float:
            return owner._scale[0]

        def __set__(self, owner: Any, value: float) -> None:
            owner._scale[0] = value

    class Config:
        scale = Scaled()

        def __init__(self) -> None:
            self._scale = [1.0]

    config = Config()
    return (lambda: config.scale), (lambda k: setattr(config, "scale", float(k)))


@kind()
def data_class(here: Here) -> State:
    @dataclasses.dataclass
    class Config:
        v: list[float]

    config = Config([1.0])
    return (lambda: config.v[0]), (lambda k: config.v.__setitem__(0, float(k)))


@kind()
def frozen_data_class_with_a_list(here: Here) -> State:
    @dataclasses.dataclass(frozen=True)
    class Config:
        v: tuple[list[float], ...]

    config = Config(([1.0],))
    return (lambda: config.v[0][0]), (lambda k: config.v[0].__setitem__(0, float(k)))


@kind()
def data_class_compared(here: Here) -> State:
    @dataclasses.dataclass
    class Config:
        v: float

    config, other = Config(1.0), Config(6.0)
    return (lambda: 2.0 if config == other else 1.0), (lambda k: setattr(config, "v", float(k)))


@kind()
def data_class_as_a_dictionary(here: Here) -> State:
    @dataclasses.dataclass
    class Config:
        v: float

    config = Config(1.0)
    return (lambda: dataclasses.asdict(config)["v"]), (lambda k: setattr(config, "v", float(k)))


@kind()
def data_class_replaced(here: Here) -> State:
    @dataclasses.dataclass(frozen=True)
    class Config:
        v: float
        w: float = 2.0

    box = [Config(1.0)]
    return (lambda: box[0].v), (lambda k: box.__setitem__(0, dataclasses.replace(box[0], v=float(k))))


@kind()
def member_of_an_enumeration_changed(here: Here) -> State:
    class Mode(enum.Enum):
        ONE = 1

        def __init__(self, number: int) -> None:
            self.factor = float(number)

    return (lambda: Mode.ONE.factor), (lambda k: setattr(Mode.ONE, "factor", float(k)))


@kind()
def enumeration_swapped(here: Here) -> State:
    class Mode(enum.Enum):
        ONE = 1
        TWO = 2

    box = Holder(Mode.ONE)
    return (lambda: box.v.value), (lambda k: setattr(box, "v", Mode.TWO if even(k) else Mode.ONE))


@kind()
def flags_swapped(here: Here) -> State:
    class Mode(enum.Flag):
        ONE = 1
        TWO = 2

    box = Holder(Mode.ONE)

    def change(k: int) -> None:
        box.v = Mode.ONE | Mode.TWO if even(k) else Mode.ONE

    return (lambda: 2.0 if Mode.TWO in box.v else 1.0), change


@kind()
def cyclic_objects(here: Here) -> State:
    one, other = Holder(), Holder()
    one.other, other.other = other, one  # type: ignore[attr-defined]

    def read() -> Any:
        return one.other.other.other.v  # type: ignore[attr-defined]

    return read, (lambda k: setattr(other, "v", float(k)))


@kind()
def arguments_of_an_error(here: Here) -> State:
    error = ValueError(1.0)
    return (lambda: error.args[0]), (lambda k: setattr(error, "args", (float(k),)))


@kind()
def error_that_is_raised_and_caught(here: Here) -> State:
    values = [1.0]

    def raising() -> None:
        raise KeyError(values[0])

    def read() -> float:
        try:
            raising()
        except KeyError as error:
            return error.args[0]
        return 0.0

    return read, (lambda k: values.__setitem__(0, float(k)))


@kind()
def attribute_of_a_float(here: Here) -> State:
    class Rate(float):
        v = 1.0

    rate = Rate(3)
    return (lambda: rate * rate.v), (lambda k: setattr(rate, "v", float(k)))


@kind()
def subclass_of_float_swapped(here: Here) -> State:
    class Rate(float):
        pass

    box = Holder(Rate(1))
    return (lambda: float(box.v)), (lambda k: setattr(box, "v", Rate(k)))


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


@kind()
def object_that_is_replaced_and_then_changed(here: Here) -> State:
    boxes = [Holder()]

    def change(k: int) -> None:
        if even(k):
            boxes[0] = Holder(float(k))
        else:
            boxes[0].v = float(k)

    return (lambda: boxes[0].v), change


@kind()
def object_that_is_equal_and_another(here: Here) -> State:
    box = Holder([1.0])
    first = box.v
    return (lambda: 1.0 if box.v is first else 2.0), (
        lambda k: setattr(box, "v", [1.0] if even(k) else first)
    )


@kind()
def attribute_that_is_deleted(here: Here) -> State:
    class Config:
        scale = 1.0

    config = Config()
    config.scale = 2.0

    def change(k: int) -> None:
        if even(k):
            del config.scale
        config.scale = float(k)
        if k == 15:
            del config.scale

    return (lambda: config.scale), change
