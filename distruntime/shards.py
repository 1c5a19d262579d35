"""From a mesh's value to its members' values and back: names for memory that is there, no copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .handle import Handle, Residence, Storage, next_ref
from .issue import issue
from .line import user_line
from .team import Team
from .wire.messages import GIVE, TAKE


def member_of(handle: Handle, k: int) -> Handle:
    """Return the value of a mesh's `k`-th member, at that member's own place. Return at once."""
    team: Any = handle.place.node
    node, lane = team.lanes[k]
    team.session.require_open()
    node.require_alive()
    place = team.session.places.residence(team.members[k], numbered=False)
    taken = Handle(next_ref(), handle.spec, place, Storage(handle.storage.spec))
    issue([TAKE, handle.ref, lane, taken.ref], [taken], (), (), place, user_line())
    return taken


def mesh_of(team: Team, home: Residence, handles: Sequence[Handle], into: Handle | None = None) -> Handle:
    """Return a mesh's value made of its members' values, which have one spec; or make them the value of `into`. Return at once."""
    spec = handles[0].spec
    whole = Handle(next_ref(), spec, home, Storage(spec)) if into is None else into
    line = user_line()
    with team.lock:
        for node, ranks in team.ranks.items():
            mine = [handles[k] for k in ranks]
            if node.failed is None:
                written = [Storage(spec)]  # not a value of this worker alone: nobody fetches it by this name
                issue([GIVE, [h.ref for h in mine], whole.ref], (), mine, written, mine[0].place, line)
        if into is None:
            whole.born = (team.base + len(team.log), line[1], line[2])
    return whole
