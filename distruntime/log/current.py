"""Where new tensors go: the current node and device, per thread and per asyncio task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Protocol

import torch

from ..errors import PlacementError
from .handle import Place, Residence

current_node: ContextVar[int | None] = ContextVar("distruntime_node", default=None)
current_device: ContextVar[str | None] = ContextVar("distruntime_device", default=None)

# This is the mesh's place that was entered last.
current_mesh: ContextVar[Residence | None] = ContextVar("distruntime_mesh", default=None)

# torch's code runs for the member at this place.
current_member: ContextVar[Residence | None] = ContextVar("distruntime_member", default=None)

# It is True while torch asks for the current place on behalf of fake tensors, which are nowhere: see
# torch_dtensor.py.
asked_by_fakes: ContextVar[bool] = ContextVar("distruntime_asked_by_fakes", default=False)


class StreamOfPlace(Protocol):
    """A stream, as it is seen from here."""

    number: int
    residence: Residence

    @property
    def place(self) -> Place:
        """The node and device that it belongs to."""


# Each device's instructions go to this stream, by (node, device). A device that is not here uses its default
# stream.
current_streams: ContextVar[Mapping[tuple[int, str], StreamOfPlace]] = ContextVar(
    "distruntime_streams", default=MappingProxyType({})
)

DeviceLike = str | int | torch.device


# A node's accelerator, of whatever kind it is.
ACCELERATOR = "accelerator"
_SPELLING = re.compile(r"(\w+)(?::(\d+))?")
# torch and the packages that extend it call accelerators so. A node may add one: see `know`.
_kinds = {"cpu", "cuda", "xpu", "mps", "npu", "hpu", "mtia", ACCELERATOR}


def know(device: str) -> None:
    """Take the kind of a device that a node has said it has: another package may call it anything."""
    _kinds.add(device.partition(":")[0])


def device_name(device: object) -> str:
    """Return a device of a node as users spell it, in one form: "cpu", "cuda", "cuda:1", "accelerator:1".

    -1 is the CPU, and k is the accelerator k. What a spelling means depends on the node: see `meant_by`.
    """
    text = str(device)
    if isinstance(device, int) and not isinstance(device, bool):
        text = "cpu" if device == -1 else f"{ACCELERATOR}:{device}"
    found = _SPELLING.fullmatch(text)
    good = found is not None and found[1] in _kinds and not isinstance(device, bool)
    if not found or not good or not isinstance(device, (str, int, torch.device)):
        raise PlacementError(
            f'a device of a node is "cpu", "cuda", "cuda:1" or a number (-1 is the CPU), got {device!r}'
        )
    kind, index = found.groups()
    if kind == "cpu" and index in (None, "0"):
        return "cpu"
    return kind if index is None else f"{kind}:{int(index)}"


def is_of_kind(device: str, kind: str) -> bool:
    """Whether a node's device is one of a kind: "cpu", "cuda", or "accelerator" for any but a CPU."""
    own = device.partition(":")[0]
    return kind == own or (kind == ACCELERATOR and own != "cpu")


def meant_by(device: str, have: Sequence[str]) -> str:
    """Return which of a node's devices a spelling means, or how that one would be called where it is missing.

    "cuda" is the current device if that is a GPU of the node, else the first GPU that the node offers.
    "accelerator" is that of any kind.
    """
    if device in have or device == "cpu":
        return device
    accelerators = [name for name in have if name != "cpu"]
    kind, _, index = device.partition(":")
    if kind == ACCELERATOR:
        if not accelerators:
            return device
        kind = accelerators[0].partition(":")[0]
    if index:
        return f"{kind}:{index}"
    of_kind = [name for name in accelerators if is_of_kind(name, kind)]
    current = current_device.get()
    return current if current in of_kind else of_kind[0] if of_kind else f"{kind}:0"


@dataclass(frozen=True)
class Entered:
    """What one context has set, and how to set it back."""

    context: object
    mode: torch.device | None = None
    node: Token[int | None] | None = None
    device: Token[str | None] | None = None
    mesh: Token[Residence | None] | None = None
    streams: Token[Mapping[tuple[int, str], StreamOfPlace]] | None = None

    def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Set all back."""
        if self.streams is not None:
            current_streams.reset(self.streams)
        if self.mode is not None:
            self.mode.__exit__(kind, error, trace)
        if self.mesh is not None:
            current_mesh.reset(self.mesh)
        if self.device is not None:
            current_device.reset(self.device)
        if self.node is not None:
            current_node.reset(self.node)


# These are what each thread and task has entered, the innermost last. A context object may be shared, and be
# entered again.
_entered: ContextVar[tuple[Entered, ...]] = ContextVar("distruntime_entered", default=())


def _last_entered(context: object) -> Entered:
    """Take back the last entry of a context."""
    stack = _entered.get()
    last = max(k for k, entry in enumerate(stack) if entry.context is context)
    _entered.set((*stack[:last], *stack[last + 1 :]))
    return stack[last]


class _Set:
    """Sets context variables for the length of a `with` block.

    May be entered again, also by several threads.
    """

    def __init__(
        self, node: int | None, device: str | None, default: bool, mesh: Residence | None = None
    ) -> None:
        self._node, self._device, self._default, self._mesh = node, device, default, mesh

    def __repr__(self) -> str:
        where = " ".join(
            [
                *([f"node {self._node}"] if self._node is not None else []),
                *([self._device] if self._device is not None else []),
                *([str(self._mesh.place)] if self._mesh is not None else []),
            ]
        )
        return f"<a context: new tensors go to {where} inside `with`; dr.set_place(...) is for good>"

    def __enter__(self) -> None:
        mode = torch.device("remote") if self._default else None
        # A place that is entered within a mesh's block counts there.
        mesh = current_mesh.set(self._mesh)
        node = current_node.set(self._node) if self._node is not None else None
        device = current_device.set(self._device) if self._device is not None else None
        if mode is not None:
            mode.__enter__()
        _entered.set((*_entered.get(), Entered(self, mode, node, device, mesh)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _last_entered(self).leave(kind, error, trace)


def node_context(node: int, device: str | None, default: bool = False) -> _Set:
    """Return the context that makes `node` current, and `device` where one is given.

    With `default` the current place becomes torch's default device, too.
    """
    return _Set(node, device, default)


def device_context(device: str) -> _Set:
    """Return the context that makes `device` the current device of whichever node is current."""
    return _Set(None, device, False)


def mesh_context(residence: Residence, default: bool = True) -> _Set:
    """Return the context that makes a mesh's place current.

    With `default` it becomes torch's default device, too.
    """
    return _Set(None, None, default, residence)


def enter_stream(stream: StreamOfPlace) -> None:
    """Make a stream current, and with it its node and device, or its mesh, until `leave_stream`."""
    place, whole = stream.place, bool(stream.residence.node.members)
    mesh = current_mesh.set(stream.residence if whole else None)
    node = None if whole else current_node.set(place.node)
    device = None if whole else current_device.set(place.local_device)
    token = current_streams.set({**current_streams.get(), (place.node, place.local_device): stream})
    _entered.set((*_entered.get(), Entered(stream, None, node, device, mesh, token)))


def leave_stream(stream: StreamOfPlace) -> None:
    """Undo the last `enter_stream` of this stream."""
    _last_entered(stream).leave(None, None, None)
