"""Meshes: members in rows and columns that run one program, each on its own shard of every tensor.

A tensor on a mesh is one proxy for as many shards as there are members, all of one shape; an operator on
it is one instruction, which every member runs. What is read of it (`.item()`, `.cpu()`, printing) is the
first member's; `shards(t)` reads all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, count, product
from math import prod
from typing import Any, NoReturn

import torch
import torch.distributed.device_mesh

from ..errors import NotSupportedError, UsageError, without_our_frames
from ..log.current import mesh_context
from ..log.handle import Place
from ..log.issue import issue_default
from ..log.line import user_line
from ..log.mesh_log import MeshLog, mesh_log_of
from ..operators.proxies import wrap
from ..operators.signatures import template
from ..operators.transfer import upload
from ..session.session import Session, active_session, session_of_log
from ..tensors.tensor import DistributedTensor
from .line_groups import Lines
from .shape import dims_along, members_for, rank_along, ranks_along, shape_of
from .torch_dtensor import prepare
from .torch_process_group import BACKEND, MeshGroup
from .torch_world import begin, end, forget, register, speaking_for
from .varying import numbers, varying

Names = tuple[str, ...]


class DeviceMesh(torch.distributed.device_mesh.DeviceMesh):
    """Members in the shape of a mesh, the last dimension innermost; its dimensions may have names.

    A torch DeviceMesh, too. As a context, new tensors go to it. `mesh["tp"]` is the same members seen along
    some dimensions, `mesh.select(dp=0)` a part of them. Tensors of meshes with the same members combine,
    whatever their shapes.
    """

    def __init__(
        self, session: Session, places: Sequence[Place], shape: Sequence[int], mesh_dim_names: Names | None
    ) -> None:
        self._mesh_log: MeshLog = mesh_log_of(session, places)
        # The mesh holds its place, so that nobody else gets its number.
        self._home = self._mesh_log.residence()
        # A mesh like `mesh["tp"]` shows some dimensions of another one, which is `_whole`. A flattened
        # dimension is several of these, row by row. `_dims` are their numbers there.
        self._whole = self
        self._dims: tuple[tuple[int, ...], ...] = tuple((dim,) for dim in range(len(shape)))
        self._sizes = tuple(shape)
        # Coordinates and slices are kept here.
        self._kept: dict[Any, Any] = {}
        self._context = mesh_context(self._home)
        prepare()
        # The default group belongs to the members, not to this mesh, which can go with all that it keeps.
        everybody = partial(self._mesh_log.lines_of, [[*range(len(places))]], Lines)
        if begin(sum(len(session.places.devices(node.index)) for node in session.nodes), everybody):
            session.ending.on_close.append(end)
        ranks = torch.arange(len(self.places), device="cpu").reshape(tuple(shape))
        super().__init__("remote", ranks, mesh_dim_names=mesh_dim_names, _init_backend=False, _rank=0)
        groups = [
            self._group_of(ranks.movedim(dim, -1).reshape(-1, shape[dim]).tolist())
            for dim in range(len(shape))
        ]
        torch_mesh: Any = self
        torch_mesh._dim_group_names = [group.group_name for group in groups]
        self._pg_registry = {group.group_name: group for group in groups}

    @property
    def session(self) -> Session:
        """The session whose devices these are."""
        return session_of_log(self._mesh_log)

    @property
    def places(self) -> tuple[Place, ...]:
        """The members' places, the last dimension's neighbours next to each other."""
        return self._mesh_log.members

    @property
    def device(self) -> torch.device:
        """What `torch.ones(..., device=)` takes for it, and `x.device` of its tensors gives."""
        return self._home.device

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of members of the dimensions that it shows, or the size of one dimension."""
        return prod(self.shape) if mesh_dim is None else self.shape[self._dim(mesh_dim)]

    def _dim(self, dim: int | str) -> int:
        if isinstance(dim, str):
            names = self.mesh_dim_names or ()
            if dim not in names:
                raise UsageError(
                    f"this mesh has no dimension {dim!r}: it has "
                    f"{', '.join(names) or 'none with names, give mesh_dim_names='}"
                )
            return names.index(dim)
        if not -self.ndim <= dim < self.ndim:
            raise UsageError(f"a mesh of {self.ndim} dimensions has no dimension {dim}")
        return dim % self.ndim

    @without_our_frames
    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the same members seen along some dimensions. What runs along them runs in all lines."""
        wanted = tuple(mesh_dim_names) if isinstance(mesh_dim_names, (tuple, list)) else (mesh_dim_names,)
        if not all(isinstance(name, str) for name in wanted):
            raise UsageError(
                f"mesh[...] takes names of dimensions, got {mesh_dim_names!r}; its members' places "
                "are mesh.places"
            )
        flat: DeviceMesh | None = self._whole._kept.get(("flattened", wanted))
        if flat is not None:
            return flat
        dims = [self._dim(name) for name in wanted]
        if dims != sorted(set(dims)):
            raise UsageError(
                "dimensions are named in the mesh's order, each once: it has "
                f"{self.mesh_dim_names}, got {wanted}"
            )
        if len(dims) == self.ndim:
            return self
        key = tuple(self._dims[d] for d in dims)
        kept = self._whole._kept
        if key not in kept:
            kept[key] = self._seen(super().__getitem__(wanted), key)
        found: DeviceMesh = kept[key]
        return found

    def _seen(self, torch_mesh: Any, dims: tuple[tuple[int, ...], ...]) -> DeviceMesh:
        """Make a mesh that torch has made of this one a mesh of the same members."""
        torch_mesh.__class__ = DeviceMesh
        torch_mesh._mesh_log, torch_mesh._home = self._mesh_log, self._home
        torch_mesh._whole, torch_mesh._dims = self._whole, dims
        torch_mesh._context = self._context
        seen: DeviceMesh = torch_mesh
        return seen

    def _joined(self, others: Sequence[DeviceMesh], torch_mesh: Any) -> DeviceMesh:
        """Make a mesh that torch has joined of this one and others a mesh of the same members.

        torch takes meshes of equal ranks for equal, and remembers the results of operators by mesh. So the
        mesh of a DTensor may show dimensions of another whole mesh than the one that its user has named.
        """
        return self._seen(torch_mesh, tuple(chain(*(mesh._dims_of(self._whole) for mesh in (self, *others)))))

    def _dims_of(self, whole: DeviceMesh) -> tuple[tuple[int, ...], ...]:
        """Return the dimensions that it shows by their numbers in another whole mesh of the same members."""
        if whole is self._whole:
            return self._dims
        same_members = whole._mesh_log is self._mesh_log
        found = [dims_along(indices, whole._sizes) for indices in zip(*self.coordinates()) if same_members]
        dims = tuple(one for one in found if one is not None)
        if len(dims) < self.ndim:
            raise UsageError(
                f"{self!r} shows no dimensions of {whole!r}: join those that mesh[...] gives of one mesh"
            )
        return dims

    @without_our_frames
    def select(self, **where: int) -> DeviceMesh:
        """Return the mesh of the members at these coordinates: `mesh.select(dp=0)` is the first row.

        Its tensors are others.
        """
        if self._whole is not self:
            raise UsageError("select members of the whole mesh, not of one that shows some of its dimensions")
        fixed = {self._dim(name): index for name, index in where.items()}
        for dim, index in fixed.items():
            if not 0 <= index < self.shape[dim]:
                name = (self.mesh_dim_names or {dim: dim})[dim]
                raise UsageError(
                    f"dimension {name!r} has coordinates 0 to {self.shape[dim] - 1}, got {index}"
                )
        kept = [d for d in range(self.ndim) if d not in fixed]
        members = [
            self.places[k]
            for k, at in enumerate(product(*map(range, self.shape)))
            if all(at[d] == index for d, index in fixed.items())
        ]
        names = None if self.mesh_dim_names is None else tuple(self.mesh_dim_names[d] for d in kept)
        return DeviceMesh(self.session, members, [self.shape[d] for d in kept] or [1], names or None)

    def coordinates(self) -> list[tuple[int, ...]]:
        """Return each member's coordinates in the dimensions of this mesh."""
        return [*zip(*(ranks_along(dims, self._whole._sizes) for dims in self._dims))]

    @without_our_frames
    def coordinate(self, dim: int | str = 0) -> DistributedTensor:
        """Return a tensor of one int64 that is, on each member, its coordinate along a dimension.

        Return at once.
        """
        k, kept = self._dim(dim), self._whole._kept
        key = "coordinate", self._dims[k]
        if key not in kept:
            kept[key] = numbers(self._home, tuple(at[k] for at in self.coordinates()))
        return kept[key].clone()  # type: ignore[no-any-return]

    def manual_seed(self, seed: int, distinct: bool | str | Sequence[str] = False) -> None:
        """Seed the members' generators, after what has been issued. Return at once.

        All members get `seed`, or with `distinct` member k gets `seed` + k. If `distinct` names dimensions,
        as "dp" or ["dp", "pp"], members that differ along one of them get other seeds. Members that differ
        along the rest only get the same: dropout is then the same in a tensor-parallel group.

        `torch.manual_seed` seeds them all alike, too.
        """
        if isinstance(distinct, bool):
            self._seed(seed, tuple(range(len(self.places))) if distinct else None)
            return
        dims = [self._dim(name) for name in ([distinct] if isinstance(distinct, str) else distinct)]
        self._seed(seed, tuple(rank_along(dims, self.shape, at) for at in self.coordinates()))

    def _seed(self, seed: int, distinct: tuple[int, ...] | None = None) -> None:
        """Seed member k with `seed` + `distinct[k]`, by a few instructions however many they are."""
        # A worker that read its seed from a device would wait for all that the device has yet to run.
        kept = upload(torch.tensor(seed, device="cpu"), self._home, stay_on_cpu=True)
        values = [wrap(DistributedTensor, kept)]
        if distinct is not None:
            values.append(numbers(self._home, distinct, stay_on_cpu=True))
        node = self._mesh_log
        with node.lock:
            number, words = template(
                None,
                DistributedTensor,
                [self._home.lazy, *values],
                {},
                0,
                node,
                name="distruntime::seed_member",
            )
            issue_default([number, *words], (), [value._handle for value in values], node, user_line())

    @contextmanager
    def drawing(self, placements: Sequence[Any], generator: torch.Generator | None) -> Iterator[None]:
        """Let a DTensor's random operator draw as on one device.

        Shards draw distinct numbers and replicas equal ones. Afterwards all generators are alike.

        What they draw follows this process's own generator, which `torch.manual_seed` seeds.
        """
        base = int(torch.randint(1 << 62, (1,), generator=generator, device="cpu"))
        # torch does not call a shard one that tensor parallelism has cut before.
        cut = tuple(k for k, p in enumerate(placements) if not (p.is_replicate() or p.is_partial()))
        kept, key = self._whole._kept, ("shards", self._dims, cut)
        if key not in kept:
            kept[key] = tuple(rank_along(cut, self.shape, at) for at in self.coordinates())
        self._seed(base, kept[key])
        try:
            yield
        finally:
            self._seed(base + len(self.places))

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> Any:
        """Return the members along several dimensions as one dimension, as torch does."""
        with speaking_for(self._mesh_log):
            flat: Any = (
                super()._flatten(mesh_dim_name)
                if backend_override is None
                else super()._flatten(mesh_dim_name, backend_override)
            )
        if not isinstance(flat, DeviceMesh):
            # Otherwise every member would get the first member's part of what is cut along it.
            self._seen(flat, (tuple(chain(*self._dims)),))
            self._whole._kept["flattened", flat.mesh_dim_names] = flat
        return flat

    @without_our_frames
    def lines(self, dim: int | str | Sequence[int | str] | None = None) -> Lines:
        """Return the groups along one dimension, several, or all.

        Block until they are open, the first time.
        """
        dims = range(len(self._dims)) if dim is None else [dim] if isinstance(dim, (int, str)) else dim
        wanted, kept = frozenset(chain(*(self._dims[self._dim(d)] for d in dims))), self._whole._kept
        found: Lines | None = kept.get(wanted)
        if found is None or found.broken is not None:
            rows: dict[tuple[int, ...], list[int]] = {}
            for k, at in enumerate(product(*map(range, self._whole._sizes))):
                rows.setdefault(tuple(n for d, n in enumerate(at) if d not in wanted), []).append(k)
            found = kept[wanted] = self._mesh_log.lines_of(list(rows.values()), Lines)
        return found

    def _group_of(self, rows: list[list[int]]) -> MeshGroup:
        """Return the process group of lines of members.

        It belongs to the members, not to this mesh. So the mesh can go, and its number with it.
        """
        known, key = self._mesh_log.torch_groups, tuple(map(tuple, rows))
        group = known.get(key)
        if not isinstance(group, MeshGroup):
            at = {k: rank for row in rows for rank, k in enumerate(row)}
            ranks, name = [at[k] for k in range(len(at))], f"{BACKEND}:{next(_names)}"
            group = known[key] = register(name, rows[0], ranks, partial(self._mesh_log.lines_of, rows, Lines))
            self.session.ending.on_close.append(partial(forget, group))
        return group

    def get_coordinate(self) -> Any:
        """Return, for each dimension, the members' coordinates, as torch's own symbolic ints.

        Each is a number that differs from member to member.
        """
        kept, key = self._whole._kept, ("varying", self._dims)
        # DTensor asks with every operator.
        if key not in kept:
            kept[key] = tuple(varying([at[k] for at in self.coordinates()]) for k in range(self.ndim))
        found: tuple[Any, ...] = kept[key]
        return found

    def _sym_get_coordinate(self, index: int) -> Any:
        return self.get_coordinate()[index]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> Any:
        """Return the members' coordinates along one dimension; see `get_coordinate`."""
        return self._sym_get_coordinate(self._dim(0 if mesh_dim is None else mesh_dim))

    def __enter__(self) -> DeviceMesh:
        # In another session new tensors would go to a place of that session.
        self.session.require_open()
        super().__enter__()
        self._context.__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, exc_traceback: Any) -> None:
        self._context.__exit__(exc_type, exc_value, exc_traceback)
        super().__exit__(exc_type, exc_value, exc_traceback)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        # Whoever copies a model of DTensors copies no mesh, as copying a tensor copies no place.
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupportedError(
            f"{self!r} cannot be pickled: its members are this session's. Fetch what is to be kept: "
            "dr.fetch(model.state_dict())"
        )

    def __repr__(self) -> str:
        names = self.mesh_dim_names or [f"dim {d}" for d in range(self.ndim)]
        dims = ", ".join(f"{n}={s}" for n, s in zip(names, self.shape))
        return f"<distruntime.mesh.DeviceMesh ({dims}), {self._mesh_log.place}>"


_names = count()


@without_our_frames
def init_device_mesh(
    device_type: str | Sequence[int | Place],
    mesh_shape: Sequence[float] | Sequence[tuple[str, float]],
    *,
    mesh_dim_names: Sequence[str] | None = None,
) -> DeviceMesh:
    """Make a mesh of the session's devices of one type, node by node, or of places.

    Args:
        device_type: "cpu" (each node's CPU), "cuda" (all GPUs of all nodes), "accelerator" (those of any
            kind), or the members themselves, node numbers or places.
        mesh_shape: the size of each dimension, (2, 4), or names and sizes, [("data", 2), ("tensor", 4)];
            the last is innermost.
        mesh_dim_names: the dimensions' names.

    Raises:
        PlacementError: the mesh is larger than the cluster. UsageError: a shape that is none.
    """
    session = active_session()
    sizes, names = shape_of(mesh_shape, mesh_dim_names)
    return DeviceMesh(session, members_for(session, device_type, sizes), sizes, names)
