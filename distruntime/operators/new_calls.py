"""The slow path: a call whose signature is new, or that never has one.

It finds out what the call returns, gives it a template, remembers both under its signature, and issues it.
Operators that do not travel as they are stand in `special.SPECIAL`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..log.handle import Residence
from ..log.line import Line, user_line
from ..log.log import relieve
from ..log.spec import spec_from_wire
from ..log.storage import require_writable
from ..log.templates import Correct
from ..wire.messages import CHECK, WATCH
from .alias_info import aliases, tensors_of, writes_lists
from .ask_worker import ask
from .common_place import common_place, elsewhere, send_along
from .defined import call_defined
from .explicit import WORKERS_DEFAULT, depends, promoted, to_promote, with_dtype
from .member_views import names_member
from .propagate import NeedsWorker, New, Outcome, Result, propagate
from .signatures import Call, Entry, emit, entry_for, results_pattern, template

_MOST_SIGNATURES = 1 << 16


class Unproven(NamedTuple):
    """What is remembered of a call until the worker has confirmed its results' metadata."""

    entry: Entry
    # It is the entry with CHECK for its template.
    checked: Entry
    # These are the specs of its new results, as they travel.
    predicted: list[object]
    correct: Correct


_Generator = torch._C.Generator

# Calls with numbers that differ from member to member go to what stands here; see torch_dtensor.py.
for_each_member: list[Callable[..., Any]] = []

# Calls with a `torch.Generator` go to what stands here; see backend/generators.py.
draws: list[Callable[..., Any]] = []


def _flat(results: list[Result]) -> list[Result]:
    return [leaf for r in results for leaf in (_flat(r) if isinstance(r, list) else [r])]


def _generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """Return the generator among the arguments of a call; some operators take it by position."""
    for value in (*args, *kwargs.values()):
        # Its metaclass answers `isinstance` in Python, which takes 2 us for each argument.
        if _Generator in type(value).__mro__:
            found: torch.Generator = value
            return found
    return None


def _complex(values: Sequence[Any]) -> bool:
    """Whether there are complex numbers among the arguments, or in their lists."""
    return any(
        isinstance(a, complex) or (isinstance(a, (list, tuple)) and any(type(item) is complex for item in a))
        for a in values
    )


def _vary(values: Sequence[Any]) -> bool:
    """Whether numbers among the arguments differ from member to member."""
    return any(
        (type(a) is torch.SymInt and not names_member(a))
        or (type(a) is list and any(type(item) is torch.SymInt for item in a))
        for a in values
    )


def first_time(
    cls: type,
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    signature: tuple[object, ...],
    words: list[object],
    where: Any,
    specials: Mapping[str, Callable[..., Any]],
) -> Any:
    """Issue a call that the hot path has not found; `where` is its place, or what stands for several.

    On a node with several streams the hot path finds nothing, so that a node with one pays nothing for the
    rules among them.
    """
    try:
        entry = where.signatures.get(signature) or where.unproven.get(signature)
    except (TypeError, AttributeError):
        # There is nothing to look up, as on the hot path.
        entry = None
    if entry is not None:
        return _issue_known(cls, entry, words, args, kwargs, where)
    if for_each_member and _vary((*args, *kwargs.values())):
        return for_each_member[0](func, args, kwargs)
    generator = _generator(args, kwargs)
    if generator is not None and draws:
        drawn = draws[0](generator, func, args, kwargs, lambda: common_place(cls, func, args, kwargs))
        if drawn is not NotImplemented:
            return drawn
    special = specials.get(func._schema.name)
    if special is not None:
        done = special(cls, func, args, kwargs)
        if done is not NotImplemented:
            return done
    place = common_place(cls, func, args, kwargs)
    target = kwargs.get("device")
    if target is not None:
        moved = elsewhere(cls, func, args, kwargs, place, target)
        if moved is not NotImplemented:
            return moved
    local = [t for t in tensors_of(args, kwargs) if type(t) is not cls]
    if local:
        args, kwargs = send_along(cls, func, args, kwargs, place)
        return func(*args, **kwargs)
    if not func._schema.name.startswith("aten::"):
        done = call_defined(func, args, kwargs, place)
        if done is not NotImplemented:
            return done
    remember = target is None or target in (place.lazy, place.device)
    return call(cls, func, args, kwargs, place, signature if remember else None)


