"""Which data channel a group uses, and what all of its workers can do with it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence

import cloudpickle

from ..errors import ConfigurationError, ConnectionFailed, ProtocolError
from ..log.handle import Residence
from ..log.node import Node
from ..session.requests import Request
from ..session.session import Session
from ..wire.data_channel import Capabilities, registered
from ..wire.deadlines import MEET
from ..wire.messages import AskChannel

log = logging.getLogger("distruntime")

# The name of a data channel, or one for each type of device; "auto" chooses.
Choice = str | Mapping[str, str]
# Devices of these kinds have data channels of their own. Those of ROCm are called "cuda", and what torch
# calls NCCL is RCCL there. All other kinds go through their nodes' CPUs.
OF_DEVICES = {"cuda": "nccl", "xpu": "xccl"}
_THROUGH_CPU = "gloo"
# Between workers that reach each other only through ssh and this machine.
RELAY = "relay"


class DataChannels:
    """The data channels of a session: what the user has chosen, and what its workers offer."""

    def __init__(self, session: Session, choice: Choice) -> None:
        self._session, self._choice = session, choice
        # Each greeting makes a `Node`. So a worker that was started anew, perhaps with another torch, is
        # asked anew.
        self._offers: dict[tuple[Node, str], Capabilities] = {}
        # These are the choices that "auto" has made, by the members' workers and devices.
        self._chosen: dict[tuple[tuple[Node, str], ...], str] = {}
        # The user has read these reasons.
        self._said: set[str] = set()

    def require_choice(self) -> None:
        """Raise `ConfigurationError` where a worker does not have the data channel that the user has named.

        Block for a round trip.
        """
        named = {"cpu": self._choice} if isinstance(self._choice, str) else dict(self._choice)
        for kind, name in named.items():
            users = [node for node in self._session.nodes if kind == "cpu" or kind in _kinds(node)]
            if name != "auto" and users:
                self.capabilities(name, users)

    def name_for(self, homes: Sequence[Residence], backend: str | None, direct: bool = True) -> str:
        """Return the name of the data channel that a group of these places uses.

        Block for a round trip, once, where the workers have yet to say whether they have it.

        Args:
            direct: whether the places reach each other without this machine.
        """
        if backend is not None:
            return backend
        kinds = {kind_of(home) for home in homes}
        # Devices of several kinds have only their nodes' CPUs in common.
        kind = kinds.pop() if len(kinds) == 1 else "cpu"
        if isinstance(self._choice, str):
            if self._choice != "auto":
                return self._choice
        elif kind in self._choice:
            return self._choice[kind]
        if not direct:
            return self._relay(homes)
        own, through = OF_DEVICES.get(kind), _THROUGH_CPU
        if not isinstance(self._choice, str):
            # The user may have named an encrypted one for what leaves the nodes' memory.
            through = self._choice.get("cpu", through)
        if own is None:
            return through
        key = tuple((home.worker, home.place.local_device) for home in homes)
        found = self._chosen.get(key)
        if found is None:
            why = _one_device(homes) or self._lack(own, homes)
            found = self._chosen[key] = through if why else own
            if why and why not in self._said:
                self._said.add(why)
                log.warning(
                    "tensors between %s go through %s and the nodes' memory, not %s: %s",
                    " and ".join(f"node {home.place.node} {home.place.local_device}" for home in homes[:4])
                    + (f" and {len(homes) - 4} more" if len(homes) > 4 else ""),
                    found,
                    own,
                    why,
                )
        return found

    def _relay(self, homes: Sequence[Residence]) -> str:
        nodes = " and ".join(f"node {k}" for k in sorted({home.place.node for home in homes})[:4])
        why = f"{nodes} reach each other only through ssh and this machine"
        if why not in self._said:
            self._said.add(why)
            log.warning("%s: tensors between them take that way, and this machine's network limits it", why)
        return RELAY

    def _lack(self, name: str, homes: Sequence[Residence]) -> str:
        """Return why some worker does not have a data channel, or nothing."""
        try:
            self.capabilities(name, list(dict.fromkeys(home.worker for home in homes)))
        except ConfigurationError as error:
            return str(error)
        return ""

    def capabilities(self, name: str, nodes: list[Node]) -> Capabilities:
        """Return what all of some workers can do with a data channel.

        Raise `ConfigurationError` where one does not have it.
        """
        found = registered(name)
        asked = {
            node: self._session.ask(node, AskChannel, name)
            for node in nodes
            if (node, name) not in self._offers or found is not None
        }
        for node, request in asked.items():
            require_done(self._session, request, f"say whether it has the data channel {name!r}")
            why, fields, python = request.value
            if found is not None:
                if tuple(python) != sys.version_info[:2]:
                    raise ConfigurationError(
                        f"the data channel {name!r} was registered here, in Python "
                        f"{sys.version_info[0]}.{sys.version_info[1]}, and cannot "
                        f"travel to {node}, which runs {python[0]}.{python[1]}: offer it there as "
                        "an entry point (see docs/data_channel.md)"
                    )
                self._offers[node, name] = found.capabilities  # type: ignore[attr-defined]
            elif why:
                raise ConfigurationError(f"{node}: {why}")
            else:
                try:
                    self._offers[node, name] = Capabilities.from_wire(fields)
                except (TypeError, ValueError, AttributeError) as error:
                    raise ProtocolError(
                        f"{node} describes the data channel {name!r} as {fields!r}: {error}"
                    ) from None
        offers = [self._offers[node, name] for node in nodes]
        reductions = {
            op: frozenset.intersection(*(o.reductions.get(op, frozenset()) for o in offers))
            for offer in offers
            for op in offer.reductions
        }
        return Capabilities(
            frozenset.intersection(*(o.operations for o in offers)),
            {op: dtypes for op, dtypes in reductions.items() if dtypes},
            frozenset.intersection(*(o.devices for o in offers)),
            all(o.tags for o in offers),
            all(o.concurrent for o in offers),
        )


def kind_of(home: Residence) -> str:
    """Return the type of the tensors of a place, as its worker's torch sees them."""
    # Simulated devices are CPU tensors.
    return home.place.local_device.partition(":")[0] if home.node.asynchronous else "cpu"


