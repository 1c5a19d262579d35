"""Automatic replay on trial: a step's words leave as one replay if they are those of the step before.

It is for measuring only. It is told where a step ends, and nothing may be read within one. A failure would
not name its line, and a node with several streams is not meant. `docs/programs.md` says what was measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import msgpack
import numpy as np

from distruntime.log import log as sending
from distruntime.log.issue import template_number
from distruntime.log.node import Node
from distruntime.wire.codec import KIN, OPERAND
from distruntime.wire.messages import ARGUMENT, FIRST_TEMPLATE, FLOAT, HELD, MADE, NUMBER, PROGRAM

_NEVER = 1 << 40
# So many words gather before they are sent, by the number of segments in flight: the log's own rule.
_enough = sending._enough


class _Instruction(NamedTuple):
    """Where the words of an instruction stand: its template, its operands' and its results' indices.

    `refs` says which operands are refs. A free has template 0.
    """

    at: int
    template: int
    refs: Sequence[bool]
    results: range


class _Plan(NamedTuple):
    """What a step must look like, and what of it the replay's own words are, by their indices."""

    length: int
    integers: Sequence[int]
    # By how much each integer changes from step to step, in units of the refs that a step uses up.
    moves: np.ndarray[tuple[int], np.dtype[np.int64]]
    # What it frees of the step before, what the replay gets, and what it frees behind that.
    before: Sequence[int]
    words: Sequence[int]
    behind: Sequence[int]
    key: bytes
    fields: Sequence[object]


def _refs(pattern: object) -> Iterator[bool]:
    """Yield for each operand word of a pattern whether it is a ref."""
    if pattern == OPERAND:
        yield True
    elif pattern == ["number"]:
        yield False
    elif isinstance(pattern, list):
        for item in pattern:
            yield from _refs(item)


def _results(pattern: object) -> int:
    return sum(map(_results, pattern)) if isinstance(pattern, list) else int(pattern == 1)


