"""What a function's Python reads while it is recorded: each read becomes a guard, or a reason to record anew.

Each instruction is looked at before it runs, with its operands. A call of a C function reads all that its
arguments hold. If the function is not known to depend on them alone, what it gives is a reason.
"""

from __future__ import annotations

import decimal
import operator
import sys
import types
from collections.abc import Callable, Mapping, Set

import torch

from ..log.tape import recorded
from . import operands
from .arithmetic import Arithmetic, operator_of
from .attributes import Attributes, Brought
from .calls import Calls
from .contents import CONTAINERS, FIXED, Contents, Met, is_python_method
from .instructions import Reading
from .notes import Notes
from .reachable import is_remote
from .seen import MISSING, SIMPLE
from .takers import stays


class Reads:
    """What one call reads, as its frames tell of their instructions."""

    def __init__(self, numbers: Arithmetic, brought: Brought) -> None:
        self.notes = Notes(numbers)
        # The id of the frame that calls the function.
        self.base = 0
        self._contents = Contents(self.notes)
        self._attributes = Attributes(self.notes, self._contents, brought)
        self._calls = Calls(self.notes, self._contents, self._attributes)
        # Frames that this call has begun, by place. A generator that was begun before has another one.
        self._begun: set[int] = set()

    def settle(self, made: Set[int]) -> list[str]:
        """Let go of what only a call that runs needs; see `Notes.settle`."""
        for then in self._calls.then.values():
            then(MISSING)
        self._calls.then.clear()
        return self.notes.settle(made)

    def step(self, frame: types.FrameType, one: Reading) -> None:
        """Note what a frame's next instruction reads.

        It stands in the user's stack, where an error would be taken for one of the user's.
        """
        if recorded.aside:
            return
        try:
            if self._calls.then and (then := self._calls.then.pop(id(frame), None)) is not None:
                # A call that has raised has given nothing.
                then(operands.operand(frame, one.depth) if one.behind else MISSING)
            if one.kind:
                _STEPS[one.kind](self, frame, one)
        except Exception as error:
            # A signal's handler has raised it just now.
            if id(error) == recorded.thrown:
                raise
            kind = f"{type(error).__name__}: {error}"
            self.notes.reason(f"what it reads could not be looked at ({kind})", frame, None)

    def enter(self, frame: types.FrameType, resumed: bool) -> None:
        """Note that a frame begins to run, or goes on."""
        if recorded.aside:
            return
        self.notes.numbers.literals(frame.f_code.co_consts)
        place = operands.place(frame)
        if not resumed:
            self._begun.add(place)
        elif place not in self._begun:
            self.notes.reason(f"the generator {frame.f_code.co_name!r} was begun before", frame.f_back, None)

    def _global(self, frame: types.FrameType, one: Reading) -> None:
        name, space = one.name, frame.f_globals
        if name in space:
            self.notes.note(name, "item", space, name, space[name])
        else:
            self.notes.note(name, "item", space, name, MISSING)
            self.notes.note(name, "item", frame.f_builtins, name, frame.f_builtins.get(name, MISSING))

    def cannot_look(self, why: str) -> None:
        """Note that nobody sees what this call reads."""
        text = f"nobody can see what it reads: {why} ({sys.version.split()[0]})"
        self.notes.reasons.setdefault(text, None)

    def _match(self, frame: types.FrameType, one: Reading) -> None:
        """Note what a pattern with the name of a class reads: `case Point(x, y=1)`."""
        names, kind, owner = (operands.operand(frame, one.depth, below) for below in range(3))
        if not isinstance(kind, type):
            return
        matches = isinstance(owner, kind)
        self._calls.class_of(owner)
        # An abstract class may be told of another one.
        if type(kind) is not type and not isinstance(owner, torch.Tensor):
            self.notes.note("isinstance()", "given", isinstance, (owner, kind), matches)
        if matches:
            self._calls.hooked(self._attributes.read(kind, "__match_args__", frame), frame)
            first = getattr(kind, "__match_args__", ())[: one.number]
            for name in (*first, *names):  # type: ignore[misc]
                self._calls.hooked(self._attributes.read(owner, str(name), frame), frame)

    def _import(self, frame: types.FrameType, one: Reading) -> None:
        name = one.name
        self.notes.note(name, "item", sys.modules, name, sys.modules.get(name, MISSING))

    def _cell(self, frame: types.FrameType, one: Reading) -> None:
        cell = operands.cell(frame, one.number)
        if cell is not None:
            try:
                self.notes.note(one.name, "cell", cell, None, cell.cell_contents)
            # It has no value yet: Python raises for it.
            except ValueError:
                return

    def _attribute(self, frame: types.FrameType, one: Reading) -> None:
        hooks = self._attributes.read(operands.operand(frame, one.depth), one.name, frame)
        self._calls.hooked(hooks, frame)

    def _super(self, frame: types.FrameType, one: Reading) -> None:
        owner, cls = operands.operand(frame, one.depth), operands.operand(frame, one.depth, 1)
        # In a method of a metaclass the owner is a class, and none below the metaclass.
        kind = owner if isinstance(owner, type) and cls in owner.__mro__ else type(owner)
        if isinstance(cls, type) and cls in kind.__mro__:
            self._calls.hooked(self._attributes.of_super(owner, kind, cls, one.name), frame)

    def _item(self, frame: types.FrameType, one: Reading) -> None:
        key, owner = operands.operand(frame, one.depth), operands.operand(frame, one.depth, 1)
        self._contents.part(owner, key, frame)

    def _slice(self, frame: types.FrameType, one: Reading) -> None:
        self._contents.whole(operands.operand(frame, one.depth, 2), frame)

    def _contains(self, frame: types.FrameType, one: Reading) -> None:
        owner, item = operands.operand(frame, one.depth), operands.operand(frame, one.depth, 1)
        if isinstance(owner, (dict, types.MappingProxyType)):
            self._contents.part(owner, item, frame)
        else:
            # C code compares the item with all of them.
            self._contents.deep(item, frame)
            self._contents.deep(owner, frame)

    def _iterate(self, frame: types.FrameType, one: Reading) -> None:
        self._contents.whole(operands.operand(frame, one.depth), frame)

    def _both(self, frame: types.FrameType, one: Reading) -> None:
        right, left = operands.operand(frame, one.depth), operands.operand(frame, one.depth, 1)
        term = self.notes.numbers.follows(operator_of(one.name), (left, right))
        if term is not None:
            self._calls.follow(frame, term)
            return
        met = Met()
        for value in (left, right):
            self._decimal(value)
            self._contents.gather(value, frame, met)
        # An operator of a remote tensor takes a number with it, in a word of its own.
        counts = one.name in ("+=", "INPLACE_ADD") and type(right) in (int, float)
        self._contents.resolve(met, frame, met.remote, counts)

    def _decimal(self, value: object) -> None:
        if isinstance(value, decimal.Decimal):
            self.notes.note("decimal.getcontext()", "given", _decimals, (), _decimals())

    def _negative(self, frame: types.FrameType, one: Reading) -> None:
        value = operands.operand(frame, one.depth)
        term = self.notes.numbers.follows(operator.neg, (value,))
        if term is not None:
            self._calls.follow(frame, term)
        else:
            self._decimal(value)
            self._contents.whole(value, frame)

    def _text(self, frame: types.FrameType, one: Reading) -> None:
        self._contents.deep(operands.operand(frame, one.depth, one.number), frame)

    def _with(self, frame: types.FrameType, one: Reading) -> None:
        self._calls.entered(operands.operand(frame, one.depth), frame)

    def _truth(self, frame: types.FrameType, one: Reading) -> None:
        value = operands.operand(frame, one.depth)
        term = self.notes.numbers.term(value)
        if term is not None:
            self.notes.numbers.gave((bool, term), bool(value))
        elif isinstance(value, CONTAINERS):
            self._contents.dunders(type(value), frame)
            self._contents.length(value)
        elif type(value) not in FIXED:
            self._contents.whole(value, frame)

    def _give(self, frame: types.FrameType, one: Reading) -> None:
        value = operands.operand(frame, one.depth)
        if type(value) in SIMPLE and type(value) is not float:
            return
        if not isinstance(value, torch.Tensor) and not stays(frame, self.base, self._calls.in_c):
            self._contents.deep(value, None)

    def _put(self, frame: types.FrameType, one: Reading) -> None:
        # A slice has two numbers, where a key is one thing.
        above = 2 if one.name == "STORE_SLICE" else 1
        key, owner, value = (operands.operand(frame, one.depth, below) for below in (0, above, above + 1))
        if isinstance(owner, dict):
            self._contents.deep(key, None)
        elif not isinstance(owner, CONTAINERS) and not is_python_method(owner, "__setitem__"):
            met = Met()
            self._contents.gather(value, None, met)
            self._contents.resolve(met, frame, follows=is_remote(owner))

    def _set(self, frame: types.FrameType, one: Reading) -> None:
        owner, value = operands.operand(frame, one.depth), operands.operand(frame, one.depth, 1)
        self._attributes.put(owner, one.name, value)

    def _hash(self, frame: types.FrameType, one: Reading) -> None:
        at = {"BUILD_SET": range(one.number), "BUILD_MAP": range(1, 2 * one.number, 2), "MAP_ADD": (1,)}
        for below in at.get(one.name, (0,)):
            self._contents.deep(operands.operand(frame, one.depth, below), None)

    def _call(self, frame: types.FrameType, one: Reading) -> None:
        function, arguments = operands.called(frame, one.depth, one.name, one.number)
        if one.name == "CALL_FUNCTION_EX":
            for below in (0, 1):
                self._contents.whole(operands.operand(frame, one.depth, below), frame)
        self._calls.call(function, arguments, frame)


def _decimals() -> str:
    """Return what the arithmetic of decimals depends on besides its operands."""
    return repr(decimal.getcontext())


_STEPS: Mapping[str, Callable[[Reads, types.FrameType, Reading], None]] = {
    "global": Reads._global,
    "cell": Reads._cell,
    "attribute": Reads._attribute,
    "super": Reads._super,
    "import": Reads._import,
    "item": Reads._item,
    "slice": Reads._slice,
    "contains": Reads._contains,
    "iterate": Reads._iterate,
    "both": Reads._both,
    "negative": Reads._negative,
    "truth": Reads._truth,
    "text": Reads._text,
    "with": Reads._with,
    "match": Reads._match,
    "give": Reads._give,
    "put": Reads._put,
    "set": Reads._set,
    "hash": Reads._hash,
    "call": Reads._call,
}
