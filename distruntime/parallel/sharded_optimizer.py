"""`dr.parallel.ShardedOptimizer`: each member of a mesh keeps the state of its share (ZeRO-1 and 2).

The idea is that of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020: optimizers work number by number, so a member can update its share alone, and all gather the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import optim
from torch.distributed.tensor import DTensor

from ..errors import NotSupportedError, UsageError, without_our_frames
from ..mesh import lines as collectives
from ..mesh.line_groups import Lines
from ..mesh.mesh import DeviceMesh
from ..tensors.tensor import DistributedTensor


@final
class _Pieces:
    """How a list of tensors is cut over the members of each line.

    Member k of n has the k-th n-th of each tensor's numbers. The last pieces end with zeros where n does not
    divide the tensor. A tensor without dimensions is one number, and every member has it: an optimizer's
    state of it has no dimensions either, so nobody could tell what of that is cut. One collective moves the
    pieces of all tensors of one dtype.
    """

    def __init__(self, lines: Lines, like: Sequence[torch.Tensor]) -> None:
        self._lines, self._shapes = lines, [tensor.shape for tensor in like]
        self._rank = lines.ranks().reshape(1)
        self.lengths = [-(-shape.numel() // lines.size) for shape in self._shapes]

    def own(self, tensors: Sequence[torch.Tensor], at: Sequence[int]) -> list[torch.Tensor]:
        """Return each member's pieces, copies of them. `at` says which of the tensors these are."""
        rows = self._rows(tensors, at).index_select(0, self._rank)[0]
        return self._split(rows, at)

    def reduced(self, tensors: Sequence[torch.Tensor], at: Sequence[int], op: str) -> list[torch.Tensor]:
        """Return each member's pieces of the reduction of what the members of its line have."""
        return self._split(collectives.reduce_scatter(self._lines, self._rows(tensors, at), op)[0], at)

    def whole(self, pieces: Sequence[torch.Tensor], at: Sequence[int]) -> list[torch.Tensor]:
        """Return the tensors whose pieces the members have, whole at each member."""
        rows = collectives.all_gather(self._lines, torch.cat([piece.reshape(-1) for piece in pieces])[None])
        parts = rows.split([self.lengths[k] for k in at], 1)
        return [
            part.reshape(-1)[: self._shapes[k].numel()].view(self._shapes[k])
            for part, k in zip(parts, at, strict=True)
        ]

    def _rows(self, tensors: Sequence[torch.Tensor], at: Sequence[int]) -> torch.Tensor:
        """Return a matrix with a row for each member."""
        rows = []
        for tensor, k in zip(tensors, at, strict=True):
            if not self._shapes[k]:
                rows.append(tensor.expand(self._lines.size, 1))
                continue
            lacking = self.lengths[k] * self._lines.size - tensor.numel()
            flat = (
                torch.nn.functional.pad(tensor.reshape(-1), (0, lacking)) if lacking else tensor.reshape(-1)
            )
            rows.append(flat.view(self._lines.size, self.lengths[k]))
        return torch.cat(rows, 1)

    def _split(self, row: torch.Tensor, at: Sequence[int]) -> list[torch.Tensor]:
        parts = row.split([self.lengths[k] for k in at])
        return [(part if self._shapes[k] else part[0]).clone() for part, k in zip(parts, at, strict=True)]


