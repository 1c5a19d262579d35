"""The metadata of a tensor, interned.

Two specs are equal exactly if they are the same object, so they hash at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..wire.codec import dtype_name, dtype_named

_CONJ, _NEG = 1, 2
# More specs than these are forgotten, which only costs a signature its cache hit.
_MOST = 1 << 16


class Spec:
    """Sizes, strides, offset, dtype and the conjugate and negative bits of one tensor."""

    __slots__ = ("bits", "dtype", "offset", "size", "stride")

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    bits: int

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, as if contiguous."""
        return self.size.numel() * self.dtype.itemsize

    @property
    def extent(self) -> int:
        """The least that the storage holds: bytes from its start to the end of the last element."""
        return (self.offset + self._span()) * self.dtype.itemsize if self.size.numel() else 0

    @property
    def begin(self) -> int:
        """Bytes from the start of the storage to the first element."""
        return self.offset * self.dtype.itemsize

    def at(self, offset: int) -> Spec:
        """Return the spec of the same tensor at another offset."""
        return self if offset == self.offset else spec(self.size, self.stride, offset, self.dtype, self.bits)

    @property
    def expanded(self) -> bool:
        """Whether several elements are one, so that the tensor cannot be written."""
        return any(n > 1 and not s for n, s in zip(self.size, self.stride)) and self.size.numel() > 0

    def _span(self) -> int:
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride)) if self.size.numel() else 0

    def wire(self) -> list[object]:
        """Return the spec as it travels."""
        return [list(self.size), list(self.stride), self.offset, dtype_name(self.dtype), self.bits]

    def meta(self) -> torch.Tensor:
        """Return a `meta` tensor of this metadata."""
        return self.empty("meta")

    def empty(self, device: str) -> torch.Tensor:
        """Return an uninitialised tensor of this metadata."""
        flat = torch.empty(self.offset + self._span(), dtype=self.dtype, device=device)
        made = (
            flat
            if (flat.size(), (1,), 0) == (self.size, self.stride, self.offset)
            else flat.as_strided(self.size, self.stride, self.offset)
        )
        if self.bits & _CONJ:
            torch._C._set_conj(made, True)
        if self.bits & _NEG:
            torch._C._set_neg(made, True)
        return made

    def __repr__(self) -> str:
        return f"{tuple(self.size)} {dtype_name(self.dtype)}"


_interned: dict[tuple[object, ...], Spec] = {}


def spec(
    size: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, bits: int = 0
) -> Spec:
    """Return the one spec of this metadata."""
    key = (tuple(size), tuple(stride), offset, dtype, bits)
    found = _interned.get(key)
    if found is None:
        if len(_interned) >= _MOST:
            _interned.clear()
        found = Spec()
        found.size, found.stride, found.offset, found.dtype, found.bits = (
            torch.Size(key[0]),
            key[1],
            offset,
            dtype,
            bits,
        )
        found = _interned.setdefault(key, found)
    return found


def spec_of(tensor: torch.Tensor) -> Spec:
    """Return the spec of any strided tensor."""
    bits = (_CONJ if tensor.is_conj() else 0) | (_NEG if tensor.is_neg() else 0)
    return spec(tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, bits)


def spec_from_wire(fields: list[object]) -> Spec:
    """Return the spec that `Spec.wire` packed."""
    size, stride, offset, dtype, bits = fields
    return spec(tuple(size), tuple(stride), offset, dtype_named(dtype), bits)  # type: ignore[arg-type]


# A ref may name what is no tensor: a tape, a stamp, a generator. It has this spec.
NO_TENSOR = spec((0,), (1,), 0, torch.float32)


def operand_fields(spec: Spec) -> list[object]:
    """Return what the templates of groups say of an operand.

    That is its dtype, its sizes, and its strides where it is not contiguous.
    """
    strides = None if spec.stride == contiguous(spec).stride else list(spec.stride)
    return [dtype_name(spec.dtype), list(spec.size), strides]


def contiguous(like: Spec, size: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Spec:
    """Return the spec of a contiguous tensor like this, or of another size or dtype."""
    sizes = tuple(like.size if size is None else size)
    stride, count = [], 1
    for n in reversed(sizes):
        stride.append(count)
        count *= max(n, 1)
    return spec(sizes, tuple(reversed(stride)), 0, dtype or like.dtype)