def call(
    cls: type,
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    place: Residence,
    signature: tuple[object, ...] | None,
) -> Any:
    """Propagate, remember and issue a call whose operands are all on `place`."""
    tables, default = place.tables, torch.get_default_dtype()
    if signature in place.promoted:
        args, kwargs = promoted(args, kwargs, place.promoted[signature])
        return func(*args, **kwargs)
    # Another thread is changing the default dtype just now, and these tables do not follow it yet.
    if place.default is not default:
        signature = None
    made = Call(cls, func, args, kwargs, place, signature, user_line())
    try:
        outcome = propagate(func, args, kwargs, lambda t: t._handle.spec, place.has_cpu_kernels)
    except NeedsWorker:
        # Fused optimizers return nothing, so there is nothing to predict.
        if not func._schema.returns:
            written = aliases(func, args, kwargs)[1]
            return _issue_new(made, Outcome([], False, written, (), listed=writes_lists(func)))
        # In inference mode a composite comes here whole. Its parts may say how many results they have.
        parts = func.decompose(*args, **kwargs)
        return ask(made) if parts is NotImplemented else parts
    # Another thread has changed the default dtype meanwhile.
    if place.tables is not tables:
        made = replace(made, signature=None)
    if default is not WORKERS_DEFAULT and depends(func, args, kwargs, outcome):
        named = with_dtype(func, args, kwargs, outcome)
        integers = (
            to_promote(func, args, kwargs, outcome, place.has_cpu_kernels) if named is None else frozenset()
        )
        if integers:
            if made.signature is not None:
                if len(place.promoted) >= _MOST_SIGNATURES:
                    place.promoted.clear()
                place.promoted[made.signature] = integers
            args, kwargs = promoted(args, kwargs, integers)
            return func(*args, **kwargs)
        made = replace(made, kwargs=named or kwargs)
    # This is `out=`.
    if any(
        a.kwarg_only and a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
    ):
        # Meta kernels resize `out` to other strides than the real ones do.
        if outcome.reshaped and func._schema.returns:
            return ask(replace(made, signature=None))
        # Such numbers may say how large `out` must be (arange), and are not in the signature.
        if any(isinstance(a, float) for a in args):
            made = replace(made, signature=None)
    return _issue_new(made, outcome)


def _issue_new(call: Call, outcome: Outcome) -> Any:
    """Give a call its template, remember both under its signature, and issue it."""
    cls, func, args, kwargs, place = call.cls, call.func, call.args, call.kwargs, call.place
    node = place.node
    # This comes before anything is noted of a call that will not be.
    if outcome.written:
        operands: list[Any] = tensors_of(args, kwargs)
        require_writable([operands[k]._handle.storage for k in outcome.written], call.line)
    relieve(node)
    with node.lock:
        number, words = template(
            func, cls, args, kwargs, results_pattern(outcome.results, outcome.single, outcome.written), node
        )
        entry = entry_for(func, cls, args, number, outcome)
        fresh = [r for r in _flat(outcome.results) if isinstance(r, New)]
        # The keys -0j and 0j are one, so complex numbers are not remembered.
        if call.signature is not None and not _complex((*args, *kwargs.values())):
            if len(place.signatures) >= _MOST_SIGNATURES:
                place.signatures.clear()
            if fresh and all(r.alias is None for r in fresh):
                correct = _corrector(place.unproven, place.signatures, call.signature, cls, func, args)
                unproven = place.unproven[call.signature] = _unproven(entry, correct)
                words.insert(0, CHECK)
                return _issue_unproven(cls, unproven, words, args, kwargs, place, call.line)
            place.signatures[call.signature] = entry
        # Emit writes the first word, and the number of the template stands behind it.
        words[:0] = [WATCH, number]
        return emit(cls, (WATCH, *entry[1:]), words, args, kwargs, place, call.line)


