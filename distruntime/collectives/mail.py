"""Mail: tensors that have been sent and not received, and receives that wait for their send."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..log.handle import Place
from ..log.line import Line
from ..streams.stream import Stream
from ..tensors.tensor import DistributedTensor
from ..wire.shield import Lock
from .work import Work


@dataclass(eq=False)
class UnreceivedSend:
    """A tensor on its way: its sender, its target place (or node, with `anywhere`), and the copy there."""

    source: Place
    target: Place
    anywhere: bool
    tag: int
    value: DistributedTensor
    line: Line


@dataclass(eq=False)
class PostedReceive:
    """A receive that was posted before its send."""

    source: Place | int | None
    target: Place
    tag: int
    tensor: DistributedTensor
    work: Work
    line: Line


@dataclass(eq=False)
class Mail:
    """What has been sent and not received, and wanted and not sent, in one group, or outside of groups.

    The oldest first.
    """

    sent: list[UnreceivedSend] = field(default_factory=list)
    posted: list[PostedReceive] = field(default_factory=list)
    # Operations that nobody waits for run on these streams.
    streams: dict[Place, Stream] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)
