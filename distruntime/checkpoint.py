"""Checkpoints: `save` and `load` of trees of tensors, which the workers write and read themselves.

Here are the tree, the index and who has which file; what happens in a folder is `distruntime_worker/checkpoint.py`. See docs/checkpoints.md.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .errors import CheckpointError, NotSupportedError, PlacementError, UsageError
from .fetch import fetch
from .functions import issue_function
from .handle import Handle, Place, Residence, Storage, next_ref
from .line import user_line
from .node import Line, Node
from .saving import VERSION, Part, Saving, other_version
from .session import Session, active_session
from .shards import member_of, mesh_of
from .spec import NO_TENSOR, Spec, spec, spec_of
from .stall import before_wait, note_wait
from .tensor import DistributedTensor
from .transfer import download, ready, upload
from .tree import packed, unpacked
from .wire.codec import dtype_name, dtype_named, tensor_bytes
from .wrap import wrap

log = logging.getLogger("distruntime")

SMALL = 1 << 16  # bytes; local tensors up to here travel together, both ways
_GRAD, _PARAMETER = 1, 2
_under_way: dict[tuple[str, str], Saving] = {}  # by session and folder


# -- saving ----------------------------------------------------------------------------------------------------------------------


def save(tree: Any, path: str | os.PathLike[str], *, async_op: bool = False) -> Saving | None:
    """Write a tree as a checkpoint into the folder `path`, in place of the one that is there. Block until it is complete.

    The values are those at this point of the program. The workers write their tensors themselves, each a file of its own, and `path` is
    made absolute here and means the same folder on each of them, on a disk that they share or not. Until all have written theirs, and
    whatever ends the save before, the checkpoint that was there is readable. One save at a time: a second one into the same folder waits
    for the first.

    Args:
        tree: nested dicts (with str or int as keys), lists and tuples of remote and local tensors, None, bool, int, float, complex, str and
            bytes; objects that have `state_dict()` and `load_state_dict()` (modules, optimizers, schedulers) are saved as what that returns.
            A tensor that occurs twice is written once and comes back tied; views that only share memory come back apart. Tensors on a
            mesh are written by its members, each its shard. Local tensors are sent to a worker, together if they are up to 64 KiB.
        path: a folder, which is made. Nothing but distruntime's own files is ever removed from it.
        async_op: return at once, with a `Saving` to `wait()` for. The workers copy the tensors, in the log's order, and write the copies
            while they go on: as much memory again, in main memory of the node. A failure that nobody waits for is raised by the next
            `synchronize`, or by `shutdown`, which waits for saves that are under way.

    Raises:
        NodeFailed: a worker is lost. NotSupportedError: a DTensor. UsageError: what a tree cannot hold. CheckpointError: the folder has a
        checkpoint of another version. Whatever a tensor is poisoned with; and, from the worker, `OSError` and its kind.
    """
    session, line = active_session(), user_line()
    folder = _folder(path)
    gathered = _Gathered(session)
    tree_form = packed(tree, gathered.leaf)
    parts = gathered.parts()
    for node, _ in parts:
        node.require_alive()
    before = _under_way.get((session.name, folder))
    if before is not None:
        before.await_end()
    save_id = uuid.uuid4().hex[:12]
    index = {"tensors": gathered.about, "tree": tree_form}
    saving = Saving(session, folder, save_id, index, line, async_op)
    if not any(getattr(callback, "func", None) is _finish_saves for callback in session.on_end):
        session.on_end.append(partial(_finish_saves, session.name))
    plans = [_plan(node, list(part.plan(folder, save_id, node)), part.small_bytes()) for node, part in parts]
    with session.lock:  # one moment of the program on all of them
        reports = [_issue_write(node, plan, async_op, part.tensors) for (node, part), plan in zip(parts, plans)]
    written = [
        Part(node, part.file(save_id, node), session.fetch(node, report.ref, ready(report), "item", {}), report)
        for (node, part), report in zip(parts, reports)
    ]
    looks = [session.ask(node, "checkpoint", ["look", folder]) for node in session.nodes if node.failed is None]
    _under_way[session.name, folder] = saving
    saving.begin(written, looks, partial(_over, session.name, folder))
    if async_op:
        return saving
    before_wait("explicit save")
    started = time.perf_counter()
    try:
        saving.wait()
    except KeyboardInterrupt:
        saving.abandon()
        raise
    finally:
        note_wait("explicit save", started)
    return None


def _over(session: str, folder: str) -> None:
    _under_way.pop((session, folder), None)


def _finish_saves(session: str) -> None:
    for (name, folder), saving in list(_under_way.items()):
        if name == session:
            log.info("the session waits for the checkpoint in %s", folder)
            saving.await_end()


def _folder(path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise UsageError(f"a checkpoint's path is the name of a folder, got {path!r:.80}")
    return os.path.abspath(os.fspath(path))


@dataclass
class _Share:
    """What one worker is to write."""

    ordinal: int
    keys: list[str] = field(default_factory=list)
    tensors: list[DistributedTensor] = field(default_factory=list)
    small: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def file(self, save_id: str, node: Node) -> str:
        return f"distruntime-{save_id}-node{node.index}.safetensors"

    def plan(self, folder: str, save_id: str, node: Node) -> Iterable[tuple[str, Any]]:
        small = [[key, dtype_name(t.dtype), list(t.shape), t.nbytes] for key, t in self.small]
        return {"folder": folder, "file": self.file(save_id, node), "save": save_id, "keys": self.keys, "small": small}.items()

    def small_bytes(self) -> list[Any]:
        return [tensor_bytes(t) for _, t in self.small]


class _Gathered:
    """The tensors of a tree: what each is called, who writes it, and what the index says of it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._home: Residence | None = None
        self._shares: dict[Node, _Share] = {}
        self._local: list[tuple[str, torch.Tensor]] = []
        self._keys: dict[tuple[Any, ...], str] = {}  # of what has been met, by memory and metadata
        self._forms: dict[int, list[Any]] = {}  # by the tensor's identity
        self._aliases: dict[str, int] = {}
        self._held: list[torch.Tensor] = []  # `state_dict()` makes tensors anew, and identities are used again
        self._taken = {"__metadata__"}  # which safetensors uses itself
        self.about: dict[str, dict[str, Any]] = {}

    def leaf(self, tensor: torch.Tensor, path: str) -> list[Any]:
        """Return what the tree has for a tensor: its key, which of the objects with these values it is, flags, and members if on a mesh."""
        found = self._forms.get(id(tensor))
        if found is None:
            self._held.append(tensor)
            _require_plain(tensor, path)
            members = 0
            if isinstance(tensor, DistributedTensor):
                node = tensor._handle.place.node
                node.session.require_open()
                members = len(node.members)
                what: tuple[Any, ...] = "remote", id(tensor._handle.storage), tensor._handle.spec
            else:
                what = "local", tensor.untyped_storage()._cdata, spec_of(tensor)
            key = self._keys.get(what)
            if key is None:
                key = self._keys[what] = self._name(path)
                self._add(key, tensor)
            alias = self._aliases[key] = self._aliases.get(key, -1) + 1
            flags = (_GRAD if tensor.requires_grad else 0) | (_PARAMETER if isinstance(tensor, torch.nn.Parameter) else 0)
            found = self._forms[id(tensor)] = [key, alias, flags, members]
        return found

    def _name(self, path: str) -> str:
        wanted = path.encode("utf-8", "backslashreplace").decode() or "tensor"
        name, n = wanted, 1
        while name in self._taken:
            n += 1
            name = f"{wanted}#{n}"
        self._taken.add(name)
        return name

    def _add(self, key: str, tensor: Any) -> None:
        if not isinstance(tensor, DistributedTensor):
            self.about[key] = _about(spec_of(tensor), None)
            self._local.append((key, tensor.detach().cpu()))
            return
        handle = tensor._handle
        team = handle.place.node
        if not team.members:
            self._assign(key, tensor)
            return
        team.require_alive()
        for k in range(len(team.members)):
            name = self._name(f"{key}.member{k}")
            self._assign(name, wrap(DistributedTensor, member_of(handle, k)))

    def _assign(self, key: str, tensor: DistributedTensor) -> None:
        node, place = tensor._handle.place.node, tensor._handle.place.place
        share = self._share(node)
        share.keys.append(key)
        share.tensors.append(tensor)
        self.about[key] = {**_about(tensor._handle.spec, place), "file": share.ordinal}

    def _share(self, node: Node) -> _Share:
        if node not in self._shares:
            self._shares[node] = _Share(len(self._shares))
        return self._shares[node]

    def parts(self) -> list[tuple[Node, _Share]]:
        """Return who writes what. This process's own tensors go to the first who writes anything, else to the current place."""
        if self._local or not self._shares:
            node = next(iter(self._shares), None) or _one_of(self._session.places.current())
            share = self._share(node)
            for key, tensor in self._local:
                self.about[key]["file"] = share.ordinal
                if tensor.nbytes <= SMALL:
                    share.small.append((key, tensor))
                else:
                    node.require_alive()
                    share.keys.append(key)
                    share.tensors.append(wrap(DistributedTensor, upload(tensor, _host_of(self._session, node))))
        return list(self._shares.items())


