"""The slow path: a call whose signature is new, or that never has one.

It finds out what the call returns, gives it a template, remembers both under its signature, and issues it. Operators that do not
travel as they are stand in `special.SPECIAL`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack
import torch
from torch.utils._pytree import tree_map_only

from .errors import InternalError, NotSupportedError, PlacementError
from .handle import Handle, Residence, Storage, next_ref
from .issue import issue, issue_draw
from .line import user_line
from .node import Line, Node
from .propagate import LENGTHS, LIARS, LOW_PRECISION_LIARS, NeedsWorker, New, Outcome, Result, Same, aliases, propagate, tensors_of
from .requests import Request
from .session import active_session
from .spec import Spec, spec_from_wire
from .stall import before_wait, note_wait
from .transfer import upload
from .wire.codec import OPERAND, pack_constant
from .wire.messages import CHECK, LEARN

HUGE = 1 << 50  # bytes that a wrapper's null storage claims, so that operators that change metadata can set any size
AUTOCAST_KEY: Any = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
AUTOCAST = torch._C.DispatchKeySet(AUTOCAST_KEY)  # on every proxy; torch looks at it while autocast of "remote" is on

_MOST_SIGNATURES = 1 << 16
_DRAWS = torch.Tag.nondeterministic_seeded

# template number; spec of the one new result, if that is all there is to it; position of the argument whose storage it shares, or
# None; the whole outcome; the operator, kept alive because the signature holds its id
Entry = tuple[int, "Spec | None", "int | None", Outcome, Any]

_make_wrapper: Any = torch.Tensor._make_wrapper_subclass
_BELOW_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)

# Operators that take index tensors from anywhere, as CUDA's do.
_INDEXED = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
    "aten::_unsafe_index_put",
}


def wrap_view(cls: Any, handle: Handle, base: Any) -> Any:
    """Return a new proxy for a view: under inference mode, a view of a normal tensor is a normal tensor."""
    if torch.is_inference_mode_enabled() and not base.is_inference():
        with torch.inference_mode(False):
            return wrap(cls, handle)
    return wrap(cls, handle)


def wrap(cls: Any, handle: Handle) -> Any:
    """Return a new proxy that owns `handle`."""
    spec, place = handle.spec, handle.place
    given = spec.size, spec.stride, spec.offset, None, spec.dtype, torch.strided, place.lazy
    out = _make_wrapper(cls, *given, _extra_dispatch_keys=AUTOCAST, storage_size=HUGE)
    if spec.bits:
        torch._C._set_conj(out, bool(spec.bits & 1))
        torch._C._set_neg(out, bool(spec.bits & 2))
    out._handle = handle
    return out


def reshape_wrapper(proxy: Any, spec: Spec) -> None:
    """Give a proxy other metadata, below Python dispatch."""
    proxy._handle.spec = spec
    torch.ops.aten.as_strided_.default.redispatch(_BELOW_PYTHON, proxy, spec.size, spec.stride, spec.offset)


def pattern(value: Any, cls: Any, words: list[Any]) -> Any:
    """Return an argument's part of a template, appending its operand words."""
    if type(value) is cls:
        words.append(value._handle.ref)
        return OPERAND
    if type(value) is float:
        words.append(value)
        return ["number"]
    if isinstance(value, (list, tuple)):
        return ["list", *(pattern(item, cls, words) for item in value)]
    if isinstance(value, torch.device):
        if value.type in ("lazy", "remote"):
            return ["device", active_session().numbered(value.index).place.device]
        return ["device", str(value)]
    if isinstance(value, torch.Generator):
        raise NotSupportedError(
            "a torch.Generator lives in this process and cannot drive draws on a worker: leave the argument out and seed with "
            "torch.manual_seed(...) or dr.manual_seed(...), which reach the workers"
        )
    try:
        return pack_constant(value)
    except TypeError as error:
        raise NotSupportedError(f"{error}; remote operators take tensors, numbers, strings, dtypes, devices and lists of them") from None


