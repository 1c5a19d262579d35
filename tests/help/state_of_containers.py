"""Kinds of state: lists, dictionaries, sets, their relatives, and weak references."""

from __future__ import annotations

import collections
import copy
import operator
import pickle
import re
import types
import weakref
import zlib
from typing import Any

from state_kinds import Here, Holder, State, even, kind

# -- containers ----------------------------------------------------------------------------------------------


@kind()
def list_in_a_tuple(here: Here) -> State:
    values = (0, ([1.0],))
    return (lambda: values[1][0][0]), (lambda k: values[1][0].__setitem__(0, float(k)))


class _Row(list[float]):
    """A list of the user's own, which C code fills."""


@kind()
def list_that_is_copied_by_its_class(here: Here) -> State:
    values = [1.0, 2.0]
    return (lambda: _Row(values)[0]), (lambda k: values.__setitem__(0, float(k)))


@kind()
def list_that_grows(here: Here) -> State:
    values = [1.0]
    return (lambda: len(values)), (lambda k: values.append(1.0))


@kind()
def list_that_is_sorted_anew(here: Here) -> State:
    values = [1.0, 2.0, 3.0]
    return (lambda: values[0]), (lambda k: values.sort(reverse=even(k)))


@kind()
def list_that_holds_itself(here: Here) -> State:
    values: list[Any] = [1.0]
    values.append(values)
    return (lambda: values[1][1][0]), (lambda k: values.__setitem__(0, float(k)))


@kind()
def long_list(here: Here) -> State:
    values = [1.0] * 20_000
    return (lambda: values[12_345]), (lambda k: values.__setitem__(12_345, float(k)))


@kind("guarded or recorded", "list")
def sum_of_a_long_list(here: Here) -> State:
    values = [1.0] * 20_000
    return (lambda: sum(values)), (lambda k: values.__setitem__(12_345, float(k)))


@kind()
def large_dictionary(here: Here) -> State:
    values = dict.fromkeys(range(20_000), 1.0)
    return (lambda: values[12_345]), (lambda k: values.__setitem__(12_345, float(k)))


@kind()
def dictionary_whose_keys_are_swapped(here: Here) -> State:
    values: dict[str, float] = {"a": 1.0}

    def change(k: int) -> None:
        values.clear()
        values["b" if even(k) else "a"] = 1.0

    return (lambda: 2.0 if "b" in values else 1.0), change


@kind()
def order_of_a_dictionary(here: Here) -> State:
    values = {"a": 1.0, "b": 2.0}
    return (lambda: next(iter(values.values()))), (lambda k: values.update(a=values.pop("a")))


@kind()
def order_of_an_ordered_dictionary(here: Here) -> State:
    values = collections.OrderedDict(a=1.0, b=2.0)
    return (lambda: next(iter(values.values()))), (lambda k: values.move_to_end("a", last=even(k)))


@kind()
def view_of_a_dictionary(here: Here) -> State:
    values = {"a": 1.0}
    view = values.values()
    return (lambda: sum(view)), (lambda k: values.update(a=float(k)))


@kind()
def key_by_identity(here: Here) -> State:
    one = Holder()
    values = {id(one): 1.0}
    return (lambda: values[id(one)]), (lambda k: values.update({id(one): float(k)}))


@kind()
def set_of_equal_length(here: Here) -> State:
    values = {1.0, 0.5}

    def change(k: int) -> None:
        values.discard(max(values))
        values.add(float(k))

    return (lambda: max(values)), change


@kind()
def member_of_a_set(here: Here) -> State:
    values = {"a"}

    def change(k: int) -> None:
        values.clear()
        values.add("b" if even(k) else "a")

    return (lambda: 2.0 if "b" in values else 1.0), change


@kind()
def set_of_frozen_sets(here: Here) -> State:
    values = [{frozenset({"a"})}]

    def change(k: int) -> None:
        values[0] = {frozenset({"b" if even(k) else "a"})}

    return (lambda: 2.0 if frozenset("b") in values[0] else 1.0), change


@kind()
def double_ended_queue(here: Here) -> State:
    values = collections.deque([1.0])
    return (lambda: values[0]), (lambda k: values.__setitem__(0, float(k)))


@kind()
def double_ended_queue_rotated(here: Here) -> State:
    values = collections.deque([1.0, 2.0, 3.0])
    return (lambda: values[0] + 2 * sum(values)), (lambda k: values.rotate(1))


@kind()
def default_dictionary(here: Here) -> State:
    values: Any = collections.defaultdict(lambda: 1.0, a=1.0)
    return (lambda: values["a"]), (lambda k: values.__setitem__("a", float(k)))


@kind()
def factory_of_a_default_dictionary(here: Here) -> State:
    values: Any = collections.defaultdict(lambda: 1.0)

    def change(k: int) -> None:
        values.default_factory = lambda: float(k)

    # What was missing is not kept, as that would change the dictionary.
    return (lambda: values.default_factory()), change


@kind()
def chain_of_dictionaries(here: Here) -> State:
    base = {"v": 1.0}
    values: Any = collections.ChainMap({}, base)
    return (lambda: values["v"]), (lambda k: base.__setitem__("v", float(k)))


@kind()
def chain_of_dictionaries_hidden(here: Here) -> State:
    values = collections.ChainMap({}, {"v": 1.0})
    return (lambda: values["v"]), (lambda k: values.__setitem__("v", float(k)))


