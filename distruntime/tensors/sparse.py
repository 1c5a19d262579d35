"""`SparseTensor`: the sparse gradient of an embedding on a worker, as two remote tensors.

Its indices and its values are ordinary remote tensors, and each of its operators is some operators of them.
So no worker knows of it. It has what training asks of such a gradient, and refuses the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, SupportsIndex, TypeAlias

import torch
from torch.utils import _pytree

from ..errors import NotSupportedError, of_caller, without_our_frames
from ..log.handle import Place
from ..operators.alias_info import Operator
from .tensor import DistributedTensor

# torch gives a tensor of another class the keys of a sparse one by this.
_make_subclass = torch.Tensor._make_subclass
Kernel: TypeAlias = Callable[..., object]  # type: ignore[explicit-any]
# Its operators, which are in `sparse_operators.py`, by their names.
KERNELS: dict[str, Kernel] = {}


@without_our_frames
def _dispatch(
    cls: type,
    func: Operator,
    types: Sequence[type],
    args: Sequence[object] = (),
    kwargs: dict[str, object] | None = None,
) -> object:
    """Compute one of torch's operators with the parts, or refuse it."""
    options, name = kwargs or {}, func._schema.name
    kernel = KERNELS.get(name)
    if kernel is not None:
        found = kernel(*args, **options)
        if found is not NotImplemented:
            return found
    # Inside a dispatch torch hands composites over whole.
    composite = func.decompose(*args, **options)
    if composite is not NotImplemented:
        return composite
    # torch's loop over a list calls the operator of single tensors.
    if name.startswith("aten::_foreach_"):
        return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **options)
    raise NotSupportedError(
        f"{func}: a sparse tensor on a worker has what the gradients of embeddings need, and not this. "
        "x.to_dense() is a dense one there, and x.cpu() a sparse one here"
    )


class SparseTensor(torch.Tensor):
    """A sparse tensor in the COO layout whose indices and values live on a worker."""

    _parts: tuple[torch.Tensor, torch.Tensor]
    _coalesced: bool

    __module__ = "torch"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __torch_dispatch__ = classmethod(_dispatch)  # type: ignore[assignment, var-annotated]

    def __new__(  # type: ignore[misc]
        cls, indices: torch.Tensor, values: torch.Tensor, size: Sequence[int], coalesced: bool = False
    ) -> torch.Tensor:
        """Return the sparse tensor of these remote parts. Return at once."""
        if not indices.size(0):
            raise NotSupportedError(
                "a sparse tensor on a worker has one sparse dimension at least, and this has none. "
                "Keep its value: values.sum(0)"
            )
        # torch's C++ asks this one for its sizes and its layout, and it has no elements.
        shape = torch.sparse_coo_tensor(
            torch.empty((indices.size(0), 0), dtype=torch.long, device="meta"),
            torch.empty((0, *values.shape[1:]), dtype=values.dtype, device="meta"),
            tuple(size),
            # The program may have set another default device.
            device="meta",
            check_invariants=False,
        )
        lazy = torch.Tensor.device.__get__(values)
        made: SparseTensor = _make_subclass(
            cls, shape, False, dispatch_device=True, device_for_backend_keys=lazy
        )
        made._parts, made._coalesced = (indices, values), coalesced
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The place as a torch device, as that of a dense remote tensor."""
        return self._parts[1].device

    @property
    def place(self) -> Place:
        """Where the tensor lives: its node's number and the device there."""
        place: Place = self._parts[1].place  # type: ignore[attr-defined]
        return place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """False, as `device.type` is "remote"."""
        return False

    @without_our_frames
    def to(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Return it at another place or with another dtype, as `Tensor.to`. To the CPU here: blocks."""
        indices, values = self._parts
        moved = values.to(*args, **kwargs)  # type: ignore[call-overload]
        if moved is values:
            return self
        return made_of(indices.to(moved.device), moved, self.shape, self._coalesced)

    @without_our_frames
    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """Return a local copy. Block until it is here."""
        return self.to("cpu")

    @without_our_frames
    def numpy(self, *, force: bool = False) -> NoReturn:
        raise of_caller(TypeError("can't convert a sparse tensor to numpy: x.to_dense().numpy(force=True)"))

    @without_our_frames
    def new(  # type: ignore[override]
        self, indices: torch.Tensor, values: torch.Tensor, size: torch.Size
    ) -> torch.Tensor:
        """Return another sparse tensor of this dtype: `SparseAdam` makes its steps so."""
        return torch.sparse_coo_tensor(
            indices, values, size, dtype=self.dtype, device=values.device, check_invariants=False
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        indices, values = self._parts
        nested = f"indices={indices},\nvalues={values},\nsize={tuple(self.shape)}, layout=torch.sparse_coo)"
        return "tensor(" + nested.replace("\n", "\n       ")

    @without_our_frames
    def __deepcopy__(self, memo: dict[int, object]) -> object:
        if id(self) not in memo:
            parts = [copy.deepcopy(part, memo) for part in self._parts]
            memo[id(self)] = SparseTensor(parts[0], parts[1], self.shape, self._coalesced)
        return memo[id(self)]

    @without_our_frames
    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        # `torch.save` fetches the parts, and another pickle refuses them.
        return torch._utils._rebuild_sparse_tensor, (
            torch.sparse_coo,
            (*self._parts, self.shape, self._coalesced),
        )

    def type(self, dtype: torch.dtype | None = None, non_blocking: bool = False) -> str | torch.Tensor:  # type: ignore[override]
        """Without arguments, return the name of its class; with a dtype, convert."""
        if dtype is not None:
            return self.to(dtype)
        return self._parts[1].type().replace("torch.remote.", "torch.remote.sparse.")


def made_of(
    indices: torch.Tensor, values: torch.Tensor, size: Sequence[int], coalesced: bool = False
) -> torch.Tensor:
    """Return a sparse tensor of parts that are both remote, or both local."""
    if isinstance(values, DistributedTensor):
        return SparseTensor(indices, values, size, coalesced)
    return torch.sparse_coo_tensor(
        indices, values, tuple(size), device=values.device, is_coalesced=coalesced, check_invariants=False
    )


def _open(sparse: SparseTensor) -> tuple[list[torch.Tensor], tuple[torch.Size, bool]]:
    return list(sparse._parts), (sparse.shape, sparse._coalesced)


def _close(parts: Iterable[torch.Tensor], about: tuple[torch.Size, bool]) -> torch.Tensor:
    indices, values = parts
    return made_of(indices, values, *about)


def install_sparse() -> None:
    """Let what opens trees open these, so that fetching one fetches its parts, once per process."""
    if SparseTensor not in _pytree.SUPPORTED_NODES:
        _pytree.register_pytree_node(
            SparseTensor, _open, _close, serialized_type_name="distruntime.SparseTensor"
        )