def _results_pattern(results: list[Result], single: bool) -> Any:
    shape = [_results_pattern(r, False) if isinstance(r, list) else 1 if isinstance(r, New) else 0 for r in results]
    return shape[0] if single else shape


def template(
    func: Any, cls: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Any, node: Node, name: str | None = None
) -> tuple[int, list[Any]]:
    """Return the number of the template for this call on the worker of `node`, and the operand words of the call."""
    words: list[Any] = []
    packed_args = [pattern(a, cls, words) for a in args]
    packed_kwargs = {k: pattern(a, cls, words) for k, a in kwargs.items()}
    if name is None:
        schema = func._schema
        name = f"{schema.name}.{schema.overload_name or 'default'}"
    fields = [name, packed_args, packed_kwargs, results]
    with node.lock:
        return node.template(msgpack.packb(fields), fields), words


def _flat(results: list[Result]) -> list[Result]:
    return [leaf for r in results for leaf in (_flat(r) if isinstance(r, list) else [r])]


def entry_for(func: Any, cls: Any, args: Sequence[Any], number: int, outcome: Outcome) -> Entry:
    """Return what the signature cache keeps for a call."""
    spec, alias = None, None
    only = outcome.results[0] if outcome.single else None
    if isinstance(only, New) and not only.spec.bits and not outcome.written and not outcome.reshaped:
        spec = only.spec
        if only.alias is not None:
            operands = [k for k, a in enumerate(args) if type(a) is cls]
            before = args[: operands[only.alias]] if only.alias < len(operands) else ()
            if only.alias >= len(operands) or any(isinstance(a, (list, tuple)) and tensors_of([a], {}) for a in before):
                spec = None  # the operand stands inside a list: the general way finds it
            else:
                alias = operands[only.alias]
    return number, spec, alias, outcome, func


def emit(cls: Any, entry: Entry, words: list[Any], args: Sequence[Any], kwargs: Any, place: Residence, line: Line) -> Any:
    """Issue an instruction of any outcome: several results, in-place, `out=`, changed metadata. Return what the operator returns."""
    number, _, _, outcome, _ = entry
    operands: list[Any] = (
        [a for a in args if type(a) is cls] if not kwargs and not any(type(a) is list for a in args) else tensors_of(args, kwargs or {})
    )
    words[0] = number
    fresh: list[Handle] = []

    built = [_build(cls, result, operands, words, fresh, place) for result in outcome.results]
    send = issue if place.node.order is None or _DRAWS not in entry[4].tags else issue_draw
    send(words, fresh, [t._handle for t in operands], [operands[k]._handle.storage for k in outcome.written], place, line)
    if outcome.rebased is not None:
        target, source = outcome.rebased
        operands[target]._handle.storage = operands[source]._handle.storage
    for k, spec in outcome.reshaped:
        reshape_wrapper(operands[k], spec)
    if outcome.single:
        return built[0]
    return tuple(built) if built else None


# A module's function, not a closure: one that calls itself is a reference cycle, which would hold its operands until a collection.
def _build(cls: Any, result: Result, operands: list[Any], words: list[Any], fresh: list[Handle], place: Residence) -> Any:
    if isinstance(result, New):
        storage = Storage(result.spec) if result.alias is None else operands[result.alias]._handle.storage
        handle = Handle(next_ref(), result.spec, place, storage)
        words.append(handle.ref)
        fresh.append(handle)
        return wrap(cls, handle) if result.alias is None else wrap_view(cls, handle, operands[result.alias])
    if isinstance(result, Same):
        return operands[result.operand]
    if isinstance(result, list):
        return [_build(cls, item, operands, words, fresh, place) for item in result]
    return None


def relieve(node: Node) -> None:
    """Block while the window of `node` is full. Not under its lock: whoever reads the acknowledgements needs that."""
    if node.busy:
        node.throttle(node)


