"""Issuing a call of the user's Python: one instruction, whatever it calls.

A result's structure is declared, or computed here on fake tensors, or known from an earlier call with
operands of these sizes; else the worker is asked for it, which is one round trip.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgpack
import torch
from torch.utils._pytree import tree_map

from ..errors import InternalError, NotSupportedError, PlacementError, UsageError
from ..log.handle import Handle, Residence, Storage, new_value, next_ref
from ..log.issue import issue
from ..log.line import Line, user_line
from ..log.log import Log, relieve
from ..log.mesh_log import MeshLog
from ..log.read_only import ReadOnlyStorage
from ..log.shards import member_of, mesh_of
from ..log.spec import NO_TENSOR, Spec
from ..operators.ask_worker import ask_specs
from ..operators.proxies import wrap
from ..operators.transfer import upload
from ..session.requests import Request
from ..session.session import active_session, session_of_log
from ..session.stalls import before_wait, note_wait
from ..tensors.tensor import DistributedTensor
from ..wire.codec import OPERAND, pack_constant, unpack_constant
from .pickling import Given, Operand, pack, pack_code
from .structure import (
    NOTHING,
    OBJECT,
    built,
    declared,
    handles_of,
    leaves,
    memory_of,
    repeats,
    require,
    wants_grad,
)

# A pickle of up to so many bytes rides in the log; a larger one is uploaded.
_INLINE = 1 << 14
# So many functions are kept on a worker, those that were called last.
_MOST_CODE = 256
# So many functions are known here, and so many names below each.
_MOST_CALLEES, _MOST_CHILDREN = 4096, 1024
# A number that has been so many different ones, with one structure of the result, is no part of what decides
# about it.
_ALIKE = 3
# So many signatures are known of a place. Arguments that are pickled may be others at each call.
_MOST_KNOWN = 1 << 16
ASK = "ask"


@dataclass(frozen=True)
class Options:
    """How a function is called.

    `writes` has the numbers of the operands that it changes; None says that it may change any. `random` says
    that it may draw.
    """

    returns: object = field(default=None, compare=False)
    writes: tuple[int, ...] | None = None
    random: bool = True
    timeout: float | None = None
    # It stands for `returns`, and has a hash: a tree of examples has none.
    _returns: object = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tree = isinstance(self.returns, (tuple, list, Mapping))
        object.__setattr__(self, "_returns", object() if tree else self.returns)


# The user's own functions: no type says what they take.
Function = Callable[..., object]  # type: ignore[explicit-any]


class Callee:
    """What is called, and what is known of its results: one for each code, and for each name below it.

    `name` is for people. `code` is the user's function or class; without it the worker has what is called
    under `named`. What is remembered of a call is remembered under the callee.
    """

    __slots__ = ("_children", "code", "is_method", "name", "named", "objects")

    def __init__(self, name: str, named: str = "", code: Code | None = None) -> None:
        self.name, self.named, self.code = name, named, code
        self._children: dict[str, Callee] = {}
        # It says whether this attribute is called rather than read. It is None where nobody has asked yet.
        self.is_method: bool | None = None
        # What has returned an object once is not asked again what it returns for such arguments.
        self.objects: set[tuple[object, ...]] = set()

    def child(self, key: str, name: str, named: str) -> Callee:
        """Return the callee for what is done with a result of this one: an attribute, an item, a call."""
        found = self._children.get(key)
        if found is None:
            if len(self._children) >= _MOST_CHILDREN:
                self._children.clear()
            found = self._children[key] = Callee(name, named)
        return found


class Code:
    """A function or a class of the user's, as it travels."""

    def __init__(self, thing: object, name: str) -> None:
        self.thing, self.name = thing, name
        self._pickled = pack_code(thing, name)
        self.digest = hashlib.sha256(self._pickled).digest()

    @classmethod
    def callee(cls, thing: object, name: str) -> Callee:
        """Return the callee of a function or a class: the one of an equal one, if there is one."""
        code = cls(thing, name)
        found = _callees.pop(code.digest, None) or Callee(name, code=code)
        while len(_callees) >= _MOST_CALLEES:
            _callees.pop(next(iter(_callees)))
        # The one that was made last stands last.
        _callees[code.digest] = found
        return found

    def there(self, home: Residence, line: Line) -> Handle:
        """Return the handle of this code on a worker, which gets it where it does not have it."""
        known, digest = home.node.code, self.digest
        found = known.pop(digest, None)
        if found is None:
            for prepare in before_code:
                prepare(home)
            sent = upload_bytes(self._pickled, home)
            found = new_value(NO_TENSOR, home)
            fields = [f"python::load {self.name}", [OPERAND], {}, 1]
            with home.node.lock:
                number = home.node.template(msgpack.packb(fields), fields)
                issue([number, sent.ref, found.ref], [found], [sent], (), home, line)
            while len(known) >= _MOST_CODE:
                known.pop(next(iter(known)))
        # The one that was called last stands last.
        known[digest] = found
        assert isinstance(found, Handle)
        return found


