"""The groups that the lines of a mesh are.

A mesh of shape (2, 4) has two lines along its last dimension, of four members each, and four along its first.
Each line is a group of the members' data channel. An instruction names the dimension, and each worker
knows the groups of its members.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

from ..collectives.group import ProcessGroup
from ..collectives.groups import groups_of
from ..log.mesh_log import MeshLog
from ..log.spec import NO_TENSOR
from ..log.storage import Storage
from ..session.session import Session, session_of_log
from ..wire.messages import OpenLines
from .varying import numbers

# So many groups of meshes that nobody holds stay open, for a mesh of these members that comes again.
_MOST_GROUPS = 128


class Lines:
    """The lines of a mesh along one or several of its dimensions. `mesh.lines(...)` returns it.

    Each line is a group of members. All lines have `size` members, and together they have every member once.
    `rows` has, for each line, the numbers of its members, by their ranks in the line. `groups` has each
    line's `ProcessGroup`.
    """

    size: int
    rows: list[list[int]]
    groups: list[ProcessGroup]
    # The number of the stream of what runs along them beside what is computed, once there is one.
    _beside: int | None = None

    def __init__(self, mesh_log: MeshLog, number: int, rows: Sequence[Sequence[int]]) -> None:
        session = session_of_log(mesh_log)
        self.mesh_log, self.number, self.rows = mesh_log, number, [list(row) for row in rows]
        self.size = len(rows[0])
        homes = [session.places.residence(place, numbered=False) for place in mesh_log.members]
        groups = groups_of(session)
        self.groups = []
        _let_go(session)
        try:
            for row in rows:
                self.groups.append(groups.open([homes[k] for k in row]))
                self.groups[-1].unordered = (mesh_log,)
        except BaseException:
            # A user who presses Ctrl-C comes here too, as opening many groups takes a while.
            self.close()
            raise
        self.capabilities = self.groups[0].capabilities
        self.sequence = count(1).__next__
        self.serial = Storage(NO_TENSOR)
        at = {k: [group.number, rank] for group, row in zip(self.groups, rows) for rank, k in enumerate(row)}
        for node, ranks in mesh_log.ranks.items():
            session.post(node, OpenLines(mesh_log.number, number, [at[k] for k in ranks]))

    def __repr__(self) -> str:
        return f"<{len(self.rows)} line{'s' if len(self.rows) > 1 else ''} of {self.size} in {self.mesh_log}>"

    def close(self) -> None:
        """Close the members' groups, after what has been issued. Return at once."""
        for group in self.groups:
            group.close()

    @property
    def broken(self) -> str | None:
        """Why the lines cannot be used any more, or None while they can."""
        return next(
            (group.broken or "a group was closed" for group in self.groups if group.broken or group.closed),
            None,
        )

    def ranks(self) -> torch.Tensor:
        """Return a tensor on the mesh: one int64 that is each member's rank in its line. Return at once."""
        at = {k: rank for row in self.rows for rank, k in enumerate(row)}
        return numbers(self.mesh_log.residence(), tuple(at[k] for k in range(len(at))))


def _let_go(session: Session) -> None:
    """Let go of what was opened first for meshes that nobody holds. Its groups close unless they are held."""
    unused = [
        (lines, mesh_log, key)
        for mesh_log in [*session.meshes]
        if session.places.number_of(mesh_log.place) is None
        for key, lines in [*mesh_log.lines.items()]
        if isinstance(lines, Lines)
    ]
    number = sum(len(lines.rows) for lines, _, _ in unused)
    # Groups are numbered as they are opened.
    for lines, mesh_log, key in sorted(unused, key=lambda row: row[0].groups[0].number):
        if number <= _MOST_GROUPS:
            break
        number -= len(lines.rows)
        mesh_log.lines.pop(key, None)
