"""What of a graph is the same at each call and comes from this process: it is computed and sent once.

`torch.tensor([])` in a traced function is such a constant, and so is `torch.arange(3).to(x.device)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._ops import OperatorBase
from torch.fx import Graph, GraphModule, Node

from ..log.handle import REMOTE_TYPES
from ..session.ending import outliving
from ..session.session import Session
from .draws import is_state

# Operators of these give what their arguments decide.
_OF_TORCH = ("aten", "prims")


class Constants:
    """What a graph takes behind its own arguments: it is made at the first call of a session."""

    def __init__(self, make: Callable[[], list[object]]) -> None:
        self._make = make
        # Threads may call one graph.
        self._made: tuple[Session, list[object]] | None = None
        outliving.add(self)

    def of(self, session: Session) -> list[object]:
        """Return them, as they were sent to the workers of a session."""
        made = self._made
        if made is None or made[0] is not session:
            made = self._made = session, self._make()
        return made[1]

    def part(self) -> None:
        """Forget what was sent in a session that has ended."""
        self._made = None


class Lifted(NamedTuple):
    """A graph that takes its constants as arguments, behind its own ones, and these, if it has any."""

    graph: GraphModule
    constants: Constants | None


def lift_constants(module: GraphModule) -> Lifted:
    """Return a graph that takes as arguments what it would compute of local constants at each call."""
    constant: set[Node] = set()
    for node in module.graph.nodes:
        if is_constant(node, constant):
            constant.add(node)
    edge = [
        node
        for node in module.graph.nodes
        if node in constant and any(user not in constant for user in node.users) and not _is_returned(node)
    ]
    remote = [found for node in edge if (found := _as_remote(node)) is not None]
    if not edge or len(remote) < len(edge):
        return Lifted(module, None)
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
    for node, found in zip(edge, remote):
        kept[node] = rest.placeholder(f"constant_{node.name}")
        # The graph is looked through for what is local, and this is not any more.
        kept[node].meta["val"] = found
    for node in module.graph.nodes:
        # A constant that is returned is computed at each call.
        if node.op != "placeholder" and node not in constant:
            copy_needed(node, kept, rest)
    maker = GraphModule(module, first)
    devices = [torch.device("remote", found.device.index) for found in remote]

    def make() -> list[object]:
        with torch.no_grad(), torch._C._DisableAutocast():
            return [value.to(device) for value, device in zip(maker(), devices)]

    return Lifted(GraphModule(module, rest), Constants(make))


def copy_needed(node: Node, kept: dict[Node, Node], rest: Graph) -> None:
    """Copy a node behind those that it reads, unless it is there already."""
    if node in kept:
        return
    for before in node.all_input_nodes:
        copy_needed(before, kept, rest)
    kept[node] = rest.node_copy(node, kept.__getitem__)


def _is_returned(node: Node) -> bool:
    """Whether a graph returns a value, or a view of it. Whoever calls the graph may write to that."""
    return any(user.op == "output" or (_is_view(user) and _is_returned(user)) for user in node.users)


def _is_view(node: Node) -> bool:
    """Whether a value of a graph may lie in the memory of what it was made of."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(one.alias_info is not None for one in schema.returns)


def is_constant(node: Node, known: set[Node]) -> bool:
    """Whether a node has the value at each call that this process has once: `known` are those before it."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or not (node.all_input_nodes or is_here(node)):
        return False
    # An operator of the user's may read a clock.
    if isinstance(node.target, OperatorBase) and getattr(node.target, "namespace", "") not in _OF_TORCH:
        return False
    tags = getattr(node.target, "tags", ())
    return all(one in known for one in node.all_input_nodes) and torch.Tag.nondeterministic_seeded not in tags


def is_here(node: Node) -> bool:
    """Whether a value of a graph is a tensor of this process, and no random state of a worker's."""
    value = node.meta.get("val")
    local = isinstance(value, torch.Tensor) and value.device.type not in REMOTE_TYPES
    return local and not is_state(node)


def _as_remote(node: Node) -> torch.Tensor | None:
    """Return what a constant is once it is sent, as a fake. None if it cannot be sent.

    It is remote itself, or a number that remote tensors of one place meet: torch takes one from any device.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    if value.device.type in REMOTE_TYPES:
        return value
    met = [one.meta.get("val") for one in node.users] if value.dim() == 0 else []
    remote = [one for one in met if isinstance(one, torch.Tensor) and one.device.type in REMOTE_TYPES]
    return remote[0] if len({one.device for one in remote}) == 1 else None
