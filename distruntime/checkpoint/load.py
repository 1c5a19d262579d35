"""Loading a checkpoint: the newest save that is whole, who has its files, and where its tensors go."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import CheckpointError, PlacementError, UsageError, without_our_frames
from ..log.handle import Handle, Place, Residence, new_value
from ..log.node import Node
from ..log.spec import Spec, spec
from ..operators.proxies import wrap
from ..operators.transfer import download, ready
from ..python.weights import Laid, Mesh, is_mesh, load_weights
from ..session.requests import Request
from ..session.session import Session, active_session
from ..session.spelling import is_node, named, on_node, require_alone
from ..session.stalls import before_wait, note_wait
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import together
from ..tensors.worker_functions import issue_function
from ..wire.codec import dtype_name, dtype_named
from ..wire.messages import IndexSummary, ListFolder, ReadIndex
from .alike import require_alike
from .phases import VERSION, other_version
from .save import GRAD, PARAMETER, SMALL, folder_of, host_of, send_plan, under_way
from .sharded import Part, Sharded, assembled, on_mesh, overlap, parts_for
from .tree import Json, unpacked

log = logging.getLogger("distruntime")

_DECODER = json.JSONDecoder()


# A tree may hold anything that JSON or a tensor is, so its users would have to convert an `object` on each
# line.
@without_our_frames
def load(  # type: ignore[explicit-any]
    path: str | os.PathLike[str],
    *,
    place: object = None,
    node: object = None,
    into: torch.nn.Module | None = None,
    placements: Laid = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return a checkpoint of `save`, or with `node=` weights that lie at a worker. Block until all is there.

    Without `node=`, return the tree of the newest complete checkpoint in the folder `path`.

    Modules and optimizers come back as the dicts that their `load_state_dict` takes. Dicts, lists and tuples
    come back as plain ones. Tensors that were tied are tied, and local ones are local. Each worker reads the
    files of what it keeps. If only another worker has a file, that one reads it and sends the tensors on.

    Args:
        path: the folder, as it was given to `save`.
        place: where remote tensors go. None means the node and device where each was, or the current place if
            that is not there. A `Place`, "remote:1", a `torch.device` like it or the number of a node means
            there. "cpu" means into this process. A mesh takes the tensors that were on a mesh, and the
            others go where they were.
        node: where weights lie and go to: the number of a node (its first GPU, else its CPU), a place, or a
            mesh, at each of whose nodes they lie. `path` is then one at the worker: a safetensors file, a
            file of `torch.save`, or a folder of them as Hugging Face has it. The result is a dict of remote
            tensors, or what was saved with `torch.save`. The bytes never come here.
        into: a module that gets the weights, and is returned. It may have been made on `meta`.
        placements: how a mesh's members share each tensor, as for `distribute_tensor`; also a dict of these
            by name, or a function of the name and a tensor on `meta`. Each member reads its own slices. None
            takes the placements of `into`'s own DTensors, and all else is read whole by each member.
        dtype: what floating-point weights become.

    Raises:
        CheckpointError: there is none, or it is half, damaged or of another version.
        FileNotFoundError: there are no weights at `node`.
        PlacementError: there is no such place.
        UsageError: a tensor differed from member to member of a mesh, and `place` is no mesh of as many.
        NodeFailed: a worker was lost meanwhile.
    """
    if node is not None:
        if place is not None:
            require_alone(place, "node", node)
        return load_weights(path, node, into, placements, dtype)
    if into is not None or placements is not None or dtype is not None:
        raise UsageError(
            "into=, placements= and dtype= are for weights that lie at a worker: say at which, node=..."
        )
    session = active_session()
    found = find_newest(session, folder_of(path))
    if found is None:
        where = ", ".join(f"node {node.index} ({node.host})" for node in session.nodes if node.failed is None)
        raise CheckpointError(
            f"there is no checkpoint in {folder_of(path)} on {where}: expected distruntime.json, as dr.save "
            "writes it"
        )
    return found.tree(place)


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
            reading = _Reading(self, _Target(self.session, place))
            unpacked(self.index["tree"], reading.add)
            values = reading.values()
            return unpacked(self.index["tree"], partial(reading.leaf, values))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"the index of the checkpoint in {self.folder} makes no sense: {type(error).__name__}: "
                f"{error}"
            ) from None


