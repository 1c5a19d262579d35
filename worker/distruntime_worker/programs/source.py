"""Straight-line Python for a program: a local for each value, which is let go of behind its last use.

In the source stand only names and numbers of our own making. Operators and constants come in by closure.
Where it was seen to be right, an operator is torch's own Python function: these parse their arguments in C++
and take 1.3 us where an `OpOverload` takes 2.2 us (torch 2.13). Which overload such a function takes depends
on the arguments.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence, Set

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distruntime.wire.codec import KIN, OPERAND, unpack_constant
from distruntime.wire.messages import ARGUMENT, FLOAT, HELD, MADE, NUMBER, Plain

from ..values.step import Operator, Pattern, Slots, Words
from .definition import Definition, Instruction, Name
from .regions import Compiled, Inputs, Region

_MODULES = (torch._C._VariableFunctions, torch._C._nn)


class _Reached(Exception):
    """A call has reached an operator, which does not run."""


class _Look(TorchDispatchMode):
    """Notes the first operator that is reached, with its arguments, and ends the call there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: tuple[object, ...] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing compiles here, and to keep Dynamo away torch would import it: some seconds.
        return False

    def __torch_dispatch__(
        self, func: object, types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> object:
        self.seen = func, args, kwargs or {}
        raise _Reached


def direct(call: Operator) -> Operator:
    """Return an operator without the part of its call that is in Python."""
    return call._op if isinstance(call, torch._ops.OpOverload) else call


def binding(call: Operator) -> Operator | None:
    """Return torch's own Python function that may be this overload's, or None if there is none."""
    if not isinstance(call, torch._ops.OpOverload):
        return None
    namespace, _, base = call._schema.name.partition("::")
    if namespace != "aten" or base.startswith("__"):
        return None
    arguments = call._schema.arguments
    owners: tuple[object, ...] = _MODULES
    if arguments and arguments[0].name == "self":
        owners = (torch._C.TensorBase, *_MODULES)
    for owner in owners:
        found: Operator | None = getattr(owner, base, None)
        if found is not None:
            return found
    return None


def alike(one: Callable[[], object], other: Callable[[], object]) -> bool:
    """Whether two calls reach the same operator with the same arguments. Neither of them runs it."""
    seen = _reached(one)
    return seen is not None and _same(seen, _reached(other))


def _reached(call: Callable[[], object]) -> tuple[object, ...] | None:
    look = _Look()
    try:
        with look:
            call()
    # Whatever it raises, it has not taken these arguments.
    except Exception:
        pass
    return look.seen


def _same(one: object, other: object) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) or one is other:
        return one is other
    return type(one) is type(other) and bool(one == other)


# A frame of this file is ours: see `objects.py`.
FILE = "<distruntime::program>"
_PREFIX = {MADE: "v", ARGUMENT: "a", HELD: "c", NUMBER: "n"}
Straight = Callable[[Slots, Words, int], None]
Locals = dict[str, object]


class NotBegun(Exception):
    """A region has not run, as one of its inputs does not exist."""


class Stopped(Exception):
    """A run has ended in an error: at this instruction, with these locals.

    `failed` are the instructions that the error is of. The others run from `at` on.
    """

    def __init__(self, at: int, values: Locals, failed: range) -> None:
        super().__init__(at)
        self.at, self.values, self.failed = at, values, failed


def local(name: Name) -> str:
    """Return what a value is called in the source."""
    return f"{_PREFIX[name[0]]}{name[1]}"


def last_uses(definition: Definition, emptied: Set[Name]) -> list[list[Name]]:
    """Return for each instruction the values that nobody needs behind it.

    These are made here, or were under a ref that is `emptied`.
    """
    found: dict[Name, int] = {}
    for at, instruction in enumerate(definition.instructions):
        for name in (*instruction.words, *(instruction.kin or ())):
            if name[0] == MADE or name in emptied:
                found[name] = at
        for number in instruction.makes:
            found.setdefault((MADE, number), at)
    for name in (*(name for _, name in definition.kept), *definition.results):
        found.pop(name, None)
    behind: list[list[Name]] = [[] for _ in definition.instructions]
    for name, at in found.items():
        behind[at].append(name)
    return behind


