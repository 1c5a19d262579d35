"""The tensors of a tree on their way from the files."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..errors import CheckpointError, UsageError
from ..log.handle import Handle, Place, Residence, new_value
from ..log.node import Node
from ..log.spec import Spec, spec
from ..operators.proxies import wrap
from ..operators.transfer import download, ready
from ..python.weights import Mesh
from ..session.fetching import ask_value
from ..session.requests import Request
from ..session.session import Session
from ..session.stalls import before_wait, note_wait
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import together
from ..tensors.worker_functions import issue_function
from ..wire.codec import dtype_name, dtype_named
from .save import GRAD, PARAMETER, SMALL, host_of, send_plan
from .sharded import Part, Sharded, assembled, on_mesh, overlap, parts_for
from .stored import Target, TensorEntry, leaf_fields
from .tree import Json, unpacked


def await_all(session: Session, requests: Sequence[Request[object]]) -> None:
    """Block until several requests are answered; raise the first failure among them, when all are."""
    for request in requests:
        if not request.done:
            session.result(request, quietly=True)
    for request in requests:
        session.raise_for(request)


def _answered(requests: Sequence[Request[object]], sizes: Sequence[int]) -> int:
    """Return how many bytes workers have read; `sizes` has the bytes that each of them reads."""
    return sum(size for size, request in zip(sizes, requests) if request.done)


@dataclass
class _TensorRead:
    """A tensor that is to be read: which place reads it, and where it goes then.

    With `home` None it comes into this process, together with other small ones if `small`.
    """

    name: str
    file: str
    spec: Spec
    stride: list[int] | None
    reader: Residence
    home: Residence | None
    small: bool


class Reading:
    """The tensors of a tree on their way from the files."""

    def __init__(self, stored: StoredCheckpoint, target: Target) -> None:
        self._stored, self._target, self._session = stored, target, stored.session
        files, tensors = stored.index["files"], stored.index["tensors"]
        if not isinstance(files, dict) or not isinstance(tensors, dict):
            raise ValueError("its files and tensors are no dicts")
        self._files = list(files)
        self._about = tensors
        self._reads: dict[str, _TensorRead] = {}
        self._made: dict[tuple[str, int], torch.Tensor] = {}
        # These are each member's part of a DTensor, and the shards that the part is made of.
        self._parts: dict[str, list[tuple[Part, list[tuple[list[int], str]]]]] = {}
        # These are the members' tensors of which one will do for other places, if they were alike.
        self._alike: dict[str, list[str]] = {}

    def add(self, form: list[Json]) -> None:
        """Put a tensor of the tree on the list of those to read."""
        key, _, _, members, about = leaf_fields(form)
        if not members:
            self._add(key, None)
            return
        mesh = self._target.mesh
        if about is not None:
            self._add_parts(key, about, mesh)
            return
        if mesh is None or len(mesh.places) != members:
            self._alike[key] = [f"{key}.member{k}" for k in range(members)]
            return
        for k in range(members):
            self._add(f"{key}.member{k}", mesh.places[k])

    def _add_alike(self) -> None:
        """Have each member of the mesh, or one place, read what the members held alike.

        Raise `UsageError` where they did not.
        """
        mesh = self._target.mesh
        rows = {key: [self._row(name) for name in names] for key, names in self._alike.items()}
        require_alike(rows, self._stored.holders, self._ask_sums, mesh)
        for key, names in self._alike.items():
            if mesh is None:
                self._add(names[0], self._whole_at(), f"{key}.member0")
                continue
            for k, place in enumerate(mesh.places):
                near = (
                    name
                    for name, row in zip(names, rows[key])
                    if self._session.nodes[place.node] in self._stored.holders[str(row[0])]
                )
                self._add(next(near, names[0]), place, f"{key}.member{k}")

    def _row(self, name: str) -> list[object]:
        """Return what a worker has to know to find a tensor."""
        about = TensorEntry.parsed(self._about[name])
        return [self._files[about.file], name, about.dtype, about.shape, about.stride]

    def _ask_sums(self, node: Node, rows: list[list[object]]) -> Handle:
        plan: dict[str, object] = {"folder": self._stored.folder, "save": self._stored.save, "tensors": rows}
        found = new_value(spec((len(rows),), (1,), 0, torch.int64), host_of(self._session, node))
        issue_function(node, "checkpoint_sums", [send_plan(node, plan)], fresh=found)
        return found

    def _add_parts(self, key: str, about: Sharded, mesh: Mesh | None) -> None:
        """Have each member of a mesh read the shards that it needs, or one place all of them."""
        if key in self._parts:
            return
        self._parts[key] = []
        for k, part in enumerate(parts_for(about, mesh)):
            pieces = []
            for name, start in about.shards:
                if overlap(start, TensorEntry.parsed(self._about[name]).shape, part) is not None:
                    read = f"{name} of {k}"
                    self._add(name, self._whole_at() if mesh is None else mesh.places[k], read)
                    pieces.append((start, read))
            self._parts[key].append((part, pieces))

    def _whole_at(self) -> Place | None:
        """Return where a DTensor goes that comes as a whole; None for this process."""
        if self._target.here:
            return None
        current = self._session.places.current().place
        node = current.members[0].node if current.members else current.node
        return self._target.place_for(node, current.local_device).place

    def _sharded(self, values: dict[str, torch.Tensor], key: str, about: Sharded) -> torch.Tensor:
        mesh = self._target.mesh
        found = []
        for part, pieces in self._parts[key]:
            if pieces:
                home = self._reads[pieces[0][1]].home
                found.append(assembled([(start, values[read]) for start, read in pieces], part, home))
                continue
            # There are more members than parts, and this one has an empty shard.
            assert mesh is not None
            dtype = dtype_named(TensorEntry.parsed(self._about[about.shards[0][0]]).dtype)
            there = self._session.places.residence(mesh.places[len(found)], numbered=False)
            found.append(torch.empty([b - a for a, b in part], dtype=dtype, device=there.device))
        return found[0] if mesh is None else on_mesh(about, mesh, found)

    def _add(self, name: str, place: Place | None, key: str = "") -> None:
        """Have a tensor of a file read, under a key of its own where several places read it."""
        key = key or name
        if key in self._reads:
            return
        about = TensorEntry.parsed(self._about[name])
        size = torch.Size(about.shape)
        stride = tuple(about.stride) if about.stride else torch.empty(size, device="meta").stride()
        metadata = spec(size, stride, 0, dtype_named(about.dtype))
        file = self._files[about.file]
        home = None
        if about.place is not None and not self._target.here:
            home = (
                self._target.place_for(*about.place)
                if place is None
                else self._session.places.residence(place, numbered=False)
            )
        holders = self._stored.holders[file]
        if home is not None and home.node in holders:
            reader = home
        else:
            reader = host_of(self._session, holders[0])
        small = home is None and metadata.nbytes <= SMALL
        self._reads[key] = _TensorRead(name, file, metadata, about.stride, reader, home, small)

    def values(self) -> dict[str, torch.Tensor]:
        """Block until all are read; return them by their keys."""
        self._add_alike()
        groups: dict[tuple[Residence, bool], list[str]] = {}
        for key, wanted in self._reads.items():
            groups.setdefault((wanted.reader, wanted.small), []).append(key)
        started = time.perf_counter()
        before_wait("explicit load")
        read: dict[str, torch.Tensor] = {}
        reports: list[Handle] = []
        packs: list[tuple[list[str], Handle]] = []
        for (reader, small), keys in groups.items():
            if small:
                packs.append((keys, self._read_packed(reader, keys)))
            else:
                report, made = self._read(reader, keys)
                reports.append(report)
                read.update(made)
        asked: list[Request[object]] = [
            ask_value(self._session, r.place.worker, r.ref, ready(r), "item", {}) for r in reports
        ]
        sizes = [
            sum(self._reads[key].spec.nbytes for key in keys)
            for (_, small), keys in groups.items()
            if not small
        ]
        with self._session.requests.announcer.working(
            f"loading from {self._stored.folder}", sum(sizes), partial(_answered, asked, sizes)
        ):
            await_all(self._session, asked)
        for keys, pack in packs:
            read.update(self._split(keys, download(pack, "explicit load")))
        far = {
            key: tensor
            for key, tensor in read.items()
            if self._reads[key].home is None and isinstance(tensor, DistributedTensor)
        }
        read.update(fetch(far) if far else {})
        for key, tensor in list(read.items()):
            home = self._reads[key].home
            if (
                home is not None
                and home is not self._reads[key].reader
                and isinstance(tensor, DistributedTensor)
            ):
                read[key] = tensor.to(home.place)
        note_wait("explicit load", started)
        return read

    def _plan(self, keys: list[str]) -> dict[str, object]:
        rows = [self._reads[key] for key in keys]
        tensors = [[r.file, r.name, dtype_name(r.spec.dtype), list(r.spec.size), r.stride] for r in rows]
        return {"folder": self._stored.folder, "save": self._stored.save, "tensors": tensors}

    def _read(self, reader: Residence, keys: list[str]) -> tuple[Handle, dict[str, DistributedTensor]]:
        plan = send_plan(reader.worker, self._plan(keys))
        one = spec((), (), 0, torch.int64)
        report = new_value(one, host_of(self._session, reader.worker))
        handles = [new_value(r.spec, reader) for r in (self._reads[key] for key in keys)]
        issue_function(reader.worker, "checkpoint_read", [plan, reader.place], fresh=[report, *handles])
        return report, {key: wrap(DistributedTensor, handle) for key, handle in zip(keys, handles)}

    def _read_packed(self, reader: Residence, keys: list[str]) -> Handle:
        whole = spec((sum(self._reads[key].spec.nbytes for key in keys),), (1,), 0, torch.uint8)
        pack = new_value(whole, host_of(self._session, reader.worker))
        issue_function(
            reader.worker, "checkpoint_read_packed", [send_plan(reader.worker, self._plan(keys))], fresh=pack
        )
        return pack

    def _split(self, keys: list[str], pack: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the small tensors that came in one, each in memory of its own."""
        found: dict[str, torch.Tensor] = {}
        start = 0
        for key in keys:
            metadata = self._reads[key].spec
            piece = pack[start : start + metadata.nbytes].clone().view(metadata.dtype).view(metadata.size)
            found[key] = torch.empty_strided(
                metadata.size, metadata.stride, dtype=metadata.dtype, device="cpu"
            ).copy_(piece)
            start += metadata.nbytes
        return found

    def leaf(self, values: dict[str, torch.Tensor], form: list[Json]) -> torch.Tensor:
        """Return a tensor of the tree."""
        key, alias, flags, members, about = leaf_fields(form)
        made = self._made.get((key, alias))
        if made is None:
            if (key, -1) not in self._made:
                mesh = self._target.mesh
                if about is not None:
                    self._made[key, -1] = self._sharded(values, key, about)
                elif members and mesh is not None:
                    self._made[key, -1] = self._on_mesh(values, key, len(mesh.places))
                else:
                    self._made[key, -1] = values[f"{key}.member0" if members else key]
            made = self._made[key, -1].detach()
            if flags & PARAMETER:
                made = torch.nn.Parameter(made, bool(flags & GRAD))
            elif flags & GRAD:
                made.requires_grad_()
            self._made[key, alias] = made
        return made

    def _on_mesh(self, values: dict[str, torch.Tensor], key: str, members: int) -> torch.Tensor:
        mesh = self._target.mesh
        assert mesh is not None
        shards = [values[f"{key}.member{k}"] for k in range(members)]
        return together(shards, mesh._home)


