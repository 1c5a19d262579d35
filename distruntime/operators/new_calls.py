"""The slow path: a call whose signature is new, or that never has one.

It finds out what the call returns, gives it a template, remembers both under its signature, and issues it.
Operators that do not travel as they are stand in `special.SPECIAL`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..errors import PlacementError
from ..log.handle import REMOTE_TYPES, Residence
from ..log.line import user_line
from ..log.log import relieve
from ..log.read_only import require_writable
from ..log.spec import Spec, spec_from_wire
from ..session.session import active_session
from ..wire.messages import CHECK, WATCH
from .ask_worker import ask
from .defined import call_defined
from .explicit import WORKERS_DEFAULT, depends, promoted, to_promote, with_dtype
from .member_views import names_member
from .owners import owner
from .propagate import NeedsWorker, New, Outcome, Result, aliases, propagate, tensors_of
from .proxies import wrap
from .signatures import Call, emit, entry_for, results_pattern, template
from .transfer import upload

_MOST_SIGNATURES = 1 << 16
_Generator = torch._C.Generator

# Calls with numbers that differ from member to member go to what stands here; see torch_dtensor.py.
for_each_member: list[Callable[..., Any]] = []

# Calls with a `torch.Generator` go to what stands here; see backend/generators.py.
draws: list[Callable[..., Any]] = []

# These operators take index tensors from anywhere, as CUDA's do.
_INDEXED = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
    "aten::_unsafe_index_put",
}


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
        entry = where.signatures.get(signature)
    except (TypeError, AttributeError):
        # There is nothing to look up, as on the hot path.
        entry = None
    if entry is not None:
        relieve(where.node)
        return emit(cls, entry, words, args, kwargs, where, user_line())
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
        moved = _elsewhere(cls, func, args, kwargs, place, target)
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
    entry: Any = place.unproven.get(signature) if signature is not None else None
    try:
        outcome = (
            propagate(func, args, kwargs, lambda t: t._handle.spec, place.has_cpu_kernels)
            if entry is None
            else entry[3]
        )
    except NeedsWorker:
        # Fused optimizers return nothing, so there is nothing to predict.
        if not func._schema.returns:
            return _issue_new(made, Outcome([], False, aliases(func, args, kwargs)[1], ()))
        return ask(made)
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
    if entry is not None:
        return _issue_new(made, outcome)
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
        words.insert(0, number)
        entry = entry_for(func, cls, args, number, outcome)
        fresh = [r for r in _flat(outcome.results) if isinstance(r, New)]
        # The keys -0j and 0j are one, so complex numbers are not remembered.
        if call.signature is not None and not any(isinstance(a, complex) for a in args):
            if len(place.signatures) >= _MOST_SIGNATURES:
                place.signatures.clear()
            if fresh and all(r.alias is None for r in fresh):
                place.unproven[call.signature] = entry
                correct = _corrector(place.unproven, place.signatures, call.signature, cls, func, args)
                # The number of the template stands behind CHECK, which is 0, the word that emit writes first.
                words[:0] = [CHECK, node.check(correct), [r.spec.wire() for r in fresh]]
                entry = (CHECK, *entry[1:])
                return emit(cls, entry, words, args, kwargs, place, call.line)
            place.signatures[call.signature] = entry
        # Emit writes the first word, and the number of the template stands behind it.
        words.insert(0, WATCH)
        return emit(cls, (WATCH, *entry[1:]), words, args, kwargs, place, call.line)


def _corrector(
    unproven: dict[tuple[object, ...], object],
    cache: dict[tuple[object, ...], object],
    signature: tuple[object, ...],
    cls: type,
    func: torch._ops.OpOverload,
    args: Sequence[Any],
) -> Callable[[int | None, list[Any]], None]:
    """Return what moves a signature into the cache, with its results' real metadata. It holds no proxy."""
    shape = [_Placeholder if type(a) is cls else a if not isinstance(a, (list, tuple)) else [] for a in args]

    def correct(result: int | None, fields: list[object]) -> None:
        entry: Any = unproven.get(signature)
        # It is forgotten, or an earlier call of this signature has proven it.
        if entry is None:
            return
        if result is None:
            cache[signature] = unproven.pop(signature)
            return
        number, _, _, outcome, _ = entry
        position = iter(range(1 << 30))
        mended = Outcome(
            [_mend(r, result, fields, position) for r in outcome.results],
            outcome.single,
            outcome.written,
            outcome.reshaped,
            outcome.rebased,
        )
        unproven[signature] = entry_for(func, _Placeholder, shape, number, mended)

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
        entry: Any = place.signatures.get(signature)
    except TypeError:
        # A size that differs from member to member has no hash.
        return for_each_member[0](func, args, kwargs, place)
    if entry is None:
        return call(cls, func, args, kwargs, place, signature)
    relieve(place.node)
    return emit(cls, entry, words, (), None, place, user_line())


