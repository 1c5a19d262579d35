"""`DistributedTensor`: a tensor whose data lives on a worker. Metadata and autograd are here, values are not.

What torch does above dispatch, in Python or in C++, and would do wrong to a proxy, is overridden here;
everything else is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import NoReturn, Protocol, SupportsIndex, overload

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.types import Number

from ..errors import NotSupportedError, PlacementError, UsageError, of_caller, without_our_frames
from ..log.current import ACCELERATOR, DeviceLike, device_name
from ..log.handle import Handle, Place
from ..log.tape import note_begin_asked
from ..operators.dispatch import dispatch
from ..operators.member_views import view_of_member
from ..operators.proxies import wrap
from ..operators.transfer import download, item
from ..session.spelling import DeviceIndex, destination
from .printing import render, suffixes_of
from .remote_storage import RemoteStorage, address, nbytes

Numbers = list["Number | Numbers"]
# numpy's own `generic` takes a parameter, which is `Any` where nobody gives it.
Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]  # type: ignore[explicit-any]


class _Convert(Protocol):
    def __call__(self, tensor: torch.Tensor, /, *args: object, **kwargs: object) -> torch.Tensor: ...


# torch's own `Tensor.to` looks at its arguments itself; its overloads are not repeated here.
_to: _Convert = torch.Tensor.to  # type: ignore[assignment]
# A class's `__torch_function__` knows this getter.
_get_data: Callable[..., torch.Tensor] = torch.Tensor.data.__get__  # type: ignore[attr-defined, explicit-any]


# While `torch.save` runs in this thread, this returns the local copy of a proxy: see
# `backend/files/torch_save.py`.
saving: ContextVar[Callable[[torch.Tensor], torch.Tensor] | None] = ContextVar("saving", default=None)


class DistributedTensor(torch.Tensor):
    """A proxy for a tensor on a worker: a ref, its metadata, and the autograd graph of this process.

    Operators return at once; `.item()`, `.cpu()`, `.tolist()`, `bool()` and printing wait for the value.
    """

    _handle: Handle

    # Libraries that take several kinds of arrays (opt_einsum) tell them by the first name of this.
    __module__ = "torch"

    # `type(parameter)(data, requires_grad=...)` makes another parameter: accelerate's hooks copy so.
    # `type(x)(data)` makes another tensor of a user's class, as torch does.
    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> torch.nn.Parameter:  # type: ignore[misc]
        origin = getattr(cls, "origin", None)
        return (
            torch.nn.Parameter(data, requires_grad) if origin is None else data.detach().as_subclass(origin)
        )

    # torch documents both of these ways, and its stubs know neither.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment, var-annotated]

    # -- place -----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The place as a torch device, `device("remote", k)`: good for `device=x.device`."""
        return self._handle.place.device

    @property
    def place(self) -> Place:
        """Where the tensor lives: its node's number and the device there."""
        return self._handle.place.place

    @without_our_frames
    def member(self, k: int) -> DistributedTensor:
        """Return a proxy of the `k`-th member's shard of a tensor on a mesh. Return at once.

        It is a view: the same memory, at that member's place, and autograd sees what is written through it.
        """
        members = self._handle.place.node.members
        if not members:
            raise UsageError(f"member() is of tensors on a mesh; this one lives on {self.place}")
        if not isinstance(k, int) or not -len(members) <= k < len(members):
            raise of_caller(
                IndexError(f"a mesh of {len(members)} members has members 0 to {len(members) - 1}, got {k!r}")
            )
        found: DistributedTensor = view_of_member(self, k % len(members))
        return found if type(self) is DistributedTensor else found.as_subclass(type(self))

    def get_node(self) -> int:
        """Return the number of the node that the tensor lives on."""
        return self.place.node

    def get_device(self) -> int:
        """Return -1 for the CPU of its node, k for `cuda:k`."""
        _, _, index = self.place.local_device.partition(":")
        number = DeviceIndex(index if index.isdigit() else -1)
        number.place = self.place
        return number

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """False, as `device.type` is "remote"; the device on the node is in `place`."""
        return False

    @without_our_frames
    def to(
        self, *args: object, device: DeviceLike | None = None, node: int | None = None, **kwargs: object
    ) -> torch.Tensor:
        """Return the tensor at another place or with another dtype, as `Tensor.to`. To the CPU here: blocks.

        A device is one of this tensor's node ("cuda:1"), "cpu" is here, and `node=` names another node.
        `.to("remote")` is the current place, `.to(y.device)` and `.to(dr.place(1, "cuda:0"))` that place.
        """
        target, rest = device, args
        if args and isinstance(args[0], torch.Tensor):
            dtype = args[0].dtype
            kwargs = {"dtype": dtype, **dict(zip(("non_blocking", "copy"), args[1:])), **kwargs}
            target, rest = args[0].device, ()
        elif args and (args[0] is None or isinstance(args[0], (str, torch.device, int))):
            target, rest = args[0], args[1:]
        if target is None and node is None:
            return _to(self, *args, **kwargs)
        own = self._handle.place
        own.node.session.require_open()
        found = destination(target, node, own)
        if isinstance(found, torch.device):
            return _to(self, found, *rest, **kwargs)
        if found is own and not rest and not kwargs:
            return self
        # "lazy" is what the wrapper claims in C++: with "remote" it would copy where torch promises `self`.
        # `found` is held until the copy lives there, so that its number stays its own.
        return _to(self, found.lazy, *rest, **kwargs)

    @without_our_frames
    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """Return a local copy. Block until it is here."""
        return super().to(torch.device("cpu"), memory_format=memory_format)

    @without_our_frames
    def cuda(
        self,
        device: DeviceLike | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        """Return a copy on a GPU of its own node: the current one, or `device` ("cuda:1" or 1).

        Return at once.
        """
        return self.to(
            ACCELERATOR if device is None else device_name(device),
            non_blocking=non_blocking,
            memory_format=memory_format,
        )

    # -- values ----------------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        text = render(self, self._handle, suffixes_of(self))
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text

    def __dir__(self) -> list[str]:
        # Python suggests a name for a mistyped one among fewer than 750, and torch's tensors have 750.
        names: list[str] = super().__dir__()  # type: ignore[no-untyped-call]
        return [name for name in names if name[:1] != "_" or name[:2] == "__"]

    @without_our_frames
    def __format__(self, spec: str) -> str:
        return (
            format(self.item(), spec)
            if self.dim() == 0 and not self.is_meta
            else object.__format__(self, spec)
        )

    @without_our_frames
    def item(self) -> Number:
        """Return the one element as a Python number. Block until it is here."""
        if self.numel() != 1:
            raise of_caller(
                RuntimeError(f"a Tensor with {self.numel()} elements cannot be converted to Scalar")
            )
        value: Number = item(self._handle)
        return value

    @without_our_frames
    def __round__(self, ndigits: int | None = None) -> Number:
        return round(self.item(), ndigits)

    @overload
    def type(self, dtype: None = None, non_blocking: bool = False) -> str: ...

    @overload
    def type(self, dtype: str | torch.dtype, non_blocking: bool = False) -> torch.Tensor: ...

    def type(self, dtype: str | torch.dtype | None = None, non_blocking: bool = False) -> str | torch.Tensor:
        """Without arguments, return the name of the class that the RFC gives it; with a dtype, convert."""
        if dtype is None:
            return torch.empty(0, dtype=self.dtype, device="cpu").type().replace("torch.", "torch.remote.")
        return super().type(dtype, non_blocking)

    @without_our_frames
    def tolist(self) -> Numbers:
        """Return the values as nested lists of numbers. Block until they are here."""
        return download(self._handle, "tolist").tolist()

    @without_our_frames
    def numpy(self, *, force: bool = False) -> Array:
        """Refuse, as a CUDA tensor does; with `force=True` fetch first."""
        if not force:
            raise of_caller(
                TypeError(
                    f"can't convert a tensor on {self.place} to numpy; fetch it first: "
                    "x.detach().cpu().numpy(), or x.numpy(force=True)"
                )
            )
        return self.detach().cpu().numpy()

    @without_our_frames
    def __array__(self, dtype: object = None, copy: object = None) -> Array:
        return self.numpy()

    # -- what torch would do above dispatch ------------------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        """The same value without history; assigning makes this tensor the other one's value."""
        # This runs below autograd, as torch's own does: what is written through it does not count in this
        # tensor's version.
        cls = type(self)
        if cls is not DistributedTensor and has_torch_function_unary(self):
            # A user's class makes one of its own of what torch returns, with the attributes that it wants.
            asked: torch.Tensor = handle_torch_function(_get_data, (self,), self)
            return asked
        found: DistributedTensor = dispatch(cls, torch.ops.aten.detach.default, (), (self,))
        # The class of a parameter, and one of the user's, is not that of its value.
        return found if cls is DistributedTensor else wrap(DistributedTensor, found._handle)

    @data.setter
    @without_our_frames
    def data(self, other: torch.Tensor) -> None:
        # torch's own setter changes the wrapper's sizes, dtype and device, and would silently
        # keep the old value.
        if not isinstance(other, torch.Tensor):
            # These are torch's words, and its class.
            raise of_caller(TypeError(f"Variable data has to be a tensor, but got {type(other).__name__}"))
        if not isinstance(other, DistributedTensor):
            raise PlacementError(
                f"x.data = y: y is local and x lives on {self.place}; send it first: x.data = y.to(x.device)"
            )
        alias = other.data
        assert isinstance(alias, DistributedTensor)
        torch.Tensor.data.__set__(self, alias)  # type: ignore[attr-defined]
        self._handle = alias._handle

    @data.deleter
    @without_our_frames
    def data(self) -> None:
        raise of_caller(RuntimeError("Deleting tensor data is not allowed. Delete tensor instead!"))

    def _stretched(self, size: int) -> torch.Tensor:
        """Return so many bytes of the memory, from its begin, as elements in a row. Return at once."""
        with torch.no_grad():
            plain: torch.Tensor = wrap(DistributedTensor, self._handle)
            if plain.is_conj():
                plain = plain.conj()
            if plain.is_neg():
                plain = torch._neg_view(plain)
            return plain.as_strided((size // plain.element_size(),), (1,), 0)

    @without_our_frames
    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        if is_lazy(self):
            # What has no shape has no values. torch does not pickle where it is, either.
            return self.origin, (self.requires_grad,)
        fetched = saving.get()
        if fetched is not None:
            reduced: str | tuple[object, ...] = fetched(self).__reduce_ex__(protocol)
            return reduced
        raise NotSupportedError(
            f"a tensor on {self.place} cannot be pickled: its values are on a worker. torch.save(state, "
            "path) fetches and saves it; elsewhere fetch it first: dr.fetch(state)"
        )

    def data_ptr(self) -> int:
        """Return a number that tells where in which memory the tensor begins.

        Views of one memory have numbers in one range, and no two memories share any. It is no address, and
        larger than an address can be: C code refuses it.
        """
        note_begin_asked(self._handle)
        begin = address(self._handle.storage)
        offset = self._handle.spec.offset * self.element_size()
        return begin + offset if begin and self.numel() else 0

    def storage_offset(self) -> int:
        """Return where in its memory the tensor begins, in elements."""
        note_begin_asked(self._handle)
        return int(super().storage_offset())

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory's size, place and identity; its bytes are not in this process."""
        # It answers what code asks that saves or compares, and it is no storage of this process.
        return RemoteStorage(self)  # type: ignore[return-value]

    @without_our_frames
    def set_(
        self,
        source: object = None,
        storage_offset: int | torch.SymInt = 0,
        size: Sequence[int | torch.SymInt] | None = None,
        stride: Sequence[int | torch.SymInt] | None = None,
    ) -> torch.Tensor:
        """Let the tensor have another one's memory, as torch's does. Return at once."""
        memory = source.tensor if isinstance(source, RemoteStorage) else source
        if not isinstance(memory, DistributedTensor) or (size is None and memory is source):
            given = () if source is None else (source,) if size is None else (source, storage_offset, size)
            return super().set_(*given, *(() if stride is None else (stride,)))
        with torch.no_grad():
            room = nbytes(memory._handle.storage) // self.element_size()
            whole = memory._stretched(room * self.element_size())
            whole = whole if whole.dtype == self.dtype else whole.view(self.dtype)
            shape = torch.empty((room,) if size is None else tuple(size), device="meta")
            if stride is not None:
                shape = torch.empty_strided(shape.shape, tuple(stride), device="meta")
            needed = storage_offset + shape.untyped_storage().nbytes() // shape.element_size()
            if needed > room and shape.numel():
                raise NotSupportedError(
                    f"the memory on {self.place} has {room} elements, and {needed} are asked for: "
                    "a worker's memory does not grow by set_; x.resize_(...) makes a larger one"
                )
            self.data = whole.as_strided(shape.shape, shape.stride(), storage_offset)
        return self

    @without_our_frames
    def storage(self) -> NoReturn:
        if self._handle.place.node.members:
            raise NotSupportedError(
                f"a tensor on {self.place} has no typed storage in this process. FullyShardedDataParallel "
                "needs one: use fully_shard (torch.distributed.fsdp), which shards over a mesh"
            )
        raise NotSupportedError(
            f"a tensor on {self.place} has no storage in this process; "
            "dr.fetch(x) gives a local tensor that has one"
        )

    @without_our_frames
    def _typed_storage(self) -> NoReturn:
        self.storage()

    @without_our_frames
    def share_memory_(self) -> NoReturn:
        raise NotSupportedError(
            f"a tensor on {self.place} is not in this machine's memory; "
            "fetch it first: x.cpu().share_memory_()"
        )

    def is_shared(self) -> bool:
        """False: the memory is a worker's."""
        return False

    @without_our_frames
    def __dlpack__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotSupportedError(
            f"a tensor on {self.place} cannot be exported by DLPack; fetch it first: x.cpu().__dlpack__()"
        )

    @without_our_frames
    def __dlpack_device__(self) -> NoReturn:
        self.__dlpack__()

    @without_our_frames
    def record_stream(self, stream: object) -> None:
        """Let the memory be used again only after what `stream` has been given until this tensor dies.

        Return at once.
        """
        if not hasattr(stream, "keep"):
            raise UsageError(
                "record_stream takes a distruntime.Stream, "
                f"got {type(stream).__module__}.{type(stream).__qualname__}"
            )
        stream.keep(self._handle)

    def dist_send(self) -> DistributedTensor:
        """Return itself: it is remote already."""
        return self
