"""The places of a session and their numbers, which torch knows them by, and the current one.

Places are counted from 0: the GPUs of node 0, then its CPU, the GPUs of node 1, then its CPU, and so on.

- Without GPUs, node n is `remote:n`.
- With g GPUs on each node, GPU i of node n is `remote:k` with k = n * (g + 1) + i. Its CPU comes after them.

GPUs come first. So `remote:0` is where new tensors go at the start, and `remote:i` is `cuda:i` of a lone
node. A place keeps its number as long as the session lasts, whatever worker has the node. If another worker
brings a device that its node did not have, that device gets the next number.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch

from ..errors import PlacementError
from ..log.current import (
    ACCELERATOR,
    current_device,
    current_member,
    current_mesh,
    current_node,
    know,
    meant_by,
)
from ..log.handle import BARE, UNNUMBERED, Place, Residence
from ..log.log import Log
from ..log.node import Node
from ..wire.shield import RLock

# So many places have a number of their own. The rest of torch's device indices are for meshes and for more
# places: they are given out and taken back.
_OWN = 80
_NUMBERS = UNNUMBERED


class Places:
    """The places that the nodes of a session offer.

    The first 80 keep their numbers. Any other place, and a mesh, has a number from its first use until no
    tensor lives there any more.
    """

    def __init__(self, nodes: list[Node], require_open: Callable[[], None]) -> None:
        self._nodes, self._require_open = nodes, require_open
        # This is what `set_place` has set.
        self.default: tuple[int, str | None] = (0, None)
        self._residences: weakref.WeakValueDictionary[Place, Residence] = weakref.WeakValueDictionary()
        self._nameless: weakref.WeakValueDictionary[Place, Residence] = weakref.WeakValueDictionary()
        self._by_number: weakref.WeakValueDictionary[int, Residence] = weakref.WeakValueDictionary()
        # The places with their numbers, by what they are spelled by. A factory without a number looks here.
        self._known: dict[tuple[int, str], Place] = {}
        # The current place by what is entered and what is set: a factory asks each time. Only places that
        # keep their number are here.
        self._recent: dict[object, Residence] = {}
        # The places that have a number of their own, by number.
        self.own: list[Place] = []
        self._held: list[Residence] = []
        # What was given back last stands last.
        self._free = list(range(_NUMBERS))
        # A torch device does not hold what has its number. So each number remembers who had it last, and is
        # given to another as late as can be: `init_device_mesh(...).device` is good when the mesh is gone.
        self._last: dict[int, tuple[Place, Log]] = {}
        self._numbering = RLock()

    def enter(self, node: Node) -> None:
        """Give the devices of a node their numbers, as long as there are some, and bring them into use."""
        names = [row[0] for row in node.welcome.devices]
        for name in sorted(names, key=lambda name: name == "cpu"):
            know(name)
            with self._numbering:
                place = self._known.get((node.index, name)) or self._own_number(node.index, name)
            if place.number != UNNUMBERED:
                self._held.append(self.residence(place))
        self._recent.clear()

    def _own_number(self, node: int, name: str) -> Place:
        """Return a place that has just come, with the next number if it is to have one."""
        number = len(self.own)
        # A mesh may have the number of a device that came late.
        if number < _OWN and number in self._free:
            self._free.remove(number)
            self.own.append(Place(node, name, number))
            found = self.own[number]
        else:
            found = Place(node, name)
        self._known[node, name] = found
        return found

    def leave(self, node: Node) -> None:
        """Give up a lost node's residences: another worker has its places, and their numbers, from now on."""
        self._held = [residence for residence in self._held if residence.node is not node]
        self._recent.clear()
        for known in (self._residences, self._nameless):
            for place, residence in list(known.items()):
                if residence.node is node:
                    del known[place]
        for number, residence in list(self._by_number.items()):
            # A number that is not the place's own stays with the tensors that have it.
            if residence.node is node and residence.place.number == number:
                del self._by_number[number]

    def devices(self, node: int) -> list[str]:
        """Return the names of a node's devices; raise `PlacementError` if there is no such node."""
        if isinstance(node, bool) or not isinstance(node, int) or not 0 <= node < len(self._nodes):
            have = ", ".join(str(n.index) for n in self._nodes)
            if isinstance(node, bool) or not isinstance(node, int):
                raise PlacementError(
                    f"a node is named by its number, 0 to {len(self._nodes) - 1}, or by a place; got "
                    f'{node!r}. A device stands behind the number: dr.place(0, "cpu")'
                )
            raise PlacementError(
                f"there is no node {node!r}: this session has node{'s' if len(self._nodes) > 1 else ''} "
                f"{have}"
            )
        return [row[0] for row in self._nodes[node].welcome.devices]

    def place(self, node: int, device: str) -> Place:
        """Return the place that a spelling of a device means; raise `PlacementError` if it does not exist."""
        have = self.devices(node)
        device = meant_by(device, have)
        if device not in have:
            raise PlacementError(f"{self._nodes[node]} has no device {device!r}: it has {', '.join(have)}")
        return self.known(node, device)

    def known(self, node: int, device: str) -> Place:
        """Return a place with its number, if it has one, whether there is such a place or not."""
        return self._known.get((node, device)) or Place(node, device)

    def residence(self, place: Place, numbered: bool = True) -> Residence:
        """Return the place in use; raise `PlacementError` if it does not exist or 127 places are in use.

        `numbered` false takes no number for a place that has none: its tensors cannot be named by `x.device`,
        only by `x.place`.
        """
        found = self._residences.get(place)
        if found is None and not numbered:
            found = self._nameless.get(place)
            if found is None:
                found = self._nameless[place] = Residence(place, self._nodes[place.node], UNNUMBERED, _keep)
        if found is not None:
            return found
        self._require_open()
        place = self.place(place.node, place.local_device)
        with self._numbering:
            found = self._residences.get(place)
            if found is not None:
                return found
            node = self._nodes[place.node]
            if place.number == UNNUMBERED:
                return self._number(place, node)
            found = Residence(place, node, place.number, _keep)
            self._residences[place] = self._by_number[place.number] = found
            return found

    def entered(self, place: Place, log: Log) -> Residence:
        """Return the place of a mesh in use, numbered; raise `PlacementError` if 127 places are in use."""
        with self._numbering:
            return self._residences.get(place) or self._number(place, log)

    def _number(self, place: Place, node: Log) -> Residence:
        """Bring a place into use that has a number for so long only."""
        if not self._free:
            # Meshes that nobody has any more are in cycles.
            gc.collect()
        if not self._free:
            raise PlacementError(
                f"{_NUMBERS} places have a number of their own, hold live tensors, or are meshes. That is "
                "the most that torch can tell apart (a device index has 7 bits); "
                f"let go of the tensors of some place before you put one on {place}"
            )
        return self._take(self._next_number(place), place, node)

    def _next_number(self, place: Place) -> int:
        """Return the number that a place had, else one that nobody had, else what is free for longest."""
        free = self._free
        own = (n for n in free if n in self._last and self._last[n][0] == place)
        fresh = max((n for n in free if n >= _OWN and n not in self._last), default=None)
        # The numbers below are for devices that come late.
        used = next((n for n in free if n in self._last), max(free))
        return next(own, used if fresh is None else fresh)

    def _take(self, number: int, place: Place, node: Log) -> Residence:
        """Give a free number to a place."""
        self._free.remove(number)
        self._last[number] = place, node
        # A mesh's place shows the number. A node's does not: whoever holds it may do so for longer.
        if place.members:
            place = Place(place.node, place.local_device, number, place.members)
        found = Residence(place, node, number, self._free.append)
        self._residences[place] = self._by_number[number] = found
        return found

    def numbered(self, number: int) -> Residence:
        """Return the place that "remote:number" means."""
        found = self._by_number.get(number)
        if found is None and number in self._last:
            with self._numbering:
                found = self._by_number.get(number)
                if found is None and number in self._free:
                    found = self._take(number, *self._last[number])
        if found is None:
            if 0 <= number < len(self.own):
                return self.residence(self.own[number])
            self._require_open()
            if number == UNNUMBERED:
                member: Residence | None = current_member.get()
                if member is not None:
                    return member
                raise PlacementError(
                    '"remote:127" stands for each place that has no number, so it names none of them. An '
                    "unpickled place has none if the session does not have it, or began later: "
                    "make it anew, dr.place(node, device). Beyond the "
                    f"{_OWN} places of a session that have one, name the place: dr.on(place), x.to(place)"
                )
            have = ", ".join(f"remote:{place.number} is {place}" for place in self.own[:8])
            raise PlacementError(
                f'no place has the number of "remote:{number}": {have}{", …" if len(self.own) > 8 else ""}; '
                '"remote" alone is the current place. dr.nodes() lists them'
            )
        return found

    def meant(self, device: torch.device | None) -> Residence:
        """Return the place that a torch device means. "remote" alone is the current place, and so is None."""
        if device is None or device.index is None or device.type == BARE:
            return self.current()
        return self.numbered(device.index)

    def current(self, *, like_torch: bool = True) -> Residence:
        """Return the current place: by context, else by `set_place`, else node 0.

        A mesh that was entered comes before all. The device is then the node's first GPU, if it has one, for
        torch's spellings, and the CPU for the RFC's (`like_torch` false).
        """
        node, device = current_node.get(), current_device.get()
        mesh = current_mesh.get()
        if mesh is not None and mesh.node.session.places is self:
            found: Residence = mesh
            return found
        meant = (node, device, self.default) if like_torch else None
        recent = self._recent.get(meant)
        if recent is not None:
            return recent
        if node is None:
            node = self.default[0]
        if device is None and self.default[1] is not None and node == self.default[0]:
            device = self.default[1]
        have = self.devices(node)
        if device is None:
            device = ACCELERATOR if like_torch and have != ["cpu"] else "cpu"
        residence = self.residence(self.known(node, meant_by(device, have)))
        if meant is not None and residence in self._held:
            self._recent[meant] = residence
        return residence

    def number_of(self, place: Place) -> int | None:
        """Return the number of a place, None while it has none."""
        found = self._residences.get(place)
        return found.number if found is not None else None

    def forget(self, node: Log | None = None) -> None:
        """Send every call to `node`, or to all, down the slow path, which does not know it either."""
        for residence in [*self._residences.values(), *self._nameless.values()]:
            if node is None or residence.node is node:
                residence.clear_signatures()

    def drop(self, of: object) -> None:
        """Forget the signatures of something that is called: see `Residence.drop_signatures`."""
        for residence in [*self._residences.values(), *self._nameless.values()]:
            residence.drop_signatures(of)

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
