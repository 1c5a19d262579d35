"""What of a graph is the same at each call and comes from this process: it is computed and sent once.

`torch.tensor([])` in a traced function is such a constant, and so is `torch.arange(3).to(x.device)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ..log.handle import REMOTE_TYPES


class Lifted(NamedTuple):
    """A graph that takes its constants as arguments, behind its own ones, and what makes them."""

    graph: GraphModule
    number: int
    make: Callable[[], list[object]]


def lift_constants(module: GraphModule) -> Lifted:
    """Return a graph that takes as arguments what it would compute of local constants at each call."""
    constant: set[Node] = set()
    for node in module.graph.nodes:
        if _is_constant(node, constant):
            constant.add(node)
    edge = [
        node
        for node in module.graph.nodes
        if node in constant
        and any(user not in constant for user in node.users)
        # Whoever calls the graph may write to what it returns.
        and not any(user.op == "output" for user in node.users)
    ]
    if not edge or any(not _can_be_sent(node) for node in edge):
        return Lifted(module, 0, list)
    first, rest = Graph(), Graph()
    made: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node in constant:
            made[node] = first.node_copy(node, made.__getitem__)
    first.output(tuple(made[node] for node in edge))
    kept: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            kept[node] = rest.node_copy(node, kept.__getitem__)
    for node in edge:
        kept[node] = rest.placeholder(f"constant_{node.name}")
        kept[node].meta["val"] = _sent_fake(node)
    for node in module.graph.nodes:
        if node.op != "placeholder" and node not in kept and (node not in constant or _is_returned(node)):
            _copy_needed(node, kept, rest)
    maker = GraphModule(module, first)
    targets = [_place_of_users(node) for node in edge]

    def make() -> list[object]:
        with torch.no_grad():
            return [value.to(target) for value, target in zip(maker(), targets)]

    return Lifted(GraphModule(module, rest), len(edge), make)


def _copy_needed(node: Node, kept: dict[Node, Node], rest: Graph) -> None:
    """Copy a node behind those that it reads."""
    for before in node.all_input_nodes:
        if before not in kept:
            _copy_needed(before, kept, rest)
    kept[node] = rest.node_copy(node, kept.__getitem__)


def _is_constant(node: Node, known: set[Node]) -> bool:
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    tags = getattr(node.target, "tags", ())
    return all(one in known for one in node.all_input_nodes) and torch.Tag.nondeterministic_seeded not in tags


def _is_returned(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _is_remote(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type in REMOTE_TYPES


def _can_be_sent(node: Node) -> bool:
    """Whether a constant is remote, or a number that remote tensors meet: torch takes one from any device."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    return _is_remote(node) or (value.dim() == 0 and _place_of_users(node) is not None)


def _place_of_users(node: Node) -> torch.device | None:
    """Return the place of a constant: its own, or else that of what is made of it."""
    for one in (node, *node.users):
        if _is_remote(one):
            value = one.meta["val"]
            assert isinstance(value, torch.Tensor)
            return value.device
    return None


def _sent_fake(node: Node) -> torch.Tensor:
    """Return the fake of a constant once it is sent: a graph is looked through for what is local."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    if _is_remote(node):
        return value
    return next(user.meta["val"] for user in node.users if _is_remote(user))  # type: ignore[no-any-return]
