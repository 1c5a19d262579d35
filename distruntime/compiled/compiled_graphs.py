"""What the graphs that `torch.compile` has traced of remote tensors run as."""

from __future__ import annotations

from typing import NamedTuple

from .graph import alive


class CompiledGraph(NamedTuple):
    """A graph: "forward 1" and "backward 1" belong to one call.

    Attributes:
        name: its direction and number.
        replays: how many calls were one instruction for each part of it.
        why: why its last call was none; empty if it was one.
        compiled: what its worker runs: "inductor", "cudagraphs", "compiling", or why it runs operator by
            operator; empty if nothing was asked for.
    """

    name: str
    replays: int
    why: str
    compiled: str


def compiled_graphs() -> list[CompiledGraph]:
    """Return what each graph of remote tensors runs as, in the order in which they were traced.

    Blocks for one round trip for each.
    """
    return [CompiledGraph(one.name, one.replays, one.why, one.compiled()) for one in list(alive.values())]