def common_place(
    cls: Any, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> Residence:
    """Return the place that all remote operands share.

    Raise `PlacementError` if they do not share one, or the session's own error.
    """
    remote = [(name, t) for name, t in named_tensors(func, args, kwargs) if type(t) is cls]
    first_name, first = remote[0]
    place: Residence = first._handle.place
    place.node.session.require_open()
    for name, t in remote[1:]:
        other: Residence = t._handle.place
        other.node.session.require_open()
        if other is not place:
            place.node.require_alive()
            other.node.require_alive()
            whose = [(word, owner(operand)) for word, operand in ((first_name, first), (name, t))]
            raise PlacementError(
                _different(func, first_name, place, name, other, t._handle.spec)
                + "".join(f"\n  `{word}` is {owned[0]}" for word, owned in whose if owned is not None)
            )
    place.node.require_alive()
    return place


def _different(
    func: torch._ops.OpOverload, one: str, here: Residence, two: str, there: Residence, moved: Spec
) -> str:
    if here.node.members or there.node.members:
        return _different_members(func, one, here, two, there)
    apart = here.node is not there.node
    hosts = f" ({here.node.host})", f" ({there.node.host})"
    return (
        f"{func}: operands live on different {'nodes' if apart else 'devices'}: "
        f"`{one}` on {here.place}{hosts[0]}, `{two}` on {there.place}{hosts[1]}\n"
        f"  move one of them, for instance {two}.to({one}.device)      "
        f"(copies {moved.nbytes:,} B from {there.place} to {here.place})"
    )


def _different_members(
    func: torch._ops.OpOverload, one: str, here: Residence, two: str, there: Residence
) -> str:
    """Say which members two operands do not share."""
    sides = [list(home.node.members or [home.place]) for home in (here, there)]
    only = [[place for place in mine if place not in other] for mine, other in (sides, sides[::-1])]
    lines = [f"{func}: operands live on different members: `{one}` on {here.place}, `{two}` on {there.place}"]
    for name, places in zip((one, two), only):
        if places:
            lines.append(
                f"  only `{name}` is on {', '.join(map(str, places[:4]))}"
                + (f" and {len(places) - 4} more" if len(places) > 4 else "")
            )
    if not any(only):
        lines.append("  they are the same members in another order")
    if here.node.members and there.node.members:
        lines.append(
            "  tensors of meshes combine where all members match; make one of the other's: "
            "dr.from_shards([x.member(k), ...], mesh)"
        )
    else:
        mesh, plain = (one, two) if here.node.members else (two, one)
        lines.append(
            f"  send it to all of them, {plain}.to({mesh}.device), "
            f"or take one member's shard, {mesh}.member(k)"
        )
    return "\n".join(lines)


def named_tensors(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[tuple[str, Any]]:
    """Return the tensors of a call with the names that the operator's schema gives them, list members as
    `tensors[2]`.
    """
    found: list[tuple[str, Any]] = []
    names = [a.name for a in func._schema.arguments]
    for k, value in enumerate(args):
        _collect(found, names[k] if k < len(names) else f"argument {k}", value)
    for name, value in kwargs.items():
        _collect(found, name, value)
    return found


def _collect(found: list[tuple[str, Any]], name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.append((name, value))
    elif isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            _collect(found, f"{name}[{k}]", item)


def send_along(
    cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], place: Residence
) -> tuple[Any, Any]:
    """Return the arguments with local tensors sent to `place` where torch lets devices mix: zero-dimensional
    ones and indices.
    """
    written = set(aliases(func, args, kwargs)[1])
    for k, (name, t) in enumerate(named_tensors(func, args, kwargs)):
        if type(t) is cls:
            continue
        indexed = func._schema.name in _INDEXED and name.startswith("indices")
        if k in written or not (t.dim() == 0 or indexed) or t.device.type != "cpu":
            raise PlacementError(f"{func}: {_local(name, t, k in written, place)}")
    sent: tuple[Any, Any] = tree_map_only(
        torch.Tensor,
        lambda t: t if type(t) is cls else wrap(cls, upload(t, place)),
        (list(args), dict(kwargs)),
    )
    return sent


def _local(name: str, t: torch.Tensor, written: bool, place: Residence) -> str:
    """Say of a local operand what it is, and how it comes to where the others are."""
    others = f"the other operands live on {place.place}" + (
        "" if place.node.members else f" ({place.node.host})"
    )
    read = "or read the remote ones: dr.fetch(...)"
    owned = owner(t)
    if owned is not None:
        whose, module = owned
        return (
            f"`{name}` is {whose}: the module is still local, {others}\n"
            f'  send it there: {module}.to("{place.device}")      {read}'
        )
    if isinstance(t, torch.nn.Parameter):
        return (
            f"`{name}` {tuple(t.shape)} is a parameter of a module that is still local, {others}\n"
            f'  send the module there: module.to("{place.device}")      {read}'
        )
    what = "is local and written by this call" if written else f"is a local tensor on {t.device}"
    return (
        f"`{name}` {tuple(t.shape)} {what}, {others}\n"
        f'  send it there: {name}.to("{place.device}")      {read}'
    )


def _elsewhere(
    cls: type,
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    place: Residence,
    target: torch.device,
) -> Any:
    """Issue a `_like` or `new_` factory whose device is not its operand's.

    Only the operand's metadata counts.
    """
    if target.type in REMOTE_TYPES:
        there = active_session().places.meant(target)
        if there is place:
            if target == place.lazy:
                return NotImplemented
            return func(*args, **{**kwargs, "device": place.lazy})

        def twin(t: Any) -> torch.Tensor:
            return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=there.lazy)

        kwargs = {**kwargs, "device": there.lazy}
    else:

        def twin(t: Any) -> torch.Tensor:
            meta: torch.Tensor = t._handle.spec.meta()
            return meta

    margs, mkwargs = tree_map_only(cls, twin, (list(args), dict(kwargs)))
    return func(*margs, **mkwargs)
