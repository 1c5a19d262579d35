"""What a ref can stand for on a worker: a tensor, or the failure that kept it from existing."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from distruntime.errors import DistruntimeError, InternalError, NotSupportedError
from distruntime.wire.codec import dtype_name, tensor_bytes
from distruntime.wire.messages import Failure, Plain
from distruntime.wire.shield import Lock

# A tensor of up to so many bytes rides inside the message. A larger one has a payload frame of its own.
INLINE_BYTES = 1 << 14
# A still larger tensor comes in messages of this size, which fit into a frame. The master frees each before
# the next, and its allocator uses the pages again.
PART_BYTES = 1 << 19

_OURS = tuple(str(Path(file).parents[1]) + os.sep for file in (__file__, tensor_bytes.__code__.co_filename))
_INSIDE = (os.path.dirname(torch.__file__) + os.sep, *_OURS)

# Torch's print options are one global.
_printing = Lock()


class Poisoned:
    """Stands in a slot for a value that does not exist; whatever reads it inherits the failure without
    running.

    `memory` is what the value would be a view of: who writes the view has not written that either.
    """

    __slots__ = ("failure", "memory")

    def __init__(self, failure: Failure, memory: torch.UntypedStorage | None = None) -> None:
        self.failure, self.memory = failure, memory


class Held:
    """Stands in a slot for an object of the user's Python: a function that has come, or what one returned."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"object of {type(self.value).__name__}"


def memory_of(value: object) -> torch.UntypedStorage | None:
    """Return the memory that a value in a slot is in, or would be."""
    return (
        value.untyped_storage()
        if isinstance(value, torch.Tensor)
        else value.memory
        if isinstance(value, Poisoned)
        else None
    )


def class_name(cls: type[BaseException]) -> str:
    """Return the name that the master finds a class by: "IndexError", "torch.OutOfMemoryError"."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def failure(
    error: BaseException, *, seq: int, position: int, op: str, operands: str, part: int = -1
) -> Failure:
    """Return `error` as the value that poisons results."""
    # An error of another process, where a member of a mesh ran, brings the traceback from there.
    there = str(getattr(error, "traceback_there", ""))
    told = there[-8000:] or (_traceback(error)[-8000:] if _tells(error) else "")
    kind, text = class_name(type(error)), _text(error)[:4000]
    return Failure(seq, position, kind, text, told, op, operands, part=part)


def _traceback(error: BaseException) -> str:
    """Return an error's traceback, without our own frames around the user's."""
    told = traceback.TracebackException(type(error), error, error.__traceback__)
    links = [told]
    for link in links:
        links += [other for other in (link.__cause__, link.__context__) if other is not None]
    # Without a frame of the user's, ours tell where a defect is.
    if any(not _is_ours(frame.filename) for link in links for frame in link.stack):
        for link in links:
            while link.stack and _is_ours(link.stack[0].filename):
                del link.stack[0]
    return "".join(told.format())


def _is_ours(file: str) -> bool:
    # A template's own code is named by its operator, as "<aten::mul.Tensor>".
    return file.startswith(_OURS) or "::" in file


def _text(error: BaseException) -> str:
    """Return an error's text.

    Where a device has no kernel for an operator, torch lists each file that registered one. A way out is
    shorter.
    """
    try:
        text = str(error)
    # An error of the user's may raise anything there.
    except Exception as another:
        return f"its text cannot be had: {type(another).__name__}: {another}"
    if not isinstance(error, NotImplementedError) or not text.startswith("Could not run '"):
        return text
    said, _, _ = text.partition("\n\n")
    return (
        f"{said}\nKeep the operands on a device that has such a kernel (most packages that build their own "
        "have them for GPUs only): dr.nodes() lists the devices, and x.to(dr.place(node, device)) moves there"
    )


def _tells(error: BaseException) -> bool:
    """Whether the frames that an error has passed say more than its text, its operator and its operands.

    These are frames of code that is neither torch's nor ours. Where our own code raises what is not meant for
    users, the frames show us a defect.
    """
    cause = error.__cause__ or error.__context__
    if cause is not None and _tells(cause):
        return True
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    # A template's own code is named by its operator, as "<aten::mul.Tensor>".
    if any(not file.startswith(_INSIDE) and "::" not in file for file in files):
        return True
    meant = isinstance(error, (DistruntimeError, OSError, MemoryError, RuntimeError))
    return bool(files) and files[-1].startswith(_OURS) and (isinstance(error, InternalError) or not meant)


def described(values: Sequence[object]) -> str:
    """Return shapes and dtypes of operands, for an error's text.

    Of a list, as of a mesh's members here, how many and the first one's.
    """
    return ", ".join(map(_described, values))


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {dtype_name(value.dtype)}"
    if isinstance(value, list) and value:
        return f"{len(value)} x {_described(value[0])}"
    return repr(value)


def spec_fields(tensor: torch.Tensor) -> list[Plain]:
    """Return a tensor's metadata in the order of the wire.

    Sizes, strides, offset, dtype, conjugate and negative bits.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotSupportedError(
            f"the result is {tensor.layout if tensor.layout is not torch.strided else 'quantized'}; remote "
            "tensors are strided only. Use .to_dense(), or fetch the operands and compute locally"
        )
    bits = (1 if tensor.is_conj() else 0) | (2 if tensor.is_neg() else 0)
    return [
        list(tensor.shape),
        list(tensor.stride()),
        int(tensor.storage_offset()),
        dtype_name(tensor.dtype),
        bits,
    ]


def render(value: torch.Tensor, options: dict[str, Plain]) -> str:
    """Return the body of torch's `tensor(...)` text.

    Large tensors are summarised before they leave the device.
    """
    with _printing, torch.no_grad():
        indent = options.pop("indent", 0)
        if not isinstance(indent, int):
            raise TypeError(f"an indent of {indent!r:.80}")
        with torch._tensor_str.printoptions(**options):
            text: str = torch._tensor_str._tensor_str(value, indent)
    return text


def wire_tensor(value: torch.Tensor) -> tuple[list[Plain], memoryview]:
    """Return a tensor's [dtype, sizes] and its bytes, on the CPU.

    Copies only what is not contiguous there.
    """
    with torch.no_grad():
        here = value.detach().to("cpu")
        return [dtype_name(here.dtype), list(here.shape)], tensor_bytes(here)
