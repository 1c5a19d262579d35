"""What torch's operators are for a `SparseTensor`: operators of its indices and of its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import of_caller
from ..operators.alias_info import Operator
from .sparse import KERNELS, Kernel, SparseTensor, made_of
from .tensor import DistributedTensor

_aten = torch.ops.aten


def _become(target: SparseTensor, source: torch.Tensor) -> torch.Tensor:
    assert isinstance(source, SparseTensor)
    indices, values = source._parts
    _require_cast(values.dtype, target.dtype)
    target._parts, target._coalesced = (indices, values.to(target.dtype)), source._coalesced
    return target


def _require_cast(found: torch.dtype, kept: torch.dtype) -> None:
    """Refuse to write what a dtype cannot hold, in torch's words."""
    if not torch.can_cast(found, kept):
        names = [
            torch.empty(0, dtype=one).type().split(".")[-1].removesuffix("Tensor") for one in (found, kept)
        ]
        words = f"Can't convert result type {names[0]} to output {names[1]} in add operation"
        raise of_caller(RuntimeError(words))


def from_parts(
    cls: type, func: Operator, args: Sequence[torch.Tensor], kwargs: dict[str, object]
) -> torch.Tensor:
    """Return the sparse tensor that an operator makes of remote indices and remote values.

    Local indices are sent, as on CUDA the function that makes a sparse tensor does.
    """
    _, _, size, indices, values = args[:5]
    if not isinstance(values, DistributedTensor):
        values = values.to(indices.device)
    coalesced = bool(kwargs.get("is_coalesced"))
    return SparseTensor(indices.to(values.device), values, size, coalesced)  # type: ignore[arg-type]


def bag_backward(  # type: ignore[explicit-any]
    cls: type, func: Operator, args: Sequence[Any], kwargs: dict[str, object]
) -> object:
    """Return the sparse gradient of `nn.EmbeddingBag`: torch makes it so on a CPU and on CUDA alone."""
    grad, indices, offsets, bags, sizes, _, rows, by_frequency, mode, sparse, weights, *padding = args
    if not sparse:
        return NotImplemented
    if indices.numel() and not bags.numel():
        # A CPU's kernel that needed no bag of each index has not told it.
        bags = torch.searchsorted(offsets, torch.arange(len(indices), device=indices.device), right=True) - 1
    return _aten._embedding_bag_sparse_backward.default.decompose(
        grad, indices, offsets, bags, sizes, rows, by_frequency, mode, weights, *padding
    )


def decompose(cls: type, func: Operator, args: Sequence[object], kwargs: dict[str, object]) -> object:
    """Take a composite apart that torch has handed over whole, as it does inside a dispatch."""
    return func.decompose(*args, **kwargs)


# What the dense tensors of a sparse one are to do with it.
SPARSE = {
    "aten::_sparse_coo_tensor_with_dims_and_tensors": from_parts,
    "aten::_embedding_bag_backward": bag_backward,
    **dict.fromkeys(
        ("aten::embedding_sparse_backward", "aten::_sparse_coo_tensor_unsafe", "aten::sparse_coo_tensor"),
        decompose,
    ),
}


def _to_dense(
    self: SparseTensor, dtype: torch.dtype | None = None, masked: bool | None = None
) -> torch.Tensor:
    values = self._parts[1]
    dense = torch.zeros(self.shape, dtype=values.dtype, device=self.device)
    _add_(dense, self)
    return dense if dtype is None else dense.to(dtype)


def _coalesce(self: SparseTensor) -> torch.Tensor:
    """Add up the values of each index, which waits for their number, as on CUDA."""
    indices, values = self._parts
    rows = self.shape[: indices.size(0)]
    flat = _flat(indices, rows)
    found, slots = torch.unique(flat, return_inverse=True)
    added = torch.zeros((found.size(0), *values.shape[1:]), dtype=values.dtype, device=self.device)
    added.index_add_(0, slots, values)
    return SparseTensor(torch.stack(torch.unravel_index(found, rows)), added, self.shape, True)