def first_time(
    cls: Any,
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    signature: tuple[Any, ...],
    words: list[Any],
    known: Any,
    specials: Any,
) -> Any:
    """Issue a call that the hot path has not found; `known` is its place, or what stands for several.

    On a node with several streams the hot path finds nothing, so that a node with one pays nothing for the rules among them.
    """
    try:
        entry = known.known.get(signature)
    except (TypeError, AttributeError):  # as on the hot path
        entry = None
    if entry is not None:
        relieve(known.node)
        return emit(cls, entry, words, args, kwargs, known, user_line())
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
    remember = target is None or target.index == place.number
    return call(cls, func, args, kwargs, place, signature if remember else None)


def call(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: Residence, signature: tuple[Any, ...] | None) -> Any:
    """Propagate, remember and issue a call whose operands are all on `place`."""
    line = user_line()
    known = place.unproven.get(signature) if signature is not None else None
    if known is not None:
        return _issue_new(cls, func, args, kwargs, place, signature, line, known[3])
    try:
        outcome = propagate(func, args, kwargs, lambda t: t._handle.spec)
    except NeedsWorker:
        if not func._schema.returns:  # fused optimizers: there is nothing to predict
            outcome = Outcome([], False, aliases(func, args, kwargs)[1], ())
            return _issue_new(cls, func, args, kwargs, place, signature, line, outcome)
        return learn(cls, func, args, kwargs, place, signature, line)
    if any(a.kwarg_only and a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):  # out=
        if outcome.reshaped and func._schema.returns:  # meta kernels resize `out` to other strides than the real ones do
            return learn(cls, func, args, kwargs, place, None, line)
        if any(isinstance(a, float) for a in args):  # which may say how large `out` must be (arange), and are not in the signature
            signature = None
    return _issue_new(cls, func, args, kwargs, place, signature, line, outcome)


def _issue_new(
    cls: Any,
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    place: Residence,
    signature: tuple[Any, ...] | None,
    line: Line,
    outcome: Outcome,
) -> Any:
    """Give a call its template, remember both under its signature, and issue it."""
    node = place.node
    relieve(node)
    with node.lock:
        number, words = template(func, cls, args, kwargs, _results_pattern(outcome.results, outcome.single), node)
        words.insert(0, number)
        entry = entry_for(func, cls, args, number, outcome)
        fresh = [r for r in _flat(outcome.results) if isinstance(r, New)]
        if signature is not None and not any(isinstance(a, complex) for a in args):  # -0j == 0j as a key
            if len(place.known) >= _MOST_SIGNATURES:
                place.known.clear()
            if fresh and all(r.alias is None for r in fresh):
                place.unproven[signature] = entry
                correct = _corrector(place.unproven, place.known, signature, cls, func, args)
                words[:0] = [CHECK, node.check(correct), [r.spec.wire() for r in fresh]]
                return _emit_checked(cls, entry, words, args, kwargs, place, line)
            place.known[signature] = entry
        return emit(cls, entry, words, args, kwargs, place, line)


def _emit_checked(cls: Any, entry: Entry, words: list[Any], args: Sequence[Any], kwargs: Any, place: Residence, line: Line) -> Any:
    """As `emit`, for words that begin with CHECK: the template's number stands behind it."""
    return emit(cls, (CHECK, *entry[1:]), words, args, kwargs, place, line)  # CHECK is 0, the word that emit writes first


def _corrector(
    unproven: dict[tuple[Any, ...], Any],
    cache: dict[tuple[Any, ...], Any],
    signature: tuple[Any, ...],
    cls: Any,
    func: Any,
    args: Sequence[Any],
) -> Callable[[int | None, list[Any]], None]:
    """Return what moves a signature into the cache, with its results' real metadata. It holds no proxy."""
    shape = [_Placeholder if type(a) is cls else a if not isinstance(a, (list, tuple)) else [] for a in args]

    def correct(result: int | None, fields: list[Any]) -> None:
        entry = unproven.get(signature)
        if entry is None:  # forgotten, or an earlier call of this signature has proven it
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


