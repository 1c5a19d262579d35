"""A member's shard as a view of a mesh's tensor: `x.member(k)`.

What is written through a view changes the tensor that it is a view of, and autograd has to know that. torch
makes such views in C++ alone, for its own operators. `select` is one of them, and its index may be a symbolic
int. So a member's shard is a `select` whose index says which member of which mesh. torch's C++ keeps the
index for the backward pass, and for making the view again after a write, and asks nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..errors import InternalError, NotSupportedError
from ..log.handle import Residence
from ..log.mesh_log import MeshLog
from ..log.shards import member_of, mesh_of
from .proxies import wrap, wrap_view

_select = torch.ops.aten.select.int


class _MemberIndex:
    """What torch's C++ holds as the index. torch gives these methods their names."""

    def __init__(self, home: Residence, k: int) -> None:
        self.home, self.k = home, k

    def __repr__(self) -> str:
        return f"<member {self.k} of {len(self.home.node.members)}>"

    _graph_repr = __repr__

    def is_int(self) -> bool:
        return True

    is_symbolic = is_int

    def is_float(self) -> bool:
        return False

    is_bool = is_nested_int = is_constant = is_float

    def maybe_as_int(self) -> None:
        return None

    def guard_int(self, file: str, line: int) -> NoReturn:
        self._refuse()

    @property
    def constant(self) -> NoReturn:
        """Refuse: make_fx asks for it."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotSupportedError(
            "x.member(k) can neither be batched nor recorded; take the member outside of torch.vmap and "
            "make_fx, and give it to the function"
        )


def names_member(value: object) -> bool:
    """Whether a value is an index that says a member."""
    return type(value) is torch.SymInt and isinstance(value.node, _MemberIndex)


def view_of_member(whole: Any, k: int) -> Any:
    """Return a mesh's tensor's `k`-th shard as a view of it. Return at once."""
    # Autograd makes views again by their strides, unless it is told that it cannot. A shard and the mesh's
    # tensor have equal strides.
    replayed = torch._C._is_view_replay_enabled()
    torch._C._set_view_replay_enabled(True)
    try:
        return _select(whole, 0, torch.SymInt(_MemberIndex(whole._handle.place, k)))
    finally:
        torch._C._set_view_replay_enabled(replayed)


def member(cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the proxy of a shard, where a `select` asks for a member."""
    if not names_member(args[2]):
        return NotImplemented
    whole, index = args[0], args[2].node
    if whole._handle.place is not index.home:
        raise InternalError(
            f"member {index.k} of {index.home.place} was asked of {whole._handle.place.place}"
        )
    return wrap_view(cls, member_of(whole._handle, index.k), whole)


def member_backward(
    cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Return the gradient of the mesh's tensor of that of one shard: zeros on all other members."""
    if not names_member(args[3]):
        return NotImplemented
    grad, home, own = args[0], args[3].node.home, args[3].node.k
    mesh_log = home.node
    assert isinstance(mesh_log, MeshLog)
    zeros: Any = torch.zeros(grad.shape, dtype=grad.dtype, device=home.lazy)
    handles = [member_of(zeros._handle, k) for k in range(len(mesh_log.members))]
    # The gradient may be somebody else's memory too.
    handles[own] = grad.clone(memory_format=torch.contiguous_format)._handle
    return wrap(cls, mesh_of(mesh_log, home, handles))
