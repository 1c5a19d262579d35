"""Keeping `torch.compile` out of this package, so that code which touches proxies compiles to graph breaks.

`torch._dynamo.disable` would wrap the hot path in a Python function of 1 us per operator, and its import
costs a second. Marking the functions and their code objects costs neither.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch._C._dynamo import eval_frame


def _functions(value: object, module: str) -> Iterator[FunctionType]:
    if isinstance(value, FunctionType):
        if value.__module__ == module:
            yield value
    elif isinstance(value, (classmethod, staticmethod)):
        yield from _functions(value.__func__, module)
    elif isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from _functions(part, module)


def _skip(code: CodeType, strategy: eval_frame._FrameExecStrategy) -> None:
    eval_frame.set_code_exec_strategy(code, strategy)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _skip(constant, strategy)


def hide(package: str) -> None:
    """Mark every function of a package as one that Dynamo neither compiles nor looks into."""
    skip = eval_frame._FrameAction.SKIP
    # The first is for this frame, and the second for what it calls.
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    for name, module in list(sys.modules.items()):
        if name != package and not name.startswith(package + "."):
            continue
        for value in list(vars(module).values()):
            members = (
                list(vars(value).values())
                if isinstance(value, type) and value.__module__ == name
                else [value]
            )
            for function in (f for member in members for f in _functions(member, name)):
                function._torchdynamo_disable = True  # type: ignore[attr-defined]
                function._torchdynamo_disable_msg = "remote tensors run on their workers"  # type: ignore[attr-defined]
                _skip(function.__code__, strategy)
