"""Kinds of state: attributes of classes, their methods, and what a class is asked."""

from __future__ import annotations

import abc
import types
from typing import Any

from state_kinds import Here, State, even, kind

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
