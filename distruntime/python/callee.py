"""What is called on a worker: the user's code as it travels, where it runs, and what is known of its results.

What a result is depends on the arguments. It is remembered under what they have in common: the sizes of
tensors, and the numbers that were given, until numbers have shown that they do not matter.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgpack
import torch

from ..errors import ConfigurationError, PlacementError, UsageError, is_of_handler
from ..guards.captured import Captured
from ..log.handle import Handle, Residence, new_value
from ..log.issue import issue, stream_at, template_number
from ..log.line import Line, user_line
from ..log.log import Log
from ..log.mesh_log import workers_of
from ..log.node import Node
from ..log.spec import NO_TENSOR
from ..log.storage import ReadOnlyStorage
from ..log.uses import Memory
from ..operators.transfer import upload
from ..session.session import active, active_session
from ..session.stalls import warn_at
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor
from ..wire.codec import OPERAND
from ..wire.shield import RLock
from .pickling import Given, Operand, pack_code

# So many functions are kept on a worker, those that were called last.
_MOST_CODE = 256
# So many functions are known here, and so many names below each.
_MOST_CALLEES, _MOST_CHILDREN = 4096, 1024
# A number that has been so many different ones, with one structure of the result, is no part of what decides
# about it.
_ALIKE = 3
# So many signatures are known of a place. Arguments that are pickled may be others at each call.
_MOST_KNOWN = 1 << 16
# Cloudpickle makes the body of a function by this name. A body is for one such version of Python only.
_CODE = b"CodeType"
_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}."
_PLAIN = {int, float, str, bool, bytes, type(None)}

# The user's own functions: no type says what they take.
Function = Callable[..., object]  # type: ignore[explicit-any]
# What the structure of a result is remembered under.
Signature = tuple[object, ...]


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


class Callee:
    """What is called, and what is known of its results: one for each code, and for each name below it.

    `name` is for people. `code` is the user's function or class; without it the worker has what is called
    under `named`. What is remembered of a call is remembered under the callee.
    """

    __slots__ = ("_children", "_objects", "code", "is_method", "name", "named")

    def __init__(self, name: str, named: str = "", code: Code | None = None) -> None:
        self.name, self.named, self.code = name, named, code
        self._children: dict[str, Callee] = {}
        # It says whether this attribute is called rather than read. It is None where nobody has asked yet.
        self.is_method: bool | None = None
        # What has returned an object once is not asked again what it returns for such arguments.
        self._objects: set[tuple[object, ...]] = set()

    def child(self, key: str, name: str, named: str) -> Callee:
        """Return the callee for what is done with a result of this one: an attribute, an item, a call."""
        found = self._children.get(key)
        if found is None:
            if len(self._children) >= _MOST_CHILDREN:
                self._children.clear()
            found = self._children[key] = Callee(name, named)
        return found

    def returns_object(self, kinds: tuple[object, ...]) -> bool:
        """Whether it has returned an object for arguments of these kinds."""
        return kinds in self._objects

    def note_object(self, kinds: tuple[object, ...]) -> None:
        """Remember that it returns an object for arguments of these kinds."""
        if len(self._objects) >= _MOST_CHILDREN:
            self._objects.clear()
        self._objects.add(kinds)


class Code:
    """A function or a class of the user's, as it travels."""

    def __init__(self, thing: object, name: str) -> None:
        self.thing, self.name = thing, name
        self.pickled = pack_code(thing, name)
        self.digest = hashlib.sha256(self.pickled).digest()

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
            require_python(home.node, self.name, self.pickled)
            for prepare in before_code:
                prepare(home)
            sent = upload_bytes(self.pickled, home)
            found = new_value(NO_TENSOR, home)
            fields = [f"python::load {self.name}", [OPERAND], {}, 1]
            with home.node.lock:
                number = template_number(home.node, msgpack.packb(fields), fields)
                issue([number, sent.ref, found.ref], [found], [sent], (), home, line)
            while len(known) >= _MOST_CODE:
                known.pop(next(iter(known)))
        # The one that was called last stands last.
        known[digest] = found
        assert isinstance(found, Handle)
        return found