_callees: dict[bytes, Callee] = {}
# These are called before code goes to a worker that does not have it: see `ship`.
before_code: list[Callable[[Residence], None]] = []


def upload_bytes(data: bytes, home: Residence) -> Handle:
    """Send bytes to a node, as a tensor of its CPU."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return upload(tensor, home, stay_on_cpu=True)


# What makes an object's proxy of its handle and of what it came from.
Keep = Callable[[Handle, Callee], object]


# This is remembered of a call with nothing but operands, which returns one tensor or one object: the number
# of its template, the words before its operands' refs, the spec of a tensor, and what keeps the code there.
Entry = tuple[int, tuple[object, ...], Spec | None, object]


def invoke(
    callee: Callee,
    options: Options,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    home: Residence | None,
    keep: Keep,
) -> object:
    """Issue a call; return its result: proxies of tensors, and what `keep` makes of other objects.

    Blocks for one round trip where only the worker can tell what the result is.
    """
    lower = torch.get_autocast_dtype("remote") if torch.is_autocast_enabled("remote") else None
    key: list[object] = [callee, options, torch.is_grad_enabled(), lower]
    used: list[Handle] = []
    simple = not kwargs
    place: Residence | None = None
    if simple:
        for a in args:
            kind = type(a)
            if kind is DistributedTensor or isinstance(a, Operand):
                handle: Handle = a._handle  # type: ignore[attr-defined]
                key.append(handle.spec)
                key.append(kind is DistributedTensor and a.requires_grad)  # type: ignore[attr-defined]
                used.append(handle)
                if place is None:
                    place = handle.place
                elif handle.place is not place:
                    simple = False
                    break
            else:
                simple = False
                break
    if simple and place is not None and (home is None or home is place):
        entry: Entry | None = place.cache.get(tuple(key))  # type: ignore[assignment]
        if entry is not None:
            return _again(callee, entry, used, place, keep)
    return _slowly(callee, options, args, kwargs, home, keep, tuple(key) if simple else None)


def _again(callee: Callee, entry: Entry, used: list[Handle], place: Residence, keep: Keep) -> object:
    """Issue a call that is known; it costs what an operator costs: see docs/benchmarks.md."""
    number, head, spec, _ = entry
    node = place.node
    if node.busy:
        relieve(node)
    made = spec or NO_TENSOR
    storage = Storage(made)
    handle = Handle(next_ref(), made, place, storage)
    words = [number, *head, *[h.ref for h in used], handle.ref]
    line = user_line()
    with node.lock:
        freed = node.freed
        while freed:
            node.words.append(-freed.pop())
        node.words += words
        end = node.base + len(node.words)
        handle.born = born = (end, line[1], line[2])
        for h in used:
            h.storage.written = end
        if place.memories:
            for taken in place.memories.values():
                taken.written = end
        node.line_table.append(born)
        if len(node.words) > node.enough:
            node.flush()
    return keep(handle, callee) if spec is None else wrap(DistributedTensor, handle)


def _slowly(
    callee: Callee,
    options: Options,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    home: Residence | None,
    keep: Keep,
    key: tuple[object, ...] | None,
) -> object:
    line = user_line()
    operands: Sequence[Given]
    if key is not None:
        pickled, operands = b"", args  # type: ignore[assignment]
    else:
        pickled, operands = pack(args, kwargs)
    place = _place(callee, operands, home)
    relieve(place.node)
    if place.node.members:
        return _each(callee, options, args, kwargs, place, keep)
    call = _Call(callee, options, pickled, operands, place, line)
    return call.result(args, kwargs, keep, key)


def _place(callee: Callee, operands: Sequence[Given], home: Residence | None) -> Residence:
    """Return where a call runs: where it was told to, else where its operands are, else the current place."""
    handles = [o._handle for o in operands if isinstance(o, (DistributedTensor, Operand))]
    first = home or (handles[0].place if handles else None)
    if first is None:
        return active_session().places.current()
    first.node.session.require_open()
    for handle in handles:
        handle.place.node.session.require_open()
        if handle.place.node is not first.node:
            handle.place.node.require_alive()
            first.node.require_alive()
            raise PlacementError(
                f"{callee.name} runs on {first.place}, and an argument is on {handle.place.place}: "
                "move a tensor with x.to(device); call a function where its objects are"
            )
    first.node.require_alive()
    return first


# The request for what a result is, the result on the worker, and its tape.
_Question = tuple[Request[object], Handle, Handle]


class _Call:
    """One call on one worker, until its result is there to be returned."""

    def __init__(
        self,
        callee: Callee,
        options: Options,
        pickled: bytes,
        operands: Sequence[Given],
        home: Residence,
        line: Line,
    ) -> None:
        self.callee, self.options, self.home, self.line = callee, options, home, line
        self.node: Log = home.node
        self.pickled = pickled
        self.operands = operands
        self.handles = [
            o._handle if isinstance(o, (DistributedTensor, Operand)) else upload(o, home, stay_on_cpu=True)
            for o in operands
        ]
        # What has to be sent is sent before the log is locked: an upload may wait for the window.
        self._what = None if callee.code is None else callee.code.there(home, line)
        self._sent = upload_bytes(pickled, home) if len(pickled) > _INLINE else None
        self.grad = torch.is_grad_enabled()
        self.lower = torch.get_autocast_dtype("remote") if torch.is_autocast_enabled("remote") else None
        self.flags = (
            [isinstance(o, DistributedTensor) and o.requires_grad for o in operands] if self.grad else None
        )

    def _signatures(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[tuple[object, ...]]:
        """Return what the result's structure is remembered under: with the numbers that were given, and
        without them.
        """
        flags = None if self.flags is None else tuple(self.flags)
        memories = [id(handle.storage) for handle in self.handles]
        specs: tuple[object, ...] = tuple([handle.spec for handle in self.handles])
        if len({*memories}) < len(memories):
            # Operands that share memory: a result in it is said to be in the first one's.
            specs = *specs, tuple([memories.index(memory) for memory in memories])
        values = (*args, *kwargs.values())
        plain = (*args, *kwargs, *kwargs.values())
        exact: object = self.pickled if len(self.pickled) <= 256 else hashlib.sha256(self.pickled).digest()
        if not all(type(v) in _PLAIN or isinstance(v, (DistributedTensor, Operand)) for v in values):
            return [("python", self.callee, exact, flags, self.lower, specs)]
        # Floats decide about no size.
        strict = tuple([float if type(v) is float else v for v in plain if type(v) in _PLAIN])
        loose = tuple([type(v) if type(v) in (int, float) else v for v in plain if type(v) in _PLAIN])
        kinds = tuple([type(v) for v in values])
        return [
            ("python", self.callee, kinds, numbers, flags, self.lower, specs)
            for numbers in dict.fromkeys((strict, ("any", *loose)))
        ]

    def _kinds(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
        """Return what it depends on whether the result is an object: names and flags, and other's types.

        A dictionary has a number under one name, and a tensor under another one.
        """
        values = (*args, *kwargs.values())
        return (*kwargs, *[v if type(v) in (str, bool) else type(v) for v in values])

    def result(
        self,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        keep: Keep,
        key: tuple[object, ...] | None,
    ) -> object:
        """Issue the call and return its result. `key` is where a call with operands only is remembered."""
        returns = self.options.returns
        if returns == ASK:
            return self._asked([], keep, None)
        if returns is not None:
            return self._known(
                self._declared(returns, args, kwargs), keep, None if callable(returns) else key
            )
        kinds = self._kinds(args, kwargs)
        if kinds in self.callee.objects:
            return self._known(OBJECT, keep, key)
        signatures, table = self._signatures(args, kwargs), self.home.signatures
        known = table.get(signatures[0])
        if known is None and len(signatures) > 1:
            alike = table.get(signatures[1])
            known = alike[0] if isinstance(alike, tuple) and alike[1] >= _ALIKE else None
        if known is None:
            return self._asked(signatures, keep, kinds)
        return self._known(known, keep, key)

    def _declared(self, returns: object, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        if returns == "fake":
            if self.callee.code is None or not callable(self.callee.code.thing):
                raise NotSupportedError('returns="fake" is for functions of yours, which are run here')
            returns = self.callee.code.thing
        if callable(returns) and returns is not object:
            fakes, named = tree_map(_fake, (tuple(args), dict(kwargs)))
            returns = returns(*fakes, **named)
        return declared(returns)

    # -- the instruction -------------------------------------------------------------------------------------

    def _words(self, promised: object, results: object, wanted: bool) -> tuple[list[object], list[Handle]]:
        """Return the words of the instruction without its results, and the handles that it needs."""
        sent = [handle for handle in (self._what, self._sent) if handle is not None]
        words: list[object] = [0, *(handle.ref for handle in sent)]
        if self._sent is None:
            words.append(self.pickled)
        args: list[object] = [
            self.callee.name,
            pack_constant(promised),
            pack_constant([self.grad, self.lower]),
            pack_constant(self.options.timeout),
            self.options.random,
            pack_constant(self.flags if wanted else None),
            pack_constant(None if self.options.writes is None else [*self.options.writes]),
            self.callee.named if self._what is None else OPERAND,
            ["number"] if self._sent is None else OPERAND,
        ]
        args.append(["list", *[OPERAND] * len(self.handles)])
        words += [handle.ref for handle in self.handles]
        fields = [f"python::call {self.callee.name}", args, {}, results]
        words[0] = self.node.template(msgpack.packb(fields), fields)
        return words, [*self.handles, *sent]

    def _written(self) -> list[Storage]:
        """Return the memories that the call may change: of an object always, of a tensor unless told."""
        writes = self.options.writes
        kept = next((h.storage for h in self.handles if isinstance(h.storage, ReadOnlyStorage)), None)
        if kept is not None and writes is None:
            raise UsageError(
                f"{self.callee.name} may write its arguments, and a tensor of {kept.name!r} is shared for "
                "reading: say that it writes none of them, dr.remote(writes=()), or pass x.clone()"
            )
        found = [
            handle.storage
            for k, handle in enumerate(self.handles)
            if handle.spec is NO_TENSOR or writes is None or k in writes
        ]
        # An object may write the tensors that were taken out of objects: parameters of a model, for example.
        return [*found, *self.home.memories.values()] if self.home.memories else found

    def _asked(
        self, signatures: list[tuple[object, ...]], keep: Keep, kinds: tuple[object, ...] | None
    ) -> object:
        """Issue the call and block until the worker has told what the result is."""
        return self.answered(self.ask(), signatures, keep, kinds)

    def ask(self) -> _Question:
        """Issue the call with a question what the result is. Return at once."""
        self._bump()
        with self.node.lock:
            words, used = self._words(ASK, [1, 1, 1], self.grad)
            whole, told, tape = [new_value(NO_TENSOR, self.home) for _ in range(3)]
            made = [whole, told, tape]
            words += [handle.ref for handle in made]
            request = ask_specs(words, made, used, self._written(), self.home, self.line, self.options.random)
        return request, whole, tape

    def answered(
        self,
        question: _Question,
        signatures: list[tuple[object, ...]],
        keep: Keep,
        kinds: tuple[object, ...] | None = None,
    ) -> object:
        """Block until the worker has told what the result is, and return the result."""
        request, whole, tape = question
        structure = require(self._described(request), len(self.handles))
        # An attribute that is None now may be a tensor later.
        if structure == NOTHING and self.callee.named.startswith("getattr "):
            return keep(whole, self.callee)
        if structure in (OBJECT, NOTHING):
            if kinds is not None:
                if len(self.callee.objects) >= _MOST_CHILDREN:
                    self.callee.objects.clear()
                self.callee.objects.add(kinds)
            return keep(whole, self.callee)
        if repeats(structure) and signatures:
            self._remember(structure, signatures)
        if structure == "end":
            return END
        with self.node.lock:
            fields = [
                f"python::take {self.callee.name}",
                [self.callee.name, pack_constant(structure), OPERAND],
                {},
                [1] * len([*leaves(structure)]),
            ]
            number = self.node.template(msgpack.packb(fields), fields)
            fresh = handles_of(structure, self.home, self.handles)
            issue([number, whole.ref, *(h.ref for h in fresh)], fresh, [whole], (), self.home, self.line)
        return self._built(structure, fresh, tape, keep)

    def _remember(self, structure: object, signatures: list[tuple[object, ...]]) -> None:
        table = self.home.signatures
        if len(table) >= _MOST_KNOWN:
            table.clear()
        table[signatures[0]] = structure
        for loose in signatures[1:]:
            alike = table.get(loose)
            if not isinstance(alike, tuple):
                table[loose] = structure, 1
            # Once sizes have followed the numbers, they may again.
            elif alike[0] != structure:
                table[loose] = alike[0], -(1 << 30)
            else:
                table[loose] = structure, alike[1] + 1

    def _described(self, request: Request[object]) -> object:
        started, session = time.perf_counter(), session_of_log(self.node)
        waits = not request.done
        if waits:
            before_wait(f"{self.callee.name} (only the worker knows what it returns)")
        described = session.value(request)
        if waits:
            note_wait(self.callee.name, started)
        if not isinstance(described, list) or len(described) != 3:
            raise InternalError(f"a worker described {self.callee.name} by {described!r:.80}")
        return unpack_constant(described[1])

    def _known(self, structure: object, keep: Keep, key: tuple[object, ...] | None) -> object:
        """Issue the call, whose result's structure is known. Return at once."""
        self._bump()
        fields = [*leaves(structure)]
        single = structure == OBJECT
        # An operand that requires grad does so in the body, too, whatever is returned: an object may keep
        # what is computed of it, and then the worker knows that a gradient would be lost.
        wanted = any(self.flags or ()) and self.options.returns is not object
        wanted = wanted or (self.grad and any(map(wants_grad, fields)))
        tape = wanted and not single
        with self.node.lock:
            words, used = self._words(structure, 1 if single else [1] * (len(fields) + tape), wanted)
            fresh = handles_of(structure, self.home, self.handles)
            recorded = new_value(NO_TENSOR, self.home) if tape else None
            made = fresh if recorded is None else [*fresh, recorded]
            words += [handle.ref for handle in made]
            issue(
                words,
                made,
                used,
                self._written(),
                self.home,
                self.line,
                self.options.random,
            )
            if key is not None and not wanted and self.options.writes is None:
                self._note(key, structure, fresh, words)
        return self._built(structure, fresh, recorded, keep)

    def _note(
        self, key: tuple[object, ...], structure: object, fresh: list[Handle], words: list[object]
    ) -> None:
        """Remember the call for `_again`, if it returns one object or one tensor of its own memory."""
        number, taken = words[0], 1 + len(fresh) + len(self.handles)
        alone = structure == OBJECT or (isinstance(structure, list) and structure[0] == "tensor")
        spec = None if structure == OBJECT else fresh[0].spec
        if not alone or self._sent is not None or (spec is not None and (spec.bits or not _own(structure))):
            return
        assert isinstance(number, int)
        entry: Entry = number, tuple(words[1 : len(words) - taken + 1]), spec, self._what
        self.home.signatures[key] = entry

    def _bump(self) -> None:
        """Let autograd notice what the call writes: a graph that has saved it must not use it."""
        for k in self.options.writes or ():
            written = self.operands[k] if k < len(self.operands) else None
            if isinstance(written, DistributedTensor):
                torch.autograd.graph.increment_version(written)

    def _built(self, structure: object, fresh: list[Handle], tape: Handle | None, keep: Keep) -> object:
        proxies: list[object] = []
        fields = [*leaves(structure)]
        for handle, leaf in zip(fresh, fields):
            if not leaf:
                proxies.append(keep(handle, self.callee))
                continue
            base = memory_of(leaf)
            given = self.operands[base] if 0 <= base < len(self.operands) else None
            if isinstance(given, DistributedTensor) and not wants_grad(leaf):
                proxies.append(_within(given, handle))
            else:
                proxies.append(wrap(DistributedTensor, handle))
        if tape is not None and any(map(wants_grad, fields)):
            proxies = self._recorded(proxies, fields, tape)
        return built(structure, iter(proxies))

    def _recorded(self, proxies: list[object], fields: list[Sequence[object]], tape: Handle) -> list[object]:
        """Return the proxies as results of one node of this process's autograd graph."""
        tensors = [(k, p) for k, p in enumerate(proxies) if isinstance(p, DistributedTensor)]
        still = [wants_grad(fields[k]) for k, _ in tensors]
        inputs = [o for o in self.operands if isinstance(o, DistributedTensor) and o.requires_grad]
        # What wants gradients may be parameters of the worker's own objects only.
        start = torch.empty(0, device="cpu", requires_grad=True)
        outputs = _Recorded.apply(self.callee.name, tape, [p for _, p in tensors], still, start, *inputs)  # type: ignore[no-untyped-call]
        for (k, _), output in zip(tensors, outputs):
            proxies[k] = output
        return proxies