def find_newest(session: Session, folder: str) -> StoredCheckpoint | None:
    """Return the newest checkpoint in a folder that has all its files; None if the folder has no checkpoint.

    Raises `CheckpointError` if none of those in the folder has all its files.
    """
    before = under_way.get((session.name, folder))
    if before is not None:
        before.await_end()
    nodes = [node for node in session.nodes if node.failed is None]
    if not nodes:
        session.nodes[0].require_alive()
    looks = [session.ask(node, ListFolder, folder) for node in nodes]
    _await(session, looks)
    holders: dict[tuple[str, int], list[Node]] = {}
    indexes: dict[str, tuple[Node, IndexSummary]] = {}
    problems: list[str] = []
    for node, look in zip(nodes, looks):
        for file, nbytes in look.value.sizes.items():
            holders.setdefault((file, nbytes), []).append(node)
        for summary in look.value.indexes:
            if summary.problem:
                problems.append(f"{summary.name} on {node}: {summary.problem}")
            elif summary.version != VERSION:
                raise CheckpointError(
                    other_version(folder, summary.version)
                    + ": load it with the distruntime that wrote it, and save it anew"
                )
            else:
                indexes.setdefault(summary.save, (node, summary))
    for node, summary in sorted(
        indexes.values(), key=lambda found: (found[1].number, found[1].save), reverse=True
    ):
        missing = [file for file, nbytes in summary.files if (file, nbytes) not in holders]
        if not missing:
            if problems:
                log.warning(
                    "the checkpoint in %s is not the newest that was begun there: %s",
                    folder,
                    "; ".join(problems),
                )
            text = session.value(session.ask(node, ReadIndex, folder, summary.name))
            try:
                index: dict[str, Json] = _DECODER.decode(text)
                same = index["save"] == summary.save
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise CheckpointError(
                    f"the index of the checkpoint in {folder} makes no sense: {error!r}"
                ) from None
            if not same:
                raise CheckpointError(
                    f"the checkpoint in {folder} was replaced while it was being read: load it again"
                )
            files = {file: holders[file, nbytes] for file, nbytes in summary.files}
            return StoredCheckpoint(session, folder, summary.save, index, files)
        sizes_of = {file: sorted(nbytes for name, nbytes in holders if name == file) for file in missing}
        for file, nbytes in summary.files:
            if file in missing:
                got = f"{sizes_of[file][0]} bytes" if sizes_of[file] else "on none of this session's nodes"
                problems.append(f"{file}: expected {nbytes} bytes, got {got}")
    if problems:
        raise CheckpointError(
            f"the checkpoint in {folder} is not whole:\n  "
            + "\n  ".join(problems)
            + "\n  Bring the missing files there, on any node, "
            "or attach the workers that have them"
        )
    return None


def _await(session: Session, requests: Sequence[Request[object]]) -> None:
    """Block until several requests are answered; raise the first failure among them, when all are."""
    for request in requests:
        if not request.done:
            session.result(request, quietly=True)
    for request in requests:
        session.raise_for(request)


def _answered(requests: Sequence[Request[object]], sizes: Sequence[int]) -> int:
    """Return how many bytes workers have read; `sizes` has the bytes that each of them reads."""
    return sum(size for size, request in zip(sizes, requests) if request.done)


class _Target:
    """Where tensors go that were remote."""

    def __init__(self, session: Session, place: object) -> None:
        self._session = session
        # It is True if they come into this process.
        self.here = False
        self.mesh: Mesh | None = None
        self._node: int | None = None
        self._residence: Residence | None = None
        if place is None:
            return
        if is_mesh(place):
            self.mesh = place
        elif is_node(place):
            session.places.devices(place)
            self._node = place
        elif isinstance(place, (str, torch.device)) and str(place) in ("cpu", "cpu:0"):
            self.here = True
        else:
            self._residence = named(session.places, place)
            if self._residence is None:
                raise PlacementError(
                    'the place of a load is a Place, "remote:1", a node by its number, a mesh, "cpu" for '
                    "this process, "
                    f"or None for where each tensor was; got {place!r:.80}"
                )
            self._residence.node.require_alive()

    def place_for(self, node: int, device: str) -> Residence:
        """Return where a tensor goes that was on this device of this node."""
        if self._residence is not None:
            return self._residence
        places = self._session.places
        if self._node is not None:
            first = places.devices(self._node)[0]
            return places.residence(on_node(places, self._node, like=device, otherwise=first))
        if (
            0 <= node < len(self._session.nodes)
            and self._session.nodes[node].failed is None
            and device in places.devices(node)
        ):
            return places.residence(places.place(node, device))
        return places.current()


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


