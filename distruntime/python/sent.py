"""Functions of this package that run on workers: they travel there as the user's own do, with their bodies.

They are in the modules whose names begin with "sent_".
"""

from __future__ import annotations

import functools

from ..errors import PlacementError
from ..log.handle import Place, Residence
from ..log.line import user_line
from ..log.log import relieve
from ..session.session import active_session
from ..session.spelling import is_node, named, on_node
from .ahead import Ahead
from .call import ASK, OWN, Call
from .callee import Callee, Code, Function, Options
from .objects import RemoteObject, issued
from .pickling import pack

_objects = Options(returns=object, random=False)


@functools.cache
def callee_of(function: Function, name: str) -> Callee:
    """Return the callee of a function that travels. `name` is what errors call it."""
    return Code.callee(function, name)


def run_at(home: Residence, function: Function, name: str, *args: object) -> object:
    """Call a function on a worker. Return its result at once, which is an object there."""
    return issued(callee_of(function, name), _objects, *args, home=home)


def ask_ahead(
    home: Residence, function: Function, name: str, *args: object, random: bool = True, own: bool = False
) -> Ahead:
    """Call a function on a worker. Return at once what blocks for its result, and returns that.

    `random` says whether the function may draw. With `own`, the result is in memory that calls do not write
    which are issued before it is there.
    """
    relieve(home.node)
    pickled, operands = pack(args, {})
    options = Options(OWN if own else ASK, random=random)
    call = Call(callee_of(function, name), options, pickled, operands, home, user_line(), RemoteObject)
    return Ahead(call)


def host(node: object) -> Residence:
    """Return the CPU of the node that is meant, by its number or by one of its places."""
    places = active_session().places
    place = node if is_node(node) else getattr(named(places, node), "place", None)
    if isinstance(place, Place) and not place.members:
        place = place.node
    if not is_node(place):
        raise PlacementError(f"expected the number of a node, or one of its places; got {node!r:.80}")
    have = places.devices(place)
    found = places.residence(on_node(places, place, "cpu" if "cpu" in have else have[0]), numbered=False)
    found.node.require_alive()
    return found