def ask_ahead(
    callee: Callee, options: Options, args: Sequence[object], home: Residence, keep: Keep
) -> Callable[[], object]:
    """Issue a call on one worker. Return at once what blocks for its result, and returns that."""
    relieve(home.node)
    pickled, operands = pack(args, {})
    call = _Call(callee, options, pickled, operands, home, user_line())
    question = call.ask()
    # Whoever was interrupted while it waited asks again, so the answer must be kept until then.
    question[0].when_done(_kept)
    return lambda: call.answered(question, [], keep)


def _kept(request: Request[object]) -> None:
    """Keep an answer for whoever asks for it."""


END = object()
_PLAIN = {int, float, str, bool, bytes, type(None)}


def _own(structure: object) -> bool:
    return all(bool(fields) and fields[-1] == -1 for fields in leaves(structure))


def _within(operand: DistributedTensor, handle: Handle) -> DistributedTensor:
    """Return the proxy of a result that is in an operand's memory: autograd counts their writes together."""
    spec, whole = handle.spec, operand._handle.spec
    if (spec.dtype, spec.bits) != (whole.dtype, whole.bits) or spec.extent > whole.extent:
        made: DistributedTensor = wrap(DistributedTensor, handle)
        return made
    # Torch makes a view of the operand, whose value nobody needs.
    found: DistributedTensor = operand.detach()  # type: ignore[assignment]
    if spec != whole:
        found = found.as_strided(spec.size, spec.stride, spec.offset)  # type: ignore[assignment]
    found._handle = handle
    return found


