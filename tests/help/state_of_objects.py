"""Kinds of state: attributes of objects."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from typing import Any

from state_kinds import Here, Holder, State, even, kind

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
def attribute_in_a_pattern(here: Here) -> State:
    box = Holder()

    def read() -> float:
        match box:
            case Holder(v=value):
                return value
        return 0.0

    return read, (lambda k: setattr(box, "v", float(k)))


class _Pair:
    __match_args__ = ("one", "other")

    def __init__(self) -> None:
        self.one, self.other = 2.0, 3.0


@kind()
def place_in_a_pattern(here: Here) -> State:
    pair = _Pair()

    def read() -> float:
        match pair:
            case _Pair(one, _):
                return one
        return 0.0

    def change(k: int) -> None:
        pair.one = float(k)
        if k == 11:
            here.put(_Pair, "__match_args__", ("other", "one"))

    return read, change


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
