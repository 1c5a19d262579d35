"""Operands of instructions, read off the interpreter's frames: they are what Python really calls and reads.

Objects here write down what is done with them. That has to be what was seen, in that order.
"""

# Its functions are there for their bytecode.
from __future__ import annotations

import ctypes
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distruntime.guards import operands, tracing
from distruntime.guards.instructions import Reading
from tricky_bytecode import FUNCTIONS, Event, Noted, Plain, branches, done, nested_calls


class Seen:
    """Stands for what makes guards of reads."""

    def __init__(self) -> None:
        self.base = id(sys._getframe(1))
        self.found: list[Event] = []
        self.refused: list[str] = []
        self.entered: list[tuple[str, bool, int]] = []
        self.cells: list[tuple[object, object]] = []
        self.depths: list[tuple[int, int]] = []
        self._open: dict[int, int] = {}

    def cannot_look(self, why: str) -> None:
        self.refused.append(why)

    def enter(self, frame: types.FrameType, resumed: bool) -> None:
        self.entered.append((frame.f_code.co_name, resumed, operands.place(frame)))

    def step(self, frame: types.FrameType, one: Reading) -> None:
        if frame.f_code in _WRITING:
            return
        own = own_depth(frame)
        if own is not None:
            self.depths.append((one.depth, own))
        at = functools.partial(operands.operand, frame, one.depth)
        number = self._open.pop(id(frame), None)
        if number is not None and one.behind:
            self.found[number] = (*self.found[number][:-1], at())
        event: Event = ()
        match one.kind:
            case "cell":
                name, cell = one.name, operands.cell(frame, one.number)
                assert cell is not None
                # The body of a class has its own names.
                self.cells.append((frame.f_locals.get(name, cell.cell_contents), cell.cell_contents))
            case "call":
                function, given = operands.called(frame, one.depth, one.name, one.number)
                if isinstance(function, types.MethodType):
                    function, given = function.__func__, (function.__self__, *given)
                event = "call", function, *given
            case "attribute" | "super":
                event = "attribute", at(), one.name
            case "item" | "both":
                event = one.kind, at(1), at()
            case "slice":
                event = "item", at(2), slice(at(1), at())
            case "contains":
                event = one.kind, at(), at(1)
            case "match" if at(1) is Noted:
                self.found += [("attribute", at(2), name, None) for name in at()]  # type: ignore[attr-defined]
            case "text":
                event = one.kind, at(one.number)
            case "negative" | "truth" | "iterate" | "with":
                event = one.kind, at()
        # Nothing is written down of what is done with other objects.
        if event and (isinstance(event[1], Noted) or event[1] in _METHODS):
            # Python 3.14 looks up the two methods of a `with` one by one.
            if event[0] != "with" or not self.found or self.found[-1][:-1] != event:
                self._open[id(frame)] = len(self.found)
                self.found.append((*event, None))


_METHODS = (Plain.method, Plain.of_class.__func__)  # type: ignore[attr-defined]
_WRITING = {one.__code__ for one in vars(Noted).values() if isinstance(one, types.FunctionType)}


def own_depth(frame: types.FrameType) -> int | None:
    """Return how deep the interpreter itself says that the stack is, where it says so."""
    word = ctypes.sizeof(ctypes.c_void_p)
    code, version = frame.f_code, sys.version_info[:2]
    if version == (3, 10):
        return ctypes.c_int.from_address(id(frame) + 10 * word).value
    own = operands.place(frame) + 8 * word
    if version == (3, 11):
        return ctypes.c_int.from_address(own).value - operands._slots(code)
    if version == (3, 14):
        top = ctypes.c_void_p.from_address(own).value or 0
        return (top - own - 2 * word) // word - operands._slots(code)
    return None


def seen(function: Callable[..., object], *given: object) -> Seen:
    """Call a function while it is looked at."""
    done.clear()
    found = Seen()
    tracing.traced(found, function, *given)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_each_operand_is_what_python_uses(function: Callable[..., object]) -> None:
    found = seen(function, Noted("a"))
    for k, (event, was) in enumerate(zip(found.found, done)):
        assert event == was, (k, found.found[max(k - 3, 0) : k + 3], done[max(k - 3, 0) : k + 3])
    assert len(found.found) == len(done) > 5
    assert all(one is other for one, other in found.cells)
    # Python 3.12 and 3.13 do not say how deep their stacks are.
    assert all(one == other for one, other in found.depths)
    assert bool(found.depths) == (sys.version_info[:2] not in ((3, 12), (3, 13)))