def _issue_known(
    cls: type, known: Any, words: list[object], args: Sequence[Any], kwargs: Any, place: Residence
) -> Any:
    """Issue a call of which everything is remembered, whether the worker has confirmed it yet or not."""
    relieve(place.node)
    issue = _issue_unproven if type(known) is Unproven else emit
    return issue(cls, known, words, args, kwargs, place, user_line())


def _unproven(entry: Entry, correct: Correct) -> Unproven:
    fresh = [r for r in _flat(entry[3].results) if isinstance(r, New)]
    return Unproven(entry, (CHECK, *entry[1:]), [r.spec.wire() for r in fresh], correct)


def _issue_unproven(
    cls: type,
    unproven: Unproven,
    words: list[object],
    args: Sequence[Any],
    kwargs: Any,
    place: Residence,
    line: Line,
) -> Any:
    """Issue a call and have the worker check what its results are."""
    entry, checked, predicted, correct = unproven
    with place.node.lock:
        # Emit writes the first word, which is CHECK, and the number of the template stands behind it.
        words[:1] = [CHECK, place.node.checks.add(correct), predicted, entry[0]]
        return emit(cls, checked, words, args, kwargs, place, line)


def _corrector(
    unproven: dict[tuple[object, ...], Any],
    cache: dict[tuple[object, ...], object],
    signature: tuple[object, ...],
    cls: type,
    func: torch._ops.OpOverload,
    args: Sequence[Any],
) -> Callable[[int | None, list[Any]], None]:
    """Return what moves a signature into the cache, with its results' real metadata. It holds no proxy."""
    shape = [_Placeholder if type(a) is cls else a if not isinstance(a, (list, tuple)) else [] for a in args]

    def correct(result: int | None, fields: list[object]) -> None:
        known: Unproven | None = unproven.get(signature)
        # It is forgotten, or an earlier call of this signature has proven it.
        if known is None:
            return
        number, _, _, outcome, *_ = known.entry
        if result is None:
            cache[signature] = known.entry
            unproven.pop(signature)
            return
        position = iter(range(1 << 30))
        mended = replace(outcome, results=[_mend(r, result, fields, position) for r in outcome.results])
        unproven[signature] = _unproven(entry_for(func, _Placeholder, shape, number, mended), correct)

    return correct


def _mend(r: Result, result: int, fields: list[object], position: Iterator[int]) -> Result:
    if isinstance(r, New):
        return New(spec_from_wire(fields), r.alias) if next(position) == result else r
    return [_mend(item, result, fields, position) for item in r] if isinstance(r, list) else r


class _Placeholder:
    """Stands for a proxy in a remembered argument list."""


def first_of_factory(
    cls: type,
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    signature: tuple[object, ...],
    words: list[object],
    place: Residence,
) -> Any:
    """Issue a factory, a call without tensors, that the hot path has not found."""
    place.node.session.require_open()
    place.node.require_alive()
    generator = kwargs.get("generator")
    if generator is not None and draws:
        drawn = draws[0](generator, func, args, kwargs, lambda: place)
        if drawn is not NotImplemented:
            return drawn
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    kwargs["device"] = place.lazy
    try:
        known: Any = place.signatures.get(signature) or place.unproven.get(signature)
    except TypeError:
        # A size that differs from member to member has no hash.
        return for_each_member[0](func, args, kwargs, place)
    if known is None:
        return call(cls, func, args, kwargs, place, signature)
    return _issue_known(cls, known, words, (), None, place)
