"""A function of `dr.remote` runs with what it has captured as it is at each call, as in plain Python."""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import distruntime as dr

pytestmark = pytest.mark.usefixtures("session")

# A function, and what changes something that it has captured. The globals are a cell's own.
Kind = Callable[[dict[str, Any]], tuple[Callable[[], object], Callable[[], object]]]
KINDS: dict[str, Kind] = {}


def kind(made: Kind) -> Kind:
    KINDS[made.__name__] = made
    return made


def cell(space: dict[str, Any], text: str) -> None:
    """Run a cell of a notebook."""
    exec(compile(text, "<cell>", "exec"), space)


def of_cells(name: str, first: str, then: str) -> None:
    """Add a kind: a cell that defines `f`, and one that changes something."""

    def made(space: dict[str, Any]) -> tuple[Callable[[], object], Callable[[], object]]:
        cell(space, first)
        return space["f"], lambda: cell(space, then)

    KINDS[name] = made


of_cells("number", "k = 5\ndef f(): return k", "k = 7")
of_cells("number_of_another_type", "k = 1\ndef f(): return repr(k)", "k = 1.0")
of_cells("sign_of_zero", "k = 0.0\ndef f(): return repr(k)", "k = -0.0")
of_cells("bool", "k = 1\ndef f(): return repr(k)", "k = True")
of_cells("text", "k = 'a'\ndef f(): return k", "k = 'b'")
of_cells("dict_item", "cfg = {'lr': 1}\ndef f(): return cfg['lr']", "cfg['lr'] = 2")
of_cells("dict_order", "cfg = {'a': 1, 'b': 2}\ndef f(): return [*cfg]", "cfg['a'] = cfg.pop('a')")
of_cells("dict_key", "cfg = {1: 2}\ndef f(): return repr(cfg)", "cfg.clear(); cfg[True] = 2")
of_cells("nested", "cfg = {'a': [1, {'b': 2}]}\ndef f(): return cfg['a'][1]['b']", "cfg['a'][1]['b'] = 3")
of_cells("list", "xs = [1, 2]\ndef f(): return [*xs]", "xs.append(3)")
of_cells("tuple_of_lists", "xs = ([1],)\ndef f(): return xs[0][0]", "xs[0][0] = 4")
of_cells("set", "xs = {1}\ndef f(): return sorted(xs)", "xs.add(2)")
of_cells("helper", "def help(): return 1\ndef f(): return help()", "def help(): return 100")
of_cells("global_of_a_helper", "k = 1\ndef help(): return k\ndef f(): return help()", "k = 3")
of_cells(
    "helper_that_comes_later", "def f(): return help() if 'help' in globals() else 0", "def help(): return 4"
)
of_cells("builtin_that_is_hidden", "def f(): return len([1])", "def len(x): return 77")
of_cells(
    "global_that_goes", "k = 1\ndef f():\n    try: return k\n    except NameError: return 'gone'", "del k"
)
of_cells("function_inside", "k = 1\ndef f():\n    def g(): return k\n    return g()", "k = 2")
of_cells("recursion", "k = 1\ndef f(n=2): return k if n == 0 else f(n - 1)", "k = 6")
of_cells("cycle", "xs = [1]; xs.append(xs)\ndef f(): return xs[1][1][0]", "xs[0] = 2")
of_cells("attribute_of_a_function", "def f(): return f.n\nf.n = 1", "f.n = 2")
of_cells("defaults", "def f(x=1): return x", "f.__defaults__ = (2,)")
of_cells("mutable_default", "def f(x=[1]): return [*x]", "f.__defaults__[0].append(2)")
of_cells("kwdefaults", "def f(*, x=1): return x", "f.__kwdefaults__['x'] = 2")
of_cells("code", "def f(): return 1\ndef g(): return 2", "f.__code__ = g.__code__")
of_cells("class_redefined", "class C:\n    s = 1\ndef f(): return C().s", "class C:\n    s = 2")
of_cells("attribute_of_a_class", "class C:\n    s = 1\ndef f(): return C.s", "C.s = 5")
of_cells(
    "method_of_a_class",
    "class C:\n    def m(self): return 1\ndef f(): return C().m()",
    "C.m = lambda self: 2",
)
of_cells("base_class", "class A:\n    s = 1\nclass B(A): pass\ndef f(): return B.s", "A.s = 2")
of_cells(
    "globals_of_methods",
    "k = 1\nclass C:\n    @property\n    def p(self): return k\n    @staticmethod\n    def t(): return k\n"
    "    @classmethod\n    def c(cls): return k\ndef f(): return C().p, C.t(), C.c()",
    "k = 2",
)
of_cells("object", "class C: pass\nc = C(); c.a = 1\ndef f(): return c.a", "c.a = 2")
of_cells("new_attribute", "class C: pass\nc = C()\ndef f(): return getattr(c, 'a', 0)", "c.a = 2")
of_cells(
    "slots", "class C:\n    __slots__ = ('a',)\nc = C(); c.a = [1]\ndef f(): return [*c.a]", "c.a.append(2)"
)
of_cells("own_list", "class L(list): pass\nxs = L([1])\ndef f(): return [*xs]", "xs.append(2)")
of_cells("own_dict", "class D(dict): pass\nd = D(a=1); d.x = 1\ndef f(): return d['a'], d.x", "d.x = 2")
of_cells("lambda", "k = 1\nf = lambda: k", "k = 2")
of_cells(
    "object_that_leaves_out_its_cache",
    "class C:\n    def __init__(self): self.items = [1]\n"
    "    def __getstate__(self): return {'items': [*self.items]}\n"
    "c = C()\ndef f(): return [*c.items]",
    "c.items.append(2)",
)