def _mend(r: Result, result: int, fields: list[Any], position: Iterator[int]) -> Result:
    if isinstance(r, New):
        return New(spec_from_wire(fields), r.alias) if next(position) == result else r
    return [_mend(item, result, fields, position) for item in r] if isinstance(r, list) else r


class _Placeholder:
    """Stands for a proxy in a remembered argument list."""


def learn(
    cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: Residence, signature: tuple[Any, ...] | None, line: Line
) -> Any:
    """Issue a call whose results only the worker can describe, and wait for the description: one round trip."""
    before_wait(f"{func} (its results depend on data)")
    node = place.node
    schema = func._schema
    _, written, shared = aliases(func, args, kwargs)
    operands: list[Any] = tensors_of(args, kwargs)
    listed = any(str(r.type) == "List[Tensor]" for r in schema.returns)
    if listed and schema.name not in LENGTHS:
        raise NotSupportedError(f"{func} returns a list whose length depends on data; fetch its operands and call it locally")
    count = LENGTHS[schema.name](args) if listed else len(schema.returns)
    returns = list(schema.returns) * count if listed else schema.returns
    shared = shared * count if listed else shared
    with node.lock:
        number, words = template(func, cls, args, kwargs, 1 if count == 1 and not listed else [1] * count, node)
        handles = [Handle(next_ref(), PENDING, place, Storage(PENDING)) for _ in range(count)]
        words = [number, *words, *(h.ref for h in handles)]
        storages = [operands[k]._handle.storage for k in written]
        request = ask_specs(words, handles, [t._handle for t in operands], storages, place, line)
    described = await_specs(request, count, node, func)
    out: list[Any] = []
    results: list[Result] = []
    for handle, fields, argument, alias in zip(handles, described, returns, shared):
        if not isinstance(fields, list) or not fields or isinstance(fields[0], str):
            out.append(complex(fields[1], fields[2]) if isinstance(fields, list) and fields and fields[0] == "complex" else fields)
            results.append(None)
            continue
        handle.spec = spec_from_wire(fields)
        if argument.alias_info is not None and argument.alias_info.is_write and alias is not None:
            target = operands[alias]
            if target._handle.spec is not handle.spec:
                reshape_wrapper(target, handle.spec)
            out.append(target)
            results.append(Same(alias))
            continue
        if alias is not None:
            handle.storage = operands[alias]._handle.storage
        else:
            handle.storage.spec = handle.spec
        out.append(wrap(cls, handle))
        results.append(New(handle.spec, alias))
    if (
        signature is not None and (schema.name in LIARS or schema.name in LOW_PRECISION_LIARS) and not written
    ):  # deterministic: only the meta kernel was wrong
        outcome = Outcome(results, count == 1, (), ())
        with node.lock:
            number, _ = template(func, cls, args, kwargs, _results_pattern(results, count == 1), node)
            place.known[signature] = entry_for(func, cls, args, number, outcome)
    if listed:
        return out
    return out[0] if count == 1 else tuple(out)


def ask_specs(
    words: list[Any], fresh: list[Handle], operands: Sequence[Handle], written: Sequence[Storage], place: Residence, line: Line
) -> Request:
    """Issue an instruction whose results its worker is to describe."""
    node = place.node
    with node.lock:
        request: Request = node.session.requests.new(node)
        issue([LEARN, request.number, *words], fresh, operands, written, place, line)
        node.flush()
    return request


def await_specs(request: Request, count: int, node: Node, func: Any) -> list[Any]:
    """Block until a worker has described an instruction's `count` results."""
    started = time.perf_counter()
    described = node.session.value(request)
    note_wait(f"{func}", started)
    if not isinstance(described, list) or len(described) != count:
        raise InternalError(f"a worker described {func} by {described!r}")
    return described


