"""`UnevenTensor`: a tensor on a mesh whose members' shards have different shapes.

DTensor makes such shards where a size is no multiple of the number of members, FSDP2 of a layer of 10 rows
on 4 members. Every other tensor on a mesh is one value in the mesh's log, and has one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from ..errors import NotSupportedError, UsageError, drop_frames, of_caller, without_our_frames
from ..log.handle import Place, Residence
from ..log.mesh_log import MeshLog
from ..log.shards import member_of, mesh_of
from ..operators.ask_worker import of_shards
from ..operators.new_calls import for_each_member
from ..operators.proxies import AUTOCAST, wrap
from .tensor import DistributedTensor

_detach_ = torch.ops.aten.detach_.default
_make_wrapper: Any = torch.Tensor._make_wrapper_subclass

# It makes one int of each member's; see mesh/varying.py, which sets it with the first mesh.
varying_int: list[Callable[[Sequence[int]], Any]] = []

# These operators are no kernels that each member runs; see mesh/torch_collectives.py.
uneven_calls: dict[str, Callable[..., Any]] = {}


def _numbers(by_member: Iterable[Sequence[int]]) -> list[Any]:
    """Return the sizes or strides of all members as one tensor's."""
    return [varying_int[0](numbers) for numbers in zip(*by_member)]


class UnevenTensor(torch.Tensor):
    """A tensor on a mesh whose shards have different shapes. Every operator runs once for each member.

    In `shape`, a size that differs is a symbolic int, which knows each member's.
    """

    # These are proxies at the members' places, or tensors on the meta device.
    _shards: list[Any]
    # A tensor on the meta device has none.
    _residence: Residence | None

    # torch documents both of these ways, and its stubs know neither.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shards: Sequence[torch.Tensor], residence: Residence | None) -> UnevenTensor:
        """Make the tensor of its members' shards, which it keeps. Return at once."""
        first = shards[0]
        found: UnevenTensor = _make_wrapper(
            cls,
            _numbers(t.shape for t in shards),
            strides=_numbers(t.stride() for t in shards),
            dtype=first.dtype,
            device=first.device if residence is None else residence.lazy,
            _extra_dispatch_keys=AUTOCAST,
        )
        # Whoever wants its memory gets an error from torch, and does not read the address 0.
        torch._C._set_throw_on_mutable_data_ptr(found)
        found._shards, found._residence = list(shards), residence
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch._ops.OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # It is DTensor's turn, to say what is mixed or to make it one.
        if not all(issubclass(kind, (cls, DistributedTensor)) for kind in types):
            return NotImplemented
        if func is _detach_:
            return args[0]
        if torch.Tag.inplace_view in func.tags:
            raise NotSupportedError(
                f"{func._schema.name} changes the shape of a tensor in place, and this one has several: "
                f"{shapes_of(args[0]._shards)}. Make a new tensor, as x.reshape(...) does"
            )
        special = uneven_calls.get(func._schema.name)
        try:
            if special is not None:
                return special(cls, func, args, kwargs or {})
            return for_each_member[0](func, args, kwargs or {})
        except BaseException as error:
            drop_frames(error)
            raise

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The mesh as a torch device, as of its other tensors."""
        return self._shards[0].device if self._residence is None else self._residence.device

    @property
    def place(self) -> Place:
        """Where the members are."""
        if self._residence is None:
            raise UsageError("a tensor on the meta device is at no place")
        return self._residence.place

    @without_our_frames
    def member(self, k: int) -> torch.Tensor:
        """Return the `k`-th member's shard: the same memory, at that member's place. Return at once.

        Autograd takes its gradient to this tensor, with zeros for the other members.
        """
        if not isinstance(k, int) or not -len(self._shards) <= k < len(self._shards):
            raise of_caller(
                IndexError(
                    f"a mesh of {len(self._shards)} members has members 0 to "
                    f"{len(self._shards) - 1}, got {k!r}"
                )
            )
        found: torch.Tensor = _Member.apply(self, k % len(self._shards))  # type: ignore[no-untyped-call]
        return found

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        shown = "".join(f"\n  member {k}: {t!r}" for k, t in enumerate(self._shards))
        return f"UnevenTensor on {'meta' if self._residence is None else self._residence.place}:{shown}"

    def __len__(self) -> int:
        return int(self.shape[0])

    def __deepcopy__(self, memo: dict[int, object]) -> UnevenTensor:
        """Return a tensor with copies of the shards; raise `RuntimeError` for one with a graph, as torch."""
        if not self.is_leaf:
            raise of_caller(RuntimeError("a tensor with a graph cannot be copied deeply: x.detach() first"))
        found = UnevenTensor([t.detach().clone() for t in self._shards], self._residence)
        memo[id(self)] = found
        found.requires_grad_(self.requires_grad)
        return found

    def data_ptr(self) -> int:
        """Return a number that tells where the first member's shard begins. It is no address."""
        return int(self._shards[0].data_ptr())

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Whether all members' shards are."""
        return all(t.is_contiguous(memory_format=memory_format) for t in self._shards)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        """Return the tensor itself, or a copy where one of the shards is not contiguous. Return at once."""
        return self if self.is_contiguous(memory_format) else self.clone(memory_format=memory_format)

    def untyped_storage(self) -> Any:
        """Return the members' memories as one, of which FSDP2 frees what it has gathered."""
        return _Storages([t.untyped_storage() for t in self._shards])

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refused("a pickle")

    def _refused(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} is of one tensor, and the members' shards have different shapes "
            f"({shapes_of(self._shards)}): dr.shards(x) has all of them, x.member(k) is one"
        )

    def tolist(self) -> NoReturn:
        """Refuse: there is one list for each member."""
        self._refused("tolist()")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse: there is one array for each member."""
        self._refused("numpy()")

    def item(self) -> NoReturn:
        """Refuse: the shards have more than one number."""
        self._refused("item()")


class _Storages:
    """The memories of an uneven tensor's shards. Sizes are in bytes, each member's own."""

    def __init__(self, storages: list[Any]) -> None:
        self._storages = storages

    def size(self) -> Any:
        """Return the size."""
        return varying_int[0]([storage.size() for storage in self._storages])

    nbytes = size

    def resize_(self, size: Any) -> None:
        """Give each member's memory its size. Return at once."""
        for k, storage in enumerate(self._storages):
            storage.resize_shard(size if isinstance(size, int) else size.node._local_ints[k])