def _require_on(mesh: DeviceMesh, parameters: Iterable[torch.Tensor]) -> None:
    """Raise unless all members of a mesh hold these parameters whole."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            raise NotSupportedError(
                "ShardedOptimizer takes parameters that all members hold whole, got a DTensor: fully_shard "
                "and parallelize_module shard an optimizer's state with the parameters, so take the "
                "optimizer itself"
            )
        if not isinstance(parameter, DistributedTensor) or parameter.device != mesh.device:
            where = parameter.place if isinstance(parameter, DistributedTensor) else parameter.device
            raise UsageError(
                f"ShardedOptimizer needs parameters on its mesh, got one on {where}: model.to(mesh.device)"
            )


# These look at more of a parameter than at one number: at its rows, its matrix, or at all parameters.
_WHOLE = tuple(
    getattr(optim, name) for name in ("LBFGS", "Adafactor", "Muon", "SparseAdam") if hasattr(optim, name)
)

Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


@final
class ShardedOptimizer(optim.Optimizer):
    """An optimizer of torch's of whose state each member of a mesh keeps its share only.

    Learning rate schedulers, `zero_grad`, `state_dict` and groups are those of torch. The state dict has the
    whole state, as the optimizer has it without shares. So another mesh can load it, and that optimizer, too.
    With `master_dtype`, its "masters" are the numbers that the parameters are rounded from. What others write
    into the parameters between steps counts, as with any optimizer.

    Args:
        params: parameters on the mesh, which all members hold alike, or groups of them.
        optimizer_class: an optimizer that works number by number, as SGD, Adam, AdamW and RMSprop do.
        mesh: the members that share the state: a mesh, or a slice of one, as `mesh["node"]`.
        reduce: None takes gradients that are the same at all members, as DistributedDataParallel leaves them.
            "avg" and "sum" take each member's own gradients, and reduce each share straight to its member:
            half of what an all_reduce moves. They reduce over all members of the mesh of which `mesh` is a
            slice.
        master_dtype: the dtype in which members keep their shares: torch.float32 for parameters in bfloat16.
            None keeps that of the parameters.
        defaults: the arguments of `optimizer_class`.

    Raises:
        UsageError: no class of an optimizer, or a parameter that is not on the mesh. NotSupportedError: the
            optimizer needs whole parameters, or a parameter is a DTensor; `fully_shard` shards those with
            their state.
    """

    @without_our_frames
    def __init__(
        self,
        params: Parameters,
        optimizer_class: type[optim.Optimizer],
        mesh: DeviceMesh,
        *,
        reduce: Literal["avg", "sum"] | None = None,
        master_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, optim.Optimizer)):
            raise UsageError(
                "ShardedOptimizer makes the optimizer of the shares, so it takes its class and the "
                "arguments, dr.parallel.ShardedOptimizer(model.parameters(), torch.optim.AdamW, mesh, "
                f"lr=1e-3); got {optimizer_class!r:.60}"
            )
        if issubclass(optimizer_class, _WHOLE):
            raise NotSupportedError(
                f"{optimizer_class.__name__} needs whole parameters, and each member has a share of each: "
                "take an optimizer that works number by number, such as AdamW"
            )
        if reduce not in (None, "avg", "sum"):
            raise UsageError(f'reduce is None, "avg" or "sum", got {reduce!r}')
        super().__init__(params, defaults)
        self._mesh, self._reduce, self._master_dtype = mesh, reduce, master_dtype
        self._parameters: list[torch.Tensor] = []
        self._shares: list[torch.Tensor] = []
        groups = [{**group, "params": self._shared_out(group["params"])} for group in self.param_groups]
        self._inner = optimizer_class(groups, **defaults)
        self._show_inner()
        self.defaults = self._inner.defaults

    def _shared_out(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Note parameters that are new, and return each member's shares of them."""
        _require_on(self._mesh, parameters)
        first = len(self._parameters)
        self._parameters += parameters
        self._pieces = _Pieces(self._mesh.lines(), self._parameters)
        with torch.no_grad():
            shares: list[torch.Tensor] = [
                torch.nn.Parameter(self._pieces.own([p], [k])[0].to(self._master_dtype or p.dtype))
                for k, p in enumerate(parameters, first)
            ]
        self._shares += shares
        return shares

    def _show_inner(self) -> None:
        """Show in the groups what the optimizer itself has filled in."""
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            outer.update({name: value for name, value in inner.items() if name != "params"})

    @without_our_frames
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to those that are optimized, as `torch.optim.Optimizer` does.

        Raises:
            UsageError: a parameter is not on the mesh.
        """
        super().add_param_group(param_group)
        if "_inner" not in self.__dict__:
            # torch's constructor is at work, and the groups are shared out after it.
            return
        group = self.param_groups[-1]
        try:
            shares = self._shared_out(group["params"])
        except BaseException:
            self.param_groups.pop()
            raise
        self._inner.add_param_group({**group, "params": shares})
        self._show_inner()

    def __repr__(self) -> str:
        return f"<ShardedOptimizer of {self._inner!r} over {self._mesh!r}>"

    @without_our_frames
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by their gradients. Return at once, with what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({name: value for name, value in outer.items() if name != "params"})
        wanted = [k for k, p in enumerate(self._parameters) if p.grad is not None]
        for k, share in enumerate(self._shares):
            if self._parameters[k].grad is None:
                share.grad = None
        for at in self._by_dtype(wanted, lambda k: self._gradient(k).dtype):
            given = [self._gradient(k) for k in at]
            for k, piece in zip(at, self._reduced(given, at)):
                self._shares[k].grad = piece.to(self._shares[k].dtype)
        self._follow_writes()
        self._inner.step()
        for share in self._shares:
            share.grad = None
        for at in self._by_dtype(wanted, lambda k: self._parameters[k].dtype):
            pieces = [self._shares[k].detach().to(self._parameters[k].dtype) for k in at]
            for k, whole in zip(at, self._pieces.whole(pieces, at)):
                self._parameters[k].copy_(whole)
        return loss

    def _follow_writes(self) -> None:
        """Take what somebody else has written into the parameters, as `load_state_dict` of a model does.

        A share in another dtype stays where its parameter is what the share rounds to.
        """
        for at in self._by_dtype([*range(len(self._shares))], lambda k: self._parameters[k].dtype):
            pieces = self._pieces.own([self._parameters[k].detach() for k in at], at)
            for k, piece in zip(at, pieces, strict=True):
                share = self._shares[k]
                if share.dtype != piece.dtype:
                    piece = torch.where(share.to(piece.dtype) == piece, share, piece.to(share.dtype))
                share.copy_(piece)

    def _gradient(self, k: int) -> torch.Tensor:
        found: torch.Tensor | None = self._parameters[k].grad
        assert found is not None
        return found

    def _by_dtype(self, numbers: list[int], dtype: Callable[[int], torch.dtype]) -> list[list[int]]:
        found: dict[torch.dtype, list[int]] = {}
        for k in numbers:
            found.setdefault(dtype(k), []).append(k)
        return list(found.values())

    def _reduced(self, gradients: list[torch.Tensor], at: list[int]) -> list[torch.Tensor]:
        if self._reduce is None:
            return self._pieces.own(gradients, at)
        pieces = self._pieces.reduced(gradients, at, self._reduce)
        others = self._mesh.others()
        if others is not None:
            flat = torch.cat([piece.reshape(-1) for piece in pieces])
            joined = collectives.all_reduce(others, flat, self._reduce).split(
                [piece.numel() for piece in pieces]
            )
            pieces = [found.view(piece.shape) for found, piece in zip(joined, pieces, strict=True)]
        return pieces

    # -- the state -------------------------------------------------------------------------------------------

    @without_our_frames
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state as the optimizer has it without shares: whole, on the mesh.

        All members gather it, so this takes the memory that they save otherwise. Return at once.
        """
        found = self._inner.state_dict()
        state = {}
        for k, values in found["state"].items():
            length, shape = self._pieces.lengths[k], self._parameters[k].shape
            state[k] = {
                name: self._pieces.whole([value], [k])[0]
                if isinstance(value, torch.Tensor) and value.shape == (length,) and shape != ()
                else value
                for name, value in values.items()
            }
        whole = {"state": state, "param_groups": found["param_groups"]}
        masters = {
            k: self._pieces.whole([share.detach()], [k])[0]
            for k, share in enumerate(self._shares)
            if share.dtype != self._parameters[k].dtype
        }
        # Other optimizers leave an entry alone that they do not know.
        return {**whole, "masters": masters} if masters else whole

    @without_our_frames
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of an optimizer of this class, whole, from any mesh or place. Return at once."""
        state: dict[int, dict[str, Any]] = {}
        for k, values in state_dict["state"].items():
            if k >= len(self._parameters):
                # The groups do not fit either, and the optimizer says so below.
                continue
            shape = self._parameters[k].shape
            state[k] = {}
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.shape == shape and shape != ():
                    value = self._pieces.own([value.to(self._parameters[k].device)], [k])[0]
                elif isinstance(value, torch.Tensor):
                    # The other optimizer may go on counting its steps in this tensor.
                    value = value.clone()
                state[k][name] = value
        self._inner.load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})
        self._show_inner()
        for k, value in state_dict.get("masters", {}).items():
            parameter, share = self._parameters[k], self._shares[k]
            if share.dtype != parameter.dtype:
                share.copy_(self._pieces.own([value.to(parameter.device)], [k])[0])
