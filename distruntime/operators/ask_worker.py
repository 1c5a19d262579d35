"""Calls whose results only their worker can describe: it is asked, and waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..errors import InternalError, NotSupportedError
from ..log.handle import Handle, Place, Residence, new_value, relate
from ..log.issue import issue
from ..log.line import Line
from ..log.log import Log
from ..log.mesh_log import MeshLog
from ..log.shards import member_of, mesh_of
from ..log.spec import Spec, spec_from_wire
from ..log.storage import require_writable
from ..log.tape import not_in_a_program, note_value_read, recorded
from ..log.uses import Memory
from ..session.requests import Request
from ..session.session import session_of_log
from ..session.stalls import before_wait, note_wait
from ..wire.codec import unpack_constant
from ..wire.messages import LEARN
from .alias_info import aliases, tensors_of, writes_lists
from .propagate import (
    LENGTHS,
    LIARS,
    LIARS_OF_DTYPES,
    LIARS_OF_LAYOUTS,
    LIARS_ON_GPUS,
    New,
    Outcome,
    Result,
    Same,
)
from .proxies import reshape_wrapper, wrap
from .signatures import Call, count_writes, entry_for, results_pattern, template

PENDING = Spec()
PENDING.size, PENDING.stride, PENDING.offset, PENDING.dtype, PENDING.bits = (
    torch.Size((0,)),
    (1,),
    0,
    torch.float32,
    0,
)


class _Unanswered(threading.local):
    """Whether this thread must not wait, as it holds the lock that the reader of the answer may need."""

    now = False


unanswered = _Unanswered()

# It makes one tensor of shards of different shapes; see tensors/uneven.py.
of_shards: list[Callable[[list[Any], Residence], Any]] = []


def ask(call: Call) -> Any:
    """Issue a call whose results only the worker can describe.

    Wait for the description: one round trip.
    """
    if unanswered.now:
        raise NotSupportedError(
            f"{call.func} with a generator at a place: only the worker knows what it returns, and a draw "
            "does not wait. Leave the generator out and seed with torch.manual_seed(...), which reaches the "
            "workers"
        )
    results = _asked(call)
    # The user's filters may raise a warning, and what was written must have its new metadata before.
    session_of_log(call.place.node).show_warnings()
    return results


def _asked(call: Call) -> Any:
    if call.place.node.members:
        return _ask_each(call)
    results, outcome = _asked_of_one(call)
    _remember(call, outcome)
    return results


def _remember(call: Call, outcome: Outcome | None) -> None:
    """Note what a call returns, for the next one of its signature; None: that may be something else then."""
    if call.signature is None or outcome is None:
        return
    func, cls, node = call.func, call.cls, call.place.node
    pattern = results_pattern(outcome.results, outcome.single, outcome.written)
    with node.lock:
        number, _ = template(func, cls, call.args, call.kwargs, pattern, node)
        call.place.signatures[call.signature] = entry_for(func, cls, call.args, number, outcome)


def _asked_of_one(call: Call) -> tuple[Any, Outcome | None]:
    """Ask one worker; return what the call gives, and what another one like it will."""
    cls, func, args, kwargs, place = call.cls, call.func, call.args, call.kwargs, call.place
    node, schema = place.node, func._schema
    # These are deterministic: only the meta kernel was wrong.
    deterministic = any(
        schema.name in liars for liars in (LIARS, LIARS_OF_DTYPES, LIARS_OF_LAYOUTS, LIARS_ON_GPUS)
    )
    if recorded.name and not deterministic:
        raise not_in_a_program(
            f"hold {func}: only the worker knows its result's shape, which depends on data",
            "call it outside, and pass the result; or use a form of fixed size: torch.where, a mask",
            call.line,
        )
    if not deterministic:
        note_value_read()
    before_wait(f"{func} (its results depend on data)")
    _, written, shared = aliases(func, args, kwargs)
    operands: list[Any] = tensors_of(args, kwargs)
    listed = any(str(r.type) == "List[Tensor]" for r in schema.returns)
    if listed and schema.name not in LENGTHS:
        raise NotSupportedError(
            f"{func} returns a list whose length depends on data; fetch its operands and call it locally"
        )
    count = LENGTHS[schema.name](args) if listed else len(schema.returns)
    returns = list(schema.returns) * count if listed else schema.returns
    shared = shared * count if listed else shared
    storages = [operands[k]._handle.storage for k in written]
    require_writable(storages, call.line)
    with node.lock:
        number, words = template(
            func, cls, args, kwargs, 1 if count == 1 and not listed else [1] * count, node
        )
        handles = [new_value(PENDING, place) for _ in range(count)]
        words = [number, *words, *(h.ref for h in handles)]
        request = ask_specs(words, handles, [t._handle for t in operands], storages, place, call.line, func)
    described = await_specs(
        request, [listed or isinstance(r.type, torch.TensorType) for r in returns], node, func
    )
    if writes_lists(func):
        count_writes([operands[k] for k in written])
    out, results = _results(cls, handles, described, zip(returns, shared), operands)
    outcome = Outcome(results, count == 1, written, ()) if deterministic and not schema.is_mutable else None
    if listed:
        return out, outcome
    return (out[0] if count == 1 else tuple(out)), outcome


def _results(
    cls: Any,
    handles: Sequence[Handle],
    described: Sequence[Any],
    declared: Iterable[tuple[Any, int | None]],
    operands: Sequence[Any],
) -> tuple[list[Any], list[Result]]:
    """Return what a call gives of what its worker has told, and what that is to a call like it.

    `declared` has each result of the schema, with the number of the operand whose memory it shares.
    """
    out: list[Any] = []
    results: list[Result] = []
    own: list[Handle] = []
    for handle, fields, (argument, alias) in zip(handles, described, declared):
        if not _is_tensor(fields):
            out.append(unpack_constant(fields))
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
            own.append(handle)
        out.append(wrap(cls, handle))
        results.append(New(handle.spec, alias))
    if len(own) > 1:
        relate(own)
    return out, results


def _ask_each(call: Call) -> Any:
    """Call on each member of a mesh by itself, whose results must be alike: one round trip for each."""
    cls, func, home = call.cls, call.func, call.place
    mesh_log = home.node
    assert isinstance(mesh_log, MeshLog)
    found: list[Any] = []
    outcomes: list[Outcome | None] = []
    # Each member's proxy has, by its id, the mesh's tensor here.
    whole: dict[int, Any] = {}
    for k, place in enumerate(mesh_log.members):
        there = mesh_log.session.places.residence(place, numbered=False)
        own = [_at_member(value, cls, home, k, place, whole) for value in call.args]
        named = {name: _at_member(value, cls, home, k, place, whole) for name, value in call.kwargs.items()}
        # The arguments are held, as their ids are keys.
        results, outcome = _asked_of_one(Call(cls, func, own, named, there, None, call.line))
        found.append((results, own, named))
        outcomes.append(outcome)
    joined = _joined(cls, func, mesh_log, home, [results for results, _, _ in found], whole)
    # What one member returned is remembered for all, so all must have returned alike.
    if all(type(t) is cls for t in tree_leaves(joined) if isinstance(t, torch.Tensor)):
        _remember(call, outcomes[0])
    return joined


def _at_member(value: Any, cls: Any, home: Residence, k: int, place: Place, whole: dict[int, Any]) -> Any:
    if type(value) is cls:
        member = wrap(cls, member_of(value._handle, k))
        whole[id(member)] = value
        return member
    if isinstance(value, (list, tuple)):
        return [_at_member(item, cls, home, k, place, whole) for item in value]
    return place if isinstance(value, torch.device) and value == home.lazy else value


def _joined(
    cls: Any,
    func: torch._ops.OpOverload,
    mesh_log: MeshLog,
    home: Residence,
    found: list[Any],
    whole: dict[int, Any],
) -> Any:
    if isinstance(found[0], (list, tuple)):
        if len({len(items) for items in found}) > 1:
            raise _unlike(func, [f"{len(items)} results" for items in found])
        return type(found[0])(_joined(cls, func, mesh_log, home, list(items), whole) for items in zip(*found))
    if type(found[0]) is cls:
        if len({id(t._handle.spec) for t in found}) > 1:
            new = not any(id(t) in whole for t in found)
            if new and of_shards and len({(t.dtype, t.ndim) for t in found}) == 1:
                return of_shards[0](found, home)
            raise _unlike(func, [f"{tuple(t.shape)} {t.dtype}" for t in found])
        target = whole.get(id(found[0]))
        if target is None:
            return wrap(cls, mesh_of(mesh_log, home, [t._handle for t in found]))
        # It was written, and resized on the way: the mesh's tensor gets its members' sizes.
        if target._handle.spec is not found[0]._handle.spec:
            mesh_of(mesh_log, home, [t._handle for t in found], target._handle)
            reshape_wrapper(target, found[0]._handle.spec)
        return target
    # Tensors are equal where all members' are; of any other number that is read, the first member's counts.
    return all(found) if type(found[0]) is bool else found[0]


def _unlike(func: torch._ops.OpOverload, results: list[str]) -> NotSupportedError:
    shown = ", ".join(f"member {k}: {what}" for k, what in enumerate(results[:4])) + (
        ", ..." if len(results) > 4 else ""
    )
    return NotSupportedError(
        f"{func}: the results differ from member to member ({shown}), and a mesh's tensors have as many "
        "dimensions and one dtype; call it for each: t.member(k)"
    )


def ask_specs(
    words: list[object],
    fresh: list[Handle],
    operands: Sequence[Handle],
    written: Sequence[Memory],
    place: Residence,
    line: Line,
    random: torch._ops.OpOverload | bool,
) -> Request[object]:
    """Issue an instruction whose results its worker is to describe; see `issue`."""
    node = place.node
    with node.lock:
        requests = session_of_log(node).requests
        request: Request[object] = requests.new(place.worker, "specs")
        try:
            issue([LEARN, request.number, *words], fresh, operands, written, place, line, random)
            node.flush()
        except BaseException:
            # Nobody waits for it.
            requests.discard(request)
            raise
    return request


def await_specs(
    request: Request[object], tensors: Sequence[bool], node: Log, func: torch._ops.OpOverload
) -> list[Any]:
    """Block until a worker has described an instruction's results.

    `tensors` says for each result whether it is a tensor, or None. Warnings are not shown, as the caller is
    still to note what the worker has done.
    """
    started = time.perf_counter()
    described = session_of_log(node).value(request, quietly=True)
    note_wait(f"{func}", started)
    if not isinstance(described, list) or len(described) != len(tensors):
        raise InternalError(f"a worker described {func} by {described!r}")
    for fields, tensor in zip(described, tensors):
        if _is_tensor(fields) != tensor and not (tensor and fields is None):
            raise InternalError(f"a worker described a result of {func} by {fields!r:.80}")
    return described


def _is_tensor(fields: object) -> bool:
    """Whether this describes a tensor; other values stand for themselves."""
    return isinstance(fields, list) and bool(fields) and not isinstance(fields[0], str)
