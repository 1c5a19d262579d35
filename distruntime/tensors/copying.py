"""What Python's `copy` makes of remote tensors: `copy.copy` and `copy.deepcopy`, as torch has them.

torch's own would copy what is in this process, and that is no value.
"""

from __future__ import annotations

import copy
from copyreg import _slotnames  # type: ignore[attr-defined]

import torch

from ..errors import of_caller, without_our_frames
from ..operators.proxies import wrap
from .remote_storage import nbytes
from .tensor import DistributedTensor


def own_attributes(tensor: torch.Tensor) -> list[tuple[str, object]]:
    """Return what a program has set on a tensor: in its dict, and in the slots of a class of the user's."""
    found = [(name, value) for name, value in tensor.__dict__.items() if name != "_handle"]
    if type(tensor) is not DistributedTensor:
        slots: list[str] = _slotnames(type(tensor))
        found += [(name, getattr(tensor, name)) for name in slots if hasattr(tensor, name)]
    return found


@without_our_frames
def _deepcopy(self: DistributedTensor, memo: dict[int, object]) -> object:
    if id(self) in memo:
        return memo[id(self)]
    if not self.is_leaf:
        raise of_caller(
            RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment.  If you were attempting to deepcopy a module, this may be "
                "because of a torch.nn.utils.weight_norm usage, see "
                "https://github.com/pytorch/pytorch/pull/103001"
            )
        )
    if isinstance(self, torch.nn.Parameter):
        # As torch's own: without attributes and gradient.
        with torch.no_grad():
            found = torch.nn.Parameter(self.data.clone(), self.requires_grad)
        memo[id(self)] = found
        return found
    twin = _copied_with_its_memory(self, memo)
    if self.requires_grad:
        twin.requires_grad_()
    memo[id(self)] = twin
    for name, value in own_attributes(self):
        setattr(twin, name, copy.deepcopy(value, memo))
    if self.grad is not None:
        twin.grad = copy.deepcopy(self.grad, memo)
    return twin


def _copied_with_its_memory(self: DistributedTensor, memo: dict[int, object]) -> torch.Tensor:
    """Return a copy that shares its memory with the other copies of one `deepcopy`, as the tensors do."""
    storage, spec = self._handle.storage, self._handle.spec
    with torch.no_grad():
        if spec.bits or not spec.extent:
            return self.clone()
        whole = memo.get(id(storage))
        if whole is None:
            memo[id(storage)] = whole = self._stretched(nbytes(storage)).clone()
            # It keeps its id as long as the memo.
            memo[id(whole)] = storage
        assert isinstance(whole, DistributedTensor)
        typed = whole if whole.dtype == self.dtype else whole.view(self.dtype)
        view = typed.as_strided(spec.size, spec.stride, spec.offset)
        assert isinstance(view, DistributedTensor)
        # It is a tensor of its own, and no view to autograd.
        plain: DistributedTensor = wrap(DistributedTensor, view._handle)
        return plain if type(self) is DistributedTensor else plain.as_subclass(type(self))


def _copy(self: DistributedTensor) -> torch.Tensor:
    twin: torch.Tensor
    if isinstance(self, torch.nn.Parameter):
        twin = torch.nn.Parameter(self.data, self.requires_grad)
    else:
        twin = self.detach().requires_grad_(self.requires_grad)
    for name, value in own_attributes(self):
        setattr(twin, name, value)
    return twin


def install_copying() -> None:
    """Put these in torch's place."""
    DistributedTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign, assignment]
    DistributedTensor.__copy__ = _copy  # type: ignore[attr-defined]
