"""Checkpoints: `save` and `load` of trees of tensors, which the workers write and read themselves.

Here is what a save asks of whom; what happens to files is `distruntime_worker/checkpoint/files.py`. See docs/checkpoints.md.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..errors import NotSupportedError, UsageError
from ..log.handle import Handle, Place, Residence, Storage, next_ref
from ..log.line import user_line
from ..log.node import Node
from ..log.shards import member_of
from ..log.spec import NO_TENSOR, Spec, spec_of
from ..operators.proxies import wrap
from ..operators.transfer import ready, upload
from ..session.session import Session, active_session
from ..session.stalls import before_wait, note_wait
from ..tensors.tensor import DistributedTensor
from ..tensors.worker_functions import issue_function
from ..wire.codec import dtype_name, tensor_bytes
from ..wire.messages import ListFolder
from .phases import Part, Saving
from .tree import packed

log = logging.getLogger("distruntime")

SMALL = 1 << 16  # bytes; local tensors up to here travel together, both ways
GRAD, PARAMETER = 1, 2
under_way: dict[tuple[str, str], Saving] = {}  # by session and folder


def save(tree: Any, path: str | os.PathLike[str], *, async_op: bool = False) -> Saving | None:
    """Write a tree as a checkpoint into the folder `path`, in place of the one that is there. Block until it is complete.

    The values are those at this point of the program. The workers write their tensors themselves, each a file of its own, and `path` is
    made absolute here and means the same folder on each of them, on a disk that they share or not. Until all have written theirs, and
    whatever ends the save before, the checkpoint that was there is readable. One save at a time: a second one into the same folder waits
    for the first.

    Args:
        tree: nested dicts (with str or int as keys), lists and tuples of remote and local tensors, None, bool, int, float, complex, str
            and bytes; objects that have `state_dict()` and `load_state_dict()` (modules, optimizers, schedulers) are saved as that.
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
    folder = folder_of(path)
    if not async_op:
        before_wait("explicit save")
    gathered = _Gathered(session)
    tree_form = packed(tree, gathered.leaf)
    parts = gathered.parts()
    for node, _ in parts:
        node.require_alive()
    save_id = uuid.uuid4().hex[:12]
    index = {"tensors": gathered.about, "tree": tree_form}
    saving = Saving(session, folder, save_id, index, line, async_op)
    if not any(getattr(callback, "func", None) is _finish_saves for callback in session.before_end):
        session.before_end.append(partial(_finish_saves, session.name))
    try:
        while (before := under_way.setdefault((session.name, folder), saving)) is not saving:
            before.await_end()
        _begin(session, saving, save_id, parts, async_op)
    except BaseException:
        saving.give_up()
        raise
    finally:
        if saving.done():
            _over(session.name, folder, saving)
    if async_op:
        return saving
    started = time.perf_counter()
    try:
        saving.wait()
    except KeyboardInterrupt:
        saving.abandon()
        raise
    finally:
        note_wait("explicit save", started)
    return None


def _begin(
    session: Session, saving: Saving, save_id: str, parts: list[tuple[Node, _Share]], background: bool
) -> None:
    plans = [
        send_plan(node, share.plan(saving.folder, save_id, node), [tensor_bytes(t) for _, t in share.small])
        for node, share in parts
    ]
    with session.lock:  # one moment of the program on all of them
        reports = [
            _issue_write(node, plan, background, share.tensors) for (node, share), plan in zip(parts, plans)
        ]
    written = [
        Part(
            node,
            share.file(save_id, node),
            session.fetch(node, report.ref, ready(report), "item", {}),
            report,
        )
        for (node, share), report in zip(parts, reports)
    ]
    looks = [session.ask(node, ListFolder, saving.folder) for node in session.nodes if node.failed is None]
    saving.begin(written, looks, partial(_over, session.name, saving.folder, saving))


def _over(session: str, folder: str, saving: Saving) -> None:
    if under_way.get((session, folder)) is saving:
        under_way.pop((session, folder), None)  # the end of the session may come between


def _finish_saves(session: str, deadline: float | None) -> None:
    for (name, folder), saving in list(under_way.items()):
        if name == session:
            log.info("the session waits for the checkpoint in %s", folder)
            if not saving.await_end(deadline):
                log.warning(
                    "the session ends before the checkpoint in %s is complete; the one before it is as it was",
                    folder,
                )
                under_way.pop((name, folder), None)  # the pump's thread may have ended it meanwhile


def folder_of(path: Any) -> str:
    """Return the folder that a path means, from wherever a worker runs."""
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

    def plan(self, folder: str, save_id: str, node: Node) -> dict[str, Any]:
        """Return what the worker is told, besides the values of small local tensors."""
        small = [[key, dtype_name(t.dtype), list(t.shape), t.nbytes] for key, t in self.small]
        return {
            "folder": folder,
            "file": self.file(save_id, node),
            "save": save_id,
            "keys": self.keys,
            "small": small,
        }


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
        self._held: list[
            torch.Tensor
        ] = []  # `state_dict()` makes tensors anew, and identities are used again
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
            flags = (GRAD if tensor.requires_grad else 0) | (
                PARAMETER if isinstance(tensor, torch.nn.Parameter) else 0
            )
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
        node, place = tensor._handle.place.worker, tensor._handle.place.place
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
                    share.tensors.append(
                        wrap(DistributedTensor, upload(tensor, host_of(self._session, node)))
                    )
        return list(self._shares.items())


def _require_plain(tensor: torch.Tensor, path: str) -> None:
    name = f"tensor {path!r}" if path else "the tensor"
    if hasattr(tensor, "_local_tensor"):
        raise NotSupportedError(
            f"{name} is a DTensor, of which a checkpoint would lose the placements: save x.full_tensor(), which is whole, or x.to_local(), "
            "each member's shard, which dr.load(path, place=mesh) brings back to a mesh of as many members"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = (
            "quantized"
            if tensor.is_quantized
            else "on meta"
            if tensor.device.type == "meta"
            else f"{tensor.layout}"
        )
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
    return next(iter(members.ranks)) if place.node.members else place.worker


def host_of(session: Session, node: Node) -> Residence:
    """Return the main memory of a node; where it does not offer that, its first device."""
    have = session.places.devices(node.index)
    return session.places.residence(Place(node.index, "cpu" if "cpu" in have else have[0]), numbered=False)


def send_plan(node: Node, fields: dict[str, Any], rest: Sequence[Any] = ()) -> DistributedTensor:
    """Send a worker what it is to do, as one tensor of bytes: as constants of the instruction it would be remembered there for good."""
    text = json.dumps(fields).encode()
    data = bytearray(b"".join([struct.pack("<Q", len(text)), text, *rest]))
    found: DistributedTensor = wrap(
        DistributedTensor, upload(torch.frombuffer(data, dtype=torch.uint8), host_of(node.session, node))
    )
    return found


def _issue_write(
    node: Node, plan: DistributedTensor, background: bool, tensors: list[DistributedTensor]
) -> Handle:
    report = Handle(next_ref(), NO_TENSOR, host_of(node.session, node), Storage(NO_TENSOR))
    issue_function(node, "checkpoint_write", [plan, background, tensors], fresh=report)
    return report