class Latest:
    """A function or a class of the user's as it is now: what it has captured is looked at before each call.

    It is pickled at the first call, as what it names may be defined after it, and again where something has
    changed. `outdated` is called with what was called before.
    """

    def __init__(self, thing: object, name: str, outdated: Callable[[Callee], None]) -> None:
        self._thing, self._name, self._outdated = thing, name, outdated
        # A class that is pickled may call the function.
        self._lock = RLock()
        self._known: tuple[Captured, Callee] | None = None
        self._told: set[str] = set()

    def callee(self) -> Callee:
        """Return what is called now."""
        known = self._known
        if known is not None:
            try:
                for test in known[0].tests:
                    if not test():
                        break
                else:
                    return known[1]
            # What cannot be read any more is not as it was: another thread may change it just now.
            except Exception as error:
                if is_of_handler(error):
                    raise
        return self._anew()

    def _anew(self) -> Callee:
        with self._lock:
            before = self._known
            # Another thread may have done it meanwhile.
            if before is not None and not before[0].changed():
                return before[1]
            captured, callee = Captured(self._thing, self._name), Code.callee(self._thing, self._name)
            self._known = captured, callee
            unseen = {label: what for label, what in captured.unseen.items() if label not in self._told}
            self._told |= unseen.keys()
        if before is not None and before[1] is not callee:
            self._outdated(before[1])
        for label, what in unseen.items():
            warn(
                f"{self._name} travels with `{label}`, {what}: if it changes in place, the workers keep "
                "the old one. Pass it as an argument, or put another object in its place"
            )
        return callee


def warn(text: str) -> None:
    """Warn at the user's line."""
    warn_at(text, user_line())


def forget(callee: Callee) -> None:
    """Let go of what nobody calls any more, here and on the workers. Whoever calls it still sends it anew."""
    code = callee.code
    assert code is not None
    if _callees.get(code.digest) is callee:
        _callees.pop(code.digest, None)
    for session in active:
        for node in session.nodes:
            node.code.pop(code.digest, None)
        session.places.drop(callee)


_callees: dict[bytes, Callee] = {}
# These are called before code goes to a worker that does not have it: see `ship`.
before_code: list[Callable[[Residence], None]] = []


def runs_our_code(node: Node) -> bool:
    """Whether a worker runs this version of Python, of which code travels."""
    return node.welcome.python.startswith(_PYTHON)


def require_python(there: Log, name: str, *pickled: bytes) -> None:
    """Raise `ConfigurationError` where code would travel to a worker that runs another version of Python."""
    for node in workers_of(there):
        if not runs_our_code(node) and any(_CODE in one for one in pickled):
            other = ".".join(node.welcome.python.split(".")[:2])
            raise ConfigurationError(
                f"{name} cannot travel to {node}, which runs Python {other} and not {_PYTHON[:-1]} as here: "
                "code of one version does not run in another. Run one version on all nodes, or call what is "
                "installed there: a function of a package travels by its name"
            )


