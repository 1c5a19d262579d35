"""The places of a session and their numbers, which torch knows them by, and the current one."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

from ..errors import PlacementError
from ..log.current import current_device, current_gpu, current_member, current_mesh, current_node
from ..log.handle import Place, Residence
from ..log.log import Log
from ..log.node import Node

# So many places that are known at the start keep their numbers. The rest of torch's 127 device indices are
# given out and taken back.
_PINNED = 64
_LAST = 126
# Members of meshes on places without a number have this index: their tensors know their place without one.
_UNNUMBERED = 127


class Places:
    """The places that the nodes of a session offer.

    A place has a number from its first use until no tensor lives there any more.
    """

    def __init__(self, nodes: list[Node], require_open: Callable[[], None]) -> None:
        self._nodes, self._require_open = nodes, require_open
        # This is what `set_place` has set.
        self.default: tuple[int, str | None] = (0, None)
        self._residences: weakref.WeakValueDictionary[Place, Residence] = weakref.WeakValueDictionary()
        self._nameless: weakref.WeakValueDictionary[Place, Residence] = weakref.WeakValueDictionary()
        self._by_number: weakref.WeakValueDictionary[int, Residence] = weakref.WeakValueDictionary()
        self._pinned: list[Residence] = []
        self._free = list(range(_LAST, 0, -1))
        self._numbering = threading.RLock()

    def pin(self, place: Place) -> None:
        """Let a place keep its number, as long as there are few."""
        if len(self._pinned) < _PINNED:
            self._pinned.append(self.residence(place))

    def leave(self, node: Node) -> None:
        """Give up a lost node's places, which another worker has from now on.

        Tensors that lived there keep the places' numbers for as long as they are alive.
        """
        self._pinned = [residence for residence in self._pinned if residence.node is not node]
        for known in (self._residences, self._nameless):
            for place, residence in list(known.items()):
                if residence.node is node:
                    del known[place]

    def devices(self, node: int) -> list[str]:
        """Return the names of a node's devices; raise `PlacementError` if there is no such node."""
        if isinstance(node, bool) or not isinstance(node, int) or not 0 <= node < len(self._nodes):
            have = ", ".join(str(n.index) for n in self._nodes)
            if not isinstance(node, (int, str)):
                raise PlacementError(
                    f"a node is named by its number, 0 to {len(self._nodes) - 1}, or by a place; got {node!r}"
                )
            raise PlacementError(
                f"there is no node {node!r}: this session has node{'s' if len(self._nodes) > 1 else ''} "
                f"{have}"
            )
        welcome = self._nodes[node].welcome
        assert welcome is not None
        return [row[0] for row in welcome.devices]

    def residence(self, place: Place, numbered: bool = True) -> Residence:
        """Return the place in use; raise `PlacementError` if it does not exist or 126 places are in use.

        `numbered` false takes no number for a place that has none: its tensors cannot be named by `x.device`,
        only by `x.place`.
        """
        found = self._residences.get(place)
        if found is None and not numbered:
            found = self._nameless.get(place)
            if found is None:
                found = self._nameless[place] = Residence(place, self._nodes[place.node], _UNNUMBERED, _keep)
        if found is not None:
            return found
        self._require_open()
        have = self.devices(place.node)
        if place.device not in have:
            node = self._nodes[place.node]
            raise PlacementError(f"{node} has no device {place.device!r}: it has {', '.join(have)}")
        with self._numbering:
            found = self._residences.get(place)
            if found is not None:
                return found
            return self._enter(place, self._nodes[place.node])

    def entered(self, place: Place, team: Log) -> Residence:
        """Return the place of a mesh in use, numbered; raise `PlacementError` if 126 places are in use."""
        with self._numbering:
            return self._residences.get(place) or self._enter(place, team)

    def _enter(self, place: Place, node: Log) -> Residence:
        if not self._free:
            # Meshes that nobody has any more are in cycles.
            gc.collect()
        if not self._free:
            raise PlacementError(
                f"{_LAST} places hold live tensors, or are meshes, the most that torch can tell apart (a "
                "device index has 7 bits); "
                f"let go of the tensors of some place before you put one on {place}"
            )
        found = Residence(place, node, self._free.pop(), self._free.append)
        self._residences[place] = self._by_number[found.number] = found
        return found

    def numbered(self, number: int | None) -> Residence:
        """Return the place that "remote:number" means; "remote" and "remote:0" are the current place."""
        if not number:
            return self.current()
        found = self._by_number.get(number)
        if found is None:
            self._require_open()
            if number == _UNNUMBERED:
                member: Residence | None = current_member.get()
                if member is not None:
                    return member
                raise PlacementError(
                    '"remote:127" is what tensors show whose place has no number, and names none: name it, '
                    "dr.on(x.place)"
                )
            have = ", ".join(f"remote:{r.number} is {r.place}" for r in self._pinned[:8])
            raise PlacementError(
                f'no place has the number of "remote:{number}": {have}; "remote" alone is the current place. '
                "dr.nodes() lists them"
            )
        return found

    def current(self, *, like_torch: bool = True) -> Residence:
        """Return the current place: by context, else by `set_place`, else node 0.

        A mesh that was entered comes before all. The device is then the node's `cuda:0`, if it has one, for
        torch's spellings, and the CPU for the RFC's (`like_torch` false).
        """
        node, device = current_node.get(), current_device.get()
        mesh = current_mesh.get()
        if mesh is not None and mesh.node.session.places is self:
            found: Residence = mesh
            return found
        if node is None:
            node = self.default[0]
        if device is None and self.default[1] is not None and node == self.default[0]:
            device = self.default[1]
        if device is None:
            device = (
                current_gpu()
                if like_torch and any(name.startswith("cuda") for name in self.devices(node))
                else "cpu"
            )
        return self.residence(Place(node, device))

    def number_of(self, place: Place) -> int:
        """Return the number of a place, 0 while it has none."""
        found = self._residences.get(place)
        return found.number if found is not None else 0

    def forget(self, node: Log | None = None) -> None:
        """Send every call to `node`, or to all, down the slow path, which does not know it either."""
        for residence in [*self._residences.values(), *self._nameless.values()]:
            if node is None or residence.node is node:
                residence.clear_signatures()

    def follow_default_dtype(self) -> None:
        """Look all signatures up among those that have run under what is torch's default dtype now."""
        with self._numbering:
            for residence in [*self._residences.values(), *self._nameless.values()]:
                residence.follow_default_dtype()

    def hide(self, node: Log) -> None:
        """Send every call to `node` down the slow path, which knows streams."""
        for residence in [*self._residences.values(), *self._nameless.values()]:
            if residence.node is node:
                residence.hide_signatures()


def _keep(number: int) -> None:
    """Take back the number that is nobody's."""