class _Reading:
    """The tensors of a tree on their way from the files."""

    def __init__(self, stored: StoredCheckpoint, target: _Target) -> None:
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
        key, _, _, members, about = _leaf_fields(form)
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
        about = _TensorEntry.parsed(self._about[name])
        return [self._files[about.file], name, about.dtype, about.shape, about.stride]

    def _ask_sums(self, node: Node, rows: list[list[object]]) -> Handle:
        plan: dict[str, object] = {
            "folder": self._stored.folder,
            "save": self._stored.save,
            "tensors": rows,
        }
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
                if overlap(start, _TensorEntry.parsed(self._about[name]).shape, part) is not None:
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
            dtype = dtype_named(_TensorEntry.parsed(self._about[about.shards[0][0]]).dtype)
            there = self._session.places.residence(mesh.places[len(found)], numbered=False)
            found.append(torch.empty([b - a for a, b in part], dtype=dtype, device=there.device))
        return found[0] if mesh is None else on_mesh(about, mesh, found)

    def _add(self, name: str, place: Place | None, key: str = "") -> None:
        """Have a tensor of a file read, under a key of its own where several places read it."""
        key = key or name
        if key in self._reads:
            return
        about = _TensorEntry.parsed(self._about[name])
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
            self._session.fetch(r.place.worker, r.ref, ready(r), "item", {}) for r in reports
        ]
        sizes = [
            sum(self._reads[key].spec.nbytes for key in keys)
            for (_, small), keys in groups.items()
            if not small
        ]
        with self._session.requests.announcer.working(
            f"loading from {self._stored.folder}", sum(sizes), partial(_answered, asked, sizes)
        ):
            _await(self._session, asked)
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
        issue_function(
            reader.worker,
            "checkpoint_read",
            [plan, reader.place],
            fresh=[report, *handles],
        )
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
        key, alias, flags, members, about = _leaf_fields(form)
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


def _leaf_fields(form: list[Json]) -> tuple[str, int, int, int, Sharded | None]:
    """Return a tensor's key, alias, flags and members, as `save` writes them into the tree, and what a
    DTensor was.
    """
    match form:
        case [str(key), int(alias), int(flags), int(members)]:
            return key, alias, flags, members, None
        case [str(key), int(alias), int(flags), int(members), about]:
            return key, alias, flags, members, Sharded.parsed(about)
    raise ValueError(f"not a tensor of a tree: {str(form)[:80]}")


@dataclass
class _TensorEntry:
    """What an index says of one tensor. `file` is the position of its file among all of the checkpoint."""

    dtype: str
    shape: list[int]
    file: int
    stride: list[int] | None
    place: tuple[int, str] | None

    @classmethod
    def parsed(cls, about: Json) -> _TensorEntry:
        """Return what `save` has written; raise `ValueError` or `KeyError` for anything else."""
        if not isinstance(about, dict):
            raise ValueError(f"not a tensor: {str(about)[:80]}")
        match about["dtype"], about["file"], about.get("place"):
            case str(dtype), int(file), None:
                place = None
            case str(dtype), int(file), [int(node), str(device)]:
                place = node, device
            case _:
                raise ValueError(f"not a tensor: {str(about)[:80]}")
        stride = about.get("stride")
        return cls(
            dtype, _integers(about["shape"]), file, None if stride is None else _integers(stride), place
        )


def _integers(value: Json) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"not a list of numbers: {str(value)[:80]}")
    numbers = [n for n in value if isinstance(n, int)]
    if len(numbers) != len(value):
        raise ValueError(f"not a list of numbers: {str(value)[:80]}")
    return numbers