@kind
def closure(space: dict[str, Any]) -> Any:
    k = 1

    def change() -> None:
        nonlocal k
        k = 2

    return lambda: k, change


@kind
def closure_in_a_closure(space: dict[str, Any]) -> Any:
    held = [1]

    def outer() -> Callable[[], int]:
        def inner() -> int:
            return held[0]

        return inner

    inner = outer()
    return lambda: inner() + 1, lambda: held.__setitem__(0, 5)


@kind
def bound_method(space: dict[str, Any]) -> Any:
    class Counter:
        n = 0

        def read(self) -> int:
            return self.n

    counter = Counter()
    return counter.read, lambda: setattr(counter, "n", 3)


@kind
def method_in_c(space: dict[str, Any]) -> Any:
    held = {"a": 1}
    get = held.get
    return lambda: get("a"), lambda: held.update(a=2)


@kind
def partial(space: dict[str, Any]) -> Any:
    held = [1]
    return functools.partial(sorted, held), lambda: held.append(0)


@kind
def dataclass(space: dict[str, Any]) -> Any:
    @dataclasses.dataclass
    class Config:
        lr: float = 1.0

    config = Config()
    return lambda: config.lr, lambda: setattr(config, "lr", 2.0)


@kind
def enumeration(space: dict[str, Any]) -> Any:
    chosen = [enum.Enum("Color", {"RED": 1})]
    return lambda: chosen[0].RED.value, lambda: chosen.__setitem__(0, enum.Enum("Color", {"RED": 2}))


@kind
def numpy_array(space: dict[str, Any]) -> Any:
    a = np.ones(3)
    return lambda: a.tolist(), lambda: a.__setitem__(0, 4.0)


@kind
def numpy_view(space: dict[str, Any]) -> Any:
    a = np.arange(6.0)
    half = a[::2]
    return lambda: half.tolist(), lambda: a.__setitem__(0, 4.0)


@kind
def numpy_shape(space: dict[str, Any]) -> Any:
    a = np.ones(4)
    return lambda: a.shape, lambda: a.resize((2, 2), refcheck=False)


@kind
def numpy_objects(space: dict[str, Any]) -> Any:
    a = np.array([{"a": 1}, None], dtype=object)
    return lambda: a[0]["a"], lambda: a[0].update(a=2)


@kind
def local_tensor(space: dict[str, Any]) -> Any:
    t = torch.ones(3)
    return lambda: t.tolist(), lambda: t.add_(1)