def _fake(leaf: object) -> object:
    """Return what a function of the arguments gets in the place of a tensor: its metadata."""
    if isinstance(leaf, DistributedTensor):
        return leaf._handle.spec.meta().requires_grad_(leaf.requires_grad)
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


class _Recorded(torch.autograd.Function):
    """A call that the worker has recorded: its backward is one instruction."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        name: str,
        tape: Handle,
        outputs: list[torch.Tensor],
        wanted: list[bool],
        start: torch.Tensor,
        *inputs: DistributedTensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.name, ctx.tape = name, tape  # type: ignore[attr-defined]
        ctx.specs = [x._handle.spec for x in inputs]  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(*[o for o, wants in zip(outputs, wanted) if not wants])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: _Recorded, *grads: DistributedTensor | None) -> tuple[object, ...]:
        with torch.no_grad():
            found = _gradients(ctx.name, ctx.tape, ctx.specs, grads)  # type: ignore[attr-defined]
        # Under `create_graph=True` somebody will differentiate the gradients, and the tape is read once.
        if torch.is_grad_enabled():
            found = [_Once.apply(ctx.name, g.detach().requires_grad_()) for g in found]  # type: ignore[attr-defined, no-untyped-call]
        return (None, None, None, None, None, *found)


class _Once(torch.autograd.Function):
    """Gradients of a call, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, name: str, found: torch.Tensor) -> torch.Tensor:
        ctx.name = name  # type: ignore[attr-defined]
        return found.view_as(found)

    @staticmethod
    def backward(ctx: _Once, grad: torch.Tensor) -> tuple[object, ...]:
        raise NotSupportedError(
            f"the gradients of {ctx.name} cannot be differentiated again (create_graph=True): "  # type: ignore[attr-defined]
            "take both gradients inside the function, and return what you need of them"
        )


