"""A stream as its node's log knows it: a place and a number. Streams as users have them, and events in them, stand on it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar

import torch

from ..errors import UsageError
from ..log.current import current_streams, enter_stream, leave_stream
from ..log.handle import Place, Residence
from ..log.log import Log
from ..log.order import Order

T = TypeVar("T")
Q = TypeVar("Q", bound="Queue")


def ordered(node: Log) -> Order:
    """Return the order among a node's streams; from the first call on, its instructions go the way that knows streams."""
    order: Order | None = node.order
    if order is None:
        with node.lock:
            if node.order is None:
                node.order = Order(node)
                node.session.places.hide(node)
            order = node.order
    assert order is not None
    return order


def expect(value: T, kind: type[Any], name: str) -> T:
    """Return `value`, which should be of a class that users know as `distruntime.name`, or raise `UsageError`."""
    if not isinstance(value, kind):
        got = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UsageError(
            f"this takes a distruntime.{name}, got {got}; torch's own streams and events are this process's"
        )
    return value


class Queue:
    """One stream of a device, by its number. As a context it is current, and with it its node and device."""

    def __init__(self, residence: Residence, number: int) -> None:
        self.residence, self.number = residence, number

    @property
    def place(self) -> Place:
        """The node and device that it belongs to."""
        return self.residence.place

    @property
    def node(self) -> int:
        """The number of its node."""
        return self.place.node

    @property
    def device(self) -> torch.device:
        """Its place as a torch device, as `x.device` of the tensors there."""
        return self.residence.device

    @property
    def stream_id(self) -> int:
        """Its number on its node; 0 is the default stream of each device."""
        return self.number

    @property
    def device_index(self) -> int:
        """The number of its place, as `device.index` says it."""
        return self.residence.number

    @property
    def device_type(self) -> int:
        """torch's number of the device type that "remote" is."""
        return 20  # PrivateUse1, in c10/core/DeviceType.h

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Queue) and (self.residence, self.number) == (other.residence, other.number)

    def __hash__(self) -> int:
        return hash((id(self.residence), self.number))

    def __repr__(self) -> str:
        return f"<distruntime.Stream {self.number} on {self.place}>"

    def __enter__(self: Q) -> Q:
        self.check()
        enter_stream(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave_stream(self)

    def check(self) -> Log:
        """Return the node, if its session is open and it lives; raise the session's or the node's own error if not."""
        node = self.residence.node
        node.session.require_open()
        node.require_alive()
        return node


def entered(residence: Residence) -> Queue | None:
    """Return what was entered as the current stream of a place in this thread or asyncio task; None: its default stream is current."""
    found: Queue | None = current_streams.get().get((residence.place.node, residence.place.device))
    return found if found is not None and found.residence.node is residence.node else None