@contextmanager
def withheld(node: Node) -> Iterator[None]:
    """Let the log of a node send nothing by itself, until the block ends."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(sending, "_enough", lambda flights: _NEVER))
        stack.enter_context(patch.object(node, "gathering", lambda: True))
        node.enough = _NEVER
        try:
            yield
        finally:
            stack.close()
            node.flush()


def whole_step(node: Node) -> None:
    """Send whole steps as they are, as soon as there are enough words. A step ends here."""
    if len(node.words) > _enough(len(node.flights)):
        node.flush()


class Tap:
    """Replaces the steps of one log. Its log must be withheld."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # These words stand for steps and are not sent yet. They stand before all other words of the log.
        self._waiting: list[object] = []
        self._weight = 0
        self._before: list[object] = []
        self._plan: _Plan | None = None
        self._last = np.zeros(0, dtype=np.int64)
        # So many steps were replaced, and that has taken so many seconds of the thread, without sending.
        self.replaced = 0
        self.seconds = 0.0

    def step(self) -> None:
        """Take the words of one step, which ends here. Call it on the issuing thread."""
        node = self._node
        with node.lock:
            while node.freed:
                node.words.append(-node.freed.pop())
            words = node.words[len(self._waiting) :]
            began = time.thread_time()
            if self._same(words):
                assert self._plan is not None
                self._replace(words, self._plan)
                self.seconds += time.thread_time() - began
                if self._weight > _enough(len(node.flights)):
                    self.send()
            else:
                self._plan = self._planned(words)
                self._before = words
                self.send()

    def send(self) -> None:
        """Send what there is."""
        node = self._node
        with node.lock:
            node.weight += self._weight
            self._waiting, self._weight = [], 0
            node.flush()

    def _same(self, words: list[object]) -> bool:
        """Whether each word is as in the step before, or a ref that has moved on as all others."""
        plan = self._plan
        if plan is None or len(words) != plan.length:
            return False
        now = np.array([words[k] for k in plan.integers], dtype=np.int64)
        moved, self._last = now - self._last, now
        by = moved[plan.moves > 0]
        return bool(len(by)) and np.array_equal(moved, plan.moves * by[0])

    def _replace(self, words: list[object], plan: _Plan) -> None:
        node, waiting = self._node, self._waiting
        waiting += [words[k] for k in plan.before]
        waiting.append(template_number(node, plan.key, plan.fields))
        waiting += [words[k] for k in plan.words]
        waiting += [words[k] for k in plan.behind]
        # The position behind the replay is that behind the words for which it stands. What is read waits for
        # that one, and not for where it was made.
        end = node.base + len(node.words)
        node.words, node.base, node.checked = list(waiting), end - len(waiting), end
        node.line_table = node.line_table[-1:]
        self.replaced += 1
        self._weight += plan.length

    def _walk(self, words: list[object]) -> list[_Instruction] | None:
        """Return the instructions; None if one of them is the runtime's own, or only checks."""
        found, at = [], 0
        while at < len(words):
            word = words[at]
            assert isinstance(word, int)
            if 0 <= word < FIRST_TEMPLATE:
                return None
            if word < 0:
                found.append(_Instruction(at, 0, (), range(0)))
                at += 1
                continue
            _, args, kwargs, results, *_ = self._node.templates.fields(word)
            assert isinstance(kwargs, dict)
            if results == KIN:
                return None
            refs = [*_refs(args), *(ref for value in kwargs.values() for ref in _refs(value))]
            first = at + 1 + len(refs)
            found.append(_Instruction(at, word, refs, range(first, first + _results(results))))
            at = found[-1].results.stop
        return found

    def _planned(self, words: list[object]) -> _Plan | None:
        """Return a plan for steps like this one and the one before, if these two are alike."""
        before, found = self._before, self._walk(words)
        if found is None or len(words) != len(before) or self._walk(before) != found:
            return None
        integers = [k for k, word in enumerate(words) if type(word) is int]
        self._last = np.array([words[k] for k in integers], dtype=np.int64)
        moved = self._last - np.array([before[k] for k in integers], dtype=np.int64)
        moves = np.sign(moved)
        if len(set(np.abs(moved[moves != 0]).tolist())) != 1:
            return None
        still = {words[k] for k, by in zip(integers, moves) if not by}
        return self._defined(words, found, integers, moves, still)

    def _defined(
        self,
        words: list[object],
        found: list[_Instruction],
        integers: list[int],
        moves: np.ndarray[tuple[int], np.dtype[np.int64]],
        still: set[object],
    ) -> _Plan:
        made: dict[object, int] = {}
        # The key of an argument is its ref. Every float is a number of the call.
        arguments: dict[object, int] = {}
        numbers: list[int] = []
        rows: dict[int, int] = {}
        body: list[tuple[int, list[list[object]], list[int]]] = []
        freed: set[object] = set()
        early: list[int] = []
        late: list[int] = []

        def name(ref: object) -> list[object]:
            if ref in made:
                return [MADE, made[ref]]
            if ref in still:
                return [HELD, ref]
            return [ARGUMENT, ref]

        for one in found:
            if one.template == 0:
                ref = -words[one.at]  # type: ignore[operator]
                freed.add(ref)
                if ref not in made:
                    (late if ref in arguments else early).append(one.at)
                continue
            operands: list[list[object]] = []
            for k, is_ref in enumerate(one.refs, one.at + 1):
                if is_ref:
                    operands.append(name(words[k]))
                    if operands[-1][0] == ARGUMENT:
                        arguments.setdefault(words[k], k)
                else:
                    operands.append([FLOAT, len(numbers)])
                    numbers.append(k)
            for k in one.results:
                made[words[k]] = len(made)
            makes = [made[words[k]] for k in one.results]
            body.append((rows.setdefault(one.template, len(rows)), operands, makes))
        results = [k for one in found for k in one.results if words[k] not in freed]
        at = {ref: 1 + n for n, ref in enumerate(arguments)}

        def word(named: list[object]) -> list[object]:
            kind, what = named
            if kind == ARGUMENT:
                return [ARGUMENT, at[what]]
            return [NUMBER, 1 + len(at) + what] if kind == FLOAT and isinstance(what, int) else named

        definition = [
            [list(self._node.templates.fields(number)) for number in rows],
            [[row, list(map(word, operands)), makes, None] for row, operands, makes in body],
            [],
            [[MADE, made[words[k]]] for k in results],
            len(at),
            len(numbers),
        ]
        fields: list[object] = [PROGRAM, definition, {}, 0]
        taken = [*arguments.values(), *numbers, *results]
        return _Plan(len(words), integers, moves, early, taken, late, msgpack.packb(fields), fields)
