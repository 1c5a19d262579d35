"""`dr.parallel.DataParallel`: a batch is shared among the members of a mesh, and looks whole from outside."""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller
from typing import Any

import torch
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ..errors import PlacementError, UsageError, without_our_frames
from ..mesh import lines
from ..mesh.mesh import DeviceMesh
from ..mesh.sharding import at_place, from_shards
from ..tensors.tensor import DistributedTensor


class DataParallel(torch.nn.Module):
    """A module that shares each batch among the members of a mesh, as `torch.nn.DataParallel` does.

    Called with a batch of 64 rows on a mesh of four, each member runs the module on 16 rows. The result has
    64 rows again, where the first member is, so a loss is that of the whole batch. Gradients are sums over
    the members, and equal on all of them: an optimizer of `parameters()` steps as on one device.

    Every tensor among the arguments is cut along its first dimension, by `chunk`; numbers and other values
    go to each member as they are. A batch need not be even: then each member's part is issued for itself.
    Before each call the members get the first member's buffers.

    Args:
        module: it is moved to the mesh. It becomes `self.module`.
        mesh: a mesh; all its members take part.

    Raises:
        UsageError: no module or no mesh. PlacementError: the module is on another place.
    """

    @without_our_frames
    def __init__(self, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module) or not isinstance(mesh, DeviceMesh):
            raise UsageError(
                "dr.parallel.DataParallel takes a module and a mesh, dr.parallel.DataParallel(model, "
                f'dr.init_device_mesh("cpu", (4,))); got {type(module).__name__} and {type(mesh).__name__}'
            )
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if isinstance(t, DistributedTensor) and t._handle.place is not mesh._home:
                raise PlacementError(
                    f"{name} is on {t.place}, the mesh is {mesh!r}: give a module of this process, or of "
                    "the mesh"
                )
        self.module = module.to(mesh.device)
        self._mesh = mesh
        self._lines = mesh.lines()
        for p in self.module.parameters():
            if p.requires_grad:
                # A hook of a leaf gets what one backward pass adds, also where gradients are accumulated.
                p.register_hook(self._summed)

    def _summed(self, gradient: torch.Tensor) -> torch.Tensor:
        return lines.all_reduce(self._lines, gradient)

    @without_our_frames
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on each member's part of the arguments. Return its results as one, at once.

        Raises `UsageError` where tensors among the arguments have different numbers of rows, or none.
        """
        with torch.no_grad():
            for buffer in self.module.buffers():
                buffer.copy_(lines.broadcast(self._lines, buffer, 0))
        flat, structure = tree_flatten((args, kwargs))
        rows = {t.shape[0] for t in flat if _is_cut(t) and not self._is_there(t)}
        if len(rows) > 1:
            raise UsageError(
                "dr.parallel.DataParallel cuts all tensors along their first dimension, which has one size: "
                f"got {sorted(rows)}. Keep what belongs to all rows in the module, or expand it"
            )
        n = len(self._mesh.places)
        if not rows or next(iter(rows)) % n == 0:
            given, named = tree_unflatten([self._shared(t) for t in flat], structure)
            return self._gathered(self.module(*given, **named))
        return self._joined([self._run(k, flat, structure) for k in range(min(n, next(iter(rows))))])

    def _is_there(self, t: torch.Tensor) -> bool:
        return isinstance(t, DistributedTensor) and t._handle.place is self._mesh._home

    def _shared(self, t: Any) -> Any:
        """Return an argument for all members: each has its part."""
        if not isinstance(t, torch.Tensor) or self._is_there(t):
            return t
        if not t.dim():
            return t.to(self._mesh.device)
        return from_shards(
            [at_place(part, place) for part, place in zip(self._cut(t), self._mesh.places)], self._mesh
        )

    def _cut(self, t: torch.Tensor) -> Sequence[torch.Tensor]:
        # Not `chunk`: it makes fewer parts than there are members of 9 rows for 4.
        return t.tensor_split(min(len(self._mesh.places), t.shape[0]))

    def _run(self, k: int, flat: Sequence[Any], structure: Any) -> Any:
        """Return what member k makes of its part of an uneven batch, where member k is."""
        place = self._mesh.places[k]
        mine = []
        for t in flat:
            if isinstance(t, torch.Tensor):
                part = self._cut(t)[k] if t.dim() else t
                mine.append(part.member(k) if self._is_there(t) else part.to(place))  # type: ignore[attr-defined]
            else:
                mine.append(t)
        given, named = tree_unflatten(mine, structure)
        own = {
            name: t.member(k)  # type: ignore[attr-defined]
            for name, t in (*self.module.named_parameters(), *self.module.named_buffers())
        }
        return functional_call(self.module, own, given, named)

    def _gathered(self, result: Any) -> Any:
        count = len(self._mesh.places)
        return self._joined(
            [tree_map_only(torch.Tensor, methodcaller("member", k), result) for k in range(count)]
        )

    def _joined(self, results: Sequence[Any]) -> Any:
        """Return the members' results as one, where the first member is."""
        first = self._mesh.places[0]
        flats = [tree_leaves(result) for result in results]
        found = []
        for of_all in zip(*flats):
            if not isinstance(of_all[0], torch.Tensor):
                found.append(of_all[0])
                continue
            here = [at_place(t, first) for t in of_all]
            found.append(torch.cat(here) if here[0].dim() else torch.stack(here))
        return tree_unflatten(found, tree_flatten(results[0])[1])


def _is_cut(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.dim() > 0
