"""Which lines hold more memory at the end of a trace than at its begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..log.handle import Place
from ..log.node import Node
from ..session.holders import Holder, held
from ..wire.units import size_text
from .chrome import Json

# A trace names so many lines.
_MOST = 20
# Less than so many bytes more, and fewer than so many tensors more, are no matter.
_BYTES, _TENSORS = 1 << 20, 20


@dataclass(frozen=True)
class Grown:
    """What one line holds more at the end of a trace, in bytes and tensors, on a device of a node."""

    nbytes: int
    tensors: int
    node: int
    device: str
    line: str


class Growth:
    """Looks at who holds memory on some workers when it is made, and again when it is asked."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = list(nodes)
        self._before = _now(nodes)

    def rows(self) -> list[Json]:
        """Return the lines that hold more now, the most first, as a trace's file has them."""
        living = [node for node in self._nodes if node.failed is None]
        return [
            {
                "node": one.place.node,
                "device": one.place.local_device,
                "bytes": one.nbytes,
                "tensors": one.tensors,
                "line": one.line,
            }
            for one in grown(self._before, _now(living))[:_MOST]
        ]


def grown(before: dict[tuple[Place, str], Holder], now: dict[tuple[Place, str], Holder]) -> list[Holder]:
    """Return what lines hold more than before, in bytes and tensors, the most first."""
    found = []
    for key, line in now.items():
        old = before.get(key)
        nbytes = line.nbytes - (0 if old is None else old.nbytes)
        if nbytes > 0:
            found.append(
                Holder(nbytes, line.tensors - (0 if old is None else old.tensors), line.place, line.line)
            )
    return sorted(found, key=lambda line: -line.nbytes)


def _now(nodes: Sequence[Node]) -> dict[tuple[Place, str], Holder]:
    return {(one.place, one.line): one for one in held(nodes)[0]}


def grown_of(rows: Json) -> tuple[Grown, ...]:
    """Return what a trace's file says of lines that hold more. What makes no sense is left out."""
    found = []
    for row in rows if isinstance(rows, list) else []:
        match row:
            case {
                "node": int(node),
                "device": str(device),
                "bytes": int(nbytes),
                "tensors": int(tensors),
                "line": str(line),
            }:
                found.append(Grown(nbytes, tensors, node, device, line))
    return tuple(found)


def growth_text(found: Sequence[Grown]) -> str:
    """Return a sentence about the line that holds most of what there is more; nothing if it is little."""
    if not found:
        return ""
    most = max(found, key=lambda one: (one.nbytes, one.tensors))
    whole = sum(one.nbytes for one in found)
    if whole < _BYTES and most.tensors < _TENSORS:
        return ""
    share = size_text(most.nbytes) if most.nbytes != whole else "all"
    return (
        f"memory: {size_text(whole)} more at the end than at the begin, {share} of it in {most.tensors} more "
        f"tensor{'s' if most.tensors != 1 else ''} on node {most.node} {most.device}, made at {most.line}"
    )
