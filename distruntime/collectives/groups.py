"""All groups of a session: how workers are brought together, and what breaks and closes a group.

The master hands out groups' numbers and has each worker join; how members find each other, and their
bytes, never pass through here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from weakref import WeakValueDictionary

import msgpack

from ..errors import NotSupportedError, PlacementError, ProtocolError, UsageError, without_our_frames
from ..log.handle import UNNUMBERED, Place, Residence
from ..log.issue import issue_joint, template_number
from ..log.line import user_line
from ..log.log import Log
from ..log.node import Node
from ..log.spec import NO_TENSOR
from ..log.storage import Storage
from ..log.tape import recorded, unrecorded
from ..log.total_order import in_total_order
from ..session.meeting import Meeting
from ..session.requests import Request
from ..session.session import Session, active_session
from ..session.spelling import homes_of
from ..session.timeouts import is_timeout
from ..streams.stream import Stream
from ..wire.deadlines import GROUP, MEET
from ..wire.messages import BreakGroup, OpenGroup, Plain
from ..wire.shield import RLock
from .data_channels import OF_DEVICES, RELAY, Choice, DataChannels, kind_of, pickled, require_done
from .group import ProcessGroup, Where
from .mail import Mail

# So many sets of places keep the groups that operations without `group=` made for them, and so many pairs
# those of copies between them. A worker has up to three idle threads for each set that it is in, and opening
# one again takes some milliseconds. Hundreds of GPUs in tensor and data parallel groups have fewer sets.
_MOST_SETS = 128


class Groups:
    """All groups of a session."""

    def __init__(self, session: Session, choice: Choice) -> None:
        self.session = session
        self.channels = DataChannels(session, choice)
        self._numbers = count(1).__next__
        self._opening = RLock()
        self._groups: WeakValueDictionary[int, ProcessGroup] = WeakValueDictionary()
        # Nobody holds these any more. The next look closes them: see `close_dropped`.
        self._dropped: list[ProcessGroup] = []
        # Operations may still go through these, until these positions in the logs.
        self._leaving: dict[ProcessGroup, dict[Log, int]] = {}
        # Members of these groups may still be at work, until these positions in the nodes' logs.
        self._closing: dict[ProcessGroup, dict[Node, int]] = {}
        self._by_places: dict[tuple[Place, ...], ProcessGroup] = {}
        self._uses = count(1).__next__
        # Copies have gone between these pairs of places.
        self._links: dict[tuple[Place, ...], ProcessGroup] = {}
        self._launches: dict[Log, Storage] = {}
        self.meeting = session.meeting = Meeting(session)
        # This is the mail of what was sent without a group.
        self.mail: Mail | None = None
        # The exchanges of layers run on these streams, beside what the places compute.
        self.streams: dict[Place, Stream] = {}
        session.on_loss.append(self._lost)
        session.on_broken = self._broken
        session.on_synchronize.append(self.close_dropped)

    def nodes_in(self, number: int) -> list[int]:
        """Return the nodes that have members of an open group; nothing where there is no such group."""
        group = self._found(number)
        return [] if group is None else sorted(node.index for node in group.own)

    def _found(self, number: int) -> ProcessGroup | None:
        # The collector clears the weak references to what it drops.
        return self._groups.get(number) or next(
            (g for g in [*self._dropped, *self._leaving] if g.number == number), None
        )

    def _lost(self, node: Node) -> None:
        held = [group for ref in self._groups.valuerefs() if (group := ref()) is not None]
        for group in [*held, *self._dropped, *self._leaving, *self._closing]:
            if node in group.own:
                self.end(group, f"{node} {node.failed}")

    def open(
        self, homes: Sequence[Residence], backend: str | None = None, timeout: float | None = None
    ) -> ProcessGroup:
        """Make a group. Block until every member has joined, at most half a minute; see `new_group`."""
        with self._opening:
            self.close_dropped()
        with unrecorded():
            return self._open(homes, backend, timeout)

    def close_dropped(self) -> None:
        """Close the groups that nobody holds any more. Return at once."""
        # A recorded call must not close what others have dropped: a replay would not. Another thread that
        # opens a group looks by itself, and may take long.
        if not (self._dropped or self._leaving) or recorded.name or recorded.traced:
            return
        if not self._opening.acquire(blocking=False):
            return
        try:
            while self._dropped:
                group = self._dropped.pop()
                # Whoever issued an operation has held the group until then, so all of them stand before.
                self._leaving[group] = {log: log.base + len(log.words) for log in group.unordered}
            for group, ends in list(self._leaving.items()):
                if all(log.failed is not None or log.acknowledged >= at for log, at in ends.items()):
                    del self._leaving[group]
                    self.close(group)
        finally:
            self._opening.release()

    def _open(self, homes: Sequence[Residence], backend: str | None, timeout: float | None) -> ProcessGroup:
        session, limit = self.session, GROUP.get() if timeout is None else timeout
        session.require_open()
        for home in homes:
            if home.node.members:
                raise PlacementError(
                    f"{home.place} are a mesh, which is no member of a group: what its members do together "
                    "runs along its lines, dr.lines.all_reduce(mesh.lines(), x)"
                )
            home.node.require_alive()
        name = self._channel_for(homes, backend)
        capabilities = self.channels.capabilities(name, list(dict.fromkeys(home.worker for home in homes)))
        for home in homes:
            if not capabilities.devices & {"cpu", kind_of(home)}:
                raise NotSupportedError(
                    f"the data channel {name!r} takes tensors of {_list(capabilities.devices)}, not "
                    f"of {home.place}"
                )
        self.meeting.require()
        with self._opening:
            group = ProcessGroup(session, self._numbers(), homes, name, capabilities, limit, self.close)
            self._groups[group.number] = group
            group._let_go = self._dropped.append
            session.joined = True
            try:
                self._join(group)
            except BaseException as error:
                self.end(group, f"it was never joined: {error}")
                raise
        return group

    def _channel_for(self, homes: Sequence[Residence], backend: str | None) -> str:
        """Return the name of the data channel of these places, once it is known how they reach each other."""
        if self.session.routes is None:
            return self.channels.name_for(homes, backend)
        nodes = {home.worker.index for home in homes}
        direct = self.meeting.reach_directly(nodes)
        name = self.channels.name_for(homes, backend, direct)
        self.meeting.require_routes(nodes, "" if name == RELAY else f"the data channel {name!r}")
        return name

    def _join(self, group: ProcessGroup) -> None:
        session = self.session
        factory = pickled(group.backend)
        requests: list[Request[None]] = []
        try:
            for node, ranks in group.own.items():
                requests.append(session.requests.new(node, "done"))
                number = requests[-1].number
                members: list[Plain] = [[rank, group.places[rank].local_device] for rank in ranks]
                nodes, limit = group.nodes, float(min(group.timeout, 1e9))
                message = OpenGroup(number, group.number, group.backend, factory, nodes, members, limit)
                session.post(node, message)
            # It is waited for quietly: a group that is half joined must not end for a warning.
            session.requests.wait(
                lambda: (
                    all(r.done for r in requests) or any(r.done and (r.cause or r.lost) for r in requests)
                ),
                session.receiver.read,
                time.monotonic() + MEET.get(),
                requests[0].node,
            )
            # A member that says why not, or is lost, comes first: the others only wait for it.
            for request in sorted(requests, key=lambda r: r.cause is None and r.lost is None):
                known = "" if request.done else self.meeting.addresses(request.node, group.own)
                require_done(session, request, f"join {group!r}", 0.0, known)
        finally:
            for request in requests:
                session.requests.discard(request)

    def between(self, one: Residence, two: Residence) -> ProcessGroup:
        """Return the group of two places that copies between them use, made at the first."""
        here, there = sorted((one, two), key=lambda home: (home.place.node, home.place.local_device))
        # The first use may ask the workers.
        with unrecorded():
            name = self._channel_for([here, there], None)
        if name not in OF_DEVICES.values():
            # There is one group for each pair of nodes, whatever the devices. It needs no numbers of places,
            # and there are few of those.
            places = tuple(Place(home.place.node, "cpu") for home in (here, there))
            found = self._links.get(places)
            if found is not None and not found.closed and not found.broken:
                # Python loses what strikes where places end that are made anew for each copy.
                found.used, found.unordered = self._uses(), tuple(found.own)
                self.close_dropped()
                return found
            here, there = (
                Residence(place, home.node, UNNUMBERED, _unnumbered)
                for place, home in zip(places, (here, there))
            )
        group = self._kept(self._links, (here, there))
        group.unordered = tuple(group.own)
        self.close_dropped()
        return group

    def of(self, homes: Sequence[Residence]) -> ProcessGroup:
        """Return the group of just these places.

        The first use makes it, and so does the next one after it has broken, or after many other sets of
        places have been used.

        An operation without `group=` uses it.
        """
        return self._kept(self._by_places, homes)

    def of_places(self, places: tuple[Place, ...]) -> ProcessGroup:
        """As `of`, for the places of tensors. While the group works, this is one look-up."""
        found = self._by_places.get(places)
        if found is None or found.closed or found.broken:
            # Whoever made a group has shown that its places exist and differ. A new one has yet to show it.
            return self.of(homes_of(self.session, places))
        found.used = self._uses()
        if self._dropped:
            self.close_dropped()
        return found

    def _kept(self, kept: dict[tuple[Place, ...], ProcessGroup], homes: Sequence[Residence]) -> ProcessGroup:
        places = tuple(home.place for home in homes)
        found = kept.get(places)
        if (
            found is None
            or found.closed
            or (found.broken and all(home.node.failed is None for home in homes))
        ):
            with self._opening:
                found = kept.get(places)
                if found is None or found.closed or found.broken:
                    # What falls out is closed below, unless somebody holds it.
                    while len(kept) >= _MOST_SETS:
                        kept.pop(min(kept, key=lambda places: kept[places].used))
                    found = kept[places] = self.open(homes)
        found.used = self._uses()
        return found

    def _broken(self, node: Node, number: int, reason: str) -> None:
        group = self._found(number)
        if group is not None:
            if node not in group.own:
                raise ProtocolError(f"a worker breaks group {number}, which it is not in")
            self.end(group, f"{node}: {reason}")

    def end(self, group: ProcessGroup, reason: str) -> None:
        """Break a group: whoever waits in it fails now, with this reason."""
        if not group.broken:
            group.broken = reason
            for node in group.own:
                if node.failed is None and self.session.closed is None:
                    self.session.post(node, BreakGroup(group.number, reason))

    def launches(self, node: Log) -> Storage:
        """Return what keeps a node's operations in one order.

        Some data channels hang where two groups begin in different orders.
        """
        return self._launches.setdefault(node, Storage(NO_TENSOR))

    def close(self, group: ProcessGroup) -> None:
        """Close a group after what has been issued to it, and forget it.

        What is broken or closed is only forgotten.
        """
        ends: dict[Node, int] = {}

        def issue() -> None:
            try:
                if not group.broken and not group.closed and self.session.closed is None:
                    fields = ["group::close", [group.number, [-1, None, None, True, [], []], []], {}, 0]
                    for node, ranks in group.own.items():
                        words = [template_number(node, msgpack.packb(fields), fields), 0]
                        home = group.homes[ranks[0]]
                        # Its operations have kept this order.
                        ordered = group.capabilities.concurrent
                        serial = group.serial[node] if ordered else self.launches(node)
                        issue_joint(words, (), (), (), [home], serial, user_line())
                        ends[node] = node.base + len(node.words)
                group.closed = True
                # Whoever keeps the closed group need not keep what nobody received.
                group.mail = None
            # A signal's handler may raise here: see operation.py.
            except BaseException as error:
                self.end(
                    group,
                    f"it was closed for some of its members only, as {type(error).__name__} came between",
                )
                raise

        in_total_order(self.session, issue)
        self._closing = {
            g: at
            for g, at in self._closing.items()
            if any(n.failed is None and n.acknowledged < k for n, k in at.items())
        }
        if ends:
            self._closing[group] = ends
        self._groups.pop(group.number, None)


def _unnumbered(number: int) -> None:
    """Take back the number of what stands for a node's CPU in a group of copies: it has none."""