def _gradients(
    name: str, tape: Handle, specs: Sequence[Spec], grads: Sequence[DistributedTensor | None]
) -> list[DistributedTensor]:
    """Issue the backward of a call; return the gradients of its inputs."""
    home, line = tape.place, user_line()
    node = home.node
    relieve(node)
    given = [g._handle for g in grads if g is not None]
    made = [new_value(spec, home) for spec in specs]
    with node.lock:
        fields = [
            f"python::backward {name}",
            [OPERAND, *(None if g is None else OPERAND for g in grads)],
            {},
            [1] * len(made),
        ]
        number = node.template(msgpack.packb(fields), fields)
        words = [number, tape.ref, *(h.ref for h in given), *(h.ref for h in made)]
        issue(words, made, [tape, *given], [tape.storage], home, line)
    return [wrap(DistributedTensor, handle) for handle in made]


# -- on the members of a mesh --------------------------------------------------------------------------------


def _each(
    callee: Callee,
    options: Options,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    home: Residence,
    keep: Keep,
) -> object:
    """Call on each member of a mesh; join tensors to the mesh's, and list objects by member."""
    log = home.node
    assert isinstance(log, MeshLog)
    found = []
    for k, place in enumerate(log.members):
        there = log.session.places.residence(place, numbered=False)

        def member(leaf: object, k: int = k) -> object:
            if not isinstance(leaf, DistributedTensor) or leaf._handle.place is not home:
                return leaf
            if leaf.requires_grad and torch.is_grad_enabled():
                return leaf.member(k)
            return wrap(DistributedTensor, member_of(leaf._handle, k))

        own, named = tree_map(member, (tuple(args), dict(kwargs)))
        found.append(invoke(callee, options, own, named, there, keep))
    return _joined(callee, log, home, found)


