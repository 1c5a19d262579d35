"""From a mesh's value to its members' values and back: names for memory that is there, no copies."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from ..errors import InternalError
from ..wire.messages import GIVE, TAKE
from .handle import Handle, Residence, Storage, next_ref
from .issue import issue_joint
from .line import user_line
from .mesh_log import MeshLog
from .spec import NO_TENSOR


def member_of(handle: Handle, k: int) -> Handle:
    """Return the value of a mesh's `k`-th member, at that member's own place. Return at once."""
    team = handle.place.node
    if not isinstance(team, MeshLog):
        raise InternalError(f"{handle.place.place} is no mesh, and has no members")
    node, lane = team.lanes[k]
    team.session.require_open()
    node.require_alive()
    place = team.session.places.residence(team.members[k], numbered=False)
    taken = Handle(next_ref(), handle.spec, place, _part(team, handle.storage, k))
    with node.lock:
        given = (handle.storage.given or {}).get(node)
        issue_joint([TAKE, handle.ref, lane, taken.ref], [taken], (), (), [place], given, user_line())
    return taken


def mesh_of(team: MeshLog, home: Residence, handles: Sequence[Handle], into: Handle | None = None) -> Handle:
    """Return a mesh's value made of its members' values, which have one spec. Return at once.

    With `into`, make them the value of that one.
    """
    spec = handles[0].spec
    storage = whole_of(team, handles)
    if storage is None:
        storage = Storage(spec)
        storage.parts = {k: h.storage for k, h in enumerate(handles)}
        for h in handles:
            h.storage.whole = {**(h.storage.whole or {}), team: weakref.ref(storage)}
    whole = Handle(next_ref(), spec, home, storage) if into is None else into
    line = user_line()
    with team.lock:
        given = whole.storage.given = whole.storage.given or {node: Storage(NO_TENSOR) for node in team.ranks}
        for node, ranks in team.ranks.items():
            mine = [handles[k] for k in ranks]
            if node.failed is None:
                # It is no value of this worker alone, and nobody fetches it by this name.
                written = [Storage(spec)]
                issue_joint(
                    [GIVE, [h.ref for h in mine], whole.ref],
                    (),
                    mine,
                    written,
                    [mine[0].place],
                    given[node],
                    line,
                )
        if into is None:
            # No word of the mesh's own log makes it; the logs keep their order.
            whole.born = (0, line[1], line[2])
    return whole


def _part(team: MeshLog, storage: Storage, k: int) -> Storage:
    """Return the storage of a member's shard: one for all names of it."""
    if storage.parts is None:
        storage.parts = {}
    found = storage.parts.get(k)
    if found is None:
        found = storage.parts[k] = Storage(storage.spec)
        found.whole = {team: weakref.ref(storage)}
    return found


def whole_of(team: MeshLog, handles: Sequence[Handle]) -> Storage | None:
    """Return the storage of the tensor on this mesh that has these shards in its order, if there is one."""
    found = _known(team, handles[0].storage)
    if found is None or found.parts is None:
        return None
    return found if all(found.parts.get(k) is h.storage for k, h in enumerate(handles)) else None


def belongs(team: MeshLog, handle: Handle) -> bool:
    """Whether a value is a shard of some tensor on this mesh."""
    return _known(team, handle.storage) is not None


def _known(team: MeshLog, storage: Storage) -> Storage | None:
    found = (storage.whole or {}).get(team)
    return None if found is None else found()
