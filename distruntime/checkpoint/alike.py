"""Which tensors all members of a mesh held alike, as the checksums in a checkpoint's files say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..errors import UsageError
from ..log.handle import Handle
from ..log.node import Node
from ..operators.transfer import download
from ..python.weights import Mesh

# How a worker finds a tensor: the file, the tensor's name there, its dtype, sizes and strides.
Row = list[object]


def require_alike(
    wanted: Mapping[str, Sequence[Row]],
    holders: Mapping[str, Sequence[Node]],
    ask: Callable[[Node, list[Row]], Handle],
    mesh: Mesh | None,
) -> None:
    """Raise `UsageError` for a tensor of which members held different values. Block until workers have said.

    `wanted` has the members' rows of each tensor. `holders` are the nodes that have each file. The tensors go
    to `mesh`, or to one place if that is None. `ask` asks a node for the checksums of rows.
    """
    by_node: dict[Node, list[Row]] = {}
    for rows in wanted.values():
        for row in rows:
            by_node.setdefault(holders[str(row[0])][0], []).append(row)
    asked = [(rows, ask(node, rows)) for node, rows in by_node.items()]
    sums: dict[object, int] = {}
    for rows, answer in asked:
        sums.update(zip((row[1] for row in rows), download(answer, "explicit load").tolist(), strict=True))
    for key, rows in wanted.items():
        if len({(sums[name], str(rest)) for _, name, *rest in rows}) > 1:
            got = f"; got one of {len(mesh.places)}" if mesh is not None else ""
            raise UsageError(
                f"{key!r} was on a mesh of {len(rows)} members, and needs a mesh of as many: dr.load(path, "
                f"place=mesh), with dr.init_device_mesh of {len(rows)} places{got}. Its members held "
                "different values, and only what they held alike can go elsewhere"
            )
