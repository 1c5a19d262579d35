"""`dr.parallel.Experts`: each member of a mesh holds some experts, and takes all tokens for them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn

from ..errors import ConfigurationError, PlacementError, UsageError, without_our_frames
from ..mesh import lines
from ..mesh.each_member import home_of
from ..mesh.line_groups import Lines
from ..mesh.mesh import DeviceMesh
from ..mesh.sharding import at_place, from_shards
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor

# Some dimensions of a mesh.
Modes = int | str | Sequence[int | str]


@final
class Experts(nn.Module):
    """Experts that are shared out among the members of a mesh: tokens go to their experts, and come back.

    Each member has tokens of its own, and chooses some experts for each of them. Two all_to_all carry them:
    each member gets the tokens that any member of its line has for its experts, runs these experts, and sends
    back what they return. It returns the same as a loop over all experts in one process would.

    `state_dict()` is that of `nn.ModuleList(experts)`: it has all experts, each at one member that holds it.

    Args:
        experts: all experts: modules of one kind in this process, in order. The members of a line get equal
            numbers of them; the first member gets the first ones.
        mesh: the mesh that the tokens are on.
        ep: the dimension along which members hold different experts.
        dp: the dimensions along which members hold the same experts for other tokens, None if there are none.
        capacity: how many tokens a member sends to one expert at most. Further ones are dropped: that expert
            adds nothing to their results. First choices go first, then the earlier tokens. None sends all.
            What travels and what an expert computes goes by the capacity, or by the member with most tokens.

    Raises:
        ConfigurationError: a number of experts that the members do not divide, or a capacity below 1.
        UsageError: experts of several kinds, no mesh, or a dimension that it has not.
    """

    experts: nn.ModuleList

    @without_our_frames
    def __init__(
        self,
        experts: Sequence[nn.Module],
        mesh: DeviceMesh,
        ep: Modes = "moe_ep",
        dp: Modes | None = "moe_dp",
        capacity: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(mesh, DeviceMesh):
            raise UsageError(
                "dr.parallel.Experts takes all experts and a mesh, dr.parallel.Experts(experts, "
                f'dr.init_device_mesh("cpu", [("moe_dp", 2), ("moe_ep", 2)])); got {type(mesh).__name__}'
            )
        if isinstance(experts, nn.Module) and not isinstance(experts, (nn.ModuleList, nn.Sequential)):
            raise UsageError(
                f"dr.parallel.Experts takes a list of all experts, got one {type(experts).__name__}"
            )
        self.along = _lines(mesh, ep, "ep")
        self._replicas = None if dp is None else _lines(mesh, dp, "dp")
        self._mesh, members = mesh, self.along.size
        if not experts or len(experts) % members:
            raise ConfigurationError(
                f"{len(experts)} experts among {members} members: each has as many of them, so give a "
                f"multiple of {members}, or a smaller {ep!r}"
            )
        if capacity is not None and (
            isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1
        ):
            raise ConfigurationError(f"a capacity is a whole number of tokens from 1 on, got {capacity!r}")
        _require_alike(experts)
        self.capacity, self._count = capacity, len(experts) // members
        self.experts = nn.ModuleList(copy.deepcopy(experts[k]).to(mesh.device) for k in range(self._count))
        with torch.no_grad():
            self._take(
                {
                    f"{k}.{name}": t
                    for k, expert in enumerate(experts)
                    for name, t in expert.state_dict().items()
                }
            )
        hooks: Any = self
        hooks._register_state_dict_hook(_all_experts)
        hooks.register_load_state_dict_pre_hook(_own_experts)

    @without_our_frames
    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return what the chosen experts make of each token, times their weights, added up. Return at once.

        Args:
            x: tokens, of shape (..., features), each member's own. Their numbers may differ.
            weights: of shape (..., k), differentiable.
            chosen: numbers of experts, of shape (..., k), k different ones for each token.

        Raises `PlacementError` for a tensor that is not on the mesh, `UsageError` for shapes that differ.
        """
        for t in (x, weights, chosen):
            at = home_of(t)
            if at is None or at.node is not self._mesh._mesh_log:
                raise PlacementError(
                    f"dr.parallel.Experts takes tensors on {self._mesh!r}, got one on "
                    f"{t.place if isinstance(t, DistributedTensor) else t.device}: t.to(mesh.device), and "
                    "of a DTensor t.to_local()"
                )
        if weights.shape != chosen.shape or x.shape[:-1] != chosen.shape[:-1]:
            raise UsageError(
                "dr.parallel.Experts takes tokens (..., features), and weights and chosen experts (..., k), "
                f"got {tuple(x.shape)}, {tuple(weights.shape)} and {tuple(chosen.shape)}"
            )
        if chosen.dtype.is_floating_point or chosen.dtype == torch.bool:
            raise UsageError(f"the chosen experts are whole numbers, as topk gives them, got {chosen.dtype}")
        k = chosen.shape[-1]
        tokens, weights, chosen = x.flatten(0, -2), weights.reshape(-1, k), chosen.reshape(-1, k)
        if not isinstance(tokens, UnevenTensor):
            made: torch.Tensor = self._of_tokens(tokens, weights, chosen, None).unflatten(0, x.shape[:-1])
            return made
        # One instruction runs for all members, so each has as many rows as the member with most tokens.
        count, most = tokens.shape[0], max(len(t) for t in tokens._shards)
        real = torch.nn.functional.pad(torch.ones_like(chosen[:, 0], dtype=torch.bool), (0, most - count))
        rows = [torch.nn.functional.pad(t, (0, 0, 0, most - count)) for t in (tokens, weights, chosen)]
        found = self._of_tokens(rows[0], rows[1], rows[2], real)
        return found.narrow(0, 0, count).reshape(*x.shape[:-1], found.shape[-1])

    def _of_tokens(
        self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, real: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what the experts make of rows. `real` says which rows are tokens, if not all are."""
        k = chosen.shape[1]
        # In this order first choices come first.
        to = chosen.T.flatten()
        capacity = len(tokens) if self.capacity is None else min(self.capacity, len(tokens))
        slots, fits = self._slots(to, capacity, None if real is None else real.repeat(k))
        given = tokens.repeat(k, 1) * fits
        all_slots = self.along.size * self._count * capacity
        sent = tokens.new_zeros(all_slots, tokens.shape[1]).index_add(0, slots, given)
        returned = self._there_and_back(sent, capacity)
        made = returned.index_select(0, slots) * fits
        # Experts may return other numbers of features than they take.
        made = made.unflatten(0, (k, len(tokens))) * weights.T.unsqueeze(-1)
        found: torch.Tensor = made.sum(0)
        return found

    def _slots(
        self, to: torch.Tensor, capacity: int, real: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where each token stands among those that are sent, and whether there is room for it."""
        every = torch.arange(self.along.size * self._count, device=to.device)
        mine = to.unsqueeze(1) == every
        if real is not None:
            mine = mine & real.unsqueeze(1)
        before = mine.cumsum(0).sub(1).mul(mine).sum(1)
        fits = before < capacity if real is None else (before < capacity) & real
        # What does not fit adds zero to some other token's row.
        return to * capacity + before.clamp(max=capacity - 1), fits.unsqueeze(1)

    def _there_and_back(self, rows: torch.Tensor, capacity: int) -> torch.Tensor:
        """Return what the experts make of rows, which are sorted by expert."""
        size, count = self.along.size, self._count
        here = self._exchanged(rows).unflatten(0, (size, count, capacity)).transpose(0, 1).flatten(1, 2)
        made = torch.stack([expert(here[k]) for k, expert in enumerate(self.experts)])
        return self._exchanged(made.unflatten(1, (size, capacity)).transpose(0, 1).flatten(0, 2))

    def _exchanged(self, rows: torch.Tensor) -> torch.Tensor:
        each = [len(rows) // self.along.size] * self.along.size
        return lines.all_to_all(self.along, rows.contiguous(), each, each)

    @without_our_frames
    @torch.no_grad()
    def reduce_gradients(self, divide_by: float | None = None) -> None:
        """Add up the experts' gradients over the members that hold the same ones. Return at once.

        Call it after the backward pass, in each step. Other members hold other experts, so the gradients must
        not be reduced over all members, as those of other layers are.

        Args:
            divide_by: by what the sums are divided. If None, by the number of members that have tokens of
                their own, so that the gradient is that of the mean of their losses.
        """
        replicas = self._replicas
        by = self.along.size * (1 if replicas is None else replicas.size) if divide_by is None else divide_by
        for p in self.experts.parameters():
            if p.grad is not None:
                total = p.grad if replicas is None else lines.all_reduce(replicas, p.grad)
                p.grad.copy_(total / by)

    @without_our_frames
    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of all experts' gradients, the same number at each member. Return at once.

        Call it behind `reduce_gradients`. torch's `clip_grad_norm_` would clip at each member by the norm of
        its own experts, and what all members hold alike would differ then.
        """
        own = [p.grad for p in self.experts.parameters() if p.grad is not None]
        if not own:
            return torch.zeros((), device=self._mesh.device)
        return over_members(self.along, torch.nn.utils.get_total_norm(own, norm_type), norm_type)

    def _take(self, every: dict[str, torch.Tensor]) -> None:
        """Write each expert's tensors where it is."""
        for name, t in self.experts.state_dict(keep_vars=True).items():
            k, rest = name.split(".", 1)
            shards = [
                every[f"{rank * self._count + int(k)}.{rest}"].to(t.dtype)
                for _, rank in sorted((m, r) for row in self.along.rows for r, m in enumerate(row))
            ]
            t.copy_(from_shards([at_place(s, p) for s, p in zip(shards, self._mesh.places)], self._mesh))

    def extra_repr(self) -> str:
        return f"{self.along.size * self._count} experts, {self._count} at each member"


def over_members(along: Lines, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm of what all members of a line have: each knows its own norm. Return at once."""
    if norm_type == math.inf:
        return lines.all_reduce(along, norm, "max")
    return lines.all_reduce(along, norm**norm_type) ** (1 / norm_type)


def _lines(mesh: DeviceMesh, along: Modes, name: str) -> Lines:
    try:
        return mesh.lines(along)
    except UsageError as error:
        raise UsageError(
            f"{name}={along!r}: {error}. Name the dimension along which members hold different experts, ep=, "
            "and the one along which they hold the same ones, dp=, None if there is none"
        ) from None


def _require_alike(experts: Sequence[nn.Module]) -> None:
    def kind(expert: nn.Module) -> object:
        return type(expert), [(name, t.shape, t.dtype) for name, t in expert.state_dict().items()]

    for k, expert in enumerate(experts):
        if not isinstance(expert, nn.Module) or kind(expert) != kind(experts[0]):
            raise UsageError(
                f"experts are modules of one kind, with tensors of the same names, shapes and dtypes: expert "
                f"{k}, {type(expert).__name__}, is unlike expert 0"
            )


def _all_experts(module: Any, state: dict[str, torch.Tensor], prefix: str, metadata: object) -> None:
    """Put all experts into a state, where the experts of a member are."""
    head = f"{prefix}experts."
    own = {name[len(head) :]: state.pop(name) for name in [*state] if name.startswith(head)}
    for rank, member in enumerate(module.along.rows[0]):
        for name, t in own.items():
            k, rest = name.split(".", 1)
            state[f"{prefix}{rank * module._count + int(k)}.{rest}"] = t.member(member)  # type: ignore[attr-defined]


def _own_experts(
    module: Any, state: dict[str, Any], prefix: str, metadata: object, strict: bool, *_: Any
) -> None:
    """Take all experts of a state, and leave what load_state_dict is to find."""
    wanted = {
        f"{rank * module._count + int(name.split('.', 1)[0])}.{name.split('.', 1)[1]}"
        for name in module.experts.state_dict()
        for rank in range(module.along.size)
    }
    # torch says which names are missing.
    if all(prefix + name in state for name in wanted):
        found = {name: state.pop(prefix + name) for name in wanted}
        with torch.no_grad():
            module._take(found)
        state.update(
            {f"{prefix}experts.{name}": t for name, t in module.experts.state_dict(keep_vars=True).items()}
        )
