"""Which data channel a group uses, and what all of its workers can do with it."""

from __future__ import annotations

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

# The name of a data channel, or one for each type of device; "auto" chooses.
Choice = str | Mapping[str, str]


class DataChannels:
    """The data channels of a session: what the user has chosen, and what its workers offer."""

    def __init__(self, session: Session, choice: Choice) -> None:
        self._session, self._choice = session, choice
        self._offers: dict[tuple[Node, str], Capabilities] = {}

    def require_choice(self) -> None:
        """Raise `ConfigurationError` where a worker does not have the data channel that the user has named.

        Block for a round trip.
        """
        named = (
            {"cpu": self._choice, "cuda": self._choice}
            if isinstance(self._choice, str)
            else dict(self._choice)
        )
        for kind, name in named.items():
            users = [node for node in self._session.nodes if kind == "cpu" or node.asynchronous]
            if name != "auto" and users:
                self.capabilities(name, users)

    def name_for(self, homes: Sequence[Residence], backend: str | None) -> str:
        """Return the name of the data channel that a group of these places uses."""
        if backend is not None:
            return backend
        gpus = all(home.place.local_device != "cpu" and home.node.asynchronous for home in homes)
        if isinstance(self._choice, str):
            if self._choice != "auto":
                return self._choice
            return "nccl" if gpus else "gloo"
        return self._choice.get("cuda" if gpus else "cpu", "nccl" if gpus else "gloo")

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


def require_done(session: Session, request: Request[object], what: str, limit: float | None = None) -> None:
    """Block until a worker has answered; raise `ConnectionFailed` unless it has done what was asked."""
    patience = MEET.get()
    if not session.result(request, patience if limit is None else limit, quietly=True):
        session.requests.discard(request)
        raise ConnectionFailed(
            f"{request.node} did not {what} within {patience:.0f} s: can the workers reach each other?"
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