def upload_bytes(data: bytes, home: Residence) -> Handle:
    """Send bytes to a node, as a tensor of its CPU."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return upload(tensor, home, stay_on_cpu=True)


# -- where a call runs ---------------------------------------------------------------------------------------


def place_of(name: str, operands: Sequence[Given], home: Residence | None) -> Residence:
    """Return where a call runs: where it was told to, else where its operands are, else the current place."""
    places = [
        o._handle.place if isinstance(o, (DistributedTensor, Operand)) else o._residence
        for o in operands
        if isinstance(o, (DistributedTensor, Operand, UnevenTensor))
    ]
    first = home or (places[0] if places else None)
    if first is None:
        return active_session().places.current()
    first.node.session.require_open()
    for place in places:
        if place is None:
            raise UsageError(f"{name} was given a tensor on the meta device, which has no values")
        place.node.session.require_open()
        if place.node is not first.node:
            place.node.require_alive()
            first.node.require_alive()
            raise PlacementError(
                f"{name} runs on {first.place}, and an argument is on {place.place}: "
                "move a tensor with x.to(device); call a function where its objects are"
            )
    first.node.require_alive()
    return first


# -- what a call may write -----------------------------------------------------------------------------------


def written_by(
    name: str, writes: Sequence[int] | None, operands: Sequence[Handle], home: Residence
) -> list[Memory]:
    """Return the memories that a call may change: of an object always, of a tensor unless told.

    Call under the lock, before the call is issued.
    """
    kept = next((h.storage for h in operands if isinstance(h.storage, ReadOnlyStorage)), None)
    if kept is not None and writes is None:
        raise UsageError(
            f"{name} may write its arguments, and a tensor of {kept.name!r} is shared for "
            "reading: say that it writes none of them, dr.remote(writes=()), or pass x.clone()"
        )
    found: list[Memory] = [
        handle.storage
        for k, handle in enumerate(operands)
        if handle.spec is NO_TENSOR or writes is None or k in writes
    ]
    return [*found, *lent_by(home)]


def lent_by(home: Residence) -> list[Memory]:
    """Return what Python on a worker may write besides: what was taken out of any object.

    Parameters of a model are that, for example. Call under the lock, before the instruction is issued.
    """
    lent, order = home.node.lent, home.node.order
    if lent.named:
        return [lent]
    # Nobody has any of that, and what was read of it may still be under way.
    if order is not None:
        order.follow(lent, stream_at(home))
    return []


# -- what is remembered of results ---------------------------------------------------------------------------


def kinds_of(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    """Return what it depends on whether a result is an object: names and flags, and other's types.

    A dictionary has a number under one name, and a tensor under another one.
    """
    values = (*args, *kwargs.values())
    return (tuple(kwargs), *[v if type(v) in (str, bool) else type(v) for v in values])


def signatures(
    callee: Callee,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    pickled: bytes,
    handles: Sequence[Handle],
    modes: tuple[object, ...],
) -> list[Signature]:
    """Return what a result's structure is remembered under: with the numbers that were given, and without
    them.

    `modes` has what else decides about it: which operands require grad, and the dtype of an autocast.
    """
    memories = [id(handle.storage) for handle in handles]
    specs: tuple[object, ...] = tuple([handle.spec for handle in handles])
    if len({*memories}) < len(memories):
        # Operands that share memory: a result in it is said to be in the first one's.
        specs = *specs, tuple([memories.index(memory) for memory in memories])
    values = (*args, *kwargs.values())
    plain = (*args, *kwargs, *kwargs.values())
    exact: object = pickled if len(pickled) <= 256 else hashlib.sha256(pickled).digest()
    if not all(type(v) in _PLAIN or isinstance(v, (DistributedTensor, Operand)) for v in values):
        return [("python", callee, exact, *modes, specs)]
    # Floats decide about no size.
    strict = tuple([float if type(v) is float else v for v in plain if type(v) in _PLAIN])
    loose = tuple([type(v) if type(v) in (int, float) else v for v in plain if type(v) in _PLAIN])
    kinds = tuple([type(v) for v in values])
    return [
        ("python", callee, kinds, numbers, *modes, specs)
        for numbers in dict.fromkeys((strict, ("any", *loose)))
    ]


def recall(table: Mapping[Signature, object], under: Sequence[Signature]) -> object:
    """Return the structure that is remembered under these signatures; None where nobody knows it."""
    known = table.get(under[0])
    if known is None and len(under) > 1:
        alike = table.get(under[1])
        known = alike[0] if isinstance(alike, tuple) and alike[1] >= _ALIKE else None
    return known


def remember(table: dict[Signature, object], under: Sequence[Signature], structure: object) -> None:
    """Note the structure of a result under these signatures."""
    if len(table) >= _MOST_KNOWN:
        table.clear()
    table[under[0]] = structure
    for loose in under[1:]:
        alike = table.get(loose)
        if not isinstance(alike, tuple):
            table[loose] = structure, 1
        # Once sizes have followed the numbers, they may again.
        elif alike[0] != structure:
            table[loose] = alike[0], -(1 << 30)
        else:
            table[loose] = structure, alike[1] + 1
