"""Issuing a call of the user's Python: one instruction, whatever it calls.

A result's structure is declared, or computed here on fake tensors, or known from an earlier call with
operands of these sizes; else the worker is asked for it, which is one round trip.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgpack
import torch

from ..errors import InternalError
from ..log.handle import Handle, Residence, new_value, next_ref
from ..log.issue import await_fetch, issue, join, join_all, template_number
from ..log.line import Line, user_line
from ..log.log import Log, relieve
from ..log.spec import NO_TENSOR, Spec
from ..log.storage import Storage
from ..operators.ask_worker import ask_specs
from ..operators.proxies import wrap
from ..operators.transfer import upload
from ..session.requests import Request
from ..session.session import session_of_log
from ..session.stalls import before_wait, note_wait
from ..tensors.tensor import DistributedTensor
from ..wire.codec import NOTHING, OBJECT, OPERAND, pack_constant, unpack_constant
from .callee import (
    Callee,
    Options,
    Signature,
    kinds_of,
    place_of,
    recall,
    remember,
    require_python,
    signatures,
    upload_bytes,
    written_by,
)
from .pickling import Given, Operand, pack
from .results import of_members, recorded, tensor_proxies
from .structure import (
    built,
    declared,
    handles_of,
    is_fresh,
    is_lent,
    kept_by,
    known_here,
    leaves,
    object_in,
    owner_of,
    repeats,
    require,
    wants_grad,
)

# A pickle of up to so many bytes rides in the log; a larger one is uploaded.
_INLINE = 1 << 14
ASK = "ask"
# As `ASK`, and what somebody else holds there is copied.
OWN = "own"
# What the last item of an iterator is followed by.
END = object()

# What makes an object's proxy of its handle and of what it came from.
Keep = Callable[[Handle, Callee], object]
# This is remembered of a call with nothing but operands, which returns one tensor or one object: the number
# of its template, the words before its operands' refs, the spec of a tensor, what keeps the code there, the
# operand that an object is a part of, and the operand that may keep the others (-1 for the result).
Entry = tuple[int, tuple[object, ...], Spec | None, object, int | None, int | None]


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
    """Issue a call that is known; it costs what an operator costs: see docs/tables/benchmarks.md."""
    number, head, spec, _, part_of, keeper = entry
    node = place.node
    if node.busy:
        relieve(node)
    made = spec or NO_TENSOR
    storage = Storage(made) if part_of is None else used[part_of].storage
    handle = Handle(next_ref(), made, place, storage)
    words = [number, *head, *[h.ref for h in used], handle.ref]
    line = user_line()
    with node.lock:
        freed = node.freed
        while freed:
            node.words.append(-freed.pop())
        try:
            # What may lie in one memory counts as one from before the call on.
            joint = (
                join_all(place, storage if keeper < 0 else used[keeper].storage, used)
                if keeper is not None
                else None
            )
            node.words += words
            end = node.base + len(node.words)
            handle.born = born = (end, line[1], line[2])
            if joint is not None:
                joint.written = end
            else:
                for h in used:
                    h.storage.written = end
            node.lent.written = end
            node.line_table.append(born)
            if spec is None and node.enough == 0:
                await_fetch(node)
            if len(node.words) > node.enough:
                node.flush(gathered=True)
        except BaseException:
            node.in_doubt = True
            raise
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
    place = place_of(callee.name, operands, home)
    relieve(place.node)
    if place.node.members:

        def call(own: Sequence[object], named: Mapping[str, object], member: Residence) -> object:
            return invoke(callee, options, own, named, member, keep)

        return of_members(callee.name, place, args, kwargs, call)
    return Call(callee, options, pickled, operands, place, line, keep).result(args, kwargs, key)


# The request for what a result is, the result on the worker, and its tape.
Question = tuple[Request[object], Handle, Handle]


class Call:
    """One call on one worker, until its result is there to be returned."""

    def __init__(
        self,
        callee: Callee,
        options: Options,
        pickled: bytes,
        operands: Sequence[Given],
        home: Residence,
        line: Line,
        keep: Keep,
    ) -> None:
        self.callee, self.options, self.home, self.line, self.keep = callee, options, home, line, keep
        self.node: Log = home.node
        self.pickled = pickled
        # A pickle begins with this byte, and msgpack with others.
        if pickled[:1] == b"\x80":
            require_python(home.node, f"an argument of {callee.name}", pickled)
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

    def result(
        self, args: Sequence[object], kwargs: Mapping[str, object], key: tuple[object, ...] | None
    ) -> object:
        """Issue the call and return its result. `key` is where a call with operands only is remembered."""
        returns = self.options.returns
        if returns == ASK:
            return self.answered(self.ask(), [])
        if returns is not None:
            thing = None if self.callee.code is None else self.callee.code.thing
            expected = declared(returns, thing, args, kwargs)
            return self._known(expected, None if callable(returns) else key)
        kinds = kinds_of(args, kwargs)
        if self.callee.returns_object(kinds):
            return self._known(OBJECT, key)
        modes = None if self.flags is None else tuple(self.flags), self.lower
        under = signatures(self.callee, args, kwargs, self.pickled, self.handles, modes)
        known = recall(self.home.signatures, under)
        if known is None:
            return self.answered(self.ask(), under, kinds)
        return self._known(known, key)

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
        words[0] = template_number(self.node, msgpack.packb(fields), fields)
        return words, [*self.handles, *sent]

    def _keep(self, made: Sequence[Handle]) -> None:
        """Note what may lie in the memory of an object, before the instruction: it may be interrupted."""
        memories = kept_by(self.handles, made)
        if len(memories) > 1:
            join(self.home, memories)

    def ask(self) -> Question:
        """Issue the call with a question what the result is. Return at once."""
        self._bump()
        with self.node.lock:
            asked = OWN if self.options.returns == OWN else ASK
            words, used = self._words(asked, [1, 1, 1], self.grad)
            owner = owner_of(self.handles)
            whole, tape = [object_in(owner, self.home) for _ in range(2)]
            told = new_value(NO_TENSOR, self.home)
            made = [whole, told, tape]
            words += [handle.ref for handle in made]
            written = written_by(self.callee.name, self.options.writes, self.handles, self.home)
            if owner is not None:
                self._keep(())
            request = ask_specs(words, made, used, written, self.home, self.line, self.options.random)
        return request, whole, tape

    def answered(
        self, question: Question, under: list[Signature], kinds: tuple[object, ...] | None = None
    ) -> object:
        """Block until the worker has told what the result is, and return the result.

        What it is is remembered `under` these signatures, or as an object for arguments of these `kinds`.
        """
        request, whole, tape = question
        told = require(self._described(request), len(self.handles))
        structure, here = known_here(told)
        if structure in (OBJECT, NOTHING):
            with self.node.lock:
                self._keep([whole])
            # An attribute that is None now may be a tensor later.
            if kinds is not None and not (structure == NOTHING and self.callee.named.startswith("getattr ")):
                self.callee.note_object(kinds)
            return self.keep(whole, self.callee)
        if repeats(structure) and under:
            remember(self.home.signatures, under, structure)
        if structure == "end":
            return END
        with self.node.lock:
            fields = [
                f"python::take {self.callee.name}",
                [self.callee.name, pack_constant(structure), OPERAND],
                {},
                [1] * len([*leaves(structure)]),
            ]
            number = template_number(self.node, msgpack.packb(fields), fields)
            fresh = handles_of(structure, self.home, self.handles)
            # What is taken out of an object from here on is what any call may write.
            lent = [self.node.lent] if any(map(is_lent, leaves(structure))) else []
            words = [number, whole.ref, *(h.ref for h in fresh)]
            issue(words, fresh, [whole], lent, self.home, self.line)
            if lent:
                join(self.home, [*lent, whole.storage])
            self._keep(fresh)
        return self._built(structure, fresh, tape, here)

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

    def _known(self, structure: object, key: tuple[object, ...] | None) -> object:
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
            recorded = object_in(owner_of(self.handles), self.home) if tape else None
            made = fresh if recorded is None else [*fresh, recorded]
            words += [handle.ref for handle in made]
            if single:
                await_fetch(self.node)
            written = written_by(self.callee.name, self.options.writes, self.handles, self.home)
            self._keep(fresh)
            issue(words, made, used, written, self.home, self.line, self.options.random)
            if key is not None and not wanted and self.options.writes is None:
                self._note(key, structure, fresh, words)
        return self._built(structure, fresh, recorded)

    def _note(
        self, key: tuple[object, ...], structure: object, fresh: list[Handle], words: list[object]
    ) -> None:
        """Remember the call for `_again`, if it returns one object or one tensor of its own memory."""
        number, taken = words[0], 1 + len(fresh) + len(self.handles)
        spec = None if structure == OBJECT else fresh[0].spec if fresh else NO_TENSOR
        alone = spec is None or (structure[0] == "tensor" and not spec.bits and is_fresh(structure))  # type: ignore[index]
        if alone and self._sent is None:
            assert isinstance(number, int)
            head, part_of, keeper = tuple(words[1 : len(words) - taken + 1]), None, None
            owner = next((k for k, h in enumerate(self.handles) if h.spec is NO_TENSOR), None)
            if spec is None:
                part_of = owner
            if len(kept_by(self.handles, fresh)) > 1:
                keeper = -1 if owner is None else owner
            entry: Entry = number, head, spec, self._what, part_of, keeper
            self.home.signatures[key] = entry

    def _bump(self) -> None:
        """Let autograd notice what the call writes: a graph that has saved it must not use it."""
        for k in self.options.writes or ():
            written = self.operands[k] if k < len(self.operands) else None
            if isinstance(written, DistributedTensor):
                torch.autograd.graph.increment_version(written)

    def _built(
        self, structure: object, fresh: list[Handle], tape: Handle | None, here: Sequence[bool] | None = None
    ) -> object:
        """`here` says which tensors of the tape's are in the structure; None stands for all."""
        found = tensor_proxies(structure, fresh, self.operands)
        if tape is not None and any(map(wants_grad, leaves(structure))):
            found = recorded(self.callee.name, structure, found, self.operands, tape, here)
        objects = [self.keep(h, self.callee) if proxy is None else proxy for h, proxy in zip(fresh, found)]
        return built(structure, iter(objects))