class _Member(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: UnevenTensor, k: int) -> torch.Tensor:
        ctx.shards, ctx.residence, ctx.k = whole._shards, whole._residence, k
        found: torch.Tensor = whole._shards[k].detach()
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return together(
            [grad if k == ctx.k else torch.zeros_like(t) for k, t in enumerate(ctx.shards)], ctx.residence
        ), None


def members_of(t: DistributedTensor | UnevenTensor) -> list[torch.Tensor]:
    """Return the members' shards of a tensor on a mesh, below autograd. Return at once."""
    if isinstance(t, UnevenTensor):
        return [*t._shards]
    return [wrap(DistributedTensor, member_of(t._handle, k)) for k in range(len(t.place.members))]


def together(shards: Sequence[torch.Tensor], residence: Residence | None) -> torch.Tensor:
    """Return a tensor on a mesh of its members' shards, proxies at their places. Return at once.

    It is an `UnevenTensor` where their shapes differ. Without a residence, they are on the meta device.
    """
    if len({t.shape for t in shards}) > 1:
        return UnevenTensor(shards, residence)
    if residence is None:
        return shards[0]
    # Views must stay views, as what is written to them goes to the tensor.
    alike = len({t.stride() for t in shards}) == 1
    mesh_log = residence.node
    assert isinstance(mesh_log, MeshLog)
    proxies: list[Any] = [t if alike else t.contiguous() for t in shards]
    handles = [t._handle for t in proxies]
    found: torch.Tensor = wrap(DistributedTensor, mesh_of(mesh_log, residence, handles))
    return found


of_shards.append(together)


def shapes_of(shards: Sequence[torch.Tensor]) -> str:
    """Return the shapes of the first shards, in words."""
    shown = ", ".join(f"member {k}: {tuple(t.shape)}" for k, t in enumerate(shards[:4]))
    return shown + (", ..." if len(shards) > 4 else "")