class Source:
    """The source of a program. `emptied` are the held values and the arguments whose refs it empties."""

    def __init__(
        self,
        definition: Definition,
        patterns: Sequence[Pattern],
        emptied: Set[Name],
        device: Callable[[torch.device], torch.device],
    ) -> None:
        self._patterns, self._device = patterns, device
        self._closure: dict[str, object] = {}
        self._behind: list[list[Name]] = []
        # The key is the first instruction of a region that is compiled.
        self._regions: dict[int, Region] = {}
        self._names = itertools.count()
        # These words are read at the beginning.
        self._used: dict[Name, None] = {}
        behind, count = last_uses(definition, emptied), len(definition.instructions)
        self._behind = behind
        # Each line has the number of its instruction, and its call as an expression if it has one.
        body: list[tuple[int, str, str]] = []
        for at, instruction in enumerate(definition.instructions):
            front, call = self._call(at, instruction)
            body.append((at, f"{front}f{at}{call}", call))
            if behind[at]:
                body.append((at, "del " + ", ".join(map(local, behind[at])), ""))
        first = 1 + definition.tensors + definition.numbers
        end = [f"slots[{ref}] = {self._use(name)}" for ref, name in definition.kept]
        end += [f"slots[p[i+{first + k}]] = {self._use(name)}" for k, name in enumerate(definition.results)]
        # An argument may be under a ref that is emptied after it.
        head = [_read(name, emptied) for name in sorted(self._used, key=lambda name: name in emptied)]
        unread = sorted(emptied - self._used.keys())
        head += [f"slots.pop({ref}, None)" for kind, ref in unread if kind == HELD]
        self._lines = [*((-1, line, "") for line in head), *body, *((count, line, "") for line in end)]
        self._rows = [instruction.row for instruction in definition.instructions]

    def _use(self, name: Name) -> str:
        if name[0] != MADE:
            self._used[name] = None
        return local(name)

    def _constant(self, value: object) -> str:
        if value is None or value is True or value is False or type(value) is int:
            return repr(value)
        name = f"k{next(self._names)}"
        self._closure[name] = value
        return name

    def _call(self, at: int, instruction: Instruction) -> tuple[str, str]:
        """Return what stands before the name of an instruction's function, and what stands behind it."""
        pattern = self._patterns[instruction.row]
        words = iter(instruction.words)

        def word(part: Plain) -> str:
            if part == OPERAND or part == ["number"]:
                name = next(words)
                return self._constant(name[1]) if name[0] == FLOAT else self._use(name)
            if isinstance(part, list) and part and part[0] == "list":
                return "[" + ", ".join(word(item) for item in part[1:]) + "]"
            constant = unpack_constant(part)
            return self._constant(self._device(constant) if isinstance(constant, torch.device) else constant)

        given = [word(part) for part in pattern.args]
        # The template of this row has seen to it that these are names.
        given += [f"{key}={word(part)}" for key, part in pattern.kwargs.items()]
        for name in instruction.kin or ():
            self._use(name)
        self._closure[f"f{at}"] = direct(pattern.call)
        makes = iter(instruction.makes)

        def target(part: Plain) -> str:
            if isinstance(part, list):
                return "(" + "".join(f"{target(item)}, " for item in part) + ")"
            return f"v{next(makes)}" if part == 1 else "_"

        results = pattern.results
        front = "" if results in (0, [], KIN) else f"{target(results)} = "
        return front, f"({', '.join(given)})"

    def first_run(
        self, slots: Slots, p: Words, i: int, regions: Sequence[Region] = (), inputs: Inputs | None = None
    ) -> Straight:
        """Run the program line by line, and return the function for the runs that follow.

        Before each call, see whether torch's own function of its operator does the same here. Note what
        `regions` get and make in `inputs`. Raise `Stopped` from the error of an instruction.
        """
        begun = {region.first: region for region in regions}
        ended = {region.behind: region for region in regions}
        values: Locals = {"slots": slots, "p": p, "i": i}
        quick: dict[str, Operator] = {}
        for at, line, call in self._lines:
            try:
                if inputs is not None and at in ended:
                    region = ended.pop(at)
                    inputs.note_made(region, [values[local(name)] for name in region.outputs])
                if call and inputs is not None and at in begun:
                    region = begun[at]
                    inputs.note(region, [values[local(name)] for name in region.inputs])
                if call:
                    found = self._binding(at, call, values)
                    if found is not None:
                        quick[f"f{at}"] = found
                exec(line, self._closure, values)
            # Whatever the error is, it is the instruction's.
            except Exception as error:
                raise Stopped(at, values, range(at, at + 1)) from error
        self._closure.update(quick)
        return self._function()

    def _function(self) -> Straight:
        source = "def run(slots, p, i):\n    pass\n"
        source += "".join(f"    {line}\n" for _, line, _ in self._lines)
        exec(compile(source, FILE, "exec"), self._closure)
        run: Straight = self._closure["run"]  # type: ignore[assignment]
        return run

    def with_regions(self, regions: Sequence[tuple[Region, Compiled]]) -> tuple[Source, Straight]:
        """Return this source with each region as one call, and its function."""
        other = copy.copy(self)
        other._closure = {name: value for name, value in self._closure.items() if name != "run"}
        other._regions = {region.first: region for region, _ in regions}
        inside = {at for region, _ in regions for at in range(region.first, region.behind)}
        calls = {region.first: call for region, call in regions}
        lines: list[tuple[int, str, str]] = []
        for at, line, call in self._lines:
            if at not in inside:
                lines.append((at, line, call))
            elif call and at in other._regions:
                other._closure[f"r{at}"] = calls[at]
                lines += self._region(other._regions[at])
        other._lines = lines
        return other, other._function()

    def _region(self, region: Region) -> Iterator[tuple[int, str, str]]:
        given = ", ".join(map(local, region.inputs))
        front = "".join(f"{local(name)}, " for name in region.outputs)
        yield region.first, f"{front and front + '= '}r{region.first}({given})", ""
        known = {*region.inputs, *region.outputs}
        gone = [
            name for at in range(region.first, region.behind) for name in self._behind[at] if name in known
        ]
        if gone:
            yield region.first, "del " + ", ".join(map(local, gone)), ""

    def _binding(self, at: int, call: str, values: Locals) -> Operator | None:
        """Return torch's own function that does the same as an instruction's operator, if there is one."""
        own = self._patterns[self._rows[at]].call
        found = binding(own)
        if found is None:
            return None
        expression = compile(f"f{call}", FILE, "eval")
        same = alike(
            lambda: eval(expression, self._closure, {**values, "f": own}),
            lambda: eval(expression, self._closure, {**values, "f": found}),
        )
        return found if same else None

    def stopped_in(self, error: BaseException) -> Stopped:
        """Say at which instruction the compiled function has ended in an error, and with which locals."""
        trace, line, values = error.__traceback__, 0, Locals()
        while trace is not None:
            if trace.tb_frame.f_globals is self._closure:
                line, values = trace.tb_lineno, dict(trace.tb_frame.f_locals)
            trace = trace.tb_next
        # The first line is the function's head, and the second one does nothing.
        at = self._lines[line - 3][0] if line >= 3 else -1
        region = self._regions.get(at)
        if region is None:
            return Stopped(at, values, range(at, at + (at >= 0)))
        # What has written nothing runs again, instruction by instruction, so that one of them fails.
        again = isinstance(error, NotBegun) or not region.writes
        return Stopped(at, values, range(at, at if again else region.behind))


def _read(name: Name, emptied: Set[Name]) -> str:
    kind, k = name
    if kind == NUMBER:
        return f"{local(name)} = p[i+{k}]"
    ref = f"p[i+{k}]" if kind == ARGUMENT else k
    return f"{local(name)} = " + (f"slots.pop({ref})" if name in emptied else f"slots[{ref}]")
