"""Templates of calls, what is remembered of a call under its signature, and issuing by it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import torch

from ..errors import NotSupportedError
from ..log.handle import REMOTE_TYPES, Handle, Place, Residence, kin_of, next_ref, relate
from ..log.issue import issue, template_number
from ..log.line import Line
from ..log.log import Log
from ..log.spec import Spec
from ..log.storage import Storage
from ..session.session import active_session
from ..wire.codec import KIN, OPERAND, pack_constant
from .alias_info import tensors_of
from .propagate import New, Outcome, Result, Same
from .proxies import reshape_wrapper, wrap, wrap_view
from .whole_numbers import takes

_inference = torch.is_inference_mode_enabled
# Below this key nothing is a view to autograd. torch excludes it in what Python dispatch runs.
_VIEWS: Any = torch._C.DispatchKey.ADInplaceOrView


class Multiple(NamedTuple):
    """What a call returns that makes several values, or none for a result that nobody wants, and no more."""

    specs: tuple[Spec | None, ...]
    # The results are a list.
    listed: bool


# This is what is remembered of a call: the number of its template, the spec of its one new result (if that is
# all there is to it), the position of the argument that shares its storage with the results (or None), the
# whole outcome, the operator, and its results if they are several (and that is all there is to it). Without
# new results, the position is that of the argument which is returned as it is. The signature holds the
# operator's id, so the operator is kept alive here.
Entry = tuple[int, "Spec | None", "int | None", Outcome, torch._ops.OpOverload, "Multiple | None"]


@dataclass(frozen=True)
class Call:
    """A call of an operator whose operands are all on one place. Without a signature it is not remembered."""

    cls: type
    func: torch._ops.OpOverload
    args: Sequence[Any]
    kwargs: dict[str, Any]
    place: Residence
    signature: tuple[object, ...] | None
    line: Line


def pattern(value: Any, cls: Any, words: list[object], numeric: bool = False) -> object:
    """Return an argument's part of a template, appending its operand words.

    `numeric` says that a whole number is one of them, as a fraction is.
    """
    if isinstance(value, cls):
        words.append(value._handle.ref)
        return OPERAND
    if type(value) is float or (numeric and type(value) is int):
        words.append(value)
        return ["number"]
    if isinstance(value, (list, tuple)):
        return ["list", *(pattern(item, cls, words) for item in value)]
    if isinstance(value, torch.device):
        if value.type in REMOTE_TYPES:
            # A mesh's place says "member".
            return ["device", active_session().places.meant(value).place.local_device]
        return ["device", str(value)]
    if isinstance(value, Place):
        # This process's torch may not know such a kind of device.
        return ["device", value.local_device]
    if isinstance(value, torch._C.Generator):
        raise NotSupportedError(
            "a generator of this process cannot drive draws on a worker: make one there, "
            'torch.Generator("remote:0"), or leave the argument out and seed with torch.manual_seed(...), '
            "which reaches the workers"
        )
    try:
        return pack_constant(value)
    except TypeError as error:
        raise NotSupportedError(
            f"{error}; remote operators take tensors, numbers, strings, dtypes, devices and lists of them"
        ) from None


def results_pattern(results: list[Result], single: bool, written: Sequence[int] = ()) -> object:
    """Return the results' part of a template.

    It has 1 for what gets a ref, 0 for what does not, and lists as they are. It is `KIN` for an operator that
    only checks: one that returns nothing and writes none of its operands.
    """
    if not results and not written:
        return KIN
    shape = [_result_pattern(result) for result in results]
    return shape[0] if single else shape


def _result_pattern(result: Result) -> object:
    if isinstance(result, list):
        # It may be empty, as the rows of a tensor without rows are. Then it is no check, and has no kin.
        return [_result_pattern(one) for one in result]
    return 1 if isinstance(result, New) else 0


def template(
    func: torch._ops.OpOverload | None,
    cls: type,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    results: object,
    node: Log,
    name: str | None = None,
) -> tuple[int, list[object]]:
    """Return the number of the template for this call on the worker of `node`, and the operand words of the
    call.
    """
    words: list[object] = []
    numeric = func is not None and takes(func)
    packed_args = [pattern(a, cls, words, numeric) for a in args]
    packed_kwargs = {k: pattern(a, cls, words, numeric) for k, a in kwargs.items()}
    if func is not None:
        schema = func._schema
        name = f"{schema.name}.{schema.overload_name or 'default'}"
    fields = [name, packed_args, packed_kwargs, results]
    with node.lock:
        return template_number(node, msgpack.packb(fields), fields), words


def entry_for(
    func: torch._ops.OpOverload, cls: type, args: Sequence[Any], number: int, outcome: Outcome
) -> Entry:
    """Return what the signature cache keeps for a call."""
    results = outcome.results
    if not results or outcome.written or outcome.reshaped or outcome.rebased is not None:
        return number, None, None, outcome, func, None
    only = results[0] if outcome.single else None
    if isinstance(only, Same):
        return number, None, _position(only.operand, cls, args), outcome, func, None
    listed = isinstance(only, list)
    made = only if isinstance(only, list) else results
    new = [r for r in made if isinstance(r, New)]
    if (
        not new
        or len(new) + made.count(None) < len(made)
        or any(r.spec.bits for r in new)
        or len({r.alias for r in new}) > 1
    ):
        return number, None, None, outcome, func, None
    alias = None if new[0].alias is None else _position(new[0].alias, cls, args)
    if new[0].alias is not None and alias is None:
        return number, None, None, outcome, func, None
    if isinstance(only, New):
        return number, only.spec, alias, outcome, func, None
    specs = tuple(r.spec if isinstance(r, New) else None for r in made)
    return number, None, alias, outcome, func, Multiple(specs, listed)


def _position(operand: int, cls: type, args: Sequence[Any]) -> int | None:
    """Return which argument is this operand; None if it stands inside a list, or behind one."""
    operands = [k for k, a in enumerate(args) if type(a) is cls]
    if operand >= len(operands):
        return None
    before = args[: operands[operand]]
    inside = any(isinstance(a, (list, tuple)) and tensors_of([a], {}) for a in before)
    return None if inside else operands[operand]


def emit(
    cls: type,
    entry: Entry,
    words: list[object],
    args: Sequence[Any],
    kwargs: Any,
    place: Residence,
    line: Line,
) -> Any:
    """Issue an instruction of any outcome: several results, in-place, `out=`, changed metadata.

    Return what the operator returns.
    """
    number, _, _, outcome, func, _ = entry
    operands: list[Any] = tensors_of(args, kwargs or {})
    if _inference() and _views_by_others(func) and not operands[0].is_inference():
        # torch hands it over whole here, and the views that it is made of are what autograd is to know.
        with torch._C._SetExcludeDispatchKeyGuard(_VIEWS, False):
            return func.decompose(*args, **(kwargs or {}))
    words[0] = number
    fresh: list[Handle] = []
    own: list[Handle] = []
    built = _build(cls, outcome.results, operands, words, fresh, own, place, entry[4])
    if len(own) > 1:
        relate(own)
    handles = [t._handle for t in operands]
    written = [operands[k]._handle.storage for k in outcome.written]
    if not fresh and not written and outcome.results and all(type(r) is Same for r in outcome.results):
        # It returns operands as they are: `lift_fresh` does, by which `torch.tensor` ends.
        return built[0] if outcome.single else tuple(built)
    if not fresh and not written and not outcome.results:
        # If the check fails, it changes these: so whoever reads them comes after it.
        kin, written = kin_of(handles)
        words.append(kin)
    issued = False
    try:
        issue(words, fresh, handles, written, place, line, entry[4])
        issued = True
        if outcome.rebased is not None or outcome.reshaped:
            _change(operands, outcome)
    except BaseException:
        # What a signal's handler raises may strike when the instruction is in the log.
        if issued or words is place.node.struck or words is place.node.latest:
            _change(operands, outcome)
            # Autograd does this behind an operator that returns.
            count_writes([operands[k] for k in outcome.written])
            # It is done: see `count_unreturned`.
            place.node.latest = ()
        raise
    if outcome.listed:
        count_writes([operands[k] for k in outcome.written])
    if outcome.single:
        return built[0]
    return tuple(built) if built else None


@functools.cache
def _views_by_others(func: torch._ops.OpOverload) -> bool:
    """Whether an operator that may return views is made of others: `reshape`, `flatten`, `view_as`."""
    aliased = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    made_of_others = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    # torch makes views of what `narrow` and `chunk` return, by kernels of their own.
    return aliased and made_of_others and not func.has_kernel_for_dispatch_key(_VIEWS)


def count_unreturned(
    entry: Entry, words: list[object], args: Sequence[Any], kwargs: Any, place: Residence
) -> None:
    """Count the writes of a call whose instruction is in the log, and that has raised behind `emit`."""
    if words is place.node.latest:
        place.node.latest = ()
        operands = tensors_of(args, kwargs or {})
        count_writes([operands[k] for k in entry[3].written])


def count_writes(tensors: Sequence[Any]) -> None:
    """Count a write to each of these tensors, as autograd does."""
    # Outside of inference mode nobody may write to its tensors.
    if torch.is_inference_mode_enabled():
        tensors = [t for t in tensors if not t.is_inference()]
    torch._C._increment_version(tensors)


# A tensor, its version, and the position of what has written its memory last.
Version = tuple[Any, int, int]


def versions(cls: Any, args: Sequence[Any], kwargs: Any) -> list[Version]:
    """Return what `count_written` needs to know of the operands of a call that writes to some."""
    return versions_of([t for t in tensors_of(args, kwargs or {}) if type(t) is cls])


def versions_of(tensors: Sequence[Any]) -> list[Version]:
    """Return what `count_written` needs to know of these remote tensors."""
    return [(t, t._version, t._handle.storage.written) for t in tensors if not t.is_inference()]


def count_written(before: Sequence[Version]) -> None:
    """Count the writes of a call that was interrupted, as autograd does behind an operator that returns."""
    for t, version, written in before:
        if t._handle.storage.written != written and t._version == version:
            torch.autograd.graph.increment_version(t)


def _change(operands: Sequence[Any], outcome: Outcome) -> None:
    """Give operands the metadata and the memory that a call gives them."""
    if outcome.rebased is not None:
        target, source = outcome.rebased
        operands[target]._handle.storage = operands[source]._handle.storage
    for k, spec in outcome.reshaped:
        reshape_wrapper(operands[k], spec)


# This is a module's function, not a closure: a closure that calls itself is a reference cycle, which would
# hold its operands until a collection. A call for each result would cost 0.3 us more.
def _build(
    cls: type,
    results: Sequence[Result],
    operands: list[Any],
    words: list[object],
    fresh: list[Handle],
    own: list[Handle],
    place: Residence,
    func: torch._ops.OpOverload,
) -> list[Any]:
    """Return the results' proxies. New handles are added to `fresh`, and to `own` unless they are views."""
    built: list[Any] = []
    for result in results:
        if type(result) is New:
            spec, alias, ref = result.spec, result.alias, next_ref()
            words.append(ref)
            if alias is None:
                handle = Handle(ref, spec, place, Storage(spec))
                own.append(handle)
            else:
                base = operands[alias]
                handle = Handle(ref, spec, place, base._handle.storage)
            fresh.append(handle)
            built.append(wrap(cls, handle) if alias is None else wrap_view(cls, handle, base, func))
        elif type(result) is Same:
            built.append(operands[result.operand])
        elif type(result) is list:
            built.append(_build(cls, result, operands, words, fresh, own, place, func))
        else:
            built.append(None)
    return built
