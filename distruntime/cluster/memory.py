"""`dr.memory()`: what memory the devices have, and which lines of this process hold it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError, without_our_frames
from ..log.handle import Place
from ..session.holders import Holder, held, held_by_layer
from ..session.session import active_session
from ..session.tables import table_html, table_text
from ..wire.units import size_text
from .nodes import node_info


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device in bytes. This process has `values` values there, of `held` bytes.

    `allocated` and `reserved` are what torch's caching allocator has given out on a GPU and holds in all, 0
    elsewhere.
    """

    place: Place
    total: int
    free: int
    allocated: int
    reserved: int
    values: int
    held: int


@dataclass(frozen=True)
class Memory:
    """What `dr.memory` found. It prints as two tables: the devices, and the lines or layers that hold most.

    `left_out` counts those that the second table leaves out.
    """

    devices: tuple[DeviceMemory, ...]
    lines: tuple[Holder, ...]
    left_out: int
    by: str = "line"

    def _device_rows(self) -> list[list[str]]:
        cached = any(d.reserved for d in self.devices)
        rows = [
            [
                "node",
                "device",
                "total",
                "free",
                *(["allocated", "reserved"] if cached else []),
                "values",
                "held",
            ]
        ]
        for d in self.devices:
            cache = [size_text(d.allocated), size_text(d.reserved)] if cached else []
            sizes = [size_text(d.total), size_text(d.free), *cache, str(d.values), size_text(d.held)]
            rows.append([str(d.place.node), d.place.local_device, *sizes])
        return rows

    def _line_rows(self) -> list[list[str]]:
        rows = [[size_text(h.nbytes), str(h.tensors), str(h.place), h.line] for h in self.lines]
        rest = sum(d.held for d in self.devices) - sum(h.nbytes for h in self.lines)
        of_modules = self.by == "module"
        if self.left_out or (of_modules and rest):
            what = (
                f"{self.left_out} more {'layer' if of_modules else 'line'}{'s' if self.left_out > 1 else ''}"
            )
            outside = "what no module has"
            named = outside if not self.left_out else f"{what}, and {outside}" if of_modules else what
            rows.append([size_text(rest), "", "", named])
        return [["held", "tensors", "where", "layer" if of_modules else "made by"], *rows]

    def __repr__(self) -> str:
        return table_text(self._device_rows()) + (
            "\n\n" + table_text(self._line_rows()) if self.lines else ""
        )

    def _repr_html_(self) -> str:
        return table_html(self._device_rows()) + (table_html(self._line_rows()) if self.lines else "")


@without_our_frames
def memory(node: int | None = None, *, top: int = 10, by: Literal["line", "module"] = "line") -> Memory:
    """Return who holds the memory of a node's devices, or of every node's.

    Block for two round trips, at most 2 s a node.

    Values are counted as this process knows them, those included that are issued and not computed yet: each
    storage once, views with their base, under the line that made the oldest value in it. What a worker keeps
    for the backward of attention and recurrent layers is not among them.

    Args:
        node: a node's number; all nodes if left out, but for lost ones.
        top: how many lines or layers to name, the biggest first.
        by: "line" names the lines of your program that made the values. "module" names the layers of your
            modules, with their gradients and the state of their optimizers. A layer's name ends with the
            first number in its path.

    Raises:
        UsageError: `by` is something else. PlacementError: there is no such node. NodeFailed: it is lost.
    """
    if by not in ("line", "module"):
        raise UsageError(f'got by={by!r}, expected "line" or "module"')
    session = active_session()
    asked = session.living(node)
    infos = [node_info(session, n) for n in asked]
    hollow = frozenset[tuple[int, ...]]().union(*(session.poisoned(n) for n in asked))
    lines, values = held(asked, poisoned=hollow)
    there: Counter[Place] = Counter()
    for line in lines:
        there[line.place] += line.nbytes
    if by == "module":
        lines = held_by_layer(asked, poisoned=hollow)
    devices = [
        DeviceMemory(place, d.total, d.free, d.allocated, d.reserved, values[place], there[place])
        for info in infos
        for d in info.devices
        for place in [session.places.known(info.index, d.name)]
    ]
    return Memory(tuple(devices), tuple(lines[:top]), max(0, len(lines) - top), by)
