"""What one recorded call has read: notes of it, and the reasons for which each call must be recorded."""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping, Set

import torch

from ..log.line import line_from, line_text, of_a_library, own_line
from .arithmetic import Arithmetic
from .functions import is_traced, is_trusted
from .generators import state_of
from .seen import HEAP, LISTED, MISSING, SIMPLE, TENSOR, Key, Seen, key_of, looked_up, same

DRAWS = "it draws random numbers in this process, by"
DRAW_OUTSIDE = (
    "Draw on the worker, torch.rand(..., device=x.device), or draw before, and pass the numbers as "
    "an argument"
)
_HOLDERS = (types.FunctionType, types.MethodType, staticmethod, classmethod, functools.partial, property)


class Notes:
    """What one call has read, of what was there before it."""

    def __init__(self, numbers: Arithmetic) -> None:
        self.numbers = numbers
        # Each read, by its owner's id, its form and its key.
        self.found: dict[Key, Seen] = {}
        # Why each call must be recorded, with the object that it depends on, if there is one.
        self.reasons: dict[str, object] = {}
        # The ids of objects that the call has made, once it is over.
        self.made: Set[int] = frozenset()
        # What counts an optimizer's steps and decides something, by id, with the line at which it does.
        self.asked: dict[int, str] = {}
        # Each generator of random numbers that C code has got, by id, with what gives its state, the state
        # that it was in, and the line.
        self._generators: dict[int, tuple[object, Callable[[], object], object, str]] = {}

    def note(self, path: str, form: str, owner: object, key: object, value: object) -> None:
        """Note that something was read, and what it was."""
        held = TENSOR if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor else value
        one = Seen(path, form, owner, key, held)
        name = key_of(one)
        if self.found.setdefault(name, one) is one and isinstance(value, _HOLDERS):
            self.function(value)
        self.numbers.read(name, value)

    def function(self, value: object) -> None:
        """Note what a function is, as it can be changed where it stands."""
        while isinstance(value, _HOLDERS[1:]):
            inner = value.fget if isinstance(value, property) else getattr(value, "func", None)
            value = inner if inner is not None else getattr(value, "__func__", None)
        if isinstance(value, functools._lru_cache_wrapper):
            value = value.__wrapped__
        if not isinstance(value, types.FunctionType) or of_a_library(value.__code__.co_filename):
            return
        if (id(value), "attribute", "__code__") not in self.found:
            for name in ("__code__", "__defaults__", "__kwdefaults__"):
                self.note(f"{value.__name__}.{name}", "attribute", value, name, getattr(value, name))
            self.numbers.literals(value.__defaults__ or ())
            for key, default in (value.__kwdefaults__ or {}).items():
                path = f"{value.__name__}.__kwdefaults__[{key!r}]"
                self.note(path, "item", value.__kwdefaults__, key, default)

    def reason(self, what: str, frame: types.FrameType | None, owner: object) -> str:
        text = f"{what}\n  at {line_text(own_line(line_from(frame)))}"
        self.reasons.setdefault(text, owner)
        return text

    def asks_step(self, tensor: torch.Tensor, frame: types.FrameType | None) -> None:
        """Note that what a tensor holds decides something, if it counts an optimizer's steps."""
        if id(tensor) in self.numbers.steps and id(tensor) not in self.asked:
            line = line_text(own_line(line_from(frame)))
            self.asked[id(tensor)] = (
                "it decides something by the number of an optimizer's steps, and each call counts one. "
                f"Compute with step.item(), or keep the number outside\n  at {line}"
            )

    def generator(self, owner: object, frame: types.FrameType | None) -> None:
        """Note that C code has got a generator of random numbers, and may draw from it."""
        state = None if id(owner) in self._generators else state_of(owner)
        if state is not None:
            line = line_text(own_line(line_from(frame)))
            self._generators[id(owner)] = owner, state, state(), line

    def _note_draws(self) -> None:
        """Note the generators that were drawn from."""
        for owner, state, before, line in self._generators.values():
            if state() != before:
                self.reasons[f"{DRAWS} a {type(owner).__name__}. {DRAW_OUTSIDE}\n  at {line}"] = owner
        self._generators.clear()

    def unseen(self, what: str, frame: types.FrameType, owner: object) -> None:
        # torch's own Python depends on nothing else.
        if is_trusted(frame.f_code.co_filename):
            return
        self.reason(
            f"{what}, and nobody can see whether that changes. Read it outside, and pass what it gives as an "
            "argument",
            frame,
            owner,
        )

    def cls(self, kind: type, name: str) -> None:
        """Note what a class and its bases have under a name. Classes of C code cannot change."""
        if kind.__flags__ & HEAP and (id(kind), "class", name) not in self.found:
            self.note(f"{kind.__name__}.{name}", "class", kind, name, looked_up(kind, name))

    def after_class(self, kind: type, cls: type, name: str) -> object:
        """Note what the bases behind one of them have under a name, and return that."""
        bases = kind.__mro__
        for base in bases[bases.index(cls) + 1 :]:
            self.cls(base, name)
            if name in vars(base):
                return vars(base)[name]
        return MISSING

    def settle(self, made: Set[int]) -> list[str]:
        """Let go of what the call itself has made, or has held alone. Return the reasons that are left.

        `made` are the ids of objects that were not there before. What the call has put there itself is no
        state that it depends on.
        """
        self.numbers.settle()
        self.made = made
        self._note_draws()
        self.found = {key: one for key, one in self.found.items() if not _of_made(one, made)}
        self.reasons = {text: owner for text, owner in self.reasons.items() if id(owner) not in made}
        # How often notes and reasons hold each thing, by its id.
        own = Counter(map(id, self.reasons.values()))
        for one in self.found.values():
            own.update(_held(one))
        # What goes may have been all that held something else.
        while dead := self._dead(own):
            for key in dead:
                if isinstance(key, str):
                    own[id(self.reasons.pop(key))] -= 1
                else:
                    own.subtract(_held(self.found.pop(key)))
        self.numbers.keep(self.found)
        return list(self.reasons)

    def _dead(self, own: Mapping[int, int]) -> list[Key | str]:
        """Return the notes and reasons about things that nothing but notes and reasons holds."""
        thing: object = object()
        # The variable, and the argument of the function that counts.
        spare = sys.getrefcount(thing)
        dead: list[Key | str] = []
        for key, one in self.found.items():
            thing = one.holder
            alone = sys.getrefcount(thing) - spare <= own[id(thing)]
            if one.form == "given":
                for thing in one.key:  # type: ignore[attr-defined]
                    count = sys.getrefcount(thing) - spare
                    alone = alone or (type(thing) not in SIMPLE and count <= own[id(thing)])
            if alone:
                dead.append(key)
        # The iterator of a dictionary's items would hold one more reference.
        for text in self.reasons:
            thing = self.reasons[text]
            if sys.getrefcount(thing) - spare <= own[id(thing)]:
                dead.append(text)
        return dead

    def renew(self) -> dict[Key, object]:
        """Let each read say what is there now. Return what was read where that was something else.

        Something that the call itself has put there is no state that it depends on. The next call finds what
        is there now. What is not plain counts as MISSING, and as TENSOR if it says nothing of what was there
        before the call: it was made meanwhile, or a tensor is there, which others look at.
        """
        changed: dict[Key, object] = {}
        for key, one in list(self.found.items()):
            try:
                now = one.now()
            except (LookupError, AttributeError, ValueError):
                now = MISSING
            if (isinstance(now, torch.Tensor) and one.held is TENSOR) or one.is_as(one.held, now):
                continue
            changed[key] = self._read_before(one, now)
            one.held = TENSOR if isinstance(now, torch.Tensor) and type(now) is not torch.Tensor else now
            if now is MISSING and one.form != "item" and one.form != "class":
                del self.found[key]
        return changed

    def _read_before(self, one: Seen, now: object) -> object:
        """Return what tells of what has stood there before the call."""
        was = one.held
        if was is TENSOR or (isinstance(now, torch.Tensor) and type(now) is not torch.Tensor):
            return TENSOR
        if type(was) in SIMPLE:
            return was
        if one.form in LISTED:
            # Equal texts may be made anew.
            equal = len(was) == len(now) and all(map(same, was, now))  # type: ignore[arg-type, call-overload]
            return TENSOR if equal else MISSING
        # This package puts functions of its own in the place of some, and takes them away.
        own = isinstance(was, types.FunctionType) and not is_traced(was.__code__.co_filename)
        made = one.form != "bytes" and id(was) in self.made
        return TENSOR if own or made else MISSING


def _of_made(one: Seen, made: Set[int]) -> bool:
    given = one.form == "given" and any(id(thing) in made for thing in one.key)  # type: ignore[attr-defined]
    return given or id(one.holder) in made


def _held(one: Seen) -> list[int]:
    """Return the ids of what a note holds, and of what is in a list or tuple of its own."""
    copied = one.key if one.form == "given" else one.held if one.form in LISTED else ()
    return [id(one.holder), id(one.held), *map(id, copied)]  # type: ignore[call-overload]