def _flat(indices: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return one number for each index."""
    flat = indices[0]
    for k, size in enumerate(rows[1:], 1):
        flat = flat * size + indices[k]
    return flat


def _add_(self: torch.Tensor, other: object, alpha: float = 1) -> object:
    if not isinstance(other, SparseTensor):
        return _sparse_and_dense(other)
    indices, values = other._parts
    if not isinstance(self, SparseTensor):
        _require_cast(values.dtype, self.dtype)
        values = values.to(self.dtype)
        if indices.size(0) == 1:
            return self.index_add_(0, indices[0], values, alpha=alpha)
        return self.index_put_(tuple(indices), values if alpha == 1 else values * alpha, accumulate=True)
    return _become(self, _joined(self, other, alpha))


def _joined(self: SparseTensor, other: SparseTensor, alpha: float) -> torch.Tensor:
    if self.shape != other.shape:
        raise of_caller(
            RuntimeError(
                "add: expected sizes of 'self' and 'other' to match, but "
                f"{list(self.shape)} != {list(other.shape)}"
            )
        )
    values = other._parts[1]
    parts = [
        torch.cat([self._parts[0], other._parts[0]], 1),
        torch.cat([self._parts[1], values if alpha == 1 else values * alpha]),
    ]
    joined = SparseTensor(parts[0], parts[1], self.shape)
    # Without this, gradients that are gathered for long would grow without end; CUDA has this rule.
    return joined.coalesce() if parts[1].numel() > self.numel() else joined


def _sparse_and_dense(other: object) -> object:
    if isinstance(other, torch.Tensor):
        raise of_caller(RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead."))
    return NotImplemented


def _add(self: torch.Tensor, other: object, alpha: float = 1) -> object:
    if not isinstance(other, SparseTensor):
        return _sparse_and_dense(other)
    if isinstance(self, SparseTensor):
        return _joined(self, other, alpha)
    return _add_(self.to(torch.promote_types(self.dtype, other.dtype), copy=True), other, alpha)


def _sub(self: torch.Tensor, other: object, alpha: float = 1) -> object:
    return _add(self, other, -alpha)


def _sub_(self: torch.Tensor, other: object, alpha: float = 1) -> object:
    return _add_(self, other, -alpha)


def _with_values(self: SparseTensor, values: torch.Tensor) -> torch.Tensor:
    return SparseTensor(self._parts[0], values, self.shape, self._coalesced)


def _each(function: Kernel) -> Kernel:
    """Return an operator that changes the value of each element, linearly, and with a number."""

    def call(self: SparseTensor, *args: object, **kwargs: object) -> object:
        numbers = not any(isinstance(a, torch.Tensor) and a.dim() for a in (*args, *kwargs.values()))
        if not isinstance(self, SparseTensor) or not numbers:
            return NotImplemented
        if kwargs.get("rounding_mode") is not None:
            self = self.coalesce()  # type: ignore[assignment]
        return _with_values(self, function(self._parts[1], *args, **kwargs))  # type: ignore[arg-type]

    return call


def _each_(function: Kernel) -> Kernel:
    """Return its form in place. The tensors that the sparse one was made of stay as they are, as in torch."""
    made = _each(function)

    def call(self: SparseTensor, *args: object, **kwargs: object) -> object:
        found = made(self, *args, **kwargs)
        return NotImplemented if found is NotImplemented else _become(self, found)  # type: ignore[arg-type]

    return call


def _of_sums(function: Kernel) -> Kernel:
    """Return an operator that keeps zeros, and needs the sum of each index first."""

    def call(self: SparseTensor, *args: object, **kwargs: object) -> object:
        if any(isinstance(a, torch.Tensor) for a in args):
            return NotImplemented
        whole = self.coalesce()
        return _with_values(whole, function(whole._parts[1], *args, **kwargs))  # type: ignore[arg-type, attr-defined]

    return call


def _pow(self: SparseTensor, exponent: float) -> object:
    if exponent == 0:
        raise of_caller(
            RuntimeError(
                "pow: cannot raise to zeroth power on sparse tensor; it would make the result tensor dense"
            )
        )
    return _of_sums(_aten.pow.Tensor_Scalar)(self, exponent)


def _clone(self: SparseTensor, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    indices, values = self._parts
    return SparseTensor(indices.clone(), values.clone(), self.shape, self._coalesced)


def _detach(self: SparseTensor) -> torch.Tensor:
    indices, values = self._parts
    return SparseTensor(indices, values, self.shape, self._coalesced)


def _empty(
    self: SparseTensor,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: object,
) -> object:
    indices, values = self._parts
    if device is not None and device not in (self.device, _device(self)):
        return NotImplemented
    return SparseTensor(
        indices.new_empty((indices.size(0), 0)),
        values.new_empty((0, *values.shape[1:]), dtype=dtype or values.dtype),
        self.shape,
        True,
    )


def _zero_(self: SparseTensor) -> torch.Tensor:
    return _become(self, _empty(self))  # type: ignore[arg-type]


def _copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> object:
    if not isinstance(self, SparseTensor) or not source.is_sparse:
        return NotImplemented
    indices, values = source._indices().to(self.device), source._values().to(self.device, self.dtype)
    return _become(self, _clone(SparseTensor(indices, values, source.shape, source.is_coalesced())))  # type: ignore[arg-type]


def _to_copy(
    self: SparseTensor,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **options: object,
) -> torch.Tensor:
    indices, values = (
        part if device is None else part.to(device, non_blocking=non_blocking) for part in self._parts
    )
    return made_of(indices, values.to(dtype or values.dtype), self.shape, self._coalesced)


def _sparse_mask(self: torch.Tensor, mask: SparseTensor, accumulate_matches: bool = False) -> object:
    if isinstance(self, SparseTensor):
        return NotImplemented
    indices = mask._parts[0]
    return SparseTensor(indices, self[tuple(indices)], mask.shape, mask._coalesced)


def _norm(
    self: SparseTensor, p: float | None = None, dim: Sequence[int] = (), *rest: object, **options: object
) -> object:
    if dim or options.get("dtype") is not None:
        return NotImplemented
    return self.coalesce()._parts[1].norm(2 if p is None else p)  # type: ignore[attr-defined]


def _sum(self: SparseTensor, *dims: object, dtype: torch.dtype | None = None, **rest: object) -> object:
    return NotImplemented if dims or rest else self._parts[1].sum(dtype=dtype)


def _mm(self: torch.Tensor, other: torch.Tensor) -> object:
    """Multiply a sparse matrix with a dense one: add up its rows, each times a value."""
    if not isinstance(self, SparseTensor) or isinstance(other, SparseTensor) or self._parts[1].dim() > 1:
        return NotImplemented
    if self.shape[1] != other.shape[0]:
        shapes = f"{self.shape[0]}x{self.shape[1]} and {other.shape[0]}x{other.shape[1]}"
        raise of_caller(RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({shapes})"))
    indices, values = self._parts
    if values.dtype is not other.dtype:
        raise of_caller(
            RuntimeError(
                f"expected m1 and m2 to have the same dtype, but got: {values.dtype} != {other.dtype}"
            )
        )
    made = torch.zeros((self.shape[0], other.shape[1]), dtype=values.dtype, device=self.device)
    return made.index_add_(0, indices[0], other.index_select(0, indices[1]) * values[:, None])


def _addmm(
    self: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> object:
    found = _mm(first, second)
    numbers = all(type(one) is int for one in (beta, alpha))
    if not isinstance(found, torch.Tensor) or self.dim() > 2:
        return NotImplemented
    if self.dtype is not found.dtype or not (numbers or found.is_floating_point() or found.is_complex()):
        return NotImplemented
    # As in torch, what is multiplied with 0 is not read.
    return found * alpha + self * beta if beta else found * alpha


def _mv(self: torch.Tensor, vector: torch.Tensor) -> object:
    found = _mm(self, vector[:, None])
    return found[:, 0] if isinstance(found, torch.Tensor) else found


def _transpose(self: SparseTensor, first: int = 0, second: int = 1) -> object:
    indices, values = self._parts
    if indices.size(0) != 2 or values.dim() > 1 or {first % 2, second % 2} != {0, 1}:
        return NotImplemented
    return SparseTensor(indices.flip(0), values.clone(), self.shape[::-1])


def _public(part: int) -> Kernel:
    def call(self: SparseTensor) -> torch.Tensor:
        if not self._coalesced:
            raise of_caller(
                RuntimeError(
                    f"Cannot get {('indices', 'values')[part]} on an uncoalesced tensor, please call "
                    ".coalesce() first"
                )
            )
        return self._parts[part].detach()

    return call


def _coalesced_(self: SparseTensor, coalesced: bool) -> torch.Tensor:
    self._coalesced = coalesced
    return self


def _device(self: SparseTensor) -> torch.device:
    # torch's C++ compares the devices that the wrappers claim.
    device: torch.device = torch.Tensor.device.__get__(self._parts[1])
    return device


def _named(names: str, function: Kernel) -> dict[str, Kernel]:
    return dict.fromkeys((f"aten::{name}" for name in names.split()), function)


KERNELS.update(
    {
        "prim::device": _device,
        "aten::_indices": lambda self: self._parts[0],
        "aten::_values": lambda self: self._parts[1],
        "aten::indices": _public(0),
        "aten::values": _public(1),
        "aten::_nnz": lambda self: self._parts[1].size(0),
        "aten::sparse_dim": lambda self: self._parts[0].size(0),
        "aten::dense_dim": lambda self: self.dim() - self._parts[0].size(0),
        "aten::is_coalesced": lambda self: self._coalesced,
        "aten::_coalesced_": _coalesced_,
        "aten::is_pinned": lambda self, device=None: False,
        "aten::_coalesce": _coalesce,
        "aten::_to_dense": _to_dense,
        "aten::add": _add,
        "aten::add_": _add_,
        "aten::sub": _sub,
        "aten::sub_": _sub_,
        "aten::mul": _each(torch.mul),
        "aten::mul_": _each_(torch.mul),
        "aten::div": _each(torch.div),
        "aten::div_": _each_(torch.div),
        "aten::neg": _each(torch.neg),
        "aten::neg_": _each_(torch.neg),
        "aten::pow": _pow,
        **{
            f"aten::{name}": _of_sums(getattr(torch, name))
            for name in ("abs", "sqrt", "isnan", "isinf", "sign")
        },
        "aten::clone": _clone,
        "aten::detach": _detach,
        **_named("zeros_like empty_like", _empty),
        "aten::zero_": _zero_,
        "aten::copy_": _copy_,
        "aten::_to_copy": _to_copy,
        "aten::sparse_mask": _sparse_mask,
        **_named("norm native_norm", _norm),
        "aten::sum": _sum,
        "aten::mm": _mm,
        "aten::mv": _mv,
        **_named("addmm _sparse_addmm", _addmm),
        **_named("t transpose", _transpose),
    }
)