def test_it_is_seen_again_and_again() -> None:
    a = Noted("a")
    for _ in range(3):
        assert [event[:-1] for event in seen(branches, a).found][:2] == [("truth", a), ("attribute", a, "x")]
        assert not seen(lambda: None).found


def test_equal_functions_are_each_looked_at() -> None:
    spaces: list[dict[str, Any]] = [{}, {}]
    for space in spaces:
        exec(compile("def calls(a):\n    a(1)", __file__, "exec"), space)
    one, other = [space["calls"] for space in spaces]
    assert one.__code__ == other.__code__ and one.__code__ is not other.__code__
    a = Noted("a")
    assert len(seen(lambda: (one(a), other(a))).found) == 2


# -- generators ----------------------------------------------------------------------------------------------


def test_a_generator_that_was_begun_before_goes_on() -> None:
    def counts() -> Iterator[int]:
        yield from range(9)

    begun = [counts() for _ in range(20)]
    for one in begun:
        next(one)

    def goes_on() -> None:
        # The objects of their frames are made where those of frames that have ended were.
        for _ in range(50):
            list(counts())
        for one in begun:
            next(one)

    found = seen(goes_on)
    places = {place for name, resumed, place in found.entered if not resumed}
    again = [place for name, resumed, place in found.entered if resumed and place not in places]
    assert len(set(again)) == len(begun)
    # Those of the call itself have begun where they go on.
    own = [place for name, resumed, place in found.entered if resumed and place in places]
    assert len(own) >= 50


def test_a_generator_that_was_begun_before_is_thrown_into() -> None:
    def catches() -> Iterator[int]:
        try:
            yield 1
        except ValueError:
            yield 2

    begun = catches()
    next(begun)
    entered = seen(lambda: begun.throw(ValueError())).entered
    assert [resumed for name, resumed, place in entered if name == "catches"] == [True]


# -- where nobody can look -----------------------------------------------------------------------------------


@pytest.mark.parametrize("unknown", ["version", "implementation"])
def test_an_unknown_interpreter_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, unknown: str) -> None:
    assert operands.known()
    if unknown == "version":
        monkeypatch.setattr(operands, "_VERSION", (3, 99))
    else:
        monkeypatch.setattr(sys.implementation, "name", "pypy")
    assert not operands.known()
    found = seen(nested_calls, Noted("a"))
    assert not found.found and "does not know how this Python" in found.refused[0]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python has no sys.monitoring")
@pytest.mark.parametrize("taken", [(4,), (3, 4, 5), (0, 1, 2, 3, 4, 5)])
def test_other_tools_have_numbers(taken: tuple[int, ...]) -> None:
    monitoring = sys.monitoring  # type: ignore[attr-defined]
    free = [number for number in taken if monitoring.get_tool(number) is None]
    for number in free:
        monitoring.use_tool_id(number, "another")
    try:
        found = seen(nested_calls, Noted("a"))
    finally:
        for number in free:
            assert monitoring.get_tool(number) == "another"
            monitoring.free_tool_id(number)
    if len(taken) == 6:
        assert not found.found and "numbers of sys.monitoring" in found.refused[0]
    else:
        assert len(found.found) == len(done) and not found.refused


def test_two_threads_see_what_each_of_them_reads() -> None:
    a = [Noted("a"), Noted("b")]
    found: list[Seen] = []
    together = threading.Barrier(2)

    def reads(own: Noted, k: int) -> None:
        for _ in range(30):
            own(k)
        together.wait(20)
        for _ in range(30):
            own(k)[k]

    def look(k: int) -> None:
        one = Seen()
        found.append(one)

        def work() -> None:
            together.wait(20)
            reads(a[k], k)

        tracing.traced(one, work)  # type: ignore[arg-type]

    threads = [threading.Thread(target=look, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for one in found:
        calls = [event for event in one.found if event[0] == "call"]
        assert len(calls) == 60 and len({event[1] for event in calls}) == 1
        assert len(one.found) == 90
    assert {one.found[0][1] for one in found} == {*a}
