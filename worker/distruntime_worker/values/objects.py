"""What a ref can stand for on a worker: a tensor, or the failure that kept it from existing."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence

import torch

from distruntime.errors import NotSupportedError
from distruntime.wire.codec import dtype_name, tensor_bytes
from distruntime.wire.messages import Failure, Plain

# Up to here a tensor rides inside the message; above, in a payload frame of its own.
INLINE_BYTES = 1 << 14
# Above, in messages of this size, which fit into a frame: the master frees each before the next, and its
# allocator uses the pages again.
PART_BYTES = 1 << 19

# Torch's print options are one global.
_printing = threading.Lock()


class Poisoned:
    """Stands in a slot for a value that does not exist; whatever reads it inherits the failure without
    running.

    `memory` is what the value would be a view of: who writes the view has not written that either.
    """

    __slots__ = ("failure", "memory")

    def __init__(self, failure: Failure, memory: torch.UntypedStorage | None = None) -> None:
        self.failure, self.memory = failure, memory


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


def failure(error: BaseException, *, seq: int, position: int, op: str, operands: str) -> Failure:
    """Return `error` as the value that poisons results."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return Failure(
        seq, position, class_name(type(error)), str(error)[:4000], "".join(lines)[-8000:], op, operands
    )


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
            "tensors are strided only. "
            "Use .to_dense(), or fetch the operands and compute locally"
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
