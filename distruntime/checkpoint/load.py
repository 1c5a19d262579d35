"""Loading a checkpoint: the newest save that is whole, who has its files, and where its tensors go."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CheckpointError, UsageError, without_our_frames
from ..log.node import Node
from ..python.weights import Laid, load_weights
from ..session.requests import Request
from ..session.session import Session, active_session
from ..session.spelling import require_alone
from ..wire.messages import FolderListing, IndexSummary, ListFolder, ReadIndex
from .phases import VERSION, other_version
from .reading import StoredCheckpoint, await_all
from .save import folder_of, under_way
from .tree import Json

log = logging.getLogger("distruntime")

# The nodes that have a file of a size.
Holders = dict[tuple[str, int], list[Node]]

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
    await_all(session, looks)
    holders, indexes, problems = _looked(folder, nodes, looks)
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
            index = _read_index(session, node, folder, summary)
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


def _looked(
    folder: str, nodes: Sequence[Node], looks: Sequence[Request[FolderListing]]
) -> tuple[Holders, dict[str, tuple[Node, IndexSummary]], list[str]]:
    """Return which nodes have each file of a size, the index of each save, and what is wrong with some."""
    holders: Holders = {}
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
    return holders, indexes, problems


def _read_index(session: Session, node: Node, folder: str, summary: IndexSummary) -> dict[str, Json]:
    """Return the index of a save; raise `CheckpointError` where it makes no sense, or is another by now."""
    text = session.value(session.ask(node, ReadIndex, folder, summary.name))
    try:
        index: dict[str, Json] = _DECODER.decode(text)
        same = index["save"] == summary.save
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"the index of the checkpoint in {folder} makes no sense: {error!r}") from None
    if not same:
        raise CheckpointError(
            f"the checkpoint in {folder} was replaced while it was being read: load it again"
        )
    return index
