"""Keeping `torch.compile` out of this package, so that code which touches proxies compiles to graph breaks.

torch's `flex_attention` compiles itself. For proxies it runs torch's own formula instead, op by op.

`torch._dynamo.disable` would wrap the hot path in a Python function of 1 us per operator, and its import
costs a second. Marking the functions and their code objects costs neither.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType

import torch
from torch._C._dynamo import eval_frame

from ..session.spelling import is_remote
from ..tensors.tensor import DistributedTensor
from .on_import import when_imported

_Function = Callable[..., object]  # type: ignore[explicit-any]


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


def _strategy(*, skip: bool) -> eval_frame._FrameExecStrategy:
    action = eval_frame._FrameAction.SKIP if skip else eval_frame._FrameAction.DEFAULT
    # The first is for this frame, and the second for what it calls.
    return eval_frame._FrameExecStrategy(action, action)


def hide(package: str) -> None:
    """Mark every function of a package as one that Dynamo neither compiles nor looks into."""
    strategy = _strategy(skip=True)
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
    """Have what touches proxies run op by op, from now on or from the import of torch's compilers on."""
    when_imported("torch.nn.attention.flex_attention", _patch_flex_attention)
    when_imported("torch._dynamo.output_graph", _patch_graphs)


def _patch_graphs(module: ModuleType) -> None:
    """Run a graph as it is that makes tensors on a place or sends them there.

    Dynamo captures such calls, which have no proxy among their operands, and a compiler would compile them
    for a device of this process.
    """
    graphs = module.OutputGraph
    own = graphs._call_user_compiler

    @functools.wraps(own)
    def compile_it(self: object, gm: torch.fx.GraphModule, *args: object, **kwargs: object) -> object:
        if any(is_remote(getattr(node.meta.get("example_value"), "device", None)) for node in gm.graph.nodes):
            return gm.forward
        return own(self, gm, *args, **kwargs)

    graphs._call_user_compiler = compile_it


def _patch_flex_attention(module: ModuleType) -> None:
    check, operator = module._validate_device, module.flex_attention_hop
    formula = sys.modules["torch._higher_order_ops.flex_attention"].math_attention
    constants = module.flex_attention.__code__.co_consts
    wrapper = next(c for c in constants if getattr(c, "co_name", "") == "_flex_attention_hop_wrapper")
    own_flag = module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG

    def compiled(yes: bool) -> None:
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = own_flag or not yes  # type: ignore[attr-defined]
        # Where the caller is compiled, Dynamo would look into the function that calls the operator.
        eval_frame.set_code_exec_strategy(wrapper, _strategy(skip=not yes))

    @functools.wraps(check)
    def validate(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if not isinstance(query, DistributedTensor):
            check(query, key, value)
            return
        # torch reads the flag after this check and before it calls the operator.
        compiled(False)

    def computed(query: torch.Tensor, *args: object, **kwargs: object) -> object:
        compiled(True)
        return formula(query, *args, **kwargs)

    def differentiated(own: _Function) -> _Function:
        # autograd differentiates the formula. torch would trace it first.
        @functools.wraps(own)
        def run(query: torch.Tensor, *args: object, **kwargs: object) -> object:
            chosen = computed if isinstance(query, DistributedTensor) else own
            return chosen(query, *args, **kwargs)

        return run

    module._validate_device = validate  # type: ignore[attr-defined]
    operator.py_impl(DistributedTensor)(computed)
    autograd = torch._C.DispatchKey.Autograd
    operator.py_kernels[autograd] = differentiated(operator.py_kernels[autograd])
    operator._dispatch_cache.clear()
