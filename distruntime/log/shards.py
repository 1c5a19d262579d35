"""From a mesh's value to its members' values and back: names for memory that is there, no copies."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from ..errors import InternalError
from ..wire.messages import GIVE, TAKE
from .handle import Handle, Residence, next_ref
from .issue import Between, covered, issue_joint, stream_at
from .line import Line, user_line
from .mesh_log import MeshLog
from .spec import NO_TENSOR
from .storage import Storage
from .tape import cuts


def member_of(handle: Handle, k: int, line: Line | None = None) -> Handle:
    """Return the value of a mesh's `k`-th member, at that member's own place. Return at once."""
    mesh_log, line = handle.place.node, line or user_line()
    if cuts():
        with covered(line) as note:
            found = member_of(handle, k, line)
            between = Between(
                "member",
                (k,),
                [mesh_log, found.place.node],
                [handle.ref],
                [found.ref],
                [found.storage],
                lambda given, at: [member_of(given[0], k, at)],
            )
            note(between, [handle])
        return found
    if not isinstance(mesh_log, MeshLog):
        raise InternalError(f"{handle.place.place} is no mesh, and has no members")
    node, lane = mesh_log.lanes[k]
    mesh_log.session.require_open()
    node.require_alive()
    place = mesh_log.session.places.residence(mesh_log.members[k], numbered=False)
    taken = Handle(next_ref(), handle.spec, place, _part(mesh_log, handle.storage, k))
    with node.lock:
        given = (handle.storage.given or {}).get(node)
        if node.order is not None:
            node.order.find(taken.storage, stream_at(place))
        issue_joint([TAKE, handle.ref, lane, taken.ref], [taken], (), (), [place], given, line)
    return taken


def mesh_of(
    mesh_log: MeshLog,
    home: Residence,
    handles: Sequence[Handle],
    into: Handle | None = None,
    line: Line | None = None,
) -> Handle:
    """Return a mesh's value made of its members' values, which have one spec. Return at once.

    With `into`, make them the value of that one.
    """
    line = line or user_line()
    if cuts():
        return _recorded(mesh_log, home, handles, into, line)
    spec = handles[0].spec
    storage = whole_of(mesh_log, handles)
    if storage is None:
        storage = Storage(spec)
        storage.parts = {k: h.storage for k, h in enumerate(handles)}
        for h in handles:
            h.storage.whole = {**(h.storage.whole or {}), mesh_log: weakref.ref(storage)}
    whole = Handle(next_ref(), spec, home, storage) if into is None else into
    with mesh_log.lock:
        given = whole.storage.given = whole.storage.given or {
            node: Storage(NO_TENSOR) for node in mesh_log.ranks
        }
        for node, ranks in mesh_log.ranks.items():
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


def _recorded(
    mesh_log: MeshLog, home: Residence, handles: Sequence[Handle], into: Handle | None, line: Line
) -> Handle:
    """Make a mesh's value while a program is recorded, which notes how a replay makes it."""
    with covered(line) as note:
        found = mesh_of(mesh_log, home, handles, into, line)
        reads, fresh, count = [*handles, *([] if into is None else [into])], into is None, len(handles)

        def again(given: Sequence[Handle], at: Line) -> Sequence[Handle]:
            made = mesh_of(mesh_log, home, given[:count], None if fresh else given[-1], at)
            return [made] if fresh else []

        between = Between(
            "shards",
            (count, fresh),
            [mesh_log, *mesh_log.ranks],
            [h.ref for h in reads],
            [found.ref] if fresh else [],
            [found.storage] if fresh else [],
            again,
        )
        note(between, reads)
    return found


def _part(mesh_log: MeshLog, storage: Storage, k: int) -> Storage:
    """Return the storage of a member's shard: one for all names of it."""
    if storage.parts is None:
        storage.parts = {}
    found = storage.parts.get(k)
    if found is None:
        found = storage.parts[k] = Storage(storage.spec)
        found.whole = {mesh_log: weakref.ref(storage)}
    return found


def whole_of(mesh_log: MeshLog, handles: Sequence[Handle]) -> Storage | None:
    """Return the storage of the tensor on this mesh that has these shards in its order, if there is one."""
    found = _known(mesh_log, handles[0].storage)
    if found is None or found.parts is None:
        return None
    return found if all(found.parts.get(k) is h.storage for k, h in enumerate(handles)) else None


def belongs(mesh_log: MeshLog, handle: Handle) -> bool:
    """Whether a value is a shard of some tensor on this mesh."""
    return _known(mesh_log, handle.storage) is not None


def _known(mesh_log: MeshLog, storage: Storage) -> Storage | None:
    found = (storage.whole or {}).get(mesh_log)
    return None if found is None else found()