def _list(names: frozenset[str]) -> str:
    return " and ".join(sorted(names)) or "nothing"


def groups_of(session: Session) -> Groups:
    """Return the groups of a session."""
    groups = session.groups
    assert isinstance(groups, Groups)
    return groups


@without_our_frames
def new_group(
    nodes_or_places: Sequence[Where] | None = None, backend: str | None = None, timeout: float | None = None
) -> ProcessGroup:
    """Make a group whose members' tensors take part in collectives together.

    Block until all have joined, at most half a minute.

    Args:
        nodes_or_places: node numbers (each its first GPU, or its CPU if it has none) or places, in the
            order of ranks; None: all nodes.
        backend: the data channel, "gloo", "nccl", "xccl", "tcp", "tcp+tls", "mpi" or a registered one; None:
            as `init_master_worker(data_channel=)` says.
        timeout: seconds that one operation may take, waiting for late members included; None: half an
            hour, as in torch.

    Raises:
        UsageError: a member given twice, or none. PlacementError: no such place. NodeFailed: a member is
        lost. ConfigurationError: a worker does not have the data channel, or a port is in use.
        ConnectionFailed: members do not find each other.
    """
    session = active_session()
    if timeout is not None and not (is_timeout(timeout) and timeout > 0):
        raise UsageError(
            f"timeout is a number of seconds above 0, or None for {GROUP.get():g}; got {timeout!r}"
        )
    return groups_of(session).open(homes_of(session, nodes_or_places), backend, timeout)
