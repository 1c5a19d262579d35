"""What workers say of a place's device: its kind, and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ProtocolError, UsageError
from ..log.handle import Residence
from ..session.holders import held
from ..session.session import session_of_log
from .worker_functions import read_function


@dataclass(frozen=True)
class DeviceProperties:
    """What `torch.remote.get_device_properties` returns, named as in `torch.cuda`. Memory is in bytes.

    A CPU has its cores as `multi_processor_count`, and 0 as `major` and `minor`.
    """

    name: str
    total_memory: int
    major: int
    minor: int
    multi_processor_count: int


class Figures(NamedTuple):
    """The memory of a place in bytes. The last four count what torch's allocator has given out and holds."""

    free: int
    total: int
    allocated: int
    most_allocated: int
    reserved: int
    most_reserved: int


def _ask(place: Residence, function: str, kinds: tuple[type, ...]) -> list[object]:
    """Return what the worker's function says of a place. Block until all that was issued before has run."""
    if place.node.members:
        raise UsageError(
            f"{place.place} are several places, and each has figures of its own: ask for those of "
            "mesh.places, or of x.member(k).device"
        )
    node = place.worker
    session_of_log(node).require_open()
    node.require_alive()
    found = read_function(node, function, [place.place])
    rows: list[object] = found[1:] if isinstance(found, list) else []
    if list(map(type, rows)) != list(kinds):
        raise ProtocolError(f"{node} answered {found!r:.80} when {function} was asked")
    return rows


def properties(place: Residence) -> DeviceProperties:
    """Return what kind of device a place is. Block until all that was issued before has run."""
    rows = _ask(place, "device_properties", (str, int, int, int, int))
    # `_ask` has looked at each.
    return DeviceProperties(*rows)  # type: ignore[arg-type]


def figures(place: Residence, *, reset: bool = False) -> Figures:
    """Return the memory of a place; with `reset` its peaks begin anew.

    A GPU's figures are those of torch's allocator on its worker, for all sessions there. A CPU, and a
    simulated GPU, has no such allocator. So what is allocated there is what this session's values hold, and
    the peak is that of the worker's process.

    Block until all that was issued before has run.
    """
    rows = _ask(place, "reset_peak" if reset else "memory_figures", (int,) * len(Figures._fields))
    # `_ask` has looked at each.
    found = Figures(*rows)  # type: ignore[arg-type]
    if not place.has_cpu_kernels:
        return found
    node = place.worker
    lines, _ = held([node], poisoned=session_of_log(node).poisoned(node))
    nbytes = sum(line.nbytes for line in lines if line.place == place.place)
    # Memory that nobody has written yet is not part of the process's peak.
    peak = max(found.most_allocated, nbytes)
    return Figures(found.free, found.total, nbytes, peak, nbytes, peak)