class _Joined(torch.autograd.Function):
    """The members' results, as one tensor of the mesh: each gets its member's gradient."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, whole: DistributedTensor, *shards: torch.Tensor
    ) -> DistributedTensor:
        del ctx, shards
        return whole

    @staticmethod
    def backward(ctx: _Joined, grad: DistributedTensor) -> tuple[object, ...]:
        wanted: tuple[bool, ...] = ctx.needs_input_grad[1:]
        return (None, *[grad.member(k) if wants else None for k, wants in enumerate(wanted)])


def _joined(callee: Callee, log: MeshLog, home: Residence, found: list[object]) -> object:
    first = found[0]
    if isinstance(first, DistributedTensor):
        specs = {id(t._handle.spec) for t in found if isinstance(t, DistributedTensor)}
        if len(specs) > 1 or not all(isinstance(t, DistributedTensor) for t in found):
            raise NotSupportedError(
                f"{callee.name} returned other sizes on some members, and a mesh's tensor has one shape: "
                "call it for each, x.member(k)"
            )
        shards = [t for t in found if isinstance(t, DistributedTensor)]
        whole = wrap(DistributedTensor, mesh_of(log, home, [t._handle for t in shards]))
        return _Joined.apply(whole, *shards) if any(t.requires_grad for t in shards) else whole  # type: ignore[no-untyped-call]
    if isinstance(first, (tuple, list)) and type(first) in (tuple, list):
        return type(first)(_joined(callee, log, home, list(items)) for items in zip(*found))
    if isinstance(first, dict):
        return {key: _joined(callee, log, home, [one[key] for one in found]) for key in first}  # type: ignore[index]
    return found
