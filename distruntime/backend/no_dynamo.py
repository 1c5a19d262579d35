"""Keeping other backends of `torch.compile` away from remote tensors: with one, their code runs op by op.

Some backends are for them (see `compiled`). Any other has nothing to compile: Dynamo would break the graph at
each operator, and would raise where `fullgraph=True` forbids that. So a compiled function looks at what it is
called with, and runs as it was written if that is remote. It says so once for each line. What it cannot see
there (a global) compiles to graph breaks, because Dynamo neither compiles this package nor looks into it.

`torch._dynamo.disable` would wrap the hot path in a Python function of 1 us per operator, and its import
costs a second. Marking the functions and their code objects costs neither.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch._C._dynamo import eval_frame

from ..guards.tracing import HANDS_ON
from ..log.tape import recorded
from ..session.session import active
from ..session.spelling import is_remote
from ..tensors.tensor import DistributedTensor
from . import no_memory
from .on_import import when_imported

# These backends take remote tensors: see compiled/backend.py. `torch._dynamo.explain` has the last one, which
# runs a graph as it is, as "eager" does.
_OWN = (
    *("distruntime", "inductor", "aot_eager", "cudagraphs", "eager"),
    "dynamo_graph_accumulating_compiler",
)
_Function = Callable[..., Any]  # type: ignore[explicit-any]

_FLEX = "torch.nn.attention.flex_attention"
# A function may close over a whole data set, and to look through that would cost more than the call.
_LOOKED_AT = 32


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


def install_op_by_op() -> None:
    """Let compiled functions run as they were written where they are called with remote tensors."""
    when_imported("torch._dynamo.eval_frame", _watch_calls)


def _watch_calls(module: ModuleType) -> None:
    context = module._TorchDynamoContext
    own = context.__call__

    @functools.wraps(own)
    def __call__(self: Any, fn: Any) -> Any:  # type: ignore[explicit-any]
        made = own(self, fn)
        # torch.export looks into the function itself.
        if not isinstance(self, module.OptimizeContext) or self.export or not isinstance(made, FunctionType):
            return made
        original = made._torchdynamo_orig_callable  # type: ignore[attr-defined]
        why_not = _why_not_traced if is_own(self.callback) else _why_not_compiled

        @functools.wraps(made)
        def call(*args: object, **kwargs: object) -> object:
            # Nothing of what Dynamo's guards look at would be a guard of the program.
            if recorded.name:
                return original(*args, **kwargs)
            if active and (why := why_not(original, args, kwargs)):
                no_memory.ignored("torch.compile")
                warnings.warn(why, stacklevel=2)
                return original(*args, **kwargs)
            return made(*args, **kwargs)

        # Dynamo tells by it that this is the wrapper, and no function that a user wrapped around it.
        call._torchdynamo_wrapper_id = id(call)  # type: ignore[attr-defined]
        HANDS_ON.add(id(call.__code__))  # type: ignore[attr-defined]
        return call

    context.__call__ = __call__


def is_own(backend: object) -> bool:
    """Whether what Dynamo calls with a graph ends at a backend that takes remote tensors."""
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_name", getattr(backend, "__name__", "")) in _OWN


def _why_not_traced(original: object, args: object, kwargs: object) -> str:
    """Say why a call for our own backend runs as it was written, or return nothing."""
    if getattr(original, "__module__", "") == _FLEX and (_remote(args) or _remote(kwargs)):
        # Scripts compile this one function, with `fullgraph=True`. Dynamo cannot trace what stands in for it.
        what = "flex_attention is computed by its formula"
    else:
        return ""
    return f"what torch.compile was given runs operator by operator: {what}"


def _why_not_compiled(original: object, args: object, kwargs: object) -> str:
    """Say why a call for another backend runs as it was written: it has remote tensors."""
    if not (_remote(original) or _remote(args) or _remote(kwargs)):
        return ""
    return (
        "torch.compile does nothing to remote tensors by this backend: they run operator by operator. "
        'torch.compile(model, backend="distruntime") makes one instruction of a forward pass'
    )


def _remote(value: object) -> bool:
    """Whether a remote tensor is in what a function is called with, or in what it is bound to."""
    if isinstance(value, torch.Tensor):
        return isinstance(value, DistributedTensor) or is_remote(value.device)
    if isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        return any(map(_remote, itertools.islice(items, _LOOKED_AT)))
    if isinstance(value, torch.nn.Module):
        # Modules are in one place, but for those that pass their tensors on.
        return _remote(next(value.parameters(), None))
    if isinstance(value, torch.optim.Optimizer):
        return any(_remote(group["params"][:1]) for group in value.param_groups)
    if isinstance(value, MethodType):
        return _remote(value.__self__)
    if isinstance(value, FunctionType):
        return any(_remote(variable) for variable in _closure(value))
    return False


def _closure(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        # It raises where the variable has no value yet.
        with contextlib.suppress(ValueError):
            yield cell.cell_contents