@kind
def tensor_through_numpy(space: dict[str, Any]) -> Any:
    t = torch.ones(3)
    return lambda: t.tolist(), lambda: t.numpy().__setitem__(0, 7.0)


@kind
def tensor_whose_data_is_replaced(space: dict[str, Any]) -> Any:
    t = torch.ones(3)
    return lambda: t.tolist(), lambda: setattr(t, "data", torch.zeros(2))


@kind
def large_tensor(space: dict[str, Any]) -> Any:
    t = torch.zeros(1 << 16)
    return lambda: t.sum().item(), lambda: t.add_(1)


@kind
def low_precision(space: dict[str, Any]) -> Any:
    t = torch.ones(2, 3, dtype=torch.bfloat16).t()
    return lambda: t.tolist(), lambda: t.data.mul_(2)


@kind
def local_module(space: dict[str, Any]) -> Any:
    module = torch.nn.Linear(2, 2)
    return lambda: module.weight.tolist(), lambda: module.weight.data.fill_(3.0)


@kind
def byte_array(space: dict[str, Any]) -> Any:
    b = bytearray(b"a")
    return lambda: bytes(b), lambda: b.append(66)


@kind
def array_of_python(space: dict[str, Any]) -> Any:
    a = array.array("d", [1.0])
    return lambda: a.tolist(), lambda: a.append(2.0)


@kind
def queue(space: dict[str, Any]) -> Any:
    q = collections.deque([1], maxlen=2)
    return lambda: [*q], lambda: q.append(2)


@kind
def ordered_dict(space: dict[str, Any]) -> Any:
    d = collections.OrderedDict(a=1, b=2)
    return lambda: [*d], lambda: d.move_to_end("a")


@kind
def counter(space: dict[str, Any]) -> Any:
    c = collections.Counter("aab")
    return lambda: dict(c), lambda: c.update("b")


@kind
def view_of_keys(space: dict[str, Any]) -> Any:
    d = {"a": 1}
    keys = d.keys()
    return lambda: [*keys], lambda: d.update(b=2)


@kind
def proxy_of_a_mapping(space: dict[str, Any]) -> Any:
    d = {"a": 1}
    proxy = types.MappingProxyType(d)
    return lambda: proxy["a"], lambda: d.update(a=2)


@kind
def generator_of_python(space: dict[str, Any]) -> Any:
    rng = random.Random(3)
    return lambda: rng.getstate()[1][:3], lambda: rng.seed(5)


@kind
def generator_of_numpy(space: dict[str, Any]) -> Any:
    rng = np.random.default_rng(3)
    return lambda: rng.bit_generator.state["state"]["state"], lambda: rng.random(7)


@kind
def iterator(space: dict[str, Any]) -> Any:
    numbers = iter([1, 2, 3])
    return lambda: numbers.__length_hint__(), lambda: next(numbers)


@kind
def module_that_was_made(space: dict[str, Any]) -> Any:
    module = types.ModuleType("made_here")
    module.k = 1  # type: ignore[attr-defined]
    return lambda: module.k, lambda: setattr(module, "k", 2)


@kind
def another_remote_function(space: dict[str, Any]) -> Any:
    held = [1]
    inner = dr.remote(lambda: held[0])

    def outer() -> object:
        return inner()

    def both() -> object:
        # On a worker it is the plain function, and here it would be a call.
        return held[0]

    return (outer, both), lambda: held.__setitem__(0, 2)


@pytest.mark.parametrize("name", KINDS)
def test_what_has_changed_is_what_the_next_call_sees(name: str) -> None:
    found, change = KINDS[name]({"__name__": "__main__"})
    f, plain = found if isinstance(found, tuple) else (found, found)
    # The state here stays as it is: a call there must not be one here.
    here = plain()
    there: Any = dr.remote(f, node=0)
    assert dr.fetch(there()) == here
    known = there.callee()
    assert there.callee() is known, "nothing has changed, and it was pickled again"
    change()
    changed = plain()
    assert changed != here or repr(changed) != repr(here), "the test changes nothing"
    got = dr.fetch(there())
    assert got == changed and repr(got) == repr(changed)
    assert there.callee() is there.callee() is not known