def _kinds(node: Node) -> set[str]:
    """Return the types of devices, other than its CPU, that a worker offers."""
    return (
        {row.name.partition(":")[0] for row in node.welcome.devices} - {"cpu"} if node.asynchronous else set()
    )


def _one_device(homes: Sequence[Residence]) -> str:
    """Return which two of these places are one device, or may be, or nothing.

    NCCL takes a device once, and so do the others.
    """
    by_uuid: dict[str, Residence] = {}
    # The names on one host tell devices apart, unless two workers there call theirs the same.
    by_name: dict[tuple[str, str], Residence] = {}
    nameless = not all(map(_uuid, homes))
    for home in homes:
        other = by_uuid.setdefault(uuid, home) if (uuid := _uuid(home)) else home
        if other is not home:
            return f"{other.place} and {home.place} are one device ({uuid})"
        other = by_name.setdefault((home.worker.host, home.place.local_device), home)
        if nameless and other is not home:
            return (
                f"{other.place} and {home.place} may be one device of {home.worker.host}: their torch does "
                "not tell devices apart"
            )
    return ""


def _uuid(home: Residence) -> str:
    """Return what tells a place's device from all others, if its worker knows."""
    rows = home.worker.welcome.devices
    return next((row.uuid for row in rows if row.name == home.place.local_device), "")


def require_done(
    session: Session, request: Request[object], what: str, limit: float | None = None, known: str = ""
) -> None:
    """Block until a worker has answered; raise `ConnectionFailed` unless it has done what was asked.

    `known` is what else a user should know who asks whether the workers reach each other.
    """
    patience = MEET.get()
    if not session.result(request, patience if limit is None else limit, quietly=True):
        session.requests.discard(request)
        raise ConnectionFailed(
            f"{request.node} did not {what} within {patience:.0f} s: can the workers reach each other?{known}"
        )
    if request.lost is not None:
        session.raise_for(request)
    if request.cause is not None:
        failure = request.cause.failure
        error = ConfigurationError if failure.kind.endswith("ConfigurationError") else ConnectionFailed
        raise error(f"{request.node} could not {what}: {failure.text}")


def pickled(name: str) -> bytes:
    """Return a data channel that was registered here, for workers that do not have its module.

    Nothing if it was not.
    """
    found = registered(name)
    if found is None:
        return b""
    module = sys.modules[found.__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        packed: bytes = cloudpickle.dumps(found)
        return packed
    finally:
        cloudpickle.unregister_pickle_by_value(module)
