"""The functions of Inductor's own tests, compiled for remote tensors.

`test_torchinductor.py` has a class of tests for each device. This one has the functions of `CommonTemplate`
run as they are, and compiled for straight-line code. It compares the results to the last bit in each of
several calls: the first runs operator by operator, the second is recorded, and later ones are replayed.
What a test compiles itself goes to the worker's Inductor.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from _pytest.unittest import UnitTestCase
from torch.utils._pytree import tree_leaves, tree_map

REMOTE = "remote"
_CALLS = 4


def _there(x: Any) -> Any:
    """Return a tensor of a worker with these values and strides."""
    if not isinstance(x, torch.Tensor):
        return x
    found = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=REMOTE)
    with torch.no_grad():
        found.copy_(x)
    return found.requires_grad_(x.requires_grad)


def _detached(tree: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tree)


def _gradients(out: Any, inputs: Any, draw: bool) -> Sequence[Any]:
    flat = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not draw or not flat or not leaves:
        return ()
    torch.manual_seed(1)
    return torch.autograd.grad(flat, leaves, [torch.randn_like(t) for t in flat], allow_unused=True)


def check(
    self: Any,
    model: Any,
    example_inputs: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    nopython: bool = True,
    check_gradient: bool = False,
    output_process_fn_grad: Callable[[Any], Any] = lambda x: x,
    **rest: Any,
) -> None:
    """Compare a function, compiled and not: `check_model` of torch's tests, to the last bit."""
    torch._dynamo.reset()
    if hasattr(model, "to"):
        model = model.to(REMOTE)

    def run(*args: Any, **named: Any) -> Any:
        return model(*args, **named)

    compiled = torch.compile(run, backend="distruntime", fullgraph=nopython)
    for number in range(_CALLS):
        found = []
        for function in (run, compiled):
            inputs, named = tree_map(_there, (list(example_inputs), kwargs or {}))
            torch.manual_seed(0)
            out = function(*inputs, **named)
            gradients = _gradients(output_process_fn_grad(out), inputs, check_gradient)
            found.append((type(out), _detached(out), _detached(inputs), gradients))
        assert found[0][0] is found[1][0]
        for one, other in zip(found[0][1:], found[1][1:]):
            self.assertEqual(
                other,
                one,
                atol=0,
                rtol=0,
                equal_nan=True,
                exact_dtype=True,
                msg=partial("in call {}: {}".format, number),
            )


def give_old_name() -> None:
    """Let the file find a name that it imports, and that this torch does not have there any more."""
    module: Any = importlib.import_module("torch._inductor.compile_fx")
    if not hasattr(module, "complex_memory_overlap"):
        module.complex_memory_overlap = lambda tensor: False


def collected(collector: Any, tests: type) -> Sequence[pytest.Collector]:
    """Return two classes in the place of the one for CPUs: that one, and one for remote tensors."""
    module = collector.obj

    class CommonREMOTE(module.TestCase):  # type: ignore[misc, name-defined]
        common = check
        device = REMOTE

    module.copy_tests(module.CommonTemplate, CommonREMOTE, REMOTE)
    # torch's own asks Inductor what it knows of the device.
    CommonREMOTE.is_dtype_supported = lambda self, dtype: True
    # There is no kernel of Inductor's in this process.
    module.assertGeneratedKernelCountEqual = lambda self, expected: None
    for name, kind in (("CommonCPU", tests), ("CommonREMOTE", CommonREMOTE)):
        setattr(module, name, kind)
        kind.__name__, kind.__qualname__, kind.__module__ = name, name, module.__name__
    return [
        UnitTestCase.from_parent(collector, name=name, obj=getattr(module, name))
        for name in ("CommonCPU", "CommonREMOTE")
    ]
