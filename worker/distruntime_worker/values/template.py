"""Templates: an operator with its argument pattern, compiled once to a function that runs one instruction.

This is the worker's hot path. The function's source holds only positions (`p[i+1]`) and names of closure
variables; every constant, and the operator itself, comes in by closure, so nothing that came over the wire is
ever source code. An instruction is [template, operand words..., result refs...]; the compiled function
returns the index of the word after it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator

import torch

from distruntime.errors import ProtocolError
from distruntime.wire.codec import KIN, OPERAND, unpack_constant
from distruntime.wire.messages import Plain
from distruntime.wire.undeclared_writes import undeclared_writes

from .step import Operator, Pattern, Run, Slots, Step, Words

Fail = Callable[["Template", Slots, Words, int, BaseException], None]


# These operators of torch exist only once their module is imported.
_ON_IMPORT = {
    "prims": "torch._inductor.inductor_prims",
    "torch_nn": "torch.nn.modules.linear_cross_entropy",
    "torch_attn": "torch.nn.attention.varlen",
}


def operator(name: str) -> Operator:
    """Return the operator that `name` ("aten::add.Tensor") names here.

    One that raises if this torch does not have it.
    """
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    found, broken = _find(namespace, base, overload), ""
    if found is None and namespace in _ON_IMPORT and importlib.util.find_spec(_ON_IMPORT[namespace]):
        importlib.import_module(_ON_IMPORT[namespace])
        found = _find(namespace, base, overload)
    if found is None:
        try:
            if _imported(namespace):
                found = _find(namespace, base, overload)
        # Whatever a package does when it is imported, its operator is missing, and the session goes on.
        except Exception as error:
            broken = f"{type(error).__name__}: {str(error).strip()[:300]}"
    if found is not None:
        return found
    why = (
        ""
        if namespace in ("aten", "prims", "distruntime")
        else f": the package {namespace!r} is installed here, and its import fails with {broken}. Its "
        "compiled part may be made for another torch: install the build for this one on the worker"
        if broken
        else f", and no package {namespace!r} that is installed here has it. If it is one of a "
        "package, install that on the worker; if your program defines it, let it do so once the session "
        "has begun, with a kernel for this device; if a module of another name does, import that there: "
        "dr.remote(importlib.import_module)('its.module')"
    )

    def missing(*args: object, **kwargs: object) -> object:
        # A function of the user's may have imported its module since. The step knows nothing of its writes.
        late = _find(namespace, base, overload)
        schema = getattr(late, "_schema", None)
        if late is not None and schema is not None and all(a.alias_info is None for a in schema.arguments):
            return late(*args, **kwargs)
        raise NotImplementedError(f"{name} does not exist in torch {torch.__version__} on this worker{why}")

    return missing


def _find(namespace: str, base: str, overload: str) -> Operator | None:
    try:
        found: Operator = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except (AttributeError, RuntimeError):
        return None
    return found


def _imported(namespace: str) -> bool:
    """Import the package that an operator's namespace names (torchvision), if it is installed here."""
    if namespace in sys.modules or namespace in sys.stdlib_module_names or not namespace.isidentifier():
        return False
    if importlib.util.find_spec(namespace) is None:
        return False
    importlib.import_module(namespace)
    return True


def _stored(pattern: Plain, source: str) -> Iterator[str]:
    """Yield what an instruction stores of its results, as their pattern says."""
    if isinstance(pattern, list):
        for k, item in enumerate(pattern):
            yield from _stored(item, f"{source}[{k}]")
    elif pattern == 1:
        yield source
    elif pattern != 0:
        raise ProtocolError(f"not a pattern of results: {pattern!r}")


class Template(Step):
    """One compiled template."""

    def __init__(
        self,
        name: str,
        call: Operator,
        args: list[Plain],
        kwargs: dict[str, Plain],
        results: Plain,
        device: Callable[[torch.device], torch.device],
        fail: Fail,
    ) -> None:
        self.name, self.pattern, self._fail = name, Pattern(call, args, kwargs, results), fail
        self.devices: list[torch.device] = []
        self.reads: list[int] = []
        self.mutates: list[int] = []
        self.views: list[int] = []
        self.unsaid: list[int] = []
        schema = getattr(call, "_schema", None)
        arguments = schema.arguments if schema else ()
        names = [a.name for a in arguments]
        unsaid = undeclared_writes(name, names, {**dict(zip(names, args)), **kwargs})
        # These lists note the operands of an argument, besides `reads`.
        noted = dict.fromkeys(unsaid, self.unsaid)
        for a in arguments:
            if a.alias_info is not None:
                noted[a.name] = self.mutates if a.alias_info.is_write else self.views
        closure: dict[str, object] = {"call": call, "fail": fail, "template": self}
        offset = 1

        def word(pattern: Plain, argument: str) -> str:
            nonlocal offset
            if pattern == OPERAND or pattern == ["number"]:
                text = f"p[i+{offset}]"
                if pattern == OPERAND:
                    text = f"slots[{text}]"
                    self.reads.append(offset)
                    if argument in noted:
                        noted[argument].append(offset)
                offset += 1
                return text
            if isinstance(pattern, list) and pattern and pattern[0] == "list":
                return "[" + ", ".join(word(item, argument) for item in pattern[1:]) + "]"
            constant = unpack_constant(pattern)
            if isinstance(constant, torch.device):
                constant = device(constant)
                self.devices = self.devices or [constant]
            name = f"c{len(closure)}"
            closure[name] = constant
            return name

        words = [word(pattern, names[k] if k < len(names) else "") for k, pattern in enumerate(args)]
        for name_, pattern in kwargs.items():
            if not name_.isidentifier():
                raise ProtocolError(f"not an argument's name: {name_[:40]!r}")
            words.append(f"{name_}={word(pattern, name_)}")
        self.length = offset
        self.run = self._compiled(f"call({', '.join(words)})", results, closure)

    def _compiled(self, expression: str, results: Plain, closure: dict[str, object]) -> Run:
        """Return what runs an expression and stores its results; note where the words of these stand."""
        if results == KIN:
            self.kin, self.length, results = self.length, self.length + 1, 0
        lines, stored = [f"out = {expression}"], [*_stored(results, "out")]
        if results == 1:
            # One value needs no name.
            lines, stored = [], [expression]
        self.writes = list(range(self.length, self.length + len(stored)))
        self.length += len(stored)
        lines += [f"slots[p[i+{k}]] = {value}" for k, value in zip(self.writes, stored)]
        source = "def run(slots, p, i):\n    try:\n" + "".join(f"        {line}\n" for line in lines)
        source += (
            "    except Exception as error:\n        fail(template, slots, p, i, error)\n    return "
            f"i + {self.length}\n"
        )
        exec(compile(source, f"<{self.name}>", "exec"), closure)
        return closure["run"]  # type: ignore[return-value]

    def drop(self, slots: Slots, p: Words, i: int, error: BaseException, /) -> int:
        """Let the instruction at `i` fail with `error`, as if its operator had raised it."""
        self._fail(self, slots, p, i, error)
        return i + self.length