def _require_plain(tensor: torch.Tensor, path: str) -> None:
    name = f"tensor {path!r}" if path else "the tensor"
    if hasattr(tensor, "_local_tensor"):
        raise NotSupportedError(
            f"{name} is a DTensor, of which a checkpoint would lose the placements: save x.full_tensor(), which is whole, or x.to_local(), "
            "each member's shard, which dr.load(path, place=mesh) brings back to a mesh of as many members"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "quantized" if tensor.is_quantized else "on meta" if tensor.device.type == "meta" else f"{tensor.layout}"
        raise NotSupportedError(
            f"{name} is {kind}; a checkpoint holds strided tensors with values: save x.to_dense(), or what it is made of"
        )


def _about(of: Spec, place: Place | None) -> dict[str, Any]:
    about: dict[str, Any] = {"dtype": dtype_name(of.dtype), "shape": list(of.size)}
    if place is not None:
        about["place"] = [place.node, place.device]
    stride = torch.empty_like(of.meta()).stride()  # as a copy of it has them
    if stride != torch.empty(of.size, device="meta").stride():
        about["stride"] = list(stride)
    return about


def _one_of(place: Residence) -> Node:
    members: Any = place.node
    return next(iter(members.ranks)) if place.node.members else place.node


def _host_of(session: Session, node: Node) -> Residence:
    """Return the main memory of a node; where it does not offer that, its first device."""
    have = session.places.devices(node.index)
    return session.places.residence(Place(node.index, "cpu" if "cpu" in have else have[0]), numbered=False)


def _plan(node: Node, fields: list[tuple[str, Any]], rest: Sequence[Any] = ()) -> DistributedTensor:
    """Send a worker what it is to do, as one tensor of bytes: as constants of the instruction it would be remembered there for good."""
    text = json.dumps(dict(fields)).encode()
    data = bytearray(b"".join([struct.pack("<Q", len(text)), text, *rest]))
    found: DistributedTensor = wrap(DistributedTensor, upload(torch.frombuffer(data, dtype=torch.uint8), _host_of(node.session, node)))
    return found


def _issue_write(node: Node, plan: DistributedTensor, background: bool, tensors: list[DistributedTensor]) -> Handle:
    report = Handle(next_ref(), NO_TENSOR, _host_of(node.session, node), Storage(NO_TENSOR))
    issue_function(node, "checkpoint_write", [plan, background, tensors], fresh=report)
    return report


# -- loading ---------------------------------------------------------------------------------------------------------------------


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
    found = find(session, _folder(path))
    if found is None:
        where = ", ".join(f"node {node.index} ({node.host})" for node in session.nodes if node.failed is None)
        raise CheckpointError(f"there is no checkpoint in {_folder(path)} on {where}: expected distruntime.json, as dr.save writes it")
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
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(f"the index of the checkpoint in {self.folder} makes no sense: {type(error).__name__}: {error}") from None


def find(session: Session, folder: str) -> Found | None:
    """Return the newest checkpoint in a folder of which all files are there; None if there is none, `CheckpointError` if only such ones."""
    before = _under_way.get((session.name, folder))
    if before is not None:
        before.await_end()
    nodes = [node for node in session.nodes if node.failed is None]
    if not nodes:
        session.nodes[0].require_alive()
    looks = _answers(session, [session.ask(node, "checkpoint", ["look", folder]) for node in nodes])
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
                raise CheckpointError(other_version(folder, entry[2]) + ": load it with the distruntime that wrote it, and save it anew")
            else:
                entries.setdefault(entry[4], (node, entry))
    for node, entry in sorted(entries.values(), key=lambda found: (found[1][3], found[1][4]), reverse=True):
        missing = [file for file, nbytes in entry[5] if (file, nbytes) not in holders]
        if not missing:
            if problems:
                log.warning("the checkpoint in %s is not the newest that was begun there: %s", folder, "; ".join(problems))
            text = _answers(session, [session.ask(node, "checkpoint", ["index", folder, entry[0]])])[0]
            index = json.loads(text)
            if index["save"] != entry[4]:
                raise CheckpointError(f"the checkpoint in {folder} was replaced while it was being read: load it again")
            return Found(session, folder, entry[4], index, {file: holders[file, nbytes] for file, nbytes in entry[5]})
        sizes_of = {file: sorted(nbytes for name, nbytes in holders if name == file) for file in missing}
        for file, nbytes in entry[5]:
            if file in missing:
                got = f"{sizes_of[file][0]} bytes" if sizes_of[file] else "on none of this session's nodes"
                problems.append(f"{file}: expected {nbytes} bytes, got {got}")
    if problems:
        raise CheckpointError(
            f"the checkpoint in {folder} is not whole:\n  " + "\n  ".join(problems) + "\n  Bring the missing files there, on any node, "
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
        elif isinstance(place, Place):
            self._residence = session.places.residence(place)
        elif isinstance(place, int) and not isinstance(place, bool):
            session.places.devices(place)
            self._node = place
        elif isinstance(place, (str, torch.device)) and str(place) in ("cpu", "cpu:0"):
            self.here = True
        elif isinstance(place, (str, torch.device)) and str(place).partition(":")[0] in ("remote", "lazy"):
            self._residence = session.places.numbered(torch.device(place).index)
        else:
            raise PlacementError(
                f'a checkpoint\'s place is a Place, "remote:1", a node\'s number, a mesh, "cpu" for this process, or None, got {place!r:.80}'
            )
        if self._residence is not None:
            self._residence.node.require_alive()

    def of(self, node: int, device: str) -> Residence:
        """Return where a tensor goes that was on this device of this node."""
        if self._residence is not None:
            return self._residence
        places = self._session.places
        if self._node is not None:
            have = places.devices(self._node)
            return places.residence(Place(self._node, device if device in have else have[0]))
        if 0 <= node < len(self._session.nodes) and self._session.nodes[node].failed is None and device in places.devices(node):
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
                f"dr.init_device_mesh of {members} places" + (f"; got one of {len(mesh.places)}" if mesh is not None else "")
            )
        for k in range(members):
            self._want(f"{key}.member{k}", mesh.places[k])

    def _want(self, key: str, place: Place | None) -> None:
        if key in self._wanted:
            return
        about = self._found.index["tensors"][key]
        size = torch.Size(about["shape"])
        stride = about.get("stride")
        of = spec(size, tuple(stride) if stride else torch.empty(size, device="meta").stride(), 0, dtype_named(about["dtype"]))
        file = self._files[about["file"]]
        was = about.get("place")
        home = None
        if was is not None and not self._target.here:
            home = self._target.of(*was) if place is None else self._session.places.residence(place, numbered=False)
        holders = self._found.holders[file]
        if home is not None and home.node in holders:
            reader = home
        else:
            reader = _host_of(self._session, holders[0])
        self._wanted[key] = _Wanted(file, of, stride, reader, home, home is None and of.nbytes <= SMALL)

    def values(self) -> dict[str, Any]:
        """Block until all are read; return them by their keys."""
        line = user_line()
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
        _answers(self._session, [self._session.fetch(r.place.node, r.ref, ready(r), "item", {}) for r in reports])
        for keys, pack in packs:
            read.update(self._apart(keys, download(pack, "explicit load")))
        far = {key: tensor for key, tensor in read.items() if self._wanted[key].home is None and isinstance(tensor, DistributedTensor)}
        read.update(fetch(far) if far else {})
        for key, wanted in self._wanted.items():
            if wanted.home is not None and wanted.home is not wanted.reader:
                read[key] = read[key].to(wanted.home.place)
        note_wait("explicit load", started)
        del line
        return read

    def _rows(self, keys: list[str]) -> list[tuple[str, Any]]:
        rows = [(key, self._wanted[key]) for key in keys]
        tensors = [[w.file, key, dtype_name(w.spec.dtype), list(w.spec.size), w.stride] for key, w in rows]
        return [("folder", self._found.folder), ("save", self._found.save), ("tensors", tensors)]

    def _read(self, reader: Residence, keys: list[str]) -> tuple[Handle, dict[str, Any]]:
        plan = _plan(reader.node, self._rows(keys))
        one = spec((), (), 0, torch.int64)
        report = Handle(next_ref(), one, _host_of(self._session, reader.node), Storage(one))
        handles = [Handle(next_ref(), w.spec, reader, Storage(w.spec)) for w in (self._wanted[key] for key in keys)]
        issue_function(reader.node, "checkpoint_read", [plan, torch.device(reader.place.device)], fresh=[report, *handles])
        return report, {key: wrap(DistributedTensor, handle) for key, handle in zip(keys, handles)}

    def _read_packed(self, reader: Residence, keys: list[str]) -> Handle:
        whole = spec((sum(self._wanted[key].spec.nbytes for key in keys),), (1,), 0, torch.uint8)
        pack = Handle(next_ref(), whole, _host_of(self._session, reader.node), Storage(whole))
        issue_function(reader.node, "checkpoint_read_packed", [_plan(reader.node, self._rows(keys))], fresh=pack)
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
            if flags & _PARAMETER:
                made = torch.nn.Parameter(made, bool(flags & _GRAD))
            elif flags & _GRAD:
                made.requires_grad_()
            self._made[key, alias] = made
        return made

    def _on_mesh(self, values: dict[str, Any], key: str, members: int) -> Any:
        mesh = self._target.mesh
        handles = [values[f"{key}.member{k}"]._handle for k in range(members)]
        return wrap(DistributedTensor, mesh_of(mesh._team, mesh._home, handles))


__all__ = ["Found", "Saving", "find", "load", "save"]
