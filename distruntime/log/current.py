"""Where new tensors go: the current node and device, per thread and per asyncio task."""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

import torch

from ..errors import PlacementError

current_node: ContextVar[int | None] = ContextVar("distruntime_node", default=None)
current_device: ContextVar[str | None] = ContextVar("distruntime_device", default=None)

current_mesh: ContextVar[Any] = ContextVar(
    "distruntime_mesh", default=None
)  # the Residence of the mesh that was entered last

current_member: ContextVar[Any] = ContextVar(
    "distruntime_member", default=None
)  # the Residence of the member that torch's code runs for

# Whether torch asks for the current place on behalf of fake tensors, which are nowhere: see dtensor.py.
asked_by_fakes: ContextVar[bool] = ContextVar("distruntime_asked_by_fakes", default=False)

# The stream that each device's instructions go to, by (node, device); the default stream where none stands here.
current_streams: ContextVar[dict[tuple[int, str], Any]] = ContextVar("distruntime_streams", default={})  # noqa: B039  # never changed

DeviceLike = str | int | torch.device


def device_name(device: DeviceLike) -> str:
    """Return "cpu" or "cuda:k" for a device as users spell it: -1 is the CPU, k is `cuda:k`, "cuda" the current GPU."""
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise PlacementError(
            f'a device of a node is "cpu", "cuda", "cuda:1" or a number (-1 is the CPU), got {device!r}'
        )
    if isinstance(device, int):
        return "cpu" if device == -1 else f"cuda:{device}"
    text = str(device)
    kind, _, index = text.partition(":")
    if kind == "cpu" and index in ("", "0"):
        return "cpu"
    if kind == "cuda" and (not index or index.isdigit()):
        return f"cuda:{int(index)}" if index else current_gpu()
    raise PlacementError(
        f'a device of a node is "cpu", "cuda", "cuda:1" or a number (-1 is the CPU), got {text!r}'
    )


def current_gpu() -> str:
    """Return the GPU that "cuda" means: the context's, or the first."""
    device = current_device.get()
    return device if device is not None and device.startswith("cuda") else "cuda:0"


Entered = tuple[Any, "Token[int | None] | None", "Token[str | None] | None", Any]

# What each thread and task has entered, the innermost last: a context object may be shared, and be entered again.
_entered: ContextVar[tuple[Entered, ...]] = ContextVar("distruntime_entered", default=())


class _Set:
    """Sets context variables for the length of a `with` block. May be entered again, also by several threads."""

    def __init__(self, node: int | None, device: str | None, default: bool) -> None:
        self._node, self._device, self._default = node, device, default

    def __repr__(self) -> str:
        where = " ".join(
            [
                *([f"node {self._node}"] if self._node is not None else []),
                *([self._device] if self._device is not None else []),
            ]
        )
        return f"<a context: new tensors go to {where} inside `with`; dr.set_place(...) is for good>"

    def __enter__(self) -> None:
        mode = torch.device("remote") if self._default else None
        # A place that is entered within a mesh's block counts there.
        mesh = current_mesh.set(None) if self._node is not None or self._device is not None else None
        node = current_node.set(self._node) if self._node is not None else None
        device = current_device.set(self._device) if self._device is not None else None
        if mode is not None:
            mode.__enter__()
        _entered.set((*_entered.get(), (self, node, device, (mode, mesh))))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack = _entered.get()
        last = max(k for k, entry in enumerate(stack) if entry[0] is self)
        _, node, device, (mode, mesh) = stack[last]
        _entered.set((*stack[:last], *stack[last + 1 :]))
        if mode is not None:
            mode.__exit__(kind, error, trace)
        if mesh is not None:
            current_mesh.reset(mesh)
        if device is not None:
            current_device.reset(device)
        if node is not None:
            current_node.reset(node)


def node_context(node: int, device: str | None, default: bool = False) -> _Set:
    """Return the context that makes `node` (and `device`, and with `default` torch's default device) current."""
    return _Set(node, device, default)


def device_context(device: str) -> _Set:
    """Return the context that makes `device` the current device of whichever node is current."""
    return _Set(None, device, False)


class MeshContext:
    """Makes a mesh's place, and with `default` torch's default device too, current for the length of a `with` block."""

    def __init__(self, residence: Any, default: bool = True) -> None:
        self._residence, self._default = residence, default

    def __enter__(self) -> None:
        mode = torch.device("remote") if self._default else None
        if mode is not None:
            mode.__enter__()
        _entered.set((*_entered.get(), (self, None, None, (mode, current_mesh.set(self._residence)))))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack = _entered.get()
        last = max(k for k, entry in enumerate(stack) if entry[0] is self)
        mode, mesh = stack[last][3]
        _entered.set((*stack[:last], *stack[last + 1 :]))
        if mode is not None:
            mode.__exit__(kind, error, trace)
        current_mesh.reset(mesh)


def enter_stream(stream: Any) -> None:
    """Make a stream current, and with it its node and device, or its mesh, until `leave_stream`."""
    place, whole = stream.place, bool(stream.residence.node.members)
    mesh = current_mesh.set(stream.residence if whole else None)
    node = None if whole else current_node.set(place.node)
    device = None if whole else current_device.set(place.device)
    token = current_streams.set({**current_streams.get(), (place.node, place.device): stream})
    _entered.set((*_entered.get(), (stream, node, device, (token, mesh))))


def leave_stream(stream: Any) -> None:
    """Undo the last `enter_stream` of this stream."""
    stack = _entered.get()
    last = max(k for k, entry in enumerate(stack) if entry[0] is stream)
    _, node, device, (token, mesh) = stack[last]
    _entered.set((*stack[:last], *stack[last + 1 :]))
    current_streams.reset(token)
    if device is not None:
        current_device.reset(device)
    if node is not None:
        current_node.reset(node)
    current_mesh.reset(mesh)