@kind()
def counter(here: Here) -> State:
    values = collections.Counter("a")
    return (lambda: values["a"]), (lambda k: values.update("a"))


@kind()
def counter_of_what_is_missing(here: Here) -> State:
    values = collections.Counter("a")
    return (lambda: values["b"] + 1), (lambda k: values.update("b"))


@kind()
def user_dictionary(here: Here) -> State:
    values: Any = collections.UserDict(a=1.0)
    return (lambda: values["a"]), (lambda k: values.__setitem__("a", float(k)))


@kind()
def user_list(here: Here) -> State:
    values = collections.UserList([1.0])
    return (lambda: values[0]), (lambda k: values.__setitem__(0, float(k)))


@kind()
def subclass_of_dict(here: Here) -> State:
    class Config(dict[str, float]):
        def __getattr__(self, name: str) -> float:
            return self[name]

    config = Config(scale=1.0)
    return (lambda: config.scale), (lambda k: config.update(scale=float(k)))


@kind()
def subclass_of_dict_with_missing(here: Here) -> State:
    class Config(dict[str, float]):
        other = 1.0

        def __missing__(self, key: str) -> float:
            return self.other

    config = Config()
    return (lambda: config["a"]), (lambda k: setattr(config, "other", float(k)))


@kind()
def subclass_of_dict_filled_from_c(here: Here) -> State:
    class Config(dict[str, float]):
        def __getitem__(self, key: str) -> float:
            return 2 * super().__getitem__(key)

    config = Config(a=1.0)
    return (lambda: config["a"]), (lambda k: dict.__setitem__(config, "a", float(k)))


@kind()
def subclass_of_list(here: Here) -> State:
    class Values(list[float]):
        def total(self) -> float:
            return sum(self)

    values = Values([1.0])
    return (lambda: values.total()), (lambda k: values.__setitem__(0, float(k)))


@kind()
def subclass_of_set(here: Here) -> State:
    class Values(set[float]):
        pass

    values = Values([1.0])
    return (lambda: max(values)), (lambda k: (values.clear(), values.add(float(k))))


@kind()
def named_tuple_swapped(here: Here) -> State:
    Point = collections.namedtuple("Point", "x y")
    box = Holder(Point(1.0, 2.0))
    return (lambda: box.v.x), (lambda k: setattr(box, "v", box.v._replace(x=float(k))))


@kind()
def mapping_proxy(here: Here) -> State:
    values = {"a": 1.0}
    proxy = types.MappingProxyType(values)
    return (lambda: proxy["a"]), (lambda k: values.update(a=float(k)))


@kind()
def mapping_proxy_of_a_class(here: Here) -> State:
    class Config:
        scale = 1.0

    return (lambda: vars(Config)["scale"]), (lambda k: setattr(Config, "scale", float(k)))


@kind()
def deep_copy(here: Here) -> State:
    values = {"a": [1.0]}
    return (lambda: copy.deepcopy(values)["a"][0]), (lambda k: values["a"].__setitem__(0, float(k)))


@kind("guarded or recorded", "copy")
def deep_copy_of_an_object(here: Here) -> State:
    box = Holder([1.0])
    return (lambda: copy.deepcopy(box).v[0]), (lambda k: box.v.__setitem__(0, float(k)))


@kind("guarded or recorded", "pickle")
def pickled_object(here: Here) -> State:
    box = Holder([1.0])
    return (lambda: zlib.crc32(pickle.dumps(box.v)) % 1000), (lambda k: box.v.__setitem__(0, float(k)))


@kind()
def text_that_is_matched(here: Here) -> State:
    box = Holder("a1")
    return (lambda: float(re.match("a([0-9]+)", box.v)[1])), (lambda k: setattr(box, "v", f"a{k}"))


@kind()
def weak_reference(here: Here) -> State:
    box = Holder()
    weak = weakref.ref(box)
    return (lambda: weak().v), (lambda k: setattr(box, "v", float(k)))  # type: ignore[union-attr]


@kind("guarded or recorded", "weak")
def weak_proxy(here: Here) -> State:
    box = Holder()
    weak = weakref.proxy(box)
    return (lambda: weak.v), (lambda k: setattr(box, "v", float(k)))


@kind("guarded or recorded", "weak")
def weak_values(here: Here) -> State:
    boxes = [Holder()]
    values = weakref.WeakValueDictionary({"a": boxes[0]})

    def change(k: int) -> None:
        boxes[0] = values["a"] = Holder(float(k))

    return (lambda: values["a"].v), change


@kind("guarded or recorded", "weak")
def weak_keys(here: Here) -> State:
    box = Holder()
    values = weakref.WeakKeyDictionary({box: 1.0})
    return (lambda: values[box]), (lambda k: values.__setitem__(box, float(k)))


@kind("guarded or recorded", "weak")
def weak_set(here: Here) -> State:
    boxes = [Holder()]
    values = weakref.WeakSet(boxes)

    def change(k: int) -> None:
        boxes.append(Holder())
        values.add(boxes[-1])

    return (lambda: len(values)), change


@kind()
def getter_of_attributes(here: Here) -> State:
    box, getter = Holder(Holder()), operator.attrgetter("v.v")
    return (lambda: getter(box)), (lambda k: setattr(box.v, "v", float(k)))


@kind()
def caller_of_methods(here: Here) -> State:
    values, caller = {"a": 1.0}, operator.methodcaller("get", "a")
    return (lambda: caller(values)), (lambda k: values.update(a=float(k)))
