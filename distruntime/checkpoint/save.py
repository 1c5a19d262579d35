"""Saving a checkpoint: which worker writes which tensors of a tree, and what the index says of them.

The workers write the files themselves, in `distruntime_worker/checkpoint/files.py`. See docs/checkpoints.md.
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

import torch

from ..errors import NotSupportedError, UsageError, without_our_frames
from ..log.handle import Handle, Place, Residence, new_value
from ..log.line import user_line
from ..log.node import Node
from ..log.shards import member_of
from ..log.spec import NO_TENSOR, Spec, spec_of
from ..operators.proxies import wrap
from ..operators.transfer import ready, upload
from ..session.fetching import ask_value
from ..session.session import Session, active_session, session_of_log
from ..session.stalls import before_wait, note_wait
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor
from ..tensors.worker_functions import issue_function
from ..wire.codec import Buffer, dtype_name, tensor_bytes
from ..wire.messages import ListFolder
from .phases import Contents, FileWrite, Saving
from .sharded import sharded
from .tree import Json, packed

log = logging.getLogger("distruntime")

# Local tensors of at most so many bytes travel together, both ways.
SMALL = 1 << 16
GRAD, PARAMETER = 1, 2
# The keys are a session's name and a folder.
under_way: dict[tuple[str, str], Saving] = {}


@without_our_frames
def save(tree: object, path: str | os.PathLike[str], *, async_op: bool = False) -> Saving | None:
    """Write a tree as a checkpoint into the folder `path`, in place of the one that is there.

    Block until it is complete. The values are those at this point of the program. The workers write their
    tensors themselves, each a file of its own. `path` is made absolute here and means the same folder on each
    of them, whether they share a disk or not. Until all have written theirs the checkpoint that was there is
    readable, whatever ends the save before. A second save into the same folder waits for the first.

    Args:
        tree: nested dicts (with str or int as keys), lists and tuples of remote and local tensors, None,
            bool, int, float, complex, str and bytes. Objects that have `state_dict()` and `load_state_dict()`
            (modules, optimizers, schedulers) are saved as their state_dict. A tensor that occurs twice is
            written once and comes back tied, and views that only share memory come back apart. The members of
            a mesh write its tensors, each its shard. Local tensors are sent to a worker, together if they are
            up to 64 KiB.
        path: a folder, which is made. Nothing but distruntime's own files is ever removed from it.
        async_op: return at once, with a `Saving` to `wait()` for. The workers copy the tensors, in the log's
            order, and write the copies while they go on. That takes as much memory again, in main memory of
            the node. A failure that nobody waits for is raised by the next `synchronize`, or by `shutdown`,
            which waits for saves that are under way.

    Raises:
        NodeFailed: a worker is lost.
        NotSupportedError: there is a sparse or a quantized tensor in the tree, or a DTensor that is partial.
        UsageError: there is something in it that a tree cannot hold.
        CheckpointError: the folder has a checkpoint of another version.
        OSError and its kind: a worker could not write.
        Whatever a tensor is poisoned with.
    """
    session, line = active_session(), user_line()
    folder = folder_of(path)
    if not async_op:
        before_wait("explicit save")
    gathered = _Gathered(session)
    tree_form = packed(tree, gathered.leaf)
    plans = gathered.plans()
    for node, _ in plans:
        node.require_alive()
    save_id = uuid.uuid4().hex[:12]
    saving = Saving(session, folder, save_id, Contents(gathered.about, tree_form), line, async_op)
    if not any(getattr(callback, "func", None) is _finish_saves for callback in session.ending.before):
        session.ending.before.append(partial(_finish_saves, session.name))
    try:
        while (before := under_way.setdefault((session.name, folder), saving)) is not saving:
            before.await_end()
        _start_writing(session, saving, save_id, plans, async_op)
    except BaseException:
        saving.give_up()
        raise
    finally:
        if saving.done():
            _take_off(session.name, folder, saving)
    if async_op:
        return saving
    sizes = [sum(tensor._handle.spec.nbytes for tensor in plan.tensors) for _, plan in plans]
    _wait(session, saving, sizes)
    return None


def _wait(session: Session, saving: Saving, sizes: Sequence[int]) -> None:
    """Block until a save is complete. Ctrl-C gives it up. `sizes` are each node's bytes."""
    started, text = time.perf_counter(), f"saving to {saving.folder}"
    try:
        with session.requests.announcer.working(text, sum(sizes), partial(saving.written, sizes)):
            saving.wait()
    except KeyboardInterrupt:
        saving.abandon()
        raise
    finally:
        note_wait("explicit save", started)


