"""Operators that the user's own program defines: `torch.library.custom_op`, `Library.impl`.

A worker does not know them. What the user has registered for autograd, for vmap and for metadata runs here,
above dispatch. The kernel travels as a function of the user's does, and is called in its place. So a
definition that is made anew holds from the next call on, and two programs may give one name to two kernels.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ..errors import is_of_handler
from ..log.handle import Residence
from ..log.line import of_a_library
from .alias_info import aliases, tensors_of
from .signatures import count_writes

_Kernel = Callable[..., object]

# What calls a kernel on a worker stands here, once this module above is there: most programs define none.
_CALLS = "distruntime.python.remote"
run: list[Callable[[str, _Kernel, Sequence[Any], Mapping[str, Any], object, tuple[int, ...]], Any]] = []

# The kernels that `Library.impl` was given, by operator and dispatch key. C++ alone has them otherwise.
_kernels: dict[tuple[str, str], _Kernel] = {}
# torch asks for a kernel by these, in this order; a device's own goes before them.
_ANY = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")

_ASK = "ask"


def _by_devices(func: torch._ops.OpOverload) -> dict[str | None, _Kernel]:
    """Return the kernels of an operator by the type of device; under None the one for each."""
    name = func._schema.name
    made = OPDEFS.get(name)
    if made is not None:
        return {device: _plain(kernel, made) for device, kernel in made._backend_fns.items()}
    name += "" if func._overloadname == "default" else f".{func._overloadname}"
    found: dict[str | None, _Kernel] = {
        key.lower(): kernel for (other, key), kernel in _kernels.items() if other == name and key not in _ANY
    }
    for key in _ANY:
        if (name, key) in _kernels:
            found[None] = _kernels[name, key]
    return found


def _plain(kernel: _Kernel, made: Any) -> _Kernel:
    """Return what the user has written: torch keeps it in a closure beside what cannot travel."""
    wrapped = getattr(kernel, "__wrapped__", kernel)
    code = getattr(wrapped, "__code__", None)
    names = code.co_freevars if isinstance(code, CodeType) else ()
    cells = dict(zip(names, getattr(wrapped, "__closure__", None) or ()))
    found: _Kernel = cells["fn"].cell_contents if "fn" in cells else made._init_fn
    return found


def call_defined(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], place: Residence
) -> Any:
    """Call an operator of the user's own program; return `NotImplemented` for any other operator.

    Blocks for one round trip where nothing tells what the results are: `register_fake` does.
    """
    found, name = _by_devices(func), func._schema.name
    kernel = found.get(place.place.local_device.partition(":")[0], found.get(None))
    code = getattr(kernel, "__code__", None)
    # A package's operator is there once the worker has imported the package. The worker refuses what has no
    # kernel for this device.
    if kernel is None or not isinstance(code, CodeType) or of_a_library(code.co_filename):
        return NotImplemented
    if not run:
        importlib.import_module(_CALLS)
    written = aliases(func, args, kwargs)[1]
    returns = func._schema.returns
    result = run[0](name, kernel, args, kwargs, _example(func, args, kwargs), written)
    operands: list[Any] = tensors_of(args, kwargs)
    # On a CPU, the operators by which the kernel writes count this.
    count_writes([operands[k] for k in written])
    if returns and all(one.alias_info is not None and one.alias_info.is_write for one in returns):
        # It has returned what it wrote.
        same = [operands[k] for k in written]
        return same[0] if len(returns) == 1 else tuple(same)
    given = {_memory(t): t for t in reversed(operands)}
    # What a kernel returns as it is, is the operand itself: its writes count, and its graph stays.
    return tree_map_only(torch.Tensor, lambda t: given.get(_memory(t), t), result)


def _memory(tensor: Any) -> tuple[int, object]:
    handle = tensor._handle
    return id(handle.storage), handle.spec


def _example(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> object:
    """Return what a call returns, as `dr.remote(returns=...)` takes it."""
    # It returns nothing, and the first call says so.
    if not func._schema.returns:
        return None
    made = OPDEFS.get(func._schema.name)
    told = (
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta")
        if made is None
        else made._abstract_fn is not None
    )
    if not told:
        return _ASK
    remote: list[Any] = tensors_of(args, kwargs)
    twins = iter([t._handle.spec.meta() for t in remote])
    metas, named = tree_map_only(torch.Tensor, lambda t: next(twins), (list(args), kwargs))
    try:
        with _disable_current_modes():
            found: object = func(*metas, **named)
    except Exception as error:
        # A size that depends on data has no number here, and what is wrong the kernel says better.
        if is_of_handler(error):
            raise
        return _ASK
    return lambda *args, **kwargs: found


def install_defined() -> None:
    """Note what `Library.impl` is given from now on; once per process."""
    own = torch.library.Library.impl

    @functools.wraps(own)
    def impl(
        self: torch.library.Library, op_name: Any, fn: _Kernel, dispatch_key: str = "", **options: Any
    ) -> object:
        done: object = own(self, op_name, fn, dispatch_key, **options)  # type: ignore[no-untyped-call]
        name = op_name if isinstance(op_name, str) else op_name.name()
        if self.ns not in ("aten", "_") and not options.get("with_keyset"):
            _kernels[f"{self.ns}::{name.rpartition('::')[2]}", dispatch_key or self.dispatch_key] = fn
        return done

    torch.library.Library.impl = impl  # type: ignore[method-assign]
    end = torch.library.Library._destroy

    @functools.wraps(end)
    def destroy(self: torch.library.Library) -> None:
        end(self)  # type: ignore[no-untyped-call]
        for one in self._op_impls:
            # It names what was registered: namespace, operator and dispatch key.
            namespace, name, key = one.split("/")
            _kernels.pop((f"{namespace}::{name}", key), None)

    torch.library.Library._destroy = destroy  # type: ignore[method-assign]
