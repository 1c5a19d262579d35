"""One test whether what a function can reach is as it was, compiled from a walk."""

from __future__ import annotations

import keyword
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial

import torch

from ..operators.proxies import reshapes
from .anchors import Anchor, anchored
from .arithmetic import Term
from .reachable import Reachable
from .seen import (
    LISTED,
    MISSING,
    PLAIN,
    TENSOR,
    Key,
    Seen,
    ask,
    content_of,
    elements_of,
    key_of,
    keys_of,
    looked_up,
    same,
)
from .specs import Specs

_thing = operator.attrgetter("thing")
_handle = operator.attrgetter("thing._handle")
_requires_grad = operator.attrgetter("thing.requires_grad")
# These attributes of many tensors are read by one loop in C.
_LOOPED = ("grad", "grad_fn", "_backward_hooks", "_post_accumulate_grad_hooks")
_LOOPED_OF_ANY = ("__class__", "__dict__", "__code__", "__defaults__", "__kwdefaults__")
_IDENTIFIER = re.compile(rf"(?!(?:{'|'.join(keyword.kwlist)})\Z)[a-zA-Z_]\w*\Z", re.ASCII).match
# So many conditions stand in one expression: one of thousands is too deep for the compiler.
_TOGETHER = 20


def settings() -> tuple[object, ...]:
    """Return what torch's own switches say, as far as they change which operators are issued."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.utils._device.CURRENT_DEVICE,
        torch.is_autocast_enabled("remote"),
        torch.get_autocast_dtype("remote"),
        torch.is_autocast_cache_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch._C._get_sdp_priority_order(),
        len(torch.nn.modules.module._global_forward_hooks),
        len(torch.nn.modules.module._global_forward_pre_hooks),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    )


def _dropped(kept: Sequence[Anchor[object]], counts: Sequence[int], returned: Sequence[int]) -> bool:
    """Whether nobody holds more or less but the caller, who has let go of what was returned."""
    # Before they are counted, nobody may be taken for alone.
    return len(counts) == len(kept) and all(
        count in (before, before - often)
        for count, before, often in zip(map(sys.getrefcount, map(_thing, kept)), counts, returned)
    )


class Guards:
    """The test of one plan.

    `free` are the reads of floats that may change, `steps` the tensors that count an optimizer's steps, and
    `made` the objects that the recorded call has made, by id.
    `kept` are the tensors that a replay gives other values, and the objects that hold them, by path: nobody
    else may hold them.
    """

    def __init__(
        self,
        reach: Reachable,
        reads: Mapping[Key, Seen],
        kept: Mapping[str, object],
        free: Collection[Term],
        steps: Container[int],
        made: Container[int],
    ) -> None:
        self._seen = _to_watch(reach, reads, free, steps, made)
        self._tensors = [anchored(tensor) for _, tensor in reach.tensors.values()]
        self._paths = [path for path, _ in reach.tensors.values()]
        self._handles = [*map(_handle, self._tensors)]
        self._specs = Specs(self._handles)
        self._gradients = [*map(_requires_grad, self._tensors)]
        self._settings = settings()
        self._kept, self._kept_paths = [*map(anchored, kept.values())], list(kept)
        self._counts: list[int] = []
        # What the call has returned may be held by its caller, or not: so often it is counted less then.
        self._returned: list[int] = []
        self.holds: Callable[[], bool] = self._compiled()

    def settle(self, returned: Iterable[object] = ()) -> None:
        """Note who holds what a replay changes: from now on nobody else may.

        `returned` is what the call returns, and holds now.
        """
        often = Counter(map(id, returned))
        self._counts[:] = map(sys.getrefcount, map(_thing, self._kept))
        self._returned[:] = [often[id(anchor.thing)] for anchor in self._kept]

    def count(self) -> int:
        """Return how many conditions the test has."""
        return len(self._seen) + 2 * len(self._tensors) + len(self._kept)

    def missed(self) -> str:
        """Say what is not as it was, or return nothing."""
        for one in self._seen:
            try:
                now = one.now()
            except (LookupError, AttributeError, ValueError):
                return f"{one.path} is gone"
            if one.form == "length" and now != one.value:
                return f"{one.path} had {one.value} items, and has {now} now"
            elif not one.is_as(one.value, now):
                shown = isinstance(one.value, PLAIN) and isinstance(now, PLAIN)
                return (
                    f"{one.path} was {one.value!r:.60}, and is {now!r:.60} now"
                    if shown
                    else (f"{one.path} is another object")
                )
        tensors = zip(self._paths, self._tensors, self._handles, self._specs.each(), self._gradients)
        for path, tensor, handle, alike, grad in tensors:
            if tensor.thing._handle is not handle:
                return f"{path} has another value: .data was assigned"
            if not alike:
                return f"{path} has another shape or other strides: they were changed in place"
            if tensor.thing.requires_grad != grad:
                return f"{path}.requires_grad has changed"
        counts = [*map(sys.getrefcount, map(_thing, self._kept))]
        for path, count, before, often in zip(self._kept_paths, counts, self._counts, self._returned):
            if count not in (before, before - often):
                return f"{path} is held elsewhere too, and a replay would change it there"
        if settings() != self._settings:
            return "a setting of torch has changed (grad mode, autocast, the default dtype, ...)"
        return ""

    def _compiled(self) -> Callable[[], bool]:
        asked = (same, content_of, looked_up, elements_of, keys_of, ask, settings)
        names: dict[str, object] = {
            **{function.__name__: function for function in asked},
            "before": self._settings,
            "tensors": self._tensors,
            "handles": self._handles,
            "specs": self._specs,
            "reshapes": reshapes,
            "gradients": self._gradients,
            "thing": _thing,
            "handle": _handle,
            "grad": _requires_grad,
            "is_": operator.is_,
            "count": sys.getrefcount,
            "kept": self._kept,
            "counts": self._counts,
            # A method of this object would be a cycle, which holds memory on workers.
            "dropped": partial(_dropped, self._kept, self._counts, self._returned),
        }
        known: dict[int, str] = {}

        def name(thing: object) -> str:
            found = known.get(id(thing))
            if found is None:
                found = known[id(thing)] = f"x{len(known)}"
                names[found] = thing
            return found

        conditions = self._conditions(names, name)
        conditions += [
            "all(map(is_, map(handle, tensors), handles))",
            "(reshapes.last is specs.known or specs.hold())",
            "list(map(grad, tensors)) == gradients",
            "settings() == before",
            "not any(empty)",
        ]
        lines = ["def test():", "    try:"]
        for k in range(0, len(conditions), _TOGETHER):
            lines.append(f"        if not ({' and '.join(conditions[k : k + _TOGETHER])}): return False")
        lines += [
            "    except (LookupError, AttributeError, ValueError):",
            "        return False",
            "    return list(map(count, map(thing, kept))) == counts or dropped()",
        ]
        # The text holds this module's words, counted names, numbers, quoted strings and identifiers.
        exec(compile("\n".join(lines), "<guards>", "exec"), names)
        # A function that its own globals name would be a cycle, which holds memory on workers.
        test: Callable[[], bool] = names.pop("test")  # type: ignore[assignment]
        return test

    def _conditions(self, names: dict[str, object], name: Callable[[object], str]) -> list[str]:
        """Return the conditions of what was seen. Those that are alike are one, which loops in C."""
        conditions: list[str] = []
        empty = names["empty"] = list[object]()
        classes = _Classes()
        # These are the owners and values of an attribute, by whether the values are anchors.
        looped: dict[tuple[str, bool], tuple[list[object], list[object]]] = {}
        for one in self._seen:
            if one.form == "length" and one.value == 0:
                empty.append(one.owner)
            elif one.form == "class" and not isinstance(one.value, PLAIN):
                classes.add(one)
            elif one.form == "attribute" and one.key in _LOOPED and isinstance(one.holder, Anchor):
                _gather(looped, (f"thing.{one.key}", isinstance(one.held, Anchor)), one)
            elif one.form == "attribute" and one.key in _LOOPED_OF_ANY:
                _gather(looped, (str(one.key), False), one)
            else:
                conditions.append(_condition(one, name))
        conditions += classes.conditions(name)
        for (key, tensors), (owners, values) in looped.items():
            loop = f"map({name(operator.attrgetter(key))}, {name(owners)})"
            wanted = f"map(thing, {name(values)})" if tensors else name(values)
            conditions.append(f"all(map(is_, {loop}, {wanted}))")
        return conditions


def _to_watch(
    reach: Reachable,
    reads: Mapping[Key, Seen],
    free: Collection[Term],
    steps: Container[int],
    made: Container[int],
) -> list[Seen]:
    """Return what decides what the function does: what it has read, and the tensors that it can reach.

    What C code reads of a tensor (a gradient, a hook) is seen by no tracer, so all of that counts. So does
    what this package's layers hold, and what stands in an object that the call itself has made: the next call
    may read it.
    """
    rest = dict(reads)
    freed: dict[Key, set[object]] = {}
    for kind, key, *index in free:
        if kind == "read":
            freed.setdefault(key, set()).add(index[0])  # type: ignore[arg-type]
    found = []
    for key, indices in freed.items():
        one = rest.pop(key)
        if None not in indices:
            # The other elements of the tuple stay as they are.
            given = (one, frozenset(indices))
            found.append(Seen(one.path, "given", _elements_but, given, _elements_but(*given)))
    for one in reach.seen:
        if key_of(one) in freed or id(one.owner) in steps:
            continue
        read = rest.pop(key_of(one), None)
        tensors = isinstance(one.holder, (Anchor, torch.Tensor)) or isinstance(one.held, Anchor)
        # torch's own C code reads the hooks of a tensor.
        if read is not None or tensors or "_hooks" in one.path or id(one.owner) in made:
            found.append(one)
        elif reach.own and reach.hidden(one.path):
            found.append(one)
    return found + reach.graphs + [one for one in rest.values() if one.held is not TENSOR]


def _elements_but(one: Seen, free: Container[object]) -> str:
    """Return what a tuple has, but for the floats that may change."""
    now = one.now()
    if type(now) is not type(one.value) or not isinstance(now, tuple):
        return ""
    fixed = [
        repr(value) if isinstance(value, PLAIN) else str(id(value))
        for k, value in enumerate(now)
        if k not in free
    ]
    return f"{len(now)} {fixed}"


def _gather(
    looped: dict[tuple[str, bool], tuple[list[object], list[object]]], kind: tuple[str, bool], one: Seen
) -> None:
    owners, values = looped.setdefault(kind, ([], []))
    owners.append(one.holder)
    values.append(one.held)


def _read(one: Seen, name: Callable[[object], str]) -> str:
    owner = _text(one.holder, name)
    key = str(one.key)
    match one.form:
        case "item":
            return f"{owner}[{_key(one, name)}]"
        case "class":
            return f"looked_up({owner}, {key!r})"
        case "attribute":
            # A name such as "learning-rate" is fine for setattr, and is no Python.
            return f"{owner}.{key}" if _IDENTIFIER(key) else f"getattr({owner}, {name(one.key)})"
        case "cell":
            return f"{owner}.cell_contents"
        case "length":
            return f"len({owner})"
        case "keys":
            return f"keys_of({owner})"
        case "elements":
            return f"elements_of({owner})"
        case "bytes":
            return f"content_of({owner})"
        case "given":
            return f"ask({owner}, {name(one.key)})"
    return f"{owner}._version"


def _key(one: Seen, name: Callable[[object], str]) -> str:
    return repr(one.key) if type(one.key) in (str, int) else name(one.key)


def _condition(one: Seen, name: Callable[[object], str]) -> str:
    read, value = _read(one, name), one.value
    if one.form in ("length", "version"):
        return f"{read} == {value}"
    if one.form == "bytes":
        return f"{read} == {name(value)}"
    if one.form in LISTED:
        # Its length is another condition.
        return f"all(map(is_, {read}, {name(value)}))"
    if one.form == "item" and value is MISSING:
        return f"{_key(one, name)} not in {_text(one.holder, name)}"
    if one.form == "attribute" and value is MISSING:
        return f"not hasattr({_text(one.holder, name)}, {one.key!r})"
    if one.form == "given" and isinstance(value, PLAIN):
        return f"same({read}, {name(value)})"
    if value is None or value is True or value is False:
        return f"{read} is {value}"
    if isinstance(value, PLAIN):
        return f"({read} is {name(value)} or same({read}, {name(value)}))"
    return f"{read} is {_text(one.held, name)}"


class _Classes:
    """What classes have under names, and under which names they have nothing: tests that loop in C."""

    def __init__(self) -> None:
        self._kinds: dict[type, None] = {}
        self._there: dict[tuple[type, str], object] = {}
        self._absent: dict[type, set[str]] = {}

    def add(self, one: Seen) -> None:
        """Note what a class has: the first of its bases that has the name, and that none before has it."""
        kind, name = one.owner, str(one.key)
        assert isinstance(kind, type)
        self._kinds[kind] = None
        for base in kind.__mro__:
            if name in vars(base):
                self._there[base, name] = one.value
                break
            self._absent.setdefault(base, set()).add(name)

    def conditions(self, name: Callable[[object], str]) -> list[str]:
        """Return the text of the tests."""
        if not self._kinds:
            return []
        kinds, orders = list(self._kinds), [kind.__mro__ for kind in self._kinds]
        views, absent = [vars(kind).keys() for kind in self._absent], list(self._absent.values())
        spaces = [vars(kind) for kind, _ in self._there]
        keys, values = [key for _, key in self._there], list(self._there.values())
        there = f"map({name(operator.getitem)}, {name(spaces)}, {name(keys)})"
        return [
            f"all(map(is_, map({name(operator.attrgetter('__mro__'))}, {name(kinds)}), {name(orders)}))",
            f"all(map({name(type({}.keys()).isdisjoint)}, {name(views)}, {name(absent)}))",
            f"all(map(is_, {there}, {name(values)}))",
        ]


def _text(thing: object, name: Callable[[object], str]) -> str:
    return f"{name(thing)}.thing" if isinstance(thing, Anchor) else name(thing)
