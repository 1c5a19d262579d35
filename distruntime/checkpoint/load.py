"""Loading a checkpoint: which save is the newest whole one, who has its files, and where its tensors go."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import CheckpointError, PlacementError, UsageError
from ..log.handle import Handle, Place, Residence, Storage, next_ref
from ..log.node import Node
from ..log.shards import mesh_of
from ..log.spec import Spec, spec
from ..operators.proxies import wrap
from ..operators.transfer import download, ready
from ..session.session import Session, active_session
from ..session.spelling import is_node, named, on_node
from ..session.stalls import before_wait, note_wait
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor
from ..tensors.worker_functions import issue_function
from ..wire.codec import dtype_name, dtype_named
from ..wire.messages import ListFolder, ReadIndex
from .phases import VERSION, other_version
from .save import GRAD, PARAMETER, SMALL, folder_of, host_of, send_plan, under_way
from .tree import unpacked

log = logging.getLogger("distruntime")

_DECODER = json.JSONDecoder()


def load(path: str | os.PathLike[str], *, place: Any = None) -> Any:
    """Return the tree of the newest complete checkpoint in the folder `path`. Block until all of it is there.

    Modules and optimizers come back as the dicts that their `load_state_dict` takes; dicts, lists and tuples as plain ones; tensors that
    were tied are tied; local ones are local. The workers read the files, each what it keeps; where only another worker has a file, that
    one reads it and sends the tensors on.

    Args:
        path: the folder, as it was given to `save`.
        place: where remote tensors go. None: to the node and device where each was, else to the current place; a `Place`, "remote:1" or a
            `torch.device` like it, or the number of a node: there; "cpu": into this process; a mesh: there go those that were on a mesh of
            as many members, each member's shard to its place, and the others where they were.

    Raises:
        CheckpointError: there is none, or it is half, damaged or of another version. PlacementError: there is no such place.
        UsageError: a tensor was on a mesh, and `place` is none, or one of another size. NodeFailed: a worker was lost meanwhile.
    """
    session = active_session()
    found = find(session, folder_of(path))
    if found is None:
        where = ", ".join(f"node {node.index} ({node.host})" for node in session.nodes if node.failed is None)
        raise CheckpointError(
            f"there is no checkpoint in {folder_of(path)} on {where}: expected distruntime.json, as dr.save writes it"
        )
    return found.tree(place)


@dataclass
class Found:
    """A complete checkpoint, and which nodes have its files."""

    session: Session
    folder: str
    save: str
    index: dict[str, Any]
    holders: dict[str, list[Node]]

    def tree(self, place: Any) -> Any:
        """Return its tree, as `load` does."""
        try:
            reading = _Reading(self, _Target(self.session, place))
            unpacked(self.index["tree"], reading.note)
            values = reading.values()
            return unpacked(self.index["tree"], partial(reading.leaf, values))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"the index of the checkpoint in {self.folder} makes no sense: {type(error).__name__}: {error}"
            ) from None


def find(session: Session, folder: str) -> Found | None:
    """Return the newest checkpoint in a folder of which all files are there; None if there is none, `CheckpointError` if only such ones."""
    before = under_way.get((session.name, folder))
    if before is not None:
        before.await_end()
    nodes = [node for node in session.nodes if node.failed is None]
    if not nodes:
        session.nodes[0].require_alive()
    looks = _answers(session, [session.ask(node, ListFolder, folder) for node in nodes])
    holders: dict[tuple[str, int], list[Node]] = {}
    entries: dict[str, tuple[Node, list[Any]]] = {}
    problems: list[str] = []
    for node, (summaries, sizes) in zip(nodes, looks):
        for file, nbytes in sizes.items():
            holders.setdefault((file, nbytes), []).append(node)
        for entry in summaries:
            if entry[1]:
                problems.append(f"{entry[0]} on {node}: {entry[1]}")
            elif entry[2] != VERSION:
                raise CheckpointError(
                    other_version(folder, entry[2])
                    + ": load it with the distruntime that wrote it, and save it anew"
                )
            else:
                entries.setdefault(entry[4], (node, entry))
    for node, entry in sorted(entries.values(), key=lambda found: (found[1][3], found[1][4]), reverse=True):
        missing = [file for file, nbytes in entry[5] if (file, nbytes) not in holders]
        if not missing:
            if problems:
                log.warning(
                    "the checkpoint in %s is not the newest that was begun there: %s",
                    folder,
                    "; ".join(problems),
                )
            text = _answers(session, [session.ask(node, ReadIndex, folder, entry[0])])[0]
            try:
                index = _DECODER.decode(text)
                same = index["save"] == entry[4]
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise CheckpointError(
                    f"the index of the checkpoint in {folder} makes no sense: {error!r}"
                ) from None
            if not same:
                raise CheckpointError(
                    f"the checkpoint in {folder} was replaced while it was being read: load it again"
                )
            return Found(
                session, folder, entry[4], index, {file: holders[file, nbytes] for file, nbytes in entry[5]}
            )
        sizes_of = {file: sorted(nbytes for name, nbytes in holders if name == file) for file in missing}
        for file, nbytes in entry[5]:
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


def _answers(session: Session, requests: list[Any]) -> list[Any]:
    """Block for the values of several requests; raise the first failure among them, when all are answered."""
    for request in requests:
        if not request.done:
            session.result(request)
    return [session.value(request) for request in requests]


class _Target:
    """Where tensors go that were remote."""

    def __init__(self, session: Session, place: Any) -> None:
        self._session = session
        self.here = False  # into this process
        self.mesh: Any = None
        self._node: int | None = None
        self._residence: Residence | None = None
        if place is None:
            return
        if hasattr(place, "_team"):
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
                    'the place of a load is a Place, "remote:1", a node by its number, a mesh, "cpu" for this process, '
                    f"or None for where each tensor was; got {place!r:.80}"
                )
            self._residence.node.require_alive()

    def of(self, node: int, device: str) -> Residence:
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
            return places.residence(Place(node, device))
        return places.current()


@dataclass
class _Wanted:
    """A tensor that is to be read: by whom, and where it goes then; `home` None: into this process, with other small ones if `small`."""

    file: str
    spec: Spec
    stride: list[int] | None
    reader: Residence
    home: Residence | None
    small: bool


class _Reading:
    """The tensors of a tree on their way from the files."""

    def __init__(self, found: Found, target: _Target) -> None:
        self._found, self._target, self._session = found, target, found.session
        self._files = list(found.index["files"])
        self._wanted: dict[str, _Wanted] = {}
        self._made: dict[tuple[str, int], Any] = {}

    def note(self, form: list[Any]) -> None:
        """Take note of a tensor of the tree."""
        key, _, _, members = form
        if not members:
            self._want(key, None)
            return
        mesh = self._target.mesh
        if mesh is None or len(mesh.places) != members:
            raise UsageError(
                f"{key!r} was on a mesh of {members} members, and comes back to one of as many: dr.load(path, place=mesh), with "
                f"dr.init_device_mesh of {members} places"
                + (f"; got one of {len(mesh.places)}" if mesh is not None else "")
            )
        for k in range(members):
            self._want(f"{key}.member{k}", mesh.places[k])

    def _want(self, key: str, place: Place | None) -> None:
        if key in self._wanted:
            return
        about = self._found.index["tensors"][key]
        size = torch.Size(about["shape"])
        stride = about.get("stride")
        of = spec(
            size,
            tuple(stride) if stride else torch.empty(size, device="meta").stride(),
            0,
            dtype_named(about["dtype"]),
        )
        file = self._files[about["file"]]
        was = about.get("place")
        home = None
        if was is not None and not self._target.here:
            home = (
                self._target.of(*was)
                if place is None
                else self._session.places.residence(place, numbered=False)
            )
        holders = self._found.holders[file]
        if home is not None and home.node in holders:
            reader = home
        else:
            reader = host_of(self._session, holders[0])
        self._wanted[key] = _Wanted(file, of, stride, reader, home, home is None and of.nbytes <= SMALL)

    def values(self) -> dict[str, Any]:
        """Block until all are read; return them by their keys."""
        groups: dict[tuple[Residence, bool], list[str]] = {}
        for key, wanted in self._wanted.items():
            groups.setdefault((wanted.reader, wanted.small), []).append(key)
        started = time.perf_counter()
        before_wait("explicit load")
        read: dict[str, Any] = {}
        reports: list[Handle] = []
        packs: list[tuple[list[str], Handle]] = []
        for (reader, small), keys in groups.items():
            if small:
                packs.append((keys, self._read_packed(reader, keys)))
            else:
                report, made = self._read(reader, keys)
                reports.append(report)
                read.update(made)
        _answers(
            self._session, [self._session.fetch(r.place.worker, r.ref, ready(r), "item", {}) for r in reports]
        )
        for keys, pack in packs:
            read.update(self._apart(keys, download(pack, "explicit load")))
        far = {
            key: tensor
            for key, tensor in read.items()
            if self._wanted[key].home is None and isinstance(tensor, DistributedTensor)
        }
        read.update(fetch(far) if far else {})
        for key, wanted in self._wanted.items():
            if wanted.home is not None and wanted.home is not wanted.reader:
                read[key] = read[key].to(wanted.home.place)
        note_wait("explicit load", started)
        return read

    def _plan(self, keys: list[str]) -> dict[str, Any]:
        rows = [(key, self._wanted[key]) for key in keys]
        tensors = [[w.file, key, dtype_name(w.spec.dtype), list(w.spec.size), w.stride] for key, w in rows]
        return {"folder": self._found.folder, "save": self._found.save, "tensors": tensors}

    def _read(self, reader: Residence, keys: list[str]) -> tuple[Handle, dict[str, Any]]:
        plan = send_plan(reader.worker, self._plan(keys))
        one = spec((), (), 0, torch.int64)
        report = Handle(next_ref(), one, host_of(self._session, reader.worker), Storage(one))
        handles = [
            Handle(next_ref(), w.spec, reader, Storage(w.spec)) for w in (self._wanted[key] for key in keys)
        ]
        issue_function(
            reader.worker,
            "checkpoint_read",
            [plan, torch.device(reader.place.device)],
            fresh=[report, *handles],
        )
        return report, {key: wrap(DistributedTensor, handle) for key, handle in zip(keys, handles)}

    def _read_packed(self, reader: Residence, keys: list[str]) -> Handle:
        whole = spec((sum(self._wanted[key].spec.nbytes for key in keys),), (1,), 0, torch.uint8)
        pack = Handle(next_ref(), whole, host_of(self._session, reader.worker), Storage(whole))
        issue_function(
            reader.worker, "checkpoint_read_packed", [send_plan(reader.worker, self._plan(keys))], fresh=pack
        )
        return pack

    def _apart(self, keys: list[str], pack: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the small tensors that came in one, each in memory of its own."""
        found: dict[str, torch.Tensor] = {}
        start = 0
        for key in keys:
            of = self._wanted[key].spec
            piece = pack[start : start + of.nbytes].clone().view(of.dtype).view(of.size)
            found[key] = torch.empty_strided(of.size, of.stride, dtype=of.dtype).copy_(piece)
            start += of.nbytes
        return found

    def leaf(self, values: dict[str, Any], form: list[Any]) -> Any:
        """Return a tensor of the tree."""
        key, alias, flags, members = form
        made = self._made.get((key, alias))
        if made is None:
            if (key, -1) not in self._made:
                self._made[key, -1] = values[key] if not members else self._on_mesh(values, key, members)
            made = self._made[key, -1].detach()
            if flags & PARAMETER:
                made = torch.nn.Parameter(made, bool(flags & GRAD))
            elif flags & GRAD:
                made.requires_grad_()
            self._made[key, alias] = made
        return made

    def _on_mesh(self, values: dict[str, Any], key: str, members: int) -> Any:
        mesh = self._target.mesh
        handles = [values[f"{key}.member{k}"]._handle for k in range(members)]
        return wrap(DistributedTensor, mesh_of(mesh._team, mesh._home, handles))