PENDING = Spec()
PENDING.size, PENDING.stride, PENDING.offset, PENDING.dtype, PENDING.bits = torch.Size((0,)), (1,), 0, torch.float32, 0


def create(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Issue a factory: a call without tensors whose device is remote."""
    place = active_session().numbered(kwargs["device"].index if kwargs.get("device") is not None else None)
    place.node.session.require_open()
    place.node.require_alive()
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    kwargs["device"] = place.lazy
    signature = (id(func), *(tuple(a) if isinstance(a, list) else a for a in args), *((k, type(v), v) for k, v in kwargs.items()))
    entry = place.known.get(signature)
    if entry is None:
        return call(cls, func, args, kwargs, place, signature)
    words: list[Any] = [0, *(a for a in args if type(a) is float), *(v for v in kwargs.values() if type(v) is float)]
    relieve(place.node)
    return emit(cls, entry, words, args, kwargs, place, user_line())


def common_place(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Residence:
    """Return the place that all remote operands share; raise `PlacementError` if they do not, or the session's own error."""
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
            raise PlacementError(_different(func, first_name, place, name, other, t._handle.spec))
    place.node.require_alive()
    return place


def _different(func: Any, one: str, here: Residence, two: str, there: Residence, moved: Spec) -> str:
    apart = here.node is not there.node
    hosts = f" ({here.node.host})", f" ({there.node.host})"
    return (
        f"{func}: operands live on different {'nodes' if apart else 'devices'}: "
        f"`{one}` on {here.place}{hosts[0]}, `{two}` on {there.place}{hosts[1]}\n"
        f"  move one of them, for instance {two}.to({one}.device)      (copies {moved.nbytes:,} B from {there.place} to {here.place})"
    )


def named_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the tensors of a call with the names that the operator's schema gives them, list members as `tensors[2]`."""
    found: list[tuple[str, Any]] = []
    names = [a.name for a in func._schema.arguments]
    for k, value in enumerate(args):
        _look(found, names[k] if k < len(names) else f"argument {k}", value)
    for name, value in kwargs.items():
        _look(found, name, value)
    return found


def _look(found: list[tuple[str, Any]], name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.append((name, value))
    elif isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            _look(found, f"{name}[{k}]", item)


def send_along(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: Residence) -> tuple[Any, Any]:
    """Return the arguments with local tensors sent to `place` where torch lets devices mix: zero-dimensional ones and indices."""
    written = set(aliases(func, args, kwargs)[1])
    for k, (name, t) in enumerate(named_tensors(func, args, kwargs)):
        if type(t) is cls:
            continue
        indexed = func._schema.name in _INDEXED and name.startswith("indices")
        if k in written or not (t.dim() == 0 or indexed) or t.device.type != "cpu":
            what = "is local and written by this call" if k in written else f"is a local tensor on {t.device}"
            raise PlacementError(
                f"{func}: `{name}` {tuple(t.shape)} {what}, the other operands live on {place.place} ({place.node.host})\n"
                f'  send it there: {name}.to("{place.device}")      or read the remote ones: dr.fetch(...)'
            )
    sent: tuple[Any, Any] = tree_map_only(
        torch.Tensor, lambda t: t if type(t) is cls else wrap(cls, upload(t, place)), (list(args), dict(kwargs))
    )
    return sent


def _elsewhere(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: Residence, target: torch.device) -> Any:
    """Issue a `_like` or `new_` factory whose device is not its operand's: only the operand's metadata counts."""
    if target.type in ("remote", "lazy"):
        there = active_session().numbered(target.index)
        if there is place:
            if target == place.lazy:
                return NotImplemented
            return func(*args, **{**kwargs, "device": place.lazy})
        twin = lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=there.lazy)  # noqa: E731
        kwargs = {**kwargs, "device": there.lazy}
    else:
        twin = lambda t: t._handle.spec.meta()  # noqa: E731
    margs, mkwargs = tree_map_only(cls, twin, (list(args), dict(kwargs)))
    return func(*margs, **mkwargs)