def _start_writing(
    session: Session, saving: Saving, save_id: str, plans: list[tuple[Node, _SavePlan]], background: bool
) -> None:
    sent = [
        send_plan(node, plan.fields(saving.folder, save_id, node), [tensor_bytes(t) for _, t in plan.small])
        for node, plan in plans
    ]
    # One moment of the program is the same for all of them.
    with session.lock:
        reports = [
            _issue_write(node, told, background, plan.tensors) for (node, plan), told in zip(plans, sent)
        ]
    writes = [
        FileWrite(
            node,
            plan.file(save_id, node),
            ask_value(session, node, report.ref, ready(report), "item", {}),
            report,
        )
        for (node, plan), report in zip(plans, reports)
    ]
    looks = [session.ask(node, ListFolder, saving.folder) for node in session.nodes if node.failed is None]
    saving.track(writes, looks, partial(_take_off, session.name, saving.folder, saving))


def _take_off(session: str, folder: str, saving: Saving) -> None:
    """Take a save that is over off the list of those that are under way."""
    if under_way.get((session, folder)) is saving:
        # The end of the session may have come between.
        under_way.pop((session, folder), None)


def _finish_saves(session: str, deadline: float | None) -> None:
    for (name, folder), saving in list(under_way.items()):
        if name == session:
            log.info("the session waits for the checkpoint in %s", folder)
            if not saving.await_end(deadline):
                log.warning(
                    "the session ends before the checkpoint in %s is complete; the one before it is as it "
                    "was",
                    folder,
                )
                # The pump's thread may have ended it meanwhile.
                under_way.pop((name, folder), None)


def folder_of(path: object) -> str:
    """Return the folder that a path means, from wherever a worker runs."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise UsageError(f"a checkpoint's path is the name of a folder, got {path!r:.80}")
    return os.path.abspath(os.fspath(path))


@dataclass
class _SavePlan:
    """What one worker is to write."""

    ordinal: int
    keys: list[str] = field(default_factory=list)
    tensors: list[DistributedTensor] = field(default_factory=list)
    small: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def file(self, save_id: str, node: Node) -> str:
        """Return the name of its file."""
        return f"distruntime-{save_id}-node{node.index}.safetensors"

    def fields(self, folder: str, save_id: str, node: Node) -> dict[str, object]:
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
    """The tensors of a tree: the name of each, the worker that writes it, and what the index says of it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._home: Residence | None = None
        self._plans: dict[Node, _SavePlan] = {}
        self._local: list[tuple[str, torch.Tensor]] = []
        # These are the keys of tensors that were met before, by where they are, their memory and their
        # metadata.
        self._keys: dict[tuple[str, int, Spec], str] = {}
        # Each tensor's identity has what the tree has for the tensor. `state_dict()` makes tensors anew, so
        # they are held here: an identity must not be used again.
        self._forms: dict[int, list[Json]] = {}
        self._held: list[torch.Tensor] = []
        self._aliases: dict[str, int] = {}
        self._sharded: dict[str, dict[str, Json]] = {}
        # safetensors uses this name itself.
        self._names = {"__metadata__"}
        self.about: dict[str, dict[str, Json]] = {}

    def leaf(self, tensor: torch.Tensor, path: str) -> list[Json]:
        """Return what the tree has for a tensor: its key, alias, flags and members.

        The alias tells apart several objects with the same values. Members is 0 for a tensor that is on no
        mesh.
        """
        found = self._forms.get(id(tensor))
        if found is None:
            self._held.append(tensor)
            if hasattr(tensor, "_local_tensor"):
                found = self._forms[id(tensor)] = self._dtensor(tensor, path)
                return found
            _require_plain(tensor, path)
            members = 0
            if isinstance(tensor, UnevenTensor):
                members = len(tensor._shards)
                what = "uneven", id(tensor._shards[0]._handle.storage), tensor._shards[0]._handle.spec
            elif isinstance(tensor, DistributedTensor):
                node = tensor._handle.place.node
                node.session.require_open()
                members = len(node.members)
                what = "remote", id(tensor._handle.storage), tensor._handle.spec
            else:
                what = "local", tensor.untyped_storage()._cdata, spec_of(tensor)
            key = self._keys.get(what)
            if key is None:
                key = self._keys[what] = self._name(path)
                self._add(key, tensor)
            found = self._forms[id(tensor)] = [*self._named(key, tensor), members]
        return found

    def _named(self, key: str, tensor: torch.Tensor) -> list[Json]:
        """Return the key, the alias and the flags of a tensor."""
        alias = self._aliases[key] = self._aliases.get(key, -1) + 1
        flags = (GRAD if tensor.requires_grad else 0) | (
            PARAMETER if isinstance(tensor, torch.nn.Parameter) else 0
        )
        return [key, alias, flags]

    def _dtensor(self, tensor: torch.Tensor, path: str) -> list[Json]:
        """Return what the tree has for a DTensor: also where its shards are in the whole."""
        local, about, members = sharded(tensor, path)
        if isinstance(local, UnevenTensor):
            shards, one = local._shards, local._shards[0]._handle
        else:
            one = local._handle
            shards = [wrap(DistributedTensor, member_of(one, k)) for k in range(len(one.place.node.members))]
        one.place.node.session.require_open()
        one.place.node.require_alive()
        what = f"DTensor {about.placements}", id(one.storage), one.spec
        key = self._keys.get(what)
        if key is None:
            key = self._keys[what] = self._name(path)
            for n, k in enumerate(members):
                name = self._name(f"{key}.member{k}")
                about.shards[n] = name, about.shards[n][1]
                self._assign(name, shards[k])
            self._sharded[key] = about.form()
        return [*self._named(key, tensor), len(members), self._sharded[key]]

    def _name(self, path: str) -> str:
        wanted = path.encode("utf-8", "backslashreplace").decode() or "tensor"
        name, n = wanted, 1
        while name in self._names:
            n += 1
            name = f"{wanted}#{n}"
        self._names.add(name)
        return name

    def _add(self, key: str, tensor: torch.Tensor) -> None:
        if isinstance(tensor, UnevenTensor):
            for k, shard in enumerate(tensor._shards):
                shard._handle.place.node.require_alive()
                self._assign(self._name(f"{key}.member{k}"), shard)
            return
        if not isinstance(tensor, DistributedTensor):
            self.about[key] = _about(spec_of(tensor), None)
            self._local.append((key, tensor.detach().cpu()))
            return
        handle = tensor._handle
        node = handle.place.node
        if not node.members:
            self._assign(key, tensor)
            return
        node.require_alive()
        for k in range(len(node.members)):
            name = self._name(f"{key}.member{k}")
            self._assign(name, wrap(DistributedTensor, member_of(handle, k)))

    def _assign(self, key: str, tensor: DistributedTensor) -> None:
        node, place = tensor._handle.place.worker, tensor._handle.place.place
        plan = self._plan(node)
        plan.keys.append(key)
        plan.tensors.append(tensor)
        self.about[key] = {**_about(tensor._handle.spec, place), "file": plan.ordinal}

    def _plan(self, node: Node) -> _SavePlan:
        if node not in self._plans:
            self._plans[node] = _SavePlan(len(self._plans))
        return self._plans[node]

    def plans(self) -> list[tuple[Node, _SavePlan]]:
        """Return who writes what.

        This process's own tensors go to the first node that writes anything, or to the current place if none
        does.
        """
        if self._local or not self._plans:
            node = next(iter(self._plans), None) or self._current_node()
            plan = self._plan(node)
            for key, tensor in self._local:
                self.about[key]["file"] = plan.ordinal
                if tensor.nbytes <= SMALL:
                    plan.small.append((key, tensor))
                else:
                    node.require_alive()
                    plan.keys.append(key)
                    plan.tensors.append(wrap(DistributedTensor, upload(tensor, host_of(self._session, node))))
        return list(self._plans.items())

    def _current_node(self) -> Node:
        """Return the node of the current place, which is the first member's if that is a mesh."""
        current = self._session.places.current()
        members = current.node.members
        return self._session.nodes[members[0].node] if members else current.worker


