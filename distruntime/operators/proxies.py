"""Proxies, made of handles: the wrapper subclass as torch's C++ sees it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..log.handle import Handle
from ..log.spec import Spec
from ..log.storage import Storage

# A wrapper's null storage claims so many bytes, so that operators that change metadata can set any size.
HUGE = 1 << 50
AUTOCAST_KEY: Any = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
# Every proxy has it; torch looks at it while autocast of "remote" is on.
AUTOCAST = torch._C.DispatchKeySet(AUTOCAST_KEY)

_make_wrapper: Any = torch.Tensor._make_wrapper_subclass
_strided = torch.strided
_inference = torch.is_inference_mode_enabled
_creation_meta: Any = torch._C._autograd._get_creation_meta
_set_creation_meta: Any = torch._C._autograd._set_creation_meta
_OF_A_FUNCTION: Any = torch._C._autograd.CreationMeta.IN_CUSTOM_FUNCTION
# It changes a wrapper's metadata, below Python dispatch.
restride: Any = partial(
    torch.ops.aten.as_strided_.default.redispatch,
    torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd),
)


# Torch lets what this returns be written anywhere.
DETACH: Any = torch.ops.aten.detach.default
_AS_STRIDED: Any = torch.ops.aten.as_strided.default
_TORCH = os.path.dirname(torch.__file__) + os.sep


def wrap_view(cls: type, handle: Handle, base: Any, func: Any = None) -> Any:
    """Return a new proxy for a view: it is an inference tensor if its base is one, whatever the mode is."""
    # A parameter without a shape is detached too, and says nothing.
    if func is DETACH and not _inference():
        return wrap(cls, handle)
    inference = base.is_inference()
    if inference == _inference():
        return wrap(cls, handle)
    with torch.inference_mode(inference):
        return wrap(cls, handle)


def wrap(cls: type, handle: Handle) -> Any:
    """Return a new proxy that owns `handle`."""
    spec = handle.spec
    # The arguments go by position: see `dispatch`.
    out = _make_wrapper(
        cls,
        spec.size,
        spec.stride,
        spec.offset,
        None,
        spec.dtype,
        _strided,
        handle.place.lazy,
        False,
        False,
        None,
        False,
        False,
        AUTOCAST,
        HUGE,
    )
    if spec.bits:
        torch._C._set_conj(out, bool(spec.bits & 1))
        torch._C._set_neg(out, bool(spec.bits & 2))
    out._handle = handle
    return out


def wrap_all(cls: type, handles: Iterable[Handle]) -> list[Any]:
    """Return what `wrap` makes of each: a graph has hundreds of results."""
    make, strided, keys, huge = _make_wrapper, _strided, AUTOCAST, HUGE
    found = []
    for handle in handles:
        spec = handle.spec
        if spec.bits:
            found.append(wrap(cls, handle))
            continue
        out = make(
            cls,
            spec.size,
            spec.stride,
            spec.offset,
            None,
            spec.dtype,
            strided,
            handle.place.lazy,
            False,
            False,
            None,
            False,
            False,
            keys,
            huge,
        )
        out._handle = handle
        found.append(out)
    return found


class Answering(TorchDispatchMode):
    """Says what one operator of one tensor returns, where the function that has opened this calls it.

    A signal's handler or a finalizer may run meanwhile. What they call is done as ever.
    """

    def __init__(self, func: Any, tensor: Any, answer: Callable[[], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._func, self._tensor, self._answer = func, tensor, answer
        self._asker = sys._getframe(1).f_code

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._func and args[0] is self._tensor and _caller() is self._asker:
            return self._answer()
        return func(*args, **(kwargs or {}))


def _caller() -> CodeType:
    """Return the code that has called torch's function for which Python dispatch runs."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    code: CodeType = frame.f_code
    return code


def wrap_within(cls: type, handle: Handle, base: Any, view: Any = None) -> Any:
    """Return a new proxy of what lies in the memory of `base`: autograd counts the writes to both together.

    With a `view`, torch's word on how a view was made, it is a view of `base` for autograd, too. Nothing is
    issued. A proxy in an inference tensor's memory is one as well, and nobody counts its writes.
    """
    if base.is_inference():
        with torch.inference_mode():
            return wrap(cls, handle)
    with torch.inference_mode(False), torch.no_grad():
        proxy, func = wrap(cls, handle), DETACH if view is None else _AS_STRIDED
        # A user's class of tensors makes results of its own.
        with torch._C.DisableTorchFunctionSubclass(), Answering(func, base, lambda: proxy):
            if view is None:
                return func(base)
            spec = handle.spec
            found = func(base, spec.size, spec.stride, spec.offset)
    # Below autograd, where the body of a program's own operator is called, nothing becomes a view.
    if found._is_view():
        _set_creation_meta(found, view)
    return found


def of_a_function(spec: Spec) -> Any:
    """Return torch's word on views that a function returns, whose gradients it gives as a whole.

    Autograd refuses writes for which a gradient would have to go from one to another. Return None for
    integers, which have no gradients.
    """
    return _OF_A_FUNCTION if spec.dtype.is_floating_point or spec.dtype.is_complex else None


def view_of(proxy: Any) -> Any:
    """Return torch's word on how a view was made; None where its base sees its memory in another way."""
    if not proxy._is_view():
        return None
    spec, base = proxy._handle.spec, proxy._base._handle.spec
    return _creation_meta(proxy) if (spec.dtype, spec.bits) == (base.dtype, base.bits) else None


class Reshapes:
    """When a proxy got other metadata last: `last` is another object then."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: object = None


reshapes = Reshapes()


def reshape_wrapper(proxy: Any, spec: Spec) -> None:
    """Give a proxy other metadata, below Python dispatch."""
    handle = proxy._handle
    if handle.spec is not spec:
        handle.spec = spec
        reshapes.last = object()
    _grow(handle.storage, spec)
    restride(proxy, spec.size, spec.stride, spec.offset)


def _grow(storage: Storage, spec: Spec) -> None:
    """Note that a memory is as large as a tensor that it now has needs; it never shrinks."""
    if spec.extent > storage.spec.extent:
        storage.spec = spec
    if storage.resized is not None:
        storage.resized = max(storage.resized, spec.extent)