@dataclass
class StoredCheckpoint:
    """A complete checkpoint, and the nodes that have each of its files."""

    session: Session
    folder: str
    save: str
    index: dict[str, Json]
    holders: dict[str, list[Node]]

    def tree(self, place: object) -> object:
        """Return its tree, as `load` does."""
        try:
            reading = Reading(self, Target(self.session, place))
            unpacked(self.index["tree"], reading.add)
            values = reading.values()
            return unpacked(self.index["tree"], partial(reading.leaf, values))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"the index of the checkpoint in {self.folder} makes no sense: {type(error).__name__}: "
                f"{error}"
            ) from None


# How a worker finds a tensor: the file, the tensor's name there, its dtype, sizes and strides.
Row = list[object]


def require_alike(
    wanted: Mapping[str, Sequence[Row]],
    holders: Mapping[str, Sequence[Node]],
    ask: Callable[[Node, list[Row]], Handle],
    mesh: Mesh | None,
) -> None:
    """Raise `UsageError` for a tensor of which members held different values. Block until workers have said.

    `wanted` has the members' rows of each tensor. `holders` are the nodes that have each file. The tensors go
    to `mesh`, or to one place if that is None. `ask` asks a node for the checksums of rows.
    """
    by_node: dict[Node, list[Row]] = {}
    for rows in wanted.values():
        for row in rows:
            by_node.setdefault(holders[str(row[0])][0], []).append(row)
    asked = [(rows, ask(node, rows)) for node, rows in by_node.items()]
    sums: dict[object, int] = {}
    for rows, answer in asked:
        sums.update(zip((row[1] for row in rows), download(answer, "explicit load").tolist(), strict=True))
    for key, rows in wanted.items():
        if len({(sums[name], str(rest)) for _, name, *rest in rows}) > 1:
            got = f"; got one of {len(mesh.places)}" if mesh is not None else ""
            raise UsageError(
                f"{key!r} was on a mesh of {len(rows)} members, and needs a mesh of as many: dr.load(path, "
                f"place=mesh), with dr.init_device_mesh of {len(rows)} places{got}. Its members held "
                "different values, and only what they held alike can go elsewhere"
            )
