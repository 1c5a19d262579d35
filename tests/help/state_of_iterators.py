"""Kinds of state: iterators that live outside, and functions that run in threads and coroutines."""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from state_kinds import Here, Holder, State, even, kind

# -- iterators that live outside -----------------------------------------------------------------------------


@kind("recorded or refused", "count")
def iterator_that_counts(here: Here) -> State:
    numbers = itertools.count(1)
    return (lambda: next(numbers)), (lambda k: next(numbers))


@kind("recorded or refused", "generator")
def generator_outside(here: Here) -> State:
    numbers = (k for k in range(99))
    return (lambda: next(numbers)), (lambda k: next(numbers))


@kind("recorded or refused", "iterator")
def iterator_of_a_list(here: Here) -> State:
    numbers = iter([*range(99)])
    return (lambda: next(numbers)), (lambda k: next(numbers))


@kind("recorded or refused", "cycle")
def iterator_that_gives_the_same(here: Here) -> State:
    """Each call gets an equal value, until one is skipped."""
    numbers = itertools.cycle([1.0, 2.0])

    def read() -> float:
        first = next(numbers)
        next(numbers)
        return first

    return read, (lambda k: next(numbers))


@kind("recorded or refused", "generator")
def generator_that_is_sent_to(here: Here) -> State:
    def echo() -> Any:
        v = 1.0
        while True:
            v = (yield v) or v

    values = echo()
    next(values)
    return (lambda: next(values)), (lambda k: values.send(float(k)))


@kind("refused", "change")
def list_that_is_emptied(here: Here) -> State:
    """It is as long as before when the call ends."""
    values = [float(k) for k in range(30)]

    def read() -> float:
        found = values.pop()
        values.insert(0, found)
        return found

    return read, (lambda k: None)


@kind("guarded or recorded", "thread|SimpleQueue")
def function_in_another_thread(here: Here) -> State:
    values = [1.0]
    pool = here.enter_context(ThreadPoolExecutor(1))
    return (lambda: pool.submit(lambda: values[0]).result()), (lambda k: values.__setitem__(0, float(k)))


@kind()
def coroutine(here: Here) -> State:
    values = [1.0]

    async def inner() -> float:
        return values[0]

    async def outer() -> float:
        return await inner()

    def read() -> float:
        try:
            outer().send(None)
        except StopIteration as end:
            return end.value
        return 0.0

    return read, (lambda k: values.__setitem__(0, float(k)))


@kind("guarded or recorded", "_getframe|frame")
def frame_of_the_caller(here: Here) -> State:
    box = Holder()

    def given() -> float:
        return sys._getframe(1).f_locals["mine"]

    def read() -> float:
        mine = box.v
        return given() + 0 * mine

    return read, (lambda k: setattr(box, "v", float(k)))


@kind()
def function_found_by_its_name(here: Here) -> State:
    class Table:
        def one(self) -> float:
            return 1.0

        def two(self) -> float:
            return 2.0

    table, names = Table(), ["one"]
    return (lambda: getattr(table, names[0])()), (lambda k: names.__setitem__(0, "two" if even(k) else "one"))