def _require_plain(tensor: torch.Tensor, path: str) -> None:
    name = f"tensor {path!r}" if path else "the tensor"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = (
            "quantized"
            if tensor.is_quantized
            else "on meta"
            if tensor.device.type == "meta"
            else f"{tensor.layout}"
        )
        raise NotSupportedError(
            f"{name} is {kind}; a checkpoint holds strided tensors with values: save x.to_dense(), or what "
            "it is made of"
        )


def _about(of: Spec, place: Place | None) -> dict[str, Json]:
    about: dict[str, Json] = {"dtype": dtype_name(of.dtype), "shape": [*of.size]}
    if place is not None:
        about["place"] = [place.node, place.local_device]
    # A copy of it has these strides.
    stride = torch.empty_like(of.meta()).stride()
    if stride != torch.empty(of.size, device="meta").stride():
        about["stride"] = [*stride]
    return about


def host_of(session: Session, node: Node) -> Residence:
    """Return the main memory of a node, or its first device if it does not offer that."""
    have = session.places.devices(node.index)
    return session.places.residence(Place(node.index, "cpu" if "cpu" in have else have[0]), numbered=False)


def send_plan(node: Node, fields: dict[str, object], rest: Sequence[Buffer] = ()) -> DistributedTensor:
    """Send a worker what it is to do, as one tensor of bytes.

    As constants of the instruction it would be remembered there for good.
    """
    text = json.dumps(fields).encode()
    data = bytearray(b"".join([struct.pack("<Q", len(text)), text, *rest]))
    found: DistributedTensor = wrap(
        DistributedTensor,
        upload(torch.frombuffer(data, dtype=torch.uint8), host_of(session_of_log(node), node)),
    )
    return found


def _issue_write(
    node: Node, plan: DistributedTensor, background: bool, tensors: list[DistributedTensor]
) -> Handle:
    report = new_value(NO_TENSOR, host_of(session_of_log(node), node))
    issue_function(node, "checkpoint_write", [plan, background, tensors], fresh=report)
    return report
